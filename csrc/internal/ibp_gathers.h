/* ibp_gathers.h - gathers of several tables, ids in the order of windows, and selections of items as they are stored.
 */
#ifndef IBP_GATHERS_H
#define IBP_GATHERS_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- several tables ---------------------------------------------------------------------------------------------- */

/* What is asked of one table among several: its items at ids, as by ibp_cuda_gather_items, or, where ids is NULL, all
 * of its bytes, as by ibp_cuda_decode_bytes. */
typedef struct ibp_gather {
    const ibp_table *table;
    const ibp_ids *ids;
    uint8_t *out;
    ibp_fault *fault;
} ibp_gather;

/* All gathers, in any order. Of every 32 a launch does all that the same kernel decodes: tables of one scheme, element
 * size and about one row length. Longer rows than 2 KiB have launches of their own. */
IBP_API ibp_status ibp_cuda_gather_tables(const ibp_gather *gathers, int64_t num_gathers, int max_sms,
                                          ibp_stream stream);

/* ---- ids by windows --------------------------------------------------------------------------------------------- */

#define IBP_MAX_WINDOWS 65536

/* Windows of 2^window_bits items that num_items items fall into: at least 1; 0 for a window_bits above 62 or negative
 * num_items. */
IBP_API int64_t ibp_num_windows(int64_t num_items, uint32_t window_bits);

/* Bytes of workspace, 8-byte aligned, that a partition of count ids needs; 0 for arguments that ibp_partition_ids
 * refuses. */
IBP_API size_t ibp_partition_workspace_bytes(int64_t count, int64_t num_items, uint32_t window_bits);

/* Puts ids in the order of the windows of 2^window_bits items that they lie in, so that a gather goes through the table
 * once: sorted_ids[k] = ids[positions[k]], sorted_ids of the type of ids; inside a window their order is kept. An id
 * out of range counts to the nearest window. ids->positions is not read. If ids change during the call, positions still
 * holds each of the numbers 0 to count - 1 once, and each sorted id is one of the values that stood at its position.
 * @return IBP_INVALID_ARGUMENT for more than UINT32_MAX ids, more than IBP_MAX_WINDOWS windows or a negative num_items.
 */
IBP_API ibp_status ibp_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                     void *sorted_ids, uint32_t *positions);
/* As ibp_partition_ids, but for the order inside a window, which may be any. */
IBP_API ibp_status ibp_cuda_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                          void *sorted_ids, uint32_t *positions, ibp_stream stream);

/* ---- selections -------------------------------------------------------------------------------------------------- */

/* A selection is the table of the items ids[0], ids[1], ... in packed layout (section 3), its rows copied as they are
 * stored. Its row q is row q % n of item ids[q / n], n = item_bytes / row_bytes; the functions fail with
 * IBP_INVALID_ARGUMENT unless that is whole.
 *
 * For its rows first_row to last_row - 1: lengths[q - first_row], where the table has lengths, and the sum of their
 * stored bytes.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a length above row_bytes), noted in *fault if that is still clear.
 */
IBP_API ibp_status ibp_measure_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row,
                                         int64_t last_row, uint16_t *lengths, uint64_t *stored_bytes, ibp_fault *fault);
/* Copies its rows first_row to last_row - 1, as stored, back to back to dst, which has room for dst_bytes.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a row that lies outside the table or does not fit dst), noted
 * likewise. */
IBP_API ibp_status ibp_copy_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                                      uint8_t *dst, uint64_t dst_bytes, ibp_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
