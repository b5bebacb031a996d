// decode_columns.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and every
// column has its own entries. This file is compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Columns = PairsDecoder<IBP_ELEMENT, G, true>;

template <typename T> ibp_status gather_columns(const Gather &gather)
{
    return launch_by_group<Columns, kEightTiles>(gather);
}

template ibp_status gather_columns<IBP_ELEMENT>(const Gather &);

} // namespace ibp
