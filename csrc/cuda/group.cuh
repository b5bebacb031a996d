// group.cuh - groups of threads that decode one row together: 2, 4, 8 or 16 lanes of a warp, a warp, or several warps
// of a block.
#ifndef IBP_GROUP_CUH
#define IBP_GROUP_CUH

#include "digits.cuh"

namespace ibp {

constexpr uint32_t kLaneBytes = 64;                    // size in bytes of a lane's part of a row
constexpr uint32_t kWarpRowBytes = kWarp * kLaneBytes; // size in bytes of a warp's part of a row
constexpr uint32_t kMostWarps = 8;                     // largest number of warps in a group

// A group of LANES lanes of a warp (WARPS == 1), or of WARPS whole warps. All lanes of a warp must call every function
// together, even if some groups of the warp have nothing to do. ANY_LENGTH: a lane's part of a row may be longer than
// kLaneBytes.
template <uint32_t LANES, uint32_t WARPS, bool ANY_LENGTH = false> struct Group {
    static_assert((WARPS == 1 && kWarp % LANES == 0) || LANES == kWarp, "a group is a part of a warp, or whole warps");
    static constexpr uint32_t kLanes = LANES, kWarps = WARPS, kThreads = LANES * WARPS;
    static constexpr uint32_t kPerWarp = kWarp / LANES;
    static constexpr bool kAnyLength = ANY_LENGTH;

    static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % kThreads; }
    // Returns the index of this warp in its group.
    static __device__ __forceinline__ uint32_t warp() { return threadIdx.x % kThreads / kWarp; }
    static __device__ __forceinline__ uint32_t in_block() { return threadIdx.x / kThreads; }

    static __device__ __forceinline__ void sync()
    {
        if (WARPS == 1)
            __syncwarp();
        else
            named_barrier(in_block() + 1u, kThreads);
    }
    // Returns whether is_so is true in any lane of the warp. All lanes of a group must pass the same value. If the
    // group is a whole warp, the result is is_so itself, but a vote is taken all the same: it tells the compiler that
    // the lanes are converged, so that the compiler inserts no check for it before shuffles.
    static __device__ __forceinline__ bool any(bool is_so) { return __any_sync(kAllLanes, is_so); }
    // Returns the sum of v over the group's lanes up to and including this one. v may hold several numbers in separate
    // bit fields, if no sum overflows its field.
    static __device__ __forceinline__ uint32_t inclusive_scan(uint32_t v)
    {
#pragma unroll
        for (uint32_t step = 1; step < LANES; step *= 2) v = add_from_below<LANES>(v, step);
        return v;
    }
    static __device__ __forceinline__ uint32_t last_lane(uint32_t v)
    {
        return __shfl_sync(kAllLanes, v, LANES - 1u, LANES);
    }
    static __device__ __forceinline__ uint32_t sum(uint32_t v)
    {
        if constexpr (LANES == kWarp) {
            return __reduce_add_sync(kAllLanes, v);
        } else {
#pragma unroll
            for (uint32_t step = LANES / 2; step > 0; step /= 2) v += __shfl_xor_sync(kAllLanes, v, step, LANES);
            return v;
        }
    }
    // Returns the votes of the group's lanes, one bit for each.
    static __device__ __forceinline__ uint32_t ballot(bool vote)
    {
        const uint32_t votes = __ballot_sync(kAllLanes, vote);
        return LANES == kWarp ? votes : votes >> (lane_id() / LANES * LANES) & ((1u << (LANES % kWarp)) - 1u);
    }
    static __device__ __forceinline__ uint32_t lanes_below() { return low_bits(~0u, lane()); }

    // Returns the sum of `mine` over the group's warps before this one. total: receives the sum over all warps of the
    // group. counts: index of the first of WARPS words of shared memory, which no other exchange may use at the same
    // time.
    static __device__ __forceinline__ uint32_t exchange(uint32_t counts, uint32_t mine, uint32_t &total)
    {
        if (WARPS == 1) {
            total = mine;
            return 0;
        }
        if (lane() == 0) shared_word(counts + warp()) = mine;
        sync();
        const uint32_t count = lane() < WARPS ? shared_word(counts + lane()) : 0u;
        total = __reduce_add_sync(kAllLanes, count);
        return __reduce_add_sync(kAllLanes, lane() < warp() ? count : 0u);
    }
};

// Copies bytes with accesses of type T, and the last bytes one by one. Both addresses must be aligned for T.
template <class G, typename T>
__device__ __forceinline__ void group_copy_as(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    const uint32_t whole = num_bytes / sizeof(T);
#pragma unroll 4
    for (uint32_t i = G::rank(); i < whole; i += G::kThreads)
        reinterpret_cast<T *>(dst)[i] = reinterpret_cast<const T *>(src)[i];
    for (uint32_t i = whole * sizeof(T) + G::rank(); i < num_bytes; i += G::kThreads) dst[i] = src[i];
}
// Copies bytes with the widest accesses that both addresses allow. No byte outside the ranges is accessed.
template <class G> __device__ __forceinline__ void group_copy(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    if (aligned(dst, 16) && aligned(src, 16))
        group_copy_as<G, uint4>(dst, src, num_bytes);
    else if (aligned(dst, 4) && aligned(src, 4))
        group_copy_as<G, uint32_t>(dst, src, num_bytes);
    else
        group_copy_as<G, uint8_t>(dst, src, num_bytes);
}

// Rotates a repeating pattern of eight bytes, so that it begins with its byte first % 8.
__device__ __forceinline__ uint64_t turned_bytes(uint64_t bytes, uint32_t first)
{
    const uint32_t by = 8u * (first % 8u);
    return by == 0u ? bytes : bytes >> by | bytes << (64u - by);
}

// Fills memory with a repeating pattern of eight bytes. It stores single bytes up to the first address that is a
// multiple of 16, then vectors of 16 bytes, then single bytes again.
template <class G> __device__ __forceinline__ void group_fill(uint8_t *dst, uint32_t num_bytes, uint64_t repeated)
{
    const uint32_t head = ibp_min_u32(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst) % 16u), num_bytes);
    const uint32_t vectors = (num_bytes - head) / 16u, tail = head + 16u * vectors;
    const uint64_t half = turned_bytes(repeated, head);
    const auto low = static_cast<uint32_t>(half), high = static_cast<uint32_t>(half >> 32);
    const auto byte_at = [&](uint32_t i) { return static_cast<uint8_t>(turned_bytes(repeated, i)); };
    for (uint32_t i = G::rank(); i < head; i += G::kThreads) dst[i] = byte_at(i);
    for (uint32_t i = G::rank(); i < vectors; i += G::kThreads)
        reinterpret_cast<uint4 *>(dst + head)[i] = make_uint4(low, high, low, high);
    for (uint32_t i = tail + G::rank(); i < num_bytes; i += G::kThreads) dst[i] = byte_at(i);
}
template <class G> __device__ __forceinline__ void group_zero(uint8_t *dst, uint32_t num_bytes)
{
    group_fill<G>(dst, num_bytes, 0u);
}

} // namespace ibp

#endif
