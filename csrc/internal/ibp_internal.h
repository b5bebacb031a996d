/* ibp_internal.h - everything that libibp exports: the installed headers, and those of this folder.
 *
 * The functions of this folder are exported for the Python package, which is built together with the library. Their
 * headers are not installed, and any version may change them. Otherwise the rules of ibp.h and ibp_cuda.h hold. */
#ifndef IBP_INTERNAL_H
#define IBP_INTERNAL_H

#include "ibp_cuda.h"
#include "ibp_file.h"

#include "ibp_cache.h"
#include "ibp_coding.h"
#include "ibp_file_fields.h"
#include "ibp_fingerprint.h"
#include "ibp_gathers.h"
#include "ibp_linear.h"
#include "ibp_machine.h"
#include "ibp_pages.h"
#include "ibp_stream.h"

#endif
