// values.cu - encodes dense rows of scheme planes whose symbols have a table of codes; encode_dense.cu measures them.
#include "rows.cuh"
#include "values.cuh"

namespace ibp {

template <uint32_t LANES> using Values1 = DenseValuesEncoder<uint8_t, LANES>;
template <uint32_t LANES> using Values2 = DenseValuesEncoder<uint16_t, LANES>;
template <uint32_t LANES> using Values4 = DenseValuesEncoder<uint32_t, LANES>;

ibp_status encode_values(const Encode &encode)
{
    switch (encode.place.table.codebook.planes.element_bytes) {
    case 1: return launch_by_lanes<Values1>(encode);
    case 2: return launch_by_lanes<Values2>(encode);
    case 4: return launch_by_lanes<Values4>(encode);
    default: return IBP_INVALID_ARGUMENT;
    }
}

} // namespace ibp
