/* codebook.c - from rows to masks (the paper's section 4.1), and from masks to the working codebook. */
#include "format.h"
#include "ibp.h"

#include <string.h>

size_t ibp_codebook_words(uint32_t row_bytes) { return ((size_t)row_bytes + 15u) / 16u * 4u; }

static bool chunk_has_mask(const uint8_t *mask, uint32_t row_bytes, uint32_t first, uint32_t chunk_bytes)
{
    for (uint32_t i = first; i < first + chunk_bytes && i < row_bytes; i++)
        if (mask[i] != 0) return true;
    return false;
}

ibp_status ibp_build_codebook(const uint8_t *mask, const uint8_t *bitval, uint32_t row_bytes, uint32_t chunk_bytes, bool flag_all,
                              uint32_t *words, ibp_codebook *out)
{
    if (row_bytes < 1 || row_bytes > IBP_MAX_ROW_BYTES) return IBP_INVALID_ARGUMENT;
    if (chunk_bytes != 1 && chunk_bytes != 2 && chunk_bytes != 4 && chunk_bytes != 8) return IBP_INVALID_ARGUMENT;
    for (uint32_t i = 0; i < row_bytes; i++)
        if (bitval[i] & ~mask[i]) return IBP_INVALID_ARGUMENT;

    const size_t num_words = ibp_codebook_words(row_bytes);
    uint32_t *const mask_words = words, *const bitval_words = words + num_words, *const flags = words + 2 * num_words;
    memset(words, 0, 3 * num_words * sizeof *words);
    for (uint32_t i = 0; i < row_bytes; i++) {
        mask_words[i / 4] |= (uint32_t)mask[i] << (8 * (i % 4));
        bitval_words[i / 4] |= (uint32_t)bitval[i] << (8 * (i % 4));
    }
    uint32_t position = 0, chunk_position = 0;
    for (uint32_t first = 0; first < row_bytes; first += chunk_bytes) {
        const uint32_t flagged = flag_all || chunk_has_mask(mask, row_bytes, first, chunk_bytes);
        if (first % 4 == 0) flags[first / 4] = position;
        flags[first / 4] |= flagged << (IBP_FLAG_POS_BITS + first % 4 / chunk_bytes);
        chunk_position = position;
        position += flagged;
        if (chunk_bytes == 8 && first + 4 < row_bytes) flags[first / 4 + 1] = chunk_position;
    }
    *out = (ibp_codebook){.scheme = IBP_SCHEME_IBP,
                          .row_bytes = row_bytes,
                          .mask = mask_words,
                          .bitval = bitval_words,
                          .flags = flags,
                          .chunk_bytes = chunk_bytes,
                          .num_flags = position};
    return IBP_OK;
}

/* The bits of a byte as eight bytes of 0 or 1, bit 0 lowest. */
static uint64_t spread_bits(uint8_t byte)
{
    const uint64_t one_bit_each = byte * 0x0101010101010101u & 0x8040201008040201u;
    return (one_bit_each + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
}

enum { COLUMNS = 512, ROWS_BEFORE_CARRY = 255 };

void ibp_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts)
{
    for (uint32_t first = 0; first < row_bytes; first += COLUMNS) {
        const uint32_t columns = row_bytes - first < COLUMNS ? row_bytes - first : COLUMNS;
        for (size_t r = 0; r < num_rows; r += ROWS_BEFORE_CARRY) {
            const size_t stop = num_rows - r < ROWS_BEFORE_CARRY ? num_rows : r + ROWS_BEFORE_CARRY;
            uint64_t sums[COLUMNS] = {0}; /* eight counters of one byte each */
            for (size_t q = r; q < stop; q++)
                for (uint32_t i = 0; i < columns; i++) sums[i] += spread_bits(data[q * row_bytes + first + i]);
            for (uint32_t i = 0; i < columns; i++)
                for (uint32_t b = 0; b < 8; b++) counts[8 * (size_t)(first + i) + b] += (sums[i] >> (8 * b)) & 0xffu;
        }
    }
}

ibp_status ibp_threshold_bits(const uint64_t *counts, uint64_t num_rows, uint32_t row_bytes, double tau, uint8_t *mask,
                              uint8_t *bitval)
{
    if (!(tau >= 0.5 && tau <= 1.0)) return IBP_INVALID_ARGUMENT;
    const double high = tau * (double)num_rows, low = (1.0 - tau) * (double)num_rows;
    for (uint32_t i = 0; i < row_bytes; i++) {
        mask[i] = bitval[i] = 0;
        for (uint32_t b = 0; b < 8; b++) {
            const uint64_t count = counts[8 * (size_t)i + b];
            const bool one = tau < 1.0 ? (double)count > high : count == num_rows;
            const bool zero = tau < 1.0 ? (double)count < low : count == 0;
            if (one) bitval[i] |= (uint8_t)(1u << b);
            if (one || zero) mask[i] |= (uint8_t)(1u << b);
        }
    }
    return IBP_OK;
}
