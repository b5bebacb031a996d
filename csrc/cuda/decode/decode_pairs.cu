// decode_pairs.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and all columns
// share their entries.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Pairs1 = PairsDecoder<uint8_t, G, false>;
template <class G> using Pairs2 = PairsDecoder<uint16_t, G, false>;
template <class G> using Pairs4 = PairsDecoder<uint32_t, G, false>;

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
    switch (gather.table.codebook.planes.element_bytes) {
    case 1: return launch_by_tiles<Pairs1>(gather);
    case 2: return launch_by_block<Pairs2>(gather);
    default: return launch_by_block<Pairs4>(gather);
    }
}

} // namespace ibp
