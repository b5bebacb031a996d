// decode_pairs.cu - launches gathers of the rows that decode_pairs.cuh decodes, if digits have two bits and all columns
// share their entries. This file is compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <typename T> struct PairsDecoders {
    template <class G> using Of = PairsDecoder<T, G, false>;
};

template <typename T> ibp_status gather_pairs(const Gather &gather)
{
    constexpr uint32_t kGroups = sizeof(T) == 1 ? kEightTiles : kEightTiles | kWholeBlock;
    return launch_by_group<PairsDecoders<T>::template Of, kGroups>(gather);
}

template ibp_status gather_pairs<IBP_ELEMENT>(const Gather &);

} // namespace ibp
