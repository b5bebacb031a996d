// bags.cuh - the kernel of ibp_cuda_sum_bags, which decodes rows and reduces them without storing them, and its launch.
//
// A team of warps takes a contiguous range of bags. All ranges have about the same number of bags plus rows. A team
// works in rounds of these steps:
//
// 1. The groups of the team decode consecutive rows to shared memory, each group one or two of them (decode/fetch.cuh),
//    while the bytes of their next rows are loaded.
// 2. The team meets at a barrier.
// 3. Threads of the team add the rows to the sums of their bags, in the order of the rows (bag_sums.cuh), and write the
//    sums of the bags that are complete.
// 4. The team meets at a barrier again. After that the rows may be overwritten.
//
// So every sum is the one that a single thread would compute by adding the bag's rows in order, although all warps of a
// team decode the rows of a long bag.
#ifndef IBP_BAGS_CUH
#define IBP_BAGS_CUH

#include "bag_sums.cuh"
#include "../decode/fetch.cuh"
#include "../launch.cuh"

namespace ibp {

// The checked arguments of ibp_cuda_sum_bags.
struct BagsCall {
    const ibp_table &table;
    const Request &request;
    const ibp_bags &bags;
    uint8_t *out;
    ibp_fault *fault;
    int max_sms;
    ibp_stream stream;
};

// ---- the kernel ----

// A row that a lane has looked up, and its weight.
struct Sample {
    Entry entry;
    float weight;
};

// Looks up the row of the id at position `number`. Returns a sample without a row if the id is padding, or if number >=
// last. last: the position at which the team's rows end. Not inlined, because registers are scarce.
static __device__ __noinline__ Sample look_up_sample(const ibp_table &table, const Request &request,
                                                     const ibp_bags &bags, uint32_t number, uint32_t last)
{
    Sample sample{{nullptr, nullptr, nullptr, what_of(0, 0, kNothing)}, 1.0f};
    if (number >= last) return sample;
    const bool is_padding = bags.padding_id >= 0 && load_ticket(request, number).id == bags.padding_id;
    if (!is_padding) sample.entry = look_up(table, request, number);
    sample.entry.dst = nullptr; // rows are decoded to the shared memory of their groups
    if (bags.weights == nullptr) return sample;
    if (bags.kind == IBP_FLOAT32) {
        sample.weight = __ldg(static_cast<const float *>(bags.weights) + number);
    } else {
        const uint32_t bits = __ldg(static_cast<const unsigned short *>(bags.weights) + number);
        sample.weight = bags.kind == IBP_FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
    }
    return sample;
}

// Returns the largest number of threads in a block, which consists of whole teams. The number is small enough that
// registers hardly spill to local memory, because the block's shared memory leaves no L1 cache for spills.
template <class Decoder, class Sums> constexpr uint32_t most_bag_threads()
{
    constexpr uint32_t kMost = Sums::kUnits == 1u ? 768 : 640;
    return (Decoder::kMostThreads < kMost ? Decoder::kMostThreads : kMost) / kTeamThreads * kTeamThreads;
}

// Number of turns in a round. In each turn a group decodes one row. With two turns, a row costs less time than with one
// turn. With more turns, bags of short rows would be completed later, and shared memory would have room for fewer long
// rows.
template <class Decoder, class Sums>
constexpr uint32_t kTurnsOfRound = Decoder::Group::kPerWarp == 1 && Sums::kUnits == 1u ? 2u : 1u;

// The offsets of a round's rows in a group's shared memory. The last row overlaps the decoder's scratch, so that shared
// memory has room for more teams. If a round has two turns, the row of the first turn follows the scratch and the last
// row.
//
//     | stage | scratch: kept bytes | last row | row before it |
template <class Decoder, uint32_t TURNS> struct GroupRows {
    // num_bytes: size in bytes of the group's shared memory.
    uint32_t last, before, num_bytes;

    explicit GroupRows(const ibp_codebook &cb)
    {
        static_assert(TURNS <= 2u, "a round must have one or two turns");
        const uint32_t stage = row_stage_bytes(cb.row_bytes), row_bytes = (cb.row_bytes + 15u) / 16u * 16u;
        last = stage + (Decoder::kept_bytes(cb) + 15u) / 16u * 16u;
        before = std::max(stage + (Decoder::scratch_bytes(cb) + 15u) / 16u * 16u, last + row_bytes);
        num_bytes = group_bytes_of<Decoder>(cb, before + (TURNS - 1u) * row_bytes);
    }
    __device__ __forceinline__ uint32_t row(uint32_t turn) const { return turn + 1u == TURNS ? last : before; }
};

template <class Decoder, class Sums>
__global__ void __launch_bounds__(most_bag_threads<Decoder, Sums>(), 1)
    sum_bags(const __grid_constant__ ibp_table table, const __grid_constant__ Request request,
             const __grid_constant__ ibp_bags bags,
             const __grid_constant__ GroupRows<Decoder, kTurnsOfRound<Decoder, Sums>> group, uint8_t *out,
             ibp_fault *fault)
{
    using F = Fetch<Decoder, true>;
    using G = typename Decoder::Group;
    await_work_before();
    constexpr uint32_t kTurn = kTeamThreads / G::kThreads, kTurns = kTurnsOfRound<Decoder, Sums>,
                       kRound = kTurn * kTurns; // number of rows of a round
    const uint32_t row_bytes = table.codebook.row_bytes, first_stage = Decoder::block_bytes(table.codebook),
                   mine = first_stage + G::in_block() * group.num_bytes;
    // The shuffles tell the compiler that all lanes of a warp run through the loop together.
    const auto of_first_lane = [](uint32_t v) { return __shfl_sync(kAllLanes, v, 0); };
    const uint32_t team = of_first_lane(threadIdx.x / kTeamThreads), teams = blockDim.x / kTeamThreads,
                   num_ids = static_cast<uint32_t>(request.ids.count);
    const auto fetch_of = [&](uint32_t turn) { // returns the Fetch for a turn of a round
        uint8_t *const row = shared_bytes() + mine + group.row(turn);
        return F{table, request, row, stage_at(mine, row_bytes), first_stage, group.num_bytes};
    };
    const Decoder decoder(table.codebook, mine + row_stage_bytes(row_bytes));
    __syncthreads();

    const TeamMemory memory{first_stage + teams * kTurn * group.num_bytes +
                            team * TeamMemory::num_bytes(Sums::kWords, kRound)};
    const Rows<kTurn, kTurns> rows{first_stage + team * kTurn * group.num_bytes + group.row(0), group.num_bytes,
                                   group.row(kTurns - 1u) - group.row(0), memory.notes(Sums::kWords)};
    const BagShare found = share_of(bags, num_ids, blockIdx.x + gridDim.x * team, gridDim.x * teams);
    if (threadIdx.x % kTeamThreads == 0u) memory.share() = found;
    named_barrier(team + 1u, kTeamThreads);
    const BagShare of_team = memory.share(), share{of_first_lane(of_team.first_bag), of_first_lane(of_team.last_bag),
                                                   of_first_lane(of_team.first), of_first_lane(of_team.last)};
    if (share.first_bag >= share.last_bag) return;
    const Sums sums(bags, of_first_lane(task_of(bags)), num_ids, row_bytes, out, fault, memory, share);
    sums.begin();

    // Each lane of a warp looks up one row of the warp's next turns. These turns are whole rounds.
    const uint32_t of_warp = threadIdx.x % kTeamThreads / kWarp * G::kPerWarp, turn_of_lane = lane_id() / G::kPerWarp,
                   ahead = of_warp + turn_of_lane * kTurn + lane_id() % G::kPerWarp;
    static_assert(kWarp / G::kPerWarp % kTurns == 0u, "the turns that a warp looks up must be whole rounds");
    uint32_t first = share.first, i = 0;
    uint4 vectors[F::kVectors] = {};
    Sample sample = look_up_sample(table, request, bags, first + ahead, share.last);
    fetch_of(0).prefetch(sample.entry, 0, vectors);
#pragma unroll 1
    do { // runs once even if all bags are empty
#pragma unroll 1
        for (uint32_t turn = 0; turn < kTurns; turn++) {
            const F fetch = fetch_of(turn);
            const Row row = fetch.row_of(sample.entry, i + F::in_warp());
            const uint32_t number = first + turn * kTurn + of_warp + F::in_warp();
            fetch.receive(row, sample.entry, i, vectors);
            if (sums.takes_notes()) {
                const float weight = __shfl_sync(kAllLanes, sample.weight, i + F::in_warp());
                if (G::rank() == 0u) rows.note(turn * kTurn + G::in_block() % kTurn) = {weight, row.kind() == kNothing};
            }
            i += G::kPerWarp;
            if (i == kWarp) {
                const uint32_t next = first + (turn + 1u) * kTurn;
                sample = look_up_sample(table, request, bags, next + ahead, share.last);
                i = 0;
            }
            fetch.prefetch(sample.entry, i, vectors);
            fetch.finish(decoder, number, row, fault);
        }
        named_barrier(team + 1u, kTeamThreads); // before the rows are read
        sums.add(rows, first, ibp_min_u32(first + kRound, share.last));
        named_barrier(team + 1u, kTeamThreads); // before the rows are overwritten
        first += kRound;
    } while (first < share.last);
}

template <class Decoder, class Sums> ibp_status launch_bags(const BagsCall &call)
{
    static_assert(is_decoder<Decoder>(), "the decoder must keep the contract of decoder.cuh");
    using G = typename Decoder::Group;
    static_assert(G::kWarps == 1, "a group must not have several warps");
    static_assert(most_bag_threads<Decoder, Sums>() / kTeamThreads <= 15u, "each team must have a barrier of its own");
    constexpr uint32_t kTurn = kTeamThreads / G::kThreads, kTurns = kTurnsOfRound<Decoder, Sums>;
    const ibp_codebook &cb = call.table.codebook;
    const auto kernel = sum_bags<Decoder, Sums>;
    const int64_t work = call.request.ids.count + call.bags.num_bags;
    const GroupRows<Decoder, kTurns> group(cb);
    const uint32_t team_bytes = kTurn * group.num_bytes + TeamMemory::num_bytes(Sums::kWords, kTurn * kTurns);
    Launch launch;
    const ibp_status status =
        plan_groups(reinterpret_cast<const void *>(kernel), most_bag_threads<Decoder, Sums>(), Decoder::block_bytes(cb),
                    team_bytes, kTeamThreads, (work + kTurn - 1) / kTurn, call.max_sms, &launch);
    if (status != IBP_OK) return status;
    return launch_kernel(kernel, launch, call.stream, call.table, call.request, call.bags, group, call.out, call.fault);
}

// The groups for each length of rows: 8 lanes decode a row of up to 512 bytes, and a whole warp decodes a longer row.
constexpr uint32_t kShortRowBytes = 8u * kLaneBytes;
template <template <class> class Decoder> using ShortRows = Decoder<Group<8, 1>>;
template <template <class> class Decoder> using WarpRows = Decoder<Group<kWarp, 1>>;
template <template <class> class Decoder> using LongRows = Decoder<Group<kWarp, 1, kDecodesAny>>;
using Pool = Reducer<1>;
using LongPool = Reducer<4>;

} // namespace ibp

#endif
