// listed_encoders.cuh - the encoders of listed rows, and which one a codebook takes: included by encode_listed.cu and
// listed_fields.cu.
#ifndef IBP_ENCODE_LISTED_ENCODERS_CUH
#define IBP_ENCODE_LISTED_ENCODERS_CUH

#include "encode_listed.cuh"
#include "rows.cuh"

namespace ibp {

// What encoders know that put a row's listed elements side by side.
constexpr uint32_t kGatheredFields = kConsecutive | kSignedDefault;

// Those of codebooks that may have FIELDS.
template <uint32_t FIELDS> struct ListedEncoders {
    template <uint32_t LANES> using Any1 = PlanesEncoder<uint8_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Any2 = PlanesEncoder<uint16_t, true, LANES, FIELDS>;
    template <uint32_t LANES> using Any4 = PlanesEncoder<uint32_t, true, LANES, FIELDS>;
    // Rare elements: one set of encoders serves all their codebooks.
    template <uint32_t LANES> using Any8 = PlanesEncoder<uint64_t, true, LANES, kAllFields>;
    template <uint32_t LANES> using Listed1 = ListedEncoder<uint8_t, LANES, FIELDS & kGatheredFields>;
    template <uint32_t LANES> using Listed2 = ListedEncoder<uint16_t, LANES, FIELDS & kGatheredFields>;
    template <uint32_t LANES> using Listed4 = ListedEncoder<uint32_t, LANES, FIELDS & kGatheredFields>;

    static bool take(const ibp_codebook &cb)
    {
        return knows_fields(cb, FIELDS) && (FIELDS == kAllFields || cb.planes.element_bytes < 8u);
    }
    template <class Call> static ibp_status launch_any(const ibp_codebook &codebook, const Call &call)
    {
        switch (codebook.planes.element_bytes) {
        case 1: return launch_by_lanes<Any1>(call);
        case 2: return launch_by_lanes<Any2>(call);
        case 4: return launch_by_lanes<Any4>(call);
        }
        if constexpr (FIELDS == kAllFields)
            if (codebook.planes.element_bytes == 8u) return launch_by_lanes<Any8>(call);
        return IBP_INVALID_ARGUMENT;
    }
    // Listed elements lie in shared memory, which a block of eight warps has for short rows.
    template <template <uint32_t> class Encoder> static ibp_status launch_gathered(const Encode &encode)
    {
        const bool is_short = encode.place.table.codebook.row_bytes <= kLongestOfPart;
        return is_short ? launch_encode<Encoder<kPartLanes>>(encode) : launch_encode<Encoder<kWarp>>(encode);
    }
    static ibp_status launch(const Measure &measure) { return launch_any(measure.codebook, measure); }
    static ibp_status launch(const Encode &encode)
    {
        const ibp_codebook &cb = encode.place.table.codebook;
        if (has_code_table(cb) && cb.row_bytes <= kLongestOfWarp && knows_fields(cb, kGatheredFields)) {
            if (cb.planes.element_bytes == 1) return launch_gathered<Listed1>(encode);
            if (cb.planes.element_bytes == 2) return launch_gathered<Listed2>(encode);
            if (cb.planes.element_bytes == 4) return launch_gathered<Listed4>(encode);
        }
        return launch_any(cb, encode);
    }
};

} // namespace ibp

#endif
