/* ibp_cuda_rows.h - the functions of ibp_table.h and ibp_place.h for GPUs.
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

/* Measures the coded size of each row of a tensor on a stream, as ibp_measure_rows does.
 *
 * codebook: the struct is read before the function returns; its arrays are in device memory.
 * data, lengths: memory that the device can use. */
IBP_API ibp_status ibp_cuda_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                         uint16_t *lengths, ibp_stream stream);

/* Computes on a stream where the overflow parts of a table's rows lie, and how large overflow must be, as
 * ibp_index_rows does.
 *
 * lengths: memory that the device can use; NULL if all rows are raw.
 * bases: memory that the device can use.
 * overflow_bytes: memory that the device can use. The caller copies the int64_t that is written there to the host, to
 *   allocate overflow. */
IBP_API ibp_status ibp_cuda_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                       uint32_t slot_bytes, uint64_t *bases, int64_t *overflow_bytes,
                                       ibp_stream stream);
/* Counts the bytes and the sectors that rows take, on a stream, as ibp_survey_rows does. The counts are added to
 * `survey`.
 *
 * lengths, survey: memory that the device can use. */
IBP_API ibp_status ibp_cuda_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes,
                                        uint64_t *survey, ibp_stream stream);
/* Codes all rows of a tensor on a stream. Writes the same bytes as ibp_encode_rows.
 *
 * table: sizes, codebook, lengths and bases; the struct is read before the function returns.
 * data, slots, overflow: memory that the device can use, such as mapped pinned host memory.
 * fault: memory that the device can write, zero before the call; or NULL. If entries of lengths do not match their rows
 *   in data, *fault receives one of these rows. */
IBP_API ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots, uint8_t *overflow,
                                        ibp_fault *fault, ibp_stream stream);
/* Copies, on a stream, the overflow parts of new rows to the offsets that the index of a table gives them, as
 * ibp_move_parts does.
 *
 * overflow: memory that the device can use. */
IBP_API ibp_status ibp_cuda_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow,
                                       ibp_stream stream);
/* Measures and codes all rows of a source into a place in one launch, as ibp_encode_into does. It allocates nothing and
 * does not wait for the device, so it can be captured in a CUDA graph. The offsets of overflow parts may differ from
 * run to run; the bytes of rows do not.
 *
 * place, source: the structs are read before the function returns. place->slots, place->overflow and the rows of the
 *   source may each be in device memory or in mapped pinned host memory; all other arrays are in device memory. Packed
 *   rows are refused. The bytes between the end of a row and the next multiple of IBP_OVERFLOW_ALIGN, in its slot or
 *   overflow part, become zeros or stay as they were.
 * row_ids: in device memory. If NULL, row i becomes row first_row + i of the table. Ids must differ. If two ids are
 *   equal and the table has bases, the table's row becomes one of the two rows, and the other row may be noted as
 *   IBP_INVALID_ARGUMENT. If two ids are equal and the table has no bases, the table's row may become a mixture of both
 *   rows. Other rows are not affected.
 * fault: memory that the device can write, zero before the call; or NULL.
 * max_sms: largest number of SMs that the kernel may keep busy; 0: all.
 * stream: the work is queued here; the function does not wait for it.
 * @return IBP_OK if the arguments are right and the work is queued. Faults of rows are reported in *fault, and lost
 * rows are counted in place->counts. */
IBP_API ibp_status ibp_cuda_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                        int64_t first_row, ibp_fault *fault, int max_sms, ibp_stream stream);

/* Gathers all items of `ids`, as ibp_gather_items does. If an id is out of range, its item becomes zeros. A corrupt row
 * of an item becomes zeros, too. All other rows are right.
 *
 * table: its slots and overflow may be in device memory or in mapped pinned host memory, from which the kernel reads
 *   the rows that it needs over the link. Lengths, bases and the arrays of the codebook are best in device memory. The
 *   struct itself is read before the function returns.
 * ids: the struct is in host memory; its arrays are in memory that the device can use.
 * out: position 0 of the output.
 * fault: memory that the device can write, zero before the call. It receives the fault that any of the threads records
 *   first. Read it after the stream is synchronised.
 * max_sms: largest number of SMs that the kernel may keep busy; 0: all. A few SMs suffice for rows that come over the
 *   link.
 * stream: the work is queued here; the function does not wait for it.
 * @return IBP_OK if the arguments are right and the work is queued. Faults of rows are reported in *fault. */
IBP_API ibp_status ibp_cuda_gather_items(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
                                         int max_sms, ibp_stream stream);

/* Decodes bytes [start, end) of a table, as ibp_decode_bytes does. The other arguments and the result are as in
 * ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out,
                                         ibp_fault *fault, int max_sms, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
