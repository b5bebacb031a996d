// kinds.h - tests the kind of a codebook. Decoders and encoders are chosen by these tests.
#ifndef IBP_KINDS_H
#define IBP_KINDS_H

#include "../core/checks.h"
#include "../core/format.h"
#include "ibp.h"

namespace ibp {

// Fields of a codebook of scheme planes that only some kernels support. Each kernel states which of these fields it
// knows, that is, supports. A kernel is not launched for a codebook that uses any other of these fields.
enum PlanesField : uint32_t {
    kInvariantBits = 1,
    kConsecutive = 2,
    kSignedDefault = 4,
    kConstantColumns = 8,
};
constexpr uint32_t kNoFields = 0, kAllFields = 15;
// The fields that decoders of dense rows know.
constexpr uint32_t kDenseFields = kInvariantBits | kConsecutive | kConstantColumns;
// The fields that decoders of listed rows know.
constexpr uint32_t kListedFields = kAllFields;

// Returns whether a codebook uses only PlanesFields that are in `known`.
IBP_INLINE bool knows_fields(const ibp_codebook &cb, uint32_t known)
{
    if (cb.scheme != IBP_SCHEME_PLANES) return true;
    const ibp_planes &planes = cb.planes;
    const uint32_t fields = (planes.invariant_bits != 0u ? kInvariantBits : 0u) |
                            (planes.consecutive ? kConsecutive : 0u) | (planes.signed_default ? kSignedDefault : 0u) |
                            (planes.num_constant != 0u ? kConstantColumns : 0u);
    return (fields & ~known) == 0u;
}

// Calls use(zero) and returns its result. zero is a 0 of the unsigned integer type that has the size of an element, so
// that use can be a template over this type. Returns IBP_INVALID_ARGUMENT if elements have less than LEAST or more than
// MOST bytes.
template <uint32_t LEAST = 1, uint32_t MOST = 8, class Use>
ibp_status by_element(const ibp_codebook &cb, const Use &use)
{
    const uint32_t size = cb.planes.element_bytes;
    if constexpr (LEAST <= 1u)
        if (size == 1u) return use(uint8_t{0});
    if constexpr (LEAST <= 2u && MOST >= 2u)
        if (size == 2u) return use(uint16_t{0});
    if constexpr (LEAST <= 4u && MOST >= 4u)
        if (size == 4u) return use(uint32_t{0});
    if constexpr (MOST >= 8u)
        if (size == 8u) return use(uint64_t{0});
    return IBP_INVALID_ARGUMENT;
}

// Returns the number of clusters (FORMAT.md section 7). If there are several, a byte with the index of its cluster
// comes before a coded row.
IBP_INLINE uint32_t clusters_of(const ibp_codebook &cb) { return ibp_has_clusters(&cb) ? cb.num_clusters : 1u; }

// Return whether a codebook is of one kind: any, listed or dense. The lists of decoders and encoders use these
// functions.
inline bool is_any(const ibp_codebook &) { return true; }
inline bool is_listed(const ibp_codebook &cb) { return cb.planes.listed; }
inline bool is_dense(const ibp_codebook &cb) { return !cb.planes.listed; }

// Returns whether there are two planes or more, the digits of plane 0 have first_bits bits, the digits of all other
// planes have two bits, and symbols have one byte.
IBP_INLINE bool are_pairs(const ibp_planes &planes, uint32_t first_bits = 2)
{
    bool pairs = planes.num_planes >= 2 && planes.symbol_bytes == 1;
    for (uint32_t p = 0; p < planes.num_planes; p++)
        pairs = pairs && planes.digit_bits[p] == (p == 0 ? first_bits : 2u);
    return pairs;
}
// Returns whether decode_pairs.cuh can decode the dense rows of a codebook. That decoder supports neither constant
// columns nor invariant bits of two-byte elements, because they would take registers from all rows.
IBP_INLINE bool decodes_pairs(const ibp_planes &planes)
{
    if (!are_pairs(planes) || planes.element_bytes > 4 || planes.num_constant != 0u) return false;
    return planes.element_bytes == 1   ? !planes.per_column
           : planes.element_bytes == 2 ? planes.invariant_bits == 0u
                                       : true;
}

// Returns whether a codebook has the form that level="fast" makes: dense rows of elements of two or four bytes, one
// plane of digits of four bits, and consecutive symbols of one byte.
IBP_INLINE bool is_fast(const ibp_codebook &cb)
{
    const ibp_planes &planes = cb.planes;
    return planes.consecutive && planes.num_planes == 1u && planes.digit_bits[0] == 4u && !planes.listed &&
           planes.symbol_bytes == 1u && (planes.element_bytes == 2u || planes.element_bytes == 4u);
}

// Encoders look up the codes of symbols in a table in shared memory. The table has a code of 4 bytes for each possible
// symbol of each cluster. kMostCodes: the largest number of codes in a table. kMostCodeBits: the largest number of bits
// of a symbol; if symbols have more bits, there is no table.
constexpr uint32_t kMostCodes = 4096, kMostCodeBits = 12;

IBP_INLINE uint32_t bits_of_symbol(const ibp_planes &planes)
{
    return 8u * planes.element_bytes - planes.invariant_bits - planes.residual_bits;
}
// Returns the number of codes in the table, for all clusters together.
IBP_INLINE uint32_t codes_of_all(const ibp_codebook &cb) { return clusters_of(cb) << bits_of_symbol(cb.planes); }
IBP_INLINE bool has_code_table(const ibp_codebook &cb)
{
    return !cb.planes.per_column && bits_of_symbol(cb.planes) <= kMostCodeBits && codes_of_all(cb) <= kMostCodes;
}
// If every column has its own entries, encoders look up the rank of a symbol, which is its index among the entries of
// its column; num_entries if the column has no such entry. The table of ranks is in shared memory and has one byte for
// each possible symbol of each column. kMostRanks: the largest number of ranks in a table. kMostRankEntries: the
// largest number of entries of a column, so that a rank fits in a byte.
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
