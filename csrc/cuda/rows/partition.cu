// partition.cu - sorts ids by windows, which are runs of consecutive items of a table.
//
// 1. count_windows counts the ids in each window, and numbers the ids within each window.
// 2. scan_windows computes the position of each window's first id from the counts.
// 3. scatter_ids writes each id, and its original position, to its new position.
//
// Address translation limits a gather from a large table. If rows are fetched window by window, the GPU finds the
// translations of their addresses in its TLBs. The three kernels here are short, and latency limits them. For each id
// they read and write about twenty bytes, in the L2 cache.
#include "../../internal/ibp_gathers.h"
#include "../cuda_checks.h"
#include "../launch.cuh"

namespace ibp {

constexpr uint32_t kThreads = 256, kScanThreads = 1024;

__device__ __forceinline__ uint32_t window_of(int64_t id, int64_t num_items, uint32_t window_bits)
{
    return static_cast<uint32_t>(max(min(id, num_items - 1), int64_t{0}) >> window_bits);
}

// Counts the ids in each window. windows[k] receives the window of id k. ranks[k] receives the number of ids in this
// window that were counted before id k. Lanes of a warp whose ids are in the same window share one atomic.
template <typename Id>
__global__ void __launch_bounds__(kThreads)
    count_windows(const Id *ids, int64_t count, int64_t num_items, uint32_t window_bits, uint32_t *counts,
                  uint32_t *ranks, uint16_t *windows)
{
    const int64_t k = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    const bool is_id = k < count;
    const uint32_t window = is_id ? window_of(IBP_LOAD_ONCE(ids[k]), num_items, window_bits) : ~0u;
    const uint32_t peers = __match_any_sync(kAllLanes, window), below = peers & ((1u << lane_id()) - 1u);
    uint32_t before = 0;
    if (is_id && below == 0) before = atomicAdd(counts + window, ibp_popcount(peers));
    before = __shfl_sync(kAllLanes, before, static_cast<int>(lowest_of(peers)));
    if (!is_id) return;
    ranks[k] = before + ibp_popcount(below);
    windows[k] = static_cast<uint16_t>(window);
}

// Writes the number of ids in all windows before window w to starts[w]. Each block takes kScanThreads windows. It first
// adds up the counts of all windows before its own, and then scans its own windows.
__global__ void __launch_bounds__(kScanThreads)
    scan_windows(const uint32_t *counts, uint32_t num_windows, uint32_t *starts)
{
    const uint32_t first = blockIdx.x * kScanThreads, w = first + threadIdx.x;
    uint32_t mine = 0, before, total;
    for (uint32_t i = threadIdx.x; i < first; i += kScanThreads) mine += counts[i];
    block_scan<kScanThreads>(mine, before);
    const uint32_t in_block = block_scan<kScanThreads>(w < num_windows ? counts[w] : 0u, total);
    if (w < num_windows) starts[w] = before + in_block;
}

// Writes ids and their original positions in the order of windows. It uses the windows that count_windows has stored,
// even if the ids have changed meanwhile, so that each position of the result is written exactly once.
template <typename Id>
__global__ void __launch_bounds__(kThreads)
    scatter_ids(const Id *ids, int64_t count, const uint32_t *starts, const uint32_t *ranks, const uint16_t *windows,
                Id *sorted_ids, uint32_t *positions)
{
    const int64_t k = blockIdx.x * int64_t{kThreads} + threadIdx.x;
    if (k >= count) return;
    const uint32_t to = starts[windows[k]] + ranks[k];
    sorted_ids[to] = ids[k];
    positions[to] = static_cast<uint32_t>(k);
}

template <typename Id>
static ibp_status partition(const ibp_ids &ids, int64_t num_items, uint32_t window_bits, uint32_t *starts,
                            Id *sorted_ids, uint32_t *positions, ibp_stream stream)
{
    const auto num_windows = static_cast<uint32_t>(ibp_num_windows(num_items, window_bits));
    const auto blocks = static_cast<uint32_t>((ids.count + kThreads - 1) / kThreads);
    uint32_t *const counts = starts + num_windows, *const ranks = counts + num_windows;
    auto *const windows = reinterpret_cast<uint16_t *>(ranks + ids.count);
    const Id *const data = static_cast<const Id *>(ids.data);
    const ibp_status status = check_cuda(cudaMemsetAsync(counts, 0, sizeof(uint32_t) * num_windows, stream));
    if (status != IBP_OK) return status;
    count_windows<Id><<<blocks, kThreads, 0, stream>>>(data, ids.count, num_items, window_bits, counts, ranks, windows);
    scan_windows<<<(num_windows + kScanThreads - 1) / kScanThreads, kScanThreads, 0, stream>>>(counts, num_windows,
                                                                                               starts);
    scatter_ids<Id><<<blocks, kThreads, 0, stream>>>(data, ids.count, starts, ranks, windows, sorted_ids, positions);
    return check_cuda(cudaGetLastError());
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits,
                                             void *workspace, void *sorted_ids, uint32_t *positions, ibp_stream stream)
{
    if (!ibp::are_ids(ids) || window_bits > 62 || ids->count > UINT32_MAX) return IBP_INVALID_ARGUMENT;
    const int64_t num_windows = ibp_num_windows(num_items, window_bits);
    if (num_windows < 1 || num_windows > IBP_MAX_WINDOWS) return IBP_INVALID_ARGUMENT;
    if (ids->count == 0) return IBP_OK;
    if (workspace == nullptr || sorted_ids == nullptr || positions == nullptr) return IBP_INVALID_ARGUMENT;
    uint32_t *const words = static_cast<uint32_t *>(workspace);
    if (ids->id_bytes == 8)
        return ibp::partition(*ids, num_items, window_bits, words, static_cast<int64_t *>(sorted_ids), positions,
                              stream);
    return ibp::partition(*ids, num_items, window_bits, words, static_cast<int32_t *>(sorted_ids), positions, stream);
}
