/* groups.h - which arguments ibp_group_vectors takes, and matrices of vectors, for gcc, g++ and nvcc. */
#ifndef IBP_CORE_GROUPS_H
#define IBP_CORE_GROUPS_H

#include "format.h"
#include "ibp.h"

/* A vector's matrix; num_matrices: it is not there. */
IBP_INLINE uint32_t ibp_matrix_of_id(int64_t id, int64_t num_matrices)
{
    return (uint32_t)(id >= 0 && id < num_matrices ? id : num_matrices);
}

/* Whether arguments are in range; reads no ids. */
IBP_INLINE bool ibp_can_group(const ibp_ids *ids, int64_t num_matrices, const int64_t *order,
                              const ibp_vector_group *groups, int64_t num_groups)
{
    if (ids == NULL || (ids->id_bytes != 4u && ids->id_bytes != 8u) || ids->positions != NULL) return false;
    if (ids->count < 0 || ids->count > IBP_MOST_GROUPED || num_matrices < 0 || num_matrices > IBP_MOST_STACKED)
        return false;
    const int64_t most = ids->count < num_matrices ? ids->count : num_matrices;
    if (num_groups < most + ids->count / IBP_MOST_OF_A_GROUP || num_groups > INT32_MAX) return false;
    return (ids->count == 0 || (ids->data != NULL && order != NULL)) && (num_groups == 0 || groups != NULL);
}

#endif
