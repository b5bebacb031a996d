// listed.cu - measures and encodes listed rows of scheme planes.
#include "listed.cuh"
#include "rows.cuh"

namespace ibp {

template <uint32_t LANES> using Any1 = PlanesEncoder<uint8_t, true, LANES>;
template <uint32_t LANES> using Any2 = PlanesEncoder<uint16_t, true, LANES>;
template <uint32_t LANES> using Any4 = PlanesEncoder<uint32_t, true, LANES>;
template <uint32_t LANES> using Any8 = PlanesEncoder<uint64_t, true, LANES>;
template <uint32_t LANES> using Listed2 = ListedEncoder<uint16_t, LANES>;
template <uint32_t LANES> using Listed4 = ListedEncoder<uint32_t, LANES>;

template <class Call> static ibp_status launch(const ibp_codebook &codebook, const Call &call)
{
    switch (codebook.planes.element_bytes) {
    case 1: return launch_by_lanes<Any1>(call);
    case 2: return launch_by_lanes<Any2>(call);
    case 4: return launch_by_lanes<Any4>(call);
    case 8: return launch_by_lanes<Any8>(call);
    default: return IBP_INVALID_ARGUMENT;
    }
}

ibp_status measure_listed(const Measure &measure) { return launch(measure.codebook, measure); }
ibp_status encode_listed(const Encode &encode)
{
    // A row's listed elements are put side by side in shared memory, which a block of eight warps has for short rows.
    const ibp_codebook &cb = encode.place.table.codebook;
    if (has_code_table(cb) && cb.row_bytes <= kLongestOfWarp && knows_fields(cb, kConsecutive | kSignedDefault)) {
        if (cb.planes.element_bytes == 2) return launch_by_lanes<Listed2>(encode);
        if (cb.planes.element_bytes == 4) return launch_by_lanes<Listed4>(encode);
    }
    return launch(cb, encode);
}

} // namespace ibp
