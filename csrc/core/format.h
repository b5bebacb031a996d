/* format.h - the rules of FORMAT.md as inline functions, shared by gcc, g++ and nvcc.
 *
 * The functions cover words of scheme ibp, headers and positions of listed rows, fingerprints, differences, and sizes
 * of rows.
 *
 * The functions for scheme ibp (section 5) work on 32-bit words of a row; byte 4w is the low byte of word w. A chunk
 * participates if its invariant bits have the codebook's values; these bits are then left out of the coded row. All
 * other bits of the row are kept bits. They are stored in the order of their positions, for every size of chunks. */
#ifndef IBP_FORMAT_H
#define IBP_FORMAT_H

#include "ibp.h"

#if defined(__CUDACC__)
#define IBP_INLINE static __host__ __device__ __forceinline__
#else
#define IBP_INLINE static inline
#endif

/* The fields of an entry of ibp_codebook.flags, which describes a word of a row. A chunk is flagged if it has a
 * participation bit, which says in each coded row whether the chunk participates. A gap is a run of invariant bits in
 * the word, which are left out if their chunk participates.
 *
 *   bits 0-16    position of the word's first participation bit
 *   bits 17-20   which of the chunks that start in the word are flagged
 *   bits 21-25   where the first gap starts
 *   bits 26-30   where the last gap starts
 *   bit 31       there are more than two gaps */
#define IBP_FLAG_POS_BITS 17u
#define IBP_FLAG_FIRST_GAP (IBP_FLAG_POS_BITS + 4u)
#define IBP_FLAG_LAST_GAP (IBP_FLAG_FIRST_GAP + 5u)
#define IBP_FLAG_MANY_GAPS (1u << (IBP_FLAG_LAST_GAP + 5u))

/* IBP_LOAD_ONCE(element) reads an element of an array with exactly one load, and returns its value. The compiler may
 * repeat a plain load, so a value could change between its check and its use if another thread or another stream writes
 * the array meanwhile. In kernels IBP_LOAD_ONCE is a relaxed load with the scope of a block. If no thread of a kernel
 * writes an array, the kernel reads the array with __ldg, which is also one load. */
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

/* Returns the lowest run of ones in x as a mask. */
IBP_INLINE uint32_t ibp_lowest_run(uint32_t x) { return x & ~(x + (x & (0u - x))); }

/* Inserts a gap into a word. The bits at start % 32 and above move up to make room for `gap`, a run of ones that begins
 * at bit start % 32. The gap's bits become 0. If gap is 0, no bit moves. */
IBP_INLINE uint32_t ibp_insert_gap(uint32_t word, uint32_t gap, uint32_t start)
{
#if defined(__CUDA_ARCH__)
    return word + __funnelshift_r(word, 0u, start) * gap;
#else
    return word + (word >> start % 32u) * gap;
#endif
}

/* Inserts the lowest of the gaps into a word, and removes this gap from *gaps. */
IBP_INLINE uint32_t ibp_insert_lowest_gap(uint32_t word, uint32_t *gaps)
{
    const uint32_t gap = ibp_lowest_run(*gaps),
                   below = (gap & (0u - gap)) - 1u; /* the number of ones below the gap is its start */
    *gaps ^= gap;
    return ibp_insert_gap(word, gap, ibp_popcount(below));
}

/* Parallel bit deposit: moves the low popcount(keep) bits of word, in order, to the ones of keep. It inserts the gaps,
 * which are the runs of zeros of keep, one after the other; masks of floats have one to three gaps. */
IBP_INLINE uint32_t ibp_deposit(uint32_t word, uint32_t keep)
{
    uint32_t gaps = ~keep;
    while (gaps != 0) word = ibp_insert_lowest_gap(word, &gaps);
    return word;
}

/* Parallel bit extract, the inverse of ibp_deposit: packs the bits of word at the ones of keep, beginning at bit 0. */
IBP_INLINE uint32_t ibp_extract(uint32_t word, uint32_t keep)
{
    uint32_t bits = 0, filled = 0;
    while (keep != 0) {
        const uint32_t run = ibp_lowest_run(keep);
        const uint32_t below = (run & (0u - run)) - 1u; /* the number of ones below the run is its start */
        bits |= ((word & run) >> ibp_popcount(below)) << filled;
        filled += ibp_popcount(run);
        keep ^= run;
    }
    return bits;
}

/* Returns a mask of the bits of word w that belong to a row of row_bytes bytes. */
IBP_INLINE uint32_t ibp_row_bits_of_word(uint32_t row_bytes, uint32_t w)
{
    if (4u * w + 4u <= row_bytes) return ~0u;
    return 4u * w >= row_bytes ? 0u : (1u << (8u * (row_bytes - 4u * w))) - 1u;
}

/* Returns the position of a word's first participation bit in a coded row. */
IBP_INLINE uint32_t ibp_flag_position(uint32_t flags_entry) { return flags_entry & ((1u << IBP_FLAG_POS_BITS) - 1u); }
/* Returns the set of the chunks, up to four, that start in a word and are flagged: bit i stands for the word's chunk
 * i. */
IBP_INLINE uint32_t ibp_flagged_chunks(uint32_t flags_entry) { return flags_entry >> IBP_FLAG_POS_BITS & 0xfu; }

/* Returns the fields of a flags entry that describe the gaps of a word. Gaps are the runs of ones of its mask, cut at
 * the ends of chunks, so that a gap is removed either as a whole or not at all. */
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

/* Does what ibp_deposit(word, ~removed) does, for masks with at most two gaps. removed: the bits of the gaps to insert;
 * 0 if there are none. */
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

/* Returns a mask of the kept bits of a word. mask, flags_entry: the codebook's mask and flags of this word.
 * participation: bit 0 is the word's first participation bit. A chunk of 4 or 8 bytes has one participation bit for the
 * whole word. If such a chunk is not flagged, its mask is 0, so it does not matter which bit is read for it. */
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

/* Returns the participation bits of the flagged chunks that start in a word, one after the other from bit 0. mismatch:
 * (word ^ bitval) & mask; for chunks of 8 bytes, the OR of these values of both words of the chunk. */
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

#define IBP_MAX_LOW_BITS 13u /* largest number of low bits of a position in a list */

/* Returns the size in bytes of a listed row's header. */
IBP_INLINE uint32_t ibp_header_bytes(uint32_t columns) { return columns < 128u ? 1u : columns < 32768u ? 2u : 3u; }
/* Returns the bit of a listed row's header that says whether the row is closed. */
IBP_INLINE uint32_t ibp_closed_bit(uint32_t columns) { return 1u << (8u * ibp_header_bytes(columns) - 1u); }

/* The header of a listed row. */
typedef struct ibp_listed_header {
    uint32_t num_listed; /* number of listed elements */
    bool is_closed;      /* whether all listed elements equal the codebook's closed_value and are not stored */
} ibp_listed_header;

/* Splits the bits of a header. Returns false if the coded row, which has src_bytes bytes, is too short for a header, or
 * if it lists more elements than there are columns. */
IBP_INLINE bool ibp_split_header(uint32_t bits, uint32_t src_bytes, uint32_t columns, ibp_listed_header *header)
{
    header->num_listed = bits & (ibp_closed_bit(columns) - 1u);
    header->is_closed = (bits & ibp_closed_bit(columns)) != 0u;
    return src_bytes >= ibp_header_bytes(columns) && header->num_listed <= columns;
}

/* The form in which the k listed positions of a row are stored. It is not stored itself, because it follows from k and
 * the number of columns. A list has the form of Elias and Fano: for its j-th position p, bit (p >> low_bits) + j of the
 * upper bits is 1. The low bits of all positions begin at the first byte after the upper bits. */
typedef struct ibp_position_form {
    uint32_t is_list;       /* 1: a list; 0: a bitmap */
    uint32_t is_complement; /* 1: the list has the other columns - k positions, those that are not listed */
    uint32_t low_bits;      /* number of low bits of each position in a list */
    uint32_t num_positions; /* number of positions in the list, or of ones in the bitmap */
    uint32_t upper_bits;    /* number of upper bits of a list, or of bits of a bitmap */
    uint32_t num_bytes;     /* size of the list or bitmap in bytes */
} ibp_position_form;

IBP_INLINE ibp_position_form ibp_bitmap_form(uint32_t k, uint32_t columns)
{
    const ibp_position_form form = {0, 0, 0, k, columns, (columns + 7u) / 8u};
    return form;
}
/* Returns the form of a list with l low bits for each position. complement: 0 for a list of the k listed positions, 1
 * for a list of the positions that are not listed. */
IBP_INLINE ibp_position_form ibp_list_form(uint32_t k, uint32_t columns, uint32_t complement, uint32_t l)
{
    const uint32_t m = complement ? columns - k : k, upper = m + ((columns - 1u) >> l);
    const ibp_position_form form = {1, complement, l, m, upper, (upper + 7u) / 8u + (m * l + 7u) / 8u};
    return form;
}
/* Returns whether k and columns - k are both so large that a bitmap is the shortest form. A list of m positions with l
 * low bits has at least m * (l + 1) + (columns - 1) / 2^l bits. For such k, this is more than the size of a bitmap for
 * every l. */
IBP_INLINE bool ibp_is_bitmap_shortest(uint32_t k, uint32_t columns)
{
    return 4u * ibp_min_u32(k, columns - k) >= columns + 4u;
}
/* Returns the shortest form for k listed positions. If several forms are equally short, returns the first one in this
 * order: the bitmap; lists of the listed positions, those with fewer low bits first; lists of the positions that are
 * not listed, likewise. */
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

#define IBP_GOLDEN 0x9E3779B97F4A7C15u /* 2^64 divided by the golden ratio */

/* The finalizer of SplitMix64 (Steele, Lea, Flood 2014). */
IBP_INLINE uint64_t ibp_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}
/* Returns what word i of a tensor contributes to the sum from which the tensor's fingerprint is computed. */
IBP_INLINE uint64_t ibp_mix_word(uint64_t word, uint64_t i) { return ibp_mix(word + (i + 1u) * IBP_GOLDEN); }

/* ---- differences (section 9): several elements packed in 64 bits, each modulo 2^w ---- */

/* Returns a word in which the highest bit of each element is 1. */
IBP_INLINE uint64_t ibp_highest_bits(uint32_t element_bytes)
{
    const uint64_t each = element_bytes == 8u ? 1u : ~(uint64_t)0 / (((uint64_t)1 << 8u * element_bytes) - 1u);
    return each << (8u * element_bytes - 1u);
}
/* Return the sums, or the differences, of the elements of a and b. highest: ibp_highest_bits(element_bytes). */
IBP_INLINE uint64_t ibp_add_elements(uint64_t a, uint64_t b, uint64_t highest)
{
    return ((a & ~highest) + (b & ~highest)) ^ ((a ^ b) & highest);
}
IBP_INLINE uint64_t ibp_subtract_elements(uint64_t a, uint64_t b, uint64_t highest)
{
    return ((a | highest) - (b & ~highest)) ^ ((a ^ ~b) & highest);
}

/* ---- rows of a table (sections 2 and 3) ---- */

/* Returns 8 bytes of a default row of a codebook without constant columns: byte i of the row is byte i % 8 of the
 * result. */
IBP_INLINE uint64_t ibp_default_bytes(const ibp_codebook *codebook)
{
    if (codebook->scheme != IBP_SCHEME_PLANES) return 0;
    uint64_t bytes = codebook->planes.default_value;
    for (uint32_t filled = 8u * codebook->planes.element_bytes; filled < 64u; filled *= 2u) bytes |= bytes << filled;
    return bytes;
}
/* Returns the default row if there are constant columns, else NULL. */
IBP_INLINE const uint8_t *ibp_template_of(const ibp_codebook *codebook)
{
    const bool has_constants = codebook->scheme == IBP_SCHEME_PLANES && codebook->planes.num_constant != 0u;
    return has_constants ? codebook->planes.row_template : NULL;
}

/* Returns the entry of lengths of a row whose coded form has coded_bytes bytes. The entry is coded_bytes if coded_bytes
 * is less than both valid_bytes and the length that marks a default row; otherwise it is 0 (raw). valid_bytes: size of
 * the row before coding, which is row_bytes unless the row is a short last row. */
IBP_INLINE uint32_t ibp_length_of_coded(size_t coded_bytes, uint32_t row_bytes, uint32_t valid_bytes)
{
    return coded_bytes < ibp_min_u32(valid_bytes, IBP_DEFAULT_LENGTH(row_bytes)) ? (uint32_t)coded_bytes : 0u;
}

/* Returns the number of sectors of IBP_OVERFLOW_ALIGN bytes that num_bytes bytes need. */
IBP_INLINE uint32_t ibp_sectors_of(uint32_t num_bytes)
{
    return (num_bytes + IBP_OVERFLOW_ALIGN - 1u) / IBP_OVERFLOW_ALIGN;
}
/* Returns num_bytes rounded up to whole sectors. */
IBP_INLINE uint32_t ibp_sector_bytes(uint32_t num_bytes) { return ibp_sectors_of(num_bytes) * IBP_OVERFLOW_ALIGN; }

/* Returns the size in bytes of a row before coding. num_bytes: size of the tensor in bytes. */
IBP_INLINE uint32_t ibp_valid_bytes(int64_t num_bytes, uint32_t row_bytes, int64_t row)
{
    const int64_t left = num_bytes - row * (int64_t)row_bytes;
    return left < (int64_t)row_bytes ? (uint32_t)left : row_bytes;
}
/* Returns the size in bytes of the overflow part of a row of stored_bytes bytes. */
IBP_INLINE uint32_t ibp_overflow_part(uint32_t stored_bytes, uint32_t slot_bytes)
{
    return stored_bytes > slot_bytes ? stored_bytes - slot_bytes : 0u;
}
/* Returns the size in bytes of an overflow part with its padding. There is no padding in a table without slots. */
IBP_INLINE uint32_t ibp_overflow_room(uint32_t part_bytes, uint32_t slot_bytes)
{
    return slot_bytes == 0u ? part_bytes : ibp_sector_bytes(part_bytes);
}

#endif
