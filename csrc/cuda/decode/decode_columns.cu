// decode_columns.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and every
// column has its own entries. This file is compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <typename T> struct ColumnsDecoders {
    template <class G> using Of = PairsDecoder<T, G, true>;
};

template <typename T> ibp_status gather_columns(const Gather &gather)
{
    return launch_by_group<ColumnsDecoders<T>::template Of, kEightTiles>(gather);
}

template ibp_status gather_columns<IBP_ELEMENT>(const Gather &);

} // namespace ibp
