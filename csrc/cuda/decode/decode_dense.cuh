// decode_dense.cuh - decodes dense rows of scheme planes (FORMAT.md section 6) of any codebook. It is used where
// decode_fast.cuh and decode_pairs.cuh are not. Digits may have 1 to 4 bits.
//
// tiles.cuh explains tiles, names and levels. Its three phases are as follows here:
//
// 1. The group visits planes 0 to 3 in order. A lane spreads its digits of planes 0 and 1 to nibbles, and counts
//    escapes. It keeps the nibbles of plane 0 in shared memory, and the first chunk of plane 1 in registers (a chunk is
//    the digits of plane 1 that a group takes at a time). It counts the escapes of the other chunks, but does not keep
//    their digits, which it loads again in phase 2. A lane names the elements that reach plane 2 or 3 one at a time.
//    Level 2 has a byte for each element that reaches plane 2, and a list holds the elements that have no name yet. The
//    bytes of the elements in the list are overwritten later, in plane 3 or by raw symbols.
// 2. Raw symbols complete level 2. Then the group returns to plane 1. A lane takes 16 digits at a time, whose nibbles
//    select bytes of the plane's names (`prmt`). Escaped elements take bytes of level 2 instead; a prefix sum over the
//    nibbles says which bytes.
// 3. The group returns to plane 0, where names are found in the same way, with level 1 in place of level 2. In each
//    step a lane makes 16 bytes of output: it combines symbols with their residuals, and stores the result.
//
// A name is a symbol if elements have less than eight bytes and all columns share entries of up to eight bits.
// Otherwise it is a rank, or kRawRank if the symbol is raw. If names are ranks, each step looks up their symbols. After
// a step has stored its 16 bytes, the step stores the elements with raw symbols a second time, one element at a time
// and with the right symbols.
//
// The rate at which integer instructions are issued limits the decoder.
#ifndef IBP_DECODE_DENSE_CUH
#define IBP_DECODE_DENSE_CUH

#include "tiles.cuh"

namespace ibp {

// The constants that spread eight digits of up to four bits to nibbles. The first multiplication moves the upper four
// digits up, the second one moves the upper two digits of each group of four, and the third one moves the upper digit
// of each pair. The digits of an absent plane have no bits; they become nibbles of four ones, which are escapes.
struct DigitSpread {
    // width: number of bits of a digit. fours, twos, ones: masks of the bits that the three multiplications move.
    uint32_t width, fours, twos, ones;
    // above: a mask of those bits of every nibble that lie above its digit. absent: all ones if the plane is absent,
    // otherwise 0.
    uint32_t above, absent;

    __device__ __forceinline__ explicit DigitSpread(uint32_t num_bits)
        : width(num_bits), fours(ones_of(4u * num_bits) << 4u * num_bits),
          twos((ones_of(2u * num_bits) << 2u * num_bits) * 0x00010001u),
          ones((ones_of(num_bits) << num_bits) * 0x01010101u),
          above(num_bits == 0u ? 0u : (0xfu << num_bits & 0xfu) * 0x11111111u), absent(num_bits == 0u ? ~0u : 0u)
    {
    }
    // Returns low_bits(~0u, num_bits), computed with instructions that can use uniform registers.
    static __device__ __forceinline__ uint32_t ones_of(uint32_t num_bits) { return (1u << num_bits) - 1u; }
    // Spreads eight digits, which are packed from bit 0 of `bits`, over the nibbles of the result, one digit to each
    // nibble. An addition moves bits: x + x * (2^s - 1) is x << s.
    __device__ __forceinline__ uint32_t nibbles(uint32_t bits) const
    {
        bits &= ones_of(4u * width) | fours;
        bits += (bits & fours) * ones_of(16u - 4u * width);
        bits += (bits & twos) * ones_of(8u - 2u * width);
        bits += (bits & ones) * ones_of(4u - width);
        return bits | absent;
    }
};

// Returns a word in which bit 3 of every nibble is set if its digit is an escape. above: DigitSpread::above.
__device__ __forceinline__ uint32_t escaped_digits(uint32_t digits, uint32_t above)
{
    digits |= above;
    digits &= digits << 1;
    return digits & digits << 2 & 0x88888888u;
}

// The Digits of TileDecoder for digits of 1 to 4 bits. A lane spreads them to nibbles, which are in shared memory for
// plane 0.
template <typename T, class G> struct AnyDigits {
    using Element = T;
    using Group = G;
    static constexpr uint32_t kFirstBits = 0;
    using Levels = TileLevels<T, G, (G::kPerWarp > 1 ? 6 : 4)>;
    using Counts = StepCounts<G, Levels::kStep, Levels::kSteps>;
    static constexpr uint32_t kPerVector = Levels::kPerVector, kSteps = Levels::kSteps, kStep = Levels::kStep,
                              kPerLane = Levels::kPerLane;
    static constexpr uint32_t kNibbles = (kPerVector + 7u) / 8u; // number of words of a vector's digits
    static constexpr uint32_t kNameBytes = 16u * IBP_MAX_PLANES, kKeptBytes = 4u * kSteps * G::kLanes * kNibbles;

    static __device__ __forceinline__ uint32_t width_of(const PlanesBook<T> &book, uint32_t p)
    {
        return book.width_of(p);
    }
    // Returns the address of the lane's digits of the first step, one in each nibble. names: the shared byte at which
    // the warp's names begin.
    static __device__ __forceinline__ uint32_t *kept_digits(uint32_t names)
    {
        return &shared_word((names + kNameBytes) / 4u + G::lane() * kNibbles);
    }

    using Chunk = PlaneChunk<G, 2>;
    // The names that belong to the digits of one plane.
    struct PlaneNames {
        uint4 table; // a byte for each digit; 0 at the escape
        // above: as in DigitSpread. low, high: eight bytes, one for each digit below 8. The byte at the escape is 0xff,
        // and all others are 0.
        uint32_t above, low, high;
        uint32_t wide; // not 0 if a digit fills its nibble: it has four bits, or the plane is absent

        // Returns the names of eight digits, one byte each; some digits may be escapes. from: the shared byte at which
        // the names of the escaped digits begin; the function advances it past these names. In `order`, each nibble is
        // the number of escapes in lower nibbles: an escape's bit 3 times 2 is bit 0 of the next nibble, so the product
        // adds 1 to every higher nibble.
        __device__ __forceinline__ uint2 of(uint32_t digits, uint32_t &from) const
        {
            const uint32_t escaped = escaped_digits(digits, above), order = escaped * 0x22222222u;
            const uint2 x = eight_bytes(from);
            from += (order >> 28) + (escaped >> 31);
            const uint32_t first = permute_bytes(x.x, x.y, order), second = permute_bytes(x.x, x.y, order >> 16);
            if (wide != 0u)
                return make_uint2(of_wide(digits, escaped, first), of_wide(digits >> 16, escaped >> 16, second));
            return make_uint2((first & permute_bytes(low, high, digits)) | permute_bytes(table.x, table.y, digits),
                              (second & permute_bytes(low, high, digits >> 16)) |
                                  permute_bytes(table.x, table.y, digits >> 16));
        }
        __device__ __forceinline__ uint4 sixteen(const Chunk &chunk, uint32_t, uint32_t &from) const
        {
            const uint2 a = of(chunk.digits[0], from), b = of(chunk.digits[1], from);
            return make_uint4(a.x, a.y, b.x, b.y);
        }
        // Returns the names of the lowest four of `digits`, which fill their nibbles. escaped: the result of
        // escaped_digits. below: the names that the digits take if they are escapes.
        __device__ __forceinline__ uint32_t of_wide(uint32_t digits, uint32_t escaped, uint32_t below) const
        {
            const uint32_t seven = digits & 0x7777u, upper = permute_bytes(0xff00u, 0, digits >> 3 & 0x1111u);
            return (below & permute_bytes(0xff00u, 0, escaped >> 3)) |
                   select_bits(upper, permute_bytes(table.z, table.w, seven), permute_bytes(table.x, table.y, seven));
        }
    };
    template <class Decoder>
    static __device__ __forceinline__ PlaneNames names_of(const Decoder &decoder, uint32_t plane, uint32_t width)
    {
        const uint32_t escape = (1u << width) - 1u;
        return {*reinterpret_cast<const uint4 *>(shared_bytes() + decoder.names() + 16u * plane),
                DigitSpread(width).above, escape < 4u ? 0xffu << 8u * escape : 0u, escape == 7u ? 0xff000000u : 0u,
                width % 4u == 0u ? 1u : 0u};
    }

    // Loads COUNT digits of a plane, beginning with digit i, each into a nibble. Only the digits before digit n are
    // loaded; the nibbles of all others are 0. start: the bit at which digit 0 begins.
    template <uint32_t COUNT>
    static __device__ __forceinline__ void load_digits(const DigitSpread &spread, uint32_t start, uint32_t i,
                                                       uint32_t n, uint32_t (&digits)[(COUNT + 7u) / 8u])
    {
        i = ibp_min_u32(i, n);
        const uint32_t position = start + i * spread.width, left = 4u * ibp_min_u32(n - i, COUNT);
        const Cursor cursor{&shared_word(position / 32u), position};
        const uint32_t low = cursor.word(0);
        digits[0] = low_bits(spread.nibbles(low), left);
        if (COUNT > 8u)
            digits[(COUNT - 1u) / 8u] =
                low_bits(spread.nibbles(permute_bytes(low, cursor.word(1), 0x3210u + 0x1111u * spread.width)),
                         left - ibp_min_u32(left, 32u));
    }
    // Returns the number of escapes among a lane's digits.
    template <uint32_t WORDS>
    static __device__ __forceinline__ uint32_t count_escaped(const DigitSpread &spread, const uint32_t (&digits)[WORDS])
    {
        const uint32_t escaped = escaped_digits(digits[0], spread.above);
        return ibp_popcount(WORDS == 1u ? escaped : escaped >> 1 | escaped_digits(digits[WORDS - 1u], spread.above));
    }

    // Loads the lane's part of the next n digits of plane 1, and counts escapes. position: the bit at which the first
    // of these n digits begins.
    static __device__ __forceinline__ Chunk load_chunk(uint32_t width, uint32_t position, uint32_t n)
    {
        const DigitSpread spread(width);
        Chunk chunk;
        load_digits<kPerLane>(spread, position, kPerLane * G::lane(), n, chunk.digits);
        chunk.number(count_escaped(spread, chunk.digits));
        return chunk;
    }

    // num_escaped: number of the tile's elements whose digits of plane 0 are escapes. lower: for each step, the number
    // of these elements in lower lanes.
    struct Tile {
        Counts lower;
        uint32_t num_escaped, num_steps;
        Chunk chunk; // the first digits of plane 1
    };
    // Loads the tile's digits of plane 0 into shared memory.
    template <class Decoder>
    static __device__ __forceinline__ uint32_t load_tile(const Decoder &decoder, const PlanesBook<T> &book,
                                                         uint32_t start, DigitRange range, Tile &tile)
    {
        const DigitSpread spread(width_of(book, 0));
        Counts counts;
        uint32_t escaped = 0, *const kept = kept_digits(decoder.names());
        // If a warp has several groups, every group goes through the steps of a complete row, even if the group has no
        // row, because store_vectors calls collectives of the warp in each step.
        tile.num_steps = ((G::kPerWarp > 1 ? book.columns : range.to - range.from) + kStep - 1u) / kStep;
#pragma unroll 1
        for (uint32_t s = tile.num_steps; s-- > 0u;) {
            uint32_t digits[kNibbles];
            load_digits<kPerVector>(spread, start, range.from + kPerVector * G::lane() + s * kStep, range.to, digits);
#pragma unroll
            for (uint32_t q = 0; q < kNibbles; q++) kept[s * G::kLanes * kNibbles + q] = digits[q];
            const uint32_t count = count_escaped(spread, digits);
            counts.push(count), escaped += count;
        }
#pragma unroll
        for (uint32_t k = 0; k < Counts::kWords; k++)
            // In the last lane a sum can be 256. It then overflows its field and adds 1 to the next field. The
            // subtraction of the lane's own count undoes this.
            tile.lower.words[k] = G::scan_in_warp(counts.words[k]) - counts.words[k];
        return tile.num_escaped = G::sum_in_warp(escaped);
    }
    template <class Decoder>
    static __device__ __forceinline__ uint32_t name_digits(const Decoder &decoder, uint32_t p, uint32_t width,
                                                           uint32_t start, DigitRange range)
    {
        const uint32_t n = range.to - range.from, escape = (1u << width) - 1u, table = decoder.names() + 16u * p;
        const auto digit = [&](uint32_t base) {
            const uint32_t i = range.from + ibp_min_u32(base + G::lane(), n),
                           bits = shared_bits(start + i * width) & escape;
            return NamedDigit{shared_bytes()[table + bits], bits == escape};
        };
        const Levels levels = decoder.levels();
        return p == 2u ? levels.template name<true>(n, digit) : levels.template name<false>(n, digit);
    }
    // Returns the number of escapes among the digits `range` of a plane. Not inlined (warp.cuh).
    static __device__ __noinline__ uint32_t count_escapes(uint32_t start, DigitRange range, uint32_t num_bits)
    {
        return PlanesBook<T>::template count_escapes<G>(start, range, num_bits);
    }
};

// The Names of TileDecoder for codebooks of any kind: names are symbols or ranks, as names_symbols() says. BLOCK: the
// block may have a table of all columns' entries in shared memory.
template <class DIGITS, bool BLOCK> struct AnyNames {
    using Digits = DIGITS;
    using T = typename Digits::Element;
    using G = typename Digits::Group;
    using Decoder = TileDecoder<AnyNames>;
    using Tile = typename Digits::Tile;
    // If groups are parts of a warp, each thread has more registers, so that the prefetched vectors stay in registers.
    // If these vectors were spilled to local memory, the warp would have to wait until they are loaded.
    static constexpr uint32_t kMostThreads = G::kAnyLength     ? 512
                                             : G::kPerWarp > 1 ? 640
                                                               : 768,
                              kVectors = sizeof(T) == 2 && G::kPerWarp == 1 ? 3 : 4;
    static constexpr uint32_t kLeastLanes = sizeof(T) == 2 ? 2 : 4, kOwnVectors = 0;
    static constexpr bool kConstantColumns = true; // the codebook may have constant columns
    static constexpr uint32_t kPerVector = Digits::kPerVector, kNibbles = Digits::kNibbles;
    static constexpr uint32_t kNames = (kPerVector + 3u) / 4u; // number of words of a vector's names

    // Returns whether names are symbols, not ranks.
    static __host__ __device__ __forceinline__ bool names_symbols(const ibp_planes &planes)
    {
        return sizeof(T) < 8 && !planes.per_column && bits_of_symbol(planes) <= 8u;
    }
    using TableEntry = T;
    static __host__ __device__ __forceinline__ bool has_table(const ibp_codebook &cb)
    {
        return BLOCK && cb.planes.per_column && cb.planes.num_entries != 0u;
    }
    static __device__ __forceinline__ T column_entry(const PlanesBook<T> &book, uint32_t i) { return book.entry(i); }
    // Entries are in a warp's scratch only if names are ranks of entries that all columns share.
    static __host__ __device__ __forceinline__ uint32_t entry_bytes(const ibp_codebook &cb)
    {
        const uint32_t entries = cb.planes.per_column || names_symbols(cb.planes) ? 0u : cb.planes.num_entries;
        return (entries * static_cast<uint32_t>(sizeof(T)) + 15u) / 16u * 16u;
    }

    // Returns the address of the entries in a warp's scratch. names: the shared byte at which the scratch begins.
    static __device__ __forceinline__ T *entries_of(uint32_t names, const ibp_codebook &cb)
    {
        return reinterpret_cast<T *>(shared_bytes() + names + Decoder::entries_at(cb));
    }
    static __device__ __forceinline__ void begin(const ibp_codebook &cb, uint32_t names)
    {
        for (uint32_t i = G::lane(); i < Digits::kNameBytes / 4u; i += G::kLanes) shared_word(names / 4u + i) = 0;
        __syncwarp();
        fill(cb, 0, names);
    }
    // Writes the names for the digits of a cluster's planes, and the entries, to shared memory. names: the shared byte
    // at which the names begin. Not inlined, because registers are scarce if rows have clusters.
    static __device__ __noinline__ void fill(const ibp_codebook &cb, uint32_t cluster, uint32_t names)
    {
        const PlanesBook<T> book(cb, cluster);
        const bool symbols = names_symbols(cb.planes);
        T *const entries = entries_of(names, cb);
        for (uint32_t rank = G::lane(); rank < cb.planes.num_entries; rank += G::kLanes) {
            uint32_t at = rank;
#pragma unroll
            for (uint32_t p = 1; p < IBP_MAX_PLANES; p++)
                if (rank >= book.first_of(p)) at = 16u * p + rank - book.first_of(p);
            const T entry = cb.planes.per_column ? T{0} : book.entry(rank);
            shared_bytes()[names + at] = static_cast<uint8_t>(symbols ? static_cast<uint32_t>(entry) : rank);
            if (!symbols && !cb.planes.per_column) entries[rank] = entry;
        }
    }

    static __device__ __forceinline__ uint32_t raw_name(const PlanesBook<T> &book, uint32_t first_raw, uint32_t i)
    {
        const uint32_t num_bits = book.symbol_bits;
        return names_symbols(book.planes) ? low_bits(shared_bits(first_raw + i * num_bits), num_bits)
                                          : uint32_t{kRawRank};
    }

    // ---- symbols and residuals ----

    // Looks up the symbols of a vector by their ranks, and returns each symbol in the low bits of its element. If the
    // rank stands for a raw symbol, the result is unspecified. entry(e, rank): returns the entry of element e with this
    // rank.
    template <class Entry> static __device__ __forceinline__ uint4 look_up(uint4 ranks, const Entry &entry)
    {
        const uint32_t all[4] = {ranks.x, ranks.y, ranks.z, ranks.w};
        uint32_t words[4] = {};
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) {
            const T symbol = entry(e, permute_bytes(all[e / 4u] & ~kRawRanks, 0, 0x4440u + e % 4u));
            words[sizeof(T) * e / 4u] |= static_cast<uint32_t>(symbol) << 8u * sizeof(T) * e % 32u;
            if (sizeof(T) == 8) words[2u * e + 1u] = static_cast<uint32_t>(uint64_t{symbol} >> 32);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    // Does what look_up does, for a codebook in which every column has its own entries. column: the vector's first
    // column. Not inlined (warp.cuh).
    static __device__ __noinline__ uint4 look_up_columns(const ibp_codebook &cb, const uint8_t *entries,
                                                         uint32_t column, uint4 ranks)
    {
        const uint32_t columns = PlanesBook<T>::live_columns(cb);
        const T *const table = reinterpret_cast<const T *>(shared_bytes()) + column;
        if (Decoder::block_bytes(cb) != 0u)
            return look_up(ranks, [&](uint32_t e, uint32_t rank) { return (table + rank * columns)[e]; });
        return look_up(ranks, [&](uint32_t e, uint32_t rank) {
            const uint32_t of_column = ibp_min_u32(column + e, columns - 1u) * cb.planes.num_entries;
            return PlanesBook<T>::entry_at(entries, cb.planes, of_column + rank);
        });
    }

    using Joined = WordJoin<std::conditional_t<sizeof(T) == 8, uint32_t, T>>; // not used for elements of 8 bytes
    // Combines the symbols of a vector with their residuals. position: the bit at which the first residual begins.
    // NIBBLES: elements have one byte, and residuals have four bits.
    template <bool NIBBLES>
    static __device__ __forceinline__ void join(const PlanesBook<T> &book, const Joined &with, uint32_t position,
                                                uint32_t (&words)[4])
    {
        const uint32_t r = NIBBLES ? 4u : book.planes.residual_bits;
        const Cursor cursor{&shared_word(position / 32u), position};
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (uint32_t e = 0; e < 2u; e++) {
                const uint64_t symbol = words[2u * e] | static_cast<uint64_t>(words[2u * e + 1u]) << 32;
                const uint64_t element = book.join(symbol, low_bits(shared_bits64(position + e * r), r));
                words[2u * e] = static_cast<uint32_t>(element),
                           words[2u * e + 1u] = static_cast<uint32_t>(element >> 32);
            }
        } else {
            const uint32_t low = cursor.word(0), high = cursor.word(1);
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++) {
                const uint32_t octet = k < 2u ? low : high, bits = cursor.bits(k * (4u / sizeof(T)) * r);
                words[k] = with.rotated(words[k], NIBBLES ? permute_bytes(octet, octet >> 4, k % 2u ? 0x7362 : 0x5140) &
                                                                0x0f0f0f0fu
                                                          : spread_fields<T>(bits, r));
            }
            if (!with.turns()) return;
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++) words[k] = with.turned(words[k]);
        }
    }

    // Returns a word in which bit e is set if the symbol of a vector's element e is raw.
    static __device__ __forceinline__ uint32_t raws_of(const uint32_t (&ranks)[kNames])
    {
        uint32_t mask = 0;
#pragma unroll
        for (uint32_t k = 0; k < kNames; k++) mask |= highest_bits(ranks[k]) << 4u * k;
        return mask;
    }
    // What is known about a codebook and its rows when store_vectors is compiled.
    //
    //     kNothing    nothing
    //     kSymbols    names are symbols
    //     kHalves     names are symbols, and elements have one byte with residuals of four bits
    //     kEntries    names are ranks of entries that all columns share
    //
    // Unless the value is kNothing, the complete row is wanted and is stored in vectors of 16 bytes (Window::is_units).
    enum Known { kNothing, kSymbols, kHalves, kEntries };

    // Finds the names of a tile's elements from plane 0 and level 1, and stores the tile's vectors. units: the result
    // of window.is_units; false if there are constant columns.
    template <Known KNOWN>
    static __device__ __forceinline__ void store_vectors(const Decoder &decoder, const PlanesBook<T> &book,
                                                         const ValueParts &parts, const Tile &tile, uint32_t tile_start,
                                                         uint32_t n, const Window &window, bool units)
    {
        constexpr uint32_t kSteps = Digits::kSteps, kStep = Digits::kStep;
        const ibp_codebook &cb = decoder.cb;
        const uint32_t first = tile_start + kPerVector * G::lane();
        const bool symbols = KNOWN == kNothing ? names_symbols(cb.planes) : KNOWN != kEntries,
                   per_column = KNOWN == kNothing && cb.planes.per_column;
        const DigitRange raw = parts.mine[IBP_MAX_PLANES];
        const bool any_raw = !symbols && __any_sync(kAllLanes, raw.from != raw.to);
        RawPlace place{parts.residuals, parts.digits[IBP_MAX_PLANES], raw.from};
        const auto names = in_registers(Digits::names_of(decoder, 0, book.width_of(0)));
        const Joined with = in_registers(Joined(cb.planes));
        auto lower = tile.lower;
        uint32_t step_names = decoder.levels().level1; // the shared byte at which the step's names of level 1 begin
        const uint32_t *const kept = Digits::kept_digits(decoder.names());
#pragma unroll(sizeof(T) == 8 ? kSteps : 1)
        for (uint32_t s = 0; s < kSteps; s++) {
            if (s >= tile.num_steps) break;
            uint32_t from = step_names + lower.pop(), raws = 0;
            const uint32_t i = first + s * kStep;
            if (i < n) {
                uint32_t named[kNames], words[4];
#pragma unroll
                for (uint32_t q = 0; q < kNibbles; q++) {
                    const uint2 eight = names.of(kept[s * G::kLanes * kNibbles + q], from);
                    named[2u * q % kNames] = eight.x;
                    if (kPerVector > 4u) named[(2u * q + 1u) % kNames] = eight.y;
                }
                const uint4 four = make_uint4(named[0], named[1u % kNames], named[2u % kNames], named[3u % kNames]);
                if (symbols) {
#pragma unroll
                    for (uint32_t k = 0; k < 4u; k++) words[k] = symbols_of_word<T>(four, k);
                } else {
                    const uint4 found = cb.planes.num_entries == 0u ? make_uint4(0, 0, 0, 0)
                                        : per_column                ? look_up_columns(cb, book.entries, i, four)
                                                                    : look_up(four, [&](uint32_t, uint32_t rank) {
                                                           return entries_of(decoder.names(), cb)[rank];
                                                       });
                    words[0] = found.x, words[1] = found.y, words[2] = found.z, words[3] = found.w;
                    if (any_raw) raws = raws_of(named) & low_bits(~0u, n - i);
                }
                join<KNOWN == kHalves>(book, with, parts.residuals + i * cb.planes.residual_bits, words);
                store_elements<T>(cb, window, KNOWN != kNothing || units, i, words);
            }
            step_names = G::last_lane(from);
            if (any_raw && __any_sync(kAllLanes, raws != 0u))
                place.before = put_raw_elements<T, G, 1>(cb, window, place, i, raws);
        }
    }
    // Stores a tile's elements (TileDecoder).
    static __device__ __forceinline__ void store(const Decoder &decoder, const PlanesBook<T> &book,
                                                 const ValueParts &parts, const Tile &tile, uint32_t tile_start,
                                                 uint32_t n, const Window &window)
    {
        const ibp_codebook &cb = decoder.cb;
        const bool units = cb.planes.num_constant == 0u && window.is_units(cb.row_bytes, 16);
        if (cb.planes.per_column || G::any_in_warp(!units && n != 0u))
            store_vectors<kNothing>(decoder, book, parts, tile, tile_start, n, window, units);
        else if (sizeof(T) == 1 ? cb.planes.residual_bits == 4u : !names_symbols(cb.planes))
            store_vectors<sizeof(T) == 1 ? kHalves : kEntries>(decoder, book, parts, tile, tile_start, n, window,
                                                               units);
        else
            store_vectors<kSymbols>(decoder, book, parts, tile, tile_start, n, window, units);
    }
};

// Decodes rows as described above.
template <typename T, class G, bool BLOCK> using DenseDecoder = TileDecoder<AnyNames<AnyDigits<T, G>, BLOCK>>;

} // namespace ibp

#endif
