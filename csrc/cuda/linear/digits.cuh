// digits.cuh - shared code of the kernels that multiply vectors by a coded matrix of BF16: copies to shared memory, the
// decoding of elements to operands of tensor cores, the order in which products are added, and the products of escapes.
//
// A slot, which is a row as it is stored:
//
//     | residuals: 1 byte for each column | digits: 4 bits for each column |
#ifndef IBP_LINEAR_DIGITS_CUH
#define IBP_LINEAR_DIGITS_CUH

#include "../../internal/ibp_linear.h"
#include "../floats.cuh"
#include "../warp.cuh"

#include <cfloat>

namespace ibp {

// ---- matrices and vectors ----

// A coded matrix, the bias that is added to its products, and the memory of the results.
struct LinearMatrix {
    ibp_product product;
    uint32_t first_tile; // index of the matrix's first tile, counted over all matrices

    __host__ __device__ __forceinline__ const ibp_digit_matrix &coded() const { return product.matrix; }
    __host__ __device__ __forceinline__ uint32_t rows() const { return static_cast<uint32_t>(coded().num_rows); }
};

// Vectors [count, columns], one after the other. If `order` is not NULL, order[i] is the number of vector i.
struct Vectors {
    const uint16_t *x;
    uint32_t count, columns;
    const int64_t *order = nullptr;
    // most: the largest valid number in `order`. sharing: number of vectors with consecutive numbers that share a row
    // of x; used only with `order`.
    uint32_t most = 0, sharing = 1;

    // Returns the number of a vector, which says where its result is stored.
    __device__ __forceinline__ uint32_t place(uint32_t vector) const
    {
        return order == nullptr ? vector : ibp_min_u32(static_cast<uint32_t>(order[vector]), most);
    }
    __device__ __forceinline__ const uint16_t *of(uint32_t vector) const
    {
        const uint32_t row = order == nullptr ? vector : place(vector) / sharing;
        return x + uint64_t{row} * columns;
    }
};

// A job in which several matrices multiply the same vectors. The rows of each matrix are divided into tiles, which are
// numbered consecutively over all matrices.
struct LinearJob {
    LinearMatrix matrices[IBP_MOST_MATRICES];
    uint32_t num_matrices, num_tiles, num_columns, num_vectors;
    const uint16_t *x; // [num_vectors, num_columns]

    __device__ __forceinline__ Vectors vectors() const { return {x, num_vectors, num_columns}; }
    void cut(uint32_t tile_rows)
    {
        num_tiles = 0;
        for (uint32_t i = 0; i < IBP_MOST_MATRICES; i++) {
            matrices[i].first_tile = i < num_matrices ? num_tiles : UINT32_MAX;
            if (i < num_matrices) num_tiles += (matrices[i].rows() + tile_rows - 1u) / tile_rows;
        }
    }
    // Returns the index of the matrix to which a tile belongs.
    __device__ __forceinline__ uint32_t number_of(uint32_t tile) const
    {
        uint32_t number = 0;
#pragma unroll
        for (uint32_t i = 1; i < IBP_MOST_MATRICES; i++) number += tile >= matrices[i].first_tile ? 1u : 0u;
        return number;
    }
    __device__ __forceinline__ const LinearMatrix &matrix_of(uint32_t tile) const { return matrices[number_of(tile)]; }
};

// ---- copies, matrix products and barriers ----

// Starts to copy 16 bytes to byte `shared` of shared memory. If `wanted` is false, zeros are written instead.
__device__ __forceinline__ void copy_vector(uint32_t shared, const uint8_t *from, bool wanted)
{
#ifdef __CUDACC__
    const uint32_t to = static_cast<uint32_t>(__cvta_generic_to_shared(shared_bytes() + shared)),
                   num_bytes = wanted ? 16u : 0u;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(num_bytes)
                 : "memory");
#else
    const uint4 vector = wanted ? *reinterpret_cast<const uint4 *>(from) : uint4{};
    *reinterpret_cast<uint4 *>(shared_bytes() + shared) = vector;
#endif
}
// end_copies() ends a group of copies. await_copies() waits until all of this thread's groups of copies except the last
// NUM_LEFT are complete, and then waits for the other lanes.
__device__ __forceinline__ void end_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int NUM_LEFT> __device__ __forceinline__ void await_copies()
{
#ifdef __CUDACC__
    asm volatile("cp.async.wait_group %0;" ::"n"(NUM_LEFT) : "memory");
#endif
    __syncwarp();
}

// Adds the products of 16 rows with 8 vectors over 16 columns to `sums` (`mma.m16n8k16`). Lane 4 g + t holds, two
// elements in each word:
//
//     a[0], a[2]    row g, columns 2 t and 2 t + 1, and columns 2 t + 8 and 2 t + 9
//     a[1], a[3]    row g + 8, the same columns
//     b[0], b[1]    vector g, the same columns
//     sums          of rows g, g, g + 8, g + 8 with vectors 2 t, 2 t + 1, 2 t, 2 t + 1
__device__ __forceinline__ void multiply_tile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2])
{
#ifdef __CUDACC__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
                 "{%0,%1,%2,%3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    const uint32_t g = lane_id() / 4u, t = lane_id() % 4u;
    for (uint32_t lane = 0; lane < 4u; lane++)
        for (uint32_t i = 0; i < 4u; i++) {
            const uint32_t weights = __shfl_sync(kAllLanes, a[i], static_cast<int>(4u * g + lane));
            for (uint32_t v = 0; v < 2u; v++) {
                const uint32_t x = __shfl_sync(kAllLanes, b[i / 2u], static_cast<int>(4u * (2u * t + v) + lane));
                float &sum = sums[2u * (i % 2u) + v];
                sum += float_of_bfloat16(weights & 0xffffu) * float_of_bfloat16(x & 0xffffu);
                sum += float_of_bfloat16(weights >> 16) * float_of_bfloat16(x >> 16);
            }
        }
#endif
}

// The block's named barrier with this ID, for NUM_THREADS threads, a multiple of kWarp. await_barrier() arrives and
// waits until all these threads have arrived; arrive_at_barrier() only arrives.
template <uint32_t ID, uint32_t NUM_THREADS> __device__ __forceinline__ void await_barrier()
{
#ifdef __CUDACC__
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(NUM_THREADS) : "memory");
#else
    named_barrier(ID, NUM_THREADS);
#endif
}
template <uint32_t ID, uint32_t NUM_THREADS> __device__ __forceinline__ void arrive_at_barrier()
{
#ifdef __CUDACC__
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(NUM_THREADS) : "memory");
#else
    named_arrival(ID, NUM_THREADS);
#endif
}

// ---- the order of sums ----

constexpr uint32_t kStripRows = 16, kStepColumns = 128;

// Columns are divided into steps, and step s belongs to piece s % 16, so that warps with neighbouring pieces read
// adjacent bytes of a row at the same time. The products of a piece are added one after the other. Then the sums of the
// pieces are added: first pairs of pieces, then pairs of these sums, and so on. The kernels of linear.cuh and many.cuh
// add in this order, whatever the number of blocks and of vectors; the kernel of tiles.cuh does not.
constexpr uint32_t kPieces = 16;

__host__ __device__ __forceinline__ uint32_t num_steps(const LinearJob &job)
{
    return (job.num_columns + kStepColumns - 1u) / kStepColumns;
}
// Returns the sum of `sums`: neighbours are added first, then neighbouring pairs, and so on.
template <uint32_t COUNT> __device__ __forceinline__ float sum_in_pairs(float (&sums)[COUNT])
{
#pragma unroll
    for (uint32_t apart = 1; apart < COUNT; apart *= 2u)
#pragma unroll
        for (uint32_t i = 0; i < COUNT; i += 2u * apart) sums[i] += sums[i + apart];
    return sums[0];
}

// Returns the first row of a strip of a matrix. If the number of rows is not a multiple of 16, the last strip overlaps
// the strip before it.
__device__ __forceinline__ uint32_t first_row(const LinearMatrix &matrix, uint32_t strip)
{
    return ibp_min_u32(strip * kStripRows, matrix.rows() - kStripRows);
}

// The rows of a strip in memory, `pitch` bytes apart.
struct StripRows {
    const uint8_t *first;
    uint32_t pitch;

    // Finds strip `number` of a tile; strip 0 is the tile's first one. strips: number of strips in a tile. The loop
    // reads the fields of all matrices, so that no address depends on the tile. If an address depended on the tile, the
    // warp would have to wait for the load.
    __device__ __forceinline__ void find(const LinearJob &job, uint32_t tile, uint32_t strips, uint32_t number)
    {
        uint32_t first_tile = 0, last_row = 0;
#pragma unroll
        for (uint32_t i = 0; i < IBP_MOST_MATRICES; i++) {
            const LinearMatrix &matrix = job.matrices[i];
            if (i != 0u && tile < matrix.first_tile) continue;
            first = matrix.coded().slots, pitch = matrix.coded().slot_bytes;
            first_tile = matrix.first_tile, last_row = matrix.rows() - kStripRows;
        }
        const uint32_t strip = (tile - first_tile) * strips + number;
        first += uint64_t{ibp_min_u32(strip * kStripRows, last_row)} * pitch;
    }
};

// ---- elements ----

// 32 elements of a row. Each element has a residual of 8 bits (sign and mantissa) and a digit of four bits.
struct Elements {
    uint32_t residuals[8], digits[4];
};

// A byte times this constant is a word with this byte in all four places.
constexpr uint32_t kEveryByte = 0x01010101u;

// Converts the two elements of a word to BF16, whose bits are sign, exponent and mantissa. In `rotated`, the low byte
// of each element is its residual, and the high byte is its exponent.
__device__ __forceinline__ uint32_t turned(uint32_t rotated)
{
    return select_bits(0x7fff7fffu, rotated >> 1, rotated << 15);
}

// The exponents of 8 elements, one byte each. One word has the exponents of the elements with even indices, and the
// other word has those with odd indices. firsts: first_symbol in every byte.
struct Exponents {
    uint32_t even, odd;

    __device__ __forceinline__ Exponents(uint32_t digits, uint32_t firsts)
        : even((digits & 0x0f0f0f0fu) + firsts), odd((digits >> 4 & 0x0f0f0f0fu) + firsts)
    {
    }
};

// Makes one of the 8 operands, of 16 columns each, from a lane's elements of two rows. Elements 0 and 2 of four
// consecutive elements make one word, and elements 1 and 3 the other, because their exponents are adjacent bytes.
// number: the operand's index, a constant after unrolling.
__device__ __forceinline__ void make_operand(uint32_t (&a)[4], const Elements (&rows)[2], uint32_t number,
                                             uint32_t firsts)
{
    const uint32_t even_order = number % 2u ? 0x7260u : 0x5240u, odd_order = number % 2u ? 0x7361u : 0x5341u;
#pragma unroll
    for (uint32_t r = 0; r < 2u; r++) {
        const Exponents exponents(rows[r].digits[number / 2u], firsts);
        a[r] = turned(permute_bytes(rows[r].residuals[number], exponents.even, even_order));
        a[2u + r] = turned(permute_bytes(rows[r].residuals[number], exponents.odd, odd_order));
    }
}

// A step of a strip in shared memory:
//
//     | residuals: 16 rows of 128 bytes | digits: 16 rows of 64 bytes |
struct StripStep {
    static constexpr uint32_t kDigitsStart = kStripRows * kStepColumns,
                              kBytes = kDigitsStart + kStripRows * kStepColumns / 2u;

    // Starts to copy a step of a strip to byte `to` of shared memory. All lanes of the warp must call it. num_columns:
    // number of columns in the strip. column: first column of the step.
    static __device__ __forceinline__ void begin_copy(const StripRows &rows, uint32_t num_columns, uint32_t column,
                                                      uint32_t to)
    {
        const uint32_t g = lane_id() / 4u, t = lane_id() % 4u;
        const uint64_t pitch = rows.pitch;
        const uint8_t *const digits = rows.first + g * pitch + num_columns + column / 2u + 16u * t;
        const uint32_t digits_to = to + kDigitsStart + g * kStepColumns / 2u + 16u * t;
        copy_residuals(rows, num_columns, column, to);
#pragma unroll
        for (uint32_t i = 0; i < kStripRows / 8u; i++)
            copy_vector(digits_to + 4u * i * kStepColumns, digits + 8u * i * pitch, column + 32u * t < num_columns);
    }
    // Returns the lane's elements of a row of the step that begins at byte `at` of shared memory.
    static __device__ __forceinline__ Elements elements(uint32_t at, uint32_t row)
    {
        const uint32_t t = lane_id() % 4u;
        const uint4 digits =
            reinterpret_cast<const uint4 *>(shared_bytes() + at + kDigitsStart + row * kStepColumns / 2u)[t];
        // Lanes that read together read from different banks (see copy_residuals).
        const uint4 *const residuals = reinterpret_cast<const uint4 *>(shared_bytes() + at + row * kStepColumns);
        const uint4 low = residuals[2u * t ^ row % 2u], high = residuals[(2u * t + 1u) ^ row % 2u];
        return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, {digits.x, digits.y, digits.z, digits.w}};
    }

  private:
    // Copies the residuals. The v-th 16 bytes of row r, which has 128 bytes, are stored at position v ^ (r % 2), so
    // that lanes that read together read from different banks.
    static __device__ __forceinline__ void copy_residuals(const StripRows &rows, uint32_t num_columns, uint32_t column,
                                                          uint32_t to)
    {
        const uint32_t row = lane_id() / 8u, vector = lane_id() % 8u;
        const uint64_t pitch = rows.pitch;
        const uint8_t *const residuals = rows.first + row * pitch + column + 16u * vector;
        const uint32_t residuals_to = to + row * kStepColumns + 16u * (vector ^ row % 2u);
#pragma unroll
        for (uint32_t i = 0; i < kStripRows / 4u; i++)
            copy_vector(residuals_to + 4u * i * kStepColumns, residuals + 4u * i * pitch,
                        column + 16u * vector < num_columns);
    }
};

// ---- escapes ----

// The escapes of a row: their range in the list, and the next entries. find() loads the range, and load() loads the
// entries. Both can be called long before the results are used.
struct RowEscapes {
    static constexpr uint32_t kTogether = 4; // number of entries that are loaded together

    const ibp_escape *list = nullptr;
    uint32_t first = 0, end = 0;
    ibp_escape entries[kTogether] = {};

    __device__ __forceinline__ void find(const LinearMatrix &matrix, uint32_t row)
    {
        list = matrix.coded().escapes;
        first = __ldg(matrix.coded().starts + row);
        end = ibp_min_u32(__ldg(matrix.coded().starts + row + 1u), matrix.coded().num_escapes);
    }
    __device__ __forceinline__ void load(uint32_t num_columns)
    {
#pragma unroll
        for (uint32_t j = 0; j < kTogether; j++) {
            const bool wanted = first < end && j < end - first;
            const uint2 words = wanted ? __ldg(reinterpret_cast<const uint2 *>(list + first + j)) : make_uint2(0, 0);
            entries[j] = {ibp_min_u32(words.x, num_columns - 1u), static_cast<uint16_t>(words.y),
                          static_cast<uint16_t>(words.y >> 16)};
        }
    }
    __device__ __forceinline__ uint32_t num_loaded() const
    {
        return first < end ? ibp_min_u32(end - first, kTogether) : 0u;
    }
    // Loads the next entries.
    __device__ __forceinline__ void load_next(uint32_t num_columns)
    {
        first += num_loaded();
        load(num_columns);
    }
};

// Sums of the products of a row's escapes with VECTORS vectors, whose indices are APART apart. taken: the sums with the
// weights that the multiplying warps used, as if escapes were ordinary digits. right: the sums with the right weights.
template <uint32_t VECTORS, uint32_t APART = 2> struct Corrections {
    static constexpr uint32_t kTogether = RowEscapes::kTogether;

    float taken[VECTORS] = {}, right[VECTORS] = {};

    // Adds the products of the loaded entries. All loads are issued together; in place of vectors past the last one,
    // the last vector is loaded again. If an element of x is infinite or NaN, nothing is added to `taken`: the wrong
    // and the right weight have the same sign, so the row's sum is already infinite or NaN, as it should be.
    __device__ __forceinline__ void add_loaded(const Vectors &vectors, const RowEscapes &escapes, uint32_t first_vector)
    {
        const ibp_escape(&entries)[kTogether] = escapes.entries;
        const uint32_t num_entries = escapes.num_loaded();
        float x[VECTORS][kTogether];
#pragma unroll
        for (uint32_t i = 0; i < VECTORS; i++) {
            const uint16_t *const from = vectors.of(ibp_min_u32(first_vector + APART * i, vectors.count - 1u));
#pragma unroll
            for (uint32_t j = 0; j < kTogether; j++)
                x[i][j] = j < num_entries ? float_of_bfloat16(from[entries[j].column]) : 0.0f;
        }
#pragma unroll
        for (uint32_t i = 0; i < VECTORS; i++)
#pragma unroll
            for (uint32_t j = 0; j < kTogether; j++) {
                const float finite = fabsf(x[i][j]) <= FLT_MAX ? x[i][j] : 0.0f;
                if (j >= num_entries) continue;
                taken[i] = fmaf(float_of_bfloat16(entries[j].taken), finite, taken[i]);
                right[i] = fmaf(float_of_bfloat16(entries[j].weight), x[i][j], right[i]);
            }
    }
    // Adds the products of all escapes of the row. The first entries of `escapes` must have been loaded.
    __device__ __forceinline__ void add(const Vectors &vectors, RowEscapes &escapes, uint32_t first_vector)
    {
        for (; escapes.num_loaded() != 0u; escapes.load_next(vectors.columns))
            add_loaded(vectors, escapes, first_vector);
    }
    // Returns the corrected sum of the lane's vector `number`. sum: the sum of products with that vector. The order of
    // these operations makes the result exact if a vector has a single nonzero element and that element is 1.
    __device__ __forceinline__ float corrected(float sum, uint32_t number) const
    {
        return (sum - taken[number]) + right[number];
    }
};

__device__ __forceinline__ float bias_of(const LinearMatrix &matrix, uint32_t row)
{
    const uint16_t *const bias = matrix.product.bias;
    return bias != nullptr ? float_of_bfloat16(bias[row]) : 0.0f;
}
// Stores a row's sum to y as BF16, after adding the bias if the matrix has one.
__device__ __forceinline__ void store_sum(const LinearMatrix &matrix, uint16_t *y, float sum, float bias)
{
    if (matrix.product.bias != nullptr) sum += bias;
    *y = static_cast<uint16_t>(bfloat16s_of_floats(sum, sum));
}

} // namespace ibp

#endif
