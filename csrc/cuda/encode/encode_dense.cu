// encode_dense.cu - measures and encodes dense rows of scheme planes, of all kinds but those of encode_pairs.cu.
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Dense1 = PlanesEncoder<uint8_t, false, LANES>;
template <uint32_t LANES> using Dense2 = PlanesEncoder<uint16_t, false, LANES>;
template <uint32_t LANES> using Dense4 = PlanesEncoder<uint32_t, false, LANES>;
template <uint32_t LANES> using Dense8 = PlanesEncoder<uint64_t, false, LANES>;

template <class Call> static ibp_status launch(const ibp_codebook &codebook, const Call &call)
{
    switch (codebook.planes.element_bytes) {
    case 1: return launch_by_lanes<Dense1>(call);
    case 2: return launch_by_lanes<Dense2>(call);
    case 4: return launch_by_lanes<Dense4>(call);
    case 8: return launch_by_lanes<Dense8>(call);
    default: return IBP_INVALID_ARGUMENT;
    }
}

ibp_status measure_dense(const Measure &measure) { return launch(measure.codebook, measure); }
ibp_status encode_dense(const Encode &encode) { return launch(encode.place.table.codebook, encode); }

} // namespace ibp
