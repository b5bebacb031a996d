// measure_listed.cu - measures listed rows of scheme planes. encode_listed.cu and encode_any_listed.cu encode them.
#include "planes.cuh"
#include "rows.cuh"

namespace ibp {

template <typename T, uint32_t FIELDS> static ibp_status launch(const Measure &measure)
{
    return by_threads<kPartLanes, kEncodeThreads>(measure.codebook.row_bytes, [&](auto threads) {
        return launch_rows<PlanesCensus<T, true, decltype(threads)::value, FIELDS, true>>(measure);
    });
}

ibp_status measure_listed(const Measure &measure)
{
    return by_element(measure.codebook, [&](auto zero) {
        using T = decltype(zero);
        // Elements of eight bytes are rare, so that all their codebooks have the encoder for all fields.
        if constexpr (sizeof(T) < 8)
            if (knows_fields(measure.codebook, kNoFields)) return launch<T, kNoFields>(measure);
        return launch<T, kAllFields>(measure);
    });
}

} // namespace ibp
