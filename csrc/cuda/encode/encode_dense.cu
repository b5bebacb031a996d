// encode_dense.cu - measures the dense rows of scheme planes that encode_fast.cu does not measure, and encodes the
// dense rows that neither encode_fast.cu nor values.cu encodes. This file is compiled once for each IBP_ELEMENT
// (csrc/Makefile).
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T> struct DenseEncoders {
    template <uint32_t THREADS> using Measuring = PlanesCensus<T, false, THREADS, kAllFields, true>;
    template <uint32_t THREADS> using Encoding = PlanesEncoder<T, false, THREADS, kAllFields>;
};

template <typename T> ibp_status measure_dense(const Measure &measure)
{
    return launch_by_threads<DenseEncoders<T>::template Measuring>(measure);
}
template <typename T> ibp_status encode_dense(const Encode &encode)
{
    return launch_by_threads<DenseEncoders<T>::template Encoding>(encode);
}

template ibp_status measure_dense<IBP_ELEMENT>(const Measure &);
template ibp_status encode_dense<IBP_ELEMENT>(const Encode &);

} // namespace ibp
