/* ibp.h - public C API of the ibp core: codebooks, rows and tables in host memory. C11 and C++17.
 *
 * Lossless compression of tensors whose rows decode alone. The bytes are specified in FORMAT.md, to whose sections the
 * headers refer. This header includes the others; each may also be included alone. The rules below hold for all of
 * them. The CUDA twins, with device pointers and a stream, are in ibp_cuda.h, files in ibp_file.h.
 *
 *     bool is_current(void) // whether the library that is linked has what this header declares
 *     {
 *         return ibp_version_number() >= IBP_VERSION_NUMBER;
 *     }
 *
 * Memory. No function here allocates, prints or reads the environment. Callers own every buffer; no function keeps one
 * after it returns. Functions that code rows work in `scratch`: ibp_scratch_bytes(row_bytes) bytes, at any alignment,
 * whose content before and after means nothing. A function takes at most IBP_MAX_STACK_BYTES of stack.
 *
 * Threads. Every function may be called from several threads at once on different outputs and different scratch; inputs
 * may be shared. The only state is the set of processor features in use (ibp_set_cpu_features), an atomic.
 *
 * Arguments. Pointers are not NULL unless that is said. Sizes are exact. Every function checks its numbers and the
 * fields of the codebook or table that it is given, which takes a few nanoseconds, and returns IBP_INVALID_ARGUMENT for
 * unknown schemes and for values that are out of range or contradict each other. It does not check what arrays hold:
 * ibp_check_codebook and ibp_check_table do that, once, for codebooks that come from elsewhere.
 *
 * Safety. Coded bytes, lengths and bases may be hostile: they are detected or give wrong data, and nothing outside the
 * buffers is read or written. The same holds for a codebook whose fields are in range but whose arrays hold anything,
 * and for arrays that another thread writes during the call: rows, ids, positions, offsets, entries, lengths, bases
 * and what codebooks point to. A value that is checked is read once. During a call the structs that arguments point to
 * stay as they are, and so do addresses in arrays, which are trusted; scratch and workspaces are the call's own.
 *
 * ABI. While the major version is 0, a minor version may change anything in these headers; a patch version changes no
 * declaration. From version 1 on, a minor version only adds: functions, enumerators, and fields at the end of
 * ibp_codebook, ibp_planes and ibp_table, for which zero means what there was before. So zero structs before you fill
 * them in, and compare ibp_version_number() with IBP_VERSION_NUMBER where header and library may come from different
 * builds. The name of the shared library changes with every version that is not compatible. The format of stored bytes
 * has a version of its own. What stands under "unstable" may change with any version. */
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
/* Of the bytes of tables (FORMAT.md). */
#define IBP_FORMAT_VERSION 1

/* The version of the library that is linked, where the macros are those of the header: text, number, and that of the
 * format. */
IBP_API const char *ibp_version(void);
IBP_API int ibp_version_number(void);
IBP_API int ibp_format_version(void);

#ifdef __cplusplus
}
#endif
#endif
