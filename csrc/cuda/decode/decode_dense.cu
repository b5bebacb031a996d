// decode_dense.cu - launches gathers of the dense rows of scheme planes that no other decoder can decode.
#include "gather.cuh"
#include "decode_dense.cuh"

namespace ibp {

template <typename T> struct DenseDecoders {
    template <class G> using Of = DenseDecoder<T, G, true>;
};

ibp_status gather_dense(const Gather &gather)
{
    return by_element(gather.table.codebook,
                      [&](auto zero) { return launch_by_group<DenseDecoders<decltype(zero)>::template Of>(gather); });
}

} // namespace ibp
