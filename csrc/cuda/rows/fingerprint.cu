// fingerprint.cu - sums of words for fingerprints (FORMAT.md section 10), of many parts of tensors by one launch. Bound
// by memory if the data is aligned to 16 bytes: a word takes some 30 instructions.
#include "../../internal/ibp_fingerprint.h"
#include "../cuda_checks.h"
#include "../launch.cuh"

namespace ibp {

constexpr uint32_t kSumThreads = 256;
constexpr uint32_t kPairsAhead = 4;   // number of pairs of words that a thread loads before it mixes them
constexpr uint32_t kMostSummed = 96;  // number of parts of a launch, whose parameters may have 4 KiB
constexpr int64_t kMostBlocks = 4096; // number of blocks of a launch, besides one for each part
constexpr int64_t kLeastBytes = 16 * kPairsAhead * kSumThreads; // a block's share of a part is not smaller

// The parts of a launch. end_blocks: for each part, the number behind that of its last block.
struct SummedParts {
    ibp_summed_part parts[kMostSummed];
    uint32_t end_blocks[kMostSummed];
};

// Returns the sum of v over the lanes of a warp, in lane 0.
__device__ __forceinline__ uint64_t sum_of_warp(uint64_t v)
{
    for (uint32_t step = kWarp / 2u; step != 0u; step /= 2u) {
        const uint32_t low = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(v), step),
                       high = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(v >> 32), step);
        v += low | static_cast<uint64_t>(high) << 32;
    }
    return v;
}

// Returns the sum of the words of every `step`-th pair, beginning with pair `first`, of data that is aligned to 16
// bytes. first_word: the number of the data's first word in its tensor.
__device__ __forceinline__ uint64_t sum_pairs(const ulonglong2 *pairs, int64_t num_pairs, int64_t first, int64_t step,
                                              uint64_t first_word)
{
    uint64_t sum = 0;
    for (int64_t p = first; p < num_pairs; p += kPairsAhead * step) {
        ulonglong2 words[kPairsAhead];
#pragma unroll
        for (uint32_t i = 0; i < kPairsAhead; i++)
            if (p + i * step < num_pairs) words[i] = pairs[p + i * step];
#pragma unroll
        for (uint32_t i = 0; i < kPairsAhead; i++) {
            const uint64_t number = first_word + 2u * static_cast<uint64_t>(p + i * step);
            if (p + i * step < num_pairs)
                sum += ibp_mix_word(words[i].x, number) + ibp_mix_word(words[i].y, number + 1u);
        }
    }
    return sum;
}

// Returns word i of num_bytes bytes at any address, with zeros behind the bytes. Reads no byte outside them.
__device__ __forceinline__ uint64_t load_any_word(const uint8_t *data, int64_t num_bytes, int64_t i)
{
    const uint8_t *const from = data + 8 * i;
    const uint32_t start = reinterpret_cast<uintptr_t>(from) % 8u;
    const uint64_t *const near = reinterpret_cast<const uint64_t *>(from - start);
    if (start == 0u && 8 * i + 8 <= num_bytes) return near[0];
    if (start != 0u && i != 0 && 8 * i + 16 - start <= num_bytes)
        return near[0] >> 8u * start | near[1] << (64u - 8u * start);
    uint64_t word = 0;
    for (uint32_t b = 0; b < 8u && 8 * i + b < num_bytes; b++) word |= static_cast<uint64_t>(from[b]) << 8u * b;
    return word;
}

__global__ void __launch_bounds__(kSumThreads) sum_words(const __grid_constant__ SummedParts summed)
{
    uint32_t k = 0;
    while (blockIdx.x >= summed.end_blocks[k]) k++;
    const ibp_summed_part &part = summed.parts[k];
    const uint32_t first_block = k == 0u ? 0u : summed.end_blocks[k - 1u];
    const int64_t first = int64_t{blockIdx.x - first_block} * kSumThreads + threadIdx.x,
                  step = int64_t{summed.end_blocks[k] - first_block} * kSumThreads,
                  num_words = (part.num_bytes + 7) / 8, num_pairs = aligned(part.data, 16) ? part.num_bytes / 16 : 0;
    uint64_t own = sum_pairs(reinterpret_cast<const ulonglong2 *>(part.data), num_pairs, first, step, part.first_word);
    for (int64_t i = 2 * num_pairs + first; i < num_words; i += step)
        own += ibp_mix_word(load_any_word(part.data, part.num_bytes, i), part.first_word + static_cast<uint64_t>(i));
    own = sum_of_warp(own);
    if (lane_id() == 0u)
        atomicAdd(reinterpret_cast<unsigned long long *>(part.sum), static_cast<unsigned long long>(own));
}

// Launches the kernel for up to kMostSummed parts.
static ibp_status sum_together(const ibp_summed_part *parts, int64_t num_parts, ibp_stream stream)
{
    SummedParts summed{};
    int64_t num_bytes = 0, num_blocks = 0;
    for (int64_t k = 0; k < num_parts; k++) num_bytes += parts[k].num_bytes;
    const int64_t each = std::max(kLeastBytes, num_bytes / kMostBlocks);
    for (int64_t k = 0; k < num_parts; k++) {
        summed.parts[k] = parts[k];
        num_blocks += (parts[k].num_bytes + each - 1) / each;
        summed.end_blocks[k] = static_cast<uint32_t>(num_blocks);
    }
    if (num_blocks == 0) return IBP_OK;
    return launch_kernel(sum_words, Launch{static_cast<uint32_t>(num_blocks), kSumThreads, 0, 1}, stream, summed);
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_sum_words(const ibp_summed_part *parts, int64_t num_parts, ibp_stream stream)
{
    if (num_parts < 0 || !ibp::has_bytes(parts, num_parts)) return IBP_INVALID_ARGUMENT;
    for (int64_t k = 0; k < num_parts; k++)
        if (parts[k].num_bytes < 0 || parts[k].sum == nullptr || !ibp::has_bytes(parts[k].data, parts[k].num_bytes))
            return IBP_INVALID_ARGUMENT;
    ibp_status status = IBP_OK;
    for (int64_t k = 0; k < num_parts && status == IBP_OK; k += ibp::kMostSummed)
        status = ibp::sum_together(parts + k, std::min<int64_t>(num_parts - k, ibp::kMostSummed), stream);
    return status;
}
