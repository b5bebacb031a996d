// planes_book.cuh - reads codebooks of scheme planes, finds the parts of a coded row, combines symbols and residuals
// into elements, and stores the elements (FORMAT.md section 6). The template parameter T is the type of an element; all
// fields of a codebook except the size of elements are read at run time.
//
// include/ibp_codebook.h explains codebooks: planes, entries, symbols, residuals, digits, constant and live columns. In
// short, an element without its invariant low bits is a symbol, its upper bits, and a residual, its lower bits, which
// is stored as it is. The symbol is an entry of the codebook, and a digit says which one: digit d of plane p stands for
// the entry with the rank first_of(p) + d. If elements are rotated, their highest bit, which is the sign of a float, is
// the lowest bit of the residual, so that the symbol is the exponent. All decoders and encoders of scheme planes use
// these terms, too:
//
//     dense row       a row that stores the values of all its live columns
//     listed row      a row that stores the values of only those elements that differ from the default value, and says
//                     which elements these are. With signed_default, an element whose highest bit alone differs from
//                     the default value is not among them
//     escape          a digit whose bits are all ones. No entry of this plane or an earlier one is the element's symbol
//     reach           an element reaches a plane if its digits in all earlier planes are escapes; all elements reach
//                     plane 0. An element that has an escape in every plane has a raw symbol
//     raw symbol      a symbol that is stored as it is. `raw` alone stands for raw symbols where values are decoded or
//                     encoded, and for raw rows, which are not coded at all, where rows are fetched or placed
//     rank            the index of an entry among the codebook's entries or, if every column has its own entries, among
//                     those of its column, which are consecutive. The entries of plane 0 come first, then those of
//                     plane 1, and so on
//     absent plane    one of the IBP_MAX_PLANES planes that the codebook does not have. Decoders treat it as a plane
//                     whose digits have no bits and are all escapes
//     cluster         one of the codebooks of a table (FORMAT.md section 7). In launch.cuh, a cluster of thread blocks
//
// If a table has several clusters, a coded row begins with a byte, the index of the row's cluster, which the pictures
// below leave out. All fields are packed from the lowest bit of a byte up, in the order of the elements.
//
// The values of n elements, which are all live elements of a dense row, or the listed elements of a listed row. Each
// part is padded to a byte:
//
//     | residuals | plane 0: a digit for each element | plane 1: a digit for each escape of plane 0 | plane 2 |
//     | plane 3 | raw symbols: one for each escape of the last plane |
//
// A listed row, each part padded to a byte. If the row is closed, all its listed elements equal planes.closed_value,
// and no values follow:
//
//     | header, 1 to 3 bytes: k in the low bits, is_closed in the highest bit | positions of the k listed elements |
//     | highest bits of the others, with signed_default | values of the listed elements, unless is_closed |
//
// The positions have the shortest form for k (ibp_choose_position_form), and no bytes if k is 0. With signed_default,
// an element that is not listed equals the default in all bits but the highest one, which is stored here.
#ifndef IBP_PLANES_BOOK_CUH
#define IBP_PLANES_BOOK_CUH

#include "group.cuh"
#include "kinds.h"

namespace ibp {

// Returns a word in which the lowest bit of each digit is set if the digit is an escape. num_bits: number of bits of a
// digit: 1, 3 or 4. (escaped_pairs is for digits of two bits.)
__device__ __forceinline__ uint64_t escapes_in(uint64_t digits, uint32_t num_bits)
{
    switch (num_bits) {
    case 1: return digits;
    case 3: return digits & digits >> 1 & digits >> 2 & 0x9249249249249249ull;
    default: return digits & digits >> 1 & digits >> 2 & digits >> 3 & 0x1111111111111111ull;
    }
}

// The digits of a plane that a warp reads: digits `from` to `to` - 1.
struct DigitRange {
    uint32_t from, to;
};

// The bit positions in shared memory at which the parts of a row's values begin. An absent plane has no bits, so
// digits[IBP_MAX_PLANES] is always where the raw symbols begin. (In PlanesCensus::Parts, digits[num_planes] is.)
// mine[p]: the digits of plane p that this warp reads; mine[IBP_MAX_PLANES]: the raw symbols that it reads. find_parts
// sets these ranges for all tiles of the warp; TileDecoder::decode then narrows them to one tile after the other.
struct ValueParts {
    uint32_t residuals, digits[IBP_MAX_PLANES + 1], end;
    DigitRange mine[IBP_MAX_PLANES + 1];

    // Returns the parts of a row that has no values.
    static __device__ __forceinline__ ValueParts nothing(uint32_t start)
    {
        ValueParts parts{};
        parts.residuals = parts.end = start;
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) parts.digits[p] = start;
        return parts;
    }
};

// A codebook of scheme planes. FIELDS: the PlanesFields that the codebook may use.
template <typename T, uint32_t FIELDS = kAllFields> struct PlanesBook {
    static constexpr uint32_t kElementBits = 8u * sizeof(T);
    const ibp_planes &planes;
    const uint8_t *entries;              // entries of the row's cluster
    const uint32_t columns, symbol_bits; // columns: number of live columns

    __device__ __forceinline__ PlanesBook(const ibp_codebook &cb, uint32_t cluster)
        : planes(cb.planes),
          entries(static_cast<const uint8_t *>(cb.planes.entries) + uint64_t{cluster} * cb.cluster_stride),
          columns(live_columns(cb)), symbol_bits(kElementBits - invariant_bits(cb.planes) - cb.planes.residual_bits)
    {
    }
    static __host__ __device__ __forceinline__ uint32_t live_columns(const ibp_codebook &cb)
    {
        return cb.row_bytes / static_cast<uint32_t>(sizeof(T)) - num_constant(cb.planes);
    }
    // Return a field of the codebook, or a constant if FIELDS says that the codebook does not use the field.
    static __host__ __device__ __forceinline__ uint32_t invariant_bits(const ibp_planes &planes)
    {
        return (FIELDS & kInvariantBits) != 0u ? planes.invariant_bits : 0u;
    }
    static __host__ __device__ __forceinline__ uint64_t invariant_value(const ibp_planes &planes)
    {
        return (FIELDS & kInvariantBits) != 0u ? planes.invariant_value : 0u;
    }
    static __host__ __device__ __forceinline__ bool consecutive(const ibp_planes &planes)
    {
        return (FIELDS & kConsecutive) != 0u && planes.consecutive;
    }
    static __host__ __device__ __forceinline__ bool signed_default(const ibp_planes &planes)
    {
        return (FIELDS & kSignedDefault) != 0u && planes.signed_default;
    }
    static __host__ __device__ __forceinline__ uint32_t num_constant(const ibp_planes &planes)
    {
        return (FIELDS & kConstantColumns) != 0u ? planes.num_constant : 0u;
    }

    // Returns the size of an entry in bytes, which is at most the size of an element.
    static __host__ __device__ __forceinline__ uint32_t symbol_bytes(const ibp_planes &planes)
    {
        return sizeof(T) == 1 ? 1u : planes.symbol_bytes;
    }
    __device__ __forceinline__ T entry(uint32_t i) const
    {
        if (consecutive(planes)) return static_cast<T>(low_bits(planes.first_symbol + i, symbol_bits));
        return entry_at(entries, planes, i);
    }
    // Returns entry i of a codebook whose entries are not consecutive. Bits above the symbol, which a wrong codebook
    // may have, are dropped.
    static __device__ __forceinline__ T entry_at(const uint8_t *entries, const ibp_planes &planes, uint32_t i)
    {
        T entry;
        if (sizeof(T) == 1 || planes.symbol_bytes == 1u)
            entry = static_cast<T>(__ldg(entries + i));
        else if (sizeof(T) == 2 || planes.symbol_bytes == 2u)
            entry = static_cast<T>(__ldg(reinterpret_cast<const uint16_t *>(entries) + i));
        else if (sizeof(T) == 4 || planes.symbol_bytes == 4u)
            entry = static_cast<T>(__ldg(reinterpret_cast<const uint32_t *>(entries) + i));
        else
            entry = static_cast<T>(__ldg(reinterpret_cast<const unsigned long long *>(entries) + i));
        const uint32_t symbol_bits = kElementBits - invariant_bits(planes) - planes.residual_bits;
        return static_cast<T>(low_bits(uint64_t{entry}, symbol_bits));
    }
    // Returns the number of bits of a plane's digits; 0 if the plane is absent.
    __device__ __forceinline__ uint32_t width_of(uint32_t plane) const
    {
        return plane < planes.num_planes ? planes.digit_bits[plane] : 0u;
    }
    __device__ __forceinline__ uint32_t escape_of(uint32_t plane) const { return (1u << width_of(plane)) - 1u; }
    // Returns the index of a plane's first entry.
    __device__ __forceinline__ uint32_t first_of(uint32_t plane) const
    {
        uint32_t first = 0;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++)
            if (p < plane) first += escape_of(p);
        return first;
    }

    // Returns the element that has this symbol and this residual. turned() stands for a rotation to the right by one
    // bit among the coded bits, which are all bits except the invariant ones, if the codebook rotates elements:
    //
    //     element = turned(symbol << residual_bits | residual) << invariant_bits | invariant_value
    __device__ __forceinline__ T join(T symbol, T residual) const
    {
        const uint32_t inv = invariant_bits(planes), at = inv + planes.residual_bits;
        if (inv >= kElementBits) return static_cast<T>(invariant_value(planes));
        const T rotated = static_cast<T>((at >= kElementBits ? T{0} : static_cast<T>(symbol << at)) |
                                         static_cast<T>(residual << inv));
        const T top = static_cast<T>(static_cast<T>(rotated >> inv) << (kElementBits - 1u)),
                element = planes.rotate ? static_cast<T>(rotated >> 1 | top) : rotated;
        return static_cast<T>((element & static_cast<T>(~uint64_t{0} << inv)) |
                              static_cast<T>(invariant_value(planes)));
    }
    // Returns the num_bits bits of shared memory that begin at bit `position`.
    static __device__ __forceinline__ T shared_field(uint32_t position, uint32_t num_bits)
    {
        if (sizeof(T) < 8) return static_cast<T>(low_bits(shared_bits(position), num_bits));
        return static_cast<T>(low_bits(shared_bits64(position), num_bits));
    }

    // Returns the number of escapes among the digits of a range. start: the bit at which the plane's digits begin.
    template <class G>
    static __device__ __forceinline__ uint32_t count_escapes(uint32_t start, DigitRange range, uint32_t num_bits)
    {
        uint32_t count = 0;
        if (num_bits == 2u) { // a word holds 16 digits
#pragma unroll 1
            for (uint32_t first = range.from; first < range.to; first += 16u * G::kLanes) {
                const uint32_t i = first + 16u * G::lane();
                if (i < range.to)
                    count += ibp_popcount(
                        escaped_pairs(low_bits(shared_bits(start + 2u * i), 2u * ibp_min_u32(range.to - i, 16u))));
            }
            return G::sum_in_warp(count);
        }
        const uint32_t per_load = 0x10152040u >> 8u * (num_bits - 1u) & 0xffu; // 64 / num_bits, without a division
#pragma unroll 1
        for (uint32_t first = range.from; first < range.to; first += per_load * G::kLanes) {
            const uint32_t i = first + per_load * G::lane();
            if (i >= range.to) continue;
            const uint64_t digits = shared_bits64(start + i * num_bits);
            count += __popcll(low_bits(escapes_in(digits, num_bits), ibp_min_u32(range.to - i, per_load) * num_bits));
        }
        return G::sum_in_warp(count);
    }

    // Finds the parts of the values of n elements, which lie in the bits `start` to `end` - 1 of shared memory. Each
    // plane after plane 0 has one digit for every escape of the plane before it. If a part ends past `end`, parts.end
    // is past `end`, too.
    // FIRST_BITS: if not 0, plane 0 must have digits of FIRST_BITS bits, and there must be at least one further plane,
    // all with digits of two bits. mine: the warp's elements. exchanged: index of the first of IBP_MAX_PLANES *
    // G::kWarps words of shared memory, in which the warps exchange counts. count(plane, start, range, num_bits):
    // returns the number of escapes among the plane's digits in `range`.
    template <class G, uint32_t FIRST_BITS, class Count>
    __device__ __forceinline__ ValueParts find_parts(uint32_t start, uint32_t end, uint32_t n, DigitRange mine,
                                                     uint32_t exchanged, const Count &count) const
    {
        ValueParts parts;
        parts.residuals = start;
        parts.digits[0] = start + to_byte(n * planes.residual_bits);
        parts.mine[0] = mine;
        uint32_t reaching = n;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            parts.digits[p + 1] = parts.digits[p];
            parts.mine[p + 1] = parts.mine[p];
            if (!(FIRST_BITS != 0u && p < 2u) && p >= planes.num_planes) continue;
            const uint32_t num_bits = FIRST_BITS == 0u ? planes.digit_bits[p] : p == 0u ? FIRST_BITS : 2u;
            parts.digits[p + 1] += to_byte(reaching * num_bits);
            if (parts.digits[p + 1] > end) parts.mine[p] = {0, 0}; // nothing is read past the end
            const uint32_t escaped = count(p, parts.digits[p], parts.mine[p], num_bits),
                           before = G::exchange(exchanged + p * G::kWarps, escaped, reaching);
            parts.mine[p + 1] = {before, before + escaped};
        }
        parts.end = parts.digits[IBP_MAX_PLANES] + to_byte(reaching * symbol_bits);
        return parts;
    }
};

// The constants for combining a word of symbols and a word of residuals into a word of elements. A symbol or residual
// lies in the low bits of its element's field of the word.
template <typename T> struct WordJoin {
    static_assert(sizeof(T) <= 4, "a word must hold whole elements");
    static constexpr uint32_t kBits = 8u * sizeof(T), kOnes = ~0u >> (32u - kBits);
    static constexpr uint32_t kEach = ~0u / kOnes; // the lowest bit of every element
    // of_symbol, of_residual, to_top: the powers of two by which symbols, residuals and elements are multiplied, to
    // shift them left. rotate: number of bits by which elements are shifted right.
    uint32_t of_symbol, of_residual, to_top, rotate;
    // kept: a mask of the bits of every element that come from the right shift. top: a mask of the highest bit of every
    // element if elements are rotated, else 0. invariant: the invariant bits of every element.
    uint32_t kept, top, invariant;

    __device__ __forceinline__ explicit WordJoin(const ibp_planes &planes)
    {
        const uint32_t inv = planes.invariant_bits, width = kBits - inv;
        of_residual = power(inv), of_symbol = power(inv + planes.residual_bits), to_top = power(width - 1u);
        rotate = planes.rotate;
        top = rotate ? kEach << (kBits - 1u) : 0u;
        kept = low_bits(uint32_t{kOnes}, width) << ibp_min_u32(inv, 31u);
        kept = (kept >> rotate & kept) * kEach;
        invariant = static_cast<uint32_t>(low_bits(planes.invariant_value, inv)) * kEach;
    }
    // Returns 2^shift in a form that the compiler does not recognize as a constant power of two, so that it does not
    // turn multiplications into shifts. Multiplications run on a separate unit, while shifts compete with the other
    // integer instructions.
    static __device__ __forceinline__ uint32_t power(uint32_t shift)
    {
        uint32_t factor = 1u << ibp_min_u32(shift, 31u);
#ifdef __CUDACC__
        asm("" : "+r"(factor));
#endif
        return factor;
    }
    __device__ __forceinline__ uint32_t word(uint32_t symbols, uint32_t residuals) const
    {
        return turned(rotated(symbols, residuals));
    }
    // Returns elements that are still rotated, and whose invariant bits are 0.
    __device__ __forceinline__ uint32_t rotated(uint32_t symbols, uint32_t residuals) const
    {
        return symbols * of_symbol + residuals * of_residual;
    }
    // Inserts residuals into elements that are final except that their residual bits are 0. The residuals must have
    // been multiplied by of_residual.
    __device__ __forceinline__ uint32_t beside(uint32_t elements, uint32_t residuals) const
    {
        return elements | (residuals >> rotate & kept) | (residuals * to_top & top);
    }
    // Returns whether turned() changes elements, which it does if they are rotated or have invariant bits.
    __device__ __forceinline__ bool turns() const { return kept != ~0u; }
    // Rotates elements back, and sets their invariant bits, which are the lowest ones.
    __device__ __forceinline__ uint32_t turned(uint32_t elements) const
    {
        return select_bits(kept, elements >> rotate, (elements * to_top & top) | invariant);
    }
};

// Combines symbols and residuals into a vector of elements, which have two or four bytes and no invariant bits. A
// symbol is one byte, and a residual is all other bits of its element. The residuals begin `word` words after the
// cursor.
template <typename T>
__device__ __forceinline__ void join_bytes(uint32_t rotate, uint2 symbols, const Cursor &residuals, uint32_t word,
                                           uint32_t (&words)[4])
{
    const uint32_t a = residuals.word(word), b = residuals.word(word + 1u);
    if constexpr (sizeof(T) == 2) {
        words[0] = permute_bytes(a, symbols.x, 0x5140), words[1] = permute_bytes(a, symbols.x, 0x7362);
        words[2] = permute_bytes(b, symbols.y, 0x5140), words[3] = permute_bytes(b, symbols.y, 0x7362);
        const uint32_t kept = (0xffffu >> rotate) * 0x00010001u;
#pragma unroll
        for (uint32_t k = 0; k < 4u; k++) words[k] = select_bits(kept, words[k] >> rotate, words[k] << 15);
    } else {
        const uint32_t c = residuals.word(word + 2u);
        words[0] = permute_bytes(a, symbols.x, 0x4210);
        words[1] = permute_bytes(__funnelshift_r(a, b, 24), symbols.x, 0x5210);
        words[2] = permute_bytes(__funnelshift_r(b, c, 16), symbols.x, 0x6210);
        words[3] = permute_bytes(c, symbols.x, 0x7321);
#pragma unroll
        for (uint32_t k = 0; k < 4u; k++) words[k] = __funnelshift_r(words[k], words[k], rotate);
    }
}

// Stores the element of a live column. FIELDS: as in PlanesBook.
template <typename T, uint32_t FIELDS = kAllFields>
__device__ __forceinline__ void put_element(const ibp_planes &planes, const Window &window, uint32_t column, T element)
{
    if (PlanesBook<T, FIELDS>::num_constant(planes) != 0u) column = __ldg(planes.live_columns + column);
    const uint32_t first = column * static_cast<uint32_t>(sizeof(T));
    uint8_t *const dst = window.dst + (static_cast<int64_t>(first) - window.low);
    if (first >= window.low && first + sizeof(T) <= window.high && aligned(dst, sizeof(T))) {
        *reinterpret_cast<T *>(dst) = element;
        return;
    }
    for (uint32_t b = 0; b < sizeof(T); b++)
        if (first + b >= window.low && first + b < window.high)
            dst[b] = static_cast<uint8_t>(static_cast<uint64_t>(element) >> (8u * b));
}
// residuals, raw: the bits of shared memory at which a row's residuals and its raw symbols begin. before: number of raw
// symbols of the row that belong to earlier elements.
struct RawPlace {
    uint32_t residuals, raw, before;
};
// Stores the elements of a lane's vector that have raw symbols. Bit STRIDE * e of `raws` is set if element first + e
// has a raw symbol. Returns place.before plus the number of raw symbols of all lanes of the group; this is `before` in
// the next call's RawPlace.
template <typename T, class G, uint32_t STRIDE>
static __device__ __noinline__ uint32_t put_raw_elements(const ibp_codebook &cb, Window window, RawPlace place,
                                                         uint32_t first, uint32_t raws)
{
    const PlanesBook<T> book(cb, 0);
    const uint32_t r = cb.planes.residual_bits, count = ibp_popcount(raws), sums = G::scan_in_warp(count);
    uint32_t position = place.raw + (place.before + sums - count) * book.symbol_bits;
    for (uint32_t left = raws; left != 0u; left &= left - 1u, position += book.symbol_bits) {
        const uint32_t i = first + lowest_of(left) / STRIDE;
        const T symbol = PlanesBook<T>::shared_field(position, book.symbol_bits),
                residual = PlanesBook<T>::shared_field(place.residuals + i * r, r);
        put_element<T>(cb.planes, window, i, book.join(symbol, residual));
    }
    return place.before + G::last_lane(sums);
}
// Copies the bytes of a codebook's row template that lie in the window.
template <class G> static __device__ __noinline__ void copy_template(const uint8_t *from, Window window)
{
    group_copy<G>(window.dst, from + window.low, window.high - window.low);
}
// If the codebook has constant columns, copies its row template to the rows of active groups. Call this before the live
// elements are stored.
template <class G>
__device__ __forceinline__ void put_template(const ibp_planes &planes, bool active, const Window &window)
{
    if (planes.num_constant == 0u) return;
    if (active) copy_template<G>(planes.row_template, window);
    G::sync();
}
// Stores the bytes of a 16-byte vector that lie in the window. The vector begins with live element `first`. If the
// codebook has constant columns, stores one element at a time.
template <typename T>
static __device__ __noinline__ void store_slowly(const ibp_codebook &cb, Window window, uint32_t first, uint4 words)
{
    if (cb.planes.num_constant == 0u)
        return store_part(window, first * static_cast<uint32_t>(sizeof(T)) / 4u, 4, words);
    const uint32_t columns = PlanesBook<T>::live_columns(cb), values[4] = {words.x, words.y, words.z, words.w};
    for (uint32_t e = 0; e < 16u / sizeof(T) && first + e < columns; e++) {
        T element;
        memcpy(&element, reinterpret_cast<const uint8_t *>(values) + e * sizeof(T), sizeof(T));
        put_element<T>(cb.planes, window, first + e, element);
    }
}
// Stores 16 bytes of elements, beginning with live element `first`. units: the result of window.is_units; must be false
// if there are constant columns.
template <typename T>
__device__ __forceinline__ void store_elements(const ibp_codebook &cb, const Window &window, bool units, uint32_t first,
                                               const uint32_t (&words)[4])
{
    const uint4 four = make_uint4(words[0], words[1], words[2], words[3]);
    if (units)
        *reinterpret_cast<uint4 *>(window.dst + first * static_cast<uint32_t>(sizeof(T))) = four;
    else
        store_slowly<T>(cb, window, first, four);
}

} // namespace ibp

#endif
