/* ibp_coding.h - computes the size of a coded row on the CPU; counts bits and hits, and fills memory, on a GPU. */
#ifndef IBP_CODING_H
#define IBP_CODING_H

#include "ibp_cuda_device.h"
#include "ibp_learn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the exact size of a coded row, whether or not it is smaller than the row, without coding it. Returns
 * IBP_NO_CODED_FORM if the codebook cannot code the row. Returns 0 for an invalid argument, such as a codebook of
 * scheme raw. The result may also be 0 if ibp_check_codebook refuses the codebook's arrays.
 *
 * row: codebook->row_bytes bytes.
 * scratch, scratch_bytes: at least ibp_scratch_bytes(codebook->row_bytes) bytes. */
IBP_API size_t ibp_coded_row_bytes(const ibp_codebook *codebook, const uint8_t *row, void *scratch,
                                   size_t scratch_bytes);

/* ---- on a GPU --------------------------------------------------------------------------------------------------- */

/* Counts bits on a GPU as ibp_count_bits does, and adds the counts to `counts`. */
IBP_API ibp_status ibp_cuda_count_bits(const uint8_t *data, size_t num_rows, uint32_t row_bytes, uint64_t *counts,
                                       ibp_stream stream);
/* Counts hits on a GPU as ibp_count_hits does, and adds the counts to `hits`. */
IBP_API ibp_status ibp_cuda_count_hits(const ibp_codebook *codebook, const uint8_t *data, size_t num_rows,
                                       uint64_t *hits, ibp_stream stream);
/* Sets each of num_bytes bytes of device memory to `value`, for example to prepare the arrays of an ibp_place. */
IBP_API ibp_status ibp_cuda_fill(void *memory, uint8_t value, size_t num_bytes, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
