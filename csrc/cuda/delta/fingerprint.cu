// fingerprint.cu - computes the sum of words of a part of a tensor, from which its fingerprint is made (FORMAT.md
// section 10). A word takes about 30 instructions. Device memory limits the kernel if the data is aligned to 16 bytes.
#include "../../internal/ibp_delta.h"
#include "../cuda_checks.h"
#include "../launch.cuh"
#include "sums.cuh"

namespace ibp {

constexpr uint32_t kSumThreads = 256;

__global__ void __launch_bounds__(kSumThreads)
    sum_words(const uint8_t *data, const int64_t num_bytes, const uint64_t first_word, unsigned long long *sum)
{
    const int64_t first = int64_t{blockIdx.x} * kSumThreads + threadIdx.x, step = int64_t{gridDim.x} * kSumThreads,
                  num_words = (num_bytes + 7) / 8, num_pairs = aligned(data, 16) ? num_bytes / 16 : 0;
    uint64_t own = sum_pairs(reinterpret_cast<const ulonglong2 *>(data), num_pairs, first, step, first_word);
    for (int64_t i = 2 * num_pairs + first; i < num_words; i += step)
        own += ibp_mix_word(load_any_word(data, num_bytes, i), first_word + static_cast<uint64_t>(i));
    own = sum_of_warp(own);
    if (lane_id() == 0u) atomicAdd(sum, static_cast<unsigned long long>(own));
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                                         ibp_stream stream)
{
    constexpr int64_t kBytesABlock = 16 * ibp::kPairsAhead * ibp::kSumThreads, kMostBlocks = 4096;
    if (num_bytes < 0 || sum == nullptr || !ibp::has_bytes(part, num_bytes)) return IBP_INVALID_ARGUMENT;
    if (num_bytes == 0) return IBP_OK;
    return ibp::launch_kernel(ibp::sum_words, ibp::plan_jobs(num_bytes, kBytesABlock, kMostBlocks, ibp::kSumThreads),
                              stream, part, num_bytes, first_word, reinterpret_cast<unsigned long long *>(sum));
}
