// listed.cu - measures and encodes listed rows of scheme planes.
#include "listed.cuh"
#include "rows.cuh"

namespace ibp {

// What encoders know that put a row's listed elements side by side.
constexpr uint32_t kGatheredFields = kConsecutive | kSignedDefault;

// Those of codebooks that may have FIELDS.
template <uint32_t FIELDS> struct Encoders {
    template <uint32_t LANES> using Any1 = PlanesEncoder<uint8_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Any2 = PlanesEncoder<uint16_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Any4 = PlanesEncoder<uint32_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Any8 = PlanesEncoder<uint64_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Listed2 = ListedEncoder<uint16_t, LANES, FIELDS & kGatheredFields>;
    template <uint32_t LANES> using Listed4 = ListedEncoder<uint32_t, LANES, FIELDS & kGatheredFields>;

    template <class Call> static ibp_status launch_any(const ibp_codebook &codebook, const Call &call)
    {
        switch (codebook.planes.element_bytes) {
        case 1: return launch_by_lanes<Any1>(call);
        case 2: return launch_by_lanes<Any2>(call);
        case 4: return launch_by_lanes<Any4>(call);
        case 8: return launch_by_lanes<Any8>(call);
        default: return IBP_INVALID_ARGUMENT;
        }
    }
    static ibp_status launch(const Measure &measure) { return launch_any(measure.codebook, measure); }
    static ibp_status launch(const Encode &encode)
    {
        // Listed elements lie in shared memory, which a block of eight warps has for short rows.
        const ibp_codebook &cb = encode.place.table.codebook;
        if (has_code_table(cb) && cb.row_bytes <= kLongestOfWarp && knows_fields(cb, kGatheredFields)) {
            if (cb.planes.element_bytes == 2) return launch_by_lanes<Listed2>(encode);
            if (cb.planes.element_bytes == 4) return launch_by_lanes<Listed4>(encode);
        }
        return launch_any(cb, encode);
    }
};

template <class Call> static ibp_status launch(const ibp_codebook &codebook, const Call &call)
{
    return knows_fields(codebook, kNoFields) ? Encoders<kNoFields>::launch(call) : Encoders<kAllFields>::launch(call);
}

ibp_status measure_listed(const Measure &measure) { return launch(measure.codebook, measure); }
ibp_status encode_listed(const Encode &encode) { return launch(encode.place.table.codebook, encode); }

} // namespace ibp
