/* stage.h - slots of chosen items, copied to where they go to a GPU together. */
#ifndef IBP_STAGE_H
#define IBP_STAGE_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Items in slots: one takes item_slots bytes, its rows' slots one after the other. */
typedef struct ibp_stage {
    const uint8_t *slots;
    int64_t num_items;
    uint64_t item_slots;
    uint32_t id_bytes; /* of ids as they are staged: 4, or 8 where there are 2^31 items and more */
    bool streams;      /* past the caches: faster where what is written has not been in them lately */
} ibp_stage;

/* Copies the slots of the items ids[first] to ids[last - 1] to `to`, one after the other, and their ids to to_ids,
 * stage->id_bytes each: -1 for one that is out of range, whose slots are left out. */
void ibp_stage_items(const ibp_stage *stage, const ibp_ids *ids, int64_t first, int64_t last, uint8_t *to,
                     void *to_ids);

#ifdef __cplusplus
}
#endif
#endif
