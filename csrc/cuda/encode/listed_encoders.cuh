// listed_encoders.cuh - chooses among the encoders of listed rows. measure_listed.cu, encode_listed.cu and
// listed_fields.cu include this file.
#ifndef IBP_ENCODE_LISTED_ENCODERS_CUH
#define IBP_ENCODE_LISTED_ENCODERS_CUH

#include "encode_listed.cuh"
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

// The PlanesFields that ListedEncoder supports. ListedEncoder copies a row's listed elements to consecutive elements of
// shared memory.
constexpr uint32_t kGatheredFields = kConsecutive | kSignedDefault;

// The encoders for codebooks that use only PlanesFields in FIELDS.
template <uint32_t FIELDS> struct ListedEncoders {
    template <typename T> struct Of {
        template <uint32_t THREADS> using Any = PlanesEncoder<T, true, THREADS, FIELDS>;
        template <uint32_t THREADS> using Measuring = PlanesCensus<T, true, THREADS, FIELDS, true>;
        template <uint32_t THREADS> using Gathered = ListedEncoder<T, THREADS, FIELDS & kGatheredFields>;
    };

    static bool take(const ibp_codebook &cb)
    {
        return knows_fields(cb, FIELDS) && (FIELDS == kAllFields || cb.planes.element_bytes < 8u);
    }
    // True if Any and Measuring are compiled for elements of type T. Elements of eight bytes are rare, so their
    // codebooks all use the encoders for kAllFields.
    template <typename T> static constexpr bool kHasAny = FIELDS == kAllFields || sizeof(T) < 8;
    static ibp_status launch(const Measure &measure)
    {
        return by_element(measure.codebook, [&](auto zero) {
            if constexpr (kHasAny<decltype(zero)>)
                return launch_by_threads<Of<decltype(zero)>::template Measuring>(measure);
            else
                return IBP_INVALID_ARGUMENT;
        });
    }
    // Encodes with ListedEncoder if rows are short enough for a part of a warp or a warp. ListedEncoder keeps listed
    // elements in shared memory, which then has room for those of all rows that a block encodes at once.
    static ibp_status launch(const Encode &encode)
    {
        const ibp_codebook &cb = codebook_of(encode);
        const bool gathers = has_code_table(cb) && cb.row_bytes <= kLongestOfWarp && knows_fields(cb, kGatheredFields);
        return by_element(cb, [&](auto zero) {
            if constexpr (sizeof zero < 8)
                if (gathers) return launch_by_threads<Of<decltype(zero)>::template Gathered, kWarp>(encode);
            if constexpr (kHasAny<decltype(zero)>)
                return launch_by_threads<Of<decltype(zero)>::template Any>(encode);
            else
                return IBP_INVALID_ARGUMENT;
        });
    }
};

} // namespace ibp

#endif
