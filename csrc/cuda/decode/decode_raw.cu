// decode_raw.cu - the gathers whose rows are stored as they are: there is nothing to decode.
#include "gather.cuh"
#include "decode_raw.cuh"

namespace ibp {

ibp_status gather_raw(const Gather &gather) { return launch_by_group<RawDecoder>(gather); }

} // namespace ibp
