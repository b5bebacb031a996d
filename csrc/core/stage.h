/* stage.h - copies the slots of chosen items to a buffer, which is then copied to a GPU. */
#ifndef IBP_STAGE_H
#define IBP_STAGE_H

#include "ibp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What ibp_stage_items has to know about a table: where its slots are, and in which form items are copied. item_slots:
 * size in bytes of the slots of an item's rows, which lie one after the other. */
typedef struct ibp_stage {
    const uint8_t *slots;
    int64_t num_items;
    uint64_t item_slots;
    uint32_t id_bytes; /* size of a staged id: 4, or 8 if there are 2^31 items or more */
    bool streams;      /* whether stores bypass the caches, which is faster if the buffer is not in the caches */
} ibp_stage;

/* Copies the slots of the items ids[first] to ids[last - 1] to `to`, one after the other, and their ids to to_ids,
 * stage->id_bytes bytes each. An id out of range becomes -1, and the bytes of `to` for its slots are not written. */
void ibp_stage_items(const ibp_stage *stage, const ibp_ids *ids, int64_t first, int64_t last, uint8_t *to,
                     void *to_ids);

#ifdef __cplusplus
}
#endif
#endif
