// decode_fast.cu - launches gathers of the rows that decode_fast.cuh decodes.
#include "decode_fast.cuh"
#include "gather.cuh"

namespace ibp {

template <class G> using Fast2 = FastDecoder<uint16_t, G>;
template <class G> using Fast4 = FastDecoder<uint32_t, G>;

ibp_status gather_fast(const Gather &gather)
{
    return gather.table.codebook.planes.element_bytes == 2 ? launch_by_group<Fast2, kWholeBlock>(gather)
                                                           : launch_by_group<Fast4, kWholeBlock>(gather);
}

} // namespace ibp
