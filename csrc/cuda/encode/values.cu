// values.cu - encodes the dense rows of scheme planes for which encode.cu chooses values.cuh. encode_dense.cu measures
// these rows. This file is compiled once for each IBP_ELEMENT (csrc/Makefile).
#include "rows.cuh"
#include "values.cuh"

namespace ibp {

// Encodes rows with this encoder if the tables of a block and the stage and scratch of one group fit in shared memory.
// On some GPUs they do not fit if rows are long; then encode_dense.cu encodes the rows.
template <typename T, class Encoder> static ibp_status encode_if_fits(const Encode &encode)
{
    const ibp_codebook &cb = codebook_of(encode);
    DeviceSizes device{};
    const ibp_status status = read_device(&device);
    if (status != IBP_OK) return status;
    const uint64_t wanted = uint64_t{Encoder::table_bytes(cb)} + group_bytes_of<Encoder>(cb);
    return wanted <= static_cast<uint64_t>(device.block_bytes) ? launch_rows<Encoder>(encode) : encode_dense<T>(encode);
}

template <typename T, bool COLUMNS> static ibp_status launch(const Encode &encode)
{
    const uint32_t row_bytes = codebook_of(encode).row_bytes;
    if (COLUMNS && row_bytes > kLongestOfWarp) return encode_dense<T>(encode);
    constexpr uint32_t kFew = COLUMNS ? kPartLanes : kFewLanes, kMany = COLUMNS ? kWarp : kMostEncodeThreads;
    return by_threads<kFew, kMany>(row_bytes, [&](auto threads) {
        return encode_if_fits<T, DenseValuesEncoder<T, decltype(threads)::value, COLUMNS>>(encode);
    });
}

template <typename T> ibp_status encode_values(const Encode &encode)
{
    if constexpr (sizeof(T) > 1)
        if (codebook_of(encode).planes.per_column) return launch<T, true>(encode);
    return launch<T, false>(encode);
}

template ibp_status encode_values<IBP_ELEMENT>(const Encode &);

} // namespace ibp
