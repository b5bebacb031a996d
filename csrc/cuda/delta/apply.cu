// apply.cu - deltas added to their bases (FORMAT.md section 9). A warp takes a row of differences: it is decoded in
// shared memory as by decode_listed.cuh, and its listed elements are added to the words of the base that they lie in,
// 32 elements at a time: a word is written once, by the lane of its first element, and the next ones are on their way
// meanwhile. What a changed word adds to the base's sum gives the sum of the result without reading it.
//
// All is queued at once: the bases' sums, a verdict, the changes if it is good, a verdict again, and the same changes
// taken back if that is not. A row that is corrupt changes nothing, both times.
#include "../decode/decode_listed.cuh"
#include "versions.cuh"

#include <algorithm>

namespace ibp {

constexpr uint32_t kApplyThreads = 256, kSumOfVersionsThreads = 256, kJudgeThreads = 256;
constexpr uint32_t kMostSharedBytes = 98 << 10; // of a block, on any GPU

// The state of a call (ibp_cuda_apply_deltas).
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

// Whether the bases are those wanted, and, where the changes have been made, their results.
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
    __syncthreads(); // all have read the verdict
    if (wrong) state.verdict() = is_applied ? IBP_DELTA_DAMAGED : IBP_DELTA_OTHER_BASE;
}

template <typename T> struct DeltaAdder {
    using Decoder = ListedDecoder<T, kConsecutive>;
    using Book = typename Decoder::Book;
    static constexpr uint32_t kPerWord = 8u / sizeof(T), kBits = 8u * sizeof(T);

    const ibp_codebook &cb;
    const Decoder decoder;
    const Stage stage;
    const bool negates;

    // Shared memory of a warp: a stage for coded bytes, and what the decoder has.
    static __host__ __device__ __forceinline__ uint32_t shared_bytes_of(const ibp_codebook &cb, Coded coded)
    {
        return (row_stage_bytes(most_stored(coded, cb.row_bytes)) + Decoder::scratch_bytes(cb) + 15u) / 16u * 16u;
    }
    __device__ __forceinline__ DeltaAdder(const ibp_codebook &codebook, Coded coded, uint32_t first, bool takes_back)
        : cb(codebook), decoder(codebook, in_register(first + row_stage_bytes(most_stored(coded, codebook.row_bytes)))),
          stage(stage_at(first, most_stored(coded, codebook.row_bytes))), negates(takes_back)
    {
        __syncwarp(); // the entries are there
    }

    // ---- a row's bytes ----

    // The row's entry of lengths, and where its bytes are: in overflow, unless it is corrupt.
    struct Place {
        uint32_t length, stored;
        uint64_t start;
        bool good;
    };
    // What it takes is loaded at once. By all lanes together.
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
    // Prefetches num_bytes from `start` on: the warp's next row is mostly there, and about as long.
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
    // Stages them. Returns the bit that they begin with.
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

    // A row of a base, and what its changes add to the sum of its words. By all lanes together.
    struct Target {
        uint8_t *bytes;
        uint32_t valid;       // bytes
        bool is_whole;        // all words are there, and aligned
        uint64_t key, change; // key: what a word is mixed with besides its number in the row

        __device__ __forceinline__ Target(uint8_t *row, uint32_t num_bytes, uint32_t row_bytes, uint64_t first_word)
            : bytes(row), valid(num_bytes), is_whole(__all_sync(kAllLanes, aligned(row, 8) && num_bytes == row_bytes)),
              key(first_word * IBP_GOLDEN), change(0)
        {
        }
        // Word w; 0 past the row's end.
        __device__ __forceinline__ uint64_t load(uint32_t w) const
        {
            return is_whole ? __ldcg(reinterpret_cast<const unsigned long long *>(bytes) + w)
                            : load_any_word(bytes, valid, w);
        }
        // Adds elements to word w, which was `before`, unless it is past the row's end.
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
    __device__ __forceinline__ uint64_t signed_elements(uint64_t elements) const
    {
        return negates ? ibp_subtract_elements(0, elements, ibp_highest_bits(sizeof(T))) : elements;
    }
    __device__ __forceinline__ void add_raw(const ibp_delta_tensor &version, uint64_t start, Target &target) const
    {
        for (uint32_t w = lane_id(); 8u * w < target.valid; w += kWarp)
            target.add(w, target.load(w), signed_elements(load_any_word(version.overflow + start, target.valid, w)));
        __syncwarp();
    }
    // Elements from one number on of those whose columns are in decoder.numbers(), one a lane, and the words that they
    // are added to: without those whose word the elements behind share, so that the next words can be loaded before.
    struct Batch {
        uint32_t count, column, joined; // joined: a bit each of the elements whose word the next one has too
        uint64_t before;
    };
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
    // Adds an element a lane: the first one's lane adds those of a word. By all lanes together.
    __device__ __forceinline__ void add_elements_of(const Batch &batch, T element, Target &target) const
    {
        const auto mine = static_cast<uint64_t>(element) << kBits * (batch.column % kPerWord) % 64u;
        uint64_t elements = mine;
        uint32_t joined = batch.joined; // lanes whose word the next d lanes have too
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

    // Where the values of the next elements are. By all lanes together, as all that follows.
    struct Values {
        ValueParts parts; // digits and residuals from the next one on
        bool closed;
    };
    // The values of n consecutive elements, one a lane. Planes that none of them reaches, and residuals of no bits, are
    // not looked at.
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
    // Columns that decoder.numbers() has room for: at least those of 32 lanes' words of a bitmap.
    __device__ __forceinline__ uint32_t most_columns() const { return ibp_min_u32(Decoder::batch_of(cb), 32u * kWarp); }
    // Puts the next columns of a bitmap, from column *tile on, into decoder.numbers(): all, which are `left`, or, where
    // these are too many, those of the next tile that has any. Returns how many.
    __device__ __forceinline__ uint32_t take_columns(const typename Decoder::Bitmap &map, uint32_t left,
                                                     uint32_t *tile) const
    {
        uint32_t held = 0;
        __syncwarp(); // the columns before have been read
#pragma unroll 1
        do {
            uint32_t listed = map.word(*tile + 32u * lane_id());
            const uint32_t count = ibp_popcount(listed), sums = Decoder::G::inclusive_scan(count);
            uint16_t *to = decoder.numbers() + (held + sums - count);
            for (; listed != 0u; listed &= listed - 1u)
                *to++ = static_cast<uint16_t>(*tile + 32u * lane_id() + ibp_popcount((listed & (0u - listed)) - 1u));
            held += Decoder::G::last_lane(sums), *tile += 32u * kWarp;
        } while (held == 0u || (held < left && left <= most_columns()));
        __syncwarp(); // the columns are there
        return held;
    }
    __device__ __forceinline__ bool has_ones(const typename Decoder::Bitmap &map, uint32_t columns, uint32_t k) const
    {
        uint32_t count = 0;
        for (uint32_t first = 32u * lane_id(); first < columns; first += 32u * kWarp)
            count += ibp_popcount(map.word(first));
        return __reduce_add_sync(kAllLanes, count) == k;
    }

    // Adds a coded row that is staged from start_bit on. Returns false, and has added nothing, if it is corrupt.
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
        uint32_t held = k, tile = 0; // columns that are taken; the next one of the bitmap
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
        Batch batch = begin_batch(0, held, target); // on its way while the values are looked for
        Values values{};
        values.closed = header.is_closed;
        if (!values.closed)
            values.parts = book.template find_parts<typename Decoder::G, 0>(
                start, end, k, {0, k}, 0, [&](uint32_t, uint32_t from, DigitRange range, uint32_t num_bits) {
                    if (range.from == range.to) return 0u;
                    return Book::template count_escapes<typename Decoder::G>(from, range, num_bits);
                });
        if ((values.closed ? start : values.parts.end) != end) return false;
        uint32_t first = 0, left = k - held; // held columns that are used; columns still to come
        bool goes_on;
#pragma unroll 1
        do {
            Batch next = batch;
            first += batch.count;
            if (first == held && left != 0u) held = take_columns(map, left, &tile), left -= held, first = 0;
            goes_on = first != held;
            if (goes_on) next = begin_batch(first, held, target); // on its way meanwhile
            T element = next_elements(book, values, batch.count);
            if (negates) element = static_cast<T>(T{0} - element);
            add_elements_of(batch, element, target);
            batch = next;
        } while (goes_on);
        return true;
    }

    // Adds row `row` of a version. Returns what that adds to the sum of its words, for each lane; *good: whether it is
    // not corrupt.
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
        __syncwarp(); // the stage is free for the next row
        return target.change;
    }
};

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
    uint32_t taken = 0, version_of_lane = 0; // of the warp's rows from one on, a lane each
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
        row.valid = __shfl_sync(kAllLanes, row.valid, 0); // known as uniform
        const ibp_delta_tensor &version = versions[row.version];
        const typename DeltaAdder<T>::Place place = adder.look_up(version, row);
        if (!is_taken(place.length)) continue; // it has changed
        bool good;
        const uint64_t added = adder.add(version, row, place, &good);
        change.open(state.change(row.version));
        if (!takes_back) change.own[0] += added; // the judged sum stays
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
