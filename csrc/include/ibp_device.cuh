// ibp_device.cuh - decodes and codes rows inside your own kernels, as the paper's header-only library does. For nvcc,
// C++17.
//
//     template <uint32_t KINDS = ibp::kAllRows>
//     uint32_t ibp::warp_scratch_bytes(const ibp_codebook &);
//     template <uint32_t KINDS = ibp::kAllRows>
//     ibp_status ibp::warp_decode_row(const ibp_table &, int64_t number, uint8_t *row, uint32_t scratch);
//     template <uint32_t KINDS = ibp::kAllRows>
//     ibp_status ibp::warp_decode_coded(const ibp_codebook &, const uint8_t *coded, uint32_t coded_bytes, uint8_t *row,
//                                       uint32_t num_bytes, uint32_t scratch);
//     uint32_t ibp::warp_encode_scratch_bytes(const ibp_codebook &);
//     uint32_t ibp::warp_encode_row(const ibp_codebook &, const uint8_t *row, uint8_t *coded, uint32_t scratch);
//
// With these functions a warp decodes a row of any scheme, from a table or from coded bytes. A warp can code only rows
// of scheme ibp. Rows and coded bytes may be in any memory that the device can use. warp_rows.cuh and warp_encode.cuh,
// which this file includes, document the arguments and guarantees of each function. Other names in namespace ibp are
// not part of the interface and change from version to version. Kernels that use only this file need not be linked with
// libibp. The library has the functions of ibp.h and ibp_cuda.h, which make tables.
//
//     __global__ void kernel(const __grid_constant__ ibp_table table, uint32_t warp_bytes, ...)
//     {
//         extern __shared__ uint4 memory[]; // warp_bytes for each warp: warp_scratch_bytes(table.codebook) and a row
//         const uint32_t scratch = threadIdx.x / 32 * warp_bytes;
//         uint8_t *const row = reinterpret_cast<uint8_t *>(memory) + scratch + ibp::warp_scratch_bytes(table.codebook);
//         if (ibp::warp_decode_row(table, number, row, scratch) == IBP_OK) ...
#ifndef IBP_DEVICE_CUH
#define IBP_DEVICE_CUH

#if __has_include("ibp/cuda/decode/warp_rows.cuh") // as installed
#include "ibp/cuda/decode/warp_rows.cuh"
#include "ibp/cuda/encode/warp_encode.cuh"
#else // in the source tree
#include "../cuda/decode/warp_rows.cuh"
#include "../cuda/encode/warp_encode.cuh"
#endif

#endif
