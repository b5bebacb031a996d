/* version.c - status texts and the library's version. */
#include "ibp.h"

const char *ibp_status_string(ibp_status status)
{
    switch (status) {
#define IBP_STATUS_TEXT(name, value, text) \
    case name: return text;
        IBP_STATUS_LIST(IBP_STATUS_TEXT)
#undef IBP_STATUS_TEXT
    }
    return "not an ibp_status";
}

const char *ibp_version(void) { return IBP_VERSION; }
