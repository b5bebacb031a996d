// dense.cuh - dense rows of scheme planes (FORMAT.md section 6), of all kinds but those of decode/pairs.cuh.
//
// Works on bytes: digits are spread to nibbles, which select bytes of a table of entries (`prmt`); symbols that
// escaped are taken from the bytes of the next plane, where a prefix sum over nibbles says which. So a tile of a row
// is decoded from the last plane to the first:
//   tail     planes 2, 3 and raw symbols, one element a lane: few elements come so far
//   plane 1  eight digits a lane
//   plane 0  16 bytes of output a lane and step, joined with their residuals
// Symbols of several bytes are so many bytes side by side; with entries a column the first byte is the rank, kRaw
// with a raw symbol behind it.
// Bound by integer instructions, some 20 an element of BF16; on all SMs by device memory too.
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

// What four digits stand for, one byte each. table: 16 bytes, those of a plane's entries and 0 at the escape; escape:
// 0xff there, of digits of up to 3 bits. x: the next escaped bytes; order: which of them each nibble takes. Nibbles
// above the fourth mean nothing.
__device__ __forceinline__ uint32_t bytes_of_digits(uint32_t digits, uint32_t num_bits, uint4 table, uint2 escape,
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

template <typename T, class G> struct DenseDecoder : NoBlockMemory {
    using Group = G;
    static constexpr uint32_t kMostThreads = 512, kVectors = sizeof(T) == 2 && G::kPerWarp == 1 ? 3 : 4;
    static constexpr uint32_t kPerVector = 16u / sizeof(T);               // elements of 16 bytes
    static constexpr uint32_t kSteps = 4;                                 // vectors of a lane in a tile
    static constexpr uint32_t kOctet = kPerVector < 8u ? kPerVector : 8u; // elements whose digits share a word
    static constexpr uint32_t kOctets = kPerVector / kOctet;              // of a vector
    static constexpr uint32_t kByteWords = (kPerVector + 3u) / 4u; // words that hold a byte of each element of a vector
    static constexpr uint32_t kTile = G::kLanes * kSteps * kPerVector;
    static constexpr uint32_t kTableBytes = 16u * IBP_MAX_PLANES; // of a byte of the symbols
    static constexpr uint32_t kLevel1 = kTile + 16u, kLevel2 = 16u * G::kLanes + 16u;
    static constexpr uint32_t kRaw = 0xff;
    static constexpr uint32_t kField = G::kLanes * kPerVector < 256u ? 8 : 16; // bits of a step's count
    static constexpr uint32_t kFields = 32u / kField, kScans = kSteps / kFields;

    const ibp_codebook &cb;
    const uint32_t scratch; // shared byte

    // Shared memory of a group: of every warp the tables and the bytes of plane 1 and of the tail, then what the
    // warps exchange.
    static __host__ __device__ __forceinline__ uint32_t byte_planes(const ibp_codebook &cb)
    {
        return PlanesBook<T>::symbol_bytes(cb.planes) + (cb.planes.per_column ? 1u : 0u);
    }
    static __host__ __device__ __forceinline__ uint32_t warp_bytes(const ibp_codebook &cb)
    {
        return byte_planes(cb) * (kTableBytes + kLevel1 + kLevel2);
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return G::kWarps * warp_bytes(cb) + (G::kWarps > 1 ? 4u * IBP_MAX_PLANES * G::kWarps : 0u);
    }
    __device__ __forceinline__ uint32_t exchanged() const { return (scratch + G::kWarps * warp_bytes(cb)) / 4u; }
    __device__ __forceinline__ uint32_t tables() const { return scratch + G::warp() * warp_bytes(cb); }
    __device__ __forceinline__ uint32_t table_of(uint32_t plane, uint32_t h) const
    {
        return tables() + 16u * (plane * byte_planes(cb) + h);
    }
    __device__ __forceinline__ uint32_t level1() const { return tables() + byte_planes(cb) * kTableBytes; }
    __device__ __forceinline__ uint32_t level2() const { return level1() + byte_planes(cb) * kLevel1; }
    __device__ __forceinline__ uint4 table(uint32_t plane, uint32_t h) const
    {
        return *reinterpret_cast<const uint4 *>(shared_bytes() + table_of(plane, h));
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
        if (cb.num_clusters <= 1u) fill_tables(PlanesBook<T>(cb, 0));
    }

    __device__ __forceinline__ void fill_tables(const PlanesBook<T> &book) const
    {
        const uint32_t planes = byte_planes(cb);
        for (uint32_t i = G::lane(); i < kTableBytes * planes; i += G::kLanes) {
            const uint32_t digit = i % 16u, h = i / 16u % planes, plane = i / (16u * planes),
                           rank = book.first_of(plane) + digit;
            uint64_t byte = 0;
            if (digit < book.escape_of(plane) && !cb.planes.per_column)
                byte = static_cast<uint64_t>(book.entry(rank)) >> 8u * h;
            if (digit < book.escape_of(plane) && cb.planes.per_column && h == 0u) byte = rank;
            shared_bytes()[tables() + i] = static_cast<uint8_t>(byte);
        }
    }

    static __device__ __forceinline__ uint2 escape_bytes(uint32_t num_bits)
    {
        const uint32_t escape = (1u << num_bits) - 1u;
        return make_uint2(escape < 4u ? 0xffu << 8u * escape : 0u, escape == 7u ? 0xff000000u : 0u);
    }

    // ---- the tail ----

    // Puts the bytes of the next n elements that escaped plane 1 into level 2. next: how many elements reached planes
    // 2, 3 and the raw symbols so far.
    __device__ __forceinline__ void decode_tail(const PlanesBook<T> &book, const ValueParts &parts, uint32_t n,
                                                uint32_t (&next)[3]) const
    {
#pragma unroll 1
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += G::kLanes) {
            const uint32_t i = base + G::lane();
            bool open = i < n;
            uint32_t at = next[0] + (open ? i : 0u), named = 0;
#pragma unroll
            for (uint32_t p = 2; p < IBP_MAX_PLANES; p++) {
                const uint32_t num_bits = book.width_of(p), escape = (1u << num_bits) - 1u;
                if (num_bits == 0u) continue;
                const uint32_t digit = shared_bits(parts.digits[p] + at * num_bits) & escape;
                if (open) named = table_of(p, 0) + digit;
                open = open && digit == escape;
                const uint32_t escaped = G::ballot(open);
                at = next[p - 1] + ibp_popcount(escaped & G::lanes_below());
                next[p - 1] += ibp_popcount(escaped);
            }
            if (i >= n) continue;
            uint32_t to = level2() + i;
            if (!open) {
                for (uint32_t h = 0; h < byte_planes(cb); h++)
                    shared_bytes()[to + h * kLevel2] = shared_bytes()[named + 16u * h];
                continue;
            }
            const uint32_t position = parts.digits[IBP_MAX_PLANES] + at * book.symbol_bits;
            uint64_t symbol = shared_bits(position);
            if (sizeof(T) == 8) symbol |= static_cast<uint64_t>(shared_bits(position + 32u)) << 32;
            symbol = low_bits(symbol, book.symbol_bits);
            if (cb.planes.per_column) {
                shared_bytes()[to] = kRaw;
                to += kLevel2;
            }
            for (uint32_t h = 0; h < book.symbol_bytes(cb.planes); h++)
                shared_bytes()[to + h * kLevel2] = static_cast<uint8_t>(symbol >> 8u * h);
        }
        next[0] += n;
    }

    // ---- plane 1 ----

    // Puts the bytes of the n elements of a tile that escaped plane 0 into level 1. first: how many of the row's came
    // before.
    __device__ __forceinline__ void decode_plane1(const PlanesBook<T> &book, const ValueParts &parts, uint32_t first,
                                                  uint32_t n, uint32_t (&next)[3]) const
    {
        constexpr uint32_t kLaneOctets = 2;
        const uint32_t width = book.width_of(1), num_bits = nibble_bits(book, 1);
#pragma unroll 1
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += 8u * kLaneOctets * G::kLanes) {
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
            __syncwarp();
            for (uint32_t h = 0; h < byte_planes(cb); h++) {
                const uint4 entries = table(1, h);
                const uint2 escape = escape_bytes(num_bits);
                uint32_t from = level2() + h * kLevel2 + (sums - count);
#pragma unroll
                for (uint32_t q = 0; q < kLaneOctets; q++) {
                    const uint32_t order = order_of(escaped[q]);
                    const uint2 x = eight_bytes(from);
                    if (i + 8u * q < n)
                        *reinterpret_cast<uint2 *>(shared_bytes() + level1() + h * kLevel1 + i + 8u * q) =
                            make_uint2(bytes_of_digits(digits[q], num_bits, entries, escape, x, order),
                                       bytes_of_digits(digits[q] >> 16, num_bits, entries, escape, x, order >> 16));
                    from += count_of(escaped[q], order);
                }
            }
            __syncwarp(); // level 2 is free, level 1 is there
        }
    }

    // ---- plane 0 ----

    // The digits of a lane's elements in a tile, and which shared bytes their escaped ones begin with.
    struct TileDigits {
        uint32_t digits[kSteps * kOctets], before[kSteps], num_escaped;
        uint4 entries; // of byte 0 of the symbols

        __device__ __forceinline__ void clear(uint32_t level1)
        {
#pragma unroll
            for (uint32_t o = 0; o < kSteps * kOctets; o++) digits[o] = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) before[s] = level1;
            num_escaped = 0;
        }
    };

    static __device__ __forceinline__ uint32_t first_element(uint32_t tile_start, uint32_t step)
    {
        return tile_start + (step * G::kLanes + G::lane()) * kPerVector;
    }
    // start: bit of the row's first digit.
    __device__ __forceinline__ TileDigits load_digits(const PlanesBook<T> &book, uint32_t start, uint32_t tile_start,
                                                      uint32_t n) const
    {
        const uint32_t width = book.width_of(0), num_bits = nibble_bits(book, 0);
        TileDigits tile;
        uint32_t counts[kScans] = {};
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
#pragma unroll
            for (uint32_t q = 0; q < kOctets; q++) {
                const uint32_t i = first_element(tile_start, s) + q * kOctet;
                const uint32_t digits = spread_digits(shared_bits(start + ibp_min_u32(i, n) * width), width);
                tile.digits[s * kOctets + q] = kOctet < 8u ? low_bits(digits, 4u * kOctet) : digits;
            }
        }
        if (tile_start + kTile > n) {
#pragma unroll
            for (uint32_t o = 0; o < kSteps * kOctets; o++) {
                const uint32_t i = ibp_min_u32(first_element(tile_start, o / kOctets) + o % kOctets * kOctet, n);
                tile.digits[o] = low_bits(tile.digits[o], 4u * ibp_min_u32(n - i, kOctet));
            }
        }
#pragma unroll
        for (uint32_t o = 0; o < kSteps * kOctets; o++) {
            const uint32_t s = o / kOctets, escaped = escaped_nibbles(tile.digits[o], num_bits);
            counts[s / kFields] += count_of(escaped, order_of(escaped)) << s % kFields * kField;
        }
        tile.entries = table(0, 0);
        tile.num_escaped = 0;
#pragma unroll
        for (uint32_t k = 0; k < kScans; k++) {
            const uint32_t sums = G::inclusive_scan(counts[k]), totals = G::last_lane(sums), before = sums - counts[k];
#pragma unroll
            for (uint32_t f = 0; f < kFields; f++) {
                tile.before[k * kFields + f] =
                    level1() + tile.num_escaped + (before >> f * kField & ((1u << kField) - 1u));
                tile.num_escaped += totals >> f * kField & ((1u << kField) - 1u);
            }
        }
        return tile;
    }

    // Byte h of the symbols of step s, from element 0 on.
    __device__ __forceinline__ void bytes_of_step(const PlanesBook<T> &book, const TileDigits &tile, uint32_t s,
                                                  uint32_t h, uint32_t (&bytes)[kByteWords]) const
    {
        const uint32_t num_bits = nibble_bits(book, 0);
        const uint4 entries = h == 0u ? tile.entries : table(0, h);
        const uint2 escape = escape_bytes(num_bits);
        uint32_t escaped = tile.before[s] + h * kLevel1;
#pragma unroll
        for (uint32_t q = 0; q < kOctets; q++) {
            const uint32_t digits = tile.digits[s * kOctets + q], escapes = escaped_nibbles(digits, num_bits),
                           order = order_of(escapes);
            const uint2 x = eight_bytes(escaped);
            bytes[q * 2u] = bytes_of_digits(digits, num_bits, entries, escape, x, order);
            if (kOctet == 8u)
                bytes[(q * 2u + 1u) % kByteWords] =
                    bytes_of_digits(digits >> 16, num_bits, entries, escape, x, order >> 16);
            if (kOctets > 1u) escaped += count_of(escapes, order);
        }
    }

    // ---- symbols and residuals ----

    static __device__ __forceinline__ void put_element(uint32_t (&words)[4], uint32_t e, T element)
    {
        if (sizeof(T) == 8) {
            words[2 * e % 4] = static_cast<uint32_t>(element);
            words[(2 * e + 1) % 4] = static_cast<uint32_t>(static_cast<uint64_t>(element) >> 32);
        } else {
            words[e * sizeof(T) / 4u] |= static_cast<uint32_t>(element) << (e * sizeof(T) % 4u * 8u);
        }
    }

    // The 16 bytes of step s, whose first element is i < n or, where there are none, any.
    __device__ __forceinline__ void decode_vector(const PlanesBook<T> &book, const ValueParts &parts,
                                                  const TileDigits &tile, uint32_t s, uint32_t i, uint32_t n,
                                                  uint32_t (&words)[4]) const
    {
        uint32_t bytes[kByteWords];
        bytes_of_step(book, tile, s, 0, bytes);
        const uint32_t r = cb.planes.residual_bits;
        T symbol[kPerVector];
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) symbol[e] = static_cast<T>(bytes[e / 4u] >> 8u * (e % 4u) & 0xffu);
        if (!cb.planes.per_column) {
            for (uint32_t h = 1; h < book.symbol_bytes(cb.planes); h++) add_bytes(book, tile, s, h, 8u * h, symbol);
        } else {
            T raw[kPerVector] = {};
            for (uint32_t h = 0; h < book.symbol_bytes(cb.planes); h++) add_bytes(book, tile, s, h + 1u, 8u * h, raw);
#pragma unroll
            for (uint32_t e = 0; e < kPerVector; e++) {
                const uint32_t rank = static_cast<uint32_t>(symbol[e]);
                symbol[e] = rank != kRaw && i + e < n ? book.entry((i + e) * cb.planes.num_entries + rank) : raw[e];
            }
        }
        constexpr uint32_t kPerWindow = 8u / sizeof(T); // elements whose residuals fit 64 bits
        uint64_t residuals = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) {
            if (e % kPerWindow == 0) {
                const uint32_t position = parts.residuals + ibp_min_u32(i + e, n) * r;
                residuals = shared_bits(position) | static_cast<uint64_t>(shared_bits(position + 32u)) << 32;
            }
            put_element(words, e, book.join(symbol[e], static_cast<T>(low_bits(residuals, r))));
            residuals = kPerWindow == 1 ? 0 : residuals >> r;
        }
    }
    __device__ __forceinline__ void add_bytes(const PlanesBook<T> &book, const TileDigits &tile, uint32_t s, uint32_t h,
                                              uint32_t shift, T (&numbers)[kPerVector]) const
    {
        uint32_t bytes[kByteWords];
        bytes_of_step(book, tile, s, h, bytes);
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++)
            numbers[e] = static_cast<T>(numbers[e] | static_cast<T>(bytes[e / 4u] >> 8u * (e % 4u) & 0xffu) << shift);
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just
    // coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        const PlanesBook<T> book(cb, cluster);
        if (cb.num_clusters > 1u) {
            __syncwarp();
            fill_tables(book);
            __syncwarp();
        }
        uint32_t n = active ? book.columns : 0u;
        const uint32_t tiles = (book.columns + kTile - 1u) / kTile, per_warp = (tiles + G::kWarps - 1u) / G::kWarps;
        const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n),
                       last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
        const uint32_t end = start_bit + 8u * coded_bytes;
        TileDigits tile{};
        const bool one_tile = per_warp == 1u && cb.planes.num_planes > 0u; // whose digits need not be looked at twice
        ValueParts parts = book.template find_parts<G, false>(
            start_bit, end, n, {first, last}, exchanged(),
            [&](uint32_t p, uint32_t start, DigitRange range, uint32_t num_bits) {
                if (p != 0u || !one_tile) return PlanesBook<T>::template count_escapes<G>(start, range, num_bits);
                tile = load_digits(book, start, G::warp() * kTile, range.to);
                return tile.num_escaped;
            });
        const bool good = !active || parts.end == end;
        // Then every position that is read from here on lies in the row, or up to 16 bytes behind a part of it.
        if (!good) {
            n = 0;
            parts = ValueParts::nothing(start_bit);
            tile.clear(level1());
        }
        const bool units = window.is_units(cb.row_bytes, 16);
        uint32_t in_plane1 = parts.mine[1].from, next[3] = {parts.mine[2].from, parts.mine[3].from, parts.mine[4].from};
#pragma unroll 1
        for (uint32_t k = 0; k < per_warp; k++) {
            const uint32_t tile_start = (G::warp() * per_warp + k) * kTile;
            if (tile_start >= book.columns) break;
            if (!one_tile) tile = load_digits(book, parts.digits[0], tile_start, n);
            decode_plane1(book, parts, in_plane1, tile.num_escaped, next);
            in_plane1 += tile.num_escaped;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t i = first_element(tile_start, s);
                uint32_t words[4] = {};
                decode_vector(book, parts, tile, s, ibp_min_u32(i, n), n, words);
                if (i < n) store_words(window, units, i * static_cast<uint32_t>(sizeof(T)) / 4u, words);
            }
            __syncwarp(); // level 1 is free for the next tile
        }
        return good;
    }
};

} // namespace ibp

#endif
