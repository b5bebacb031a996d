// planes.cuh - rows of scheme planes by one warp (FORMAT.md section 6). T is the element; everything else is a run-time value.
//
// Dense rows: a lane takes 16 bytes of output; how many digits of each plane belong to the lanes below it comes from one warp scan a
// plane. Listed rows: a lane takes one listed element; ballots give the same counts.
#ifndef IBP_PLANES_CUH
#define IBP_PLANES_CUH

#include "warp.cuh"

#include <type_traits>

namespace ibp {

template <typename Bits> __device__ __forceinline__ Bits low_bits(Bits value, uint32_t num_bits)
{
    return num_bits >= 8u * sizeof(Bits) ? value : value & ((Bits{1} << num_bits) - 1u);
}

__device__ __forceinline__ uint32_t lanes_below() { return (1u << lane_id()) - 1u; }

__device__ __forceinline__ uint32_t to_byte(uint32_t bits) { return (bits + 7u) & ~7u; }

// The lowest bit of each digit of num_bits whose bits are all set.
template <typename Digits> __device__ __forceinline__ Digits escapes_in(Digits digits, uint32_t num_bits)
{
    const Digits lowest = static_cast<Digits>(num_bits == 1u   ? ~0ull
                                              : num_bits == 2u ? 0x5555555555555555ull
                                              : num_bits == 3u ? 0x9249249249249249ull
                                                               : 0x1111111111111111ull);
    Digits all = digits;
    for (uint32_t b = 1; b < num_bits; b++) all &= digits >> b;
    return all & lowest;
}

// Where the parts of the values are, in stage bits; digits[num_planes] are the raw symbols.
struct ValueParts {
    uint32_t residuals, digits[IBP_MAX_PLANES + 1], end;
};

template <typename T, bool LISTED> struct Planes {
    static constexpr uint32_t kElementBits = 8u * sizeof(T), kPerLane = 16u / sizeof(T);
    static constexpr uint32_t kPerWindow = 8u / sizeof(T); // elements whose residuals fit 64 bits
    using Digits = std::conditional_t<sizeof(T) == 1, uint64_t, uint32_t>; // holds a lane's digits of one plane
    const ibp_codebook &cb;
    const ibp_planes &planes;
    const uint32_t columns, symbol_bits;
    uint64_t cluster_offset = 0; // bytes to the entries of the row's cluster

    __device__ __forceinline__ explicit Planes(const ibp_codebook &codebook)
        : cb(codebook), planes(codebook.planes), columns(codebook.row_bytes / static_cast<uint32_t>(sizeof(T))),
          symbol_bits(kElementBits - codebook.planes.residual_bits)
    {
        if (!is_shared()) return;
        for (uint32_t i = threadIdx.x; i < planes.num_entries; i += blockDim.x) shared_entries()[i] = load_entry(i);
        __syncthreads();
    }

    // ---- the codebook ----

    __device__ __forceinline__ Planes of_cluster(const ibp_codebook &codebook, uint32_t k) const
    {
        Planes one = *this;
        one.cluster_offset = uint64_t{k} * codebook.cluster_stride;
        return one;
    }

    // A table's entries are copied to shared memory; columns' and clusters' are read where they are.
    __device__ __forceinline__ bool is_shared() const { return !planes.per_column && cb.num_clusters <= 1u; }
    static __device__ __forceinline__ T *shared_entries()
    {
        __shared__ T entries[IBP_MAX_PLANES * ((1u << IBP_MAX_DIGIT_BITS) - 1u)];
        return entries;
    }
    __device__ __forceinline__ T load_entry(uint32_t i) const
    {
        const uint8_t *const entries = static_cast<const uint8_t *>(planes.entries) + cluster_offset;
        switch (planes.symbol_bytes) {
        case 1: return static_cast<T>(__ldg(entries + i));
        case 2: return static_cast<T>(__ldg(reinterpret_cast<const uint16_t *>(entries) + i));
        case 4: return static_cast<T>(__ldg(reinterpret_cast<const uint32_t *>(entries) + i));
        default: return static_cast<T>(__ldg(reinterpret_cast<const unsigned long long *>(entries) + i));
        }
    }
    __device__ __forceinline__ T entry(uint32_t column, uint32_t i) const
    {
        if (is_shared()) return shared_entries()[i];
        return load_entry((planes.per_column ? column * planes.num_entries : 0u) + i);
    }
    __device__ __forceinline__ uint32_t escape_of(uint32_t plane) const { return (1u << planes.digit_bits[plane]) - 1u; }

    // ---- elements ----

    __device__ __forceinline__ T join(T symbol, T residual) const
    {
        const uint32_t r = planes.residual_bits;
        const T rotated = static_cast<T>((r >= kElementBits ? T{0} : static_cast<T>(symbol << r)) | residual);
        return planes.rotate ? static_cast<T>(rotated >> 1 | rotated << (kElementBits - 1u)) : rotated;
    }
    __device__ __forceinline__ void split(T element, T &symbol, T &residual) const
    {
        const uint32_t r = planes.residual_bits;
        const T rotated = planes.rotate ? static_cast<T>(element << 1 | element >> (kElementBits - 1u)) : element;
        symbol = r >= kElementBits ? T{0} : static_cast<T>(rotated >> r);
        residual = low_bits(rotated, r);
    }
    __device__ __forceinline__ T field(Stage stage, uint32_t position, uint32_t num_bits) const
    {
        if (sizeof(T) == 8) return static_cast<T>(low_bits(stage.bits64_at(position), num_bits));
        return static_cast<T>(low_bits(stage.bits_at(position), num_bits));
    }

    // ---- parts ----

    __device__ __forceinline__ ValueParts lay_out(uint32_t start, const uint32_t (&reaching)[IBP_MAX_PLANES + 1]) const
    {
        ValueParts parts;
        parts.residuals = start;
        parts.digits[0] = start + to_byte(reaching[0] * planes.residual_bits);
        parts.end = parts.digits[0] + (planes.num_planes ? 0u : to_byte(reaching[0] * symbol_bits));
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes) continue;
            parts.digits[p + 1] = parts.digits[p] + to_byte(reaching[p] * planes.digit_bits[p]);
            if (p + 1 == planes.num_planes) parts.end = parts.digits[p + 1] + to_byte(reaching[p + 1] * symbol_bits);
        }
        return parts;
    }

    __device__ __forceinline__ uint32_t count_escapes(Stage stage, uint32_t start, uint32_t n, uint32_t num_bits) const
    {
        const uint32_t per_load = 64u / num_bits;
        uint32_t count = 0;
        for (uint32_t i = lane_id() * per_load; i < n; i += kWarp * per_load) {
            const uint64_t digits = stage.bits64_at(start + i * num_bits);
            count += __popcll(low_bits(escapes_in(digits, num_bits), ibp_min_u32(per_load, n - i) * num_bits));
        }
        return __reduce_add_sync(kAllLanes, count);
    }

    // Finds the parts of n values from a stage bit on: each plane is as long as the one before has escapes.
    __device__ __forceinline__ ValueParts find_parts(Stage stage, uint32_t start, uint32_t n) const
    {
        uint32_t reaching[IBP_MAX_PLANES + 1] = {n, 0, 0, 0, 0};
        uint32_t at = start + to_byte(n * planes.residual_bits);
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes || reaching[p] == 0) continue;
            reaching[p + 1] = count_escapes(stage, at, reaching[p], planes.digit_bits[p]);
            at += to_byte(reaching[p] * planes.digit_bits[p]);
        }
        return lay_out(start, reaching);
    }

    // ---- dense rows ----

    // The digits of a lane's elements, plane by plane, next digit lowest; and where their raw symbols are.
    struct LaneDigits {
        Digits plane[IBP_MAX_PLANES];
        uint32_t raw;
    };

    static __device__ __forceinline__ Digits load_digits(Stage stage, uint32_t position)
    {
        if (sizeof(Digits) == 8) return static_cast<Digits>(stage.bits64_at(position));
        return static_cast<Digits>(stage.bits_at(position));
    }
    static __device__ __forceinline__ uint32_t count_ones(Digits bits)
    {
        return sizeof(Digits) == 8 ? static_cast<uint32_t>(__popcll(bits)) : static_cast<uint32_t>(__popc(static_cast<uint32_t>(bits)));
    }

    // before[p]: digits of plane p that belong to elements of earlier steps; advanced by this step's.
    __device__ __forceinline__ LaneDigits lane_digits(Stage stage, const ValueParts &parts, uint32_t first, uint32_t count,
                                                      uint32_t (&before)[IBP_MAX_PLANES]) const
    {
        LaneDigits digits{};
        uint32_t at = first, reaching = count;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes) continue;
            const uint32_t num_bits = planes.digit_bits[p];
            digits.plane[p] = load_digits(stage, parts.digits[p] + at * num_bits);
            reaching = count_ones(low_bits(static_cast<Digits>(escapes_in(digits.plane[p], num_bits)), reaching * num_bits));
            uint32_t total;
            at = before[p] + exclusive_scan(reaching, total);
            before[p] += total;
        }
        digits.raw = parts.digits[0];
#pragma unroll
        for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++)
            if (p == planes.num_planes) digits.raw = parts.digits[p];
        digits.raw += at * symbol_bits;
        return digits;
    }

    __device__ __forceinline__ T next_symbol(Stage stage, LaneDigits &digits, uint32_t column) const
    {
        uint32_t i = 0;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes) continue;
            const uint32_t escape = escape_of(p), digit = static_cast<uint32_t>(digits.plane[p]) & escape;
            digits.plane[p] >>= planes.digit_bits[p];
            i += digit;
            if (digit != escape) return entry(column, i);
        }
        const T symbol = field(stage, digits.raw, symbol_bits);
        digits.raw += symbol_bits;
        return symbol;
    }

    __device__ __forceinline__ bool decode_dense(Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        const ValueParts parts = find_parts(stage, start_bit, columns);
        if (parts.end != start_bit + 8u * coded_bytes) return false;
        const bool vectors = (reinterpret_cast<uintptr_t>(window.dst) - window.low) % 16u == 0;
        uint32_t before[IBP_MAX_PLANES] = {};
        for (uint32_t base = 0; base < columns; base += kWarp * kPerLane) {
            const uint32_t first = base + lane_id() * kPerLane;
            const uint32_t count = first < columns ? ibp_min_u32(columns - first, kPerLane) : 0u;
            LaneDigits digits = lane_digits(stage, parts, ibp_min_u32(first, columns), count, before);
            uint32_t words[4] = {};
            uint64_t residuals = 0;
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) {
                if (e >= count) break;
                if (e % kPerWindow == 0) residuals = stage.bits64_at(parts.residuals + (first + e) * planes.residual_bits);
                const T residual = static_cast<T>(low_bits(residuals, planes.residual_bits));
                residuals = kPerWindow == 1 ? 0 : residuals >> planes.residual_bits;
                put_element(words, e, join(next_symbol(stage, digits, first + e), residual));
            }
            store_words(window, vectors, first * static_cast<uint32_t>(sizeof(T)) / 4u, words);
        }
        return true;
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

    // ---- listed rows ----

    static __device__ __forceinline__ uint32_t *queue_of(Stage stage) { return stage.words + stage.last_word + 2u; }
    static __device__ __forceinline__ Stage bitmap_of(Stage stage, uint32_t columns)
    {
        return {queue_of(stage) + kQueue, (columns + 127u) / 128u * 4u + 2u};
    }

    // 32 bits of a bit array that ends at bit end.
    static __device__ __forceinline__ uint32_t bits_until(Stage stage, uint32_t position, uint32_t end)
    {
        return low_bits(stage.bits_at(position), ibp_min_u32(end - position, 32u));
    }

    // The position that this lane's bit of a list's upper bits stands for.
    __device__ __forceinline__ uint32_t list_position(Stage stage, const ibp_position_form &form, uint32_t low_start, uint32_t bit,
                                                      uint32_t rank) const
    {
        return (bit - rank) << form.low_bits | low_bits(stage.bits_at(low_start + rank * form.low_bits), form.low_bits);
    }

    // Turns a list of the positions that are not listed into a bitmap of those that are. Returns whether it names m of them.
    __device__ __forceinline__ bool spread_complement(Stage stage, const ibp_position_form &form, uint32_t start, uint32_t low_start) const
    {
        const Stage bitmap = bitmap_of(stage, columns);
        uint32_t *const queue = queue_of(stage);
        for (uint32_t i = lane_id(); i <= bitmap.last_word; i += kWarp)
            bitmap.words[i] = 32u * i < columns ? low_bits(~0u, ibp_min_u32(columns - 32u * i, 32u)) : 0u;
        __syncwarp();
        uint32_t found = 0;
        bool good = true;
        for (uint32_t i = 0; i < form.upper_bits; i += kWarp) {
            const uint32_t word = bits_until(stage, start + i, start + form.upper_bits);
            const bool mine = word >> lane_id() & 1u;
            const uint32_t rank = found + ibp_popcount(word & lanes_below());
            const uint32_t position = mine ? list_position(stage, form, low_start, i + lane_id(), rank) : 0u;
            if (mine) queue[rank % kQueue] = position;
            __syncwarp();
            if (mine) good = good && position < columns && (rank == 0u || position > queue[(rank - 1u) % kQueue]);
            if (mine && position < columns) atomicAnd(bitmap.words + position / 32u, ~(1u << position % 32u));
            found += ibp_popcount(word);
            __syncwarp();
        }
        __syncwarp();
        return __all_sync(kAllLanes, good) && found == form.num_positions;
    }

    // The values of up to 32 listed elements, one a lane.
    __device__ __forceinline__ T listed_value(Stage stage, const ValueParts &parts, uint32_t j, bool active,
                                              uint32_t (&before)[IBP_MAX_PLANES]) const
    {
        uint32_t at = j, i = 0, raw = parts.digits[0];
        bool open = active;
        T symbol = 0;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes) continue;
            const uint32_t digit = static_cast<uint32_t>(low_bits(stage.bits_at(parts.digits[p] + at * planes.digit_bits[p]), planes.digit_bits[p]));
            i += digit;
            const bool escaped = open && digit == escape_of(p);
            if (open && !escaped) symbol = entry(0, i);
            open = escaped;
            const uint32_t escapes = __ballot_sync(kAllLanes, escaped);
            at = before[p] + ibp_popcount(escapes & lanes_below());
            before[p] += ibp_popcount(escapes);
            raw = parts.digits[p + 1];
        }
        if (open) symbol = field(stage, raw + at * symbol_bits, symbol_bits);
        return join(symbol, field(stage, parts.residuals + j * planes.residual_bits, planes.residual_bits));
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
            if (first + b >= window.low && first + b < window.high) dst[b] = static_cast<uint8_t>(static_cast<uint64_t>(element) >> (8u * b));
    }

    __device__ __forceinline__ void fill_default(const Window &window) const
    {
        if (planes.default_value == 0u) {
            zero_bytes(window.dst, window.high - window.low);
        } else {
            const bool vectors = (reinterpret_cast<uintptr_t>(window.dst) - window.low) % 16u == 0;
            uint32_t words[4] = {};
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) put_element(words, e, static_cast<T>(planes.default_value));
            for (uint32_t w = 4u * lane_id(); 4u * w < cb.row_bytes; w += 4u * kWarp) store_words(window, vectors, w, words);
        }
        __syncwarp(); // before single elements are stored over it
    }

    __device__ __forceinline__ bool decode_listed(Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        const uint32_t header_bytes = ibp_header_bytes(columns), end = start_bit + 8u * coded_bytes;
        const uint32_t header = low_bits(stage.bits_at(start_bit), 8u * header_bytes);
        const uint32_t k = header & (ibp_closed_bit(columns) - 1u);
        const bool closed = (header & ibp_closed_bit(columns)) != 0u;
        if (k > columns || coded_bytes < header_bytes) return false;
        fill_default(window);
        const uint32_t start = start_bit + 8u * header_bytes;
        if (k == 0) return start == end;
        ibp_position_form form = ibp_choose_position_form(k, columns);
        const uint32_t low_start = start + to_byte(form.upper_bits), values = start + 8u * form.num_bytes;
        if (values > end) return false;
        ValueParts parts{};
        if (!closed) parts = find_parts(stage, values, k);
        if ((closed ? values : parts.end) != end) return false;
        Stage upper = stage;
        uint32_t upper_start = start;
        if (form.is_complement) {
            if (!spread_complement(stage, form, start, low_start)) return false;
            upper = bitmap_of(stage, columns);
            upper_start = 0;
            form.is_list = 0;
            form.upper_bits = columns;
        }
        return store_listed(stage, upper, form, upper_start, low_start, parts, k, closed, window);
    }

    // Walks the upper bits 32 at a time; the positions found wait in a queue until there are 32 of them.
    __device__ __forceinline__ bool store_listed(Stage stage, Stage upper, const ibp_position_form &form, uint32_t upper_start,
                                                 uint32_t low_start, const ValueParts &parts, uint32_t k, bool closed, const Window &window) const
    {
        uint32_t *const queue = queue_of(stage);
        uint32_t found = 0, stored = 0, before[IBP_MAX_PLANES] = {};
        bool good = true;
        for (uint32_t i = 0; i < form.upper_bits; i += kWarp) {
            const uint32_t word = bits_until(upper, upper_start + i, upper_start + form.upper_bits);
            if (word >> lane_id() & 1u) {
                const uint32_t bit = i + lane_id(), rank = found + ibp_popcount(word & lanes_below());
                queue[rank % kQueue] = form.is_list ? list_position(stage, form, low_start, bit, rank) : bit;
            }
            found += ibp_popcount(word);
            __syncwarp();
            if (found > k) return false;
            while (stored < found && (found - stored >= kWarp || i + kWarp >= form.upper_bits)) {
                const uint32_t j = stored + lane_id();
                const bool active = j < found;
                const uint32_t column = active ? queue[j % kQueue] : 0u;
                const T element = closed ? static_cast<T>(planes.closed_value) : listed_value(stage, parts, j, active, before);
                good = good && column < columns && (!active || j == 0u || column > queue[(j - 1u) % kQueue]);
                if (active && column < columns) store_element(window, column, element);
                stored = ibp_min_u32(stored + kWarp, found);
                __syncwarp();
            }
        }
        return __all_sync(kAllLanes, good) && found == k;
    }

    __device__ __forceinline__ bool decode(Stage stage, uint32_t start_bit, uint32_t coded_bytes, const Window &window) const
    {
        return LISTED ? decode_listed(stage, start_bit, coded_bytes, window) : decode_dense(stage, start_bit, coded_bytes, window);
    }

    // ---- encoding: one element a lane ----

    static __device__ __forceinline__ T load_element(const uint8_t *row, uint32_t valid, uint32_t column)
    {
        const uint32_t first = column * static_cast<uint32_t>(sizeof(T));
        if (aligned(row, sizeof(T)) && first + sizeof(T) <= valid) return *reinterpret_cast<const T *>(row + first);
        uint64_t element = 0;
        for (uint32_t b = 0; b < sizeof(T); b++)
            if (first + b < valid) element |= static_cast<uint64_t>(row[first + b]) << (8u * b);
        return static_cast<T>(element);
    }

    // What a lane knows of its element.
    struct Coded {
        T symbol, residual;
        uint32_t rank;  // entry of the symbol; num_entries: none
        uint32_t column;
        bool listed;    // it is coded: in a dense row every element is
        bool closed;
    };
    __device__ __forceinline__ Coded code_element(const uint8_t *row, uint32_t valid, uint32_t base) const
    {
        Coded coded{};
        coded.column = base + lane_id();
        const T element = load_element(row, valid, coded.column);
        coded.listed = coded.column < columns && (!LISTED || element != static_cast<T>(planes.default_value));
        coded.closed = element == static_cast<T>(planes.closed_value);
        split(element, coded.symbol, coded.residual);
        if (coded.listed)
            while (coded.rank < planes.num_entries && entry(coded.column, coded.rank) != coded.symbol) coded.rank++;
        return coded;
    }

    struct Census {
        uint32_t reaching[IBP_MAX_PLANES + 1];
        bool closed;
    };
    __device__ __forceinline__ Census take_census(const uint8_t *row, uint32_t valid) const
    {
        Census census = {{}, LISTED};
        for (uint32_t base = 0; base < columns; base += kWarp) {
            const Coded coded = code_element(row, valid, base);
            census.closed = __all_sync(kAllLanes, !coded.listed || coded.closed) && census.closed;
            uint32_t first = 0;
#pragma unroll
            for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
                if (p > planes.num_planes) continue;
                census.reaching[p] += ibp_popcount(__ballot_sync(kAllLanes, coded.listed && coded.rank >= first));
                if (p < planes.num_planes) first += escape_of(p);
            }
        }
        census.closed = census.closed && census.reaching[0] > 0;
        return census;
    }

    __device__ __forceinline__ uint32_t bits_before_values(uint32_t k) const
    {
        if (!LISTED) return 0;
        return 8u * (ibp_header_bytes(columns) + (k ? ibp_choose_position_form(k, columns).num_bytes : 0u));
    }
    __device__ __forceinline__ uint32_t bits_of(const Census &census) const
    {
        const uint32_t start = bits_before_values(census.reaching[0]);
        return census.closed || census.reaching[0] == 0 ? start : lay_out(start, census.reaching).end;
    }
    __device__ __forceinline__ uint32_t measure(const uint8_t *row, uint32_t valid) const { return bits_of(take_census(row, valid)); }

    static __device__ __forceinline__ void or_field(Stage stage, uint32_t position, T bits)
    {
        stage.or_bits(position, static_cast<uint32_t>(bits));
        if (sizeof(T) == 8) stage.or_bits(position + 32u, static_cast<uint32_t>(static_cast<uint64_t>(bits) >> 32));
    }

    __device__ __forceinline__ void write_values(const Coded &coded, const ValueParts &parts, Stage stage, uint32_t &written,
                                                 uint32_t (&before)[IBP_MAX_PLANES]) const
    {
        const uint32_t listed = __ballot_sync(kAllLanes, coded.listed);
        uint32_t at = written + ibp_popcount(listed & lanes_below()), rank = coded.rank, raw = parts.digits[0];
        written += ibp_popcount(listed);
        if (coded.listed) or_field(stage, parts.residuals + at * planes.residual_bits, coded.residual);
        bool open = coded.listed;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= planes.num_planes) continue;
            const uint32_t digit = ibp_min_u32(rank, escape_of(p));
            if (open) stage.or_bits(parts.digits[p] + at * planes.digit_bits[p], digit);
            open = open && digit == escape_of(p);
            rank -= digit;
            const uint32_t escapes = __ballot_sync(kAllLanes, open);
            at = before[p] + ibp_popcount(escapes & lanes_below());
            before[p] += ibp_popcount(escapes);
            raw = parts.digits[p + 1];
        }
        if (open) or_field(stage, raw + at * symbol_bits, coded.symbol);
    }

    __device__ __forceinline__ void write_position(const Coded &coded, const ibp_position_form &form, uint32_t start, Stage stage,
                                                   uint32_t &written) const
    {
        const bool named = coded.column < columns && coded.listed != (form.is_complement != 0u);
        const uint32_t names = __ballot_sync(kAllLanes, named);
        const uint32_t rank = written + ibp_popcount(names & lanes_below());
        written += ibp_popcount(names);
        if (!named) return;
        stage.or_bits(start + (form.is_list ? (coded.column >> form.low_bits) + rank : coded.column), 1u);
        if (form.is_list) stage.or_bits(start + to_byte(form.upper_bits) + rank * form.low_bits, low_bits(coded.column, form.low_bits));
    }

    // Codes a row into a stage that is all zeros from start_bit, a whole byte, on. Returns the bits that it took.
    __device__ __forceinline__ uint32_t encode(const uint8_t *row, uint32_t valid, Stage stage, uint32_t start_bit) const
    {
        const Census census = take_census(row, valid);
        const uint32_t k = census.reaching[0], start = start_bit + 8u * ibp_header_bytes(columns);
        if (LISTED && lane_id() == 0) stage.or_bits(start_bit, k | (census.closed ? ibp_closed_bit(columns) : 0u));
        if (LISTED && k == 0) return start - start_bit;
        const ibp_position_form form = ibp_choose_position_form(k, columns);
        const ValueParts parts = lay_out(start_bit + bits_before_values(k), census.reaching);
        uint32_t positions = 0, values = 0, before[IBP_MAX_PLANES] = {};
        for (uint32_t base = 0; base < columns; base += kWarp) {
            const Coded coded = code_element(row, valid, base);
            if (LISTED) write_position(coded, form, start, stage, positions);
            if (!census.closed) write_values(coded, parts, stage, values, before);
        }
        return bits_of(census);
    }
};

} // namespace ibp

#endif
