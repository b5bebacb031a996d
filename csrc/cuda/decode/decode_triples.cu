// decode_triples.cu - launches gathers of rows that decode_pairs.cuh decodes, if elements have one byte and digits of
// plane 0 have three bits.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Triples1 = PairsDecoder<uint8_t, G, false, 3>;

ibp_status gather_triples(const Gather &gather) { return launch_by_warp<Triples1>(gather); }

} // namespace ibp
