// decode_dense.cuh - dense rows of scheme planes (FORMAT.md section 6), of all kinds but those of decode_fast.cuh and
// decode_pairs.cuh.
//
// Works on ranks, a byte each: which entry an element's symbol is, or kRaw. Digits are spread to nibbles, which select
// bytes of a table (`prmt`); elements that escaped take the next bytes of the plane below, where a prefix sum over
// nibbles says which. So a tile of a row is decoded from the last plane to the first:
//   tail     planes 2 and 3, one element a lane: few elements come so far
//   plane 1  16 digits a lane
//   plane 0  16 bytes of output a lane and step: symbols are looked up and joined with their residuals
//   raw      symbols are stored last, one element at a time
// Bound by integer instructions.
#ifndef IBP_DECODE_DENSE_CUH
#define IBP_DECODE_DENSE_CUH

#include "../planes_book.cuh"
#include "decoder.cuh"

namespace ibp {

// Eight digits of num_bits, from bit 0 of bits on, one a nibble. Of an absent plane, whose digits have no
// bits, all are escapes, of four.
__device__ __forceinline__ uint32_t spread_digits(uint32_t bits, uint32_t num_bits)
{
    if (num_bits == 2u) return spread_pairs<false>(bits);
    if (num_bits == 0u) return ~0u;
    const uint32_t gap = 4u - num_bits, four = (1u << 4u * num_bits) - 1u,
                   two = ((1u << 2u * num_bits) - 1u) * 0x00010001u, one = ((1u << num_bits) - 1u) * 0x01010101u;
    bits = (bits & four) | (bits << 4u * gap & four << 16);
    bits = (bits & two) | (bits << 2u * gap & two << 8);
    return (bits & one) | (bits << gap & one << 4);
}

// Bit 0 of every nibble whose digit is an escape.
__device__ __forceinline__ uint32_t escaped_nibbles(uint32_t digits, uint32_t num_bits)
{
    if (num_bits == 2u) return escaped_nibbles(digits);
    digits |= (0xfu << num_bits & 0xfu) * 0x11111111u;
    digits &= digits >> 1;
    return digits & digits >> 2 & 0x11111111u;
}

// The ranks of four digits, one byte each. table: 16 bytes, those of a plane's digits and 0 at the escape; escape: 0xff
// there, of digits of up to 3 bits. x: the next escaped ranks; order: which of them each nibble takes. Nibbles above
// the fourth mean nothing.
__device__ __forceinline__ uint32_t ranks_of_digits(uint32_t digits, uint32_t num_bits, uint4 table, uint2 escape,
                                                    uint2 x, uint32_t order)
{
    const uint32_t escaped = permute_bytes(x.x, x.y, order);
    if (num_bits == 2u) return (escaped & permute_bytes(escape.x, 0, digits)) | permute_bytes(table.x, 0, digits);
    if (num_bits < 4u)
        return (escaped & permute_bytes(escape.x, escape.y, digits)) | permute_bytes(table.x, table.y, digits);
    const uint32_t low = digits & 0x7777u, upper = permute_bytes(0xff00u, 0, digits >> 3 & 0x1111u);
    const uint32_t entries =
        select_bits(upper, permute_bytes(table.z, table.w, low), permute_bytes(table.x, table.y, low));
    return (escaped & permute_bytes(0, 0xff000000u, low) & upper) | entries;
}

// BLOCK: whether the block has shared memory for entries a column.
template <typename T, class G, bool BLOCK> struct DenseDecoder {
    using Group = G;
    static constexpr uint32_t kMostThreads = G::kAnyLength ? 512 : 768,
                              kVectors = sizeof(T) == 2 && G::kPerWarp == 1 ? 3 : 4;
    static constexpr uint32_t kPerVector = 16u / sizeof(T);               // elements of 16 bytes
    static constexpr uint32_t kSteps = 4;                                 // vectors of a lane in a tile
    static constexpr uint32_t kOctet = kPerVector < 8u ? kPerVector : 8u; // elements whose digits share a word
    static constexpr uint32_t kOctets = kPerVector / kOctet;              // of a vector
    static constexpr uint32_t kRankWords = (kPerVector + 3u) / 4u;        // words of a vector's ranks
    static constexpr uint32_t kTile = G::kLanes * kSteps * kPerVector;
    static constexpr uint32_t kLaneOctets = 2, kChunk = 8u * kLaneOctets * G::kLanes; // digits of plane 1 at a time
    static constexpr uint32_t kTables = 16u * IBP_MAX_PLANES, kLevel1 = kTile + 16u, kLevel2 = kChunk + 16u;
    static constexpr uint32_t kRaw = 0x80, kRaws = 0x80808080;                 // the rank of a raw symbol, and four
    static constexpr uint32_t kField = G::kLanes * kPerVector < 256u ? 8 : 16; // bits of a step's count
    static constexpr uint32_t kFields = 32u / kField, kScans = kSteps / kFields;
    static constexpr uint32_t kMostTable = 32u << 10; // bytes of columns' entries in shared memory

    const ibp_codebook &cb;
    const uint32_t scratch; // shared byte

    // Shared memory of a block: the entries of each rank of all columns and some bytes that are read behind them, if
    // there is room.
    static __host__ __device__ __forceinline__ uint32_t block_bytes(const ibp_codebook &cb)
    {
        const uint32_t entries = PlanesBook<T>::live_columns(cb) * cb.planes.num_entries,
                       num_bytes = entries * static_cast<uint32_t>(sizeof(T)) + 16u;
        return BLOCK && cb.planes.per_column && entries != 0u && cb.num_clusters <= 1u && num_bytes <= kMostTable
                   ? (num_bytes + 15u) / 16u * 16u
                   : 0u;
    }
    // Shared memory of a group: of every warp a table of ranks for each plane, the ranks of plane 1 and of the tail,
    // and the entries where they are the table's; then what the warps exchange.
    static __host__ __device__ __forceinline__ uint32_t warp_bytes(const ibp_codebook &cb)
    {
        const uint32_t entries = cb.planes.per_column ? 0u : cb.planes.num_entries;
        return kTables + kLevel1 + kLevel2 + (entries * static_cast<uint32_t>(sizeof(T)) + 15u) / 16u * 16u;
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return G::kWarps * warp_bytes(cb) + (G::kWarps > 1 ? 4u * IBP_MAX_PLANES * G::kWarps : 0u);
    }
    __device__ __forceinline__ uint32_t exchanged() const { return (scratch + G::kWarps * warp_bytes(cb)) / 4u; }
    __device__ __forceinline__ uint32_t tables() const { return scratch + G::warp() * warp_bytes(cb); }
    __device__ __forceinline__ uint32_t level1() const { return tables() + kTables; }
    __device__ __forceinline__ uint32_t level2() const { return level1() + kLevel1; }
    __device__ __forceinline__ T *entries() const { return reinterpret_cast<T *>(shared_bytes() + level2() + kLevel2); }
    __device__ __forceinline__ uint4 table(uint32_t plane) const
    {
        return *reinterpret_cast<const uint4 *>(shared_bytes() + tables() + 16u * plane);
    }
    // Bits of a plane's digits in a nibble.
    __device__ __forceinline__ uint32_t nibble_bits(const PlanesBook<T> &book, uint32_t plane) const
    {
        const uint32_t num_bits = book.width_of(plane);
        return num_bits == 0u ? 4u : num_bits;
    }

    __device__ __forceinline__ DenseDecoder(const ibp_codebook &codebook, uint32_t shared)
        : cb(codebook), scratch(shared)
    {
        const PlanesBook<T> book(cb, 0);
        for (uint32_t i = G::lane(); i < kTables; i += G::kLanes) {
            const uint32_t digit = i % 16u, plane = i / 16u;
            shared_bytes()[tables() + i] =
                static_cast<uint8_t>(digit < book.escape_of(plane) ? book.first_of(plane) + digit : 0u);
        }
        if (cb.num_clusters <= 1u) fill_entries(book);
        if (block_bytes(cb) == 0u) return;
        T *const columns = reinterpret_cast<T *>(shared_bytes());
        for (uint32_t column = threadIdx.x; column < book.columns; column += blockDim.x)
#pragma unroll 4
            for (uint32_t rank = 0; rank < cb.planes.num_entries; rank++)
                columns[rank * book.columns + column] = book.entry(column * cb.planes.num_entries + rank);
    }
    __device__ __forceinline__ void fill_entries(const PlanesBook<T> &book) const
    {
        if (cb.planes.per_column) return;
        for (uint32_t rank = G::lane(); rank < cb.planes.num_entries; rank += G::kLanes)
            entries()[rank] = book.entry(rank);
    }

    static __device__ __forceinline__ uint2 escape_bytes(uint32_t num_bits)
    {
        const uint32_t escape = (1u << num_bits) - 1u;
        return make_uint2(escape < 4u ? 0xffu << 8u * escape : 0u, escape == 7u ? 0xff000000u : 0u);
    }

    // ---- the tail ----

    // Puts the ranks of the next n elements that escaped plane 1 into level 2. next: how many elements reached planes
    // 2, 3 and the raw symbols so far.
    __device__ __forceinline__ void decode_tail(const PlanesBook<T> &book, const ValueParts &parts, uint32_t n,
                                                uint32_t (&next)[3]) const
    {
#pragma unroll 1
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += G::kLanes) {
            const uint32_t i = base + G::lane();
            bool open = i < n;
            uint32_t at = next[0] + (open ? i : 0u), rank = kRaw;
#pragma unroll
            for (uint32_t p = 2; p < IBP_MAX_PLANES; p++) {
                const uint32_t num_bits = book.width_of(p), escape = (1u << num_bits) - 1u;
                if (num_bits != 0u) {
                    const uint32_t digit = shared_bits(parts.digits[p] + at * num_bits) & escape;
                    if (open && digit != escape) rank = book.first_of(p) + digit;
                    open = open && digit == escape;
                }
                const uint32_t escaped = G::ballot(open);
                at = next[p - 1] + ibp_popcount(escaped & G::lanes_below());
                next[p - 1] += ibp_popcount(escaped);
            }
            if (i < n) shared_bytes()[level2() + i] = static_cast<uint8_t>(rank);
        }
        next[0] += n;
    }

    // ---- plane 1 ----

    // Puts the ranks of the n elements of a tile that escaped plane 0 into level 1. first: how many of the row's came
    // before.
    __device__ __forceinline__ void decode_plane1(const PlanesBook<T> &book, const ValueParts &parts, uint32_t first,
                                                  uint32_t n, uint32_t (&next)[3]) const
    {
        const uint32_t width = book.width_of(1), num_bits = nibble_bits(book, 1);
        const uint4 ranks = table(1);
        const uint2 escape = escape_bytes(num_bits);
#pragma unroll 1
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += kChunk) {
            const uint32_t i = base + 8u * kLaneOctets * G::lane();
            uint32_t digits[kLaneOctets], escaped[kLaneOctets], count = 0;
#pragma unroll
            for (uint32_t q = 0; q < kLaneOctets; q++) {
                const uint32_t j = ibp_min_u32(i + 8u * q, n);
                digits[q] = low_bits(spread_digits(shared_bits(parts.digits[1] + (first + j) * width), width),
                                     4u * ibp_min_u32(n - j, 8u));
                escaped[q] = escaped_nibbles(digits[q], num_bits);
                count += count_of(escaped[q], order_of(escaped[q]));
            }
            const uint32_t sums = G::inclusive_scan(count);
            decode_tail(book, parts, G::last_lane(sums), next);
            __syncwarp(); // level 2 is there
            uint32_t from = level2() + (sums - count);
#pragma unroll
            for (uint32_t q = 0; q < kLaneOctets; q++) {
                const uint32_t order = order_of(escaped[q]);
                const uint2 x = eight_bytes(from);
                if (i + 8u * q < n)
                    *reinterpret_cast<uint2 *>(shared_bytes() + level1() + i + 8u * q) =
                        make_uint2(ranks_of_digits(digits[q], num_bits, ranks, escape, x, order),
                                   ranks_of_digits(digits[q] >> 16, num_bits, ranks, escape, x, order >> 16));
                from += count_of(escaped[q], order);
            }
            __syncwarp(); // level 2 is free, level 1 is there
        }
    }

    // ---- plane 0 ----

    // How many escapes there are before a lane's vectors of each step, of the same step; how many a step has; how many
    // there are. Fields of kField bits.
    struct Tile {
        uint32_t before[kScans], totals[kScans], num_escaped;
    };

    static __device__ __forceinline__ uint32_t first_element(uint32_t tile_start, uint32_t step)
    {
        return tile_start + (step * G::kLanes + G::lane()) * kPerVector;
    }
    // The digits of up to eight elements from number i on, of n; start: bit of the row's first digit.
    static __device__ __forceinline__ uint32_t load_digits(uint32_t width, uint32_t start, uint32_t i, uint32_t n)
    {
        i = ibp_min_u32(i, n);
        return low_bits(spread_digits(shared_bits(start + i * width), width), 4u * ibp_min_u32(n - i, kOctet));
    }
    __device__ __forceinline__ Tile load_tile(const PlanesBook<T> &book, uint32_t start, uint32_t tile_start,
                                              uint32_t n) const
    {
        const uint32_t width = book.width_of(0), num_bits = nibble_bits(book, 0);
        uint32_t counts[kScans] = {};
#pragma unroll 1
        for (uint32_t s = 0; s < kSteps; s++) {
            uint32_t count = 0;
#pragma unroll
            for (uint32_t q = 0; q < kOctets; q++)
                count += ibp_popcount(
                    escaped_nibbles(load_digits(width, start, first_element(tile_start, s) + q * kOctet, n), num_bits));
#pragma unroll
            for (uint32_t k = 0; k < kScans; k++)
                if (s / kFields == k) counts[k] += count << s % kFields * kField;
        }
        Tile tile{};
#pragma unroll
        for (uint32_t k = 0; k < kScans; k++) {
            const uint32_t sums = G::inclusive_scan(counts[k]);
            tile.before[k] = sums - counts[k], tile.totals[k] = G::last_lane(sums);
#pragma unroll
            for (uint32_t f = 0; f < kFields; f++) tile.num_escaped += field(tile.totals[k], f);
        }
        return tile;
    }
    static __device__ __forceinline__ uint32_t field(uint32_t counts, uint32_t f)
    {
        return counts >> f * kField & ((1u << kField) - 1u);
    }
    static __device__ __forceinline__ uint32_t of_step(const uint32_t (&counts)[kScans], uint32_t s)
    {
        return field(kScans == 1u || s < kFields ? counts[0] : counts[kScans - 1u], s % kFields);
    }
    static_assert(kScans <= 2, "fields of two words");

    // The ranks of a vector.
    struct Ranks {
        uint32_t words[kRankWords];

        __device__ __forceinline__ uint32_t of(uint32_t e) const
        {
            return permute_bytes(words[e / 4u] & ~kRaws, 0, 0x4440u + e % 4u);
        }
        // A bit for each raw symbol.
        __device__ __forceinline__ uint32_t raws() const
        {
            uint32_t mask = 0;
#pragma unroll
            for (uint32_t k = 0; k < kRankWords; k++)
                mask |= (words[k] >> 7 & 0x01010101u) * 0x10204080u >> 28 << 4u * k;
            return mask;
        }
    };
    // Of a vector whose first element is number i of n; from: shared byte with which the ranks of its escaped elements
    // begin.
    __device__ __forceinline__ Ranks ranks_of_vector(const PlanesBook<T> &book, uint32_t start, uint4 table0,
                                                     uint32_t from, uint32_t i, uint32_t n) const
    {
        const uint32_t width = book.width_of(0), num_bits = nibble_bits(book, 0);
        const uint2 escape = escape_bytes(num_bits);
        Ranks ranks;
#pragma unroll
        for (uint32_t q = 0; q < kOctets; q++) {
            const uint32_t digits = load_digits(width, start, i + q * kOctet, n),
                           escapes = escaped_nibbles(digits, num_bits), order = order_of(escapes);
            const uint2 x = eight_bytes(from);
            ranks.words[q * 2u] = ranks_of_digits(digits, num_bits, table0, escape, x, order);
            if (kOctet == 8u)
                ranks.words[(q * 2u + 1u) % kRankWords] =
                    ranks_of_digits(digits >> 16, num_bits, table0, escape, x, order >> 16);
            if (kOctets > 1u) from += count_of(escapes, order);
        }
        return ranks;
    }

    // ---- symbols and residuals ----

    // The symbols of a vector of columns; of raw ones, any.
    __device__ __forceinline__ void look_up(const PlanesBook<T> &book, const Ranks &ranks, uint32_t column,
                                            T (&symbols)[kPerVector]) const
    {
        if (cb.planes.num_entries == 0u) {
#pragma unroll
            for (uint32_t e = 0; e < kPerVector; e++) symbols[e] = 0;
        } else if (!cb.planes.per_column) {
#pragma unroll
            for (uint32_t e = 0; e < kPerVector; e++) symbols[e] = entries()[ranks.of(e)];
        } else if (block_bytes(cb) != 0u) {
            const T *const table = reinterpret_cast<const T *>(shared_bytes()) + column;
#pragma unroll
            for (uint32_t e = 0; e < kPerVector; e++) symbols[e] = (table + ranks.of(e) * book.columns)[e];
        } else {
#pragma unroll
            for (uint32_t e = 0; e < kPerVector; e++)
                symbols[e] = entry_of(book.entries, cb.planes,
                                      ibp_min_u32(column + e, book.columns - 1u) * cb.planes.num_entries + ranks.of(e));
        }
    }
    // Not inlined: a kernel has it once.
    static __device__ __noinline__ T entry_of(const uint8_t *entries, const ibp_planes &planes, uint32_t i)
    {
        return PlanesBook<T>::entry_at(entries, planes, i);
    }

    // The 16 bytes of elements from number i < n on. residuals: stage bit of the row's.
    __device__ __forceinline__ void join(const PlanesBook<T> &book, const T (&symbols)[kPerVector], uint32_t residuals,
                                         uint32_t i, uint32_t n, uint32_t (&words)[4]) const
    {
        const uint32_t r = cb.planes.residual_bits;
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (uint32_t e = 0; e < 2u; e++) {
                const uint64_t bits = shared_bits64(residuals + ibp_min_u32(i + e, n) * r);
                const uint64_t element = book.join(symbols[e], low_bits(bits, r));
                words[2u * e] = static_cast<uint32_t>(element),
                           words[2u * e + 1u] = static_cast<uint32_t>(element >> 32);
            }
        } else {
            constexpr uint32_t kPerWord = 4u / sizeof(T);
            const WordJoin<T> with(cb.planes);
#pragma unroll
            for (uint32_t k = 0; k < 4u; k++) {
                uint32_t word = symbols[k * kPerWord];
#pragma unroll
                for (uint32_t e = 1; e < kPerWord; e++)
                    word |= static_cast<uint32_t>(symbols[k * kPerWord + e]) << 8u * sizeof(T) * e;
                const uint32_t bits = r == 0u ? 0u : shared_bits(residuals + ibp_min_u32(i + k * kPerWord, n) * r);
                words[k] = with.word(word, spread_fields<T>(bits, r));
            }
        }
    }

    // By all lanes of a warp together. raw: number of the tile's first raw symbol; any_raw: whether there are any.
    __device__ __forceinline__ void store_tile(const PlanesBook<T> &book, const ValueParts &parts, const Tile &tile,
                                               uint32_t tile_start, uint32_t n, uint32_t raw, bool any_raw,
                                               const Window &window) const
    {
        const bool units = cb.planes.num_constant == 0u && window.is_units(cb.row_bytes, 16);
        const uint4 table0 = table(0);
        uint32_t level = level1();
        uint64_t raws = 0; // 16 bits a step
#pragma unroll 1
        for (uint32_t s = 0; s < kSteps; s++) {
            const uint32_t i = first_element(tile_start, s);
            if (i >= n) break;
            const Ranks ranks = ranks_of_vector(book, parts.digits[0], table0, level + of_step(tile.before, s), i, n);
            level += of_step(tile.totals, s);
            T symbols[kPerVector];
            look_up(book, ranks, i, symbols);
            uint32_t words[4];
            join(book, symbols, parts.residuals, i, n, words);
            store_elements<T>(cb, window, units, i, words);
            raws |= static_cast<uint64_t>(ranks.raws() & low_bits(~0u, n - i)) << 16u * s;
        }
        if (!__any_sync(kAllLanes, any_raw)) return;
        const auto low = static_cast<uint32_t>(raws), high = static_cast<uint32_t>(raws >> 32);
        put_raw_elements<T, G, kPerVector, 1>(cb, window, {parts.residuals, parts.digits[IBP_MAX_PLANES], raw},
                                              tile_start,
                                              make_uint4(low & 0xffffu, low >> 16, high & 0xffffu, high >> 16));
    }

    // Not inlined: a kernel has it once.
    static __device__ __noinline__ uint32_t count_escapes(uint32_t start, DigitRange range, uint32_t num_bits)
    {
        return PlanesBook<T>::template count_escapes<G>(start, range, num_bits);
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just
    // coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        put_template<G>(cb.planes, active, window);
        const PlanesBook<T> book(cb, cluster);
        if (cb.num_clusters > 1u) {
            __syncwarp();
            fill_entries(book);
            __syncwarp();
        }
        uint32_t n = active ? book.columns : 0u;
        const uint32_t tiles = (book.columns + kTile - 1u) / kTile, per_warp = (tiles + G::kWarps - 1u) / G::kWarps;
        const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n),
                       last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
        const uint32_t end = start_bit + 8u * coded_bytes;
        Tile tile{};
        const bool one_tile = per_warp == 1u && cb.planes.num_planes > 0u; // whose digits need not be looked at twice
        ValueParts parts =
            book.template find_parts<G, false>(start_bit, end, n, {first, last}, exchanged(),
                                               [&](uint32_t p, uint32_t start, DigitRange range, uint32_t num_bits) {
                                                   if (p != 0u || !one_tile)
                                                       return count_escapes(start, range, num_bits);
                                                   tile = load_tile(book, start, G::warp() * kTile, range.to);
                                                   return tile.num_escaped;
                                               });
        const bool good = !active || parts.end == end;
        // Then every position that is read from here on lies in the row, or up to 16 bytes behind a part of it.
        if (!good) {
            n = 0;
            parts = ValueParts::nothing(start_bit);
            tile = Tile{};
        }
        uint32_t in_plane1 = parts.mine[1].from, next[3] = {parts.mine[2].from, parts.mine[3].from, parts.mine[4].from};
#pragma unroll 1
        for (uint32_t k = 0; k < per_warp; k++) {
            const uint32_t tile_start = (G::warp() * per_warp + k) * kTile;
            if (tile_start >= book.columns) break;
            if (!one_tile) tile = load_tile(book, parts.digits[0], tile_start, n);
            const uint32_t raw = next[2];
            decode_plane1(book, parts, in_plane1, tile.num_escaped, next);
            in_plane1 += tile.num_escaped;
            store_tile(book, parts, tile, tile_start, n, raw, next[2] != raw, window);
            __syncwarp(); // level 1 is free for the next tile
        }
        return good;
    }
};

} // namespace ibp

#endif
