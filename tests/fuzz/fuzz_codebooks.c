/* fuzz_codebooks.c - codebooks of any fields: what is accepted is safe to code with. */
#include "fuzz.h"

enum { ROWS_PLACE = 8, ROW_PLACE, DST_PLACE, LEARN_PLACE, ARRAYS_PLACE, FIELD_PLACE };

typedef struct job {
    const ibp_codebook *codebook;
    uint8_t *row, *dst;
    size_t dst_bytes;
} job;

/* Codes a row and reads it back; then reads what is left in dst with a byte less. */
static void code(void *argument)
{
    const job *const j = argument;
    const uint32_t row_bytes = j->codebook->row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    uint8_t *const scratch = fenced_scratch(row_bytes);
    size_t coded_bytes;
    const ibp_status status =
        ibp_encode_row(j->codebook, j->row, j->dst, j->dst_bytes, &coded_bytes, scratch, scratch_bytes);
    REQUIRE(status == IBP_OK || status == IBP_BUFFER_TOO_SMALL);
    uint8_t *const back = fenced(ROW_PLACE, row_bytes);
    if (status == IBP_OK) ibp_decode_row(j->codebook, j->dst, coded_bytes, back, scratch, scratch_bytes);
    ibp_decode_row(j->codebook, j->dst, j->dst_bytes, back, scratch, scratch_bytes);
}

static void code_any_row(input *in, const ibp_codebook *codebook)
{
    job j = {.codebook = codebook, .row = fenced(ROWS_PLACE, codebook->row_bytes)};
    j.dst_bytes = take_below(in, 2 * codebook->row_bytes + 2), j.dst = fenced(DST_PLACE, j.dst_bytes);
    take_pattern(in, j.row, codebook->row_bytes, 64);
    take_pattern(in, j.dst, j.dst_bytes, 64);
    on_each_processor(code, &j);
}

/* Fields of scheme planes that may be anything, and arrays of just the sizes that those give that are accepted. */
static void try_planes(input *in)
{
    const uint32_t row_bytes = take_flag(in) ? take_size(in) : (uint32_t)take(in, 4);
    ibp_planes p = {.element_bytes = (uint32_t)take(in, 1),
                    .residual_bits = (uint32_t)take(in, 1),
                    .rotate = (uint32_t)take(in, 1),
                    .num_planes = (uint32_t)take(in, 1),
                    .invariant_bits = (uint32_t)take(in, 1),
                    .num_constant = (uint32_t)take(in, 2)};
    const uint32_t flags = take_below(in, 256);
    p.per_column = flags & 1, p.listed = flags & 2, p.consecutive = flags & 4, p.signed_default = flags & 8;
    for (int i = 0; i < 4; i++) p.digit_bits[i] = (uint8_t)take(in, 1);
    p.default_value = take(in, flags & 16 ? 8 : 1), p.closed_value = take(in, flags & 16 ? 8 : 1);
    p.invariant_value = take(in, flags & 16 ? 8 : 1), p.first_symbol = take(in, flags & 16 ? 8 : 1);
    const size_t entries_bytes = (size_t)take(in, flags & 32 ? 8 : 3);
    uint8_t *const at_fence = fenced(FIELD_PLACE, 0); /* nothing may be read before the sizes are known */
    ibp_codebook codebook;
    p.entries = at_fence, p.live_columns = (const void *)at_fence, p.row_template = at_fence;
    if (ibp_build_planes_codebook(&p, row_bytes, entries_bytes, &codebook) != IBP_OK) return;
    REQUIRE(row_bytes >= 1 && row_bytes <= IBP_MAX_ROW_BYTES);
    if (entries_bytes > 1 << 21) return;
    uint8_t *const entries = fenced(FIELD_PLACE, entries_bytes);
    take_pattern(in, entries, entries_bytes, 64);
    codebook.planes.entries = entries;
    if (p.num_constant != 0) {
        const size_t live_bytes = 2 * (size_t)(row_bytes / p.element_bytes - p.num_constant);
        uint8_t *const live = fenced(LEARN_PLACE, live_bytes), *const row_template =
                                                                   fenced(ARRAYS_PLACE, (row_bytes + 15u) / 16u * 16u);
        take_pattern(in, live, live_bytes, 64);
        take_pattern(in, row_template, row_bytes, 64);
        codebook.planes.live_columns = (const void *)live, codebook.planes.row_template = row_template;
    }
    ibp_check_codebook(&codebook);
    code_any_row(in, &codebook);
}

/* Masks that may be anything. */
static void try_masks(input *in)
{
    const uint32_t row_bytes = take_flag(in) ? take_size(in) : (uint32_t)take(in, 4);
    const uint32_t chunk_bytes = (uint32_t)take(in, 1);
    const bool fits = row_bytes >= 1 && row_bytes <= IBP_MAX_ROW_BYTES;
    const size_t num_bytes = fits ? row_bytes : 0, words_bytes = fits ? 12 * ibp_codebook_words(row_bytes) : 0;
    uint8_t *const mask = fenced(ROWS_PLACE, num_bytes), *const bitval = fenced(FIELD_PLACE, num_bytes);
    uint32_t *const words = (void *)fenced(ARRAYS_PLACE, words_bytes);
    ibp_codebook codebook;
    take_pattern(in, mask, num_bytes, 32);
    take_pattern(in, bitval, num_bytes, 32);
    for (size_t i = 0; i < num_bytes && take_below(in, 16) != 15; i++) bitval[i] &= mask[i];
    if (ibp_build_codebook(mask, bitval, row_bytes, chunk_bytes, take_flag(in), words, &codebook) != IBP_OK) return;
    REQUIRE(ibp_check_codebook(&codebook) == IBP_OK);
    damage(in, words, words_bytes);
    codebook.num_flags = take_flag(in) ? (uint32_t)take(in, 4) : codebook.num_flags;
    const ibp_status status = ibp_check_codebook(&codebook);
    if (status == IBP_OK || codebook.num_flags <= (row_bytes + chunk_bytes - 1) / chunk_bytes)
        code_any_row(in, &codebook);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    (take_flag(&in) ? try_planes : try_masks)(&in);
    return 0;
}
