// group.cuh - groups of threads that decode or encode one row together: 2, 4, 8 or 16 lanes of a warp, a warp, or
// several warps of a block.
#ifndef IBP_GROUP_CUH
#define IBP_GROUP_CUH

#include "digits.cuh"

namespace ibp {

// kLaneBytes, kWarpRowBytes: size in bytes of the largest part of a row that a lane and a warp have if a group consists
// of whole warps and its use is kDecodesTile. kMostWarps: number of warps in a group that decodes rows of any length. A
// group has more warps only if it is a whole block (kWholeBlock in decode/gather.cuh), or if it encodes.
constexpr uint32_t kLaneBytes = 64;
constexpr uint32_t kWarpRowBytes = kWarp * kLaneBytes;
constexpr uint32_t kMostWarps = 8;
// The largest number of threads in a block whose groups have several warps and call any, sum, scan or broadcast.
constexpr uint32_t kMostJoined = 512;

// What groups do.
//
//     kDecodesTile    they decode rows of which a lane has at most kLaneBytes bytes or, if the group is a part of a
//                     warp, at most Decoder::kLaneVectors vectors of 16 bytes, which are up to 96 bytes. (The
//                     decoder of listed rows has such a group, although it decodes rows of any length)
//     kDecodesAny     they decode rows of any length
//     kEncodes        they encode rows of any length
//
// Collectives are `sync` and all functions that exchange values between lanes. In kernels that decode, all lanes of a
// warp must call a collective together, even if some groups of the warp have nothing to do. They must also call
// together every function that calls a collective. The comments of such functions do not say this again. In kernels
// that encode, the groups of one warp may diverge, so the masks of collectives have only the lanes of the group.
enum GroupUse { kDecodesTile, kDecodesAny, kEncodes };

// A group of LANES lanes of a warp (WARPS == 1), or of WARPS whole warps. All threads of a group must call every
// collective together.
template <uint32_t LANES, uint32_t WARPS, GroupUse USE = kDecodesTile> struct Group {
    static_assert((WARPS == 1 && kWarp % LANES == 0) || LANES == kWarp, "a group is a part of a warp, or whole warps");
    static constexpr uint32_t kLanes = LANES, kWarps = WARPS, kThreads = LANES * WARPS;
    static constexpr uint32_t kPerWarp = kWarp / LANES; // number of groups in a warp; 1 if groups are whole warps
    static constexpr bool kAnyLength = USE == kDecodesAny;

    // lane() returns the index of this thread among the group's lanes in its warp; rank() returns its index among all
    // threads of the group.
    static __device__ __forceinline__ uint32_t lane() { return threadIdx.x % LANES; }
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % kThreads; }
    // Returns the index of this warp in its group.
    static __device__ __forceinline__ uint32_t warp() { return threadIdx.x % kThreads / kWarp; }
    // Return the index of this group in its block. uniform_in_block() makes the index uniform in the warp if the group
    // is a warp, or if it decodes and consists of warps. Then the index and the addresses that are computed from it are
    // in uniform registers, and the compiler knows that all lanes go through a loop over rows together.
    static __device__ __forceinline__ uint32_t in_block() { return threadIdx.x / kThreads; }
    static __device__ __forceinline__ uint32_t uniform_in_block()
    {
        constexpr bool kIsUniform = LANES == kWarp && (WARPS == 1 || USE != kEncodes);
        return kIsUniform ? __reduce_max_sync(kAllLanes, in_block()) : in_block();
    }
    // Returns a mask of the lanes of this warp that call functions together.
    static __device__ __forceinline__ uint32_t mask()
    {
        return USE == kEncodes ? (kAllLanes >> (kWarp - LANES)) << (lane_id() / LANES * LANES) : kAllLanes;
    }
    static __device__ __forceinline__ void sync()
    {
        if (WARPS == 1)
            __syncwarp(mask());
        else
            named_barrier(in_block() + 1u, kThreads);
    }

    // ---- the lanes of a warp ----

    // Returns whether is_so is true in any of the lanes that call this together, which may belong to several groups. If
    // all lanes pass the same value, the result is this value, but a vote is taken all the same: it tells the compiler
    // that the lanes are converged, so that the compiler inserts no check for it before shuffles.
    static __device__ __forceinline__ bool any_in_warp(bool is_so) { return __any_sync(mask(), is_so); }
    // Returns the votes of the group's lanes, one bit for each.
    static __device__ __forceinline__ uint32_t ballot(bool vote)
    {
        const uint32_t votes = __ballot_sync(mask(), vote);
        return LANES == kWarp ? votes : votes >> (lane_id() / LANES * LANES) & ((1u << (LANES % kWarp)) - 1u);
    }
    static __device__ __forceinline__ uint32_t lanes_below() { return low_bits(~0u, lane()); }
    // Returns the sum of v over the group's lanes up to and including this one. v may hold several numbers in separate
    // bit fields, if no sum overflows its field.
    static __device__ __forceinline__ uint32_t scan_in_warp(uint32_t v)
    {
#pragma unroll
        for (uint32_t step = 1; step < LANES; step *= 2) v = add_from_below<LANES>(v, step, mask());
        return v;
    }
    static __device__ __forceinline__ uint32_t last_lane(uint32_t v)
    {
        return __shfl_sync(mask(), v, LANES - 1u, LANES);
    }
    static __device__ __forceinline__ uint32_t sum_in_warp(uint32_t v)
    {
        if constexpr (LANES == kWarp) {
            return __reduce_add_sync(kAllLanes, v);
        } else {
#pragma unroll
            for (uint32_t step = LANES / 2; step > 0; step /= 2) v += __shfl_xor_sync(mask(), v, step, LANES);
            return v;
        }
    }
    static __device__ __forceinline__ uint32_t min_in_warp(uint32_t v)
    {
        if constexpr (LANES == kWarp) {
            return __reduce_min_sync(kAllLanes, v);
        } else {
#pragma unroll
            for (uint32_t step = LANES / 2; step > 0; step /= 2)
                v = ibp_min_u32(v, __shfl_xor_sync(mask(), v, step, LANES));
            return v;
        }
    }

    // ---- all threads of a group ----

    static __device__ __forceinline__ bool any(bool is_so)
    {
        uint32_t count[1] = {any_in_warp(is_so)};
        if constexpr (WARPS > 1) {
            uint32_t before[1];
            join_warps(count, before, count);
        }
        return count[0] != 0u;
    }
    // Replaces each of N numbers by its sum over the group's threads.
    template <int N> static __device__ __forceinline__ void sum(uint32_t (&v)[N])
    {
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = sum_in_warp(v[i]);
        if constexpr (WARPS > 1) {
            uint32_t before[N];
            join_warps(v, before, v);
        }
    }
    // Computes, for each of N numbers, its sum over the group's threads before this one (before), and its sum over all
    // threads of the group (total).
    template <int N>
    static __device__ __forceinline__ void scan(const uint32_t (&v)[N], uint32_t (&before)[N], uint32_t (&total)[N])
    {
#pragma unroll
        for (int i = 0; i < N; i++) {
            const uint32_t sums = scan_in_warp(v[i]);
            before[i] = sums - v[i], total[i] = last_lane(sums);
        }
        if constexpr (WARPS > 1) {
            uint32_t of_warps[N];
            join_warps(total, of_warps, total);
#pragma unroll
            for (int i = 0; i < N; i++) before[i] += of_warps[i];
        }
    }
    // Returns the value that v has in the group's first thread.
    static __device__ __forceinline__ uint64_t broadcast(uint64_t v)
    {
        if constexpr (WARPS > 1) {
            __shared__ uint64_t of_first[most_groups()];
            if (rank() == 0u) of_first[in_block()] = v;
            sync();
            v = of_first[in_block()];
            sync();
            return v;
        } else {
            return __shfl_sync(mask(), v, 0, LANES);
        }
    }
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

  private:
    // Returns the largest number of groups in a block whose warps are joined by broadcast or join_warps.
    static __host__ __device__ constexpr uint32_t most_groups()
    {
        static_assert(kThreads <= kMostJoined, "a group whose warps are joined must have at most kMostJoined threads");
        return kMostJoined / kThreads;
    }

    // Does what exchange does for each of N numbers, in static shared memory, and ends with a barrier, so that it can
    // be called again at once. of_warp: this warp's numbers. before, total: receive the sums. Shuffles add up the
    // numbers, because they take fewer registers than the reductions of exchange, and encoders have none to spare.
    template <int N>
    static __device__ __forceinline__ void join_warps(const uint32_t (&of_warp)[N], uint32_t (&before)[N],
                                                      uint32_t (&total)[N])
    {
        __shared__ uint32_t parts_of_all[most_groups()][WARPS][N];
        uint32_t(*const parts)[N] = parts_of_all[in_block()];
        if (lane() == 0)
#pragma unroll
            for (int i = 0; i < N; i++) parts[warp()][i] = of_warp[i];
        sync();
#pragma unroll
        for (int i = 0; i < N; i++) { // each lane takes the sum of one warp
            const uint32_t part = parts[lane() % WARPS][i];
            uint32_t up_to = part;
#pragma unroll
            for (uint32_t step = 1; step < WARPS; step *= 2) up_to = add_from_below<WARPS>(up_to, step);
            before[i] = __shfl_sync(kAllLanes, up_to - part, static_cast<int>(warp()), WARPS);
            total[i] = __shfl_sync(kAllLanes, up_to, WARPS - 1, WARPS);
        }
        sync();
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
