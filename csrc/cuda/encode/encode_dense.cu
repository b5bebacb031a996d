// encode_dense.cu - measures the dense rows of scheme planes that encode_fast.cu does not measure, and encodes the
// dense rows that neither encode_fast.cu nor values.cu encodes.
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T, bool MEASURES> struct DenseEncoders {
    template <uint32_t LANES> using Of = PlanesEncoder<T, false, LANES, kAllFields, MEASURES>;
};

template <bool MEASURES, class Call> static ibp_status launch(const Call &call)
{
    return by_element(codebook_of(call), [&](auto zero) {
        return launch_by_lanes<DenseEncoders<decltype(zero), MEASURES>::template Of>(call);
    });
}

ibp_status measure_dense(const Measure &measure) { return launch<true>(measure); }
ibp_status encode_dense(const Encode &encode) { return launch<false>(encode); }

} // namespace ibp
