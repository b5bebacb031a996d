// encode_any_listed.cu - encodes the listed rows of scheme planes that encode_listed.cu does not encode. If they have
// more than 8 KiB and their codebook uses no PlanesField, as is often so, they have an encoder that supports none. This
// file is compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

using Long = PlanesEncoder<IBP_ELEMENT, true, kEncodeThreads, kNoFields>;
template <uint32_t THREADS> using Any = PlanesEncoder<IBP_ELEMENT, true, THREADS, kAllFields>;

template <typename T> ibp_status encode_any_listed(const Encode &encode)
{
    const ibp_codebook &cb = codebook_of(encode);
    if constexpr (sizeof(IBP_ELEMENT) < 8)
        if (cb.row_bytes > kLongestOfWarp && knows_fields(cb, kNoFields)) return launch_rows<Long>(encode);
    return launch_by_threads<Any>(encode);
}

template ibp_status encode_any_listed<IBP_ELEMENT>(const Encode &);

} // namespace ibp
