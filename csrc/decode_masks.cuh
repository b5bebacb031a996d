// decode_masks.cuh - rows of scheme ibp (FORMAT.md section 5; the paper's section 4.3).
#ifndef IBP_DECODE_MASKS_CUH
#define IBP_DECODE_MASKS_CUH

#include "group.cuh"

namespace ibp {

// A lane takes kSteps * WORDS words a tile; one scan of the bits that its words keep gives their places, for all steps side by side.
template <int WORDS, class G> struct MasksDecoder : NoBlockMemory {
    using Group = G;
    static constexpr uint32_t kMostThreads = 768, kVectors = 4;
    static constexpr uint32_t kSteps = 2, kStepWords = G::kLanes * WORDS, kTileWords = kSteps * kStepWords;

    const ibp_codebook &cb;
    const uint32_t exchanged; // shared word

    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &)
    {
        return G::kWarps > 1 ? 4u * G::kWarps : 0u;
    }

    __device__ __forceinline__ MasksDecoder(const ibp_codebook &codebook, uint32_t scratch) : cb(codebook), exchanged(scratch / 4u)
    {
    }

    // One codebook, under the names of struct ibp_codebook.
    struct Book {
        const uint32_t *mask, *bitval, *flags;
        uint32_t num_flags;
    };
    __device__ __forceinline__ Book book_of(uint32_t cluster) const
    {
        const uint64_t offset = uint64_t{cluster} * cb.cluster_stride;
        return {cb.mask + offset, cb.bitval + offset, cb.flags + offset,
                cb.num_clusters > 1u ? __ldg(cb.cluster_flags + offset) : cb.num_flags};
    }

    // WORDS consecutive entries of a codebook array from entry w on; the last ones past the row.
    __device__ __forceinline__ void load_entries(const uint32_t *entries, uint32_t w, uint32_t (&out)[WORDS]) const
    {
        const uint32_t *const from = entries + ibp_min_u32(w, (cb.row_bytes + 15u) / 16u * 4u - WORDS);
        if (WORDS == 4) {
            const uint4 v = __ldg(reinterpret_cast<const uint4 *>(from));
            out[0] = v.x, out[1 % WORDS] = v.y, out[2 % WORDS] = v.z, out[3 % WORDS] = v.w;
        } else {
            out[0] = __ldg(from);
        }
    }

    // Which bits of a lane's words are kept, and how many of them are in the row.
    struct Kept {
        uint32_t keep[WORDS], flags[WORDS], count;
    };
    template <uint32_t CHUNK_BYTES>
    __device__ __forceinline__ Kept kept_bits(const Book &book, Stage stage, uint32_t start_bit, uint32_t w) const
    {
        Kept kept;
        uint32_t mask[WORDS];
        load_entries(book.mask, w, mask);
        load_entries(book.flags, w, kept.flags);
        const uint32_t position = ibp_flag_position(kept.flags[0]), bits = stage.bits_at(start_bit + position);
        const uint32_t participation = __funnelshift_l(bits, bits, position); // bit i: that of the position that is i modulo 32
        kept.count = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            kept.keep[i] =
                ibp_keep_word(__funnelshift_r(participation, participation, kept.flags[i]), mask[i], kept.flags[i], CHUNK_BYTES);
            kept.count += ibp_popcount(kept.keep[i]);
        }
        if (4u * (w + WORDS) > cb.row_bytes) {
            kept.count = 0;
#pragma unroll
            for (int i = 0; i < WORDS; i++) kept.count += ibp_popcount(kept.keep[i] & ibp_row_bits_of_word(cb.row_bytes, w + i));
        }
        return kept;
    }

    // A lane's words, whose kept bits are staged from bit `from` on.
    __device__ __forceinline__ void rebuild(const Book &book, Stage stage, uint32_t from, uint32_t w, const Kept &kept,
                                            uint32_t (&word)[WORDS]) const
    {
        uint32_t staged[WORDS + 1], bitval[WORDS], many = 0;
        load_entries(book.bitval, w, bitval);
        const uint32_t first = ibp_min_u32(from / 32u, stage.last_word + 1u - WORDS); // a corrupt row asks for more
#pragma unroll
        for (int i = 0; i <= WORDS; i++) staged[i] = shared_word(first + i);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = __funnelshift_r(staged[i], staged[i + 1], from);
            many |= kept.flags[i];
        }
        // word[i] and those after it hold the bits from the kept ones of word i on
#pragma unroll
        for (int i = 0; i + 1 < WORDS; i++)
#pragma unroll
            for (int k = WORDS - 1; k > i; k--) word[k] = __funnelshift_rc(word[k - 1], word[k], ibp_popcount(kept.keep[i]));
        if (many & IBP_FLAG_MANY_GAPS) {
            uint32_t gaps[WORDS], left;
#pragma unroll
            for (int i = 0; i < WORDS; i++) gaps[i] = ~kept.keep[i];
            do {
                left = 0;
#pragma unroll
                for (int i = 0; i < WORDS; i++) {
                    word[i] = ibp_insert_lowest_gap(word[i], &gaps[i]);
                    left |= gaps[i];
                }
            } while (left != 0u);
        } else {
#pragma unroll
            for (int i = 0; i < WORDS; i++) word[i] = ibp_insert_two_gaps(word[i], ~kept.keep[i], kept.flags[i]);
        }
#pragma unroll
        for (int i = 0; i < WORDS; i++) word[i] |= bitval[i] & ~kept.keep[i];
    }

    template <uint32_t CHUNK_BYTES>
    __device__ __forceinline__ bool decode_chunks(uint32_t cluster, bool active, Stage stage, uint32_t start_bit,
                                                  uint32_t coded_bytes, const Window &window) const
    {
        const Book book = book_of(cluster);
        const bool units = window.is_units(cb.row_bytes, 4 * WORDS);
        const uint32_t num_words = (cb.row_bytes + 3u) / 4u, tiles = (num_words + kTileWords - 1u) / kTileWords;
        const uint32_t per_warp = (tiles + G::kWarps - 1u) / G::kWarps, first = G::warp() * per_warp;
        uint32_t position = book.num_flags, total = 0;
        if (G::kWarps > 1) { // where the warp's bits begin
            uint32_t count = 0;
            for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++)
#pragma unroll
                for (uint32_t s = 0; s < kSteps; s++)
                    count +=
                        kept_bits<CHUNK_BYTES>(book, stage, start_bit, t * kTileWords + s * kStepWords + G::lane() * WORDS).count;
            position += G::exchange(exchanged, G::sum(count), total);
            total += book.num_flags;
            if ((total + 7u) / 8u != coded_bytes) return !active;
        }
        for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++) {
            Kept kept[kSteps];
            uint32_t counts = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                kept[s] = kept_bits<CHUNK_BYTES>(book, stage, start_bit, t * kTileWords + s * kStepWords + G::lane() * WORDS);
                counts += kept[s].count << 16u * s;
            }
            const uint32_t sums = G::inclusive_scan(counts), totals = G::last_lane(sums), before = sums - counts;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t w = t * kTileWords + s * kStepWords + G::lane() * WORDS;
                uint32_t word[WORDS];
                rebuild(book, stage, start_bit + position + (before >> 16u * s & 0xffffu), w, kept[s], word);
                if (active && 4u * w < cb.row_bytes) store_words(window, units, w, word);
                position += totals >> 16u * s & 0xffffu;
            }
        }
        return !active || G::kWarps > 1 || (position + 7u) / 8u == coded_bytes;
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit, uint32_t coded_bytes,
                                           const Window &window) const
    {
        switch (cb.chunk_bytes) {
        case 1: return decode_chunks<1>(cluster, active, stage, start_bit, coded_bytes, window);
        case 2: return decode_chunks<2>(cluster, active, stage, start_bit, coded_bytes, window);
        default: return decode_chunks<4>(cluster, active, stage, start_bit, coded_bytes, window); // a participation bit a word
        }
    }
};

} // namespace ibp

#endif
