/* ibp_delta.h - fingerprints (section 10 of FORMAT.md), and differences added to tensors (section 9); on a GPU deltas
 * of many tensors are made or applied by one launch.
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

/* Adds to *sum what a part of a tensor contributes to its fingerprint. part: num_bytes bytes at any alignment, which
 * begin with word first_word of the tensor; num_bytes is a multiple of 8 except for the last part. Parts may come in
 * any order. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* Returns the fingerprint of a tensor of num_bytes bytes, for all of whose parts ibp_sum_words has been called with a
 * sum that was 0 at first. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Returns the fingerprint of num_bytes bytes at any alignment. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* Adds the rows first_row to last_row - 1 of a table of differences to a tensor, or subtracts them, element by element
 * modulo 2^w. A corrupt row changes nothing, neither when it is added nor when it is subtracted; it is noted in *fault
 * if *fault is still zero, and the other rows are added all the same. Threads may each take rows of one table.
 *
 * base: the whole tensor, of as many bytes as the table, at any alignment.
 * change: the call adds to *change what the sum of ibp_sum_words changes by.
 * scratch: ibp_scratch_bytes(row_bytes) and row_bytes more.
 * @return the first fault's status, or IBP_OK; IBP_INVALID_ARGUMENT also if row_bytes is no multiple of 8. */
IBP_API ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                                int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                                ibp_fault *fault);

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Adds to *sum on a GPU as ibp_sum_words does; sum is aligned to 8 bytes. */
IBP_API ibp_status ibp_cuda_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum,
                                      ibp_stream stream);

/* One of the tensors whose deltas are made or applied by one launch; arrays of these are in device memory. The rows of
 * all tensors are numbered in one sequence, in which each tensor's begin with a multiple of IBP_ROWS_PER_BASE. Its
 * elements may begin at any address that is a multiple of their size. */
typedef struct ibp_delta_tensor {
    uint8_t *base;           /* num_bytes bytes; written where a delta is applied, or updates_bases says so */
    const uint8_t *newer;    /* likewise; read where a delta is made */
    int64_t num_bytes;       /* whole elements */
    int64_t first_row;       /* of the sequence; increasing, the first tensor's 0 */
    const uint16_t *lengths; /* the tensor's own packed table of differences: read where a delta is applied */
    const uint64_t *bases;   /* one for IBP_ROWS_PER_BASE rows; NULL: there are none */
    const uint8_t *overflow;
    int64_t overflow_bytes;
    uint64_t base_sum, result_sum; /* of ibp_sum_words: of the base and of what it becomes */
} ibp_delta_tensor;

/* Return whether the functions below take a codebook for making, or for applying, deltas. Its rows are listed, have a
 * multiple of 16 bytes and at most 8192, and the default 0; it has no clusters, constant columns, invariant bits or
 * signed default. For making, symbols must also be whole elements, neither rotated nor consecutive, and the closed
 * value must be 1. */
IBP_API bool ibp_cuda_makes_deltas(const ibp_codebook *codebook);
IBP_API bool ibp_cuda_applies_deltas(const ibp_codebook *codebook);

#define IBP_DELTA_COUNTS 8u /* numbers of a row that measuring leaves for coding */

/* Measures the differences newer - base, element by element modulo 2^w, of all tensors: lengths[r], as
 * ibp_measure_rows, for the num_rows rows of the sequence, a multiple of IBP_ROWS_PER_BASE; rows that belong to no
 * tensor are default rows. The codebook's entries are -1, 1, -2, 2, ..., which is not looked at. counts: num_rows *
 * IBP_DELTA_COUNTS entries, for ibp_cuda_encode_deltas. sums[2 * k] and sums[2 * k + 1], set to 0 by the caller, become
 * the sums of words of tensor k's base and of its newer version. */
IBP_API ibp_status ibp_cuda_measure_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                           uint32_t num_tensors, int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                                           uint64_t *sums, ibp_stream stream);
/* Codes them: the rows of the sequence back to back, as bases say, which ibp_cuda_index_rows has made of lengths as if
 * all rows were whole. What does not lie in overflow, as where a tensor has changed since, is left out.
 * updates_bases: rows that are coded become those of the newer version in their bases; what does not differ is not
 * written. */
IBP_API ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                          uint32_t num_tensors, int64_t num_rows, const uint16_t *lengths,
                                          const uint16_t *counts, const uint64_t *bases, uint8_t *overflow,
                                          int64_t overflow_bytes, bool updates_bases, ibp_stream stream);

/* What has become of a call of ibp_cuda_apply_deltas. */
typedef enum ibp_delta_verdict {
    IBP_DELTA_APPLIED = 0,
    IBP_DELTA_OTHER_BASE = 1, /* a base has another sum than it should: nothing was written */
    IBP_DELTA_DAMAGED = 2     /* a row is corrupt, or a result has another sum: all was undone */
} ibp_delta_verdict;

/* Adds the differences to the bases, all or none of them. state: 1 + 3 * num_tensors entries, set to 0 by the caller:
 * becomes the verdict, and of each tensor the sum of its base's words, what its changes added to that, and whether rows
 * were corrupt. Of the bases only what changes is written; they share no memory with anything else. Rows are not
 * trusted.
 * takes_back: takes the changes of an earlier call back instead, whose state is given with IBP_DELTA_DAMAGED in place
 * of its verdict. */
IBP_API ibp_status ibp_cuda_apply_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *tensors,
                                         uint32_t num_tensors, int64_t num_rows, bool takes_back, uint64_t *state,
                                         ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
