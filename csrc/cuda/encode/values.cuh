// values.cuh - encodes the values of consecutive elements of scheme planes (FORMAT.md section 6). The block must have a
// table of the codes of all symbols, or of the ranks of all symbols in each column (census.cuh). planes_book.cuh shows
// the parts of the values, and explains the terms of scheme planes. A closed row has no values, so this file has no
// part in it.
//
// 1. In each step, a lane loads one or two octets, which are eight elements each, and writes their residuals.
// 2. It looks up the *path* of each symbol. A path is a word with all that planes 0 and 1 need: the symbol's digits in
//    these planes, whether the symbol reaches plane 1, and whether it goes on to the *list* of symbols that have no
//    entry in planes 0 and 1. A lane collects the digits of a plane in a register; one funnel shift pushes a digit into
//    this register. The digits of plane 0 are in low bits of the paths, and the first element's digit is pushed first.
//    The digits of plane 1 are in the highest bits, and the last element's digit is pushed first.
// 3. One prefix sum says where the lane's digits of plane 1 go, and where its entries of the list go.
// 4. Planes 2 and 3 and the raw symbols are encoded from the list (put_list).
#ifndef IBP_ENCODE_VALUES_CUH
#define IBP_ENCODE_VALUES_CUH

#include "census.cuh"

#include <type_traits>

namespace ibp {

// An encoder of values as described above. COLUMNS: every column has its own entries, and paths are looked up by the
// ranks of symbols. Symbols must then have at most eight bits, which has_values() in encode.cu ensures.
template <typename T, bool LISTED, uint32_t THREADS, uint32_t FIELDS, bool COLUMNS = false>
struct ValuesEncoder : PlanesCensus<T, LISTED, THREADS, FIELDS, false> {
    static_assert(sizeof(T) <= 4 && (!COLUMNS || (sizeof(T) >= 2 && !LISTED)),
                  "a word must hold whole elements; entries for each column require dense rows of two or four bytes");
    using Base = PlanesCensus<T, LISTED, THREADS, FIELDS, false>;
    using Book = typename Base::Book;
    using Group = typename Base::Group;
    using G = Group;
    using Base::codes, Base::own_codes, Base::columns, Base::kBits, Base::kPerWord, Base::planes, Base::ranks,
        Base::symbol_bits;
    // The kernel asks for two blocks on an SM. An SM has 65,536 registers, so a thread of a block of kMostEncodeThreads
    // threads then has at most 64.
    static constexpr uint32_t kBlocks = 2;
    static constexpr bool kFillsStage = false;
    // kOctets: number of octets that a lane takes in each step: two, or one if rows are listed or elements have four
    // bytes. A lane keeps the words of its octets in registers.
    static constexpr uint32_t kOctet = 8, kOctets = LISTED || sizeof(T) == 4 ? 1 : 2, kOfLane = kOctet * kOctets;
    static constexpr uint32_t kWords = kOctet * sizeof(T) / 4u;           // number of words of an octet
    using Symbol = std::conditional_t<sizeof(T) == 1, uint8_t, uint16_t>; // an entry of the list

    // The bits of a path:
    //
    //     bits 0 to 15    the symbol's entry of the list
    //     bit  16         kReaches: the symbol reaches plane 1
    //     bit  21         kGoesOn: the symbol goes on to the list
    //     highest bits    the digit of plane 1
    //
    // Bits 0 to 15 also hold the digit of plane 0, at bit kDigitAt, and the symbol or its rank, at bit kKeyAt:
    //
    //     elements of two or four bytes    bits 0 to 3: the digit; bits 4 to 15: the symbol
    //     elements of one byte             bits 0 to 7: the symbol; bits 8 to 11: the digit. An entry of the list has
    //                                      only one byte, the symbol
    //     COLUMNS                          bits 0 to 3: the digit; bits 8 to 15: the rank. Once the digit has been
    //                                      used, the symbol is written to bits 0 to 7
    static constexpr uint32_t kReaches = 1u << 16, kGoesOn = 1u << 21,
                              kKeyAt = COLUMNS          ? 8
                                       : sizeof(T) == 1 ? 0
                                                        : 4,
                              kDigitAt = sizeof(T) == 1 ? 8 : 0;
    static_assert(kMostCodeBits + 4u <= 16u && kMostRankEntries <= 255u, "two bytes must hold an entry of the list");
    const uint32_t *paths; // the paths of all symbols, or of all ranks; they follow the tables of Base

    // ---- the codebook ----

    static __host__ __device__ __forceinline__ uint32_t table_bytes(const ibp_codebook &cb)
    {
        return Base::table_bytes(cb) + Base::codes_bytes(cb);
    }
    __device__ __forceinline__ ValuesEncoder(const ibp_codebook &cb, uint32_t *table)
        : Base(cb, table), paths(table + Base::table_bytes(cb) / 4u)
    {
        uint32_t *const to = table + Base::table_bytes(cb) / 4u;
        // `table` begins with the codes, because only other encoders put a hash table before them. If COLUMNS, codes
        // are indexed by rank. Otherwise the low bits of the index are a symbol, and the high bits are a cluster.
        for (uint32_t i = threadIdx.x; i < Base::num_codes(cb); i += blockDim.x)
            to[i] = path_of(COLUMNS ? i : low_bits(i, symbol_bits), table[i]);
        __syncthreads();
    }
    // Returns the path of a symbol. key: the symbol or its rank. code: its code (census.cuh).
    __device__ __forceinline__ uint32_t path_of(uint32_t key, uint32_t code) const
    {
        const bool has_first = planes.num_planes > 0u, has_second = planes.num_planes > 1u,
                   reaches = !has_first || (code & 1u) != 0u,
                   goes_on = reaches && (!has_second || (code & 1u << 8) != 0u);
        const uint32_t first = has_first ? code >> 4 & 15u : 0u,
                       second = has_second ? (code >> 12 & 15u) << (32u - this->width_of(1)) : 0u;
        // Symbols of no bits can only go on if there are no planes. Then nothing is stored of them, so the list leaves
        // them out.
        return first << kDigitAt | key << kKeyAt | (reaches ? kReaches : 0u) |
               (goes_on && symbol_bits != 0u ? kGoesOn : 0u) | second;
    }

    // ---- the elements of a lane ----

    // Returns the path of element e of an octet. column: the element's column. If it lies past the last column, the
    // result is unspecified.
    __device__ __forceinline__ uint32_t path_in(uint32_t column, const uint32_t (&words)[kWords], uint32_t e) const
    {
        const uint32_t place =
            Base::place_of_rank(ibp_min_u32(column, columns - 1u), this->symbol_at(words, e, 0), symbol_bits);
        return paths[ranks[place]];
    }

    // first, second: the digits of an octet in planes 0 and 1, packed from bit 0 in the order of the elements. counts:
    // the sum of bits 16 to 23 of the octet's paths. Bits 0 to 4 of this sum are the number of elements that reach
    // plane 1, and the bits above are the number of elements that go on to the list.
    struct Octet {
        uint32_t first, second, counts;
    };
    // Looks up the paths of an octet's first num elements, and collects their digits. first: the index of the first
    // element, which is also its column if COLUMNS is true. path: receives the paths of these elements, followed by
    // zeros. Afterwards the lowest 16 bits of each path are the symbol's entry of the list.
    __device__ __forceinline__ Octet push(const uint32_t (&words)[kWords], uint32_t first, uint32_t num,
                                          uint32_t (&path)[kOctet]) const
    {
#pragma unroll
        for (uint32_t e = 0; e < kOctet; e++)
            path[e] = COLUMNS ? path_in(first + e, words, e) : this->entry_for(paths, words, e);
        if (num < kOctet)
#pragma unroll
            for (uint32_t e = 0; e < kOctet; e++) path[e] = e < num ? path[e] : 0u;
        const uint32_t width = this->width_of(0), next_width = this->width_of(1);
        Octet octet{};
#pragma unroll
        for (uint32_t e = 0; e < kOctet; e++) {
            octet.first = __funnelshift_r(octet.first, path[e] >> kDigitAt, width);
            octet.counts = add_third_byte(path[e], octet.counts);
        }
        octet.first >>= (32u - kOctet * width) % 32u; // digits are zeros if the width is 0
#pragma unroll
        for (uint32_t e = kOctet; e-- > 0;)
            if (path[e] & kReaches) octet.second = __funnelshift_l(path[e], octet.second, next_width);
        if (COLUMNS) // turns paths into entries of the list
#pragma unroll
            for (uint32_t e = 0; e < kOctet; e++)
                path[e] = select_bits(0xffu, low_bits(this->symbol_at(words, e, 0), symbol_bits), path[e]);
        return octet;
    }
    static __device__ __forceinline__ uint32_t add_third_byte(uint32_t path, uint32_t sum)
    {
#ifdef __CUDACC__
        return __dp4a(path, 0x00010000u, sum);
#else
        return sum + (path >> 16 & 0xffu);
#endif
    }

    // ---- residuals ----

    // Writes the residuals of a lane's first `held` elements to a stage, beginning at bit `position`, which must be the
    // first bit of a byte. The bits after these residuals stay zeros. The stage must have room for the residuals.
    __device__ __forceinline__ void put_residuals(const BitStage &stage, uint32_t position,
                                                  const uint32_t (&words)[kOctets][kWords], uint32_t held) const
    {
        const uint32_t r = planes.residual_bits;
        if (r == 0u || held == 0u) return;
        if constexpr (sizeof(T) == 4) {
            const uint32_t(&w)[8] = words[0];
            if (r == 24u && held == kOfLane)
                put_fields<24>(stage, position, w);
            else if (r == 23u && held == kOfLane)
                put_fields<23>(stage, position, w);
            else
                put_pairs(stage, position, w, held, r);
        } else if (r == kBits / 2u) {
            put_halves(stage, position, words, held);
        } else {
#pragma unroll
            for (uint32_t o = 0; o < kOctets; o++)
                put_packed(stage, position + o * kOctet * r, pack_fields(words[o], r),
                           held - ibp_min_u32(held, o * kOctet), r);
        }
    }
    // Does what put_residuals does, for residuals that are the lower halves of their elements.
    static __device__ __forceinline__ void put_halves(const BitStage &stage, uint32_t position,
                                                      const uint32_t (&words)[kOctets][kWords], uint32_t held)
    {
        constexpr uint32_t kRun = kOfLane * sizeof(T) / 8u;
        uint32_t run[kRun];
#pragma unroll
        for (uint32_t i = 0; i < kRun; i++) {
            uint32_t low = words[2u * i / kWords][2u * i % kWords],
                     high = words[2u * i / kWords][(2u * i + 1u) % kWords];
            if (sizeof(T) == 1)
                low = select_bits(0x0f0f0f0fu, low, low >> 4), high = select_bits(0x0f0f0f0fu, high, high >> 4);
            run[i] = permute_bytes(low, high, 0x6420);
        }
        uint32_t *const to = stage.words + position / 32u;
        if (held < kOfLane) { // clears the bits after the residuals
            const uint32_t num_bits = held * kBits / 2u;
#pragma unroll
            for (uint32_t i = 0; i < kRun; i++) run[i] = low_bits(run[i], num_bits - ibp_min_u32(num_bits, 32u * i));
            stage.or_words<kLikely>(position, run);
        } else if (position % (32u * kRun) != 0u)
            put_run(stage, position, run);
        else if constexpr (kRun == 4)
            *reinterpret_cast<uint4 *>(to) = make_uint4(run[0], run[1], run[2], run[3]);
        else if constexpr (kRun == 2)
            *reinterpret_cast<uint2 *>(to) = make_uint2(run[0], run[1]);
        else
            *to = run[0];
    }
    // 128 bits: the residuals of an octet.
    struct Packed {
        uint64_t low, high;
    };
    static __device__ __forceinline__ void put_packed(const BitStage &stage, uint32_t position, Packed bits,
                                                      uint32_t num, uint32_t r)
    {
        if (num < kOctet) {
            bits.low = low_bits(bits.low, num * r);
            bits.high = low_bits(bits.high, num * r - ibp_min_u32(num * r, 64u));
        }
        const uint32_t low[2] = {static_cast<uint32_t>(bits.low), static_cast<uint32_t>(bits.low >> 32)};
        stage.or_words<kLikely>(position, low);
        if (sizeof(T) == 2 && r > 8u) stage.or_bits(position + 64u, bits.high);
    }
    // Writes the low R bits of each of eight words, packed. The packed bits take six words, of which the last one may
    // be filled only in part.
    template <uint32_t R>
    static __device__ __forceinline__ void put_fields(const BitStage &stage, uint32_t position,
                                                      const uint32_t (&words)[kWords])
    {
        uint32_t run[6] = {};
#pragma unroll
        for (uint32_t e = 0; e < kOctet; e++) {
            const uint32_t field = words[e % kWords] & ((1u << R) - 1u), at = e * R;
            run[at / 32u] |= field << at % 32u;
            if (at % 32u + R > 32u) run[(at / 32u + 1u) % 6u] |= field >> (32u - at % 32u) % 32u;
        }
        put_run<6, R * kOctet / 32u>(stage, position, run);
    }
    // Writes N words to a stage, beginning at any bit. The first WHOLE words are full. Words in the middle are stored
    // instead of ORed, because no other lane has bits in them.
    template <uint32_t N, uint32_t WHOLE = N>
    static __device__ __forceinline__ void put_run(const BitStage &stage, uint32_t position, const uint32_t (&run)[N])
    {
        uint32_t *const to = stage.at<N>(position);
        const uint32_t shift = position % 32u;
        if (shift == 0u) {
#pragma unroll
            for (uint32_t i = 0; i < WHOLE; i++) to[i] = run[i];
            if (WHOLE < N) atomicOr(to + N - 1u, run[N - 1u]);
            return;
        }
        atomicOr(to, run[0] << shift);
#pragma unroll
        for (uint32_t i = 1; i < N; i++) {
            const uint32_t word = __funnelshift_l(run[i - 1u], run[i], shift);
            if (i < WHOLE)
                to[i] = word;
            else
                atomicOr(to + i, word);
        }
        atomicOr(to + N, run[N - 1u] >> (32u - shift));
    }
    // Returns the low r bits of an octet's elements, packed. To move the upper of two fields of a word, one
    // multiplication subtracts the field at its old position and adds it at the new one.
    static __device__ __forceinline__ Packed pack_fields(const uint32_t (&words)[kWords], uint32_t r)
    {
        const uint32_t ones = low_bits(0xffffffffu >> (32u - kBits), r) * Base::kLowest;
        const uint32_t of_word = r * (4u / sizeof(T)); // number of bits of a word's fields
        uint32_t packed[kWords];
#pragma unroll
        for (uint32_t w = 0; w < kWords; w++) {
            uint32_t fields = words[w] & ones;
            if (sizeof(T) == 1) fields += (fields >> 8 & 0x00ff00ffu) * ((1u << r) - 0x100u);
            packed[w] = fields + (fields >> 16) * ((1u << of_word / 2u) - 0x10000u);
        }
        if (sizeof(T) == 1) return {packed[0] | uint64_t{packed[1 % kWords]} << of_word, 0};
        if (r <= 8u) {
            const uint32_t first = packed[0] | packed[1 % kWords] << of_word,
                           second = packed[2 % kWords] | packed[3 % kWords] << of_word;
            return {first | uint64_t{second} << 4u * r, 0};
        }
        const uint64_t first = packed[0] | uint64_t{packed[1 % kWords]} << of_word,
                       second = packed[2 % kWords] | uint64_t{packed[3 % kWords]} << of_word;
        return {first | (r < 16u ? second << 4u * r : 0u), second >> (64u - 4u * r)};
    }
    // Writes the low r bits of each of the first num words, packed. r is at most 32.
    static __device__ __forceinline__ void put_pairs(const BitStage &stage, uint32_t position,
                                                     const uint32_t (&words)[kWords], uint32_t num, uint32_t r)
    {
#pragma unroll
        for (uint32_t e = 0; e < kOctet; e += 2) {
            if (e >= num) return;
            const uint64_t low = low_bits(words[e % kWords], r),
                           high = e + 1u < num ? low_bits(words[(e + 1u) % kWords], r) : 0u, both = low | high << r;
            const uint32_t bits[2] = {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
            stage.or_words<kLikely>(position + e * r, bits);
        }
    }

    // ---- planes ----

    // Encodes the values of n elements into a stage, beginning at bit `start`, which must be the first bit of a byte.
    // load(first, words): loads a lane's elements and rotates them; words past the last element are unspecified.
    // list: room for n symbols; with LISTED, it may be the memory that load() reads. Returns the bit at which the
    // values end. If the values would go past bit most_bits, the function stops, and returns a number above most_bits.
    template <class Load>
    __device__ __forceinline__ uint32_t put_values(const BitStage &stage, uint32_t n, uint32_t start,
                                                   uint32_t most_bits, Symbol *list, const Load &load) const
    {
        const uint32_t r = planes.residual_bits, width = this->width_of(0), next_width = this->width_of(1),
                       plane0 = start + to_byte(n * r), plane1 = plane0 + to_byte(n * width);
        if (plane1 > most_bits) return plane1;
        uint32_t reached = 0, listed = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += kOfLane * THREADS) {
            const uint32_t first = base + kOfLane * G::rank();
            uint32_t words[kOctets][kWords] = {}, path[kOctets][kOctet];
            Octet octets[kOctets];
            if (first < n) load(first, words);
            const uint32_t held = ibp_min_u32(n - ibp_min_u32(first, n), kOfLane);
            put_residuals(stage, start + first * r, words, held);
#pragma unroll
            for (uint32_t o = 0; o < kOctets; o++)
                octets[o] = push(words[o], first + o * kOctet, held - ibp_min_u32(held, o * kOctet), path[o]);
            const Octet &last = octets[kOctets - 1u];
            put_digits(stage, plane0 + first * width, octets[0].first, last.first, kOctet * width);
            const uint32_t sum = octets[0].counts + (kOctets > 1u ? last.counts : 0u);
            // The low half has the number of elements that reach plane 1, and the high half those that go on to the
            // list.
            const uint32_t counts[1] = {(sum & 31u) | sum >> 5 << 16};
            uint32_t before[1], total[1];
            G::scan(counts, before, total);
            put_digits(stage, plane1 + (reached + (before[0] & 0xffffu)) * next_width, octets[0].second, last.second,
                       (octets[0].counts & 31u) * next_width);
            if (LISTED) G::sync(); // before the list overwrites the elements
            append(list + listed + (before[0] >> 16), path);
            reached += total[0] & 0xffffu, listed += total[0] >> 16;
        }
        G::sync(); // before the list is read
        return put_list(stage, listed, plane1 + to_byte(reached * next_width), most_bits, list);
    }
    // Writes the digits of a lane's one or two octets. first, last: the digits of the first and of the last octet.
    // num_bits: number of bits of the first octet's digits if there are two octets.
    static __device__ __forceinline__ void put_digits(const BitStage &stage, uint32_t position, uint32_t first,
                                                      uint32_t last, uint32_t num_bits)
    {
        if (kOctets == 1u)
            stage.or_bits<kLikely>(position, first);
        else
            stage.or_bits(position, first | static_cast<uint64_t>(last) << num_bits);
    }
    static __device__ __forceinline__ void append(Symbol *to, const uint32_t (&path)[kOctets][kOctet])
    {
#pragma unroll
        for (uint32_t o = 0; o < kOctets; o++)
#pragma unroll
            for (uint32_t e = 0; e < kOctet; e++) {
                const uint32_t goes_on = path[o][e] & kGoesOn;
                if (goes_on != 0u) *to = static_cast<Symbol>(path[o][e]);
                to += goes_on / kGoesOn;
            }
    }

    // Encodes the n symbols of a list: first their digits of planes 2 and 3, beginning at bit `at`, and then, as raw
    // symbols, the symbols that have no entry in these planes either. A lane takes four symbols in each step. Returns
    // what put_values returns.
    __device__ __forceinline__ uint32_t put_list(const BitStage &stage, uint32_t n, uint32_t at, uint32_t most_bits,
                                                 Symbol *list) const
    {
        constexpr uint32_t kFour = 4;
        const uint32_t width = this->width_of(2), next_width = this->width_of(3), plane3 = at + to_byte(n * width);
        if (plane3 > most_bits) return plane3;
        // Bits 0 and 8 of a code's upper half say whether its digits of planes 2 and 3 are escapes. is_raw: the bit of
        // the last plane, which says whether the symbol is raw.
        const bool has_fourth = planes.num_planes > 3u;
        const uint32_t is_raw = has_fourth ? 1u << 8 : 1u;
        uint32_t reached = 0, left = planes.num_planes > 2u ? 0u : n;
#pragma unroll 1
        for (uint32_t base = 0; base < n && planes.num_planes > 2u; base += kFour * THREADS) {
            const uint32_t i = base + kFour * G::rank();
            uint32_t entries[kFour], code[kFour], first = 0, second = 0, escapes = 0;
#pragma unroll
            for (uint32_t e = 0; e < kFour; e++) {
                entries[e] = i + e < n ? list[i + e] : 0u;
                code[e] = i + e < n ? codes[own_codes + (entries[e] >> kKeyAt)] >> 16 : 0u;
            }
#pragma unroll
            for (uint32_t e = kFour; e-- > 0;) {
                first = __funnelshift_l(code[e] << (28u - width), first, width);
                if (code[e] & 1u) second = __funnelshift_l(code[e] << (20u - next_width), second, next_width);
                escapes += code[e] & 0x101u;
            }
            // The low half has the number of escapes of plane 2, and the high half the number of raw symbols.
            const uint32_t counts[1] = {permute_bytes(escapes, 0, has_fourth ? 0x4140 : 0x4040)};
            uint32_t before[1], total[1];
            G::scan(counts, before, total);
            stage.or_bits<kLikely>(at + i * width, first);
            stage.or_bits(plane3 + (reached + (before[0] & 0xffffu)) * next_width, second);
            G::sync(); // before the list is overwritten
            Symbol *to = list + left + (before[0] >> 16);
#pragma unroll
            for (uint32_t e = 0; e < kFour; e++) {
                if ((code[e] & is_raw) == 0u) continue;
                *to = static_cast<Symbol>(entries[e]);
                to += 1;
            }
            reached += total[0] & 0xffffu, left += total[0] >> 16;
        }
        G::sync(); // before the list is read
        const uint32_t symbols = plane3 + to_byte(reached * next_width), end = symbols + to_byte(left * symbol_bits);
        if (end > most_bits) return end;
        for (uint32_t i = G::rank(); i < left; i += THREADS)
            stage.or_bits(symbols + i * symbol_bits,
                          COLUMNS ? uint32_t{list[i]} & 0xffu : static_cast<uint32_t>(list[i]) >> kKeyAt);
        return end;
    }
};

// An encoder of dense rows that have neither constant columns nor invariant bits.
template <typename T, uint32_t THREADS, bool COLUMNS>
struct DenseValuesEncoder : ValuesEncoder<T, false, THREADS, kConsecutive, COLUMNS> {
    using Base = ValuesEncoder<T, false, THREADS, kConsecutive, COLUMNS>;
    using Group = typename Base::Group;
    using G = Group;
    using Base::columns, Base::kWords, Base::row_bytes;
    static constexpr uint32_t kPerVector = kVector / sizeof(T);
    using Symbol = typename Base::Symbol;

    using Base::Base;
    // Returns the size in bytes of a group's scratch, which holds the list.
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        return (cb.row_bytes / static_cast<uint32_t>(sizeof(T) * 16u / sizeof(Symbol)) + 1u) * 16u;
    }

    __device__ __forceinline__ void load(const PlainRow &row, uint32_t first, bool is_whole,
                                         uint32_t (&words)[Base::kOctets][kWords]) const
    {
        constexpr uint32_t kVectors = Base::kOfLane / kPerVector;
        uint32_t vectors[kVectors][4] = {};
#pragma unroll
        for (uint32_t v = 0; v < kVectors; v++) {
            const uint32_t byte = first * static_cast<uint32_t>(sizeof(T)) + v * kVector;
            if (byte < row_bytes) row.load(byte, is_whole, vectors[v]);
        }
#pragma unroll
        for (uint32_t v = 0; v < kVectors; v++) { // after all loads have been issued
            this->rotate(vectors[v]);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) words[(4u * v + i) / kWords][(4u * v + i) % kWords] = vectors[v][i];
        }
    }

    // Encodes a row (encoder.cuh).
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        auto *const list =
            reinterpret_cast<Symbol *>(reinterpret_cast<uint8_t *>(stage.words) + bit_stage_bytes(row_bytes));
        const bool is_whole = row.is_whole(row_bytes);
        const uint32_t end = this->put_values(
            stage, columns, start_bit, 8u * most_bytes, list,
            [&](uint32_t first, uint32_t(&words)[Base::kOctets][kWords]) { load(row, first, is_whole, words); });
        return end / 8u;
    }
};

} // namespace ibp

#endif
