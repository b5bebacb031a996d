/* ibp_cuda_cache.h - the CUDA twins of ibp_cache.h.
 *
 *     // Looks rows up, and gathers their items. maps, cache->entries, counts and fault: in device memory, or mapped.
 *     ibp_status cached_items(const ibp_table *table, const ibp_row_query *query, const ibp_cache_map *map,
 *                             uint64_t *entries, const ibp_cache *cache, uint8_t *out, ibp_fault *fault,
 *                             ibp_stream stream)
 *     {
 *         const ibp_status status = ibp_cuda_find_cached(query, map, 1, entries, NULL, stream);
 *         if (status != IBP_OK) return status;
 *         return ibp_cuda_gather_cached(table, query->ids, cache, out, fault, 0, stream);
 *     }
 */
#ifndef IBP_CUDA_CACHE_H
#define IBP_CUDA_CACHE_H

#include "ibp_cache.h"
#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As ibp_owners_of_rows. */
IBP_API ibp_status ibp_cuda_owners_of_rows(const int64_t *rows, int64_t count, uint32_t num_slabs, uint8_t *owners,
                                           ibp_stream stream);
/* As ibp_find_cached for all ids. maps: an array in host memory; the maps, and counts, which may be NULL, in device
 * memory. Maps of peers are read where they are. At most 2^31 rows. */
IBP_API ibp_status ibp_cuda_find_cached(const ibp_row_query *query, const ibp_cache_map *maps, uint32_t num_maps,
                                        uint64_t *entries, ibp_cache_counts *counts, ibp_stream stream);
/* As ibp_gather_cached for all ids. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                          uint8_t *out, ibp_fault *fault, int max_sms, ibp_stream stream);
/* As ibp_fill_slab for all rows. */
IBP_API ibp_status ibp_cuda_fill_slab(const ibp_table *table, const int64_t *rows, const int64_t *offsets,
                                      int64_t count, const ibp_cache_slab *slab, ibp_fault *fault, ibp_stream stream);
/* As ibp_claim_cached, but that missing rows take their ways in any order. Calls of one cache follow each other on one
 * stream, and lookups in it too. At most 2^31 rows. */
IBP_API ibp_status ibp_cuda_claim_cached(const ibp_table *table, const ibp_ids *ids, const ibp_lru *lru,
                                         uint64_t *entries, ibp_cache_counts *counts, ibp_fault *fault,
                                         ibp_stream stream);
/* As ibp_drop_cached, and ibp_set_cached. */
IBP_API ibp_status ibp_cuda_drop_cached(const int64_t *rows, int64_t count, const ibp_cache_map *map,
                                        ibp_stream stream);
IBP_API ibp_status ibp_cuda_set_cached(const int64_t *rows, const uint16_t *lengths, int64_t count, bool dirty,
                                       const ibp_cache_map *map, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
