// decode_dense.cu - the gathers whose rows are dense ones of scheme planes.
#include "gather.cuh"
#include "decode_dense.cuh"

namespace ibp {

template <class G> using Dense1 = DenseDecoder<uint8_t, G, true>;
template <class G> using Dense2 = DenseDecoder<uint16_t, G, true>;
template <class G> using Dense4 = DenseDecoder<uint32_t, G, true>;
template <class G> using Dense8 = DenseDecoder<uint64_t, G, true>;

ibp_status gather_dense(const Gather &gather)
{
    switch (gather.table.codebook.planes.element_bytes) {
    case 1: return launch_by_group<Dense1>(gather);
    case 2: return launch_by_group<Dense2>(gather);
    case 4: return launch_by_group<Dense4>(gather);
    case 8: return launch_by_group<Dense8>(gather);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp
