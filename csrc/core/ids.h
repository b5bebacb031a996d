/* ids.h - reads ids of items, and finds where their items go in the output. For gcc, g++ and nvcc. */
#ifndef IBP_IDS_H
#define IBP_IDS_H

#include "format.h"
#include "ibp.h"

/* Returns the index of the item that an id names. If ids->from_end is num_items, ids below 0 count from the end. If
 * ids->from_end is 0, the result for an id below 0 is below 0, which is out of range. */
IBP_INLINE int64_t ibp_item_of_id(const ibp_ids *ids, int64_t id) { return id < 0 ? id + ids->from_end : id; }

/* Returns the item of ids[k]. Each call loads the id again, and the id may have changed. So a caller that checks the
 * result must keep it. */
static inline int64_t ibp_id_at(const ibp_ids *ids, int64_t k)
{
    if (ids->id_bytes == 0) return k;
    return ibp_item_of_id(ids, ids->id_bytes == 8 ? IBP_LOAD_ONCE(((const int64_t *)ids->data)[k])
                                                  : IBP_LOAD_ONCE(((const int32_t *)ids->data)[k]));
}

/* Returns the number of items of the output: out_items if ids->positions is not NULL, otherwise the number of ids. */
IBP_INLINE int64_t ibp_num_positions(const ibp_ids *ids) { return ids->positions ? ids->out_items : ids->count; }

/* Returns whether the output can hold all positions. If it has addresses, it must have neither positions nor
 * dimensions. If it is strided, it must have at least ibp_num_positions(ids) positions, and the numbers and offsets of
 * its positions must not overflow. */
IBP_INLINE bool ibp_are_dims(const ibp_ids *ids)
{
    int64_t positions = 1, reach = 0;
    if (ids->addresses) return !ids->positions && ids->num_dims == 0;
    if (ids->num_dims == 0) return true;
    if (ids->num_dims > IBP_MAX_OUT_DIMS) return false;
    for (uint32_t d = 0; d < ids->num_dims; d++) {
        const int64_t size = ids->sizes[d], stride = ids->strides[d];
        if (size < 1 || stride < 0 || size > (INT64_MAX >> 8) / positions) return false;
        positions *= size;
        if (stride != 0 && size - 1 > ((INT64_MAX >> 8) - reach) / stride) return false;
        reach += (size - 1) * stride;
    }
    return ibp_num_positions(ids) <= positions;
}

/* Returns whether the ids first to last - 1 exist. */
static inline bool ibp_are_ids(const ibp_ids *ids, int64_t first, int64_t last)
{
    if (ids->id_bytes != 0 && ids->id_bytes != 4 && ids->id_bytes != 8) return false;
    if (0 > first || first > last || last > ids->count) return false;
    return ids->id_bytes == 0 ? ids->data == NULL : ids->data != NULL || ids->count == 0;
}

/* Returns the offset of a position in the output. position: in [0, ibp_num_positions(ids)). Kernels use another
 * function (cuda/decode/fetch.cuh). */
static inline int64_t ibp_offset_of_position(const ibp_ids *ids, int64_t position, int64_t item_bytes)
{
    int64_t offset = 0;
    if (ids->num_dims == 0) return position * item_bytes;
    for (uint32_t d = ids->num_dims - 1; d > 0; d--) {
        const int64_t rest = position / ids->sizes[d];
        offset += (position - rest * ids->sizes[d]) * ids->strides[d];
        position = rest;
    }
    return offset + position * ids->strides[0];
}

/* Returns the address of a position. out: the address of position 0; not used if ids->addresses is not NULL. */
static inline uint8_t *ibp_memory_of_position(const ibp_ids *ids, uint8_t *out, int64_t position, int64_t item_bytes)
{
    if (ids->addresses) return (uint8_t *)(uintptr_t)ids->addresses[position];
    return out + ibp_offset_of_position(ids, position, item_bytes);
}

#endif
