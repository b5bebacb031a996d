// decode_listed.cu - the gathers whose rows are listed ones of scheme planes.
#include "gather.cuh"
#include "decode_listed.cuh"

namespace ibp {

template <uint32_t FIELDS> static ibp_status launch(const Gather &gather)
{
    switch (gather.table.codebook.planes.element_bytes) {
    case 1: return launch_gather<ListedDecoder<uint8_t, FIELDS>>(gather);
    case 2: return launch_gather<ListedDecoder<uint16_t, FIELDS>>(gather);
    case 4: return launch_gather<ListedDecoder<uint32_t, FIELDS>>(gather);
    case 8: return launch_gather<ListedDecoder<uint64_t, FIELDS>>(gather);
    default: return IBP_INVALID_ARGUMENT;
    }
}

ibp_status gather_listed(const Gather &gather)
{
    const bool plain = knows_fields(gather.table.codebook, kNoFields);
    return plain ? launch<kNoFields>(gather) : launch<kListedFields>(gather);
}

} // namespace ibp
