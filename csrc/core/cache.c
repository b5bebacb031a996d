/* cache.c - a cache of rows in host memory. Tests compare the kernels of cuda/cache/cache.cu with it. */
#include "cache.h"
#include "ids.h"
#include "rows.h"

ibp_status ibp_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners)
{
    if (count < 0 || num_slabs < 1 || num_slabs > IBP_MAX_SLABS) return IBP_INVALID_ARGUMENT;
    for (int64_t i = 0; i < count; i++) owners[i] = (uint8_t)ibp_owner_of_row(rows[i], num_slabs);
    return IBP_OK;
}

/* ---- maps: several threads may insert rows in a map while others read it ---- */

/* If `takes` is false, finds a row: returns its way, or NULL if the map does not have the row. If `takes` is true,
 * inserts a row: claims an empty way and returns it, and the caller must then write the way's entry. In this case the
 * result is NULL if the map has the row already, or if no way is empty. */
static ibp_cached_row *find_way(const ibp_cache_map *map, int64_t row, bool takes)
{
    const uint64_t hash = ibp_hash_of_row(row);
    if (row < 0 || map->num_sets == 0) return NULL;
    uint32_t set = ibp_home_of_hash(hash, map);
    const uint32_t step = ibp_step_of_hash(hash, map);
    for (uint32_t left = ibp_searched_sets(map); left > 0; left--, set = ibp_next_set(set, step, map)) {
        ibp_cached_row *const ways = map->rows + (int64_t)set * map->ways;
        for (uint32_t w = 0; w < map->ways; w++) {
            int64_t found = __atomic_load_n(&ways[w].row, __ATOMIC_ACQUIRE);
            if (takes && found == IBP_WAY_EMPTY &&
                __atomic_compare_exchange_n(&ways[w].row, &found, row, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                return &ways[w];
            if (found == row) return takes ? NULL : &ways[w];
            if (found == IBP_WAY_EMPTY) return NULL; /* ways are taken in order, so the row is in no later way */
        }
    }
    return NULL;
}

static uint64_t entry_of_way(const ibp_cached_row *way)
{
    const uint64_t entry = way ? __atomic_load_n(&way->entry, __ATOMIC_ACQUIRE) : 0u;
    return ibp_is_present(entry) ? entry : 0u;
}

/* ---- looking up rows ---- */

static void count_miss(ibp_cache_counts *counts, uint32_t stored_bytes)
{
    counts->misses++;
    counts->missed_bytes += ibp_sector_bytes(stored_bytes);
}
static void add_counts(ibp_cache_counts *to, const ibp_cache_counts *counts)
{
    if (!to) return;
    for (uint32_t s = 0; s < IBP_MAX_SLABS; s++) __atomic_fetch_add(&to->hits[s], counts->hits[s], __ATOMIC_RELAXED);
    __atomic_fetch_add(&to->misses, counts->misses, __ATOMIC_RELAXED);
    __atomic_fetch_add(&to->missed_bytes, counts->missed_bytes, __ATOMIC_RELAXED);
}

ibp_status ibp_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps, int64_t first,
                           int64_t last, uint64_t *entries, ibp_cache_counts *counts)
{
    if (!ibp_is_query(query) || num_maps > IBP_MAX_SLABS || !ibp_are_ids(query->ids, first, last))
        return IBP_INVALID_ARGUMENT;
    for (uint32_t m = 0; m < num_maps; m++)
        if (!ibp_is_map(&maps[m])) return IBP_INVALID_ARGUMENT;
    ibp_cache_counts mine = {{0}, 0, 0};
    for (int64_t n = first * query->rows_per_item; n < last * query->rows_per_item; n++) {
        const int64_t item = n / query->rows_per_item;
        const int64_t row = ibp_row_of_item(ibp_id_at(query->ids, item), n - item * query->rows_per_item,
                                            query->rows_per_item, query->num_rows);
        const uint32_t owner = ibp_owner_of_row(row, num_maps);
        const uint64_t entry = row >= 0 && num_maps != 0 ? entry_of_way(find_way(&maps[owner], row, false)) : 0;
        entries[n] = entry;
        if (row < 0) continue;
        const uint32_t length = ibp_length_of_row(query->lengths, row);
        if (entry != 0)
            mine.hits[owner]++;
        else if (length != IBP_DEFAULT_LENGTH(query->row_bytes))
            count_miss(&mine, ibp_stored_bytes(length, query->row_bytes, query->row_bytes));
    }
    add_counts(counts, &mine);
    return IBP_OK;
}

/* ---- filling a slab ---- */

/* Finds where the stored bytes of a row lie, and how many there are. Returns IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW
 * if the row cannot be copied. */
static ibp_status find_stored(const ibp_table *table, int64_t row, ibp_row_place *place, uint32_t *stored)
{
    *stored = 0;
    if (row < 0 || row >= ibp_rows_of_bytes(ibp_bytes_of_table(table), table->codebook.row_bytes))
        return IBP_INDEX_OUT_OF_RANGE;
    if (!ibp_locate_row(table, row, place)) return IBP_CORRUPT_ROW;
    *stored = place->in_slot + place->in_overflow;
    return IBP_OK;
}

/* Computes a row's entry of lengths from the row's place, because the entry in the table may have changed since the
 * place was computed. The row must have stored bytes. */
static uint32_t length_of_place(const ibp_row_place *place)
{
    return place->raw ? 0u : place->in_slot + place->in_overflow;
}

static bool is_cacheable(const ibp_table *table)
{
    return ibp_check_table_fields(table) == IBP_OK && ibp_has_whole_rows(table) &&
           ibp_has_arrays(table, table->slots, table->overflow);
}

ibp_status ibp_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets, int64_t first,
                         int64_t last, const ibp_cache_slab *slab, ibp_fault *fault)
{
    if (!is_cacheable(table) || !ibp_is_cache_slab(slab) || first < 0 || first > last) return IBP_INVALID_ARGUMENT;
    ibp_fault_log log = {fault, IBP_OK};
    for (int64_t i = first; i < last; i++) {
        const int64_t row = IBP_LOAD_ONCE(rows[i]), offset = IBP_LOAD_ONCE(offsets[i]);
        ibp_row_place place;
        uint32_t stored;
        if (row < 0 || offset < 0) continue;
        ibp_status status = find_stored(table, row, &place, &stored);
        if (status == IBP_OK && !ibp_part_in_bounds((uint64_t)offset, stored, slab->num_bytes))
            status = IBP_BUFFER_TOO_SMALL;
        ibp_note_fault(&log, status, i, row);
        if (status != IBP_OK || place.is_default) continue;
        ibp_cached_row *way = NULL;
        if (slab->map.num_sets > 0 && !(way = find_way(&slab->map, row, true))) continue;
        ibp_copy_stored(table, &place, slab->bytes + offset);
        if (!way) continue;
        const uint64_t entry = ibp_make_entry(slab->number, (uint64_t)offset, length_of_place(&place));
        __atomic_store_n(&way->entry, entry, __ATOMIC_RELEASE);
    }
    return log.status;
}

/* ---- replacing the least recently used rows ---- */

/* Chooses the way for a missing row. Returns the index of the way, or -1 if every way of the row's set is dirty or was
 * used by this call. */
static int64_t choose_way(const ibp_lru *lru, int64_t set, uint32_t now)
{
    const int64_t first = set * lru->slab.map.ways;
    int64_t chosen = -1;
    uint32_t oldest = 0; /* age of the chosen way */
    for (int64_t w = first; w < first + lru->slab.map.ways; w++) {
        const ibp_cached_row *const way = &lru->slab.map.rows[w];
        if (way->row < 0) return w;
        const uint32_t age = ibp_age_of_way(now, lru->stamps[w]);
        if (age <= oldest || (way->entry & IBP_ENTRY_DIRTY) != 0u) continue;
        chosen = w;
        oldest = age;
    }
    return chosen;
}

/* Takes a way for a missing row and copies the row to the way's slot. Returns the row's entry, or 0 if there is no way
 * for it. */
static uint64_t claim_way(const ibp_lru *lru, const ibp_table *table, int64_t row, const ibp_row_place *place,
                          uint32_t stored, uint32_t now)
{
    const ibp_cache_slab *const slab = &lru->slab;
    if (slab->map.num_sets == 0 || stored > lru->slot_bytes) return 0;
    const int64_t way = choose_way(lru, ibp_home_of_hash(ibp_hash_of_row(row), &slab->map), now);
    if (way < 0) return 0;
    const uint64_t offset = (uint64_t)way * lru->slot_bytes,
                   entry = ibp_make_entry(slab->number, offset, length_of_place(place));
    ibp_copy_stored(table, place, slab->bytes + offset);
    lru->stamps[way] = now;
    slab->map.rows[way] = (ibp_cached_row){row, entry};
    return entry;
}

ibp_status ibp_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru, uint64_t *entries,
                            ibp_cache_counts *counts, ibp_fault *fault)
{
    if (!is_cacheable(table) || !ibp_is_lru(lru) || !ibp_are_ids(ids, 0, ids->count)) return IBP_INVALID_ARGUMENT;
    const int64_t row_bytes = table->codebook.row_bytes, rows_per_item = table->item_bytes / row_bytes,
                  num_rows = ibp_bytes_of_table(table) / row_bytes;
    if (ids->count > INT64_MAX / 16 / rows_per_item) return IBP_INVALID_ARGUMENT;
    const uint32_t now = (uint32_t)lru->clock[0] + 1u;
    ibp_cache_counts mine = {{0}, 0, 0};
    ibp_fault_log log = {fault, IBP_OK};
    for (int claims = 0; claims < 2; claims++) /* the first pass stamps the rows that are in the cache, so that the
                                                  second pass does not replace them */
        for (int64_t n = 0; n < ids->count * rows_per_item; n++) {
            const int64_t item = n / rows_per_item, id = ibp_id_at(ids, item),
                          row = ibp_row_of_item(id, n - item * rows_per_item, rows_per_item, num_rows);
            ibp_row_place place;
            uint32_t stored;
            if (claims && entries[n] != 0) continue;
            const ibp_cached_row *const way = find_way(&lru->slab.map, row, false);
            const uint64_t entry = entry_of_way(way);
            entries[n] = entry;
            if (entry != 0) {
                lru->stamps[way - lru->slab.map.rows] = now;
                mine.hits[lru->slab.number]++;
            } else if (claims) {
                const ibp_status status = find_stored(table, row, &place, &stored);
                ibp_note_fault(&log, status, item, id);
                if (status != IBP_OK || place.is_default) continue;
                entries[n] = claim_way(lru, table, row, &place, stored, now);
                count_miss(&mine, stored);
            }
        }
    lru->clock[0] = lru->clock[1] = lru->clock[0] + 1u;
    add_counts(counts, &mine);
    return log.status;
}

/* ---- removing and rewriting rows ---- */

ibp_status ibp_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map)
{
    if (!ibp_is_map(map) || count < 0) return IBP_INVALID_ARGUMENT;
    for (int64_t i = 0; i < count; i++) {
        ibp_cached_row *const way = find_way(map, IBP_LOAD_ONCE(rows[i]), false);
        if (!way) continue;
        __atomic_store_n(&way->entry, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&way->row, IBP_WAY_REMOVED, __ATOMIC_RELEASE);
    }
    return IBP_OK;
}

ibp_status ibp_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                          const ibp_cache_map *map)
{
    if (!ibp_is_map(map) || count < 0) return IBP_INVALID_ARGUMENT;
    for (int64_t i = 0; i < count; i++) {
        ibp_cached_row *const way = find_way(map, IBP_LOAD_ONCE(rows[i]), false);
        const uint64_t entry = entry_of_way(way);
        if (entry == 0) continue;
        const uint32_t length = lengths ? IBP_LOAD_ONCE(lengths[i]) : ibp_length_of_entry(entry);
        __atomic_store_n(&way->entry, ibp_rewrite_entry(entry, length, dirty), __ATOMIC_RELEASE);
    }
    return IBP_OK;
}
