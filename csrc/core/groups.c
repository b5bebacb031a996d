/* groups.c - vectors in the order of the matrices that multiply them, and groups of them, by counting. */
#include "groups.h"

#include "ids.h"

ibp_status ibp_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order, ibp_vector_group *groups,
                             int64_t num_groups)
{
    if (!ibp_can_group(ids, num_matrices, order, groups, num_groups)) return IBP_INVALID_ARGUMENT;
    uint32_t starts[IBP_MOST_STACKED + 1] = {0};
    uint16_t matrices[IBP_MOST_GROUPED]; /* as counted: ids may change meanwhile */
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
