/* codebook.c - from masks to the working codebook of scheme ibp. */
#include "format.h"
#include "ibp.h"

#include <string.h>

_Static_assert(IBP_MAX_ROW_BYTES < 1u << IBP_FLAG_POS_BITS, "the position of any participation bit fits an entry of flags");

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
    for (size_t w = 0; w < num_words; w++) flags[w] |= ibp_gaps_of_word(mask_words[w], chunk_bytes);
    *out = (ibp_codebook){.scheme = IBP_SCHEME_IBP,
                          .row_bytes = row_bytes,
                          .mask = mask_words,
                          .bitval = bitval_words,
                          .flags = flags,
                          .chunk_bytes = chunk_bytes,
                          .num_flags = position};
    return IBP_OK;
}
