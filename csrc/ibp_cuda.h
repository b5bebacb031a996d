/* ibp_cuda.h - the CUDA twins of ibp.h: same verbs, same bytes, device pointers, the stream last.
 *
 * Pointers may be anything that the current device can read: device memory, or pinned host memory mapped into it (rows
 * are then fetched over the link by the kernel itself, the paper's section 4.4). Nothing here allocates, synchronises or uses
 * the default stream; every function but the allocators can be captured in a CUDA graph. In a build without CUDA every
 * function returns IBP_NO_CUDA. IBP_CUDA_ERROR: the cause is in cudaGetLastError() / ibp_cuda_last_error().
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
IBP_API ibp_status ibp_cuda_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows, uint64_t *hits,
                                       ibp_stream stream);
/* As ibp_measure_rows. */
IBP_API ibp_status ibp_cuda_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes, uint16_t *lengths,
                                         ibp_stream stream);
/* As ibp_encode_rows for all rows of data. Codes exactly the bytes that ibp_encode_rows does; other bytes of a slot are left alone.
 * *fault (device-accessible, may be NULL) notes a row whose lengths entry does not belong to data. */
IBP_API ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                        ibp_fault *fault, ibp_stream stream);
/* As ibp_gather_items for all ids. fault: device-accessible, not NULL, cleared by the caller; the first fault met by any
 * warp is kept. max_sms: at most this many SMs are kept busy; 0: all. */
IBP_API ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault, int max_sms,
                                         ibp_stream stream);

/* As ibp_decode_bytes. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

/* As ibp_partition_ids, but for the order inside a window, which may be any. */
IBP_API ibp_status ibp_cuda_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                          void *sorted_ids, uint32_t *positions, ibp_stream stream);

/* Pinned host memory of exactly num_bytes (no rounding to a power of two), mapped and portable. */
IBP_API ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, void **host);
IBP_API ibp_status ibp_cuda_free_pinned(void *host);
/* Pins memory that the caller owns, where it is, until it is unregistered. */
IBP_API ibp_status ibp_cuda_register_pinned(void *host, size_t num_bytes);
IBP_API ibp_status ibp_cuda_unregister_pinned(void *host);
/* Device address of mapped host memory, for the current device. */
IBP_API ibp_status ibp_cuda_map_pinned(void *host, void **device);

#ifdef __cplusplus
}
#endif
#endif
