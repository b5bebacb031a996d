// encode_fast.cu - measures and encodes the dense rows of scheme planes that encode_fast.cuh describes: one plane of
// digits of four bits over consecutive exponents.
#include "encode_fast.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Fast2 = FastEncoder<uint16_t, LANES>;
template <uint32_t LANES> using Fast4 = FastEncoder<uint32_t, LANES>;

template <class Call> static ibp_status launch(const Call &call)
{
    return codebook_of(call).planes.element_bytes == 2 ? launch_by_lanes<Fast2>(call) : launch_by_lanes<Fast4>(call);
}

ibp_status measure_fast(const Measure &measure) { return launch(measure); }
ibp_status encode_fast(const Encode &encode) { return launch(encode); }

} // namespace ibp
