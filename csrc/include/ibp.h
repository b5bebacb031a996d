/* ibp.h - public C API of the ibp core: codebooks, rows and tables in host memory. C11 and C++17.
 *
 * Lossless compression of tensors, each of whose rows can be decoded alone. FORMAT.md specifies the bytes; the headers
 * refer to its sections. This header includes the others for host memory but ibp_file.h, which reads files. ibp_cuda.h
 * declares the CUDA twins, which take device pointers and a stream. Each header may also be included alone. The
 * following rules hold for all of them.
 *
 *     bool is_current(void) // whether the library that is linked has what this header declares
 *     {
 *         return ibp_version_number() >= IBP_VERSION_NUMBER;
 *     }
 *
 * Memory. No function here allocates memory, prints or reads the environment. Callers own every buffer; no function
 * keeps a pointer after it returns. Functions that code rows work in `scratch`, which has ibp_scratch_bytes(row_bytes)
 * bytes at any alignment. What scratch holds before and after a call means nothing. A function uses at most
 * IBP_MAX_STACK_BYTES of stack.
 *
 * Alignment. Data, rows, coded bytes and outputs may begin at any address. Arrays of numbers have the alignment of
 * their type, unless more is asked for.
 *
 * Threads. Several threads may call any function at once if their outputs and their scratch differ; they may share
 * inputs. The library's only state says which features of the processor it uses; it is an atomic.
 *
 * Arguments. Pointers are not NULL unless NULL is mentioned. Sizes are exact. Every function checks its numbers and the
 * fields of its codebook or table, which takes a few nanoseconds, and returns IBP_INVALID_ARGUMENT if the scheme is
 * unknown, if a value is out of range, or if values contradict each other. It does not check what arrays hold: call
 * ibp_check_codebook and ibp_check_table once for codebooks that come from elsewhere.
 *
 * Safety. Coded bytes, lengths and bases may be hostile: they are refused or give wrong data, and nothing outside the
 * buffers is read or written. The same holds if a codebook has fields in range and arrays with any contents, and if
 * another thread writes arrays during the call: rows, ids, positions, offsets, lengths, bases and what codebooks point
 * to. A function reads a value that it checks only once. Addresses in arrays are trusted. During a call nobody else may
 * write the structs that arguments point to, such addresses, scratch, or workspaces.
 *
 * ABI. While the major version is 0, a minor version may change anything in these headers; a patch version changes no
 * declaration. From version 1 on, a minor version only adds functions, enumerators, and fields at the end of
 * ibp_codebook, ibp_planes and ibp_table. A new field that is zero means what was the case without it. So zero structs
 * before you fill them in, and compare ibp_version_number() with IBP_VERSION_NUMBER if header and library may come from
 * different builds. The name of the shared library changes with every version that is not compatible. The format of
 * stored bytes has a version of its own. */
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

#define IBP_VERSION "0.2.0"
#define IBP_VERSION_MAJOR 0
#define IBP_VERSION_MINOR 2
#define IBP_VERSION_PATCH 0
/* Grows with every version. */
#define IBP_VERSION_NUMBER (IBP_VERSION_MAJOR * 10000 + IBP_VERSION_MINOR * 100 + IBP_VERSION_PATCH)
/* The version of the format of stored bytes (FORMAT.md). */
#define IBP_FORMAT_VERSION 1

/* The macros above describe the header that you compile with. The following functions describe the library that you
 * link or load. */

/* Returns the version of the library as text, such as "0.2.0". The text lives as long as the library is loaded. */
IBP_API const char *ibp_version(void);

/* Returns the version of the library as a number, which can be compared with IBP_VERSION_NUMBER of the header. */
IBP_API int ibp_version_number(void);

/* Returns the version of the format that the library writes. The library reads this version and all older ones from
 * version 1 on. */
IBP_API int ibp_format_version(void);

#ifdef __cplusplus
}
#endif
#endif
