// tiles.cuh - the decoder of dense rows (TileDecoder). It decodes a row tile by tile, and each tile plane by plane.
// decode_dense.cuh and decode_pairs.cuh say how digits and names are kept. planes_book.cuh shows the values of a dense
// row, and explains escapes, ranks, absent planes, and when an element reaches a plane.
//
// A tile is the elements of one row that the lanes of a group in one warp decode at a time. Each warp of a larger group
// has tiles of its own. Where this file speaks of the lanes of a group, or of what a group takes at a time, it means
// the group's lanes in one warp. In each step of a tile, every lane has 16 bytes of the row:
//
//     step 0    | elements of lane 0 | elements of lane 1 | ... | elements of the last lane |
//     step 1    | elements of lane 0 | elements of lane 1 | ... | elements of the last lane |
//     ...
//
// A tile is decoded in three phases:
//
// 1. The group goes down the planes, from plane 0 to plane 3 (visit), because each plane begins where the digits of the
//    plane before it end, and counts escapes. The elements that reach planes 2 and 3 get their names.
// 2. It goes up again, from the raw symbols, which complete level 2, to plane 1, and makes level 1 (the first part of
//    TileDecoder::store).
// 3. In plane 0 it finds the names of all elements, turns the names into elements, and stores these (Names::store).
//
// Where a plane begins depends on the number of escapes in the whole row, so the warps of a larger group add up their
// counts once in each plane. If each warp has a single tile, the visits of this tile also count its escapes. Otherwise
// the escapes of the whole row are counted first, and then each tile is visited to find its digits.
//
// Every element gets a name, which is one byte from which Names makes the element's symbol, such as the symbol itself
// or the rank of an entry. The names of a plane are a table, which has a name for every digit except the escape. An
// element whose digit in plane p is an escape takes its name from level p + 1. A level is an array of names in shared
// memory:
//
//     level 1    the names of the elements that reach plane 1
//     level 2    the names of the elements that reach plane 2. These names come from plane 2, plane 3 and raw symbols
//
// An example: digits have two bits, so that 3 is the escape, and the names are a, b, c in plane 0, d, e, f in plane 1,
// and g, h, i in plane 2.
//
//     plane 0    2 3 0 3 3 1        names      c d a h f b
//     plane 1      0   3 2          level 1      d   h f
//     plane 2          1            level 2          h
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
            const uint32_t sums = G::scan_in_warp(words[k]), lower = sums - words[k],
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

// The group decodes the digits of plane 1 in chunks, and this is one of them. Scheme ibp has chunks of another kind.
// digits: a lane's digits, in WORDS words; digits past the tile's last one are 0. before: number of escapes among the
// digits of lower lanes. num_escaped: number of escapes among the digits of all lanes of the group.
template <class G, uint32_t WORDS> struct PlaneChunk {
    uint32_t digits[WORDS], before, num_escaped;

    // Fills in before and num_escaped. count: number of escapes among this lane's digits.
    __device__ __forceinline__ void number(uint32_t count)
    {
        const uint32_t sums = G::scan_in_warp(count);
        before = sums - count, num_escaped = G::last_lane(sums);
    }
};

// kRawRank: the name of an element with a raw symbol if names are ranks. kRawRanks: four such names, one in each byte.
constexpr uint32_t kRawRank = 0x80, kRawRanks = 0x80808080;
constexpr uint32_t kMostColumnTable = 32u << 10; // largest size in bytes of a block's table of all columns' entries

// Returns the symbols of word k of a vector, each in the low bits of its element. names: the names of the vector's
// elements, which are symbols, one byte each. T: the type of an element.
template <typename T> __device__ __forceinline__ uint32_t symbols_of_word(uint4 names, uint32_t k)
{
    if (sizeof(T) == 1) return k < 2u ? k == 0u ? names.x : names.y : k == 2u ? names.z : names.w;
    if (sizeof(T) == 2) return permute_bytes(k < 2u ? names.x : names.y, 0, k % 2u ? 0x4342 : 0x4140);
    return permute_bytes(names.x, 0, 0x4440 + k);
}

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
        for (uint32_t base = 0; G::any_in_warp(base < n); base += G::kLanes) {
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
        for (uint32_t i = 4u * G::lane(); G::any_in_warp(i - 4u * G::lane() < n); i += 4u * G::kLanes) {
            uint32_t digits = i < n ? four(i, n - i) : 0u, escaped = escaped_pairs(digits);
            digits = either_bits(digits, digits << 4, 0x0f0fu);
            digits = either_bits(digits, digits << 2, 0x3333u);
            if (i < n) shared_word((level2() + i) / 4u) = name(digits);
            if (!__any_sync(kAllLanes, escaped != 0u)) continue;
            const uint32_t count = ibp_popcount(escaped), sums = G::scan_in_warp(count);
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
            if (kTile <= kChunk || !G::any_in_warp(base < n)) break;
            first += chunk.num_escaped;
            chunk = load(base, base < n ? n - base : 0u);
            i += kChunk;
        }
        __syncwarp(); // before level 1 is read
    }
};

// The decoder of dense rows (decoder.cuh). Names says what the name of an element is and how names become elements, and
// Names::Digits says how digits are kept and how they select names. decode_dense.cuh and decode_pairs.cuh define all
// Digits and Names.
//
// Digits is a struct of static functions for elements of type Element, which a Group decodes:
//
//     Levels, Tile, Chunk     the levels, and what a lane knows of a tile and of a chunk of plane 1
//     kFirstBits              number of bits of a digit of plane 0; there must be a further plane, and all further
//                             planes must have digits of two bits. 0: digits of any width, in any number of planes
//     kNameBytes, kKeptBytes  sizes in bytes of two parts of a warp's scratch: the names of all digits, and the digits
//                             of plane 0 in a tile; 0 if these digits are in registers
//     width_of                returns the number of bits of a plane's digits; 0 if the plane is absent
//     load_tile               loads a tile's digits of plane 0; returns the number of escapes among them
//     load_chunk              loads a chunk of plane 1
//     name_digits             writes the names of elements that reach plane 2 or 3 to level 2, and fills the list with
//                             the elements whose digits are escapes; returns the number of escapes
//     count_escapes           returns the number of escapes among the digits of a range
//     names_of                returns the PlaneNames of a plane, whose function sixteen() returns names for plane 1
//
// Names is a struct of static functions, too. Besides constants of the contract of decoder.cuh it has:
//
//     kConstantColumns        whether the codebook may have constant columns; if so, decode() copies its row template
//                             first
//     begin, fill             write the names that belong to the digits of a cluster to the warp's scratch
//     has_table, TableEntry   whether a block has a table of the entries of all columns, provided that there is one
//                             cluster and the table is not too large; the type of the table's entries
//     column_entry            returns an entry of a column as the block's table has it
//     entry_bytes             size in bytes of the entries at the end of the warp's scratch
//     raw_name                returns the name of an element with a raw symbol
//     store                   finds the names of a tile's elements from plane 0 and level 1, and stores the elements
template <class Names> struct TileDecoder {
    using Digits = typename Names::Digits;
    using T = typename Digits::Element;
    using Group = typename Digits::Group;
    using G = Group;
    using Levels = typename Digits::Levels;
    using Tile = typename Digits::Tile;
    using TableEntry = typename Names::TableEntry;
    static constexpr uint32_t kMostThreads = Names::kMostThreads, kVectors = Names::kVectors,
                              kOwnVectors = Names::kOwnVectors, kLeastLanes = Names::kLeastLanes,
                              kLaneVectors = Levels::kSteps;
    static constexpr uint32_t kTile = Levels::kTile, kChunk = Levels::kChunk;

    const ibp_codebook &cb;
    const uint32_t scratch; // the shared byte at which the group's scratch begins

    // Returns the size in bytes of the block's table of the entries of all columns; 0 if the block has no table. At the
    // end of the table are at least 16 bytes of padding, which may be read.
    //
    //     | entries of rank 0: one for each column | entries of rank 1 | ... | padding |
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &cb)
    {
        const uint32_t entries = PlanesBook<T>::live_columns(cb) * cb.planes.num_entries,
                       num_bytes = entries * static_cast<uint32_t>(sizeof(TableEntry)) + 16u;
        return Names::has_table(cb) && cb.num_clusters <= 1u && num_bytes <= kMostColumnTable
                   ? num_bytes / 16u * 16u + 16u
                   : 0u;
    }
    // The scratch of a group in shared memory: a part for each warp, and then the words through which the warps
    // exchange counts.
    //
    //     each warp's part    | names of the digits of each plane | digits of plane 0 | levels | entries |
    static __host__ __device__ __forceinline__ uint32_t entries_at(const ibp_codebook &cb)
    {
        return Digits::kNameBytes + Digits::kKeptBytes + Levels::num_bytes(cb);
    }
    static __host__ __device__ __forceinline__ uint32_t warp_bytes(const ibp_codebook &cb)
    {
        return entries_at(cb) + Names::entry_bytes(cb);
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return G::kWarps * warp_bytes(cb) + (G::kWarps > 1 ? 4u * IBP_MAX_PLANES * G::kWarps : 0u);
    }
    // Returns the size in bytes of the first part of the scratch, which is still read while elements are stored
    // (decoder.cuh). If digits of plane 0 are in registers, this part ends with level 1.
    static __host__ __device__ __forceinline__ uint32_t kept_bytes(const ibp_codebook &cb)
    {
        if (Digits::kKeptBytes != 0u) return scratch_bytes(cb);
        static_assert(Digits::kKeptBytes != 0u || (G::kWarps == 1 && !G::kAnyLength),
                      "only a row of a single tile may have its window in the scratch");
        return Digits::kNameBytes + Levels::kept_bytes(cb);
    }
    __device__ __forceinline__ uint32_t exchanged() const { return (scratch + G::kWarps * warp_bytes(cb)) / 4u; }
    // Returns the shared byte at which the warp's names begin.
    __device__ __forceinline__ uint32_t names() const { return scratch + G::warp() * warp_bytes(cb); }
    __device__ __forceinline__ Levels levels() const
    {
        return {names() + Digits::kNameBytes + Digits::kKeptBytes, Levels::most_of(cb)};
    }

    __device__ __forceinline__ TileDecoder(const ibp_codebook &codebook, uint32_t shared)
        : cb(codebook), scratch(shared)
    {
        Names::begin(cb, names());
        if (block_bytes(cb) == 0u) return;
        const PlanesBook<T> book(cb, 0);
        auto *const table = reinterpret_cast<TableEntry *>(shared_bytes());
        for (uint32_t column = threadIdx.x; column < book.columns; column += blockDim.x)
#pragma unroll 4
            for (uint32_t rank = 0; rank < cb.planes.num_entries; rank++)
                table[rank * book.columns + column] = Names::column_entry(book, column * cb.planes.num_entries + rank);
    }

    // Visits plane p of a tile. In planes 0 and 1 it loads the digits, and in planes 2 and 3 it names elements. start:
    // the bit at which the plane begins. range: the tile's digits in this plane. Returns the number of escapes among
    // these digits; all digits of an absent plane are escapes. Of plane 1, only the first chunk stays loaded; in the
    // other chunks the function only counts escapes.
    __device__ __forceinline__ uint32_t visit(const PlanesBook<T> &book, uint32_t p, uint32_t start, DigitRange range,
                                              Tile &tile) const
    {
        const uint32_t width = Digits::width_of(book, p), n = range.to - range.from;
        if (p == 0u) return Digits::load_tile(*this, book, start, range, tile);
        if (p >= 2u) return Digits::name_digits(*this, p, width, start, range);
        tile.chunk = Digits::load_chunk(width, start + range.from * width, n);
        if (width == 0u) return n;
        if (kTile <= kChunk || !G::any_in_warp(n > kChunk)) return tile.chunk.num_escaped;
        return tile.chunk.num_escaped +
               Digits::count_escapes(start, {range.from + ibp_min_u32(n, kChunk), range.to}, width);
    }

    // Finds the names of a tile's elements, from raw symbols back to plane 0, and stores the elements (phases 2 and 3).
    // parts.mine has the ranges of the tile's digits.
    __device__ __forceinline__ void store(const PlanesBook<T> &book, const ValueParts &parts, const Tile &tile,
                                          uint32_t tile_start, uint32_t n, const Window &window) const
    {
        const DigitRange raw = parts.mine[IBP_MAX_PLANES];
        const uint32_t width = Digits::width_of(book, 1);
        const uint32_t position = parts.digits[1] + parts.mine[1].from * width,
                       first_raw = parts.digits[IBP_MAX_PLANES] + raw.from * book.symbol_bits;
        levels().name_raw(raw.to - raw.from, cb.planes.num_planes > 2u,
                          [&](uint32_t i) { return Names::raw_name(book, first_raw, i); });
        const auto names = Digits::names_of(*this, 1, width);
        levels().name_plane1(
            tile.num_escaped, tile.chunk,
            [&](uint32_t base, uint32_t left) { return Digits::load_chunk(width, position + base * width, left); },
            [&](const typename Digits::Chunk &chunk, uint32_t part, uint32_t &from) {
                return names.sixteen(chunk, part, from);
            });
        Names::store(*this, book, parts, tile, tile_start, n, window);
    }

    // Rebuilds a row (decoder.cuh). If a warp has a single tile, it visits the tile while the parts of the row are
    // found. Otherwise it counts escapes first, and visits each tile afterwards.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        if (Names::kConstantColumns) put_template<G>(cb.planes, active, window);
        const PlanesBook<T> book(cb, cluster);
        if (cb.num_clusters > 1u) {
            __syncwarp();
            Names::fill(cb, cluster, names());
            __syncwarp();
        }
        uint32_t n = active ? book.columns : 0u;
        const uint32_t tiles = (book.columns + kTile - 1u) / kTile,
                       per_warp = G::kAnyLength ? (tiles + G::kWarps - 1u) / G::kWarps : 1u;
        const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n),
                       last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
        const uint32_t end = start_bit + 8u * coded_bytes;
        const bool one_tile = per_warp == 1u;
        Tile tile;
        ValueParts parts = book.template find_parts<G, Digits::kFirstBits>(
            start_bit, end, n, {first, last}, exchanged(),
            [&](uint32_t p, uint32_t start, DigitRange range, uint32_t num_bits) {
                return one_tile ? visit(book, p, start, range, tile) : Digits::count_escapes(start, range, num_bits);
            });
        // If `good`, every position that is read below lies in the row, or at most 16 bytes past the end of one of its
        // parts.
        const bool good = !active || parts.end == end;
        if (G::kPerWarp == 1 && G::any_in_warp(!good)) return false;
        if (G::kPerWarp > 1 && !good) n = 0;
        DigitRange(&mine)[IBP_MAX_PLANES + 1] = parts.mine;
#pragma unroll 1
        for (uint32_t k = 0; k < per_warp; k++) {
            const uint32_t tile_start = ibp_min_u32(first + k * kTile, last);
            if (!one_tile) mine[0] = {tile_start, ibp_min_u32(tile_start + kTile, last)};
#pragma unroll
            for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
                const bool present = (Digits::kFirstBits != 0u && p < 2u) || p < book.planes.num_planes;
                // If there is one tile, only absent planes 0 and 1 have not been visited yet. They are visited as if
                // all their digits were escapes, so that all elements go on to the next level.
                if (one_tile && (present || p >= 2u)) continue;
                mine[p + 1].to = mine[p + 1].from + (present || p < 2u ? visit(book, p, parts.digits[p], mine[p], tile)
                                                                       : mine[p].to - mine[p].from);
            }
            if (G::kPerWarp > 1 && !good) tile.num_escaped = 0, mine[IBP_MAX_PLANES] = {0, 0};
            store(book, parts, tile, tile_start, n, window);
            __syncwarp(); // before the levels are overwritten
#pragma unroll
            for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++) mine[p].from = mine[p].to;
        }
        return G::kPerWarp == 1 || good;
    }
};

} // namespace ibp

#endif
