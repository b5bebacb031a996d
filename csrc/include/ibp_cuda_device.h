/* ibp_cuda_device.h - devices, streams, errors of CUDA, and pinned host memory.
 *
 *     // Copies bytes into pinned memory. *device: its address for kernels. ibp_cuda_free_pinned frees *pinned.
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

/* Returns whether this build of the library has kernels. */
IBP_API bool ibp_cuda_is_built(void);

/* Returns the number of GPUs that the library can use; 0 in a build without kernels, and on a machine without a
 * driver. */
IBP_API int ibp_cuda_device_count(void);

/* Returns CUDA's description of the last CUDA error that a function of this library has met in the calling thread; ""
 * if there was none. */
IBP_API const char *ibp_cuda_last_error(void);

/* ---- pinned memory ----------------------------------------------------------------------------------------------- */

/* Allocates pinned host memory and sets it to zero. The memory is mapped into the address spaces of all devices, so
 * that all GPUs can read and write it, whichever device is current during the call. The call may take milliseconds and
 * may wait for the GPU.
 *
 * num_bytes: exactly this many bytes are allocated, without rounding to a power of two.
 * node: the NUMA node whose memory is preferred; if negative, the node of the calling thread. If the system refuses
 *   this node, or if the node is full, the memory lies on other nodes.
 * host: receives the address for the CPU; NULL if num_bytes is 0.
 * @return IBP_CUDA_ERROR if there is not enough memory. */
IBP_API ibp_status ibp_cuda_alloc_pinned(size_t num_bytes, int node, void **host);

/* Frees memory that ibp_cuda_alloc_pinned has allocated; does nothing if `host` is NULL. Kernels that use the memory
 * must have ended.
 *
 * num_bytes: the value that was given to ibp_cuda_alloc_pinned. */
IBP_API ibp_status ibp_cuda_free_pinned(void *host, size_t num_bytes);

/* Pins memory that the caller owns, such as a writable mapping of a file. The memory keeps its address. Until
 * ibp_cuda_unregister_pinned is called, the memory can be used like memory that ibp_cuda_alloc_pinned has allocated.
 *
 * num_bytes: at least 1. */
IBP_API ibp_status ibp_cuda_register_pinned(void *host, size_t num_bytes);

/* Unpins memory that ibp_cuda_register_pinned has pinned. Call it before the memory is freed. */
IBP_API ibp_status ibp_cuda_unregister_pinned(void *host);

/* Finds the address at which kernels of the current device access pinned host memory. Devices may have different
 * addresses for the same memory. Call the function again when another device is current.
 *
 * host: the address that ibp_cuda_alloc_pinned returned or that ibp_cuda_register_pinned was called with.
 * device: receives the address for kernels. */
IBP_API ibp_status ibp_cuda_map_pinned(void *host, void **device);

#ifdef __cplusplus
}
#endif
#endif
