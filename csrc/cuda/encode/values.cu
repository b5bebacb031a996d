// values.cu - encodes dense rows of scheme planes whose symbols have a table of codes; encode_dense.cu measures them.
#include "rows.cuh"
#include "values.cuh"

namespace ibp {

template <typename T> struct ValuesEncoders {
    template <uint32_t LANES> using Of = DenseValuesEncoder<T, LANES>;
};

ibp_status encode_values(const Encode &encode)
{
    return by_element(codebook_of(encode), [&](auto zero) {
        if constexpr (sizeof zero <= 4)
            return launch_by_lanes<ValuesEncoders<decltype(zero)>::template Of>(encode);
        else
            return IBP_INVALID_ARGUMENT;
    });
}

} // namespace ibp
