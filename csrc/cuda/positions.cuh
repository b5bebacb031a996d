// positions.cuh - lets a warp choose the form in which a row's listed positions are stored in scheme planes (FORMAT.md
// section 6).
#ifndef IBP_POSITIONS_CUH
#define IBP_POSITIONS_CUH

#include "warp.cuh"

namespace ibp {

constexpr uint32_t kListForms = IBP_MAX_LOW_BITS + 1u, kPositionForms = 1u + 2u * kListForms;
static_assert(kPositionForms <= kWarp, "each lane of a warp must have at most one form to try");

// Returns form i, in the order in which ibp_choose_position_form tries the forms.
__device__ __forceinline__ ibp_position_form position_form_at(uint32_t i, uint32_t k, uint32_t columns)
{
    if (i == 0u) return ibp_bitmap_form(k, columns);
    const uint32_t complement = i > kListForms;
    return ibp_list_form(k, columns, complement, i - 1u - complement * kListForms);
}

// Returns what ibp_choose_position_form returns. Each lane computes the size of one form. If several forms are equally
// short, the minimum is that of the earliest form. All lanes of a warp must call this together, with the same
// arguments.
__device__ __forceinline__ ibp_position_form choose_position_form(uint32_t k, uint32_t columns)
{
    if (ibp_is_bitmap_shortest(k, columns)) return ibp_bitmap_form(k, columns);
    const uint32_t i = ibp_min_u32(lane_id(), kPositionForms - 1u);
    const uint32_t bytes = position_form_at(i, k, columns).num_bytes;
    return position_form_at(__reduce_min_sync(kAllLanes, bytes * kWarp + i) % kWarp, k, columns);
}

} // namespace ibp

#endif
