/* ibp_delta.h - fingerprints (section 10 of FORMAT.md), and differences added to tensors (section 9).
 *
 *     // fingerprint: of what the tensor has become.
 *     ibp_status add(const ibp_table *differences, uint8_t *tensor, int64_t num_bytes, void *scratch,
 *                    size_t scratch_bytes, uint64_t *fingerprint)
 *     {
 *         ibp_fault fault = {0};
 *         uint64_t sum = 0;
 *         ibp_status status = ibp_sum_words(tensor, num_bytes, 0, &sum);
 *         if (status == IBP_OK)
 *             status = ibp_add_rows(differences, 2, false, 0, ibp_num_rows(differences), tensor, &sum, scratch,
 *                                   scratch_bytes, &fault);
 *         *fingerprint = ibp_finish_fingerprint(sum, num_bytes);
 *         return status;
 *     }
 */
#ifndef IBP_DELTA_H
#define IBP_DELTA_H

#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- fingerprints (section 10) ---------------------------------------------------------------------------------- */

/* Adds to *sum what the words of a part of a tensor add to its fingerprint. part: num_bytes bytes at any alignment,
 * which begin with word first_word of the tensor; a multiple of 8 bytes but for the last part. Parts may come in any
 * order. */
IBP_API ibp_status ibp_sum_words(const uint8_t *part, int64_t num_bytes, uint64_t first_word, uint64_t *sum);

/* The fingerprint of a tensor of num_bytes bytes whose words add up to sum, from 0 on. */
IBP_API uint64_t ibp_finish_fingerprint(uint64_t sum, int64_t num_bytes);

/* Both in one: of num_bytes bytes at any alignment, at least 0. */
IBP_API uint64_t ibp_fingerprint(const uint8_t *data, int64_t num_bytes);

/* ---- deltas (section 9) ------------------------------------------------------------------------------------------ */

/* Adds the rows first_row to last_row - 1 of a table of differences to base, or subtracts them: element by element,
 * modulo 2^w. base: the whole tensor, as many bytes as the table's, at any alignment. *change: what that adds to the
 * sum of ibp_sum_words is added to it. A corrupt row changes nothing, now and when it is subtracted, and is noted in
 * *fault if that is still clear; the others are added all the same. Threads may each take rows of one table.
 * scratch: ibp_scratch_bytes(row_bytes) and row_bytes more.
 * @return the first fault's status, or IBP_OK; IBP_INVALID_ARGUMENT also for rows that are no multiple of 8 bytes. */
IBP_API ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                                int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                                ibp_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
