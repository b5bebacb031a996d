// decode_masks.cu - launches gathers of rows of scheme ibp.
#include "gather.cuh"
#include "decode_masks.cuh"

namespace ibp {

template <class G> using Moves = MasksDecoder<4, true, G>;
template <class G> using Vectors = MasksDecoder<4, false, G>;
template <class G> using Words = MasksDecoder<1, false, G>;

// If moves (decode_masks.cuh) cannot be used, rows with more bytes than this are decoded by several warps. These warps
// count a row's kept bits before they decode the row.
constexpr uint32_t kLongestOfWarp = 8u << 10;

ibp_status gather_masks(const Gather &gather)
{
    const ibp_codebook &cb = gather.table.codebook;
    const bool is_long = cb.row_bytes > kLongestOfWarp;
    if (gather.request.copies_vectors && MasksDecoder<4, true, Group<kWarp, 1>>::has_moves(cb))
        return launch_by_warp<Moves>(gather);
    if (gather.request.copies_vectors && !is_long) return launch_by_warp<Vectors>(gather);
    if (gather.request.copies_vectors) return launch_gather<Vectors<Group<kWarp, kMostWarps, kDecodesAny>>>(gather);
    if (!is_long) return launch_gather<Words<Group<kWarp, 1>>>(gather);
    return launch_gather<Words<Group<kWarp, kMostWarps, kDecodesAny>>>(gather);
}

} // namespace ibp
