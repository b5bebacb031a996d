/* ibp_cache.h - a cache that holds rows of a table as they are stored (the paper's section 5).
 *
 *     ibp_status cached_items(const ibp_table *table, const ibp_ids *ids, const ibp_cache_map *map,
 *                             const ibp_slab *slab, uint64_t *entries, uint8_t *out, void *scratch)
 *     {
 *         ibp_row_query query = {0};
 *         query.ids = ids;
 *         query.rows_per_item = table->item_bytes / table->codebook.row_bytes;
 *         query.row_bytes = table->codebook.row_bytes;
 *         query.lengths = table->lengths;
 *         query.num_rows = ibp_num_rows(table);
 *         const ibp_status status = ibp_find_cached(&query, map, 1, 0, ids->count, entries, NULL);
 *         if (status != IBP_OK) return status;
 *         ibp_cache cache = {0};
 *         cache.entries = entries;
 *         cache.num_slabs = 1;
 *         cache.slabs[0] = *slab;
 *         ibp_fault fault = {0};
 *         const size_t scratch_bytes = ibp_scratch_bytes(query.row_bytes);
 *         return ibp_gather_cached(table, ids, &cache, 0, ids->count, out, scratch, scratch_bytes, &fault);
 *     }
 */
#ifndef IBP_CACHE_H
#define IBP_CACHE_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A cache holds rows of a table as they are stored, with slot part and overflow part joined. The rows lie in slabs:
 * memory that is nearer to the GPUs than the table, one slab for each GPU. The map of a slab leads from a row's number
 * to the row's entry. An entry has 64 bits, as in the paper; it is 0 if the cache does not hold the row.
 *
 *   bits 0-39   where the row's bytes begin in the slab
 *   bits 40-42  number of the slab
 *   bit 43      1: the row is coded. 0: its row_bytes bytes are stored as they are
 *   bits 44-59  for a coded row, its entry of lengths (section 2): its size as stored, or the value that marks a
 *               default row, which has no bytes. 0 if the row is not coded
 *   bit 60      present: an entry without this bit counts as 0
 *   bit 61      dirty: the row has changed since it was taken from the table
 *
 * A lookup takes two steps. ibp_find_cached finds the entries of the rows of the requested items. ibp_gather_cached
 * then reads each row from its slab if the row's entry is present, and otherwise from the table. Caches are for tables
 * whose items are whole rows: item_bytes is a multiple of row_bytes.
 *
 * Nothing in a cache is trusted. If an entry points to bytes outside the slab, the row counts as corrupt. A map with
 * arbitrary contents gives wrong rows, but a search in it still ends after IBP_SEARCHED_WAYS ways. */
#define IBP_MAX_SLABS 8u
#define IBP_ENTRY_OFFSET_BITS 40u
#define IBP_ENTRY_SLAB_SHIFT 40u
#define IBP_ENTRY_CODED ((uint64_t)1 << 43)
#define IBP_ENTRY_LENGTH_SHIFT 44u
#define IBP_ENTRY_PRESENT ((uint64_t)1 << 60)
#define IBP_ENTRY_DIRTY ((uint64_t)1 << 61)

/* A way of a map: a row's number and its entry. */
typedef struct ibp_cached_row {
    int64_t row; /* the row's number, IBP_WAY_EMPTY or IBP_WAY_REMOVED */
    uint64_t entry;
} ibp_cached_row;

/* A way that has never been used. A search ends in the first set that has such a way. */
#define IBP_WAY_EMPTY ((int64_t)-1)
/* A way whose row was removed. A search goes on past it. */
#define IBP_WAY_REMOVED ((int64_t)-2)

/* Number of ways that a search looks at. A hash of the row's number gives a sequence of sets, of which the first is the
 * row's home set. A row is stored in the first set of this sequence that has an empty way, so a search looks at the
 * sets in the same order. In a map with sets of two ways that is filled to 85 %, fewer than one row in a thousand finds
 * no way. */
#define IBP_SEARCHED_WAYS 32u

/* The map of a slab: sets of `ways` ways each. In an empty map every way has row IBP_WAY_EMPTY and entry 0. */
typedef struct ibp_cache_map {
    ibp_cached_row *rows; /* num_sets * ways, aligned to 16 bytes */
    int64_t num_sets;     /* 1 to UINT32_MAX; 0: the slab has no rows */
    uint32_t ways;        /* 2, 4, 8, 16 or 32 */
} ibp_cache_map;

/* A slab: memory that holds cached rows. */
typedef struct ibp_slab {
    const uint8_t *bytes;
    int64_t num_bytes;
} ibp_slab;

/* What a gather needs of a cache: its slabs, and the entries of the rows that are gathered. The entry of row r of item
 * ids[k] is entries[k * rows_per_item + r], where rows_per_item is item_bytes / row_bytes. */
typedef struct ibp_cache {
    const uint64_t *entries; /* ids->count * rows_per_item */
    uint32_t num_slabs;      /* at most IBP_MAX_SLABS */
    ibp_slab slabs[IBP_MAX_SLABS];
} ibp_cache;

/* Counts of rows that were looked up. Default rows and ids out of range count neither as hits nor as misses. */
typedef struct ibp_cache_counts {
    uint64_t hits[IBP_MAX_SLABS]; /* number of rows found in each slab */
    uint64_t misses;              /* number of rows not found */
    uint64_t missed_bytes;        /* size of the missed rows as stored, in bytes, each row rounded up to a multiple of
                                     IBP_OVERFLOW_ALIGN */
} ibp_cache_counts;

/* Computes for each row the slab to whose map the row belongs, from a hash of the row's number.
 *
 * rows, count: the numbers of `count` rows.
 * num_slabs: 1 to IBP_MAX_SLABS.
 * owners: owners[i] receives the number of the slab of row rows[i]. */
IBP_API ibp_status ibp_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners);

/* The items whose rows are looked up. Each item has rows_per_item rows of row_bytes bytes. */
typedef struct ibp_row_query {
    const ibp_ids *ids;      /* its positions are not read */
    int64_t rows_per_item;   /* at least 1 */
    uint32_t row_bytes;      /* 1 to IBP_MAX_ROW_BYTES */
    const uint16_t *lengths; /* one for each row; NULL: every row is raw */
    int64_t num_rows;        /* number of rows of the table; ids of items beyond these rows are out of range */
} ibp_row_query;

/* Looks up the rows of the items ids[first] to ids[last - 1].
 *
 * maps, num_maps: at most IBP_MAX_SLABS maps. A row is looked up only in the map of the slab that ibp_owners_of_rows
 * computes for it.
 * entries: entries[k * rows_per_item + r] receives the entry of row r of item ids[k]; 0 if no map has the row.
 * counts: the counts of this call are added to it atomically, so that threads may share it. May be NULL. */
IBP_API ibp_status ibp_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                   int64_t first, int64_t last, uint64_t *entries, ibp_cache_counts *counts);

/* Gathers items as ibp_gather_items does. Rows whose entries are present are read from their slabs.
 *
 * @return IBP_INVALID_ARGUMENT also if items are not whole rows. */
IBP_API ibp_status ibp_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache, int64_t first,
                                     int64_t last, uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault);

/* A slab to which rows are copied, and its map. */
typedef struct ibp_cache_slab {
    ibp_cache_map map;
    uint8_t *bytes;
    int64_t num_bytes; /* at most 2^IBP_ENTRY_OFFSET_BITS */
    uint32_t number;   /* number of the slab among the slabs of the cache, below IBP_MAX_SLABS */
} ibp_cache_slab;

/* Copies rows of a table into a slab, as they are stored, and puts them into its map. Row rows[i] goes to byte
 * offsets[i] of the slab, for first <= i < last. Several threads may share a map. A row's entry is written to the map
 * after the row's bytes have been written to the slab.
 *
 * A row is left out if it is in the map already, if it is a default row, if all ways that a search would look at are
 * taken, or if its number or its offset is negative. If `rows` has the same number several times, the row is copied
 * once. If the bytes of two rows overlap in the slab, reading these rows gives wrong data. If the map has no sets, rows
 * are copied to the slab but not entered in a map; then only default rows and rows with a negative number or offset are
 * left out.
 *
 * @return IBP_INDEX_OUT_OF_RANGE if the table does not have one of the rows; IBP_CORRUPT_ROW if the index of the table
 * is wrong for a row, or the row is lost (ibp_place.h); IBP_BUFFER_TOO_SMALL if a row would not lie inside the slab.
 * Such rows are left out, and the first one is noted in *fault. */
IBP_API ibp_status ibp_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets, int64_t first,
                                 int64_t last, const ibp_cache_slab *slab, ibp_fault *fault);

/* A cache that replaces its least recently used rows with requested rows. Its sets have IBP_SEARCHED_WAYS ways, and a
 * row is always in its home set. Way i of the map owns the slot_bytes bytes of the slab that begin at byte i *
 * slot_bytes. */
typedef struct ibp_lru {
    ibp_cache_slab slab;
    uint32_t slot_bytes; /* a multiple of IBP_OVERFLOW_ALIGN; longer rows are not cached */
    uint32_t *stamps;    /* for each way, the number of the call that used it last; after these, a lock for each set,
                            which is 0 between calls. Set all of them to 0 before the first call */
    uint64_t *clock;     /* two numbers; between calls each is the number of calls so far */
} ibp_lru;

/* Looks up the rows of all ids, and copies missing rows into the cache in place of the least recently used rows.
 * entries[k * rows_per_item + r] receives the entry of row r of item ids[k].
 *
 * Rows that the cache holds when the call begins keep their ways. Each missing row, in the order of the ids, takes a
 * way without a row in its home set. If every way of the set has a row, it takes the way that was used longest ago,
 * among the ways that this call does not use and that are not dirty. The row's bytes are copied there. If there is no
 * such way either, or if the row is longer than a slot, the row is not cached and its entry is 0. If an id occurs
 * several times, each occurrence gets the same entry, and all occurrences except the first count as hits.
 *
 * counts: this call's counts are added to it. May be NULL.
 * @return the status of the first fault, which is noted in *fault if *fault is still zero: an id out of range, or a row
 * that lies outside the table. The entries of such rows are 0. IBP_INVALID_ARGUMENT also if items are not whole
 * rows. */
IBP_API ibp_status ibp_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru, uint64_t *entries,
                                    ibp_cache_counts *counts, ibp_fault *fault);

/* Removes the rows rows[0] to rows[count - 1] from a map. Rows that the map does not have, and negative numbers, are
 * skipped. */
IBP_API ibp_status ibp_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map);

/* Notes in a map that the cached bytes of rows have been rewritten. Rows that the map does not have, and negative
 * numbers, are skipped. The numbers in `rows` must differ.
 *
 * lengths: the new entries of lengths; NULL: they have not changed.
 * dirty: whether the rows of the table itself are now older than the cached rows. */
IBP_API ibp_status ibp_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                                  const ibp_cache_map *map);

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Computes the slabs of rows on a GPU as ibp_owners_of_rows does. */
IBP_API ibp_status ibp_cuda_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners,
                                           ibp_stream stream);
/* Finds the entries of all ids as ibp_find_cached does, for at most 2^31 rows. The array `maps` is in host memory. The
 * `rows` arrays that it points to are in device memory, and so is `counts`, which may be NULL. Maps may be in the
 * memory of other GPUs, and are then read from there. */
IBP_API ibp_status ibp_cuda_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                        uint64_t *entries, ibp_cache_counts *counts, ibp_stream stream);
/* Gathers all ids as ibp_gather_cached does; fault and max_sms are as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                          uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream);
/* Copies all rows as ibp_fill_slab does. */
IBP_API ibp_status ibp_cuda_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets,
                                      int64_t count, const ibp_cache_slab *slab, ibp_fault *fault, ibp_stream stream);
/* Finds and replaces rows as ibp_claim_cached does, for at most 2^31 rows, except that missing rows take their ways in
 * any order. All calls that look up or change one cache must be queued on the same stream. */
IBP_API ibp_status ibp_cuda_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru,
                                         uint64_t *entries, ibp_cache_counts *counts, ibp_fault *fault,
                                         ibp_stream stream);
/* ibp_cuda_drop_cached and ibp_cuda_set_cached do the same as ibp_drop_cached and ibp_set_cached. */
IBP_API ibp_status ibp_cuda_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map,
                                        ibp_stream stream);
IBP_API ibp_status ibp_cuda_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                                       const ibp_cache_map *map, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
