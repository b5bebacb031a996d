// index.cu - computes the offsets of overflow parts, which belong to the row index (FORMAT.md sections 2 and 3),
// surveys the sizes of rows, and moves overflow parts.
//
// A room is the overflow part of a row together with its padding.
//
// 1. sum_rooms: each warp takes one group of 32 rows at a time, and adds up the sizes of their rooms.
// 2. scan_rooms: one block turns the sums into bases by a prefix sum.
//
// Device memory limits the kernels: they read two bytes for each row. One block is enough for the scan, which reads and
// writes 16 bytes for each group of rows.
#include "../cuda_checks.h"
#include "../group.cuh"
#include "../launch.cuh"

namespace ibp {

constexpr uint32_t kIndexThreads = 256, kScanThreads = 1024;

// Writes the total size in bytes of the rooms of group g to bases[g]. A warp takes one group at a time.
__global__ void __launch_bounds__(kIndexThreads)
    sum_rooms(const uint16_t *lengths, const int64_t num_bytes, const int64_t num_rows, const uint32_t row_bytes,
              const uint32_t slot_bytes, unsigned long long *bases)
{
    const int64_t step = int64_t{gridDim.x} * kIndexThreads;
    for (int64_t r = blockIdx.x * int64_t{kIndexThreads} + threadIdx.x; ibp_first_of_group(r) < num_rows; r += step) {
        uint32_t room = 0;
        if (r < num_rows)
            room =
                ibp_room_of(lengths ? lengths[r] : 0u, row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r), slot_bytes);
        room = __reduce_add_sync(kAllLanes, room);
        if (lane_id() == 0) bases[ibp_group_of_row(r)] = room;
    }
}

// Replaces each sum in `bases` by the total of all preceding sums, and writes the total of all sums to *total.
__global__ void __launch_bounds__(kScanThreads)
    scan_rooms(const int64_t num_groups, unsigned long long *bases, int64_t *total)
{
    unsigned long long before = 0, total_of_block;
    for (int64_t first = 0; first < num_groups; first += kScanThreads) {
        const int64_t g = first + threadIdx.x;
        const unsigned long long below = block_scan<kScanThreads>(g < num_groups ? bases[g] : 0ull, total_of_block);
        if (g < num_groups) bases[g] = before + below;
        before += total_of_block;
    }
    if (threadIdx.x == 0) *total = static_cast<int64_t>(before);
}

// Computes the counts of ibp_survey_rows. A thread counts in a register as long as its rows need the same number of
// sectors, so that few atomics are needed.
__global__ void __launch_bounds__(kIndexThreads)
    survey_rows(const uint16_t *lengths, const int64_t num_bytes, const int64_t num_rows, const uint32_t row_bytes,
                unsigned long long *survey)
{
    __shared__ uint32_t rows[IBP_MAX_ROW_BYTES / IBP_OVERFLOW_ALIGN + 1];
    __shared__ unsigned long long bytes;
    const uint32_t num_bins = ibp_sectors_of(row_bytes) + 1u;
    for (uint32_t i = threadIdx.x; i < num_bins; i += kIndexThreads) rows[i] = 0;
    if (threadIdx.x == 0) bytes = 0;
    __syncthreads();
    const int64_t step = int64_t{gridDim.x} * kIndexThreads;
    unsigned long long stored = 0;
    uint32_t bin = 0, count = 0;
    for (int64_t r = blockIdx.x * int64_t{kIndexThreads} + threadIdx.x; r < num_rows; r += step) {
        const uint32_t own =
            ibp_stored_bytes(IBP_LOAD_ONCE(lengths[r]), row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r));
        // A corrupt length may be larger than a row.
        const uint32_t sectors = ibp_min_u32(ibp_sectors_of(own), num_bins - 1u);
        if (sectors != bin) {
            if (count != 0u) atomicAdd(&rows[bin], count);
            bin = sectors, count = 0;
        }
        stored += own;
        count++;
    }
    if (count != 0u) atomicAdd(&rows[bin], count);
    atomicAdd(&bytes, stored);
    __syncthreads();
    for (uint32_t i = threadIdx.x; i < num_bins; i += kIndexThreads)
        if (rows[i] != 0u) atomicAdd(survey + 1u + i, static_cast<unsigned long long>(rows[i]));
    if (threadIdx.x == 0) atomicAdd(survey, bytes);
}

// Copies overflow parts to the offsets that a table's index gives them. A warp takes one group of 32 rows, which share
// a base, at a time.
static __global__ void move_parts(const __grid_constant__ ibp_table table, const __grid_constant__ ibp_place from,
                                  uint8_t *overflow)
{
    const int64_t num_bytes = ibp_bytes_of_table(&table), step = int64_t{gridDim.x} * kIndexThreads;
    const uint32_t row_bytes = table.codebook.row_bytes;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    for (int64_t r = blockIdx.x * int64_t{kIndexThreads} + threadIdx.x; r - lane_id() < num_rows; r += step) {
        uint32_t room = 0;
        if (r < num_rows)
            room = ibp_room_of(table.lengths[r], row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r), table.slot_bytes);
        uint32_t with_room = __ballot_sync(kAllLanes, room != 0u);
        if (with_room == 0u) continue;
        const uint32_t sum = Group<kWarp, 1>::scan_in_warp(room);
        const uint64_t to = table.bases[ibp_base_of_row(&table, r - lane_id())] + sum - room,
                       start = room != 0u ? from.bases[r] : 0u;
        for (; with_room != 0u; with_room &= with_room - 1u) {
            const uint32_t lane = lowest_of(with_room), count = __shfl_sync(kAllLanes, room, lane);
            const uint64_t source = __shfl_sync(kAllLanes, start, lane), target = __shfl_sync(kAllLanes, to, lane);
            if (ibp_part_in_bounds(source, count, from.table.overflow_bytes) &&
                ibp_part_in_bounds(target, count, table.overflow_bytes))
                for (uint32_t i = lane_id(); i < count; i += kWarp) overflow[target + i] = from.overflow[source + i];
        }
    }
}

static Launch plan_index(int64_t num_rows) { return plan_jobs(num_rows, kIndexThreads, 512, kIndexThreads); }

} // namespace ibp

extern "C" ibp_status ibp_cuda_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                          uint32_t slot_bytes, uint64_t *bases, int64_t *overflow_bytes,
                                          ibp_stream stream)
{
    if (!ibp_are_sizes(num_bytes, row_bytes) || overflow_bytes == nullptr) return IBP_INVALID_ARGUMENT;
    if (!ibp_is_slot(slot_bytes, row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes),
                  num_groups = ibp_group_of_row(num_rows + ibp::kWarp - 1);
    if (num_rows > 0 && bases == nullptr) return IBP_INVALID_ARGUMENT;
    auto *const sums = reinterpret_cast<unsigned long long *>(bases);
    ibp_status status = IBP_OK;
    if (num_rows > 0)
        status = ibp::launch_kernel(ibp::sum_rooms, ibp::plan_index(num_rows), stream, lengths, num_bytes, num_rows,
                                    row_bytes, slot_bytes, sums);
    if (status != IBP_OK) return status;
    return ibp::launch_kernel(ibp::scan_rooms, ibp::Launch{1, ibp::kScanThreads, 0, 1}, stream, num_groups, sums,
                              overflow_bytes);
}

extern "C" ibp_status ibp_cuda_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                           uint64_t *survey, ibp_stream stream)
{
    if (!ibp_are_sizes(num_bytes, row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    if (num_rows == 0) return IBP_OK;
    if (lengths == nullptr || survey == nullptr) return IBP_INVALID_ARGUMENT;
    return ibp::launch_kernel(ibp::survey_rows, ibp::plan_index(num_rows), stream, lengths, num_bytes, num_rows,
                              row_bytes, reinterpret_cast<unsigned long long *>(survey));
}

extern "C" ibp_status ibp_cuda_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow,
                                          ibp_stream stream)
{
    if (table == nullptr || from == nullptr || !ibp_can_move_parts(table, from, overflow)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_num_rows(table);
    if (table->overflow_bytes == 0 || num_rows == 0) return IBP_OK;
    return ibp::launch_kernel(ibp::move_parts, ibp::plan_index(num_rows), stream, *table, *from, overflow);
}
