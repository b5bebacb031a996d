// encode_fast.cuh - dense rows of scheme planes with one plane of digits of four bits over consecutive symbols of up to
// a byte (FORMAT.md section 6): what level="fast" makes.
//
// A lane takes 16 bytes a step. A digit is a subtraction and a comparison, four symbols at once; residuals and digits
// of a lane are whole bytes at places that are known. Escapes are rare: a vote finds them, and only then are they
// counted.
// Most tables are of floats whose symbol is an exponent of 8 bits, with rows of whole vectors: PlainFastEncoder.
#ifndef IBP_ENCODE_FAST_CUH
#define IBP_ENCODE_FAST_CUH

#include "byte_symbols.cuh"

namespace ibp {

template <typename T, uint32_t LANES> struct FastEncoder : ByteSymbols<T> {
    using Symbols = ByteSymbols<T>;
    using Group = EncodeGroup<LANES>;
    using G = Group;
    using Symbols::columns, Symbols::kPerLane, Symbols::kWords, Symbols::residual_bits, Symbols::row_bytes,
        Symbols::symbol_bits;
    static constexpr uint32_t kBlocks = 1;
    static constexpr bool kFillsStage = false;
    static constexpr uint32_t kSteps = 2, kStepBytes = kVector * LANES, kEscape = 15, kDigitBits = 4;
    static constexpr uint32_t kHigh = 0x80808080u, kBytes = 0x01010101u;
    const uint32_t first_symbol, of_symbol; // in each byte

    static __host__ __device__ __forceinline__ uint32_t table_bytes(const ibp_codebook &) { return 0; }
    // The list of symbols that escape.
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 31u) / 16u * 16u;
    }
    __device__ __forceinline__ FastEncoder(const ibp_codebook &cb, uint32_t *)
        : Symbols(cb), first_symbol((static_cast<uint32_t>(cb.planes.first_symbol) & 0xffu) * kBytes),
          of_symbol(low_bits(0xffu, symbol_bits) * kBytes)
    {
    }
    __device__ __forceinline__ void select(const ibp_codebook &, uint32_t) {}

    // The digits of four symbols, a byte each. escaped: the highest bit of a byte is set where its symbol escapes.
    // BYTES: symbols have 8 bits.
    template <bool BYTES = false>
    __device__ __forceinline__ uint32_t digits_of(uint32_t symbols, uint32_t &escaped) const
    {
        // How far each symbol is behind the first one: a subtraction without borrows from byte to byte.
        const uint32_t difference = (symbols | kHigh) - (first_symbol & ~kHigh);
        uint32_t ahead = difference ^ ((symbols ^ ~first_symbol) & kHigh);
        if (!BYTES) ahead &= of_symbol;
        escaped = (((ahead & ~kHigh) + (0x80u - kEscape) * kBytes) | ahead) & kHigh;
        return (ahead | (escaped >> 7u) * kEscape) & kEscape * kBytes;
    }

    // A lane's elements of one step. column: past the last one where it has none. differ: as split says.
    struct Lane {
        uint32_t column, num, symbols[kWords], escaped[kWords], residuals[4], digits, differ;
    };
    __device__ __forceinline__ Lane look_at(uint32_t (&word)[4], uint32_t first) const
    {
        Lane lane{};
        lane.column = first / static_cast<uint32_t>(sizeof(T));
        if (lane.column >= columns) return lane;
        lane.num = ibp_min_u32(columns - lane.column, kPerLane);
        if (lane.num < kPerLane) this->fill_up(word, lane.num);
        lane.differ = this->split(word, lane.symbols, lane.residuals);
#pragma unroll
        for (uint32_t w = 0; w < kWords; w++) {
            const uint32_t digits = digits_of(lane.symbols[w], lane.escaped[w]);
            lane.digits |= permute_bytes(digits | digits >> 4, 0, 0x4420) << 16u * w;
        }
        if (lane.num < kPerLane) {
            lane.digits = low_bits(lane.digits, kDigitBits * lane.num);
#pragma unroll
            for (uint32_t w = 0; w < kWords; w++)
                lane.escaped[w] = low_bits(lane.escaped[w], 8u * (lane.num > 4u * w ? lane.num - 4u * w : 0u));
        }
        return lane;
    }
    static __device__ __forceinline__ uint32_t count_escaped(const Lane &lane)
    {
        uint32_t count = 0;
#pragma unroll
        for (uint32_t w = 0; w < kWords; w++) count += ibp_popcount(lane.escaped[w]);
        return count;
    }

    __device__ __forceinline__ uint32_t measure(const PlainRow &row) const
    {
        uint32_t sums[2] = {0, 0};
        for (uint32_t first = kVector * G::lane(); first < row_bytes; first += kStepBytes) {
            uint32_t word[4];
            row.load(first, word);
            const Lane lane = look_at(word, first);
            sums[0] += count_escaped(lane);
            sums[1] |= lane.differ != 0u;
        }
        G::sum(sums);
        if (sums[1] != 0u) return kNoCodedForm;
        return to_byte(columns * residual_bits) + to_byte(columns * kDigitBits) + to_byte(sums[0] * symbol_bits);
    }

    __device__ __forceinline__ void put(const Lane &lane, uint8_t *residuals, uint8_t *digits) const
    {
        using Digits = std::conditional_t<kPerLane == 8, uint32_t, uint16_t>;
        put_bytes(residuals + lane.column * residual_bits / 8u, lane.residuals, (lane.num * residual_bits + 7u) / 8u);
        uint8_t *const to = digits + lane.column / 2u;
        if (lane.num == kPerLane && aligned(to, sizeof(Digits))) {
            *reinterpret_cast<Digits *>(to) = static_cast<Digits>(lane.digits);
            return;
        }
        for (uint32_t i = 0; i < (lane.num + 1u) / 2u; i++) to[i] = static_cast<uint8_t>(lane.digits >> 8u * i);
    }
    // Appends the symbols of a step that escape to a list of num_listed symbols. Returns how many it has then.
    static __device__ __forceinline__ uint32_t list_escaped(const Lane (&lanes)[kSteps], uint8_t *list,
                                                            uint32_t num_listed)
    {
        const uint32_t counts[1] = {count_escaped(lanes[0]) | count_escaped(lanes[1]) << 16};
        uint32_t before[1], total[1];
        G::scan(counts, before, total);
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            uint8_t *to = list + num_listed + (before[0] >> 16u * s & 0xffffu);
#pragma unroll
            for (uint32_t w = 0; w < kWords; w++) Symbols::append(to, lanes[s].symbols[w], lanes[s].escaped[w]);
            num_listed += total[0] >> 16u * s & 0xffffu;
        }
        return num_listed;
    }

    // Codes a row into a stage that is all zeros from start_bit, a whole byte, on. Returns the bytes up to its end.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        uint8_t *const bytes = reinterpret_cast<uint8_t *>(stage.words), *const list =
                                                                             bytes + bit_stage_bytes(row_bytes);
        const uint32_t digits_at = start_bit + to_byte(columns * residual_bits),
                       symbols_at = digits_at + to_byte(columns * kDigitBits);
        if (symbols_at > 8u * most_bytes) return symbols_at / 8u;
        uint32_t num_listed = 0, differ = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            uint32_t word[kSteps][4], escaped = 0;
            Lane lanes[kSteps];
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) row.load(base + s * kStepBytes + kVector * G::lane(), word[s]);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                lanes[s] = look_at(word[s], base + s * kStepBytes + kVector * G::lane());
                if (lanes[s].num != 0u) put(lanes[s], bytes + start_bit / 8u, bytes + digits_at / 8u);
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) escaped |= lanes[s].escaped[w];
                differ |= lanes[s].differ;
            }
            if (G::any(escaped != 0u)) num_listed = list_escaped(lanes, list, num_listed);
        }
        if (this->invariant_bits != 0u && G::any(differ != 0u)) return kNoCodedForm;
        const uint32_t end = symbols_at + to_byte(num_listed * symbol_bits);
        if (num_listed == 0u || end > 8u * most_bytes) return end / 8u;
        G::sync(); // the list is there
        for (uint32_t i = G::lane(); i < num_listed; i += LANES)
            stage.or_bits(symbols_at + i * symbol_bits, static_cast<uint32_t>(list[i]));
        return end / 8u;
    }
};

// Of elements that are rotated and have symbols of 8 bits and no invariant bits, in rows of whole vectors.
template <typename T, uint32_t LANES> struct PlainFastEncoder : FastEncoder<T, LANES> {
    using Base = FastEncoder<T, LANES>;
    using Group = typename Base::Group;
    using G = Group;
    using Base::columns, Base::kPerLane, Base::kSteps, Base::kStepBytes, Base::kWords, Base::row_bytes;
    static constexpr bool kFillsStage = true;
    static constexpr uint32_t kResidualBytes = sizeof(T) - 1u; // of an element

    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }
    using Base::Base;

    static __device__ __forceinline__ void split(const uint32_t (&word)[4], uint32_t (&symbols)[kWords],
                                                 uint32_t (&residuals)[3])
    {
        if constexpr (sizeof(T) == 2) {
#pragma unroll
            for (uint32_t w = 0; w < 2u; w++) {
                // The carry from one element to the next is a sign where no sign belongs, and is left out with it.
                const uint32_t low = word[2 * w] << 1, high = word[2 * w + 1] << 1,
                               signs = replicate_signs<0xfdb9>(word[2 * w], word[2 * w + 1]);
                symbols[w] = permute_bytes(low, high, 0x7531);
                residuals[w] = select_bits(0x01010101u, signs, permute_bytes(low, high, 0x6420));
            }
        } else {
            uint32_t rotated[4];
#pragma unroll
            for (uint32_t i = 0; i < 4u; i++) rotated[i] = __funnelshift_l(word[i], word[i], 1);
            symbols[0] = permute_bytes(permute_bytes(rotated[0], rotated[1], 0x73),
                                       permute_bytes(rotated[2], rotated[3], 0x73), 0x5410);
            residuals[0] = permute_bytes(rotated[0], rotated[1], 0x4210);
            residuals[1] = permute_bytes(rotated[1], rotated[2], 0x5421);
            residuals[2] = permute_bytes(rotated[2], rotated[3], 0x6542);
        }
    }
    static __device__ __forceinline__ void put(const uint32_t (&residuals)[3], uint32_t digits, uint8_t *to_residuals,
                                               uint8_t *to_digits)
    {
        if constexpr (sizeof(T) == 2) {
            *reinterpret_cast<uint2 *>(to_residuals) = make_uint2(residuals[0], residuals[1]);
            *reinterpret_cast<uint32_t *>(to_digits) = digits;
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 3u; i++) reinterpret_cast<uint32_t *>(to_residuals)[i] = residuals[i];
            *reinterpret_cast<uint16_t *>(to_digits) = static_cast<uint16_t>(digits);
        }
    }
    // Puts the symbols of a step that escape at `to` if there is room for all of them. Returns how many escape.
    static __device__ __noinline__ uint32_t append_escaped(uint4 symbols, uint4 escaped, uint8_t *to, uint32_t room)
    {
        static_assert(kSteps * kWords <= 4u, "a vector holds them");
        const uint32_t of_symbols[4] = {symbols.x, symbols.y, symbols.z, symbols.w},
                       of_escaped[4] = {escaped.x, escaped.y, escaped.z, escaped.w};
        uint32_t counts[1] = {}, before[1], total[1];
#pragma unroll
        for (uint32_t i = 0; i < kSteps * kWords; i++) counts[0] += ibp_popcount(of_escaped[i]) << 16u * (i / kWords);
        G::scan(counts, before, total);
        const uint32_t of_first = total[0] & 0xffffu, count = of_first + (total[0] >> 16);
        if (count > room) return count;
#pragma unroll
        for (uint32_t s = 0; s < kSteps; s++) {
            uint8_t *at = to + (s == 0u ? before[0] & 0xffffu : of_first + (before[0] >> 16));
#pragma unroll
            for (uint32_t w = 0; w < kWords; w++)
                Base::append(at, of_symbols[s * kWords + w], of_escaped[s * kWords + w]);
        }
        return count;
    }

    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        uint8_t *const residuals = reinterpret_cast<uint8_t *>(stage.words), *const digits =
                                                                                 residuals + columns * kResidualBytes;
        uint32_t end = columns * kResidualBytes + columns / 2u; // bytes
        if (end > most_bytes || start_bit != 0u) return kNoCodedForm;
        const bool is_whole = row.valid >= row_bytes && aligned(row.bytes, kVector);
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            const uint32_t first = base + kVector * G::lane();
            uint32_t word[kSteps][4] = {}, symbols[4] = {}, escaped[4] = {}, any = 0;
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++)
                if (first + s * kStepBytes < row_bytes) row.load(first + s * kStepBytes, is_whole, word[s]);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                if (first + s * kStepBytes >= row_bytes) continue;
                uint32_t of_lane[3], of_step[kWords], found[kWords], packed = 0;
                split(word[s], of_step, of_lane);
#pragma unroll
                for (uint32_t w = 0; w < kWords; w++) {
                    found[w] = this->template digits_of<true>(of_step[w], escaped[s * kWords + w]);
                    found[w] |= found[w] >> 4;
                    symbols[s * kWords + w] = of_step[w];
                    any |= escaped[s * kWords + w];
                }
                packed = permute_bytes(found[0], found[kWords - 1u], 0x6420);
                const uint32_t column = (first + s * kStepBytes) / static_cast<uint32_t>(sizeof(T));
                put(of_lane, packed, residuals + column * kResidualBytes, digits + column / 2u);
            }
            if (G::any(any != 0u))
                end += append_escaped(make_uint4(symbols[0], symbols[1], symbols[2], symbols[3]),
                                      make_uint4(escaped[0], escaped[1], escaped[2], escaped[3]), residuals + end,
                                      most_bytes - ibp_min_u32(end, most_bytes));
        }
        return end;
    }
};

} // namespace ibp

#endif
