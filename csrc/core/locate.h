/* locate.h - finds the stored bytes of a row (FORMAT.md sections 1 to 3), for gcc, g++ and nvcc.
 *
 * Memory safety depends on this rule: no part of a table's index is trusted, and a row's bytes are accessed only after
 * ibp_place_in_bounds has returned true. There are three steps:
 *
 *     ibp_row_place place = ibp_split_row(&table, row, length of the row);          sizes, no memory read
 *     if (ibp_needs_base(&table, &place)) base = bases[ibp_base_of_row(&table, row)],
 *         rooms = sum of ibp_room_of over the rows from ibp_first_of_base(&table, row) to row - 1;
 *     if (!ibp_place_in_bounds(&table, base, rooms, &place)) the row is corrupt;    else read or write it
 *
 * A row's room is the number of bytes that it takes in overflow, with padding. The caller adds up the rooms: CPU code
 * adds one after the other, and in a kernel the lanes of a warp add them together. */
#ifndef IBP_LOCATE_H
#define IBP_LOCATE_H

#include "format.h"
#include "ibp.h"

/* Returns the size in bytes of a table's tensor. It does not overflow for a table that ibp_check_table accepts. */
IBP_INLINE int64_t ibp_bytes_of_table(const ibp_table *table) { return table->num_items * table->item_bytes; }
/* Returns the number of rows of a tensor of num_bytes bytes. */
IBP_INLINE int64_t ibp_rows_of_bytes(int64_t num_bytes, uint32_t row_bytes)
{
    return (num_bytes + row_bytes - 1) / row_bytes;
}

/* Returns the index of a row's group. Each group has IBP_ROWS_PER_BASE consecutive rows. */
IBP_INLINE int64_t ibp_group_of_row(int64_t row) { return (int64_t)((uint64_t)row / IBP_ROWS_PER_BASE); }
/* Returns the first row of the group that a row belongs to. */
IBP_INLINE int64_t ibp_first_of_group(int64_t row) { return ibp_group_of_row(row) * (int64_t)IBP_ROWS_PER_BASE; }

/* Returns whether every row of a table has its own base. Otherwise the rows of a group share one. */
IBP_INLINE bool ibp_has_own_bases(const ibp_table *table) { return table->rows_per_base == 1u; }
/* Returns the index of the entry of bases that a row uses. */
IBP_INLINE int64_t ibp_base_of_row(const ibp_table *table, int64_t row)
{
    return ibp_has_own_bases(table) ? row : ibp_group_of_row(row);
}
/* Returns the first of the rows that share a row's entry of bases. */
IBP_INLINE int64_t ibp_first_of_base(const ibp_table *table, int64_t row)
{
    return ibp_has_own_bases(table) ? row : ibp_first_of_group(row);
}

/* Returns the size in bytes of a row as stored. length: the row's entry of lengths; 0 if the table has no lengths.
 * valid_bytes: size of the row before coding, at most row_bytes. */
IBP_INLINE uint32_t ibp_stored_bytes(uint32_t length, uint32_t row_bytes, uint32_t valid_bytes)
{
    if (length == IBP_DEFAULT_LENGTH(row_bytes)) return 0u;
    return length != 0u ? length : valid_bytes;
}

/* Returns the number of bytes that a row takes in overflow, including padding. valid_bytes: size of the row before
 * coding, which is row_bytes for all rows but the last. The result is at most 65,536, so the sum over a group fits in
 * 32 bits. */
IBP_INLINE uint32_t ibp_room_of(uint32_t length, uint32_t row_bytes, uint32_t valid_bytes, uint32_t slot_bytes)
{
    return ibp_overflow_room(ibp_overflow_part(ibp_stored_bytes(length, row_bytes, valid_bytes), slot_bytes),
                             slot_bytes);
}

/* Where a row's stored bytes lie. The first in_slot bytes begin at slot_start of table->slots; the other in_overflow
 * bytes begin at overflow_start of table->overflow. The start of an empty part has no meaning. */
typedef struct ibp_row_place {
    uint64_t slot_start, overflow_start;
    uint32_t in_slot, in_overflow;
    uint32_t valid;  /* size of the row before coding, in bytes */
    bool raw;        /* the row is stored raw */
    bool is_default; /* the row is a default row, which is not stored */
} ibp_row_place;

/* Computes the sizes of a row's parts and the start of its slot, but does not check them. row: an existing
 * row. */
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

/* Returns whether ibp_place_in_bounds needs a row's base and rooms. It needs them if the row has an overflow part and
 * the table has bases. */
IBP_INLINE bool ibp_needs_base(const ibp_table *table, const ibp_row_place *place)
{
    return place->in_overflow != 0u && table->bases != NULL;
}

/* Returns whether num_bytes bytes that begin at `start` lie in an array of array_bytes bytes. The result is right for
 * any `start`, even if the computation of `start` has wrapped around. */
IBP_INLINE bool ibp_part_in_bounds(uint64_t start, uint32_t num_bytes, int64_t array_bytes)
{
    return start <= (uint64_t)array_bytes && num_bytes <= (uint64_t)array_bytes - start;
}

/* Returns whether a row as stored is at most as large as the row before coding, and its slot part lies inside the
 * table's slots. */
IBP_INLINE bool ibp_slot_in_bounds(const ibp_table *table, const ibp_row_place *place)
{
    return place->in_slot + place->in_overflow <= place->valid &&
           (place->in_slot == 0u || ibp_part_in_bounds(place->slot_start, place->in_slot, table->slots_bytes));
}

/* Fills in overflow_start, and returns whether the overflow part is empty or lies inside overflow. base: the row's
 * entry of bases, which may be any number. rooms: the sum of ibp_room_of over the earlier rows that share the base.
 * base and rooms are used only if ibp_needs_base returns true. */
IBP_INLINE bool ibp_overflow_in_bounds(const ibp_table *table, uint64_t base, uint32_t rooms, ibp_row_place *place)
{
    if (place->in_overflow == 0u) return true;
    if (table->bases == NULL) return false;
    const uint64_t first = base - table->overflow_start;
    if (!ibp_part_in_bounds(first, 0u, table->overflow_bytes)) return false; /* else first + rooms could wrap around */
    place->overflow_start = first + rooms;
    return ibp_part_in_bounds(place->overflow_start, place->in_overflow, table->overflow_bytes);
}

/* Checks both parts of a row. Returns false if the row is corrupt: as stored it would be larger than the row before
 * coding, or a part of it lies outside the table's arrays. */
IBP_INLINE bool ibp_place_in_bounds(const ibp_table *table, uint64_t base, uint32_t rooms, ibp_row_place *place)
{
    return ibp_slot_in_bounds(table, place) && ibp_overflow_in_bounds(table, base, rooms, place);
}

#endif
