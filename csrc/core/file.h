/* file.h - declarations that the source files of the file reader share. json.c reads JSON strings and numbers,
 * file_fields.c reads the fields in these strings, file.c reads the header of a file, and file_tables.c opens tables.
 * Each of these files uses only the ones named before it. */
#ifndef IBP_CORE_FILE_H
#define IBP_CORE_FILE_H

#include "../internal/ibp_file_fields.h"
#include "json.h"

#define IBP_FILE_ALIGN 128u                                    /* the writer pads tensors to a multiple of this size */
#define IBP_SHAPE_BITS "2^63 - 1 bits, each size 0 taken as 1" /* the limit on the size of a tensor, for messages */

/* ---- file_fields.c ----------------------------------------------------------------------------------------------- */

/* The fields of a codebook. IBP_C_ROW and the fields after it are the same in all clusters of a codebook. */
enum {
    IBP_C_SCHEME,
    IBP_C_CLUSTERS,
    IBP_C_SAVINGS,
    IBP_C_TAU,
    IBP_C_PAIRS,
    IBP_C_ROW,
    IBP_C_CHUNK,
    IBP_C_FLAG_ALL,
    IBP_C_ELEMENT,
    IBP_C_ROTATE,
    IBP_C_RESIDUAL,
    IBP_C_DIGITS,
    IBP_C_PER_COLUMN,
    IBP_C_LISTED,
    IBP_C_DEFAULT,
    IBP_C_CLOSED,
    IBP_C_SIGNED,
    IBP_C_INVARIANT_BITS,
    IBP_C_INVARIANT_VALUE,
    IBP_C_FIRST,
    IBP_C_LIVE,
    IBP_C_COUNT
};

/* Records why a file is refused: what was found and what was wanted. Returns IBP_BAD_FILE. */
ibp_status ibp_refuse(ibp_refusal *refusal, ibp_text found, const char *wanted);
/* Reads all fields of a line, "key=value key=value". If the line also has keys that are not in `fields`, it reads the
 * other fields and returns IBP_UNSUPPORTED_TABLE. */
ibp_status ibp_read_fields(ibp_text line, ibp_field *fields, size_t num_fields, ibp_refusal *refusal);
/* Checks that all needed fields are given, and that every other given field is optional. needed, optional: sets of
 * fields, in which bit i stands for fields[i]. Returns IBP_BAD_FILE if a needed field is missing, or
 * IBP_UNSUPPORTED_TABLE if a field is given that is neither needed nor optional. */
ibp_status ibp_check_given(const ibp_field *fields, size_t num_fields, uint32_t needed, uint32_t optional,
                           ibp_refusal *refusal);
/* Records that a field is missing or has a wrong value. Returns IBP_BAD_FILE. */
ibp_status ibp_refuse_field(ibp_refusal *refusal, const ibp_field *of);
/* Takes the next number of a list, and the comma before it unless the number is the first. Returns false if no such
 * number comes next. */
bool ibp_take_listed(ibp_text *list, bool is_first, uint64_t *number);

/* Returns the number of bits of an element of a dtype, or 0 if the dtype is unknown. */
uint32_t ibp_bits_of_dtype(ibp_text dtype);
/* Computes the size in bytes of a tensor of num_dims dimensions whose elements have `bits` bits. Returns false if the
 * size is not a whole number of bytes, or if the number of bits, with each size 0 taken as 1, does not fit in an
 * int64_t. */
bool ibp_bytes_of_shape(const int64_t *shape, uint32_t num_dims, uint32_t bits, int64_t *num_bytes);

/* ---- file.c ------------------------------------------------------------------------------------------------------ */

/* Finds the value of the key `prefix` + `name` in the metadata. Returns IBP_NOT_IN_FILE if there is no such key, or
 * IBP_BAD_FILE if there are two. */
ibp_status ibp_find_metadata(const ibp_file *file, const char *prefix, const char *name, ibp_text *value);

#endif
