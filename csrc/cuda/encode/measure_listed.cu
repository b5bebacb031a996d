// measure_listed.cu - measures listed rows of scheme planes. encode_listed.cu and listed_fields.cu encode them. The
// kernels are divided among three files so that these compile at the same time.
#include "listed_encoders.cuh"

namespace ibp {

ibp_status measure_listed(const Measure &measure)
{
    using Plain = ListedEncoders<kNoFields>;
    return Plain::take(codebook_of(measure)) ? Plain::launch(measure) : ListedEncoders<kAllFields>::launch(measure);
}

} // namespace ibp
