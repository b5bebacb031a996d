// analysis.cu - bit and chunk statistics over rows (the paper's section 4.1): one thread a column of words, over every k-th row.
#include "warp.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kThreads = 256;

__device__ __forceinline__ uint32_t load_row_word(const uint8_t *row, uint32_t row_bytes, uint32_t w)
{
    if (aligned(row, 4) && 4u * w + 4u <= row_bytes) return reinterpret_cast<const uint32_t *>(row)[w];
    uint32_t word = 0;
    for (uint32_t i = 4u * w; i < ibp_min_u32(row_bytes, 4u * w + 4u); i++)
        word |= static_cast<uint32_t>(row[i]) << (8u * (i % 4u));
    return word;
}

// 32 counters, one a bit of a word, held as bit planes: plane p has bit p of every counter, so that adding a word is a ripple of
// half adders over all 32 at once.
struct BitCounters {
    static constexpr uint32_t kPlanes = 8, kMost = (1u << kPlanes) - 1u;
    uint32_t plane[kPlanes] = {};

    __device__ __forceinline__ void add(uint32_t word)
    {
#pragma unroll
        for (uint32_t p = 0; p < kPlanes; p++) {
            const uint32_t carry = plane[p] & word;
            plane[p] ^= word;
            word = carry;
        }
    }
    __device__ __forceinline__ void flush(uint32_t (&sums)[32])
    {
#pragma unroll
        for (uint32_t b = 0; b < 32; b++)
#pragma unroll
            for (uint32_t p = 0; p < kPlanes; p++) sums[b] += ((plane[p] >> b) & 1u) << p;
#pragma unroll
        for (uint32_t p = 0; p < kPlanes; p++) plane[p] = 0;
    }
};

__global__ void __launch_bounds__(kThreads) count_bits(const uint8_t *data, const int64_t num_rows, const uint32_t row_bytes,
                                                       const uint32_t num_slices, unsigned long long *counts)
{
    const uint32_t num_words = (row_bytes + 3u) / 4u;
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const uint32_t w = static_cast<uint32_t>(thread % num_words), slice = static_cast<uint32_t>(thread / num_words);
    if (slice >= num_slices) return;
    BitCounters counters;
    uint32_t sums[32] = {}, added = 0;
    for (int64_t r = slice; r < num_rows; r += num_slices) {
        counters.add(load_row_word(data + r * row_bytes, row_bytes, w));
        if (++added == BitCounters::kMost) {
            counters.flush(sums);
            added = 0;
        }
    }
    counters.flush(sums);
#pragma unroll
    for (uint32_t b = 0; b < 32; b++)
        if (sums[b] != 0 && 32u * w + b < 8u * row_bytes)
            atomicAdd(counts + 32ull * w + b, static_cast<unsigned long long>(sums[b]));
}

// A thread's unit is a word, or two words of a chunk of 8 bytes; a word has up to four chunks.
__global__ void __launch_bounds__(kThreads) count_hits(const ibp_codebook cb, const uint8_t *data, const int64_t num_rows,
                                                       const uint32_t num_slices, unsigned long long *hits)
{
    const uint32_t unit_bytes = max(cb.chunk_bytes, 4u), num_units = (cb.row_bytes + unit_bytes - 1u) / unit_bytes;
    const uint64_t thread = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
    const uint32_t unit = static_cast<uint32_t>(thread % num_units), slice = static_cast<uint32_t>(thread / num_units);
    if (slice >= num_slices) return;
    const uint32_t w = unit * (unit_bytes / 4u), chunks = 4u / ibp_min_u32(cb.chunk_bytes, 4u);
    const uint32_t ones = chunks == 1u ? ~0u : (1u << (32u / chunks)) - 1u;
    const bool two_words = cb.chunk_bytes == 8u;
    uint32_t sums[4] = {};
    for (int64_t r = slice; r < num_rows; r += num_slices) {
        const uint8_t *const row = data + r * cb.row_bytes;
        uint32_t mismatch = (load_row_word(row, cb.row_bytes, w) ^ __ldg(cb.bitval + w)) & __ldg(cb.mask + w);
        if (two_words) mismatch |= (load_row_word(row, cb.row_bytes, w + 1u) ^ __ldg(cb.bitval + w + 1u)) & __ldg(cb.mask + w + 1u);
#pragma unroll
        for (uint32_t c = 0; c < 4u; c++)
            if (c < chunks) sums[c] += (mismatch & (ones << (c * (32u / chunks)))) == 0u;
    }
    for (uint32_t c = 0; c < 4u; c++) {
        const uint32_t chunk = unit * chunks + c;
        if (c < chunks && chunk * cb.chunk_bytes < cb.row_bytes) atomicAdd(hits + chunk, static_cast<unsigned long long>(sums[c]));
    }
}

// Threads for num_units columns: enough to fill the device, at least 64 rows each.
static ibp_status plan_slices(int64_t num_rows, uint32_t num_units, uint32_t *num_slices, uint32_t *num_blocks)
{
    int device = 0, num_sms = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (status != IBP_OK) return status;
    const int64_t filling = (static_cast<int64_t>(num_sms) * 2048 + num_units - 1) / num_units;
    const int64_t slices = std::max<int64_t>(1, std::min(filling, num_rows / 64));
    *num_slices = static_cast<uint32_t>(slices);
    *num_blocks = static_cast<uint32_t>((slices * num_units + kThreads - 1) / kThreads);
    return IBP_OK;
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                                          ibp_stream stream)
{
    if (num_rows == 0) return IBP_OK;
    uint32_t slices, blocks;
    const ibp_status status = ibp::plan_slices(static_cast<int64_t>(num_rows), (row_bytes + 3u) / 4u, &slices, &blocks);
    if (status != IBP_OK) return status;
    ibp::count_bits<<<blocks, ibp::kThreads, 0, stream>>>(data, static_cast<int64_t>(num_rows), row_bytes, slices,
                                                          reinterpret_cast<unsigned long long *>(counts));
    return ibp::check_cuda(cudaGetLastError());
}

extern "C" ibp_status ibp_cuda_count_hits(const ibp_codebook *cb, const uint8_t *data, size_t num_rows, uint64_t *hits,
                                          ibp_stream stream)
{
    if (num_rows == 0) return IBP_OK;
    const uint32_t unit_bytes = cb->chunk_bytes > 4 ? cb->chunk_bytes : 4;
    uint32_t slices, blocks;
    const ibp_status status =
        ibp::plan_slices(static_cast<int64_t>(num_rows), (cb->row_bytes + unit_bytes - 1) / unit_bytes, &slices, &blocks);
    if (status != IBP_OK) return status;
    ibp::count_hits<<<blocks, ibp::kThreads, 0, stream>>>(*cb, data, static_cast<int64_t>(num_rows), slices,
                                                          reinterpret_cast<unsigned long long *>(hits));
    return ibp::check_cuda(cudaGetLastError());
}
