// encode_masks.cuh - encodes rows of scheme ibp (FORMAT.md section 5; the paper's section 4.2). A group of lanes
// encodes a row, and in each step every lane takes 16 bytes.
//
//     | participation bits, num_flags of them | kept bits of word 0 | of word 1 | ... | zero bits up to a byte |
//
// Kept bits are the bits that a coded row stores: the bits outside the mask of a participating chunk, and all bits of
// any other chunk.
//
// 1. A lane loads four words and their masks and bitvals, and finds out which chunks participate and which bits are
//    kept (match).
// 2. A prefix sum over the group says where each lane's kept bits begin.
// 3. A lane ORs its participation bits into the stage, extracts the kept bits of each word, and writes them to the
//    stage one after the other.
//
// The rate at which instructions are issued limits the encoder. A warp executes about 250 instructions to encode 512
// bytes, which are one step. Most of them are for parallel bit extracts. To measure 512 bytes it executes about 80.
#ifndef IBP_ENCODE_MASKS_CUH
#define IBP_ENCODE_MASKS_CUH

#include "encoder.cuh"

namespace ibp {

template <uint32_t THREADS> struct MasksEncoder {
    using Group = EncodeGroup<THREADS>;
    using G = Group;
    static constexpr uint32_t kBlocks = 1;
    static constexpr bool kFillsStage = false;
    const uint32_t *mask, *bitval, *flags;
    uint32_t row_bytes, chunk_bytes, num_flags;

    static __host__ __device__ __forceinline__ uint32_t table_bytes(const ibp_codebook &) { return 0; }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    __device__ __forceinline__ MasksEncoder(const ibp_codebook &cb, uint32_t *)
        : mask(cb.mask), bitval(cb.bitval), flags(cb.flags), row_bytes(cb.row_bytes), chunk_bytes(cb.chunk_bytes),
          num_flags(cb.num_flags)
    {
    }
    __device__ __forceinline__ void select(const ibp_codebook &cb, uint32_t k)
    {
        const uint64_t offset = uint64_t{k} * cb.cluster_stride;
        mask += offset, bitval += offset, flags += offset;
        // The num_flags that is read from memory may have any value. It is limited to row_bytes, because no row has
        // more participation bits than bytes.
        if (cb.num_clusters > 1u) num_flags = ibp_min_u32(__ldg(cb.cluster_flags + offset), cb.row_bytes);
    }

    // What a lane knows about its four words. word: the words. keep: for each word a mask of its kept bits.
    // participation: the participation bits of the words' chunks, packed. flag_position: the position of the first of
    // these participation bits. num_kept: number of kept bits.
    struct Lane {
        uint32_t word[4], keep[4];
        uint32_t participation, flag_position, num_kept;
    };
    static __device__ __forceinline__ void load_entries(const uint32_t *entries, uint32_t first, uint32_t (&out)[4])
    {
        const uint4 v = __ldg(reinterpret_cast<const uint4 *>(entries + first / 4u));
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    }
    __device__ __forceinline__ Lane match(const PlainRow &row, uint32_t first) const
    {
        Lane lane{};
        if (first >= row_bytes) return lane;
        uint32_t invariant[4], mismatch[4], entry[4];
        row.load(first, lane.word);
        load_entries(mask, first, invariant);
        load_entries(bitval, first, mismatch);
        load_entries(flags, first, entry);
#pragma unroll
        for (int i = 0; i < 4; i++) mismatch[i] = (lane.word[i] ^ mismatch[i]) & invariant[i];
        if (chunk_bytes == 8u)
#pragma unroll
            for (int i = 0; i < 4; i += 2) mismatch[i] = mismatch[i + 1] = mismatch[i] | mismatch[i + 1];
        lane.flag_position = ibp_flag_position(entry[0]);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t participation = ibp_match_word(mismatch[i], entry[i], chunk_bytes);
            const uint32_t flags_before = (ibp_flag_position(entry[i]) - lane.flag_position) % 32u;
            if (ibp_flagged_chunks(entry[i])) lane.participation |= participation << flags_before;
            lane.keep[i] = ibp_keep_word(participation, invariant[i], entry[i], chunk_bytes) &
                           ibp_row_bits_of_word(row_bytes, first / 4u + i);
            lane.num_kept += ibp_popcount(lane.keep[i]);
        }
        return lane;
    }

    __device__ __forceinline__ uint32_t default_bytes() const { return ~0u; }
    // Returns the exact size of the coded row in bits.
    __device__ __forceinline__ uint32_t measure(const PlainRow &row) const
    {
        uint32_t kept[1] = {0};
        for (uint32_t first = kVector * G::rank(); first < row_bytes; first += kVector * THREADS)
            kept[0] += match(row, first).num_kept;
        G::sum(kept);
        return num_flags + kept[0];
    }

    // Encodes a row into a stage whose bits are zeros, beginning at bit start_bit. Returns the byte at which the coded
    // row ends.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t) const
    {
        uint32_t position = start_bit + num_flags;
        for (uint32_t base = 0; base < row_bytes; base += kVector * THREADS) {
            const Lane lane = match(row, base + kVector * G::rank());
            const uint32_t kept[1] = {lane.num_kept};
            uint32_t before[1], total[1];
            G::scan(kept, before, total);
            stage.or_bits(start_bit + lane.flag_position, lane.participation);
            BitWriter writer(stage, position + before[0]);
#pragma unroll
            for (int i = 0; i < 4; i++)
                writer.push(ibp_extract(lane.word[i], lane.keep[i]), ibp_popcount(lane.keep[i]));
            writer.finish();
            position += total[0];
        }
        return (position + 7u) / 8u;
    }
};

} // namespace ibp

#endif
