// decode_dense.cu - launches gathers of the dense rows of scheme planes that no other decoder can decode. This file is
// compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "gather.cuh"
#include "decode_dense.cuh"

namespace ibp {

template <typename T> struct DenseDecoders {
    template <class G> using Of = DenseDecoder<T, G, true>;
};

template <typename T> ibp_status gather_dense(const Gather &gather)
{
    return launch_by_group<DenseDecoders<T>::template Of>(gather);
}

template ibp_status gather_dense<IBP_ELEMENT>(const Gather &);

} // namespace ibp
