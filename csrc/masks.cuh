// masks.cuh - rows of scheme ibp by one warp (FORMAT.md section 5; the paper's sections 4.2 and 4.3).
#ifndef IBP_MASKS_CUH
#define IBP_MASKS_CUH

#include "warp.cuh"

namespace ibp {

// One codebook of scheme ibp, under the names of struct ibp_codebook.
struct MaskView {
    const uint32_t *mask, *bitval, *flags;
    uint32_t row_bytes, chunk_bytes, num_flags;
};

// WORDS consecutive entries of a codebook array from entry w on; zeros past the row.
template <int WORDS>
__device__ __forceinline__ void load_entries(const uint32_t *entries, uint32_t w, uint32_t num_words, uint32_t (&out)[WORDS])
{
    if (WORDS == 4 && w < num_words) {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(entries + w));
        out[0] = v.x, out[1 % WORDS] = v.y, out[2 % WORDS] = v.z, out[3 % WORDS] = v.w;
    } else {
#pragma unroll
        for (int i = 0; i < WORDS; i++) out[i] = w + i < num_words ? __ldg(entries + w + i) : 0u;
    }
}

// Rebuilds a staged row of coded_bytes whose first bit is at stage bit start_bit. Returns whether it took just those bytes.
template <int WORDS>
__device__ __forceinline__ bool decode_masks(const MaskView &cb, Stage stage, uint32_t start_bit, uint32_t coded_bytes,
                                             const Window &window)
{
    const bool vectors = (reinterpret_cast<uintptr_t>(window.dst) - window.low) % (4u * WORDS) == 0;
    const uint32_t num_words = (cb.row_bytes + 15u) / 16u * 4u;
    uint32_t position = cb.num_flags;
    for (uint32_t base = 0; base < num_words; base += kWarp * WORDS) {
        const uint32_t w = base + lane_id() * WORDS;
        uint32_t mask[WORDS], word[WORDS], flags[WORDS], keep[WORDS];
        load_entries(cb.mask, w, num_words, mask);
        load_entries(cb.bitval, w, num_words, word);
        load_entries(cb.flags, w, num_words, flags);
        const uint32_t participation = stage.bits_at(start_bit + ibp_flag_position(flags[0]));
        uint32_t num_kept = 0, total;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const uint32_t flags_before = (ibp_flag_position(flags[i]) - ibp_flag_position(flags[0])) % 32u;
            keep[i] = ibp_keep_word(participation >> flags_before, mask[i], flags[i], cb.chunk_bytes) &
                      ibp_row_bits_of_word(cb.row_bytes, w + i);
            num_kept += ibp_popcount(keep[i]);
        }
        uint32_t from = start_bit + position + exclusive_scan(num_kept, total);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = (word[i] & ~keep[i]) | ibp_deposit(stage.bits_at(from), keep[i]);
            from += ibp_popcount(keep[i]);
        }
        store_words(window, vectors, w, word);
        position += total;
    }
    return (position + 7u) / 8u == coded_bytes;
}

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
__device__ __forceinline__ LaneWords<WORDS> match_words(const MaskView &cb, const uint8_t *row, uint32_t valid, uint32_t w)
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

// Exact bits of a row as coded.
template <int WORDS>
__device__ __forceinline__ uint32_t measure_masks(const MaskView &cb, const uint8_t *row, uint32_t valid)
{
    uint32_t num_kept = 0;
    for (uint32_t base = 0; 4u * base < cb.row_bytes; base += kWarp * WORDS)
        num_kept += match_words<WORDS>(cb, row, valid, base + lane_id() * WORDS).num_kept;
    return cb.num_flags + __reduce_add_sync(kAllLanes, num_kept);
}

// Codes a row into a stage that is all zeros from start_bit on. Returns the bits that it took.
template <int WORDS>
__device__ __forceinline__ uint32_t encode_masks(const MaskView &cb, const uint8_t *row, uint32_t valid, Stage stage,
                                                 uint32_t start_bit)
{
    uint32_t position = cb.num_flags;
    for (uint32_t base = 0; 4u * base < cb.row_bytes; base += kWarp * WORDS) {
        const LaneWords<WORDS> lane = match_words<WORDS>(cb, row, valid, base + lane_id() * WORDS);
        uint32_t total, to = start_bit + position + exclusive_scan(lane.num_kept, total);
        stage.or_bits(start_bit + lane.flag_position, lane.participation);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            stage.or_bits(to, ibp_extract(lane.word[i], lane.keep[i]));
            to += ibp_popcount(lane.keep[i]);
        }
        position += total;
    }
    return position;
}

// The coder of scheme ibp as the kernels know it; 4 * WORDS bytes is the widest access that the rows' addresses allow.
template <int WORDS> struct Masks {
    MaskView cb;
    __device__ __forceinline__ explicit Masks(const ibp_codebook &codebook)
        : cb{codebook.mask, codebook.bitval, codebook.flags, codebook.row_bytes, codebook.chunk_bytes, codebook.num_flags}
    {
    }
    __device__ __forceinline__ Masks of_cluster(const ibp_codebook &codebook, uint32_t k) const
    {
        const uint64_t offset = uint64_t{k} * codebook.cluster_stride;
        Masks one(codebook);
        one.cb.mask += offset, one.cb.bitval += offset, one.cb.flags += offset;
        if (codebook.num_clusters > 1u) one.cb.num_flags = __ldg(codebook.cluster_flags + offset);
        return one;
    }
    __device__ __forceinline__ bool decode(Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        return decode_masks<WORDS>(cb, stage, start_bit, coded_bytes, window);
    }
    __device__ __forceinline__ uint32_t measure(const uint8_t *row, uint32_t valid) const { return measure_masks<WORDS>(cb, row, valid); }
    __device__ __forceinline__ uint32_t encode(const uint8_t *row, uint32_t valid, Stage stage, uint32_t start_bit) const
    {
        return encode_masks<WORDS>(cb, row, valid, stage, start_bit);
    }
};

} // namespace ibp

#endif
