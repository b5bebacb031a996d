/* planes_layout.h - computes where the parts of a row of scheme planes lie (FORMAT.md section 6). The C coders of that
 * scheme share it. */
#ifndef IBP_PLANES_LAYOUT_H
#define IBP_PLANES_LAYOUT_H

#include "format.h"
#include "ibp.h"

/* Returns the number of live columns, which are the columns that are coded. */
static inline uint32_t ibp_columns_of(const ibp_codebook *cb)
{
    return cb->row_bytes / cb->planes.element_bytes - cb->planes.num_constant;
}

static inline uint32_t ibp_element_bits(const ibp_planes *planes) { return 8 * planes->element_bytes; }

/* Returns the number of bits of an element that are coded. */
static inline uint32_t ibp_coded_bits(const ibp_planes *planes)
{
    return ibp_element_bits(planes) - planes->invariant_bits;
}

static inline uint32_t ibp_symbol_bits(const ibp_planes *planes)
{
    return ibp_coded_bits(planes) - planes->residual_bits;
}

/* Returns the size in bytes of a symbol in an array of entries. */
static inline uint32_t ibp_bytes_of_symbol(uint32_t symbol_bits)
{
    return symbol_bits <= 8 ? 1 : symbol_bits <= 16 ? 2 : symbol_bits <= 32 ? 4 : 8;
}

/* Returns the digit of a plane that says that the symbol is not among the plane's entries: all bits are set. */
static inline uint32_t ibp_escape_of(const ibp_planes *planes, uint32_t plane)
{
    return (1u << planes->digit_bits[plane]) - 1;
}

/* Where the residuals, the digits of each plane, and the raw symbols of n elements begin, in bits from the start of the
 * coded row. Each of these parts begins at a byte. */
typedef struct ibp_value_parts {
    size_t residuals;
    size_t digits[IBP_MAX_PLANES + 1]; /* digits[p]: the digits of plane p; digits[num_planes]: the raw symbols */
    size_t end;
} ibp_value_parts;

static inline size_t ibp_to_byte(size_t bits) { return (bits + 7) / 8 * 8; }

/* Computes the positions of the parts. start: the bit at which the values begin. reaching[p]: number of elements with a
 * digit in plane p; reaching[num_planes]: number of elements with a raw symbol. */
static inline ibp_value_parts ibp_lay_out(const ibp_planes *planes, size_t start, const uint32_t *reaching)
{
    ibp_value_parts parts = {.residuals = start};
    parts.digits[0] = start + ibp_to_byte((size_t)reaching[0] * planes->residual_bits);
    for (uint32_t p = 0; p < planes->num_planes; p++)
        parts.digits[p + 1] = parts.digits[p] + ibp_to_byte((size_t)reaching[p] * planes->digit_bits[p]);
    parts.end =
        parts.digits[planes->num_planes] + ibp_to_byte((size_t)reaching[planes->num_planes] * ibp_symbol_bits(planes));
    return parts;
}

/* The layout of a row with k listed elements: the form in which their positions are stored, and the bits at which two
 * parts begin: `signs`, the highest bits of the unlisted elements, and `values`, the values of the listed elements. All
 * fields are 0 if rows are dense. */
typedef struct ibp_listed_parts {
    ibp_position_form form;
    size_t signs, values;
} ibp_listed_parts;

static inline ibp_listed_parts ibp_lay_out_listed(const ibp_codebook *cb, uint32_t k)
{
    ibp_listed_parts parts = {{0}, 0, 0};
    if (!cb->planes.listed) return parts;
    const uint32_t columns = ibp_columns_of(cb);
    parts.form = ibp_choose_position_form(k, columns);
    parts.signs = 8 * (size_t)(ibp_header_bytes(columns) + (k ? parts.form.num_bytes : 0));
    parts.values = parts.signs + (cb->planes.signed_default ? ibp_to_byte(columns - k) : 0);
    return parts;
}

#endif
