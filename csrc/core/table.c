/* table.c - tables in host memory: the row index, coding rows into slots and overflow, gathering and selecting items (FORMAT.md 1 to 3). */
#include "locate.h"

#include <string.h>

int64_t ibp_num_rows(const ibp_table *table) { return ibp_rows_of_bytes(ibp_bytes_of_table(table), table->codebook.row_bytes); }

_Static_assert(IBP_ROWS_PER_BASE == 32, "FORMAT.md section 2");

/* Rows are coded in less time than their bytes take to come, and each in streams too short for the processor to foresee: while one is
 * coded, a row some bytes ahead is asked for. */
enum { BYTES_AHEAD = 2048, LINE_BYTES = 64 };

/* That many rows, or items, of so many bytes. */
static int64_t steps_ahead(int64_t step_bytes) { return step_bytes > 0 ? 1 + BYTES_AHEAD / step_bytes : 1; }

static void prefetch(const void *src, uint32_t num_bytes)
{
#if defined(__GNUC__)
    for (uint32_t at = 0; at < num_bytes; at += LINE_BYTES) __builtin_prefetch((const uint8_t *)src + at, 0, 2);
#else
    (void)src, (void)num_bytes;
#endif
}

static void prefetch_data(const uint8_t *data, int64_t num_bytes, uint32_t row_bytes, int64_t row)
{
    const int64_t ahead = row + steps_ahead(row_bytes);
    if (ahead < num_bytes / row_bytes) prefetch(data + ahead * row_bytes, row_bytes);
}

/* A row of codebook->row_bytes bytes: where it lies in data, or extended with zeros in scratch if it is the short last one. */
static const uint8_t *whole_row(const uint8_t *data, int64_t num_bytes, uint32_t row_bytes, int64_t row, uint8_t *scratch)
{
    const uint32_t valid = ibp_valid_bytes(num_bytes, row_bytes, row);
    const uint8_t *const start = data + row * (int64_t)row_bytes;
    if (valid == row_bytes) return start;
    memcpy(scratch, start, valid);
    memset(scratch + valid, 0, row_bytes - valid);
    return scratch;
}

void ibp_measure_rows(const ibp_codebook *cb, const uint8_t *data, int64_t num_bytes, uint16_t *lengths)
{
    uint8_t last_row[IBP_MAX_ROW_BYTES];
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, cb->row_bytes);
    for (int64_t r = 0; r < num_rows; r++) {
        prefetch_data(data, num_bytes, cb->row_bytes, r);
        const size_t coded = ibp_coded_row_bytes(cb, whole_row(data, num_bytes, cb->row_bytes, r, last_row));
        lengths[r] = coded < ibp_valid_bytes(num_bytes, cb->row_bytes, r) ? (uint16_t)coded : 0;
    }
}

static uint32_t length_of(const uint16_t *lengths, int64_t row) { return lengths ? lengths[row] : 0; }

void ibp_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes, uint64_t *bases,
                    int64_t *overflow_bytes)
{
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    uint64_t end = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        if (r % IBP_ROWS_PER_BASE == 0) bases[r / IBP_ROWS_PER_BASE] = end;
        end += ibp_room_of(length_of(lengths, r), ibp_valid_bytes(num_bytes, row_bytes, r), slot_bytes);
    }
    *overflow_bytes = (int64_t)end;
}

/* @return false if the index contradicts the table's buffers. */
static bool locate_row(const ibp_table *table, int64_t row, ibp_row_place *place)
{
    uint64_t base = 0;
    uint32_t rooms = 0;
    *place = ibp_split_row(table, row, length_of(table->lengths, row));
    if (ibp_needs_base(table, place)) {
        base = table->bases[ibp_group_of_row(row)];
        for (int64_t q = ibp_first_of_group(row); q < row; q++)
            rooms += ibp_room_of(length_of(table->lengths, q), table->codebook.row_bytes, table->slot_bytes);
    }
    return ibp_place_in_bounds(table, base, rooms, place);
}

static void prefetch_row(const ibp_table *table, int64_t row)
{
    ibp_row_place place;
    if (!locate_row(table, row, &place)) return;
    if (place.in_slot) prefetch(table->slots + place.slot_start, place.in_slot);
    if (place.in_overflow) prefetch(table->overflow + place.overflow_start, place.in_overflow);
}

static void note_fault(ibp_fault *fault, ibp_status status, int64_t position, int64_t id)
{
    if (status != IBP_OK && fault->status == IBP_OK) *fault = (ibp_fault){status, position, id, 1};
}

/* Codes row r of data. scratch, last: row_bytes bytes each. */
static ibp_status encode_table_row(const ibp_table *table, const uint8_t *data, int64_t r, uint8_t *slots, uint8_t *overflow,
                                   uint8_t *scratch, uint8_t *last)
{
    const uint32_t row_bytes = table->codebook.row_bytes;
    ibp_row_place place;
    if (!locate_row(table, r, &place)) return IBP_BUFFER_TOO_SMALL;
    const uint8_t *const row = whole_row(data, ibp_bytes_of_table(table), row_bytes, r, last);
    const uint8_t *coded = row;
    if (!place.raw) {
        size_t coded_bytes;
        const ibp_status status = ibp_encode_row(&table->codebook, row, scratch, row_bytes, &coded_bytes);
        if (status != IBP_OK || coded_bytes != table->lengths[r]) return IBP_CORRUPT_ROW;
        coded = scratch;
    }
    if (place.in_slot) memcpy(slots + place.slot_start, coded, place.in_slot);
    if (place.in_overflow) memcpy(overflow + place.overflow_start, coded + place.in_slot, place.in_overflow);
    return IBP_OK;
}

ibp_status ibp_encode_rows(const ibp_table *table, const uint8_t *data, int64_t first_row, int64_t last_row, uint8_t *slots,
                           uint8_t *overflow, uint8_t *scratch, ibp_fault *fault)
{
    uint8_t last[IBP_MAX_ROW_BYTES];
    const int64_t ahead = steps_ahead(table->codebook.row_bytes);
    for (int64_t r = first_row; r < last_row; r++) {
        prefetch_data(data, ibp_bytes_of_table(table), table->codebook.row_bytes, r);
        if (r + ahead < last_row) prefetch_row(table, r + ahead);
        const ibp_status status = encode_table_row(table, data, r, slots, overflow, scratch, last);
        note_fault(fault, status, r, r);
        if (status != IBP_OK) return status;
    }
    return IBP_OK;
}

/* Row r of the table. scratch, out: row_bytes bytes each; *row is out, or points into scratch or the table where the row is raw. */
static ibp_status read_row(const ibp_table *table, int64_t r, uint8_t *scratch, uint8_t *out, const uint8_t **row)
{
    ibp_row_place place;
    if (!locate_row(table, r, &place)) return IBP_CORRUPT_ROW;
    const uint8_t *stored = place.in_slot ? table->slots + place.slot_start : table->overflow + place.overflow_start;
    if (place.in_slot != 0 && place.in_overflow != 0) {
        memcpy(scratch, stored, place.in_slot);
        memcpy(scratch + place.in_slot, table->overflow + place.overflow_start, place.in_overflow);
        stored = scratch;
    }
    *row = stored;
    if (place.raw) return IBP_OK;
    *row = out;
    return ibp_decode_row(&table->codebook, stored, place.in_slot + place.in_overflow, out);
}

/* Bytes [start, end) of the original tensor. A corrupt row leaves zeros; *bad_row is the first one. */
static ibp_status read_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, uint8_t *scratch, int64_t *bad_row)
{
    const int64_t row_bytes = table->codebook.row_bytes;
    const int64_t ahead = steps_ahead(row_bytes), last_row = (end - 1) / row_bytes;
    ibp_status first_fault = IBP_OK;
    while (start < end) {
        const int64_t r = start / row_bytes, row_start = r * row_bytes;
        if (r + ahead < last_row) {
            prefetch_row(table, r + ahead);
            prefetch(out + ((r + ahead) * row_bytes - start), table->codebook.row_bytes);
        }
        const int64_t stop = end < row_start + row_bytes ? end : row_start + row_bytes;
        uint8_t *const decoded = stop - start == row_bytes ? out : scratch + row_bytes; /* whole rows where they belong */
        const uint8_t *row = decoded;
        const ibp_status status = read_row(table, r, scratch, decoded, &row);
        if (status == IBP_OK) {
            if (row != out) memcpy(out, row + (start - row_start), (size_t)(stop - start));
        } else {
            memset(out, 0, (size_t)(stop - start));
            if (first_fault == IBP_OK) *bad_row = r;
            first_fault = IBP_CORRUPT_ROW;
        }
        out += stop - start;
        start = stop;
    }
    return first_fault;
}

static int64_t id_at(const ibp_ids *ids, int64_t position)
{
    return ids->id_bytes == 8 ? ((const int64_t *)ids->data)[position] : ((const int32_t *)ids->data)[position];
}

/* The first row of an item, if there is one. */
static void prefetch_item(const ibp_table *table, int64_t id)
{
    if (id < 0 || id >= table->num_items || table->item_bytes == 0) return;
    prefetch_row(table, id * table->item_bytes / table->codebook.row_bytes);
}

ibp_status ibp_gather_items(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last, uint8_t *out, uint8_t *scratch,
                            ibp_fault *fault)
{
    const int64_t ahead = steps_ahead(table->item_bytes);
    ibp_status first_fault = IBP_OK;
    for (int64_t k = first; k < last; k++) {
        const int64_t id = id_at(ids, k), position = ids->positions ? ids->positions[k] : k;
        const bool has_room = !ids->positions || position < ids->out_items;
        uint8_t *const item = out + position * table->item_bytes;
        ibp_status status = IBP_INDEX_OUT_OF_RANGE;
        int64_t bad_row;
        if (k + ahead < last) prefetch_item(table, id_at(ids, k + ahead));
        if (has_room && id >= 0 && id < table->num_items)
            status = read_bytes(table, id * table->item_bytes, (id + 1) * table->item_bytes, item, scratch, &bad_row);
        else if (has_room)
            memset(item, 0, (size_t)table->item_bytes);
        note_fault(fault, status, position, id);
        if (first_fault == IBP_OK) first_fault = status;
    }
    return first_fault;
}

ibp_status ibp_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, uint8_t *scratch, ibp_fault *fault)
{
    if (start < 0 || start > end || end > ibp_bytes_of_table(table)) return IBP_INVALID_ARGUMENT;
    int64_t bad_row = 0;
    const ibp_status status = read_bytes(table, start, end, out, scratch, &bad_row);
    note_fault(fault, status, bad_row, bad_row);
    return status;
}

/* Items of a table by their ids, as the rows that they are made of. */
typedef struct selection {
    const ibp_table *table;
    const ibp_ids *ids;
    int64_t rows_per_item;
} selection;

static bool is_selectable(const ibp_table *table)
{
    return table->item_bytes > 0 && table->item_bytes % table->codebook.row_bytes == 0;
}

static selection selection_of(const ibp_table *table, const ibp_ids *ids)
{
    return (selection){table, ids, table->item_bytes / table->codebook.row_bytes};
}

/* Row q of a selection as a row of the table; -1 if its id is out of range. */
static int64_t selected_row(const selection *of, int64_t q)
{
    const int64_t position = of->rows_per_item == 1 ? q : q / of->rows_per_item, id = id_at(of->ids, position);
    if (id < 0 || id >= of->table->num_items) return -1;
    return id * of->rows_per_item + (q - position * of->rows_per_item);
}

static ibp_status note_row(const selection *of, int64_t q, ibp_status status, ibp_fault *fault)
{
    const int64_t position = q / of->rows_per_item;
    note_fault(fault, status, position, id_at(of->ids, position));
    return status;
}

/* Lengths at random places come no faster than their lines do: those of rows some way ahead are asked for. */
#define PREFETCH_LENGTHS 32

static void prefetch_length(const selection *of, int64_t q)
{
    const int64_t row = q < of->ids->count * of->rows_per_item ? selected_row(of, q) : -1;
    if (row >= 0 && of->table->lengths) prefetch(&of->table->lengths[row], sizeof *of->table->lengths);
}

ibp_status ibp_measure_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row, uint16_t *lengths,
                                 uint64_t *stored_bytes, ibp_fault *fault)
{
    if (!is_selectable(table)) return IBP_INVALID_ARGUMENT;
    const selection of = selection_of(table, ids);
    *stored_bytes = 0;
    for (int64_t q = first_row; q < last_row; q++) {
        const int64_t row = selected_row(&of, q);
        if (row < 0) return note_row(&of, q, IBP_INDEX_OUT_OF_RANGE, fault);
        prefetch_length(&of, q + PREFETCH_LENGTHS);
        const uint32_t stored = ibp_stored_bytes(length_of(table->lengths, row), table->codebook.row_bytes);
        if (stored > table->codebook.row_bytes) return note_row(&of, q, IBP_CORRUPT_ROW, fault);
        *stored_bytes += stored;
        if (table->lengths) lengths[q - first_row] = table->lengths[row];
    }
    return IBP_OK;
}

/* Few instructions a row, so that the processor has many rows' lines on their way at a time: no prefetch gains more. */
ibp_status ibp_copy_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row, uint8_t *dst,
                              uint64_t dst_bytes, ibp_fault *fault)
{
    if (!is_selectable(table)) return IBP_INVALID_ARGUMENT;
    const selection of = selection_of(table, ids);
    const uint64_t slots_end = (uint64_t)table->slots_bytes;
    for (int64_t q = first_row; q < last_row; q++) {
        const int64_t row = selected_row(&of, q);
        if (row < 0) return note_row(&of, q, IBP_INDEX_OUT_OF_RANGE, fault);
        const uint32_t stored = ibp_stored_bytes(length_of(table->lengths, row), table->codebook.row_bytes);
        const uint64_t start = (uint64_t)row * table->slot_bytes - table->slots_start;
        if (stored > dst_bytes) return note_row(&of, q, IBP_CORRUPT_ROW, fault);
        if (stored <= table->slot_bytes && start <= slots_end && stored <= slots_end - start) {
            memcpy(dst, table->slots + start, stored);
        } else {
            ibp_row_place place;
            if (!locate_row(table, row, &place)) return note_row(&of, q, IBP_CORRUPT_ROW, fault);
            if (place.in_slot) memcpy(dst, table->slots + place.slot_start, place.in_slot);
            if (place.in_overflow) memcpy(dst + place.in_slot, table->overflow + place.overflow_start, place.in_overflow);
        }
        dst += stored;
        dst_bytes -= stored;
    }
    return IBP_OK;
}
