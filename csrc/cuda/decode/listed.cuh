// listed.cuh - listed rows of scheme planes (FORMAT.md section 6): the default everywhere, then the listed elements
// over it, one a lane.
#ifndef IBP_DECODE_LISTED_CUH
#define IBP_DECODE_LISTED_CUH

#include "../planes_book.cuh"
#include "decoder.cuh"

namespace ibp {

template <typename T> struct ListedDecoder : NoBlockMemory {
    using Group = ibp::Group<kWarp, 1>;
    using G = Group;
    static constexpr uint32_t kMostThreads = 768, kVectors = 1;
    static constexpr uint32_t kQueue = 2 * kWarp;

    const ibp_codebook &cb;
    // Shared word with which the positions found and not yet stored begin; behind them a bitmap of all positions.
    const uint32_t queue;

    static __host__ __device__ __forceinline__ uint32_t bitmap_words(uint32_t columns)
    {
        return (columns + 127u) / 128u * 4u + 4u;
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &codebook)
    {
        return 4u * (kQueue + bitmap_words(codebook.row_bytes / static_cast<uint32_t>(sizeof(T))));
    }
    __device__ __forceinline__ ListedDecoder(const ibp_codebook &codebook, uint32_t scratch)
        : cb(codebook), queue(scratch / 4u)
    {
    }
    __device__ __forceinline__ uint32_t &queued(uint32_t j) const { return shared_word(queue + j % kQueue); }

    // 32 bits of a bit array that ends at bit end.
    static __device__ __forceinline__ uint32_t bits_until(Stage stage, uint32_t position, uint32_t end)
    {
        return low_bits(stage.bits_at(position), ibp_min_u32(end - position, 32u));
    }

    // The position that this lane's bit of a list's upper bits stands for.
    __device__ __forceinline__ uint32_t list_position(Stage stage, const ibp_position_form &form, uint32_t low_start,
                                                      uint32_t bit, uint32_t rank) const
    {
        return (bit - rank) << form.low_bits | low_bits(stage.bits_at(low_start + rank * form.low_bits), form.low_bits);
    }

    // Turns a list of the positions that are not listed into a bitmap of those that are. Returns whether it names m
    // of them.
    __device__ __forceinline__ bool spread_complement(uint32_t columns, uint32_t bitmap, Stage stage,
                                                      const ibp_position_form &form, uint32_t start,
                                                      uint32_t low_start) const
    {
        for (uint32_t i = lane_id(); i < bitmap_words(columns); i += kWarp)
            shared_word(bitmap + i) = 32u * i < columns ? low_bits(~0u, ibp_min_u32(columns - 32u * i, 32u)) : 0u;
        __syncwarp();
        uint32_t found = 0;
        bool good = true;
        for (uint32_t i = 0; i < form.upper_bits; i += kWarp) {
            const uint32_t word = bits_until(stage, start + i, start + form.upper_bits);
            const bool mine = word >> lane_id() & 1u;
            const uint32_t rank = found + ibp_popcount(word & G::lanes_below());
            const uint32_t position = mine ? list_position(stage, form, low_start, i + lane_id(), rank) : 0u;
            if (mine) queued(rank) = position;
            __syncwarp();
            if (mine) good = good && position < columns && (rank == 0u || position > queued(rank - 1u));
            if (mine && position < columns) atomicAnd(&shared_word(bitmap + position / 32u), ~(1u << position % 32u));
            found += ibp_popcount(word);
            __syncwarp();
        }
        __syncwarp();
        return __all_sync(kAllLanes, good) && found == form.num_positions;
    }

    // The values of up to 32 listed elements, one a lane, from the j-th on. next: how many elements reached planes 1,
    // 2, 3 and the raw symbols so far.
    __device__ __forceinline__ T listed_value(const PlanesBook<T> &book, Stage stage, const ValueParts &parts,
                                              uint32_t j, bool active, uint32_t (&next)[IBP_MAX_PLANES]) const
    {
        uint32_t at = j, rank = 0;
        bool open = active;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            const uint32_t num_bits = book.width_of(p);
            if (num_bits == 0u) continue;
            const uint32_t digit = low_bits(stage.bits_at(parts.digits[p] + at * num_bits), num_bits);
            if (open) rank += digit;
            open = open && digit == book.escape_of(p);
            const uint32_t escaped = G::ballot(open);
            at = next[p] + ibp_popcount(escaped & G::lanes_below());
            next[p] += ibp_popcount(escaped);
        }
        T symbol = 0;
        if (open)
            symbol = book.field(stage, parts.digits[IBP_MAX_PLANES] + at * book.symbol_bits, book.symbol_bits);
        else if (active)
            symbol = book.entry(rank);
        return book.join(symbol,
                         book.field(stage, parts.residuals + j * book.planes.residual_bits, book.planes.residual_bits));
    }

    static __device__ __forceinline__ void store_element(const Window &window, uint32_t column, T element)
    {
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

    __device__ __forceinline__ void fill_default(const Window &window) const
    {
        if (cb.planes.default_value == 0u) {
            group_zero<G>(window.dst, window.high - window.low);
        } else {
            const bool vectors = window.is_units(cb.row_bytes, 16);
            constexpr uint32_t kRepeats = sizeof(T) == 8 ? 1 : 4 / sizeof(T); // of the element in a word
            uint32_t words[4] = {};
#pragma unroll
            for (uint32_t i = 0; i < 4u; i++)
#pragma unroll
                for (uint32_t e = 0; e < kRepeats; e++)
                    words[i] |= static_cast<uint32_t>(cb.planes.default_value >> (sizeof(T) == 8 ? 32u * (i % 2u) : 0u))
                                << (8u * sizeof(T) * e % 32u);
            for (uint32_t w = 4u * lane_id(); 4u * w < cb.row_bytes; w += 4u * kWarp)
                store_words(window, vectors, w, words);
        }
        __syncwarp(); // before single elements are stored over it
    }

    // Rebuilds a row that is staged from start_bit on; nothing where not active. Returns whether it took just
    // coded_bytes.
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        if (!active) return true;
        const PlanesBook<T> book(cb, cluster);
        const uint32_t columns = book.columns, header_bytes = ibp_header_bytes(columns),
                       end = start_bit + 8u * coded_bytes;
        ibp_listed_header header;
        if (!ibp_split_header(low_bits(stage.bits_at(start_bit), 8u * header_bytes), coded_bytes, columns, &header))
            return false;
        const uint32_t k = header.num_listed;
        const bool closed = header.is_closed;
        fill_default(window);
        const uint32_t start = start_bit + 8u * header_bytes;
        if (k == 0) return start == end;
        ibp_position_form form = ibp_choose_position_form(k, columns);
        const uint32_t low_start = start + to_byte(form.upper_bits), values = start + 8u * form.num_bytes;
        if (values > end) return false;
        ValueParts parts{};
        if (!closed)
            parts = book.template find_parts<G, false>(
                values, end, k, {0, k}, 0, [](uint32_t, uint32_t from, DigitRange range, uint32_t num_bits) {
                    return PlanesBook<T>::template count_escapes<G>(from, range, num_bits);
                });
        if ((closed ? values : parts.end) != end) return false;
        Stage upper = stage;
        uint32_t upper_start = start;
        if (form.is_complement) {
            const uint32_t bitmap = queue + kQueue;
            if (!spread_complement(columns, bitmap, stage, form, start, low_start)) return false;
            upper.last_word = bitmap + bitmap_words(columns) - 2u;
            upper_start = 32u * bitmap;
            form.is_list = 0;
            form.upper_bits = columns;
        }
        return store_listed(book, stage, upper, form, upper_start, low_start, parts, k, closed, window);
    }

    // Walks the upper bits 32 at a time; the positions found wait in a queue until there are 32 of them.
    __device__ __forceinline__ bool store_listed(const PlanesBook<T> &book, Stage stage, Stage upper,
                                                 const ibp_position_form &form, uint32_t upper_start,
                                                 uint32_t low_start, const ValueParts &parts, uint32_t k, bool closed,
                                                 const Window &window) const
    {
        const uint32_t columns = book.columns;
        uint32_t found = 0, stored = 0, next[IBP_MAX_PLANES] = {};
        bool good = true;
        for (uint32_t i = 0; i < form.upper_bits; i += kWarp) {
            const uint32_t word = bits_until(upper, upper_start + i, upper_start + form.upper_bits);
            if (word >> lane_id() & 1u) {
                const uint32_t bit = i + lane_id(), rank = found + ibp_popcount(word & G::lanes_below());
                queued(rank) = form.is_list ? list_position(stage, form, low_start, bit, rank) : bit;
            }
            found += ibp_popcount(word);
            __syncwarp();
            if (found > k) return false;
            while (stored < found && (found - stored >= kWarp || i + kWarp >= form.upper_bits)) {
                const uint32_t j = stored + lane_id();
                const bool active = j < found;
                const uint32_t column = active ? queued(j) : 0u;
                const T element =
                    closed ? static_cast<T>(cb.planes.closed_value) : listed_value(book, stage, parts, j, active, next);
                good = good && column < columns && (!active || j == 0u || column > queued(j - 1u));
                if (active && column < columns) store_element(window, column, element);
                stored = ibp_min_u32(stored + kWarp, found);
                __syncwarp();
            }
        }
        return __all_sync(kAllLanes, good) && found == k;
    }
};

} // namespace ibp

#endif
