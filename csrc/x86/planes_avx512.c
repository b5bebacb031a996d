/* planes_avx512.c - codes and decodes rows of scheme planes with AVX-512. The bytes and the statuses are the same as
 * those of planes.c. This file codes rows if symbols have at most nine bits, all columns share the same entries, and
 * the number of residual bits suits 64-bit words (fits_words). It decodes rows if, in addition, rows are dense and
 * symbols have at most eight bits. planes_avx2.c codes and decodes all other rows.
 *
 * Residuals, digits and raw symbols are all fields of a fixed number of bits. Each step unpacks fields to, or packs
 * them from, a vector with 64 bytes of lanes. The vector is treated as eight 64-bit words; the fields of a word's lanes
 * are contiguous in the packed bytes, and the words follow one another.
 *
 * Coding and decoding go through *levels*, which are arrays of bytes. Level p has a byte for each element with a digit
 * in plane p; the last level has a byte for each raw symbol. A decoder reads the digits of all levels from the first to
 * the last, and then turns them into symbols from the last to the first. An encoder begins with the ranks of all
 * symbols; a rank is the index of a symbol's entry. It turns each level of ranks into digits and the next level. */
#include "../core/schemes.h"

#if IBP_HAS_X86_ROWS
#include "bits_avx512.h"
#include "../core/planes_layout.h"
#include "planes_avx512.h"

enum {
    VECTOR = IBP_VECTOR_BYTES,
    PADDING = VECTOR,           /* number of bytes past a level that may be read and written */
    LEVELS = IBP_MAX_PLANES + 1 /* one for each plane, and one for raw symbols */
};

IBP_AVX512_INLINE __m512i all_words(uint64_t x) { return _mm512_set1_epi64((int64_t)x); }

/* Copies the lowest byte of each 64-bit word to all of its bytes. */
IBP_AVX512_INLINE __m512i all_bytes(__m512i words)
{
    return _mm512_shuffle_epi8(words, _mm512_set4_epi64(0x0808080808080808, 0, 0x0808080808080808, 0));
}

/* Returns the bits of a where mask is 1, and the bits of b elsewhere. */
IBP_AVX512_INLINE __m512i select_bits(__m512i mask, __m512i a, __m512i b)
{
    return _mm512_ternarylogic_epi64(mask, a, b, 0xca);
}

/* ---- fields ---- */

static const uint64_t byte_numbers = 0x0706050403020100, byte_ones = 0x0101010101010101;

/* Returns the number of packed bits for a 64-bit word of lanes: `bits` for each of its lanes. */
IBP_AVX512_INLINE uint32_t bits_of_word(uint32_t bits, uint32_t lane_bytes) { return 8 / lane_bytes * bits; }

/* Returns, for each 64-bit word of lanes, the bit at which the fields of the word begin. */
IBP_AVX512_INLINE __m512i starts_of_words(uint32_t word_bits)
{
    return _mm512_mul_epu32(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), all_words(word_bits));
}

/* The constants that unpack fields to lanes. bytes: for each 64-bit word of lanes, the indices of the packed bytes that
 * contain its fields. shifts: for each byte of the word, the position of its first bit in these packed bytes. mask: the
 * bits of the lanes that are kept. */
typedef struct unpacking {
    __m512i bytes, shifts, mask;
} unpacking;

IBP_AVX512_INLINE unpacking unpacking_of(uint32_t bits, uint32_t lane_bytes)
{
    const __m512i starts = starts_of_words(bits_of_word(bits, lane_bytes));
    const uint64_t lanes = byte_numbers >> _tzcnt_u32(lane_bytes) & 7 * byte_ones,
                   in_lanes = byte_numbers & (lane_bytes - 1) * byte_ones;
    return (unpacking){
        .bytes = _mm512_add_epi8(all_bytes(_mm512_srli_epi64(starts, 3)), all_words(byte_numbers)),
        .shifts =
            _mm512_add_epi8(all_bytes(_mm512_and_si512(starts, all_words(7))), all_words(lanes * bits + in_lanes * 8)),
        .mask = all_words(ibp_lane_fields(lane_bytes, bits)),
    };
}

IBP_AVX512_INLINE __m512i unpack(const unpacking *u, __m512i fields)
{
    return _mm512_and_si512(_mm512_multishift_epi64_epi8(u->shifts, _mm512_permutexvar_epi8(u->bytes, fields)),
                            u->mask);
}

/* The constants that pack lanes to fields, in two steps. The first step joins the fields of each 64-bit word: in words
 * of 16, then 32, then 64 bits, the upper half moves down to the end of the lower half's fields, unless a half is
 * smaller than a lane. The second step joins the words: each word is shifted up by the bit offset (0 to 7) of its
 * fields in their first byte, whose low bits come from the end of the word before it. Then the complete bytes of each
 * word are stored. */
typedef struct packing {
    __m512i lower[3], down[3];     /* for each of three steps: lower: the bits of the lower half's fields; down: the
                                      distance that the upper half moves */
    __m512i mask, offset, carried; /* mask: the bits of all fields; offset: the distance that a word moves up; carried:
                                      the distance that the word before it moves down, so that its last bits fill up
                                      the first byte */
    __mmask64 bytes;               /* the whole bytes of each word */
} packing;

IBP_AVX512_INLINE packing packing_of(uint32_t bits, uint32_t lane_bytes)
{
    const uint32_t word_bits = bits_of_word(bits, lane_bytes);
    const __m512i starts = starts_of_words(word_bits), ends = _mm512_add_epi64(starts, all_words(word_bits));
    packing p = {.mask = all_words(ibp_low_bits(~(uint64_t)0, word_bits))};
    for (uint32_t step = 0, half = 1; step < 3; step++, half *= 2) {
        const uint32_t filled = half < lane_bytes ? 8 * half : half / lane_bytes * bits;
        p.lower[step] = all_words(ibp_lane_fields(2 * half, filled));
        p.down[step] = all_words(8 * half - filled);
    }
    p.offset = _mm512_and_si512(starts, all_words(7));
    p.carried = _mm512_sub_epi64(all_words(word_bits), p.offset);
    const __m512i num_bytes = _mm512_sub_epi64(_mm512_srli_epi64(ends, 3), _mm512_srli_epi64(starts, 3));
    p.bytes = _mm512_cmplt_epu8_mask(all_words(byte_numbers), all_bytes(num_bytes));
    return p;
}

IBP_AVX512_INLINE __m512i pack(const packing *p, __m512i x)
{
    for (uint32_t step = 0; step < 3; step++) x = select_bits(p->lower[step], x, _mm512_srlv_epi64(x, p->down[step]));
    x = _mm512_and_si512(x, p->mask);
    const __m512i before = _mm512_alignr_epi64(x, x, 7);
    return _mm512_maskz_compress_epi8(
        p->bytes, _mm512_or_si512(_mm512_sllv_epi64(x, p->offset), _mm512_srlv_epi64(before, p->carried)));
}

/* ---- elements ---- */

/* The constants that rotate the lanes of a vector. */
typedef struct rotation {
    __m512i left, right, low; /* left, right: the distances to shift; low: the bits that come from the right shift */
} rotation;

IBP_AVX512_INLINE rotation rotation_of(uint32_t left, uint32_t lane_bytes)
{
    const uint32_t by = left % (8 * lane_bytes);
    return (rotation){all_words(by), all_words(by ? 8 * lane_bytes - by : 0),
                      all_words(ibp_lane_fields(lane_bytes, by))};
}

IBP_AVX512_INLINE __m512i rotate(const rotation *r, __m512i x)
{
    return select_bits(r->low, _mm512_srlv_epi64(x, r->right), _mm512_sllv_epi64(x, r->left));
}

/* ---- decoding ---- */

/* Unpacks the n digits of a level, of `bits` bits each. level is padded. Returns the number of escapes, which are the
 * digits whose bits are all 1. */
IBP_AVX512 static uint32_t read_level(const uint8_t *src, size_t src_bytes, uint32_t n, uint32_t bits, uint8_t *level)
{
    const unpacking digits = unpacking_of(bits, 1);
    uint32_t num_escapes = 0;
    for (uint32_t i = 0; i < n; i += VECTOR) {
        const size_t at = (size_t)i / 8 * bits;
        const __m512i digit = unpack(&digits, ibp_load_part(src + at, src_bytes - at));
        _mm512_storeu_si512(level + i, digit);
        num_escapes += (uint32_t)_mm_popcnt_u64(_mm512_cmpeq_epi8_mask(digit, digits.mask) & ibp_first_bytes(n - i));
    }
    return num_escapes;
}

/* Replaces the n digits of a level with bytes: a digit with the low bits of its entry, and an escape with the next byte
 * of the next level. All arrays are padded. */
IBP_AVX512 static void name_level(uint8_t *level, uint32_t n, uint32_t escape, const uint8_t *entries,
                                  uint32_t symbol_bits, const uint8_t *next)
{
    const __m128i mask = _mm_set1_epi8((char)ibp_low_bits(255, symbol_bits));
    const __m512i named =
        _mm512_broadcast_i32x4(_mm_and_si128(mask, _mm_maskz_loadu_epi8((__mmask16)((1u << escape) - 1), entries)));
    for (uint32_t i = 0; i < n; i += VECTOR) {
        const __m512i digit = _mm512_loadu_si512(level + i);
        const __mmask64 escapes = _mm512_cmpeq_epi8_mask(digit, _mm512_set1_epi8((char)escape));
        _mm512_storeu_si512(
            level + i, _mm512_mask_expand_epi8(_mm512_shuffle_epi8(named, digit), escapes, _mm512_loadu_si512(next)));
        next += _mm_popcnt_u64(escapes);
    }
}

/* Combines each residual at the beginning of src with its symbol into an element. symbols is padded. */
IBP_AVX512 static void join_elements(const ibp_planes *planes, const uint8_t *src, size_t src_bytes,
                                     const uint8_t *symbols, uint8_t *row, uint32_t row_bytes)
{
    const uint32_t bits = planes->residual_bits, lane_bytes = planes->element_bytes;
    const unpacking residuals = unpacking_of(bits, lane_bytes);
    const rotation back = rotation_of(8 * lane_bytes - planes->rotate, lane_bytes);
    const __mmask64 lanes = ~(uint64_t)0 / ((1u << lane_bytes) - 1);
    const __m512i shift = all_words(bits);
    for (uint32_t at = 0; at < row_bytes; at += VECTOR, symbols += VECTOR / lane_bytes) {
        const size_t from = (size_t)at / (8 * lane_bytes) * bits;
        const __m512i residual = unpack(&residuals, ibp_load_part(src + from, src_bytes - from));
        const __m512i symbol = _mm512_maskz_expand_epi8(lanes, _mm512_loadu_si512(symbols));
        ibp_store_part(row + at, row_bytes - at,
                       rotate(&back, _mm512_or_si512(residual, _mm512_sllv_epi64(symbol, shift))));
    }
}

IBP_AVX512 ibp_status ibp_decode_coded_avx512(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes,
                                              size_t start, uint32_t n, uint8_t *elements, ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t num_planes = planes->num_planes;
    src += start / 8, src_bytes -= start / 8;
    uint8_t *levels[LEVELS] = {ibp_take(scratch, (size_t)(num_planes + 1) * (n + PADDING))};
    uint32_t reaching[LEVELS + 1] = {n};
    size_t at = ibp_to_byte((size_t)n * planes->residual_bits) / 8;
    for (uint32_t p = 0; p <= num_planes; p++) {
        const uint32_t bits = p < num_planes ? planes->digit_bits[p] : ibp_symbol_bits(planes);
        const size_t end = at + ibp_to_byte((size_t)reaching[p] * bits) / 8;
        if (p < num_planes ? end > src_bytes : end != src_bytes) return IBP_CORRUPT_ROW;
        if (p > 0) levels[p] = levels[p - 1] + reaching[p - 1] + PADDING;
        reaching[p + 1] = read_level(src + at, src_bytes - at, reaching[p], bits, levels[p]);
        at = end;
    }
    for (uint32_t p = num_planes, first = planes->num_entries; p-- > 0;) {
        first -= ibp_escape_of(planes, p);
        name_level(levels[p], reaching[p], ibp_escape_of(planes, p), (const uint8_t *)planes->entries + first,
                   ibp_symbol_bits(planes), levels[p + 1]);
    }
    join_elements(planes, src, src_bytes, levels[0], elements, n * planes->element_bytes);
    return IBP_OK;
}

/* ---- encoding ---- */

/* Returns a mask of the lanes of x in which any bit of `mask` is set. */
IBP_AVX512_INLINE uint64_t test_lanes(__m512i x, __m512i mask, uint32_t lane_bytes)
{
    return lane_bytes == 1   ? _mm512_test_epi8_mask(x, mask)
           : lane_bytes == 2 ? _mm512_test_epi16_mask(x, mask)
           : lane_bytes == 4 ? _mm512_test_epi32_mask(x, mask)
                             : _mm512_test_epi64_mask(x, mask);
}

/* Returns the lanes of x whose bits in `lanes` are set, one after the other. */
IBP_AVX512_INLINE __m512i compress_lanes(uint64_t lanes, __m512i x, uint32_t lane_bytes)
{
    return lane_bytes == 1   ? _mm512_maskz_compress_epi8(lanes, x)
           : lane_bytes == 2 ? _mm512_maskz_compress_epi16((__mmask32)lanes, x)
           : lane_bytes == 4 ? _mm512_maskz_compress_epi32((__mmask16)lanes, x)
                             : _mm512_maskz_compress_epi64((__mmask8)lanes, x);
}

IBP_AVX512_INLINE uint32_t list_of(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap,
                                   uint8_t *listed, uint32_t lane_bytes)
{
    const uint64_t ones = ibp_lane_fields(lane_bytes, 1), bits = ibp_low_bits(~(uint64_t)0, 8 * lane_bytes);
    const __m512i values = all_words((value & bits) * ones), masks = all_words((mask & bits) * ones);
    uint32_t count = 0;
    for (uint32_t i = 0; i < n; i += VECTOR / lane_bytes) {
        const __m512i x = ibp_load_part(row + i * lane_bytes, (n - i) * lane_bytes);
        const uint64_t lanes = test_lanes(_mm512_xor_si512(x, values), masks, lane_bytes) & ibp_first_bytes(n - i);
        ibp_store64((uint8_t *)bitmap + i / 8, lanes);
        _mm512_storeu_si512(listed + (size_t)count * lane_bytes, compress_lanes(lanes, x, lane_bytes));
        count += (uint32_t)_mm_popcnt_u64(lanes);
    }
    return count;
}
IBP_AVX512 uint32_t ibp_list_avx512(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap,
                                    uint8_t *listed, uint32_t lane_bytes)
{
    return IBP_BY_SIZE(lane_bytes, list_of, row, n, value, mask, bitmap, listed);
}

/* Extracts the low byte of each element's symbol and, if symbols have nine bits, the ninth bit. symbols and ninths are
 * padded. */
IBP_AVX512 static void cut_symbols(const ibp_planes *planes, const uint8_t *elements, uint32_t num_bytes,
                                   uint8_t *symbols, uint8_t *ninths)
{
    const uint32_t lane_bytes = planes->element_bytes, per_word = 8 / lane_bytes, symbol_bits = ibp_symbol_bits(planes);
    const rotation to_coded = rotation_of(planes->rotate, lane_bytes);
    /* For each 64-bit word, the bit positions at which its symbols begin. */
    const __m512i starts = all_words(byte_numbers * 8 * lane_bytes + byte_ones * planes->residual_bits);
    const __m512i mask = all_words(byte_ones * ibp_low_bits(255, symbol_bits)),
                  ninth = all_words(ibp_lane_fields(lane_bytes, 1) << (planes->residual_bits + 8) % 64);
    const __mmask64 bytes = byte_ones * ibp_low_bits(255, per_word);
    for (uint32_t at = 0; at < num_bytes; at += VECTOR, symbols += 8 * per_word) {
        const __m512i coded = rotate(&to_coded, ibp_load_part(elements + at, num_bytes - at)),
                      words = _mm512_multishift_epi64_epi8(starts, coded);
        _mm512_storeu_si512(symbols, _mm512_maskz_compress_epi8(bytes, _mm512_and_si512(words, mask)));
        if (symbol_bits > 8) ibp_store64(ninths + at / lane_bytes / 8, test_lanes(coded, ninth, lane_bytes));
    }
}

/* Looks up each byte of x in a table of 256 bytes, which is given as four vectors. */
IBP_AVX512_INLINE __m512i look_up(const __m512i *quarters, __m512i x)
{
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(x), _mm512_permutex2var_epi8(quarters[0], x, quarters[1]),
                                  _mm512_permutex2var_epi8(quarters[2], x, quarters[3]));
}

/* Ranks n symbols. The rank is num_entries if no entry equals the symbol; such symbols are copied to `raw`,
 * symbol_bytes bytes each. Returns the number of copied symbols. symbol_bytes is a constant at every call: 2 if symbols
 * have ninth bits, else 1. With 1, `raw` may be the same array as `symbols`. All arrays are padded. */
IBP_AVX512_INLINE uint32_t rank_symbols(const ibp_planes *planes, const uint8_t *symbols, const uint8_t *ninths,
                                        uint32_t n, uint8_t *ranks, uint8_t *raw, uint32_t symbol_bytes)
{
    uint8_t table[8 * VECTOR];
    const size_t size = sizeof table / 2 * symbol_bytes;
    memset(table, (int)planes->num_entries, size);
    for (uint32_t e = planes->num_entries; e-- > 0;) {
        const uint64_t entry = ibp_load_number((const uint8_t *)planes->entries + e * symbol_bytes, symbol_bytes);
        if (entry < size) table[entry] = (uint8_t)e;
    }
    __m512i parts[8];
    for (uint32_t q = 0; q < 4 * symbol_bytes; q++) parts[q] = _mm512_loadu_si512(table + q * VECTOR);

    uint32_t num_raw = 0;
    for (uint32_t i = 0; i < n; i += VECTOR) {
        const uint64_t ninth = symbol_bytes == 1 ? 0 : ibp_load64(ninths + i / 8);
        const __m512i symbol = _mm512_loadu_si512(symbols + i), low = look_up(parts, symbol),
                      rank = symbol_bytes == 1 ? low : _mm512_mask_blend_epi8(ninth, low, look_up(parts + 4, symbol));
        uint64_t is_raw =
            _mm512_cmpeq_epi8_mask(rank, _mm512_set1_epi8((char)planes->num_entries)) & ibp_first_bytes(n - i);
        _mm512_storeu_si512(ranks + i, rank);
        if (symbol_bytes == 1) {
            _mm512_storeu_si512(raw + num_raw, _mm512_maskz_compress_epi8(is_raw, symbol));
            num_raw += (uint32_t)_mm_popcnt_u64(is_raw);
            continue;
        }
        for (; is_raw != 0; is_raw &= is_raw - 1, num_raw++) {
            const uint64_t at = _tzcnt_u64(is_raw);
            raw[2 * num_raw] = symbols[i + at], raw[2 * num_raw + 1] = ninth >> at & 1;
        }
    }
    return num_raw;
}

/* Writes the digits of a level of n ranks, unless dst is NULL. Replaces the level with the next level, in place. level
 * is padded. Returns the number of ranks of the next level. */
IBP_AVX512 static uint32_t strip_level(uint8_t *level, uint32_t n, uint32_t bits, uint8_t *dst)
{
    const packing digits = packing_of(bits, 1);
    const __m512i escape = _mm512_set1_epi8((char)((1u << bits) - 1));
    const size_t end = ibp_to_byte((size_t)n * bits) / 8;
    uint8_t *next = level;
    for (uint32_t i = 0; i < n; i += VECTOR) {
        const __m512i rank = ibp_load_part(level + i, n - i), digit = _mm512_min_epu8(rank, escape);
        const __mmask64 escapes = _mm512_cmpeq_epi8_mask(digit, escape);
        const uint32_t at = i / 8 * bits;
        if (dst) ibp_store_part(dst + at, end - at < 8 * bits ? end - at : 8 * bits, pack(&digits, digit));
        _mm512_storeu_si512(next, _mm512_maskz_compress_epi8(escapes, _mm512_sub_epi8(rank, escape)));
        next += _mm_popcnt_u64(escapes);
    }
    return (uint32_t)(next - level);
}

/* Rotates lanes left by `rotated` bits, and packs the low `bits` bits of each lane to dst. num_bytes: size of the
 * lanes. */
IBP_AVX512 static void write_fields(const uint8_t *lanes, uint32_t num_bytes, uint32_t lane_bytes, uint32_t rotated,
                                    uint32_t bits, uint8_t *dst)
{
    const packing fields = packing_of(bits, lane_bytes);
    const rotation to_coded = rotation_of(rotated, lane_bytes);
    const size_t end = ibp_to_byte((size_t)num_bytes / lane_bytes * bits) / 8, step = bits_of_word(bits, lane_bytes);
    for (uint32_t at = 0; at < num_bytes; at += VECTOR, dst += step) {
        const size_t left = end - (size_t)at / VECTOR * step;
        ibp_store_part(dst, left < step ? left : step,
                       pack(&fields, rotate(&to_coded, ibp_load_part(lanes + at, num_bytes - at))));
    }
}

IBP_AVX512 size_t ibp_encode_coded_avx512(const ibp_codebook *cb, const uint8_t *elements, size_t start, uint32_t n,
                                          uint8_t *dst, size_t dst_bytes, ibp_scratch *scratch)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t r = planes->residual_bits, symbol_bits = ibp_symbol_bits(planes), lane_bytes = planes->symbol_bytes,
                   num_bytes = n * planes->element_bytes;
    uint8_t *const symbols = ibp_take(scratch, n + PADDING), *const level = ibp_take(scratch, n + PADDING);
    uint8_t *const ninths = ibp_take(scratch, n / 8 + PADDING);
    uint8_t *const raw = lane_bytes == 1 ? symbols : ibp_take(scratch, (size_t)(n + PADDING) * lane_bytes);
    cut_symbols(planes, elements, num_bytes, symbols, ninths);
    const uint32_t num_raw = lane_bytes == 1 ? rank_symbols(planes, symbols, ninths, n, level, raw, 1)
                                             : rank_symbols(planes, symbols, ninths, n, level, raw, 2);
    size_t at = start / 8 + ibp_to_byte((size_t)n * r) / 8, end;
    if (at <= dst_bytes && r > 0)
        write_fields(elements, num_bytes, planes->element_bytes, planes->rotate, r, dst + start / 8);
    for (uint32_t p = 0, reaching = n; p < planes->num_planes; p++, at = end) {
        end = at + ibp_to_byte((size_t)reaching * planes->digit_bits[p]) / 8;
        reaching = strip_level(level, reaching, planes->digit_bits[p], end <= dst_bytes ? dst + at : NULL);
    }
    end = at + ibp_to_byte((size_t)num_raw * symbol_bits) / 8;
    if (end <= dst_bytes && end > at) write_fields(raw, num_raw * lane_bytes, lane_bytes, 0, symbol_bits, dst + at);
    return 8 * end;
}

/* ---- which codebooks are accepted ---- */

/* Returns whether residuals can be packed and unpacked in 64-bit words of lanes. The fields of a word may begin at any
 * bit of a byte, and must end within 64 bits of the beginning of that byte. A word may share a byte only with the word
 * before it. */
static bool fits_words(const ibp_planes *planes)
{
    const uint32_t word_bits = 8 / planes->element_bytes * planes->residual_bits;
    const uint32_t largest_offset = word_bits % 8 == 0 ? 0 : word_bits % 4 == 0 ? 4 : word_bits % 2 == 0 ? 6 : 7;
    return word_bits + largest_offset <= 64 && (word_bits == 0 || word_bits >= 8);
}

bool ibp_takes_avx512(const ibp_planes *planes)
{
    return !planes->per_column && ibp_symbol_bits(planes) <= 9 && fits_words(planes);
}

#endif
