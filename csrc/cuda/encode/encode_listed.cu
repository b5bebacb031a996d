// encode_listed.cu - encodes listed rows of scheme planes. This file compiles the encoders for codebooks that use no
// PlanesField and have elements of less than eight bytes; listed_fields.cu compiles those for all others.
#include "listed_encoders.cuh"

namespace ibp {

ibp_status encode_listed(const Encode &encode)
{
    using Plain = ListedEncoders<kNoFields>;
    return Plain::take(codebook_of(encode)) ? Plain::launch(encode) : encode_listed_of_any_fields(encode);
}

} // namespace ibp
