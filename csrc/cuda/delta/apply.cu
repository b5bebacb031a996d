// apply.cu - adds deltas to their bases (FORMAT.md section 9). A warp processes one row of differences at a time. It
// decodes the row in shared memory, as decode_listed.cuh does, and adds the listed elements to the 8-byte words of the
// base in which they lie, 32 elements at a time. If several elements lie in one word, the lane of the first of them
// adds all of them and writes the word once. Meanwhile the words for the next elements are loaded. Each changed word
// also changes the base's sum of words; so the sum of the result is known without reading the result.
//
// A call queues these kernels one after the other, without waiting for a verdict:
//
// 1. sum_versions computes the sums of the bases.
// 2. judge_deltas compares these sums with those that the deltas require, and sets the verdict.
// 3. add_deltas adds the differences if the sums agree.
// 4. judge_deltas compares the sums of the results with those that the deltas require, and sets the verdict again.
// 5. add_deltas subtracts the same differences if these sums differ or a row was corrupt.
//
// A corrupt row is skipped both when the differences are added and when they are subtracted.
#include "../decode/decode_listed.cuh"
#include "versions.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kApplyThreads = 256, kSumOfVersionsThreads = 256, kJudgeThreads = 256;
constexpr uint32_t kMostSharedBytes = 98 << 10; // size in bytes of the shared memory that a block can have on any GPU

// The argument `state` of ibp_cuda_apply_deltas. base_sum, change and corrupt return the addresses of the three numbers
// of a version.
struct DeltaState {
    uint64_t *words;

    __device__ __forceinline__ uint64_t &verdict() const { return words[0]; }
    __device__ __forceinline__ uint64_t *base_sum(uint32_t version) const { return words + 1u + 3u * version; }
    __device__ __forceinline__ uint64_t *change(uint32_t version) const { return words + 2u + 3u * version; }
    __device__ __forceinline__ uint64_t *corrupt(uint32_t version) const { return words + 3u + 3u * version; }
};

__global__ void __launch_bounds__(kSumOfVersionsThreads)
    sum_versions(const ibp_delta_tensor *versions, const uint32_t num_versions, const int64_t num_rows,
                 const uint32_t row_bytes, const DeltaState state)
{
    const WarpRows mine(num_rows);
    PlacedSums<1> total;
#pragma unroll 1
    for (uint32_t k = 0; mine.has(k); k++) {
        const VersionRow row = find_row(versions, num_versions, row_bytes, mine.row(k));
        if (row.valid == 0u) continue;
        const ibp_delta_tensor &version = versions[row.version];
        const uint8_t *const from = version.base + row.start;
        const uint64_t first_word = static_cast<uint64_t>(row.start) / 8u;
        const uint32_t num_pairs = aligned(from, 16) ? row.valid / 16u : 0u;
        uint64_t sum = sum_pairs(reinterpret_cast<const ulonglong2 *>(from), num_pairs, lane_id(), kWarp, first_word);
        for (uint32_t w = 2u * num_pairs + lane_id(); 8u * w < row.valid; w += kWarp)
            sum += ibp_mix_word(load_any_word(from, row.valid, w), first_word + w);
        __syncwarp();
        total.open(state.base_sum(row.version));
        total.own[0] += sum;
    }
    total.flush();
}

// Sets the verdict if something is wrong. If is_applied is false, compares the sums of the bases with those that the
// deltas require. If is_applied is true, compares the sums of the results with those that the deltas require, and
// checks that no row was corrupt. The launch has one block.
__global__ void __launch_bounds__(kJudgeThreads)
    judge_deltas(const ibp_delta_tensor *versions, const uint32_t num_versions, const bool is_applied,
                 const DeltaState state)
{
    if (is_applied && state.verdict() != IBP_DELTA_APPLIED) return;
    bool wrong = false;
    for (uint32_t v = threadIdx.x; v < num_versions; v += kJudgeThreads) {
        const uint64_t base = *state.base_sum(v);
        if (is_applied)
            wrong = wrong || base + *state.change(v) != versions[v].result_sum || *state.corrupt(v) != 0u;
        else
            wrong = wrong || base != versions[v].base_sum;
    }
    __syncthreads(); // all threads have read the verdict before it is written
    if (wrong) state.verdict() = is_applied ? IBP_DELTA_DAMAGED : IBP_DELTA_OTHER_BASE;
}

// Adds rows of differences to a base or, if takes_back is true, subtracts them. T: an unsigned integer that has the
// size of an element. One warp processes a row; all its lanes must call the functions together.
template <typename T> struct DeltaAdder {
    using Decoder = ListedDecoder<T, kConsecutive>;
    using Book = typename Decoder::Book;
    static constexpr uint32_t kPerWord = 8u / sizeof(T), kBits = 8u * sizeof(T);

    const ibp_codebook &cb;
    const Decoder decoder;
    const Stage stage;
    const bool negates;

    // Returns the size of a warp's shared memory in bytes: a stage, which holds a coded row, and the decoder's scratch.
    static __host__ __device__ __forceinline__ uint32_t shared_bytes_of(const ibp_codebook &cb, Coded coded)
    {
        return (row_stage_bytes(most_stored(coded, cb.row_bytes)) + Decoder::scratch_bytes(cb) + 15u) / 16u * 16u;
    }
    // first: the shared byte at which the warp's memory begins.
    __device__ __forceinline__ DeltaAdder(const ibp_codebook &codebook, Coded coded, uint32_t first, bool takes_back)
        : cb(codebook), decoder(codebook, in_register(first + row_stage_bytes(most_stored(coded, codebook.row_bytes)))),
          stage(stage_at(first, most_stored(coded, codebook.row_bytes))), negates(takes_back)
    {
        __syncwarp(); // before the decoder's entries are read
    }

    // ---- the stored bytes of a row ----

    // length: the row's entry in `lengths`. start, stored: the byte of overflow at which the stored row begins, and its
    // size in bytes. good: the stored row lies in overflow; if false, the row is corrupt.
    struct Place {
        uint32_t length, stored;
        uint64_t start;
        bool good;
    };
    // Finds the stored bytes of a row. Loads the lengths of the rows that share its base, and the base, at once.
    __device__ __forceinline__ Place look_up(const ibp_delta_tensor &version, const VersionRow &row) const
    {
        const int64_t first = ibp_first_of_group(row.row);
        const auto own = static_cast<uint32_t>(row.row - first);
        const uint32_t of_lane = lane_id() <= own ? __ldg(version.lengths + first + lane_id()) : 0u;
        const bool has_base = version.bases != nullptr;
        const uint64_t base = has_base ? __ldg(version.bases + ibp_group_of_row(row.row)) : 0u;
        const uint32_t room = lane_id() < own ? ibp_stored_bytes(of_lane, cb.row_bytes, cb.row_bytes) : 0u,
                       length = __shfl_sync(kAllLanes, of_lane, own),
                       stored = ibp_stored_bytes(length, cb.row_bytes, row.valid);
        const uint64_t start = base + __reduce_add_sync(kAllLanes, room);
        const bool good = has_base && stored <= row.valid && ibp_part_in_bounds(base, 0u, version.overflow_bytes) &&
                          ibp_part_in_bounds(start, stored, version.overflow_bytes);
        return {length, stored, start, static_cast<bool>(__all_sync(kAllLanes, good))};
    }
    // Prefetches num_bytes bytes of overflow, beginning at byte `start`. The warp's next row usually begins where the
    // present one ends, and has about the same size.
    __device__ __forceinline__ void prefetch_behind(const ibp_delta_tensor &version, uint64_t start,
                                                    uint32_t num_bytes) const
    {
#ifdef __CUDACC__
        constexpr uint32_t kLine = 128;
        const uint32_t first = kLine * lane_id();
        if (first < num_bytes && ibp_part_in_bounds(start, first + 1u, version.overflow_bytes))
            asm volatile("prefetch.global.L2 [%0];" ::"l"(version.overflow + start + first));
#endif
    }
    // Copies a stored row into the stage. Returns the bit of shared memory at which the row begins.
    __device__ __forceinline__ uint32_t receive(const ibp_delta_tensor &version, uint64_t start, uint32_t stored) const
    {
        const uint8_t *const from = version.overflow + start;
        const uint32_t shift = reinterpret_cast<uintptr_t>(from) % 16u, num_vectors = (shift + stored + 15u) / 16u;
        const int64_t before = static_cast<int64_t>(start) - shift;
        prefetch_behind(version, start + stored, stored);
        for (uint32_t k = lane_id(); k < num_vectors; k += kWarp) {
            const int64_t at = before + 16 * int64_t{k};
            uint4 *const to = reinterpret_cast<uint4 *>(stage.bytes()) + k;
            if (at >= 0 && at + 16 <= version.overflow_bytes) {
                *to = *reinterpret_cast<const uint4 *>(version.overflow + at);
                continue;
            }
            for (int64_t b = 0; b < 16; b++)
                if (at + b >= 0 && at + b < version.overflow_bytes)
                    reinterpret_cast<uint8_t *>(to)[b] = version.overflow[at + b];
        }
        __syncwarp();
        return 8u * (stage.first + __shfl_sync(kAllLanes, shift, 0));
    }

    // ---- adding ----

    // A row of a base, to which differences are added. change: by how much the additions change the base's sum of
    // words. Each lane has the change for the words that it writes.
    struct Target {
        uint8_t *bytes;
        uint32_t valid;       // number of bytes that the row has
        bool is_whole;        // the row has row_bytes bytes and begins at a multiple of 8
        uint64_t key, change; // key: ibp_mix_word(word + key, w) is the mixed word of word w of the row

        __device__ __forceinline__ Target(uint8_t *row, uint32_t num_bytes, uint32_t row_bytes, uint64_t first_word)
            : bytes(row), valid(num_bytes), is_whole(__all_sync(kAllLanes, aligned(row, 8) && num_bytes == row_bytes)),
              key(first_word * IBP_GOLDEN), change(0)
        {
        }
        // Returns word w; bytes past the row's end count as zeros.
        __device__ __forceinline__ uint64_t load(uint32_t w) const
        {
            return is_whole ? __ldcg(reinterpret_cast<const unsigned long long *>(bytes) + w)
                            : load_any_word(bytes, valid, w);
        }
        // Adds a word of elements to word w of the row. before: the value of word w so far. Bytes past the row's end
        // are dropped.
        __device__ __forceinline__ void add(uint32_t w, uint64_t before, uint64_t elements)
        {
            const uint64_t after = ibp_add_elements(before, elements, ibp_highest_bits(sizeof(T)));
            if (is_whole) {
                __stcg(reinterpret_cast<unsigned long long *>(bytes) + w, after);
            } else {
                if (8u * w >= valid) return;
                store_any_word(bytes, valid, w, after);
            }
            change += ibp_mix_word(after + key, w) - ibp_mix_word(before + key, w);
        }
    };
    // Returns a word of differences, negated if they are subtracted.
    __device__ __forceinline__ uint64_t signed_elements(uint64_t elements) const
    {
        return negates ? ibp_subtract_elements(0, elements, ibp_highest_bits(sizeof(T))) : elements;
    }
    // Adds a row that is stored raw. start: the byte of overflow at which it begins.
    __device__ __forceinline__ void add_raw(const ibp_delta_tensor &version, uint64_t start, Target &target) const
    {
        for (uint32_t w = lane_id(); 8u * w < target.valid; w += kWarp)
            target.add(w, target.load(w), signed_elements(load_any_word(version.overflow + start, target.valid, w)));
        __syncwarp();
    }
    // Up to 32 consecutive listed elements, one for each lane. All listed elements of one word are in the same batch,
    // so that the words of the next batch can be loaded before this batch is added. Therefore some batches have fewer
    // than 32 elements.
    struct Batch {
        // count: number of elements. column: the column of the lane's element. joined: a bit for each lane, set if the
        // element of the next lane lies in the same word.
        uint32_t count, column, joined;
        uint64_t before; // the word of the base in which the lane's element lies
    };
    // Returns the batch that begins with element `first` of the n elements whose columns are in decoder.numbers().
    // Loads the words of the base.
    __device__ __forceinline__ Batch begin_batch(uint32_t first, uint32_t n, const Target &target) const
    {
        Batch batch;
        const uint32_t j = ibp_min_u32(first + lane_id(), n - 1u);
        const uint16_t *const columns = decoder.numbers() + j;
        batch.column = columns[0];
        batch.before = target.load(batch.column / kPerWord);
        const bool joins = j + 1u < n && batch.column / kPerWord == columns[1] / kPerWord;
        batch.joined = __ballot_sync(kAllLanes, joins);
        batch.count = ibp_min_u32(n - first, kWarp - static_cast<uint32_t>(__clz(static_cast<int>(~batch.joined))));
        batch.joined &= low_bits(~0u, batch.count);
        return batch;
    }
    // Adds the elements of a batch. element: the lane's element. The lane of the first element of a word adds all
    // elements of the word.
    __device__ __forceinline__ void add_elements_of(const Batch &batch, T element, Target &target) const
    {
        const auto mine = static_cast<uint64_t>(element) << kBits * (batch.column % kPerWord) % 64u;
        uint64_t elements = mine;
        uint32_t joined = batch.joined; // a bit for each lane, set if the next d lanes have the same word
#pragma unroll 1
        for (uint32_t d = 1; joined != 0u; d++, joined &= batch.joined >> (d - 1u)) {
            const uint32_t low = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(mine), d),
                           high = __shfl_down_sync(kAllLanes, static_cast<uint32_t>(mine >> 32), d);
            if (joined >> lane_id() & 1u) elements |= low | static_cast<uint64_t>(high) << 32;
        }
        const uint32_t firsts = low_bits(~(batch.joined << 1), batch.count);
        if (firsts >> lane_id() & 1u) target.add(batch.column / kPerWord, batch.before, elements);
    }

    // ---- listed rows ----

    // The values of the listed elements that have not been read yet. parts: the bits of shared memory at which their
    // residuals, the digits of each plane, and the raw symbols begin. closed: the row has no values, because all its
    // listed elements equal the codebook's closed value.
    struct Values {
        ValueParts parts;
        bool closed;
    };
    // Returns the next n elements, one for each lane, and advances `values` past them. Planes that no element reaches,
    // and residuals of 0 bits, are not read.
    __device__ __forceinline__ T next_elements(const Book &book, Values &values, uint32_t n) const
    {
        if (values.closed) return static_cast<T>(cb.planes.closed_value);
        ValueParts &parts = values.parts;
        const uint32_t r = cb.planes.residual_bits;
        uint32_t at = lane_id(), rank = 0, reaching = n, escaped = kAllLanes;
        bool open = lane_id() < n;
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            if (p >= cb.planes.num_planes || escaped == 0u) break;
            const uint32_t num_bits = cb.planes.digit_bits[p], escape = low_bits(~0u, num_bits),
                           digit = shared_bits(parts.digits[p] + at * num_bits) & escape;
            parts.digits[p] += reaching * num_bits;
            if (open) rank += digit;
            open = open && digit == escape;
            escaped = __ballot_sync(kAllLanes, open);
            at = ibp_popcount(escaped & Decoder::G::lanes_below()), reaching = ibp_popcount(escaped);
        }
        if (escaped == 0u && r == 0u) return decoder.entries()[rank];
        typename Decoder::Word raw = 0;
        uint32_t &raws = parts.digits[IBP_MAX_PLANES];
        if (open && r < kBits) raw = low_bits(decoder.field(raws + at * book.symbol_bits), book.symbol_bits) << r;
        if (escaped != 0u) raws += reaching * book.symbol_bits;
        if (r != 0u) raw |= low_bits(decoder.field(parts.residuals + lane_id() * r), r);
        parts.residuals += n * r;
        return static_cast<T>(decoder.entries()[rank] | decoder.element_of(raw));
    }
    // A tile is 32 * kWarp columns: each lane takes one word of the bitmap. Returns the number of columns that
    // decoder.numbers() can hold: those of a tile or, if the row has fewer, all columns of the row, rounded up to a
    // multiple of 16.
    __device__ __forceinline__ uint32_t most_columns() const { return ibp_min_u32(Decoder::batch_of(cb), 32u * kWarp); }
    // Writes listed columns of a bitmap to decoder.numbers(), beginning with the tile whose first column is *tile.
    // Advances *tile past the tiles whose columns it has written. If decoder.numbers() can hold all listed columns that
    // are left, writes all of them; otherwise writes those of the next tile that has any. left: number of listed
    // columns that are left. Returns the number of columns written.
    __device__ __forceinline__ uint32_t take_columns(const typename Decoder::Bitmap &map, uint32_t left,
                                                     uint32_t *tile) const
    {
        uint32_t held = 0;
        __syncwarp(); // before the previous columns are overwritten
#pragma unroll 1
        do {
            uint32_t listed = map.word(*tile + 32u * lane_id());
            const uint32_t count = ibp_popcount(listed), sums = Decoder::G::scan_in_warp(count);
            uint16_t *to = decoder.numbers() + (held + sums - count);
            for (; listed != 0u; listed &= listed - 1u)
                *to++ = static_cast<uint16_t>(*tile + 32u * lane_id() + lowest_of(listed));
            held += Decoder::G::last_lane(sums), *tile += 32u * kWarp;
        } while (held == 0u || (held < left && left <= most_columns()));
        __syncwarp(); // before the columns are read
        return held;
    }
    // Returns whether a bitmap has k ones.
    __device__ __forceinline__ bool has_ones(const typename Decoder::Bitmap &map, uint32_t columns, uint32_t k) const
    {
        uint32_t count = 0;
        for (uint32_t first = 32u * lane_id(); first < columns; first += 32u * kWarp)
            count += ibp_popcount(map.word(first));
        return __reduce_add_sync(kAllLanes, count) == k;
    }

    // Adds the coded row of coded_bytes bytes that begins at bit start_bit of shared memory. If the row is corrupt,
    // adds nothing and returns false.
    __device__ __forceinline__ bool add_coded(uint32_t start_bit, uint32_t coded_bytes, Target &target) const
    {
        const Book book(cb, 0);
        const uint32_t columns = book.columns, header_bits = 8u * ibp_header_bytes(columns),
                       end = start_bit + 8u * coded_bytes, positions = start_bit + header_bits;
        ibp_listed_header header;
        const uint32_t first_bits = __shfl_sync(kAllLanes, stage.bits_at(start_bit), 0);
        if (!ibp_split_header(low_bits(first_bits, header_bits), coded_bytes, columns, &header)) return false;
        const uint32_t k = header.num_listed;
        if (k == 0u) return positions == end;
        const ibp_position_form form = choose_position_form(k, columns);
        const uint32_t start = positions + 8u * form.num_bytes;
        if (start > end) return false;
        const bool is_direct = form.is_list && !form.is_complement && k <= most_columns();
        typename Decoder::Bitmap map{};
        uint32_t held = k, tile = 0; // number of columns in decoder.numbers(); first column of the next tile
        if (is_direct) {
            uint16_t *const to = decoder.numbers();
            if (!decoder.walk_list(form, columns, positions, [&](uint32_t rank, uint32_t position) {
                    to[rank] = static_cast<uint16_t>(position);
                }))
                return false;
        } else {
            if (!decoder.find_bitmap(stage, form, columns, positions, map) || !has_ones(map, columns, k)) return false;
            held = take_columns(map, k, &tile);
        }
        Batch batch = begin_batch(0, held, target); // its words are loaded while the values are found
        Values values{};
        values.closed = header.is_closed;
        if (!values.closed)
            values.parts = book.template find_parts<typename Decoder::G, 0>(
                start, end, k, {0, k}, 0, [&](uint32_t, uint32_t from, DigitRange range, uint32_t num_bits) {
                    if (range.from == range.to) return 0u;
                    return Book::template count_escapes<typename Decoder::G>(from, range, num_bits);
                });
        if ((values.closed ? start : values.parts.end) != end) return false;
        // first: number of columns in decoder.numbers() that are done. left: number of listed columns that have not
        // been written to decoder.numbers() yet.
        uint32_t first = 0, left = k - held;
        bool goes_on;
#pragma unroll 1
        do {
            Batch next = batch;
            first += batch.count;
            if (first == held && left != 0u) held = take_columns(map, left, &tile), left -= held, first = 0;
            goes_on = first != held;
            if (goes_on) next = begin_batch(first, held, target); // loaded while the present batch is added
            T element = next_elements(book, values, batch.count);
            if (negates) element = static_cast<T>(T{0} - element);
            add_elements_of(batch, element, target);
            batch = next;
        } while (goes_on);
        return true;
    }

    // Adds a row of differences to its version's base. Returns in each lane a part of the change of the base's sum of
    // words. The change is the sum of the parts of all lanes. *good: receives false if the row is corrupt, else true.
    __device__ __forceinline__ uint64_t add(const ibp_delta_tensor &version, const VersionRow &row, const Place &place,
                                            bool *good) const
    {
        *good = place.good;
        if (!*good) return 0;
        Target target(version.base + row.start, row.valid, cb.row_bytes, static_cast<uint64_t>(row.start) / 8u);
        if (place.length == 0u)
            add_raw(version, place.start, target);
        else
            *good = add_coded(receive(version, place.start, place.stored), place.stored, target);
        __syncwarp(); // before the stage is overwritten by the next row
        return target.change;
    }
};

// If takes_back is false, adds the rows that `coded` selects, provided that the verdict is IBP_DELTA_APPLIED. If
// takes_back is true, subtracts these rows, provided that the verdict is IBP_DELTA_DAMAGED.
template <typename T>
__global__ void __launch_bounds__(kApplyThreads, 4)
    add_deltas(const __grid_constant__ ibp_codebook cb, const ibp_delta_tensor *versions, const uint32_t num_versions,
               const int64_t num_rows, const Coded coded, const bool takes_back, const DeltaState state)
{
    if (__any_sync(kAllLanes, state.verdict() != (takes_back ? IBP_DELTA_DAMAGED : IBP_DELTA_APPLIED))) return;
    const WarpRows mine(num_rows);
    const DeltaAdder<T> adder(cb, coded, mine.warp * DeltaAdder<T>::shared_bytes_of(cb, coded), takes_back);
    PlacedSums<1> change;
    const auto is_taken = [&](uint32_t length) {
        return length != IBP_DEFAULT_LENGTH(cb.row_bytes) && takes(coded, length);
    };
    const auto is_taken_row = [&](const VersionRow &row) {
        return row.valid != 0u && is_taken(__ldg(versions[row.version].lengths + row.row));
    };
    // taken: a bit for each of 32 rows of the warp, set if this launch processes the row. version_of_lane: the index of
    // the version of one of these rows, a different row in each lane.
    uint32_t taken = 0, version_of_lane = 0;
#pragma unroll 1
    for (uint32_t k = 0; mine.has(k); k++) {
        if (k % kWarp == 0u) {
            const int64_t own = mine.row(k + lane_id());
            if (own < num_rows) version_of_lane = find_version(versions, num_versions, own);
            taken = __ballot_sync(kAllLanes,
                                  own < num_rows && is_taken_row(row_of(versions, version_of_lane, cb.row_bytes, own)));
        }
        if ((taken >> k % kWarp & 1u) == 0u) continue;
        VersionRow row =
            row_of(versions, __shfl_sync(kAllLanes, version_of_lane, k % kWarp), cb.row_bytes, mine.row(k));
        row.valid = __shfl_sync(kAllLanes, row.valid, 0); // tells the compiler that all lanes have the same value
        const ibp_delta_tensor &version = versions[row.version];
        const typename DeltaAdder<T>::Place place = adder.look_up(version, row);
        if (!is_taken(place.length)) continue; // the row's entry in `lengths` has changed since it was first read
        bool good;
        const uint64_t added = adder.add(version, row, place, &good);
        change.open(state.change(row.version));
        if (!takes_back) change.own[0] += added; // else the state keeps the change that was judged
        if (!good && lane_id() == 0u)
            atomicOr(reinterpret_cast<unsigned long long *>(state.corrupt(row.version)), 1ull);
    }
    change.flush();
}

static ibp_status judge(const DeltaCall &call, const DeltaState &state, bool is_applied)
{
    return launch_kernel(judge_deltas, Launch{1, kJudgeThreads, 0, 1}, call.stream, call.versions, call.num_versions,
                         is_applied, state);
}
template <typename T> static ibp_status add(const DeltaCall &call, const DeltaState &state, bool takes_back)
{
    ibp_status status = IBP_OK;
    for (const Coded coded : {Coded::kShort, Coded::kLong}) {
        const uint32_t warp_bytes = DeltaAdder<T>::shared_bytes_of(call.cb, coded),
                       warps = std::min(kApplyThreads / kWarp, kMostSharedBytes / warp_bytes);
        if (status == IBP_OK)
            status = launch_rows(add_deltas<T>, warps * kWarp, warps * warp_bytes, call, call.cb, call.versions,
                                 call.num_versions, call.num_rows, coded, takes_back, state);
    }
    return status;
}
template <typename T> static ibp_status apply(const DeltaCall &call, const DeltaState &state, bool takes_back)
{
    if (takes_back) return add<T>(call, state, true);
    ibp_status status = launch_rows(sum_versions, kSumOfVersionsThreads, 0, call, call.versions, call.num_versions,
                                    call.num_rows, call.cb.row_bytes, state);
    if (status == IBP_OK) status = judge(call, state, false);
    if (status == IBP_OK) status = add<T>(call, state, false);
    if (status == IBP_OK) status = judge(call, state, true);
    return status == IBP_OK ? add<T>(call, state, true) : status;
}

} // namespace ibp

extern "C" {

bool ibp_cuda_applies_deltas(const ibp_codebook *codebook) { return ibp::has_delta_rows(codebook); }

ibp_status ibp_cuda_apply_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *versions, uint32_t num_versions,
                                 int64_t num_rows, bool takes_back, uint64_t *state, ibp_stream stream)
{
    if (!ibp_cuda_applies_deltas(codebook) || state == nullptr) return IBP_INVALID_ARGUMENT;
    if (num_rows == 0) return IBP_OK;
    if (!ibp::are_versions(versions, num_versions, num_rows)) return IBP_INVALID_ARGUMENT;
    const ibp::DeltaCall call{*codebook, versions, num_versions, num_rows, stream};
    return ibp::by_element(
        *codebook, [&](auto zero) { return ibp::apply<decltype(zero)>(call, ibp::DeltaState{state}, takes_back); });
}
}
