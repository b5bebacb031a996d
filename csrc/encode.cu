// encode.cu - rows measured and coded by the GPU, one warp a row (the paper's section 4.2).
#include "codecs.cuh"

namespace ibp {

// The cluster that codes a row in the fewest bits, the first of equal ones; and the bits of the row with its number.
struct Choice {
    uint32_t cluster, bits;
};
template <class Codec>
__device__ __forceinline__ Choice choose_cluster(const ibp_codebook &cb, const Codec &codec, const uint8_t *row, uint32_t valid)
{
    const bool several = cb.num_clusters > 1u;
    Choice best{0, ~0u};
    for (uint32_t k = 0; k == 0 || k < cb.num_clusters; k++) {
        const uint32_t bits = (codec.of_cluster(cb, k).measure(row, valid) + 7u) / 8u * 8u + (several ? 8u : 0u);
        if (bits < best.bits) best = {k, bits};
    }
    return best;
}

// Codes a row into a stage that is all zeros. Returns the bits that it took.
template <class Codec>
__device__ __forceinline__ uint32_t encode_row(const ibp_codebook &cb, const Codec &codec, const uint8_t *row, uint32_t valid, Stage stage)
{
    uint32_t k = 0, skipped = 0;
    if (cb.num_clusters > 1u) {
        k = choose_cluster(cb, codec, row, valid).cluster;
        skipped = 8;
        if (lane_id() == 0) stage.or_bits(0, k);
    }
    return skipped + codec.of_cluster(cb, k).encode(row, valid, stage, skipped);
}

template <class Codec>
__global__ void measure_rows(const ibp_codebook cb, const uint8_t *data, const int64_t num_bytes, const int64_t num_rows,
                             uint16_t *lengths)
{
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    const Codec codec(cb);
    for (int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; r < num_rows; r += step) {
        const uint32_t valid = ibp_valid_bytes(num_bytes, cb.row_bytes, r);
        const uint32_t coded = (choose_cluster(cb, codec, data + r * cb.row_bytes, valid).bits + 7u) / 8u;
        if (lane_id() == 0) lengths[r] = coded < valid ? static_cast<uint16_t>(coded) : uint16_t{0};
    }
}

template <class Codec>
__global__ void __launch_bounds__(1024, 1)
    encode_rows(const ibp_table table, const uint8_t *data, uint8_t *slots, uint8_t *overflow, ibp_fault *fault)
{
    const ibp_codebook &cb = table.codebook;
    const int64_t num_bytes = table.num_items * table.item_bytes, num_rows = (num_bytes + cb.row_bytes - 1) / cb.row_bytes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    const Stage stage = warp_stage(cb);
    const Codec codec(cb);
    for (int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; r < num_rows; r += step) {
        const RowSpan span = locate_row(table, num_bytes, num_rows, r);
        const uint8_t *coded = data + r * cb.row_bytes;
        bool good = span.in_bounds;
        if (good && !span.raw) {
            for (uint32_t i = lane_id(); i < stage.last_word + 2u; i += kWarp) stage.words[i] = 0;
            __syncwarp();
            const uint32_t bits = encode_row(cb, codec, coded, span.valid, stage);
            good = (bits + 7u) / 8u == span.in_slot + span.in_overflow;
            coded = stage.bytes();
            __syncwarp();
        }
        if (good) {
            copy_bytes(slots + (span.slot - table.slots), coded, span.in_slot);
            copy_bytes(overflow + (span.overflow - table.overflow), coded + span.in_slot, span.in_overflow);
        } else {
            note_fault(fault, IBP_CORRUPT_ROW, r, r);
        }
        __syncwarp(); // the stage is free for the next row
    }
}

static bool by_16(const uint8_t *data, uint32_t row_bytes)
{
    return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0;
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_measure_rows(const ibp_codebook *cb, const uint8_t *data, int64_t num_bytes, uint16_t *lengths,
                                            ibp_stream stream)
{
    const int64_t num_rows = (num_bytes + cb->row_bytes - 1) / cb->row_bytes;
    if (num_rows == 0) return IBP_OK;
    const int64_t warps_a_block = 8, blocks = (num_rows + warps_a_block - 1) / warps_a_block;
    const uint32_t grid = static_cast<uint32_t>(blocks < 65536 ? blocks : 65536), threads = warps_a_block * ibp::kWarp;
    return ibp::with_codec(*cb, ibp::by_16(data, cb->row_bytes), [&](auto codec) {
        ibp::measure_rows<typename decltype(codec)::type><<<grid, threads, 0, stream>>>(*cb, data, num_bytes, num_rows, lengths);
        return ibp::check_cuda(cudaGetLastError());
    });
}

extern "C" ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                           ibp_fault *fault, ibp_stream stream)
{
    const int64_t num_rows = ibp_num_rows(table);
    if (num_rows == 0) return IBP_OK;
    return ibp::with_codec(table->codebook, ibp::by_16(data, table->codebook.row_bytes), [&](auto codec) {
        const auto kernel = ibp::encode_rows<typename decltype(codec)::type>;
        ibp::Launch launch;
        const ibp_status status = ibp::plan_launch(reinterpret_cast<const void *>(kernel), table->codebook, num_rows, 0, &launch);
        if (status != IBP_OK) return status;
        kernel<<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(*table, data, slots, overflow, fault);
        return ibp::check_cuda(cudaGetLastError());
    });
}
