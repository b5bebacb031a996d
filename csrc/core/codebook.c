/* codebook.c - builds codebooks of scheme ibp from masks, and checks them (FORMAT.md section 5). */
#include "format.h"
#include "schemes.h"

#include <string.h>

_Static_assert(IBP_MAX_ROW_BYTES < 1u << IBP_FLAG_POS_BITS,
               "the position of any participation bit fits an entry of flags");

size_t ibp_codebook_words(uint32_t row_bytes) { return ((size_t)row_bytes + 15u) / 16u * 4u; }

/* Returns the set of the chunks that start in word w of a row: bit i stands for the word's chunk i. */
static uint32_t chunks_of_word(const ibp_codebook *cb, uint32_t w)
{
    uint32_t chunks = 0;
    for (uint32_t first = 4 * w; first < 4 * w + 4 && first < cb->row_bytes; first++)
        if (first % cb->chunk_bytes == 0) chunks |= 1u << first % 4 / cb->chunk_bytes;
    return chunks;
}
/* Returns the set of the chunks that start in word w and whose mask is not 0. */
static uint32_t masked_chunks_of_word(const ibp_codebook *cb, uint32_t w)
{
    const uint32_t chunks = chunks_of_word(cb, w);
    if (cb->chunk_bytes >= 4) return (cb->mask[w] | (cb->chunk_bytes == 8 ? cb->mask[w | 1u] : 0)) != 0 ? chunks : 0;
    const uint32_t ones = (1u << 8 * cb->chunk_bytes) - 1;
    uint32_t masked = 0;
    for (uint32_t chunk = 0; chunk * cb->chunk_bytes < 4; chunk++)
        if (cb->mask[w] & ones << 8 * cb->chunk_bytes * chunk) masked |= 1u << chunk;
    return masked & chunks;
}

/* Returns flags[w], the entry of the array `flags` for word w. flagged: a bit for each flagged chunk that starts in
 * word w. *position: the position of the next participation bit; the function advances it. */
static uint32_t flags_entry(const ibp_codebook *cb, uint32_t w, uint32_t flagged, uint32_t *position)
{
    const bool is_second =
        cb->chunk_bytes == 8 && w % 2 == 1; /* this word is the second half of its chunk, whose participation bit
                                               came with the first half */
    const uint32_t first = is_second && ibp_flagged_chunks(cb->flags[w - 1]) ? *position - 1 : *position;
    *position += ibp_popcount(flagged);
    return first | flagged << IBP_FLAG_POS_BITS | ibp_gaps_of_word(cb->mask[w], cb->chunk_bytes);
}

ibp_status ibp_build_codebook(const uint8_t *mask, const uint8_t *bitval, uint32_t row_bytes, uint32_t chunk_bytes,
                              bool flag_all, uint32_t *words, ibp_codebook *out)
{
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(chunk_bytes)) return IBP_INVALID_ARGUMENT;
    const size_t num_words = ibp_codebook_words(row_bytes);
    uint32_t *const mask_words = words, *const bitval_words = words + num_words, *const flags = words + 2 * num_words;
    memset(words, 0, 3 * num_words * sizeof *words);
    for (uint32_t i = 0; i < row_bytes; i++) {
        const uint32_t invariant = IBP_LOAD_ONCE(mask[i]), value = IBP_LOAD_ONCE(bitval[i]);
        if (value & ~invariant) return IBP_INVALID_ARGUMENT;
        mask_words[i / 4] |= invariant << (8 * (i % 4));
        bitval_words[i / 4] |= value << (8 * (i % 4));
    }
    ibp_codebook cb = {.scheme = IBP_SCHEME_IBP,
                       .row_bytes = row_bytes,
                       .mask = mask_words,
                       .bitval = bitval_words,
                       .flags = flags,
                       .chunk_bytes = chunk_bytes};
    for (uint32_t w = 0; 4 * w < row_bytes; w++)
        flags[w] =
            flags_entry(&cb, w, flag_all ? chunks_of_word(&cb, w) : masked_chunks_of_word(&cb, w), &cb.num_flags);
    *out = cb;
    return IBP_OK;
}

static bool is_aligned(const void *words) { return words && (uintptr_t)words % 16 == 0; }

bool ibp_are_masks_fields(const ibp_codebook *cb)
{
    if (!ibp_is_element_size(cb->chunk_bytes)) return false;
    if (cb->num_flags > (cb->row_bytes + cb->chunk_bytes - 1) / cb->chunk_bytes) return false;
    if (!is_aligned(cb->mask) || !is_aligned(cb->bitval) || !is_aligned(cb->flags)) return false;
    return !ibp_has_clusters(cb) || (cb->cluster_stride >= ibp_codebook_words(cb->row_bytes) &&
                                     cb->cluster_stride % 4 == 0 && cb->cluster_flags);
}

bool ibp_are_masks_words(const ibp_codebook *cb)
{
    uint32_t position = 0;
    for (uint32_t w = 0; w < ibp_codebook_words(cb->row_bytes); w++) {
        if ((cb->mask[w] & ~ibp_row_bits_of_word(cb->row_bytes, w)) || (cb->bitval[w] & ~cb->mask[w])) return false;
        if (4 * w >= cb->row_bytes) {
            if (cb->flags[w] != 0) return false;
            continue;
        }
        const uint32_t flagged = ibp_flagged_chunks(cb->flags[w]);
        if ((masked_chunks_of_word(cb, w) & ~flagged) || (flagged & ~chunks_of_word(cb, w))) return false;
        if (cb->flags[w] != flags_entry(cb, w, flagged, &position)) return false;
    }
    return position == cb->num_flags;
}

/* Selects cluster k. Limits the number of flags to row_bytes: cluster_flags may hold any number, but coders rely on a
 * row having no more participation bits than bytes. */
void ibp_select_masks(ibp_codebook *one, uint32_t k)
{
    const size_t offset = (size_t)k * one->cluster_stride;
    one->mask += offset;
    one->bitval += offset;
    one->flags += offset;
    one->num_flags = ibp_min_u32(IBP_LOAD_ONCE(one->cluster_flags[offset]), one->row_bytes);
}
