// decode_triples.cu - the gathers whose rows are as those of decode_pairs.cu, of bytes with first digits of three bits.
#include "gather.cuh"
#include "decode_pairs.cuh"

namespace ibp {

template <class G> using Triples1 = PairsDecoder<uint8_t, G, false, 3>;

ibp_status gather_triples(const Gather &gather) { return launch_by_warp<Triples1>(gather); }

} // namespace ibp
