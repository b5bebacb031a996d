/* stage.c - copies the slots of chosen items to a buffer, one after the other. */
#include "stage.h"

#include "ids.h"

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

/* The speed of reading slots at random addresses depends on how many cache lines are requested at the same time.
 * Therefore slots are prefetched about BYTES_AHEAD bytes ahead, but at most MOST_AHEAD items ahead. This is further
 * than a processor looks ahead by itself. At most MOST_PREFETCHED bytes of each item are prefetched. */
enum { BYTES_AHEAD = 6144, MOST_AHEAD = 16, LINE_BYTES = 64, MOST_PREFETCHED = 4096 };

static void prefetch(const uint8_t *from, uint64_t num_bytes)
{
    for (uint64_t at = 0; at < num_bytes && at < MOST_PREFETCHED; at += LINE_BYTES) __builtin_prefetch(from + at, 0, 3);
}

/* The size in bytes of a store that bypasses the caches. The size of an item's slots and the address in the buffer
 * must be multiples of it. On processors without such stores, slots are copied with memcpy. */
#if defined(__SSE2__)
enum { STREAMED_BYTES = sizeof(__m128i) };

static void stream(uint8_t *to, const uint8_t *from, uint64_t num_bytes)
{
    const __m128i *const vectors = (const void *)from;
    __m128i *const streamed = (void *)to;
    for (uint64_t i = 0; i < num_bytes / STREAMED_BYTES; i++)
        _mm_stream_si128(&streamed[i], _mm_loadu_si128(&vectors[i]));
}
static void end_streams(void) { _mm_sfence(); }
#else
enum { STREAMED_BYTES = 1 };
static void stream(uint8_t *to, const uint8_t *from, uint64_t num_bytes) { memcpy(to, from, num_bytes); }
static void end_streams(void) {}
#endif

static void put_id(void *to_ids, uint32_t id_bytes, int64_t k, int64_t id)
{
    if (id_bytes == 8)
        ((int64_t *)to_ids)[k] = id;
    else
        ((int32_t *)to_ids)[k] = (int32_t)id;
}

void ibp_stage_items(const ibp_stage *stage, const ibp_ids *ids, int64_t first, int64_t last, uint8_t *to, void *to_ids)
{
    const uint64_t item_slots = stage->item_slots, fitting = BYTES_AHEAD / item_slots + 1;
    const int64_t ahead = fitting < MOST_AHEAD ? (int64_t)fitting : MOST_AHEAD;
    const bool streams = stage->streams && item_slots % STREAMED_BYTES == 0 && (uintptr_t)to % STREAMED_BYTES == 0;
    for (int64_t k = first; k < last; k++, to += item_slots) {
        const int64_t id = ibp_id_at(ids, k), next = k + ahead < ids->count ? ibp_id_at(ids, k + ahead) : -1;
        const bool exists = id >= 0 && id < stage->num_items;
        if (next >= 0 && next < stage->num_items) prefetch(stage->slots + (uint64_t)next * item_slots, item_slots);
        put_id(to_ids, stage->id_bytes, k - first, exists ? id : -1);
        if (!exists) continue;
        const uint8_t *const from = stage->slots + (uint64_t)id * item_slots;
        if (streams)
            stream(to, from, item_slots);
        else
            memcpy(to, from, item_slots);
    }
    if (streams) end_streams();
}
