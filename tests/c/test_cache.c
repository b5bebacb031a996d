/* test_cache.c - rows of a table in slabs, found by maps: what comes out is what the table holds, whatever is cached;
 * then maps, entries, stamps and clocks that hold anything. */
#include "check.h"
#include "core/cache.h"

enum { NUM_ROWS = 200, ROWS_PER_ITEM = 2, MOST_IDS = 60 };

/* A table of coded rows with slots, and the state of a cache of any kind. */
typedef struct cached {
    sample sample;
    ibp_table table;
    buffer data, slots, overflow, scratch, bytes;
    uint16_t lengths[NUM_ROWS];
    uint64_t bases[NUM_ROWS / 32 + 1], clock[2];
    ibp_cached_row rows[8 * 32];
    uint32_t stamps[8 * 33];
    ibp_lru lru;
} cached;

static uint32_t row_bytes_of(const cached *c) { return c->sample.masks.row_bytes; }

static cached *new_cached(rng *r, uint32_t row_bytes, uint32_t slot_bytes, uint32_t ways)
{
    cached *const c = calloc(1, sizeof *c);
    if (!c) abort();
    c->sample = sample_new(r, row_bytes, 4, false, (int)rng_below(r, NUM_MASK_KINDS));
    c->data = buffer_new((size_t)NUM_ROWS * row_bytes, 1);
    for (int64_t i = 0; i < NUM_ROWS; i++)
        sample_rows(r, &c->sample, (int)rng_below(r, NUM_ROW_KINDS), c->data.data + i * row_bytes, row_bytes);
    memset(c->data.data, 0, 3 * (size_t)row_bytes); /* default rows */
    const int64_t num_bytes = (int64_t)c->data.size;
    c->scratch = scratch_new(row_bytes);
    ibp_table *const t = &c->table;
    *t = (ibp_table){.num_items = NUM_ROWS / ROWS_PER_ITEM,
                     .item_bytes = ROWS_PER_ITEM * (int64_t)row_bytes,
                     .slot_bytes = slot_bytes,
                     .codebook = c->sample.codebook,
                     .lengths = c->lengths,
                     .bases = c->bases};
    ibp_measure_rows(&t->codebook, c->data.data, num_bytes, c->lengths, c->scratch.data, c->scratch.size);
    ibp_index_rows(c->lengths, num_bytes, row_bytes, slot_bytes, c->bases, &t->overflow_bytes);
    t->slots_bytes = NUM_ROWS * (int64_t)slot_bytes;
    c->slots = buffer_new((size_t)t->slots_bytes, 3);
    c->overflow = buffer_new((size_t)t->overflow_bytes, 1);
    t->slots = c->slots.data, t->overflow = c->overflow.data;
    ibp_fault fault = {0};
    CHECK(ibp_encode_rows(t, c->data.data, 0, NUM_ROWS, c->slots.data, c->overflow.data, c->scratch.data,
                          c->scratch.size, &fault) == IBP_OK,
          "%u bytes a row", row_bytes);
    const int64_t num_sets = 8 * 32 / (int64_t)ways;
    const uint32_t cache_slot = (row_bytes + 31) / 32 * 32;
    c->bytes = buffer_new(8 * 32 * (size_t)cache_slot, 5);
    for (int w = 0; w < 8 * 32; w++) c->rows[w] = (ibp_cached_row){IBP_WAY_EMPTY, 0};
    c->lru = (ibp_lru){
        {{c->rows, num_sets, ways}, c->bytes.data, (int64_t)c->bytes.size, 0}, cache_slot, c->stamps, c->clock};
    return c;
}

static void free_cached(cached *c)
{
    for (buffer *b = &c->data; b <= &c->bytes; b++) buffer_free(b);
    sample_free(&c->sample);
    free(c);
}

static ibp_ids choose_ids(rng *r, int64_t *ids)
{
    const int64_t count = (int64_t)rng_below(r, MOST_IDS + 1);
    for (int64_t k = 0; k < count; k++) ids[k] = (int64_t)rng_below(r, NUM_ROWS / ROWS_PER_ITEM);
    return (ibp_ids){.data = ids, .count = count, .id_bytes = 8};
}

/* Gathers the items, which are those of the tensor where nothing is hostile. */
static void check_gather(const cached *c, const ibp_ids *ids, const uint64_t *entries, bool is_hostile)
{
    const size_t item_bytes = (size_t)c->table.item_bytes;
    buffer out = buffer_new((size_t)ids->count * item_bytes, 1);
    const ibp_cache cache = {entries, 1, {{c->bytes.data, (int64_t)c->bytes.size}}};
    ibp_fault fault = {0};
    const ibp_status status =
        ibp_gather_cached(&c->table, ids, &cache, 0, ids->count, out.data, c->scratch.data, c->scratch.size, &fault);
    CHECK(status == IBP_OK || (is_hostile && status == IBP_CORRUPT_ROW), "%s", ibp_status_string(status));
    for (int64_t k = 0; k < ids->count && !is_hostile; k++) {
        const int64_t id = ((const int64_t *)ids->data)[k];
        CHECK(memcmp(out.data + (size_t)k * item_bytes, c->data.data + (size_t)id * item_bytes, item_bytes) == 0,
              "item %lld", (long long)id);
    }
    buffer_free(&out);
}

/* Entries of the items' rows, and what was counted. @return the rows that have bytes. */
static uint64_t find(const cached *c, const ibp_ids *ids, uint64_t *entries, ibp_cache_counts *counts)
{
    const ibp_row_query query = {ids, ROWS_PER_ITEM, row_bytes_of(c), c->lengths, NUM_ROWS};
    uint64_t with_bytes = 0;
    CHECK(ibp_find_cached(&query, &c->lru.slab.map, 1, 0, ids->count, entries, counts) == IBP_OK, "%lld ids",
          (long long)ids->count);
    for (int64_t n = 0; n < ids->count * ROWS_PER_ITEM; n++) {
        const int64_t row = ((const int64_t *)ids->data)[n / ROWS_PER_ITEM] * ROWS_PER_ITEM + n % ROWS_PER_ITEM;
        with_bytes += c->lengths[row] != IBP_DEFAULT_LENGTH(row_bytes_of(c));
    }
    return with_bytes;
}

static void fill(cached *c, rng *r)
{
    int64_t rows[NUM_ROWS], offsets[NUM_ROWS], end = 0, count = 0;
    for (int64_t row = 0; row < NUM_ROWS; row++) {
        if (rng_chance(r, 40)) continue;
        const uint32_t stored = ibp_stored_bytes(c->lengths[row], row_bytes_of(c), row_bytes_of(c));
        rows[count] = row, offsets[count++] = end;
        end += stored;
    }
    ibp_fault fault = {0};
    CHECK(ibp_fill_slab(&c->table, rows, offsets, 0, count, &c->lru.slab, &fault) == IBP_OK, "%lld rows",
          (long long)count);
}

static void check_static(rng *r, uint32_t row_bytes, uint32_t slot_bytes)
{
    cached *const c = new_cached(r, row_bytes, slot_bytes, 2u << rng_below(r, 5));
    int64_t ids[MOST_IDS];
    uint64_t entries[MOST_IDS * ROWS_PER_ITEM];
    fill(c, r);
    for (int call = 0; call < 4; call++) {
        ibp_cache_counts counts = {{0}, 0, 0};
        const ibp_ids request = choose_ids(r, ids);
        const uint64_t with_bytes = find(c, &request, entries, &counts);
        CHECK(counts.hits[0] + counts.misses == with_bytes, "%llu hits", (unsigned long long)counts.hits[0]);
        check_gather(c, &request, entries, false);
        if (request.count != 0) ibp_drop_cached(ids, request.count / 2, &c->lru.slab.map);
    }
    free_cached(c);
}

static void check_lru(rng *r, uint32_t row_bytes, uint32_t slot_bytes)
{
    cached *const c = new_cached(r, row_bytes, slot_bytes, 32);
    c->lru.slab.map.num_sets = 1 + (int64_t)rng_below(r, 8);
    int64_t ids[MOST_IDS];
    uint64_t entries[MOST_IDS * ROWS_PER_ITEM];
    for (int call = 0; call < 8; call++) {
        ibp_cache_counts counts = {{0}, 0, 0}, after = {{0}, 0, 0};
        const ibp_ids request = choose_ids(r, ids);
        ibp_fault fault = {0};
        CHECK(ibp_claim_cached(&c->table, &request, &c->lru, entries, &counts, &fault) == IBP_OK, "call %d", call);
        check_gather(c, &request, entries, false);
        const uint64_t with_bytes = find(c, &request, entries, &after);
        CHECK(counts.hits[0] + counts.misses == with_bytes, "%llu hits", (unsigned long long)counts.hits[0]);
        check_gather(c, &request, entries, false);
    }
    CHECK(c->clock[0] == 8 && c->clock[1] == 8, "%llu calls", (unsigned long long)c->clock[0]);
    free_cached(c);
}

/* Nothing outside the arrays is touched, which a sanitizer sees. */
static void check_hostile(rng *r, uint32_t row_bytes, uint32_t slot_bytes)
{
    cached *const c = new_cached(r, row_bytes, slot_bytes, 32);
    int64_t ids[MOST_IDS];
    uint64_t entries[MOST_IDS * ROWS_PER_ITEM];
    fill(c, r);
    for (int call = 0; call < 10; call++) {
        for (int w = 0; w < 8 * 32; w++) {
            if (rng_chance(r, 50)) c->rows[w].row = (int64_t)rng_below(r, NUM_ROWS + 3) - 3;
            if (rng_chance(r, 50)) c->rows[w].entry = rng_next(r) | (rng_chance(r, 50) ? IBP_ENTRY_PRESENT : 0u);
        }
        for (int w = 0; w < 8 * 33; w++) c->stamps[w] = (uint32_t)rng_next(r);
        for (int i = 0; i < 2; i++) c->clock[i] = rng_next(r);
        ibp_cache_counts counts = {{0}, 0, 0};
        ibp_fault fault = {0};
        const ibp_ids request = choose_ids(r, ids);
        find(c, &request, entries, &counts);
        check_gather(c, &request, entries, true);
        ibp_claim_cached(&c->table, &request, &c->lru, entries, &counts, &fault);
        check_gather(c, &request, entries, true);
        for (int64_t k = 0; k < request.count; k++) ids[k] = (int64_t)rng_next(r);
        uint16_t lengths[MOST_IDS];
        rng_fill(r, (uint8_t *)lengths, sizeof lengths);
        ibp_set_cached(ids, lengths, request.count, true, &c->lru.slab.map);
        ibp_drop_cached(ids, request.count, &c->lru.slab.map);
        ibp_fill_slab(&c->table, ids, ids, 0, request.count, &c->lru.slab, &fault);
    }
    free_cached(c);
}

static void check_refusals(rng *r)
{
    cached *const c = new_cached(r, 64, 32, 32);
    int64_t ids[MOST_IDS] = {0};
    uint64_t entries[2] = {0};
    ibp_fault fault = {0};
    const ibp_ids one = {.data = ids, .count = 1, .id_bytes = 8};
    const ibp_row_query query = {&one, ROWS_PER_ITEM, 64, c->lengths, NUM_ROWS};
    ibp_cache_map map = c->lru.slab.map;
    for (uint32_t ways = 0; ways < 66; ways++) {
        map.ways = ways;
        const bool is_good = ways == 2 || ways == 4 || ways == 8 || ways == 16 || ways == 32;
        CHECK((ibp_find_cached(&query, &map, 1, 0, 1, entries, NULL) == IBP_OK) == is_good, "%u ways", ways);
    }
    CHECK(ibp_find_cached(&query, &c->lru.slab.map, IBP_MAX_SLABS + 1, 0, 1, entries, NULL) == IBP_INVALID_ARGUMENT,
          "%s", "9 maps");
    CHECK(ibp_find_cached(&query, &c->lru.slab.map, 1, 0, 2, entries, NULL) == IBP_INVALID_ARGUMENT, "%s", "2 ids");
    ibp_table parts = c->table;
    parts.item_bytes = 96, parts.num_items = 2;
    const ibp_cache cache = {entries, 0, {{NULL, 0}}};
    CHECK(ibp_gather_cached(&parts, &one, &cache, 0, 1, c->data.data, c->scratch.data, c->scratch.size, &fault) ==
              IBP_INVALID_ARGUMENT,
          "%s", "parts of rows");
    CHECK(ibp_fill_slab(&parts, ids, ids, 0, 1, &c->lru.slab, &fault) == IBP_INVALID_ARGUMENT, "%s", "parts of rows");
    ibp_lru lru = c->lru;
    lru.slot_bytes = 33;
    CHECK(ibp_claim_cached(&c->table, &one, &lru, entries, NULL, &fault) == IBP_INVALID_ARGUMENT, "%s", "33 bytes");
    lru = c->lru, lru.slab.num_bytes--;
    CHECK(ibp_claim_cached(&c->table, &one, &lru, entries, NULL, &fault) == IBP_INVALID_ARGUMENT, "%s", "few bytes");
    uint8_t owner;
    CHECK(ibp_owners_of_rows(ids, 1, 0, &owner) == IBP_INVALID_ARGUMENT, "%s", "no slabs");
    CHECK(ibp_owners_of_rows(ids, 1, 1, &owner) == IBP_OK && owner == 0, "%s", "one slab");
    free_cached(c);
}

void test_cache(void)
{
    rng r = rng_seed(31);
    for (int round = 0; round < (is_quick ? 10 : 60); round++) {
        const uint32_t row_bytes = 32 + 4 * rng_below(&r, 60), slot_bytes = rng_below(&r, (row_bytes + 31) / 32) * 32;
        check_static(&r, row_bytes, slot_bytes);
        check_lru(&r, row_bytes, slot_bytes);
        check_hostile(&r, row_bytes, slot_bytes);
    }
    check_refusals(&r);
}
