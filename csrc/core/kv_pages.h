/* kv_pages.h - computes the row ids and the addresses of a transfer of pages (ibp_pages.h), one by one. For gcc, g++
 * and nvcc. */
#ifndef IBP_KV_PAGES_H
#define IBP_KV_PAGES_H

#include "../internal/ibp_pages.h"
#include "format.h"
#include "ibp.h"

/* Returns whether a transfer is valid: its numbers are consistent, and, if it has pages, its arrays are not NULL. */
IBP_INLINE bool ibp_is_page_transfer(const ibp_page_transfer *t)
{
    if (t->count < 0 || t->num_pages < 0 || t->num_blocks < 0 || t->pieces < 1 || t->ids_per_block < t->pieces)
        return false;
    if (t->ids_per_block % t->pieces != 0 || t->tensors < 1 || t->first_tensor > t->num_tensors) return false;
    if (t->tensors > t->num_tensors - t->first_tensor) return false;
    /* Otherwise the number of ids of a page could overflow. */
    if (t->num_tensors > INT32_MAX || t->ids_per_block > INT32_MAX) return false;
    const int64_t ids_per_page = (int64_t)t->num_tensors * t->ids_per_block;
    if (t->num_pages > INT64_MAX / ids_per_page || t->count > INT64_MAX / ids_per_page) return false;
    return t->count == 0 || (t->pages && t->blocks && t->starts);
}

/* Returns the number of ids of a transfer. */
IBP_INLINE int64_t ibp_num_transfer_ids(const ibp_page_transfer *t) { return t->count * t->tensors * t->ids_per_block; }

/* Returns whether a page is stored for every tensor that the transfer moves. first_flag: the index in `stored` of the
 * page's flag for the first of these tensors. */
IBP_INLINE bool ibp_is_stored_page(const ibp_page_transfer *t, const uint8_t *stored, int64_t first_flag)
{
    uint32_t lacking = 0;
    for (uint32_t tensor = 0; tensor < t->tensors; tensor++) lacking += stored[first_flag + tensor] == 0;
    return lacking == 0;
}

/* Computes id i of a transfer, and, if a piece begins with it, the address of the piece. stored: as in
 * ibp_plan_pages. */
IBP_INLINE void ibp_plan_id(const ibp_page_transfer *t, const uint8_t *stored, int64_t i, int64_t *ids,
                            uint64_t *addresses)
{
    const int64_t per_page = (int64_t)t->tensors * t->ids_per_block, k = i / per_page, in_page = i - k * per_page;
    const int64_t page = IBP_LOAD_ONCE(t->pages[k]), block = IBP_LOAD_ONCE(t->blocks[k]);
    const uint32_t ids_per_piece = t->ids_per_block / t->pieces;
    const bool is_there = page >= 0 && page < t->num_pages && block >= 0 && block < t->num_blocks;
    const int64_t first_flag = is_there ? page * t->num_tensors + t->first_tensor : 0;
    const bool has_rows = is_there && (!stored || ibp_is_stored_page(t, stored, first_flag));
    ids[i] = has_rows ? first_flag * t->ids_per_block + in_page : -1;
    if (in_page % ids_per_piece != 0) return;
    const uint64_t from = !is_there         ? t->scratch
                          : t->block_starts ? t->block_starts[block]
                                            : (uint64_t)block * (uint64_t)t->block_stride;
    addresses[i / ids_per_piece] = from + (is_there ? t->starts[in_page / ids_per_piece] : 0u);
}

/* Returns whether a row of a place is lost: its entries of lengths and rooms say that it is raw but has no overflow
 * part. So it is not stored. A row that does not exist counts as lost. rooms: NULL if slots hold whole rows. */
IBP_INLINE bool ibp_is_lost_row(const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows, int64_t row)
{
    if (row < 0 || row >= num_rows) return true;
    return rooms && lengths[row] == 0 && rooms[row] == 0;
}

#endif
