/* fuzz_learning.c - codebooks learned from any rows: what is learned is right, and codes the rows that it was learned
 * from. */
#include "fuzz.h"

enum { ROWS_PLACE = 8, LEARN_PLACE, ARRAYS_PLACE, ENTRIES_PLACE };
enum { MOST_ROWS = 16, MOST_ROOM = 1 << 24 };

/* What is learned from rows is right, and codes every one of them if it leaves nothing out. */
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input all = {data, data + size}, *const in = &all;
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
    if (scratch_bytes == 0 || scratch_bytes > MOST_ROOM || arrays_bytes > MOST_ROOM) return 0;
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
    if (!planes.consecutive)
        REQUIRE(ibp_learn_entries(&sample, &planes, scratch, scratch_bytes, fenced(ENTRIES_PLACE, entries_bytes),
                                  entries_bytes) == IBP_OK);
    return 0;
}
