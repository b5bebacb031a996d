// decode_masks.cuh - rows of scheme ibp (FORMAT.md section 5; the paper's section 4.3).
#ifndef IBP_DECODE_MASKS_CUH
#define IBP_DECODE_MASKS_CUH

#include "group.cuh"

namespace ibp {

// A lane takes kSteps * WORDS words a tile; one scan of the bits that its words keep gives their places, for all steps side by side.
template <int WORDS, class G> struct MasksDecoder {
    using Group = G;
    static constexpr uint32_t kMostThreads = 512, kVectors = 4;
    static constexpr uint32_t kSteps = 2, kStepWords = G::kLanes * WORDS, kTileWords = kSteps * kStepWords;

    const ibp_codebook &cb;
    const uint32_t exchanged; // shared word

    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return G::kWarps > 1 ? 4u * G::kWarps : 0u; }

    __device__ __forceinline__ MasksDecoder(const ibp_codebook &codebook, uint32_t scratch) : cb(codebook), exchanged(scratch / 4u) {}

    // One codebook, under the names of struct ibp_codebook.
    struct Book {
        const uint32_t *mask, *bitval, *flags;
        uint32_t num_flags;
    };
    __device__ __forceinline__ Book book_of(uint32_t cluster) const
    {
        const uint64_t offset = uint64_t{cluster} * cb.cluster_stride;
        return {cb.mask + offset, cb.bitval + offset, cb.flags + offset, cb.num_clusters > 1u ? __ldg(cb.cluster_flags + offset) : cb.num_flags};
    }

    // WORDS consecutive entries of a codebook array from entry w on; zeros past the row.
    __device__ __forceinline__ void load_entries(const uint32_t *entries, uint32_t w, uint32_t (&out)[WORDS]) const
    {
        const uint32_t num_words = (cb.row_bytes + 15u) / 16u * 4u;
        if (WORDS == 4) {
            const uint4 v = w < num_words ? __ldg(reinterpret_cast<const uint4 *>(entries + w)) : make_uint4(0, 0, 0, 0);
            out[0] = v.x, out[1 % WORDS] = v.y, out[2 % WORDS] = v.z, out[3 % WORDS] = v.w;
        } else {
            out[0] = w < num_words ? __ldg(entries + w) : 0u;
        }
    }

    // Which bits of a lane's words are kept, and how many.
    __device__ __forceinline__ uint32_t kept_bits(const Book &book, Stage stage, uint32_t start_bit, uint32_t w, uint32_t (&keep)[WORDS]) const
    {
        uint32_t mask[WORDS], flags[WORDS], count = 0;
        load_entries(book.mask, w, mask);
        load_entries(book.flags, w, flags);
        const uint32_t participation = stage.bits_at(start_bit + ibp_flag_position(flags[0]));
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            const uint32_t flags_before = (ibp_flag_position(flags[i]) - ibp_flag_position(flags[0])) % 32u;
            keep[i] = ibp_keep_word(participation >> flags_before, mask[i], flags[i], cb.chunk_bytes);
            if (4u * (w + i) + 4u > cb.row_bytes) keep[i] &= ibp_row_bits_of_word(cb.row_bytes, w + i);
            count += ibp_popcount(keep[i]);
        }
        return count;
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        const Book book = book_of(cluster);
        const bool units = window.is_units(cb.row_bytes, 4 * WORDS);
        const uint32_t num_words = (cb.row_bytes + 3u) / 4u, tiles = (num_words + kTileWords - 1u) / kTileWords;
        const uint32_t per_warp = (tiles + G::kWarps - 1u) / G::kWarps, first = G::warp() * per_warp;
        uint32_t position = book.num_flags, total = 0;
        if (G::kWarps > 1) { // where the warp's bits begin
            uint32_t count = 0, keep[WORDS];
            for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++)
                for (uint32_t s = 0; s < kSteps; s++) count += kept_bits(book, stage, start_bit, t * kTileWords + s * kStepWords + G::lane() * WORDS, keep);
            position += G::exchange(exchanged, G::sum(count), total);
            total += book.num_flags;
            if ((total + 7u) / 8u != coded_bytes) return !active;
        }
        for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++) {
            uint32_t keep[kSteps][WORDS], counts = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++)
                counts += kept_bits(book, stage, start_bit, t * kTileWords + s * kStepWords + G::lane() * WORDS, keep[s]) << 16u * s;
            const uint32_t sums = G::inclusive_scan(counts), totals = G::last_lane(sums), before = sums - counts;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t w = t * kTileWords + s * kStepWords + G::lane() * WORDS;
                uint32_t word[WORDS], from = start_bit + position + (before >> 16u * s & 0xffffu);
                load_entries(book.bitval, w, word);
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    word[i] = (word[i] & ~keep[s][i]) | ibp_deposit(stage.bits_at(from), keep[s][i]);
                    from += ibp_popcount(keep[s][i]);
                }
                if (active && 4u * w < cb.row_bytes) store_words(window, units, w, word);
                position += totals >> 16u * s & 0xffffu;
            }
        }
        return !active || G::kWarps > 1 || (position + 7u) / 8u == coded_bytes;
    }
};

} // namespace ibp

#endif
