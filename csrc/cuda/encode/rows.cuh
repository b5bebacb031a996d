// rows.cuh - the kernels that every encoder is instantiated with, and their launches: included by the one .cu of each
// encoder.
#ifndef IBP_ENCODE_ROWS_CUH
#define IBP_ENCODE_ROWS_CUH

#include "../launch.cuh"
#include "../kinds.h"
#include "encoder.cuh"
#include "request.h"

#include <algorithm>

namespace ibp {

// The cluster that codes a row in the fewest bytes, the first of equal ones; and the bytes of the row with its number.
struct Choice {
    uint32_t cluster, bytes;
};
template <class Encoder>
__device__ __forceinline__ Choice choose_cluster(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row)
{
    if (!ibp_has_clusters(&cb)) return {0, (encoder.measure(row) + 7u) / 8u};
    Choice best{0, ~0u};
    for (uint32_t k = 0; k < cb.num_clusters; k++) {
        const uint32_t bytes = 1u + (encoder.of_cluster(cb, k).measure(row) + 7u) / 8u;
        if (bytes < best.bytes) best = {k, bytes};
    }
    return best;
}

template <class Encoder>
__global__ void __launch_bounds__(kEncodeThreads)
    measure_rows(const __grid_constant__ ibp_codebook cb, const uint8_t *data, const int64_t num_bytes,
                 const int64_t num_rows, uint16_t *lengths)
{
    using G = typename Encoder::Group;
    extern __shared__ uint4 shared[];
    constexpr uint32_t kGroups = kEncodeThreads / G::kLanes;
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    for (int64_t r = blockIdx.x * int64_t{kGroups} + threadIdx.x / G::kLanes; r < num_rows;
         r += int64_t{gridDim.x} * kGroups) {
        const PlainRow row{data + r * cb.row_bytes, ibp_valid_bytes(num_bytes, cb.row_bytes, r)};
        const uint32_t length = is_default_row<G>(cb, row) ? IBP_DEFAULT_LENGTH(cb.row_bytes)
                                                           : ibp_length_of_coded(choose_cluster(cb, encoder, row).bytes,
                                                                                 cb.row_bytes, row.valid);
        if (G::lane() == 0u) lengths[r] = static_cast<uint16_t>(length);
    }
}

// Puts a row as it is stored into a stage that is all zeros. Returns whether it has the bytes that it should.
template <class Encoder>
__device__ __forceinline__ bool store_row(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row,
                                          const ibp_row_place &place, const BitStage &stage)
{
    using G = typename Encoder::Group;
    if (place.is_default) return is_default_row<G>(cb, row);
    if (place.raw) {
        for (uint32_t first = kVector * G::lane(); first < row.valid; first += kVector * G::kLanes) {
            uint32_t words[4];
            row.load(first, words);
            reinterpret_cast<uint4 *>(stage.words)[first / kVector] =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
        return true;
    }
    const bool numbered = ibp_has_clusters(&cb);
    const uint32_t k = numbered ? choose_cluster(cb, encoder, row).cluster : 0u;
    if (numbered && G::lane() == 0u) stage.or_bits(0, k);
    return encoder.of_cluster(cb, k).encode(row, stage, numbered ? 8u : 0u, place.in_slot + place.in_overflow);
}

template <class Encoder>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_rows(const __grid_constant__ ibp_table table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                ibp_fault *fault)
{
    using G = typename Encoder::Group;
    extern __shared__ uint4 shared[];
    constexpr uint32_t kGroups = kEncodeThreads / G::kLanes;
    const ibp_codebook &cb = table.codebook;
    const int64_t num_bytes = ibp_bytes_of_table(&table), num_rows = ibp_rows_of_bytes(num_bytes, cb.row_bytes);
    const uint32_t stage_bytes = bit_stage_bytes(cb.row_bytes), group_bytes = stage_bytes + Encoder::scratch_bytes(cb);
    uint8_t *const stages = reinterpret_cast<uint8_t *>(shared) + Encoder::table_bytes(cb);
    const BitStage stage{reinterpret_cast<uint32_t *>(stages + threadIdx.x / G::kLanes * group_bytes),
                         stage_bytes / 4u - 1u};
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    const int64_t step = int64_t{gridDim.x} * kGroups;
    const auto row_at = [&](int64_t r) {
        return PlainRow{data + r * cb.row_bytes, ibp_valid_bytes(num_bytes, cb.row_bytes, r)};
    };
    for (int64_t r = blockIdx.x * int64_t{kGroups} + threadIdx.x / G::kLanes; r < num_rows; r += step) {
        const PlainRow row = row_at(r);
        if (r + step < num_rows) prefetch<G>(row_at(r + step));
        const RowTarget target = target_of<G>(table, r);
        const uint32_t copied = max(target.slot_room, target.room ? table.slot_bytes + target.room : 0u);
        const uint32_t vectors = ibp_min_u32(copied / kVector + 2u, stage_bytes / kVector);
        for (uint32_t i = G::lane(); i < vectors; i += G::kLanes)
            reinterpret_cast<uint4 *>(stage.words)[i] = make_uint4(0, 0, 0, 0);
        G::sync();
        const bool good = target.in_bounds && store_row(cb, encoder, row, target.place, stage);
        G::sync();
        if (good) {
            copy_out<G>(slots + target.place.slot_start, stage, 0, target.slot_room);
            copy_out<G>(overflow + target.place.overflow_start, stage, table.slot_bytes, target.room);
        } else if (G::lane() == 0u && fault != nullptr) {
            record_fault(fault, IBP_CORRUPT_ROW, r, r);
        }
        G::sync(); // the stage is free for the next row
    }
}

// ---- launching ----

// As many blocks as the device holds at once, or as there is work for.
inline ibp_status plan_blocks(const void *kernel, uint32_t shared_bytes, int64_t num_blocks, uint32_t *blocks)
{
    int device = 0, num_sms = 0, blocks_an_sm = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (status == IBP_OK) status = allow_shared(kernel);
    if (status == IBP_OK)
        status = check_cuda(
            cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, kernel, kEncodeThreads, shared_bytes));
    *blocks = static_cast<uint32_t>(std::min<int64_t>(num_blocks, int64_t{num_sms} * std::max(1, blocks_an_sm)));
    return status;
}

template <class Encoder> ibp_status launch_measure(const Measure &measure)
{
    const ibp_codebook &cb = measure.codebook;
    const auto kernel = measure_rows<Encoder>;
    const int64_t groups = kEncodeThreads / Encoder::Group::kLanes,
                  num_rows = ibp_rows_of_bytes(measure.num_bytes, cb.row_bytes);
    const uint32_t shared_bytes = Encoder::table_bytes(cb);
    uint32_t blocks;
    const ibp_status status =
        plan_blocks(reinterpret_cast<const void *>(kernel), shared_bytes, (num_rows + groups - 1) / groups, &blocks);
    if (status != IBP_OK) return status;
    kernel<<<blocks, kEncodeThreads, shared_bytes, measure.stream>>>(cb, measure.data, measure.num_bytes, num_rows,
                                                                     measure.lengths);
    return check_cuda(cudaGetLastError());
}

template <class Encoder> ibp_status launch_encode(const Encode &encode)
{
    static_assert(is_encoder<Encoder>(), "the contract of encoder.cuh");
    const ibp_codebook &cb = encode.table.codebook;
    const auto kernel = encode_rows<Encoder>;
    const uint32_t groups = kEncodeThreads / Encoder::Group::kLanes;
    const uint32_t shared_bytes =
        Encoder::table_bytes(cb) + groups * (bit_stage_bytes(cb.row_bytes) + Encoder::scratch_bytes(cb));
    uint32_t blocks;
    const ibp_status status = plan_blocks(reinterpret_cast<const void *>(kernel), shared_bytes,
                                          (ibp_num_rows(&encode.table) + groups - 1) / groups, &blocks);
    if (status != IBP_OK) return status;
    kernel<<<blocks, kEncodeThreads, shared_bytes, encode.stream>>>(encode.table, encode.data, encode.slots,
                                                                    encode.overflow, encode.fault);
    return check_cuda(cudaGetLastError());
}

// As many lanes as rows of a length keep busy.
template <template <uint32_t> class Encoder> ibp_status launch_by_lanes(const Measure &measure)
{
    if (measure.codebook.row_bytes <= kLongestOfPart) return launch_measure<Encoder<kPartLanes>>(measure);
    if (measure.codebook.row_bytes <= kLongestOfWarp) return launch_measure<Encoder<kWarp>>(measure);
    return launch_measure<Encoder<kEncodeThreads>>(measure);
}
template <template <uint32_t> class Encoder> ibp_status launch_by_lanes(const Encode &encode)
{
    const uint32_t row_bytes = encode.table.codebook.row_bytes;
    if (row_bytes <= kLongestOfPart) return launch_encode<Encoder<kPartLanes>>(encode);
    if (row_bytes <= kLongestOfWarp) return launch_encode<Encoder<kWarp>>(encode);
    return launch_encode<Encoder<kEncodeThreads>>(encode);
}

} // namespace ibp

#endif
