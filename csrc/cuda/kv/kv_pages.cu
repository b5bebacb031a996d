// kv_pages.cu - plans transfers of pages of a KV-cache, and notes which blocks are stored (ibp_pages.h). Both kernels
// do so little work that a launch takes most of their time.
#include "../../core/kv_pages.h"
#include "../cuda_checks.h"
#include "../launch.cuh"

namespace ibp {

constexpr uint32_t kPageThreads = 256;
constexpr int64_t kMostPageBlocks = 1 << 16;

__global__ void __launch_bounds__(kPageThreads) plan_pages(const __grid_constant__ ibp_page_transfer transfer,
                                                           const uint8_t *stored, int64_t *ids, uint64_t *addresses)
{
    const int64_t count = ibp_num_transfer_ids(&transfer), step = int64_t{gridDim.x} * kPageThreads;
    for (int64_t i = int64_t{blockIdx.x} * kPageThreads + threadIdx.x; i < count; i += step)
        ibp_plan_id(&transfer, stored, i, ids, addresses);
}

// Records for each block in the list `ids` whether all rows of the block are stored. A warp takes one block at a time.
__global__ void __launch_bounds__(kPageThreads)
    note_pages(const int64_t *ids, const int64_t num_blocks, const uint32_t ids_per_block, const uint16_t *lengths,
               const uint16_t *rooms, const int64_t num_rows, uint8_t *stored, uint8_t *seen)
{
    const int64_t step = int64_t{gridDim.x} * (kPageThreads / kWarp);
    for (int64_t b = int64_t{blockIdx.x} * (kPageThreads / kWarp) + threadIdx.x / kWarp; b < num_blocks; b += step) {
        const int64_t *const rows = ids + b * ids_per_block;
        const int64_t first = IBP_LOAD_ONCE(rows[0]);
        if (first < 0 || first >= num_rows) continue;
        bool lost = false;
        for (uint32_t r = lane_id(); r < ids_per_block; r += kWarp)
            lost = lost || ibp_is_lost_row(lengths, rooms, num_rows, IBP_LOAD_ONCE(rows[r]));
        lost = __any_sync(kAllLanes, lost);
        if (lane_id() == 0) stored[first / ids_per_block] = seen[first / ids_per_block] = !lost;
    }
}

static Launch plan_threads(int64_t num_threads)
{
    return plan_jobs(num_threads, kPageThreads, kMostPageBlocks, kPageThreads);
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                          uint64_t *addresses, ibp_stream stream)
{
    if (transfer == nullptr || !ibp_is_page_transfer(transfer)) return IBP_INVALID_ARGUMENT;
    const int64_t count = ibp_num_transfer_ids(transfer);
    if (count == 0) return IBP_OK;
    if (ids == nullptr || addresses == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::plan_pages, ibp::plan_threads(count), stream, *transfer, stored, ids, addresses);
}

extern "C" ibp_status ibp_cuda_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                                          const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows,
                                          uint8_t *stored, uint8_t *seen, ibp_stream stream)
{
    if (num_blocks < 0 || num_rows < 0 || ids_per_block == 0 || num_rows % ids_per_block != 0)
        return IBP_INVALID_ARGUMENT;
    if (num_blocks == 0 || num_rows == 0) return IBP_OK;
    if (ids == nullptr || lengths == nullptr || stored == nullptr || seen == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::note_pages, ibp::plan_threads(num_blocks * ibp::kWarp), stream, ids, num_blocks,
                              ids_per_block, lengths, rooms, num_rows, stored, seen);
}
