/* ibp.h - public C API of the ibp core: codebooks, rows and tables in host memory. C11 and C++17.
 *
 * Lossless compression of tensors whose rows can be decoded one by one. FORMAT.md specifies the bytes; the headers
 * refer to its sections. This header includes the other headers for host memory, except ibp_file.h, which reads files.
 * ibp_cuda.h declares versions of these functions for GPUs, which take device pointers and a stream. Each header may
 * also be included alone. The following rules hold for all of them.
 *
 *     bool is_current(void) // returns whether the linked library has everything that this header declares
 *     {
 *         return ibp_version_number() >= IBP_VERSION_NUMBER;
 *     }
 *
 * Memory. No function here allocates memory, prints or reads the environment. Callers own every buffer; no function
 * keeps a pointer after it returns. Functions that code rows work in `scratch`, which has ibp_scratch_bytes(row_bytes)
 * bytes at any alignment. The contents of scratch mean nothing before and after a call. A function uses at most
 * IBP_MAX_STACK_BYTES of stack.
 *
 * Alignment. Data, rows, coded bytes and outputs may begin at any address. Arrays of numbers must be aligned to their
 * type, unless a larger alignment is stated.
 *
 * Threads. Several threads may call any function at once if their outputs and their scratch differ; they may share
 * inputs. The library has a single piece of state, an atomic that says which features of the processor it uses.
 *
 * Arguments. Pointers must not be NULL unless NULL is mentioned. Sizes are exact. Every function checks its numeric
 * arguments and the fields of its codebook or table, which takes a few nanoseconds. It returns IBP_INVALID_ARGUMENT if
 * the scheme is unknown, if a value is out of range, or if values are inconsistent. It does not check the contents of
 * arrays: call ibp_check_codebook and ibp_check_table once for codebooks and tables that come from elsewhere.
 *
 * Safety. Coded bytes, lengths and bases may be hostile: they are refused or give wrong data, and nothing outside the
 * buffers is read or written. The same holds for a codebook whose fields are in range, whatever its arrays contain. It
 * also holds if another thread writes rows, ids, positions, offsets, lengths, bases or the arrays of codebooks during
 * the call, because a function that checks a value reads the value from memory only once. Addresses that are stored in
 * arrays, such as ibp_ids.addresses, are trusted. During a call no other thread may write these addresses, the structs
 * that arguments point to, scratch, or workspaces.
 *
 * ABI. While the major version is 0, a minor version may change anything in these headers; a patch version changes no
 * declaration. Beginning with version 1, a minor version only adds functions, enumerators, and fields at the end of
 * ibp_codebook, ibp_planes and ibp_table. If a new field is zero, the struct means what it meant before the field
 * existed. So set structs to zero before you fill them in. Compare ibp_version_number() with IBP_VERSION_NUMBER if
 * header and library may come from different builds. The name of the shared library changes with every version that is
 * not compatible. The format of stored bytes has a separate version, IBP_FORMAT_VERSION. */
#ifndef IBP_H
#define IBP_H

#include "ibp_status.h"
#include "ibp_codebook.h"
#include "ibp_learn.h"
#include "ibp_rows.h"
#include "ibp_table.h"
#include "ibp_place.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_VERSION "0.3.0"
#define IBP_VERSION_MAJOR 0
#define IBP_VERSION_MINOR 3
#define IBP_VERSION_PATCH 0
/* A number that grows with every version. */
#define IBP_VERSION_NUMBER (IBP_VERSION_MAJOR * 10000 + IBP_VERSION_MINOR * 100 + IBP_VERSION_PATCH)
/* The version of the format of stored bytes (FORMAT.md). */
#define IBP_FORMAT_VERSION 1

/* The macros above describe the header that you compile with. The following functions describe the library that you
 * link or load. */

/* Returns the version of the library as a string, such as "0.3.0". The string stays valid as long as the library is
 * loaded. */
IBP_API const char *ibp_version(void);

/* Returns the version of the library as a number, which can be compared with IBP_VERSION_NUMBER of the header. */
IBP_API int ibp_version_number(void);

/* Returns the version of the format that the library writes. The library reads this version and all older versions
 * since version 1. */
IBP_API int ibp_format_version(void);

#ifdef __cplusplus
}
#endif
#endif
