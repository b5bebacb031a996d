/* slots.h - which slots suit rows that ibp_survey_rows has counted. For bindings: exported, but not installed. */
#ifndef IBP_CORE_SLOTS_H
#define IBP_CORE_SLOTS_H

#include "ibp_table.h"

#include <stdbool.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Of the sizes that few enough rows outgrow, the one is chosen whose slots and overflow cost the least together. */
typedef struct ibp_slot_rule {
    uint32_t least_bytes; /* of a slot, at least */
    double overflow_cost; /* of a byte in overflow, in bytes of slots */
    double part_cost;     /* of a row that has a part in overflow, besides its bytes */
    double most_spilled;  /* rows with a part in overflow, at most */
    double near;          /* of all sizes that cost at most this many times the least, the largest is chosen */
    const int64_t *sizes; /* num_sizes sizes to choose from; NULL: all */
    size_t num_sizes;
} ibp_slot_rule;

/* Counts the rows that leave slots of slot_bytes, and the bytes of their parts in whole sectors. sectors: num_counts
 * entries; sectors[k] rows take k sectors of IBP_OVERFLOW_ALIGN bytes, as survey[1 + k] of ibp_survey_rows says. */
IBP_API void ibp_count_spilled(const uint64_t *sectors, size_t num_counts, uint32_t slot_bytes, uint64_t *num_rows,
                               uint64_t *overflow_bytes);

/* Chooses slots for rows of row_bytes. sectors: 1 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) entries, as above.
 * @return the bytes of a slot: a multiple of IBP_OVERFLOW_ALIGN below row_bytes, or row_bytes if no smaller size is
 * better, or if the rule allows none. *mean_overflow: bytes of overflow of a mean row. */
IBP_API uint32_t ibp_choose_slots(const uint64_t *sectors, uint32_t row_bytes, const ibp_slot_rule *rule,
                                  double *mean_overflow);

#ifdef __cplusplus
}
#endif
#endif
