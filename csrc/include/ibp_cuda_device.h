/* ibp_cuda_device.h - devices, streams, errors of CUDA, and pinned host memory.
 *
 *     ibp_status make_visible(const uint8_t *bytes, size_t num_bytes, void **pinned, void **device)
 *     {
 *         ibp_status status = ibp_cuda_alloc_pinned(num_bytes, -1, pinned);
 *         if (status != IBP_OK) return status;
 *         for (size_t i = 0; i < num_bytes; i++) ((uint8_t *)*pinned)[i] = bytes[i];
 *         status = ibp_cuda_map_pinned(*pinned, device);
 *         if (status != IBP_OK) ibp_cuda_free_pinned(*pinned, num_bytes);
 *         return status;
 *     }
 */
#ifndef IBP_CUDA_DEVICE_H
#define IBP_CUDA_DEVICE_H

#include "ibp_status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *ibp_stream; /* a cudaStream_t */

/* Whether this build has kernels, and how many devices it can see (0 without a driver). */
IBP_API bool ibp_cuda_is_built(void);
IBP_API int ibp_cuda_device_count(void);
/* Text of the last CUDA error met by this thread in this library; "" if none. */
IBP_API const char *ibp_cuda_last_error(void);

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
IBP_API ibp_status ibp_cuda_unregister_pinned(void *host);
/* Address of pinned host memory for the current device. Devices may have different ones: ask again where another one
 * is current. */
IBP_API ibp_status ibp_cuda_map_pinned(void *host, void **device);

#ifdef __cplusplus
}
#endif
#endif
