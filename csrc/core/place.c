/* place.c - codes rows one by one into the memory of a table, and allocates parts of overflow when rows need them. */
#include "rows.h"

/* Stands for the base of a row while a thread is coding the row. */
#define CLAIMED (IBP_NO_BASE - 1u)

/* A part of overflow that a row owns. */
typedef struct part {
    uint64_t base;
    uint32_t sectors;
} part;

/* Returns the part that a row's base names if the part lies in overflow; otherwise an empty part. */
static part part_of(const ibp_place *place, int64_t row, uint64_t base, uint32_t valid)
{
    const ibp_table *const table = &place->table;
    const uint32_t stored = ibp_stored_bytes(IBP_LOAD_ONCE(place->lengths[row]), table->codebook.row_bytes, valid),
                   sectors = place->rooms ? IBP_LOAD_ONCE(place->rooms[row])
                                          : ibp_sectors_of(ibp_overflow_part(stored, table->slot_bytes));
    if (!ibp_part_in_bounds(base, IBP_OVERFLOW_ALIGN * sectors, table->overflow_bytes)) return (part){IBP_NO_BASE, 0};
    return (part){base, sectors};
}

/* Returns the part of a row, as part_of does, and marks the row as CLAIMED until its base is written, because other
 * threads may code the same row. If another thread has already marked the row, the base of the result is CLAIMED. */
static part claim_part(const ibp_place *place, int64_t row, uint32_t valid)
{
    const uint64_t base = __atomic_exchange_n(&place->bases[row], CLAIMED, __ATOMIC_ACQ_REL);
    return base == CLAIMED ? (part){CLAIMED, 0} : part_of(place, row, base, valid);
}

/* Allocates a new part of overflow; returns an empty part if there is no room. The function reads the counter
 * place->used before it adds to it. So the counter stays close to the size of overflow, even if many rows find no
 * room. */
static part take_part(const ibp_place *place, uint32_t sectors)
{
    const uint32_t num_bytes = IBP_OVERFLOW_ALIGN * sectors;
    const int64_t there_are = place->table.overflow_bytes;
    if (!ibp_part_in_bounds(__atomic_load_n(place->used, __ATOMIC_RELAXED), num_bytes, there_are))
        return (part){IBP_NO_BASE, 0};
    const uint64_t start = __atomic_fetch_add(place->used, num_bytes, __ATOMIC_RELAXED);
    return ibp_part_in_bounds(start, num_bytes, there_are) ? (part){start, sectors} : (part){IBP_NO_BASE, 0};
}

/* Takes a part for a row whose own part is too small. If place->rooms is not NULL and the row already had a part, the
 * new part is large enough for the raw row, provided that overflow has that much space left. Otherwise the new part is
 * only large enough for the coded row. */
static part take_part_for(const ibp_place *place, part own, uint32_t in_overflow, uint32_t valid)
{
    part taken = {IBP_NO_BASE, 0};
    if (place->rooms && own.sectors != 0u)
        taken = take_part(place, ibp_sectors_of(ibp_overflow_part(valid, place->table.slot_bytes)));
    return taken.base != IBP_NO_BASE ? taken : take_part(place, ibp_sectors_of(in_overflow));
}

/* Returns the address of row i of a source that has buffers or dimensions. */
static const uint8_t *spread_address(const ibp_row_source *source, uint32_t row_bytes, int64_t i)
{
    const uint8_t *from = source->data;
    if (source->buffers) {
        from = source->buffers[i / source->rows_per_buffer];
        i %= source->rows_per_buffer;
    }
    if (source->num_dims == 0u) return from + i * (int64_t)row_bytes;
    for (uint32_t d = source->num_dims - 1u; d > 0u; d--) {
        from += i % source->sizes[d] * source->strides[d];
        i /= source->sizes[d];
    }
    return from + i * source->strides[0];
}

/* Returns the address of row i of a source. */
static inline const uint8_t *address_of(const ibp_row_source *source, uint32_t row_bytes, int64_t i)
{
    if (source->buffers || source->num_dims != 0u) return spread_address(source, row_bytes, i);
    return source->data + i * (int64_t)row_bytes;
}

/* Returns row i of a source, cut to `valid` bytes and then extended with zeros to row_bytes bytes. The result points to
 * the source's own bytes if nothing must be changed, else to a copy in the workspace. valid: the size in bytes, before
 * coding, of the table's row. */
static const uint8_t *source_row(const ibp_row_source *source, uint32_t row_bytes, int64_t i, uint32_t valid,
                                 const ibp_workspace *work)
{
    const bool is_last = i == source->num_rows - 1;
    const uint32_t there_are = is_last && source->last_row_bytes != 0u ? source->last_row_bytes : row_bytes,
                   num_bytes = ibp_min_u32(there_are, valid);
    return ibp_whole_row(address_of(source, row_bytes, i), num_bytes, row_bytes, work->whole);
}

/* Codes a row. Returns its entry of lengths. *stored receives the address of the bytes that are to be stored. */
static uint32_t code_row(const ibp_codebook *cb, const uint8_t *row, uint32_t valid, const ibp_workspace *work,
                         const uint8_t **stored)
{
    *stored = row;
    if (cb->scheme == IBP_SCHEME_RAW) return 0;
    const uint32_t length = ibp_code_row(cb, row, valid, work, work->stored, cb->row_bytes);
    if (length != 0u) *stored = work->stored;
    return length;
}

/* Writes num_bytes bytes, then zeros up to byte min(end, room). */
static void put(uint8_t *to, const uint8_t *from, uint32_t num_bytes, uint32_t end, uint64_t room)
{
    memcpy(to, from, num_bytes);
    memset(to + num_bytes, 0, (room < end ? (uint32_t)room : end) - num_bytes);
}

/* Stores a coded row in its slot and in a part of overflow, and writes the row's entries of the index. claims: whether
 * other threads may code the same row. Returns IBP_INVALID_ARGUMENT, and writes nothing, if another thread is coding
 * the row now. */
static ibp_status settle(const ibp_place *place, int64_t row, uint32_t length, uint32_t valid, const uint8_t *stored,
                         bool claims, ibp_place_counts *counts)
{
    const ibp_table *const table = &place->table;
    const uint32_t num_bytes = ibp_stored_bytes(length, table->codebook.row_bytes, valid),
                   in_overflow = ibp_overflow_part(num_bytes, table->slot_bytes);
    const bool spills = in_overflow != 0u, is_new = place->is_new != 0u;
    part own = {IBP_NO_BASE, 0};
    if (spills || claims) {
        if (claims)
            own = claim_part(place, row, valid);
        else if (!is_new)
            own = part_of(place, row, IBP_LOAD_ONCE(place->bases[row]), valid);
        if (own.base == CLAIMED) return IBP_INVALID_ARGUMENT;
        if (own.sectors < ibp_sectors_of(in_overflow)) own = take_part_for(place, own, in_overflow, valid);
    }
    const bool has_part = spills && own.base != IBP_NO_BASE, lost = spills && !has_part,
               is_kept = !lost || is_new; /* the slot part of a new row is kept even if there is no overflow part */
    if (is_kept) {
        const uint64_t start = (uint64_t)row * table->slot_bytes, left = (uint64_t)table->slots_bytes - start;
        const uint64_t room = left < table->slot_bytes ? left : table->slot_bytes;
        const uint32_t in_slot = num_bytes - in_overflow;
        if (room != 0u && (in_slot != 0u || is_new))
            put(place->slots + start, stored, in_slot, is_new ? table->slot_bytes : ibp_sector_bytes(in_slot), room);
        if (has_part)
            put(place->overflow + own.base, stored + table->slot_bytes, in_overflow, ibp_sector_bytes(in_overflow),
                UINT64_MAX);
    }
    if (place->lengths) place->lengths[row] = is_kept ? (uint16_t)length : 0;
    if (!spills && !claims) return IBP_OK;
    if (place->rooms) place->rooms[row] = lost ? 0 : (uint16_t)own.sectors;
    __atomic_store_n(&place->bases[row], own.base, __ATOMIC_RELEASE);
    counts->spilled += has_part, counts->lost += lost;
    return IBP_OK;
}

/* Codes the rows first to last - 1 of a source as packed rows: each begins in overflow where the row before it ends. */
static void pack_rows(const ibp_place *place, const ibp_row_source *source, int64_t first_row, int64_t first,
                      int64_t last, const ibp_workspace *work, ibp_place_counts *counts)
{
    const ibp_codebook *const cb = &place->table.codebook;
    const uint32_t row_bytes = cb->row_bytes;
    const int64_t num_bytes = ibp_bytes_of_table(&place->table), there_are = place->table.overflow_bytes,
                  ahead = ibp_steps_ahead(row_bytes);
    uint64_t end = *place->used;
    for (int64_t i = first; i < last; i++) {
        if (i + ahead < last) ibp_prefetch(address_of(source, row_bytes, i + ahead), row_bytes);
        const uint32_t valid = ibp_valid_bytes(num_bytes, row_bytes, first_row + i);
        const uint8_t *const row = source_row(source, row_bytes, i, valid, work);
        uint32_t length = 0;
        if (ibp_part_in_bounds(end, valid, there_are)) {
            length = ibp_code_row(cb, row, valid, work, place->overflow + end, valid);
            if (length == 0u) memcpy(place->overflow + end, row, valid);
            end += ibp_stored_bytes(length, row_bytes, valid);
            counts->spilled += length != IBP_DEFAULT_LENGTH(row_bytes);
        } else {
            counts->lost++;
        }
        place->lengths[first_row + i] = (uint16_t)length;
    }
    *place->used = end;
}

ibp_status ibp_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                           int64_t first_row, int64_t first, int64_t last, void *scratch, size_t scratch_bytes,
                           ibp_fault *fault)
{
    const ibp_codebook *const cb = &place->table.codebook;
    if (!ibp_is_place(place) || !ibp_is_row_source(source, cb->row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_bytes = ibp_bytes_of_table(&place->table), num_rows = ibp_rows_of_bytes(num_bytes, cb->row_bytes);
    ibp_workspace work;
    const ibp_status opened = ibp_open_workspace(cb, cb->scheme != IBP_SCHEME_RAW, scratch, scratch_bytes, &work);
    if (opened != IBP_OK) return opened;
    const bool is_packed = ibp_is_packed(place), claims = row_ids && place->bases;
    if (first < 0 || first > last || last > source->num_rows) return IBP_INVALID_ARGUMENT;
    if (!row_ids && (first_row < 0 || first_row > num_rows - source->num_rows)) return IBP_INVALID_ARGUMENT;
    if (row_ids && (is_packed || place->is_new)) return IBP_INVALID_ARGUMENT;
    const int64_t ahead = ibp_steps_ahead(cb->row_bytes);
    ibp_place_counts counts = {0, 0};
    ibp_fault_log log = {fault, IBP_OK};
    if (is_packed) {
        pack_rows(place, source, first_row, first, last, &work, &counts);
        first = last;
    }
    for (int64_t i = first; i < last; i++) {
        if (i + ahead < last) ibp_prefetch(address_of(source, cb->row_bytes, i + ahead), cb->row_bytes);
        const int64_t row = row_ids ? IBP_LOAD_ONCE(row_ids[i]) : first_row + i;
        if (row < 0 || row >= num_rows) {
            ibp_note_fault(&log, IBP_INDEX_OUT_OF_RANGE, i, row);
            continue;
        }
        const uint32_t valid = ibp_valid_bytes(num_bytes, cb->row_bytes, row);
        const uint8_t *stored;
        const uint32_t length = code_row(cb, source_row(source, cb->row_bytes, i, valid, &work), valid, &work, &stored);
        ibp_note_fault(&log, settle(place, row, length, valid, stored, claims, &counts), i, row);
    }
    if (place->counts) {
        __atomic_fetch_add(&place->counts->spilled, counts.spilled, __ATOMIC_RELAXED);
        __atomic_fetch_add(&place->counts->lost, counts.lost, __ATOMIC_RELAXED);
    }
    return log.status;
}

bool ibp_can_move_parts(const ibp_table *table, const ibp_place *from, const uint8_t *overflow)
{
    if (ibp_check_table_fields(table) != IBP_OK || !ibp_is_place(from)) return false;
    if (table->overflow_bytes == 0) return true;
    return ibp_num_rows(&from->table) == ibp_num_rows(table) && table->rows_per_base != 1u && from->bases &&
           table->lengths && table->bases && overflow;
}

ibp_status ibp_move_parts(const ibp_table *table, const ibp_place *from, uint8_t *overflow)
{
    if (!ibp_can_move_parts(table, from, overflow)) return IBP_INVALID_ARGUMENT;
    const uint32_t row_bytes = table->codebook.row_bytes;
    const int64_t num_bytes = ibp_bytes_of_table(table),
                  num_rows = table->overflow_bytes == 0 ? 0 : ibp_num_rows(table);
    uint64_t to = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        if (r % IBP_ROWS_PER_BASE == 0) to = table->bases[r / IBP_ROWS_PER_BASE];
        const uint32_t room =
            ibp_room_of(table->lengths[r], row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r), table->slot_bytes);
        if (room == 0u) continue;
        if (ibp_part_in_bounds(from->bases[r], room, from->table.overflow_bytes) &&
            ibp_part_in_bounds(to, room, table->overflow_bytes))
            memcpy(overflow + to, from->overflow + from->bases[r], room);
        to += room;
    }
    return IBP_OK;
}
