/* ibp_delta.h - computes fingerprints (section 10 of FORMAT.md), and adds differences to tensors (section 9). A delta
 * is a table of the differences between two versions of a tensor. On a GPU the deltas of many tensors are made or
 * applied by one launch.
 *
 *     // state: in device memory, 1 + 3 * num_tensors zeros; its first entry becomes the verdict.
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
 * first_word: the number of the part's first 8-byte word in the tensor. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* Returns the fingerprint of a tensor of num_bytes bytes.
 *
 * sum: starts at 0; ibp_sum_words has added all parts of the tensor to it. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Returns the fingerprint of num_bytes bytes at any alignment. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* Adds the rows first_row to last_row - 1 of a table of differences to a tensor, or subtracts them, element by element
 * modulo 2^w. A corrupt row changes nothing, whether it is added or subtracted. It is noted in *fault if *fault is
 * still zero, and the other rows are still processed. Several threads may each take rows of one table.
 *
 * base: the whole tensor, which has the size of the table's tensor, at any alignment.
 * change: the function adds to it the change of the tensor's sum (ibp_sum_words).
 * scratch, scratch_bytes: at least ibp_scratch_bytes(row_bytes) + row_bytes bytes.
 * @return the first fault's status, or IBP_OK; IBP_INVALID_ARGUMENT also if row_bytes is not a multiple of 8. */
IBP_API ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                                int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                                ibp_fault *fault);

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Adds to *sum on a GPU as ibp_sum_words does. sum is aligned to 8 bytes. */
IBP_API ibp_status ibp_cuda_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                                      ibp_stream stream);

/* A tensor whose delta is made or applied together with the deltas of other tensors, by one launch. Arrays of these
 * structs are in device memory. The rows of all tensors are numbered in one sequence, in which the first row of each
 * tensor has a multiple of IBP_ROWS_PER_BASE as its number. Elements may begin at any address that is a multiple of
 * their size. */
typedef struct ibp_delta_tensor {
    uint8_t *base;        /* num_bytes bytes; written if a delta is applied, or if updates_bases is set */
    const uint8_t *newer; /* num_bytes bytes; read if a delta is made */
    int64_t num_bytes;    /* a whole number of elements */
    int64_t first_row;    /* number of the tensor's first row in the sequence; 0 for the first tensor, and larger for
                             each following one */
    /* The tensor's table of differences, in packed layout: read if a delta is applied. */
    const uint16_t *lengths;
    const uint64_t *bases; /* an entry for every IBP_ROWS_PER_BASE rows, or NULL */
    const uint8_t *overflow;
    int64_t overflow_bytes;
    uint64_t base_sum, result_sum; /* sums by ibp_sum_words: of the base, and of the base after the delta has been
                                      applied */
} ibp_delta_tensor;

/* Return whether the functions below can make, or apply, deltas with a codebook. Its rows must be listed, have a
 * multiple of 16 bytes and at most 8192, and have the default 0. It must have no clusters, constant columns, invariant
 * bits or signed default. To make deltas, symbols must also be whole elements that are not rotated, entries must not be
 * consecutive, and the closed value must be 1. */
IBP_API bool ibp_cuda_makes_deltas(const ibp_codebook *codebook);
IBP_API bool ibp_cuda_applies_deltas(const ibp_codebook *codebook);

/* Number of counts of each row that ibp_cuda_measure_deltas passes on to ibp_cuda_encode_deltas. */
#define IBP_DELTA_COUNTS 8u

/* Measures the differences newer - base of all tensors, element by element modulo 2^w.
 *
 * codebook: its entries are -1, 1, -2, 2, ...; the function does not check this.
 * num_rows: number of rows of the sequence, a multiple of IBP_ROWS_PER_BASE. Rows that belong to no tensor are default
 *   rows.
 * lengths: receives an entry for each row, as ibp_measure_rows makes them.
 * counts: receives num_rows * IBP_DELTA_COUNTS entries, for ibp_cuda_encode_deltas.
 * sums: 2 * num_tensors numbers, set to 0 by the caller. sums[2 * k] receives the sum of the words of tensor k's base,
 *   and sums[2 * k + 1] the sum of the words of its newer version. */
IBP_API ibp_status ibp_cuda_measure_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                           uint32_t num_tensors, int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                                           uint64_t *sums, ibp_stream stream);
/* Codes the differences that ibp_cuda_measure_deltas has measured: writes the rows of the sequence back to back to
 * overflow. A row that would not lie inside overflow is left out; this happens if a tensor has changed since it was
 * measured.
 *
 * bases: as ibp_cuda_index_rows makes them from lengths, with slot_bytes 0 and num_bytes = num_rows * row_bytes.
 * updates_bases: if true, `base` of each tensor receives the elements of the newer version in the rows that are coded.
 *   Elements that do not differ are not written. */
IBP_API ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                          uint32_t num_tensors, int64_t num_rows, const uint16_t *lengths,
                                          const uint16_t *counts, const uint64_t *bases, uint8_t *overflow,
                                          int64_t overflow_bytes, bool updates_bases, ibp_stream stream);

/* The outcome of a call of ibp_cuda_apply_deltas. */
typedef enum ibp_delta_verdict {
    IBP_DELTA_APPLIED = 0,
    IBP_DELTA_OTHER_BASE = 1, /* a base does not have the sum base_sum: nothing was written */
    IBP_DELTA_DAMAGED = 2     /* a row is corrupt, or a result does not have the sum result_sum: all changes were
                                 undone */
} ibp_delta_verdict;

/* Adds the differences of all tensors to their bases, or changes no base if a base, a row or a result is wrong. Only
 * the parts of the bases that change are written. Bases must not share memory with anything else. Rows are not trusted.
 *
 * takes_back: if true, undoes the changes of an earlier call. `state` must then be what that call wrote, with the first
 *   entry set to IBP_DELTA_DAMAGED.
 * state: 1 + 3 * num_tensors entries, set to 0 by the caller. The first entry receives the verdict. The others receive
 *   three numbers for each tensor: the sum of its base's words, what its changes added to that sum, and whether rows
 *   were corrupt. */
IBP_API ibp_status ibp_cuda_apply_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                         uint32_t num_tensors, int64_t num_rows, bool takes_back, uint64_t *state,
                                         ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
