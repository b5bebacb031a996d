// tiles.cuh - what decode_dense.cuh and decode_pairs.cuh share: tiles of dense rows, whose planes a warp goes down and
// up again, and the levels, where names of escaped elements wait for the plane above, a byte each: symbols or ranks.
#ifndef IBP_TILES_CUH
#define IBP_TILES_CUH

#include "../planes_book.cuh"
#include "decoder.cuh"

namespace ibp {

// How many elements a lane has in each of the STEPS steps of a tile; a step is STEP elements of the group.
template <class G, uint32_t STEP, uint32_t STEPS> struct StepCounts {
    static constexpr uint32_t kField = STEP <= 256u ? 8 : 16; // bits of a step's count
    static constexpr uint32_t kFields = 32u / kField, kWords = (STEPS + kFields - 1u) / kFields;
    uint32_t words[kWords] = {};

    __device__ __forceinline__ void add(uint32_t s, uint32_t count)
    {
        words[s / kFields] += count << s % kFields * kField;
    }
    // Moves all counts up a step and puts one before them; takes the first one away and moves the others down.
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
    // Numbers the elements from `first` on. before: the number of the lane's first element in each step. columns: of
    // the table, which may have no further steps. Returns how many elements there are.
    __device__ __forceinline__ uint32_t number(uint32_t first, uint32_t columns, uint32_t (&before)[STEPS]) const
    {
        uint32_t total = 0;
#pragma unroll
        for (uint32_t k = 0; k < kWords; k++) {
            if (k != 0u && k * kFields * STEP >= columns) break;
            // All lanes but the last have less than 2^kField together in a step, and where it fits all of them.
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

// Digits of plane 1 of a lane, WORDS of them, none behind the last one, and how many lower lanes' escapes there are.
template <class G, uint32_t WORDS> struct PlaneChunk {
    uint32_t digits[WORDS], before, num_escaped;

    // count: how many of a lane's digits are escapes.
    __device__ __forceinline__ void number(uint32_t count)
    {
        const uint32_t sums = G::inclusive_scan(count);
        before = sums - count, num_escaped = G::last_lane(sums);
    }
};

// What a digit stands for.
struct NamedDigit {
    uint32_t name;
    bool escaped;
};

// Shared memory of a warp: a list of the elements still open, which makes room for the names of plane 1, and the names
// of the elements of plane 2.
// STEPS: vectors of a lane in a tile. PARTS: vectors of names of plane 1 that a lane makes at a time.
template <typename T, class G, uint32_t STEPS, uint32_t PARTS = 1> struct TileLevels {
    static constexpr uint32_t kPerVector = 16u / sizeof(T); // elements of 16 bytes
    static constexpr uint32_t kSteps = STEPS, kStep = G::kLanes * kPerVector, kTile = kSteps * kStep; // elements
    static constexpr uint32_t kPerLane = 16u * PARTS, kChunk = G::kLanes * kPerLane; // digits of plane 1 at a time
    uint32_t level1, most;                                                           // shared byte; elements of a tile

    // Elements of a tile, of short rows no more than a row has, rounded up to vectors: so that warps find room.
    static __host__ __device__ __forceinline__ uint32_t most_of(const ibp_codebook &cb)
    {
        if (G::kPerWarp == 1) return kTile;
        return (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 15u) / 16u * 16u;
    }
    static __host__ __device__ __forceinline__ uint32_t num_bytes(const ibp_codebook &cb)
    {
        return 3u * most_of(cb) + 32u; // 16 bytes behind each level's names may be read
    }
    // The names of plane 1 alone, which are read while elements are stored.
    static __host__ __device__ __forceinline__ uint32_t kept_bytes(const ibp_codebook &cb) { return most_of(cb) + 16u; }
    __device__ __forceinline__ uint32_t level2() const { return level1 + 2u * most + 16u; }
    __device__ __forceinline__ uint16_t &listed(uint32_t i) const
    {
        return reinterpret_cast<uint16_t *>(shared_bytes() + level1)[i];
    }

    // Names n elements of plane 2 or 3 in level 2. FIRST: the first n elements there, otherwise the listed ones. Lists
    // the elements that escape. digit(base): the digit of the lane's element, `base` elements after its first one.
    // Returns how many have escaped.
    template <bool FIRST, class Digit> __device__ __forceinline__ uint32_t name(uint32_t n, const Digit &digit) const
    {
        uint32_t num_escaped = 0;
        if (!FIRST) __syncwarp(); // the list is there
#pragma unroll 1
        for (uint32_t base = 0; G::any(base < n); base += G::kLanes) {
            const uint32_t i = base + G::lane(), element = FIRST ? i : listed(i);
            const NamedDigit found = digit(base);
            const bool named = i < n, open = named && found.escaped;
            if (named) shared_bytes()[level2() + element] = static_cast<uint8_t>(found.name);
            const uint32_t escaped = G::ballot(open);
            if (!FIRST) __syncwarp(); // all have read the list
            if (open) listed(num_escaped + ibp_popcount(escaped & G::lanes_below())) = static_cast<uint16_t>(element);
            num_escaped += ibp_popcount(escaped);
        }
        return num_escaped;
    }
    // Likewise the first n elements, of plane 2, by digits of two bits, four a lane: where there are few lanes. four(i,
    // left): four digits from the i-th on; name(digits): what digits stand for, which are a nibble each.
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
    // Likewise n elements whose symbols are raw. in_list: whether they are listed, not all of plane 2.
    template <class Name> __device__ __forceinline__ void name_raw(uint32_t n, bool in_list, const Name &name) const
    {
        __syncwarp(); // the list is there
        for (uint32_t i = G::lane(); i < n; i += G::kLanes)
            shared_bytes()[level2() + (in_list ? listed(i) : i)] = static_cast<uint8_t>(name(i));
        __syncwarp(); // level 2 is there
    }
    // Puts the names of the n elements of a tile that escaped plane 0 into level 1. chunk: the first digits; load(base,
    // left): `left` digits from `base` on; names(chunk, part, from): 16 names; from: the shared byte at which the names
    // of a lane's escaped elements begin, which it moves on to the next ones.
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
        __syncwarp(); // level 1 is there
    }
};

// Rebuilds a dense row as in decoder.cuh, by a decoder that goes down the planes of a tile, visit(book, plane, start,
// range, tile), which returns how many digits have escaped, and up again, store(book, parts, tile, tile_start, n,
// window), where parts.mine are the digits of the tile. A warp that has one tile visits it while the parts are found.
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
    // Then every position that is read from here on lies in the row, or up to 16 bytes behind a part of it.
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
        __syncwarp(); // the levels are free
#pragma unroll
        for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++) mine[p].from = mine[p].to;
    }
    return G::kPerWarp == 1 || good;
}

} // namespace ibp

#endif
