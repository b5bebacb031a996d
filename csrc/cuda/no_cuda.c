/* no_cuda.c - the CUDA functions of a build without nvcc. Every function that returns a status returns IBP_NO_CUDA. */
#include "../internal/ibp_internal.h"

#pragma GCC diagnostic ignored "-Wunused-parameter"
#define IBP_WITHOUT_CUDA(name, ...) \
    ibp_status name(__VA_ARGS__) { return IBP_NO_CUDA; }

bool ibp_cuda_is_built(void) { return false; }
const char *ibp_cuda_architectures(void) { return ""; }
int ibp_cuda_device_count(void) { return 0; }
const char *ibp_cuda_last_error(void) { return ""; }
int64_t ibp_cuda_linear_bytes(const ibp_product *products, int64_t num_products, int64_t num_vectors) { return 0; }
bool ibp_cuda_makes_deltas(const ibp_codebook *codebook) { return false; }
bool ibp_cuda_applies_deltas(const ibp_codebook *codebook) { return false; }

IBP_WITHOUT_CUDA(ibp_cuda_count_bits, const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_count_hits, const ibp_codebook *codebook, const uint8_t *data, size_t num_rows,
                 uint64_t *hits, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_measure_rows, const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                 uint16_t *lengths, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_index_rows, const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                 uint32_t slot_bytes, uint64_t *bases, int64_t *overflow_bytes, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_sum_words, const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_survey_rows, const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_encode_rows, const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                 ibp_fault *fault, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_move_parts, const ibp_table *table, const ibp_place *from, uint8_t *overflow,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_encode_into, const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                 int64_t first_row, ibp_fault *fault, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_fill, void *memory, uint8_t value, size_t num_bytes, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_gather_items, const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
                 int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_gather_tables, const ibp_gather *gathers, int64_t num_gathers, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_sum_bags, const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                 const ibp_bags *bags, uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_linear, const ibp_product *products, int64_t num_products, const uint16_t *x,
                 int64_t num_vectors, uint8_t *workspace, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_decode_matrix, const ibp_digit_matrix *matrix, uint16_t *weights, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_linear_groups, const ibp_digit_matrix *stack, int64_t num_rows,
                 const ibp_vector_group *groups, int64_t num_groups, const int64_t *order, int64_t sharing,
                 const uint16_t *x, int64_t num_vectors, uint16_t *y, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_group_vectors, const ibp_ids *ids, int64_t num_matrices, int64_t *order,
                 ibp_vector_group *groups, int64_t num_groups, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_list_matrices, const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_decode_bytes, const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                 ibp_fault *fault, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_owners_of_rows, const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_find_cached, const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                 uint64_t *entries, ibp_cache_counts *counts, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_gather_cached, const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                 uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_fill_slab, const ibp_table *table, const int64_t *rows, const int64_t *offsets, int64_t count,
                 const ibp_cache_slab *slab, ibp_fault *fault, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_claim_cached, const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru,
                 uint64_t *entries, ibp_cache_counts *counts, ibp_fault *fault, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_drop_cached, const int64_t *rows, int64_t count, const ibp_cache_map *map, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_set_cached, const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                 const ibp_cache_map *map, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_record_event, ibp_event event, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_wait_for_stream, ibp_stream waiting, ibp_stream running, ibp_event event)
IBP_WITHOUT_CUDA(ibp_cuda_create_stager, uint8_t *pinned, uint8_t *near, int64_t ring_bytes, ibp_stager **stager)
IBP_WITHOUT_CUDA(ibp_cuda_destroy_stager, ibp_stager *stager)
IBP_WITHOUT_CUDA(ibp_cuda_stage_items, ibp_stager *stager, const ibp_table *table, const uint8_t *slots,
                 const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms, ibp_run run, void *runner,
                 int64_t num_threads, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_destroy_streamer, ibp_streamer *streamer)
IBP_WITHOUT_CUDA(ibp_cuda_begin_stream, ibp_streamer *streamer, uint8_t *ring, int64_t ring_bytes)
IBP_WITHOUT_CUDA(ibp_cuda_continue_stream, ibp_streamer *streamer)
IBP_WITHOUT_CUDA(ibp_cuda_stream_bytes, ibp_streamer *streamer, const ibp_table *table, const uint64_t *bases,
                 int64_t start, int64_t end, bool ends, uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_partition_ids, const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                 void *sorted_ids, uint32_t *positions, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_free_pinned, void *host, size_t num_bytes)
IBP_WITHOUT_CUDA(ibp_cuda_register_pinned, void *host, size_t num_bytes)
IBP_WITHOUT_CUDA(ibp_cuda_register_read_only, void *host, size_t num_bytes)
IBP_WITHOUT_CUDA(ibp_cuda_unregister_pinned, void *host)
IBP_WITHOUT_CUDA(ibp_cuda_plan_pages, const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                 uint64_t *addresses, ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_note_pages, const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                 const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows, uint8_t *stored, uint8_t *seen,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_measure_deltas, const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                 uint32_t num_tensors, int64_t num_rows, uint16_t *lengths, uint16_t *counts, uint64_t *sums,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_encode_deltas, const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                 uint32_t num_tensors, int64_t num_rows, const uint16_t *lengths, const uint16_t *counts,
                 const uint64_t *bases, uint8_t *overflow, int64_t overflow_bytes, bool updates_bases,
                 ibp_stream stream)
IBP_WITHOUT_CUDA(ibp_cuda_apply_deltas, const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                 uint32_t num_tensors, int64_t num_rows, bool takes_back, uint64_t *state, ibp_stream stream)

ibp_status ibp_cuda_create_streamer(ibp_streamer **streamer)
{
    *streamer = 0;
    return IBP_NO_CUDA;
}

ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, int node, void **host)
{
    *host = 0;
    return IBP_NO_CUDA;
}

ibp_status ibp_cuda_map_pinned(void *host, void **device)
{
    *device = 0;
    return IBP_NO_CUDA;
}
