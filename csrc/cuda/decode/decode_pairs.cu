// decode_pairs.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and all columns
// share their entries.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Pairs1 = PairsDecoder<uint8_t, G, false>;
template <class G> using Pairs2 = PairsDecoder<uint16_t, G, false>;
template <class G> using Pairs4 = PairsDecoder<uint32_t, G, false>;

ibp_status gather_pairs(const Gather &gather)
{
    switch (gather.table.codebook.planes.element_bytes) {
    case 1: return launch_by_group<Pairs1, kEightTiles>(gather);
    case 2: return launch_by_group<Pairs2, kEightTiles | kWholeBlock>(gather);
    default: return launch_by_group<Pairs4, kEightTiles | kWholeBlock>(gather);
    }
}

} // namespace ibp
