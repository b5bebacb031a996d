/* ibp_cuda_rows.h - the CUDA twins of ibp_table.h and ibp_place.h.
 *
 *     // Gathers 32 items. The arrays of the table, ids, out and *fault are in memory that the device can use.
 *     ibp_status gather_32(const ibp_table *table, const int64_t *ids, uint8_t *out, ibp_fault *fault,
 *                          ibp_stream stream)
 *     {
 *         ibp_ids wanted = {0};
 *         wanted.data = ids;
 *         wanted.count = 32;
 *         wanted.id_bytes = sizeof ids[0];
 *         return ibp_cuda_gather_items(table, &wanted, out, fault, 0, stream);
 *     }
 */
#ifndef IBP_CUDA_ROWS_H
#define IBP_CUDA_ROWS_H

#include "ibp_cuda_device.h"
#include "ibp_table.h"
#include "ibp_place.h"

#ifdef __cplusplus
extern "C" {
#endif

/* As ibp_measure_rows. */
IBP_API ibp_status ibp_cuda_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                         uint16_t *lengths, ibp_stream stream);

/* Works out on a stream where the overflow parts of a table's rows lie and how large overflow must be, as
 * ibp_index_rows does.
 *
 * lengths, bases, overflow_bytes: memory that the device can use. *overflow_bytes is an int64_t there, which the caller
 *   copies to the host to allocate overflow. lengths may be NULL: all rows are raw. */
IBP_API ibp_status ibp_cuda_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                       uint32_t slot_bytes, uint64_t *bases, int64_t *overflow_bytes,
                                       ibp_stream stream);
/* As ibp_survey_rows; adds to survey. */
IBP_API ibp_status ibp_cuda_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                        uint64_t *survey, ibp_stream stream);
/* As ibp_encode_rows for all rows of data. Writes exactly the bytes that ibp_encode_rows does.
 * *fault (device-accessible, may be NULL) notes a row whose lengths entry does not belong to data. */
IBP_API ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                        ibp_fault *fault, ibp_stream stream);
/* As ibp_move_parts. */
IBP_API ibp_status ibp_cuda_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow,
                                       ibp_stream stream);
/* Codes the rows of a source into a place: row i becomes row row_ids[i] of the table, or first_row + i where row_ids is
 * NULL. One launch: nothing is measured before, allocated or asked of the host, and all of it can be captured; where
 * overflow parts lie differs from run to run, the bytes of rows do not. place->slots, place->overflow and the source
 * may be device memory or mapped pinned host memory, each for itself; everything else is device memory.
 *
 * A row that does not shrink is stored raw, one that equals the default as the marker of section 2. Where overflow has
 * no room for a row's part, the row is lost: its base becomes IBP_NO_BASE and its length 0, so that reading it is a
 * fault, and it is counted. A source row with fewer bytes than the table's row has zeros behind them; of one with more
 * the first are taken. Bytes of a slot or room behind a row's own are zeros up to a multiple of IBP_OVERFLOW_ALIGN, or
 * stay as they were.
 * Rows of a place that is_new are treated as ibp_place.h says. Packed rows are refused.
 * row_ids: an id outside the table is noted as IBP_INDEX_OUT_OF_RANGE, and its row left out. Ids must differ. If some
 * are equal and the table has bases, the row is coded for one of them, and equal ids whose turn comes meanwhile are
 * left out and noted as IBP_INVALID_ARGUMENT; without bases the row holds anything. No other row is harmed.
 * lengths, bases and rooms of the place are not trusted: a part that does not lie in overflow is none.
 * fault: device-accessible, or NULL. max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                        int64_t first_row, ibp_fault *fault, int max_sms, ibp_stream stream);

/* Gathers all items of `ids`, as ibp_gather_items does. An id out of range and an item with a corrupt row leave zeros
 * in their place; all other items are right.
 *
 * table: its slots and overflow may be in device memory or in mapped pinned host memory, from which the kernel reads
 *   the rows that it needs over the link. Lengths, bases and the arrays of the codebook are best in device memory. The
 *   struct itself is read before the function returns.
 * ids: the struct is in host memory, its arrays are memory that the device can use.
 * out: position 0 of the output.
 * fault: memory that the device can write, zero before the call. Of all faults it receives the one that a warp meets
 *   first; read it after the stream is synchronised.
 * max_sms: how many SMs the kernel may keep busy at most; 0: all. Rows that come over the link need few.
 * stream: the work is queued here; the function does not wait for it.
 * @return IBP_OK if the arguments are right and the work is queued; what it finds is in *fault. */
IBP_API ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

/* Decodes bytes [start, end) of a table, as ibp_decode_bytes does. The memory of the other arguments, max_sms and the
 * result are as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                                         ibp_fault *fault, int max_sms, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
