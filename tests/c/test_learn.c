/* test_learn.c - codebooks learned from counts: they are right, cost what they say, and find what there is. */
#include "check.h"

#include <math.h>

/* Rows of one of the kinds of data that a codebook must find something in, or nothing. */
enum {
    FLOATS,
    HALF_DEFAULT,
    FEW_ONES,
    COLUMNS,
    SMALL_NUMBERS,
    RANDOM,
    CONSTANT,
    ROUNDED,
    BOTH_ZEROS,
    CONSTANT_COLUMNS,
    NUM_KINDS
};
static const char *const KIND_NAMES[] = {"floats", "half default", "few ones", "columns",    "small numbers",
                                         "random", "constant",     "rounded",  "both zeros", "constant columns"};

static uint64_t element_of(rng *r, int kind, uint32_t column, uint32_t width)
{
    const uint64_t noise = rng_next(r);
    const uint32_t level = (uint32_t)__builtin_ctzll(rng_next(r) | (1u << 20)); /* frequent ones and rare ones */
    const uint32_t low = width / 2;
    switch (kind) {
    case FLOATS: return (uint64_t)(7 - level % 8) << low | (noise & (((uint64_t)1 << low) - 1));
    case HALF_DEFAULT: return noise & 1 ? 5 : noise;
    case FEW_ONES: return noise % 50 == 0;
    case COLUMNS: return (uint64_t)(column * 7 % 13 + (level > 3)) << low | (noise & (((uint64_t)1 << low) - 1));
    case SMALL_NUMBERS: return level;
    case RANDOM: return noise;
    case ROUNDED: return (noise >> width / 4 << width / 4) | 1;
    case BOTH_ZEROS: return noise >> 3 & 1 ? noise & (uint64_t)1 << (width - 1) : noise;
    case CONSTANT_COLUMNS: return column % 2 ? 7 : noise;
    default: return 42;
    }
}

static buffer rows_of(rng *r, int kind, int64_t num_rows, uint32_t columns, uint32_t element_bytes)
{
    buffer rows = buffer_new((size_t)num_rows * columns * element_bytes, 1);
    for (size_t i = 0; i < (size_t)num_rows * columns; i++) {
        const uint64_t element = element_of(r, kind, (uint32_t)(i % columns), 8 * element_bytes);
        memcpy(rows.data + i * element_bytes, &element, element_bytes);
    }
    return rows;
}

/* Bytes of a mean row as coded, raw rows counted as they are, with its share of the codebook. */
static double measured(const ibp_sample *table, const ibp_codebook *codebook, size_t entries_bytes)
{
    size_t total = entries_bytes + (codebook->planes.listed ? 2 * codebook->planes.element_bytes : 0);
    for (int64_t i = 0; i < table->num_rows; i++) {
        uint8_t scratch[IBP_SCRATCH_BYTES(4096)];
        uint16_t length = 0;
        CHECK(ibp_measure_rows(codebook, table->rows + (size_t)i * table->row_bytes, table->row_bytes, &length, scratch,
                               sizeof scratch) == IBP_OK,
              "row %d", (int)i);
        total += length == table->row_bytes ? 0 : length ? length : table->row_bytes; /* a default row, a raw one */
    }
    return (double)total / (double)table->num_rows;
}

/* Learns from all rows of a table. @return the expected bytes of a mean row as a share of the row. */
static double check_learned(const ibp_sample *table, const char *what)
{
    const size_t scratch_bytes = ibp_learn_scratch_bytes(table);
    const size_t most = ibp_max_planes_bytes(table->row_bytes, table->element_bytes);
    void *const scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
    buffer arrays = buffer_new(most, 0);
    ibp_planes planes;
    ibp_codebook codebook;
    double expected = 0;
    ibp_status status = ibp_learn_planes(table, scratch, scratch_bytes, arrays.data, most, &planes, &expected);
    CHECK(status == IBP_OK, "%s: %s", what, ibp_status_string(status));
    const size_t sets = planes.per_column ? table->row_bytes / table->element_bytes - planes.num_constant : 1;
    const size_t entries_bytes = planes.entries ? sets * planes.num_entries * planes.symbol_bytes : 0;
    buffer own = buffer_copy(planes.entries, entries_bytes, 0); /* no longer than they are */
    if (planes.entries) planes.entries = own.data;
    status = ibp_build_planes_codebook(&planes, table->row_bytes, entries_bytes, &codebook);
    CHECK(status == IBP_OK && ibp_check_codebook(&codebook) == IBP_OK, "%s: the codebook is wrong", what);
    CHECK(codebook.planes.num_entries == planes.num_entries && codebook.planes.symbol_bytes == planes.symbol_bytes,
          "%s: %u entries of %u bytes", what, planes.num_entries, planes.symbol_bytes);
    const double found = measured(table, &codebook, entries_bytes), margin = 0.02 * table->row_bytes + 3;
    CHECK(fabs(found - expected) <= margin, "%s: %.1f bytes a row expected, %.1f found", what, expected, found);
    CHECK(expected <= table->row_bytes, "%s: %.1f bytes for rows of %u", what, expected, table->row_bytes);

    buffer row = buffer_new(table->row_bytes, 0), coded = buffer_new(ibp_max_coded_row_bytes(table->row_bytes), 0);
    size_t coded_bytes = 0;
    status = encode_row(&codebook, table->rows, coded.data, coded.size, &coded_bytes);
    CHECK(status == IBP_OK && decode_row(&codebook, coded.data, coded_bytes, row.data) == IBP_OK &&
              memcmp(row.data, table->rows, table->row_bytes) == 0,
          "%s: a row comes back wrong", what);
    buffer_free(&row), buffer_free(&coded), buffer_free(&own), buffer_free(&arrays);
    free(scratch);
    return expected / table->row_bytes;
}

/* The fields of what is learned from all rows of a table; its arrays are gone. */
static ibp_planes learned(const ibp_sample *table)
{
    const size_t scratch_bytes = ibp_learn_scratch_bytes(table);
    const size_t most = ibp_max_planes_bytes(table->row_bytes, table->element_bytes);
    void *const scratch = aligned_alloc(64, (scratch_bytes + 63) / 64 * 64);
    buffer arrays = buffer_new(most, 0);
    ibp_planes planes = {0};
    double expected;
    CHECK(ibp_learn_planes(table, scratch, scratch_bytes, arrays.data, most, &planes, &expected) == IBP_OK, "%u",
          table->row_bytes);
    buffer_free(&arrays);
    free(scratch);
    return planes;
}

static void check_kinds(void)
{
    rng r = rng_seed(31);
    for (uint32_t element_bytes = 1; element_bytes <= 8; element_bytes *= 2)
        for (uint32_t columns = 1; columns <= (is_quick ? 40u : 400u); columns = columns * 3 + 1)
            for (int kind = 0; kind < NUM_KINDS; kind++)
                for (int64_t num_rows = 1; num_rows <= 200; num_rows = num_rows * 8 + 3) {
                    const uint32_t exponent_bits = rng_chance(&r, 50) ? 3 + rng_below(&r, 8 * element_bytes - 3) : 0;
                    buffer rows = rows_of(&r, kind, num_rows, columns, element_bytes);
                    const ibp_sample table = {rows.data,
                                              num_rows,
                                              num_rows,
                                              columns * element_bytes,
                                              element_bytes,
                                              exponent_bits,
                                              rng_chance(&r, 30) ? IBP_LEVEL_FAST : IBP_LEVEL_DEFAULT,
                                              rng_chance(&r, 30)};
                    char what[100];
                    snprintf(what, sizeof what, "%s, %u columns of %u bytes, exponent of %u bits, %d rows",
                             KIND_NAMES[kind], columns, element_bytes, exponent_bits, (int)num_rows);
                    check_learned(&table, what);
                    buffer_free(&rows);
                }
}

/* What is to be found in enough rows: the most that a mean row may take, as a share. */
static void check_savings(void)
{
    static const double most[NUM_KINDS] = {0.70, 0.60, 0.05, 0.65, 0.15, 1.0, 0.02, 0.76, 0.61, 0.52};
    rng r = rng_seed(32);
    for (uint32_t element_bytes = 2; element_bytes <= 8; element_bytes *= 2)
        for (int kind = 0; kind < NUM_KINDS; kind++) {
            const int64_t num_rows = 600;
            buffer rows = rows_of(&r, kind, num_rows, 128, element_bytes);
            const ibp_sample table = {rows.data,     num_rows, num_rows,          128 * element_bytes,
                                      element_bytes, 0,        IBP_LEVEL_DEFAULT, false};
            const double share = check_learned(&table, KIND_NAMES[kind]);
            CHECK(share <= most[kind], "%s, %u bytes: %.3f of the bytes", KIND_NAMES[kind], element_bytes, share);
            CHECK(kind != RANDOM || share > 0.99, "%.3f of random bytes", share);
            buffer_free(&rows);
        }
}

static void check_refused(void)
{
    uint8_t rows[64] = {0};
    const ibp_sample good = {rows, 4, 4, 16, 2, 8, IBP_LEVEL_DEFAULT, false};
    const size_t scratch_bytes = ibp_learn_scratch_bytes(&good), most = ibp_max_planes_bytes(16, 2);
    uint8_t *const arrays = aligned_alloc(64, (most + 63) / 64 * 64);
    void *const scratch = aligned_alloc(64, (scratch_bytes + 127) / 64 * 64);
    ibp_planes planes;
    double bytes;
    for (int wrong = 0; wrong < 9; wrong++) {
        ibp_sample s = good;
        if (wrong == 0) s.rows = NULL;
        if (wrong == 1) s.num_rows = 0;
        if (wrong == 2) s.row_bytes = 0;
        if (wrong == 3) s.row_bytes = 17;
        if (wrong == 4) s.element_bytes = 3;
        if (wrong == 5) s.exponent_bits = 16;
        if (wrong == 6) s.num_rows = (int64_t)1 << 40;
        if (wrong == 7) s.table_rows = -1;
        if (wrong == 8) s.level = (ibp_level)2;
        CHECK(ibp_learn_scratch_bytes(&s) == 0, "case %d", wrong);
        CHECK(ibp_learn_planes(&s, scratch, scratch_bytes, arrays, most, &planes, &bytes) == IBP_INVALID_ARGUMENT,
              "case %d", wrong);
    }
    CHECK(ibp_learn_scratch_bytes(NULL) == 0 && ibp_max_planes_bytes(16, 3) == 0 && ibp_max_planes_bytes(15, 2) == 0,
          "sizes of what is refused");
    CHECK(ibp_learn_planes(&good, scratch, scratch_bytes - 1, arrays, most, &planes, &bytes) == IBP_BUFFER_TOO_SMALL,
          "scratch");
    CHECK(ibp_learn_planes(&good, scratch, scratch_bytes, arrays, most - 1, &planes, &bytes) == IBP_BUFFER_TOO_SMALL,
          "arrays");
    CHECK(ibp_learn_planes(&good, scratch, scratch_bytes, arrays + 8, most, &planes, &bytes) == IBP_INVALID_ARGUMENT,
          "arrays of symbols");
    CHECK(ibp_learn_planes(&good, (uint8_t *)scratch + 8, scratch_bytes, arrays, most, &planes, &bytes) ==
              IBP_INVALID_ARGUMENT,
          "alignment");
    CHECK(ibp_learn_planes(&good, scratch, scratch_bytes, arrays, most, &planes, &bytes) == IBP_OK, "a good sample");
    free(scratch);
    free(arrays);
}

/* What is left out is what all rows agree on, and what is left in when it is asked for. */
static void check_what_is_left_out(void)
{
    rng r = rng_seed(33);
    static const int kinds[] = {ROUNDED, BOTH_ZEROS, CONSTANT_COLUMNS, FLOATS};
    for (size_t i = 0; i < 4; i++)
        for (int codes_invariant = 0; codes_invariant < 2; codes_invariant++) {
            buffer rows = rows_of(&r, kinds[i], 600, 128, 4);
            ibp_sample table = {rows.data, 600, 600, 512, 4, 0, IBP_LEVEL_DEFAULT, codes_invariant};
            const ibp_planes planes = learned(&table);
            const bool leaves_out = !codes_invariant;
            CHECK(planes.invariant_bits == (leaves_out && kinds[i] == ROUNDED ? 8u : 0u), "%s: %u invariant bits",
                  KIND_NAMES[kinds[i]], planes.invariant_bits);
            CHECK(planes.invariant_value == (planes.invariant_bits ? 1u : 0u), "%s", KIND_NAMES[kinds[i]]);
            CHECK(planes.num_constant == (leaves_out && kinds[i] == CONSTANT_COLUMNS ? 64u : 0u),
                  "%s: %u constant columns", KIND_NAMES[kinds[i]], planes.num_constant);
            CHECK(planes.signed_default == (kinds[i] == BOTH_ZEROS), "%s", KIND_NAMES[kinds[i]]);
            table.level = IBP_LEVEL_FAST;
            const ibp_planes fast = learned(&table);
            if (leaves_out) CHECK(fast.consecutive == (kinds[i] == FLOATS), "%s", KIND_NAMES[kinds[i]]);
            if (fast.consecutive) CHECK(fast.num_planes == 1 && fast.digit_bits[0] == 4 && !fast.listed, "%s", "fast");
            buffer_free(&rows);
        }
}

void test_learn(void)
{
    check_kinds();
    check_savings();
    check_refused();
    check_what_is_left_out();
}
