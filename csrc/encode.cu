// encode.cu - rows measured and coded by the GPU, one warp a row (the paper's section 4.2).
#include "warp.cuh"

namespace ibp {

// WORDS words of a row from word w on, zeros past its valid bytes: vector loads where the row is aligned for them.
template <int WORDS>
__device__ __forceinline__ void load_words(const uint8_t *row, uint32_t valid, uint32_t w, uint32_t (&out)[WORDS])
{
    const uint32_t first = 4u * w;
    if (aligned(row, 4u * WORDS) && first + 4u * WORDS <= valid) {
        if (WORDS == 4) {
            const uint4 v = *reinterpret_cast<const uint4 *>(row + first);
            out[0] = v.x, out[1 % WORDS] = v.y, out[2 % WORDS] = v.z, out[3 % WORDS] = v.w;
        } else {
            out[0] = *reinterpret_cast<const uint32_t *>(row + first);
        }
        return;
    }
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        out[i] = 0;
        for (uint32_t b = 0; b < 4u; b++)
            if (first + 4u * i + b < valid) out[i] |= static_cast<uint32_t>(row[first + 4u * i + b]) << (8u * b);
    }
}

// What a lane knows of its WORDS words: the words, the bits kept of them, and their participation bits with their position.
template <int WORDS> struct LaneWords {
    uint32_t word[WORDS], keep[WORDS];
    uint32_t participation, flag_position, num_kept;
};

template <int WORDS>
__device__ __forceinline__ LaneWords<WORDS> match_words(const ibp_codebook &cb, const uint8_t *row, uint32_t valid, uint32_t w)
{
    const uint32_t num_words = (cb.row_bytes + 15u) / 16u * 4u;
    LaneWords<WORDS> lane;
    uint32_t mask[WORDS], mismatch[WORDS], flags[WORDS];
    load_words(row, valid, w, lane.word);
    load_entries(cb.mask, w, num_words, mask);
    load_entries(cb.bitval, w, num_words, mismatch);
    load_entries(cb.flags, w, num_words, flags);
#pragma unroll
    for (int i = 0; i < WORDS; i++) mismatch[i] = (lane.word[i] ^ mismatch[i]) & mask[i];
    if (cb.chunk_bytes == 8u) { // a chunk is two words: of this lane, or of this lane and its neighbour
        if (WORDS == 1) {
            mismatch[0] |= __shfl_xor_sync(kAllLanes, mismatch[0], 1);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i += 2) mismatch[i] = mismatch[(i + 1) % WORDS] = mismatch[i] | mismatch[(i + 1) % WORDS];
        }
    }
    lane.participation = lane.num_kept = 0;
    lane.flag_position = ibp_flag_position(flags[0]);
#pragma unroll
    for (int i = 0; i < WORDS; i++) {
        const uint32_t participation = ibp_match_word(mismatch[i], flags[i], cb.chunk_bytes);
        const uint32_t flags_before = (ibp_flag_position(flags[i]) - lane.flag_position) % 32u;
        if (ibp_flagged_chunks(flags[i])) lane.participation |= participation << flags_before;
        lane.keep[i] = ibp_keep_word(participation, mask[i], flags[i], cb.chunk_bytes) & ibp_row_bits_of_word(cb.row_bytes, w + i);
        lane.num_kept += ibp_popcount(lane.keep[i]);
    }
    return lane;
}

// Codes a row into a stage that is all zeros. Returns the bits that it took.
template <int WORDS>
__device__ __forceinline__ uint32_t encode_row(const ibp_codebook &cb, const uint8_t *row, uint32_t valid, Stage stage)
{
    uint32_t position = cb.num_flags;
    for (uint32_t base = 0; 4u * base < cb.row_bytes; base += kWarp * WORDS) {
        const LaneWords<WORDS> lane = match_words<WORDS>(cb, row, valid, base + lane_id() * WORDS);
        uint32_t total, to = position + exclusive_scan(lane.num_kept, total);
        stage.or_bits(lane.flag_position, lane.participation);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            stage.or_bits(to, ibp_extract(lane.word[i], lane.keep[i]));
            to += ibp_popcount(lane.keep[i]);
        }
        position += total;
    }
    return position;
}

template <int WORDS>
__global__ void measure_rows(const ibp_codebook cb, const uint8_t *data, const int64_t num_bytes, const int64_t num_rows,
                             uint16_t *lengths)
{
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    for (int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; r < num_rows; r += step) {
        const uint32_t valid = ibp_valid_bytes(num_bytes, cb.row_bytes, r);
        uint32_t num_kept = 0;
        for (uint32_t base = 0; 4u * base < cb.row_bytes; base += kWarp * WORDS)
            num_kept += match_words<WORDS>(cb, data + r * cb.row_bytes, valid, base + lane_id() * WORDS).num_kept;
        const uint32_t coded = (cb.num_flags + __reduce_add_sync(kAllLanes, num_kept) + 7u) / 8u;
        if (lane_id() == 0) lengths[r] = coded < valid ? static_cast<uint16_t>(coded) : uint16_t{0};
    }
}

template <int WORDS>
__global__ void __launch_bounds__(1024)
    encode_rows(const ibp_table table, const uint8_t *data, uint8_t *slots, uint8_t *overflow, ibp_fault *fault)
{
    const ibp_codebook &cb = table.codebook;
    const int64_t num_bytes = table.num_items * table.item_bytes, num_rows = (num_bytes + cb.row_bytes - 1) / cb.row_bytes;
    const int64_t step = static_cast<int64_t>(gridDim.x) * (blockDim.x / kWarp);
    const Stage stage = warp_stage(cb.row_bytes);
    for (int64_t r = blockIdx.x * static_cast<int64_t>(blockDim.x / kWarp) + threadIdx.x / kWarp; r < num_rows; r += step) {
        const RowSpan span = locate_row(table, num_bytes, num_rows, r);
        const uint8_t *coded = data + r * cb.row_bytes;
        bool good = span.in_bounds;
        if (good && !span.raw) {
            for (uint32_t i = lane_id(); i < stage.last_word + 2u; i += kWarp) stage.words[i] = 0;
            __syncwarp();
            const uint32_t bits = encode_row<WORDS>(cb, coded, span.valid, stage);
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

template <int WORDS>
static ibp_status launch_encode(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow, ibp_fault *fault,
                                ibp_stream stream)
{
    Launch launch;
    const ibp_status status =
        plan_launch(reinterpret_cast<const void *>(encode_rows<WORDS>), table->codebook.row_bytes, ibp_num_rows(table), 0, &launch);
    if (status != IBP_OK) return status;
    encode_rows<WORDS><<<launch.blocks, launch.threads, launch.shared_bytes, stream>>>(*table, data, slots, overflow, fault);
    return check_cuda(cudaGetLastError());
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_measure_rows(const ibp_codebook *cb, const uint8_t *data, int64_t num_bytes, uint16_t *lengths,
                                            ibp_stream stream)
{
    const int64_t num_rows = (num_bytes + cb->row_bytes - 1) / cb->row_bytes;
    if (num_rows == 0) return IBP_OK;
    const int64_t warps_a_block = 8, blocks = (num_rows + warps_a_block - 1) / warps_a_block;
    const uint32_t grid = static_cast<uint32_t>(blocks < 65536 ? blocks : 65536), threads = warps_a_block * ibp::kWarp;
    if (ibp::by_16(data, cb->row_bytes))
        ibp::measure_rows<4><<<grid, threads, 0, stream>>>(*cb, data, num_bytes, num_rows, lengths);
    else
        ibp::measure_rows<1><<<grid, threads, 0, stream>>>(*cb, data, num_bytes, num_rows, lengths);
    return ibp::check_cuda(cudaGetLastError());
}

extern "C" ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                           ibp_fault *fault, ibp_stream stream)
{
    if (ibp_num_rows(table) == 0) return IBP_OK;
    return ibp::by_16(data, table->codebook.row_bytes) ? ibp::launch_encode<4>(table, data, slots, overflow, fault, stream)
                                                       : ibp::launch_encode<1>(table, data, slots, overflow, fault, stream);
}
