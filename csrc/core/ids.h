/* ids.h - ids of items as the C core reads them. */
#ifndef IBP_IDS_H
#define IBP_IDS_H

#include "ibp.h"

static inline int64_t ibp_id_at(const ibp_ids *ids, int64_t k)
{
    return ids->id_bytes == 8 ? ((const int64_t *)ids->data)[k] : ((const int32_t *)ids->data)[k];
}

/* Whether there are ids first to last - 1. */
static inline bool ibp_are_ids(const ibp_ids *ids, int64_t first, int64_t last)
{
    if (ids->id_bytes != 4 && ids->id_bytes != 8) return false;
    return 0 <= first && first <= last && last <= ids->count && (ids->data != NULL || ids->count == 0);
}

#endif
