/* file.h - what the two halves of the reader of files share. */
#ifndef IBP_CORE_FILE_H
#define IBP_CORE_FILE_H

#include "json.h"

#define IBP_FILE_ALIGN 128u /* what the writer pads tensors to */

/* The value of a key of the metadata, whose name is these two, one after the other.
 * @return IBP_NOT_IN_FILE if it is not there, IBP_BAD_FILE if it is there twice. */
ibp_status ibp_find_metadata(const ibp_file *file, const char *prefix, const char *name, ibp_text *value);

/* Bits of an element of a dtype; 0 for one that is not known. */
uint32_t ibp_bits_of_dtype(ibp_text dtype);
/* Bytes of a tensor of num_dims dimensions whose elements have `bits` bits. @return false if they are no whole number,
 * or if the bits are too many for an int64_t, each size 0 taken as 1. */
bool ibp_bytes_of_shape(const int64_t *shape, uint32_t num_dims, uint32_t bits, int64_t *num_bytes);

#endif
