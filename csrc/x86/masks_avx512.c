/* masks_avx512.c - codes and decodes rows of scheme ibp with AVX-512. The bytes and the statuses are the same as those
 * of masks.c. The coders compare a row with the masks in blocks of 64 bytes. They move only the kept bits
 * of each block, which are the bits that the coded row stores, 64 at a time, as masks_avx2.c does. */
#include "../core/schemes.h"

#if IBP_HAS_X86_ROWS
#include "../core/greedy_gain.h"
#include "bits_avx512.h"
#include "../core/format.h"

enum { BLOCK = IBP_VECTOR_BYTES, WORDS = BLOCK / 8 };

/* The part of a codebook for a block of a row. */
typedef struct block {
    __m512i mask, bitval;
    uint64_t flagged;     /* bit c is set if chunk c of the block is flagged */
    uint32_t flags_entry; /* the entry of flags for the first 32-bit word */
} block;

IBP_AVX512_INLINE block load_block(const ibp_codebook *cb, uint32_t at, uint32_t chunk_bytes)
{
    const size_t left = 4 * ibp_codebook_words(cb->row_bytes) - at;
    const uint32_t *const flags = cb->flags + at / 4,
                          chunks = chunk_bytes < 4 ? 4 / chunk_bytes : 1; /* number of chunks that an entry of flags
                                                                             describes */
    block b = {.mask = ibp_load_part(cb->mask + at / 4, left),
               .bitval = ibp_load_part(cb->bitval + at / 4, left),
               .flags_entry = *flags};
    const __m512i words = ibp_load_part(flags, left);
    for (uint32_t chunk = 0; chunk < chunks; chunk++) {
        const uint64_t flagged = _mm512_test_epi32_mask(words, _mm512_set1_epi32(1 << (IBP_FLAG_POS_BITS + chunk)));
        b.flagged |= _pdep_u64(flagged, ~(uint64_t)0 / ((1u << chunks) - 1) << chunk);
    }
    if (chunk_bytes == 8) b.flagged = _pext_u64(b.flagged, 0x5555); /* a chunk's flag is in the first of two words */
    return b;
}

/* Returns a mask in which bit c is set if chunk c of a block matches. row: the bytes of the row in this block. */
IBP_AVX512_INLINE uint64_t matching_chunks(const block *b, __m512i row, uint32_t chunk_bytes)
{
    const __m512i x = _mm512_and_si512(_mm512_xor_si512(row, b->bitval), b->mask);
    switch (chunk_bytes) {
    case 1: return _mm512_testn_epi8_mask(x, x);
    case 2: return _mm512_testn_epi16_mask(x, x);
    case 4: return _mm512_testn_epi32_mask(x, x);
    default: return _mm512_testn_epi64_mask(x, x);
    }
}

/* Returns x with only the chunks whose bits in `chunks` are 1. The other chunks become 0. */
IBP_AVX512_INLINE __m512i chunks_of(__m512i x, uint64_t chunks, uint32_t chunk_bytes)
{
    switch (chunk_bytes) {
    case 1: return _mm512_maskz_mov_epi8(chunks, x);
    case 2: return _mm512_maskz_mov_epi16((__mmask32)chunks, x);
    case 4: return _mm512_maskz_mov_epi32((__mmask16)chunks, x);
    default: return _mm512_maskz_mov_epi64((__mmask8)chunks, x);
    }
}

/* Returns a mask of the bits, among the first num_bytes bytes of a block, that are kept in the coded row. matching: a
 * mask of the chunks that match. */
IBP_AVX512_INLINE __m512i kept_bits(const block *b, uint64_t matching, size_t num_bytes, uint32_t chunk_bytes)
{
    const __m512i left_out = chunks_of(b->mask, matching, chunk_bytes);
    return _mm512_maskz_mov_epi8(ibp_first_bytes(num_bytes), _mm512_xor_si512(left_out, _mm512_set1_epi8(-1)));
}

IBP_AVX512_INLINE size_t coded_bytes_of(const ibp_codebook *cb, const uint8_t *row, uint32_t chunk_bytes)
{
    __m512i counts = _mm512_setzero_si512();
    for (uint32_t at = 0; at < cb->row_bytes; at += BLOCK) {
        const size_t left = cb->row_bytes - at;
        const block b = load_block(cb, at, chunk_bytes);
        const __m512i x = ibp_load_part(row + at, left);
        const uint64_t matching = matching_chunks(&b, x, chunk_bytes);
        counts = _mm512_add_epi64(counts, _mm512_popcnt_epi64(kept_bits(&b, matching, left, chunk_bytes)));
    }
    return (cb->num_flags + (size_t)_mm512_reduce_add_epi64(counts) + 7) / 8;
}

IBP_AVX512_INLINE ibp_status encode_of(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                       size_t *coded_bytes, ibp_scratch *scratch, uint32_t chunk_bytes)
{
    const uint32_t row_bytes = cb->row_bytes, num_flags = cb->num_flags;
    const size_t flags_bytes = num_flags / 8 + 1;
    ibp_bit_writer to_flags = {ibp_take(scratch, flags_bytes), flags_bytes, 0, 0, 0},
                   kept = {dst, dst_bytes, num_flags / 8, 0, num_flags % 8};
    for (uint32_t at = 0; at < row_bytes; at += BLOCK) {
        const size_t left = row_bytes - at;
        const block b = load_block(cb, at, chunk_bytes);
        const __m512i x = ibp_load_part(row + at, left);
        const uint64_t matching = matching_chunks(&b, x, chunk_bytes);
        ibp_append_bits(&to_flags, _pext_u64(matching, b.flagged), (uint32_t)_mm_popcnt_u64(b.flagged));
        uint64_t words[WORDS], keep[WORDS];
        _mm512_storeu_si512(words, x);
        _mm512_storeu_si512(keep, kept_bits(&b, matching, left, chunk_bytes));
        for (uint32_t w = 0; w < WORDS; w++)
            ibp_append_bits(&kept, _pext_u64(words[w], keep[w]), (uint32_t)_mm_popcnt_u64(keep[w]));
    }
    *coded_bytes = ibp_join_runs(&to_flags, &kept);
    return *coded_bytes > dst_bytes ? IBP_BUFFER_TOO_SMALL : IBP_OK;
}

/* Number of bytes past the end of a coded row that decoding a block may read before the row is found to be corrupt. */
enum { PADDING = BLOCK + 16 };

IBP_AVX512_INLINE ibp_status decode_of(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                       ibp_scratch *scratch, uint32_t chunk_bytes)
{
    const uint32_t row_bytes = cb->row_bytes, num_flags = cb->num_flags;
    if (src_bytes < (num_flags + 7) / 8 || src_bytes > (num_flags + 7) / 8 + row_bytes) return IBP_CORRUPT_ROW;
    const uint32_t position_mask = ibp_position_mask(num_flags);
    const uint8_t *const padded = ibp_pad_row(src, src_bytes, position_mask / 8 + PADDING, PADDING, scratch);
    size_t position = num_flags;
    for (uint32_t at = 0; at < row_bytes; at += BLOCK) {
        if (position > 8 * src_bytes) return IBP_CORRUPT_ROW;
        const size_t left = row_bytes - at;
        const block b = load_block(cb, at, chunk_bytes);
        const uint64_t matching = _pdep_u64(ibp_load64_at(padded, b.flags_entry & position_mask), b.flagged);
        const __m512i kept = kept_bits(&b, matching, left, chunk_bytes);
        uint64_t keep[WORDS], words[WORDS];
        _mm512_storeu_si512(keep, kept);
        _mm512_storeu_si512(words, _mm512_andnot_si512(kept, b.bitval));
        uint8_t last[BLOCK], *const out = left < BLOCK ? last : row + at;
        for (uint32_t w = 0; w < WORDS; w++) {
            ibp_store64(out + 8 * w, _pdep_u64(ibp_load64_at(padded, position), keep[w]) | words[w]);
            position += (size_t)_mm_popcnt_u64(keep[w]);
        }
        if (left < BLOCK) memcpy(row + at, last, left);
    }
    return (position + 7) / 8 == src_bytes ? IBP_OK : IBP_CORRUPT_ROW;
}

#define TARGET IBP_AVX512
#define CODER ibp_masks_avx512
#include "masks_coder.h"

IBP_AVX512 uint64_t ibp_greedy_gain_avx512(const uint64_t *columns, uint32_t num_bits, uint32_t num_rows)
{
    return ibp_greedy_gain(columns, num_bits, num_rows);
}
#endif
