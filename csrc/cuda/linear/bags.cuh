// bags.cuh - rows decoded and reduced at once: the kernel of ibp_cuda_sum_bags, and its launch.
//
// A team of warps takes a contiguous range of bags, of about as many rows as every other team's. In a round its groups
// decode consecutive rows, each some of its own, to shared memory (decode/fetch.cuh); then threads of the team add the
// rows to the sums of their bags, in their order (bag_sums.cuh). So a sum is what one thread makes of it that goes
// through the bag, and a long bag is still decoded by all warps of a team.
#ifndef IBP_BAGS_CUH
#define IBP_BAGS_CUH

#include "bag_sums.cuh"
#include "../decode/fetch.cuh"
#include "../launch.cuh"

namespace ibp {

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

// ---- the kernel ----

// A row that a lane has looked up, and its weight.
struct Sample {
    Entry entry;
    float weight;
};

// Row `number` of a team whose rows end with `last`. Not inlined: registers are scarce.
static __device__ __noinline__ Sample look_up_sample(const ibp_table &table, const Request &request,
                                                     const ibp_bags &bags, uint32_t number, uint32_t last)
{
    Sample sample{{nullptr, nullptr, nullptr, what_of(0, 0, kNothing)}, 1.0f};
    if (number >= last) return sample;
    const bool is_padding = bags.padding_id >= 0 && load_ticket(request, number).id == bags.padding_id;
    if (!is_padding) sample.entry = look_up(table, request, number);
    sample.entry.dst = nullptr; // rows go to their groups
    if (bags.weights == nullptr) return sample;
    if (bags.kind == IBP_FLOAT32) {
        sample.weight = __ldg(static_cast<const float *>(bags.weights) + number);
    } else {
        const uint32_t bits = __ldg(static_cast<const unsigned short *>(bags.weights) + number);
        sample.weight = bags.kind == IBP_FLOAT16 ? float_of_half(bits) : float_of_bits(bits << 16);
    }
    return sample;
}

// Of a block: whole teams, and so few that registers hardly spill to local memory, for which shared memory leaves no
// cache.
template <class Decoder, class Sums> constexpr uint32_t most_bag_threads()
{
    constexpr uint32_t kMost = Sums::kUnits == 1u ? 768 : 640;
    return (Decoder::kMostThreads < kMost ? Decoder::kMostThreads : kMost) / kTeamThreads * kTeamThreads;
}

// Rows of a group that are added at a time: two cost less a row. Bags of short rows would wait longer to be closed, and
// fewer long rows have room.
template <class Decoder, class Sums>
constexpr uint32_t kTurnsOfRound = Decoder::Group::kPerWarp == 1 && Sums::kUnits == 1u ? 2u : 1u;

// Where a group has the rows of a round, from its first shared byte on: the last one in its scratch, so that more teams
// find room, the one before behind that.
template <class Decoder, uint32_t TURNS> struct GroupRows {
    uint32_t last, before, num_bytes; // num_bytes: of the group

    explicit GroupRows(const ibp_codebook &cb)
    {
        static_assert(TURNS <= 2u, "one row before");
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
                       kRound = kTurn * kTurns; // rows
    const uint32_t row_bytes = table.codebook.row_bytes, first_stage = Decoder::block_bytes(table.codebook),
                   mine = first_stage + G::in_block() * group.num_bytes;
    // By shuffles, from which the compiler knows that the lanes of a warp go through the loop together.
    const auto of_first_lane = [](uint32_t v) { return __shfl_sync(kAllLanes, v, 0); };
    const uint32_t team = of_first_lane(threadIdx.x / kTeamThreads), teams = blockDim.x / kTeamThreads,
                   num_ids = static_cast<uint32_t>(request.ids.count);
    const auto fetch_of = [&](uint32_t turn) { // of a round
        uint8_t *const row = shared_bytes() + mine + group.row(turn);
        return F{table, request, row, stage_at(mine, row_bytes), first_stage, group.num_bytes};
    };
    const Decoder decoder(table.codebook, mine + row_stage_bytes(row_bytes));
    __syncthreads();

    const TeamMemory memory{first_stage + teams * kTurn * group.num_bytes +
                            team * TeamMemory::num_bytes(Sums::kWords, kRound)};
    const Rows<kTurn, kTurns> rows{first_stage + team * kTurn * group.num_bytes + group.row(0), group.num_bytes,
                                   group.row(kTurns - 1u) - group.row(0), memory.notes(Sums::kWords)};
    const Share found = share_of(bags, num_ids, blockIdx.x + gridDim.x * team, gridDim.x * teams);
    if (threadIdx.x % kTeamThreads == 0u) memory.share() = found;
    named_barrier(team + 1u, kTeamThreads);
    const Share of_team = memory.share(), share{of_first_lane(of_team.first_bag), of_first_lane(of_team.last_bag),
                                                of_first_lane(of_team.first), of_first_lane(of_team.last)};
    if (share.first_bag >= share.last_bag) return;
    const Sums sums(bags, of_first_lane(task_of(bags)), num_ids, row_bytes, out, fault, memory, share);
    sums.begin();

    // The lanes of a warp look up its rows of as many turns as there are lanes for, whole rounds.
    const uint32_t of_warp = threadIdx.x % kTeamThreads / kWarp * G::kPerWarp, turn_of_lane = lane_id() / G::kPerWarp,
                   ahead = of_warp + turn_of_lane * kTurn + lane_id() % G::kPerWarp;
    static_assert(kWarp / G::kPerWarp % kTurns == 0u, "whole rounds");
    uint32_t first = share.first, i = 0;
    uint4 vectors[F::kVectors] = {};
    Sample sample = look_up_sample(table, request, bags, first + ahead, share.last);
    fetch_of(0).prefetch(sample.entry, 0, vectors);
#pragma unroll 1
    do { // once for empty bags
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
        named_barrier(team + 1u, kTeamThreads); // the rows are there
        sums.add(rows, first, ibp_min_u32(first + kRound, share.last));
        named_barrier(team + 1u, kTeamThreads); // and may be overwritten
        first += kRound;
    } while (first < share.last);
}

template <class Decoder, class Sums> ibp_status launch_bags(const BagsCall &call)
{
    static_assert(is_decoder<Decoder>(), "the contract of decoder.cuh");
    using G = typename Decoder::Group;
    static_assert(G::kWarps == 1, "teams of whole groups");
    static_assert(most_bag_threads<Decoder, Sums>() / kTeamThreads <= 15u, "a barrier a team");
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

// Rows of up to 512 bytes are decoded by 8 lanes, longer ones by a warp.
constexpr uint32_t kShortRowBytes = 8u * kLaneBytes;
template <template <class> class Decoder> using ShortRows = Decoder<Group<8, 1>>;
template <template <class> class Decoder> using WarpRows = Decoder<Group<kWarp, 1>>;
template <template <class> class Decoder> using LongRows = Decoder<Group<kWarp, 1, true>>;
using Pool = Reducer<1>;
using LongPool = Reducer<4>;

} // namespace ibp

#endif
