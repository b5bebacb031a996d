// kinds.h - the kinds of codebooks that decoders and encoders are chosen by.
#ifndef IBP_KINDS_H
#define IBP_KINDS_H

#include "../core/checks.h"
#include "../core/format.h"
#include "ibp.h"

namespace ibp {

// Fields of a codebook of scheme planes that not every kernel knows. A kernel names the fields that it knows, and takes
// no rows of a codebook that has others.
enum PlanesField : uint32_t {
    kInvariantBits = 1,
    kConsecutive = 2,
    kSignedDefault = 4,
    kConstantColumns = 8,
};
constexpr uint32_t kNoFields = 0, kAllFields = 15;
// What decoders of dense rows know.
constexpr uint32_t kDenseFields = kInvariantBits | kConsecutive | kConstantColumns;
// What decoders of listed rows know.
constexpr uint32_t kListedFields = kAllFields;

IBP_INLINE bool knows_fields(const ibp_codebook &cb, uint32_t known)
{
    if (cb.scheme != IBP_SCHEME_PLANES) return true;
    const ibp_planes &planes = cb.planes;
    const uint32_t fields = (planes.invariant_bits != 0u ? kInvariantBits : 0u) |
                            (planes.consecutive ? kConsecutive : 0u) | (planes.signed_default ? kSignedDefault : 0u) |
                            (planes.num_constant != 0u ? kConstantColumns : 0u);
    return (fields & ~known) == 0u;
}

// Calls use with a 0 of the unsigned integer that has an element's size.
template <class Use> ibp_status by_element(const ibp_codebook &cb, const Use &use)
{
    switch (cb.planes.element_bytes) {
    case 1: return use(uint8_t{0});
    case 2: return use(uint16_t{0});
    case 4: return use(uint32_t{0});
    case 8: return use(uint64_t{0});
    default: return IBP_INVALID_ARGUMENT;
    }
}

// Codebooks of rows: with more than one, a coded row begins with the number of its own.
IBP_INLINE uint32_t clusters_of(const ibp_codebook &cb) { return ibp_has_clusters(&cb) ? cb.num_clusters : 1u; }

// What lists of decoders and encoders choose by.
inline bool is_any(const ibp_codebook &) { return true; }
inline bool is_listed(const ibp_codebook &cb) { return cb.planes.listed; }
inline bool is_dense(const ibp_codebook &cb) { return !cb.planes.listed; }

// Whether all digits have two bits, but plane 0's first_bits, and all symbols a byte.
IBP_INLINE bool are_pairs(const ibp_planes &planes, uint32_t first_bits = 2)
{
    bool pairs = planes.num_planes >= 2 && planes.symbol_bytes == 1;
    for (uint32_t p = 0; p < planes.num_planes; p++)
        pairs = pairs && planes.digit_bits[p] == (p == 0 ? first_bits : 2u);
    return pairs;
}
// Whether dense rows are decoded by decode_pairs.cuh, which knows no constant columns, nor invariant bits of elements
// of two bytes: that would cost the others registers.
IBP_INLINE bool decodes_pairs(const ibp_planes &planes)
{
    if (!are_pairs(planes) || planes.element_bytes > 4 || planes.num_constant != 0u) return false;
    return planes.element_bytes == 1   ? !planes.per_column
           : planes.element_bytes == 2 ? planes.invariant_bits == 0u
                                       : true;
}

// Whether there is one plane of digits of four bits over consecutive symbols of up to a byte: what level="fast" makes.
IBP_INLINE bool is_fast(const ibp_codebook &cb)
{
    const ibp_planes &planes = cb.planes;
    return planes.consecutive && planes.num_planes == 1u && planes.digit_bits[0] == 4u && !planes.listed &&
           planes.symbol_bytes == 1u && (planes.element_bytes == 2u || planes.element_bytes == 4u);
}

// Encoders look symbols up in a table of all there are, in shared memory, 4 bytes each, if they are not too many.
constexpr uint32_t kMostCodes = 4096, kMostCodeBits = 12;

IBP_INLINE uint32_t bits_of_symbol(const ibp_planes &planes)
{
    return 8u * planes.element_bytes - planes.invariant_bits - planes.residual_bits;
}
// Entries of such a table, of all clusters.
IBP_INLINE uint32_t codes_of_all(const ibp_codebook &cb) { return clusters_of(cb) << bits_of_symbol(cb.planes); }
IBP_INLINE bool has_code_table(const ibp_codebook &cb)
{
    return !cb.planes.per_column && bits_of_symbol(cb.planes) <= kMostCodeBits && codes_of_all(cb) <= kMostCodes;
}
// Entries of a column are in a table of the ranks of all symbols in all columns, a byte each, if there is room for it.
constexpr uint32_t kMostRanks = 48u << 10, kMostRankEntries = 255;
IBP_INLINE bool has_column_ranks(const ibp_codebook &cb)
{
    const ibp_planes &planes = cb.planes;
    const uint32_t num_bits = bits_of_symbol(planes),
                   columns = cb.row_bytes / planes.element_bytes - planes.num_constant;
    return planes.per_column && !ibp_has_clusters(&cb) && planes.num_entries <= kMostRankEntries &&
           num_bits <= kMostCodeBits && columns <= kMostRanks >> num_bits;
}

} // namespace ibp

#endif
