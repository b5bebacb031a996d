// decode_listed.cuh - decodes listed rows of scheme planes (FORMAT.md section 6). One warp decodes a row.
// planes_book.cuh shows the bytes of a listed row, and explains the terms of scheme planes.
//
// 1. Count. The warp counts the escapes of every plane. These counts say where each part begins, and whether the row
//    has the right length. If all listed elements of the row fit in one batch, the warp finds their ranks at the same
//    time.
// 2. Positions. A bitmap is used as it is. A list of the listed columns is turned into an array of columns if at most
//    one column in eight is listed and there is no signed_default. Otherwise the list is turned into a bitmap. A list
//    of the columns that are not listed is always turned into a bitmap.
// 3. Elements. The listed elements are joined in batches: each entry or raw symbol is combined with its residual. If a
//    row has several batches, the ranks of a batch are found first. In plane 0 a lane takes eight digits at a time, and
//    the elements whose digits are escapes go to the list of escaped elements. In the other planes a lane takes one
//    element of this list at a time. A lane joins eight elements at a time.
// 4. Columns. The warp goes through tiles of columns. A lane makes 16 bytes of output at a time. The bits of the bitmap
//    say which of its columns are listed, and a prefix sum over the counts of these bits says which listed elements
//    belong to these columns. Lane j has the bits of columns 32 j to 32 j + 31 of the tile. If a lane makes columns
//    whose bits another lane has, it gets these bits by a shuffle. All other columns get the default. If there is an
//    array of columns, the default is written to all columns, and then each listed element is stored in its column.
//
// A batch has room for 1,024 elements or, if a row has fewer columns, for as many elements as the row has columns,
// rounded up to a multiple of 16. If rows have more than 8 KiB, a batch has room for 256 elements. If all listed
// elements of a row fit in one batch, they are joined only once, before the first tile. Otherwise the listed elements
// of each tile are a batch. If there is an array of columns, the batches do not follow tiles; each batch except the
// last one is full.
//
// In this file, a tile consists of columns, listed or not; in tiles.cuh it consists of elements. `list` alone stands
// for a list of positions. To name an element means to write its rank. The number of an element is its index in its
// batch.
#ifndef IBP_DECODE_LISTED_CUH
#define IBP_DECODE_LISTED_CUH

#include "../positions.cuh"
#include "decode_dense.cuh"
#include "find_row.cuh"

namespace ibp {

// A decoder of rows as described above. FIELDS: the PlanesFields that the codebook may use. Registers are scarce, so
// every field that is supported slows down the decoding of all rows.
template <typename T, uint32_t FIELDS> struct ListedDecoder : NoBlockMemory {
    using Book = PlanesBook<T, FIELDS>;
    using Group = ibp::Group<kWarp, 1>;
    using G = Group;
    using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>; // the integer in which an element is computed
    static constexpr uint32_t kMostThreads = sizeof(T) <= 2 ? 896 : 768, kVectors = 4;
    // kBatch: the largest number of elements in a batch, and of columns in a tile. Each lane then has one word of the
    // bitmap.
    static constexpr uint32_t kBatch = 1024;
    // Rows with more bytes than kLongRow have batches of kBatchOfLong elements, because their stage leaves less shared
    // memory.
    static constexpr uint32_t kLongRow = 8192, kBatchOfLong = 256;
    static constexpr uint32_t kOctet = 8; // number of elements that a lane takes at a time
    // If at most one column in kSparse is listed, and their positions are stored as a list, the listed elements are
    // stored one by one. decode() has all conditions (is_sparse).
    static constexpr uint32_t kSparse = 8;
    static constexpr uint64_t kSign = uint64_t{1} << (8u * sizeof(T) - 1u);
    static constexpr uint32_t kBits = 8u * sizeof(T), kPerVector = 16u / sizeof(T); // number of elements in a vector
    static constexpr uint32_t kEntries = 64, kMostEntries = IBP_MAX_PLANES * ((1u << IBP_MAX_DIGIT_BITS) - 1u);
    static_assert(kMostEntries < kEntries, "a rank is needed after those of all entries, for raw symbols");
    // kDigits: the byte of the scratch at which the bit positions of the next digits begin. kRanks: the byte of the
    // scratch at which the ranks begin.
    static constexpr uint32_t kDigits = kEntries * static_cast<uint32_t>(sizeof(T)), kRanks = kDigits + 16u;
    static_assert(4u * IBP_MAX_PLANES <= 16u, "each plane must have a word for the position of its next digits");

    const ibp_codebook &cb;
    const uint32_t scratch; // the shared byte at which the warp's scratch begins
    const uint32_t most;    // the largest number of elements in a batch

    // The scratch of a warp, in shared memory:
    //
    //     kEntries elements    the codebook's entries, then a batch's raw symbols if all fit; all with residuals of 0
    //     16 bytes             for each plane, the bit at which the digits of the next batch begin
    //     ranks                the ranks of a batch's elements, one byte each
    //     elements             the elements of a batch; at first, a list of the 16-bit numbers of escaped elements
    //     positions            a bitmap of all positions; or an array of columns, if elements are stored one by one
    static __host__ __device__ __forceinline__ uint32_t batch_of(const ibp_codebook &codebook)
    {
        const uint32_t columns = codebook.row_bytes / static_cast<uint32_t>(sizeof(T));
        return codebook.row_bytes > kLongRow ? kBatchOfLong : ibp_min_u32((columns + 15u) / 16u * 16u, kBatch);
    }
    static __host__ __device__ __forceinline__ uint32_t bitmap_words(uint32_t columns)
    {
        return (columns + 127u) / 128u * 4u + 4u;
    }
    // Returns the size in bytes of the memory for positions. This memory holds either a bitmap of all positions or, if
    // the listed elements of a row are stored one by one, an array of their columns, 16 bits each. It is large enough
    // for the larger of the two.
    static __host__ __device__ __forceinline__ uint32_t positions_bytes(uint32_t columns)
    {
        const uint32_t bytes = 4u * bitmap_words(columns), of_few = (2u * (columns / kSparse) + 15u) / 16u * 16u;
        return bytes > of_few ? bytes : of_few;
    }
    static __host__ __device__ __forceinline__ uint32_t element_bytes_of(const ibp_codebook &codebook)
    {
        return batch_of(codebook) * (sizeof(T) == 1 ? 2u : static_cast<uint32_t>(sizeof(T)));
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &codebook)
    {
        return kRanks + batch_of(codebook) + element_bytes_of(codebook) +
               positions_bytes(codebook.row_bytes / static_cast<uint32_t>(sizeof(T)));
    }
    __device__ __forceinline__ uint8_t *ranks() const { return shared_bytes() + scratch + kRanks; }
    __device__ __forceinline__ uint32_t &next_digits(uint32_t plane) const // a bit position in shared memory
    {
        return shared_word((scratch + kDigits) / 4u + plane);
    }
    __device__ __forceinline__ T *entries() const { return reinterpret_cast<T *>(shared_bytes() + scratch); }
    __device__ __forceinline__ T *elements() const { return reinterpret_cast<T *>(ranks() + most); }
    static __device__ __forceinline__ uint32_t shared_byte_of(const void *p)
    {
        return static_cast<uint32_t>(static_cast<const uint8_t *>(p) - shared_bytes());
    }
    __device__ __forceinline__ uint16_t *numbers() const { return reinterpret_cast<uint16_t *>(elements()); }
    __device__ __forceinline__ uint32_t bitmap() const // the number of a shared word
    {
        return (scratch + kRanks + most + element_bytes_of(cb)) / 4u;
    }

    __device__ __forceinline__ ListedDecoder(const ibp_codebook &codebook, uint32_t shared)
        : cb(codebook), scratch(shared), most(in_register(batch_of(codebook)))
    {
        if (cb.num_clusters <= 1u) fill_entries(Book(cb, 0));
    }
    __device__ __forceinline__ void fill_entries(const Book &book) const
    {
        const uint32_t r = cb.planes.residual_bits;
        for (uint32_t i = lane_id(); i < kEntries; i += kWarp)
            entries()[i] = element_of(i < cb.planes.num_entries && r < kBits ? Word{book.entry(i)} << r : Word{0});
    }

    // ---- ranks ----

    // Writes the ranks of n elements according to their digits of plane 0, and fills the list of escaped elements with
    // the numbers of the elements whose digits are escapes. An escape gets the rank 2^num_bits - 1, which is the rank
    // of the first entry of plane 1. plane: the bit at which the first element's digit begins. Returns the number of
    // escapes.
    __device__ __forceinline__ uint32_t name_first(uint32_t plane, uint32_t n, uint32_t num_bits) const
    {
        const DigitSpread spread(num_bits);
        uint32_t num_escaped = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += kOctet * kWarp) {
            const uint32_t i = ibp_min_u32(base + kOctet * lane_id(), n);
            const uint32_t digits =
                low_bits(spread.nibbles(shared_bits(plane + i * num_bits)), 4u * ibp_min_u32(n - i, kOctet));
            const uint32_t escaped = escaped_digits(digits, spread.above);
            const uint32_t even = digits & 0x0f0f0f0fu, odd = digits >> 4 & 0x0f0f0f0fu;
            if (i < n)
                *reinterpret_cast<uint2 *>(ranks() + i) =
                    make_uint2(permute_bytes(even, odd, 0x5140), permute_bytes(even, odd, 0x7362));
            const uint32_t count = ibp_popcount(escaped), sums = G::scan_in_warp(count);
            uint32_t to = shared_byte_of(numbers() + (num_escaped + sums - count));
#pragma unroll
            for (uint32_t e = 0; e < kOctet; e++) {
                if (escaped >> (4u * e + 3u) & 1u)
                    *reinterpret_cast<uint16_t *>(shared_bytes() + to) = static_cast<uint16_t>(i + e);
                // A second `if` with the same test makes the compiler add to the register of `to` in place.
                if (escaped >> (4u * e + 3u) & 1u) to += 2u;
            }
            num_escaped += G::last_lane(sums);
        }
        return num_escaped;
    }
    // Does what name_first does, for the n elements in the list of escaped elements, according to their digits of plane
    // 1, 2 or 3. first: the rank of the plane's first entry. An escape again gets the rank of the next plane's first
    // entry. So after the last plane, the rank num_entries marks the elements with raw symbols.
    __device__ __forceinline__ uint32_t name_next(uint32_t plane, uint32_t n, uint32_t num_bits, uint32_t first) const
    {
        const uint32_t escape = (1u << num_bits) - 1u, position = plane + lane_id() * num_bits;
        Cursor digits{&shared_word(position / 32u), position}; // a warp's 32 digits fill num_bits words
        const uint16_t *list = numbers() + lane_id();
        uint32_t num_escaped = 0;
        __syncwarp(); // before the list of escaped elements is read
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += kWarp, digits.words += num_bits, list += kWarp) {
            const bool active = lane_id() < n - base;
            const uint32_t digit = digits.word(0) & escape; // the bits of lanes that are not active are unspecified
            const uint32_t j = active ? *list : 0u;
            if (active) ranks()[j] = static_cast<uint8_t>(first + digit);
            const bool open = active && digit == escape;
            const uint32_t escaped = G::ballot(open);
            __syncwarp(); // before the list of escaped elements is overwritten
            if (open) numbers()[num_escaped + ibp_popcount(escaped & G::lanes_below())] = static_cast<uint16_t>(j);
            num_escaped += ibp_popcount(escaped);
        }
        return num_escaped;
    }
    __device__ __forceinline__ uint32_t name(uint32_t p, uint32_t plane, uint32_t n, uint32_t num_bits,
                                             uint32_t first) const
    {
        return p == 0u ? name_first(plane, n, num_bits) : name_next(plane, n, num_bits, first);
    }

    // residuals, raws: the bits at which the residuals and the raw symbols of the next elements begin. num_raws: number
    // of raw symbols in the batch. While find_values goes through the planes, raws is the bit at which the next plane
    // begins, and num_raws is the number of elements that reach it.
    struct Values {
        uint32_t residuals, raws, num_raws;
    };
    // Finds where the parts of the values of k elements begin. The values begin at bit `start` of shared memory. If the
    // elements are a single batch, also writes their ranks. Returns false if the values do not end at bit `end`.
    __device__ __forceinline__ bool find_values(uint32_t start, uint32_t end, uint32_t k, uint32_t symbol_bits,
                                                bool is_batch, Values &values) const
    {
        values = {start, start + to_byte(k * cb.planes.residual_bits), k};
        uint32_t first = 0;
#pragma unroll 1
        for (uint32_t p = 0; p < cb.planes.num_planes; p++) {
            const uint32_t plane = values.raws, num_bits = cb.planes.digit_bits[p];
            values.raws += to_byte(values.num_raws * num_bits);
            if (G::any_in_warp(values.raws > end)) return false;
            if (lane_id() == 0u) next_digits(p) = plane;
            values.num_raws = is_batch ? name(p, plane, values.num_raws, num_bits, first)
                                       : Book::template count_escapes<G>(plane, {0, values.num_raws}, num_bits);
            first += (1u << num_bits) - 1u;
        }
        return values.raws + to_byte(values.num_raws * symbol_bits) == end;
    }
    // Writes the ranks of the next n elements, which form a batch. Used only if the row has several batches. Returns
    // the number of raw symbols in the batch.
    __device__ __forceinline__ uint32_t name_batch(uint32_t n) const
    {
        uint32_t first = 0;
#pragma unroll 1
        for (uint32_t p = 0; p < cb.planes.num_planes; p++) {
            __syncwarp(); // before next_digits is read
            const uint32_t plane = next_digits(p), num_bits = cb.planes.digit_bits[p];
            __syncwarp(); // before next_digits is overwritten
            if (lane_id() == 0u) next_digits(p) = plane + n * num_bits;
            n = name(p, plane, n, num_bits, first);
            first += (1u << num_bits) - 1u;
        }
        return n;
    }

    // ---- elements ----

    // The shifts and masks that combine residuals with entries, all elements of a word at a time. WordJoin would give
    // the same results, but it takes 4 % more instructions here.
    struct ResidualJoin {
        static constexpr uint32_t kWordBits = kBits < 32u ? kBits : 32u, kEach = ~0u / (~0u >> (32u - kWordBits));
        // kept: a mask of the bits of every element that come from its residual and are not rotated to the top. top: if
        // the rotation moves a bit of the residual to the highest bit of its element, a mask of the highest bit of
        // every element; else 0.
        uint32_t num_bits, invariant, rotate, kept, top;

        __device__ __forceinline__ explicit ResidualJoin(const ibp_planes &planes)
            : num_bits(planes.residual_bits), invariant(ibp_min_u32(Book::invariant_bits(planes), kWordBits - 1u)),
              rotate(planes.rotate),
              kept(num_bits > rotate ? (low_bits(~0u, num_bits - rotate) << invariant) * kEach : 0u),
              top(num_bits != 0u && rotate ? kEach << (kWordBits - 1u) : 0u)
        {
        }
        // Puts residuals into a word of elements. entries: the elements, with zeros in their residual bits. fields: the
        // residuals, packed from bit 0; bits above them are ignored.
        __device__ __forceinline__ uint32_t beside(uint32_t entries, uint32_t fields) const
        {
            if (sizeof(T) == 1) fields = select_bits(0xffffu, fields, fields << (16u - 2u * num_bits));
            if (sizeof(T) == 1) fields = select_bits(0x00ff00ffu, fields, fields << (8u - num_bits));
            if (sizeof(T) == 2) fields = select_bits(0xffffu, fields, fields << (16u - num_bits));
            fields <<= invariant;
            return entries | (fields >> rotate & kept) | (fields << (kWordBits - 1u - invariant) & top);
        }
    };

    // Joins the n elements of a batch. A lane takes eight elements at a time. If there are planes, and kEntries leaves
    // room for all raw symbols after the codebook's entries, raw symbols become entries. Otherwise elements with raw
    // symbols are joined once more, one by one.
    __device__ __forceinline__ void join_batch(const Book &book, const Values &values, uint32_t n) const
    {
        const uint32_t r = cb.planes.residual_bits, raw_ranks = cb.planes.num_entries * 0x01010101u;
        const bool few = values.num_raws <= kEntries - cb.planes.num_entries && cb.planes.num_planes != 0u;
        const ResidualJoin with(cb.planes);
        uint32_t raw = 0;
        __syncwarp(); // before the ranks and the list of escaped elements are read
        if (few) {    // raw symbols become entries
#pragma unroll 1
            for (uint32_t i = lane_id(); i < values.num_raws; i += kWarp) {
                const uint32_t rank = cb.planes.num_entries + i;
                entries()[rank] = raw_element(book, values, i);
                ranks()[numbers()[i]] = static_cast<uint8_t>(rank);
            }
            __syncwarp(); // before the ranks are read and elements overwrite the list
        }
#pragma unroll 1
        for (uint32_t base = 0; base < n; base += kOctet * kWarp) {
            const uint32_t j = base + kOctet * lane_id(), residuals = values.residuals + j * r;
            uint2 octet = make_uint2(raw_ranks, raw_ranks);
            if (cb.planes.num_planes != 0u && j < n) octet = *reinterpret_cast<const uint2 *>(ranks() + j);
            if (j < n) join_octet(with, octet, residuals, j);
            if (few) continue;
            const auto equal = [&](uint32_t ranks) { return highest_bits(~((ranks ^ raw_ranks) + 0x7f7f7f7fu)); };
            // No rank is above 127, so the sum in `equal` does not carry from byte to byte.
            uint32_t mine = low_bits(equal(octet.x) | equal(octet.y) << 4u, n - ibp_min_u32(j, n));
            const uint32_t count = ibp_popcount(mine), sums = G::scan_in_warp(count);
            for (uint32_t i = raw + sums - count; mine != 0u; mine &= mine - 1u, i++) {
                const uint32_t e = lowest_of(mine);
                elements()[j + e] = raw_element(book, values, i) | element_of(low_bits(field(residuals + e * r), r));
            }
            raw += G::last_lane(sums);
        }
        __syncwarp(); // before the elements are read
    }
    // Returns the element of raw symbol i, with a residual of 0.
    __device__ __forceinline__ T raw_element(const Book &book, const Values &values, uint32_t i) const
    {
        const uint32_t r = cb.planes.residual_bits, at = values.raws + i * book.symbol_bits;
        return element_of(r < kBits ? low_bits(field(at), book.symbol_bits) << r : Word{0});
    }
    // Joins elements j to j + 7 of a batch, whose residuals begin at bit `residuals`. octet: their ranks. Elements past
    // the batch's end are unspecified; their bits come from the stage or from the scratch that follows the stage.
    __device__ __forceinline__ void join_octet(const ResidualJoin &with, uint2 octet, uint32_t residuals,
                                               uint32_t j) const
    {
        constexpr uint32_t kPerWord = sizeof(T) == 8 ? 1u : 4u / static_cast<uint32_t>(sizeof(T));
        const uint32_t r = cb.planes.residual_bits;
        const auto entry = [&](uint32_t e) {
            return entries()[permute_bytes(e < 4u ? octet.x : octet.y, 0, 0x4440u + e % 4u)];
        };
        uint32_t words[kOctet * sizeof(T) / 4u];
        if constexpr (sizeof(T) == 8) {
#pragma unroll
            for (uint32_t e = 0; e < kOctet; e++) {
                const uint64_t element = entry(e) | element_of(low_bits(field(residuals + e * r), r));
                words[2u * e] = static_cast<uint32_t>(element),
                           words[2u * e + 1u] = static_cast<uint32_t>(element >> 32);
            }
        } else {
#pragma unroll
            for (uint32_t k = 0; k < kOctet / kPerWord; k++) {
                // The residuals of words k and k + 1, for an even k, begin at bit `two`.
                const uint32_t two = residuals + k / 2u * 2u * kPerWord * r;
                const Cursor fields{&shared_word(two / 32u), two};
                const uint32_t low = fields.word(0), high = fields.word(1);
                words[k] = 0;
#pragma unroll
                for (uint32_t e = 0; e < kPerWord; e++)
                    words[k] |= static_cast<uint32_t>(entry(k * kPerWord + e)) << e * kBits;
                words[k] = with.beside(words[k], k % 2u == 0u ? low : __funnelshift_rc(low, high, kPerWord * r));
            }
        }
        uint32_t *const to = reinterpret_cast<uint32_t *>(elements() + j);
#pragma unroll
        for (uint32_t i = 0; i < kOctet * sizeof(T) / 4u; i += 2u)
            *reinterpret_cast<uint2 *>(to + i) = make_uint2(words[i], words[i + 1u]);
    }
    // Returns the Word of shared memory that begins at bit `position`.
    static __device__ __forceinline__ Word field(uint32_t position)
    {
        if constexpr (sizeof(T) == 8)
            return shared_bits64(position);
        else
            return shared_bits(position);
    }
    // Undoes the rotation of an element, puts in its invariant bits, and returns it. coded: the symbol and the residual
    // of the element, still rotated.
    __device__ __forceinline__ T element_of(Word coded) const
    {
        const uint32_t invariant = Book::invariant_bits(cb.planes);
        if (cb.planes.rotate) coded = coded >> 1 | (coded & 1u) << (kBits - 1u - invariant);
        return static_cast<T>(coded << invariant | static_cast<Word>(Book::invariant_value(cb.planes)));
    }

    // ---- positions ----

    // Calls take(rank, position) for every position of a list of positions, where rank is the position's index in the
    // list. Returns whether the list is valid: it has form.num_positions positions, and these increase and are below
    // `columns`. take is not called for a position that is not valid. start: the bit of shared memory at which the list
    // begins; the list lies in the stage.
    //
    // The list has the form of Elias and Fano (FORMAT.md section 6): each 1 among the upper bits stands for one
    // position. If upper bit b is a 1 and j ones lie below it, it stands for the position (b - j) << low_bits | low
    // field j. Each lane takes some consecutive upper bits and decodes the positions that their ones stand for, one by
    // one.
    template <class Take>
    __device__ __forceinline__ bool walk_list(const ibp_position_form &form, uint32_t columns, uint32_t start,
                                              const Take &take) const
    {
        // each: number of upper bits that a lane takes at a time.
        const uint32_t lows = start + to_byte(form.upper_bits),
                       each = ibp_min_u32((form.upper_bits + kWarp - 1u) / kWarp, 32u);
        // edge: the least position that may follow the positions of all earlier upper bits.
        uint32_t found = 0, edge = 0;
        bool good = true;
#pragma unroll 1
        for (uint32_t i = 0; i < form.upper_bits; i += each * kWarp) {
            const uint32_t from = ibp_min_u32(i + each * lane_id(), form.upper_bits);
            uint32_t ones = low_bits(shared_bits(start + from), ibp_min_u32(form.upper_bits - from, each));
            const uint32_t count = ibp_popcount(ones), sums = G::scan_in_warp(count);
            // first: the least position that the lane has decoded. next: one more than the position that it decoded
            // last, which is the least that may follow; ~0 once a position was wrong.
            uint32_t rank = found + sums - count, first = ~0u, next = 0;
            found += G::last_lane(sums);
            if (G::any_in_warp(found > form.num_positions)) return false;
#pragma unroll 1
            for (uint32_t low = lows + rank * form.low_bits; G::any_in_warp(ones != 0u);
                 ones &= ones - 1u, low += form.low_bits) {
                if (ones == 0u)
                    // Lanes that have no positions left stay in the loop, so the warp does not diverge. If the warp
                    // could diverge, the compiler would add code to the atomic in `take` that determines the active
                    // lanes.
                    continue;
                const uint32_t bit = from + lowest_of(ones),
                               position = (bit - rank) << form.low_bits | low_bits(shared_bits(low), form.low_bits);
                const bool follows = position >= next && position < columns;
                if (follows) take(rank, position);
                first = ibp_min_u32(first, position);
                next = follows ? position + 1u : ~0u, rank++; // no position follows a wrong one
            }
            // A lane without positions passes on 0, so the next lane compares its positions with no earlier one. This
            // is right, because the next lane's upper bits alone make its positions greater than all earlier ones.
            const uint32_t below = __shfl_up_sync(kAllLanes, next, 1);
            good = good && next != ~0u && first >= (lane_id() == 0u ? edge : below);
            edge = __shfl_sync(kAllLanes, next, kWarp - 1u);
        }
        __syncwarp(); // before the bitmap or the array of columns is read
        return __all_sync(kAllLanes, good) && found == form.num_positions;
    }

    // A bitmap of the listed positions or, if `inverted` is all ones, of the positions that are not listed.
    struct Bitmap {
        Stage stage;
        uint32_t start, columns, inverted;

        __device__ __forceinline__ uint32_t word(uint32_t first) const
        {
            if (first >= columns) return 0u;
            return low_bits(stage.bits_at(start + first) ^ inverted, ibp_min_u32(columns - first, 32u));
        }
    };
    // Finds the bitmap of a row's listed positions in the stage or, if the positions are a list, makes a bitmap of them
    // in the scratch. map.stage then stands for the scratch, and limits reads to it. start: the bit at which the
    // positions begin. Returns false if the list is not valid.
    __device__ __forceinline__ bool find_bitmap(Stage stage, const ibp_position_form &form, uint32_t columns,
                                                uint32_t start, Bitmap &map) const
    {
        map = {stage, start, columns, 0};
        if (!form.is_list) return true;
        const uint32_t first = bitmap(), num_words = bitmap_words(columns);
        for (uint32_t i = lane_id(); i < num_words; i += kWarp) shared_word(first + i) = 0;
        __syncwarp();
        map.stage.last_word = first + num_words - 2u, map.start = 32u * first;
        if (form.is_complement) map.inverted = ~0u;
        return walk_list(form, columns, start, [&](uint32_t, uint32_t position) {
            atomicOr(&shared_word(first + position / 32u), 1u << position % 32u);
        });
    }

    // ---- columns ----

    // Writes a default row. Not inlined, so that the code takes no registers from the loops around its call.
    static __device__ __noinline__ void fill(const ibp_codebook &cb, Window window)
    {
        fill_default<G>(cb, window.dst, window.low, window.high);
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

    // Stores the default in all columns of a row that consists of whole vectors.
    __device__ __forceinline__ void fill_vectors(const Window &window) const
    {
        uint32_t words[4] = {};
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) put_element(words, e, static_cast<T>(cb.planes.default_value));
#pragma unroll 4
        for (uint32_t i = lane_id(); i < cb.row_bytes / 16u; i += kWarp) store_words(window, true, 4u * i, words);
    }

    // Stores 16 bytes of elements one by one. column: the first element's column, counted among the live columns.
    static __device__ __noinline__ void store_live(const ibp_planes &planes, Window window, uint32_t column,
                                                   uint32_t columns, uint4 words)
    {
        const uint32_t values[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) {
            Word element = values[e * sizeof(T) / 4u] >> (e * sizeof(T) % 4u * 8u);
            if (sizeof(T) == 8) element |= static_cast<Word>(uint64_t{values[(e * sizeof(T) / 4u + 1u) % 4u]} << 32);
            if (column + e < columns) ibp::put_element<T, FIELDS>(planes, window, column + e, static_cast<T>(element));
        }
    }

    // A tile of a row's columns, listed or not. Each lane holds the bits of 32 columns.
    struct Tile {
        uint32_t first, held; // the index of the first column, and the number of columns
        // listed: a bit for each of the lane's own columns, set if the column is listed.
        uint32_t listed;
        // before: number of the batch's elements whose columns come before the lane's columns.
        uint32_t before;
        // earlier: number of the row's listed elements that come before the batch.
        uint32_t earlier;
    };
    // Advances past an element. If the element is listed, advances `next`, the shared byte of the next listed element.
    // Otherwise, if SIGNED, shifts `signs`, so that the next sign becomes its lowest bit.
    template <bool SIGNED>
    static __device__ __forceinline__ void go_on(uint32_t listed, uint32_t &next, uint32_t &signs)
    {
#ifdef __CUDACC__
        if (SIGNED) {
            // This is in assembly, because the compiler would compute the results in other registers and then move
            // them.
            asm("{.reg .pred p; setp.ne.u32 p, %2, 0; @p add.u32 %0, %0, %3; @!p shr.u32 %1, %1, 1;}"
                : "+r"(next), "+r"(signs)
                : "r"(listed), "n"(sizeof(T)));
            return;
        }
#endif
        if (listed != 0u)
            next += static_cast<uint32_t>(sizeof(T));
        else if (SIGNED)
            signs >>= 1;
    }
    // Assembles 16 bytes of elements. mask: a bit for each element, set if the element is listed. rank: the index in
    // the batch of the first listed element. signs: the highest bits of the unlisted elements; used only if SIGNED.
    template <bool SIGNED>
    __device__ __forceinline__ void pick(uint32_t mask, uint32_t rank, uint32_t signs, uint32_t (&words)[4]) const
    {
        const T default_value = static_cast<T>(SIGNED ? cb.planes.default_value & ~kSign : cb.planes.default_value);
        uint32_t next = shared_byte_of(elements() + rank);
#pragma unroll
        for (uint32_t e = 0; e < kPerVector; e++) {
            T element = default_value;
            if (SIGNED) element |= static_cast<T>(static_cast<Word>(signs & 1u) << (kBits - 1u));
            if (mask >> e & 1u) element = *reinterpret_cast<const T *>(shared_bytes() + next);
            go_on<SIGNED>(mask & 1u << e, next, signs);
            put_element(words, e, element);
        }
    }
    // Stores a tile of columns. signs: the bit at which the row's signs begin.
    __device__ __forceinline__ void store_tile(uint32_t columns, const Tile &tile, Stage stage, uint32_t signs,
                                               const Window &window) const
    {
        constexpr uint32_t kLanesOfWord = 32u / kPerVector, kWordsOfStep = kWarp / kLanesOfWord;
        const uint32_t shift = lane_id() % kLanesOfWord * kPerVector;
        const bool lives = Book::num_constant(cb.planes) != 0u, units = !lives && window.is_units(cb.row_bytes, 16);
#pragma unroll 1
        for (uint32_t s = 0; s * kWarp * kPerVector < tile.held; s++) {
            const uint32_t source = s * kWordsOfStep + lane_id() / kLanesOfWord,
                           column = tile.first + (s * kWarp + lane_id()) * kPerVector;
            const uint32_t word = __shfl_sync(kAllLanes, tile.listed, source),
                           rank = __shfl_sync(kAllLanes, tile.before, source) + ibp_popcount(low_bits(word, shift));
            uint32_t words[4] = {};
            if (Book::signed_default(cb.planes))
                pick<true>(word >> shift, rank, stage.bits_at(signs + (column - rank - tile.earlier)), words);
            else
                pick<false>(word >> shift, rank, 0, words);
            if (column >= tile.first + tile.held) continue;
            if (lives)
                store_live(cb.planes, window, column, columns, make_uint4(words[0], words[1], words[2], words[3]));
            else
                store_words(window, units, column * static_cast<uint32_t>(sizeof(T)) / 4u, words);
        }
    }

    // A row, as its header and the position form describe it.
    struct Listed {
        // positions, signs: the bits of shared memory at which the positions, and the highest bits of the unlisted
        // elements, begin.
        uint32_t num_listed, columns, positions, signs;
        bool closed, is_batch, is_sparse; // is_batch: the listed elements are one batch
        ibp_position_form form;
    };

    // Returns the array in shared memory with the columns of the listed elements. Only sparse rows (is_sparse) use it.
    __device__ __forceinline__ uint16_t *listed_columns() const
    {
        return reinterpret_cast<uint16_t *>(&shared_word(bitmap()));
    }
    __device__ __forceinline__ bool find_positions(const Listed &row, Stage stage, Bitmap &map) const
    {
        if (!row.is_sparse) return find_bitmap(stage, row.form, row.columns, row.positions, map);
        uint16_t *const columns = listed_columns();
        return walk_list(row.form, row.columns, row.positions,
                         [&](uint32_t rank, uint32_t position) { columns[rank] = static_cast<uint16_t>(position); });
    }
    // Joins the next n elements, which form a batch, and advances `values` past them.
    __device__ __forceinline__ void take_batch(const Book &book, const Listed &row, uint32_t n, Values &values) const
    {
        if (!row.is_batch) values.num_raws = name_batch(n);
        join_batch(book, values, n);
        values.residuals += n * cb.planes.residual_bits, values.raws += values.num_raws * book.symbol_bits;
    }
    // Stores the default in all columns, and then overwrites the listed columns with their elements, one by one.
    __device__ __forceinline__ void store_each(const Book &book, const Listed &row, Values &values,
                                               const Window &window) const
    {
        const uint16_t *const columns = listed_columns();
        const bool units = Book::num_constant(cb.planes) == 0u && window.is_units(cb.row_bytes, 16);
        if (units)
            fill_vectors(window);
        else
            fill(cb, window);
        __syncwarp();
#pragma unroll 1
        for (uint32_t first = 0; first < row.num_listed; first += most) {
            const uint32_t n = ibp_min_u32(row.num_listed - first, most);
            if (!row.closed) take_batch(book, row, n, values);
#pragma unroll 1
            for (uint32_t j = lane_id(); j < n; j += kWarp) {
                const T element = row.closed ? static_cast<T>(cb.planes.closed_value) : elements()[j];
                const uint32_t column = columns[first + j];
                if (units)
                    reinterpret_cast<T *>(window.dst)[column] = element;
                else
                    ibp::put_element<T, FIELDS>(cb.planes, window, column, element);
            }
            __syncwarp(); // before the elements are overwritten
        }
    }

    // Stores all columns of a row. values: the values of the listed elements; unused if the row is closed, that is, if
    // all its listed elements equal planes.closed_value. Returns false if the positions are not valid.
    __device__ __forceinline__ bool store_row(const Book &book, const Listed &row, Values &values, Stage stage,
                                              const Window &window) const
    {
        Bitmap map{}; // without columns: no column is listed
        if (row.num_listed != 0u && G::any_in_warp(!find_positions(row, stage, map))) return false;
        if (row.is_sparse) {
            store_each(book, row, values, window);
            return true;
        }
        if (Book::num_constant(cb.planes) != 0u) {
            fill(cb, window);
            __syncwarp();
        }
        uint32_t found = 0;
#pragma unroll 1
        for (uint32_t tile = 0; tile < row.columns; tile += most) {
            const uint32_t listed = 32u * lane_id() < most ? map.word(tile + 32u * lane_id()) : 0u,
                           count = ibp_popcount(listed), sums = G::scan_in_warp(count), n = G::last_lane(sums);
            if (G::any_in_warp(found + n > row.num_listed)) return false;
            const uint32_t batch = row.is_batch ? row.num_listed : n;
            if (!row.closed && (tile == 0u || !row.is_batch)) take_batch(book, row, batch, values);
            if (row.closed && (tile == 0u || !row.is_batch)) {
                for (uint32_t j = lane_id(); j < batch; j += kWarp)
                    elements()[j] = static_cast<T>(cb.planes.closed_value);
                __syncwarp();
            }
            const uint32_t earlier = row.is_batch ? 0u : found, before = (row.is_batch ? found : 0u) + (sums - count);
            store_tile(row.columns, {tile, ibp_min_u32(row.columns - tile, most), listed, before, earlier}, stage,
                       row.signs, window);
            __syncwarp(); // before the elements are overwritten
            found += n;
        }
        return found == row.num_listed;
    }

    // Rebuilds a row (decoder.cuh).
    __device__ __forceinline__ bool decode(uint32_t cluster, bool active, Stage stage, uint32_t start_bit,
                                           uint32_t coded_bytes, const Window &window) const
    {
        if (!G::any_in_warp(active)) return true;
        const Book book(cb, cluster);
        const uint32_t columns = book.columns, header_bytes = ibp_header_bytes(columns),
                       end = start_bit + 8u * coded_bytes;
        ibp_listed_header header;
        // The reduction makes the header, and everything that is computed from it, uniform in the warp. So these values
        // are in uniform registers, and the compiler knows that the lanes stay together.
        const uint32_t bits = __reduce_or_sync(kAllLanes, low_bits(stage.bits_at(start_bit), 8u * header_bytes));
        if (G::any_in_warp(!ibp_split_header(bits, coded_bytes, columns, &header))) return false;
        const uint32_t k = header.num_listed;
        Listed row{};
        row.num_listed = k, row.columns = columns, row.closed = header.is_closed, row.is_batch = k <= most;
        row.positions = row.signs = start_bit + 8u * header_bytes;
        if (k != 0u) {
            row.form = choose_position_form(k, columns);
            row.signs += 8u * row.form.num_bytes;
        }
        const uint32_t start = row.signs + (Book::signed_default(cb.planes) ? to_byte(columns - k) : 0u);
        if (G::any_in_warp(start > end)) return false;
        if (k == 0u && !Book::signed_default(cb.planes)) {
            fill(cb, window);
            return start == end;
        }
        if (cb.num_clusters > 1u) fill_entries(book);
        row.is_sparse =
            row.form.is_list && !row.form.is_complement && kSparse * k <= columns && !Book::signed_default(cb.planes);
        row.closed = row.closed || k == 0u; // no values follow
        Values values{};
        const bool fits =
            row.closed ? start == end : find_values(start, end, k, book.symbol_bits, row.is_batch, values);
        if (G::any_in_warp(!fits)) return false;
        return store_row(book, row, values, stage, window);
    }
};

} // namespace ibp

#endif
