/* rows.h - helpers of functions that work on many rows: prefetching, reading and coding rows of tables, workspaces, and
 * the log of faults. */
#ifndef IBP_CORE_ROWS_H
#define IBP_CORE_ROWS_H

#include "locate.h"
#include "schemes.h"

#include <string.h>

/* Coding a row takes less time than loading it from memory, and rows are too short for the processor to predict the
 * next accesses. Therefore the row that lies about IBP_BYTES_AHEAD bytes further on is prefetched while a row is coded.
 * IBP_LINE_BYTES: size of a cache line in bytes. */
enum { IBP_BYTES_AHEAD = 2048, IBP_LINE_BYTES = 64 };

/* Returns IBP_BYTES_AHEAD as a number of rows, or items, of step_bytes bytes. */
static inline int64_t ibp_steps_ahead(int64_t step_bytes)
{
    return step_bytes > 0 ? 1 + IBP_BYTES_AHEAD / step_bytes : 1;
}

static inline void ibp_prefetch(const void *src, uint32_t num_bytes)
{
    for (uint32_t at = 0; at < num_bytes; at += IBP_LINE_BYTES) __builtin_prefetch((const uint8_t *)src + at, 0, 2);
}

static inline uint32_t ibp_length_of_row(const uint16_t *lengths, int64_t row)
{
    return lengths ? IBP_LOAD_ONCE(lengths[row]) : 0;
}

/* Finds where the stored bytes of a table's row lie. Returns false if the row is corrupt: the index gives it an
 * impossible size, or bytes outside the table's arrays. */
static inline bool ibp_locate_row(const ibp_table *table, int64_t row, ibp_row_place *place)
{
    const uint32_t row_bytes = table->codebook.row_bytes;
    uint64_t base = 0;
    uint32_t rooms = 0;
    *place = ibp_split_row(table, row, ibp_length_of_row(table->lengths, row));
    if (ibp_needs_base(table, place)) {
        base = IBP_LOAD_ONCE(table->bases[ibp_base_of_row(table, row)]);
        for (int64_t q = ibp_first_of_base(table, row); q < row; q++)
            rooms += ibp_room_of(ibp_length_of_row(table->lengths, q), row_bytes, row_bytes, table->slot_bytes);
    }
    return ibp_place_in_bounds(table, base, rooms, place);
}

/* Copies both parts of a located row to dst, one after the other. */
static inline void ibp_copy_stored(const ibp_table *table, const ibp_row_place *place, uint8_t *dst)
{
    if (place->in_slot) memcpy(dst, table->slots + place->slot_start, place->in_slot);
    if (place->in_overflow) memcpy(dst + place->in_slot, table->overflow + place->overflow_start, place->in_overflow);
}

/* Returns a row of num_bytes bytes extended with zeros to row_bytes bytes: `from` itself if num_bytes is row_bytes,
 * else a copy in `room`. */
static inline const uint8_t *ibp_whole_row(const uint8_t *from, uint32_t num_bytes, uint32_t row_bytes, uint8_t *room)
{
    if (num_bytes == row_bytes) return from;
    memcpy(room, from, num_bytes);
    memset(room + num_bytes, 0, row_bytes - num_bytes);
    return room;
}

static inline bool ibp_is_default_row(const ibp_codebook *cb, const uint8_t *row, uint32_t num_bytes)
{
    const uint8_t *const template = ibp_template_of(cb);
    if (template) return memcmp(row, template, num_bytes) == 0;
    const uint64_t bytes = ibp_default_bytes(cb);
    uint64_t first;
    if (num_bytes < sizeof first) return memcmp(row, &bytes, num_bytes) == 0;
    memcpy(&first, row, sizeof first); /* most rows differ from a default row in the first 8 bytes. In other rows each
                                          byte is compared with the byte that lies 8 bytes before it */
    return first == bytes && memcmp(row + sizeof first, row, num_bytes - sizeof first) == 0;
}

/* The scratch of functions that work on tables, divided into buffers for two rows and the rest, which is for coders. */
typedef struct ibp_workspace {
    uint8_t *stored; /* a row as stored */
    uint8_t *whole;  /* a row before coding, if it must be copied, or if only a part of it is wanted */
    ibp_row_codec codec;
} ibp_workspace;

/* Opens a workspace. has_coded_rows: whether rows will be coded or decoded. If so, the scheme must have coded rows.
 * Returns IBP_INVALID_ARGUMENT if ibp_open_codec returns it, or if scratch is too small. */
static inline ibp_status ibp_open_workspace(const ibp_codebook *cb, bool has_coded_rows, void *scratch,
                                            size_t scratch_bytes, ibp_workspace *work)
{
    const size_t two_rows = 2 * (size_t)cb->row_bytes;
    if (!scratch || !ibp_are_sizes(0, cb->row_bytes) || scratch_bytes < IBP_SCRATCH_BYTES(cb->row_bytes))
        return IBP_INVALID_ARGUMENT;
    work->stored = scratch;
    work->whole = work->stored + cb->row_bytes;
    if (!has_coded_rows) return ibp_check_codebook_fields(cb);
    return ibp_open_codec(cb, work->stored + two_rows, &work->codec);
}

/* Codes a row into dst. valid_bytes: size of the row before it was extended to row_bytes bytes. work: must have been
 * opened for coded rows. Returns the row's entry of lengths. If this entry says that the row is raw or a default row,
 * the content of dst is unspecified. */
static inline uint32_t ibp_code_row(const ibp_codebook *cb, const uint8_t *row, uint32_t valid_bytes,
                                    const ibp_workspace *work, uint8_t *dst, size_t dst_bytes)
{
    if (ibp_is_default_row(cb, row, valid_bytes)) return IBP_DEFAULT_LENGTH(cb->row_bytes);
    size_t coded_bytes = 0;
    const ibp_status status = ibp_encode_with(&work->codec, row, dst, dst_bytes, &coded_bytes);
    return status == IBP_OK ? ibp_length_of_coded(coded_bytes, cb->row_bytes, valid_bytes) : 0u;
}

/* The log of a call's faults: `fault` keeps the first fault of all calls, and `status` is the status of this call's
 * first fault. */
typedef struct ibp_fault_log {
    ibp_fault *fault;
    ibp_status status;
} ibp_fault_log;

static inline void ibp_note_fault(ibp_fault_log *log, ibp_status status, int64_t position, int64_t id)
{
    if (status == IBP_OK) return;
    if (log->status == IBP_OK) log->status = status;
    if (log->fault->status == IBP_OK) *log->fault = (ibp_fault){status, position, id, 1};
}

#endif
