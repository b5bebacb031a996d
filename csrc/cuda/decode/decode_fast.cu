// decode_fast.cu - launches gathers of the rows that decode_fast.cuh decodes.
#include "decode_fast.cuh"
#include "gather.cuh"

namespace ibp {

template <class G> using Fast2 = FastDecoder<uint16_t, G>;
template <class G> using Fast4 = FastDecoder<uint32_t, G>;

// If rows are very long, launches with groups of 32 warps. A block then decodes one row at a time, which keeps the SMs
// busier if the gather runs on few of them. Otherwise launches as launch_by_group does.
template <template <class> class Decoder> static ibp_status launch_by_block(const Gather &gather)
{
    if (gather.table.codebook.row_bytes > 2u * kMostWarps * kWarpRowBytes)
        return launch_gather<Decoder<Group<kWarp, 32>>>(gather);
    return launch_by_group<Decoder>(gather);
}

ibp_status gather_fast(const Gather &gather)
{
    return gather.table.codebook.planes.element_bytes == 2 ? launch_by_block<Fast2>(gather)
                                                           : launch_by_block<Fast4>(gather);
}

} // namespace ibp
