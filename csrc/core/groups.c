/* groups.c - sorts vectors by the matrices that multiply them, makes groups of the sorted vectors, and lists the
 * matrices that ids name. It sorts by counting. */
#include "groups.h"

#include "ids.h"

ibp_status ibp_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order, ibp_vector_group *groups,
                             int64_t num_groups)
{
    if (!ibp_can_group(ids, num_matrices, order, groups, num_groups)) return IBP_INVALID_ARGUMENT;
    uint32_t starts[IBP_MOST_STACKED + 1] = {0};
    uint16_t matrices[IBP_MOST_GROUPED]; /* the matrix of each id as it was counted, because ids may change meanwhile */
    for (int64_t k = 0; k < ids->count; k++) {
        matrices[k] = (uint16_t)ibp_matrix_of_id(ibp_id_at(ids, k), num_matrices);
        starts[matrices[k]]++;
    }
    uint32_t used = 0;
    for (uint32_t matrix = 0, start = 0; matrix <= num_matrices; matrix++) {
        const uint32_t end = start + starts[matrix];
        starts[matrix] = start;
        for (; start < end && matrix < num_matrices; used++) {
            groups[used] = (ibp_vector_group){matrix, start, ibp_min_u32(end - start, IBP_MOST_OF_A_GROUP)};
            start += groups[used].count;
        }
        start = end;
    }
    for (; used < num_groups; used++) groups[used] = (ibp_vector_group){0, 0, 0};
    for (int64_t k = 0; k < ids->count; k++) order[starts[matrices[k]]++] = k;
    return IBP_OK;
}

ibp_status ibp_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed)
{
    if (!ibp_can_list(ids, num_matrices, listed)) return IBP_INVALID_ARGUMENT;
    uint32_t slots[IBP_MOST_STACKED + 1] = {0}; /* for each matrix: at first, whether an id names it; later, its slot */
    int64_t used = 0, *row = listed->rows;
    for (int64_t k = 0; k < ids->count; k++) {
        /* The matrix of each id is kept, because ids may change meanwhile. */
        listed->slots[k] = ibp_matrix_of_id(ibp_id_at(ids, k), num_matrices);
        slots[listed->slots[k]] = 1;
    }
    for (int64_t matrix = 0; matrix <= num_matrices; matrix++) {
        if (!slots[matrix]) continue;
        slots[matrix] = (uint32_t)used;
        listed->held[used++] = matrix;
    }
    for (int64_t k = 0; k < ids->count; k++) listed->slots[k] = slots[listed->slots[k]];
    for (int64_t s = used; s < listed->num_slots; s++) listed->held[s] = -1;
    if (listed->num_spare) *listed->num_spare += (uint64_t)(listed->num_slots - used);
    for (uint32_t i = 0; i < listed->num_stacks; i++)
        for (int64_t s = 0; s < listed->num_slots; s++)
            for (int64_t r = 0; r < listed->num_rows[i]; r++)
                *row++ = s < used ? listed->held[s] * listed->num_rows[i] + r : 0;
    return IBP_OK;
}
