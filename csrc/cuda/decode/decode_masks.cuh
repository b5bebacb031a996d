// decode_masks.cuh - decodes rows of scheme ibp (FORMAT.md section 5; the paper's section 4.3).
//
// A coded row in shared memory:
//
//     | participation bits, num_flags of them | kept bits of word 0 | of word 1 | ... | zero bits up to a byte |
//
// Kept bits are the bits that a coded row stores: the bits outside the mask of a participating chunk, and all bits of
// any other chunk.
//
// A group does the following for each tile. A tile has kSteps * WORDS words for each lane.
//
// 1. A lane reads the masks of its words and the participation bits of their chunks. Together these say which bits of
//    each word are kept (kept_bits).
// 2. A prefix sum over the group, of packed counts for all steps, says where each lane's kept bits begin.
// 3. A lane loads the kept bits, moves them to their positions in each word, and fills in the invariant bits (rebuild).
// 4. The words are stored in the output.
//
// If several warps decode a row, each of them has a share of the tiles, and first counts the kept bits of its share.
#ifndef IBP_DECODE_MASKS_CUH
#define IBP_DECODE_MASKS_CUH

#include "decoder.cuh"

namespace ibp {

// A decoder of rows as described above. MOVES: a word's kept bits are moved in five steps, by 16, 8, 4, 2 and 1 bits;
// each step moves some of these bits (Warren, Hacker's Delight, section 7-5). The block computes once, for every word,
// which bits each step moves. Without MOVES, gaps (format.h) are inserted into a word one after the other.
template <int WORDS, bool MOVES, class G> struct MasksDecoder : FourLanes {
    static_assert(!MOVES || WORDS == 4, "moves are read as vectors of four words");
    using Group = G;
    static constexpr uint32_t kMostThreads = 768, kVectors = 4;
    static constexpr uint32_t kSteps = 2, kStepWords = G::kLanes * WORDS, kTileWords = kSteps * kStepWords;

    // kMostTable: largest size in bytes of a block's table of moves.
    static constexpr uint32_t kMoves = 5, kMostTable = 24u << 10;

    const ibp_codebook &cb;
    const uint32_t exchanged; // index of the first shared word through which the group's warps exchange counts

    // Returns the number of words in each array of a codebook.
    static __host__ __device__ __forceinline__ uint32_t entries_of(const ibp_codebook &cb)
    {
        return (cb.row_bytes + 15u) / 16u * 4u;
    }
    // Returns whether moves can be used. No chunk may be shorter than a word, so that every word keeps either all its
    // bits or the bits outside its mask. There must be only one cluster, and its table of moves must have at most
    // kMostTable bytes.
    static __host__ __device__ __forceinline__ bool has_moves(const ibp_codebook &cb)
    {
        return cb.chunk_bytes >= 4u && cb.num_clusters <= 1u && 4u * kMoves * entries_of(cb) <= kMostTable;
    }
    // Returns the size in bytes of the block's table of moves. For each step and word the table has a mask of the
    // positions to which the step moves bits.
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &cb)
    {
        return MOVES ? 4u * kMoves * entries_of(cb) : 0u;
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &)
    {
        return G::kWarps > 1 ? 4u * G::kWarps : 0u;
    }

    __device__ __forceinline__ MasksDecoder(const ibp_codebook &codebook, uint32_t scratch)
        : cb(codebook), exchanged(scratch / 4u)
    {
        if constexpr (MOVES) find_moves();
    }
    __device__ __forceinline__ void find_moves() const
    {
        for (uint32_t w = threadIdx.x; w < entries_of(cb); w += blockDim.x) {
            uint32_t keep = ~__ldg(cb.mask + w), removed = ~keep << 1;
#pragma unroll
            for (uint32_t i = 0; i < kMoves; i++) {
                // A bit of `odd` is set if an odd number of the bits of `removed` lie at or below it.
                uint32_t odd = removed;
#pragma unroll
                for (uint32_t step = 1; step < 32u; step *= 2) odd ^= odd << step;
                const uint32_t moved = odd & keep;
                shared_word(i * entries_of(cb) + w) = moved;
                keep = (keep ^ moved) | moved >> (1u << i);
                removed &= ~odd;
            }
        }
    }

    // The arrays of one cluster's codebook, named as in struct ibp_codebook.
    struct Book {
        const uint32_t *mask, *bitval, *flags;
        uint32_t num_flags;
    };
    // Returns the codebook of a cluster. The num_flags that is read from memory may have any value. It is limited to
    // row_bytes, because no row has more participation bits than bytes.
    __device__ __forceinline__ Book book_of(uint32_t cluster) const
    {
        const uint64_t offset = uint64_t{cluster} * cb.cluster_stride;
        return {cb.mask + offset, cb.bitval + offset, cb.flags + offset,
                cb.num_clusters > 1u ? ibp_min_u32(__ldg(cb.cluster_flags + offset), cb.row_bytes) : cb.num_flags};
    }

    // Loads WORDS consecutive entries of a codebook array, beginning with entry w. If w lies past the row, loads the
    // last WORDS entries of the array.
    __device__ __forceinline__ void load_entries(const uint32_t *entries, uint32_t w, uint32_t (&out)[WORDS]) const
    {
        const uint32_t *const from = entries + ibp_min_u32(w, entries_of(cb) - WORDS);
        if (WORDS == 4) {
            const uint4 v = __ldg(reinterpret_cast<const uint4 *>(from));
            out[0] = v.x, out[1 % WORDS] = v.y, out[2 % WORDS] = v.z, out[3 % WORDS] = v.w;
        } else {
            out[0] = __ldg(from);
        }
    }

    // The kept bits of a lane's words. keep: for each word a mask of its kept bits. flags: for each word its entry in
    // the codebook's array `flags`. count: number of kept bits that lie in the row.
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
        // Bit i is the participation bit whose position modulo 32 is i.
        const uint32_t participation = __funnelshift_l(bits, bits, position);
        kept.count = 0;
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            kept.keep[i] = ibp_keep_word(__funnelshift_r(participation, participation, kept.flags[i]), mask[i],
                                         kept.flags[i], CHUNK_BYTES);
            kept.count += ibp_popcount(kept.keep[i]);
        }
        if (4u * (w + WORDS) > cb.row_bytes) {
            kept.count = 0;
#pragma unroll
            for (int i = 0; i < WORDS; i++)
                kept.count += ibp_popcount(kept.keep[i] & ibp_row_bits_of_word(cb.row_bytes, w + i));
        }
        return kept;
    }

    // Moves the kept bits of a lane's words to their positions, and fills in the invariant bits. word: at first, the
    // kept bits of each word, packed from bit 0.
    __device__ __forceinline__ void move(const Book &book, uint32_t w, const Kept &kept, uint32_t (&word)[WORDS]) const
    {
        const uint32_t first = ibp_min_u32(w, entries_of(cb) - WORDS);
        uint32_t moved[WORDS], bitval[WORDS];
#pragma unroll
        for (int i = 0; i < WORDS; i++) moved[i] = word[i];
#pragma unroll
        for (uint32_t step = kMoves; step-- > 0;) {
            const uint4 to = *reinterpret_cast<const uint4 *>(&shared_word(step * entries_of(cb) + first));
            const uint32_t masks[4] = {to.x, to.y, to.z, to.w};
#pragma unroll
            for (int i = 0; i < WORDS; i++) moved[i] = select_bits(masks[i], moved[i] << (1u << step), moved[i]);
        }
        load_entries(book.bitval, w, bitval);
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            word[i] = kept.keep[i] == ~0u ? word[i] : select_bits(kept.keep[i], moved[i], bitval[i]);
    }

    // Rebuilds a lane's words, whose kept bits begin at bit `from` of shared memory.
    __device__ __forceinline__ void rebuild(const Book &book, Stage stage, uint32_t from, uint32_t w, const Kept &kept,
                                            uint32_t (&word)[WORDS]) const
    {
        uint32_t staged[WORDS + 1], many = 0;
        // If the row is corrupt, `from` may lie past the stage.
        const uint32_t first = ibp_min_u32(from / 32u, stage.last_word + 1u - WORDS);
#pragma unroll
        for (int i = 0; i <= WORDS; i++) staged[i] = shared_word(first + i);
#pragma unroll
        for (int i = 0; i < WORDS; i++) {
            word[i] = __funnelshift_r(staged[i], staged[i + 1], from);
            many |= kept.flags[i];
        }
        // Before iteration i, word[i] and the words after it hold consecutive bits of the row, beginning with the first
        // kept bit of word i.
#pragma unroll
        for (int i = 0; i + 1 < WORDS; i++)
#pragma unroll
            for (int k = WORDS - 1; k > i; k--)
                word[k] = __funnelshift_rc(word[k - 1], word[k], ibp_popcount(kept.keep[i]));
        if constexpr (MOVES) {
            move(book, w, kept, word);
            return;
        }
        uint32_t bitval[WORDS];
        load_entries(book.bitval, w, bitval);
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
        if (G::kWarps > 1) { // finds where the warp's kept bits begin
            uint32_t count = 0;
            for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++)
#pragma unroll
                for (uint32_t s = 0; s < kSteps; s++)
                    count += kept_bits<CHUNK_BYTES>(book, stage, start_bit,
                                                    t * kTileWords + s * kStepWords + G::lane() * WORDS)
                                 .count;
            position += G::exchange(exchanged, G::sum_in_warp(count), total);
            total += book.num_flags;
            if ((total + 7u) / 8u != coded_bytes) return !active;
        }
        for (uint32_t t = first; t < ibp_min_u32(first + per_warp, tiles); t++) {
            Kept kept[kSteps];
            uint32_t counts = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                kept[s] =
                    kept_bits<CHUNK_BYTES>(book, stage, start_bit, t * kTileWords + s * kStepWords + G::lane() * WORDS);
                counts += kept[s].count << 16u * s;
            }
            const uint32_t sums = G::scan_in_warp(counts), totals = G::last_lane(sums), before = sums - counts;
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

    // Rebuilds a row (decoder.cuh).
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        switch (MOVES ? 4u : cb.chunk_bytes) {
        case 1: return decode_chunks<1>(cluster, active, stage, start_bit, coded_bytes, window);
        case 2: return decode_chunks<2>(cluster, active, stage, start_bit, coded_bytes, window);
        default:
            // Chunks of 4 or 8 bytes: all bits of a word have the same participation bit.
            return decode_chunks<4>(cluster, active, stage, start_bit, coded_bytes, window);
        }
    }
};

} // namespace ibp

#endif
