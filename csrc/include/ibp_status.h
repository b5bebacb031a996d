/* ibp_status.h - statuses that functions return, faults of rows, and bounds that hold for all functions.
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

/* The statuses that functions return; IBP_STATUS_LIST has a description of each. */
typedef enum ibp_status {
#define IBP_STATUS_ENUM(name, value, text) name = value,
    IBP_STATUS_LIST(IBP_STATUS_ENUM)
#undef IBP_STATUS_ENUM
} ibp_status;

/* Returns an English description of a status as a NUL-terminated string. The result is never NULL, even if `status` is
 * not an ibp_status, and stays valid as long as the library is loaded. */
IBP_API const char *ibp_status_string(ibp_status status);

/* ---- bounds ----------------------------------------------------------------------------------------------------- */

#define IBP_MAX_ROW_BYTES 65536u
#define IBP_MAX_STACK_BYTES 32768u /* largest stack use of a function in bytes, as tests/c/test_stack.c measures it */

/* Size of the scratch for rows of row_bytes bytes, in bytes, as a constant expression. The AVX2 decoder of scheme
 * planes (planes_avx2.c) needs the most, for elements of one byte:
 *
 *   - three times the size of a row for the largest coded row, in which an element takes 8 bits of symbol and residual,
 *     and 16 bits of digits (section 6);
 *   - seven rows for levels, symbols and listed elements, bitmaps included;
 *   - one row for the live columns;
 *   - two rows for functions on tables: a row that lies partly in a slot and partly in overflow, and a row of which
 *     only a part is wanted.
 *
 * The rest is padding and alignment. */
#define IBP_SCRATCH_BYTES(row_bytes) (14 * (size_t)(row_bytes) + 4096)
#define IBP_MAX_SCRATCH_BYTES IBP_SCRATCH_BYTES(IBP_MAX_ROW_BYTES)

/* Largest size in bytes of the coded form of a row of row_bytes bytes with any codebook, as a constant expression. It
 * is the sum of 24 bits for each element of one byte, a bitmap of positions, and 16 bytes for the header, the number of
 * the cluster, and the padding of eight parts. In a table rows take less, because rows that would not shrink are stored
 * raw. */
#define IBP_CODED_ROW_BYTES(row_bytes) (3 * (size_t)(row_bytes) + ((size_t)(row_bytes) + 7) / 8 + 16)
#define IBP_MAX_CODED_ROW_BYTES IBP_CODED_ROW_BYTES(IBP_MAX_ROW_BYTES)

/* Stands for the coded size of a row that a codebook cannot code, because its invariant bits or constant columns differ
 * from the codebook's (section 6). It is larger than any buffer. A table stores such a row raw. */
#define IBP_NO_CODED_FORM ((size_t)UINT32_MAX)

/* Returns the size in bytes of the scratch for calls that code or decode rows of row_bytes bytes, as IBP_SCRATCH_BYTES
 * does; 0 unless row_bytes is 1 to IBP_MAX_ROW_BYTES. Each thread needs its own scratch. */
IBP_API size_t ibp_scratch_bytes(uint32_t row_bytes);

/* Returns the largest size in bytes of a coded row with any codebook, as IBP_CODED_ROW_BYTES does; 0 unless row_bytes
 * is 1 to IBP_MAX_ROW_BYTES. */
IBP_API size_t ibp_max_coded_row_bytes(uint32_t row_bytes);

/* ---- faults ------------------------------------------------------------------------------------------------------ */

/* The first fault among many rows. The caller sets the struct to zero before the call, and it stays zero if all rows
 * are right. It is written only while it is zero, so several calls can share one struct, which then receives the first
 * fault of all of them. Each field has eight bytes, so that a GPU can write it into mapped memory. */
typedef struct ibp_fault {
    int64_t status;   /* an ibp_status, such as IBP_INDEX_OUT_OF_RANGE or IBP_CORRUPT_ROW */
    int64_t position; /* position in the output; a row number in calls without ids */
    int64_t id;       /* the id at this position; a row number in calls without ids */
    int64_t taken;    /* 1 once a fault is stored; GPUs set it before the other fields */
} ibp_fault;

#ifdef __cplusplus
}
#endif
#endif
