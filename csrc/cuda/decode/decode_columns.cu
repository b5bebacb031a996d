// decode_columns.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and every
// column has its own entries. decode_pairs.cu launches the others, so that the two files compile at the same time.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Columns2 = PairsDecoder<uint16_t, G, true>;
template <class G> using Columns4 = PairsDecoder<uint32_t, G, true>;

ibp_status gather_columns(const Gather &gather)
{
    return gather.table.codebook.planes.element_bytes == 2 ? launch_by_group<Columns2, kEightTiles>(gather)
                                                           : launch_by_group<Columns4, kEightTiles>(gather);
}

} // namespace ibp
