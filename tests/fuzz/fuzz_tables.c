/* fuzz_tables.c - tables whose index, slots and overflow are damaged after they were made: rows gathered, decoded,
 * selected, cached and coded anew. What was not damaged comes back as it was. */
#include "fuzz.h"

enum {
    DATA_PLACE = 8,
    SLOTS_PLACE,
    OVERFLOW_PLACE,
    LENGTHS_PLACE,
    BASES_PLACE,
    OUT_PLACE,
    SLAB_PLACE,
    MAP_PLACE,
    ENTRIES_PLACE,
    STAMPS_PLACE,
    ROOMS_PLACE,
    IDS_PLACE,
    SOURCE_PLACE,
    POSITIONS_PLACE
};
enum { MOST_BYTES = 1 << 15, MOST_STORED = 1 << 20, MOST_ROWS = 512, MOST_IDS = 24 };

typedef struct made {
    ibp_table table;
    uint8_t *data, *slots, *overflow;
    uint16_t *lengths;
    uint64_t *bases;
    int64_t num_rows, num_bases;
    uint8_t *scratch;
    size_t scratch_bytes;
} made;

/* Sizes that the input chooses, and a table's memory. */
static bool take_table(input *in, made *m)
{
    ibp_table *const t = &m->table;
    if (!take_codebook(in, &t->codebook)) return false;
    const uint32_t row_bytes = t->codebook.row_bytes, sectors = row_bytes / IBP_OVERFLOW_ALIGN;
    const uint32_t kind = take_below(in, 3);
    if (kind == 0) t->item_bytes = (int64_t)row_bytes * (1 + take_below(in, 3));
    if (kind != 0) t->item_bytes = take_below(in, kind == 1 ? 16 : 2 * row_bytes);
    if (t->item_bytes > MOST_BYTES) return false;
    t->num_items = take_below(in, 256);
    if (t->num_items * t->item_bytes > MOST_BYTES) t->num_items = MOST_BYTES / t->item_bytes;
    t->slot_bytes = take_flag(in) ? row_bytes : IBP_OVERFLOW_ALIGN * take_below(in, sectors + 1);
    t->rows_per_base = take_flag(in) ? IBP_ROWS_PER_BASE : 1;
    m->num_rows = ibp_num_rows(t);
    if (m->num_rows > MOST_ROWS || m->num_rows * row_bytes > MOST_STORED) return false;
    const int64_t num_bytes = t->num_items * t->item_bytes;
    t->slots_bytes = t->slot_bytes == row_bytes ? num_bytes : m->num_rows * t->slot_bytes;
    m->num_bases = (m->num_rows + t->rows_per_base - 1) / t->rows_per_base;
    m->data = fenced(DATA_PLACE, (size_t)num_bytes);
    m->slots = fenced(SLOTS_PLACE, (size_t)t->slots_bytes);
    m->lengths = (void *)fenced(LENGTHS_PLACE, 2 * (size_t)m->num_rows);
    m->bases = (void *)fenced(BASES_PLACE, 8 * (size_t)m->num_bases);
    m->scratch = fenced_scratch(row_bytes), m->scratch_bytes = ibp_scratch_bytes(row_bytes);
    take_pattern(in, m->data, (size_t)num_bytes, 128);
    damage(in, m->data, (size_t)num_bytes);
    return true;
}

/* Codes the data in one go: measured, indexed, encoded. */
static bool encode_at_once(made *m)
{
    ibp_table *const t = &m->table;
    const int64_t num_bytes = t->num_items * t->item_bytes;
    ibp_fault fault = {0};
    REQUIRE(ibp_measure_rows(&t->codebook, m->data, num_bytes, m->lengths, m->scratch, m->scratch_bytes) == IBP_OK);
    REQUIRE(ibp_index_rows(m->lengths, num_bytes, t->codebook.row_bytes, t->slot_bytes, m->bases, &t->overflow_bytes) ==
            IBP_OK);
    m->overflow = fenced(OVERFLOW_PLACE, (size_t)t->overflow_bytes);
    t->lengths = m->lengths, t->bases = m->bases;
    t->slots = m->slots, t->overflow = m->overflow;
    return ibp_encode_rows(t, m->data, 0, m->num_rows, m->slots, m->overflow, m->scratch, m->scratch_bytes, &fault) ==
           IBP_OK;
}

/* Codes the data in one pass, rows back to back: the lengths are those that were measured, and it decodes to itself. */
static void encode_packed(const made *m)
{
    const ibp_codebook *const cb = &m->table.codebook;
    const int64_t num_bytes = m->table.num_items * m->table.item_bytes;
    uint64_t used = 0;
    uint16_t *const lengths = (void *)fenced(ROOMS_PLACE, 2 * (size_t)m->num_rows);
    uint64_t bases[MOST_ROWS / IBP_ROWS_PER_BASE + 1];
    uint8_t *const dst = fenced(OUT_PLACE, (size_t)num_bytes), *const back = fenced(SLAB_PLACE, (size_t)num_bytes);
    ibp_fault fault = {0};
    ibp_table packed = m->table;
    packed.slots = NULL, packed.slots_bytes = 0, packed.slot_bytes = 0, packed.overflow_bytes = num_bytes;
    const ibp_place place = {.table = packed, .overflow = dst, .lengths = lengths, .used = &used};
    const ibp_row_source source = {
        .data = m->data, .num_rows = m->num_rows, .last_row_bytes = (uint32_t)(num_bytes % cb->row_bytes)};
    REQUIRE(ibp_encode_into(&place, &source, NULL, 0, 0, m->num_rows, m->scratch, m->scratch_bytes, &fault) == IBP_OK);
    REQUIRE(used <= (uint64_t)num_bytes);
    if (ibp_check_codebook(cb) != IBP_OK) return;
    REQUIRE(memcmp(lengths, m->lengths, 2 * (size_t)m->num_rows) == 0);
    REQUIRE(ibp_index_rows(lengths, num_bytes, cb->row_bytes, 0, bases, &packed.overflow_bytes) == IBP_OK);
    REQUIRE(packed.overflow_bytes == (int64_t)used);
    packed.overflow = dst, packed.lengths = lengths, packed.bases = bases;
    REQUIRE(ibp_decode_bytes(&packed, 0, num_bytes, back, m->scratch, m->scratch_bytes, &fault) == IBP_OK);
    REQUIRE(memcmp(back, m->data, (size_t)num_bytes) == 0);
}

/* Codes rows of the data, at the ids that the input gives or all in order, into a place. */
static ibp_status encode_into(input *in, const made *m, uint16_t *rooms, uint64_t *used, const int64_t *row_ids,
                              int64_t num_rows)
{
    const uint32_t row_bytes = m->table.codebook.row_bytes;
    const int64_t num_bytes = m->table.num_items * m->table.item_bytes;
    ibp_place_counts counts = {0, 0};
    ibp_fault fault = {0};
    const ibp_place place = {.table = m->table,
                             .slots = m->slots,
                             .overflow = m->overflow,
                             .lengths = m->lengths,
                             .bases = m->bases,
                             .rooms = rooms,
                             .used = used,
                             .counts = &counts};
    ibp_row_source source = {.data = m->data, .num_rows = num_rows};
    if (num_rows == m->num_rows) source.last_row_bytes = (uint32_t)(num_bytes % row_bytes);
    if (num_rows > num_bytes / row_bytes && num_rows != m->num_rows) return IBP_INVALID_ARGUMENT;
    (void)in;
    return ibp_encode_into(&place, &source, row_ids, 0, 0, num_rows, m->scratch, m->scratch_bytes, &fault);
}

/* Codes the data row by row: every row has a base of its own. */
static bool encode_into_place(input *in, made *m, uint16_t *rooms, uint64_t *used)
{
    ibp_table *const t = &m->table;
    t->overflow_bytes = IBP_OVERFLOW_ALIGN * (int64_t)take_below(in, 2048);
    m->overflow = fenced(OVERFLOW_PLACE, (size_t)t->overflow_bytes);
    for (int64_t r = 0; r < m->num_rows; r++) m->lengths[r] = 0, m->bases[r] = IBP_NO_BASE;
    memset(rooms, 0, 2 * (size_t)m->num_rows);
    t->lengths = m->lengths, t->bases = m->bases;
    t->slots = m->slots, t->overflow = m->overflow;
    *used = 0;
    const ibp_status status = encode_into(in, m, take_flag(in) ? rooms : NULL, used, NULL, m->num_rows);
    return status == IBP_OK && *used <= (uint64_t)t->overflow_bytes;
}

/* ---- what is read of a table ---- */

typedef struct job {
    const made *m;
    const int64_t *ids;
    const uint32_t *positions;
    int64_t num_ids;
    int64_t start, end; /* a range of bytes */
    bool is_right;      /* nothing was damaged */
    uint64_t seen;      /* a sum of what the first processor read */
    bool is_first, is_right_codebook;
} job;

static uint64_t sum_of(const uint8_t *bytes, size_t num_bytes) { return ibp_fingerprint(bytes, (int64_t)num_bytes); }

static void read_rows(void *argument)
{
    job *const j = argument;
    const ibp_table *const t = &j->m->table;
    const size_t item_bytes = (size_t)t->item_bytes;
    const ibp_ids ids = {
        .data = j->ids, .count = j->num_ids, .id_bytes = 8, .positions = j->positions, .out_items = j->num_ids};
    ibp_fault fault = {0};
    uint8_t *const out = fenced(OUT_PLACE, (size_t)j->num_ids * item_bytes);
    memset(out, 0, (size_t)j->num_ids * item_bytes);
    const ibp_status gathered =
        ibp_gather_items(t, &ids, 0, j->num_ids, out, j->m->scratch, j->m->scratch_bytes, &fault);
    REQUIRE(gathered == IBP_OK || gathered == IBP_CORRUPT_ROW || gathered == IBP_INDEX_OUT_OF_RANGE);
    REQUIRE(gathered == (ibp_status)fault.status);
    for (int64_t k = 0; k < j->num_ids && j->is_right && !j->positions; k++)
        if (j->ids[k] >= 0 && j->ids[k] < t->num_items)
            REQUIRE(memcmp(out + (size_t)k * item_bytes, j->m->data + (size_t)j->ids[k] * item_bytes, item_bytes) == 0);
    uint64_t seen = gathered == IBP_OK ? sum_of(out, (size_t)j->num_ids * item_bytes) : 0;

    const size_t num_bytes = (size_t)(j->end - j->start);
    uint8_t *const bytes = fenced(OUT_PLACE, num_bytes);
    fault = (ibp_fault){0};
    const ibp_status decoded = ibp_decode_bytes(t, j->start, j->end, bytes, j->m->scratch, j->m->scratch_bytes, &fault);
    REQUIRE(decoded == IBP_OK || decoded == IBP_CORRUPT_ROW);
    if (j->is_right) REQUIRE(decoded == IBP_OK && memcmp(bytes, j->m->data + j->start, num_bytes) == 0);
    seen = 31 * seen + (decoded == IBP_OK ? sum_of(bytes, num_bytes) : 1) + (uint64_t)gathered;
    REQUIRE(j->is_first || !j->is_right_codebook || seen == j->seen);
    j->seen = seen, j->is_first = false;
}

/* Rows as they are stored: measured, copied, surveyed. */
static void select_rows(const job *j)
{
    const ibp_table *const t = &j->m->table;
    const uint32_t row_bytes = t->codebook.row_bytes, sectors = (row_bytes + 31) / 32;
    const ibp_ids ids = {.data = j->ids, .count = j->num_ids, .id_bytes = 8};
    const int64_t rows = t->item_bytes / row_bytes * j->num_ids;
    uint16_t *const lengths = (void *)fenced(OUT_PLACE, 2 * (size_t)rows);
    uint64_t *const survey = calloc(2 + sectors, sizeof *survey), stored;
    ibp_fault fault = {0};
    REQUIRE(survey != NULL);
    if (t->lengths) REQUIRE(ibp_survey_rows(t->lengths, t->num_items * t->item_bytes, row_bytes, survey) == IBP_OK);
    free(survey);
    if (ibp_measure_selection(t, &ids, 0, rows, lengths, &stored, &fault) != IBP_OK) return;
    REQUIRE(stored <= (uint64_t)rows * row_bytes);
    uint8_t *const dst = fenced(SLAB_PLACE, (size_t)stored);
    ibp_copy_selection(t, &ids, 0, rows, dst, stored, &fault);
    if (stored != 0) ibp_copy_selection(t, &ids, 0, rows, dst, stored - 1, &fault);
}

/* A cache of hostile entries, maps and stamps over the table. */
static void cache_rows(input *in, const job *j)
{
    const ibp_table *const t = &j->m->table;
    const uint32_t row_bytes = t->codebook.row_bytes, ways = IBP_SEARCHED_WAYS;
    const int64_t rows_per_item = t->item_bytes / row_bytes, num_sets = take_below(in, 4);
    if (rows_per_item < 1 || t->item_bytes % row_bytes != 0) return;
    const size_t num_ways = (size_t)num_sets * ways, num_entries = (size_t)(j->num_ids * rows_per_item);
    const uint32_t slot_bytes = IBP_OVERFLOW_ALIGN * (1 + take_below(in, 4));
    ibp_cached_row *const map = (void *)fenced(MAP_PLACE, num_ways * sizeof *map);
    uint64_t *const entries = (void *)fenced(ENTRIES_PLACE, num_entries * 8), clock[2] = {take(in, 4), 0};
    uint32_t *const stamps = (void *)fenced(STAMPS_PLACE, 4 * (num_ways + (size_t)num_sets));
    const size_t slab_bytes = num_ways * slot_bytes;
    uint8_t *const bytes = fenced(SLAB_PLACE, slab_bytes);
    for (size_t w = 0; w < num_ways; w++) map[w] = (ibp_cached_row){IBP_WAY_EMPTY, 0};
    memset(stamps, 0, 4 * (num_ways + (size_t)num_sets));
    memset(bytes, 0, slab_bytes);
    clock[1] = clock[0];
    const ibp_lru lru = {
        {{map, num_sets, ways}, bytes, (int64_t)slab_bytes, take_below(in, IBP_MAX_SLABS)}, slot_bytes, stamps, clock};
    const ibp_ids ids = {.data = j->ids, .count = j->num_ids, .id_bytes = 8};
    ibp_cache_counts counts = {{0}, 0, 0};
    ibp_fault fault = {0};
    ibp_cache cache = {.entries = entries, .num_slabs = take_below(in, IBP_MAX_SLABS + 1)};
    for (uint32_t s = 0; s < cache.num_slabs; s++) cache.slabs[s] = (ibp_slab){bytes, (int64_t)slab_bytes};
    uint8_t *const out = fenced(OUT_PLACE, (size_t)(j->num_ids * t->item_bytes));
    ibp_claim_cached(t, &ids, &lru, entries, &counts, &fault);
    const ibp_status gathered =
        ibp_gather_cached(t, &ids, &cache, 0, j->num_ids, out, j->m->scratch, j->m->scratch_bytes, &fault);
    REQUIRE(gathered != IBP_INVALID_ARGUMENT);
    damage(in, map, num_ways * sizeof *map);
    damage(in, stamps, 4 * (num_ways + (size_t)num_sets));
    damage(in, bytes, slab_bytes);
    int64_t offsets[MOST_IDS];
    for (int64_t k = 0; k < j->num_ids; k++) offsets[k] = (int64_t)take(in, take_flag(in) ? 1 : 8);
    ibp_fill_slab(t, j->ids, offsets, 0, j->num_ids, &lru.slab, &fault);
    const ibp_row_query query = {&ids, rows_per_item, row_bytes, t->lengths, j->m->num_rows};
    REQUIRE(ibp_find_cached(&query, &lru.slab.map, 1, 0, j->num_ids, entries, &counts) == IBP_OK);
    damage(in, entries, num_entries * 8);
    ibp_gather_cached(t, &ids, &cache, 0, j->num_ids, out, j->m->scratch, j->m->scratch_bytes, &fault);
    REQUIRE(ibp_set_cached(j->ids, NULL, j->num_ids, take_flag(in), &lru.slab.map) == IBP_OK);
    REQUIRE(ibp_drop_cached(j->ids, j->num_ids / 2, &lru.slab.map) == IBP_OK);
    ibp_claim_cached(t, &ids, &lru, entries, &counts, &fault);
    ibp_gather_cached(t, &ids, &cache, 0, j->num_ids, out, j->m->scratch, j->m->scratch_bytes, &fault);
}

static void sort_ids(input *in, const job *j)
{
    const ibp_ids ids = {.data = j->ids, .count = j->num_ids, .id_bytes = 8};
    const uint32_t window_bits = take_below(in, 12);
    const size_t bytes = ibp_partition_workspace_bytes(j->num_ids, j->m->table.num_items, window_bits);
    int64_t *const sorted = (void *)fenced(OUT_PLACE, 8 * (size_t)j->num_ids);
    uint32_t *const positions = (void *)fenced(POSITIONS_PLACE, 4 * (size_t)j->num_ids);
    if (bytes == 0 || bytes > MOST_BYTES) return;
    REQUIRE(ibp_partition_ids(&ids, j->m->table.num_items, window_bits, fenced(SLAB_PLACE, (bytes + 7) / 8 * 8), sorted,
                              positions) == IBP_OK);
    for (int64_t k = 0; k < j->num_ids; k++) REQUIRE(positions[k] < j->num_ids && sorted[k] == j->ids[positions[k]]);
}

/* Pages on their way to and from a place whose rows are the table's: numbers of pages and blocks are any. */
static void move_pages(input *in, const job *j)
{
    enum { MOST = 8 };
    ibp_page_transfer t = {.pages = j->ids,
                           .blocks = j->ids + j->num_ids / 2,
                           .count = j->num_ids - j->num_ids / 2,
                           .num_pages = take_below(in, 64),
                           .num_blocks = take_below(in, 64),
                           .num_tensors = take_below(in, MOST),
                           .first_tensor = take_below(in, MOST),
                           .tensors = take_below(in, MOST),
                           .pieces = take_below(in, MOST),
                           .ids_per_block = take_below(in, 4 * MOST),
                           .block_stride = (int64_t)take(in, 8)};
    if (t.count > j->num_ids / 2) t.count = j->num_ids / 2;
    const size_t num_ids = (size_t)t.count * t.tensors * t.ids_per_block, num_starts = (size_t)t.tensors * t.pieces,
                 num_flags = (size_t)t.num_pages * t.num_tensors;
    uint8_t *const stored = fenced(STAMPS_PLACE, num_flags), *const seen = fenced(SOURCE_PLACE, num_flags);
    uint64_t *const starts = (void *)fenced(MAP_PLACE, 8 * num_starts), *const block_starts = (void *)fenced(
                                                                            POSITIONS_PLACE, 8 * (size_t)t.num_blocks);
    int64_t *const ids = (void *)fenced(OUT_PLACE, 8 * num_ids);
    uint64_t *const addresses = (void *)fenced(SLAB_PLACE, 8 * (size_t)t.count * num_starts);
    take_pattern(in, stored, num_flags, 32);
    memset(seen, 0, num_flags), memset(starts, 1, 8 * num_starts), memset(block_starts, 2, 8 * (size_t)t.num_blocks);
    t.starts = starts, t.block_starts = take_flag(in) ? block_starts : NULL;
    if (ibp_plan_pages(&t, take_flag(in) ? stored : NULL, ids, addresses) != IBP_OK) return;
    const int64_t num_rows = (int64_t)num_flags * t.ids_per_block;
    for (size_t i = 0; i < num_ids; i++) REQUIRE(ids[i] >= -1 && ids[i] < num_rows);
    if (num_rows > MOST_BYTES) return;
    damage(in, ids, 8 * num_ids);
    uint16_t *const lengths = (void *)fenced(ENTRIES_PLACE, 2 * (size_t)num_rows);
    memset(lengths, 0, 2 * (size_t)num_rows);
    REQUIRE(ibp_note_pages(ids, (int64_t)(num_ids / t.ids_per_block), t.ids_per_block, lengths,
                           take_flag(in) ? lengths : NULL, num_rows, stored, seen) == IBP_OK);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    made m = {0};
    uint64_t used = 0;
    if (!take_table(&in, &m)) return 0;
    uint16_t *const rooms = (void *)fenced(ROOMS_PLACE, 2 * (size_t)m.num_rows);
    const bool is_place = m.table.rows_per_base == 1;
    if (is_place) m.slots = memset(m.slots, 0, (size_t)m.table.slots_bytes);
    const bool is_coded = is_place ? encode_into_place(&in, &m, rooms, &used) : encode_at_once(&m);
    if (is_coded && !is_place) encode_packed(&m);
    const bool is_damaged = take_flag(&in);
    if (is_damaged) {
        damage(&in, m.lengths, 2 * (size_t)m.num_rows);
        damage(&in, m.bases, 8 * (size_t)m.num_bases);
        damage(&in, m.slots, (size_t)m.table.slots_bytes);
        damage(&in, m.overflow, (size_t)m.table.overflow_bytes);
    }
    job j = {.m = &m, .num_ids = take_below(&in, MOST_IDS + 1), .is_first = true};
    int64_t *const ids = (void *)fenced(IDS_PLACE, 8 * (size_t)j.num_ids);
    uint32_t *const positions = (void *)fenced(SOURCE_PLACE, 4 * (size_t)j.num_ids);
    const uint32_t spread = (uint32_t)m.table.num_items;
    const bool is_hostile = take_below(&in, 8) == 7;
    for (int64_t k = 0; k < j.num_ids; k++) {
        ids[k] = is_hostile ? (int64_t)take(&in, 8) : take_below(&in, spread);
        positions[k] = is_hostile ? (uint32_t)take(&in, 4) : (uint32_t)(j.num_ids - 1 - k);
    }
    j.ids = ids, j.positions = take_flag(&in) ? positions : NULL;
    const uint32_t num_bytes = (uint32_t)(m.table.num_items * m.table.item_bytes);
    j.start = take_below(&in, num_bytes + 1), j.end = j.start + take_below(&in, (uint32_t)(num_bytes - j.start) + 1);
    j.is_right_codebook = ibp_check_table(&m.table) == IBP_OK;
    j.is_right = is_coded && !is_damaged && j.is_right_codebook && !is_place;
    on_each_processor(read_rows, &j);
    select_rows(&j);
    cache_rows(&in, &j);
    sort_ids(&in, &j);
    move_pages(&in, &j);
    if (is_place) { /* rows coded anew, over what was damaged */
        used = take_flag(&in) ? take(&in, 8) : used;
        damage(&in, rooms, 2 * (size_t)m.num_rows);
        encode_into(&in, &m, rooms, &used, NULL, m.num_rows);
        encode_into(&in, &m, rooms, &used, ids, j.num_ids);
        j.is_right = false, j.is_first = true;
        on_each_processor(read_rows, &j);
    }
    return 0;
}
