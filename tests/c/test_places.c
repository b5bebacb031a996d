/* test_places.c - rows coded again and again into slots and an overflow that hands parts out, against a plain copy of
 * what the rows are; then hostile indexes. */
#include "check.h"

enum { NUM_ROWS = 70, MOST_CODED = 40 };

/* A place, and what its rows are. */
typedef struct placed {
    sample sample;
    ibp_place place;
    buffer slots, overflow, rows, scratch;
    uint16_t lengths[NUM_ROWS], rooms[NUM_ROWS];
    uint64_t bases[NUM_ROWS], used;
    ibp_place_counts counts;
    bool is_lost[NUM_ROWS];
    int64_t num_bytes;
} placed;

static uint32_t row_bytes_of(const placed *p) { return p->sample.masks.row_bytes; }
static uint32_t valid_bytes_of(const placed *p, int64_t row)
{
    const int64_t left = p->num_bytes - row * row_bytes_of(p);
    return left < row_bytes_of(p) ? (uint32_t)left : row_bytes_of(p);
}

/* Without rows: all of them lost. last_bytes: of the last row. */
static placed *new_placed(sample s, uint32_t slot_bytes, int64_t overflow_bytes, bool has_rooms, uint32_t last_bytes)
{
    placed *const p = calloc(1, sizeof *p);
    if (!p) abort();
    p->sample = s;
    p->num_bytes = (NUM_ROWS - 1) * (int64_t)s.masks.row_bytes + last_bytes;
    ibp_table *const table = &p->place.table;
    *table = (ibp_table){.num_items = p->num_bytes, .item_bytes = 1, .slot_bytes = slot_bytes, .codebook = s.codebook};
    table->rows_per_base = 1;
    table->slots_bytes = slot_bytes == s.masks.row_bytes ? p->num_bytes : NUM_ROWS * (int64_t)slot_bytes;
    table->overflow_bytes = overflow_bytes;
    p->slots = buffer_new((size_t)table->slots_bytes, 3);
    p->overflow = buffer_new((size_t)overflow_bytes, 1);
    p->rows = buffer_new((size_t)NUM_ROWS * s.masks.row_bytes, 0);
    p->scratch = scratch_new(s.masks.row_bytes);
    for (int r = 0; r < NUM_ROWS; r++) p->bases[r] = IBP_NO_BASE;
    /* What has never been coded has a fault where it does not fit its slot. */
    memset(p->slots.data, 0, p->slots.size);
    memset(p->rows.data, 0, p->rows.size);
    for (int64_t r = 0; r < NUM_ROWS; r++) p->is_lost[r] = valid_bytes_of(p, r) > slot_bytes;
    table->slots = p->place.slots = p->slots.data;
    table->overflow = p->place.overflow = p->overflow.data;
    table->lengths = p->place.lengths = p->lengths;
    table->bases = p->place.bases = p->bases;
    p->place.rooms = has_rooms ? p->rooms : NULL;
    p->place.used = &p->used;
    p->place.counts = &p->counts;
    return p;
}

static void free_placed(placed *p)
{
    buffer_free(&p->slots);
    buffer_free(&p->overflow);
    buffer_free(&p->rows);
    buffer_free(&p->scratch);
    free(p);
}

static void check_rows(const placed *p)
{
    buffer out = buffer_new(row_bytes_of(p), 1);
    for (int64_t r = 0; r < NUM_ROWS; r++) {
        ibp_fault fault = {0};
        const int64_t start = r * row_bytes_of(p);
        const ibp_status status = ibp_decode_bytes(&p->place.table, start, start + valid_bytes_of(p, r), out.data,
                                                   p->scratch.data, p->scratch.size, &fault);
        CHECK(status == (p->is_lost[r] ? IBP_CORRUPT_ROW : IBP_OK), "row %lld: %s", (long long)r,
              ibp_status_string(status));
        if (!p->is_lost[r])
            CHECK(memcmp(out.data, p->rows.data + start, valid_bytes_of(p, r)) == 0, "row %lld", (long long)r);
    }
    buffer_free(&out);
}

/* No two rows own the same bytes of overflow. */
static void check_parts(const placed *p)
{
    for (int64_t r = 0; r < NUM_ROWS; r++) {
        if (p->bases[r] == IBP_NO_BASE || !p->place.rooms) continue;
        const uint64_t end = p->bases[r] + 32u * p->rooms[r];
        CHECK(p->bases[r] % 32 == 0 && end <= (uint64_t)p->place.table.overflow_bytes, "row %lld", (long long)r);
        for (int64_t q = 0; q < r; q++)
            CHECK(p->bases[q] == IBP_NO_BASE || end <= p->bases[q] || p->bases[q] + 32u * p->rooms[q] <= p->bases[r],
                  "rows %lld and %lld", (long long)q, (long long)r);
    }
}

/* Rows of a source in memory: one after the other, apart, in two dimensions, or in buffers. */
typedef struct source {
    buffer memory;
    const uint8_t *buffers[MOST_CODED];
    ibp_row_source rows;
} source;

static source new_source(rng *r, const placed *p, int64_t num_rows, int kind)
{
    const int64_t row_bytes = row_bytes_of(p), stride = kind == 0 ? row_bytes : row_bytes + 5;
    source s = {.memory = buffer_new((size_t)(num_rows * stride + 8), 1)};
    s.rows = (ibp_row_source){.data = s.memory.data, .num_rows = num_rows};
    if (kind == 1) {
        s.rows.num_dims = 1, s.rows.sizes[0] = num_rows, s.rows.strides[0] = stride;
    } else if (kind == 2) { /* the later dimension is the farther one */
        s.rows.num_dims = 2, s.rows.sizes[1] = 2, s.rows.strides[0] = stride,
        s.rows.strides[1] = (num_rows + 1) / 2 * stride;
    } else if (kind == 3) {
        s.rows.rows_per_buffer = 1, s.rows.data = NULL;
        for (int64_t i = 0; i < num_rows; i++) s.buffers[i] = s.memory.data + (num_rows - 1 - i) * stride;
    }
    for (int64_t i = 0; i < num_rows * stride / row_bytes; i++)
        sample_rows(r, &p->sample, (int)rng_below(r, NUM_ROW_KINDS), s.memory.data + i * row_bytes, (size_t)row_bytes);
    return s;
}

static const uint8_t *row_of_source(const source *s, int64_t i, int64_t row_bytes, int kind)
{
    const int64_t stride = kind == 0 ? row_bytes : row_bytes + 5;
    if (kind == 2) return s->memory.data + (i / 2 + i % 2 * ((s->rows.num_rows + 1) / 2)) * stride;
    return kind == 3 ? s->buffers[i] : s->memory.data + i * stride;
}

static void code_some(rng *r, placed *p)
{
    const int kind = (int)rng_below(r, 4);
    const int64_t num_rows = 1 + rng_below(r, MOST_CODED), row_bytes = row_bytes_of(p);
    source s = new_source(r, p, num_rows, kind);
    if (kind == 3) s.rows.buffers = s.buffers;
    if (kind == 0 && rng_chance(r, 50)) s.rows.last_row_bytes = 1 + rng_below(r, (uint32_t)row_bytes);
    int64_t ids[MOST_CODED];
    const int64_t start = rng_below(r, NUM_ROWS), step = rng_chance(r, 50) ? 1 : 3; /* no factor of NUM_ROWS */
    for (int64_t i = 0; i < num_rows; i++) ids[i] = (start + i * step) % NUM_ROWS;
    const bool in_order = rng_chance(r, 30);
    const int64_t first_row = in_order ? rng_below(r, (uint32_t)(NUM_ROWS - num_rows) + 1) : 0;
    const ibp_place_counts before = p->counts;
    const int64_t middle = rng_below(r, (uint32_t)num_rows + 1);
    ibp_fault fault = {0};
    for (int part = 0; part < 2; part++)
        CHECK(ibp_encode_into(&p->place, &s.rows, in_order ? NULL : ids, first_row, part ? middle : 0,
                              part ? num_rows : middle, p->scratch.data, p->scratch.size, &fault) == IBP_OK,
              "%lld", (long long)fault.status);
    uint64_t lost = 0, spilled = 0;
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t row = in_order ? first_row + i : ids[i];
        const uint32_t there_are =
            i == num_rows - 1 && s.rows.last_row_bytes ? s.rows.last_row_bytes : (uint32_t)row_bytes;
        uint8_t *const wanted = p->rows.data + row * row_bytes;
        memset(wanted, 0, (size_t)row_bytes);
        memcpy(wanted, row_of_source(&s, i, row_bytes, kind), there_are);
        const uint32_t stored = naive_stored_bytes(&p->place.table, row);
        const bool spills = stored > p->place.table.slot_bytes;
        p->is_lost[row] = spills && p->bases[row] == IBP_NO_BASE;
        CHECK(!p->is_lost[row] || p->lengths[row] == 0, "row %lld", (long long)row);
        lost += p->is_lost[row], spilled += spills && !p->is_lost[row];
    }
    CHECK(p->counts.lost == before.lost + lost && p->counts.spilled == before.spilled + spilled,
          "%llu lost, %llu spilled", (unsigned long long)lost, (unsigned long long)spilled);
    buffer_free(&s.memory);
}

static void check_places(rng *r, uint32_t row_bytes, uint32_t slot_bytes)
{
    sample s = sample_new(r, row_bytes, 4, false, (int)rng_below(r, NUM_MASK_KINDS));
    const int64_t room = (row_bytes - slot_bytes + 31) / 32 * 32;
    /* With rooms a row takes two parts at most, the second one as large as its raw bytes. */
    const int64_t plenty = 2 * NUM_ROWS * room, little = plenty / 8;
    for (int kind = 0; kind < 4; kind++) {
        placed *const p = new_placed(s, slot_bytes, kind < 2 ? plenty : little, kind % 2 == 0,
                                     rng_chance(r, 50) ? row_bytes : 1 + rng_below(r, row_bytes));
        for (int round = 0; round < (is_quick ? 12 : 60); round++) {
            code_some(r, p);
            check_rows(p);
            check_parts(p);
        }
        CHECK(kind != 0 || p->counts.lost == 0, "%llu rows are lost", (unsigned long long)p->counts.lost);
        free_placed(p);
    }
    sample_free(&s);
}

/* Of equal ids in order the last one wins; ids out of range are noted, and the others are coded. */
static void check_ids(rng *r)
{
    sample s = sample_new(r, 256, 4, false, 1);
    placed *const p = new_placed(s, 128, 2 * NUM_ROWS * 128, true, 256);
    source rows = new_source(r, p, 4, 0);
    const int64_t ids[4] = {7, 7, NUM_ROWS, 9};
    ibp_fault fault = {0};
    CHECK(ibp_encode_into(&p->place, &rows.rows, ids, 0, 0, 4, p->scratch.data, p->scratch.size, &fault) ==
              IBP_INDEX_OUT_OF_RANGE,
          "%lld", (long long)fault.status);
    CHECK(fault.position == 2 && fault.id == NUM_ROWS, "%lld", (long long)fault.position);
    memcpy(p->rows.data + 7 * 256, rows.memory.data + 256, 256);
    memcpy(p->rows.data + 9 * 256, rows.memory.data + 3 * 256, 256);
    p->is_lost[7] = p->is_lost[9] = false;
    check_rows(p);
    const int64_t claimed = 11;
    p->bases[claimed] = IBP_NO_BASE - 1u; /* another thread has it */
    fault = (ibp_fault){0};
    CHECK(ibp_encode_into(&p->place, &rows.rows, &claimed, 0, 0, 1, p->scratch.data, p->scratch.size, &fault) ==
                  IBP_INVALID_ARGUMENT &&
              fault.id == claimed,
          "%lld", (long long)fault.status);
    check_rows(p);
    buffer_free(&rows.memory);
    free_placed(p);
    sample_free(&s);
}

/* Bases, rooms, lengths and the counter hold anything: nothing outside the arrays is touched. */
static void check_hostile(rng *r)
{
    sample s = sample_new(r, 300, 2, false, 2);
    for (int round = 0; round < (is_quick ? 100 : 1000); round++) {
        placed *const p = new_placed(s, 64, 32 * rng_below(r, 40), rng_chance(r, 50), 1 + rng_below(r, 300));
        for (int64_t row = 0; row < NUM_ROWS; row++) {
            p->bases[row] = rng_chance(r, 50) ? rng_next(r) : rng_below(r, 1500);
            p->rooms[row] = (uint16_t)(rng_chance(r, 50) ? rng_next(r) : rng_below(r, 12));
            p->lengths[row] = (uint16_t)(rng_chance(r, 50) ? rng_next(r) : rng_below(r, 310));
        }
        p->used = rng_chance(r, 50) ? rng_next(r) : rng_below(r, 1500);
        source rows = new_source(r, p, MOST_CODED, 0);
        int64_t ids[MOST_CODED];
        for (int i = 0; i < MOST_CODED; i++) ids[i] = rng_chance(r, 90) ? rng_below(r, NUM_ROWS) : (int64_t)rng_next(r);
        ibp_fault fault = {0};
        ibp_encode_into(&p->place, &rows.rows, ids, 0, 0, MOST_CODED, p->scratch.data, p->scratch.size, &fault);
        buffer out = buffer_new((size_t)p->num_bytes, 0);
        fault = (ibp_fault){0};
        ibp_decode_bytes(&p->place.table, 0, p->num_bytes, out.data, p->scratch.data, p->scratch.size, &fault);
        num_passed++; /* the sanitizers look on */
        buffer_free(&out);
        buffer_free(&rows.memory);
        free_placed(p);
    }
    sample_free(&s);
}

static void check_arguments(rng *r)
{
    sample s = sample_new(r, 64, 4, false, 0);
    placed *const p = new_placed(s, 32, 64, true, 64);
    source rows = new_source(r, p, 4, 0);
    ibp_fault fault = {0};
    const struct {
        int64_t first_row, first, last;
        size_t scratch_bytes;
    } bad[] = {{-1, 0, 4, p->scratch.size},       {NUM_ROWS - 3, 0, 4, p->scratch.size},
               {0, -1, 4, p->scratch.size},       {0, 3, 2, p->scratch.size},
               {0, 0, 5, p->scratch.size},        {0, 0, 4, 10},
               {INT64_MAX, 0, 4, p->scratch.size}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK(ibp_encode_into(&p->place, &rows.rows, NULL, bad[i].first_row, bad[i].first, bad[i].last, p->scratch.data,
                              bad[i].scratch_bytes, &fault) == IBP_INVALID_ARGUMENT,
              "%zu", i);
    ibp_place without[4] = {p->place, p->place, p->place, p->place};
    without[0].used = NULL, without[1].bases = NULL, without[2].lengths = NULL, without[3].table.rows_per_base = 32;
    for (int i = 0; i < 4; i++)
        CHECK(ibp_encode_into(&without[i], &rows.rows, NULL, 0, 0, 4, p->scratch.data, p->scratch.size, &fault) ==
                  IBP_INVALID_ARGUMENT,
              "%d", i);
    CHECK(fault.status == 0 && p->used == 0 && p->counts.spilled == 0, "%s", "nothing is done");
    buffer_free(&rows.memory);
    free_placed(p);
    sample_free(&s);
}

void test_places(void)
{
    rng r = rng_seed(41);
    const uint32_t sizes[][2] = {{64, 32}, {64, 64}, {96, 0}, {250, 96}, {1024, 640}, {2000, 2000}, {513, 0}};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) check_places(&r, sizes[i][0], sizes[i][1]);
    check_ids(&r);
    check_hostile(&r);
    check_arguments(&r);
}
