// encode_listed.cu - measures and encodes listed rows of scheme planes. This file compiles the encoders for codebooks
// that use no PlanesField and have elements of less than eight bytes. listed_fields.cu compiles the encoders for all
// other codebooks.
#include "listed_encoders.cuh"

namespace ibp {

using Plain = ListedEncoders<kNoFields>;

ibp_status measure_listed(const Measure &measure)
{
    return Plain::take(codebook_of(measure)) ? Plain::launch(measure) : measure_listed_of_any_fields(measure);
}
ibp_status encode_listed(const Encode &encode)
{
    return Plain::take(codebook_of(encode)) ? Plain::launch(encode) : encode_listed_of_any_fields(encode);
}

} // namespace ibp
