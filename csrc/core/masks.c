/* masks.c - encodes and decodes rows of scheme ibp in plain C (FORMAT.md section 5). It is the reference that every
 * other encoder and decoder is compared with. A coded row consists of bits, the lowest of each byte first:
 *
 *     num_flags participation bits | kept bits of the row, in the order of their positions | zeros up to a byte */
#include "bits.h"
#include "format.h"
#include "schemes.h"

static uint32_t load_word(const uint8_t *row, uint32_t row_bytes, uint32_t w)
{
    uint32_t word = 0;
    if (4 * w + 4 <= row_bytes)
        memcpy(&word, row + 4 * w, 4);
    else
        for (uint32_t i = 4 * w; i < row_bytes; i++) word |= (uint32_t)row[i] << (8 * (i % 4));
    return word;
}

static void store_word(uint8_t *row, uint32_t row_bytes, uint32_t w, uint32_t word)
{
    if (4 * w + 4 <= row_bytes)
        memcpy(row + 4 * w, &word, 4);
    else
        for (uint32_t i = 4 * w; i < row_bytes; i++) row[i] = (uint8_t)(word >> (8 * (i % 4)));
}

/* Returns the participation bits that start in word w of a row. keep: receives a mask of the word's kept bits. */
static uint32_t match_row_word(const ibp_codebook *cb, const uint8_t *row, uint32_t w, uint32_t *keep)
{
    uint32_t mismatch = (load_word(row, cb->row_bytes, w) ^ cb->bitval[w]) & cb->mask[w];
    if (cb->chunk_bytes == 8) {
        const uint32_t other = w ^ 1u; /* words past the row have mask 0 */
        mismatch |= (load_word(row, cb->row_bytes, other) ^ cb->bitval[other]) & cb->mask[other];
    }
    const uint32_t participation = ibp_match_word(mismatch, cb->flags[w], cb->chunk_bytes);
    *keep = ibp_keep_word(participation, cb->mask[w], cb->flags[w], cb->chunk_bytes) &
            ibp_row_bits_of_word(cb->row_bytes, w);
    return participation;
}

static size_t coded_bytes_of(const ibp_codebook *cb, const uint8_t *row)
{
    size_t bits = cb->num_flags;
    for (uint32_t w = 0; 4 * w < cb->row_bytes; w++) {
        uint32_t keep;
        match_row_word(cb, row, w, &keep);
        bits += ibp_popcount(keep);
    }
    return (bits + 7) / 8;
}

static ibp_status encode(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                         size_t *coded_bytes, ibp_scratch scratch)
{
    (void)scratch;
    const size_t num_bytes = coded_bytes_of(cb, row);
    *coded_bytes = num_bytes;
    if (num_bytes > dst_bytes) return IBP_BUFFER_TOO_SMALL;
    memset(dst, 0, num_bytes);
    size_t position = cb->num_flags;
    for (uint32_t w = 0; 4 * w < cb->row_bytes; w++) {
        uint32_t keep;
        const uint32_t participation = match_row_word(cb, row, w, &keep);
        if (ibp_flagged_chunks(cb->flags[w]))
            ibp_or_bits(dst, num_bytes, ibp_flag_position(cb->flags[w]), participation);
        ibp_or_bits(dst, num_bytes, position, ibp_extract(load_word(row, cb->row_bytes, w), keep));
        position += ibp_popcount(keep);
    }
    return IBP_OK;
}

static ibp_status decode(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                         ibp_scratch scratch)
{
    (void)scratch;
    size_t position = cb->num_flags;
    for (uint32_t w = 0; 4 * w < cb->row_bytes; w++) {
        const uint32_t participation = (uint32_t)ibp_load_bits(src, src_bytes, ibp_flag_position(cb->flags[w]));
        const uint32_t keep = ibp_keep_word(participation, cb->mask[w], cb->flags[w], cb->chunk_bytes) &
                              ibp_row_bits_of_word(cb->row_bytes, w);
        const uint32_t kept = ibp_deposit((uint32_t)ibp_load_bits(src, src_bytes, position), keep);
        store_word(row, cb->row_bytes, w, kept | (cb->bitval[w] & ~keep));
        position += ibp_popcount(keep);
    }
    return (position + 7) / 8 == src_bytes ? IBP_OK : IBP_CORRUPT_ROW;
}

const ibp_row_coder ibp_masks_plain = {coded_bytes_of, encode, decode};
