// analysis.cu - computes statistics of the rows of a tensor (the paper's section 4.1). For each bit position,
// count_bits counts the rows in which the bit is 1. For each chunk, count_hits counts the rows that match the chunk's
// mask and bitval.
//
// 1. A block takes up to 256 columns. The blocks with the same columns divide the rows among themselves. A column is a
//    word of a row, or two words if chunks have 8 bytes. A thread takes one column.
// 2. A thread loads the words of eight rows at a time, and counts in registers.
// 3. The threads add their counts to the block's counters in shared memory.
// 4. The block adds its counters to the result with atomics.
//
// Device memory limits the kernels. They execute about 10 instructions for each word, and one atomic for each counter
// of each block.
#include "../../internal/ibp_coding.h"
#include "../cuda_checks.h"
#include "../launch.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kThreads = 256, kRowsAhead = 8;

// Returns word w of a row, which may begin at any address. Bytes past the end of the row are zeros. is_inner: the
// result of is_inner_word for w. If is_inner is true, the function loads aligned words; otherwise it loads byte by
// byte.
__device__ __forceinline__ uint32_t load_row_word(const uint8_t *row, uint32_t row_bytes, uint32_t w, bool is_inner)
{
    const uint8_t *const from = row + 4u * w;
    if (is_inner) {
        const uint32_t start = reinterpret_cast<uintptr_t>(from) % 4u;
        const uint32_t *const near = reinterpret_cast<const uint32_t *>(from - start);
        return start == 0u ? near[0] : __funnelshift_r(near[0], near[1], 8u * start);
    }
    uint32_t word = 0;
#pragma unroll 1
    for (uint32_t b = 0; b < 4u && 4u * w + b < row_bytes; b++) word |= static_cast<uint32_t>(from[b]) << (8u * b);
    return word;
}

// Returns whether word w of every row can be loaded by loading aligned words that do not reach past the end of the row.
// A load past the end of the last row could be outside the tensor's allocation. If a row is not aligned, the second
// aligned word ends up to 3 bytes after word w.
__device__ __forceinline__ bool is_inner_word(const uint8_t *data, uint32_t row_bytes, uint32_t w)
{
    const bool are_aligned = aligned(data, 4u) && row_bytes % 4u == 0u;
    return 4u * w + (are_aligned ? 4u : 7u) <= row_bytes;
}

// The column and the rows that a thread counts. A column is a unit of the row: a word, or a chunk of 8 bytes.
struct Columns {
    uint32_t first, count; // the block's columns
    uint32_t column;       // the thread's column, counted from the block's first
    int64_t row, step;
    bool active;

    // Chooses the thread's column and rows. Consecutive blocks take consecutive tiles of kThreads columns. After the
    // last tile, the next block takes the first tile again, with other rows.
    __device__ __forceinline__ explicit Columns(uint32_t num_units)
    {
        const uint32_t tiles = (num_units + kThreads - 1u) / kThreads;
        first = blockIdx.x % tiles * kThreads;
        count = ibp_min_u32(num_units - first, kThreads);
        const uint32_t slices = kThreads / count; // number of rows that the block reads at the same time
        column = threadIdx.x % count;
        active = threadIdx.x / count < slices;
        row = int64_t{blockIdx.x / tiles} * slices + threadIdx.x / count;
        step = int64_t{gridDim.x / tiles} * slices;
    }
};

// 32 counters, one for each bit position of a word, stored as bit planes: bit b of plane p is bit p of counter b.
struct BitCounters {
    static constexpr uint32_t kPlanes = 8, kMost = (1u << kPlanes) - 1u;
    uint32_t plane[kPlanes] = {};

    // Adds the bits of a, b and c at each position. Replaces a with the low bits of the sums, and returns the high
    // bits, the carries.
    static __device__ __forceinline__ uint32_t add3(uint32_t &a, uint32_t b, uint32_t c)
    {
        const uint32_t carry = (a & b) | (a & c) | (b & c);
        a ^= b ^ c;
        return carry;
    }
    __device__ __forceinline__ void add(const uint32_t (&word)[kRowsAhead])
    {
        const uint32_t twos0 = add3(plane[0], word[0], word[1]), twos1 = add3(plane[0], word[2], word[3]);
        const uint32_t twos2 = add3(plane[0], word[4], word[5]), twos3 = add3(plane[0], word[6], word[7]);
        const uint32_t fours0 = add3(plane[1], twos0, twos1), fours1 = add3(plane[1], twos2, twos3);
        uint32_t carry = add3(plane[2], fours0, fours1);
#pragma unroll
        for (uint32_t p = 3; p < kPlanes; p++) {
            const uint32_t next = plane[p] & carry;
            plane[p] ^= carry;
            carry = next;
        }
    }
    // Adds the counter of bit b to sums[b * stride].
    __device__ __forceinline__ void flush(uint32_t *sums, uint32_t stride)
    {
#pragma unroll
        for (uint32_t b = 0; b < 32; b++) {
            uint32_t sum = 0;
#pragma unroll
            for (uint32_t p = 0; p < kPlanes; p++) sum |= ((plane[p] >> b) & 1u) << p;
            if (sum != 0u) atomicAdd(sums + b * stride, sum);
        }
#pragma unroll
        for (uint32_t p = 0; p < kPlanes; p++) plane[p] = 0;
    }
};

__global__ void __launch_bounds__(kThreads)
    count_bits(const uint32_t row_bytes, const uint8_t *data, const int64_t num_rows, unsigned long long *counts)
{
    __shared__ uint32_t sums[32 * kThreads]; // [bit][column]
    const Columns own((row_bytes + 3u) / 4u);
    for (uint32_t i = threadIdx.x; i < 32u * own.count; i += kThreads) sums[i] = 0;
    __syncthreads();
    BitCounters counters;
    uint32_t added = 0;
    const uint32_t w = own.first + own.column;
    const bool is_inner = is_inner_word(data, row_bytes, w);
    for (int64_t r = own.row; own.active && r < num_rows; r += kRowsAhead * own.step) {
        uint32_t word[kRowsAhead];
#pragma unroll
        for (uint32_t i = 0; i < kRowsAhead; i++) {
            const int64_t row = r + i * own.step;
            word[i] = row < num_rows ? load_row_word(data + row * row_bytes, row_bytes, w, is_inner) : 0u;
        }
        counters.add(word);
        added += kRowsAhead;
        if (added + kRowsAhead <= BitCounters::kMost) continue;
        counters.flush(sums + own.column, own.count);
        added = 0;
    }
    if (added != 0u) counters.flush(sums + own.column, own.count);
    __syncthreads();
    // `counts` has a counter of eight bytes for each bit of a row, in the order of the bits. So consecutive threads add
    // to consecutive counters.
    for (uint32_t i = threadIdx.x; i < 32u * own.count; i += kThreads) {
        const uint32_t sum = sums[i % 32u * own.count + i / 32u];
        if (sum != 0u) atomicAdd(counts + 32ull * own.first + i, static_cast<unsigned long long>(sum));
    }
}

// Counts, for each chunk, the rows that match its mask and bitval. A thread's column is a word, which has up to four
// chunks, or the two words of a chunk of 8 bytes.
__global__ void __launch_bounds__(kThreads) count_hits(const __grid_constant__ ibp_codebook cb, const uint8_t *data,
                                                       const int64_t num_rows, unsigned long long *hits)
{
    __shared__ uint32_t sums[4 * kThreads]; // [column][chunk]
    const uint32_t unit_bytes = max(cb.chunk_bytes, 4u), chunks = 4u / ibp_min_u32(cb.chunk_bytes, 4u);
    const Columns own((cb.row_bytes + unit_bytes - 1u) / unit_bytes);
    for (uint32_t i = threadIdx.x; i < 4u * kThreads; i += kThreads) sums[i] = 0;
    __syncthreads();
    const uint32_t w = (own.first + own.column) * (unit_bytes / 4u),
                   ones = chunks == 1u ? ~0u : (1u << (32u / chunks)) - 1u;
    const bool two_words = cb.chunk_bytes == 8u && 4u * w + 4u < cb.row_bytes;
    const bool is_inner[2] = {is_inner_word(data, cb.row_bytes, w), is_inner_word(data, cb.row_bytes, w + 1u)};
    const uint32_t mask[2] = {cb.mask[w], two_words ? cb.mask[w + 1u] : 0u},
                   bitval[2] = {cb.bitval[w], two_words ? cb.bitval[w + 1u] : 0u};
    uint32_t found[4] = {};
    for (int64_t r = own.row; own.active && r < num_rows; r += kRowsAhead * own.step) {
        uint32_t mismatch[kRowsAhead];
#pragma unroll
        for (uint32_t i = 0; i < kRowsAhead; i++) {
            const int64_t row = r + i * own.step;
            if (row >= num_rows) {
                mismatch[i] = ~0u;
                continue;
            }
            const uint8_t *const bytes = data + row * cb.row_bytes;
            mismatch[i] = (load_row_word(bytes, cb.row_bytes, w, is_inner[0]) ^ bitval[0]) & mask[0];
            if (two_words)
                mismatch[i] |= (load_row_word(bytes, cb.row_bytes, w + 1u, is_inner[1]) ^ bitval[1]) & mask[1];
        }
#pragma unroll
        for (uint32_t i = 0; i < kRowsAhead; i++)
#pragma unroll
            for (uint32_t c = 0; c < 4u; c++)
                if (c < chunks) found[c] += (mismatch[i] & (ones << (c * (32u / chunks) % 32u))) == 0u;
    }
#pragma unroll
    for (uint32_t c = 0; c < 4u; c++)
        if (found[c] != 0u) atomicAdd(&sums[own.column * chunks + c], found[c]);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < own.count * chunks; i += kThreads) {
        const uint32_t chunk = own.first * chunks + i;
        if (sums[i] != 0u && chunk * cb.chunk_bytes < cb.row_bytes)
            atomicAdd(hits + chunk, static_cast<unsigned long long>(sums[i]));
    }
}

// Launches a counting kernel. what: the kernel's first argument. num_units: number of columns. The number of blocks is
// a multiple of the number of tiles of 256 columns. There are enough blocks to fill the device, unless threads would
// then have fewer than about eight rows each.
template <class What>
static ibp_status count(void (*kernel)(What, const uint8_t *, int64_t, unsigned long long *), const What &what,
                        uint32_t row_bytes, uint32_t num_units, const uint8_t *data, size_t rows, uint64_t *counts,
                        ibp_stream stream)
{
    if (rows > static_cast<size_t>(INT64_MAX) / row_bytes) return IBP_INVALID_ARGUMENT;
    if (rows == 0) return IBP_OK;
    if (data == nullptr || counts == nullptr) return IBP_INVALID_ARGUMENT;
    const auto num_rows = static_cast<int64_t>(rows);
    Launch launch;
    const ibp_status status =
        plan_resident(reinterpret_cast<const void *>(kernel), kThreads, 0, INT32_MAX, 1, 0, &launch);
    if (status != IBP_OK) return status;
    const int64_t tiles = (num_units + kThreads - 1) / kThreads, slices = kThreads / std::min(num_units, kThreads);
    const int64_t filling = std::max<int64_t>(1, launch.blocks / tiles);
    launch.blocks =
        static_cast<uint32_t>(tiles * std::min(filling, (num_rows + kRowsAhead * slices - 1) / (kRowsAhead * slices)));
    return launch_kernel(kernel, launch, stream, what, data, num_rows, reinterpret_cast<unsigned long long *>(counts));
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                                          ibp_stream stream)
{
    if (!ibp_are_sizes(0, row_bytes)) return IBP_INVALID_ARGUMENT;
    return ibp::count(ibp::count_bits, row_bytes, row_bytes, (row_bytes + 3u) / 4u, data, num_rows, counts, stream);
}

extern "C" ibp_status ibp_cuda_count_hits(const ibp_codebook *cb, const uint8_t *data, size_t num_rows, uint64_t *hits,
                                          ibp_stream stream)
{
    if (!ibp::is_codebook(cb) || cb->scheme != IBP_SCHEME_IBP) return IBP_INVALID_ARGUMENT;
    const uint32_t unit_bytes = cb->chunk_bytes > 4 ? cb->chunk_bytes : 4;
    return ibp::count(ibp::count_hits, *cb, cb->row_bytes, (cb->row_bytes + unit_bytes - 1) / unit_bytes, data,
                      num_rows, hits, stream);
}
