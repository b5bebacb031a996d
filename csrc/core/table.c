/* table.c - tables in host memory: makes the row index, codes rows into slots and overflow, gathers and selects items
 * (FORMAT.md sections 1 to 3). */
#include "../internal/ibp_gathers.h"
#include "cache.h"
#include "ids.h"
#include "rows.h"

_Static_assert(IBP_ROWS_PER_BASE == 32, "FORMAT.md section 2");

static void prefetch_data(const uint8_t *data, int64_t num_bytes, uint32_t row_bytes, int64_t row)
{
    const int64_t ahead = row + ibp_steps_ahead(row_bytes);
    if (ahead < num_bytes / row_bytes) ibp_prefetch(data + ahead * row_bytes, row_bytes);
}

static void fill_default_row(const ibp_codebook *cb, uint8_t *row)
{
    const uint8_t *const template = ibp_template_of(cb);
    if (template) {
        memcpy(row, template, cb->row_bytes);
        return;
    }
    const uint64_t bytes = ibp_default_bytes(cb);
    for (uint32_t at = 0; at < cb->row_bytes; at += sizeof bytes)
        memcpy(row + at, &bytes, ibp_min_u32(cb->row_bytes - at, sizeof bytes));
}

ibp_status ibp_measure_rows(const ibp_codebook *cb, const uint8_t *data, int64_t num_bytes, uint16_t *lengths,
                            void *scratch, size_t scratch_bytes)
{
    ibp_workspace work;
    if (!ibp_are_sizes(num_bytes, cb->row_bytes)) return IBP_INVALID_ARGUMENT;
    const ibp_status status = ibp_open_workspace(cb, true, scratch, scratch_bytes, &work);
    if (status != IBP_OK) return status;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, cb->row_bytes);
    for (int64_t r = 0; r < num_rows; r++) {
        prefetch_data(data, num_bytes, cb->row_bytes, r);
        const uint32_t valid = ibp_valid_bytes(num_bytes, cb->row_bytes, r);
        const uint8_t *const row = data + r * cb->row_bytes;
        if (ibp_is_default_row(cb, row, valid)) {
            lengths[r] = (uint16_t)IBP_DEFAULT_LENGTH(cb->row_bytes);
            continue;
        }
        const size_t coded = ibp_measure_with(&work.codec, ibp_whole_row(row, valid, cb->row_bytes, work.whole));
        lengths[r] = (uint16_t)ibp_length_of_coded(coded, cb->row_bytes, valid);
    }
    return IBP_OK;
}

ibp_status ibp_index_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint32_t slot_bytes,
                          uint64_t *bases, int64_t *overflow_bytes)
{
    if (!ibp_are_sizes(num_bytes, row_bytes) || !ibp_is_slot(slot_bytes, row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    uint64_t end = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        if (r % IBP_ROWS_PER_BASE == 0) bases[r / IBP_ROWS_PER_BASE] = end;
        end +=
            ibp_room_of(ibp_length_of_row(lengths, r), row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r), slot_bytes);
    }
    *overflow_bytes = (int64_t)end;
    return IBP_OK;
}

ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey)
{
    if (!ibp_are_sizes(num_bytes, row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    const uint32_t most = ibp_sectors_of(row_bytes);
    for (int64_t r = 0; r < num_rows; r++) {
        const uint32_t stored =
            ibp_stored_bytes(IBP_LOAD_ONCE(lengths[r]), row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r));
        survey[0] += stored;
        survey[1 + ibp_min_u32(ibp_sectors_of(stored), most)]++;
    }
    return IBP_OK;
}

/* Prefetches the stored bytes of a row. slots, overflow: the table's arrays, or the arrays that rows are coded into. */
static void prefetch_row(const ibp_table *table, int64_t row, const uint8_t *slots, const uint8_t *overflow)
{
    ibp_row_place place;
    if (!ibp_locate_row(table, row, &place)) return;
    if (place.in_slot) ibp_prefetch(slots + place.slot_start, place.in_slot);
    if (place.in_overflow) ibp_prefetch(overflow + place.overflow_start, place.in_overflow);
}

/* Writes zeros after the num_bytes bytes of a part that begins at `start`. room: size in bytes of the part with
 * padding. */
static void clear_room(uint8_t *array, int64_t array_bytes, uint64_t start, uint32_t num_bytes, uint32_t room)
{
    if (start > (uint64_t)array_bytes) return;
    const uint64_t left = (uint64_t)array_bytes - start, end = left < room ? left : room;
    if (num_bytes < end) memset(array + start + num_bytes, 0, (size_t)(end - num_bytes));
}

static ibp_status encode_table_row(const ibp_table *table, const uint8_t *data, int64_t r, uint8_t *slots,
                                   uint8_t *overflow, const ibp_workspace *work)
{
    const uint32_t row_bytes = table->codebook.row_bytes;
    ibp_row_place place;
    if (!ibp_locate_row(table, r, &place)) return IBP_BUFFER_TOO_SMALL;
    clear_room(slots, table->slots_bytes, place.slot_start, place.in_slot, table->slot_bytes);
    clear_room(overflow, table->overflow_bytes, place.overflow_start, place.in_overflow,
               ibp_overflow_room(place.in_overflow, table->slot_bytes));
    const uint8_t *const row = data + r * row_bytes;
    if (place.is_default) return ibp_is_default_row(&table->codebook, row, place.valid) ? IBP_OK : IBP_CORRUPT_ROW;
    const uint8_t *coded = ibp_whole_row(row, place.valid, row_bytes, work->whole);
    if (!place.raw) {
        size_t coded_bytes;
        const ibp_status status = ibp_encode_with(&work->codec, coded, work->stored, row_bytes, &coded_bytes);
        if (status != IBP_OK || coded_bytes != place.in_slot + place.in_overflow) return IBP_CORRUPT_ROW;
        coded = work->stored;
    }
    if (place.in_slot) memcpy(slots + place.slot_start, coded, place.in_slot);
    if (place.in_overflow) memcpy(overflow + place.overflow_start, coded + place.in_slot, place.in_overflow);
    return IBP_OK;
}

/* Checks the fields of a table, and opens a workspace for its rows. */
static ibp_status open_table(const ibp_table *table, bool has_coded_rows, void *scratch, size_t scratch_bytes,
                             ibp_workspace *work)
{
    const ibp_status status = ibp_check_table_fields(table);
    return status == IBP_OK ? ibp_open_workspace(&table->codebook, has_coded_rows, scratch, scratch_bytes, work)
                            : status;
}

ibp_status ibp_encode_rows(const ibp_table *table, const uint8_t *data, int64_t first_row, int64_t last_row,
                           uint8_t *slots, uint8_t *overflow, void *scratch, size_t scratch_bytes, ibp_fault *fault)
{
    ibp_workspace work;
    const ibp_status opened = open_table(table, table->lengths != NULL, scratch, scratch_bytes, &work);
    if (opened != IBP_OK) return opened;
    if (first_row < 0 || first_row > last_row || last_row > ibp_num_rows(table)) return IBP_INVALID_ARGUMENT;
    if (!ibp_has_arrays(table, slots, overflow)) return IBP_INVALID_ARGUMENT;
    const int64_t ahead = ibp_steps_ahead(table->codebook.row_bytes);
    ibp_fault_log log = {fault, IBP_OK};
    for (int64_t r = first_row; r < last_row && log.status == IBP_OK; r++) {
        prefetch_data(data, ibp_bytes_of_table(table), table->codebook.row_bytes, r);
        if (r + ahead < last_row) prefetch_row(table, r + ahead, slots, overflow);
        ibp_note_fault(&log, encode_table_row(table, data, r, slots, overflow, &work), r, r);
    }
    return log.status;
}

/* Decodes a row whose parts have been found, the slot part in `slots` and the overflow part in `overflow`. out: room
 * for row_bytes bytes. *row receives the row: it is `out`, or, if the row is raw, points into the workspace or the
 * arrays. */
static ibp_status read_place(const ibp_codebook *cb, const ibp_row_place *place, const uint8_t *slots,
                             const uint8_t *overflow, const ibp_workspace *work, uint8_t *out, const uint8_t **row)
{
    *row = out;
    if (place->is_default) {
        fill_default_row(cb, out);
        return IBP_OK;
    }
    const uint8_t *stored = place->in_slot ? slots + place->slot_start : overflow + place->overflow_start;
    if (place->in_slot != 0 && place->in_overflow != 0) {
        memcpy(work->stored, stored, place->in_slot);
        memcpy(work->stored + place->in_slot, overflow + place->overflow_start, place->in_overflow);
        stored = work->stored;
    }
    if (!place->raw) return ibp_decode_with(&work->codec, stored, place->in_slot + place->in_overflow, out);
    *row = stored;
    return IBP_OK;
}

/* Decodes row r of a table, as read_place does. */
static ibp_status read_row(const ibp_table *table, int64_t r, const ibp_workspace *work, uint8_t *out,
                           const uint8_t **row)
{
    ibp_row_place place;
    if (!ibp_locate_row(table, r, &place)) return IBP_CORRUPT_ROW;
    return read_place(&table->codebook, &place, table->slots, table->overflow, work, out, row);
}

/* Decodes bytes [start, end) of the original tensor. The bytes of a corrupt row become zeros. Returns the index of the
 * first corrupt row, or -1 if all rows are intact. */
static int64_t read_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, const ibp_workspace *work)
{
    const int64_t row_bytes = table->codebook.row_bytes;
    const int64_t ahead = ibp_steps_ahead(row_bytes), last_row = (end - 1) / row_bytes;
    int64_t first_bad = -1;
    while (start < end) {
        const int64_t r = start / row_bytes, row_start = r * row_bytes;
        if (r + ahead < last_row) {
            prefetch_row(table, r + ahead, table->slots, table->overflow);
            ibp_prefetch(out + ((r + ahead) * row_bytes - start), table->codebook.row_bytes);
        }
        const int64_t stop = end < row_start + row_bytes ? end : row_start + row_bytes;
        /* Whole rows are decoded directly to the output. */
        uint8_t *const decoded = stop - start == row_bytes ? out : work->whole;
        const uint8_t *row = decoded;
        if (read_row(table, r, work, decoded, &row) != IBP_OK) {
            memset(out, 0, (size_t)(stop - start));
            if (first_bad < 0) first_bad = r;
        } else if (row != out) {
            memcpy(out, row + (start - row_start), (size_t)(stop - start));
        }
        out += stop - start;
        start = stop;
    }
    return first_bad;
}

/* Decodes a row from a cache. Returns false, and writes zeros, if the row is corrupt. */
static bool read_cached(const ibp_codebook *cb, const ibp_cache *cache, uint64_t entry, uint8_t *out,
                        const ibp_workspace *work)
{
    ibp_row_place place;
    const uint8_t *slab = NULL, *row = out;
    if (!ibp_place_in_slab(cache, entry, cb->row_bytes, &place, &slab) ||
        (!place.raw && !place.is_default && cb->scheme == IBP_SCHEME_RAW) ||
        read_place(cb, &place, slab, NULL, work, out, &row) != IBP_OK) {
        memset(out, 0, cb->row_bytes);
        return false;
    }
    if (row != out) memcpy(out, row, cb->row_bytes);
    return true;
}

/* Prefetches the first row of an item, if there is one. */
static void prefetch_item(const ibp_table *table, int64_t id)
{
    if (id < 0 || id >= table->num_items || table->item_bytes == 0) return;
    prefetch_row(table, id * table->item_bytes / table->codebook.row_bytes, table->slots, table->overflow);
}

/* Returns whether the table's arrays can be read. */
static bool can_read(const ibp_table *table) { return ibp_has_arrays(table, table->slots, table->overflow); }
/* Returns whether the table's arrays can be read, the ids first to last - 1 exist, and the size of the output does not
 * overflow. */
static bool can_gather(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last)
{
    if (!can_read(table) || !ibp_are_ids(ids, first, last)) return false;
    const int64_t out_items = ibp_num_positions(ids);
    return out_items >= 0 && ibp_are_dims(ids) &&
           (table->item_bytes == 0 || out_items <= INT64_MAX / table->item_bytes);
}

/* Returns whether a gather of the items at ids can use a cache. */
static bool can_use(const ibp_cache *cache, const ibp_table *table, const ibp_ids *ids)
{
    if (!ibp_has_whole_rows(table) || cache->num_slabs > IBP_MAX_SLABS || (!cache->entries && ids->count != 0))
        return false;
    for (uint32_t s = 0; s < cache->num_slabs; s++)
        if (cache->slabs[s].num_bytes < 0 || (!cache->slabs[s].bytes && cache->slabs[s].num_bytes != 0)) return false;
    return true;
}

/* Decodes item number `id` to out. cache: NULL, or a cache from which rows with an entry are read. The entry of row r
 * of the item is cache->entries[first + r]. Returns whether all rows are intact; corrupt rows become zeros. */
static bool read_item(const ibp_table *table, int64_t id, const ibp_cache *cache, int64_t first, uint8_t *out,
                      const ibp_workspace *work)
{
    const int64_t row_bytes = table->codebook.row_bytes, start = id * table->item_bytes;
    bool good = true;
    if (!cache) return read_bytes(table, start, start + table->item_bytes, out, work) < 0;
    for (int64_t r = 0; r < table->item_bytes / row_bytes; r++) {
        uint8_t *const to = out + r * row_bytes;
        const uint64_t entry = IBP_LOAD_ONCE(cache->entries[first + r]);
        if (ibp_is_present(entry))
            good = read_cached(&table->codebook, cache, entry, to, work) && good;
        else
            good = read_bytes(table, start + r * row_bytes, start + (r + 1) * row_bytes, to, work) < 0 && good;
    }
    return good;
}

/* Gathers items. cache: NULL, or a cache that holds some of the rows. */
static ibp_status gather(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache, int64_t first,
                         int64_t last, uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault)
{
    ibp_workspace work;
    const bool has_coded_rows = table->lengths != NULL || (cache && table->codebook.scheme != IBP_SCHEME_RAW);
    const ibp_status opened = open_table(table, has_coded_rows, scratch, scratch_bytes, &work);
    if (opened != IBP_OK) return opened;
    if (!can_gather(table, ids, first, last) || (cache && !can_use(cache, table, ids))) return IBP_INVALID_ARGUMENT;
    const int64_t ahead = ibp_steps_ahead(table->item_bytes), item_bytes = table->item_bytes,
                  rows_per_item = item_bytes / table->codebook.row_bytes;
    ibp_fault_log log = {fault, IBP_OK};
    for (int64_t k = first; k < last; k++) {
        const int64_t id = ibp_id_at(ids, k), position = ids->positions ? IBP_LOAD_ONCE(ids->positions[k]) : k;
        if (k + ahead < last) prefetch_item(table, ibp_id_at(ids, k + ahead));
        const bool has_room = !ids->positions || position < ids->out_items, exists = id >= 0 && id < table->num_items;
        uint8_t *const to = has_room ? ibp_memory_of_position(ids, out, position, item_bytes) : NULL;
        if (!has_room || !exists) {
            if (has_room) memset(to, 0, (size_t)item_bytes);
            ibp_note_fault(&log, IBP_INDEX_OUT_OF_RANGE, position, id);
        } else if (!read_item(table, id, cache, k * rows_per_item, to, &work)) {
            ibp_note_fault(&log, IBP_CORRUPT_ROW, position, id);
        }
    }
    return log.status;
}

ibp_status ibp_gather_items(const ibp_table *table, const ibp_ids *ids, int64_t first, int64_t last, uint8_t *out,
                            void *scratch, size_t scratch_bytes, ibp_fault *fault)
{
    return gather(table, ids, NULL, first, last, out, scratch, scratch_bytes, fault);
}

ibp_status ibp_gather_cached(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache, int64_t first,
                             int64_t last, uint8_t *out, void *scratch, size_t scratch_bytes, ibp_fault *fault)
{
    return gather(table, ids, cache, first, last, out, scratch, scratch_bytes, fault);
}

ibp_status ibp_decode_bytes(const ibp_table *table, int64_t start, int64_t end, uint8_t *out, void *scratch,
                            size_t scratch_bytes, ibp_fault *fault)
{
    ibp_workspace work;
    const ibp_status opened = open_table(table, table->lengths != NULL, scratch, scratch_bytes, &work);
    if (opened != IBP_OK) return opened;
    if (!can_read(table) || start < 0 || start > end || end > ibp_bytes_of_table(table)) return IBP_INVALID_ARGUMENT;
    const int64_t bad_row = read_bytes(table, start, end, out, &work);
    ibp_fault_log log = {fault, IBP_OK};
    if (bad_row >= 0) ibp_note_fault(&log, IBP_CORRUPT_ROW, bad_row, bad_row);
    return log.status;
}

/* A selection of items of a table (ibp_gathers.h), as the rows that the items consist of. */
typedef struct selection {
    const ibp_table *table;
    const ibp_ids *ids;
    int64_t rows_per_item;
    ibp_fault_log log;
} selection;

/* Opens a selection, for the rows first_row to last_row - 1. Returns IBP_INVALID_ARGUMENT if the selection does not
 * have these rows. */
static ibp_status open_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                                 ibp_fault *fault, selection *of)
{
    const ibp_status status = ibp_check_table_fields(table);
    if (status != IBP_OK) return status;
    if (!ibp_has_whole_rows(table) || !ibp_are_ids(ids, 0, ids->count)) return IBP_INVALID_ARGUMENT;
    *of = (selection){table, ids, table->item_bytes / table->codebook.row_bytes, {fault, IBP_OK}};
    if (ids->count > INT64_MAX / of->rows_per_item) return IBP_INVALID_ARGUMENT;
    const bool exist = 0 <= first_row && first_row <= last_row && last_row <= ids->count * of->rows_per_item;
    return exist && can_read(table) ? IBP_OK : IBP_INVALID_ARGUMENT;
}

/* Returns the index in the table of row q of a selection; -1 if the id of its item is out of range. */
static int64_t selected_row(const selection *of, int64_t q)
{
    const int64_t position = of->rows_per_item == 1 ? q : q / of->rows_per_item, id = ibp_id_at(of->ids, position);
    if (id < 0 || id >= of->table->num_items) return -1;
    return id * of->rows_per_item + (q - position * of->rows_per_item);
}

static ibp_status note_row(selection *of, int64_t q, ibp_status status)
{
    const int64_t position = q / of->rows_per_item;
    ibp_note_fault(&of->log, status, position, ibp_id_at(of->ids, position));
    return of->log.status;
}

/* The length of a row is prefetched this number of rows before it is read. The speed of reading lengths at random
 * addresses depends on how many cache lines are requested at the same time. */
#define PREFETCH_LENGTHS 32

static void prefetch_length(const selection *of, int64_t q)
{
    const int64_t row = q < of->ids->count * of->rows_per_item ? selected_row(of, q) : -1;
    if (row >= 0 && of->table->lengths) ibp_prefetch(&of->table->lengths[row], sizeof *of->table->lengths);
}

ibp_status ibp_measure_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                                 uint16_t *lengths, uint64_t *stored_bytes, ibp_fault *fault)
{
    selection of;
    *stored_bytes = 0;
    const ibp_status status = open_selection(table, ids, first_row, last_row, fault, &of);
    if (status != IBP_OK) return status;
    for (int64_t q = first_row; q < last_row; q++) {
        const int64_t row = selected_row(&of, q);
        if (row < 0) return note_row(&of, q, IBP_INDEX_OUT_OF_RANGE);
        prefetch_length(&of, q + PREFETCH_LENGTHS);
        const uint32_t length = ibp_length_of_row(table->lengths, row),
                       stored = ibp_stored_bytes(length, table->codebook.row_bytes, table->codebook.row_bytes);
        if (stored > table->codebook.row_bytes) return note_row(&of, q, IBP_CORRUPT_ROW);
        *stored_bytes += stored;
        if (table->lengths) lengths[q - first_row] = (uint16_t)length;
    }
    return IBP_OK;
}

/* Copies the stored rows of a selection. It uses few instructions for each row, so that the processor requests the
 * cache lines of many rows at the same time. Prefetching the rows would not make the copy faster. */
ibp_status ibp_copy_selection(const ibp_table *table, const ibp_ids *ids, int64_t first_row, int64_t last_row,
                              uint8_t *dst, uint64_t dst_bytes, ibp_fault *fault)
{
    selection of;
    const ibp_status status = open_selection(table, ids, first_row, last_row, fault, &of);
    if (status != IBP_OK) return status;
    for (int64_t q = first_row; q < last_row; q++) {
        const int64_t row = selected_row(&of, q);
        ibp_row_place place;
        if (row < 0) return note_row(&of, q, IBP_INDEX_OUT_OF_RANGE);
        if (!ibp_locate_row(table, row, &place)) return note_row(&of, q, IBP_CORRUPT_ROW);
        const uint32_t stored = place.in_slot + place.in_overflow;
        if (stored > dst_bytes) return note_row(&of, q, IBP_CORRUPT_ROW);
        ibp_copy_stored(table, &place, dst);
        dst += stored;
        dst_bytes -= stored;
    }
    return IBP_OK;
}
