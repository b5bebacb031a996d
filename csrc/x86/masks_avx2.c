/* masks_avx2.c - codes and decodes rows of scheme ibp with BMI2, 64 bits of a row at a time. The bytes and the statuses
 * are the same as those of masks.c. */
#include "../core/schemes.h"

#if IBP_HAS_X86_ROWS
#include "bits_avx2.h"
#include "../core/format.h"

/* The part of a codebook for the 64 bits of a row that begin at byte 4 * w, where w is even. */
typedef struct wide_word {
    uint64_t mask, bitval;
    uint64_t flagged;     /* the lowest bit of each flagged chunk */
    uint32_t flags_entry; /* the entry of flags for the first 32-bit word */
} wide_word;

IBP_AVX2_INLINE wide_word load_wide(const ibp_codebook *cb, uint32_t w, uint32_t chunk_bytes)
{
    const uint64_t flags = ibp_load64((const uint8_t *)(cb->flags + w));
    const uint32_t chunks = ibp_flagged_chunks((uint32_t)flags) | ibp_flagged_chunks((uint32_t)(flags >> 32))
                                                                      << (4 / chunk_bytes);
    return (wide_word){.mask = ibp_load64((const uint8_t *)(cb->mask + w)),
                       .bitval = ibp_load64((const uint8_t *)(cb->bitval + w)),
                       .flagged = _pdep_u64(chunks, ibp_lane_fields(chunk_bytes, 1)),
                       .flags_entry = (uint32_t)flags};
}

/* Returns a word in which all bits of a chunk are 1 if the chunk matches, and 0 if it does not. mismatch: the invariant
 * bits that differ from bitval. */
IBP_AVX2_INLINE uint64_t matching_chunks(uint64_t mismatch, uint32_t chunk_bytes)
{
    const __m128i x = _mm_cvtsi64_si128((int64_t)mismatch), zero = _mm_setzero_si128();
    switch (chunk_bytes) {
    case 1: return (uint64_t)_mm_cvtsi128_si64(_mm_cmpeq_epi8(x, zero));
    case 2: return (uint64_t)_mm_cvtsi128_si64(_mm_cmpeq_epi16(x, zero));
    case 4: return (uint64_t)_mm_cvtsi128_si64(_mm_cmpeq_epi32(x, zero));
    default: return mismatch == 0 ? ~(uint64_t)0 : 0;
    }
}

/* Returns the 8 bytes of a row that begin at byte `at`. Bytes past the row's end are zeros. */
IBP_AVX2_INLINE uint64_t load_row(const uint8_t *row, uint32_t row_bytes, uint32_t at)
{
    return at + 8 <= row_bytes ? ibp_load64(row + at) : ibp_load_number(row + at, row_bytes - at);
}
/* Returns a mask of the bits that lie inside the row, among the 8 bytes that begin at byte `at`. */
IBP_AVX2_INLINE uint64_t row_bits(uint32_t row_bytes, uint32_t at)
{
    return ibp_low_bits(~(uint64_t)0, 8 * (row_bytes - at));
}

IBP_AVX2_INLINE size_t coded_bytes_of(const ibp_codebook *cb, const uint8_t *row, uint32_t chunk_bytes)
{
    size_t bits = cb->num_flags;
    for (uint32_t at = 0; at < cb->row_bytes; at += 8) {
        const uint64_t mask = ibp_load64((const uint8_t *)(cb->mask + at / 4)),
                       bitval = ibp_load64((const uint8_t *)(cb->bitval + at / 4));
        const uint64_t matching = matching_chunks((load_row(row, cb->row_bytes, at) ^ bitval) & mask, chunk_bytes);
        bits += (size_t)_mm_popcnt_u64(~(mask & matching) & row_bits(cb->row_bytes, at));
    }
    return (bits + 7) / 8;
}

IBP_AVX2_INLINE ibp_status encode_of(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                                     size_t *coded_bytes, ibp_scratch *scratch, uint32_t chunk_bytes)
{
    const size_t flags_bytes = cb->num_flags / 8 + 1;
    ibp_bit_writer to_flags = {ibp_take(scratch, flags_bytes), flags_bytes, 0, 0, 0};
    ibp_bit_writer kept = {dst, dst_bytes, cb->num_flags / 8, 0, cb->num_flags % 8};
    for (uint32_t at = 0; at < cb->row_bytes; at += 8) {
        const wide_word word = load_wide(cb, at / 4, chunk_bytes);
        const uint64_t x = load_row(row, cb->row_bytes, at);
        const uint64_t matching = matching_chunks((x ^ word.bitval) & word.mask, chunk_bytes);
        const uint64_t keep = ~(word.mask & matching) & row_bits(cb->row_bytes, at);
        ibp_append_bits(&to_flags, _pext_u64(matching, word.flagged), (uint32_t)_mm_popcnt_u64(word.flagged));
        ibp_append_bits(&kept, _pext_u64(x, keep), (uint32_t)_mm_popcnt_u64(keep));
    }
    *coded_bytes = ibp_join_runs(&to_flags, &kept);
    return *coded_bytes > dst_bytes ? IBP_BUFFER_TOO_SMALL : IBP_OK;
}

IBP_AVX2_INLINE ibp_status decode_of(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                                     ibp_scratch *scratch, uint32_t chunk_bytes)
{
    if (src_bytes < (cb->num_flags + 7) / 8 || src_bytes > (cb->num_flags + 7) / 8 + cb->row_bytes)
        return IBP_CORRUPT_ROW;
    const uint32_t position_mask = ibp_position_mask(cb->num_flags);
    const uint8_t *const padded =
        ibp_pad_row(src, src_bytes, position_mask / 8 + IBP_AVX2_PADDING, IBP_AVX2_PADDING, scratch);
    size_t position = cb->num_flags;
    for (uint32_t at = 0; at < cb->row_bytes; at += 8) {
        const wide_word word = load_wide(cb, at / 4, chunk_bytes);
        const uint32_t flags_at = word.flags_entry & position_mask;
        const uint64_t flags = ibp_load64(padded + flags_at / 8) >> (flags_at % 8);
        const uint64_t matching = _pdep_u64(flags, word.flagged) * ibp_low_bits(~(uint64_t)0, 8 * chunk_bytes);
        const uint64_t keep = ~(word.mask & matching) & row_bits(cb->row_bytes, at);
        if (position > 8 * src_bytes) return IBP_CORRUPT_ROW;
        const uint64_t x = _pdep_u64(ibp_load64_at(padded, position), keep) | (word.bitval & ~keep);
        if (at + 8 <= cb->row_bytes)
            ibp_store64(row + at, x);
        else
            memcpy(row + at, &x, cb->row_bytes - at);
        position += (size_t)_mm_popcnt_u64(keep);
    }
    return (position + 7) / 8 == src_bytes ? IBP_OK : IBP_CORRUPT_ROW;
}

#define TARGET IBP_AVX2
#define CODER ibp_masks_avx2
#include "masks_coder.h"
#endif
