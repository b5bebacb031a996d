/* ibp_cuda.h - the CUDA twins of ibp.h: same verbs, same bytes, device pointers, the stream last.
 *
 * Pointers may be anything that the current device can read: device memory, or pinned host memory mapped into it (rows
 * are then fetched over the link by the kernel itself, the paper's section 4.4). Nothing here allocates, synchronises
 * or uses the default stream; every function but the allocators can be captured in a CUDA graph. In a build without
 * CUDA every function returns IBP_NO_CUDA.
 *
 * Devices. Every function works on the device that is current when it is called: the stream belongs to it, and it can
 * read the inputs and write the outputs. A streamer belongs to the device that was current when it was created.
 * Pinned memory belongs to no device: all of them can read it, at the address that ibp_cuda_map_pinned gives for
 * each. An ibp_fault is written by one device at a time.
 *
 * Errors. IBP_INVALID_ARGUMENT: an argument is NULL where bytes are needed, out of range, or contradicts another one
 * (raw rows with lengths, an unknown scheme, a codebook whose fields do not fit each other); then nothing
 * has been launched. What arrays in device memory hold is not checked before, and does no harm, nor do kernels of other
 * streams that write them meanwhile: what is wrong in a table's index and rows is noted in *fault, words of a codebook
 * that are wrong give wrong rows. IBP_CUDA_ERROR: a
 * CUDA call failed, and ibp_cuda_last_error() says why; the error is no longer in cudaGetLastError().
 */
#ifndef IBP_CUDA_H
#define IBP_CUDA_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *ibp_stream; /* a cudaStream_t */

/* Whether this build has kernels, and how many devices it can see (0 without a driver). */
IBP_API bool ibp_cuda_is_built(void);
IBP_API int ibp_cuda_device_count(void);
/* Text of the last CUDA error met by this thread in this library; "" if none. */
IBP_API const char *ibp_cuda_last_error(void);

/* As ibp_count_bits; adds to counts. */
IBP_API ibp_status ibp_cuda_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                                       ibp_stream stream);
/* As ibp_count_hits; adds to hits. */
IBP_API ibp_status ibp_cuda_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows,
                                       uint64_t *hits, ibp_stream stream);
/* As ibp_measure_rows. */
IBP_API ibp_status ibp_cuda_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                         uint16_t *lengths, ibp_stream stream);
/* As ibp_index_rows; overflow_bytes is a device pointer as well. */
IBP_API ibp_status ibp_cuda_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                       uint32_t slot_bytes, uint64_t *bases, int64_t *overflow_bytes,
                                       ibp_stream stream);
/* As ibp_survey_rows; adds to survey. */
IBP_API ibp_status ibp_cuda_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                        uint64_t *survey, ibp_stream stream);
/* As ibp_encode_rows for all rows of data. Codes exactly the bytes that ibp_encode_rows does, and zeros to the end of
 * each slot and overflow room.
 * *fault (device-accessible, may be NULL) notes a row whose lengths entry does not belong to data. */
IBP_API ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                        ibp_fault *fault, ibp_stream stream);
/* As ibp_sum_words; adds to *sum, aligned to 8 bytes. */
IBP_API ibp_status ibp_cuda_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                                      ibp_stream stream);
/* Codes the rows of a source into a place: row i becomes row row_ids[i] of the table, or first_row + i where row_ids is
 * NULL. One launch: nothing is measured before, allocated or asked of the host, and all of it can be captured; where
 * overflow parts lie differs from run to run, the bytes of rows do not. place->slots, place->overflow and the source
 * may be device memory or mapped pinned host memory, each for itself; everything else is device memory.
 *
 * A row that does not shrink is stored raw, one that equals the default as the marker of section 2. Where overflow has
 * no room for a row's part, the row is lost: its base becomes IBP_NO_BASE and its length 0, so that reading it is a
 * fault, and it is counted. A source row with fewer bytes than the table's row has zeros behind them; of one with more
 * the first are taken. Bytes of a slot or room behind a row's own are zeros up to a multiple of IBP_OVERFLOW_ALIGN, or
 * stay as they were.
 * row_ids: an id outside the table is noted as IBP_INDEX_OUT_OF_RANGE, and its row left out. Ids must differ: where the
 * table has bases, one of equal ones wins, and those that come while it is being coded are left out and noted as
 * IBP_INVALID_ARGUMENT; without bases the row holds anything. No other row is harmed.
 * lengths, bases and rooms of the place are not trusted: a part that does not lie in overflow is none.
 * fault: device-accessible, or NULL. max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                        int64_t first_row, ibp_fault *fault, int max_sms, ibp_stream stream);
/* As ibp_gather_items for all ids. fault: device-accessible, not NULL, cleared by the caller; the first fault met by
 * any warp is kept. max_sms: at most this many SMs are kept busy; 0: all, and never negative. */
IBP_API ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

/* As ibp_decode_bytes. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                                         ibp_fault *fault, int max_sms, ibp_stream stream);

/* As ibp_partition_ids, but for the order inside a window, which may be any. */
IBP_API ibp_status ibp_cuda_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                          void *sorted_ids, uint32_t *positions, ibp_stream stream);

/* ---- pages of a KV-cache ---------------------------------------------------------------------------------------- */

/* As ibp_plan_pages and ibp_note_pages. All pointers but transfer itself are of memory that the device can use. */
IBP_API ibp_status ibp_cuda_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                       uint64_t *addresses, ibp_stream stream);
IBP_API ibp_status ibp_cuda_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                                       const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows,
                                       uint8_t *stored, uint8_t *seen, ibp_stream stream);

/* ---- a cache of rows --------------------------------------------------------------------------------------------- */

/* Lets kernels of `device` read the memory of `peer`, for maps and slabs that are there. Once is enough, for as long as
 * the process lives; more often does no harm.
 * @return IBP_CUDA_ERROR where the two cannot. */
IBP_API ibp_status ibp_cuda_enable_peer(int device, int peer);

/* As ibp_owners_of_rows. */
IBP_API ibp_status ibp_cuda_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners,
                                           ibp_stream stream);
/* As ibp_find_cached for all ids. maps: an array in host memory; the maps, and counts, which may be NULL, in device
 * memory. Maps of peers are read where they are. At most 2^31 rows. */
IBP_API ibp_status ibp_cuda_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                        uint64_t *entries, ibp_cache_counts *counts, ibp_stream stream);
/* As ibp_gather_cached for all ids. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                          uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream);
/* As ibp_fill_slab for all rows. */
IBP_API ibp_status ibp_cuda_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets,
                                      int64_t count, const ibp_cache_slab *slab, ibp_fault *fault, ibp_stream stream);
/* As ibp_claim_cached, but that missing rows take their ways in any order. Calls of one cache follow each other on one
 * stream, and lookups in it too. At most 2^31 rows. */
IBP_API ibp_status ibp_cuda_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru,
                                         uint64_t *entries, ibp_cache_counts *counts, ibp_fault *fault,
                                         ibp_stream stream);
/* As ibp_drop_cached, and ibp_set_cached. */
IBP_API ibp_status ibp_cuda_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map,
                                        ibp_stream stream);
IBP_API ibp_status ibp_cuda_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                                       const ibp_cache_map *map, ibp_stream stream);

/* ---- bags of rows ------------------------------------------------------------------------------------------------ */

typedef enum ibp_bag_mode { IBP_BAG_SUM, IBP_BAG_MEAN, IBP_BAG_MAX } ibp_bag_mode;
typedef enum ibp_float_kind { IBP_FLOAT32, IBP_FLOAT16, IBP_BFLOAT16 } ibp_float_kind;

/* Bags of ids: bag b has the ids from offsets[b] up to offsets[b + 1]. The first begins with id 0 and the last ends
 * with the last id, whatever the offsets say. */
typedef struct ibp_bags {
    const void *offsets;   /* device: int32_t or int64_t [num_bags], ascending; NULL: bags of bag_size ids each */
    uint32_t offset_bytes; /* 4 or 8 */
    int64_t num_bags, bag_size;
    const void *weights; /* device: one an id, of the kind of the elements; NULL: all 1. For IBP_BAG_SUM only */
    ibp_bag_mode mode;
    ibp_float_kind kind; /* of the elements of rows */
    int64_t padding_id;  /* rows with this id count as absent; negative: there is none */
} ibp_bags;

/* out[b] = the sum, mean or maximum of the rows of bag b, row_bytes bytes each: decoded and reduced by one kernel. A
 * bag without rows gives zeros. Sums are added up in float, in the order of the bag, with one rounding at its end: in
 * the bits of torch's embedding_bag for CUDA.
 * table: of items of one row each, at most 8 KiB, of scheme raw or of dense rows of scheme planes with elements of 2 or
 * 4 bytes. ids: without positions. An id out of range and a corrupt row are noted as in ibp_cuda_gather_items, and
 * count as rows of zeros. An offset past the ids, or less than the one before, is noted as IBP_INVALID_ARGUMENT, with
 * its position and value; the bags about it are then made of any of the rows between their neighbours.
 * cache: rows whose entries are present come from its slabs, as in ibp_cuda_gather_cached; NULL: all from the table.
 * out: aligned to the elements. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_sum_bags(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                     const ibp_bags *bags, uint8_t *out, ibp_fault *fault, int max_sms,
                                     ibp_stream stream);

/* ---- products with a matrix -------------------------------------------------------------------------------------- */

#define IBP_MOST_VECTORS 8

/* An element of a row whose digit is an escape. */
typedef struct {
    uint32_t column;
    uint16_t weight; /* its bits */
    uint16_t taken;  /* those with the exponent first_symbol + 15: what it is multiplied as like other digits */
} ibp_escape;

/* A matrix [N, K] of BF16 whose rows are the items of a table of scheme planes with one plane of four-bit digits,
 * consecutive entries, rotated elements, residuals of 8 bits, no constant columns and no clusters (level fast). Of a
 * slot only residuals and digits are read, its first 3 K / 2 bytes. All is in device memory. */
typedef struct {
    const uint8_t *slots; /* aligned to 16 bytes */
    int64_t slots_bytes;
    uint32_t slot_bytes;   /* a multiple of 16 */
    uint32_t first_symbol; /* of the codebook, at most 239 */
    int64_t num_rows;      /* N, at least 16 */
    uint32_t num_columns;  /* K, a multiple of 32 */
    uint32_t num_escapes;
    const uint32_t *starts;    /* [N + 1]: the escapes of row r are escapes[starts[r]] to escapes[starts[r + 1] - 1] */
    const ibp_escape *escapes; /* by rows and columns; aligned to 8 bytes */
} ibp_digit_matrix;

/* y = x W^T + bias: W, the matrix; x [num_vectors, K], bias [N] or NULL, y [num_vectors, N], all BF16. Rows are decoded
 * in registers, W is read once and never written. Products are added in float, in an order that depends on K alone, and
 * rounded once.
 * Rows that are stored raw or as default rows give any numbers, which are finite for finite x. The list of escapes is
 * not compared with the rows; columns and starts out of range do no harm.
 * num_vectors: up to IBP_MOST_VECTORS. x: aligned to 16 bytes.
 * The matrix may be read before work that the stream has before the call is done: nothing of that writes it. x and bias
 * may be what it writes. */
IBP_API ibp_status ibp_cuda_linear(const ibp_digit_matrix *matrix, const uint16_t *x, int64_t num_vectors,
                                   const uint16_t *bias, uint16_t *y, ibp_stream stream);

/* ---- items with the CPU's help ----------------------------------------------------------------------------------- */

/* Brings items at ids in host memory to the GPU, of tables in pinned host memory so large that a GPU which fetches rows
 * at random places is bound by address translation: threads of the CPU gather slots into a ring of pinned memory, the
 * copy engine moves them to a ring on the GPU, and the GPU decodes them there, all at the same time. Owns a stream and
 * events of the device that is current when it is created. Used by one call at a time. */
typedef struct ibp_stager ibp_stager;

/* pinned, near: ring_bytes each, pinned host memory and device memory, aligned to 16 bytes, the stager's own until it
 * is destroyed and the work queued by then is completed. 24 MiB keep a PCIe 5 link busy. */
IBP_API ibp_status ibp_cuda_create_stager(uint8_t *pinned, uint8_t *near, int64_t ring_bytes, ibp_stager **stager);
/* From any current device; NULL: nothing to do. */
IBP_API ibp_status ibp_cuda_destroy_stager(ibp_stager *stager);

/* Calls work(state, number) once for every number of [0, count), on as many threads as it likes at the same time or
 * one after the other, and returns when all have returned: an OpenMP loop, or a pool of threads. */
typedef void (*ibp_run)(void *runner, int64_t count, void (*work)(void *state, int64_t number), void *state);

/* As ibp_cuda_gather_items, of items of whole rows at ids in host memory (no positions, contiguous output), in the
 * order of the stream. Comes back when the last chunk is queued; ids and slots are not read afterwards.
 * table: with slots, its arrays as the device sees them: what is not in a slot it reads itself. slots: the same slots
 * as the CPU sees them. run(runner, num_threads, ...) is called once.
 * @return IBP_INVALID_ARGUMENT also where an item's slots do not fit into a twelfth of the ring. */
IBP_API ibp_status ibp_cuda_stage_items(ibp_stager *stager, const ibp_table *table, const uint8_t *slots,
                                        const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms, ibp_run run,
                                        void *runner, int64_t num_threads, ibp_stream stream);

/* ---- streams of whole tables ------------------------------------------------------------------------------------- */

/* Brings tables from pinned host memory to the GPU with its copy engine, chunk by chunk through a ring of staging
 * buffers there, while the chunks before are decoded. Owns streams and events of the device that is current when it
 * is created, no other memory. Used by one host thread at a time, and with one caller's stream; from another current
 * device the functions that use one return IBP_INVALID_ARGUMENT. */
typedef struct ibp_streamer ibp_streamer;

IBP_API ibp_status ibp_cuda_create_streamer(ibp_streamer **streamer);
/* Work already queued is completed. From any current device; NULL: nothing to do. */
IBP_API ibp_status ibp_cuda_destroy_streamer(ibp_streamer *streamer);

/* Begins a stream: one table after the other, each by a call of ibp_cuda_stream_bytes with the same caller's stream,
 * through this ring. ring: device memory, aligned to 128 bytes, free for use where the caller's stream is when the
 * first chunk is queued; every later use of it by the caller's stream comes after all copies of the stream, since
 * each call joins its own. ring_bytes: it is cut in four; 32 MiB keep a PCIe 5 link busy, and where 32 rows do not
 * fit into a quarter, the kernel fetches rows from host memory itself. Queues nothing. */
IBP_API ibp_status ibp_cuda_begin_stream(ibp_streamer *streamer, uint8_t *ring, int64_t ring_bytes);

/* Begins another stream through the ring of the one before, which nothing else has used since: its first copies wait
 * for nothing but room in the ring, so that the link stays busy from one stream into the next. Not where either of them
 * is captured.
 * @return IBP_INVALID_ARGUMENT if none has begun. */
IBP_API ibp_status ibp_cuda_continue_stream(ibp_streamer *streamer);

/* As ibp_cuda_decode_bytes, of the next table of a stream.
 * table: slots and overflow mapped pinned host memory, which must hold its bytes when this is called and stay as it
 * is until they have been copied; lengths, bases and codebook in device memory; slots_start and overflow_start 0.
 * bases: table->bases in host memory, read before the function returns. Where they are out of order, rows of that
 * chunk are fetched as ibp_cuda_decode_bytes does it; other wrong bases may cost intact rows of the same chunk, which
 * are then zeros and noted. ends: this is the last table of the stream, so that its last chunks are small ones.
 * Leaving it out only costs time. The caller's stream waits for the last chunk, and copies for the caller's stream
 * where the stream begins and, from the fifth chunk on, until a place of the ring has been decoded: copies for one
 * table run while the one before is still being decoded, and all of it can be captured in a CUDA graph, whose replays
 * then need the ring and the pinned memory, but no longer the streamer. A whole stream, from begin to its last table,
 * is either captured or not. */
IBP_API ibp_status ibp_cuda_stream_bytes(ibp_streamer *streamer, const ibp_table *table, const uint64_t *bases,
                                         int64_t start, int64_t end, bool ends, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

/* ---- pinned memory ----------------------------------------------------------------------------------------------- */

/* Pinned host memory of exactly num_bytes (no rounding to a power of two), zeroed; mapped into the address spaces of
 * all devices, whichever is current now, and pinned for all (portable). node: the NUMA node whose memory is preferred;
 * negative: that of the calling thread. Where the system refuses, or the node is full, pages are elsewhere. */
IBP_API ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, int node, void **host);
/* What ibp_cuda_alloc_pinned gave, with the same num_bytes. */
IBP_API ibp_status ibp_cuda_free_pinned(void *host, size_t num_bytes);
/* Pins memory that the caller owns, where it is, until it is unregistered; mapped and portable as above. num_bytes >
 * 0. */
IBP_API ibp_status ibp_cuda_register_pinned(void *host, size_t num_bytes);
/* The same of memory that devices only read, such as a file that is mapped so: where the system lets. */
IBP_API ibp_status ibp_cuda_register_read_only(void *host, size_t num_bytes);
IBP_API ibp_status ibp_cuda_unregister_pinned(void *host);
/* Address of pinned host memory for the current device. Devices may have different ones: ask again where another one
 * is current. */
IBP_API ibp_status ibp_cuda_map_pinned(void *host, void **device);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* One of the tensors whose deltas are made or applied by one launch; arrays of these are in device memory. The rows of
 * all tensors are numbered in one sequence, in which each tensor's begin with a multiple of IBP_ROWS_PER_BASE. Its
 * elements may begin at any address that is a multiple of their size. */
typedef struct ibp_delta_tensor {
    uint8_t *base;           /* num_bytes bytes; written where a delta is applied */
    const uint8_t *newer;    /* likewise; read where a delta is made */
    int64_t num_bytes;       /* whole elements */
    int64_t first_row;       /* of the sequence; increasing, the first tensor's 0 */
    const uint16_t *lengths; /* the tensor's own packed table of differences: read where a delta is applied */
    const uint64_t *bases;   /* one for IBP_ROWS_PER_BASE rows; NULL: there are none */
    const uint8_t *overflow;
    int64_t overflow_bytes;
    uint64_t base_sum, result_sum; /* of ibp_sum_words: of the base and of what it becomes */
} ibp_delta_tensor;

/* Whether the functions below take a codebook for making, or for applying deltas: listed rows, a multiple of 16 bytes
 * and at most 8192, of default 0; no clusters, constant columns, invariant bits or signed default. For making, besides:
 * symbols are whole elements, neither rotated nor consecutive, and the closed value is 1. */
IBP_API bool ibp_cuda_makes_deltas(const ibp_codebook *codebook);
IBP_API bool ibp_cuda_applies_deltas(const ibp_codebook *codebook);

#define IBP_DELTA_COUNTS 8u /* numbers of a row that measuring leaves for coding */

/* Measures the differences newer - base, element by element modulo 2^w, of all tensors: lengths[r], as
 * ibp_measure_rows, for the num_rows rows of the sequence, a multiple of IBP_ROWS_PER_BASE; those that no tensor has
 * are default rows. The codebook's entries are -1, 1, -2, 2, ..., which is not looked at. counts: num_rows *
 * IBP_DELTA_COUNTS entries, for ibp_cuda_encode_deltas. sums[2 * k] and sums[2 * k + 1], set to 0 by the caller, become
 * the sums of words of tensor k's base and of its newer version. */
IBP_API ibp_status ibp_cuda_measure_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                           uint32_t num_tensors, int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                                           uint64_t *sums, ibp_stream stream);
/* Codes them: the rows of the sequence back to back, as bases say, which ibp_cuda_index_rows has made of lengths as if
 * all rows were whole. What does not lie in overflow, as where a tensor has changed since, is left out. */
IBP_API ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                          uint32_t num_tensors, int64_t num_rows, const uint16_t *lengths,
                                          const uint16_t *counts, const uint64_t *bases, uint8_t *overflow,
                                          int64_t overflow_bytes, ibp_stream stream);

/* What has become of a call of ibp_cuda_apply_deltas. */
typedef enum ibp_delta_verdict {
    IBP_DELTA_APPLIED = 0,
    IBP_DELTA_OTHER_BASE = 1, /* a base has another sum than it should: nothing was written */
    IBP_DELTA_DAMAGED = 2     /* a row is corrupt, or a result has another sum: all was undone */
} ibp_delta_verdict;

/* Adds the differences to the bases, all or none of them. state: 1 + 3 * num_tensors entries, set to 0 by the caller:
 * becomes the verdict, and of each tensor the sum of its base's words, what its changes added to that, and whether rows
 * were corrupt. Of the bases only what changes is written; they share no memory with anything else. Rows are not
 * trusted.
 * takes_back: takes the changes of an earlier call back instead, whose state is given with IBP_DELTA_DAMAGED in place
 * of its verdict. */
IBP_API ibp_status ibp_cuda_apply_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                         uint32_t num_tensors, int64_t num_rows, bool takes_back, uint64_t *state,
                                         ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
