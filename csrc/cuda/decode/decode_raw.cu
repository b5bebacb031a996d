// decode_raw.cu - launches gathers of tables of scheme raw, whose rows are copied.
#include "gather.cuh"
#include "decode_raw.cuh"

namespace ibp {

ibp_status gather_raw(const Gather &gather) { return launch_by_group<RawDecoder>(gather); }

} // namespace ibp
