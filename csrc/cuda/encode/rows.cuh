// rows.cuh - the kernels that measure and encode rows, and their launches. The .cu of each encoder includes this file
// once and instantiates the kernels with its encoder.
//
// In measure_rows a group of lanes finds, for each of its rows, the size of the coded row with the best cluster, and
// writes the row's entry in `lengths`.
//
// In encode_rows a group of lanes does the following for each of its rows:
//
// 1. It prefetches its next row into the L2 cache.
// 2. If the rows have been measured, it finds the row's place in the table (target_of). It clears its stage in shared
//    memory.
// 3. It encodes the row into the stage, or copies the raw row there if coding saves no bytes (code_row).
// 4. It adds zeros up to the end of the sector or slot.
// 5. It copies the stage to the row's slot and overflow part. If the rows have been measured, these are at the place
//    that was found in step 2 (store). Otherwise the overflow part is one that the row already has, or a new one
//    (settle).
#ifndef IBP_ENCODE_ROWS_CUH
#define IBP_ENCODE_ROWS_CUH

#include "../launch.cuh"
#include "../kinds.h"
#include "encoder.cuh"
#include "encode_request.h"
#include "source.cuh"
#include "target.cuh"

#include <algorithm>
#include <type_traits>

namespace ibp {

// Returns false if a row cannot be a default row, because it has row_bytes bytes and its coded form is larger than that
// of any default row. Otherwise returns true. bytes: size of the row's coded form. valid: size of the row.
template <class Encoder>
__device__ __forceinline__ bool may_be_default(const ibp_codebook &cb, const Encoder &encoder, uint32_t bytes,
                                               uint32_t valid)
{
    return bytes <= encoder.default_bytes() || valid < cb.row_bytes;
}

template <class Encoder>
__global__ void __launch_bounds__(kBlockThreads<typename Encoder::Group>, Encoder::kBlocks)
    measure_rows(const __grid_constant__ ibp_codebook cb, const uint8_t *data, const int64_t num_bytes,
                 const int64_t num_rows, uint16_t *lengths)
{
    using G = typename Encoder::Group;
    extern __shared__ uint4 shared[];
    constexpr uint32_t kGroups = kBlockThreads<G> / G::kThreads;
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    for (int64_t r = blockIdx.x * int64_t{kGroups} + G::uniform_in_block(); r < num_rows;
         r += int64_t{gridDim.x} * kGroups) {
        const PlainRow row{data + r * cb.row_bytes, ibp_valid_bytes(num_bytes, cb.row_bytes, r)};
        // The test for a default row comes last, when the row's bytes are in a cache. Few rows need this test.
        const uint32_t bytes = choose_cluster(cb, encoder, row).bytes;
        uint32_t length = ibp_length_of_coded(bytes, cb.row_bytes, row.valid);
        if (may_be_default(cb, encoder, bytes, row.valid) && is_default<G>(cb, row, row.valid))
            length = IBP_DEFAULT_LENGTH(cb.row_bytes);
        if (G::rank() == 0u) lengths[r] = static_cast<uint16_t>(length);
    }
}

// The parameters of the kernel encode_rows, which come from an Encode.
struct RowsJob {
    ibp_place place;
    RowSource source;
    const int64_t *row_ids;
    int64_t first_row;
    ibp_fault *fault;
};

constexpr uint32_t kAnyLength = ~0u; // more than any entry in `lengths`

template <class G>
__device__ __forceinline__ void stage_raw(const PlainRow &row, uint32_t num_bytes, const BitStage &stage)
{
    for (uint32_t first = kVector * G::rank(); first < num_bytes; first += kVector * G::kThreads) {
        uint32_t words[4];
        row.load(first, words);
        reinterpret_cast<uint4 *>(stage.words)[first / kVector] = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Makes the stored form of a row of `valid` bytes in a stage. Returns the row's entry in `lengths`. expected: the row's
// entry in `lengths` if the row has been measured, otherwise kAnyLength. The result may differ from `expected` if the
// row has changed since it was measured. The test for a default row comes last, when the row's bytes are in a cache.
// Few rows need this test.
template <class Encoder>
__device__ __forceinline__ uint32_t code_row(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row,
                                             uint32_t valid, uint32_t expected, const BitStage &stage)
{
    using G = typename Encoder::Group;
    const uint32_t marker = IBP_DEFAULT_LENGTH(cb.row_bytes);
    uint32_t length = 0, coded = 0;
    if (cb.scheme != IBP_SCHEME_RAW && expected != 0u && expected != marker) {
        const bool numbered = ibp_has_clusters(&cb);
        const uint32_t k = numbered ? choose_cluster(cb, encoder, row).cluster : 0u;
        if (numbered && G::rank() == 0u) stage.or_bits(0, k);
        const uint32_t most = ibp_min_u32(valid, marker) - 1u;
        coded = of_cluster(encoder, cb, k).encode(row, stage, numbered ? 8u : 0u, most);
        if (coded <= most) length = coded;
    }
    const bool looks = expected == marker || (expected == kAnyLength && may_be_default(cb, encoder, coded, valid));
    if (looks && cb.scheme != IBP_SCHEME_RAW && is_default<G>(cb, row, valid)) return marker;
    if (length == 0u) {
        G::sync(); // before the stage is overwritten
        stage_raw<G>(row, valid, stage);
    }
    return length;
}

// What a group records while it stores its rows. spilled: number of rows that were stored with an overflow part. lost:
// number of rows for whose overflow part there was no room. seen: the last value of the overflow counter that the
// group's first lane has read.
struct OverflowTally {
    uint32_t spilled, lost;
    uint64_t seen;
};

// Stores a staged row in its slot and in a part of overflow, and writes the row's entries of the index. If the row's
// own part is too small, the row gets another part. If rows have ids, other groups may store the same row, so the row
// is claimed first. All lanes of a group must call this together.
template <class G>
__device__ __forceinline__ void settle(const RowsJob &job, int64_t i, int64_t row, uint32_t length, uint32_t valid,
                                       const BitStage &stage, OverflowTally &tally)
{
    const ibp_place &place = job.place;
    const ibp_table &table = place.table;
    const uint32_t stored = ibp_stored_bytes(length, table.codebook.row_bytes, valid),
                   in_overflow = ibp_overflow_part(stored, table.slot_bytes);
    const bool claims = job.row_ids != nullptr && place.bases != nullptr, spills = in_overflow != 0u,
               is_new = place.is_new != 0u;
    OverflowPart part{IBP_NO_BASE, 0};
    if (spills || claims) {
        if (G::rank() == 0u) {
            if (claims)
                part = claim_part(place, row, valid);
            else if (!is_new)
                part = part_of(place, row, IBP_LOAD_ONCE(place.bases[row]), valid);
            if (part.base != kClaimed && part.sectors < ibp_sectors_of(in_overflow))
                part = take_part_for(place, part, in_overflow, valid, tally.seen);
        }
        part.base = G::broadcast(part.base);
    }
    if (claims && part.base == kClaimed) {
        if (G::rank() == 0u && job.fault != nullptr) record_fault(job.fault, IBP_INVALID_ARGUMENT, i, row);
        return;
    }
    // If a row is new, its slot and its length are written even if there is no room for its overflow part.
    const bool has_part = part.base != IBP_NO_BASE, lost = spills && !has_part, is_kept = !lost || is_new;
    if (is_kept) {
        const uint64_t slot = static_cast<uint64_t>(row) * table.slot_bytes;
        const uint32_t room = is_new ? table.slot_bytes : ibp_sector_bytes(stored - in_overflow);
        copy_out<G>(place.slots + slot, stage, 0,
                    room_in(ibp_min_u32(room, table.slot_bytes), table.slots_bytes, slot));
        if (has_part) copy_out<G>(place.overflow + part.base, stage, table.slot_bytes, ibp_sector_bytes(in_overflow));
    }
    if (claims) __threadfence();
    G::sync(); // the row is stored before its place is written
    if (G::rank() != 0u) return;
    if (place.lengths != nullptr) place.lengths[row] = is_kept ? static_cast<uint16_t>(length) : uint16_t{0};
    if (!spills && !claims) return;
    if (place.rooms != nullptr) place.rooms[row] = lost ? uint16_t{0} : static_cast<uint16_t>(part.sectors);
    if (claims) __threadfence();
    *static_cast<volatile uint64_t *>(place.bases + row) = part.base;
    tally.spilled += spills && !lost, tally.lost += lost;
}

// Stores a row at the place that the table's index gives, if the row has the length that the index gives; otherwise
// records a fault. All lanes of a group must call this together.
template <class G>
__device__ __forceinline__ void store(const RowsJob &job, int64_t row, const RowTarget &target, uint32_t length,
                                      const BitStage &stage)
{
    const ibp_place &place = job.place;
    if (target.in_bounds && length == target.length) {
        copy_out<G>(place.slots + target.slot_start, stage, 0, target.slot_room);
        copy_out<G>(place.overflow + target.overflow_start, stage, place.table.slot_bytes, target.room);
    } else if (G::rank() == 0u && job.fault != nullptr) {
        record_fault(job.fault, IBP_CORRUPT_ROW, row, row);
    }
}

// Returns the number of the table's row in which row i of the source is stored. The number may be out of range. All
// lanes of a group get the same number, even if ids change while they are read.
template <class G> __device__ __forceinline__ int64_t row_of(const RowsJob &job, int64_t i)
{
    if (job.row_ids == nullptr) return job.first_row + i;
    return static_cast<int64_t>(G::broadcast(static_cast<uint64_t>(IBP_LOAD_ONCE(job.row_ids[i]))));
}

// Encodes the rows of a source. IS_MEASURED: rows have been measured, and the table's index says how long they are and
// where they go.
template <class Encoder, bool IS_MEASURED>
__global__ void __launch_bounds__(kMostEncodeThreads, Encoder::kBlocks) encode_rows(const __grid_constant__ RowsJob job)
{
    using G = typename Encoder::Group;
    extern __shared__ uint4 shared[];
    const ibp_table &table = job.place.table;
    const ibp_codebook &cb = table.codebook;
    const int64_t num_bytes = ibp_bytes_of_table(&table), num_rows = ibp_rows_of_bytes(num_bytes, cb.row_bytes);
    const uint32_t stage_bytes = bit_stage_bytes(cb.row_bytes), group_bytes = stage_bytes + Encoder::scratch_bytes(cb);
    uint8_t *const stages = reinterpret_cast<uint8_t *>(shared) + Encoder::table_bytes(cb);
    const uint32_t group = G::uniform_in_block(), groups = blockDim.x / G::kThreads;
    const BitStage stage{reinterpret_cast<uint32_t *>(stages + group * group_bytes), stage_bytes / 4u - 1u};
    const Encoder encoder(cb, reinterpret_cast<uint32_t *>(shared));
    const int64_t step = int64_t{gridDim.x} * groups, first = blockIdx.x * int64_t{groups} + group;
    // The smallest number of bytes that are written for a row, including zeros after it.
    const uint32_t least_bytes = job.place.is_new != 0u ? table.slot_bytes : 0u;
    uint32_t dirty = stage_bytes; // number of the stage's first bytes that may hold bits of the previous row
    OverflowTally tally{0, 0, kNotSeen};
    PlainRow next{};
    if (first < job.source.num_rows) next = job.source.row(first);
    for (int64_t i = first; i < job.source.num_rows; i += step) {
        PlainRow row = next;
        if (i + step < job.source.num_rows) {
            next = job.source.row(i + step);
            prefetch<G>(next);
        }
        const int64_t r = row_of<G>(job, i);
        if (r >= 0 && r < num_rows) {
            RowTarget target{};
            if (IS_MEASURED) target = target_of<G>(table, r);
            // If rows have been measured, the row's complete slot and overflow part are copied from the stage,
            // including the zeros after the row. Only these bytes of the stage need be cleared.
            if (!Encoder::kFillsStage || IS_MEASURED) {
                if (IS_MEASURED) dirty = ibp_min_u32(target.slot_room + target.room, stage_bytes);
                clear<G>(stage, (dirty + kVector - 1u) / kVector * kVector);
                G::sync();
            }
            const uint32_t valid = ibp_valid_bytes(num_bytes, cb.row_bytes, r);
            row.valid = ibp_min_u32(row.valid, valid);
            const uint32_t length = code_row(cb, encoder, row, valid, IS_MEASURED ? target.length : kAnyLength, stage);
            G::sync();
            const uint32_t stored = ibp_stored_bytes(length, cb.row_bytes, valid), sectors = ibp_sector_bytes(stored);
            const uint32_t written = sectors > least_bytes ? sectors : least_bytes;
            pad<G>(stage, stored, written);
            G::sync();
            // If the row could not be coded, the attempt may have written anywhere in the stage, so all of it is
            // cleared.
            dirty = length != 0u && stored != 0u ? written : stage_bytes;
            if constexpr (IS_MEASURED)
                store<G>(job, r, target, length, stage);
            else
                settle<G>(job, i, r, length, valid, stage, tally);
            G::sync(); // before the stage is overwritten
        } else if (G::rank() == 0u && job.fault != nullptr) {
            record_fault(job.fault, IBP_INDEX_OUT_OF_RANGE, i, r);
        }
    }
    ibp_place_counts *const counts = job.place.counts;
    if (counts == nullptr) return;
    if (tally.spilled != 0u) atomicAdd(reinterpret_cast<unsigned long long *>(&counts->spilled), tally.spilled);
    if (tally.lost != 0u) atomicAdd(reinterpret_cast<unsigned long long *>(&counts->lost), tally.lost);
}

// ---- launching ----

template <class Encoder> ibp_status launch_rows(const Measure &measure)
{
    const ibp_codebook &cb = measure.codebook;
    const auto kernel = measure_rows<Encoder>;
    using G = typename Encoder::Group;
    const int64_t groups = kBlockThreads<G> / G::kThreads,
                  num_rows = ibp_rows_of_bytes(measure.num_bytes, cb.row_bytes);
    Launch launch;
    const ibp_status status = plan_resident(reinterpret_cast<const void *>(kernel), kBlockThreads<G>,
                                            Encoder::table_bytes(cb), num_rows, groups, 0, &launch);
    if (status != IBP_OK) return status;
    return launch_kernel(kernel, launch, measure.stream, cb, measure.data, measure.num_bytes, num_rows,
                         measure.lengths);
}

// Returns the size in bytes of a group's shared memory: its stage and its encoder's scratch.
template <class Encoder> uint32_t group_bytes_of(const ibp_codebook &cb)
{
    return bit_stage_bytes(cb.row_bytes) + Encoder::scratch_bytes(cb);
}

// Reduces the number of groups in a block until num_blocks blocks fit in the shared memory of an SM, but not below the
// number of groups in one warp. The groups of a block always fill whole warps. threads: number of threads of a group.
inline ibp_status fit_groups(uint32_t table_bytes, uint32_t group_bytes, uint32_t threads, uint32_t num_blocks,
                             uint32_t *groups)
{
    constexpr int kReserved = 1024; // bytes of an SM's shared memory that CUDA reserves for each block
    DeviceSizes device{};
    const ibp_status status = read_device(&device);
    const int of_block = std::min(device.block_bytes, device.sm_bytes / static_cast<int>(num_blocks) - kReserved);
    const int64_t room = of_block - int64_t{table_bytes};
    const int64_t of_warps = std::max(1u, kWarp / threads), fitting = room / group_bytes / of_warps * of_warps;
    *groups = static_cast<uint32_t>(std::clamp<int64_t>(fitting, of_warps, *groups));
    return status;
}

// If a block's table has at least this size in bytes, blocks have more threads, because every block has its own table,
// whatever its number of threads.
constexpr uint32_t kLargeTable = 16u << 10;

template <class Encoder> ibp_status launch_rows(const Encode &encode)
{
    static_assert(is_encoder<Encoder>(), "the encoder must keep the contract of encoder.cuh");
    const ibp_codebook &cb = codebook_of(encode);
    const auto kernel = encode.is_measured ? encode_rows<Encoder, true> : encode_rows<Encoder, false>;
    using G = typename Encoder::Group;
    const uint32_t threads = G::kThreads, table_bytes = Encoder::table_bytes(cb),
                   group_bytes = group_bytes_of<Encoder>(cb);
    const bool is_large = encode.max_sms > 0 || table_bytes >= kLargeTable;
    uint32_t groups = (is_large ? kMostEncodeThreads : kBlockThreads<G>) / threads;
    Launch launch;
    ibp_status status = fit_groups(table_bytes, group_bytes, threads, encode.max_sms > 0 ? 1u : 2u, &groups);
    if (status == IBP_OK)
        status =
            plan_resident(reinterpret_cast<const void *>(kernel), groups * threads, table_bytes + groups * group_bytes,
                          encode.source.num_rows, groups, encode.max_sms, &launch);
    if (status != IBP_OK) return status;
    const RowsJob job{encode.place, RowSource::of(encode.source, cb.row_bytes), encode.row_ids, encode.first_row,
                      encode.fault};
    return launch_kernel(kernel, launch, encode.stream, job);
}

// Calls use(threads) and returns its result. threads is a std::integral_constant, the number of threads that encode one
// row of row_bytes bytes. FEW: this number for rows of up to kLongestOfFew bytes; kPartLanes or kFewLanes. MANY: this
// number for rows of more than kLongestOfWarp bytes; kWarp if there are no such rows.
template <uint32_t FEW, uint32_t MANY, class Use> ibp_status by_threads(uint32_t row_bytes, const Use &use)
{
    if (row_bytes <= kLongestOfFew) return use(std::integral_constant<uint32_t, FEW>());
    if (row_bytes <= kLongestOfPart) return use(std::integral_constant<uint32_t, kPartLanes>());
    if (row_bytes <= kLongestOfWarp) return use(std::integral_constant<uint32_t, kWarp>());
    return use(std::integral_constant<uint32_t, MANY>());
}

// Launches the kernel of an encoder with the number of threads for each row that suits the length of rows. MANY: as in
// by_threads.
template <template <uint32_t> class Encoder, uint32_t MANY = kEncodeThreads, class Call>
ibp_status launch_by_threads(const Call &call)
{
    return by_threads<kPartLanes, MANY>(codebook_of(call).row_bytes, [&](auto threads) {
        return launch_rows<Encoder<decltype(threads)::value>>(call);
    });
}

} // namespace ibp

#endif
