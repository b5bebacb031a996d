// encode_listed.cu - encodes the listed rows of scheme planes for which encode.cu chooses encode_listed.cuh. This file is
// compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "encode_listed.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t THREADS> using Plain = ListedEncoder<IBP_ELEMENT, THREADS, kNoFields>;
template <uint32_t THREADS> using WithFields = ListedEncoder<IBP_ELEMENT, THREADS, kGatheredFields>;

template <typename T> ibp_status encode_listed(const Encode &encode)
{
    return knows_fields(codebook_of(encode), kNoFields) ? launch_by_threads<Plain, kWarp>(encode)
                                                        : launch_by_threads<WithFields, kWarp>(encode);
}

template ibp_status encode_listed<IBP_ELEMENT>(const Encode &);

} // namespace ibp
