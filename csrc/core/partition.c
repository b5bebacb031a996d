/* partition.c - sorts ids by the windows of a table with a counting sort. */
#include "../internal/ibp_gathers.h"
#include "ids.h"

#include <string.h>

_Static_assert(IBP_MAX_WINDOWS <= UINT16_MAX + 1, "a window's number has 16 bits");

int64_t ibp_num_windows(int64_t num_items, uint32_t window_bits)
{
    if (window_bits > 62 || num_items < 0) return 0;
    return num_items == 0 ? 1 : ((num_items - 1) >> window_bits) + 1;
}

/* Returns the size in bytes of the workspace that ibp_cuda_partition_ids needs; the CPU function needs less. It holds
 * the starts and counts of the windows, the rank of every id in its window, and the window of every id in 16 bits. */
size_t ibp_partition_workspace_bytes(int64_t count, int64_t num_items, uint32_t window_bits)
{
    const int64_t num_windows = ibp_num_windows(num_items, window_bits);
    if (num_windows < 1 || num_windows > IBP_MAX_WINDOWS || count < 0 || count > UINT32_MAX) return 0;
    return sizeof(uint32_t) * (size_t)(2 * num_windows + count) + sizeof(uint16_t) * (size_t)count;
}

static int64_t window_of(int64_t id, int64_t num_items, uint32_t window_bits)
{
    const int64_t below_end = id < num_items ? id : num_items - 1;
    return (below_end > 0 ? below_end : 0) >> window_bits;
}

ibp_status ibp_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                             void *sorted_ids, uint32_t *positions)
{
    const int64_t num_windows = ibp_num_windows(num_items, window_bits);
    if (!ibp_are_ids(ids, 0, ids->count) || ids->id_bytes == 0 || ids->count > UINT32_MAX) return IBP_INVALID_ARGUMENT;
    if (num_windows < 1 || num_windows > IBP_MAX_WINDOWS) return IBP_INVALID_ARGUMENT;
    uint32_t *const starts = workspace, *const counts = starts + num_windows;
    /* The window of each id as it was counted, because ids may change meanwhile. */
    uint16_t *const windows = (uint16_t *)(counts + num_windows);
    memset(counts, 0, sizeof(uint32_t) * (size_t)num_windows);
    for (int64_t k = 0; k < ids->count; k++) {
        windows[k] = (uint16_t)window_of(ibp_id_at(ids, k), num_items, window_bits);
        counts[windows[k]]++;
    }
    for (uint32_t w = 0, end = 0; w < num_windows; end += counts[w], w++) starts[w] = end;
    for (int64_t k = 0; k < ids->count; k++) {
        const uint32_t to = starts[windows[k]]++;
        memcpy((uint8_t *)sorted_ids + (size_t)to * ids->id_bytes,
               (const uint8_t *)ids->data + (size_t)k * ids->id_bytes, ids->id_bytes);
        positions[to] = (uint32_t)k;
    }
    return IBP_OK;
}
