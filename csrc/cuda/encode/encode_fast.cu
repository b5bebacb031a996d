// encode_fast.cu - measures and encodes the dense rows of scheme planes that encode_fast.cuh describes: one plane of
// digits of four bits over consecutive exponents.
#include "encode_fast.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t THREADS> using Fast2 = FastEncoder<uint16_t, THREADS>;
template <uint32_t THREADS> using Fast4 = FastEncoder<uint32_t, THREADS>;

template <class Call> static ibp_status launch(const Call &call)
{
    return codebook_of(call).planes.element_bytes == 2 ? launch_by_threads<Fast2>(call)
                                                       : launch_by_threads<Fast4>(call);
}

ibp_status measure_fast(const Measure &measure) { return launch(measure); }
ibp_status encode_fast(const Encode &encode) { return launch(encode); }

} // namespace ibp
