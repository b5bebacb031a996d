// encode_listed.cu - encodes listed rows of scheme planes: the short rows for which encode.cu chooses
// encode_listed.cuh, and long rows of codebooks that use no PlanesField. This file is compiled once for each
// IBP_ELEMENT (csrc/Makefile).
#include "encode_listed.cuh"
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T, uint32_t FIELDS> struct ListedEncoders {
    template <uint32_t THREADS> using Of = ListedEncoder<T, THREADS, FIELDS>;
};

template <typename T> ibp_status encode_listed(const Encode &encode)
{
    return knows_fields(codebook_of(encode), kNoFields)
               ? launch_by_threads<ListedEncoders<T, kNoFields>::template Of, kWarp>(encode)
               : launch_by_threads<ListedEncoders<T, kGatheredFields>::template Of, kWarp>(encode);
}
template <typename T> ibp_status encode_long_listed(const Encode &encode)
{
    return launch_rows<PlanesEncoder<T, true, kEncodeThreads, kNoFields>>(encode);
}

template ibp_status encode_listed<IBP_ELEMENT>(const Encode &);
template ibp_status encode_long_listed<IBP_ELEMENT>(const Encode &);

} // namespace ibp
