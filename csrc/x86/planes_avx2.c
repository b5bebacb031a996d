/* planes_avx2.c - codes and decodes rows of scheme planes with AVX2 and BMI2. The bytes and the statuses are the same
 * as those of planes.c.
 *
 * Eight fields of b bits are b whole bytes. So digits, residuals and raw symbols are unpacked to lanes by one parallel
 * deposit for each 64 bits of lanes, and packed by one parallel extract.
 *
 * *Levels* are arrays of bytes, an intermediate form between digits and symbols. Level p has a byte for each element
 * with a digit in plane p; the last level has a byte for each raw symbol. This byte is the symbol's rank: the index of
 * its entry, or num_entries if the symbol has no entry. There are two exceptions. The decoder uses the symbols
 * themselves if a symbol is one byte and all columns share the same entries. The encoder subtracts from the ranks of
 * level p the number of entries of all earlier planes. The decoder builds the levels from the last to the first. The
 * encoder goes from the first to the last: it turns each level into digits and the next level. */
#include "../core/schemes.h"

#if IBP_HAS_X86_ROWS
#include "bits_avx2.h"
#include "../core/planes_layout.h"
#include "planes_avx512.h"

enum {
    PADDING = 64, /* number of bytes past an array that may be read, and also written if the array is an output */
    MAX_ENTRIES = 64
};

/* Returns whether the bytes of the decoder's levels are symbols instead of ranks. */
static bool levels_are_symbols(const ibp_planes *planes) { return planes->symbol_bytes == 1 && !planes->per_column; }

typedef uint8_t lane8;
typedef uint16_t lane16 __attribute__((may_alias, aligned(1)));
typedef uint32_t lane32 __attribute__((may_alias, aligned(1)));
typedef uint64_t lane64 __attribute__((may_alias, aligned(1)));

IBP_AVX2_INLINE __m256i load_vector(const uint8_t *src)
{
    return _mm256_loadu_si256((const __m256i *)(const void *)src);
}
IBP_AVX2_INLINE void store_vector(uint8_t *dst, __m256i x) { _mm256_storeu_si256((__m256i *)(void *)dst, x); }

/* Shift all lanes by `by` bits, which may be 0. */
IBP_AVX2_INLINE __m256i shift_left16(__m256i x, __m128i by) { return _mm256_sll_epi16(x, by); }
IBP_AVX2_INLINE __m256i shift_left32(__m256i x, __m128i by) { return _mm256_sll_epi32(x, by); }
IBP_AVX2_INLINE __m256i shift_left64(__m256i x, __m128i by) { return _mm256_sll_epi64(x, by); }
IBP_AVX2_INLINE __m256i shift_right16(__m256i x, __m128i by) { return _mm256_srl_epi16(x, by); }
IBP_AVX2_INLINE __m256i shift_right32(__m256i x, __m128i by) { return _mm256_srl_epi32(x, by); }
IBP_AVX2_INLINE __m256i shift_right64(__m256i x, __m128i by) { return _mm256_srl_epi64(x, by); }
IBP_AVX2_INLINE __m256i shift_left8(__m256i x, __m128i by)
{
    return _mm256_and_si256(_mm256_sll_epi16(x, by), _mm256_set1_epi8((char)(0xff << _mm_cvtsi128_si32(by))));
}
IBP_AVX2_INLINE __m256i shift_right8(__m256i x, __m128i by)
{
    return _mm256_and_si256(_mm256_srl_epi16(x, by), _mm256_set1_epi8((char)(0xff >> _mm_cvtsi128_si32(by))));
}

/* Limit each lane to 255. */
IBP_AVX2_INLINE __m256i at_most_255_8(__m256i x) { return x; }
IBP_AVX2_INLINE __m256i at_most_255_16(__m256i x) { return _mm256_min_epu16(x, _mm256_set1_epi16(255)); }
IBP_AVX2_INLINE __m256i at_most_255_32(__m256i x) { return _mm256_min_epu32(x, _mm256_set1_epi32(255)); }
IBP_AVX2_INLINE __m256i at_most_255_64(__m256i x)
{
    return _mm256_blendv_epi8(_mm256_set1_epi64x(255), x,
                              _mm256_cmpeq_epi64(_mm256_srli_epi64(x, 8), _mm256_setzero_si256()));
}

/* Pack 32 lanes of at most 255 each into bytes. in_order then puts the bytes in the order of the lanes. */
IBP_AVX2_INLINE __m256i pack_bytes8(const __m256i *x) { return x[0]; }
IBP_AVX2_INLINE __m256i pack_bytes16(const __m256i *x) { return _mm256_packus_epi16(x[0], x[1]); }
IBP_AVX2_INLINE __m256i pack_bytes32(const __m256i *x)
{
    return _mm256_packus_epi16(_mm256_packus_epi32(x[0], x[1]), _mm256_packus_epi32(x[2], x[3]));
}
IBP_AVX2_INLINE __m256i pack_bytes64(const __m256i *x)
{
    __m256i halves[4]; /* the low 32 bits of the lanes */
    for (int v = 0; v < 4; v++) {
        const __m256 both = _mm256_shuffle_ps(_mm256_castsi256_ps(x[2 * v]), _mm256_castsi256_ps(x[2 * v + 1]), 0x88);
        halves[v] = _mm256_permute4x64_epi64(_mm256_castps_si256(both), 0xd8);
    }
    return pack_bytes32(halves);
}
IBP_AVX2_INLINE __m256i in_order8(__m256i x) { return x; }
IBP_AVX2_INLINE __m256i in_order16(__m256i x) { return _mm256_permute4x64_epi64(x, 0xd8); }
IBP_AVX2_INLINE __m256i in_order32(__m256i x)
{
    return _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
IBP_AVX2_INLINE __m256i in_order64(__m256i x) { return in_order32(x); }

/* Load unsigned numbers of `bytes` bytes into the lanes of a vector. bytes: at most the size of a lane. These functions
 * read up to 32 bytes. */
IBP_AVX2_INLINE __m128i load_half(const uint8_t *src) { return _mm_loadu_si128((const __m128i *)(const void *)src); }
IBP_AVX2_INLINE __m256i widened8(const uint8_t *src, uint32_t bytes)
{
    return bytes == 1 ? load_vector(src) : _mm256_setzero_si256();
}
IBP_AVX2_INLINE __m256i widened16(const uint8_t *src, uint32_t bytes)
{
    return bytes == 1 ? _mm256_cvtepu8_epi16(load_half(src)) : load_vector(src);
}
IBP_AVX2_INLINE __m256i widened32(const uint8_t *src, uint32_t bytes)
{
    return bytes == 1   ? _mm256_cvtepu8_epi32(load_half(src))
           : bytes == 2 ? _mm256_cvtepu16_epi32(load_half(src))
                        : load_vector(src);
}
IBP_AVX2_INLINE __m256i widened64(const uint8_t *src, uint32_t bytes)
{
    return bytes == 1   ? _mm256_cvtepu8_epi64(load_half(src))
           : bytes == 2 ? _mm256_cvtepu16_epi64(load_half(src))
           : bytes == 4 ? _mm256_cvtepu32_epi64(load_half(src))
                        : load_vector(src);
}

/* Returns table[x] for each byte x below 16, and 0 for other bytes. Adding 0x70 with saturation sets bit 7 of exactly
 * these other bytes, and the shuffle returns 0 for bytes whose bit 7 is set. */
IBP_AVX2_INLINE __m256i look_up(const uint8_t *table, __m256i x)
{
    const __m256i twice = _mm256_broadcastsi128_si256(load_half(table));
    return _mm256_shuffle_epi8(twice, _mm256_adds_epu8(x, _mm256_set1_epi8(0x70)));
}

#define LANE_BITS 8
#include "planes_avx2_lanes.h"
#define LANE_BITS 16
#include "planes_avx2_lanes.h"
#define LANE_BITS 32
#include "planes_avx2_lanes.h"
#define LANE_BITS 64
#include "planes_avx2_lanes.h"

/* Selects the function `name` of planes_avx2_lanes.h for lanes of lane_bytes bytes. */
#define FOR_LANES(lane_bytes, name) \
    ((lane_bytes) == 1 ? name##8 : (lane_bytes) == 2 ? name##16 : (lane_bytes) == 4 ? name##32 : name##64)

/* Returns a codebook for the coded bits of elements that have invariant bits. Its `rotate` is 0, because cut_elements
 * and restore_elements rotate these elements. The coders receive the coded bits in lanes whose highest bits are 0. */
static ibp_codebook coded_codebook(const ibp_codebook *codebook)
{
    ibp_codebook coded = *codebook;
    coded.planes.rotate = 0;
    return coded;
}

/* Returns whether the processor has AVX-512 and the coders of planes_avx512.c accept a codebook. */
static bool is_wide(const ibp_planes *planes)
{
    return ibp_cpu_features() & IBP_CPU_AVX512 && ibp_takes_avx512(planes);
}

/* Allocates a bitmap of n bits from the scratch, in whole words of 64 bits. */
static uint64_t *take_bitmap(ibp_scratch *scratch, uint32_t n) { return ibp_take(scratch, (size_t)(n + 63) / 64 * 8); }

/* Looks up symbols as name_symbols16 does, if all columns have the same entries. It searches 16 entries at a time, and
 * looks up the low bytes and the high bytes of symbols separately. */
IBP_AVX2 static void name_shorts(const ibp_planes *planes, const uint8_t *ranks, uint32_t n, uint8_t *symbols)
{
    const uint8_t *const entries = planes->entries;
    uint8_t tables[2][MAX_ENTRIES] = {{0}}; /* low bytes of the entries, and high bytes */
    for (uint32_t e = 0; e < planes->num_entries; e++)
        for (uint32_t byte = 0; byte < 2; byte++) tables[byte][e] = entries[2 * e + byte];
    for (uint32_t i = 0; i < n; i += 32) {
        const __m256i rank = _mm256_permute4x64_epi64(load_vector(ranks + i), 0xd8);
        __m256i low = _mm256_setzero_si256(), high = low;
        for (uint32_t first = 0; first < planes->num_entries; first += 16) {
            const __m256i x = _mm256_xor_si256(rank, _mm256_set1_epi8((char)first));
            low = _mm256_or_si256(low, look_up(tables[0] + first, x));
            high = _mm256_or_si256(high, look_up(tables[1] + first, x));
        }
        store_vector(symbols + 2 * i, _mm256_unpacklo_epi8(low, high));
        store_vector(symbols + 2 * i + 32, _mm256_unpackhi_epi8(low, high));
    }
}

/* For each i < n, sets bit i of is_raw if ranks[i] is num_entries, which means that the symbol has no entry, and clears
 * it otherwise. */
IBP_AVX2 static void find_raw(const ibp_planes *planes, const uint8_t *ranks, uint32_t n, uint64_t *is_raw)
{
    find_others8(ranks, n, planes->num_entries, 0xff, is_raw);
    for (uint32_t i = 0; i < n; i += 64) is_raw[i / 64] = ibp_low_bits(~is_raw[i / 64], n - i);
}

/* ---- decoding ---- */

/* Calls function(..., b) for digits of b bits, 1 to 4. If the function is inlined, b is a constant in it. */
#define FOR_BITS(b, function, ...)         \
    ((b) == 1   ? function(__VA_ARGS__, 1) \
     : (b) == 2 ? function(__VA_ARGS__, 2) \
     : (b) == 3 ? function(__VA_ARGS__, 3) \
                : function(__VA_ARGS__, 4))

/* Returns the number of escapes among n digits of b bits, which begin at byte `at` of src. */
IBP_AVX2_INLINE uint32_t count_escapes(const uint8_t *src, size_t src_bytes, size_t at, uint32_t n, uint32_t b)
{
    const uint32_t fields = b == 3 ? 16 : 64 / b; /* number of fields that are read at a time; they fill whole bytes */
    const uint64_t lowest = ibp_low_bits(~(uint64_t)0, b * fields) / ((1u << b) - 1);
    uint32_t count = 0;
    for (;; n -= fields, at += b * fields / 8) {
        const uint64_t digits = ibp_load_bits(src, src_bytes, 8 * at);
        uint64_t escapes = digits & lowest;
        for (uint32_t bit = 1; bit < b; bit++) escapes &= digits >> bit;
        if (n <= fields) return count + (uint32_t)_mm_popcnt_u64(ibp_low_bits(escapes, n * b));
        count += (uint32_t)_mm_popcnt_u64(escapes);
    }
}

/* For each p from 1 to num_planes - 1, sets reaching[p] to the number of elements with a digit in plane p. Sets
 * reaching[num_planes] to the number of elements with a raw symbol. Finds where the parts of the values begin, which
 * are the residuals, the digits of each plane, and the raw symbols. Returns false unless the parts end exactly where
 * src does. */
IBP_AVX2 static bool find_parts(const ibp_planes *planes, const uint8_t *src, size_t src_bytes, size_t start,
                                uint32_t *reaching, ibp_value_parts *parts)
{
    for (uint32_t p = 0; p < planes->num_planes; p++) {
        *parts = ibp_lay_out(planes, start, reaching);
        if (parts->digits[p + 1] > 8 * src_bytes) return false;
        reaching[p + 1] =
            FOR_BITS(planes->digit_bits[p], count_escapes, src, src_bytes, parts->digits[p] / 8, reaching[p]);
    }
    *parts = ibp_lay_out(planes, start, reaching);
    return parts->end == 8 * src_bytes;
}

/* Builds a level from its digits: each digit is replaced by its byte of `named`, and each escape by the next byte of
 * the next level. All arrays are padded. */
IBP_AVX2_INLINE void build_level_of(const uint8_t *digits, uint32_t n, __m128i named, const uint8_t *next,
                                    uint8_t *level, uint32_t b)
{
    const uint64_t ones = ibp_lane_fields(1, 1), fields = ibp_lane_fields(1, b);
    for (uint32_t i = 0; i < n; i += 8, digits += b) {
        const uint64_t digit = _pdep_u64(ibp_load64(digits), fields);
        const uint64_t escapes = (digit + ones) >> b & ones;
        const uint64_t bytes = (uint64_t)_mm_cvtsi128_si64(_mm_shuffle_epi8(named, _mm_cvtsi64_si128((int64_t)digit)));
        ibp_store64(level + i, bytes | _pdep_u64(ibp_load64(next), escapes * 255));
        next += _mm_popcnt_u64(escapes);
    }
}

/* Builds a level. named[d]: the byte that replaces digit d of the plane; 0 for the escape. */
IBP_AVX2 static void build_level(const uint8_t *digits, uint32_t n, uint32_t b, const uint8_t *named,
                                 const uint8_t *next, uint8_t *level)
{
    const __m128i bytes = _mm_loadu_si128((const void *)named);
    FOR_BITS(b, build_level_of, digits, n, bytes, next, level);
}

/* The addresses of the parts of the values. digits[num_planes]: the raw symbols. */
typedef struct value_bytes {
    const uint8_t *residuals, *digits[IBP_MAX_PLANES + 1];
} value_bytes;

/* Builds all levels, from the last to the first. levels[0] receives level 0. Each of the three arrays has room for a
 * level of n bytes. */
IBP_AVX2 static void build_levels(const ibp_planes *planes, const value_bytes *bytes, const uint32_t *reaching,
                                  uint8_t *const levels[3])
{
    const uint32_t num_planes = planes->num_planes;
    const bool symbols = levels_are_symbols(planes);
    uint8_t *next = levels[num_planes == 0 ? 0 : 1 + num_planes % 2];
    if (symbols)
        ibp_unpack_fields(bytes->digits[num_planes], reaching[num_planes], ibp_symbol_bits(planes), 1, next);
    else
        memset(next, (int)planes->num_entries, reaching[num_planes]);
    for (uint32_t p = num_planes, first = planes->num_entries; p-- > 0;) {
        uint8_t named[16] = {0}, *const level = levels[p == 0 ? 0 : 1 + p % 2];
        first -= ibp_escape_of(planes, p);
        for (uint32_t digit = 0; digit < ibp_escape_of(planes, p); digit++)
            named[digit] = symbols ? ((const uint8_t *)planes->entries)[first + digit] : (uint8_t)(first + digit);
        build_level(bytes->digits[p], reaching[p], planes->digit_bits[p], named, next, level);
        next = level;
    }
}

/* Limits ranks to num_entries. Ranks are higher if another thread changed the digits after they were counted. ranks is
 * padded. */
IBP_AVX2 static void bound_ranks(const ibp_planes *planes, uint32_t n, uint8_t *ranks)
{
    const __m256i most = _mm256_set1_epi8((char)planes->num_entries);
    for (uint32_t i = 0; i < n; i += 32) store_vector(ranks + i, _mm256_min_epu8(load_vector(ranks + i), most));
}

/* Looks up the symbol of each rank in level 0, and writes the symbols to lanes of symbol_bytes bytes. level0 and
 * symbols are padded. */
IBP_AVX2 static void look_up_symbols(const ibp_planes *planes, const value_bytes *bytes, const uint32_t *reaching,
                                     uint8_t *level0, uint8_t *symbols, ibp_scratch *scratch)
{
    const uint32_t n = reaching[0], num_raw = reaching[planes->num_planes], lane_bytes = planes->symbol_bytes;
    uint64_t *const is_raw = take_bitmap(scratch, n);
    uint8_t *const raw = ibp_take(scratch, (size_t)n * lane_bytes);
    ibp_unpack_fields(bytes->digits[planes->num_planes], num_raw, ibp_symbol_bits(planes), lane_bytes, raw);
    bound_ranks(planes, n, level0);
    if (lane_bytes == 2 && !planes->per_column)
        name_shorts(planes, level0, n, symbols);
    else
        FOR_LANES(lane_bytes, name_symbols)(planes, level0, n, symbols);
    find_raw(planes, level0, n, is_raw);
    FOR_LANES(lane_bytes, scatter)(raw, 1, is_raw, n, symbols);
}

IBP_AVX2 static void read_residuals(const ibp_planes *planes, const uint8_t *src, uint32_t n, uint8_t *elements,
                                    ibp_scratch *scratch)
{
    const uint32_t r = planes->residual_bits, lane_bytes = planes->element_bytes;
    if (r > 8 || lane_bytes == 1) {
        ibp_unpack_fields(src, n, r, lane_bytes, elements);
        return;
    }
    uint8_t *const unpacked = ibp_take(scratch, n);
    if (r < 8) ibp_unpack_fields(src, n, r, 1, unpacked);
    FOR_LANES(lane_bytes, widen_bytes)(r < 8 ? unpacked : src, n, elements);
}

/* Combines symbols and residuals into elements. If the bytes of level0 are symbols, these symbols are used. Otherwise
 * the bytes are ranks, and their symbols are looked up. level0 and elements are padded. */
IBP_AVX2 static void join_elements(const ibp_planes *planes, const value_bytes *bytes, const uint32_t *reaching,
                                   uint8_t *level0, uint8_t *elements, ibp_scratch *scratch)
{
    const uint32_t n = reaching[0], lane_bytes = planes->element_bytes, symbol_bytes = planes->symbol_bytes;
    read_residuals(planes, bytes->residuals, n, elements, scratch);
    const bool looks_up = !levels_are_symbols(planes), is_empty = ibp_symbol_bits(planes) == 0;
    uint8_t *const symbols = ibp_take(scratch, looks_up || is_empty ? (size_t)(n + PADDING) * symbol_bytes : 0);
    if (looks_up) look_up_symbols(planes, bytes, reaching, level0, symbols, scratch);
    if (is_empty) memset(symbols, 0, n);
    FOR_LANES(lane_bytes, join)
    (elements, looks_up || is_empty ? symbols : level0, symbol_bytes, n,
     planes->residual_bits % ibp_element_bits(planes), planes->rotate);
}

/* Decodes n elements, but leaves out their invariant bits. The values begin at bit `start` of src. */
IBP_AVX2 static ibp_status decode_coded(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, size_t start,
                                        uint32_t n, uint8_t *elements, ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    uint32_t reaching[IBP_MAX_PLANES + 1] = {n};
    ibp_value_parts parts;
    if (!find_parts(planes, src, src_bytes, start, reaching, &parts)) return IBP_CORRUPT_ROW;

    /* Parts that begin at byte `copied` of src or later are read from a padded copy. In src at least PADDING bytes
     * follow the earlier parts. */
    const size_t after_first = planes->num_planes > 0 ? parts.digits[1] / 8 : src_bytes;
    const size_t copied = after_first + PADDING <= src_bytes ? after_first : start / 8;
    uint8_t *const copy = ibp_take(scratch, src_bytes - copied + PADDING);
    memcpy(copy, src + copied, src_bytes - copied);
    memset(copy + (src_bytes - copied), 0, PADDING);
    value_bytes bytes = {.residuals = copied == start / 8 ? copy : src + parts.residuals / 8};
    for (uint32_t p = 0; p <= planes->num_planes; p++) {
        const size_t at = parts.digits[p] / 8;
        bytes.digits[p] = at < copied ? src + at : copy + (at - copied);
    }

    /* Each level has room for n bytes, so that no access is out of bounds if digits change after they were counted. */
    uint8_t *const levels[3] = {ibp_take(scratch, n + PADDING), ibp_take(scratch, n + PADDING),
                                ibp_take(scratch, n + PADDING)};
    build_levels(planes, &bytes, reaching, levels);
    join_elements(planes, &bytes, reaching, levels[0], elements, scratch);
    return IBP_OK;
}

/* Decodes n elements as decode_coded does, and restores their invariant bits. */
static ibp_status decode_values(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, size_t start, uint32_t n,
                                uint8_t *elements, ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    ibp_status (*const decoded_by)(const ibp_codebook *, const uint8_t *, size_t, size_t, uint32_t, uint8_t *,
                                   ibp_scratch *) =
        planes->symbol_bytes == 1 && !planes->listed && is_wide(planes) ? ibp_decode_coded_avx512 : decode_coded;
    if (planes->invariant_bits == 0) return decoded_by(cb, src, src_bytes, start, n, elements, scratch);
    const ibp_codebook coded = coded_codebook(cb);
    const ibp_status status = decoded_by(&coded, src, src_bytes, start, n, elements, scratch);
    if (status == IBP_OK) FOR_LANES(planes->element_bytes, restore_elements)(planes, n, elements);
    return status;
}

/* Reads the listed positions into a bitmap. Returns false unless there are exactly form->num_positions positions, in
 * increasing order. */
IBP_AVX2 static bool read_positions(const uint8_t *src, size_t src_bytes, uint32_t columns,
                                    const ibp_position_form *form, uint64_t *bitmap)
{
    const size_t start = ibp_header_bytes(columns), low_start = 8 * start + ibp_to_byte(form->upper_bits);
    const size_t num_words = (columns + 63) / 64;
    uint32_t found = 0, least = 0;
    memset(bitmap, form->is_complement ? 0xff : 0, 8 * num_words);
    for (uint32_t i = 0; i < form->upper_bits; i += 64) {
        uint64_t bits = ibp_low_bits(ibp_load_bits(src, src_bytes, 8 * start + i), form->upper_bits - i);
        if (!form->is_list) {
            bitmap[i / 64] = bits;
            found += (uint32_t)_mm_popcnt_u64(bits);
            continue;
        }
        for (; bits != 0; bits &= bits - 1, found++) {
            if (found == form->num_positions) return false;
            const uint64_t low =
                ibp_load_field(src, src_bytes, low_start + (size_t)found * form->low_bits, form->low_bits);
            const uint32_t position = (i + (uint32_t)_tzcnt_u64(bits) - found) << form->low_bits | (uint32_t)low;
            if (position < least || position >= columns) return false;
            least = position + 1;
            bitmap[position / 64] ^= (uint64_t)1 << (position % 64);
        }
    }
    if (form->is_complement)
        bitmap[num_words - 1] = ibp_low_bits(bitmap[num_words - 1], columns - 64 * (uint32_t)(num_words - 1));
    return found == form->num_positions;
}

/* Returns a mask of the bits in which unlisted elements may differ from the default. */
static uint64_t ignored_bits(const ibp_planes *planes)
{
    return planes->signed_default ? (uint64_t)1 << (ibp_element_bits(planes) - 1) : 0;
}

/* Sets the highest bits of a row's unlisted elements. These bits are stored in src, beginning at bit `at`. */
IBP_AVX2 static void read_signs(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, size_t at,
                                const uint64_t *listed, uint8_t *row, ibp_scratch *scratch)
{
    const uint32_t columns = ibp_columns_of(cb);
    uint64_t *const signs = take_bitmap(scratch, columns);
    for (uint32_t i = 0; i < columns; i += 64) {
        const uint64_t unlisted = ibp_low_bits(~listed[i / 64], columns - i);
        const uint32_t count = (uint32_t)_mm_popcnt_u64(unlisted);
        signs[i / 64] = _pdep_u64(ibp_load_field(src, src_bytes, at, count), unlisted);
        at += count;
    }
    FOR_LANES(cb->planes.element_bytes, set_signs)(signs, columns, row);
}

IBP_AVX2 static ibp_status decode_listed(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                         ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t columns = ibp_columns_of(cb), header_bytes = ibp_header_bytes(columns),
                   lane_bytes = planes->element_bytes;
    ibp_listed_header header;
    if (!ibp_split_header((uint32_t)ibp_load_field(src, src_bytes, 0, 8 * header_bytes), (uint32_t)src_bytes, columns,
                          &header))
        return IBP_CORRUPT_ROW;
    const uint32_t k = header.num_listed;
    const bool has_values = k > 0 && !header.is_closed;
    const ibp_listed_parts parts = ibp_lay_out_listed(cb, k);
    if (has_values ? parts.values > 8 * src_bytes : parts.values != 8 * src_bytes) return IBP_CORRUPT_ROW;
    FOR_LANES(lane_bytes, fill)(row, columns, planes->default_value & ~ignored_bits(planes));
    if (k == 0 && !planes->signed_default) return IBP_OK;
    uint64_t *const bitmap = take_bitmap(scratch, columns);
    if (k == 0) memset(bitmap, 0, (columns + 63) / 64 * 8);
    if (k != 0 && !read_positions(src, src_bytes, columns, &parts.form, bitmap)) return IBP_CORRUPT_ROW;
    if (planes->signed_default) read_signs(cb, src, src_bytes, parts.signs, bitmap, row, scratch);
    if (!has_values) {
        FOR_LANES(lane_bytes, scatter)((const uint8_t *)&planes->closed_value, 0, bitmap, columns, row);
        return IBP_OK;
    }
    uint8_t *const listed = ibp_take(scratch, (size_t)k * lane_bytes);
    const ibp_status status = decode_values(cb, src, src_bytes, parts.values, k, listed, scratch);
    if (status == IBP_OK) FOR_LANES(lane_bytes, scatter)(listed, 1, bitmap, columns, row);
    return status;
}

static ibp_status decode(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                         ibp_scratch scratch)
{
    return cb->planes.listed ? decode_listed(cb, src, src_bytes, row, &scratch)
                             : decode_values(cb, src, src_bytes, 0, ibp_columns_of(cb), row, &scratch);
}

/* ---- encoding ---- */

/* Extracts the symbols of n elements to lanes of symbol_bytes bytes. symbols: must have room for n lanes of
 * element_bytes bytes. */
IBP_AVX2 static void cut_symbols(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *symbols)
{
    const uint32_t r = planes->residual_bits, lane_bytes = planes->element_bytes, symbol_bytes = planes->symbol_bytes;
    if (ibp_symbol_bits(planes) == 0) {
        memset(symbols, 0, n);
    } else if (symbol_bytes == 1) {
        FOR_LANES(lane_bytes, shift_bytes)(elements, n, planes->rotate, r, symbols);
    } else {
        FOR_LANES(lane_bytes, shift_lanes)(elements, n, planes->rotate, r, symbols);
        for (uint32_t i = 1; i < n && symbol_bytes < lane_bytes; i++)
            if (symbol_bytes == 2)
                ((lane16 *)symbols)[i] = ((lane16 *)symbols)[i * lane_bytes / 2];
            else
                ((lane32 *)symbols)[i] = ((lane32 *)symbols)[2 * i];
    }
}

/* Writes level 0 to `ranks`: the rank of each symbol, followed by zeros. Both arrays must be padded. */
IBP_AVX2 static void rank_symbols(const ibp_planes *planes, const uint8_t *symbols, uint32_t n, uint8_t *ranks)
{
    const uint32_t lane_bytes = planes->symbol_bytes;
    if (planes->per_column)
        FOR_LANES(lane_bytes, rank_in_column)(planes, symbols, n, ranks);
    else
        FOR_LANES(lane_bytes, rank)(planes, symbols, n, ranks);
    memset(ranks + n, 0, 32);
}

/* For each p from 1 to num_planes - 1, sets reaching[p] to the number of elements with a digit in plane p. Sets
 * reaching[num_planes] to the number of elements with a raw symbol. ranks: n ranks, followed by zeros. */
IBP_AVX2 static void count_ranks(const ibp_planes *planes, const uint8_t *ranks, uint32_t n, uint32_t *reaching)
{
    for (uint32_t p = 0, first = 0; p < planes->num_planes; p++) {
        first += ibp_escape_of(planes, p);
        const __m256i least = _mm256_set1_epi8((char)first);
        uint32_t count = 0;
        for (uint32_t i = 0; i < n; i += 32) {
            const __m256i rank = _mm256_loadu_si256((const void *)(ranks + i));
            count += (uint32_t)_mm_popcnt_u32(
                (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_max_epu8(rank, least), rank)));
        }
        reaching[p + 1] = count;
    }
}

/* Writes the digits of a level, and replaces the level with the next level, in place. Zeros must follow the level, and
 * are written after the next level. */
IBP_AVX2 static void strip_level(uint8_t *level, uint32_t n, uint32_t b, uint8_t *dst, size_t dst_bytes)
{
    const __m128i escape = _mm_set1_epi8((char)((1u << b) - 1));
    const uint64_t fields = ibp_lane_fields(1, b);
    uint8_t *next = level;
    size_t at = 0;
    for (uint32_t i = 0; i < n; i += 8, at += b) {
        const __m128i rank = _mm_cvtsi64_si128((int64_t)ibp_load64(level + i)), digit = _mm_min_epu8(rank, escape);
        const uint64_t digits = _pext_u64((uint64_t)_mm_cvtsi128_si64(digit), fields);
        const uint64_t escapes = (uint64_t)_mm_cvtsi128_si64(_mm_cmpeq_epi8(digit, escape));
        if (at + 8 <= dst_bytes)
            ibp_store64(dst + at, digits);
        else
            memcpy(dst + at, &digits, ibp_min_u32(b, (uint32_t)(dst_bytes - at)));
        ibp_store64(next, _pext_u64((uint64_t)_mm_cvtsi128_si64(_mm_sub_epi8(rank, digit)), escapes));
        next += _mm_popcnt_u64(escapes) / 8;
    }
    memset(next, 0, 8);
}

IBP_AVX2 static void write_residuals(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *dst,
                                     size_t at, size_t dst_bytes, ibp_scratch *scratch)
{
    const uint32_t r = planes->residual_bits, lane_bytes = planes->element_bytes;
    if (r == 8) {
        FOR_LANES(lane_bytes, shift_bytes)(elements, n, planes->rotate, 0, dst + at);
        return;
    }
    const uint32_t cut_bytes = r < 8 ? 1 : lane_bytes; /* size in bytes of the lanes that are packed */
    uint8_t *const cut = ibp_take(scratch, (size_t)n * cut_bytes + 8);
    if (r < 8)
        FOR_LANES(lane_bytes, shift_bytes)(elements, n, planes->rotate, 0, cut);
    else
        FOR_LANES(lane_bytes, shift_lanes)(elements, n, planes->rotate, 0, cut);
    memset(cut + n * cut_bytes, 0, 8);
    ibp_pack_fields(cut, n, r, cut_bytes, dst, at, dst_bytes);
}

/* Codes n elements, from which invariant bits have been removed, to dst, beginning at bit `start`. Returns the bit at
 * which the values end. Writes nothing if they would end after byte dst_bytes. */
IBP_AVX2 static size_t encode_coded(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n,
                                    uint8_t *dst, size_t dst_bytes, ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t lane_bytes = planes->symbol_bytes, num_planes = planes->num_planes;
    uint32_t reaching[IBP_MAX_PLANES + 1] = {n};
    uint8_t *const symbols = ibp_take(scratch, (size_t)(n + PADDING) * planes->element_bytes);
    uint8_t *const ranks = ibp_take(scratch, n + PADDING);
    cut_symbols(planes, elements, n, symbols);
    rank_symbols(planes, symbols, n, ranks);
    count_ranks(planes, ranks, n, reaching);
    const ibp_value_parts parts = ibp_lay_out(planes, start, reaching);
    if (parts.end > 8 * dst_bytes) return parts.end;

    const uint32_t num_raw = reaching[num_planes];
    uint64_t *const is_raw = take_bitmap(scratch, n);
    uint8_t *const raw = ibp_take(scratch, (size_t)num_raw * lane_bytes + 8);
    find_raw(planes, ranks, n, is_raw);
    FOR_LANES(lane_bytes, gather)(symbols, is_raw, n, raw);
    memset(raw + num_raw * lane_bytes, 0, 8);
    write_residuals(planes, elements, n, dst, parts.residuals / 8, dst_bytes, scratch);
    for (uint32_t p = 0; p < num_planes; p++)
        strip_level(ranks, reaching[p], planes->digit_bits[p], dst + parts.digits[p] / 8,
                    dst_bytes - parts.digits[p] / 8);
    ibp_pack_fields(raw, num_raw, ibp_symbol_bits(planes), lane_bytes, dst, parts.digits[num_planes] / 8, dst_bytes);
    return parts.end;
}

static const size_t no_coded_form = 8 * IBP_NO_CODED_FORM;

/* Codes n elements as encode_coded does, after it has checked and removed their invariant bits. Returns no_coded_form
 * if the elements have no coded form. */
static size_t encode_values(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n, uint8_t *dst,
                            size_t dst_bytes, ibp_scratch *scratch)
{
    size_t (*const coded_by)(const ibp_codebook *, const uint8_t *, size_t, uint32_t, uint8_t *, size_t,
                             ibp_scratch *) = is_wide(&cb->planes) ? ibp_encode_coded_avx512 : encode_coded;
    if (cb->planes.invariant_bits == 0) return coded_by(cb, elements, start, n, dst, dst_bytes, scratch);
    const ibp_codebook coded = coded_codebook(cb);
    uint8_t *const cut = ibp_take(scratch, (size_t)n * cb->planes.element_bytes);
    if (!FOR_LANES(cb->planes.element_bytes, cut_elements)(&cb->planes, elements, n, cut)) return no_coded_form;
    return coded_by(&coded, cut, start, n, dst, dst_bytes, scratch);
}

/* Writes the highest bits of the unlisted elements to dst, beginning at byte `at`. */
IBP_AVX2 static void write_signs(const ibp_codebook *cb, const uint8_t *row, const uint64_t *listed, size_t at,
                                 uint8_t *dst, size_t dst_bytes, ibp_scratch *scratch)
{
    const uint32_t columns = ibp_columns_of(cb);
    uint64_t *const signs = take_bitmap(scratch, columns);
    FOR_LANES(cb->planes.element_bytes, find_signs)(row, columns, signs);
    ibp_bit_writer w = {dst, dst_bytes, at, 0, 0};
    for (uint32_t i = 0; i < columns; i += 64) {
        const uint64_t unlisted = ibp_low_bits(~listed[i / 64], columns - i);
        ibp_append_bits(&w, _pext_u64(signs[i / 64], unlisted), (uint32_t)_mm_popcnt_u64(unlisted));
    }
    ibp_flush_bits(&w);
}

/* Writes the header and the positions to dst, which has room for them. bitmap: a bit for each column, 1 at the k listed
 * positions. */
IBP_AVX2 static void write_positions(uint32_t columns, uint32_t k, bool closed, const ibp_position_form *form,
                                     const uint64_t *bitmap, uint8_t *dst, size_t dst_bytes)
{
    const uint32_t header = k | (closed ? ibp_closed_bit(columns) : 0), header_bytes = ibp_header_bytes(columns);
    memcpy(dst, &header, header_bytes);
    if (k == 0) return;
    uint8_t *const upper = dst + header_bytes;
    if (!form->is_list) {
        memcpy(upper, bitmap, form->num_bytes);
        return;
    }
    memset(upper, 0, form->num_bytes);
    ibp_bit_writer low = {dst, dst_bytes, header_bytes + ibp_to_byte(form->upper_bits) / 8, 0, 0};
    uint32_t written = 0;
    for (uint32_t i = 0; i < columns; i += 64) {
        uint64_t bits = form->is_complement ? ibp_low_bits(~bitmap[i / 64], columns - i) : bitmap[i / 64];
        for (; bits != 0; bits &= bits - 1, written++) {
            const uint32_t column = i + (uint32_t)_tzcnt_u64(bits), bit = (column >> form->low_bits) + written;
            upper[bit / 8] |= (uint8_t)(1u << (bit % 8));
            ibp_append_bits(&low, ibp_low_bits(column, form->low_bits), form->low_bits);
        }
    }
    ibp_flush_bits(&low);
}

/* Codes a complete listed row. Returns the bit at which the coded row ends, or no_coded_form. */
IBP_AVX2 static size_t encode_listed(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                     ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t columns = ibp_columns_of(cb), lane_bytes = planes->element_bytes;
    uint64_t *const bitmap = take_bitmap(scratch, columns + PADDING);
    uint8_t *const listed = ibp_take(scratch, (size_t)columns * lane_bytes + PADDING);
    const uint64_t mask = ~ignored_bits(planes);
    uint32_t k = 0;
    if (ibp_cpu_features() & IBP_CPU_AVX512) {
        k = ibp_list_avx512(row, columns, planes->default_value, mask, bitmap, listed, lane_bytes);
    } else {
        FOR_LANES(lane_bytes, find_others)(row, columns, planes->default_value, mask, bitmap);
        for (uint32_t i = 0; i < columns; i += 64) k += (uint32_t)_mm_popcnt_u64(bitmap[i / 64]);
        FOR_LANES(lane_bytes, gather)(row, bitmap, columns, listed);
    }
    const bool closed = k > 0 && memcmp(listed, &planes->closed_value, lane_bytes) == 0 &&
                        memcmp(listed, listed + lane_bytes, (size_t)(k - 1) * lane_bytes) == 0;
    const ibp_listed_parts parts = ibp_lay_out_listed(cb, k);
    const bool fits = parts.values <= 8 * dst_bytes;
    if (fits) write_positions(columns, k, closed, &parts.form, bitmap, dst, dst_bytes);
    if (fits && planes->signed_default) write_signs(cb, row, bitmap, parts.signs / 8, dst, dst_bytes, scratch);
    return closed || k == 0 ? parts.values : encode_values(cb, listed, parts.values, k, dst, dst_bytes, scratch);
}

static ibp_status encode(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                         size_t *coded_bytes, ibp_scratch scratch)
{
    const size_t bits = cb->planes.listed ? encode_listed(cb, row, dst, dst_bytes, &scratch)
                                          : encode_values(cb, row, 0, ibp_columns_of(cb), dst, dst_bytes, &scratch);
    *coded_bytes = bits / 8;
    return *coded_bytes > dst_bytes || bits == no_coded_form ? IBP_BUFFER_TOO_SMALL : IBP_OK;
}

const ibp_row_coder ibp_planes_x86 = {NULL, encode, decode};
#endif
