/* version.c - returns the messages for statuses, and the versions of the library and of the format. */
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

#define TEXT_OF(x) #x
#define VERSION_TEXT(major, minor, patch) TEXT_OF(major) "." TEXT_OF(minor) "." TEXT_OF(patch)

/* The version string is built from the three numbers, so that a test can compare it with IBP_VERSION. */
const char *ibp_version(void) { return VERSION_TEXT(IBP_VERSION_MAJOR, IBP_VERSION_MINOR, IBP_VERSION_PATCH); }

int ibp_version_number(void) { return IBP_VERSION_NUMBER; }

int ibp_format_version(void) { return IBP_FORMAT_VERSION; }
