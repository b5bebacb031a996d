// matrix.cuh - decodes all weights of a coded matrix of BF16, for products with more vectors than the other kernels
// multiply.
//
// A slot, which holds a stored row:
//
//     | residuals: 1 byte for each column | digits: 4 bits for each column |
//
// 1. A warp takes a stretch of a row. A lane loads the residuals and digits of 8 elements at a time into registers.
// 2. The lane combines each residual and digit into a weight, and stores the weights in device memory.
// 3. The warp overwrites the weights of escapes with the right ones from the list of escapes. Because of this list, the
//    kernel need not count escapes, stage symbols or exchange data between lanes.
//
// Device memory limits the kernel.
#ifndef IBP_MATRIX_CUH
#define IBP_MATRIX_CUH

#include "digits.cuh"

namespace ibp {

constexpr uint32_t kMatrixWarps = 8; // number of warps in a block
// kLaneWeights: number of weights that a lane loads at a time. kLoads: number of such loads that a lane issues before
// it uses the first result.
constexpr uint32_t kLaneWeights = 8, kLoads = 4;
constexpr uint32_t kStretchColumns = kWarp * kLaneWeights * kLoads; // number of columns in a warp's stretch

// Eight consecutive elements of a slot, beginning with `column`.
struct LaneElements {
    uint2 residuals;
    uint32_t digits;

    __device__ __forceinline__ void load(const uint8_t *slot, uint32_t columns, uint32_t column)
    {
        residuals = __ldg(reinterpret_cast<const uint2 *>(slot + column));
        digits = __ldg(reinterpret_cast<const uint32_t *>(slot + columns + column / 2u));
    }
    __device__ __forceinline__ uint4 weights(uint32_t firsts) const
    {
        const Exponents exponents(digits, firsts);
        const uint32_t low = permute_bytes(exponents.even, exponents.odd, 0x5140u),
                       high = permute_bytes(exponents.even, exponents.odd, 0x7362u);
        return make_uint4(
            turned(permute_bytes(residuals.x, low, 0x5140u)), turned(permute_bytes(residuals.x, low, 0x7362u)),
            turned(permute_bytes(residuals.y, high, 0x5140u)), turned(permute_bytes(residuals.y, high, 0x7362u)));
    }
};

// Writes the weights of all rows. A block takes a stretch of kStretchColumns columns in kMatrixWarps rows; each of its
// warps takes one of these rows.
// num_stretches: number of stretches in a row.
__global__ void __launch_bounds__(kMatrixWarps *kWarp)
    matrix_weights(const __grid_constant__ ibp_digit_matrix matrix, const uint32_t num_stretches, uint16_t *weights)
{
    const uint32_t row = blockIdx.x / num_stretches * kMatrixWarps + threadIdx.x / kWarp, columns = matrix.num_columns,
                   start = blockIdx.x % num_stretches * kStretchColumns, first = start + kLaneWeights * lane_id();
    if (row >= matrix.num_rows) return;
    const uint8_t *const slot = matrix.slots + uint64_t{row} * matrix.slot_bytes;
    uint16_t *const to = weights + uint64_t{row} * columns;
    const uint32_t escapes = __ldg(matrix.starts + row),
                   end = ibp_min_u32(__ldg(matrix.starts + row + 1u), matrix.num_escapes);
    LaneElements elements[kLoads];
#pragma unroll
    for (uint32_t i = 0; i < kLoads; i++) {
        const uint32_t column = first + i * kWarp * kLaneWeights;
        if (column < columns) elements[i].load(slot, columns, column);
    }
#pragma unroll
    for (uint32_t i = 0; i < kLoads; i++) {
        const uint32_t column = first + i * kWarp * kLaneWeights;
        if (column < columns)
            *reinterpret_cast<uint4 *>(to + column) = elements[i].weights(matrix.first_symbol * kEveryByte);
    }
    __syncwarp(); // the decoded weights must be stored before the right weights of escapes
    for (uint32_t i = escapes + lane_id(); i < end; i += kWarp) {
        const ibp_escape escape = matrix.escapes[i];
        if (escape.column - start < kStretchColumns && escape.column < columns) to[escape.column] = escape.weight;
    }
}

} // namespace ibp

#endif
