// gather.cuh - the kernel that every decoder is instantiated with, and its launch: included by the one .cu of each
// decoder.
#ifndef IBP_GATHER_CUH
#define IBP_GATHER_CUH

#include "../launch.cuh"
#include "fetch.cuh"

namespace ibp {

// Bound by the link from pinned memory, by instruction issue on few SMs, by device memory or instruction issue
// otherwise; by address translation where the rows that are fetched at the same time lie far apart. So consecutive
// jobs are done at the same time, by different warps.
template <class Decoder>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    gather_items(const __grid_constant__ ibp_table table, const __grid_constant__ Request request,
                 const uint32_t group_bytes, uint8_t *out, ibp_fault *fault)
{
    using F = Fetch<Decoder>;
    using G = typename Decoder::Group;
    const uint32_t first_stage = Decoder::block_bytes(table.codebook), mine = first_stage + G::in_block() * group_bytes;
    const F fetch{table, request, out, stage_at(mine, table.codebook.row_bytes), first_stage, group_bytes};
    const Decoder decoder(table.codebook, mine + row_stage_bytes(table.codebook.row_bytes));
    __syncthreads();

    // A warp, or a group of several, takes G::kPerWarp jobs a round, blocks in turn, so that few jobs spread over all
    // of them; its lanes look up those of as many rounds as there are lanes for.
    const uint32_t teams = blockDim.x / (G::kThreads * G::kPerWarp), team = threadIdx.x / (G::kThreads * G::kPerWarp);
    const uint32_t num_jobs = request.num_jobs, round = gridDim.x * teams * G::kPerWarp;
    const uint32_t ahead = lane_id() / G::kPerWarp * round + lane_id() % G::kPerWarp;
    uint32_t first = (blockIdx.x + gridDim.x * team) * G::kPerWarp, i = 0;
    if (first >= num_jobs) return;
    uint4 vectors[F::kVectors];
    Entry entry = look_up(table, request, first + ahead);
    fetch.prefetch(entry, 0, vectors);
#pragma unroll 1
    while (first < num_jobs) {
        const Row row = F::row_of(entry, i + F::in_warp());
        const uint32_t number = first + F::in_warp();
        fetch.receive(row, entry, i, vectors);
        first += round, i += G::kPerWarp;
        if (i == kWarp) entry = look_up(table, request, first + ahead), i = 0;
        fetch.prefetch(entry, i, vectors);
        fetch.finish(decoder, number, row, fault);
    }
}

template <class Decoder> ibp_status launch_gather(const Gather &gather)
{
    static_assert(is_decoder<Decoder>(), "the contract of decoder.cuh");
    using G = typename Decoder::Group;
    const ibp_codebook &cb = gather.table.codebook;
    const auto kernel = gather_items<Decoder>;
    const uint32_t group_bytes = (row_stage_bytes(cb.row_bytes) + Decoder::scratch_bytes(cb) + 15u) / 16u * 16u;
    Launch launch;
    const ibp_status status =
        plan_groups(reinterpret_cast<const void *>(kernel), Decoder::kMostThreads, Decoder::block_bytes(cb),
                    group_bytes, G::kThreads, gather.request.num_jobs, gather.max_sms, &launch);
    if (status != IBP_OK) return status;
    return launch_kernel(kernel, launch, gather.stream, gather.table, gather.request, group_bytes, gather.out,
                         gather.fault);
}

// The group that a row gets depends on its length: a part of a warp or a warp,
template <template <class> class Decoder> ibp_status launch_by_warp(const Gather &gather)
{
    const uint32_t row_bytes = gather.table.codebook.row_bytes;
    if (row_bytes <= 4u * kLaneBytes) return launch_gather<Decoder<Group<4, 1>>>(gather);
    if (row_bytes <= 8u * kLaneBytes) return launch_gather<Decoder<Group<8, 1>>>(gather);
    if (row_bytes <= 16u * kLaneBytes) return launch_gather<Decoder<Group<16, 1>>>(gather);
    return launch_gather<Decoder<Group<kWarp, 1>>>(gather);
}
// or several warps, where it is longer than kWarpRowBytes.
template <template <class> class Decoder> ibp_status launch_by_group(const Gather &gather)
{
    const uint32_t row_bytes = gather.table.codebook.row_bytes;
    if (row_bytes <= kWarpRowBytes) return launch_by_warp<Decoder>(gather);
    if (row_bytes <= 2u * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, 2>>>(gather);
    if (row_bytes <= 4u * kWarpRowBytes) return launch_gather<Decoder<Group<kWarp, 4>>>(gather);
    return launch_gather<Decoder<Group<kWarp, kMostWarps, true>>>(gather);
}

} // namespace ibp

#endif
