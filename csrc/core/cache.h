/* cache.h - entries and maps of a cache of rows (ibp_cache.h), for gcc, g++ and nvcc. */
#ifndef IBP_CORE_CACHE_H
#define IBP_CORE_CACHE_H

#include "../internal/ibp_cache.h"
#include "locate.h"

/* ---- entries ---- */

IBP_INLINE bool ibp_is_present(uint64_t entry) { return (entry & IBP_ENTRY_PRESENT) != 0u; }
IBP_INLINE uint64_t ibp_offset_in_slab(uint64_t entry) { return entry & (((uint64_t)1 << IBP_ENTRY_OFFSET_BITS) - 1u); }
IBP_INLINE uint32_t ibp_slab_of_entry(uint64_t entry)
{
    return (uint32_t)(entry >> IBP_ENTRY_SLAB_SHIFT) & (IBP_MAX_SLABS - 1u);
}

/* Convert between a row's entry of lengths and the bits of a cache entry that hold it. */
IBP_INLINE uint32_t ibp_length_of_entry(uint64_t entry)
{
    return (entry & IBP_ENTRY_CODED) != 0u ? (uint32_t)(entry >> IBP_ENTRY_LENGTH_SHIFT) & 0xffffu : 0u;
}
IBP_INLINE uint64_t ibp_entry_of_length(uint32_t length)
{
    return length == 0u ? 0u : IBP_ENTRY_CODED | (uint64_t)length << IBP_ENTRY_LENGTH_SHIFT;
}

/* Returns the cache entry of a row. offset: the row's offset in the slab, in [0, 2^IBP_ENTRY_OFFSET_BITS). */
IBP_INLINE uint64_t ibp_make_entry(uint32_t slab, uint64_t offset, uint32_t length)
{
    return offset | (uint64_t)slab << IBP_ENTRY_SLAB_SHIFT | ibp_entry_of_length(length) | IBP_ENTRY_PRESENT;
}
/* Returns the new cache entry of a row whose cached bytes were rewritten. entry: the old cache entry. length: the row's
 * new entry of lengths. */
IBP_INLINE uint64_t ibp_rewrite_entry(uint64_t entry, uint32_t length, bool dirty)
{
    const uint64_t kept = entry & ~(ibp_entry_of_length(0xffffu) | IBP_ENTRY_DIRTY);
    return kept | ibp_entry_of_length(length) | (dirty ? IBP_ENTRY_DIRTY : 0u);
}

/* Finds the stored bytes of a cached row. Fills in *place for decoders. The whole stored row counts as its slot part:
 * it begins at byte slot_start of *slab, and in_slot is its size. Returns false if the row is corrupt: its entry names
 * a slab that the cache does not have, or gives a length above row_bytes or a range outside the slab. */
IBP_INLINE bool ibp_place_in_slab(const ibp_cache *cache, uint64_t entry, uint32_t row_bytes, ibp_row_place *place,
                                  const uint8_t **slab)
{
    const uint32_t number = ibp_slab_of_entry(entry), length = ibp_length_of_entry(entry);
    place->valid = row_bytes;
    place->raw = length == 0u;
    place->is_default = length == IBP_DEFAULT_LENGTH(row_bytes);
    place->in_slot = ibp_stored_bytes(length, row_bytes, row_bytes);
    place->in_overflow = 0u;
    place->slot_start = ibp_offset_in_slab(entry);
    place->overflow_start = 0u;
    if (number >= cache->num_slabs || place->in_slot > row_bytes) return false;
    *slab = cache->slabs[number].bytes;
    return place->in_slot == 0u ||
           ibp_part_in_bounds(place->slot_start, place->in_slot, cache->slabs[number].num_bytes);
}

/* ---- maps ---- */

/* Return the hash of a row's number, the slab that may hold the row, and the row's home set, which is searched first.
 * The high half of the hash selects the home set. The low half selects the slab, and the sets that are searched after
 * the home set. */
IBP_INLINE uint64_t ibp_hash_of_row(int64_t row) { return ibp_mix_word((uint64_t)row, 0u); }
IBP_INLINE uint32_t ibp_owner_of_row(int64_t row, uint32_t num_slabs)
{
    return (uint32_t)((ibp_hash_of_row(row) & 0xffffffffu) * num_slabs >> 32);
}
IBP_INLINE uint32_t ibp_home_of_hash(uint64_t hash, const ibp_cache_map *map)
{
    return (uint32_t)((hash >> 32) * (uint32_t)map->num_sets >> 32);
}

/* Returns the distance from one set of a search to the next (double hashing). It differs from row to row: rows with the
 * same home set go on to different sets, so searches stay short in a map that is nearly full. In a map of few sets,
 * which is searched completely, the distance is 1. */
IBP_INLINE uint32_t ibp_step_of_hash(uint64_t hash, const ibp_cache_map *map)
{
    if (map->num_sets <= (int64_t)IBP_SEARCHED_WAYS) return 1;
    return 1 + (uint32_t)((hash & 0xffffffffu) * ((uint32_t)map->num_sets - 1u) >> 32);
}
IBP_INLINE uint32_t ibp_next_set(uint32_t set, uint32_t step, const ibp_cache_map *map)
{
    const uint32_t above = (uint32_t)map->num_sets - step;
    return set < above ? set + step : set - above;
}

/* Returns the number of sets that are searched for a row. */
IBP_INLINE uint32_t ibp_searched_sets(const ibp_cache_map *map)
{
    const uint32_t sets = IBP_SEARCHED_WAYS / map->ways;
    return (int64_t)sets < map->num_sets ? sets : (uint32_t)map->num_sets;
}

/* Returns whether the fields of a map are in range. */
IBP_INLINE bool ibp_is_map(const ibp_cache_map *map)
{
    const bool is_power = map->ways >= 2u && map->ways <= IBP_SEARCHED_WAYS && (map->ways & (map->ways - 1u)) == 0u;
    return is_power && map->num_sets >= 0 && map->num_sets <= (int64_t)UINT32_MAX &&
           (map->num_sets == 0 || map->rows != NULL);
}
IBP_INLINE bool ibp_is_cache_slab(const ibp_cache_slab *slab)
{
    return ibp_is_map(&slab->map) && slab->num_bytes >= 0 && slab->num_bytes <= (int64_t)1 << IBP_ENTRY_OFFSET_BITS &&
           slab->number < IBP_MAX_SLABS && (slab->num_bytes == 0 || slab->bytes != NULL);
}
/* Returns whether a table's items are whole rows, which a cache needs. */
IBP_INLINE bool ibp_has_whole_rows(const ibp_table *table)
{
    return table->item_bytes > 0 && table->item_bytes % table->codebook.row_bytes == 0;
}
IBP_INLINE bool ibp_is_lru(const ibp_lru *lru)
{
    const ibp_cache_slab *const slab = &lru->slab;
    if (!ibp_is_cache_slab(slab) || slab->map.ways != IBP_SEARCHED_WAYS || lru->clock == NULL) return false;
    if (lru->slot_bytes == 0u || lru->slot_bytes % IBP_OVERFLOW_ALIGN != 0u || lru->slot_bytes > IBP_MAX_ROW_BYTES)
        return false;
    return (slab->map.num_sets == 0 || lru->stamps != NULL) &&
           slab->map.num_sets <= slab->num_bytes / ((int64_t)slab->map.ways * lru->slot_bytes);
}

/* Returns whether the fields of a query are in range. Reads no memory. */
IBP_INLINE bool ibp_is_query(const ibp_row_query *query)
{
    const ibp_ids *const ids = query->ids;
    return query->row_bytes >= 1u && query->row_bytes <= IBP_MAX_ROW_BYTES && query->num_rows >= 0 &&
           query->rows_per_item >= 1 && ids->count >= 0 && ids->count <= INT64_MAX / 16 / query->rows_per_item;
}

/* Returns the number, in the table, of row `part` of an item, or -1 if there is no such item. */
IBP_INLINE int64_t ibp_row_of_item(int64_t id, int64_t part, int64_t rows_per_item, int64_t num_rows)
{
    return id >= 0 && id < num_rows / rows_per_item ? id * rows_per_item + part : -1;
}

/* Returns a way's age: the number of calls since its last use, which is 0 if the current call has used it. */
IBP_INLINE uint32_t ibp_age_of_way(uint32_t now, uint32_t stamp) { return now - stamp; }

#endif
