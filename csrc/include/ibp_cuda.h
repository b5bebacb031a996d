/* ibp_cuda.h - the CUDA twins of ibp.h: same verbs, same bytes, device pointers, the stream last.
 *
 * This header includes the other headers of CUDA; each may also be included alone. The rules below hold for all of
 * them.
 *
 *     bool can_use_gpu(void)
 *     {
 *         return ibp_cuda_is_built() && ibp_cuda_device_count() > 0;
 *     }
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
 * (raw rows with lengths, an unknown scheme, a codebook whose fields do not fit each other); then nothing has been
 * launched. What arrays in device memory hold is not checked before the launch. It does no harm, nor do kernels of
 * other streams that write the arrays meanwhile: what is wrong in a table's index and rows is noted in *fault, and
 * wrong words of a codebook give wrong rows. IBP_CUDA_ERROR: a CUDA call failed, and ibp_cuda_last_error() says why;
 * the error is no longer in cudaGetLastError(). */
#ifndef IBP_CUDA_H
#define IBP_CUDA_H

#include "ibp.h"
#include "ibp_cuda_device.h"
#include "ibp_cuda_rows.h"

#endif
