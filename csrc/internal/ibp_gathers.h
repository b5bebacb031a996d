/* ibp_gathers.h - gathers items of several tables, sorts ids by windows, and selects items as they are stored. */
#ifndef IBP_GATHERS_H
#define IBP_GATHERS_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- several tables ---------------------------------------------------------------------------------------------- */

/* A gather from one of several tables. If ids is not NULL, the gather returns the items of ids, as
 * ibp_cuda_gather_items does. If ids is NULL, it returns all bytes of the table, as ibp_cuda_decode_bytes does. */
typedef struct ibp_gather {
    const ibp_table *table;
    const ibp_ids *ids;
    uint8_t *out;
    ibp_fault *fault;
} ibp_gather;

/* Performs all gathers, in any order. It takes 32 gathers at a time, or max_sms gathers if max_sms is smaller and not
 * 0. Among these, gathers share one launch if the same kernel decodes them, which is the case if their tables have the
 * same scheme, the same element size and similar row lengths. There are two exceptions, which have separate launches:
 * tables with rows above 2 KiB, and tables with slots in device memory and much overflow in host memory. */
IBP_API ibp_status ibp_cuda_gather_tables(const ibp_gather *gathers, int64_t num_gathers, int max_sms,
                                          ibp_stream stream);

/* ---- ids by windows --------------------------------------------------------------------------------------------- */

/* A window is a run of 2^window_bits consecutive items of a table. */
#define IBP_MAX_WINDOWS 65536

/* Returns the number of windows of a table of num_items items, at least 1; 0 if window_bits is above 62 or num_items is
 * negative. */
IBP_API int64_t ibp_num_windows(int64_t num_items, uint32_t window_bits);

/* Returns the size in bytes of the workspace for sorting `count` ids, which must be aligned to 8 bytes; 0 for arguments
 * that ibp_partition_ids refuses. */
IBP_API size_t ibp_partition_workspace_bytes(int64_t count, int64_t num_items, uint32_t window_bits);

/* Sorts ids by windows, so that a gather goes through the table only once, from its beginning to its end. Ids in the
 * same window keep their order.
 *
 * ids: ids->positions is not read. An id out of range is sorted into the nearest window.
 * workspace: ibp_partition_workspace_bytes bytes, aligned to 8.
 * sorted_ids, positions: ids->count entries each; sorted_ids[k] = ids[positions[k]]. sorted_ids has the type of ids. If
 *   another thread changes ids during the call, positions is still a permutation of 0 to count - 1, and sorted_ids[k]
 *   is a value that ids[positions[k]] had at some time during the call.
 * @return IBP_INVALID_ARGUMENT if there are more than UINT32_MAX ids or more than IBP_MAX_WINDOWS windows, or if
 * num_items is negative. */
IBP_API ibp_status ibp_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                     void *sorted_ids, uint32_t *positions);
/* Sorts ids on a GPU as ibp_partition_ids does, except that the order of ids in the same window is not specified. */
IBP_API ibp_status ibp_cuda_partition_ids(const ibp_ids *ids, int64_t num_items, uint32_t window_bits, void *workspace,
                                          void *sorted_ids, uint32_t *positions, ibp_stream stream);

/* ---- selections -------------------------------------------------------------------------------------------------- */

/* A selection is the table of the items ids[0], ids[1], ... in packed layout (section 3). Its rows are copied as they
 * are stored. Row q of the selection is row q % n of item ids[q / n], where n = item_bytes / row_bytes. The functions
 * return IBP_INVALID_ARGUMENT unless n is a whole number. */

/* Finds the lengths of the rows first_row to last_row - 1 of a selection, and the sum of their stored bytes.
 *
 * lengths: lengths[q - first_row] receives the entry of row q, if the table has lengths.
 * stored_bytes: receives the sum.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a length above row_bytes), which is noted in *fault if *fault is
 * still zero. */
IBP_API ibp_status ibp_measure_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row,
                                         int64_t last_row, uint16_t *lengths, uint64_t *stored_bytes, ibp_fault *fault);
/* Copies the rows first_row to last_row - 1 of a selection, as they are stored, back to back to dst.
 *
 * dst: receives the rows. dst_bytes: size of dst in bytes.
 * @return IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW (a row that lies outside the table or does not fit in dst), which
 * is noted in *fault if *fault is still zero. */
IBP_API ibp_status ibp_copy_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                                      uint8_t *dst, uint64_t dst_bytes, ibp_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
