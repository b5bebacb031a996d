/* ibp_delta.h - fingerprints (section 10 of FORMAT.md) and deltas. A delta is a table of the differences between two
 * versions of a tensor (section 9). On a GPU, one call makes or applies the deltas of many tensors.
 *
 *     // state: 1 + 3 * num_tensors zeros in device memory. The first entry receives an ibp_delta_verdict.
 *     ibp_status apply(const ibp_codebook *codebook, const ibp_delta_tensor *tensors, uint32_t num_tensors,
 *                      int64_t num_rows, uint64_t *state, ibp_stream stream)
 *     {
 *         if (!ibp_cuda_applies_deltas(codebook)) return IBP_INVALID_ARGUMENT;
 *         return ibp_cuda_apply_deltas(codebook, tensors, num_tensors, num_rows, false, state, stream);
 *     }
 */
#ifndef IBP_DELTA_H
#define IBP_DELTA_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- fingerprints (section 10) ---------------------------------------------------------------------------------- */

/* Adds to *sum what a part of a tensor contributes to the tensor's fingerprint. The parts of a tensor may be added in
 * any order.
 *
 * part, num_bytes: the bytes of the part, at any alignment. num_bytes is a multiple of 8 except for the last part.
 * first_word: the index in the tensor of the part's first word. Words have 8 bytes. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* Returns the fingerprint of a tensor of num_bytes bytes.
 *
 * sum: a number that starts at 0, and to which ibp_sum_words has added every part of the tensor. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Returns the fingerprint of num_bytes bytes at any alignment. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* Adds the rows first_row to last_row - 1 of a table of differences to a tensor, or subtracts them. It adds and
 * subtracts element by element, modulo 2^(8 * element_bytes). A corrupt row is skipped, both when rows are added and
 * when they are subtracted; the other rows are still processed. If *fault is still zero, it receives the first corrupt
 * row. Several threads may process different rows of one table at the same time.
 *
 * base: the whole tensor, at any alignment. It has the same number of bytes as the table's tensor.
 * change: the change of the tensor's sum of words (ibp_sum_words) is added to *change.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) + row_bytes bytes.
 * @return IBP_OK; the status of the first corrupt row; or IBP_INVALID_ARGUMENT, also if row_bytes is not a multiple of
 * 8. */
IBP_API ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                                int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                                ibp_fault *fault);

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Adds to *sum on a GPU as ibp_sum_words does. sum is aligned to 8 bytes. */
IBP_API ibp_status ibp_cuda_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                                      ibp_stream stream);

/* A tensor whose delta a call makes or applies. An array of these structs, one for each tensor, is in device memory.
 * The rows of all tensors are numbered in one sequence. In this sequence the number of each tensor's first row is a
 * multiple of IBP_ROWS_PER_BASE, so there may be numbers that belong to no tensor. The addresses base and newer must be
 * multiples of the size of an element. */
typedef struct ibp_delta_tensor {
    uint8_t *base;        /* num_bytes bytes; written if a delta is applied, or if updates_bases is true */
    const uint8_t *newer; /* num_bytes bytes; read if a delta is made */
    int64_t num_bytes;    /* a whole number of elements */
    int64_t first_row;    /* number of the tensor's first row in the sequence; 0 for the first tensor, and larger for
                             each following one */
    /* The next four fields are the tensor's table of differences. Its layout is packed (section 3). They are read if a
     * delta is applied. */
    const uint16_t *lengths; /* an entry for each row of the tensor */
    const uint64_t *bases;   /* an entry for every IBP_ROWS_PER_BASE rows; or NULL if all rows are default rows */
    const uint8_t *overflow;
    int64_t overflow_bytes;
    uint64_t base_sum, result_sum; /* the sums of words (ibp_sum_words) of the base before and after the delta is
                                      applied */
} ibp_delta_tensor;

/* ibp_cuda_makes_deltas returns whether deltas can be made with a codebook, and ibp_cuda_applies_deltas whether they
 * can be applied. For both, the codebook's rows must be listed, row_bytes must be a multiple of 16 and at most 8192,
 * and the default value must be 0. The codebook must have no clusters, constant columns, invariant bits or signed
 * default. To make deltas, there are three more conditions: symbols are whole elements that are not rotated, entries
 * are not consecutive, and the closed value is 1. */
IBP_API bool ibp_cuda_makes_deltas(const ibp_codebook *codebook);
IBP_API bool ibp_cuda_applies_deltas(const ibp_codebook *codebook);

/* Number of entries that each row has in the array of counts, which ibp_cuda_measure_deltas writes and
 * ibp_cuda_encode_deltas reads. */
#define IBP_DELTA_COUNTS 8u

/* For all tensors, measures how many bytes each row of the differences newer - base takes when it is coded. Differences
 * are computed element by element, modulo 2^w, where w is the number of bits of an element.
 *
 * codebook: its entries must be -1, 1, -2, 2, ...; the function does not check this.
 * num_rows: number of rows of the sequence, a multiple of IBP_ROWS_PER_BASE. Rows that belong to no tensor become
 *   default rows.
 * lengths: receives an entry for each row, as ibp_measure_rows makes them.
 * counts: num_rows * IBP_DELTA_COUNTS entries; receives counts of each row, which ibp_cuda_encode_deltas reads.
 * sums: 2 * num_tensors numbers, set to 0 by the caller. sums[2 * k] receives the sum of the words of tensor k's base,
 *   and sums[2 * k + 1] the sum of the words of its newer version. */
IBP_API ibp_status ibp_cuda_measure_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                           uint32_t num_tensors, int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                                           uint64_t *sums, ibp_stream stream);
/* Codes the differences that ibp_cuda_measure_deltas has measured. Writes the coded rows to overflow, in the order of
 * the sequence. Rows that would lie outside overflow are skipped. If a tensor has changed since it was measured, its
 * coded rows are meaningless, but nothing is written outside overflow.
 *
 * bases: as ibp_cuda_index_rows makes them from lengths for num_rows * row_bytes bytes. So a raw row takes row_bytes
 *   bytes of overflow, even if it is the short last row of a tensor.
 * updates_bases: if true, the rows that are coded are also copied from `newer` to `base`. Words of 8 bytes that are
 *   equal in both are not written. */
IBP_API ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                          uint32_t num_tensors, int64_t num_rows, const uint16_t *lengths,
                                          const uint16_t *counts, const uint64_t *bases, uint8_t *overflow,
                                          int64_t overflow_bytes, bool updates_bases, ibp_stream stream);

/* The outcome of a call of ibp_cuda_apply_deltas. */
typedef enum ibp_delta_verdict {
    IBP_DELTA_APPLIED = 0,
    IBP_DELTA_OTHER_BASE = 1, /* the sum of a base differs from its base_sum; nothing was written */
    IBP_DELTA_DAMAGED = 2     /* a row is corrupt, or the sum of a result differs from its result_sum; all changes were
                                 undone */
} ibp_delta_verdict;

/* Adds the differences of all tensors to their bases. If a base, a row or a result is wrong, all bases keep their
 * bytes. Default rows, which have no differences, are not written. A base must not overlap another base or any other
 * memory that the call reads. Lengths, bases and coded rows are checked, so they may come from elsewhere.
 *
 * takes_back: if true, undoes the changes of an earlier call. `state` must then be what that call wrote, with the first
 *   entry set to IBP_DELTA_DAMAGED.
 * state: 1 + 3 * num_tensors entries, set to 0 by the caller. The first entry receives the verdict. The others receive
 *   three numbers for each tensor: the sum of its base's words, the change of that sum that the differences cause, and
 *   1 if a row was corrupt, else 0. */
IBP_API ibp_status ibp_cuda_apply_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                         uint32_t num_tensors, int64_t num_rows, bool takes_back, uint64_t *state,
                                         ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
