// encode.cu - rows measured and coded by the GPU, a group of lanes a row (the paper's section 4.2).
#include "encode/masks.cuh"
#include "encode/pairs.cuh"

#include <algorithm>

namespace ibp {

// The cluster that codes a row in the fewest bytes, the first of equal ones; and the bytes of the row with its number.
struct Choice {
    uint32_t cluster, bytes;
};
template <class Encoder>
__device__ __forceinline__ Choice choose_cluster(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row)
{
    if (cb.num_clusters <= 1u) return {0, (encoder.measure(row) + 7u) / 8u};
    Choice best{0, ~0u};
    for (uint32_t k = 0; k < cb.num_clusters; k++) {
        const uint32_t bytes = 1u + (encoder.of_cluster(cb, k).measure(row) + 7u) / 8u;
        if (bytes < best.bytes) best = {k, bytes};
    }
    return best;
}

template <class Encoder>
__global__ void __launch_bounds__(kEncodeThreads) measure_rows(const __grid_constant__ ibp_codebook cb, const uint8_t *data,
                                                               const int64_t num_bytes, const int64_t num_rows, uint16_t *lengths)
{
    using G = typename Encoder::G;
    extern __shared__ uint4 shared[];
    constexpr uint32_t kGroups = kEncodeThreads / G::kLanes;
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    for (int64_t r = blockIdx.x * int64_t{kGroups} + threadIdx.x / G::kLanes; r < num_rows; r += int64_t{gridDim.x} * kGroups) {
        const PlainRow row{data + r * cb.row_bytes, ibp_valid_bytes(num_bytes, cb.row_bytes, r)};
        const uint32_t coded = choose_cluster(cb, encoder, row).bytes;
        if (G::lane() == 0u) lengths[r] = coded < row.valid ? static_cast<uint16_t>(coded) : uint16_t{0};
    }
}

// Puts a row as it is stored into a stage that is all zeros. Returns whether it has the bytes that it should.
template <class Encoder>
__device__ __forceinline__ bool store_row(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row,
                                          const RowPlace &place, const BitStage &stage)
{
    using G = typename Encoder::G;
    if (place.raw) {
        for (uint32_t first = kVector * G::lane(); first < row.valid; first += kVector * G::kLanes) {
            uint32_t words[4];
            row.load(first, words);
            reinterpret_cast<uint4 *>(stage.words)[first / kVector] = make_uint4(words[0], words[1], words[2], words[3]);
        }
        return true;
    }
    const bool has_clusters = cb.num_clusters > 1u;
    const uint32_t k = has_clusters ? choose_cluster(cb, encoder, row).cluster : 0u;
    if (has_clusters && G::lane() == 0u) stage.or_bits(0, k);
    return encoder.of_cluster(cb, k).encode(row, stage, has_clusters ? 8u : 0u, place.stored);
}

template <class Encoder>
__global__ void __launch_bounds__(kEncodeThreads)
    encode_rows(const __grid_constant__ ibp_table table, const uint8_t *data, uint8_t *slots, uint8_t *overflow, ibp_fault *fault)
{
    using G = typename Encoder::G;
    extern __shared__ uint4 shared[];
    constexpr uint32_t kGroups = kEncodeThreads / G::kLanes;
    const ibp_codebook &cb = table.codebook;
    const int64_t num_bytes = table.num_items * table.item_bytes, num_rows = (num_bytes + cb.row_bytes - 1) / cb.row_bytes;
    const uint32_t stage_bytes = bit_stage_bytes(cb.row_bytes), group_bytes = stage_bytes + Encoder::scratch_bytes(cb);
    uint8_t *const stages = reinterpret_cast<uint8_t *>(shared) + Encoder::table_bytes(cb);
    const BitStage stage{reinterpret_cast<uint32_t *>(stages + threadIdx.x / G::kLanes * group_bytes), stage_bytes / 4u - 1u};
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    const int64_t step = int64_t{gridDim.x} * kGroups;
    const auto row_at = [&](int64_t r) { return PlainRow{data + r * cb.row_bytes, ibp_valid_bytes(num_bytes, cb.row_bytes, r)}; };
    for (int64_t r = blockIdx.x * int64_t{kGroups} + threadIdx.x / G::kLanes; r < num_rows; r += step) {
        const PlainRow row = row_at(r);
        if (r + step < num_rows) prefetch<G>(row_at(r + step));
        const RowPlace place = place_row<G>(table, num_bytes, r);
        const uint32_t copied = max(place.slot_room, place.room ? table.slot_bytes + place.room : 0u);
        const uint32_t vectors = ibp_min_u32(copied / kVector + 2u, stage_bytes / kVector);
        for (uint32_t i = G::lane(); i < vectors; i += G::kLanes)
            reinterpret_cast<uint4 *>(stage.words)[i] = make_uint4(0, 0, 0, 0);
        G::sync();
        const bool good = place.in_bounds && store_row(cb, encoder, row, place, stage);
        G::sync();
        if (good) {
            copy_out<G>(slots + place.slot, stage, 0, place.slot_room);
            copy_out<G>(overflow + place.overflow, stage, table.slot_bytes, place.room);
        } else if (G::lane() == 0u && fault != nullptr) {
            if (atomicCAS(reinterpret_cast<unsigned long long *>(&fault->taken), 0ull, 1ull) == 0ull)
                *fault = {IBP_CORRUPT_ROW, r, r, 1};
        }
        G::sync(); // the stage is free for the next row
    }
}

// ---- launching ----

template <class Encoder> struct EncoderTag {
    using type = Encoder;
};

// Calls launcher with the tag of the codebook's encoder: as many lanes as rows of that length keep busy.
template <uint32_t LANES, typename T, class Launcher>
static ibp_status with_planes(const ibp_codebook &cb, const Launcher &launcher)
{
    if (cb.planes.listed) return launcher(EncoderTag<PlanesEncoder<T, true, LANES>>{});
    if constexpr (sizeof(T) == 2 || sizeof(T) == 4)
        if (has_pairs(cb.planes) && PairsEncoder<T, LANES>::fits_all(cb)) return launcher(EncoderTag<PairsEncoder<T, LANES>>{});
    return launcher(EncoderTag<PlanesEncoder<T, false, LANES>>{});
}
template <uint32_t LANES, class Launcher> static ibp_status with_lanes(const ibp_codebook &cb, const Launcher &launcher)
{
    if (cb.scheme != IBP_SCHEME_PLANES) return launcher(EncoderTag<MasksEncoder<LANES>>{});
    switch (cb.planes.element_bytes) {
    case 1: return with_planes<LANES, uint8_t>(cb, launcher);
    case 2: return with_planes<LANES, uint16_t>(cb, launcher);
    case 4: return with_planes<LANES, uint32_t>(cb, launcher);
    case 8: return with_planes<LANES, uint64_t>(cb, launcher);
    default: return IBP_INVALID_ARGUMENT;
    }
}
template <class Launcher> static ibp_status with_encoder(const ibp_codebook &cb, const Launcher &launcher)
{
    if (cb.row_bytes <= 1024u) return with_lanes<8>(cb, launcher);
    if (cb.row_bytes <= 4096u) return with_lanes<kWarp>(cb, launcher);
    return with_lanes<kEncodeThreads>(cb, launcher);
}

// As many blocks as the device holds at once, or as there is work for.
static ibp_status plan_blocks(const void *kernel, uint32_t shared_bytes, int64_t num_blocks, uint32_t *blocks)
{
    int device = 0, num_sms = 0, blocks_an_sm = 0;
    ibp_status status = check_cuda(cudaGetDevice(&device));
    if (status == IBP_OK) status = check_cuda(cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, device));
    if (status == IBP_OK) status = allow_shared(kernel);
    if (status == IBP_OK)
        status = check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks_an_sm, kernel, kEncodeThreads, shared_bytes));
    *blocks = static_cast<uint32_t>(std::min<int64_t>(num_blocks, int64_t{num_sms} * std::max(1, blocks_an_sm)));
    return status;
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_measure_rows(const ibp_codebook *cb, const uint8_t *data, int64_t num_bytes, uint16_t *lengths,
                                            ibp_stream stream)
{
    const int64_t num_rows = (num_bytes + cb->row_bytes - 1) / cb->row_bytes;
    if (num_rows == 0) return IBP_OK;
    return ibp::with_encoder(*cb, [&](auto tag) {
        using Encoder = typename decltype(tag)::type::Measurer;
        const auto kernel = ibp::measure_rows<Encoder>;
        const int64_t groups = ibp::kEncodeThreads / Encoder::G::kLanes;
        const uint32_t shared_bytes = Encoder::table_bytes(*cb);
        uint32_t blocks;
        const ibp_status status =
            ibp::plan_blocks(reinterpret_cast<const void *>(kernel), shared_bytes, (num_rows + groups - 1) / groups, &blocks);
        if (status != IBP_OK) return status;
        kernel<<<blocks, ibp::kEncodeThreads, shared_bytes, stream>>>(*cb, data, num_bytes, num_rows, lengths);
        return ibp::check_cuda(cudaGetLastError());
    });
}

extern "C" ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                           ibp_fault *fault, ibp_stream stream)
{
    const int64_t num_rows = ibp_num_rows(table);
    const ibp_codebook *const cb = &table->codebook;
    if (num_rows == 0) return IBP_OK;
    return ibp::with_encoder(*cb, [&](auto tag) {
        using Encoder = typename decltype(tag)::type;
        const auto kernel = ibp::encode_rows<Encoder>;
        const uint32_t groups = ibp::kEncodeThreads / Encoder::G::kLanes;
        const uint32_t shared_bytes =
            Encoder::table_bytes(*cb) + groups * (ibp::bit_stage_bytes(cb->row_bytes) + Encoder::scratch_bytes(*cb));
        uint32_t blocks;
        const ibp_status status =
            ibp::plan_blocks(reinterpret_cast<const void *>(kernel), shared_bytes, (num_rows + groups - 1) / groups, &blocks);
        if (status != IBP_OK) return status;
        kernel<<<blocks, ibp::kEncodeThreads, shared_bytes, stream>>>(*table, data, slots, overflow, fault);
        return ibp::check_cuda(cudaGetLastError());
    });
}
