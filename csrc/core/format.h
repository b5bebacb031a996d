/* format.h - the rules of FORMAT.md as inline functions, shared by gcc, g++ and nvcc.
 *
 * Scheme ibp works on 32-bit words of a row (byte 4w is the low byte of word w): because kept bits are stored in
 * increasing position, only ibp_keep_word and ibp_match_word know what a chunk is. */
#ifndef IBP_FORMAT_H
#define IBP_FORMAT_H

#include "ibp.h"

#if defined(__CUDACC__)
#define IBP_INLINE static __host__ __device__ __forceinline__
#else
#define IBP_INLINE static inline
#endif

/* Split of an entry of ibp_codebook.flags: position of the word's first participation bit, flagged chunks, where the
 * first and the last of the gaps that participating chunks leave in the word start, and whether there are more than
 * these two. */
#define IBP_FLAG_POS_BITS 17u
#define IBP_FLAG_FIRST_GAP (IBP_FLAG_POS_BITS + 4u)
#define IBP_FLAG_LAST_GAP (IBP_FLAG_FIRST_GAP + 5u)
#define IBP_FLAG_MANY_GAPS (1u << (IBP_FLAG_LAST_GAP + 5u))

/* IBP_LOAD_ONCE: the value of an element of an array, by one load: the value checked is the value used, also where
 * another thread or another stream writes the array meanwhile. The compiler may repeat a plain load. In kernels it is a
 * relaxed load of a block's scope; arrays that no thread of a kernel writes are read by __ldg there, which is one load
 * too. */
#if defined(__CUDA_ARCH__)
template <typename T> static __device__ __forceinline__ T ibp_load_once(const T *global)
{
    static_assert(sizeof(T) <= 8 && (sizeof(T) & (sizeof(T) - 1)) == 0, "one load");
    const size_t address = __cvta_generic_to_global(global);
    if constexpr (sizeof(T) == 8) {
        uint64_t value;
        asm volatile("ld.relaxed.cta.global.u64 %0, [%1];" : "=l"(value) : "l"(address));
        return static_cast<T>(value);
    } else {
        uint32_t value;
        if constexpr (sizeof(T) == 4)
            asm volatile("ld.relaxed.cta.global.u32 %0, [%1];" : "=r"(value) : "l"(address));
        else if constexpr (sizeof(T) == 2)
            asm volatile("ld.relaxed.cta.global.u16 %0, [%1];" : "=r"(value) : "l"(address));
        else
            asm volatile("ld.relaxed.cta.global.u8 %0, [%1];" : "=r"(value) : "l"(address));
        return static_cast<T>(value);
    }
}
#define IBP_LOAD_ONCE(element) ibp_load_once(&(element))
#else
#define IBP_LOAD_ONCE(element) (*(const volatile __typeof__(element) *)&(element))
#endif

IBP_INLINE uint32_t ibp_popcount(uint32_t x)
{
#if defined(__CUDA_ARCH__)
    return (uint32_t)__popc((int)x);
#else
    return (uint32_t)__builtin_popcount(x);
#endif
}

IBP_INLINE uint32_t ibp_min_u32(uint32_t a, uint32_t b) { return a < b ? a : b; }

/* The lowest run of ones in x, as a mask. */
IBP_INLINE uint32_t ibp_lowest_run(uint32_t x) { return x & ~(x + (x & (0u - x))); }

/* Moves the bits of word from bit start % 32 on up to make room for gap, a run of ones that begins there; for no gap,
 * 0, none moves. The gap's bits become 0. */
IBP_INLINE uint32_t ibp_insert_gap(uint32_t word, uint32_t gap, uint32_t start)
{
#if defined(__CUDA_ARCH__)
    return word + __funnelshift_r(word, 0u, start) * gap;
#else
    return word + (word >> start % 32u) * gap;
#endif
}

/* Inserts the lowest of the gaps, and takes it off them. */
IBP_INLINE uint32_t ibp_insert_lowest_gap(uint32_t word, uint32_t *gaps)
{
    const uint32_t gap = ibp_lowest_run(*gaps),
                   below = (gap & (0u - gap)) - 1u; /* ones under the gap: their count is its start */
    *gaps ^= gap;
    return ibp_insert_gap(word, gap, ibp_popcount(below));
}

/* Parallel bit deposit: the low popcount(keep) bits of word, in order, at the ones of keep; gaps, the zeros of keep,
 * are inserted one after the other: floating point masks have one to three. */
IBP_INLINE uint32_t ibp_deposit(uint32_t word, uint32_t keep)
{
    uint32_t gaps = ~keep;
    while (gaps != 0) word = ibp_insert_lowest_gap(word, &gaps);
    return word;
}

/* Parallel bit extract, the inverse: the bits of word at the ones of keep, packed from bit 0. */
IBP_INLINE uint32_t ibp_extract(uint32_t word, uint32_t keep)
{
    uint32_t bits = 0, filled = 0;
    while (keep != 0) {
        const uint32_t run = ibp_lowest_run(keep);
        const uint32_t below = (run & (0u - run)) - 1u; /* ones under the run: their count is the run's start */
        bits |= ((word & run) >> ibp_popcount(below)) << filled;
        filled += ibp_popcount(run);
        keep ^= run;
    }
    return bits;
}

/* Ones at the bits of word w that belong to a row of row_bytes bytes. */
IBP_INLINE uint32_t ibp_row_bits_of_word(uint32_t row_bytes, uint32_t w)
{
    if (4u * w + 4u <= row_bytes) return ~0u;
    return 4u * w >= row_bytes ? 0u : (1u << (8u * (row_bytes - 4u * w))) - 1u;
}

/* Where a word's first participation bit is, and which of its (up to four) chunks have one. */
IBP_INLINE uint32_t ibp_flag_position(uint32_t flags_entry) { return flags_entry & ((1u << IBP_FLAG_POS_BITS) - 1u); }
IBP_INLINE uint32_t ibp_flagged_chunks(uint32_t flags_entry) { return flags_entry >> IBP_FLAG_POS_BITS & 0xfu; }

/* The entry's part on the gaps of a word: the runs of ones of its mask, cut where chunks end, so that a gap is left or
 * not as a whole. */
IBP_INLINE uint32_t ibp_gaps_of_word(uint32_t mask, uint32_t chunk_bytes)
{
    uint32_t first = 0, last = 0, count = 0;
    for (uint32_t bit = 0; bit < 32u; bit++) {
        const uint32_t is_cut = bit % (8u * chunk_bytes) == 0u;
        if (!(mask >> bit & 1u) || (!is_cut && (mask >> (bit - 1u) & 1u))) continue;
        last = bit;
        if (count++ == 0u) first = bit;
    }
    return first << IBP_FLAG_FIRST_GAP | last << IBP_FLAG_LAST_GAP | (count > 2u ? IBP_FLAG_MANY_GAPS : 0u);
}

/* ibp_deposit of a word whose entry knows of no more than two gaps; some of them, or none, are in removed. */
IBP_INLINE uint32_t ibp_insert_two_gaps(uint32_t word, uint32_t removed, uint32_t flags_entry)
{
    const uint32_t first = flags_entry >> IBP_FLAG_FIRST_GAP, last = flags_entry >> IBP_FLAG_LAST_GAP;
#if defined(__CUDA_ARCH__)
    const uint32_t from_last = __funnelshift_l(0u, ~0u, last);
#else
    const uint32_t from_last = ~0u << last % 32u;
#endif
    return ibp_insert_gap(ibp_insert_gap(word, removed & ~from_last, first), removed & from_last, last);
}

/* Kept bits of a word, from its mask, its flags entry and the participation bits that start at its flag position.
 * A chunk of 4 or 8 bytes has one participation bit for the whole word; where such a chunk is not flagged its mask is
 * 0, so that the stray bit read for it does not matter. */
IBP_INLINE uint32_t ibp_keep_word(uint32_t participation, uint32_t mask, uint32_t flags_entry, uint32_t chunk_bytes)
{
    if (chunk_bytes >= 4u) return ~(mask * (participation & 1u));
    const uint32_t chunk_bits = 8u * chunk_bytes, ones = (1u << chunk_bits) - 1u,
                   flagged = ibp_flagged_chunks(flags_entry);
    uint32_t removed = 0;
    for (uint32_t chunk = 0; chunk * chunk_bytes < 4u; chunk++) {
        if (!((flagged >> chunk) & 1u)) continue;
        if (participation & 1u) removed |= mask & (ones << (chunk * chunk_bits));
        participation >>= 1;
    }
    return ~removed;
}

/* The participation bits of the flagged chunks that start in a word, packed. mismatch = (word ^ bitval) & mask; for
 * chunks of 8 bytes the OR of both words' mismatches. */
IBP_INLINE uint32_t ibp_match_word(uint32_t mismatch, uint32_t flags_entry, uint32_t chunk_bytes)
{
    const uint32_t flagged = ibp_flagged_chunks(flags_entry);
    if (chunk_bytes >= 4u) return mismatch == 0u;
    const uint32_t chunk_bits = 8u * chunk_bytes, ones = (1u << chunk_bits) - 1u;
    uint32_t participation = 0, filled = 0;
    for (uint32_t chunk = 0; chunk * chunk_bytes < 4u; chunk++) {
        if (!((flagged >> chunk) & 1u)) continue;
        if ((mismatch & (ones << (chunk * chunk_bits))) == 0u) participation |= 1u << filled;
        filled++;
    }
    return participation;
}

/* ---- scheme planes (section 6) ---- */

#define IBP_MAX_LOW_BITS 13u

/* Bytes of a listed row's header, and the bit of it that says is_closed. */
IBP_INLINE uint32_t ibp_header_bytes(uint32_t columns) { return columns < 128u ? 1u : columns < 32768u ? 2u : 3u; }
IBP_INLINE uint32_t ibp_closed_bit(uint32_t columns) { return 1u << (8u * ibp_header_bytes(columns) - 1u); }

/* A listed row's header. */
typedef struct ibp_listed_header {
    uint32_t num_listed;
    bool is_closed;
} ibp_listed_header;

/* bits: of the header. @return false if the row, of src_bytes bytes, has none, or lists more elements than there are.
 */
IBP_INLINE bool ibp_split_header(uint32_t bits, uint32_t src_bytes, uint32_t columns, ibp_listed_header *header)
{
    header->num_listed = bits & (ibp_closed_bit(columns) - 1u);
    header->is_closed = (bits & ibp_closed_bit(columns)) != 0u;
    return src_bytes >= ibp_header_bytes(columns) && header->num_listed <= columns;
}

/* The form in which k listed positions of a row are stored. */
typedef struct ibp_position_form {
    uint32_t is_list;       /* else a bitmap */
    uint32_t is_complement; /* the list names the positions that are not listed */
    uint32_t low_bits;      /* of each position of a list */
    uint32_t num_positions; /* in the list */
    uint32_t upper_bits;    /* of the list, or bits of the bitmap */
    uint32_t num_bytes;     /* in all */
} ibp_position_form;

IBP_INLINE ibp_position_form ibp_bitmap_form(uint32_t k, uint32_t columns)
{
    const ibp_position_form form = {0, 0, 0, k, columns, (columns + 7u) / 8u};
    return form;
}
/* The list (m, l) of the positions that are listed, or of the complement. */
IBP_INLINE ibp_position_form ibp_list_form(uint32_t k, uint32_t columns, uint32_t complement, uint32_t l)
{
    const uint32_t m = complement ? columns - k : k, upper = m + ((columns - 1u) >> l);
    const ibp_position_form form = {1, complement, l, m, upper, (upper + 7u) / 8u + (m * l + 7u) / 8u};
    return form;
}
/* Whether both k and columns - k are large enough that a bitmap is the shortest form: each list of m positions has at
 * least m * (l + 1) + (columns - 1) / 2^l bits, which is more than columns. */
IBP_INLINE bool ibp_is_bitmap_shortest(uint32_t k, uint32_t columns)
{
    return 4u * ibp_min_u32(k, columns - k) >= columns + 4u;
}
/* The first of the shortest. */
IBP_INLINE ibp_position_form ibp_choose_position_form(uint32_t k, uint32_t columns)
{
    ibp_position_form best = ibp_bitmap_form(k, columns);
    if (ibp_is_bitmap_shortest(k, columns)) return best;
    for (uint32_t complement = 0; complement < 2u; complement++)
        for (uint32_t l = 0; l <= IBP_MAX_LOW_BITS; l++) {
            const ibp_position_form form = ibp_list_form(k, columns, complement, l);
            if (form.num_bytes < best.num_bytes) best = form;
        }
    return best;
}

/* ---- fingerprints (section 10) ---- */

#define IBP_GOLDEN 0x9E3779B97F4A7C15u

/* The finalizer of SplitMix64 (Steele, Lea, Flood 2014). */
IBP_INLINE uint64_t ibp_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
/* What word i of a tensor adds to its fingerprint. */
IBP_INLINE uint64_t ibp_mix_word(uint64_t word, uint64_t i) { return ibp_mix(word + (i + 1u) * IBP_GOLDEN); }

/* ---- differences (section 9): elements that lie side by side in 64 bits, modulo 2^w each ---- */

/* The highest bit of each. */
IBP_INLINE uint64_t ibp_highest_bits(uint32_t element_bytes)
{
    const uint64_t each = element_bytes == 8u ? 1u : ~(uint64_t)0 / (((uint64_t)1 << 8u * element_bytes) - 1u);
    return each << (8u * element_bytes - 1u);
}
IBP_INLINE uint64_t ibp_add_elements(uint64_t a, uint64_t b, uint64_t highest)
{
    return ((a & ~highest) + (b & ~highest)) ^ ((a ^ b) & highest);
}
IBP_INLINE uint64_t ibp_subtract_elements(uint64_t a, uint64_t b, uint64_t highest)
{
    return ((a | highest) - (b & ~highest)) ^ ((a ^ ~b) & highest);
}

/* ---- rows of a table (sections 2 and 3) ---- */

/* The byte at position i of a default row of a codebook without constant columns is byte i % 8 of this. */
IBP_INLINE uint64_t ibp_default_bytes(const ibp_codebook *codebook)
{
    if (codebook->scheme != IBP_SCHEME_PLANES) return 0;
    uint64_t bytes = codebook->planes.default_value;
    for (uint32_t filled = 8u * codebook->planes.element_bytes; filled < 64u; filled *= 2u) bytes |= bytes << filled;
    return bytes;
}
/* Where there are constant columns, the default row; else NULL. */
IBP_INLINE const uint8_t *ibp_template_of(const ibp_codebook *codebook)
{
    const bool has_constants = codebook->scheme == IBP_SCHEME_PLANES && codebook->planes.num_constant != 0u;
    return has_constants ? codebook->planes.row_template : NULL;
}

/* The entry of lengths of a row whose coded form has coded_bytes bytes: these, if they are fewer than valid_bytes and
 * than the length that marks a default row; else 0, for raw. */
IBP_INLINE uint32_t ibp_length_of_coded(size_t coded_bytes, uint32_t row_bytes, uint32_t valid_bytes)
{
    return coded_bytes < ibp_min_u32(valid_bytes, IBP_DEFAULT_LENGTH(row_bytes)) ? (uint32_t)coded_bytes : 0u;
}

/* The sectors of IBP_OVERFLOW_ALIGN bytes that num_bytes bytes need, and the bytes of these sectors. */
IBP_INLINE uint32_t ibp_sectors_of(uint32_t num_bytes)
{
    return (num_bytes + IBP_OVERFLOW_ALIGN - 1u) / IBP_OVERFLOW_ALIGN;
}
IBP_INLINE uint32_t ibp_sector_bytes(uint32_t num_bytes) { return ibp_sectors_of(num_bytes) * IBP_OVERFLOW_ALIGN; }

/* Bytes of row r before coding; what of its stored bytes lies in overflow, exactly and with its padding. */
IBP_INLINE uint32_t ibp_valid_bytes(int64_t num_bytes, uint32_t row_bytes, int64_t row)
{
    const int64_t left = num_bytes - row * (int64_t)row_bytes;
    return left < (int64_t)row_bytes ? (uint32_t)left : row_bytes;
}
IBP_INLINE uint32_t ibp_overflow_part(uint32_t stored_bytes, uint32_t slot_bytes)
{
    return stored_bytes > slot_bytes ? stored_bytes - slot_bytes : 0u;
}
IBP_INLINE uint32_t ibp_overflow_room(uint32_t part_bytes, uint32_t slot_bytes)
{
    return slot_bytes == 0u ? part_bytes : ibp_sector_bytes(part_bytes);
}

#endif
