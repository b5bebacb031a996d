/* locate.h - where the stored bytes of a row are (FORMAT.md sections 1 to 3), for gcc, g++ and nvcc.
 *
 * This is the rule that memory safety rests on: nothing of a table's index is trusted, and a row's bytes are touched
 * only after ibp_place_in_bounds has said that they lie in the table. In three steps:
 *
 *     ibp_row_place place = ibp_split_row(&table, row, length of the row);          sizes, no memory read
 *     if (ibp_needs_base(&table, &place)) base = bases[ibp_base_of_row(&table, row)],
 *         rooms = sum of ibp_room_of over the rows from ibp_first_of_base(&table, row) to the one before it;
 *     if (!ibp_place_in_bounds(&table, base, rooms, &place)) the row is corrupt;    else read or write it
 *
 * The rooms are summed by the caller: one after the other on a processor, by the lanes of a warp on a GPU. */
#ifndef IBP_LOCATE_H
#define IBP_LOCATE_H

#include "format.h"
#include "ibp.h"

/* Bytes of a table's tensor, and its rows; no overflow in a table that ibp_check_table accepts. */
IBP_INLINE int64_t ibp_bytes_of_table(const ibp_table *table) { return table->num_items * table->item_bytes; }
IBP_INLINE int64_t ibp_rows_of_bytes(int64_t num_bytes, uint32_t row_bytes)
{
    return (num_bytes + row_bytes - 1) / row_bytes;
}

/* Groups of IBP_ROWS_PER_BASE rows: a row's number of group, and the group's first row. */
IBP_INLINE int64_t ibp_group_of_row(int64_t row) { return (int64_t)((uint64_t)row / IBP_ROWS_PER_BASE); }
IBP_INLINE int64_t ibp_first_of_group(int64_t row) { return ibp_group_of_row(row) * (int64_t)IBP_ROWS_PER_BASE; }

/* Whether every row of a table has a base of its own. Else the rows of a group share one. */
IBP_INLINE bool ibp_has_own_bases(const ibp_table *table) { return table->rows_per_base == 1u; }
/* A row's entry of bases, and the first of the rows that share it. */
IBP_INLINE int64_t ibp_base_of_row(const ibp_table *table, int64_t row)
{
    return ibp_has_own_bases(table) ? row : ibp_group_of_row(row);
}
IBP_INLINE int64_t ibp_first_of_base(const ibp_table *table, int64_t row)
{
    return ibp_has_own_bases(table) ? row : ibp_first_of_group(row);
}

/* Bytes of a row as stored. length: its entry of lengths, 0 where the table has none. valid_bytes: of the row before
 * coding, row_bytes or less. */
IBP_INLINE uint32_t ibp_stored_bytes(uint32_t length, uint32_t row_bytes, uint32_t valid_bytes)
{
    if (length == IBP_DEFAULT_LENGTH(row_bytes)) return 0u;
    return length != 0u ? length : valid_bytes;
}

/* Bytes that a row takes in overflow, padding included. A row before another one of its group is a whole one: its
 * valid_bytes are row_bytes. At most 65,536 bytes, so that the rooms of a group sum up in 32 bits. */
IBP_INLINE uint32_t ibp_room_of(uint32_t length, uint32_t row_bytes, uint32_t valid_bytes, uint32_t slot_bytes)
{
    return ibp_overflow_room(ibp_overflow_part(ibp_stored_bytes(length, row_bytes, valid_bytes), slot_bytes),
                             slot_bytes);
}

/* A row's stored bytes: the first in_slot of them from slot_start of table->slots on, the other in_overflow ones from
 * overflow_start of table->overflow on. A start means nothing where its part is empty. */
typedef struct ibp_row_place {
    uint64_t slot_start, overflow_start;
    uint32_t in_slot, in_overflow;
    uint32_t valid;  /* bytes of the row before coding */
    bool raw;        /* stored as it is */
    bool is_default; /* not stored: a default row */
} ibp_row_place;

/* The sizes of a row's parts, and where its slot would be: computed, not checked. 0 <= row < rows of the table. */
IBP_INLINE ibp_row_place ibp_split_row(const ibp_table *table, int64_t row, uint32_t length)
{
    ibp_row_place place;
    place.valid = ibp_valid_bytes(ibp_bytes_of_table(table), table->codebook.row_bytes, row);
    place.raw = length == 0u;
    place.is_default = length == IBP_DEFAULT_LENGTH(table->codebook.row_bytes);
    const uint32_t stored = ibp_stored_bytes(length, table->codebook.row_bytes, place.valid);
    place.in_overflow = ibp_overflow_part(stored, table->slot_bytes);
    place.in_slot = stored - place.in_overflow;
    place.slot_start = (uint64_t)row * table->slot_bytes - table->slots_start;
    place.overflow_start = 0;
    return place;
}

/* Whether ibp_place_in_bounds reads its base and rooms: they are needed, and there are bases to take them from. */
IBP_INLINE bool ibp_needs_base(const ibp_table *table, const ibp_row_place *place)
{
    return place->in_overflow != 0u && table->bases != NULL;
}

/* Whether num_bytes bytes from start on lie in an array of array_bytes bytes; also where start has wrapped around. */
IBP_INLINE bool ibp_part_in_bounds(uint64_t start, uint32_t num_bytes, int64_t array_bytes)
{
    return start <= (uint64_t)array_bytes && num_bytes <= (uint64_t)array_bytes - start;
}

/* Whether a row is no longer than it claims to be and its slot part lies inside the table's slots. */
IBP_INLINE bool ibp_slot_in_bounds(const ibp_table *table, const ibp_row_place *place)
{
    return place->in_slot + place->in_overflow <= place->valid &&
           (place->in_slot == 0u || ibp_part_in_bounds(place->slot_start, place->in_slot, table->slots_bytes));
}

/* Fills in overflow_start, and checks the overflow part, where there is one. base: the row's entry of bases, which may
 * be any number; rooms: the sum of ibp_room_of over the rows before this one that share it; both read only where
 * ibp_needs_base. */
IBP_INLINE bool ibp_overflow_in_bounds(const ibp_table *table, uint64_t base, uint32_t rooms, ibp_row_place *place)
{
    if (place->in_overflow == 0u) return true;
    if (table->bases == NULL) return false;
    const uint64_t first = base - table->overflow_start;
    if (!ibp_part_in_bounds(first, 0u, table->overflow_bytes)) return false; /* else first + rooms could wrap around */
    place->overflow_start = first + rooms;
    return ibp_part_in_bounds(place->overflow_start, place->in_overflow, table->overflow_bytes);
}

/* Both.
 * @return false if the row is corrupt: it claims to be longer than it is, or a part of it lies outside the table's
 * arrays. */
IBP_INLINE bool ibp_place_in_bounds(const ibp_table *table, uint64_t base, uint32_t rooms, ibp_row_place *place)
{
    return ibp_slot_in_bounds(table, place) && ibp_overflow_in_bounds(table, base, rooms, place);
}

#endif
