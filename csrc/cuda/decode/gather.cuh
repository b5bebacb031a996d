// gather.cuh - the kernel that gathers rows, and its launch. The .cu of each decoder includes this file once and
// instantiates the kernel with its decoder.
//
// In the kernel a warp, or a group of several warps, does the following. A job is one row. A turn is one job for each
// group of a warp, or one job for a group of several warps.
//
// 1. It waits for earlier work of the stream, and the block fills the decoder's shared memory.
// 2. It gets turns: an equal share of all turns from the start or, if rows take unequal time, further turns whenever it
//    has finished its own. Its lanes look up the rows of several turns at once.
// 3. For each turn it stores the row that was loaded (receive), issues the loads of the next turn's row (prefetch), and
//    decodes the stored row while these loads are under way (finish). See fetch.cuh.
//
// If rows are in pinned memory, the link to the host limits the kernel. Otherwise device memory limits it, or the rate
// at which instructions are issued.
#ifndef IBP_GATHER_CUH
#define IBP_GATHER_CUH

#include "../launch.cuh"
#include "fetch.cuh"

namespace ibp {

// A block's share of a launch. part: index of the request on which the block works. block: the block's index among the
// blocks of this request. num_blocks: number of blocks of this request.
struct Share {
    uint32_t part, block, num_blocks;
};

__device__ __forceinline__ Share share_of_block(const Parts &parts)
{
    uint32_t part = 0, first = 0;
    while (blockIdx.x >= parts.ends[part]) first = parts.ends[part++];
    return {part, blockIdx.x - first, parts.ends[part] - first};
}

// Gives turns to a warp, or to a group of several warps. A turn is G::kPerWarp consecutive jobs, one for each group of
// a warp. The turns of a request, in order, go to different blocks, so that even a few jobs are spread over all blocks.
// The lanes of a warp look up the jobs of its next turns, one job for each lane.
//
// Most requests have rows that take about the same time. The turns of such a request are divided equally in advance:
// they go to warps in rounds, and in each round every warp takes one turn. The rows of an uneven request take unequal
// time. Its turns are only divided equally among blocks, and a warp that has no turns left claims consecutive turns of
// its block. The warp claims about half of what would be its equal share of the turns that are left, so that all warps
// end at about the same time. An uneven request must be the only request of its launch.
template <class G> struct Turns {
    static constexpr uint32_t kLeast = 2, kMost = kWarp / G::kPerWarp;
    // step: number of jobs from a turn of this warp to its next one. first: the first job of this turn. i: the lane
    // that has looked up job `first`. end: the lanes before this one have looked up the jobs of the warp's turns.
    uint32_t step, first, i = 0, end = kWarp;

    static __device__ __forceinline__ bool claims(const Request &request) { return G::kWarps == 1 && request.uneven; }
    // Returns the address of the number of turns that the warps of the block have claimed.
    static __device__ __forceinline__ uint32_t *taken()
    {
        __shared__ uint32_t turns;
        return &turns;
    }
    // Must be called before the constructor, with a barrier of the block between the calls.
    static __device__ __forceinline__ void begin(const Request &request)
    {
        if (claims(request) && threadIdx.x == 0u) *taken() = 0;
    }
    __device__ __forceinline__ Turns(const Request &request, const Share &share)
    {
        if (claims(request)) {
            step = gridDim.x * G::kPerWarp;
            claim(request);
            return;
        }
        // The shuffle makes the value uniform in the warp, which tells the compiler that its lanes go through the loop
        // together.
        const uint32_t team = __shfl_sync(kAllLanes, threadIdx.x / (G::kThreads * G::kPerWarp), 0);
        step = blockDim.x / (G::kThreads * G::kPerWarp) * share.num_blocks * G::kPerWarp;
        first = (share.block + share.num_blocks * team) * G::kPerWarp;
    }
    __device__ __forceinline__ void claim(const Request &request)
    {
        const uint32_t turns = (request.num_jobs + G::kPerWarp - 1u) / G::kPerWarp,
                       of_block = turns > blockIdx.x ? (turns - blockIdx.x + gridDim.x - 1u) / gridDim.x : 0u;
        uint32_t turn = 0, num_claimed = 0;
        if (lane_id() == 0u) {
            const uint32_t left = of_block - ibp_min_u32(of_block, atomicAdd(taken(), 0u));
            num_claimed = ibp_min_u32(max(left / (2u * (blockDim.x / kWarp)), kLeast), kMost);
            turn = atomicAdd(taken(), num_claimed);
        }
        end = __shfl_sync(kAllLanes, num_claimed, 0) * G::kPerWarp, turn = __shfl_sync(kAllLanes, turn, 0);
        first = (blockIdx.x + gridDim.x * ibp_min_u32(turn, of_block)) * G::kPerWarp;
    }
    // Returns the job that this lane looks up.
    __device__ __forceinline__ uint32_t of_lane() const
    {
        return lane_id() < end ? first + lane_id() / G::kPerWarp * step + lane_id() % G::kPerWarp : ~0u;
    }
    // Advances to the next turn. Returns true if its jobs must be looked up first, because all jobs that were looked up
    // are done.
    __device__ __forceinline__ bool next(const Request &request)
    {
        first += step, i += G::kPerWarp;
        if (i < end) return false;
        i = 0;
        if (claims(request)) claim(request);
        return true;
    }
};

// Does a block's share of a request: fetches, decodes and stores its rows.
//
// If rows are in pinned memory, the link to the host limits this function. Otherwise, if the function runs on few SMs,
// the rate at which instructions are issued limits it; on many SMs, either device memory or that rate does. Address
// translation would limit it if rows that are fetched at the same time lay far apart. Therefore different warps do
// consecutive jobs at the same time.
template <class Decoder>
__device__ __forceinline__ void do_share(const ibp_table &table, const Request &request, const Share &share,
                                         uint32_t group_bytes, uint8_t *out, ibp_fault *fault)
{
    using F = Fetch<Decoder>;
    using G = typename Decoder::Group;
    await_work_before();
    const uint32_t first_stage = Decoder::block_bytes(table.codebook),
                   mine = first_stage + G::uniform_in_block() * group_bytes;
    const F fetch{table, request, out, stage_at(mine, table.codebook.row_bytes), first_stage, group_bytes};
    const Decoder decoder(table.codebook, mine + row_stage_bytes(table.codebook.row_bytes));
    Turns<G>::begin(request);
    __syncthreads();

    Turns<G> turns(request, share);
    if (turns.first >= request.num_jobs) return;
    uint4 vectors[F::kVectors] = {};
    Entry entry = look_up(table, request, turns.of_lane());
    fetch.prefetch(entry, 0, vectors);
#pragma unroll 1
    while (turns.first < request.num_jobs) {
        const Row row = fetch.row_of(entry, turns.i + F::in_warp());
        const uint32_t number = turns.first + F::in_warp();
        fetch.receive(row, entry, turns.i, vectors);
        if (turns.next(request)) entry = look_up(table, request, turns.of_lane());
        fetch.prefetch(entry, turns.i, vectors);
        fetch.finish(decoder, number, row, fault);
    }
}

template <class Decoder>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    gather_items(const __grid_constant__ ibp_table table, const __grid_constant__ Request request,
                 const uint32_t group_bytes, uint8_t *out, ibp_fault *fault)
{
    do_share<Decoder>(table, request, {0, blockIdx.x, gridDim.x}, group_bytes, out, fault);
}

template <class Decoder>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    gather_parts(const __grid_constant__ Parts parts, const uint32_t group_bytes)
{
    const Share share = share_of_block(parts);
    const Part &part = parts.parts[share.part];
    do_share<Decoder>(part.table, part.request, share, group_bytes, part.out, part.fault);
}

// Plans one launch of one or several requests. group_bytes: receives the size in bytes of a group's shared memory.
template <class Decoder>
ibp_status plan(const void *kernel, const Gather *const *gathers, uint32_t num_gathers, Launch *launch,
                uint32_t *group_bytes)
{
    static_assert(is_decoder<Decoder>(), "the decoder must keep the contract of decoder.cuh");
    using G = typename Decoder::Group;
    uint32_t block_bytes = *group_bytes = 0;
    int64_t num_jobs = 0;
    for (uint32_t k = 0; k < num_gathers; k++) {
        const ibp_codebook &cb = gathers[k]->table.codebook;
        block_bytes = std::max(block_bytes, Decoder::block_bytes(cb));
        *group_bytes = std::max(*group_bytes, group_bytes_of<Decoder>(cb));
        num_jobs += gathers[k]->request.num_jobs;
    }
    return plan_groups(kernel, Decoder::kMostThreads, block_bytes, *group_bytes, G::kThreads, num_jobs,
                       gathers[0]->max_sms, launch);
}

template <class Decoder> ibp_status launch_parts(const Gather *const *gathers, uint32_t num_gathers)
{
    const auto kernel = gather_parts<Decoder>;
    uint32_t group_bytes;
    Launch launch;
    const ibp_status status =
        plan<Decoder>(reinterpret_cast<const void *>(kernel), gathers, num_gathers, &launch, &group_bytes);
    if (status != IBP_OK) return status;
    launch.blocks = std::max(launch.blocks, num_gathers);
    if (launch.blocks % 2u != 0u) launch.cluster = 1;
    Parts parts;
    share_blocks(gathers, num_gathers, launch.blocks, &parts);
    return launch_kernel(kernel, launch, gathers[0]->stream, parts, group_bytes);
}

// Launches a gather, or defers it (see Gather). If groups have several warps, rows are long, so a request has enough
// work for a launch of its own, and is launched alone. An uneven request is launched alone, too (see Turns).
template <class Decoder> ibp_status launch_gather(const Gather &gather)
{
    if constexpr (Decoder::Group::kWarps == 1) {
        if (!gather.request.uneven && gather.together != nullptr) {
            *gather.together = launch_parts<Decoder>;
            return IBP_OK;
        }
    }
    const auto kernel = gather_items<Decoder>;
    const Gather *const one = &gather;
    uint32_t group_bytes;
    Launch launch;
    const ibp_status status = plan<Decoder>(reinterpret_cast<const void *>(kernel), &one, 1, &launch, &group_bytes);
    if (status != IBP_OK) return status;
    return launch_kernel(kernel, launch, gather.stream, gather.table, gather.request, group_bytes, gather.out,
                         gather.fault);
}

// Launches with the group that suits the length of rows: a part of a warp, or a whole warp.
template <template <class> class Decoder> ibp_status launch_by_warp(const Gather &gather)
{
    using Of4 = Decoder<Group<4, 1>>;
    const uint32_t row_bytes = gather.table.codebook.row_bytes, lane_bytes = 16u * Of4::kLaneVectors;
    if constexpr (Of4::kLeastLanes == 2)
        if (row_bytes <= 2u * lane_bytes) return launch_gather<Decoder<Group<2, 1>>>(gather);
    if (row_bytes <= 4u * lane_bytes) return launch_gather<Of4>(gather);
    if (row_bytes <= 8u * lane_bytes) return launch_gather<Decoder<Group<8, 1>>>(gather);
    if (row_bytes <= 16u * lane_bytes) return launch_gather<Decoder<Group<16, 1>>>(gather);
    return launch_gather<Decoder<Group<kWarp, 1>>>(gather);
}

// Groups that a decoder may have for rows of more than 4 * kWarpRowBytes bytes, besides the group of kMostWarps warps
// that decodes rows of any length.
//
//     kEightTiles    kMostWarps warps, for rows of up to kMostWarps tiles: each warp takes one tile of a row, which is
//                    faster than the group for rows of any length
//     kWholeBlock    32 warps, for rows of more than 2 * kMostWarps tiles. A block then decodes one row at a time,
//                    which keeps the SMs busier if the gather runs on few of them
enum LongGroups : uint32_t { kEightTiles = 1, kWholeBlock = 2 };

// Launches as launch_by_warp does, but with groups of several warps if rows are longer than kWarpRowBytes. GROUPS:
// flags of LongGroups.
template <template <class> class Decoder, uint32_t GROUPS = 0> ibp_status launch_by_group(const Gather &gather)
{
    const uint32_t row_bytes = gather.table.codebook.row_bytes;
    if (row_bytes <= kWarpRowBytes) return launch_by_warp<Decoder>(gather);
    if (row_bytes <= 2u * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, 2>>>(gather);
    if (row_bytes <= 4u * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, 4>>>(gather);
    if constexpr ((GROUPS & kEightTiles) != 0u)
        if (row_bytes <= kMostWarps * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, kMostWarps>>>(gather);
    if constexpr ((GROUPS & kWholeBlock) != 0u)
        if (row_bytes > 2u * kMostWarps * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, 32>>>(gather);
    return launch_gather<Decoder<Group<kWarp, kMostWarps, kDecodesAny>>>(gather);
}

} // namespace ibp

#endif
