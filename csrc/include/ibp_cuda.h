/* ibp_cuda.h - the functions of ibp.h for GPUs. For example, ibp_cuda_gather_items writes the same bytes as
 * ibp_gather_items, but takes device pointers and a stream.
 *
 * This header includes the other CUDA headers; each of them may also be included alone. The following rules hold for
 * all of them.
 *
 *     bool can_use_gpu(void)
 *     {
 *         return ibp_cuda_is_built() && ibp_cuda_device_count() > 0;
 *     }
 *
 * Pointers. A pointer may point to any memory that the current device can use: device memory, or pinned host memory
 * that is mapped into its address space. Kernels fetch rows from pinned memory over the link themselves (the paper's
 * section 4.4). Structs that arguments point to are in host memory and are read before the function returns.
 *
 * Streams. The last argument is the stream that the work is queued on. Apart from the allocators of pinned memory, no
 * function allocates memory, waits for the GPU or uses the default stream, and every function can be captured in a CUDA
 * graph. In a build without CUDA the functions that return an ibp_status return IBP_NO_CUDA.
 *
 * Devices. Every function works on the device that is current when it is called. The stream must belong to this device,
 * and the device must be able to read the inputs and write the outputs. Pinned memory is not bound to a device. Every
 * device can read it, at the address that ibp_cuda_map_pinned returns for the device. Only one device at a time may
 * write an ibp_fault.
 *
 * Errors. IBP_INVALID_ARGUMENT means that an argument is NULL although bytes are needed, is out of range, or is
 * inconsistent (raw rows with lengths, an unknown scheme, a codebook with inconsistent fields). Then nothing has been
 * launched. The contents of arrays in device memory are not checked before the launch. Wrong contents do no harm, even
 * if kernels of other streams write the arrays meanwhile: errors in a table's index and rows are noted in *fault, and
 * wrong arrays of a codebook give wrong rows. IBP_CUDA_ERROR means that a CUDA call failed. Then ibp_cuda_last_error()
 * says why, and cudaGetLastError() no longer returns the error. */
#ifndef IBP_CUDA_H
#define IBP_CUDA_H

#include "ibp.h"
#include "ibp_cuda_device.h"
#include "ibp_cuda_rows.h"

#endif
