// listed_fields.cu - measures and encodes listed rows of scheme planes. Its encoders support all PlanesFields.
#include "listed_encoders.cuh"

namespace ibp {

using Any = ListedEncoders<kAllFields>;

ibp_status measure_listed_of_any_fields(const Measure &measure) { return Any::launch(measure); }
ibp_status encode_listed_of_any_fields(const Encode &encode) { return Any::launch(encode); }

} // namespace ibp
