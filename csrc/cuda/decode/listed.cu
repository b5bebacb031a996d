// listed.cu - the gathers whose rows are listed ones of scheme planes.
#include "gather.cuh"
#include "listed.cuh"

namespace ibp {

ibp_status gather_listed(const Gather &gather)
{
    switch (gather.table.codebook.planes.element_bytes) {
    case 1: return launch_gather<ListedDecoder<uint8_t>>(gather);
    case 2: return launch_gather<ListedDecoder<uint16_t>>(gather);
    case 4: return launch_gather<ListedDecoder<uint32_t>>(gather);
    case 8: return launch_gather<ListedDecoder<uint64_t>>(gather);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp
