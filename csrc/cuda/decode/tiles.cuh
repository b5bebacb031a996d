// tiles.cuh - decodes dense rows tile by tile, and each tile plane by plane. decode_dense.cuh and decode_pairs.cuh
// share this code.
//
// The values of a dense row in shared memory, each part padded to a byte:
//
//     | residuals | plane 0: a digit for each element | plane 1: a digit for each escape of plane 0 | plane 2 |
//     | plane 3 | raw symbols: one for each escape of the last plane |
//
// A tile is the elements that a warp decodes at a time. The warp goes down the planes, which means from plane 0 to
// plane 3 (visit), because each plane begins where the digits of the plane before it end. Then it goes up again, from
// the raw symbols back to plane 0 (store).
//
// Where a plane begins depends on the number of escapes in the whole row. If each warp has a single tile, the visits of
// this tile also count its escapes. Otherwise the escapes of the whole row are counted first, and then each tile is
// visited to find its digits.
//
// Every element gets a name, which is one byte: a symbol, or the rank of an entry. An element whose digit in a plane is
// an escape takes its name from the level below that plane:
//
//     level 1    the names of the elements that have escapes in plane 0
//     level 2    the names of the elements that have escapes in plane 0 and plane 1. These names come from plane 2,
//                plane 3 and raw symbols
#ifndef IBP_DECODE_TILES_CUH
#define IBP_DECODE_TILES_CUH

#include "../planes_book.cuh"
#include "decoder.cuh"

namespace ibp {

// A lane's counts of some of its elements, such as escapes: one count for each of the STEPS steps of a tile, packed in
// words. In a step the group takes STEP elements.
template <class G, uint32_t STEP, uint32_t STEPS> struct StepCounts {
    static constexpr uint32_t kField = STEP <= 256u ? 8 : 16; // number of bits of one step's count
    static constexpr uint32_t kFields = 32u / kField, kWords = (STEPS + kFields - 1u) / kFields;
    uint32_t words[kWords] = {};

    __device__ __forceinline__ void add(uint32_t s, uint32_t count)
    {
        words[s / kFields] += count << s % kFields * kField;
    }
    // push() moves all counts up by a step, and inserts a new count for step 0. pop() removes and returns the count of
    // step 0, and moves the other counts down by a step.
    __device__ __forceinline__ void push(uint32_t count)
    {
#pragma unroll
        for (uint32_t k = kWords - 1u; k > 0u; k--) words[k] = __funnelshift_l(words[k - 1u], words[k], kField);
        words[0] = words[0] << kField | count;
    }
    __device__ __forceinline__ uint32_t pop()
    {
        const uint32_t count = field(words[0], 0);
#pragma unroll
        for (uint32_t k = 0; k < kWords; k++)
            words[k] = __funnelshift_r(words[k], k + 1u < kWords ? words[k + 1u] : 0u, kField);
        return count;
    }
    static __device__ __forceinline__ uint32_t field(uint32_t counts, uint32_t f)
    {
        return permute_bytes(counts, 0, kField == 8u ? 0x4440u + f : 0x4410u + 0x22u * f);
    }
    // Numbers the counted elements of the group in the order of steps and, within a step, of lanes. The first one gets
    // the number `first`. before: receives, for each step, the number of the lane's first counted element. columns:
    // number of columns of a row; steps past them may be left out. Returns the number of elements that the group has
    // counted.
    __device__ __forceinline__ uint32_t number(uint32_t first, uint32_t columns, uint32_t (&before)[STEPS]) const
    {
        uint32_t total = 0;
#pragma unroll
        for (uint32_t k = 0; k < kWords; k++) {
            if (k != 0u && k * kFields * STEP >= columns) break;
            // The sum over a step's lanes may not fit in its field. The sum over all lanes except the last one does, so
            // the last lane's count is added separately.
            constexpr bool kFits = STEP >> kField == 0u;
            const uint32_t sums = G::inclusive_scan(words[k]), lower = sums - words[k],
                           to_last = G::last_lane(kFits ? sums : lower), last = kFits ? 0u : G::last_lane(words[k]);
#pragma unroll
            for (uint32_t f = 0; f < kFields && k * kFields + f < STEPS; f++) {
                before[k * kFields + f] = first + total + field(lower, f);
                total += field(to_last, f) + (kFits ? 0u : field(last, f));
            }
        }
        return total;
    }
};

// A chunk of plane 1. digits: a lane's digits, in WORDS words; digits past the plane's last one are 0. before: number
// of escapes among the digits of lower lanes. num_escaped: number of escapes among the digits of all lanes of the
// group.
template <class G, uint32_t WORDS> struct PlaneChunk {
    uint32_t digits[WORDS], before, num_escaped;

    // Fills in before and num_escaped. count: number of escapes among this lane's digits.
    __device__ __forceinline__ void number(uint32_t count)
    {
        const uint32_t sums = G::inclusive_scan(count);
        before = sums - count, num_escaped = G::last_lane(sums);
    }
};

// The name that belongs to a digit, and whether the digit is an escape.
struct NamedDigit {
    uint32_t name;
    bool escaped;
};

// The levels of a warp's tile in shared memory. The list holds the elements that have no name yet. In the list an
// element is its 16-bit index in level 2. Once all elements of level 2 have names, the memory of the list becomes level
// 1.
//
//     | list, 2 * most bytes; later level 1, most bytes | 16 bytes | level 2, most bytes | 16 bytes |
//
// STEPS: number of vectors of 16 bytes that a lane has in a tile. PARTS: number of vectors, of 16 names each, that a
// lane writes to level 1 at a time.
template <typename T, class G, uint32_t STEPS, uint32_t PARTS = 1> struct TileLevels {
    static constexpr uint32_t kPerVector = 16u / sizeof(T); // number of elements in a vector of 16 bytes
    // kStep, kTile: number of elements that the group takes in a step and in a tile.
    static constexpr uint32_t kSteps = STEPS, kStep = G::kLanes * kPerVector, kTile = kSteps * kStep;
    // kPerLane, kChunk: number of digits of plane 1 that a lane and the group take at a time.
    static constexpr uint32_t kPerLane = 16u * PARTS, kChunk = G::kLanes * kPerLane;
    // level1: the shared byte at which the levels begin. most: the largest number of elements in a tile.
    uint32_t level1, most;

    // Returns the largest number of elements in a tile. For groups that are parts of a warp this is only the number of
    // elements in a row, rounded up to a multiple of 16, so that shared memory has room for more warps.
    static __host__ __device__ __forceinline__ uint32_t most_of(const ibp_codebook &cb)
    {
        if (G::kPerWarp == 1) return kTile;
        return (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 15u) / 16u * 16u;
    }
    static __host__ __device__ __forceinline__ uint32_t num_bytes(const ibp_codebook &cb)
    {
        return 3u * most_of(cb) + 32u; // up to 16 bytes past the end of each level may be read
    }
    // Returns the size in bytes of level 1 alone, which must be kept while elements are stored.
    static __host__ __device__ __forceinline__ uint32_t kept_bytes(const ibp_codebook &cb) { return most_of(cb) + 16u; }
    __device__ __forceinline__ uint32_t level2() const { return level1 + 2u * most + 16u; }
    __device__ __forceinline__ uint16_t &listed(uint32_t i) const
    {
        return reinterpret_cast<uint16_t *>(shared_bytes() + level1)[i];
    }

    // Writes the names of n elements of plane 2 or 3 to level 2, and fills the list with the elements whose digits are
    // escapes. If FIRST is true, digit i belongs to element i of level 2; otherwise it belongs to element i of the
    // list. digit(base): returns the NamedDigit of digit base + G::lane() of the plane. Returns the number of escapes
    // among the digits.
    template <bool FIRST, class Digit> __device__ __forceinline__ uint32_t name(uint32_t n, const Digit &digit) const
    {
        uint32_t num_escaped = 0;
        if (!FIRST) __syncwarp(); // before the list is read
#pragma unroll 1
        for (uint32_t base = 0; G::any(base < n); base += G::kLanes) {
            const uint32_t i = base + G::lane(), element = FIRST ? i : listed(i);
            const NamedDigit found = digit(base);
            const bool named = i < n, open = named && found.escaped;
            if (named) shared_bytes()[level2() + element] = static_cast<uint8_t>(found.name);
            const uint32_t escaped = G::ballot(open);
            if (!FIRST) __syncwarp(); // before the list is overwritten
            if (open) listed(num_escaped + ibp_popcount(escaped & G::lanes_below())) = static_cast<uint16_t>(element);
            num_escaped += ibp_popcount(escaped);
        }
        return num_escaped;
    }
    // Does what name<true> does for the n elements of plane 2. The digits of plane 2 must have two bits. A lane takes
    // four digits at a time, which suits groups of few lanes. four(i, left): returns four digits of the plane,
    // beginning with digit i. The plane has `left` digits from there on; digits past them must be 0. name(digits):
    // returns the names of four digits, one byte each; each digit has a nibble.
    template <class Four, class Name>
    __device__ __forceinline__ uint32_t name_fours(uint32_t n, const Four &four, const Name &name) const
    {
        uint32_t num_escaped = 0;
#pragma unroll 1
        for (uint32_t i = 4u * G::lane(); G::any(i - 4u * G::lane() < n); i += 4u * G::kLanes) {
            uint32_t digits = i < n ? four(i, n - i) : 0u, escaped = escaped_pairs(digits);
            digits = either_bits(digits, digits << 4, 0x0f0fu);
            digits = either_bits(digits, digits << 2, 0x3333u);
            if (i < n) shared_word((level2() + i) / 4u) = name(digits);
            if (!__any_sync(kAllLanes, escaped != 0u)) continue;
            const uint32_t count = ibp_popcount(escaped), sums = G::inclusive_scan(count);
            uint32_t at = num_escaped + sums - count;
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++)
                if (escaped >> 2u * k & 1u) listed(at++) = static_cast<uint16_t>(i + k);
            num_escaped += G::last_lane(sums);
        }
        return num_escaped;
    }
    // Writes the names of the n elements with raw symbols to level 2. in_list: these are the elements in the list;
    // otherwise they are all elements of level 2. name(i): returns the name of raw symbol i.
    template <class Name> __device__ __forceinline__ void name_raw(uint32_t n, bool in_list, const Name &name) const
    {
        __syncwarp(); // before the list is read
        for (uint32_t i = G::lane(); i < n; i += G::kLanes)
            shared_bytes()[level2() + (in_list ? listed(i) : i)] = static_cast<uint8_t>(name(i));
        __syncwarp(); // before level 2 is read
    }
    // Writes to level 1 the names of the tile's n elements that have escapes in plane 0. chunk: the first chunk of
    // their digits of plane 1. load(base, left): loads the chunk that begins with digit `base`; `left` is the number of
    // digits from there on. names(chunk, part, from): returns 16 names. from: the shared byte at which the names of the
    // lane's escaped digits begin; names() advances it past these names.
    template <class Chunk, class Load, class Names>
    __device__ __forceinline__ void name_plane1(uint32_t n, Chunk chunk, const Load &load, const Names &names) const
    {
        uint32_t i = kPerLane * G::lane(), first = level2();
#pragma unroll 1
        for (uint32_t base = 0;;) {
            uint32_t from = first + chunk.before;
#pragma unroll
            for (uint32_t part = 0; part < PARTS; part++)
                if (i + 16u * part < n)
                    *reinterpret_cast<uint4 *>(shared_bytes() + level1 + i + 16u * part) = names(chunk, part, from);
            base += kChunk;
            if (kTile <= kChunk || !G::any(base < n)) break;
            first += chunk.num_escaped;
            chunk = load(base, base < n ? n - base : 0u);
            i += kChunk;
        }
        __syncwarp(); // before level 1 is read
    }
};

// Implements decode(), as decoder.cuh specifies it, for a decoder of dense rows that provides exchanged(),
// count_escapes() and these two functions:
//
// visit(book, plane, start, range, tile): visits one plane of a tile, and returns the number of escapes among its
// digits.
// store(book, parts, tile, tile_start, n, window): goes up the planes of a tile and stores its elements. parts.mine has
// the ranges of the tile's digits.
//
// If a warp has a single tile, it visits the tile while the parts of the row are found. Otherwise it counts escapes
// first, and visits each tile afterwards.
template <class Decoder, typename T>
__device__ __forceinline__ bool decode_tiles(const Decoder &decoder, const PlanesBook<T> &book, bool active,
                                             uint32_t start_bit, uint32_t coded_bytes, const Window &window)
{
    using G = typename Decoder::Group;
    constexpr uint32_t kTile = Decoder::kTile;
    uint32_t n = active ? book.columns : 0u;
    const uint32_t tiles = (book.columns + kTile - 1u) / kTile,
                   per_warp = G::kAnyLength ? (tiles + G::kWarps - 1u) / G::kWarps : 1u;
    const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n),
                   last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
    const uint32_t end = start_bit + 8u * coded_bytes;
    const bool one_tile = per_warp == 1u;
    typename Decoder::Tile tile;
    ValueParts parts = book.template find_parts<G, Decoder::kFirstBits>(
        start_bit, end, n, {first, last}, decoder.exchanged(),
        [&](uint32_t p, uint32_t start, DigitRange range, uint32_t num_bits) {
            return one_tile ? decoder.visit(book, p, start, range, tile)
                            : Decoder::count_escapes(start, range, num_bits);
        });
    // If `good`, every position that is read below lies in the row, or at most 16 bytes past the end of one of its
    // parts.
    const bool good = !active || parts.end == end;
    if (G::kPerWarp == 1 && G::any(!good)) return false;
    if (G::kPerWarp > 1 && !good) n = 0;
    DigitRange(&mine)[IBP_MAX_PLANES + 1] = parts.mine;
#pragma unroll 1
    for (uint32_t k = 0; k < per_warp; k++) {
        const uint32_t tile_start = ibp_min_u32(first + k * kTile, last);
        if (!one_tile) mine[0] = {tile_start, ibp_min_u32(tile_start + kTile, last)};
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            const bool present = (Decoder::kFirstBits != 0u && p < 2u) || p < book.planes.num_planes;
            if (one_tile && (present || p >= 2u)) continue;
            mine[p + 1].to =
                mine[p + 1].from + (present || p < 2u ? decoder.visit(book, p, parts.digits[p], mine[p], tile)
                                                      : mine[p].to - mine[p].from);
        }
        if (G::kPerWarp > 1 && !good) tile.num_escaped = 0, mine[IBP_MAX_PLANES] = {0, 0};
        decoder.store(book, parts, tile, tile_start, n, window);
        __syncwarp(); // before the levels are overwritten
#pragma unroll
        for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++) mine[p].from = mine[p].to;
    }
    return G::kPerWarp == 1 || good;
}

} // namespace ibp

#endif
