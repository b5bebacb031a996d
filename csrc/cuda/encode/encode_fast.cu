// encode_fast.cu - measures and encodes dense rows of scheme planes with one plane of digits of four bits over
// consecutive symbols.
#include "encode_fast.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Fast2 = FastEncoder<uint16_t, LANES>;
template <uint32_t LANES> using Fast4 = FastEncoder<uint32_t, LANES>;
template <uint32_t LANES> using PlainFast2 = PlainFastEncoder<uint16_t, LANES>;
template <uint32_t LANES> using PlainFast4 = PlainFastEncoder<uint32_t, LANES>;

template <class Call> static ibp_status launch(const Call &call)
{
    return codebook_of(call).planes.element_bytes == 2 ? launch_by_lanes<Fast2>(call) : launch_by_lanes<Fast4>(call);
}

static bool is_plain(const ibp_codebook &cb)
{
    return cb.planes.rotate == 1u && cb.planes.invariant_bits == 0u && bits_of_symbol(cb.planes) == 8u &&
           cb.row_bytes % kVector == 0u;
}

ibp_status measure_fast(const Measure &measure) { return launch(measure); }
ibp_status encode_fast(const Encode &encode)
{
    const ibp_codebook &cb = codebook_of(encode);
    if (!is_plain(cb)) return launch(encode);
    return cb.planes.element_bytes == 2 ? launch_by_lanes<PlainFast2>(encode) : launch_by_lanes<PlainFast4>(encode);
}

} // namespace ibp
