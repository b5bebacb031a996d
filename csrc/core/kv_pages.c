/* kv_pages.c - plans transfers of pages of a KV-cache, and notes which of their blocks are stored. */
#include "kv_pages.h"

ibp_status ibp_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids, uint64_t *addresses)
{
    if (!ibp_is_page_transfer(transfer)) return IBP_INVALID_ARGUMENT;
    const int64_t count = ibp_num_transfer_ids(transfer);
    for (int64_t i = 0; i < count; i++) ibp_plan_id(transfer, stored, i, ids, addresses);
    return IBP_OK;
}

ibp_status ibp_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block, const uint16_t *lengths,
                          const uint16_t *rooms, int64_t num_rows, uint8_t *stored, uint8_t *seen)
{
    if (num_blocks < 0 || num_rows < 0 || ids_per_block == 0 || num_rows % ids_per_block != 0)
        return IBP_INVALID_ARGUMENT;
    for (int64_t b = 0; b < num_blocks; b++) {
        const int64_t *const rows = ids + b * ids_per_block;
        const int64_t first = IBP_LOAD_ONCE(rows[0]), flag = first / ids_per_block;
        if (first < 0 || first >= num_rows) continue;
        bool lost = false;
        for (uint32_t r = 0; r < ids_per_block; r++)
            lost = lost || ibp_is_lost_row(lengths, rooms, num_rows, IBP_LOAD_ONCE(rows[r]));
        stored[flag] = seen[flag] = !lost;
    }
    return IBP_OK;
}
