// encode_pairs.cu - encodes dense rows of scheme planes with digits of two bits and symbols of a byte; encode_dense.cu
// measures them.
#include "encode_pairs.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Pairs2 = PairsEncoder<uint16_t, LANES>;
template <uint32_t LANES> using Pairs4 = PairsEncoder<uint32_t, LANES>;

ibp_status encode_pairs(const Encode &encode)
{
    return codebook_of(encode).planes.element_bytes == 2 ? launch_by_lanes<Pairs2>(encode)
                                                         : launch_by_lanes<Pairs4>(encode);
}

} // namespace ibp
