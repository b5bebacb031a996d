// census.cuh - counts the elements of a row that reach each plane (FORMAT.md section 6). These counts say how long each
// part of the coded row is, so they are all that is needed to measure a row (encoder.cuh). The encoders of planes.cuh,
// values.cuh and encode_listed.cuh are derived from the census. T is the type of an element, LISTED says whether rows
// are listed, and FIELDS says which PlanesFields a codebook may use. All other properties of a codebook are known only
// at run time. planes_book.cuh shows the bytes of coded rows, and explains the terms of scheme planes.
//
// 1. The block fills its table of codes once (the constructor).
// 2. Step by step, each lane of the group loads elements of the row, looks up their codes, and adds up their escapes.
//    Sums over all lanes are the counts (take_census).
// 3. The counts say where each part of the values begins (lay_out) and, if rows are listed, which form of the positions
//    is the shortest (choose_form).
//
// A symbol's *code* is a word that describes it in all planes: bits 8p + 4 to 8p + 7 are its digit in plane p, and bit
// 8p is set if this digit is an escape. A lane adds the escape bits of at most 64 codes, and then splits the sum, which
// has the number of escapes of each plane in a separate byte. The lane's counts for the row, and their sums over the
// lanes of a warp or a part of a warp, have 16 bits for each plane. In groups of several warps, which have longer rows,
// the sum for each plane is a whole word.
//
// If a table has the codes of all symbols, a warp executes about 55 instructions to measure one step, which is 512
// bytes of 16-bit elements. The rate at which instructions are issued limits measuring.
#ifndef IBP_ENCODE_CENSUS_CUH
#define IBP_ENCODE_CENSUS_CUH

#include "../kinds.h"
#include "../planes_book.cuh"
#include "../positions.cuh"
#include "encoder.cuh"

namespace ibp {

constexpr uint32_t kEscapes = 0x01010101; // the bits of a code that mark escapes

// Takes the census that is described above. FIELDS: the PlanesFields that the codebook may use. MEASURES: rows are only
// measured, so codes have no digits.
template <typename T, bool LISTED, uint32_t THREADS, uint32_t FIELDS, bool MEASURES>
struct PlanesCensus : PlanesBook<T, FIELDS> {
    using Book = PlanesBook<T, FIELDS>;
    using Group = EncodeGroup<THREADS>;
    using G = Group;
    // To measure listed rows, five blocks of kEncodeThreads threads must fit on an SM. Of its 65,536 registers each
    // thread can then have at most 48.
    static constexpr uint32_t kBlocks = MEASURES && LISTED ? 5 : 1;
    using Book::columns, Book::entries, Book::planes, Book::symbol_bits;
    static constexpr uint32_t kBits = 8u * sizeof(T), kPerLane = kVector / sizeof(T),
                              kPerWord = sizeof(T) < 4 ? 4u / sizeof(T) : 1u;
    static constexpr uint32_t kAll = (1u << kPerLane) - 1u, kStepBytes = kVector * THREADS;
    const uint32_t row_bytes, live_bytes; // live_bytes: size of the live columns in bytes
    // The block's table of codes. If has_all is true, it is indexed by symbols; if is_hashed is true, by slots of the
    // hash table. Otherwise it is indexed by the ranks of symbols. Ranks are looked up in `ranks`, or found by
    // comparing symbols with the entries.
    const uint32_t *codes;
    uint32_t own_codes; // index of the cluster's first code
    const T *keys;      // the symbol in each slot of the hash table
    // The rank of every symbol in every column (place_of_rank). Used if has_ranks is true, that is, if every column has
    // its own entries and the table is not too large.
    const uint8_t *ranks;
    const uint32_t free; // the code of symbols without an entry
    bool has_all, is_hashed, has_ranks;
    // If true, take_census counts the escapes of all elements, and then subtracts those of the elements that are not
    // coded. It can do so if all elements that are not coded have the same symbol. With signed_default, this is so only
    // if the residual contains the sign.
    bool counts_all;

    // ---- the codebook ----

    // If there are too many possible symbols for a table of all codes, the codes of the entries are in a hash table
    // with open addressing.
    static constexpr uint32_t kSlotBits = 8, kSlots = 1u << kSlotBits;
    static __host__ __device__ __forceinline__ bool has_hash_table(const ibp_codebook &cb)
    {
        return !has_code_table(cb) && !cb.planes.per_column && !ibp_has_clusters(&cb);
    }
    static __host__ __device__ __forceinline__ uint32_t ranks_bytes(const ibp_codebook &cb)
    {
        return has_column_ranks(cb) ? ((Book::live_columns(cb) << bits_of_symbol(cb.planes)) + 15u) / 16u * 16u : 0u;
    }
    // Returns the index in `ranks` of a column's symbol, which has num_bits bits. The lanes of a warp look up different
    // columns at once, but often the same symbol. Therefore the ranks of each lane's columns are rotated by a different
    // number of words, so that the lanes read different banks.
    static __device__ __forceinline__ uint32_t place_of_rank(uint32_t column, uint32_t symbol, uint32_t num_bits)
    {
        return (column << num_bits) + low_bits(symbol + column / kPerLane * 4u, num_bits);
    }
    static __device__ __forceinline__ uint32_t slot_of(T symbol)
    {
        if (sizeof(T) == 8) return static_cast<uint32_t>(symbol * 0x9E3779B97F4A7C15u >> (64u - kSlotBits));
        return static_cast<uint32_t>(symbol) * 0x9E3779B1u >> (32u - kSlotBits);
    }
    static __host__ __device__ __forceinline__ uint32_t keys_bytes(const ibp_codebook &cb)
    {
        return has_hash_table(cb) ? kSlots * static_cast<uint32_t>(sizeof(T)) : 0u;
    }
    static __host__ __device__ __forceinline__ uint32_t num_codes(const ibp_codebook &cb)
    {
        return has_code_table(cb) ? codes_of_all(cb) : has_hash_table(cb) ? kSlots : cb.planes.num_entries + 1u;
    }
    static __host__ __device__ __forceinline__ uint32_t codes_bytes(const ibp_codebook &cb)
    {
        return (4u * num_codes(cb) + 15u) / 16u * 16u;
    }
    static __host__ __device__ __forceinline__ uint32_t table_bytes(const ibp_codebook &cb)
    {
        return keys_bytes(cb) + codes_bytes(cb) + ranks_bytes(cb);
    }

    // Fills the block's tables. All threads of a block must call this together. table: table_bytes(cb) bytes of shared
    // memory.
    __device__ __forceinline__ PlanesCensus(const ibp_codebook &cb, uint32_t *table)
        : Book(cb, 0), row_bytes(cb.row_bytes), live_bytes(columns * static_cast<uint32_t>(sizeof(T))),
          codes(table + keys_bytes(cb) / 4u), own_codes(0), keys(reinterpret_cast<const T *>(table)),
          ranks(reinterpret_cast<const uint8_t *>(codes) + codes_bytes(cb)), free(code_of_rank(planes.num_entries)),
          has_all(has_code_table(cb)), is_hashed(has_hash_table(cb)), has_ranks(has_column_ranks(cb)),
          counts_all(sizeof(T) <= 4 && has_all && Book::num_constant(planes) + Book::invariant_bits(planes) == 0u &&
                     (!LISTED || !Book::signed_default(planes) || (planes.rotate && planes.residual_bits != 0u)))
    {
        uint32_t *const all = table + keys_bytes(cb) / 4u;
        auto *const of_columns = reinterpret_cast<uint8_t *>(all) + codes_bytes(cb);
        for (uint32_t i = threadIdx.x; i < num_codes(cb); i += blockDim.x)
            all[i] = has_all || is_hashed ? free : code_of_rank(i);
        for (uint32_t i = threadIdx.x; i < ranks_bytes(cb) / 4u; i += blockDim.x)
            reinterpret_cast<uint32_t *>(of_columns)[i] = planes.num_entries * 0x01010101u;
        __syncthreads();
        const uint32_t tables = planes.per_column ? columns : clusters_of(cb),
                       count = has_all || is_hashed || has_ranks ? tables * planes.num_entries : 0u;
        for (uint32_t i = threadIdx.x; i < count; i += blockDim.x) {
            const uint32_t number = i / planes.num_entries, rank = i % planes.num_entries,
                           first = planes.per_column ? i - rank : 0u;
            PlanesCensus one = *this;
            one.select(cb, planes.per_column ? 0u : number);
            bool is_first = true;
            const T symbol = one.entry(first + rank);
            for (uint32_t q = 0; q < rank; q++) is_first = is_first && one.entry(first + q) != symbol;
            if (!is_first) continue;
            if (is_hashed) {
                enter(reinterpret_cast<T *>(table), all, symbol, code_of_rank(rank));
                continue;
            }
            // An invalid codebook may have an entry with more bits than a symbol. No element of a row has this symbol.
            if (static_cast<uint64_t>(symbol) >> symbol_bits != 0u) continue;
            const auto bits = static_cast<uint32_t>(symbol);
            if (has_ranks)
                of_columns[place_of_rank(number, bits, symbol_bits)] = static_cast<uint8_t>(rank);
            else
                all[(number << symbol_bits) + bits] = code_of_rank(rank);
        }
        __syncthreads();
    }
    // Inserts a symbol into the hash table. No other thread may insert the same symbol. A slot is empty if its code is
    // `free`, the code of symbols whose digits are escapes in all planes.
    __device__ __forceinline__ void enter(T *to, uint32_t *all, T symbol, uint32_t code) const
    {
        uint32_t slot = slot_of(symbol);
        while (atomicCAS(&all[slot], free, code) != free) slot = (slot + 1u) % kSlots;
        to[slot] = symbol;
    }
    __device__ __forceinline__ uint32_t hashed_code(T symbol) const
    {
        uint32_t slot = slot_of(symbol), code = codes[slot];
        while (code != free && keys[slot] != symbol) {
            slot = (slot + 1u) % kSlots;
            code = codes[slot];
        }
        return code;
    }
    __device__ __forceinline__ void select(const ibp_codebook &cb, uint32_t k)
    {
        entries += uint64_t{k} * cb.cluster_stride;
        if (has_all) own_codes = k << symbol_bits;
    }
    __device__ __forceinline__ uint32_t code_of_rank(uint32_t rank) const
    {
        uint32_t code = 0;
        for (uint32_t p = 0; p < planes.num_planes; p++) {
            const uint32_t digit = ibp_min_u32(rank, this->escape_of(p));
            if (!MEASURES) code |= digit << (8u * p + 4u);
            if (digit != this->escape_of(p)) return code;
            code |= 1u << (8u * p);
            rank -= digit;
        }
        return code;
    }

    // ---- the elements of a lane ----

    // The elements that a lane takes in one step. word: the elements, rotated and without their invariant bits.
    // present: a bit for each element, set if the element is coded. column: the live column of the first element.
    // signs: the highest bits of the elements as they are in the row, one bit for each element.
    struct Lane {
        uint32_t word[4], present, column, signs;
        bool open;    // a coded element differs from the closed value
        bool differs; // a coded element's invariant bits differ from the codebook's
    };
    // kLowest: the lowest bit of each element of a word. kAllBits: all bits of one element.
    static constexpr uint32_t kLowest = sizeof(T) == 1   ? 0x01010101u
                                        : sizeof(T) == 2 ? 0x00010001u
                                                         : 1u,
                              kAllBits = 0xffffffffu / kLowest;
    static __device__ __forceinline__ T element(const uint32_t (&word)[4], uint32_t e)
    {
        if (sizeof(T) == 8) return static_cast<T>(word[2 * e % 4] | static_cast<uint64_t>(word[(2 * e + 1) % 4]) << 32);
        return static_cast<T>(word[e / kPerWord] >> (e % kPerWord * kBits % 32u));
    }
    // Returns a mask of the bits that decide whether an element is listed. The element is listed if any of these bits
    // differs from the same bit of the default value.
    __device__ __forceinline__ T listing_bits() const
    {
        return static_cast<T>(Book::signed_default(planes) ? ~uint64_t{0} >> (65u - kBits) : ~uint64_t{0});
    }
    template <uint32_t N> __device__ __forceinline__ void rotate(uint32_t (&word)[N]) const
    {
        if (!planes.rotate) return;
        const uint32_t bits = kBits - Book::invariant_bits(planes);
        const uint32_t of_all = (FIELDS & kInvariantBits) != 0u ? low_bits(kAllBits, bits) * kLowest : ~0u;
#pragma unroll
        for (uint32_t i = 0; i < N; i++) {
            if (sizeof(T) < 8) {
                word[i] = select_bits(kLowest, word[i] >> (bits - 1u) % 32u, word[i] << 1) & of_all;
            } else if (i % 2 == 0) {
                const uint64_t whole = word[i] | static_cast<uint64_t>(word[(i + 1) % N]) << 32,
                               rotated = low_bits(whole << 1 | whole >> (bits - 1u) % 64u, bits);
                word[i] = static_cast<uint32_t>(rotated), word[(i + 1) % N] = static_cast<uint32_t>(rotated >> 32);
            }
        }
    }
    // Shifts the invariant bits out of a lane's elements, and sets `differs`.
    __device__ __forceinline__ void drop_invariant(Lane &lane) const
    {
        const uint32_t num_bits = Book::invariant_bits(planes);
        if (num_bits == 0u) return;
        const uint64_t wanted = planes.invariant_value;
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++)
            lane.differs =
                lane.differs || ((lane.present >> e & 1u) && low_bits(element(lane.word, e) ^ wanted, num_bits) != 0u);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            if (sizeof(T) < 8) {
                const uint32_t kept = low_bits(kAllBits, kBits - num_bits) * kLowest;
                lane.word[i] = num_bits < 32u ? lane.word[i] >> num_bits & kept : 0u;
            } else if (i % 2 == 0) {
                const uint64_t whole = lane.word[i] | static_cast<uint64_t>(lane.word[(i + 1) % 4]) << 32,
                               kept = num_bits < 64u ? whole >> num_bits : 0u;
                lane.word[i] = static_cast<uint32_t>(kept), lane.word[(i + 1) % 4] = static_cast<uint32_t>(kept >> 32);
            }
        }
    }
    // Returns the element of a live column. The codebook may name a column that the row does not have; then the row's
    // last column is taken.
    __device__ __forceinline__ T live_element(const PlainRow &row, uint32_t column) const
    {
        return column_of(row, ibp_min_u32(__ldg(planes.live_columns + column), row_bytes / sizeof(T) - 1u));
    }
    // Returns the element of any column. Bytes past the valid ones are zeros.
    static __device__ __noinline__ T column_of(PlainRow row, uint32_t number)
    {
        uint64_t value = 0;
        for (uint32_t b = 0; b < sizeof(T); b++) {
            const uint32_t at = number * static_cast<uint32_t>(sizeof(T)) + b;
            if (at < row.valid) value |= static_cast<uint64_t>(row.bytes[at]) << 8u * b;
        }
        return static_cast<T>(value);
    }
    __device__ __forceinline__ void load_words(const PlainRow &row, uint32_t first, uint32_t (&word)[4]) const
    {
        if (Book::num_constant(planes) == 0u) return row.load(first, word);
        const uint32_t column = first / static_cast<uint32_t>(sizeof(T));
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) word[i] = 0;
        for (uint32_t e = 0; e < kPerLane && column + e < columns; e++) {
            const uint64_t value = live_element(row, column + e);
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) { // into the words in which the element lies
                const uint32_t at = e * kBits;
                if (i == at / 32u) word[i] |= static_cast<uint32_t>(value << at % 32u);
                if (i == at / 32u + 1u && kBits == 64u) word[i] = static_cast<uint32_t>(value >> 32);
            }
        }
    }
    __device__ __forceinline__ Lane load(const PlainRow &row, uint32_t first) const
    {
        Lane lane{};
        lane.column = first / static_cast<uint32_t>(sizeof(T));
        if (first >= live_bytes) return lane;
        load_words(row, first, lane.word);
        lane.present = held_at(lane.column);
        if (LISTED) {
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) {
                const T value = element(lane.word, e);
                lane.signs |= static_cast<uint32_t>(value >> (kBits - 1u)) << e;
                if (((value ^ static_cast<T>(planes.default_value)) & listing_bits()) == 0u) lane.present &= ~(1u << e);
                lane.open = lane.open || ((lane.present >> e & 1u) && value != static_cast<T>(planes.closed_value));
            }
        }
        drop_invariant(lane);
        rotate(lane.word);
        return lane;
    }
    // Returns a mask of a lane's elements that lie in the row. column: the live column of the lane's first element.
    __device__ __forceinline__ uint32_t held_at(uint32_t column) const
    {
        const uint32_t left = columns - ibp_min_u32(column, columns);
        return left >= kPerLane ? kAll : (1u << left) - 1u;
    }
    // Returns whether all constant columns hold the elements of the row template. The function counts all elements of
    // the row that differ from the template, and subtracts those in live columns.
    __device__ __forceinline__ bool keeps_constants(const PlainRow &row) const
    {
        const PlainRow wanted{planes.row_template, row_bytes};
        uint32_t differing[1] = {0};
        for (uint32_t first = kVector * G::rank(); first < row_bytes; first += kVector * THREADS) {
            uint32_t word[4], same[4];
            row.load(first, word);
            wanted.load(first, same);
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) differing[0] += element(word, e) != element(same, e);
        }
        for (uint32_t column = G::rank(); column < columns; column += THREADS)
            differing[0] -= live_element(row, column) != static_cast<T>(planes.default_value);
        G::sum(differing);
        return differing[0] == 0u;
    }
    __device__ __forceinline__ T symbol(const Lane &lane, uint32_t e) const
    {
        return planes.residual_bits >= kBits ? T{0} : static_cast<T>(element(lane.word, e) >> planes.residual_bits);
    }
    // Finds the codes of a lane's elements. Elements that are not coded get 0. Returns the sum of the codes' escape
    // bits: the number of escapes in each plane, one byte for each.
    __device__ __forceinline__ uint32_t find_codes(const Lane &lane, uint32_t (&code)[kPerLane]) const
    {
        if (has_all) {
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++)
                code[e] = (lane.present >> e & 1u) ? codes[own_codes + static_cast<uint32_t>(symbol(lane, e))] : 0u;
        } else if (has_ranks) {
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) {
                const uint32_t place =
                    place_of_rank(lane.column + e, static_cast<uint32_t>(symbol(lane, e)), symbol_bits);
                code[e] = (lane.present >> e & 1u) ? codes[ranks[place]] : 0u;
            }
        } else if (is_hashed) {
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++)
                code[e] = (lane.present >> e & 1u) ? hashed_code(symbol(lane, e)) : 0u;
        } else {
            compare_entries(lane, code);
        }
        uint32_t escapes = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++) escapes += code[e] & kEscapes;
        return escapes;
    }
    // Finds the codes by comparing the elements with one entry after the other, until every element has its entry.
    __device__ __forceinline__ void compare_entries(const Lane &lane, uint32_t (&code)[kPerLane]) const
    {
        uint32_t open = lane.present;
        const uint32_t step = planes.per_column ? planes.num_entries : 0u, first = lane.column * step;
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++) code[e] = (open >> e & 1u) ? codes[planes.num_entries] : 0u;
#pragma unroll 1
        for (uint32_t rank = 0; rank < planes.num_entries && open != 0u; rank++) {
            const uint32_t found = codes[rank];
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++) {
                if (!(open >> e & 1u) || this->entry(first + e * step + rank) != symbol(lane, e)) continue;
                code[e] = found;
                open &= ~(1u << e);
            }
        }
    }

    // ---- measuring ----

    // Returns a word in which each element is 0 if the same element of `word` is 0, and otherwise 1.
    static __device__ __forceinline__ uint32_t ones_of(uint32_t word)
    {
        if (sizeof(T) == 4) return ibp_min_u32(word, 1u);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 // a single instruction there
        if (sizeof(T) == 2) return __vminu2(word, kLowest);
#endif
        constexpr uint32_t kBelow = ~(kLowest << (kBits - 1u));
        return (((word & kBelow) + kBelow) | word) >> (kBits - 1u) & kLowest;
    }
    // Returns the lowest bits of all elements of N words, packed from bit 0. All other bits of the elements must be 0.
    template <uint32_t N> static __device__ __forceinline__ uint32_t bits_of(const uint32_t (&ones)[N])
    {
        static_assert(N * kPerWord <= 32u, "a word must hold one bit for each element");
        constexpr uint32_t kRun = N < 8u ? N : 8u;
        uint32_t bits = 0;
#pragma unroll
        for (uint32_t i = 0; i < N; i += kRun) {
            uint32_t run = 0;
#pragma unroll
            for (uint32_t w = kRun; w-- > 0;) {
                if (sizeof(T) == 1)
                    run = (run << 4) + (ones[i + w] * 0x10204080u >> 28);
                else
                    run = (run << kPerWord) + ones[i + w];
            }
            if (sizeof(T) == 2) run = (run | run >> 15) & 0xffffu;
            bits |= run << i * kPerWord;
        }
        return bits;
    }
    // Returns one bit for each element of N words, set if the element and `value` differ in any bit of `mask`. value
    // and mask repeat the same bits in every element of the word.
    template <uint32_t N>
    static __device__ __forceinline__ uint32_t different_from(uint32_t value, uint32_t mask, const uint32_t (&words)[N])
    {
        uint32_t ones[N];
#pragma unroll
        for (uint32_t i = 0; i < N; i++) ones[i] = ones_of((words[i] ^ value) & mask);
        return bits_of(ones);
    }
    // Returns a word in which the symbol of element e begins at bit `bit`. The other bits of the word are unspecified.
    template <uint32_t WORDS>
    __device__ __forceinline__ uint32_t symbol_at(const uint32_t (&words)[WORDS], uint32_t e, uint32_t bit) const
    {
        const uint32_t word = words[e / kPerWord];
        return __funnelshift_r(word, word, e % kPerWord * kBits + planes.residual_bits - bit);
    }
    // Returns the word that a table has for the symbol of element e. skipped: number of bits by which the element still
    // has to be rotated. Before this rotation the symbol lies that number of bits lower.
    template <uint32_t WORDS>
    __device__ __forceinline__ uint32_t entry_for(const uint32_t *table, const uint32_t (&words)[WORDS], uint32_t e,
                                                  uint32_t skipped = 0) const
    {
        // A symbol that begins at bit 2 is an offset in bytes into the table. The bits above it come from the index of
        // the cluster's first code.
        const uint32_t byte =
            select_bits(low_bits(~0u, symbol_bits) << 2, symbol_at(words, e, 2u + skipped), 4u * own_codes);
        return *reinterpret_cast<const uint32_t *>(reinterpret_cast<const uint8_t *>(table) + byte);
    }
    // Adds the escape bits of the first NUM elements of `words` to `escapes`. The words hold elements as they are in
    // the row. If the codebook rotates elements, elements of one byte are rotated here first. Larger elements are not
    // rotated, because their residual contains the sign: symbols with a table of all codes have at most kMostCodeBits
    // bits, so the elements have residual bits, of which the rotation makes the sign the lowest one. Therefore the
    // symbol can be taken from where it lies before the rotation.
    template <uint32_t NUM, uint32_t WORDS>
    __device__ __forceinline__ void add_escapes(uint32_t (&words)[WORDS], uint32_t &escapes) const
    {
        if (sizeof(T) == 1) rotate(words);
#pragma unroll
        for (uint32_t e = 0; e < NUM; e++)
            escapes += entry_for(codes, words, e, sizeof(T) == 1 ? 0u : planes.rotate) & (MEASURES ? ~0u : kEscapes);
    }
    // Returns a word whose elements are all the default value; with signed_default, their highest bits are 0. Returns 0
    // for dense rows, which have no default.
    __device__ __forceinline__ uint32_t normal_word() const
    {
        return LISTED ? static_cast<T>(static_cast<T>(planes.default_value) & listing_bits()) * kLowest : 0u;
    }
    // Loads N vectors of a row, which begin at bytes `first`, `first` + stride and so on. is_whole: the result of
    // row.is_whole. Bits past the end of the row are taken from normal_word().
    template <uint32_t N>
    __device__ __forceinline__ void load_vectors(const PlainRow &row, uint32_t first, uint32_t stride, bool is_whole,
                                                 uint32_t (&words)[N][4]) const
    {
        if (is_whole && first + (N - 1u) * stride < row_bytes) { // all loads are issued at once
#pragma unroll
            for (uint32_t v = 0; v < N; v++) row.load(first + v * stride, true, words[v]);
            return;
        }
#pragma unroll
        for (uint32_t v = 0; v < N; v++) {
            const uint32_t at = first + v * stride;
            uint4 four = make_uint4(normal_word(), normal_word(), normal_word(), normal_word());
            if (at < row_bytes)
                four = is_whole ? *reinterpret_cast<const uint4 *>(row.bytes + at)
                                : load_some(row, at, row_bytes, normal_word());
            words[v][0] = four.x, words[v][1] = four.y, words[v][2] = four.z, words[v][3] = four.w;
        }
    }
    static __device__ __noinline__ uint4 load_some(PlainRow row, uint32_t first, uint32_t row_bytes, uint32_t rest)
    {
        uint32_t words[4];
        row.load(first, words);
#pragma unroll
        for (uint32_t i = 0; i < 4; i++)
            words[i] = select_bits(ibp_row_bits_of_word(row_bytes, first / 4u + i), words[i], rest);
        return make_uint4(words[0], words[1], words[2], words[3]);
    }

    // count: number of the lane's listed elements. open: whether any listed element of the group differs from the
    // closed value.
    struct Listed {
        uint32_t count;
        bool open;
    };
    // Number of vectors that a lane loads in each step. Groups of eight lanes have short rows, which take few steps.
    static constexpr uint32_t kSteps = THREADS < kWarp ? 2 : 4;
    // Counts the listed elements. In each step, calls add(escapes), where escapes has the number of escapes in each
    // plane among the lane's elements, including elements past the end of the row. Used if counts_all is true.
    template <class Add> __device__ __forceinline__ Listed count_escapes(const PlainRow &row, const Add &add) const
    {
        const uint32_t normal = normal_word(), bits = listing_bits() * kLowest,
                       closed = static_cast<T>(planes.closed_value) * kLowest;
        const bool is_whole = row.is_whole(row_bytes);
        Listed listed{0, false};
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            uint32_t words[kSteps][4], escapes = 0;
            load_vectors(row, base + kVector * G::rank(), kStepBytes, is_whole, words);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                if (LISTED) {
                    uint32_t open = 0;
#pragma unroll
                    for (uint32_t i = 0; i < 4u; i++) listed.count += ones_of((words[s][i] ^ normal) & bits);
                    if (!listed.open) { // in most rows the first elements decide this
#pragma unroll
                        for (uint32_t i = 0; i < 4u; i++)
                            open |= ones_of((words[s][i] ^ normal) & bits) & ones_of(words[s][i] ^ closed);
                        listed.open = G::any(open != 0u);
                    }
                }
                add_escapes<kPerLane>(words[s], escapes);
            }
            add(escapes);
        }
        if (sizeof(T) == 1) listed.count = (listed.count & 0x00ff00ffu) + (listed.count >> 8 & 0x00ff00ffu);
        if (sizeof(T) < 4) listed.count = (listed.count & 0xffffu) + (listed.count >> 16);
        return listed;
    }

    // The counts of a row. reaching[p]: number of elements with a digit in plane p; reaching[num_planes]: number of
    // elements with a raw symbol; the counts after it are 0. closed: there are listed elements, and all of them equal
    // the closed value.
    struct Census {
        uint32_t reaching[IBP_MAX_PLANES + 1];
        bool closed;
        bool has_form; // the row can be coded
    };
    __device__ __forceinline__ Census take_census(const PlainRow &row) const
    {
        // even: the numbers of escapes in planes 0 and 2, 16 bits each. odd: the numbers of escapes in planes 1 and 3.
        uint32_t even = 0, odd = 0, listed = 0;
        const bool constants = Book::num_constant(planes) == 0u || keeps_constants(row);
        bool open = false, differs = false;
        const auto add = [&](uint32_t escapes) {
            even += escapes & 0x00ff00ffu;
            odd += escapes >> 8 & 0x00ff00ffu;
        };
        if constexpr (sizeof(T) <= 4) {
            if (counts_all) {
                const Listed found = count_escapes(row, add);
                listed = found.count, open = found.open;
            }
        }
        for (uint32_t first = kVector * G::rank(); first < live_bytes && !counts_all; first += kStepBytes) {
            const Lane lane = load(row, first);
            if (LISTED && lane.present == 0u) continue;
            uint32_t code[kPerLane];
            add(find_codes(lane, code));
            listed += ibp_popcount(lane.present);
            open = open || lane.open, differs = differs || lane.differs;
        }
        constexpr uint32_t kOpen = 1u << 16; // above the sum of `differs`, which is at most the number of lanes
        const uint32_t found = (open ? kOpen : 0u) + differs;
        uint32_t sums[6] = {found, LISTED ? listed : 0u, even & 0xffffu, odd & 0xffffu, even >> 16, odd >> 16};
        if constexpr (THREADS <= kWarp) { // few elements: two counts fit in a word
            uint32_t packed[LISTED ? 4 : 3] = {found, even, odd};
            if (LISTED) packed[LISTED ? 3 : 0] = listed;
            G::sum(packed);
            sums[0] = packed[0], sums[1] = packed[LISTED ? 3 : 0];
            sums[2] = packed[1] & 0xffffu, sums[3] = packed[2] & 0xffffu;
            sums[4] = packed[1] >> 16, sums[5] = packed[2] >> 16;
        } else {
            G::sum(sums);
        }
        const uint32_t k = LISTED ? sums[1] : columns;
        if constexpr (sizeof(T) <= 4) {
            if (counts_all) { // subtracts the escapes of the elements that are not coded
                constexpr uint32_t kCounted = kSteps * THREADS * kPerLane;
                const uint32_t others = (columns + kCounted - 1u) / kCounted * kCounted - k;
                uint32_t word[1] = {normal_word()}, escapes = 0;
                add_escapes<1>(word, escapes);
#pragma unroll
                for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) sums[2 + p] -= (escapes >> 8 * p & 1u) * others;
            }
        }
        // The elements of a closed row need not have the invariant bits, because their values are not coded.
        const bool closed = LISTED && sums[0] < kOpen && k > 0u;
        return {{k, sums[2], sums[3], sums[4], sums[5]}, closed, constants && (closed || sums[0] % kOpen == 0u)};
    }

    // Returns what ibp_choose_position_form returns: the shortest form of the positions or, if several forms are
    // equally short, the first of them. Each lane computes the sizes of some forms.
    __device__ __forceinline__ ibp_position_form choose_form(uint32_t k) const
    {
        if (ibp_is_bitmap_shortest(k, columns)) return ibp_bitmap_form(k, columns);
        uint32_t least = ~0u;
        for (uint32_t i = G::lane(); i < kPositionForms; i += G::kLanes)
            least = ibp_min_u32(least, position_form_at(i, k, columns).num_bytes * kWarp + i);
        return position_form_at(G::min_in_warp(least) % kWarp, k, columns);
    }

    // The bit positions in the stage at which the parts of the values begin. digits[p]: the digits of plane p;
    // digits[num_planes]: the raw symbols. (In the ValueParts of decoders, digits[IBP_MAX_PLANES] is always the raw
    // symbols.) end: where the last part ends.
    struct Parts {
        uint32_t residuals, digits[IBP_MAX_PLANES + 1], end;
    };
    __device__ __forceinline__ Parts lay_out(uint32_t start, const Census &census) const
    {
        Parts parts;
        parts.residuals = start;
        uint32_t at = start + to_byte(census.reaching[0] * planes.residual_bits);
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
            parts.digits[p] = at;
            const uint32_t num_bits = p < planes.num_planes    ? planes.digit_bits[p % IBP_MAX_PLANES]
                                      : p == planes.num_planes ? symbol_bits
                                                               : 0u;
            at += to_byte(census.reaching[p] * num_bits);
        }
        parts.end = at;
        return parts;
    }
    __device__ __forceinline__ uint32_t header_bits() const { return LISTED ? 8u * ibp_header_bytes(columns) : 0u; }

    // Returns the size in bits, including padding, of the part with the highest bits of the unlisted elements, if k
    // elements are listed.
    __device__ __forceinline__ uint32_t sign_bits(uint32_t k) const
    {
        return LISTED && Book::signed_default(planes) ? to_byte(columns - k) : 0u;
    }

    // Returns the largest size in bytes that the coded form of a default row can have, or ~0 if there is no limit. With
    // LISTED, a default row lists no elements: it consists of the header, the highest bits if they are stored, and at
    // most one byte for the cluster.
    __device__ __forceinline__ uint32_t default_bytes() const
    {
        return LISTED ? (header_bits() + sign_bits(0)) / 8u + 1u : ~0u;
    }
    // Returns the exact size of the coded row in bits, or kNoCodedForm.
    __device__ __forceinline__ uint32_t measure(const PlainRow &row) const
    {
        const Census census = take_census(row);
        if (!census.has_form) return kNoCodedForm;
        const uint32_t k = census.reaching[0];
        uint32_t start = header_bits() + sign_bits(k);
        if (LISTED && k != 0u) start += 8u * choose_form(k).num_bytes;
        return census.closed || k == 0u ? start : lay_out(start, census).end;
    }
};

} // namespace ibp

#endif
