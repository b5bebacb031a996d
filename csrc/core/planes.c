/* planes.c - codes and decodes rows of scheme planes in plain C (FORMAT.md section 6). It is the reference that every
 * other encoder and decoder is compared with. A coded row consists of parts, each of which is padded to a byte:
 *
 *     values:      residuals | digits of plane 0 | digits of plane 1 | ... | raw symbols
 *     dense row:   values of all columns
 *     listed row:  header | positions | highest bits of unlisted elements | values of listed elements
 *
 * A listed row has positions if any element is listed, highest bits if the codebook has signed_default, and values if
 * any element is listed and the row is not closed. */
#include "bits.h"
#include "planes_layout.h"
#include "schemes.h"

static uint64_t load_number(const void *numbers, size_t i, uint32_t num_bytes)
{
    return ibp_load_number((const uint8_t *)numbers + i * num_bytes, num_bytes);
}

/* ---- codebooks ---- */

/* Computes the number of entries of a column. Returns false if a plane's digits have an invalid number of bits. */
static bool count_entries(const ibp_planes *p, uint32_t *num_entries)
{
    *num_entries = 0;
    for (uint32_t i = 0; i < p->num_planes; i++) {
        if (p->digit_bits[i] < 1 || p->digit_bits[i] > IBP_MAX_DIGIT_BITS) return false;
        *num_entries += ibp_escape_of(p, i);
    }
    return true;
}

/* Returns the size in bytes of one cluster's entries. It cannot overflow, because there are at most 2^16 columns with
 * 60 entries of 8 bytes each. */
static size_t bytes_of_entries(const ibp_codebook *cb)
{
    const ibp_planes *const p = &cb->planes;
    return p->consecutive ? 0 : (size_t)(p->per_column ? ibp_columns_of(cb) : 1) * p->num_entries * p->symbol_bytes;
}

static bool fits_bits(uint64_t value, uint32_t num_bits) { return ibp_low_bits(value, num_bits) == value; }

/* Returns whether the fields split the bits of an element into invariant, symbol and residual bits. */
static bool are_bits(const ibp_planes *p)
{
    return ibp_is_element_size(p->element_bytes) && p->invariant_bits < ibp_element_bits(p) &&
           p->residual_bits <= ibp_coded_bits(p);
}

static bool are_constants(const ibp_codebook *cb)
{
    const ibp_planes *const p = &cb->planes;
    if (p->num_constant == 0) return true;
    const bool are_aligned = (uintptr_t)p->live_columns % 2 == 0 && (uintptr_t)p->row_template % 16 == 0;
    return p->num_constant < cb->row_bytes / p->element_bytes && p->live_columns && p->row_template && are_aligned;
}

bool ibp_are_planes_fields(const ibp_codebook *cb)
{
    const ibp_planes *const p = &cb->planes;
    uint32_t num_entries;
    if (!are_bits(p) || cb->row_bytes % p->element_bytes != 0 || !are_constants(cb)) return false;
    if (p->rotate > 1 || p->num_planes > IBP_MAX_PLANES || (p->per_column && p->listed)) return false;
    if (!fits_bits(p->default_value, ibp_element_bits(p)) || !fits_bits(p->closed_value, ibp_element_bits(p)))
        return false;
    if (!fits_bits(p->invariant_value, p->invariant_bits) || (p->signed_default && !p->listed)) return false;
    if (!count_entries(p, &num_entries) || p->num_entries != num_entries) return false;
    if (p->symbol_bytes != ibp_bytes_of_symbol(ibp_symbol_bits(p))) return false;
    if (p->consecutive)
        return !p->per_column && !ibp_has_clusters(cb) && fits_bits(p->first_symbol, ibp_symbol_bits(p));
    if (num_entries != 0 && (!p->entries || (uintptr_t)p->entries % p->symbol_bytes != 0)) return false;
    return !ibp_has_clusters(cb) ||
           (cb->cluster_stride >= bytes_of_entries(cb) && cb->cluster_stride % p->symbol_bytes == 0);
}

bool ibp_are_planes_arrays(const ibp_codebook *cb)
{
    const ibp_planes *const p = &cb->planes;
    const size_t num_entries = bytes_of_entries(cb) / p->symbol_bytes;
    for (size_t i = 0; i < num_entries; i++)
        if (!fits_bits(load_number(p->entries, i, p->symbol_bytes), ibp_symbol_bits(p))) return false;
    if (p->num_constant == 0) return true;
    for (uint32_t i = 0, least = 0; i < ibp_columns_of(cb); i++) {
        const uint32_t column = p->live_columns[i];
        if (column < least || column >= cb->row_bytes / p->element_bytes) return false;
        if (load_number(p->row_template, column, p->element_bytes) != p->default_value) return false;
        least = column + 1;
    }
    return true;
}

void ibp_write_out_planes(const ibp_codebook *cb, uint64_t *entries, ibp_codebook *out)
{
    *out = *cb;
    ibp_planes *const p = &out->planes;
    out->row_bytes = ibp_columns_of(cb) * p->element_bytes;
    p->num_constant = 0;
    if (!p->consecutive) return;
    p->consecutive = false;
    p->entries = entries;
    for (uint32_t i = 0; i < p->num_entries; i++) {
        const uint64_t entry = ibp_low_bits(p->first_symbol + i, ibp_symbol_bits(p));
        memcpy((uint8_t *)entries + i * p->symbol_bytes, &entry, p->symbol_bytes);
    }
}

void ibp_select_planes(ibp_codebook *one, uint32_t k)
{
    if (one->planes.entries)
        one->planes.entries = (const uint8_t *)one->planes.entries + (size_t)k * one->cluster_stride;
}

ibp_status ibp_build_planes_codebook(const ibp_planes *planes, uint32_t row_bytes, size_t entries_bytes,
                                     ibp_codebook *out)
{
    ibp_codebook cb = {.scheme = IBP_SCHEME_PLANES, .row_bytes = row_bytes, .planes = *planes};
    ibp_planes *const p = &cb.planes;
    if (!are_bits(p) || p->num_planes > IBP_MAX_PLANES) return IBP_INVALID_ARGUMENT;
    if (!count_entries(p, &p->num_entries)) return IBP_INVALID_ARGUMENT;
    p->symbol_bytes = ibp_bytes_of_symbol(ibp_symbol_bits(p));
    if (ibp_check_codebook_fields(&cb) != IBP_OK) return IBP_INVALID_ARGUMENT;
    const size_t set_bytes = bytes_of_entries(&cb), num_sets = set_bytes ? entries_bytes / set_bytes : 1;
    if (entries_bytes != num_sets * set_bytes || num_sets < 1 || num_sets > IBP_MAX_CLUSTERS)
        return IBP_INVALID_ARGUMENT;
    if (num_sets > 1) cb.num_clusters = (uint32_t)num_sets, cb.cluster_stride = (uint32_t)set_bytes;
    *out = cb;
    return IBP_OK;
}

/* ---- elements ---- */

static uint64_t rotate_left(uint64_t x, uint32_t by, uint32_t width)
{
    return by == 0 ? x : ibp_low_bits(x << by, width) | x >> (width - by);
}

/* Returns the index of the first entry that equals a symbol, or num_entries if there is no such entry. */
static uint32_t rank_of(const ibp_planes *planes, uint32_t column, uint64_t symbol)
{
    const size_t first = planes->per_column ? (size_t)column * planes->num_entries : 0;
    uint32_t rank = 0;
    while (rank < planes->num_entries && load_number(planes->entries, first + rank, planes->symbol_bytes) != symbol)
        rank++;
    return rank;
}

/* ---- encoding ---- */

/* Facts about a row from which its coded size follows. reaching: as in ibp_lay_out. closed: whether all listed elements
 * equal closed_value. has_form: whether the codebook can code the row. */
typedef struct row_census {
    uint32_t reaching[IBP_MAX_PLANES + 1];
    bool closed, has_form;
} row_census;

static uint64_t sign_of(const ibp_planes *planes) { return (uint64_t)1 << (ibp_element_bits(planes) - 1); }

static bool is_listed(const ibp_planes *planes, uint64_t element)
{
    const uint64_t differing = element ^ planes->default_value;
    return !planes->listed || (planes->signed_default ? differing & ~sign_of(planes) : differing) != 0;
}

static void split_element(const ibp_planes *planes, uint64_t element, uint64_t *symbol, uint64_t *residual)
{
    const uint64_t rotated = rotate_left(element >> planes->invariant_bits, planes->rotate, ibp_coded_bits(planes));
    *symbol = planes->residual_bits >= 64 ? 0 : rotated >> planes->residual_bits;
    *residual = ibp_low_bits(rotated, planes->residual_bits);
}

static row_census take_census(const ibp_codebook *cb, const uint8_t *row)
{
    const ibp_planes *const planes = &cb->planes;
    row_census census = {{0}, planes->listed, true};
    for (uint32_t column = 0; column < ibp_columns_of(cb); column++) {
        const uint64_t element = load_number(row, column, planes->element_bytes);
        if (!is_listed(planes, element)) continue;
        census.closed = census.closed && element == planes->closed_value;
        census.has_form = census.has_form && ibp_low_bits(element, planes->invariant_bits) == planes->invariant_value;
        uint64_t symbol, residual;
        split_element(planes, element, &symbol, &residual);
        const uint32_t rank = rank_of(planes, column, symbol);
        for (uint32_t p = 0, first = 0; p <= planes->num_planes && rank >= first;
             first += ibp_escape_of(planes, p), p++) {
            census.reaching[p]++;
            if (p == planes->num_planes) break;
        }
    }
    census.closed = census.closed && census.reaching[0] > 0;
    census.has_form = census.has_form || census.closed;
    return census;
}

static void write_positions(const ibp_codebook *cb, const uint8_t *row, const row_census *census,
                            ibp_position_form form, uint8_t *dst, size_t dst_bytes)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t columns = ibp_columns_of(cb), k = census->reaching[0];
    ibp_or_bits(dst, dst_bytes, 0, k | (census->closed ? ibp_closed_bit(columns) : 0));
    if (k == 0) return;
    const size_t start = 8 * (size_t)ibp_header_bytes(columns), low_start = start + ibp_to_byte(form.upper_bits);
    uint32_t written = 0;
    for (uint32_t column = 0; column < columns; column++) {
        const bool listed = is_listed(planes, load_number(row, column, planes->element_bytes));
        if (!form.is_list) {
            ibp_or_bits(dst, dst_bytes, start + column, listed);
        } else if (listed != form.is_complement) {
            ibp_or_bits(dst, dst_bytes, start + (column >> form.low_bits) + written, 1);
            ibp_or_bits(dst, dst_bytes, low_start + (size_t)written * form.low_bits,
                        ibp_low_bits(column, form.low_bits));
            written++;
        }
    }
}

/* Writes the highest bits of the elements that are not listed, beginning at bit `at`. */
static void write_signs(const ibp_codebook *cb, const uint8_t *row, size_t at, uint8_t *dst, size_t dst_bytes)
{
    const ibp_planes *const planes = &cb->planes;
    for (uint32_t column = 0; column < ibp_columns_of(cb); column++) {
        const uint64_t element = load_number(row, column, planes->element_bytes);
        if (!is_listed(planes, element)) ibp_or_bits(dst, dst_bytes, at++, (element & sign_of(planes)) != 0);
    }
}

static void write_values(const ibp_codebook *cb, const uint8_t *row, ibp_value_parts parts, uint8_t *dst,
                         size_t dst_bytes)
{
    const ibp_planes *const planes = &cb->planes;
    for (uint32_t column = 0; column < ibp_columns_of(cb); column++) {
        const uint64_t element = load_number(row, column, planes->element_bytes);
        if (!is_listed(planes, element)) continue;
        uint64_t symbol, residual;
        split_element(planes, element, &symbol, &residual);
        ibp_or_bits(dst, dst_bytes, parts.residuals, residual);
        parts.residuals += planes->residual_bits;
        uint32_t rank = rank_of(planes, column, symbol), p = 0;
        for (; p < planes->num_planes; p++) {
            const uint32_t digit = ibp_min_u32(rank, ibp_escape_of(planes, p));
            ibp_or_bits(dst, dst_bytes, parts.digits[p], digit);
            parts.digits[p] += planes->digit_bits[p];
            if (digit < ibp_escape_of(planes, p)) break;
            rank -= digit;
        }
        if (p < planes->num_planes) continue;
        ibp_or_bits(dst, dst_bytes, parts.digits[p], symbol);
        parts.digits[p] += ibp_symbol_bits(planes);
    }
}

static ibp_status encode(const ibp_codebook *cb, const uint8_t *row, uint8_t *dst, size_t dst_bytes,
                         size_t *coded_bytes, ibp_scratch scratch)
{
    (void)scratch;
    const row_census census = take_census(cb, row);
    const ibp_listed_parts listed = ibp_lay_out_listed(cb, census.reaching[0]);
    const ibp_value_parts values = ibp_lay_out(&cb->planes, listed.values, census.reaching);
    const bool has_values = !census.closed && census.reaching[0] != 0;
    const size_t num_bytes = (has_values ? values.end : listed.values) / 8;
    *coded_bytes = census.has_form ? num_bytes : IBP_NO_CODED_FORM;
    if (num_bytes > dst_bytes || !census.has_form) return IBP_BUFFER_TOO_SMALL;
    memset(dst, 0, num_bytes);
    if (cb->planes.listed) write_positions(cb, row, &census, listed.form, dst, num_bytes);
    if (cb->planes.signed_default) write_signs(cb, row, listed.signs, dst, num_bytes);
    if (has_values) write_values(cb, row, values, dst, num_bytes);
    return IBP_OK;
}

/* ---- decoding ---- */

/* A coded row, and the bit up to which each part of its values has been read. */
typedef struct value_reader {
    const ibp_planes *planes;
    const uint8_t *src;
    size_t src_bytes;
    ibp_value_parts parts;
} value_reader;

/* Finds the parts of n values that begin at bit `start`. Returns false unless they end exactly at the end of src. */
static bool open_values(value_reader *reader, size_t start, uint32_t n)
{
    const ibp_planes *const planes = reader->planes;
    uint32_t reaching[IBP_MAX_PLANES + 1] = {n};
    for (uint32_t p = 0; p < planes->num_planes; p++) {
        reader->parts = ibp_lay_out(planes, start, reaching);
        if (reader->parts.digits[p + 1] > 8 * reader->src_bytes) return false;
        for (uint32_t i = 0; i < reaching[p]; i++) {
            const size_t at = reader->parts.digits[p] + (size_t)i * planes->digit_bits[p];
            reaching[p + 1] +=
                ibp_load_field(reader->src, reader->src_bytes, at, planes->digit_bits[p]) == ibp_escape_of(planes, p);
        }
    }
    reader->parts = ibp_lay_out(planes, start, reaching);
    return reader->parts.end == 8 * reader->src_bytes;
}

static uint64_t read_field(const value_reader *reader, size_t *position, uint32_t num_bits)
{
    const uint64_t field = ibp_load_field(reader->src, reader->src_bytes, *position, num_bits);
    *position += num_bits;
    return field;
}

static uint64_t read_value(value_reader *reader, uint32_t column)
{
    const ibp_planes *const planes = reader->planes;
    const size_t first = planes->per_column ? (size_t)column * planes->num_entries : 0;
    uint64_t symbol = 0;
    uint32_t entry = 0, p = 0;
    for (; p < planes->num_planes; p++) {
        const uint32_t digit = (uint32_t)read_field(reader, &reader->parts.digits[p], planes->digit_bits[p]);
        entry += digit;
        if (digit < ibp_escape_of(planes, p)) break;
    }
    if (p < planes->num_planes)
        symbol = load_number(planes->entries, first + entry, planes->symbol_bytes);
    else
        symbol = read_field(reader, &reader->parts.digits[p], ibp_symbol_bits(planes));
    const uint32_t width = ibp_coded_bits(planes), r = planes->residual_bits;
    const uint64_t residual = read_field(reader, &reader->parts.residuals, r);
    const uint64_t rotated = ibp_low_bits((r >= 64 ? 0 : symbol << r) | residual, width);
    const uint64_t coded = planes->rotate ? rotate_left(rotated, width - 1, width) : rotated;
    return coded << planes->invariant_bits | planes->invariant_value;
}

static void store_element(const ibp_planes *planes, uint8_t *row, uint32_t column, uint64_t element)
{
    memcpy(row + (size_t)column * planes->element_bytes, &element, planes->element_bytes);
}

enum { BITMAP_BYTES = IBP_MAX_ROW_BYTES / 8 };

/* Reads the listed positions into a bitmap of `columns` bits. Returns false unless there are exactly
 * form->num_positions positions, in increasing order. */
static bool read_positions(const value_reader *reader, uint32_t columns, const ibp_position_form *form, uint8_t *bitmap)
{
    const size_t start = 8 * (size_t)ibp_header_bytes(columns), low_start = start + ibp_to_byte(form->upper_bits);
    uint32_t found = 0, least = 0;
    memset(bitmap, form->is_complement ? 0xff : 0, BITMAP_BYTES);
    for (uint32_t i = 0; i < form->upper_bits; i++) {
        if (!(ibp_load_bits(reader->src, reader->src_bytes, start + i) & 1)) continue;
        uint32_t position = i;
        if (form->is_list) {
            const uint64_t low = ibp_load_field(reader->src, reader->src_bytes,
                                                low_start + (size_t)found * form->low_bits, form->low_bits);
            position = (i - found) << form->low_bits | (uint32_t)low;
        }
        found++;
        if (position < least || position >= columns || found > form->num_positions) return false;
        least = position + 1;
        bitmap[position / 8] ^= (uint8_t)(1u << (position % 8));
    }
    return found == form->num_positions;
}

static ibp_status decode_listed(const ibp_codebook *cb, value_reader *reader, uint8_t *row)
{
    const ibp_planes *const planes = &cb->planes;
    const uint32_t columns = ibp_columns_of(cb), src_bytes = (uint32_t)reader->src_bytes;
    const uint64_t bits = ibp_load_field(reader->src, reader->src_bytes, 0, 8 * ibp_header_bytes(columns));
    ibp_listed_header header;
    if (!ibp_split_header((uint32_t)bits, src_bytes, columns, &header)) return IBP_CORRUPT_ROW;
    const uint32_t k = header.num_listed;
    const bool has_values = k > 0 && !header.is_closed;
    const ibp_listed_parts parts = ibp_lay_out_listed(cb, k);
    if (has_values ? parts.values > 8 * reader->src_bytes : parts.values != 8 * reader->src_bytes)
        return IBP_CORRUPT_ROW;
    uint8_t bitmap[BITMAP_BYTES] = {0};
    if (k > 0 && !read_positions(reader, columns, &parts.form, bitmap)) return IBP_CORRUPT_ROW;
    if (has_values && !open_values(reader, parts.values, k)) return IBP_CORRUPT_ROW;
    size_t sign = parts.signs;
    for (uint32_t column = 0; column < columns; column++) {
        const bool listed = bitmap[column / 8] & (1 << (column % 8));
        uint64_t element = planes->default_value;
        if (listed)
            element = header.is_closed ? planes->closed_value : read_value(reader, column);
        else if (planes->signed_default)
            element = (element & ~sign_of(planes)) | read_field(reader, &sign, 1) << (ibp_element_bits(planes) - 1);
        store_element(planes, row, column, element);
    }
    return IBP_OK;
}

static ibp_status decode(const ibp_codebook *cb, const uint8_t *src, size_t src_bytes, uint8_t *row,
                         ibp_scratch scratch)
{
    (void)scratch;
    value_reader reader = {.planes = &cb->planes, .src = src, .src_bytes = src_bytes};
    if (cb->planes.listed) return decode_listed(cb, &reader, row);
    if (!open_values(&reader, 0, ibp_columns_of(cb))) return IBP_CORRUPT_ROW;
    for (uint32_t column = 0; column < ibp_columns_of(cb); column++)
        store_element(&cb->planes, row, column, read_value(&reader, column));
    return IBP_OK;
}

const ibp_row_coder ibp_planes_plain = {NULL, encode, decode};
