/* slots.h - chooses the size of slots for rows that ibp_survey_rows has counted (FORMAT.md section 3), for gcc and
 * g++. */
#ifndef IBP_CORE_SLOTS_H
#define IBP_CORE_SLOTS_H

#include "format.h"
#include "ibp_table.h"

#include <math.h>

/* The rule by which the size of slots is chosen. Sizes that more than most_spilled rows exceed are not allowed. The
 * others are compared by the cost of slots and overflow together. Of the sizes whose cost is at most `near` times the
 * least cost, the largest is chosen. */
typedef struct ibp_slot_rule {
    uint32_t least_bytes; /* least size of a slot */
    double overflow_cost; /* cost of a byte in overflow; a byte in a slot costs 1 */
    double part_cost;     /* additional cost of each row that has a part in overflow */
    double most_spilled;  /* largest number of rows with a part in overflow */
    double near;          /* largest ratio of the cost of the chosen size to the least cost; at least 1 */
    const int64_t *sizes; /* num_sizes sizes to choose from; NULL: any size is allowed */
    size_t num_sizes;
} ibp_slot_rule;

/* Counts the rows that do not fit in slots of slot_bytes bytes, and adds up the sizes in bytes of their overflow parts,
 * each rounded up to whole sectors. sectors: num_counts entries; sectors[k] is the number of rows that take k sectors
 * of IBP_OVERFLOW_ALIGN bytes, as in survey[1 + k] of ibp_survey_rows. */
IBP_INLINE void ibp_count_spilled(const uint64_t *sectors, size_t num_counts, uint32_t slot_bytes, uint64_t *num_rows,
                                  uint64_t *overflow_bytes)
{
    const size_t fitting = ibp_sectors_of(slot_bytes);
    *num_rows = 0, *overflow_bytes = 0;
    for (size_t k = fitting + 1; k < num_counts; k++) {
        *num_rows += sectors[k];
        *overflow_bytes += sectors[k] * IBP_OVERFLOW_ALIGN * (k - fitting);
    }
}

/* Returns the size in bytes of a slot of k sectors, at most row_bytes: the last sector of a row may be incomplete. */
IBP_INLINE uint32_t ibp_slot_of(uint32_t row_bytes, uint32_t k)
{
    return ibp_min_u32(k * IBP_OVERFLOW_ALIGN, row_bytes);
}

IBP_INLINE bool ibp_is_among(const ibp_slot_rule *rule, uint32_t slot_bytes)
{
    for (size_t i = 0; rule->sizes != NULL && i < rule->num_sizes; i++)
        if (rule->sizes[i] == (int64_t)slot_bytes) return true;
    return rule->sizes == NULL;
}

/* Chooses the size of slots for rows of row_bytes bytes. sectors: 1 + ceil(row_bytes / IBP_OVERFLOW_ALIGN) entries, as
 * in ibp_count_spilled. mean_overflow: receives the mean number of bytes that a row has in overflow.
 * @return the size of a slot in bytes: a multiple of IBP_OVERFLOW_ALIGN below row_bytes; or row_bytes if no smaller
 * size is better, or if the rule allows no size. */
IBP_INLINE uint32_t ibp_choose_slots(const uint64_t *sectors, uint32_t row_bytes, const ibp_slot_rule *rule,
                                     double *mean_overflow)
{
    const uint32_t last = ibp_sectors_of(row_bytes), first = rule->least_bytes / IBP_OVERFLOW_ALIGN;
    double costs[IBP_MAX_ROW_BYTES / IBP_OVERFLOW_ALIGN + 1], least = INFINITY, num_rows = 0.0;
    for (uint32_t k = 0; k <= last; k++) num_rows += (double)sectors[k];
    if (num_rows < 1.0) num_rows = 1.0;
    uint64_t above = 0, in_overflow = 0; /* number of rows that do not fit in slots of k sectors, and number of sectors
                                            that the overflow parts of these rows need */
    for (uint32_t k = last + 1; k-- > 0;) {
        const uint32_t slot_bytes = ibp_slot_of(row_bytes, k);
        costs[k] = INFINITY;
        if ((double)above <= rule->most_spilled && ibp_is_among(rule, slot_bytes))
            costs[k] = num_rows * slot_bytes + rule->overflow_cost * (double)(in_overflow * IBP_OVERFLOW_ALIGN) +
                       rule->part_cost * (double)above;
        if (k >= first && costs[k] < least) least = costs[k];
        above += sectors[k], in_overflow += above;
    }
    uint32_t best = last;
    while (best > 0 && !(costs[best] <= rule->near * least)) best--;
    const uint32_t slot_bytes = ibp_slot_of(row_bytes, best);
    uint64_t spilled, overflow_bytes;
    ibp_count_spilled(sectors, last + 1u, slot_bytes, &spilled, &overflow_bytes);
    *mean_overflow = (double)overflow_bytes / num_rows;
    return slot_bytes;
}

#endif
