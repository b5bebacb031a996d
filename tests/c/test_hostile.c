/* test_hostile.c - arguments that contradict each other are refused by every function; codebooks whose arrays hold
 * anything do no harm. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <sys/mman.h>

/* ---- arguments ---- */

enum { ROW_BYTES = 64, NUM_ITEMS = 40 };

/* A table whose fields are right, in place, of rows of scheme ibp; and what functions need beside it. */
typedef struct good_table {
    sample sample;
    buffer data, slots, scratch;
    uint16_t lengths[NUM_ITEMS];
    uint64_t bases[2];
    ibp_table table;
} good_table;

static void make_good(rng *r, good_table *g)
{
    g->sample = sample_new(r, ROW_BYTES, 4, false, 5);
    g->data = buffer_new(NUM_ITEMS * ROW_BYTES, 0);
    g->slots = buffer_new(NUM_ITEMS * ROW_BYTES, 0);
    g->scratch = scratch_new(ROW_BYTES);
    sample_rows(r, &g->sample, 1, g->data.data, g->data.size);
    g->table = (ibp_table){.num_items = NUM_ITEMS,
                           .item_bytes = ROW_BYTES,
                           .slots = g->slots.data,
                           .lengths = g->lengths,
                           .slots_bytes = NUM_ITEMS * ROW_BYTES,
                           .slot_bytes = ROW_BYTES,
                           .codebook = g->sample.codebook};
}

static void free_good(good_table *g)
{
    sample_free(&g->sample);
    buffer_free(&g->data);
    buffer_free(&g->slots);
    buffer_free(&g->scratch);
}

/* What every function that takes a table says of one: all the same. */
static ibp_status try_table(const good_table *g, const ibp_table *table)
{
    static const int64_t id = 3;
    const ibp_ids ids = {.data = &id, .count = 1, .id_bytes = 8};
    const bool has_slots = table->slots != NULL, has_overflow = table->overflow != NULL;
    uint8_t out[4 * ROW_BYTES], coded[NUM_ITEMS * ROW_BYTES] = {0};
    uint16_t lengths[1];
    uint64_t stored_bytes;
    ibp_fault fault = {0};
    const ibp_status status = ibp_check_table(table);
    const ibp_status others[] = {
        ibp_encode_rows(table, g->data.data, 0, 1, has_slots ? coded : NULL, has_overflow ? coded : NULL,
                        g->scratch.data, g->scratch.size, &fault),
        ibp_gather_items(table, &ids, 0, 1, out, g->scratch.data, g->scratch.size, &fault),
        ibp_decode_bytes(table, 0, 1, out, g->scratch.data, g->scratch.size, &fault),
        ibp_measure_selection(table, &ids, 0, 1, lengths, &stored_bytes, &fault),
        ibp_copy_selection(table, &ids, 0, 1, out, sizeof out, &fault),
    };
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        CHECK((others[i] == IBP_INVALID_ARGUMENT) == (status == IBP_INVALID_ARGUMENT), "function %zu: %s", i,
              ibp_status_string(others[i]));
    return status;
}

/* Refused with that field of a good table set to that, which is put back. */
#define CHECK_FIELD(g, field, ...)                                                                 \
    do {                                                                                           \
        const ibp_table good = (g)->table;                                                         \
        (g)->table.field = __VA_ARGS__;                                                            \
        CHECK(try_table(g, &(g)->table) == IBP_INVALID_ARGUMENT, "%s = %s", #field, #__VA_ARGS__); \
        (g)->table = good;                                                                         \
        CHECK(try_table(g, &(g)->table) != IBP_INVALID_ARGUMENT, "good again after %s", #field);   \
    } while (0)

static void check_table_fields(rng *r)
{
    good_table g;
    make_good(r, &g);
    CHECK(ibp_measure_rows(&g.table.codebook, g.data.data, NUM_ITEMS * ROW_BYTES, g.lengths, g.scratch.data,
                           g.scratch.size) == IBP_OK,
          "%s", "measured");
    CHECK(try_table(&g, &g.table) == IBP_OK, "%s", "a good table");
    CHECK_FIELD(&g, num_items, -1);
    CHECK_FIELD(&g, num_items, INT64_MIN);
    CHECK_FIELD(&g, num_items, INT64_MAX);
    CHECK_FIELD(&g, item_bytes, -1);
    CHECK_FIELD(&g, item_bytes, INT64_MAX / NUM_ITEMS);
    CHECK_FIELD(&g, slot_bytes, ROW_BYTES + 32);
    CHECK_FIELD(&g, slot_bytes, 33);
    CHECK_FIELD(&g, rows_per_base, 2);
    CHECK_FIELD(&g, rows_per_base, UINT32_MAX);
    CHECK_FIELD(&g, slots_bytes, -1);
    CHECK_FIELD(&g, slots, NULL);
    CHECK_FIELD(&g, overflow_bytes, 1);
    CHECK_FIELD(&g, overflow_bytes, INT64_MIN);
    CHECK_FIELD(&g, codebook.scheme, (ibp_scheme)3);
    CHECK_FIELD(&g, codebook.scheme, (ibp_scheme)-1);
    CHECK_FIELD(&g, codebook.scheme, IBP_SCHEME_RAW); /* with lengths */
    CHECK_FIELD(&g, codebook.scheme, IBP_SCHEME_PLANES);
    CHECK_FIELD(&g, codebook.row_bytes, 0);
    CHECK_FIELD(&g, codebook.row_bytes, IBP_MAX_ROW_BYTES + 1);
    CHECK_FIELD(&g, codebook.chunk_bytes, 0);
    CHECK_FIELD(&g, codebook.chunk_bytes, 3);
    CHECK_FIELD(&g, codebook.num_flags, ROW_BYTES / 4 + 1);
    CHECK_FIELD(&g, codebook.num_flags, UINT32_MAX - 7);
    CHECK_FIELD(&g, codebook.mask, NULL);
    CHECK_FIELD(&g, codebook.bitval, NULL);
    CHECK_FIELD(&g, codebook.flags, g.table.codebook.flags + 1);
    CHECK_FIELD(&g, codebook.num_clusters, IBP_MAX_CLUSTERS + 1);
    CHECK_FIELD(&g, codebook.num_clusters, 2); /* cluster_stride and cluster_flags are 0 */

    ibp_table raw = g.table;
    raw.codebook = (ibp_codebook){.row_bytes = ROW_BYTES};
    raw.lengths = NULL;
    CHECK(try_table(&g, &raw) == IBP_OK, "%s", "a raw table");
    raw.codebook.num_clusters = 2;
    CHECK(try_table(&g, &raw) == IBP_INVALID_ARGUMENT, "%s", "clusters of raw rows");
    g.table.num_items = -1;
    CHECK(ibp_num_rows(&g.table) == 0, "%lld rows", (long long)ibp_num_rows(&g.table));
    free_good(&g);
}

/* Ranges, ids and scratch, of a table that is good. */
static void check_ranges(rng *r)
{
    good_table g;
    make_good(r, &g);
    uint8_t out[4 * ROW_BYTES], *const scratch = g.scratch.data;
    const size_t size = g.scratch.size;
    uint16_t lengths[4];
    uint64_t stored_bytes;
    ibp_fault fault = {0};
    const int64_t id[2] = {3, 4};
    const ibp_table *const t = &g.table;
    ibp_measure_rows(&t->codebook, g.data.data, NUM_ITEMS * ROW_BYTES, g.lengths, scratch, size);
    static const int64_t bad_rows[][2] = {{-1, 1}, {2, 1}, {0, NUM_ITEMS + 1}, {INT64_MIN, INT64_MAX}};
    for (size_t i = 0; i < 4; i++)
        CHECK(ibp_encode_rows(t, g.data.data, bad_rows[i][0], bad_rows[i][1], g.slots.data, NULL, scratch, size,
                              &fault) == IBP_INVALID_ARGUMENT,
              "rows %zu", i);
    CHECK(ibp_encode_rows(t, g.data.data, 0, NUM_ITEMS, NULL, NULL, scratch, size, &fault) == IBP_INVALID_ARGUMENT,
          "%s", "no slots");
    static const int64_t bad_ids[][2] = {{-1, 1}, {2, 1}, {0, 3}};
    for (size_t i = 0; i < 3; i++) {
        const ibp_ids ids = {.data = id, .count = 2, .id_bytes = 8};
        CHECK(ibp_gather_items(t, &ids, bad_ids[i][0], bad_ids[i][1], out, scratch, size, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "ids %zu", i);
        CHECK(ibp_measure_selection(t, &ids, bad_ids[i][0], bad_ids[i][1], lengths, &stored_bytes, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "ids %zu", i);
        CHECK(ibp_copy_selection(t, &ids, bad_ids[i][0], bad_ids[i][1], out, sizeof out, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "ids %zu", i);
    }
    const uint32_t positions[2] = {0, 1};
    const ibp_ids odd[] = {{.data = id, .count = 2, .id_bytes = 2},
                           {.data = id, .count = 2, .id_bytes = 0},
                           {.data = NULL, .count = 2, .id_bytes = 8},
                           {.data = id, .count = INT64_MAX, .id_bytes = 8},
                           {.data = id, .count = 2, .id_bytes = 8, .positions = positions, .out_items = -1},
                           {.data = id, .count = 2, .id_bytes = 8, .positions = positions, .out_items = INT64_MAX}};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        CHECK(ibp_gather_items(t, &odd[i], 0, 2, out, scratch, size, &fault) == IBP_INVALID_ARGUMENT, "ids %zu", i);

    size_t coded_bytes = 1;
    CHECK(ibp_decode_bytes(t, 0, 1, out, scratch, size - 1, &fault) == IBP_INVALID_ARGUMENT, "%s", "little scratch");
    CHECK(ibp_decode_bytes(t, 0, 1, out, NULL, size, &fault) == IBP_INVALID_ARGUMENT, "%s", "no scratch");
    CHECK(ibp_encode_row(&t->codebook, g.data.data, out, sizeof out, &coded_bytes, scratch, size - 1) ==
              IBP_INVALID_ARGUMENT,
          "%s", "row");
    CHECK(ibp_decode_row(&t->codebook, out, 9, out, scratch, size - 1) == IBP_INVALID_ARGUMENT && coded_bytes == 0,
          "%s", "row");
    CHECK(ibp_coded_row_bytes(&t->codebook, g.data.data, scratch, size - 1) == 0, "%s", "row");
    CHECK(ibp_measure_rows(&t->codebook, g.data.data, ROW_BYTES, g.lengths, scratch, size - 1) == IBP_INVALID_ARGUMENT,
          "%s", "rows");
    CHECK(ibp_measure_rows(&t->codebook, g.data.data, -1, g.lengths, scratch, size) == IBP_INVALID_ARGUMENT, "%s",
          "rows");
    CHECK(fault.status == IBP_OK, "%lld: what is refused is no fault of a row", (long long)fault.status);
    free_good(&g);
}

/* Codebooks of which there are no coded rows. */
static void check_no_coded_rows(void)
{
    uint8_t row[8] = {0}, coded[64], scratch[IBP_SCRATCH_BYTES(8)];
    static const int schemes[] = {IBP_SCHEME_RAW, 3, 77, -1};
    for (size_t i = 0; i < sizeof schemes / sizeof *schemes; i++) {
        const ibp_codebook cb = {.scheme = (ibp_scheme)schemes[i], .row_bytes = 8};
        size_t coded_bytes = 1;
        uint16_t length = 7;
        uint64_t hits[8] = {0};
        CHECK(ibp_encode_row(&cb, row, coded, sizeof coded, &coded_bytes, scratch, sizeof scratch) ==
                  IBP_INVALID_ARGUMENT,
              "%d", schemes[i]);
        CHECK(ibp_decode_row(&cb, coded, 8, row, scratch, sizeof scratch) == IBP_INVALID_ARGUMENT, "%d", schemes[i]);
        CHECK(ibp_coded_row_bytes(&cb, row, scratch, sizeof scratch) == 0 && coded_bytes == 0, "%d", schemes[i]);
        CHECK(ibp_measure_rows(&cb, row, 8, &length, scratch, sizeof scratch) == IBP_INVALID_ARGUMENT && length == 7,
              "%d", schemes[i]);
        CHECK(ibp_count_hits(&cb, row, 1, hits) == IBP_INVALID_ARGUMENT && hits[0] == 0, "%d", schemes[i]);
        CHECK((ibp_check_codebook(&cb) == IBP_OK) == (schemes[i] == IBP_SCHEME_RAW), "%d", schemes[i]);
        CHECK((ibp_scheme_name(cb.scheme) == NULL) == (schemes[i] != IBP_SCHEME_RAW), "%d", schemes[i]);
    }
    CHECK(strcmp(ibp_scheme_name(IBP_SCHEME_IBP), "ibp") == 0 &&
              strcmp(ibp_scheme_name(IBP_SCHEME_PLANES), "planes") == 0,
          "%s", "names");
}

static void check_numbers(void)
{
    uint8_t data[64] = {0}, mask[64], bitval[64];
    uint64_t counts[512] = {0}, bases[2];
    int64_t overflow_bytes;
    uint16_t lengths[8] = {0};
    double savings;
    static const uint32_t bad_rows[] = {0, IBP_MAX_ROW_BYTES + 1, UINT32_MAX};
    for (size_t i = 0; i < 3; i++) {
        CHECK(ibp_count_bits(data, 1, bad_rows[i], counts) == IBP_INVALID_ARGUMENT, "%u", bad_rows[i]);
        CHECK(ibp_threshold_bits(counts, 1, bad_rows[i], 0.9, mask, bitval) == IBP_INVALID_ARGUMENT, "%u", bad_rows[i]);
        CHECK(ibp_estimate_masks(data, 1, bad_rows[i], &savings) == IBP_INVALID_ARGUMENT, "%u", bad_rows[i]);
        CHECK(ibp_choose_masks(data, 1, bad_rows[i], 1, 0, 0, mask, bitval) == IBP_INVALID_ARGUMENT, "%u", bad_rows[i]);
        CHECK(ibp_index_rows(NULL, 64, bad_rows[i], 0, bases, &overflow_bytes) == IBP_INVALID_ARGUMENT, "%u",
              bad_rows[i]);
        CHECK(ibp_survey_rows(lengths, 64, bad_rows[i], counts) == IBP_INVALID_ARGUMENT, "%u", bad_rows[i]);
        CHECK(ibp_scratch_bytes(bad_rows[i]) == 0 && ibp_max_coded_row_bytes(bad_rows[i]) == 0, "%u", bad_rows[i]);
    }
    CHECK(ibp_scratch_bytes(9) == IBP_SCRATCH_BYTES(9) && ibp_max_coded_row_bytes(9) == IBP_CODED_ROW_BYTES(9), "%s",
          "bounds");
    static const int64_t bad_bytes[] = {-1, INT64_MIN, INT64_MAX, INT64_MAX - IBP_MAX_ROW_BYTES};
    for (size_t i = 0; i < 4; i++) {
        CHECK(ibp_index_rows(NULL, bad_bytes[i], 64, 32, bases, &overflow_bytes) == IBP_INVALID_ARGUMENT, "%lld",
              (long long)bad_bytes[i]);
        CHECK(ibp_survey_rows(lengths, bad_bytes[i], 64, counts) == IBP_INVALID_ARGUMENT, "%lld",
              (long long)bad_bytes[i]);
    }
    static const uint32_t bad_slots[] = {1, 31, 33, 65, 96, UINT32_MAX};
    for (size_t i = 0; i < 6; i++)
        CHECK(ibp_index_rows(NULL, 64, 64, bad_slots[i], bases, &overflow_bytes) == IBP_INVALID_ARGUMENT, "slots of %u",
              bad_slots[i]);
    CHECK(ibp_choose_masks(data, 1, 64, 4, 0, 17, mask, bitval) == IBP_INVALID_ARGUMENT, "%s", "17 chunks of 16");
    CHECK(ibp_choose_masks(data, 1, 64, 4, 2, 1, mask, bitval) == IBP_INVALID_ARGUMENT, "%s", "from chunk 2 to 1");
    CHECK(ibp_choose_masks(data, 1, 64, 4, UINT32_MAX, UINT32_MAX, mask, bitval) == IBP_INVALID_ARGUMENT, "%s",
          "chunk 2^32 - 1");

    const int64_t id = 5;
    ibp_ids ids = {.data = &id, .count = 1, .id_bytes = 8};
    uint32_t workspace[8], positions[1];
    int64_t sorted[1];
    CHECK(ibp_num_windows(5, 63) == 0 && ibp_num_windows(-1, 0) == 0 && ibp_num_windows(INT64_MAX, 62) == 2, "%s",
          "windows");
    CHECK(ibp_partition_ids(&ids, INT64_MIN, 0, workspace, sorted, positions) == IBP_INVALID_ARGUMENT, "%s",
          "negative items");
    CHECK(ibp_partition_workspace_bytes(1, INT64_MIN, 0) == 0 && ibp_partition_workspace_bytes(-1, 5, 0) == 0, "%s",
          "workspace");
    CHECK(ibp_partition_workspace_bytes(1, INT64_MAX, 0) == 0 && ibp_partition_workspace_bytes(INT64_MAX, 5, 0) == 0,
          "%s", "workspace");
    ids.id_bytes = 3;
    CHECK(ibp_partition_ids(&ids, 5, 0, workspace, sorted, positions) == IBP_INVALID_ARGUMENT, "%s", "ids of 3 bytes");
    CHECK(ibp_version_number() == IBP_VERSION_NUMBER && ibp_format_version() == IBP_FORMAT_VERSION, "%d",
          ibp_version_number());
}

/* ---- codebooks of scheme planes ---- */

static void check_planes_refused(const ibp_planes *planes, uint32_t row_bytes, size_t entries_bytes, const char *why)
{
    ibp_codebook cb;
    CHECK(ibp_build_planes_codebook(planes, row_bytes, entries_bytes, &cb) == IBP_INVALID_ARGUMENT, "%s", why);
}

#define CHECK_PLANES(field, ...)                                         \
    do {                                                                 \
        ibp_planes other = good;                                         \
        other.field = __VA_ARGS__;                                       \
        check_planes_refused(&other, 24, 12, #field " = " #__VA_ARGS__); \
    } while (0)

static void check_planes_fields(void)
{
    _Alignas(8) uint8_t entries[12 * 3] = {0};
    const ibp_planes good = {.entries = entries,
                             .element_bytes = 4,
                             .residual_bits = 20,
                             .num_planes = 2,
                             .digit_bits = {1, 2, 7},
                             .default_value = 1};
    ibp_codebook cb, wrong;
    CHECK(ibp_build_planes_codebook(&good, 24, 8, &cb) == IBP_OK && ibp_check_codebook(&cb) == IBP_OK, "%s", "one set");
    CHECK(cb.planes.num_entries == 4 && cb.planes.symbol_bytes == 2 && cb.num_clusters == 0, "%u entries",
          cb.planes.num_entries);
    CHECK(ibp_build_planes_codebook(&good, 24, 24, &cb) == IBP_OK && ibp_check_codebook(&cb) == IBP_OK, "%s",
          "three sets");
    CHECK(cb.num_clusters == 3 && cb.cluster_stride == 8, "%u clusters", cb.num_clusters);
    entries[17] = 0x10; /* bit 12 of a symbol of 12 bits, of the last cluster */
    CHECK(ibp_check_codebook(&cb) == IBP_INVALID_ARGUMENT, "%s", "an entry with more bits than a symbol");
    entries[17] = 0x0f;
    CHECK(ibp_check_codebook(&cb) == IBP_OK, "%s", "an entry with as many bits as a symbol");
    wrong = cb, wrong.planes.num_entries++;
    CHECK(ibp_check_codebook(&wrong) == IBP_INVALID_ARGUMENT, "%s", "num_entries");
    wrong = cb, wrong.planes.symbol_bytes = 4;
    CHECK(ibp_check_codebook(&wrong) == IBP_INVALID_ARGUMENT, "%s", "symbol_bytes");
    wrong = cb, wrong.cluster_stride = 6;
    CHECK(ibp_check_codebook(&wrong) == IBP_INVALID_ARGUMENT, "%s", "cluster_stride");

    CHECK_PLANES(element_bytes, 0);
    CHECK_PLANES(element_bytes, 3);
    CHECK_PLANES(element_bytes, 16);
    CHECK_PLANES(element_bytes, UINT32_MAX);
    CHECK_PLANES(residual_bits, 33);
    CHECK_PLANES(residual_bits, UINT32_MAX);
    CHECK_PLANES(rotate, 2);
    CHECK_PLANES(num_planes, 3); /* of 7 bits */
    CHECK_PLANES(num_planes, 5);
    CHECK_PLANES(num_planes, UINT32_MAX);
    CHECK_PLANES(digit_bits[0], 0);
    CHECK_PLANES(default_value, (uint64_t)1 << 32);
    CHECK_PLANES(closed_value, UINT64_MAX);
    CHECK_PLANES(entries, NULL);
    CHECK_PLANES(entries, entries + 1);
    CHECK_PLANES(invariant_bits, 13); /* and 20 residual bits */
    CHECK_PLANES(invariant_bits, 32);
    CHECK_PLANES(invariant_bits, UINT32_MAX);
    CHECK_PLANES(invariant_value, 1);   /* of no bits */
    CHECK_PLANES(signed_default, true); /* in a dense codebook */
    CHECK_PLANES(consecutive, true);    /* with entries */
    CHECK_PLANES(num_constant, 1);      /* without any of which there are */
    CHECK_PLANES(num_constant, 6);
    CHECK_PLANES(num_constant, UINT32_MAX);
    ibp_planes both = good;
    both.per_column = both.listed = true;
    check_planes_refused(&both, 24, 12, "listed with entries for each column");
    check_planes_refused(&good, 22, 8, "row_bytes no multiple of element_bytes");
    check_planes_refused(&good, 0, 8, "no row_bytes");
    check_planes_refused(&good, IBP_MAX_ROW_BYTES + 4, 8, "a row too long");
    check_planes_refused(&good, 24, 0, "no entries");
    check_planes_refused(&good, 24, 12, "a set and a half");
    check_planes_refused(&good, 24, 8 * (IBP_MAX_CLUSTERS + 1), "too many sets");
    check_planes_refused(&good, 24, SIZE_MAX / 8 * 8, "far too many sets");
    ibp_planes none = {.element_bytes = 4, .residual_bits = 32, .listed = true};
    CHECK(ibp_build_planes_codebook(&none, 24, 0, &cb) == IBP_OK && ibp_check_codebook(&cb) == IBP_OK, "%s",
          "no planes");
    check_planes_refused(&none, 24, 8, "entries of no planes");
}

static void check_planes_constants(void)
{
    _Alignas(16) uint8_t row_template[24 + 16] = {[4] = 9};
    uint16_t live[5] = {0, 2, 5, 3, 4};
    ibp_planes planes = {.element_bytes = 4,
                         .residual_bits = 20,
                         .num_planes = 1,
                         .digit_bits = {2},
                         .consecutive = true,
                         .first_symbol = 0xffe,
                         .num_constant = 3,
                         .live_columns = live,
                         .row_template = row_template};
    ibp_codebook cb;
    CHECK(ibp_build_planes_codebook(&planes, 24, 0, &cb) == IBP_OK && ibp_check_codebook(&cb) == IBP_OK, "%s",
          "three live columns");
    planes.first_symbol = 0x1000;
    check_planes_refused(&planes, 24, 0, "a first symbol of 13 bits");
    planes.first_symbol = 0;
    planes.per_column = true;
    check_planes_refused(&planes, 24, 0, "consecutive entries of columns");
    planes.per_column = false;
    planes.row_template = row_template + 4;
    check_planes_refused(&planes, 24, 0, "a template that is not aligned");
    planes.row_template = NULL;
    check_planes_refused(&planes, 24, 0, "no template");
    planes.row_template = row_template;
    planes.live_columns = NULL;
    check_planes_refused(&planes, 24, 0, "no live columns");
    cb.num_clusters = 2;
    CHECK(ibp_check_codebook(&cb) == IBP_INVALID_ARGUMENT, "%s", "clusters of consecutive entries");
    cb.num_clusters = 0;
    for (uint32_t i = 0; i < 3; i++) {
        const uint16_t kept = live[i];
        const uint16_t wrong[] = {6, UINT16_MAX, i == 0 ? 2 : live[i - 1], 1}; /* column 1 is not the default */
        for (int k = 0; k < 4; k++) {
            live[i] = wrong[k];
            CHECK(ibp_check_codebook(&cb) == IBP_INVALID_ARGUMENT, "live column %u: %u", i, wrong[k]);
        }
        live[i] = kept;
    }
    CHECK(ibp_check_codebook(&cb) == IBP_OK, "%s", "good again");
    cb.planes.num_constant = 1;
    CHECK(ibp_check_codebook(&cb) == IBP_INVALID_ARGUMENT, "%s", "live columns out of order");
}

/* ---- codebooks of scheme ibp ---- */

/* Each bit of the flags, and what masks and bitvals must not have, is found out. */
static void check_words(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, bool flag_all, int kind)
{
    sample s = sample_new(r, row_bytes, chunk_bytes, flag_all, kind);
    const size_t num_words = ibp_codebook_words(row_bytes);
    uint32_t *const mask = s.words, *const bitval = mask + num_words, *const flags = bitval + num_words;
    CHECK(ibp_check_codebook(&s.codebook) == IBP_OK, "row of %u, chunks of %u, kind %d", row_bytes, chunk_bytes, kind);
    for (int i = 0; i < 40; i++) {
        const uint32_t w = rng_below(r, (uint32_t)num_words), bit = 1u << rng_below(r, 32);
        flags[w] ^= bit;
        CHECK(ibp_check_codebook(&s.codebook) == IBP_INVALID_ARGUMENT, "flags %08x of word %u, row of %u", bit, w,
              row_bytes);
        flags[w] ^= bit;
        if (mask[w] & bit) continue;
        bitval[w] ^= bit;
        CHECK(ibp_check_codebook(&s.codebook) == IBP_INVALID_ARGUMENT, "bitval %08x of word %u, row of %u", bit, w,
              row_bytes);
        bitval[w] ^= bit;
    }
    for (uint32_t i = row_bytes; i < 4 * num_words; i++) {
        mask[i / 4] ^= 1u << 8 * (i % 4);
        CHECK(ibp_check_codebook(&s.codebook) == IBP_INVALID_ARGUMENT, "mask of byte %u, row of %u", i, row_bytes);
        mask[i / 4] ^= 1u << 8 * (i % 4);
    }
    s.codebook.num_flags ^= 1;
    CHECK(ibp_check_codebook(&s.codebook) == IBP_INVALID_ARGUMENT, "%u flags", s.codebook.num_flags);
    sample_free(&s);
}

/* Codebooks of several clusters in one array, laid out as the torch operations do, whose words may then be anything. */
static uint32_t *make_clusters(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, uint32_t num_clusters,
                               ibp_codebook *out)
{
    const size_t num_words = ibp_codebook_words(row_bytes), stride = 3 * num_words + 4;
    uint32_t *const words = aligned_alloc(16, num_clusters * stride * 4);
    if (!words) abort();
    for (uint32_t k = 0; k < num_clusters; k++) {
        sample s = sample_new(r, row_bytes, chunk_bytes, k % 2 == 1, 3);
        memcpy(words + k * stride, s.words, 12 * num_words);
        words[k * stride + 3 * num_words] = s.codebook.num_flags;
        if (k == 0) *out = s.codebook;
        sample_free(&s);
    }
    out->mask = words;
    out->bitval = words + num_words;
    out->flags = words + 2 * num_words;
    out->num_clusters = num_clusters;
    out->cluster_stride = (uint32_t)stride;
    out->cluster_flags = words + 3 * num_words;
    return words;
}

/* Bytes that begin, or end, where memory that can be touched does. */
static uint8_t *guarded(int place, size_t size, bool at_end)
{
    enum { NUM_PLACES = 7, ROOM = 1 << 18, FENCE = 65536 };
    static uint8_t *places[NUM_PLACES];
    if (!places[place]) {
        uint8_t *const memory = mmap(NULL, ROOM + 2 * FENCE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED || mprotect(memory + FENCE, ROOM, PROT_READ | PROT_WRITE) != 0) abort();
        places[place] = memory + FENCE;
    }
    if (size > ROOM) abort();
    return at_end ? places[place] + ROOM - size : places[place];
}

/* Codes and decodes noise, from and to buffers between fences. The codebook's own arrays end at a fence, too, or are
 * the caller's. */
static void code_noise(rng *r, const ibp_codebook *cb)
{
    const size_t most = rng_chance(r, 50) ? ibp_max_coded_row_bytes(cb->row_bytes) : rng_below(r, 2 * cb->row_bytes);
    for (int i = 0; i < NUM_FEATURE_SETS; i++) {
        if (ibp_set_cpu_features(feature_sets[i]) != feature_sets[i]) continue;
        const bool at_end = rng_chance(r, 50);
        const size_t src_bytes = rng_below(r, cb->row_bytes + 40), scratch_bytes = ibp_scratch_bytes(cb->row_bytes);
        uint8_t *const row = guarded(0, cb->row_bytes, at_end), *const dst = guarded(1, most, at_end),
                       *const src = guarded(2, src_bytes, at_end), *const scratch = guarded(3, scratch_bytes, at_end);
        rng_fill(r, row, cb->row_bytes);
        rng_fill(r, src, src_bytes);
        if (src_bytes > 0 && cb->num_clusters > 1) src[0] = (uint8_t)(src[0] % cb->num_clusters);
        size_t coded_bytes;
        const ibp_status encoded = ibp_encode_row(cb, row, dst, most, &coded_bytes, scratch, scratch_bytes);
        CHECK(encoded == IBP_OK || encoded == IBP_BUFFER_TOO_SMALL, "%s", ibp_status_string(encoded));
        CHECK((encoded == IBP_OK) == (coded_bytes <= most), "%zu bytes in %zu", coded_bytes, most);
        const ibp_status decoded = ibp_decode_row(cb, src, src_bytes, row, scratch, scratch_bytes);
        CHECK(decoded == IBP_OK || decoded == IBP_CORRUPT_ROW, "%s", ibp_status_string(decoded));
    }
    ibp_set_cpu_features(UINT32_MAX);
}

static void check_hostile_masks(rng *r)
{
    const uint32_t row_bytes = 1 + rng_below(r, rng_chance(r, 5) ? 9000 : 300), chunk_bytes = 1u << rng_below(r, 4);
    const uint32_t num_clusters = 1 + rng_below(r, 3), num_words = (uint32_t)ibp_codebook_words(row_bytes);
    ibp_codebook cb;
    uint32_t *const words = make_clusters(r, row_bytes, chunk_bytes, num_clusters, &cb);
    if (num_clusters == 1) cb.num_clusters = 0;
    CHECK(ibp_check_codebook(&cb) == IBP_OK, "%u clusters, row of %u", num_clusters, row_bytes);
    const int kind =
        (int)rng_below(r, 4); /* any noise, positions as high as can be, flags for all, many flags of a cluster */
    for (uint32_t k = 0; k < num_clusters; k++)
        for (uint32_t w = 0; w < 3 * num_words + 4; w++) {
            uint32_t *const word = &words[k * (3 * num_words + 4) + w];
            if (kind == 0 && rng_chance(r, 30)) *word = (uint32_t)rng_next(r);
            if (kind == 1 && w >= 2 * num_words && w < 3 * num_words) *word |= 0x1ffff;
            if (kind == 2 && w >= 2 * num_words && w < 3 * num_words) *word |= 0xfu << 17;
            if (kind == 3 && w == 3 * num_words) *word = UINT32_MAX - rng_below(r, 9);
        }
    if (rng_chance(r, 50)) cb.num_flags = rng_below(r, (row_bytes + chunk_bytes - 1) / chunk_bytes + 1);
    code_noise(r, &cb);
    free(words);
}

/* What planes may leave out, with live columns and a template of noise. */
static void leave_out(rng *r, ibp_planes *planes, uint32_t columns)
{
    const uint32_t width = 8 * planes->element_bytes, most = width - planes->residual_bits;
    if (rng_chance(r, 30)) planes->invariant_bits = rng_below(r, most < width ? most + 1 : width);
    planes->signed_default = planes->listed && rng_chance(r, 30);
    planes->consecutive = !planes->per_column && rng_chance(r, 20);
    if (columns == 1 || rng_chance(r, 50)) return;
    planes->num_constant = 1 + rng_below(r, columns - 1);
    const size_t live_bytes = 2 * (size_t)(columns - planes->num_constant), row_bytes = columns * planes->element_bytes;
    uint8_t *const live = guarded(5, live_bytes, true), *const row_template =
                                                            guarded(6, (row_bytes + 15) / 16 * 16, true);
    rng_fill(r, live, live_bytes);
    for (size_t i = 1; i < live_bytes && rng_chance(r, 90); i += 2) live[i] = 0;
    memset(row_template, 0, row_bytes);
    planes->live_columns = (const uint16_t *)(const void *)live;
    planes->row_template = row_template;
}

static void check_hostile_planes(rng *r)
{
    const uint32_t element_bytes = 1u << rng_below(r, 4), columns = 1 + rng_below(r, 200);
    ibp_planes planes = {.element_bytes = element_bytes,
                         .residual_bits = rng_below(r, 8 * element_bytes + 1),
                         .rotate = rng_below(r, 2),
                         .num_planes = rng_below(r, IBP_MAX_PLANES + 1),
                         .per_column = rng_chance(r, 30)};
    planes.listed = !planes.per_column && rng_chance(r, 50);
    leave_out(r, &planes, columns);
    size_t num_entries = 0, symbol_bytes = 1;
    for (uint32_t p = 0; p < planes.num_planes; p++) {
        planes.digit_bits[p] = (uint8_t)(1 + rng_below(r, IBP_MAX_DIGIT_BITS));
        num_entries += (1u << planes.digit_bits[p]) - 1;
    }
    while (8 * symbol_bytes < 8 * element_bytes - planes.invariant_bits - planes.residual_bits) symbol_bytes *= 2;
    const size_t num_columns = planes.per_column ? columns - planes.num_constant : 1;
    const size_t num_bytes = planes.consecutive ? 0 : num_entries * symbol_bytes * num_columns * (1 + rng_below(r, 3));
    uint8_t *const entries = guarded(4, num_bytes, true);
    rng_fill(r, entries, num_bytes); /* bits above a symbol's included */
    planes.entries = entries;
    ibp_codebook cb;
    const ibp_status status = ibp_build_planes_codebook(&planes, columns * element_bytes, num_bytes, &cb);
    CHECK(status == IBP_OK, "%zu bytes of entries", num_bytes);
    if (status == IBP_OK) code_noise(r, &cb);
}

void test_arguments(void)
{
    rng r = rng_seed(31);
    check_table_fields(&r);
    check_ranges(&r);
    check_no_coded_rows();
    check_numbers();
    check_planes_fields();
    check_planes_constants();
    for (uint32_t row_bytes = 1; row_bytes < 70; row_bytes++)
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            check_words(&r, row_bytes, chunk_bytes, row_bytes % 2 == 1, (int)rng_below(&r, NUM_MASK_KINDS));
}

void test_hostile_codebooks(void)
{
    rng r = rng_seed(32);
    for (int round = 0; round < (is_quick ? 1000 : 20000); round++) {
        check_hostile_masks(&r);
        check_hostile_planes(&r);
    }
}
