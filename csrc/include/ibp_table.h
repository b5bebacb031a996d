/* ibp_table.h - tables of rows (sections 1 to 3 of FORMAT.md): measured, indexed, coded, gathered, decoded.
 *
 *     ibp_status three_items(const ibp_table *table, uint8_t *out, void *scratch) // items 7, 0 and 7
 *     {
 *         const int32_t numbers[3] = {7, 0, 7};
 *         ibp_ids ids = {0};
 *         ids.data = numbers;
 *         ids.count = 3;
 *         ids.id_bytes = sizeof numbers[0];
 *         ibp_fault fault = {0};
 *         const size_t scratch_bytes = ibp_scratch_bytes(table->codebook.row_bytes);
 *         return ibp_gather_items(table, &ids, 0, 3, out, scratch, scratch_bytes, &fault);
 *     }
 */
#ifndef IBP_TABLE_H
#define IBP_TABLE_H

#include "ibp_codebook.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a table's bytes are and how they are coded; the caller keeps all arrays. Host pointers here; device-accessible
 * ones in ibp_cuda.h. */
typedef struct ibp_table {
    int64_t num_items;       /* items of the original tensor */
    int64_t item_bytes;      /* bytes of one item; all items have less than INT64_MAX / 32 bytes */
    const uint8_t *slots;    /* NULL if slots_bytes is 0 */
    const uint8_t *overflow; /* NULL if overflow_bytes is 0 */
    const uint16_t *lengths; /* one a row, or NULL: every row is raw; NULL in scheme raw */
    const uint64_t *bases;   /* one for rows_per_base rows, or NULL: no overflow parts */
    int64_t slots_bytes;
    int64_t overflow_bytes;
    uint64_t slots_start, overflow_start; /* which byte of the whole table's slots and overflow they begin with: 0, but
                                             for a block of its rows */
    uint32_t slot_bytes;                  /* 0, row_bytes, or a multiple of IBP_OVERFLOW_ALIGN below row_bytes */
    ibp_codebook codebook;
    uint32_t rows_per_base; /* 0 or IBP_ROWS_PER_BASE: rooms in the rows' order; 1: every row has a base, and its part
                               lies anywhere */
} ibp_table;

/* The entry of lengths of a default row, which has no bytes (section 2). */
#define IBP_DEFAULT_LENGTH(row_bytes) ((row_bytes) < 65535u ? (row_bytes) : 65535u)

#define IBP_ROWS_PER_BASE 32u  /* rows that share an entry of bases where their rooms are in order (section 2) */
#define IBP_OVERFLOW_ALIGN 32u /* bytes: the unit of overflow rooms and slots (section 3), a sector of GPU memory */

/* Whether the fields of a table fit each other, and ibp_check_codebook of its codebook. Its rows and index are not
 * read: what is wrong in them is found row by row. Host pointers only. @return IBP_INVALID_ARGUMENT if not. */
IBP_API ibp_status ibp_check_table(const ibp_table *table);

/* Rows of a table: ceil(num_items * item_bytes / row_bytes). 0 if these are out of range. */
IBP_API int64_t ibp_num_rows(const ibp_table *table);

/* lengths[r] for rows 0 to num_rows - 1 of data (num_bytes bytes, the last row may be short): IBP_DEFAULT_LENGTH for
 * a default row, else the coded size, or 0 if that is not smaller. */
IBP_API ibp_status ibp_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                    uint16_t *lengths, void *scratch, size_t scratch_bytes);

/* Fills bases (ceil(num_rows / IBP_ROWS_PER_BASE) entries) for the given slot size, and *overflow_bytes with the size
 * that overflow must have, for a table whose rooms are in the rows' order. lengths: num_rows entries as
 * ibp_measure_rows makes them, or NULL (all rows raw). num_rows = ceil(num_bytes / row_bytes). */
IBP_API ibp_status ibp_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes,
                                  uint64_t *bases, int64_t *overflow_bytes);

/* Codes the rows first_row to last_row - 1 of data into slots and overflow, which have the sizes that the table says;
 * table->slots and table->overflow are not read. Zeros follow each part, to the end of its slot or overflow room. data:
 * the whole tensor. Stops at the first row that it cannot code, noted in *fault if that is still clear.
 * @return IBP_CORRUPT_ROW if table->lengths does not belong to data, IBP_BUFFER_TOO_SMALL if a part lies outside its
 * array. */
IBP_API ibp_status ibp_encode_rows(const ibp_table *table, const uint8_t *data, int64_t first_row, int64_t last_row,
                                   uint8_t *slots, uint8_t *overflow, void *scratch, size_t scratch_bytes,
                                   ibp_fault *fault);

#define IBP_MAX_OUT_DIMS 4u

/* Item ids of a gather: int32_t (id_bytes 4) or int64_t (id_bytes 8); id_bytes 0, with no data: the items 0, 1, 2 and
 * so on. Item k goes to position positions[k] of the output, which has out_items positions; a position past them is
 * left out and noted as IBP_INDEX_OUT_OF_RANGE. positions NULL: to position k.
 * Positions lie one after the other, item_bytes each, or, where num_dims is not 0, as the items of a strided tensor:
 * they are numbered in row-major order of num_dims dimensions, of sizes[d] each, and that of index (i0, i1, ...) begins
 * at byte i0 * strides[0] + i1 * strides[1] + ... of the output. No two may share a byte.
 * With addresses, position p begins there and nowhere else: the output is several pieces of memory, such as the blocks
 * of a paged cache. They are trusted, as `out` is, which is not read then; positions and num_dims are NULL and 0. */
typedef struct ibp_ids {
    const void *data;
    int64_t count;
    uint32_t id_bytes;
    const uint32_t *positions;
    int64_t out_items;                 /* read where there are positions */
    uint32_t num_dims;                 /* at most IBP_MAX_OUT_DIMS */
    int64_t sizes[IBP_MAX_OUT_DIMS];   /* at least 1; as many positions in all as there are items to put, or more */
    int64_t strides[IBP_MAX_OUT_DIMS]; /* bytes, at least 0 */
    const uint64_t *addresses;         /* NULL, or one for each of count items */
    int64_t from_end;                  /* added to ids below 0: num_items, so that they count from the end, or 0 */
} ibp_ids;

/* out[k] = item ids[k], for first <= k < last, item_bytes bytes each; out points to position 0. With positions,
 * out[positions[k]]. A bad id or a corrupt row leaves zeros in its place and is noted in *fault if that is still clear.
 * @return the first fault's status, or IBP_OK. */
IBP_API ibp_status ibp_gather_items(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last,
                                    uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault);

/* out = bytes [start, end) of the original tensor, 0 <= start <= end <= num_items * item_bytes. Otherwise as
 * ibp_gather_items.
 * @return IBP_INVALID_ARGUMENT for another range. */
IBP_API ibp_status ibp_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, void *scratch,
                                    size_t scratch_bytes, ibp_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
