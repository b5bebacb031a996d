// listed_fields.cu - encodes listed rows of scheme planes. Its encoders support all PlanesFields.
#include "listed_encoders.cuh"

namespace ibp {

ibp_status encode_listed_of_any_fields(const Encode &encode) { return ListedEncoders<kAllFields>::launch(encode); }

} // namespace ibp
