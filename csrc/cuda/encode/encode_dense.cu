// encode_dense.cu - measures the dense rows of scheme planes that encode_fast.cu does not measure, and encodes the
// dense rows that neither encode_fast.cu nor values.cu encodes.
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T> struct DenseEncoders {
    template <uint32_t THREADS> using Measuring = PlanesCensus<T, false, THREADS, kAllFields, true>;
    template <uint32_t THREADS> using Encoding = PlanesEncoder<T, false, THREADS, kAllFields>;
};

ibp_status measure_dense(const Measure &measure)
{
    return by_element(measure.codebook, [&](auto zero) {
        return launch_by_threads<DenseEncoders<decltype(zero)>::template Measuring>(measure);
    });
}
ibp_status encode_dense(const Encode &encode)
{
    return by_element(codebook_of(encode), [&](auto zero) {
        return launch_by_threads<DenseEncoders<decltype(zero)>::template Encoding>(encode);
    });
}

} // namespace ibp
