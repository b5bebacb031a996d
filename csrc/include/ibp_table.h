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

/* Adds to survey[0] the bytes of the rows as stored and to survey[1 + k] how many of them take k sectors of
 * IBP_OVERFLOW_ALIGN bytes; one that claims to be longer than a row counts as a row of all sectors. lengths: num_rows
 * entries. survey: 2 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) entries, set to 0 by the caller. */
IBP_API ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey);

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

/* ---- large tables ----------------------------------------------------------------------------------------------- */

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

/* ---- vectors that matrices of a stack multiply ------------------------------------------------------------------- */

#define IBP_MOST_OF_A_GROUP 8
#define IBP_MOST_GROUPED 1024 /* vectors of a call */
#define IBP_MOST_STACKED 4096 /* matrices of a call */

/* Vectors number first to first + count - 1, which matrix number `matrix` of a stack multiplies. */
typedef struct {
    uint32_t matrix, first, count; /* count: at most IBP_MOST_OF_A_GROUP */
} ibp_vector_group;

/* Puts vectors in the order of their matrices and makes groups of them, for ibp_cuda_linear_groups. ids: the matrix of
 * each vector, at most IBP_MOST_GROUPED, without positions. A vector whose matrix is not there comes last and is in no
 * group.
 * order [ids->count]: the vectors' numbers in their order, which is kept among those of a matrix. groups [num_groups]:
 * of vectors in that order, then groups of no vectors. num_groups: at least the smaller of ids->count and num_matrices,
 * and ids->count / IBP_MOST_OF_A_GROUP more. num_matrices: at most IBP_MOST_STACKED. */
IBP_API ibp_status ibp_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order, ibp_vector_group *groups,
                                     int64_t num_groups);

#define IBP_MOST_LISTED 16 /* stacks whose rows are listed */

/* Which matrices are asked for: matrix held[s] is in slot s. */
typedef struct {
    int64_t *slots;      /* [ids]: of the matrix that each id asks for */
    int64_t *held;       /* [num_slots]: -1 in slots that are left over */
    int64_t *rows;       /* of each stack [num_slots * num_rows[stack]], one stack after the other: the numbers of the
                            matrices' rows, zeros in slots that are left over */
    uint64_t *num_spare; /* NULL, or added to: how many slots are left over */
    int64_t num_slots;   /* at least the smaller of ids->count and num_matrices + 1 */
    int64_t num_rows[IBP_MOST_LISTED]; /* of a matrix of each stack, at least 1 */
    uint32_t num_stacks;
} ibp_listed;

/* Lists the matrices that ids ask for in the order of their numbers, each once, and the rows that each has in several
 * stacks. ids: without positions. An id that is out of range asks for matrix num_matrices, at most IBP_MOST_STACKED,
 * which no stack has. */
IBP_API ibp_status ibp_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed);

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
