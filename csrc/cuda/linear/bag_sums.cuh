// bag_sums.cuh - finds where bags begin and end, and adds rows, which lie in shared memory, to the sums of bags.
#ifndef IBP_BAG_SUMS_CUH
#define IBP_BAG_SUMS_CUH

#include "../../internal/ibp_linear.h"
#include "../floats.cuh"
#include "../warp.cuh"

namespace ibp {

constexpr uint32_t kTeamWarps = 4, kTeamThreads = kTeamWarps * kWarp;

// ---- the bags and rows of a team ----

constexpr uint32_t kNoOffset = ~0u; // marks an offset that is below 0 or above the number of ids

// Returns the position of a bag's first id, num_ids for a bag after the last one, or kNoOffset if the bag's offset is
// invalid.
__device__ __forceinline__ uint32_t begin_of(const ibp_bags &bags, uint32_t bag, uint32_t num_ids)
{
    if (bag == 0u) return 0;
    if (bag >= bags.num_bags) return num_ids;
    if (bags.offsets == nullptr) return static_cast<uint32_t>(bags.bag_size) * bag; // at most num_ids
    const int64_t begin = bags.offset_bytes == 8u ? __ldg(static_cast<const long long *>(bags.offsets) + bag)
                                                  : __ldg(static_cast<const int *>(bags.offsets) + bag);
    return begin < 0 || begin > num_ids ? kNoOffset : static_cast<uint32_t>(begin);
}

// Returns the first bag for which the number of bags before it plus the number of ids before it is at least `target`,
// or num_bags if there is no such bag. All lanes of a warp must call it; each half of the warp may have a different
// target.
__device__ __forceinline__ uint32_t first_bag_at(const ibp_bags &bags, uint32_t num_ids, uint64_t target)
{
    constexpr uint32_t kProbes = kWarp / 2u;
    const uint32_t rank = lane_id() % kProbes, shift = lane_id() / kProbes * kProbes;
    uint32_t low = 0, high = static_cast<uint32_t>(bags.num_bags); // the answer is in [low, high]
    while (__any_sync(kAllLanes, low < high)) {
        const uint32_t left = high - low, step = (left + kProbes - 1u) / kProbes,
                       probe = low + ibp_min_u32((rank + 1u) * step, left);
        const bool reached = left != 0u && uint64_t{begin_of(bags, probe - 1u, num_ids)} + probe - 1u >= target;
        const uint32_t votes = __ballot_sync(kAllLanes, reached) >> shift & ((1u << kProbes) - 1u);
        const uint32_t first = votes != 0u ? lowest_of(votes) : kProbes;
        high = first == kProbes ? high : low + ibp_min_u32((first + 1u) * step, left) - 1u;
        low += ibp_min_u32(first * step, left);
    }
    return low;
}

// The bags first_bag to last_bag - 1 of a team, and the rows first to last - 1 of these bags.
struct BagShare {
    uint32_t first_bag, last_bag, first, last; // last_bag and last are exclusive
};

// Returns the share of a team. All shares have about the same number of bags plus ids, so that bags without ids are
// divided evenly, too. If another process changes the offsets meanwhile, warps compute different shares; therefore all
// warps of a team use the share that one of them has computed.
static __device__ __noinline__ BagShare share_of(const ibp_bags &bags, uint32_t num_ids, uint32_t team,
                                                 uint32_t num_teams)
{
    const uint64_t total = uint64_t{num_ids} + static_cast<uint64_t>(bags.num_bags);
    const uint32_t bag = first_bag_at(bags, num_ids, total * (team + lane_id() / (kWarp / 2u)) / num_teams);
    BagShare share;
    share.first_bag = __shfl_sync(kAllLanes, bag, 0);
    share.last_bag =
        team + 1u == num_teams ? static_cast<uint32_t>(bags.num_bags) : __shfl_sync(kAllLanes, bag, kWarp - 1u);
    share.first = ibp_min_u32(begin_of(bags, share.first_bag, num_ids), num_ids);
    share.last = max(share.first, ibp_min_u32(begin_of(bags, share.last_bag, num_ids), num_ids));
    return share;
}

// ---- rows ----

// The weight of a row, and whether the row is padding.
struct Note {
    float weight;
    uint32_t is_padding;
};
constexpr Note kNoNote{1.0f, 0};

constexpr uint32_t kTogether = 4; // number of rows whose loads a thread can issue together

// The rows of a round in shared memory. A round has one or two turns, of TURN rows each. Row j of the first turn begins
// at byte first + j * pitch. Row TURN + j, of the second turn, begins `next` bytes after row j. The notes begin at byte
// `notes`.
template <uint32_t TURN, uint32_t TURNS> struct Rows {
    uint32_t first, pitch, next, notes;
    static constexpr bool kIsEven = TURNS == 1u; // all rows are pitch bytes apart
    static_assert(TURN % kTogether == 0u && TURNS <= 2u, "rows that are added at a time must belong to one turn");

    __device__ __forceinline__ uint8_t *row(uint32_t j) const
    {
        const uint32_t place = kIsEven ? j * pitch : j % TURN * pitch + j / TURN * next; // next may be negative
        return shared_bytes() + (first + place);
    }
    __device__ __forceinline__ Note &note(uint32_t j) const
    {
        return reinterpret_cast<Note *>(shared_bytes() + notes)[j];
    }
};

// ---- sums ----

constexpr uint32_t kUnitBytes = 16; // size in bytes of a unit, the part of a row that a thread adds at once

// The ways to reduce the rows of a round: their sum, their sum weighted by the notes, or their maximum.
enum Way : uint32_t { kPlainSums, kNotedSums, kMaxima, kWays };

// Returns a number that encodes both a kind and a way, so that a round needs only one branch for them.
__host__ __device__ constexpr uint32_t task_of(ibp_float_kind kind, Way way) { return kind * kWays + way; }
__device__ __forceinline__ uint32_t task_of(const ibp_bags &bags)
{
    return task_of(bags.kind, bags.mode == IBP_BAG_MAX                          ? kMaxima
                              : bags.weights != nullptr || bags.padding_id >= 0 ? kNotedSums
                                                                                : kPlainSums);
}

// The sums or maxima for a unit's elements, in the order of the elements. A sum is a float. A maximum has the bits of
// an element; an element of two bytes is in the upper half of the word.
struct Unit {
    static constexpr uint32_t kMost = kUnitBytes / 2u;
    float values[kMost];

    template <ibp_float_kind KIND> static constexpr uint32_t kSize = KIND == IBP_FLOAT32 ? 4u : 8u;

    template <ibp_float_kind KIND, bool BITS> static __device__ __forceinline__ float element(uint4 words, uint32_t e)
    {
        const uint32_t w = KIND == IBP_FLOAT32 ? e : e / 2u,
                       word = w < 2u ? (w == 0u ? words.x : words.y) : (w == 2u ? words.z : words.w);
        if (KIND == IBP_FLOAT32) return float_of_bits(word);
        if (KIND == IBP_FLOAT16 && !BITS) return float_of_half(e % 2u == 0u ? word & 0xffffu : word >> 16);
        return float_of_bits(e % 2u == 0u ? word << 16 : word & 0xffff0000u);
    }
    template <ibp_float_kind KIND> static __device__ __forceinline__ bool is_greater(float a, float b)
    {
        if (KIND != IBP_FLOAT16) return a > b;
        return float_of_half(bits_of_float(a) >> 16) > float_of_half(bits_of_float(b) >> 16);
    }

    template <ibp_float_kind KIND> __device__ __forceinline__ void add(uint4 words, float weight)
    {
#pragma unroll
        for (uint32_t e = 0; e < kSize<KIND>; e++) values[e] = fmaf(weight, element<KIND, false>(words, e), values[e]);
    }
    // Replaces each element by the corresponding element of `words` if that is greater. is_first: there are no elements
    // to compare with yet, so all are replaced.
    template <ibp_float_kind KIND> __device__ __forceinline__ void take_greater(uint4 words, bool is_first)
    {
#pragma unroll
        for (uint32_t e = 0; e < kSize<KIND>; e++) {
            const float value = element<KIND, true>(words, e);
            if (is_first || is_greater<KIND>(value, values[e])) values[e] = value;
        }
    }

    __device__ __forceinline__ void divide(float divisor)
    {
#pragma unroll
        for (uint32_t e = 0; e < kMost; e++) values[e] /= divisor;
    }
    // Returns the unit's sums or maxima as elements of `kind`.
    __device__ __forceinline__ uint4 result(ibp_float_kind kind, bool is_maximum) const
    {
        if (kind == IBP_FLOAT32)
            return make_uint4(bits_of_float(values[0]), bits_of_float(values[1]), bits_of_float(values[2]),
                              bits_of_float(values[3]));
        if (is_maximum) return make_uint4(two_bits(0), two_bits(2), two_bits(4), two_bits(6));
        if (kind == IBP_FLOAT16)
            return make_uint4(halves_of_floats(values[0], values[1]), halves_of_floats(values[2], values[3]),
                              halves_of_floats(values[4], values[5]), halves_of_floats(values[6], values[7]));
        return make_uint4(bfloat16s_of_floats(values[0], values[1]), bfloat16s_of_floats(values[2], values[3]),
                          bfloat16s_of_floats(values[4], values[5]), bfloat16s_of_floats(values[6], values[7]));
    }
    __device__ __forceinline__ uint32_t two_bits(uint32_t e) const
    {
        return permute_bytes(bits_of_float(values[e]), bits_of_float(values[e + 1u]), 0x7632);
    }
};

// The rows of a bag, from begin to end - 1.
struct Bounds {
    uint32_t begin, end;
};

// The shared memory of a team:
//
//     BagShare                    16 bytes
//     words                       for each thread, the state of its open bag between two rounds, in words of 16 bytes
//     notes                       a note for each row of a round
struct TeamMemory {
    uint32_t first; // offset of this memory in shared memory, in bytes

    __device__ __forceinline__ BagShare &share() const { return *reinterpret_cast<BagShare *>(shared_bytes() + first); }
    // Returns the i-th word of 16 bytes of this thread. The i-th words of consecutive threads are adjacent.
    __device__ __forceinline__ uint4 &words(uint32_t i) const
    {
        const uint32_t place = 1u + i * kTeamThreads + threadIdx.x % kTeamThreads;
        return *reinterpret_cast<uint4 *>(shared_bytes() + first + place * sizeof(uint4));
    }
    __device__ __forceinline__ uint32_t notes(uint32_t words_of_thread) const
    {
        return first + num_bytes(words_of_thread, 0);
    }
    static __host__ __device__ __forceinline__ uint32_t num_bytes(uint32_t words_of_thread, uint32_t num_notes)
    {
        return (1u + words_of_thread * kTeamThreads) * static_cast<uint32_t>(sizeof(uint4)) +
               (num_notes * static_cast<uint32_t>(sizeof(Note)) + 15u) / 16u * 16u;
    }
};
static_assert(sizeof(BagShare) == sizeof(uint4), "the share at the start must be one vector of 16 bytes");

// Computes the sums of a team's bags. Several threads share a bag. Their number is the smallest power of two that is at
// least 4 and at least the number of units in a row, but it is at most kTeamThreads. Each thread takes up to UNITS
// units of a row. The groups of threads take bags in round-robin order. No state stays in registers from one round to
// the next, so that the decoders can use the registers.
template <uint32_t UNITS> struct Reducer {
    static constexpr uint32_t kMostRowBytes = UNITS * kTeamThreads * kUnitBytes, kLeastLaneBits = 2;
    // kWords: number of words of 16 bytes that each thread has in TeamMemory.
    static constexpr uint32_t kUnits = UNITS, kWords = 2u + 2u * UNITS;

    const ibp_bags &bags;
    const uint32_t num_ids, row_bytes;
    uint8_t *const out;
    ibp_fault *const fault;
    const TeamMemory memory;
    const BagShare share;
    const uint32_t task, lane_bits; // 1 << lane_bits threads share a bag

    struct State {
        uint32_t bag, count; // the open bag, and the number of its rows that are not padding
        // bounds: the bounds of the open bag, limited to the share. coming: the bounds of the next bag, if there are
        // offsets.
        Bounds bounds, coming;
        Unit units[UNITS];
    };

    // asked_task: task_of(asked).
    __device__ __forceinline__ Reducer(const ibp_bags &asked, uint32_t asked_task, uint32_t num, uint32_t bytes,
                                       uint8_t *to, ibp_fault *noted, TeamMemory kept, const BagShare &of_team)
        : bags(asked), num_ids(num), row_bytes(bytes), out(to), fault(noted), memory(kept), share(of_team),
          task(asked_task), lane_bits(bits_of_lanes(bytes))
    {
    }
    static __device__ __forceinline__ uint32_t bits_of_lanes(uint32_t row_bytes)
    {
        constexpr uint32_t kMostLaneBits = 7;
        static_assert(1u << kMostLaneBits == kTeamThreads, "a bag must have at most all threads of a team");
        const int num_units = static_cast<int>((row_bytes + kUnitBytes - 1u) / kUnitBytes);
        return ibp_min_u32(max(32u - static_cast<uint32_t>(__clz(num_units - 1)), kLeastLaneBits), kMostLaneBits);
    }
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % kTeamThreads; }
    // Returns the thread's index among the threads that share its bag.
    __device__ __forceinline__ uint32_t lane() const { return rank() & ((1u << lane_bits) - 1u); }
    // Returns the number of bags that are open at the same time.
    __device__ __forceinline__ uint32_t num_open() const { return kTeamThreads >> lane_bits; }
    __device__ __forceinline__ uint32_t first_byte(uint32_t u) const
    {
        return (lane() + (u << lane_bits)) * kUnitBytes;
    }

    __device__ __forceinline__ bool takes_notes() const { return task % kWays != kPlainSums; }

    // ---- bags ----

    // Returns a bag's bounds as the offsets give them, without a check.
    __device__ __forceinline__ Bounds bounds_of(uint32_t number) const
    {
        if (number >= share.last_bag) return {share.last, share.last};
        return {begin_of(bags, number, num_ids), begin_of(bags, number + 1u, num_ids)};
    }
    // Opens the bag now.bag, whose bounds have been loaded into now.coming, and loads the bounds of the next bag. The
    // bag's rows are limited to the share, whatever the offsets are.
    __device__ __forceinline__ void open(State &now) const
    {
        if (now.bag >= share.last_bag) return;
        if (bags.offsets == nullptr) {
            const auto bag_size = static_cast<uint32_t>(bags.bag_size), begin = bag_size * now.bag;
            now.bounds = {begin, now.bag + 1u == bags.num_bags ? num_ids : begin + bag_size};
        } else {
            const Bounds wanted = now.coming;
            now.bounds.begin = max(share.first, ibp_min_u32(wanted.begin, share.last));
            now.bounds.end = max(now.bounds.begin, ibp_min_u32(wanted.end, share.last));
            if (now.bounds.begin != wanted.begin)
                note_offset(now.bag);
            else if (now.bounds.end != wanted.end)
                note_offset(now.bag + 1u);
            now.coming = bounds_of(now.bag + num_open());
        }
        now.count = 0;
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++)
#pragma unroll
            for (uint32_t e = 0; e < Unit::kMost; e++) now.units[u].values[e] = 0.0f;
    }
    // Records a fault for an offset that is out of range or less than the offset before it. position: the offset's
    // index.
    __device__ __forceinline__ void note_offset(uint32_t position) const
    {
        if (lane() != 0u) return;
        record_fault(fault, IBP_INVALID_ARGUMENT, position,
                     bags.offset_bytes == 8u ? static_cast<const int64_t *>(bags.offsets)[position]
                                             : static_cast<const int32_t *>(bags.offsets)[position]);
    }
    __device__ __forceinline__ State load() const
    {
        State now;
        const uint4 a = memory.words(0);
        const uint2 b = reinterpret_cast<const uint2 &>(memory.words(1));
        now.bag = a.x, now.count = a.y, now.bounds = {a.z, a.w}, now.coming = {b.x, b.y};
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++)
#pragma unroll
            for (uint32_t h = 0; h < 2u; h++) {
                const uint4 four = memory.words(2u + 2u * u + h);
                float *const values = now.units[u].values + 4u * h;
                values[0] = float_of_bits(four.x), values[1] = float_of_bits(four.y);
                values[2] = float_of_bits(four.z), values[3] = float_of_bits(four.w);
            }
        return now;
    }
    __device__ __forceinline__ void keep(const State &now) const
    {
        memory.words(0) = make_uint4(now.bag, now.count, now.bounds.begin, now.bounds.end);
        reinterpret_cast<uint2 &>(memory.words(1)) = make_uint2(now.coming.begin, now.coming.end);
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++)
#pragma unroll
            for (uint32_t h = 0; h < 2u; h++) {
                const float *const values = now.units[u].values + 4u * h;
                memory.words(2u + 2u * u + h) = make_uint4(bits_of_float(values[0]), bits_of_float(values[1]),
                                                           bits_of_float(values[2]), bits_of_float(values[3]));
            }
    }
    // Writes the result of the open bag.
    __device__ __forceinline__ void close(State &now) const
    {
        uint8_t *const row = out + static_cast<int64_t>(now.bag) * row_bytes;
        const bool is_even = (row_bytes | static_cast<uint32_t>(reinterpret_cast<uintptr_t>(out))) % kUnitBytes == 0u;
        const bool divides = bags.mode == IBP_BAG_MEAN && now.count != 0u;
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) {
            if (u != 0u && first_byte(u) >= row_bytes) break;
            if (divides) now.units[u].divide(static_cast<float>(now.count));
            const uint4 words = now.units[u].result(bags.kind, bags.mode == IBP_BAG_MAX);
            if (is_even)
                *reinterpret_cast<uint4 *>(row + first_byte(u)) = words;
            else
                store_elements(row, first_byte(u), words);
        }
    }
    __device__ __forceinline__ void store_elements(uint8_t *row, uint32_t first, uint4 four) const
    {
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (uint32_t h = 0; h < kUnitBytes / 2u; h++)
            if (first + 2u * h < row_bytes)
                reinterpret_cast<uint16_t *>(row + first)[h] = static_cast<uint16_t>(words[h / 2u] >> 16u * (h % 2u));
    }

    // ---- rows ----

    // Adds n rows of the open bag, beginning with row j of the round.
    template <ibp_float_kind KIND, bool NOTES, class Rows>
    __device__ __forceinline__ void add_rows(State &now, const Rows &rows, uint32_t j, uint32_t n) const
    {
        if (!NOTES) now.count += n;
        const auto is_block = [&] { return n >= kTogether && (Rows::kIsEven || j % kTogether == 0u); };
#pragma unroll 1
        while (n != 0u) {
#pragma unroll 1
            for (; is_block(); n -= kTogether, j += kTogether) {
                const uint8_t *const row = rows.row(j) + first_byte(0);
#pragma unroll
                for (uint32_t k = 0; k < kTogether; k++)
                    add_row<KIND, NOTES>(now, row + k * rows.pitch, NOTES ? rows.note(j + k) : kNoNote);
            }
#pragma unroll 1
            for (; n != 0u && !is_block(); n--, j++)
                add_row<KIND, NOTES>(now, rows.row(j) + first_byte(0), NOTES ? rows.note(j) : kNoNote);
        }
    }
    // Adds one row. row: the address of the thread's first unit of the row.
    template <ibp_float_kind KIND, bool NOTES>
    __device__ __forceinline__ void add_row(State &now, const uint8_t *row, Note note) const
    {
        if (NOTES) now.count += !note.is_padding;
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) {
            if (u != 0u && first_byte(u) >= row_bytes) break;
            uint4 words = *reinterpret_cast<const uint4 *>(row + (u << lane_bits) * kUnitBytes);
            if (NOTES && note.is_padding) words = make_uint4(0, 0, 0, 0);
            now.units[u].template add<KIND>(words, note.weight);
        }
    }
    template <ibp_float_kind KIND, class Rows>
    __device__ __forceinline__ void compare_rows(State &now, const Rows &rows, uint32_t j, uint32_t n) const
    {
#pragma unroll 1
        for (; n != 0u; n--, j++) {
            if (rows.note(j).is_padding) continue;
#pragma unroll
            for (uint32_t u = 0; u < UNITS; u++)
                if (first_byte(u) < row_bytes)
                    now.units[u].template take_greater<KIND>(
                        *reinterpret_cast<const uint4 *>(rows.row(j) + first_byte(u)), now.count == 0u);
            now.count++;
        }
    }
    template <ibp_float_kind KIND, class Rows>
    __device__ __forceinline__ void reduce_otherwise(State &now, const Rows &rows, uint32_t j, uint32_t n) const
    {
        if (task % kWays == kMaxima)
            compare_rows<KIND>(now, rows, j, n);
        else
            add_rows<KIND, true>(now, rows, j, n);
    }
    // Adds n rows, beginning with row j of the round, in the way that `task` encodes. The most common tasks are tested
    // first.
    template <class Rows>
    __device__ __forceinline__ void reduce(State &now, const Rows &rows, uint32_t j, uint32_t n) const
    {
        if (task == task_of(IBP_FLOAT32, kPlainSums))
            add_rows<IBP_FLOAT32, false>(now, rows, j, n);
        else if (task == task_of(IBP_BFLOAT16, kPlainSums))
            add_rows<IBP_BFLOAT16, false>(now, rows, j, n);
        else if (task == task_of(IBP_FLOAT16, kPlainSums))
            add_rows<IBP_FLOAT16, false>(now, rows, j, n);
        else if (bags.kind == IBP_FLOAT32)
            reduce_otherwise<IBP_FLOAT32>(now, rows, j, n);
        else if (bags.kind == IBP_FLOAT16)
            reduce_otherwise<IBP_FLOAT16>(now, rows, j, n);
        else
            reduce_otherwise<IBP_BFLOAT16>(now, rows, j, n);
    }

    // Opens the team's first bags.
    __device__ __forceinline__ void begin() const
    {
        State now{};
        now.bag = first_byte(0) < row_bytes ? share.first_bag + (rank() >> lane_bits) : share.last_bag;
        if (bags.offsets != nullptr) now.coming = bounds_of(now.bag);
        open(now);
        keep(now);
    }
    // Adds the rows first to stop - 1, which are a round, and writes the sums of the bags that end among them.
    template <class Rows> __device__ __forceinline__ void add(const Rows &rows, uint32_t first, uint32_t stop) const
    {
        State now = load();
        while (now.bag < share.last_bag) {
            const uint32_t from = max(now.bounds.begin, first), to = ibp_min_u32(now.bounds.end, stop);
            if (from < to) reduce(now, rows, from - first, to - from);
            if (now.bounds.end > stop) break;
            close(now);
            now.bag += num_open();
            open(now);
        }
        keep(now);
    }
};

} // namespace ibp

#endif
