/* groups.h - checks the arguments of ibp_group_vectors and ibp_list_matrices, and finds the matrix that an id names.
 * For gcc, g++ and nvcc. */
#ifndef IBP_CORE_GROUPS_H
#define IBP_CORE_GROUPS_H

#include "../internal/ibp_linear.h"
#include "format.h"
#include "ibp.h"

/* Returns the index of the matrix that an id names, or num_matrices if there is no such matrix. */
IBP_INLINE uint32_t ibp_matrix_of_id(int64_t id, int64_t num_matrices)
{
    return (uint32_t)(id >= 0 && id < num_matrices ? id : num_matrices);
}

/* Returns whether the arguments of ibp_group_vectors are in range. Reads no ids. */
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

/* Returns whether the arguments of ibp_list_matrices are in range. Reads no ids. */
IBP_INLINE bool ibp_can_list(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed)
{
    if (ids == NULL || listed == NULL || (ids->id_bytes != 4u && ids->id_bytes != 8u) || ids->positions != NULL)
        return false;
    if (ids->count < 0 || ids->count > INT32_MAX || num_matrices < 0 || num_matrices > IBP_MOST_STACKED) return false;
    const int64_t most = ids->count < num_matrices + 1 ? ids->count : num_matrices + 1;
    if (listed->num_slots < most || listed->num_slots > INT32_MAX || listed->num_stacks > IBP_MOST_LISTED) return false;
    for (uint32_t i = 0; i < listed->num_stacks; i++)
        if (listed->num_rows[i] < 1 || listed->num_rows[i] > INT32_MAX / (listed->num_slots + 1)) return false;
    if (ids->count != 0 && (ids->data == NULL || listed->slots == NULL)) return false;
    return listed->num_slots == 0 || (listed->held != NULL && (listed->num_stacks == 0 || listed->rows != NULL));
}

#endif
