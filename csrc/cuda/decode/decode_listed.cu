// decode_listed.cu - launches gathers of listed rows of scheme planes.
#include "gather.cuh"
#include "decode_listed.cuh"

namespace ibp {

template <uint32_t FIELDS> static ibp_status launch(const Gather &gather)
{
    return by_element(gather.table.codebook,
                      [&](auto zero) { return launch_gather<ListedDecoder<decltype(zero), FIELDS>>(gather); });
}

ibp_status gather_listed(const Gather &gather)
{
    const bool plain = knows_fields(gather.table.codebook, kNoFields);
    return plain ? launch<kNoFields>(gather) : launch<kListedFields>(gather);
}

} // namespace ibp
