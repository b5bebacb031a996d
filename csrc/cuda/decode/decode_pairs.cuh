// decode_pairs.cuh - decodes dense rows of scheme planes with digits of two bits and symbols of up to a byte (FORMAT.md
// section 6). Rows must have two planes or more and no constant columns. If elements have two bytes, they must have no
// invariant bits. Most tables of floats have such rows. If elements are bytes, digits of plane 0 may have three bits,
// as they often do for integers.
//
// tiles.cuh explains tiles, names and levels. Its three phases are as follows here:
//
// 1. The group visits planes 0 to 3 in order, and counts escapes. A lane keeps its digits of plane 0 and of the first
//    chunk of plane 1 in registers. A lane names the few elements that reach plane 2 or 3 one at a time. In plane 2 it
//    names four at a time if they are bytes and the group is a part of a warp. Level 2 has a byte for each element that
//    reaches plane 2, and a list holds the elements that have no name yet.
// 2. Raw symbols complete level 2. Then the group returns to plane 1. A lane takes 16 digits at a time, and spreads
//    them to nibbles, which select bytes of the plane's entries (`prmt`). Escaped elements take bytes of level 2
//    instead; a prefix sum over the nibbles says which bytes.
// 3. The group returns to plane 0, where names are found in the same way, with level 1 in place of level 2. In each
//    step a lane makes 16 bytes of output: it combines symbols with their residuals, and stores the result.
//
// If every column has its own entries, names are the ranks of entries, and phase 3 has two loops over the tile. The
// first loop finds the ranks of all steps. The second loop looks up the symbols of each step, puts in raw symbols, and
// combines symbols with residuals.
//
// If few SMs decode, the rate at which integer instructions are issued limits the decoder; if all SMs decode, device
// memory does. On an H200, a warp executed 710 instructions to decode 2 KiB of BF16, which is 22 for each of a lane's
// 32 elements. An SM issued 3.0 instructions per cycle; it can issue at most 4. For BF16 (symbols_turn), the decoder
// first makes the lower bytes and the upper bytes of four elements, and then pairs these bytes to form elements; this
// saves 5 % of the 710 instructions.
#ifndef IBP_DECODE_PAIRS_CUH
#define IBP_DECODE_PAIRS_CUH

#include "tiles.cuh"

namespace ibp {

// The Digits of TileDecoder if digits of plane 0 have FIRST bits, and digits of all other planes two bits. A lane keeps
// its digits of planes 0 and 1 in registers. STEPS: number of vectors of 16 bytes that a lane has in a tile.
template <typename T, class G, uint32_t FIRST, uint32_t STEPS> struct PairDigits {
    static_assert(FIRST == 2 || (FIRST == 3 && sizeof(T) == 1),
                  "digits of plane 0 have two bits, or three bits if elements are bytes");
    using Element = T;
    using Group = G;
    static constexpr uint32_t kFirstBits = FIRST;
    // Number of words of digits of plane 1 that a lane takes at a time. If elements are bytes and digits have two bits,
    // about a quarter of the elements reach plane 1, so a lane takes two words.
    static constexpr uint32_t kChunkWords = sizeof(T) == 1 && FIRST == 2 && G::kPerWarp > 1 ? 2 : 1;
    using Levels = TileLevels<T, G, STEPS, kChunkWords>;
    static constexpr uint32_t kPerVector = Levels::kPerVector, kSteps = Levels::kSteps, kStep = Levels::kStep,
                              kTile = Levels::kTile, kPerLane = Levels::kPerLane;
    // kDigitWords: number of words that hold a vector's digits. A digit has a pair of bits or, if digits of plane 0
    // have three bits, a nibble. kEntryWords: number of words of names, one for each plane; if digits of plane 0 have
    // three bits, plane 0 has a second word, which is the last one.
    static constexpr uint32_t kDigitWords = FIRST - 1u, kDigitBits = 2u * kDigitWords,
                              kEntryWords = IBP_MAX_PLANES + FIRST - 2u;
    static constexpr uint32_t kNameBytes = (4u * kEntryWords + 15u) / 16u * 16u, kKeptBytes = 0;

    static __device__ __forceinline__ uint32_t width_of(const PlanesBook<T> &, uint32_t p)
    {
        return p == 0u ? FIRST : 2u;
    }

    using Chunk = PlaneChunk<G, kChunkWords>;
    // The names of one plane's digits. symbols() returns the names of eight digits, one byte each. from: the byte of
    // shared memory at which the names of the escaped digits begin. order: nibble k is the index of the name that digit
    // k takes if it is an escape.
    struct PlaneNames {
        uint32_t named, then; // the names of digits 0 to 3, and of digits 4 to 7, one byte each

        // For digits of two bits. escaped: bit 0 is set in every nibble that is an escape. In the selector, the nibble
        // of digit k becomes 4 + k % 4 if the digit is an escape. This selects one of four escaped names, which `order`
        // has put in the order of the digits.
        __device__ __forceinline__ uint2 symbols(uint32_t digits, uint32_t escaped, uint32_t order, uint32_t from) const
        {
            const uint2 x = eight_bytes(from);
            const uint32_t nibbles = (escaped * 3u & 0x32103210u) | (digits + escaped);
            return make_uint2(permute_bytes(named, permute_bytes(x.x, x.y, order), nibbles),
                              permute_bytes(named, permute_bytes(x.x, x.y, order >> 16), nibbles >> 16));
        }
        // For digits of three bits.
        __device__ __forceinline__ uint2 symbols(uint32_t digits, uint32_t order, uint32_t from) const
        {
            const uint32_t escape = in_register(0xff000000u);
            const uint2 x = eight_bytes(from);
            return make_uint2((permute_bytes(x.x, x.y, order) & permute_bytes(0u, escape, digits)) |
                                  permute_bytes(named, then, digits),
                              (permute_bytes(x.x, x.y, order >> 16) & permute_bytes(0u, escape, digits >> 16)) |
                                  permute_bytes(named, then, digits >> 16));
        }
        // Returns the names of 16 digits of two bits, which are word `part` of a chunk. from: as above; the function
        // advances it past these names.
        __device__ __forceinline__ uint4 sixteen(const Chunk &chunk, uint32_t part, uint32_t &from) const
        {
            return sixteen(chunk.digits[part], from);
        }
        __device__ __forceinline__ uint4 sixteen(uint32_t digits, uint32_t &from) const
        {
            const uint32_t low = spread_pairs<false>(digits), high = spread_pairs<true>(digits),
                           low_escaped = escaped_nibbles(low), low_order = order_of(low_escaped),
                           high_escaped = escaped_nibbles(high), high_order = order_of(high_escaped);
            const uint2 a = symbols(low, low_escaped, low_order, from);
            from += count_of(low_escaped, low_order);
            const uint2 b = symbols(high, high_escaped, high_order, from);
            from += count_of(high_escaped, high_order);
            return make_uint4(a.x, a.y, b.x, b.y);
        }
    };

    template <class Decoder>
    static __device__ __forceinline__ PlaneNames names_of(const Decoder &decoder, uint32_t plane, uint32_t)
    {
        const uint32_t first = decoder.names() / 4u;
        return {shared_word(first + plane), FIRST == 3 && plane == 0u ? shared_word(first + IBP_MAX_PLANES) : 0u};
    }

    // Loads the lane's part of the next n digits of plane 1, and counts escapes. position: the bit at which the first
    // of these n digits begins.
    static __device__ __forceinline__ Chunk load_chunk(uint32_t, uint32_t position, uint32_t n)
    {
        const uint32_t first = ibp_min_u32(kPerLane * G::lane(), n);
        const Cursor cursor{&shared_word((position + 2u * first) / 32u), position + 2u * first};
        Chunk chunk;
        uint32_t escaped = 0;
#pragma unroll
        for (uint32_t w = 0; w < kChunkWords; w++) {
            chunk.digits[w] = low_bits(cursor.word(w), 2u * (max(n - first, 16u * w) - 16u * w));
            escaped = escaped << 1 | escaped_pairs(chunk.digits[w]);
        }
        chunk.number(ibp_popcount(escaped));
        return chunk;
    }

    // A lane's digits of plane 0 in a tile. before[s]: the shared byte at which the names of the lane's escaped
    // elements of step s begin. num_escaped: number of escapes among the tile's digits of plane 0.
    struct Tile {
        uint32_t digits[kSteps][kDigitWords], before[kSteps], num_escaped;
        Chunk chunk; // the first digits of plane 1
    };
    // Loads a lane's digits of plane 0 in a tile into registers. plane: the bit at which plane 0 begins.
    template <class Decoder>
    static __device__ __forceinline__ uint32_t load_tile(const Decoder &decoder, const PlanesBook<T> &book,
                                                         uint32_t plane, DigitRange range, Tile &tile)
    {
        const uint32_t columns = book.columns, tile_start = range.from, n = range.to;
        const uint32_t first = tile_start + kPerVector * G::lane();
        StepCounts<G, kStep, kSteps> counts;
        if (FIRST == 2 && tile_start + kTile <= n) {
            const Cursor cursor = Cursor::at(plane / 8u + first / 4u);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) tile.digits[s][0] = cursor.word(s * kStep / 16u);
            // The last lanes may read past the end of plane 0, by at most one step; these bits lie in the stage or the
            // scratch.
        } else {
            const uint32_t position = plane + FIRST * first, left = n > first ? n - first : 0u;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
#pragma unroll
                for (uint32_t w = 0; w < kDigitWords; w++) tile.digits[s][w] = 0;
                if (s != 0u && s * kStep >= columns) continue; // no lane has elements in this step
                const uint32_t word = position / 32u + s * kStep * FIRST / 32u;
                const Cursor cursor{&shared_word(G::kWarps > 1 ? ibp_min_u32(word, decoder.scratch / 4u - 2u) : word),
                                    position};
                const uint32_t low = cursor.word(0), any = left > s * kStep ? ~0u : 0u;
                tile.digits[s][0] = (FIRST == 2 ? low : spread_triples(low)) & any;
                if (FIRST == 3)
                    tile.digits[s][kDigitWords - 1u] = spread_triples(permute_bytes(low, cursor.word(1), 0x6543)) & any;
            }
            if (columns % kPerVector != 0u) { // the row ends inside a vector
#pragma unroll
                for (uint32_t s = 0; s < kSteps; s++) {
                    const uint32_t bits = kDigitBits * (max(left, s * kStep) - s * kStep);
                    tile.digits[s][0] = low_bits(tile.digits[s][0], bits);
                    if (FIRST == 3)
                        tile.digits[s][kDigitWords - 1u] =
                            low_bits(tile.digits[s][kDigitWords - 1u], max(bits, 32u) - 32u);
                }
            }
        }
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) counts.add(s, ibp_popcount(escaped_of_vector(tile.digits[s])));
        return tile.num_escaped = counts.number(decoder.levels().level1, columns, tile.before);
    }
    // Returns a word that has one bit set for each escape among a vector's digits.
    static __device__ __forceinline__ uint32_t escaped_of_vector(const uint32_t (&digits)[kDigitWords])
    {
        if (FIRST == 3) return escaped_triples(digits[0]) | escaped_triples(digits[kDigitWords - 1u]) >> 1;
        return escaped_pairs(digits[0]) & ~0u >> (32u - 2u * kPerVector);
    }
    static_assert(kStep * FIRST % 32 == 0, "vectors of a lane are whole words of digits apart");

    template <class Decoder>
    static __device__ __forceinline__ uint32_t name_digits(const Decoder &decoder, uint32_t p, uint32_t, uint32_t start,
                                                           DigitRange range)
    {
        const Levels levels = decoder.levels();
        const uint32_t first = range.from + G::lane(), n = range.to - range.from,
                       names = shared_word(decoder.names() / 4u + p);
        if (p == 2u && sizeof(T) == 1 && G::kPerWarp > 1)
            return levels.name_fours(
                n,
                [&](uint32_t i, uint32_t left) {
                    return low_bits(shared_bits(start + 2u * i), 2u * ibp_min_u32(left, 4u));
                },
                [&](uint32_t digits) { return permute_bytes(names, 0, digits); });
        const auto digit = [&](uint32_t base) {
            const uint32_t i = first + base, bits = shared_bytes()[start / 8u + i / 4u] >> 2u * (i % 4u) & 3u;
            return NamedDigit{permute_bytes(names, 0, bits), bits == 3u};
        };
        return p == 2u ? levels.template name<true>(n, digit) : levels.template name<false>(n, digit);
    }
    static __device__ __forceinline__ uint32_t count_escapes(uint32_t start, DigitRange range, uint32_t num_bits)
    {
        return PlanesBook<T>::template count_escapes<G>(start, range, FIRST == 2 ? 2u : num_bits);
    }

    // Returns the names of a lane's elements in step s of a tile: symbols, or ranks if every column has its own
    // entries.
    static __device__ __forceinline__ uint4 names_of_step(const PlaneNames &names, const Tile &tile, uint32_t s)
    {
        uint32_t from = tile.before[s];
        if constexpr (FIRST == 3) {
            const uint32_t low = tile.digits[s][0], high = tile.digits[s][1], escaped = escaped_triples(low),
                           order = escaped * 0x22222222u;
            const uint2 a = names.symbols(low, order, from);
            from += (order >> 28) + (escaped >> 31);
            const uint2 b = names.symbols(high, escaped_triples(high) * 0x22222222u, from);
            return make_uint4(a.x, a.y, b.x, b.y);
        }
        if (kPerVector > 8u) return names.sixteen(tile.digits[s][0], from);
        const uint32_t digits = spread_pairs<false>(tile.digits[s][0]), escaped = escaped_nibbles(digits);
        const uint2 low = names.symbols(digits, escaped, order_of(escaped), from);
        return make_uint4(low.x, low.y, 0, 0);
    }
};

// The Names of TileDecoder for these digits: symbols, or ranks if every column has its own entries (COLUMNS).
template <class DIGITS, bool COLUMNS> struct PairNames {
    using Digits = DIGITS;
    using T = typename Digits::Element;
    using G = typename Digits::Group;
    using Decoder = TileDecoder<PairNames>;
    using Tile = typename Digits::Tile;
    using PlaneNames = typename Digits::PlaneNames;
    static_assert(sizeof(T) <= 4 && (sizeof(T) > 1 || !COLUMNS),
                  "elements have one, two or four bytes; bytes have no entries for each column");
    // Shared memory has room for only two groups that decode rows of any length, so 512 threads are enough, and each
    // thread can have more registers. A group of more than 8 warps is a whole block. Decoders that need at most 72
    // registers get blocks of more threads.
    static constexpr uint32_t kMostThreads = G::kAnyLength                ? 512
                                             : G::kWarps > 8              ? 1024
                                             : sizeof(T) == 2 && !COLUMNS ? 896
                                             : Digits::kFirstBits == 3    ? 640
                                                                          : 768;
    static constexpr uint32_t kVectors = G::kAnyLength                        ? 8
                                         : sizeof(T) == 2 && G::kPerWarp == 1 ? 3
                                         : G::kWarps > 8                      ? 3
                                                                              : 4;
    static constexpr uint32_t kLeastLanes = sizeof(T) == 2 && !COLUMNS ? 2 : 4,
                              kOwnVectors = Digits::kFirstBits == 3 && G::kPerWarp > 1 ? 1 : 0;
    static constexpr bool kConstantColumns = false;
    static constexpr uint32_t kPerVector = Digits::kPerVector, kPerWord = 4u / sizeof(T), kSteps = Digits::kSteps,
                              kStep = Digits::kStep;

    // Returns whether a fixed permutation of bytes or nibbles can combine symbols and residuals into elements. This is
    // so if a residual is one byte of a rotated element of two bytes (BF16), three bytes of an element of four bytes,
    // or four bits of an element of one byte.
    static __host__ __device__ __forceinline__ bool is_simple(const ibp_planes &planes)
    {
        if (sizeof(T) != 2 && planes.invariant_bits != 0u) return false;
        if (sizeof(T) == 1) return planes.residual_bits == 4u;
        return planes.residual_bits == 8u * (sizeof(T) - 1u) && (sizeof(T) == 4 || planes.rotate != 0u);
    }

    using TableEntry = uint8_t; // symbols have one byte
    static __host__ __device__ __forceinline__ bool has_table(const ibp_codebook &) { return COLUMNS; }
    static __device__ __forceinline__ TableEntry column_entry(const PlanesBook<T> &book, uint32_t i)
    {
        return book.entries[i];
    }
    static __host__ __device__ __forceinline__ uint32_t entry_bytes(const ibp_codebook &) { return 0; }

    static __device__ __forceinline__ void begin(const ibp_codebook &cb, uint32_t names)
    {
        if (cb.num_clusters <= 1u) fill(cb, 0, names);
    }
    // Returns the name of a symbol: its low byte, rotated back if symbols_turn() is true. If elements are bytes, the
    // name is the element that has this symbol and a residual of 0.
    static __device__ __forceinline__ uint32_t name_of(const ibp_planes &planes, uint32_t symbol)
    {
        if (sizeof(T) > 1 && symbols_turn(planes)) symbol = (symbol & 0xffu) * 0x101u >> 1;
        return (sizeof(T) == 1 ? WordJoin<T>(planes).word(symbol, 0) : symbol) & 0xffu;
    }
    // Returns whether names are symbols that have been rotated back, as they are for BF16. Then the symbols and
    // residuals of four elements are first combined into four lower bytes and four upper bytes, which are then paired
    // to form elements.
    static __device__ __forceinline__ bool symbols_turn(const ibp_planes &planes)
    {
        return sizeof(T) == 2 && !COLUMNS && is_simple(planes);
    }
    // Writes the names of a cluster's entries to shared memory: a word for each plane, and a second word for plane 0 if
    // its digits have three bits. Not inlined, because registers are scarce if rows have clusters.
    static __device__ __noinline__ void fill(const ibp_codebook &cb, uint32_t cluster, uint32_t names)
    {
        const PlanesBook<T> book(cb, cluster);
        constexpr uint32_t kEscape = (1u << Digits::kFirstBits) - 1u; // the escape of plane 0
#pragma unroll 1
        for (uint32_t word = G::lane(); word < Digits::kEntryWords; word += G::kLanes) {
            const uint32_t plane = word % IBP_MAX_PLANES, first = plane == 0u ? word : kEscape + 3u * (plane - 1u),
                           count = word == 0u ? ibp_min_u32(kEscape, 4u) : 3u;
            uint32_t bytes = 0;
            for (uint32_t i = 0; i < count && plane < cb.planes.num_planes; i++) {
                const uint32_t rank = first + i;
                bytes |= (COLUMNS ? rank : name_of(cb.planes, static_cast<uint32_t>(book.entry(rank)))) << 8u * i;
            }
            shared_word(names / 4u + word) = bytes;
        }
    }

    static __device__ __forceinline__ uint32_t symbol_bits(const ibp_planes &planes)
    {
        return 8u * sizeof(T) - (sizeof(T) == 2 ? 0u : planes.invariant_bits) - planes.residual_bits;
    }
    static __device__ __forceinline__ uint32_t raw_symbol(const ibp_planes &planes, uint32_t position)
    {
        return low_bits(shared_bits(position), symbol_bits(planes));
    }
    static __device__ __forceinline__ uint32_t raw_name(const PlanesBook<T> &book, uint32_t first_raw, uint32_t i)
    {
        const ibp_planes &planes = book.planes;
        return COLUMNS ? uint32_t{kRawRank} : name_of(planes, raw_symbol(planes, first_raw + i * symbol_bits(planes)));
    }

    // ---- ranks ----

    // bytes: the ranks of a lane's elements in each step of a tile. any_raw: whether any element of the warp has a raw
    // symbol. If so, raw_before[s] is the number of raw symbols in the row before the lane's first one in step s.
    struct Ranks {
        uint2 bytes[kSteps];
        uint32_t raw_before[kSteps];
        bool any_raw;
    };
    // Returns the ranks of a lane's elements. raw: the tile's range of the row's raw symbols.
    static __device__ __forceinline__ Ranks ranks_of(const Decoder &decoder, uint32_t columns, const Tile &tile,
                                                     DigitRange raw)
    {
        const PlaneNames names = Digits::names_of(decoder, 0, Digits::kFirstBits);
        Ranks ranks{};
        StepCounts<G, kStep, kSteps> counts;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            if (s != 0u && s * kStep >= columns) continue; // no lane has elements in this step
            const uint4 bytes = Digits::names_of_step(names, tile, s);
            ranks.bytes[s] = make_uint2(bytes.x, bytes.y);
            const uint32_t of_y = kPerVector > 4u ? ibp_popcount(bytes.y & kRawRanks) : 0u;
            counts.add(s, ibp_popcount(bytes.x & kRawRanks) + of_y);
        }
        ranks.any_raw = G::any_in_warp(raw.from != raw.to);
        if (ranks.any_raw) counts.number(raw.from, columns, ranks.raw_before);
        return ranks;
    }

    // Looks up the symbols of four consecutive columns by their ranks. Returns the symbols, one byte each. The byte of
    // an element with a raw symbol is unspecified.
    static __device__ __forceinline__ uint32_t look_up(const ibp_codebook &cb, const PlanesBook<T> &book,
                                                       uint32_t ranks, uint32_t column)
    {
        uint32_t symbols[4];
        ranks &= ~kRawRanks;
        if (Decoder::block_bytes(cb) != 0u) {
            const uint8_t *const table = shared_bytes() + column;
#pragma unroll
            for (uint32_t e = 0; e < 4u; e++)
                symbols[e] = (table + permute_bytes(ranks, 0, 0x4440 + e) * book.columns)[e];
        } else {
#pragma unroll
            for (uint32_t e = 0; e < 4u; e++) {
                const uint32_t of_column = ibp_min_u32(column + e, book.columns - 1u) * cb.planes.num_entries;
                symbols[e] = __ldg(book.entries + of_column + permute_bytes(ranks, 0, 0x4440 + e));
            }
        }
        return permute_bytes(permute_bytes(symbols[0], symbols[1], 0x4040),
                             permute_bytes(symbols[2], symbols[3], 0x4040), 0x5410);
    }
    // Replaces a byte of `symbols` by the next raw symbol if the same byte of `ranks` has the bit kRawRank. position:
    // the bit of shared memory at which the first of these raw symbols begins; the function advances `position` past
    // them.
    static __device__ __forceinline__ void put_raw(const ibp_planes &planes, uint32_t ranks, uint32_t &position,
                                                   uint32_t &symbols)
    {
        for (uint32_t raw = ranks & kRawRanks; raw != 0u; raw &= raw - 1u, position += symbol_bits(planes)) {
            const uint32_t byte = lowest_of(raw) - 7u;
            symbols = (symbols & ~(0xffu << byte)) | raw_symbol(planes, position) << byte;
        }
    }

    static __device__ __forceinline__ uint4 symbols_of(const ibp_codebook &cb, const PlanesBook<T> &book,
                                                       const ValueParts &parts, const Ranks &ranks, uint32_t s,
                                                       uint32_t column)
    {
        const uint2 bytes = ranks.bytes[s];
        uint2 symbols = make_uint2(look_up(cb, book, bytes.x, column),
                                   kPerVector > 4u ? look_up(cb, book, bytes.y, column + 4u) : 0u);
        if (!ranks.any_raw) return make_uint4(symbols.x, symbols.y, 0, 0);
        uint32_t position = parts.digits[IBP_MAX_PLANES] + ranks.raw_before[s] * symbol_bits(cb.planes);
        put_raw(cb.planes, bytes.x, position, symbols.x);
        if (kPerVector > 4u) put_raw(cb.planes, bytes.y, position, symbols.y);
        return make_uint4(symbols.x, symbols.y, 0, 0);
    }

    // ---- symbols and residuals ----

    // Undoes the rotation of two 16-bit elements.
    static __device__ __forceinline__ uint32_t rotated_back(uint32_t pair)
    {
        return select_bits(0x7fff7fffu, pair >> 1, pair << 15);
    }

    // Spreads eight residuals of r <= 4 bits, which are packed from bit 0 of `bits`, over the four bytes of the result.
    // The low bits of each byte receive two residuals.
    static __device__ __forceinline__ uint32_t twos_of(uint32_t bits, uint32_t r)
    {
        bits = select_bits(0xffffu, bits, bits << (16u - 4u * r));
        return select_bits(0x00ff00ffu, bits, bits << (8u - 2u * r));
    }
    // Returns a mask for a word of four one-byte elements: the bits that hold residuals. r: number of bits of a
    // residual, at most 4.
    static __device__ __forceinline__ uint32_t nibbles_in(const WordJoin<T> &with, uint32_t r)
    {
        return sizeof(T) == 1 ? in_register(with.beside(0, low_bits(0xffu, r) * 0x01010101u)) : 0u;
    }
    // Combines symbols, given by their names (name_of), with residuals, for 16 one-byte elements. Residuals must have
    // at most four bits, and there must be no invariant bits. nibbles: the result of nibbles_in.
    template <bool SIMPLE>
    static __device__ __forceinline__ void join_nibbles(const ibp_planes &planes, uint32_t nibbles, uint4 symbols,
                                                        const Cursor &residuals, uint32_t word, uint32_t (&words)[4])
    {
        const uint32_t r = SIMPLE ? 4u : planes.residual_bits, rotate = planes.rotate, low = residuals.word(word),
                       high = residuals.word(word + 1u);
#pragma unroll
        for (uint32_t k = 0; k < 4u; k += 2) { // even, odd: the residuals of even and of odd columns
            const uint32_t eight = SIMPLE ? k == 0u ? low : high
                                          : twos_of(k == 0u ? low : permute_bytes(low, high, 0x3210u + 0x1111u * r), r);
            const uint32_t even = select_bits(0x0f0f0f0fu, eight >> rotate, eight << 7),
                           odd = select_bits(0x0f0f0f0fu, eight >> (r + rotate), eight << (7u - r));
            words[k] = symbols_of_word<T>(symbols, k) | (permute_bytes(even, odd, 0x5140) & nibbles);
            words[k + 1u] = symbols_of_word<T>(symbols, k + 1u) | (permute_bytes(even, odd, 0x7362) & nibbles);
        }
    }

    // Combines symbols and residuals into 16 bytes of elements. The first element's residual begins `bits` bits after
    // the cursor. nibbles: the result of nibbles_in, for elements of one byte. SIMPLE: the result of is_simple.
    template <bool SIMPLE>
    static __device__ __forceinline__ void join(const ibp_planes &planes, const WordJoin<T> &with, uint32_t nibbles,
                                                uint4 symbols, const Cursor &residuals, uint32_t bits,
                                                uint32_t (&words)[4])
    {
        if constexpr (sizeof(T) == 1) {
            if (SIMPLE || (planes.residual_bits <= 4u && planes.invariant_bits == 0u))
                return join_nibbles<SIMPLE>(planes, nibbles, symbols, residuals, bits / 32u, words);
        }
        if constexpr (!SIMPLE && sizeof(T) == 2) {
            const uint32_t r = planes.residual_bits, mask = low_bits(0xffffu, r) * 0x00010001u;
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++) {
                const uint32_t two = residuals.bits(bits + 2u * k * r);
                words[k] = (symbols_of_word<T>(symbols, k) << r) + (select_bits(0xffffu, two, two << (16u - r)) & mask);
                if (planes.rotate) words[k] = rotated_back(words[k]);
            }
        } else if constexpr (!SIMPLE) {
            const uint32_t r = planes.residual_bits;
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++) {
                const uint32_t spread = spread_fields<T>(residuals.bits(bits + k * kPerWord * r), r),
                               symbol = symbols_of_word<T>(symbols, k);
                words[k] = sizeof(T) == 1 ? with.beside(symbol, spread * with.of_residual) : with.word(symbol, spread);
            }
        } else if constexpr (sizeof(T) == 2 && !COLUMNS) {
#pragma unroll
            for (uint32_t k = 0; k < 4u; k += 2) {
                const uint32_t four = k == 0u ? symbols.x : symbols.y, rest = residuals.word(bits / 32u + k / 2u),
                               low = select_bits(0x80808080u, four, rest >> 1),
                               high = select_bits(0x80808080u, rest << 7, four);
                words[k] = permute_bytes(low, high, 0x5140), words[k + 1u] = permute_bytes(low, high, 0x7362);
            }
        } else if constexpr (sizeof(T) > 1) {
            join_bytes<T>(sizeof(T) == 2 ? 1u : planes.rotate, make_uint2(symbols.x, symbols.y), residuals, bits / 32u,
                          words);
        }
    }
    // Stores a lane's vectors of a tile. UNITS: the result of window.is_units, which may differ from group to group. So
    // the lanes of a warp do not call this function together, and it must contain no collectives.
    template <bool UNITS, bool SIMPLE>
    static __device__ __forceinline__ void store_tile(const Decoder &decoder, const PlanesBook<T> &book,
                                                      const ValueParts &parts, const Tile &tile, const Ranks &ranks,
                                                      uint32_t tile_start, uint32_t n, const Window &window)
    {
        const ibp_codebook &cb = decoder.cb;
        const uint32_t first = tile_start + kPerVector * G::lane(), left = n > first ? n - first : 0u;
        const uint32_t residual_bits = !SIMPLE ? cb.planes.residual_bits : sizeof(T) == 1u ? 4u : 8u * (sizeof(T) - 1u);
        const PlaneNames names = Digits::names_of(decoder, 0, Digits::kFirstBits);
        const WordJoin<T> with(cb.planes);
        const uint32_t nibbles = nibbles_in(with, residual_bits);
        const uint32_t from = parts.residuals + first * residual_bits;
        const Cursor residuals{&shared_word(from / 32u), from};
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            if (s * kStep >= left) break;
            uint4 symbols = COLUMNS ? symbols_of(cb, book, parts, ranks, s, first + s * kStep)
                                    : Digits::names_of_step(names, tile, s);
            if (!SIMPLE && !UNITS && symbols_turn(cb.planes)) { // undoes the rotation of names
                symbols.x = select_bits(0xfefefefeu, symbols.x << 1, symbols.x >> 7);
                symbols.y = select_bits(0xfefefefeu, symbols.y << 1, symbols.y >> 7);
            }
            uint32_t words[4];
            join<SIMPLE>(cb.planes, with, nibbles, symbols, residuals, s * kStep * residual_bits, words);
            store_words(window, UNITS, (first + s * kStep) * static_cast<uint32_t>(sizeof(T)) / 4u, words);
        }
    }

    // Stores a tile's elements (TileDecoder).
    static __device__ __forceinline__ void store(const Decoder &decoder, const PlanesBook<T> &book,
                                                 const ValueParts &parts, const Tile &tile, uint32_t tile_start,
                                                 uint32_t n, const Window &window)
    {
        const ibp_codebook &cb = decoder.cb;
        Ranks ranks;
        if (COLUMNS) ranks = ranks_of(decoder, book.columns, tile, parts.mine[IBP_MAX_PLANES]);
        const bool units = window.is_units(cb.row_bytes, 16);
        if (is_simple(cb.planes) && units)
            store_tile<true, true>(decoder, book, parts, tile, ranks, tile_start, n, window);
        else if (units)
            store_tile<true, false>(decoder, book, parts, tile, ranks, tile_start, n, window);
        else
            store_tile<false, false>(decoder, book, parts, tile, ranks, tile_start, n, window);
    }
};

// Elements of one byte, and elements of two bytes with entries for each column, come in rows of many lengths, such as
// heads and tokens of KV-caches. If the group is a part of a warp, a lane takes up to six vectors of such rows.
template <typename T, class G, bool COLUMNS>
constexpr uint32_t kPairSteps = G::kPerWarp > 1 && (sizeof(T) == 1 || (sizeof(T) == 2 && COLUMNS)) ? 6 : 4;

// Decodes rows as described above. COLUMNS: every column has its own entries. FIRST: number of bits of a digit
// of plane 0.
template <typename T, class G, bool COLUMNS, uint32_t FIRST = 2>
using PairsDecoder = TileDecoder<PairNames<PairDigits<T, G, FIRST, kPairSteps<T, G, COLUMNS>>, COLUMNS>>;

} // namespace ibp

#endif
