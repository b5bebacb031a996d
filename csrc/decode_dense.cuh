// decode_dense.cuh - dense rows of scheme planes (FORMAT.md section 6).
//
// Works on bytes: digits are spread to nibbles, which select bytes of a table of entries (`__byte_perm`); symbols that escaped are taken from the
// bytes of the next plane, where a prefix sum over nibbles says which. So a tile of a row is decoded from the last plane to the first:
//   tail     planes 2, 3 and raw symbols, one element a lane: few elements come so far
//   plane 1  eight digits a lane
//   plane 0  16 bytes of output a lane and step, joined with their residuals
// Symbols of several bytes are so many bytes side by side; with entries a column the first byte is the rank, kRaw with a raw symbol behind it.
#ifndef IBP_DECODE_DENSE_CUH
#define IBP_DECODE_DENSE_CUH

#include "planes_book.cuh"

namespace ibp {

// Eight digits of num_bits, from bit 0 of bits on, one a nibble.
__device__ __forceinline__ uint32_t spread_digits(uint32_t bits, uint32_t num_bits)
{
    if (num_bits == 2u) {
        bits = __byte_perm(bits, 0, 0x4140);
        bits = (bits | bits << 4) & 0x0f0f0f0fu;
        return (bits | bits << 2) & 0x33333333u;
    }
    const uint32_t gap = 4u - num_bits, four = (1u << 4u * num_bits) - 1u, two = ((1u << 2u * num_bits) - 1u) * 0x00010001u,
                   one = ((1u << num_bits) - 1u) * 0x01010101u;
    bits = (bits & four) | (bits << 4u * gap & four << 16);
    bits = (bits & two) | (bits << 2u * gap & two << 8);
    return (bits & one) | (bits << gap & one << 4);
}

// Bit 0 of every nibble whose digit is an escape.
__device__ __forceinline__ uint32_t escaped_nibbles(uint32_t digits, uint32_t num_bits)
{
    if (num_bits == 2u) return digits & digits >> 1 & 0x11111111u;
    digits |= (0xfu << num_bits & 0xfu) * 0x11111111u;
    digits &= digits >> 1;
    return digits & digits >> 2 & 0x11111111u;
}

// What four digits stand for, one byte each. table: 16 bytes, those of a plane's entries and 0 at the escape; escape: 0xff there, of digits
// of up to 3 bits. x: the next escaped bytes; order: which of them each nibble takes.
__device__ __forceinline__ uint32_t bytes_of_digits(uint32_t digits, uint32_t num_bits, uint4 table, uint2 escape, uint2 x, uint32_t order)
{
    const uint32_t escaped = __byte_perm(x.x, x.y, order);
    if (num_bits < 4u) return (escaped & __byte_perm(escape.x, escape.y, digits)) | __byte_perm(table.x, table.y, digits);
    const uint32_t low = digits & 0x7777u, upper = __byte_perm(0xff00u, 0, digits >> 3 & 0x1111u);
    const uint32_t entries = (__byte_perm(table.z, table.w, low) & upper) | (__byte_perm(table.x, table.y, low) & ~upper);
    return (escaped & __byte_perm(0, 0xff000000u, low) & upper) | entries;
}

// Eight bytes of shared memory from any address on.
__device__ __forceinline__ uint2 eight_bytes(const uint8_t *p)
{
    const uint32_t shift = 8u * (reinterpret_cast<uintptr_t>(p) % 4u);
    const uint32_t *const words = reinterpret_cast<const uint32_t *>(p - reinterpret_cast<uintptr_t>(p) % 4u);
    return make_uint2(__funnelshift_r(words[0], words[1], shift), __funnelshift_r(words[1], words[2], shift));
}

template <typename T, class G> struct DenseDecoder {
    using Group = G;
    static constexpr uint32_t kMostThreads = 768, kVectors = sizeof(T) == 1 ? 2 : sizeof(T) == 2 ? 3 : 4;
    static constexpr uint32_t kPerVector = 16u / sizeof(T);                // elements of 16 bytes
    static constexpr uint32_t kSteps = sizeof(T) >= 4 ? 4 : sizeof(T);     // vectors of a lane in a tile
    static constexpr uint32_t kOctet = kPerVector < 8u ? kPerVector : 8u;  // elements whose digits share a word
    static constexpr uint32_t kOctets = kPerVector / kOctet;               // of a vector
    static constexpr uint32_t kTile = G::kLanes * kSteps * kPerVector;
    static constexpr uint32_t kTableLevels = 2;                            // planes with tables: 0 and 1
    static constexpr uint32_t kLevel1 = kTile + 16u, kLevel2 = 8u * G::kLanes + 16u;
    static constexpr uint32_t kRaw = 0xff;
    static constexpr uint32_t kField = 32u / kSteps; // bits of a step's count in a scan of all of them

    const ibp_codebook &cb;
    uint8_t *const scratch;

    // Shared memory of a group: of every warp the tables and the bytes of plane 1 and of the tail, then what the warps exchange.
    static __host__ __device__ __forceinline__ uint32_t byte_planes(const ibp_codebook &cb)
    {
        return cb.planes.symbol_bytes + (cb.planes.per_column ? 1u : 0u);
    }
    static __host__ __device__ __forceinline__ uint32_t warp_bytes(const ibp_codebook &cb)
    {
        return byte_planes(cb) * (16u * kTableLevels + kLevel1 + kLevel2);
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return G::kWarps * warp_bytes(cb) + (G::kWarps > 1 ? 4u * IBP_MAX_PLANES * G::kWarps : 0u);
    }
    __device__ __forceinline__ uint32_t *exchanged() const { return reinterpret_cast<uint32_t *>(scratch + G::kWarps * warp_bytes(cb)); }
    __device__ __forceinline__ uint8_t *tables() const { return scratch + G::warp() * warp_bytes(cb); }
    __device__ __forceinline__ uint8_t *level1() const { return tables() + byte_planes(cb) * 16u * kTableLevels; }
    __device__ __forceinline__ uint8_t *level2() const { return level1() + byte_planes(cb) * kLevel1; }
    __device__ __forceinline__ uint4 table(uint32_t plane, uint32_t h) const
    {
        return reinterpret_cast<const uint4 *>(tables())[plane * byte_planes(cb) + h];
    }

    __device__ __forceinline__ DenseDecoder(const ibp_codebook &codebook, uint8_t *shared) : cb(codebook), scratch(shared)
    {
        if (cb.num_clusters <= 1u) fill_tables(PlanesBook<T>(cb, 0));
    }

    __device__ __forceinline__ void fill_tables(const PlanesBook<T> &book) const
    {
        const uint32_t planes = byte_planes(cb);
        for (uint32_t i = G::lane(); i < 16u * kTableLevels * planes; i += G::kLanes) {
            const uint32_t digit = i % 16u, h = i / 16u % planes, plane = i / (16u * planes), rank = book.first_of(plane) + digit;
            const bool named = digit < book.escape_of(plane);
            uint64_t bytes = 0;
            if (named) bytes = cb.planes.per_column ? rank : static_cast<uint64_t>(book.entry(rank));
            tables()[i] = static_cast<uint8_t>(bytes >> 8u * h);
        }
    }

    static __device__ __forceinline__ uint2 escape_bytes(uint32_t num_bits)
    {
        const uint32_t escape = (1u << num_bits) - 1u;
        return make_uint2(escape < 4u ? 0xffu << 8u * escape : 0u, escape == 7u ? 0xff000000u : 0u);
    }

    // ---- the tail ----

    // Puts the bytes of the next n elements that escaped plane 1 into level 2. next: how many elements reached planes 2, 3 and the raw symbols so far.
    __device__ __forceinline__ void decode_tail(const PlanesBook<T> &book, Stage stage, const ValueParts &parts, uint32_t n, uint32_t (&next)[3]) const
    {
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += G::kLanes) {
            const uint32_t i = base + G::lane();
            bool open = i < n;
            uint32_t at = next[0] + (open ? i : 0u), rank = book.first_of(2);
#pragma unroll
            for (uint32_t p = 2; p < IBP_MAX_PLANES; p++) {
                const uint32_t num_bits = book.width_of(p);
                uint32_t digit = 0;
                if (num_bits != 0u) digit = low_bits(stage.bits_at(parts.digits[p] + at * num_bits), num_bits);
                if (open) rank += digit;
                open = open && digit == book.escape_of(p);
                const uint32_t escaped = G::ballot(open);
                at = next[p - 1] + ibp_popcount(escaped & G::lanes_below());
                next[p - 1] += ibp_popcount(escaped);
            }
            T symbol = 0;
            if (open)
                symbol = PlanesBook<T>::field(stage, parts.digits[IBP_MAX_PLANES] + at * book.symbol_bits, book.symbol_bits);
            else if (i < n && !cb.planes.per_column)
                symbol = book.entry(rank);
            if (i >= n) continue;
            uint8_t *to = level2() + i;
            if (cb.planes.per_column) {
                *to = static_cast<uint8_t>(open ? kRaw : rank);
                to += kLevel2;
            }
            for (uint32_t h = 0; h < cb.planes.symbol_bytes; h++) to[h * kLevel2] = static_cast<uint8_t>(static_cast<uint64_t>(symbol) >> 8u * h);
        }
        next[0] += n;
    }

    // ---- plane 1 ----

    // Puts the bytes of the n elements of a tile that escaped plane 0 into level 1. first: how many of the row's came before.
    __device__ __forceinline__ void decode_plane1(const PlanesBook<T> &book, Stage stage, const ValueParts &parts, uint32_t first, uint32_t n,
                                                  uint32_t (&next)[3]) const
    {
        const uint32_t num_bits = book.width_of(1), planes = byte_planes(cb);
        for (uint32_t base = 0; __any_sync(kAllLanes, base < n); base += 8u * G::kLanes) {
            const uint32_t i = base + 8u * G::lane(), left = i < n ? ibp_min_u32(n - i, 8u) : 0u;
            const uint32_t digits = spread_digits(stage.bits_at(parts.digits[1] + (first + ibp_min_u32(i, n)) * num_bits), num_bits);
            const uint32_t escaped = low_bits(escaped_nibbles(digits, num_bits), 4u * left), count = ibp_popcount(escaped);
            const uint32_t sums = G::inclusive_scan(count), before = sums - count, order = escaped * 0x11111110u;
            decode_tail(book, stage, parts, G::last_lane(sums), next);
            __syncwarp();
            for (uint32_t h = 0; h < planes; h++) {
                const uint4 bytes = table(1, h);
                const uint2 escape = escape_bytes(num_bits), x = eight_bytes(level2() + h * kLevel2 + before);
                *reinterpret_cast<uint2 *>(level1() + h * kLevel1 + i) =
                    make_uint2(bytes_of_digits(digits, num_bits, bytes, escape, x, order),
                               bytes_of_digits(digits >> 16, num_bits, bytes, escape, x, order >> 16));
            }
            __syncwarp(); // level 2 is free, level 1 is there
        }
    }

    // ---- plane 0 ----

    // The digits of a lane's elements in a tile, and where in level 1 their escaped ones begin.
    struct TileDigits {
        uint32_t digits[kSteps * kOctets], escaped[kSteps * kOctets], before[kSteps], num_escaped;
    };

    static __device__ __forceinline__ uint32_t first_element(uint32_t tile_start, uint32_t step)
    {
        return tile_start + (step * G::kLanes + G::lane()) * kPerVector;
    }

    __device__ __forceinline__ TileDigits load_digits(const PlanesBook<T> &book, Stage stage, const ValueParts &parts, uint32_t tile_start, uint32_t n) const
    {
        const uint32_t num_bits = book.width_of(0);
        const bool whole = tile_start + kTile <= n;
        TileDigits tile;
        uint32_t counts = 0;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
#pragma unroll
            for (uint32_t q = 0; q < kOctets; q++) {
                const uint32_t i = first_element(tile_start, s) + q * kOctet, o = s * kOctets + q;
                tile.digits[o] = spread_digits(stage.bits_at(parts.digits[0] + ibp_min_u32(i, n) * num_bits), num_bits);
                tile.escaped[o] = low_bits(escaped_nibbles(tile.digits[o], num_bits), 4u * kOctet);
                if (!whole) tile.escaped[o] = low_bits(tile.escaped[o], i < n ? 4u * ibp_min_u32(n - i, 8u) : 0u);
                counts += ibp_popcount(tile.escaped[o]) << s * kField % 32u;
            }
        }
        const uint32_t sums = G::inclusive_scan(counts), totals = G::last_lane(sums), before = sums - counts;
        tile.num_escaped = 0;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            tile.before[s] = tile.num_escaped + low_bits(before >> s * kField % 32u, kField);
            tile.num_escaped += low_bits(totals >> s * kField % 32u, kField);
        }
        return tile;
    }

    // Byte h of the symbols of step s, from element 0 on.
    __device__ __forceinline__ void symbol_bytes(const PlanesBook<T> &book, const TileDigits &tile, uint32_t s, uint32_t h,
                                                 uint32_t (&bytes)[(kPerVector + 3u) / 4u]) const
    {
        const uint32_t num_bits = book.width_of(0);
        const uint4 entries = table(0, h);
        const uint2 escape = escape_bytes(num_bits);
        const uint8_t *escaped = level1() + h * kLevel1 + tile.before[s];
#pragma unroll
        for (uint32_t q = 0; q < kOctets; q++) {
            const uint32_t o = s * kOctets + q, order = tile.escaped[o] * 0x11111110u;
            const uint2 x = eight_bytes(escaped);
            bytes[q * 2u] = bytes_of_digits(tile.digits[o], num_bits, entries, escape, x, order);
            if (kOctet == 8u) bytes[(q * 2u + 1u) % ((kPerVector + 3u) / 4u)] = bytes_of_digits(tile.digits[o] >> 16, num_bits, entries, escape, x, order >> 16);
            if (kOctets > 1u) escaped += ibp_popcount(tile.escaped[o]);
        }
    }

    // Elements of two bytes, one of them the residual.
    static __device__ __forceinline__ void join_bytes(uint32_t symbols, uint32_t residuals, bool rotate, uint32_t &low, uint32_t &high)
    {
        low = __byte_perm(residuals, symbols, 0x5140), high = __byte_perm(residuals, symbols, 0x7362);
        if (!rotate) return;
        low = (low >> 1 & 0x7fff7fffu) | (low << 15 & 0x80008000u);
        high = (high >> 1 & 0x7fff7fffu) | (high << 15 & 0x80008000u);
    }

    static __device__ __forceinline__ void put_element(uint32_t (&words)[4], uint32_t e, T element)
    {
        if (sizeof(T) == 8) {
            words[2 * e % 4] = static_cast<uint32_t>(element);
            words[(2 * e + 1) % 4] = static_cast<uint32_t>(static_cast<uint64_t>(element) >> 32);
        } else {
            words[e * sizeof(T) / 4u] |= static_cast<uint32_t>(element) << (e * sizeof(T) % 4u * 8u);
        }
    }

    // The 16 bytes of step s, whose first element is i.
    __device__ __forceinline__ void decode_vector(const PlanesBook<T> &book, Stage stage, const ValueParts &parts, const TileDigits &tile, uint32_t s,
                                                  uint32_t i, uint32_t n, uint32_t (&words)[4]) const
    {
        const uint32_t r = cb.planes.residual_bits;
        uint32_t bytes[(kPerVector + 3u) / 4u];
        symbol_bytes(book, tile, s, 0, bytes);
        if (sizeof(T) == 2 && r == 8u && byte_planes(cb) == 1u) {
            const uint2 residuals = eight_bytes(stage.bytes() + parts.residuals / 8u + ibp_min_u32(i, n));
            join_bytes(bytes[0], residuals.x, cb.planes.rotate, words[0], words[1]);
            join_bytes(bytes[1 % ((kPerVector + 3u) / 4u)], residuals.y, cb.planes.rotate, words[2], words[3]);
            return;
        }
        T symbol[kPerVector];
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) symbol[e] = static_cast<T>(bytes[e / 4u] >> 8u * (e % 4u) & 0xffu);
        if (!cb.planes.per_column) {
            for (uint32_t h = 1; h < cb.planes.symbol_bytes; h++) add_bytes(book, tile, s, h, 8u * h, symbol);
        } else {
            T raw[kPerVector] = {};
            for (uint32_t h = 0; h < cb.planes.symbol_bytes; h++) add_bytes(book, tile, s, h + 1u, 8u * h, raw);
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
            if (e % kPerWindow == 0) residuals = stage.bits64_at(parts.residuals + ibp_min_u32(i + e, n) * r);
            put_element(words, e, book.join(symbol[e], static_cast<T>(low_bits(residuals, r))));
            residuals = kPerWindow == 1 ? 0 : residuals >> r;
        }
    }
    __device__ __forceinline__ void add_bytes(const PlanesBook<T> &book, const TileDigits &tile, uint32_t s, uint32_t h, uint32_t shift,
                                              T (&numbers)[kPerVector]) const
    {
        uint32_t bytes[(kPerVector + 3u) / 4u];
        symbol_bytes(book, tile, s, h, bytes);
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++)
            numbers[e] = static_cast<T>(numbers[e] | static_cast<T>(bytes[e / 4u] >> 8u * (e % 4u) & 0xffu) << shift);
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        const PlanesBook<T> book(cb, cluster);
        if (cb.num_clusters > 1u) {
            __syncwarp();
            fill_tables(book);
            __syncwarp();
        }
        uint32_t n = active ? book.columns : 0u;
        const uint32_t tiles = (book.columns + kTile - 1u) / kTile, per_warp = (tiles + G::kWarps - 1u) / G::kWarps;
        const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n), last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
        const ValueParts parts = book.template find_parts<G>(stage, start_bit, n, {first, last}, exchanged());
        const bool good = !active || parts.end == start_bit + 8u * coded_bytes;
        if (!good) n = 0; // from here on every position lies in the coded row
        const bool vectors = (reinterpret_cast<uintptr_t>(window.dst) - window.low) % 16u == 0;
        uint32_t in_plane1 = parts.mine[1].from, next[3] = {parts.mine[2].from, parts.mine[3].from, parts.mine[4].from};
        for (uint32_t k = 0; k < per_warp; k++) {
            const uint32_t tile_start = (G::warp() * per_warp + k) * kTile;
            if (tile_start >= book.columns) break;
            const TileDigits tile = load_digits(book, stage, parts, tile_start, n);
            decode_plane1(book, stage, parts, in_plane1, tile.num_escaped, next);
            in_plane1 += tile.num_escaped;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t i = first_element(tile_start, s);
                uint32_t words[4] = {};
                decode_vector(book, stage, parts, tile, s, i, n, words);
                if (i < n) store_words(window, vectors, i * static_cast<uint32_t>(sizeof(T)) / 4u, words);
            }
            __syncwarp(); // level 1 is free for the next tile
        }
        return good;
    }
};

} // namespace ibp

#endif
