// encode_any_listed.cu - encodes the listed rows of scheme planes that encode_listed.cu does not encode. This file is
// compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T> struct AnyListedEncoders {
    template <uint32_t THREADS> using Of = PlanesEncoder<T, true, THREADS, kAllFields>;
};

template <typename T> ibp_status encode_any_listed(const Encode &encode)
{
    return launch_by_threads<AnyListedEncoders<T>::template Of>(encode);
}

template ibp_status encode_any_listed<IBP_ELEMENT>(const Encode &);

} // namespace ibp
