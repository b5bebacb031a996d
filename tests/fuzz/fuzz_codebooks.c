/* fuzz_codebooks.c - codebooks of any fields: what is accepted is safe to code with, and what is learned codes the rows
 * that it was learned from. */
#include "fuzz.h"

enum { ROWS_PLACE = 8, ROW_PLACE, DST_PLACE, LEARN_PLACE, ARRAYS_PLACE, FIELD_PLACE };
enum { MOST_ROWS = 16, MOST_ROW_BYTES = 256 };

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

/* What is learned from rows is right, and codes every one of them if it leaves nothing out. */
static void learn(input *in)
{
    ibp_sample sample = {.num_rows = (int64_t)take(in, 1) % (MOST_ROWS + 1),
                         .table_rows = (int64_t)take(in, 2),
                         .row_bytes = (uint32_t)take(in, 1),
                         .element_bytes = take_flag(in) ? 1u << take_below(in, 4) : (uint32_t)take(in, 1),
                         .exponent_bits = (uint32_t)take(in, 1) % 70,
                         .level = take_below(in, 3),
                         .codes_invariant = take_flag(in)};
    const size_t rows_bytes = (size_t)sample.num_rows * sample.row_bytes;
    uint8_t *const rows = fenced(ROWS_PLACE, rows_bytes);
    take_pattern(in, rows, rows_bytes, 256);
    damage(in, rows, rows_bytes);
    sample.rows = rows;
    const size_t scratch_bytes = ibp_learn_scratch_bytes(&sample),
                 arrays_bytes = ibp_max_planes_bytes(sample.row_bytes, sample.element_bytes);
    if (scratch_bytes == 0 || scratch_bytes > 1 << 22 || arrays_bytes > 1 << 22) return;
    uint8_t *const scratch = fenced(LEARN_PLACE, (scratch_bytes + 15) / 16 * 16), *const arrays = fenced(
                                                                                      ARRAYS_PLACE,
                                                                                      (arrays_bytes + 15) / 16 * 16);
    ibp_planes planes;
    ibp_codebook codebook;
    double coded_bytes;
    REQUIRE(ibp_learn_planes(&sample, scratch, scratch_bytes, arrays, arrays_bytes, &planes, &coded_bytes) == IBP_OK);
    const uint32_t columns = sample.row_bytes / sample.element_bytes - planes.num_constant;
    const size_t entries_bytes =
        planes.consecutive ? 0 : (size_t)(planes.per_column ? columns : 1) * planes.num_entries * planes.symbol_bytes;
    REQUIRE(ibp_build_planes_codebook(&planes, sample.row_bytes, entries_bytes, &codebook) == IBP_OK);
    REQUIRE(ibp_check_codebook(&codebook) == IBP_OK);
    uint8_t *const work = fenced_scratch(sample.row_bytes);
    for (int64_t r = 0; r < sample.num_rows; r++)
        REQUIRE(ibp_coded_row_bytes(&codebook, rows + (size_t)r * sample.row_bytes, work,
                                    ibp_scratch_bytes(sample.row_bytes)) <=
                (sample.codes_invariant ? ibp_max_coded_row_bytes(sample.row_bytes) : IBP_NO_CODED_FORM));
    code_any_row(in, &codebook);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    const uint32_t kind = take_below(&in, 3);
    (kind == 0 ? try_planes : kind == 1 ? try_masks : learn)(&in);
    return 0;
}
