// decode_fast.cuh - decodes dense rows of scheme planes with one plane of four-bit digits and consecutive entries
// (FORMAT.md section 6), as level="fast" makes them.
//
// A coded row in shared memory, each part padded to whole bytes; r is planes.residual_bits:
//
//     | residuals, r bits for each element | digits, 4 bits for each element | raw symbols of escaped elements |
//
// 1. A tile is the elements of one row that the lanes of a group in one warp decode at a time. A lane's part of it is
//    kSteps vectors of 16 bytes. The lane loads the digits of these vectors and counts their escapes (load_tile).
// 2. The number of escapes in the row says where the row ends. The decoder checks that the row does end there.
// 3. A symbol is first_symbol plus its digit, and residuals lie at known positions. So a lane makes 16 bytes of the row
//    from a word or half a word of digits with arithmetic, shifts and permutes alone (store_tile).
// 4. Escapes are rare. If a warp has any, each lane then stores the right values of its escaped elements.
//
// Device memory limits the decoder. If rows are in pinned memory, the link to the host limits it.
#ifndef IBP_DECODE_FAST_CUH
#define IBP_DECODE_FAST_CUH

#include "../planes_book.cuh"
#include "decoder.cuh"

namespace ibp {

template <typename T, class G> struct FastDecoder : NoBlockMemory {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "elements must have two or four bytes");
    using Group = G;
    static constexpr uint32_t kMostThreads = G::kAnyLength ? 512 : G::kWarps > 8 ? 1024 : 768;
    static constexpr uint32_t kVectors = G::kAnyLength ? 8 : 4;
    // Number of elements in a vector of 16 bytes, and number of elements in a word.
    static constexpr uint32_t kPerVector = 16u / sizeof(T), kPerWord = 4u / sizeof(T);
    static constexpr uint32_t kSteps = 4; // number of vectors of 16 bytes that a lane has in a tile
    static constexpr uint32_t kStep = G::kLanes * kPerVector, kTile = kSteps * kStep;
    static constexpr uint32_t kDigitBits = 4;

    const ibp_codebook &cb;
    const uint32_t scratch; // the shared byte at which the group's scratch begins

    // Returns the size in bytes of a group's scratch. A group of several warps has one word for each warp, in which the
    // warps exchange counts.
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &)
    {
        return G::kWarps > 1 ? 4u * G::kWarps : 0u;
    }
    static __host__ __device__ __forceinline__ uint32_t kept_bytes(const ibp_codebook &cb) { return scratch_bytes(cb); }
    __device__ __forceinline__ FastDecoder(const ibp_codebook &codebook, uint32_t shared)
        : cb(codebook), scratch(shared)
    {
    }

    // The bit positions in shared memory at which the parts of a row begin.
    struct Parts {
        uint32_t residuals, digits, raw;
    };

    // ---- digits ----

    // The digits of a lane's vectors in a tile, one in each nibble. Nibbles past the row's last element are 0.
    // num_escaped: number of the lane's own escapes, unlike in the Tiles of tiles.cuh, where it is the number of the
    // whole group's escapes.
    struct Tile {
        uint32_t digits[kSteps], num_escaped;
    };
    static __device__ __forceinline__ uint32_t first_element(uint32_t tile_start, uint32_t step)
    {
        return tile_start + step * kStep + kPerVector * G::lane();
    }
    static __device__ __forceinline__ Tile load_tile(uint32_t digits, uint32_t tile_start, uint32_t n)
    {
        Tile tile;
        if (tile_start + kTile <= n) {
            const Cursor cursor = Cursor::at(digits / 8u + first_element(tile_start, 0) / 2u);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++)
                tile.digits[s] = low_bits(cursor.word(s * kStep / 8u), kDigitBits * kPerVector);
        } else {
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t i = ibp_min_u32(first_element(tile_start, s), n);
                tile.digits[s] =
                    low_bits(shared_bits(digits + kDigitBits * i), kDigitBits * ibp_min_u32(n - i, kPerVector));
            }
        }
        uint32_t all = 0; // bit s of each nibble is set if its digit of step s is an escape
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) all += escaped(tile.digits[s]) << s;
        tile.num_escaped = ibp_popcount(all);
        return tile;
    }
    static_assert(kStep % 8 == 0 && kSteps == kDigitBits, "steps are whole words of digits, and a nibble's bits");
    // Returns a word in which bit 0 of every nibble is set if its digit is an escape.
    static __device__ __forceinline__ uint32_t escaped(uint32_t digits)
    {
        digits &= digits >> 1;
        return digits & digits >> 2 & 0x11111111u;
    }

    // ---- elements ----

    // Constants for of_word(), which turns the digits of the elements in one word into symbols. Each symbol lies in the
    // low bits of its element.
    struct Symbols {
        // low: first_symbol without the highest bit of an element, repeated in every element, so that a digit plus
        // `low` cannot carry into the next element. high: the highest bit of first_symbol alone, repeated in the same
        // way. mask: the bits of the symbols.
        uint32_t low, high, mask;

        __device__ __forceinline__ Symbols(const PlanesBook<T> &book)
        {
            const uint32_t first = low_bits(static_cast<uint32_t>(book.planes.first_symbol), 8u * sizeof(T)),
                           highest = 1u << (8u * sizeof(T) - 1u);
            constexpr uint32_t kEach = WordJoin<T>::kEach;
            low = (first & ~highest) * kEach, high = (first & highest) * kEach;
            mask = low_bits(uint32_t{WordJoin<T>::kOnes}, book.symbol_bits) * kEach;
        }
        __device__ __forceinline__ uint32_t of_word(uint32_t digits, uint32_t k) const
        {
            uint32_t word;
            if (sizeof(T) == 2) // nibbles 2k and 2k + 1
                word = permute_bytes(digits, digits >> 4, (k | (k + 4u) << 8) * 0x11u) & 0x000f000fu;
            else
                word = digits >> 4u * k & 0xfu;
            return ((word + low) ^ high) & mask;
        }
    };
    // Returns the symbols of a vector of 16 bytes, one in each byte. Used if a symbol is exactly one byte.
    __device__ __forceinline__ uint2 symbol_bytes(uint32_t digits) const
    {
        const uint32_t first = (static_cast<uint32_t>(cb.planes.first_symbol) & 0xffu) * 0x01010101u;
        const auto symbols = [&](uint32_t order) {
            const uint32_t bytes = permute_bytes(digits, digits >> 4, order) & 0x0f0f0f0fu;
            return (bytes + (first & 0x7f7f7f7fu)) ^ (first & 0x80808080u);
        };
        return make_uint2(symbols(0x5140), sizeof(T) == 2 ? symbols(0x7362) : 0u);
    }

    // Returns the residuals of word k of the vector whose first element is i, each in the low bits of its element.
    // start: the bit at which the row's residuals begin. n: number of elements of the row. Residuals of elements past
    // the row's end are unspecified.
    __device__ __forceinline__ uint32_t residuals_of(uint32_t start, uint32_t i, uint32_t k, uint32_t n) const
    {
        const uint32_t r = cb.planes.residual_bits;
        return spread_fields<T>(shared_bits(start + ibp_min_u32(i + k * kPerWord, n) * r), r);
    }

    // Stores a lane's vectors of a tile, with wrong values for escaped elements. BYTES: a symbol is one byte, and a
    // residual is all other bytes of its element. UNITS: the result of window.is_units.
    template <bool BYTES, bool UNITS>
    __device__ __forceinline__ void store_tile(const PlanesBook<T> &book, const Parts &parts, const Tile &tile,
                                               uint32_t tile_start, uint32_t n, const Window &window) const
    {
        const Symbols symbols(book);
        const WordJoin<T> join(cb.planes);
        constexpr uint32_t kBytes = sizeof(T) - 1u; // size of a residual in bytes
        const Cursor residuals = Cursor::at(parts.residuals / 8u + kBytes * first_element(tile_start, 0));
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            const uint32_t i = first_element(tile_start, s);
            if (i >= n) break;
            uint32_t words[4];
            if (BYTES) {
                join_bytes<T>(cb.planes.rotate, symbol_bytes(tile.digits[s]), residuals, s * kStep * kBytes / 4u,
                              words);
            } else {
#pragma unroll
                for (uint32_t k = 0; k < 4u; k++)
                    words[k] = join.word(symbols.of_word(tile.digits[s], k), residuals_of(parts.residuals, i, k, n));
            }
            store_elements<T>(cb, window, UNITS, i, words);
        }
    }

    // Counts the escapes among the digits `from` to `to` - 1, for a warp that has several tiles.
    static __device__ __forceinline__ uint32_t count_escapes(uint32_t digits, uint32_t from, uint32_t to)
    {
        return PlanesBook<T>::template count_escapes<G>(digits, {from, to}, kDigitBits);
    }

    // Rebuilds a row (decoder.cuh).
    __device__ __forceinline__ bool decode(uint32_t, bool active, Stage, uint32_t start_bit, uint32_t coded_bytes,
                                           const Window &window) const
    {
        put_template<G>(cb.planes, active, window);
        const PlanesBook<T> book(cb, 0);
        const uint32_t tiles = (book.columns + kTile - 1u) / kTile,
                       per_warp = G::kAnyLength ? (tiles + G::kWarps - 1u) / G::kWarps : 1u;
        const uint32_t end = start_bit + 8u * coded_bytes;
        Parts parts{start_bit, start_bit + to_byte(book.columns * cb.planes.residual_bits), 0};
        parts.raw = parts.digits + to_byte(book.columns * kDigitBits);
        const uint32_t n = active && parts.raw <= end ? book.columns : 0u; // if the row is too short, nothing is read
        const uint32_t first = ibp_min_u32(G::warp() * per_warp * kTile, n),
                       last = ibp_min_u32((G::warp() + 1u) * per_warp * kTile, n);
        const bool one_tile = per_warp == 1u;
        Tile tile{};
        if (one_tile) tile = load_tile(parts.digits, first, last);
        uint32_t total,
            before = G::exchange(scratch / 4u,
                                 one_tile ? G::sum_in_warp(tile.num_escaped) : count_escapes(parts.digits, first, last),
                                 total);
        const bool good = !active || (n != 0u && parts.raw + to_byte(total * book.symbol_bits) == end);
        if (G::kPerWarp == 1 && G::any_in_warp(!good)) return false;
        const uint32_t wanted = good ? last : 0u;
        if (!good) tile = Tile{};
        const bool units = cb.planes.num_constant == 0u && window.is_units(cb.row_bytes, 16),
                   bytes = cb.planes.residual_bits == 8u * (sizeof(T) - 1u) && cb.planes.invariant_bits == 0u;
#pragma unroll 1
        for (uint32_t k = 0; k < per_warp; k++) {
            const uint32_t tile_start = ibp_min_u32(first + k * kTile, wanted);
            if (!one_tile) tile = load_tile(parts.digits, tile_start, wanted);
            if (bytes && units)
                store_tile<true, true>(book, parts, tile, tile_start, wanted, window);
            else if (units)
                store_tile<false, true>(book, parts, tile, tile_start, wanted, window);
            else
                store_tile<false, false>(book, parts, tile, tile_start, wanted, window);
            if (!__any_sync(kAllLanes, tile.num_escaped != 0u)) continue;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++)
                before = put_raw_elements<T, G, kDigitBits>(cb, window, {parts.residuals, parts.raw, before},
                                                            first_element(tile_start, s), escaped(tile.digits[s]));
        }
        return good;
    }
};

} // namespace ibp

#endif
