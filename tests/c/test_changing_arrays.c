/* test_changing_arrays.c - ids, rows, offsets, entries and indexes that change while they are read: every function
 * stays in its buffers, and what it writes down is what it did. All buffers end where memory does, so that a step
 * outside ends the program. */
#define _GNU_SOURCE /* of changing.h */
#include "changing.h"
#include "check.h"
#include "core/cache.h"
#include "core/chunk_plan.h"
#include "core/stage.h"

enum { NUM_ROWS = 40, ROWS_PER_ITEM = 2, NUM_ITEMS = NUM_ROWS / ROWS_PER_ITEM, ROW_BYTES = 64, COUNT = 4 };
enum { NUM_WAYS = 32, SLAB_BYTES = NUM_WAYS * ROW_BYTES };

/* A table, and what calls on it write. */
typedef struct world {
    sample sample;
    ibp_table table;
    uint8_t data[NUM_ROWS * ROW_BYTES];
    uint16_t lengths[NUM_ROWS], rooms[NUM_ROWS];
    uint64_t bases[NUM_ROWS]; /* of groups, or of rows */
    fenced slots, overflow, out, scratch, slab, map, stamps;
    int64_t ids[COUNT];
    ibp_ids request;
    ibp_fault fault;
} world;

/* slot_bytes: ROW_BYTES: no row leaves its slot. */
static world *world_new(rng *r, uint32_t slot_bytes)
{
    world *const w = calloc(1, sizeof *w);
    if (!w) abort();
    w->sample = sample_new(r, ROW_BYTES, 4, false, 3);
    for (int row = 0; row < NUM_ROWS; row++)
        sample_rows(r, &w->sample, row % NUM_ROW_KINDS, w->data + row * ROW_BYTES, ROW_BYTES);
    w->scratch = fenced_new(NULL, IBP_SCRATCH_BYTES(ROW_BYTES) + ROW_BYTES);
    ibp_table *const t = &w->table;
    *t = (ibp_table){.num_items = NUM_ITEMS,
                     .item_bytes = ROWS_PER_ITEM * ROW_BYTES,
                     .slot_bytes = slot_bytes,
                     .codebook = w->sample.codebook,
                     .lengths = w->lengths,
                     .bases = w->bases};
    ibp_measure_rows(&t->codebook, w->data, sizeof w->data, w->lengths, w->scratch.bytes, w->scratch.num_bytes);
    ibp_index_rows(w->lengths, sizeof w->data, ROW_BYTES, slot_bytes, w->bases, &t->overflow_bytes);
    t->slots_bytes = NUM_ROWS * (int64_t)slot_bytes;
    w->slots = fenced_new(NULL, (size_t)t->slots_bytes);
    w->overflow = fenced_new(NULL, (size_t)t->overflow_bytes);
    t->slots = w->slots.bytes, t->overflow = w->overflow.bytes;
    CHECK(ibp_encode_rows(t, w->data, 0, NUM_ROWS, w->slots.bytes, w->overflow.bytes, w->scratch.bytes,
                          w->scratch.num_bytes, &w->fault) == IBP_OK,
          "slots of %u bytes", slot_bytes);
    w->out = fenced_new(NULL, COUNT * (size_t)t->item_bytes);
    w->slab = fenced_new(NULL, SLAB_BYTES);
    w->map = fenced_new(NULL, NUM_WAYS * sizeof(ibp_cached_row));
    w->stamps = fenced_new(NULL, (NUM_WAYS + 1) * sizeof(uint32_t));
    for (int k = 0; k < COUNT; k++) w->ids[k] = (int64_t)rng_below(r, NUM_ITEMS);
    w->request = (ibp_ids){.data = w->ids, .count = COUNT, .id_bytes = 8};
    return w;
}

static void world_free(world *w)
{
    for (fenced *memory = &w->slots; memory <= &w->stamps; memory++) fenced_free(memory);
    sample_free(&w->sample);
    free(w);
}

/* Whether the contents of an array can lead to a status. */
static void check_status(ibp_status status)
{
    CHECK(status == IBP_OK || status == IBP_INDEX_OUT_OF_RANGE || status == IBP_CORRUPT_ROW ||
              status == IBP_BUFFER_TOO_SMALL || status == IBP_INVALID_ARGUMENT,
          "%s", ibp_status_string(status));
}

/* Runs a call with an array that turns into several others. */
static void check_array(const char *name, void (*call)(void *, void *), void *state, const void *bytes,
                        size_t num_bytes)
{
    enum { MOST = 1024 };
    uint8_t others[MOST];
    rng r = rng_seed(num_bytes);
    if (num_bytes > MOST) abort();
    for (int kind = 0; kind < (is_quick ? 2 : 4); kind++) {
        for (size_t i = 0; i < num_bytes; i++)
            others[i] = kind == 0 ? (uint8_t)(i % 8 == 7 ? 0 : 0xff) /* large, and not negative */
                        : kind == 1
                            ? (uint8_t)(i % 2 ? 0 : 40 + i % 16) /* too large by a little, in units of 2 bytes */
                        : kind == 2 ? 0xff
                                    : (uint8_t)rng_next(&r);
        CHECK(at_each_look(call, state, bytes, others, num_bytes) > 0, "%s is not looked at", name);
    }
}

/* ---- large tables ---- */

enum { NUM_IDS = 24, PARTITIONED_ITEMS = 1000, WINDOW_BITS = 6 };

static void partition(void *state, void *array)
{
    const ibp_ids ids = {.data = array, .count = NUM_IDS, .id_bytes = *(const uint32_t *)state};
    const fenced workspace = fenced_new(NULL, ibp_partition_workspace_bytes(NUM_IDS, PARTITIONED_ITEMS, WINDOW_BITS)),
                 sorted = fenced_new(NULL, NUM_IDS * ids.id_bytes), positions = fenced_new(NULL, NUM_IDS * 4);
    const uint32_t *const at = (const uint32_t *)(const void *)positions.bytes;
    bool is_there[NUM_IDS] = {false};
    CHECK(ibp_partition_ids(&ids, PARTITIONED_ITEMS, WINDOW_BITS, workspace.bytes, sorted.bytes,
                            (uint32_t *)(void *)positions.bytes) == IBP_OK,
          "%d ids", NUM_IDS);
    for (int k = 0; k < NUM_IDS; k++) {
        CHECK(at[k] < NUM_IDS && !is_there[at[k]], "position %u", at[k]);
        if (at[k] < NUM_IDS) is_there[at[k]] = true;
    }
    fenced_free(&workspace);
    fenced_free(&sorted);
    fenced_free(&positions);
}

static void select_items(void *state, void *array)
{
    world *const w = state;
    if (array) w->request.data = array;
    uint16_t lengths[COUNT * ROWS_PER_ITEM];
    uint64_t stored_bytes;
    check_status(
        ibp_measure_selection(&w->table, &w->request, 0, COUNT * ROWS_PER_ITEM, lengths, &stored_bytes, &w->fault));
    const fenced out = fenced_new(NULL, stored_bytes);
    check_status(
        ibp_copy_selection(&w->table, &w->request, 0, COUNT * ROWS_PER_ITEM, out.bytes, stored_bytes, &w->fault));
    fenced_free(&out);
}

static void stage(void *state, void *array)
{
    world *const w = state;
    const ibp_stage stage = {w->slots.bytes, NUM_ITEMS, ROWS_PER_ITEM * (uint64_t)w->table.slot_bytes, 4, false};
    const ibp_ids ids = {.data = array, .count = COUNT, .id_bytes = 8};
    int32_t staged[COUNT];
    ibp_stage_items(&stage, &ids, 0, COUNT, w->out.bytes + w->out.num_bytes - COUNT * stage.item_slots, staged);
    for (int k = 0; k < COUNT; k++) CHECK(staged[k] >= -1 && staged[k] < NUM_ITEMS, "id %d", staged[k]);
}

static void plan_chunks(void *state, void *array)
{
    const world *const w = state;
    for (int64_t row = 0; row < NUM_ROWS;) {
        const ibp_chunk chunk = ibp_plan_chunk(&w->table, array, row, NUM_ROWS, 0, 1 << 20, true);
        CHECK(chunk.last_row > row && chunk.last_row <= NUM_ROWS, "row %lld", (long long)chunk.last_row);
        if (chunk.last_row <= row) return;
        CHECK(!chunk.fits || (chunk.slots_start + chunk.slots_bytes <= w->slots.num_bytes &&
                              chunk.overflow_start + chunk.overflow_bytes <= w->overflow.num_bytes &&
                              ibp_chunk_overflow_offset(&chunk) + chunk.overflow_bytes <= 1 << 20),
              "chunk of %lld rows", (long long)(chunk.last_row - row));
        row = chunk.last_row;
    }
}

/* ---- gathers ---- */

static void gather(world *w)
{
    check_status(ibp_gather_items(&w->table, &w->request, 0, COUNT, w->out.bytes, w->scratch.bytes,
                                  w->scratch.num_bytes, &w->fault));
}
static void gather_ids(void *state, void *array)
{
    world *const w = state;
    w->request.data = array;
    gather(w);
}
static void gather_short_ids(void *state, void *array)
{
    world *const w = state;
    w->request.id_bytes = 4;
    gather_ids(state, array);
    w->request.id_bytes = 8;
}
static void gather_positions(void *state, void *array)
{
    world *const w = state;
    w->request.data = w->ids, w->request.positions = array, w->request.out_items = COUNT;
    gather(w);
    w->request.positions = NULL;
}

static ibp_cache cache_of(const world *w, const uint64_t *entries)
{
    return (ibp_cache){entries, 1, {{w->slab.bytes, SLAB_BYTES}}};
}
static void gather_entries(void *state, void *array)
{
    world *const w = state;
    const ibp_cache cache = cache_of(w, array);
    w->request.data = w->ids;
    check_status(ibp_gather_cached(&w->table, &w->request, &cache, 0, COUNT, w->out.bytes, w->scratch.bytes,
                                   w->scratch.num_bytes, &w->fault));
}

/* All that looks rows of a table up in its index. */
static void read_index(world *w)
{
    w->request.data = w->ids;
    gather(w);
    select_items(w, NULL);
    check_status(ibp_decode_bytes(&w->table, 3 * ROW_BYTES + 1, 5 * ROW_BYTES, w->out.bytes, w->scratch.bytes,
                                  w->scratch.num_bytes, &w->fault));
}
static void read_lengths(void *state, void *array)
{
    world *const w = state;
    const uint32_t num_sectors = (ROW_BYTES + IBP_OVERFLOW_ALIGN - 1) / IBP_OVERFLOW_ALIGN;
    const fenced survey = fenced_new(NULL, (2 + num_sectors) * sizeof(uint64_t));
    uint64_t bases[2];
    int64_t overflow_bytes;
    w->table.lengths = array;
    read_index(w);
    ibp_survey_rows(array, sizeof w->data, ROW_BYTES, (uint64_t *)(void *)survey.bytes);
    ibp_index_rows(array, sizeof w->data, ROW_BYTES, w->table.slot_bytes, bases, &overflow_bytes);
    w->table.lengths = w->lengths;
    fenced_free(&survey);
}
static void read_bases(void *state, void *array)
{
    world *const w = state;
    w->table.bases = array;
    read_index(w);
    w->table.bases = w->bases;
}

/* ---- caches ---- */

static ibp_lru new_cache(world *w)
{
    static uint64_t clock[2];
    ibp_cached_row *const rows = (ibp_cached_row *)(void *)w->map.bytes;
    for (int i = 0; i < NUM_WAYS; i++) rows[i] = (ibp_cached_row){IBP_WAY_EMPTY, 0};
    memset(w->stamps.bytes, 0, w->stamps.num_bytes);
    memset(w->slab.bytes, 0xa5, SLAB_BYTES);
    return (ibp_lru){
        {{rows, 1, NUM_WAYS}, w->slab.bytes, SLAB_BYTES, 0}, ROW_BYTES, (uint32_t *)(void *)w->stamps.bytes, clock};
}

/* Whether an entry of a row of a table without overflow parts says how many of its bytes are in the slab. */
static void check_way(const world *w, const ibp_cached_row *way)
{
    if (way->row < 0 || way->entry == 0) return;
    const uint32_t length = ibp_length_of_entry(way->entry), stored = ibp_stored_bytes(length, ROW_BYTES, ROW_BYTES);
    const uint64_t offset = ibp_offset_in_slab(way->entry);
    CHECK(way->row < NUM_ROWS && offset <= SLAB_BYTES && stored <= SLAB_BYTES - offset, "row %lld, %u bytes at %llu",
          (long long)way->row, stored, (unsigned long long)offset);
    if (w->table.slot_bytes != ROW_BYTES || way->row >= NUM_ROWS || stored > SLAB_BYTES - offset) return;
    CHECK(memcmp(w->slab.bytes + offset, w->slots.bytes + way->row * ROW_BYTES, stored) == 0, "row %lld, %u bytes",
          (long long)way->row, stored);
}

static void fill(world *w, const int64_t *rows, const int64_t *offsets)
{
    const ibp_lru lru = new_cache(w);
    check_status(ibp_fill_slab(&w->table, rows, offsets, 0, COUNT, &lru.slab, &w->fault));
    for (int i = 0; i < NUM_WAYS; i++) check_way(w, &lru.slab.map.rows[i]);
}
static const int64_t some_rows[COUNT] = {1, 33, 6, 38},
                     some_offsets[COUNT] = {0, SLAB_BYTES - ROW_BYTES, 1000, SLAB_BYTES - 2 * ROW_BYTES};
static void fill_rows(void *state, void *array) { fill(state, array, some_offsets); }
static void fill_offsets(void *state, void *array) { fill(state, some_rows, array); }

static void claim(world *w, uint64_t *entries)
{
    const ibp_lru lru = new_cache(w);
    ibp_cache_counts counts = {{0}, 0, 0};
    check_status(ibp_claim_cached(&w->table, &w->request, &lru, entries, &counts, &w->fault));
    for (int i = 0; i < NUM_WAYS; i++) check_way(w, &lru.slab.map.rows[i]);
    const ibp_row_query query = {&w->request, ROWS_PER_ITEM, ROW_BYTES, w->table.lengths, NUM_ROWS};
    check_status(ibp_find_cached(&query, &lru.slab.map, 1, 0, COUNT, entries, &counts));
}
static void claim_ids(void *state, void *array)
{
    world *const w = state;
    uint64_t entries[COUNT * ROWS_PER_ITEM];
    w->request.data = array;
    claim(w, entries);
}
static void claim_entries(void *state, void *array)
{
    world *const w = state;
    w->request.data = w->ids;
    claim(w, array);
}
static void cache_lengths(void *state, void *array)
{
    world *const w = state;
    uint64_t entries[COUNT * ROWS_PER_ITEM];
    w->table.lengths = array;
    fill(w, some_rows, some_offsets);
    w->request.data = w->ids;
    claim(w, entries);
    w->table.lengths = w->lengths;
}
/* Rows that are found in a map, given new lengths and taken out. */
static void change_rows(void *state, void *array)
{
    world *const w = state;
    const uint16_t lengths[COUNT] = {1, 2, 3, 4};
    const ibp_lru lru = new_cache(w);
    uint8_t owners[COUNT];
    ibp_fill_slab(&w->table, some_rows, some_offsets, 0, COUNT, &lru.slab, &w->fault);
    check_status(ibp_owners_of_rows(array, COUNT, 3, owners));
    check_status(ibp_set_cached(array, lengths, COUNT, true, &lru.slab.map));
    check_status(ibp_drop_cached(array, COUNT, &lru.slab.map));
    for (int i = 0; i < COUNT; i++) CHECK(owners[i] < 3, "owner %u", owners[i]);
}
static void change_map(void *state, void *array)
{
    world *const w = state;
    ibp_lru lru = new_cache(w);
    lru.slab.map.rows = array;
    ibp_cache_counts counts = {{0}, 0, 0};
    uint64_t entries[COUNT * ROWS_PER_ITEM];
    w->request.data = w->ids;
    check_status(ibp_fill_slab(&w->table, some_rows, some_offsets, 0, COUNT, &lru.slab, &w->fault));
    check_status(ibp_claim_cached(&w->table, &w->request, &lru, entries, &counts, &w->fault));
    gather_entries(w, entries);
}

/* ---- rows coded into memory that is there ---- */

static void pack(void *state, void *array)
{
    world *const w = state;
    const fenced out = fenced_new(NULL, sizeof w->data);
    uint64_t used = 0;
    ibp_place place = {.table = w->table, .overflow = out.bytes, .lengths = array, .used = &used};
    place.table.slot_bytes = 0, place.table.slots_bytes = 0, place.table.overflow_bytes = (int64_t)sizeof w->data;
    const ibp_row_source source = {.data = w->data, .num_rows = NUM_ROWS};
    CHECK(ibp_encode_into(&place, &source, NULL, 0, 0, NUM_ROWS, w->scratch.bytes, w->scratch.num_bytes, &w->fault) ==
              IBP_OK,
          "%d rows", NUM_ROWS);
    CHECK(used <= sizeof w->data, "%lld bytes", (long long)used);
    fenced_free(&out);
}

/* Codes rows twice, longer ones the second time, with an index of which one array changes. */
static void encode_into(world *w, const int64_t *row_ids, uint16_t *lengths, uint64_t *bases, uint16_t *rooms)
{
    const uint32_t slot_bytes = 32;
    const fenced slots = fenced_new(NULL, NUM_ROWS * (size_t)slot_bytes), overflow = fenced_new(NULL, 16 * ROW_BYTES);
    uint16_t own_lengths[NUM_ROWS] = {0}, own_rooms[NUM_ROWS] = {0};
    uint64_t own_bases[NUM_ROWS], used = 0;
    uint8_t dense[COUNT * ROW_BYTES];
    for (int r = 0; r < NUM_ROWS; r++) own_bases[r] = IBP_NO_BASE;
    for (size_t i = 0; i < sizeof dense; i++) dense[i] = (uint8_t)(i * 37 + 11);
    ibp_place place = {.table = w->table, .slots = slots.bytes, .overflow = overflow.bytes, .used = &used};
    place.lengths = lengths ? lengths : own_lengths, place.bases = bases ? bases : own_bases;
    place.rooms = rooms ? rooms : own_rooms;
    place.table.slot_bytes = slot_bytes, place.table.rows_per_base = 1;
    place.table.slots_bytes = (int64_t)slots.num_bytes, place.table.overflow_bytes = (int64_t)overflow.num_bytes;
    for (int turn = 0; turn < 2; turn++) {
        const ibp_row_source source = {.data = turn == 0 ? w->data : dense, .num_rows = COUNT};
        check_status(
            ibp_encode_into(&place, &source, row_ids, 3, 0, COUNT, w->scratch.bytes, w->scratch.num_bytes, &w->fault));
    }
    fenced_free(&slots);
    fenced_free(&overflow);
}
static void encode_row_ids(void *state, void *array) { encode_into(state, array, NULL, NULL, NULL); }
static void encode_lengths(void *state, void *array) { encode_into(state, NULL, array, NULL, NULL); }
static void encode_bases(void *state, void *array) { encode_into(state, NULL, NULL, array, NULL); }
static void encode_rooms(void *state, void *array) { encode_into(state, NULL, NULL, NULL, array); }

/* ---- pages of a kv-cache ---- */

enum { IDS_PER_BLOCK = 4, NUM_FLAGS = NUM_ROWS / IDS_PER_BLOCK };

static void note(const int64_t *ids, const uint16_t *lengths, const uint16_t *rooms)
{
    const fenced stored = fenced_new(NULL, NUM_FLAGS), seen = fenced_new(NULL, NUM_FLAGS);
    CHECK(ibp_note_pages(ids, COUNT, IDS_PER_BLOCK, lengths, rooms, NUM_ROWS, stored.bytes, seen.bytes) == IBP_OK,
          "%d blocks", COUNT);
    CHECK(memcmp(stored.bytes, seen.bytes, NUM_FLAGS) == 0, "%s", "flags differ");
    fenced_free(&stored);
    fenced_free(&seen);
}
static const int64_t noted_ids[COUNT * IDS_PER_BLOCK] = {0, 1, 2, 3, 36, 37, 38, 39, 8, 9, 10, 11, 20, 21, 22, 23};
static void note_ids(void *state, void *array)
{
    const world *const w = state;
    note(array, w->lengths, w->rooms);
}
static void note_lengths(void *state, void *array)
{
    const world *const w = state;
    note(noted_ids, array, w->rooms);
}

/* array: pages and then blocks. */
static void plan_pages(void *state, void *array)
{
    enum { NUM_PAGES = 5, NUM_BLOCKS = 3, TENSORS = 2, PIECES = 2 };
    (void)state;
    const uint64_t starts[TENSORS * PIECES] = {1000, 2000, 3000, 4000}, blocks_at[NUM_BLOCKS] = {10, 20, 30};
    const fenced block_starts = fenced_new(blocks_at, sizeof blocks_at), stored = fenced_new(NULL, NUM_PAGES * TENSORS);
    const ibp_page_transfer transfer = {.pages = array,
                                        .blocks = (const int64_t *)array + COUNT,
                                        .count = COUNT,
                                        .num_pages = NUM_PAGES,
                                        .num_blocks = NUM_BLOCKS,
                                        .num_tensors = TENSORS,
                                        .tensors = TENSORS,
                                        .pieces = PIECES,
                                        .ids_per_block = IDS_PER_BLOCK,
                                        .starts = starts,
                                        .block_starts = (const uint64_t *)(const void *)block_starts.bytes,
                                        .scratch = 7};
    const fenced ids = fenced_new(NULL, COUNT * TENSORS * IDS_PER_BLOCK * 8),
                 addresses = fenced_new(NULL, COUNT * TENSORS * PIECES * 8);
    memset(stored.bytes, 1, stored.num_bytes);
    CHECK(ibp_plan_pages(&transfer, stored.bytes, (int64_t *)(void *)ids.bytes, (uint64_t *)(void *)addresses.bytes) ==
              IBP_OK,
          "%d pages", COUNT);
    for (size_t i = 0; i < ids.num_bytes / 8; i++) {
        const int64_t id = ((const int64_t *)(const void *)ids.bytes)[i];
        CHECK(id >= -1 && id < NUM_PAGES * TENSORS * IDS_PER_BLOCK, "id %lld", (long long)id);
    }
    for (size_t i = 0; i < addresses.num_bytes / 8; i++) {
        const uint64_t address = ((const uint64_t *)(const void *)addresses.bytes)[i];
        CHECK(address == transfer.scratch || (address >= 1010 && address <= 4030), "address %llu",
              (unsigned long long)address);
    }
    fenced_free(&block_starts);
    fenced_free(&stored);
    fenced_free(&ids);
    fenced_free(&addresses);
}

/* ---- codebooks and files ---- */

/* array: a mask and then a bitval. The codebook that is built is right. */
static void build(void *state, void *array)
{
    (void)state;
    static _Alignas(16) uint32_t words[3 * ((ROW_BYTES + 15) / 16 * 4)];
    const uint8_t *const mask = array;
    ibp_codebook built;
    const ibp_status status = ibp_build_codebook(mask, mask + ROW_BYTES, ROW_BYTES, 4, false, words, &built);
    check_status(status);
    CHECK(status != IBP_OK || ibp_check_codebook(&built) == IBP_OK, "%s", "a codebook that is not right");
}

static void learn_entries(void *state, void *array)
{
    enum { LEARNED_ROWS = 3, NUM_LIVE = 16 };
    const world *const w = state;
    static _Alignas(16) uint8_t row_template[ROW_BYTES];
    const ibp_planes planes = {.entries = row_template, /* not read */
                               .element_bytes = 1,
                               .num_planes = 1,
                               .digit_bits = {2},
                               .num_constant = ROW_BYTES - NUM_LIVE,
                               .live_columns = array,
                               .row_template = row_template};
    const ibp_sample rows = {.rows = w->data,
                             .num_rows = LEARNED_ROWS,
                             .table_rows = LEARNED_ROWS,
                             .row_bytes = ROW_BYTES,
                             .element_bytes = 1};
    const size_t scratch_bytes = ibp_learn_scratch_bytes(&rows);
    const fenced scratch = fenced_new(NULL, (scratch_bytes + 15) / 16 * 16), entries = fenced_new(NULL, 3);
    check_status(ibp_learn_entries(&rows, &planes, scratch.bytes, scratch_bytes, entries.bytes, entries.num_bytes));
    fenced_free(&scratch);
    fenced_free(&entries);
}

static uint64_t sum_bytes(const void *data, size_t num_bytes)
{
    uint64_t sum = num_bytes;
    for (size_t i = 0; i < num_bytes; i++) sum = 31 * sum + ((const uint8_t *)data)[i];
    return sum;
}

/* A file with eight bytes and the checksums of their two blocks. */
static fenced checked_file(void)
{
    static const char header[] =
        "{\"__metadata__\":{\"ibp.format\":\"1\",\"ibp.checks\":\"hash=xxh3_64 block_bytes=4\"},"
        "\"x\":{\"dtype\":\"U8\",\"shape\":[8],\"data_offsets\":[0,8]},"
        "\"ibp.checks\":{\"dtype\":\"U64\",\"shape\":[4],\"data_offsets\":[8,40]}}       ";
    const uint64_t header_bytes = (sizeof header - 1) / 8 * 8;
    const size_t num_bytes = 8 + header_bytes + 40;
    const fenced file = fenced_new(NULL, (num_bytes + 15) / 16 * 16);
    uint8_t *const bytes = file.bytes, *const data = bytes + 8 + header_bytes;
    uint64_t checks[4];
    memcpy(bytes, &header_bytes, 8);
    memcpy(bytes + 8, header, header_bytes);
    memcpy(data, "contents", 8);
    checks[0] = sum_bytes(data, 4), checks[1] = sum_bytes(data + 4, 4);
    checks[2] = sum_bytes(bytes, 8 + header_bytes), checks[3] = sum_bytes(checks, 24);
    memcpy(data + 8, checks, sizeof checks);
    return (fenced){file.start, bytes, file.room, num_bytes};
}

/* array: the number of the block, which is written. */
static void check_blocks(void *state, void *array)
{
    const fenced *const bytes = state;
    ibp_file file;
    CHECK(ibp_open_file(bytes->bytes, bytes->num_bytes, &file) == IBP_OK, "%s", "a file with checksums");
    CHECK(ibp_check_file(&file, sum_bytes, array) == IBP_OK, "%s", "its checksums");
}

void test_changing_arrays(void)
{
    if (!CAN_STEP) return;
    rng r = rng_seed(22);
    int64_t ids[NUM_IDS], pages[2 * COUNT] = {0, 4, 2, 1, 2, 0, 1, 2};
    int32_t short_ids[NUM_IDS];
    for (int k = 0; k < NUM_IDS; k++) short_ids[k] = (int32_t)(ids[k] = (int64_t)rng_below(&r, 60));
    uint32_t id_bytes = 8;
    check_array("ids", partition, &id_bytes, ids, sizeof ids);
    id_bytes = 4;
    check_array("short ids", partition, &id_bytes, short_ids, sizeof short_ids);
    check_array("pages and blocks", plan_pages, NULL, pages, sizeof pages);
    for (uint32_t slot_bytes = 32; slot_bytes <= ROW_BYTES; slot_bytes += 32) {
        world *const w = world_new(&r, slot_bytes);
        const uint32_t positions[COUNT] = {2, 0, 3, 1};
        uint64_t entries[COUNT * ROWS_PER_ITEM] = {0}, no_bases[NUM_ROWS];
        uint16_t live_columns[16];
        uint8_t mask_and_bitval[2 * ROW_BYTES];
        ibp_cached_row ways[NUM_WAYS];
        const size_t ids_bytes = COUNT * sizeof *w->ids, rows_bytes = sizeof some_rows;
        for (int e = 0; e < COUNT; e++) entries[2 * e] = ibp_make_entry(0, (uint64_t)(ROW_BYTES * e), 0);
        for (int i = 0; i < NUM_ROWS; i++) no_bases[i] = IBP_NO_BASE;
        for (uint16_t i = 0; i < 16; i++) live_columns[i] = (uint16_t)(3 * i);
        for (int i = 0; i < NUM_WAYS; i++) ways[i] = (ibp_cached_row){IBP_WAY_EMPTY, 0};
        memset(mask_and_bitval, 0, sizeof mask_and_bitval);
        memset(mask_and_bitval, 0x0f, ROW_BYTES);
        check_array("ids of a gather", gather_ids, w, w->ids, ids_bytes);
        check_array("short ids of a gather", gather_short_ids, w, short_ids, COUNT * sizeof *short_ids);
        check_array("positions", gather_positions, w, positions, sizeof positions);
        check_array("entries", gather_entries, w, entries, sizeof entries);
        check_array("ids of a selection", select_items, w, w->ids, ids_bytes);
        check_array("ids that are staged", stage, w, w->ids, ids_bytes);
        check_array("lengths", read_lengths, w, w->lengths, sizeof w->lengths);
        if (slot_bytes < ROW_BYTES) check_array("bases", read_bases, w, w->bases, 2 * sizeof *w->bases);
        if (slot_bytes < ROW_BYTES) check_array("bases of chunks", plan_chunks, w, w->bases, 2 * sizeof *w->bases);
        check_array("rows to fill in", fill_rows, w, some_rows, rows_bytes);
        check_array("offsets", fill_offsets, w, some_offsets, rows_bytes);
        check_array("ids to claim", claim_ids, w, w->ids, ids_bytes);
        check_array("entries that are written", claim_entries, w, entries, sizeof entries);
        check_array("lengths of cached rows", cache_lengths, w, w->lengths, sizeof w->lengths);
        check_array("rows to drop", change_rows, w, some_rows, rows_bytes);
        check_array("ways", change_map, w, ways, sizeof ways);
        check_array("lengths that are written", pack, w, w->lengths, sizeof w->lengths);
        check_array("row ids", encode_row_ids, w, some_rows, rows_bytes);
        check_array("lengths of a place", encode_lengths, w, w->rooms, sizeof w->rooms);
        check_array("bases of a place", encode_bases, w, no_bases, sizeof no_bases);
        check_array("rooms of a place", encode_rooms, w, w->rooms, sizeof w->rooms);
        check_array("ids of pages", note_ids, w, noted_ids, sizeof noted_ids);
        check_array("lengths of pages", note_lengths, w, w->lengths, sizeof w->lengths);
        check_array("masks", build, w, mask_and_bitval, sizeof mask_and_bitval);
        check_array("live columns", learn_entries, w, live_columns, sizeof live_columns);
        world_free(w);
    }
    const fenced file = checked_file();
    const uint64_t block = 0;
    check_array("the number of a block", check_blocks, (void *)(uintptr_t)&file, &block, sizeof block);
    fenced_free(&file);
}
