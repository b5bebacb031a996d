// sums.cuh - loads and stores the 8-byte words of tensors at any address, and computes the sums of words from which
// fingerprints are made (FORMAT.md section 10).
#ifndef IBP_SUMS_CUH
#define IBP_SUMS_CUH

#include "../warp.cuh"

namespace ibp {

// Returns the sum of v over the lanes of a warp in lane 0; the result in other lanes is meaningless. All lanes must
// call it together.
__device__ __forceinline__ uint64_t sum_of_warp(uint64_t v)
{
    for (uint32_t step = kWarp / 2u; step != 0u; step /= 2u) {
        const uint32_t low = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(v), step),
                       high = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(v >> 32), step);
        v += low | static_cast<uint64_t>(high) << 32;
    }
    return v;
}

constexpr uint32_t kPairsAhead = 4; // number of pairs of words that a thread loads before it uses any of them

// Returns the sum of the mixed words (ibp_mix_word) of the pairs first, first + step, first + 2 * step, ... below
// num_pairs. A pair is 16 bytes. Number: an unsigned or signed integer of 32 or 64 bits. pairs: aligned to 16 bytes.
// first_word: the index in the tensor of the first word of pairs[0].
template <typename Number>
__device__ __forceinline__ uint64_t sum_pairs(const ulonglong2 *pairs, Number num_pairs, Number first, Number step,
                                              uint64_t first_word)
{
    uint64_t sum = 0;
    for (Number p = first; p < num_pairs; p += kPairsAhead * step) {
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

// Returns word i of the num_bytes bytes at `data`, which may have any alignment. Bytes past the end count as zeros;
// only the num_bytes bytes are read.
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

// Stores word i of the num_bytes bytes at `data`, which may have any alignment. Bytes of the word past the end are
// dropped.
__device__ __forceinline__ void store_any_word(uint8_t *data, int64_t num_bytes, int64_t i, uint64_t word)
{
    uint8_t *const to = data + 8 * i;
    if (aligned(to, 8) && 8 * i + 8 <= num_bytes) {
        *reinterpret_cast<uint64_t *>(to) = word;
        return;
    }
    for (uint32_t b = 0; b < 8u && 8 * i + b < num_bytes; b++) to[b] = static_cast<uint8_t>(word >> 8u * b);
}

} // namespace ibp

#endif
