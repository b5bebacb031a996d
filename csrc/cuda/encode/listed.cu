// listed.cu - measures and encodes listed rows of scheme planes.
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Listed1 = PlanesEncoder<uint8_t, true, LANES>;
template <uint32_t LANES> using Listed2 = PlanesEncoder<uint16_t, true, LANES>;
template <uint32_t LANES> using Listed4 = PlanesEncoder<uint32_t, true, LANES>;
template <uint32_t LANES> using Listed8 = PlanesEncoder<uint64_t, true, LANES>;

template <class Call> static ibp_status launch(const ibp_codebook &codebook, const Call &call)
{
    switch (codebook.planes.element_bytes) {
    case 1: return launch_by_lanes<Listed1>(call);
    case 2: return launch_by_lanes<Listed2>(call);
    case 4: return launch_by_lanes<Listed4>(call);
    case 8: return launch_by_lanes<Listed8>(call);
    default: return IBP_INVALID_ARGUMENT;
    }
}

ibp_status measure_listed(const Measure &measure) { return launch(measure.codebook, measure); }
ibp_status encode_listed(const Encode &encode) { return launch(encode.table.codebook, encode); }

} // namespace ibp
