// decode_pairs.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Pairs1 = PairsDecoder<uint8_t, G, false>;
template <class G> using Pairs2 = PairsDecoder<uint16_t, G, false>;
template <class G> using Pairs4 = PairsDecoder<uint32_t, G, false>;
template <class G> using Columns2 = PairsDecoder<uint16_t, G, true>;
template <class G> using Columns4 = PairsDecoder<uint32_t, G, true>;

// If rows are too long for groups of 4 warps but not for groups of kMostWarps warps, launches with groups of kMostWarps
// warps, in which each warp takes one tile of a row. This is faster than the group for rows of any length, which
// launch_by_group would choose. Otherwise launches as launch_by_group does.
template <template <class> class Decoder> static ibp_status launch_by_tiles(const Gather &gather)
{
    const uint32_t row_bytes = gather.table.codebook.row_bytes;
    if (row_bytes > 4u * kWarpRowBytes && row_bytes <= kMostWarps * kWarpRowBytes)
        return launch_gather<Decoder<Group<kWarp, kMostWarps>>>(gather);
    return launch_by_group<Decoder>(gather);
}
// If rows are very long, launches with groups of 32 warps. A block then decodes one row at a time, which keeps the SMs
// busier if the gather runs on few of them. Otherwise launches as launch_by_tiles does.
template <template <class> class Decoder> static ibp_status launch_by_block(const Gather &gather)
{
    if (gather.table.codebook.row_bytes > 2u * kMostWarps * kWarpRowBytes)
        return launch_gather<Decoder<Group<kWarp, 32>>>(gather);
    return launch_by_tiles<Decoder>(gather);
}

ibp_status gather_pairs(const Gather &gather)
{
    const ibp_planes &planes = gather.table.codebook.planes;
    if (planes.element_bytes == 1) return launch_by_tiles<Pairs1>(gather);
    if (planes.element_bytes == 2)
        return planes.per_column ? launch_by_tiles<Columns2>(gather) : launch_by_block<Pairs2>(gather);
    return planes.per_column ? launch_by_tiles<Columns4>(gather) : launch_by_block<Pairs4>(gather);
}

} // namespace ibp
