/* test_tables.c - the row index, coding into slots and overflow, and gathers, against naive.c; then hostile indexes. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "check.h"

#include <sys/mman.h>

typedef struct made {
    sample sample;
    buffer data, slots, overflow;
    uint16_t *lengths;
    uint64_t *bases;
    ibp_table table;
} made;

static void *exact_array(int64_t num_entries, size_t entry_bytes)
{
    void *const array = malloc((size_t)num_entries * entry_bytes);
    if (!array && num_entries != 0) abort();
    return array;
}

/* A table through the core, as a caller would make it: measure, index, encode. row_kind: see sample_rows. */
static made make_table(rng *r, sample s, int64_t num_items, int64_t item_bytes, uint32_t slot_bytes, int row_kind)
{
    made t = {.sample = s};
    const int64_t num_bytes = num_items * item_bytes, row_bytes = s.masks.row_bytes;
    t.data = buffer_new((size_t)num_bytes, rng_below(r, 4));
    sample_rows(r, &s, row_kind, t.data.data, t.data.size);
    t.table =
        (ibp_table){.num_items = num_items, .item_bytes = item_bytes, .slot_bytes = slot_bytes, .codebook = s.codebook};
    const int64_t num_rows = ibp_num_rows(&t.table);
    CHECK(num_rows == (num_bytes + row_bytes - 1) / row_bytes, "%lld rows", (long long)num_rows);
    t.lengths = exact_array(num_rows, sizeof *t.lengths);
    t.bases = exact_array((num_rows + 31) / 32, sizeof *t.bases);
    buffer scratch = scratch_new((uint32_t)row_bytes);
    CHECK(ibp_measure_rows(&s.codebook, t.data.data, num_bytes, t.lengths, scratch.data, scratch.size) == IBP_OK, "%s",
          "measured");
    buffer_free(&scratch);
    ibp_index_rows(t.lengths, num_bytes, (uint32_t)row_bytes, slot_bytes, t.bases, &t.table.overflow_bytes);
    t.table.slots_bytes = slot_bytes == row_bytes ? num_bytes : num_rows * slot_bytes;
    t.slots = buffer_new((size_t)t.table.slots_bytes, rng_below(r, 4));
    t.overflow = buffer_new((size_t)t.table.overflow_bytes, rng_below(r, 4));
    t.table.slots = t.table.slots_bytes ? t.slots.data : NULL;
    t.table.overflow = t.table.overflow_bytes ? t.overflow.data : NULL;
    t.table.lengths = t.lengths;
    t.table.bases = t.table.overflow_bytes ? t.bases : NULL;
    return t;
}

/* Rows coded in one pass are those of a table in packed layout; without overflow all of them are lost. */
static void check_packed(const made *t)
{
    const int64_t num_rows = ibp_num_rows(&t->table), row_bytes = t->sample.masks.row_bytes;
    buffer scratch = scratch_new((uint32_t)row_bytes), packed = buffer_new(t->data.size, 1);
    uint16_t *const lengths = exact_array(num_rows, sizeof *lengths);
    uint64_t used = 0;
    ibp_place_counts counts = {0, 0};
    ibp_fault fault = {0};
    ibp_place place = {.table = t->table, .overflow = packed.data, .lengths = lengths, .used = &used};
    place.table.overflow_bytes = (int64_t)t->data.size, place.counts = &counts;
    const ibp_row_source rows = {
        .data = t->data.data, .num_rows = num_rows, .last_row_bytes = (uint32_t)((int64_t)t->data.size % row_bytes)};
    ibp_status status = ibp_encode_into(&place, &rows, NULL, 0, 0, num_rows, scratch.data, scratch.size, &fault);
    CHECK(status == IBP_OK && (int64_t)used == t->table.overflow_bytes && counts.lost == 0, "%s: %lld bytes",
          ibp_status_string(status), (long long)used);
    CHECK(num_rows == 0 || memcmp(lengths, t->lengths, (size_t)num_rows * sizeof *lengths) == 0, "%s", "lengths");
    CHECK(used == 0 || memcmp(packed.data, t->overflow.data, (size_t)used) == 0, "%s", "rows");
    used = 0, place.table.overflow_bytes = 0;
    status = ibp_encode_into(&place, &rows, NULL, 0, 0, num_rows, scratch.data, scratch.size, &fault);
    CHECK(status == IBP_OK && used == 0 && (int64_t)counts.lost == num_rows, "%s: %lld rows are lost",
          ibp_status_string(status), (long long)counts.lost);
    status = ibp_encode_into(&place, &rows, &num_rows, 0, 0, num_rows, scratch.data, scratch.size, &fault);
    CHECK(num_rows == 0 || status == IBP_INVALID_ARGUMENT, "%s", ibp_status_string(status));
    free(lengths);
    buffer_free(&packed);
    buffer_free(&scratch);
}

static void encode_table(made *t, int64_t num_parts)
{
    const int64_t num_rows = ibp_num_rows(&t->table);
    buffer scratch = scratch_new(t->sample.masks.row_bytes);
    for (int64_t part = 0; part < num_parts; part++) {
        ibp_fault fault = {0};
        const ibp_status status =
            ibp_encode_rows(&t->table, t->data.data, num_rows * part / num_parts, num_rows * (part + 1) / num_parts,
                            t->slots.data, t->overflow.data, scratch.data, scratch.size, &fault);
        CHECK(status == IBP_OK && fault.status == IBP_OK && fault.taken == 0, "%s", ibp_status_string(status));
    }
    buffer_free(&scratch);
    if (t->table.slot_bytes == 0 && t->table.rows_per_base != 1) check_packed(t);
}

static void free_table(made *t)
{
    sample_free(&t->sample);
    buffer_free(&t->data);
    buffer_free(&t->slots);
    buffer_free(&t->overflow);
    free(t->lengths);
    free(t->bases);
}

static void check_lengths(const made *t)
{
    const masks *const m = &t->sample.masks;
    buffer coded = buffer_new(naive_max_coded_bytes(m), 0), row = buffer_new(m->row_bytes, 0);
    for (int64_t r = 0; r < ibp_num_rows(&t->table); r++) {
        const uint32_t valid = naive_valid_bytes(&t->table, r);
        memset(row.data, 0, row.size);
        memcpy(row.data, t->data.data + r * m->row_bytes, valid);
        bool is_default = true;
        for (uint32_t i = 0; i < valid; i++) is_default = is_default && row.data[i] == 0;
        const size_t size = naive_encode_row(m, row.data, coded.data);
        const size_t length = is_default ? IBP_DEFAULT_LENGTH(m->row_bytes) : size < valid && size < 65535 ? size : 0;
        CHECK(t->lengths[r] == length, "row %lld: %u, not %zu", (long long)r, t->lengths[r], length);
    }
    buffer_free(&coded);
    buffer_free(&row);
}

static void check_stored_rows(const made *t)
{
    buffer out = buffer_new(t->sample.masks.row_bytes, 0);
    for (int64_t r = 0; r < ibp_num_rows(&t->table); r++) {
        CHECK(naive_read_row(&t->sample.masks, &t->table, r, out.data), "row %lld", (long long)r);
        CHECK(memcmp(out.data, t->data.data + r * t->sample.masks.row_bytes, naive_valid_bytes(&t->table, r)) == 0,
              "row %lld", (long long)r);
    }
    buffer_free(&out);
}

static void check_gather(rng *r, const made *t, uint32_t id_bytes)
{
    enum { NUM_IDS = 50 };
    const size_t item = (size_t)t->table.item_bytes;
    int64_t ids64[NUM_IDS];
    int32_t ids32[NUM_IDS];
    for (int k = 0; k < NUM_IDS; k++) ids32[k] = (int32_t)(ids64[k] = rng_below(r, (uint32_t)t->table.num_items));
    const ibp_ids ids = {.data = id_bytes == 4 ? (const void *)ids32 : ids64, .count = NUM_IDS, .id_bytes = id_bytes};
    buffer out = buffer_new(NUM_IDS * item, 1), scratch = scratch_new(t->sample.masks.row_bytes);
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t->table, &ids, 0, 20, out.data, scratch.data, scratch.size, &fault) == IBP_OK, "%s",
          "the first half");
    CHECK(out.size == 20 * item || out.data[20 * item] == 0xA5, "%s", "writes past the last position");
    CHECK(ibp_gather_items(&t->table, &ids, 20, NUM_IDS, out.data, scratch.data, scratch.size, &fault) == IBP_OK, "%s",
          "the rest");
    CHECK(fault.status == IBP_OK, "%lld", (long long)fault.status);
    for (size_t k = 0; k < NUM_IDS; k++)
        CHECK(memcmp(out.data + k * item, t->data.data + (size_t)ids64[k] * item, item) == 0, "id %lld",
              (long long)ids64[k]);
    buffer_free(&out);
    buffer_free(&scratch);
}

static void check_decode_bytes(rng *r, const made *t)
{
    buffer scratch = scratch_new(t->sample.masks.row_bytes);
    const int64_t num_bytes = (int64_t)t->data.size;
    for (int i = 0; i < 8; i++) {
        const int64_t a = i == 0 ? 0 : rng_below(r, (uint32_t)num_bytes + 1), b = rng_below(r, (uint32_t)num_bytes + 1);
        const int64_t start = a < b ? a : b, end = i == 0 ? num_bytes : a < b ? b : a;
        buffer out = buffer_new((size_t)(end - start), 1);
        ibp_fault fault = {0};
        CHECK(ibp_decode_bytes(&t->table, start, end, out.data, scratch.data, scratch.size, &fault) == IBP_OK,
              "%lld to %lld", (long long)start, (long long)end);
        CHECK(out.size == 0 || memcmp(out.data, t->data.data + start, out.size) == 0, "%lld to %lld", (long long)start,
              (long long)end);
        buffer_free(&out);
    }
    uint8_t byte;
    ibp_fault fault = {0};
    const int64_t bad[][2] = {
        {-1, 0}, {1, 0}, {0, num_bytes + 1}, {num_bytes + 1, num_bytes + 1}, {INT64_MIN, INT64_MAX}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(ibp_decode_bytes(&t->table, bad[i][0], bad[i][1], &byte, scratch.data, scratch.size, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "range %zu", i);
    buffer_free(&scratch);
}

static void check_bad_ids(const made *t)
{
    const int64_t n = t->table.num_items;
    const int64_t ids64[] = {0, -1, n, INT64_MAX, INT64_MIN, n - 1, (int64_t)1 << 32};
    enum { NUM_IDS = sizeof ids64 / sizeof *ids64 };
    const size_t item = (size_t)t->table.item_bytes;
    const ibp_ids ids = {.data = ids64, .count = NUM_IDS, .id_bytes = 8};
    buffer out = buffer_new(NUM_IDS * item, 0), scratch = scratch_new(t->sample.masks.row_bytes);
    buffer zeros = buffer_new(item, 0);
    memset(zeros.data, 0, item);
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t->table, &ids, 0, NUM_IDS, out.data, scratch.data, scratch.size, &fault) ==
              IBP_INDEX_OUT_OF_RANGE,
          "%s", "bad ids");
    CHECK(fault.status == IBP_INDEX_OUT_OF_RANGE && fault.position == 1 && fault.id == -1, "position %lld, id %lld",
          (long long)fault.position, (long long)fault.id);
    for (size_t k = 0; k < NUM_IDS; k++) {
        const bool good = ids64[k] >= 0 && ids64[k] < n;
        const uint8_t *const expected = good ? t->data.data + (size_t)ids64[k] * item : zeros.data;
        CHECK(memcmp(out.data + k * item, expected, item) == 0, "id %lld", (long long)ids64[k]);
    }
    CHECK(ibp_gather_items(&t->table, &ids, 2, 4, out.data, scratch.data, scratch.size, &fault) ==
              IBP_INDEX_OUT_OF_RANGE,
          "%s", "again");
    CHECK(fault.position == 1, "the first fault stays, not %lld", (long long)fault.position);
    buffer_free(&out);
    buffer_free(&scratch);
    buffer_free(&zeros);
}

static void check_encode_fault(made *t, int64_t first, int64_t last, int64_t bad_row, ibp_status expected,
                               const buffer *scratch)
{
    ibp_fault fault = {0};
    const ibp_status status = ibp_encode_rows(&t->table, t->data.data, first, last, t->slots.data, t->overflow.data,
                                              scratch->data, scratch->size, &fault);
    CHECK(status == expected && fault.status == (int64_t)expected, "row %lld: %s", (long long)bad_row,
          ibp_status_string(status));
    CHECK(fault.position == bad_row && fault.id == bad_row, "row %lld, not %lld", (long long)fault.position,
          (long long)bad_row);
}

/* Lengths of other data, and arrays that end too early. */
static void check_encode_errors(made *t)
{
    const int64_t num_rows = ibp_num_rows(&t->table);
    const ibp_table good = t->table;
    buffer scratch = scratch_new(t->sample.masks.row_bytes);
    for (int64_t r = 0; r < num_rows; r++) {
        if (t->lengths[r] < 2 || naive_is_marked(&t->table, r)) continue;
        t->lengths[r]--;
        check_encode_fault(t, r > 2 ? r - 2 : 0, r + 1, r, IBP_CORRUPT_ROW, &scratch);
        t->lengths[r] = (uint16_t)(t->lengths[r] + 2); /* one more than it has: corrupt, or where it ends in no room */
        ibp_fault fault = {0};
        CHECK(ibp_encode_rows(&t->table, t->data.data, r, r + 1, t->slots.data, t->overflow.data, scratch.data,
                              scratch.size, &fault) != IBP_OK,
              "row %lld", (long long)r);
        CHECK(fault.status != IBP_OK && fault.position == r, "row %lld", (long long)fault.position);
        t->lengths[r]--;
    }
    for (int64_t r = 0; r < num_rows; r++) { /* the first row with a part in an array that is not there */
        if (naive_stored_bytes(&t->table, r) <= good.slot_bytes) continue;
        t->table.overflow_bytes = 0;
        check_encode_fault(t, 0, num_rows, r, IBP_BUFFER_TOO_SMALL, &scratch);
        t->table = good;
        break;
    }
    int64_t first = 0; /* with bytes */
    while (first < num_rows && naive_is_marked(&t->table, first)) first++;
    if (good.slots_bytes > 0 && first < num_rows) {
        t->table.slots_bytes = 0;
        check_encode_fault(t, 0, num_rows, first, IBP_BUFFER_TOO_SMALL, &scratch);
        t->table = good;
    }
    if (first < num_rows) {
        const uint16_t length = t->lengths[first];
        t->lengths[first] = (uint16_t)IBP_DEFAULT_LENGTH(t->sample.masks.row_bytes);
        check_encode_fault(t, first, first + 1, first, IBP_CORRUPT_ROW, &scratch);
        t->lengths[first] = length;
    }
    buffer_free(&scratch);
}

/* A block of rows coded with a slice of the index and overflow_start, as a larger table is coded piece by piece. */
static void check_overflow_start(const made *t)
{
    const int64_t row_bytes = t->sample.masks.row_bytes, num_bytes = (int64_t)t->data.size, first = 32;
    if (t->table.overflow_bytes == 0 || t->table.slots_bytes > 0 || ibp_num_rows(&t->table) <= first) return;
    if (t->table.item_bytes != row_bytes) return;
    const uint64_t start = t->bases[1];
    buffer block = buffer_new(t->overflow.size - (size_t)start, 0), scratch = scratch_new((uint32_t)row_bytes);
    ibp_table rest = t->table;
    rest.num_items -= first;
    rest.lengths += first;
    rest.bases += 1;
    rest.overflow_start = start;
    rest.overflow = block.data;
    rest.overflow_bytes = (int64_t)block.size;
    ibp_fault fault = {0};
    const ibp_status status =
        ibp_encode_rows(&rest, t->data.data + first * row_bytes, 0, (num_bytes - 1) / row_bytes + 1 - first, NULL,
                        block.data, scratch.data, scratch.size, &fault);
    CHECK(status == IBP_OK, "%s", ibp_status_string(status));
    CHECK(memcmp(block.data, t->overflow.data + start, block.size) == 0, "%zu bytes", block.size);
    buffer_free(&block);
    buffer_free(&scratch);
}

/* Rows as stored, for a table of their own in packed layout: it gives the items that were selected. */
static void check_selection(rng *r, const made *t)
{
    enum { NUM_IDS = 37 };
    const int64_t row_bytes = t->sample.masks.row_bytes, item_bytes = t->table.item_bytes,
                  rows_per_item = item_bytes / row_bytes;
    const int64_t num_rows = NUM_IDS * rows_per_item;
    int32_t ids32[NUM_IDS];
    for (int k = 0; k < NUM_IDS; k++) ids32[k] = (int32_t)rng_below(r, (uint32_t)t->table.num_items);
    const ibp_ids ids = {.data = ids32, .count = NUM_IDS, .id_bytes = 4};
    ibp_fault fault = {0};
    uint64_t stored_bytes = 0;
    uint16_t *const lengths = exact_array(num_rows, sizeof *lengths);
    uint64_t *const bases = exact_array((num_rows + 31) / 32, sizeof *bases);
    const ibp_status measured = ibp_measure_selection(&t->table, &ids, 0, num_rows, lengths, &stored_bytes, &fault);
    if (item_bytes % row_bytes != 0) {
        CHECK(measured == IBP_INVALID_ARGUMENT, "%s", ibp_status_string(measured));
    } else {
        CHECK(measured == IBP_OK, "%s", ibp_status_string(measured));
        buffer rows = buffer_new((size_t)stored_bytes, 1), item = buffer_new((size_t)item_bytes, 0);
        buffer scratch = scratch_new((uint32_t)row_bytes);
        ibp_table selection = {.num_items = NUM_IDS,
                               .item_bytes = item_bytes,
                               .lengths = lengths,
                               .bases = bases,
                               .overflow = stored_bytes ? rows.data : NULL,
                               .codebook = t->table.codebook};
        ibp_index_rows(lengths, NUM_IDS * item_bytes, (uint32_t)row_bytes, 0, bases, &selection.overflow_bytes);
        CHECK(selection.overflow_bytes == (int64_t)stored_bytes, "%lld", (long long)selection.overflow_bytes);
        const int64_t middle = rng_below(r, (uint32_t)num_rows) / 32 * 32;
        const uint64_t cut = bases[middle / 32];
        CHECK(ibp_copy_selection(&t->table, &ids, 0, middle, rows.data, cut, &fault) == IBP_OK, "%s", "the first part");
        CHECK(ibp_copy_selection(&t->table, &ids, middle, num_rows, rows.data + cut, stored_bytes - cut, &fault) ==
                  IBP_OK,
              "%s", "the rest");
        for (int64_t k = 0; k < NUM_IDS; k++) {
            const ibp_status status = ibp_decode_bytes(&selection, k * item_bytes, (k + 1) * item_bytes, item.data,
                                                       scratch.data, scratch.size, &fault);
            CHECK(status == IBP_OK && memcmp(item.data, t->data.data + ids32[k] * item_bytes, (size_t)item_bytes) == 0,
                  "id %d", ids32[k]);
        }
        int64_t last = num_rows - 1; /* with bytes */
        while (last >= 0 && naive_is_marked(&selection, last)) last--;
        if (last >= 0) {
            CHECK(ibp_copy_selection(&t->table, &ids, 0, num_rows, rows.data, stored_bytes - 1, &fault) ==
                      IBP_CORRUPT_ROW,
                  "%s", "no room");
            CHECK(fault.position == last / rows_per_item, "%lld", (long long)fault.position);
        }
        fault = (ibp_fault){0};
        ids32[5] = (int32_t)t->table.num_items;
        CHECK(ibp_measure_selection(&t->table, &ids, 0, num_rows, lengths, &stored_bytes, &fault) ==
                  IBP_INDEX_OUT_OF_RANGE,
              "%s", "a bad id");
        CHECK(ibp_copy_selection(&t->table, &ids, 0, num_rows, rows.data, rows.size, &fault) == IBP_INDEX_OUT_OF_RANGE,
              "%s", "a bad id");
        CHECK(fault.position == 5 && fault.id == ids32[5], "%lld", (long long)fault.position);
        buffer_free(&rows);
        buffer_free(&item);
        buffer_free(&scratch);
    }
    free(lengths);
    free(bases);
}

static void check_positions(const made *t)
{
    const size_t item = (size_t)t->table.item_bytes;
    const int32_t ids32[] = {0, (int32_t)t->table.num_items - 1, 0};
    const uint32_t positions[] = {2, 0, 3};
    const ibp_ids ids = {.data = ids32, .count = 3, .id_bytes = 4, .positions = positions, .out_items = 3};
    buffer out = buffer_new(3 * item, 1), scratch = scratch_new(t->sample.masks.row_bytes);
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t->table, &ids, 0, 3, out.data, scratch.data, scratch.size, &fault) ==
              IBP_INDEX_OUT_OF_RANGE,
          "%s", "no position 3");
    CHECK(fault.position == 3 && fault.id == 0, "%lld", (long long)fault.position);
    CHECK(memcmp(out.data + 2 * item, t->data.data, item) == 0, "%s", "the first item");
    CHECK(memcmp(out.data, t->data.data + (size_t)ids32[1] * item, item) == 0, "%s", "the last item");
    CHECK(out.data[item] == 0xA5, "%s", "a position that nothing goes to");
    buffer_free(&out);
    buffer_free(&scratch);
}

/* All items in order into a [3, 2, n] view of a larger tensor, the dimensions of which lie in another order. */
static void check_strided(const made *t)
{
    const int64_t item = t->table.item_bytes, count = t->table.num_items < 6 ? t->table.num_items : 6;
    const int64_t inner = 2 * item + 5, outer = 2 * inner;
    ibp_ids ids = {.count = count, .num_dims = 3, .sizes = {3, 2, 1}, .strides = {inner, 3 * outer, 0}};
    buffer out = buffer_new((size_t)(3 * outer + 3 * inner), 1), scratch = scratch_new(t->sample.masks.row_bytes);
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t->table, &ids, 0, count, out.data, scratch.data, scratch.size, &fault) == IBP_OK, "%lld",
          (long long)fault.status);
    for (int64_t k = 0; k < count; k++) {
        const int64_t start = k / 2 * inner + k % 2 * 3 * outer;
        CHECK(memcmp(out.data + start, t->data.data + k * item, (size_t)item) == 0, "item %lld", (long long)k);
        CHECK(out.data[start + item] == 0xA5, "behind item %lld", (long long)k);
    }
    const ibp_ids right = ids;
    for (int wrong = 0; wrong < 5; wrong++) {
        ids = right;
        if (wrong == 0) ids.num_dims = IBP_MAX_OUT_DIMS + 1;
        if (wrong == 1) ids.sizes[2] = 0;
        if (wrong == 2) ids.strides[1] = -1;
        if (wrong == 3) ids.sizes[0] = ids.sizes[1] = INT64_MAX / 2;
        if (wrong == 4) ids.num_dims = 1, ids.sizes[0] = count - 1;
        CHECK(ibp_gather_items(&t->table, &ids, 0, count, out.data, scratch.data, scratch.size, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "%d", wrong);
    }
    buffer_free(&out);
    buffer_free(&scratch);
}

/* Items to pieces of memory that lie anywhere. */
static void check_addresses(const made *t)
{
    const size_t item = (size_t)t->table.item_bytes;
    const int64_t ids64[] = {t->table.num_items - 1, t->table.num_items, 0};
    buffer pieces[3], scratch = scratch_new(t->sample.masks.row_bytes);
    uint64_t addresses[3];
    for (size_t k = 0; k < 3; k++) {
        pieces[k] = buffer_new(item, k);
        addresses[k] = (uint64_t)(uintptr_t)pieces[k].data;
    }
    ibp_ids ids = {.data = ids64, .count = 3, .id_bytes = 8, .addresses = addresses};
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t->table, &ids, 0, 3, NULL, scratch.data, scratch.size, &fault) == IBP_INDEX_OUT_OF_RANGE,
          "%s", "no such item");
    CHECK(fault.position == 1 && fault.id == ids64[1], "%lld", (long long)fault.position);
    CHECK(memcmp(pieces[0].data, t->data.data + (size_t)ids64[0] * item, item) == 0, "%s", "the last item");
    CHECK(memcmp(pieces[2].data, t->data.data, item) == 0, "%s", "the first item");
    for (size_t b = 0; b < item; b++) CHECK(pieces[1].data[b] == 0, "byte %zu of the item that is not there", b);
    ids.num_dims = 1, ids.sizes[0] = 3;
    CHECK(ibp_gather_items(&t->table, &ids, 0, 3, NULL, scratch.data, scratch.size, &fault) == IBP_INVALID_ARGUMENT,
          "%s", "addresses and dimensions");
    for (size_t k = 0; k < 3; k++) buffer_free(&pieces[k]);
    buffer_free(&scratch);
}

/* Every row as the bit loops read it, or zeros and a fault that names the first bad one. */
static void check_against_naive(const made *t)
{
    const int64_t num_rows = ibp_num_rows(&t->table), row_bytes = t->sample.masks.row_bytes;
    buffer out = buffer_new(t->data.size, 0), expected = buffer_new(t->data.size, 0),
           scratch = scratch_new((uint32_t)row_bytes);
    int64_t first_bad = -1;
    for (int64_t r = 0; r < num_rows; r++) {
        uint8_t *const row = expected.data + r * row_bytes;
        if (naive_read_row(&t->sample.masks, &t->table, r, row)) continue;
        memset(row, 0, naive_valid_bytes(&t->table, r));
        if (first_bad < 0) first_bad = r;
    }
    ibp_fault fault = {0};
    const ibp_status status =
        ibp_decode_bytes(&t->table, 0, (int64_t)out.size, out.data, scratch.data, scratch.size, &fault);
    CHECK(status == (first_bad < 0 ? IBP_OK : IBP_CORRUPT_ROW), "%s, first bad row %lld", ibp_status_string(status),
          (long long)first_bad);
    CHECK(fault.status == (int64_t)status && (first_bad < 0 || fault.id == first_bad), "row %lld, not %lld",
          (long long)fault.id, (long long)first_bad);
    CHECK(memcmp(out.data, expected.data, out.size) == 0, "%lld rows of %lld", (long long)num_rows,
          (long long)row_bytes);
    buffer_free(&out);
    buffer_free(&expected);
    buffer_free(&scratch);
}

/* A copy of a table in which every row has a base of its own: parts in any order, with gaps. */
static made give_own_bases(rng *r, const made *t)
{
    made own = {.sample = t->sample, .data = t->data, .table = t->table};
    const int64_t num_rows = ibp_num_rows(&t->table);
    int64_t *const order = exact_array(num_rows, sizeof *order);
    own.lengths = t->lengths;
    own.bases = exact_array(num_rows, sizeof *own.bases);
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t at = rng_below(r, (uint32_t)i + 1);
        order[i] = order[at];
        order[at] = i;
    }
    uint64_t end = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        const uint32_t stored = naive_stored_bytes(&t->table, order[i]), slot_bytes = t->table.slot_bytes;
        own.bases[order[i]] = stored > slot_bytes ? end : rng_next(r); /* not read where there is no part */
        if (stored > slot_bytes) end += (stored - slot_bytes + 31) / 32 * 32 + 32 * rng_below(r, 2);
    }
    free(order);
    own.slots = buffer_copy(t->slots.data, t->slots.size, 0);
    own.overflow = buffer_new((size_t)end, 1);
    own.table.rows_per_base = 1;
    own.table.slots = own.slots.size ? own.slots.data : NULL;
    own.table.overflow = own.overflow.size ? own.overflow.data : NULL;
    own.table.overflow_bytes = (int64_t)end;
    own.table.bases = own.bases;
    return own;
}

static void check_own_bases(rng *r, const made *t)
{
    made own = give_own_bases(r, t);
    encode_table(&own, 1 + (int64_t)rng_below(r, 3));
    check_stored_rows(&own);
    check_gather(r, &own, 4);
    check_decode_bytes(r, &own);
    check_selection(r, &own);
    int64_t lost = ibp_num_rows(&own.table) - 1; /* the last with a part */
    while (lost >= 0 && naive_stored_bytes(&own.table, lost) <= own.table.slot_bytes) lost--;
    if (lost >= 0) {
        own.bases[lost] = IBP_NO_BASE;
        check_against_naive(&own);
        CHECK(!naive_read_row(&own.sample.masks, &own.table, lost, own.data.data), "row %lld", (long long)lost);
    }
    buffer_free(&own.slots);
    buffer_free(&own.overflow);
    free(own.bases);
}

static void check_table(rng *r, uint32_t row_bytes, uint32_t chunk_bytes, uint32_t slot_bytes, int64_t item_bytes,
                        int kind)
{
    const int row_kind = kind % NUM_ROW_KINDS;
    const int64_t num_items = 1 + (int64_t)rng_below(r, 70 * row_bytes) / item_bytes;
    made t = make_table(r, sample_new(r, row_bytes, chunk_bytes, kind % 3 == 0, kind % NUM_MASK_KINDS), num_items,
                        item_bytes, slot_bytes, row_kind);
    check_lengths(&t);
    encode_table(&t, 1 + (int64_t)rng_below(r, 3));
    check_stored_rows(&t);
    check_gather(r, &t, kind % 2 ? 4 : 8);
    check_decode_bytes(r, &t);
    check_bad_ids(&t);
    check_selection(r, &t);
    check_positions(&t);
    check_strided(&t);
    check_addresses(&t);
    check_overflow_start(&t);
    check_own_bases(r, &t);
    check_encode_errors(&t);
    free_table(&t);
}

/* Rows of a default that is not zero, in which some columns are constant or none is. The last row is short. */
static void check_default_rows(rng *r, uint32_t columns, uint32_t num_constant, uint32_t slot_bytes)
{
    enum { NUM_ROWS = 70, CUT = 5, MOST_COLUMNS = 40 };
    static _Alignas(16) uint8_t row_template[4 * MOST_COLUMNS];
    uint16_t live[MOST_COLUMNS];
    uint32_t elements[NUM_ROWS * MOST_COLUMNS], out[NUM_ROWS * MOST_COLUMNS];
    for (uint32_t column = 0; column < columns; column++) {
        live[column] = (uint16_t)(column + num_constant);
        const uint32_t x = column < num_constant ? (uint32_t)rng_next(r) : 0x3f800000;
        memcpy(row_template + 4 * column, &x, 4);
    }
    const ibp_planes planes = {.element_bytes = 4,
                               .residual_bits = 24,
                               .num_planes = 1,
                               .digit_bits = {2},
                               .consecutive = true,
                               .default_value = 0x3f800000,
                               .num_constant = num_constant,
                               .live_columns = live,
                               .row_template = row_template};
    const uint32_t row_bytes = 4 * columns;
    const int64_t num_bytes = NUM_ROWS * (int64_t)row_bytes - CUT;
    ibp_table table = {.num_items = num_bytes, .item_bytes = 1, .slot_bytes = slot_bytes};
    CHECK(ibp_build_planes_codebook(&planes, row_bytes, 0, &table.codebook) == IBP_OK, "%u columns", columns);
    uint8_t *const data = (uint8_t *)elements;
    for (uint32_t i = 0; i < NUM_ROWS; i++) {
        memcpy(data + i * row_bytes, row_template, row_bytes);
        if (i % 3 == 1) data[i * row_bytes + rng_below(r, row_bytes - CUT)] ^= 1; /* of any column */
    }
    uint16_t lengths[NUM_ROWS];
    uint64_t bases[(NUM_ROWS + 31) / 32];
    buffer scratch = scratch_new(row_bytes);
    ibp_measure_rows(&table.codebook, data, num_bytes, lengths, scratch.data, scratch.size);
    for (uint32_t i = 0; i < NUM_ROWS; i++)
        CHECK((lengths[i] == row_bytes) == (i % 3 != 1), "row %u: %u bytes", i, lengths[i]);
    ibp_index_rows(lengths, num_bytes, row_bytes, slot_bytes, bases, &table.overflow_bytes);
    table.slots_bytes = slot_bytes == row_bytes ? num_bytes : NUM_ROWS * (int64_t)slot_bytes;
    buffer slots = buffer_new((size_t)table.slots_bytes, 1), overflow = buffer_new((size_t)table.overflow_bytes, 1);
    table.slots = slots.size ? slots.data : NULL;
    table.overflow = overflow.size ? overflow.data : NULL;
    table.lengths = lengths;
    table.bases = bases;
    ibp_fault fault = {0};
    CHECK(ibp_encode_rows(&table, data, 0, NUM_ROWS, slots.data, overflow.data, scratch.data, scratch.size, &fault) ==
              IBP_OK,
          "row %lld", (long long)fault.id);
    for (int64_t start = 0; start < num_bytes; start += 1 + rng_below(r, 3 * row_bytes)) {
        const int64_t left = num_bytes - start, size = left < 50 ? left : 50;
        CHECK(ibp_decode_bytes(&table, start, start + size, (uint8_t *)out, scratch.data, scratch.size, &fault) ==
                  IBP_OK,
              "byte %lld", (long long)start);
        CHECK(memcmp(out, data + start, (size_t)size) == 0, "byte %lld", (long long)start);
    }
    buffer_free(&scratch);
    buffer_free(&slots);
    buffer_free(&overflow);
}

static void check_raw_table(void)
{
    uint8_t data[50], out[50], scratch[IBP_SCRATCH_BYTES(16)];
    rng r = rng_seed(6);
    rng_fill(&r, data, sizeof data);
    const ibp_table table = {.num_items = 10,
                             .item_bytes = 5,
                             .slots = data,
                             .slots_bytes = 50,
                             .slot_bytes = 16,
                             .codebook = {.row_bytes = 16}};
    const int64_t ids64[] = {9, 0, 3, 3, 6};
    const ibp_ids ids = {.data = ids64, .count = 5, .id_bytes = 8};
    ibp_fault fault = {0};
    CHECK(ibp_num_rows(&table) == 4, "%lld", (long long)ibp_num_rows(&table));
    CHECK(ibp_gather_items(&table, &ids, 0, 5, out, scratch, sizeof scratch, &fault) == IBP_OK, "%lld",
          (long long)fault.status);
    for (int k = 0; k < 5; k++) CHECK(memcmp(out + 5 * k, data + 5 * ids64[k], 5) == 0, "id %lld", (long long)ids64[k]);
    CHECK(ibp_decode_bytes(&table, 0, 50, out, scratch, sizeof scratch, &fault) == IBP_OK && memcmp(out, data, 50) == 0,
          "%s", "all of it");
}

static void check_empty_table(void)
{
    const ibp_table table = {.num_items = 0, .item_bytes = 4, .slot_bytes = 4, .codebook = {.row_bytes = 4}};
    const int64_t zero = 0;
    const ibp_ids none = {.data = &zero, .count = 0, .id_bytes = 8}, one = {.data = &zero, .count = 1, .id_bytes = 8};
    uint8_t out[4] = {1, 1, 1, 1}, scratch[IBP_SCRATCH_BYTES(4)];
    ibp_fault fault = {0};
    CHECK(ibp_num_rows(&table) == 0, "%lld", (long long)ibp_num_rows(&table));
    CHECK(ibp_gather_items(&table, &none, 0, 0, NULL, scratch, sizeof scratch, &fault) == IBP_OK, "%s", "no ids");
    CHECK(ibp_gather_items(&table, &one, 0, 1, out, scratch, sizeof scratch, &fault) == IBP_INDEX_OUT_OF_RANGE, "%s",
          "an id of nothing");
    CHECK(out[0] == 0 && out[3] == 0, "%u", out[0]);
    CHECK(ibp_decode_bytes(&table, 0, 0, NULL, scratch, sizeof scratch, &fault) == IBP_OK, "%s", "no bytes");
    int64_t overflow_bytes = -1;
    ibp_index_rows(NULL, 0, 4, 0, NULL, &overflow_bytes);
    CHECK(overflow_bytes == 0, "%lld", (long long)overflow_bytes);
}

void test_tables(void)
{
    static const uint32_t row_sizes[] = {1, 3, 8, 31, 33, 64, 100, 129, 200, 600};
    rng r = rng_seed(7);
    int kind = 0;
    for (size_t i = 0; i < sizeof row_sizes / sizeof *row_sizes; i++) {
        const uint32_t row_bytes = row_sizes[i];
        for (uint32_t chunk_bytes = 1; chunk_bytes <= 8; chunk_bytes *= 2)
            for (int layout = 0; layout < 5; layout++) {
                const uint32_t slot_bytes = layout == 0 ? 0 : layout == 1 ? row_bytes : 32 * (uint32_t)(layout - 1);
                if (layout > 1 && slot_bytes >= row_bytes) continue;
                check_table(&r, row_bytes, chunk_bytes, slot_bytes, row_bytes, kind++);
                check_table(&r, row_bytes, chunk_bytes, slot_bytes, 1 + rng_below(&r, 3 * row_bytes), kind++);
            }
    }
    check_table(&r, IBP_MAX_ROW_BYTES, 4, 32000, IBP_MAX_ROW_BYTES, 1);
    for (uint32_t columns = 4; columns <= 40; columns += 9)
        for (uint32_t num_constant = 0; num_constant < columns; num_constant += 3)
            for (uint32_t layout = 0; layout < 3; layout++)
                check_default_rows(&r, columns, num_constant,
                                   layout == 0 || columns < 9 ? 0
                                   : layout == 1              ? 32
                                                              : 4 * columns);
    check_raw_table();
    check_empty_table();
}

/* ---- hostile indexes ----------------------------------------------------------------------------------------------
 */

static void corrupt_index(rng *r, made *t)
{
    const int64_t num_rows = ibp_num_rows(&t->table),
                  num_bases = t->table.rows_per_base == 1 ? num_rows : (num_rows + 31) / 32;
    const int64_t slots_bytes = (int64_t)t->slots.size, overflow_bytes = (int64_t)t->overflow.size;
    for (int i = 0; i < 3; i++) {
        uint16_t *const length = &t->lengths[rng_below(r, (uint32_t)num_rows)];
        if (rng_chance(r, 50))
            *length = rng_chance(r, 50) ? (uint16_t)rng_next(r) : (uint16_t)rng_below(r, t->sample.masks.row_bytes + 2);
        if (rng_chance(r, 30)) t->bases[rng_below(r, (uint32_t)num_bases)] = rng_next(r) >> rng_below(r, 64);
    }
    if (rng_chance(r, 10)) t->bases[0] = UINT64_MAX - rng_below(r, 100);
    if (rng_chance(r, 20) && slots_bytes > 0) t->table.slots_bytes = rng_below(r, (uint32_t)slots_bytes);
    if (rng_chance(r, 20) && overflow_bytes > 0) t->table.overflow_bytes = rng_below(r, (uint32_t)overflow_bytes);
    if (rng_chance(r, 10)) t->table.bases = NULL;
    if (rng_chance(r, 10)) t->table.lengths = NULL;
    if (rng_chance(r, 50)) rng_fill(r, t->slots.data, t->slots.size / 2);
}

/* Buffers that end exactly where the (corrupted) table says, so that a sanitizer sees every byte read beyond. */
static void shrink_to_fit(made *t)
{
    buffer slots = buffer_copy(t->slots.data, (size_t)t->table.slots_bytes, 0);
    buffer overflow = buffer_copy(t->overflow.data, (size_t)t->table.overflow_bytes, 0);
    buffer_free(&t->slots);
    buffer_free(&t->overflow);
    t->slots = slots;
    t->overflow = overflow;
    t->table.slots = slots.size ? slots.data : NULL;
    t->table.overflow = overflow.size ? overflow.data : NULL;
}

static void check_gather_of_corrupt_row(rng *r)
{
    made t = make_table(r, sample_new(r, 64, 4, false, 5), 40, 64, 64, 0);
    encode_table(&t, 1);
    t.lengths[7] = 1;
    const int32_t ids32[] = {5, 7, 7, 6, -2};
    const ibp_ids ids = {.data = ids32, .count = 5, .id_bytes = 4};
    uint8_t out[5 * 64], scratch[IBP_SCRATCH_BYTES(64)];
    ibp_fault fault = {0};
    CHECK(ibp_gather_items(&t.table, &ids, 0, 5, out, scratch, sizeof scratch, &fault) == IBP_CORRUPT_ROW, "%lld",
          (long long)fault.status);
    CHECK(fault.status == IBP_CORRUPT_ROW && fault.position == 1 && fault.id == 7, "position %lld",
          (long long)fault.position);
    CHECK(memcmp(out, t.data.data + 5 * 64, 64) == 0 && memcmp(out + 3 * 64, t.data.data + 6 * 64, 64) == 0, "%s",
          "good rows");
    for (int i = 0; i < 64; i++) CHECK(out[64 + i] == 0 && out[128 + i] == 0 && out[256 + i] == 0, "byte %d", i);
    free_table(&t);
}

void test_corrupt_tables(void)
{
    static const uint32_t row_sizes[] = {5, 33, 64, 100, 200};
    rng r = rng_seed(8);
    for (int round = 0; round < 1500; round++) {
        const uint32_t row_bytes = row_sizes[round % 5], slots[] = {0, row_bytes, 32, 64};
        const uint32_t slot_bytes = slots[rng_below(&r, 4)] >= row_bytes ? row_bytes : slots[rng_below(&r, 2)];
        const int64_t num_items = 1 + rng_below(&r, 100);
        made t = make_table(&r, sample_new(&r, row_bytes, 1u << rng_below(&r, 4), round % 2 == 1, 1 + round % 6),
                            num_items, 1 + rng_below(&r, 2 * row_bytes),
                            rng_chance(&r, 30) && row_bytes > 32 ? 32 : slot_bytes, round % 4);
        encode_table(&t, 1);
        if (round % 4 == 3) {
            made own = give_own_bases(&r, &t);
            encode_table(&own, 1);
            buffer_free(&t.slots);
            buffer_free(&t.overflow);
            free(t.bases);
            t = own;
        }
        corrupt_index(&r, &t);
        shrink_to_fit(&t);
        check_against_naive(&t);
        free_table(&t);
    }
    check_gather_of_corrupt_row(&r);
}

/* ---- more than 4 GiB ----------------------------------------------------------------------------------------------
 */

static void check_index_past_4_gib(uint32_t slot_bytes)
{
    enum { NUM_ROWS = 200000 };
    const int64_t row_bytes = IBP_MAX_ROW_BYTES, num_bytes = NUM_ROWS * row_bytes - 5;
    uint16_t *const lengths = exact_array(NUM_ROWS, sizeof *lengths);
    uint64_t *const bases = exact_array(NUM_ROWS / 32, sizeof *bases);
    rng r = rng_seed(9);
    for (int i = 0; i < NUM_ROWS; i++) lengths[i] = rng_chance(&r, 20) ? 0 : (uint16_t)(60000 + rng_below(&r, 5000));
    for (int with_lengths = 0; with_lengths < 2; with_lengths++) {
        int64_t overflow_bytes = 0;
        ibp_index_rows(with_lengths ? lengths : NULL, num_bytes, (uint32_t)row_bytes, slot_bytes, bases,
                       &overflow_bytes);
        int64_t end = 0;
        for (int64_t row = 0; row < NUM_ROWS; row++) {
            if (row % 32 == 0)
                CHECK(bases[row / 32] == (uint64_t)end, "row %lld: %llu", (long long)row,
                      (unsigned long long)bases[row / 32]);
            const int64_t valid = row == NUM_ROWS - 1 ? row_bytes - 5 : row_bytes;
            const int64_t part = (with_lengths && lengths[row] ? lengths[row] : valid) - (int64_t)slot_bytes;
            end += slot_bytes ? (part + 31) / 32 * 32 : part;
        }
        CHECK(overflow_bytes == end && end > (int64_t)5 << 30, "%lld, not %lld", (long long)overflow_bytes,
              (long long)end);
    }
    free(lengths);
    free(bases);
}

static uint8_t *map_zeros(size_t num_bytes)
{
    void *const memory =
        mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
        printf("cannot map %zu bytes of address space\n", num_bytes);
        exit(1);
    }
    return memory;
}

/* The last row of a table of 6 GiB, coded and gathered; the pages between stay untouched zeros. */
static void check_row_past_4_gib(uint32_t slot_bytes)
{
    const uint32_t row_bytes = 4096;
    const int64_t num_rows = 3 << 19, last = num_rows - 1;
    rng r = rng_seed(10);
    sample s = sample_new(&r, row_bytes, 4, false, 5);
    uint8_t *const data = map_zeros((size_t)num_rows * row_bytes), *const stored =
                                                                       map_zeros((size_t)num_rows * row_bytes);
    uint64_t *const bases = exact_array(num_rows / 32, sizeof *bases);
    uint16_t *const lengths = calloc((size_t)num_rows, sizeof *lengths);
    if (!lengths) abort();
    sample_rows(&r, &s, 0, data + last * row_bytes, row_bytes);
    const size_t coded = coded_row_bytes(&s.codebook, data + last * row_bytes);
    lengths[last] = (uint16_t)coded;
    ibp_table table = {.num_items = num_rows,
                       .item_bytes = row_bytes,
                       .lengths = lengths,
                       .slot_bytes = slot_bytes,
                       .codebook = s.codebook};
    CHECK(ibp_num_rows(&table) == num_rows && coded < row_bytes, "%lld", (long long)ibp_num_rows(&table));
    ibp_index_rows(lengths, num_rows * row_bytes, row_bytes, slot_bytes, bases, &table.overflow_bytes);
    table.slots_bytes = num_rows * slot_bytes;
    table.slots = slot_bytes ? stored : NULL;
    table.overflow = slot_bytes ? NULL : stored;
    table.bases = slot_bytes ? NULL : bases;

    uint8_t scratch[IBP_SCRATCH_BYTES(4096)], out[2 * 4096];
    ibp_fault fault = {0};
    const ibp_status status = ibp_encode_rows(&table, data, last, num_rows, slot_bytes ? stored : NULL,
                                              slot_bytes ? NULL : stored, scratch, sizeof scratch, &fault);
    CHECK(status == IBP_OK, "%s", ibp_status_string(status));
    CHECK(naive_read_row(&s.masks, &table, last, out) && memcmp(out, data + last * row_bytes, row_bytes) == 0,
          "slot_bytes %u", slot_bytes);
    const int64_t ids64[] = {last, last - 1};
    const ibp_ids ids = {.data = ids64, .count = 2, .id_bytes = 8};
    CHECK(ibp_gather_items(&table, &ids, 0, 2, out, scratch, sizeof scratch, &fault) == IBP_OK, "%lld",
          (long long)fault.status);
    CHECK(memcmp(out, data + last * row_bytes, row_bytes) == 0, "slot_bytes %u", slot_bytes);
    CHECK(memcmp(out + row_bytes, data, row_bytes) == 0, "a raw row of zeros, slot_bytes %u", slot_bytes);

    munmap(data, (size_t)num_rows * row_bytes);
    munmap(stored, (size_t)num_rows * row_bytes);
    free(bases);
    free(lengths);
    sample_free(&s);
}

void test_offsets_past_4_gib(void)
{
    check_index_past_4_gib(0);
    check_index_past_4_gib(32);
    check_row_past_4_gib(0);
    check_row_past_4_gib(4096);
}
