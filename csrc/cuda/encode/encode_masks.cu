// encode_masks.cu - measures and encodes rows of scheme ibp.
#include "encode_masks.cuh"
#include "rows.cuh"

namespace ibp {

ibp_status measure_masks(const Measure &measure) { return launch_by_threads<MasksEncoder>(measure); }
ibp_status encode_masks(const Encode &encode) { return launch_by_threads<MasksEncoder>(encode); }

} // namespace ibp
