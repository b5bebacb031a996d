// cuda_checks.h - checks the arguments of the functions of ibp_cuda.h before anything is launched. These checks read no
// device memory.
#ifndef IBP_CUDA_CHECKS_H
#define IBP_CUDA_CHECKS_H

#include "../core/checks.h"
#include "../core/ids.h"
#include "../core/locate.h"
#include "ibp_cuda.h"

namespace ibp {

// Returns whether `bytes` can be a pointer to num_bytes bytes: it is not NULL, or num_bytes is 0.
inline bool has_bytes(const void *bytes, int64_t num_bytes) { return num_bytes == 0 || bytes != nullptr; }

inline bool is_codebook(const ibp_codebook *codebook)
{
    return codebook != nullptr && ibp_check_codebook_fields(codebook) == IBP_OK;
}
inline bool is_table(const ibp_table *table)
{
    return table != nullptr && ibp_check_table_fields(table) == IBP_OK &&
           ibp_has_arrays(table, table->slots, table->overflow);
}
inline bool are_ids(const ibp_ids *ids)
{
    return ids != nullptr && ids->count >= 0 && (ids->id_bytes == 4 || ids->id_bytes == 8) &&
           has_bytes(ids->data, ids->count);
}
// Returns whether ids, and the dimensions of the output that ids describes, are valid. Here id_bytes may be 0, which
// means all items in order.
inline bool are_placed_ids(const ibp_ids *ids)
{
    const bool all = ids != nullptr && ids->id_bytes == 0 && ids->count >= 0 && ids->data == nullptr;
    return (all || are_ids(ids)) && ibp_are_dims(ids);
}

} // namespace ibp

#endif
