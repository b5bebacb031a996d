// encode.cu - the functions of ibp_cuda_rows.h that measure and encode rows, in two passes or in one (the paper's
// section 4.2). They check the arguments and choose the encoder. The kernels are in rows.cuh.
#include "../cuda_checks.h"
#include "encode_listed.cuh"
#include "encode_request.h"

namespace ibp {

// Returns whether encode_fast.cuh can encode with a codebook: symbols are exponents of 8 bits, and rows consist of
// whole vectors of 16 bytes.
static bool encodes_fast(const ibp_codebook &cb)
{
    return is_fast(cb) && cb.planes.rotate == 1u && bits_of_symbol(cb.planes) == 8u && cb.row_bytes % 16u == 0u;
}
// Returns whether values.cuh can encode with a codebook. Does not check which PlanesFields the codebook uses; kEncoders
// lists those that values.cuh supports.
static bool has_values(const ibp_codebook &cb)
{
    const uint32_t size = cb.planes.element_bytes;
    const bool has_ranks = has_column_ranks(cb) && size >= 2u && bits_of_symbol(cb.planes) <= 8u;
    return is_dense(cb) && size <= 4u && (has_code_table(cb) || has_ranks);
}

// Returns whether encode_listed.cuh can encode with a codebook.
static bool is_gathered(const ibp_codebook &cb)
{
    return is_listed(cb) && cb.planes.element_bytes <= 4u && has_code_table(cb) && cb.row_bytes <= kLongestOfWarp;
}
// Long listed rows often have codebooks that use no PlanesField. They have encoders that know none, except for elements
// of eight bytes, which are rare.
static bool is_long_listed(const ibp_codebook &cb)
{
    return is_listed(cb) && cb.planes.element_bytes <= 4u && cb.row_bytes > kLongestOfWarp;
}

// Launch encoders that are compiled for each type of element.
static ibp_status measure_any_dense(const Measure &measure)
{
    return by_element(measure.codebook, [&](auto zero) { return measure_dense<decltype(zero)>(measure); });
}
static ibp_status encode_any_dense(const Encode &encode)
{
    return by_element(codebook_of(encode), [&](auto zero) { return encode_dense<decltype(zero)>(encode); });
}
static ibp_status encode_of_values(const Encode &encode)
{
    return by_element<1, 4>(codebook_of(encode), [&](auto zero) { return encode_values<decltype(zero)>(encode); });
}
static ibp_status encode_gathered(const Encode &encode)
{
    return by_element<1, 4>(codebook_of(encode), [&](auto zero) { return encode_listed<decltype(zero)>(encode); });
}
static ibp_status encode_of_long_listed(const Encode &encode)
{
    return by_element<1, 4>(codebook_of(encode), [&](auto zero) { return encode_long_listed<decltype(zero)>(encode); });
}
static ibp_status encode_other_listed(const Encode &encode)
{
    return by_element(codebook_of(encode), [&](auto zero) { return encode_any_listed<decltype(zero)>(encode); });
}

// An encoder and the codebooks that it takes. A codebook gets the first encoder of its scheme in the list for which
// takes(codebook) is true and `known` has all PlanesFields that the codebook uses. Rows of scheme raw are stored
// uncompressed; the kernels do this with any encoder.
struct Encoder {
    ibp_scheme scheme;
    bool (*takes)(const ibp_codebook &codebook);
    uint32_t known; // flags of PlanesField
    ibp_status (*measure)(const Measure &measure);
    ibp_status (*encode)(const Encode &encode);
};
static const Encoder kEncoders[] = {
    {IBP_SCHEME_RAW, is_any, 0, nullptr, encode_masks},
    {IBP_SCHEME_IBP, is_any, 0, measure_masks, encode_masks},
    {IBP_SCHEME_PLANES, is_gathered, kGatheredFields, measure_listed, encode_gathered},
    {IBP_SCHEME_PLANES, is_long_listed, kNoFields, measure_listed, encode_of_long_listed},
    {IBP_SCHEME_PLANES, is_listed, kListedFields, measure_listed, encode_other_listed},
    {IBP_SCHEME_PLANES, encodes_fast, kConsecutive, measure_fast, encode_fast},
    {IBP_SCHEME_PLANES, has_values, kConsecutive, measure_any_dense, encode_of_values},
    {IBP_SCHEME_PLANES, is_dense, kDenseFields, measure_any_dense, encode_any_dense},
};

// Returns the encoder of a codebook, or NULL.
static const Encoder *encoder_of(const ibp_codebook &codebook)
{
    for (const Encoder &encoder : kEncoders)
        if (encoder.scheme == codebook.scheme && encoder.takes(codebook) && knows_fields(codebook, encoder.known))
            return &encoder;
    return nullptr;
}

} // namespace ibp

extern "C" ibp_status ibp_cuda_measure_rows(const ibp_codebook *codebook, const uint8_t *data, int64_t num_bytes,
                                            uint16_t *lengths, ibp_stream stream)
{
    if (!ibp::is_codebook(codebook) || !ibp_are_sizes(num_bytes, codebook->row_bytes)) return IBP_INVALID_ARGUMENT;
    const ibp::Encoder *const encoder = ibp::encoder_of(*codebook);
    if (encoder == nullptr || encoder->measure == nullptr) return IBP_INVALID_ARGUMENT;
    if (num_bytes == 0) return IBP_OK;
    if (data == nullptr || lengths == nullptr) return IBP_INVALID_ARGUMENT;
    return encoder->measure({*codebook, data, num_bytes, lengths, stream});
}

extern "C" ibp_status ibp_cuda_encode_rows(const ibp_table *table, const uint8_t *data, uint8_t *slots,
                                           uint8_t *overflow, ibp_fault *fault, ibp_stream stream)
{
    // This function writes to its arguments `slots` and `overflow`. It ignores the table's pointers of the same names.
    if (table == nullptr || ibp_check_table_fields(table) != IBP_OK) return IBP_INVALID_ARGUMENT;
    if (!ibp_has_arrays(table, slots, overflow)) return IBP_INVALID_ARGUMENT;
    const ibp::Encoder *const encoder = ibp::encoder_of(table->codebook);
    if (encoder == nullptr) return IBP_INVALID_ARGUMENT;
    ibp_row_source source{};
    source.data = data, source.num_rows = ibp_num_rows(table);
    if (source.num_rows == 0) return IBP_OK;
    if (data == nullptr) return IBP_INVALID_ARGUMENT;
    source.last_row_bytes = ibp_valid_bytes(ibp_bytes_of_table(table), table->codebook.row_bytes, source.num_rows - 1);
    ibp_place place{};
    place.table = *table, place.slots = slots, place.overflow = overflow;
    return encoder->encode({place, source, nullptr, 0, true, fault, 0, stream});
}

extern "C" ibp_status ibp_cuda_encode_into(const ibp_place *place, const ibp_row_source *source, const int64_t *row_ids,
                                           int64_t first_row, ibp_fault *fault, int max_sms, ibp_stream stream)
{
    if (place == nullptr || source == nullptr || max_sms < 0) return IBP_INVALID_ARGUMENT;
    const ibp_table &table = place->table;
    if (!ibp_is_place(place) || !ibp_is_row_source(source, table.codebook.row_bytes)) return IBP_INVALID_ARGUMENT;
    if (ibp_is_packed(place) || (place->is_new != 0u && row_ids != nullptr)) return IBP_INVALID_ARGUMENT;
    const ibp::Encoder *const encoder = ibp::encoder_of(table.codebook);
    if (encoder == nullptr) return IBP_INVALID_ARGUMENT;
    if (row_ids == nullptr && (first_row < 0 || first_row > ibp_num_rows(&table) - source->num_rows))
        return IBP_INVALID_ARGUMENT;
    if (source->num_rows == 0) return IBP_OK;
    return encoder->encode({*place, *source, row_ids, first_row, false, fault, max_sms, stream});
}
