// bags.cuh - rows decoded and reduced at once: the kernel of ibp_cuda_sum_bags, and its launch.
//
// A team of warps takes a contiguous range of bags, of about as many rows as every other team's. In a round its groups
// decode consecutive rows, each its own, to shared memory (decode/fetch.cuh); then its threads, of which each owns some
// words of a row, add these rows in their order. So a sum is what one thread makes of it that goes through the bag, and
// a long bag is still decoded by all warps of a team.
// Bound by what decoders are bound by: a row that is added costs a tenth of one that is decoded.
#ifndef IBP_BAGS_CUH
#define IBP_BAGS_CUH

#include "decode/fetch.cuh"
#include "floats.cuh"
#include "launch.cuh"

namespace ibp {

constexpr uint32_t kTeamWarps = 4, kTeamThreads = kTeamWarps * kWarp;

// What a launch is asked for.
struct BagsCall {
    const ibp_table &table;
    const Request &request;
    const ibp_bags &bags;
    uint8_t *out;
    ibp_fault *fault;
    int max_sms;
    ibp_stream stream;
};

// ---- which bags, and which rows ----

constexpr uint32_t kNoOffset = ~0u; // of what is no number of an id

// The number of the first id of a bag; num_ids behind the last bag.
__device__ __forceinline__ uint32_t begin_of(const ibp_bags &bags, uint32_t bag, uint32_t num_ids)
{
    if (bag == 0u) return 0;
    if (bag >= bags.num_bags) return num_ids;
    const int64_t begin = bags.offsets == nullptr   ? bags.bag_size * bag
                          : bags.offset_bytes == 8u ? __ldg(static_cast<const long long *>(bags.offsets) + bag)
                                                    : __ldg(static_cast<const int *>(bags.offsets) + bag);
    return begin < 0 || begin > num_ids ? kNoOffset : static_cast<uint32_t>(begin);
}

// The first bag before which lie at least `target` bags and ids; num_bags if there is none. By all lanes of a warp
// together; each half of it may have a target of its own, and so get another answer.
__device__ __forceinline__ uint32_t first_bag_at(const ibp_bags &bags, uint32_t num_ids, uint64_t target)
{
    constexpr uint32_t kProbes = kWarp / 2u;
    const uint32_t rank = lane_id() % kProbes, shift = lane_id() / kProbes * kProbes;
    uint32_t low = 0, high = static_cast<uint32_t>(bags.num_bags); // the answer is one of [low, high]
    while (__any_sync(kAllLanes, low < high)) {
        const uint32_t left = high - low, step = (left + kProbes - 1u) / kProbes,
                       probe = low + ibp_min_u32((rank + 1u) * step, left);
        const bool reached = left != 0u && uint64_t{begin_of(bags, probe - 1u, num_ids)} + probe - 1u >= target;
        const uint32_t votes = __ballot_sync(kAllLanes, reached) >> shift & ((1u << kProbes) - 1u);
        const uint32_t first = votes != 0u ? static_cast<uint32_t>(__ffs(static_cast<int>(votes))) - 1u : kProbes;
        high = first == kProbes ? high : low + ibp_min_u32((first + 1u) * step, left) - 1u;
        low += ibp_min_u32(first * step, left);
    }
    return low;
}

// The bags of a team, and their rows.
struct Share {
    uint32_t first_bag, last_bag, first, last; // from, up to without
};

// Notes an offset that is no number of an id, or less than the one before.
static __device__ __noinline__ void note_offset(const ibp_bags &bags, uint32_t position, ibp_fault *fault)
{
    record_fault(fault, IBP_INVALID_ARGUMENT, position,
                 bags.offset_bytes == 8u ? static_cast<const int64_t *>(bags.offsets)[position]
                                         : static_cast<const int32_t *>(bags.offsets)[position]);
}

// Bags and ids count alike, so that many bags without ids are shared out too.
static __device__ __noinline__ Share share_of(const ibp_bags &bags, uint32_t num_ids, uint32_t team, uint32_t num_teams,
                                              ibp_fault *fault)
{
    const uint64_t total = uint64_t{num_ids} + static_cast<uint64_t>(bags.num_bags);
    const uint32_t bag = first_bag_at(bags, num_ids, total * (team + lane_id() / (kWarp / 2u)) / num_teams);
    Share share;
    share.first_bag = __shfl_sync(kAllLanes, bag, 0);
    share.last_bag =
        team + 1u == num_teams ? static_cast<uint32_t>(bags.num_bags) : __shfl_sync(kAllLanes, bag, kWarp - 1u);
    share.first = ibp_min_u32(begin_of(bags, share.first_bag, num_ids), num_ids);
    const uint32_t last = begin_of(bags, share.last_bag, num_ids);
    share.last = max(share.first, ibp_min_u32(last, num_ids));
    if (share.last != last && threadIdx.x % kTeamThreads == 0u) note_offset(bags, share.last_bag, fault);
    return share;
}

// Where bags end: a lane has loaded the end of one bag of 32, and of the 32 behind them.
struct Ends {
    uint32_t first, here, ahead;

    __device__ __forceinline__ Ends(const ibp_bags &bags, uint32_t num_ids, uint32_t bag) : first(bag)
    {
        here = begin_of(bags, first + lane_id() + 1u, num_ids);
        ahead = begin_of(bags, first + kWarp + lane_id() + 1u, num_ids);
    }
    // bag: as before, or the next one. By all lanes of a warp together.
    __device__ __forceinline__ uint32_t of(const ibp_bags &bags, uint32_t num_ids, uint32_t bag)
    {
        if (bag - first == kWarp) {
            first += kWarp, here = ahead;
            ahead = begin_of(bags, first + kWarp + lane_id() + 1u, num_ids);
        }
        return __shfl_sync(kAllLanes, here, bag - first);
    }
};

// ---- sums ----

// Of the elements of WORDS words: as floats or, of a maximum, as their bits, those of two bytes in the upper half.
// Element e is word e or half a word, e / 2.
template <uint32_t WORDS> struct Sums {
    float values[2u * WORDS];

    __device__ __forceinline__ void clear()
    {
#pragma unroll
        for (uint32_t e = 0; e < 2u * WORDS; e++) values[e] = 0.0f;
    }

    static __device__ __forceinline__ float element(const ibp_bags &bags, const uint32_t *words, uint32_t e)
    {
        if (bags.kind == IBP_FLOAT32) return float_of_bits(words[e % WORDS]);
        const uint32_t word = words[e / 2u];
        if (bags.kind == IBP_FLOAT16 && bags.mode != IBP_BAG_MAX)
            return float_of_half(e % 2u == 0u ? word & 0xffffu : word >> 16);
        return float_of_bits(e % 2u == 0u ? word << 16 : word & 0xffff0000u);
    }
    static __device__ __forceinline__ bool is_greater(const ibp_bags &bags, float a, float b)
    {
        if (bags.kind != IBP_FLOAT16) return a > b;
        return float_of_half(bits_of_float(a) >> 16) > float_of_half(bits_of_float(b) >> 16);
    }

    // is_first: the bag's first row that counts.
    __device__ __forceinline__ void add(const ibp_bags &bags, const uint32_t (&words)[WORDS], float weight,
                                        bool is_first)
    {
        const bool halves = bags.kind != IBP_FLOAT32;
#pragma unroll
        for (uint32_t e = 0; e < 2u * WORDS; e++) {
            if (e >= WORDS && !halves) break;
            const float value = element(bags, words, e);
            if (bags.mode != IBP_BAG_MAX)
                values[e] = fmaf(weight, value, values[e]);
            else if (is_first || is_greater(bags, value, values[e]))
                values[e] = value;
        }
    }

    // The bits of an element. count: rows that count.
    __device__ __forceinline__ uint32_t result(const ibp_bags &bags, uint32_t e, uint32_t count) const
    {
        const bool is_max = bags.mode == IBP_BAG_MAX;
        const float value =
            bags.mode == IBP_BAG_MEAN && count != 0u ? values[e] / static_cast<float>(count) : values[e];
        if (bags.kind == IBP_FLOAT32) return bits_of_float(value);
        if (is_max) return bits_of_float(value) >> 16;
        return bags.kind == IBP_FLOAT16 ? half_of_float(value) : bfloat16_of_float(value);
    }
    __device__ __forceinline__ void results(const ibp_bags &bags, uint32_t count, uint32_t (&words)[WORDS]) const
    {
#pragma unroll
        for (uint32_t w = 0; w < WORDS; w++) {
            if (bags.kind == IBP_FLOAT32)
                words[w] = result(bags, w, count);
            else
                words[w] = result(bags, 2u * w, count) | result(bags, 2u * w + 1u, count) << 16;
        }
    }
};

// What is known of a row beside its bytes, in shared memory behind them.
struct Note {
    float weight;
    uint32_t is_padding;
};

// The rows of a round where a team finds them: row j begins with shared byte first + j * pitch.
struct Rows {
    uint32_t first, pitch, row_bytes;

    __device__ __forceinline__ const uint8_t *row(uint32_t j) const { return shared_bytes() + first + j * pitch; }
    static __device__ __forceinline__ Note &note_of(uint8_t *row, uint32_t row_bytes)
    {
        return *reinterpret_cast<Note *>(row + (row_bytes + 15u) / 16u * 16u);
    }
    __device__ __forceinline__ Note note(uint32_t j) const
    {
        return note_of(shared_bytes() + first + j * pitch, row_bytes);
    }
};

// A team's sums. A thread owns UNITS times so many words of a row, kTeamThreads apart. Its functions are not inlined:
// so registers of decoders are theirs alone, and all kernels share them.
template <uint32_t UNIT_WORDS, uint32_t UNITS> struct Reducer {
    static constexpr uint32_t kUnitBytes = 4u * UNIT_WORDS, kMostRowBytes = UNITS * kTeamThreads * kUnitBytes;

    const ibp_bags &bags;
    const uint32_t num_ids, row_bytes;
    const Share share;
    uint8_t *const out;
    ibp_fault *const fault;
    Ends ends;
    uint32_t bag, number, end, count; // the open bag, the next row's number, where the bag ends, its rows that count
    Sums<UNIT_WORDS> sums[UNITS];

    __device__ __noinline__ Reducer(const ibp_bags &asked, uint32_t num, uint32_t bytes, const Share &of, uint8_t *to,
                                    ibp_fault *noted)
        : bags(asked), num_ids(num), row_bytes(bytes), share(of), out(to), fault(noted), ends(asked, num, of.first_bag),
          bag(of.first_bag), number(of.first)
    {
        open();
    }
    static __device__ __forceinline__ uint32_t rank() { return threadIdx.x % kTeamThreads; }
    // Whether a thread of the warp owns anything.
    static __device__ __forceinline__ bool is_needed(uint32_t row_bytes)
    {
        return rank() / kWarp * kWarp * kUnitBytes < row_bytes;
    }
    __device__ __forceinline__ uint32_t first_byte(uint32_t unit) const
    {
        return (rank() + unit * kTeamThreads) * kUnitBytes;
    }

    // Where the bag ends, inside the share whatever the offsets are: the last one takes what is left.
    __device__ __forceinline__ void open()
    {
        const uint32_t wanted = bag + 1u == share.last_bag ? share.last : ends.of(bags, num_ids, bag);
        end = ibp_min_u32(max(wanted, number), share.last);
        if (wanted != end && rank() == 0u) note_offset(bags, bag + 1u, fault);
        count = 0;
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) sums[u].clear();
    }
    // Writes the open bag, and opens the next one if there is one.
    __device__ __forceinline__ void close()
    {
        uint8_t *const row = out + static_cast<int64_t>(bag) * row_bytes;
        const bool units = row_bytes % kUnitBytes == 0u && aligned(out, kUnitBytes);
#pragma unroll
        for (uint32_t u = 0; u < UNITS; u++) {
            uint32_t words[UNIT_WORDS];
            sums[u].results(bags, count, words);
            if (first_byte(u) >= row_bytes) break;
            if (units && UNIT_WORDS == 4u)
                *reinterpret_cast<uint4 *>(row + first_byte(u)) =
                    make_uint4(words[0], words[1 % UNIT_WORDS], words[2 % UNIT_WORDS], words[3 % UNIT_WORDS]);
            else if (units)
                *reinterpret_cast<uint32_t *>(row + first_byte(u)) = words[0];
            else
                store_elements(row, first_byte(u), words);
        }
        bag++;
        if (bag != share.last_bag) open();
    }
    __device__ __forceinline__ void store_elements(uint8_t *row, uint32_t first, const uint32_t (&words)[UNIT_WORDS])
    {
#pragma unroll
        for (uint32_t h = 0; h < 2u * UNIT_WORDS; h++)
            if (first + 2u * h < row_bytes)
                reinterpret_cast<uint16_t *>(row + first)[h] = static_cast<uint16_t>(words[h / 2u] >> 16u * (h % 2u));
    }

    // Adds the next n rows. By all lanes of a warp together.
    __device__ __noinline__ void add(const Rows rows, uint32_t n)
    {
#pragma unroll 1
        for (uint32_t j = 0; j < n; j++, number++) {
            while (number == end && bag != share.last_bag) close();
            const Note note = rows.note(j);
            if (note.is_padding && bags.mode == IBP_BAG_MAX) continue;
#pragma unroll
            for (uint32_t u = 0; u < UNITS; u++) {
                if (first_byte(u) >= row_bytes) break;
                uint32_t words[UNIT_WORDS] = {};
                if (!note.is_padding) load(rows.row(j) + first_byte(u), words);
                sums[u].add(bags, words, note.weight, count == 0u);
            }
            count += !note.is_padding;
        }
    }
    static __device__ __forceinline__ void load(const uint8_t *from, uint32_t (&words)[UNIT_WORDS])
    {
        if constexpr (UNIT_WORDS == 4u) {
            const uint4 four = *reinterpret_cast<const uint4 *>(from);
            words[0] = four.x, words[1] = four.y, words[2] = four.z, words[3] = four.w;
        } else {
            words[0] = *reinterpret_cast<const uint32_t *>(from);
        }
    }
    __device__ __noinline__ void close_all()
    {
        while (bag != share.last_bag) close();
    }
};

// ---- the kernel ----

// A row that a lane has looked up, and its weight.
struct Sample {
    Entry entry;
    float weight;
};

// Row `number` of a team whose rows end with `last`. dst: where its group wants it. Not inlined, as Reducer.
static __device__ __noinline__ Sample look_up_sample(const ibp_table &table, const Request &request,
                                                     const ibp_bags &bags, uint32_t number, uint32_t last, uint8_t *dst)
{
    Sample sample{{nullptr, nullptr, what_of(0, 0, kNothing)}, 1.0f};
    if (number >= last) return sample;
    const bool is_padding = bags.padding_id >= 0 && load_ticket(request, number).id == bags.padding_id;
    if (!is_padding) sample.entry = look_up(table, request, number);
    sample.entry.dst = dst;
    if (bags.weights == nullptr) return sample;
    if (bags.kind == IBP_FLOAT32) {
        sample.weight = __ldg(static_cast<const float *>(bags.weights) + number);
    } else {
        const uint32_t bits = __ldg(static_cast<const unsigned short *>(bags.weights) + number);
        sample.weight = bags.kind == IBP_FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
    }
    return sample;
}

// Shared bytes of a group: stage and scratch, then the row and its note.
template <class Decoder> __host__ __device__ __forceinline__ uint32_t bag_row_start(const ibp_codebook &cb)
{
    return (row_stage_bytes(cb.row_bytes) + Decoder::scratch_bytes(cb) + 15u) / 16u * 16u;
}
template <class Decoder> __host__ __device__ __forceinline__ uint32_t bag_group_bytes(const ibp_codebook &cb)
{
    return bag_row_start<Decoder>(cb) + (cb.row_bytes + 15u) / 16u * 16u + 16u;
}
static_assert(sizeof(Note) <= 16, "behind a row");

template <class Decoder, class Pool>
__global__ void __launch_bounds__(Decoder::kMostThreads, 1)
    sum_bags(const __grid_constant__ ibp_table table, const __grid_constant__ Request request,
             const __grid_constant__ ibp_bags bags, uint8_t *out, ibp_fault *fault)
{
    using F = Fetch<Decoder>;
    using G = typename Decoder::Group;
    constexpr uint32_t kRows = kTeamThreads / G::kThreads; // of a round
    const uint32_t row_bytes = table.codebook.row_bytes, first_stage = Decoder::block_bytes(table.codebook),
                   group_bytes = bag_group_bytes<Decoder>(table.codebook),
                   row_start = bag_row_start<Decoder>(table.codebook), mine = first_stage + G::in_block() * group_bytes;
    uint8_t *const my_row = shared_bytes() + mine + row_start;
    const F fetch{table, request, my_row, stage_at(mine, row_bytes), first_stage, group_bytes};
    const Decoder decoder(table.codebook, mine + row_stage_bytes(row_bytes));
    __syncthreads();

    const uint32_t team = threadIdx.x / kTeamThreads, teams = blockDim.x / kTeamThreads,
                   num_ids = static_cast<uint32_t>(request.ids.count);
    const Share share = share_of(bags, num_ids, blockIdx.x + gridDim.x * team, gridDim.x * teams, fault);
    if (share.first_bag >= share.last_bag) return;
    const bool is_needed = Pool::is_needed(row_bytes);
    Pool pool(bags, num_ids, row_bytes, share, out, fault);
    const Rows rows{first_stage + team * kRows * group_bytes + row_start, group_bytes, row_bytes};

    // The lanes of a warp look up its rows of as many rounds as there are lanes for.
    const uint32_t of_warp = threadIdx.x % kTeamThreads / kWarp * G::kPerWarp,
                   ahead = of_warp + lane_id() / G::kPerWarp * kRows + lane_id() % G::kPerWarp;
    uint8_t *const looked_up = shared_bytes() + rows.first + (of_warp + lane_id() % G::kPerWarp) * group_bytes;
    uint32_t first = share.first, i = 0;
    uint4 vectors[F::kVectors];
    Sample sample = look_up_sample(table, request, bags, first + ahead, share.last, looked_up);
    F::prefetch(sample.entry, 0, vectors);
#pragma unroll 1
    while (first < share.last) {
        const Row row = F::row_of(sample.entry, i + F::in_warp());
        const Note note{__shfl_sync(kAllLanes, sample.weight, i + F::in_warp()), row.kind() == kNothing};
        const uint32_t number = first + of_warp + F::in_warp();
        fetch.receive(row, sample.entry, i, vectors);
        if (G::rank() == 0u) Rows::note_of(my_row, row_bytes) = note;
        i += G::kPerWarp;
        if (i == kWarp) {
            sample = look_up_sample(table, request, bags, first + kRows + ahead, share.last, looked_up);
            i = 0;
        }
        F::prefetch(sample.entry, i, vectors);
        fetch.finish(decoder, number, row, fault);
        named_barrier(team + 1u, kTeamThreads); // the rows are there
        if (is_needed) pool.add(rows, ibp_min_u32(kRows, share.last - first));
        named_barrier(team + 1u, kTeamThreads); // and may be overwritten
        first += kRows;
    }
    if (is_needed) pool.close_all();
}

template <class Decoder, class Pool> ibp_status launch_bags(const BagsCall &call)
{
    static_assert(is_decoder<Decoder>(), "the contract of decoder.cuh");
    using G = typename Decoder::Group;
    static_assert(G::kWarps == 1 && Decoder::kMostThreads % kTeamThreads == 0, "teams of whole groups");
    static_assert(Decoder::kMostThreads / kTeamThreads <= 15u, "a barrier a team");
    constexpr uint32_t kRows = kTeamThreads / G::kThreads;
    const ibp_codebook &cb = call.table.codebook;
    const auto kernel = sum_bags<Decoder, Pool>;
    const int64_t work = call.request.ids.count + call.bags.num_bags;
    Launch launch;
    const ibp_status status = plan_groups(reinterpret_cast<const void *>(kernel), Decoder::kMostThreads,
                                          Decoder::block_bytes(cb), kRows * bag_group_bytes<Decoder>(cb), kTeamThreads,
                                          (work + kRows - 1) / kRows, call.max_sms, &launch);
    if (status != IBP_OK) return status;
    return launch_kernel(kernel, launch, call.stream, call.table, call.request, call.bags, call.out, call.fault);
}

// Rows of up to 512 bytes are decoded by 8 lanes, longer ones by a warp; a thread owns a word of the former, four words
// of up to 2 KiB, and sixteen of up to 8.
template <template <class> class Decoder> using ShortRows = Decoder<Group<8, 1>>;
template <template <class> class Decoder> using WarpRows = Decoder<Group<kWarp, 1>>;
template <template <class> class Decoder> using LongRows = Decoder<Group<kWarp, 1, true>>;
using ShortPool = Reducer<1, 1>;
using WarpPool = Reducer<4, 1>;
using LongPool = Reducer<4, 4>;

} // namespace ibp

#endif
