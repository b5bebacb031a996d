/* ibp_status.h - what every function returns, the fault of a row, and bounds that hold for all functions.
 *
 *     #include <stdio.h>
 *
 *     int report(ibp_status status, const ibp_fault *fault)
 *     {
 *         if (status == IBP_OK) return 0;
 *         fprintf(stderr, "%s (at position %lld)\n", ibp_status_string(status), (long long)fault->position);
 *         return 1;
 *     }
 */
#ifndef IBP_STATUS_H
#define IBP_STATUS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define IBP_API
#else
#define IBP_API __attribute__((visibility("default")))
#endif

/* ---- status ----------------------------------------------------------------------------------------------------- */

#define IBP_STATUS_LIST(X)                                                                  \
    X(IBP_OK, 0, "no error")                                                                \
    X(IBP_INVALID_ARGUMENT, 1, "an argument is outside its documented range")               \
    X(IBP_INDEX_OUT_OF_RANGE, 2, "an item id is outside [0, num_items)")                    \
    X(IBP_CORRUPT_ROW, 3, "a coded row contradicts its length, its codebook or its buffer") \
    X(IBP_BUFFER_TOO_SMALL, 4, "an output buffer is smaller than documented")               \
    X(IBP_NO_CUDA, 5, "this build has no CUDA support")                                     \
    X(IBP_CUDA_ERROR, 6, "a CUDA call failed")                                              \
    X(IBP_BAD_FILE, 7, "the bytes are no file of this format, or contradict each other")    \
    X(IBP_NEWER_FILE, 8, "the file is of a newer version of the format")                    \
    X(IBP_NOT_IN_FILE, 9, "the file has no such table, tensor or checksums")                \
    X(IBP_UNSUPPORTED_TABLE, 10, "the table has fields or a codec that are not known here") \
    X(IBP_WRONG_CHECKSUM, 11, "bytes of the file do not have the checksum that it names")

typedef enum ibp_status {
#define IBP_STATUS_ENUM(name, value, text) name = value,
    IBP_STATUS_LIST(IBP_STATUS_ENUM)
#undef IBP_STATUS_ENUM
} ibp_status;

/* One sentence for a status; never NULL, also for values that are none. */
IBP_API const char *ibp_status_string(ibp_status status);

/* ---- bounds ----------------------------------------------------------------------------------------------------- */

#define IBP_MAX_ROW_BYTES 65536u
#define IBP_MAX_STACK_BYTES 32768u /* of any function here; tests/c/test_stack.c measures it */

/* Scratch for rows of row_bytes bytes. The most is what the AVX2 decoder of scheme planes takes for elements of one
 * byte: three times a row for the largest coded row (section 6: 8 bits of symbol and residual, 16 of digits), and
 * seven rows of levels, symbols and listed elements, bitmaps included; a row of the live columns; and two rows for a
 * row that lies in two parts, or is wanted in part. The rest is alignment and padding. */
#define IBP_SCRATCH_BYTES(row_bytes) (14 * (size_t)(row_bytes) + 4096)
#define IBP_MAX_SCRATCH_BYTES IBP_SCRATCH_BYTES(IBP_MAX_ROW_BYTES)

/* No codebook codes a row of row_bytes bytes in more than this: 24 bits for each element of one byte, a bitmap of
 * positions, and the header, the cluster's number and the padding of eight parts. A table stores rows raw that would
 * not shrink. */
#define IBP_CODED_ROW_BYTES(row_bytes) (3 * (size_t)(row_bytes) + ((size_t)(row_bytes) + 7) / 8 + 16)
#define IBP_MAX_CODED_ROW_BYTES IBP_CODED_ROW_BYTES(IBP_MAX_ROW_BYTES)

/* The size of a row that a codebook cannot code (section 6: its invariant bits or constant columns differ from the
 * codebook's): more bytes than any buffer has. A table stores such a row raw. */
#define IBP_NO_CODED_FORM ((size_t)UINT32_MAX)

/* IBP_SCRATCH_BYTES and IBP_CODED_ROW_BYTES as functions. 0 if row_bytes is not 1 to IBP_MAX_ROW_BYTES. */
IBP_API size_t ibp_scratch_bytes(uint32_t row_bytes);
IBP_API size_t ibp_max_coded_row_bytes(uint32_t row_bytes);

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* What went wrong first; all zero when nothing did. Eight-byte fields so that a GPU can write it into mapped memory. */
typedef struct ibp_fault {
    int64_t status;   /* an ibp_status: IBP_INDEX_OUT_OF_RANGE, IBP_CORRUPT_ROW or IBP_BUFFER_TOO_SMALL */
    int64_t position; /* position in the output; a row number where there are no ids */
    int64_t id;       /* the id there; a row number where there are no ids */
    int64_t taken;    /* used by the GPU to let the first fault win */
} ibp_fault;

#ifdef __cplusplus
}
#endif
#endif
