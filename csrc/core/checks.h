/* checks.h - checks of sizes and fields that read no memory, so that pointers may be device pointers. For gcc, g++ and
 * nvcc. */
#ifndef IBP_CHECKS_H
#define IBP_CHECKS_H

#include "format.h"
#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Check the fields of a codebook, or of a table and its codebook. Return IBP_OK, or IBP_INVALID_ARGUMENT if a field is
 * out of range or fields are inconsistent. schemes.c defines these functions. */
ibp_status ibp_check_codebook_fields(const ibp_codebook *codebook);
ibp_status ibp_check_table_fields(const ibp_table *table);
/* Returns whether a place is valid: its fields are consistent, its slots are large enough for all rows, and none of the
 * pointers slots, overflow, lengths, bases and `used` that its rows need is NULL. */
bool ibp_is_place(const ibp_place *place);
/* Returns whether ibp_move_parts accepts these arguments. */
bool ibp_can_move_parts(const ibp_table *table, const ibp_place *from, const uint8_t *overflow);
/* Returns whether the fields of a source are in range and consistent. row_bytes: size of the table's rows. */
bool ibp_is_row_source(const ibp_row_source *source, uint32_t row_bytes);

#ifdef __cplusplus
}
#endif

/* Returns whether num_bytes bytes of data can be cut into rows of row_bytes bytes. */
IBP_INLINE bool ibp_are_sizes(int64_t num_bytes, uint32_t row_bytes)
{
    return num_bytes >= 0 && num_bytes <= INT64_MAX / (int64_t)IBP_OVERFLOW_ALIGN && row_bytes >= 1 &&
           row_bytes <= IBP_MAX_ROW_BYTES;
}

/* Returns whether num_items items of item_bytes bytes are within the limits of a table. */
IBP_INLINE bool ibp_are_items(int64_t num_items, int64_t item_bytes)
{
    const int64_t most = INT64_MAX / (int64_t)IBP_OVERFLOW_ALIGN;
    return num_items >= 0 && item_bytes >= 0 && (item_bytes == 0 || num_items <= most / item_bytes);
}

/* Returns whether slots can have this size (section 3). */
IBP_INLINE bool ibp_is_slot(uint32_t slot_bytes, uint32_t row_bytes)
{
    return slot_bytes == row_bytes || (slot_bytes < row_bytes && slot_bytes % IBP_OVERFLOW_ALIGN == 0);
}

/* Returns whether elements or chunks can have this size. */
IBP_INLINE bool ibp_is_element_size(uint32_t num_bytes)
{
    return num_bytes == 1u || num_bytes == 2u || num_bytes == 4u || num_bytes == 8u;
}

/* Returns whether the arrays slots and overflow exist. An array without bytes may be NULL. */
IBP_INLINE bool ibp_has_arrays(const ibp_table *table, const uint8_t *slots, const uint8_t *overflow)
{
    return (slots != NULL || table->slots_bytes == 0) && (overflow != NULL || table->overflow_bytes == 0);
}

/* Returns whether rows are packed: they have neither slots nor bases, and each row begins where the row before it
 * ends. */
IBP_INLINE bool ibp_is_packed(const ibp_place *place) { return place->table.slot_bytes == 0u && place->bases == NULL; }

IBP_INLINE bool ibp_has_clusters(const ibp_codebook *codebook) { return codebook->num_clusters > 1u; }

#endif
