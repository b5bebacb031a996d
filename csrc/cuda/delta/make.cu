// make.cu - the differences of two versions of tensors, measured and coded while they are subtracted (FORMAT.md,
// sections 6 and 9). A warp takes a row: 16 bytes a lane of both versions at a time.
//
// Measuring is bound by issue: some 130 instructions a step are the four words of two fingerprints. It leaves for coding
// how many elements each plane has, so that coding knows where the parts are; there each listed element finds by sums
// over the lanes which bits are its.
#include "../encode/encoder.cuh"
#include "../positions.cuh"
#include "versions.cuh"

namespace ibp {

using MakeGroup = EncodeGroup<kWarp>;

// The elements of a row, as a codebook whose entries are -1, 1, -2, 2, ... counts them.
struct DeltaCounts {
    uint32_t reaching[IBP_MAX_PLANES + 1]; // plane p, of all listed elements; behind the last plane: raw symbols
    uint32_t closed;                       // 1: all listed are the closed value
};
static_assert(sizeof(DeltaCounts) / 4 <= IBP_DELTA_COUNTS, "they are kept");

template <typename T> struct DeltaRows {
    static constexpr uint32_t kBits = 8u * sizeof(T), kPerLane = kVector / sizeof(T), kPerWord = 8u / sizeof(T),
                              kStep = kVector * kWarp; // bytes
    const ibp_planes &planes;
    const uint32_t columns;
    uint32_t first[IBP_MAX_PLANES + 1]; // entry of each plane; of absent ones, and of raw symbols, all entries

    __device__ __forceinline__ explicit DeltaRows(const ibp_codebook &cb)
        : planes(cb.planes), columns(cb.row_bytes / static_cast<uint32_t>(sizeof(T)))
    {
        uint32_t entries = 0;
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
            first[p] = entries;
            if (p < IBP_MAX_PLANES) entries += (1u << width_of(p)) - 1u;
        }
    }
    // Bits of a plane's digits; 0 of an absent one.
    __device__ __forceinline__ uint32_t width_of(uint32_t p) const
    {
        return p < planes.num_planes ? planes.digit_bits[p] : 0u;
    }
    // The entry of a listed element; that behind the last one where there is none.
    __device__ __forceinline__ uint32_t rank_of(T element) const
    {
        const T negative = static_cast<T>(T{0} - element);
        const bool is_negative = element >> (kBits - 1u) != 0u;
        const T size = is_negative ? negative : element; // 2^(w-1) of itself
        const uint32_t rank = size <= 64u ? 2u * static_cast<uint32_t>(size) - (is_negative ? 2u : 1u) : ~0u;
        return ibp_min_u32(rank, first[IBP_MAX_PLANES]);
    }

    // 16 bytes of both versions, and their differences.
    struct Loaded {
        uint64_t newer[2], base[2], words[2];
    };
    static __device__ __forceinline__ void load(const ibp_delta_tensor &version, const VersionRow &row, uint32_t at,
                                                Loaded &loaded)
    {
        uint32_t newer[4] = {}, base[4] = {};
        PlainRow{version.newer + row.start, row.valid}.load(at, newer);
        PlainRow{version.base + row.start, row.valid}.load(at, base);
#pragma unroll
        for (uint32_t i = 0; i < 2u; i++) {
            loaded.newer[i] = newer[2 * i] | static_cast<uint64_t>(newer[2 * i + 1]) << 32;
            loaded.base[i] = base[2 * i] | static_cast<uint64_t>(base[2 * i + 1]) << 32;
            loaded.words[i] = subtract_elements<T>(loaded.newer[i], loaded.base[i]);
        }
    }
    static __device__ __forceinline__ T element(const Loaded &loaded, uint32_t e)
    {
        return static_cast<T>((e < kPerWord ? loaded.words[0] : loaded.words[1]) >> kBits * (e % kPerWord) % 64u);
    }
    // A bit for each element that is not 0.
    static __device__ __forceinline__ uint32_t listed_of(const Loaded &loaded)
    {
        uint32_t listed = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++) listed |= static_cast<uint32_t>(element(loaded, e) != 0u) << e;
        return listed;
    }
    // Calls take(e, element) for the listed elements of a lane, in order.
    template <class Take>
    static __device__ __forceinline__ void over_listed(const Loaded &loaded, uint32_t listed, const Take &take)
    {
#pragma unroll 1
        for (; listed != 0u; listed &= listed - 1u) {
            const uint32_t e = ibp_popcount((listed & (0u - listed)) - 1u);
            take(e, element(loaded, e));
        }
    }

    // ---- measuring ----

    __device__ __forceinline__ DeltaCounts count(const ibp_delta_tensor &version, const VersionRow &row,
                                                 uint64_t &base_sum, uint64_t &newer_sum) const
    {
        DeltaCounts counts{};
        bool is_open = false;
        const uint64_t first_word = static_cast<uint64_t>(row.start) / 8u;
#pragma unroll 2
        for (uint32_t at = kVector * lane_id(); at < row.valid; at += kStep) {
            Loaded loaded;
            load(version, row, at, loaded);
            const uint32_t held = row.valid - at > 8u ? 2u : 1u; // words
#pragma unroll
            for (uint32_t i = 0; i < 2u; i++) {
                if (i >= held) continue;
                base_sum += ibp_mix_word(loaded.base[i], first_word + at / 8u + i);
                newer_sum += ibp_mix_word(loaded.newer[i], first_word + at / 8u + i);
            }
            over_listed(loaded, listed_of(loaded), [&](uint32_t, T element) {
                const uint32_t rank = rank_of(element);
                is_open = is_open || element != static_cast<T>(planes.closed_value);
                counts.reaching[0]++;
#pragma unroll
                for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++) counts.reaching[p] += rank >= first[p];
            });
        }
        __syncwarp();
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++)
            counts.reaching[p] = __reduce_add_sync(kAllLanes, counts.reaching[p]);
        counts.closed = !__any_sync(kAllLanes, is_open) && counts.reaching[0] != 0u;
        return counts;
    }

    // Where the parts of a row with such counts are, in bits. Absent planes have no bits.
    struct Parts {
        ibp_position_form form;
        uint32_t positions, digits[IBP_MAX_PLANES + 1], end;
    };
    __device__ __forceinline__ Parts lay_out(const DeltaCounts &counts) const
    {
        Parts parts{};
        parts.positions = parts.end = 8u * ibp_header_bytes(columns);
        if (counts.reaching[0] == 0u) return parts;
        parts.form = choose_position_form(counts.reaching[0], columns);
        parts.end += 8u * parts.form.num_bytes;
        if (counts.closed) return parts;
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
            const uint32_t width = p == IBP_MAX_PLANES ? kBits : width_of(p);
            parts.digits[p] = parts.end;
            parts.end += to_byte(counts.reaching[p] * width);
        }
        return parts;
    }

    // ---- coding ----

    // The numbers of a lane's elements that reach each plane, two side by side: a step has at most 512.
    struct Ranks {
        uint32_t pairs[3];

        __device__ __forceinline__ uint32_t of(uint32_t p) const { return pairs[p / 2u] >> 16u * (p % 2u) & 0xffffu; }
    };
    // Puts the positions and the values of the listed elements of a row into a stage of zeros.
    __device__ __forceinline__ void encode(const ibp_delta_tensor &version, const VersionRow &row,
                                           const DeltaCounts &counts, const Parts &parts, const BitStage &stage) const
    {
        if (lane_id() == 0u) stage.or_bits(0, counts.reaching[0] | (counts.closed ? ibp_closed_bit(columns) : 0u));
        uint32_t before[IBP_MAX_PLANES + 1] = {}; // elements of the steps before
        // The others of a short row are named to its end.
        const uint32_t end = parts.form.is_complement ? columns * static_cast<uint32_t>(sizeof(T)) : row.valid;
#pragma unroll 1
        for (uint32_t base = 0; base < end; base += kStep) {
            Loaded loaded{};
            const uint32_t at = base + kVector * lane_id(), column = at / static_cast<uint32_t>(sizeof(T));
            if (at < row.valid) load(version, row, at, loaded);
            const uint32_t listed = listed_of(loaded);
            Ranks own{};
            over_listed(loaded, listed, [&](uint32_t, T element) {
                const uint32_t rank = rank_of(element);
#pragma unroll
                for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++)
                    own.pairs[p / 2u] += static_cast<uint32_t>(rank >= first[p]) << 16u * (p % 2u);
            });
            __syncwarp();
            uint32_t lower[3], total[3];
            MakeGroup::scan(own.pairs, lower, total);
            uint32_t next[IBP_MAX_PLANES + 1];
#pragma unroll
            for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
                next[p] = before[p] + Ranks{{lower[0], lower[1], lower[2]}}.of(p);
                before[p] += Ranks{{total[0], total[1], total[2]}}.of(p);
            }
            put_positions(parts, stage, column, listed, next[0]);
            if (counts.closed) continue;
            over_listed(loaded, listed, [&](uint32_t, T element) { put_value(parts, stage, element, next); });
            __syncwarp();
        }
    }
    // rank: of the first of the lane's listed elements, whose columns are `column` and those behind it.
    __device__ __forceinline__ void put_positions(const Parts &parts, const BitStage &stage, uint32_t column,
                                                  uint32_t listed, uint32_t rank) const
    {
        const ibp_position_form &form = parts.form;
        if (!form.is_list) {
            if (listed != 0u) stage.or_bits(parts.positions + column, listed);
            return;
        }
        uint32_t named = listed;
        if (form.is_complement) {
            const uint32_t held = ibp_min_u32(columns - ibp_min_u32(column, columns), kPerLane);
            named = low_bits(~listed, held), rank = column - rank;
        }
        const uint32_t low_start = parts.positions + to_byte(form.upper_bits);
#pragma unroll 1
        for (; named != 0u; named &= named - 1u, rank++) {
            const uint32_t position = column + ibp_popcount((named & (0u - named)) - 1u),
                           bit = parts.positions + (position >> form.low_bits) + rank;
            stage.or_word(bit / 32u, 1u << bit % 32u);
            if (form.low_bits != 0u) stage.or_bits(low_start + rank * form.low_bits, low_bits(position, form.low_bits));
        }
    }
    // next: the element's number among those of each plane; counted up.
    __device__ __forceinline__ void put_value(const Parts &parts, const BitStage &stage, T element,
                                              uint32_t (&next)[IBP_MAX_PLANES + 1]) const
    {
        const uint32_t rank = rank_of(element);
#pragma unroll
        for (uint32_t p = 0; p < IBP_MAX_PLANES; p++) {
            const uint32_t width = width_of(p);
            if (rank < first[p]) continue;
            const uint32_t digit = ibp_min_u32(rank - first[p], (1u << width) - 1u);
            if (width != 0u) stage.or_bits(parts.digits[p] + next[p] * width, digit);
            next[p]++;
        }
        if (rank < first[IBP_MAX_PLANES]) return;
        const uint32_t at = parts.digits[IBP_MAX_PLANES] + next[IBP_MAX_PLANES]++ * kBits;
        if (sizeof(T) == 8)
            stage.or_bits(at, static_cast<uint64_t>(element));
        else
            stage.or_bits(at, static_cast<uint32_t>(element));
    }
    // The differences themselves.
    static __device__ __forceinline__ void stage_raw(const ibp_delta_tensor &version, const VersionRow &row,
                                                     const BitStage &stage)
    {
        for (uint32_t at = kVector * lane_id(); at < row.valid; at += kStep) {
            Loaded loaded;
            load(version, row, at, loaded);
            *reinterpret_cast<ulonglong2 *>(stage.words + at / 4u) = make_ulonglong2(loaded.words[0], loaded.words[1]);
        }
    }
};

constexpr uint32_t kMakeThreads = 256;

template <typename T>
__global__ void __launch_bounds__(kMakeThreads)
    measure_deltas(const __grid_constant__ ibp_codebook cb, const ibp_delta_tensor *versions,
                   const uint32_t num_versions, const int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                   uint64_t *sums)
{
    const DeltaRows<T> rows(cb);
    const WarpRows mine;
    PlacedSum base_sum, newer_sum;
#pragma unroll 1
    for (int64_t r = mine.first; r < num_rows; r += mine.step) {
        const VersionRow row = find_version(versions, num_versions, cb.row_bytes, r);
        uint32_t length = IBP_DEFAULT_LENGTH(cb.row_bytes);
        if (row.valid != 0u) {
            uint64_t of_base = 0, of_newer = 0;
            const DeltaCounts found = rows.count(versions[row.version], row, of_base, of_newer);
            base_sum.add(of_base, sums + 2u * row.version);
            newer_sum.add(of_newer, sums + 2u * row.version + 1u);
            if (found.reaching[0] != 0u)
                length = ibp_length_of_coded(rows.lay_out(found).end / 8u, cb.row_bytes, row.valid);
            if (lane_id() <= IBP_MAX_PLANES + 1u) {
                uint32_t kept = found.closed;
#pragma unroll
                for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++)
                    if (lane_id() == p) kept = found.reaching[p];
                counts[r * IBP_DELTA_COUNTS + lane_id()] = static_cast<uint16_t>(kept);
            }
        }
        if (lane_id() == 0u) lengths[r] = static_cast<uint16_t>(length);
    }
    base_sum.flush();
    newer_sum.flush();
}

// Where row r of the sequence begins in overflow. By all lanes together.
__device__ __forceinline__ uint64_t start_of_row(const uint16_t *lengths, const uint64_t *bases, uint32_t row_bytes,
                                                 int64_t r)
{
    const int64_t first = ibp_first_of_group(r);
    uint32_t room = 0;
    if (first + lane_id() < r) room = ibp_stored_bytes(lengths[first + lane_id()], row_bytes, row_bytes);
    return bases[ibp_group_of_row(r)] + __reduce_add_sync(kAllLanes, room);
}

template <typename T>
__global__ void __launch_bounds__(kMakeThreads)
    encode_deltas(const __grid_constant__ ibp_codebook cb, const ibp_delta_tensor *versions,
                  const uint32_t num_versions, const int64_t num_rows, const uint16_t *lengths, const uint16_t *counts,
                  const uint64_t *bases, uint8_t *overflow, const int64_t overflow_bytes)
{
    const DeltaRows<T> rows(cb);
    const WarpRows mine;
    const uint32_t stage_bytes = bit_stage_bytes(cb.row_bytes);
    const BitStage stage{reinterpret_cast<uint32_t *>(shared_bytes() + threadIdx.x / kWarp * stage_bytes),
                         stage_bytes / 4u - 1u};
#pragma unroll 1
    for (int64_t r = mine.first; r < num_rows; r += mine.step) {
        const VersionRow row = find_version(versions, num_versions, cb.row_bytes, r);
        const uint32_t length = lengths[r], stored = ibp_stored_bytes(length, cb.row_bytes, row.valid);
        if (row.valid == 0u || stored == 0u) continue;
        const uint64_t start = start_of_row(lengths, bases, cb.row_bytes, r);
        if (stored > row.valid || !ibp_part_in_bounds(start, stored, overflow_bytes)) continue;
        if (length == 0u) {
            rows.stage_raw(versions[row.version], row, stage);
        } else {
            clear<MakeGroup>(stage, (stored + kVector + 15u) / 16u * 16u);
            DeltaCounts found{};
#pragma unroll
            for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) found.reaching[p] = counts[r * IBP_DELTA_COUNTS + p];
            found.closed = counts[r * IBP_DELTA_COUNTS + IBP_MAX_PLANES + 1u];
            __syncwarp();
            rows.encode(versions[row.version], row, found, rows.lay_out(found), stage);
        }
        __syncwarp();
        copy_out<MakeGroup>(overflow + start, stage, 0, stored);
        __syncwarp(); // the stage is free for the next row
    }
}

struct MakeCall {
    const ibp_delta_tensor *versions;
    uint32_t num_versions;
    int64_t num_rows;
    ibp_stream stream;
};
template <typename T> struct Measuring {
    static ibp_status launch(const ibp_codebook &cb, const MakeCall &call, uint16_t *lengths, uint16_t *counts,
                             uint64_t *sums)
    {
        Launch launch;
        const ibp_status status =
            plan_rows(reinterpret_cast<const void *>(measure_deltas<T>), kMakeThreads, 0, call.num_rows, &launch);
        if (status != IBP_OK) return status;
        return launch_kernel(measure_deltas<T>, launch, call.stream, cb, call.versions, call.num_versions,
                             call.num_rows, lengths, counts, sums);
    }
};
template <typename T> struct Encoding {
    static ibp_status launch(const ibp_codebook &cb, const MakeCall &call, const uint16_t *lengths,
                             const uint16_t *counts, const uint64_t *bases, uint8_t *overflow, int64_t overflow_bytes)
    {
        Launch launch;
        const ibp_status status =
            plan_rows(reinterpret_cast<const void *>(encode_deltas<T>), kMakeThreads,
                      kMakeThreads / kWarp * bit_stage_bytes(cb.row_bytes), call.num_rows, &launch);
        if (status != IBP_OK) return status;
        return launch_kernel(encode_deltas<T>, launch, call.stream, cb, call.versions, call.num_versions, call.num_rows,
                             lengths, counts, bases, overflow, overflow_bytes);
    }
};

} // namespace ibp

extern "C" {

bool ibp_cuda_makes_deltas(const ibp_codebook *codebook)
{
    return ibp::has_delta_rows(codebook) && !codebook->planes.consecutive && codebook->planes.residual_bits == 0u &&
           codebook->planes.rotate == 0u && codebook->planes.closed_value == 1u;
}

ibp_status ibp_cuda_measure_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *versions,
                                   uint32_t num_versions, int64_t num_rows, uint16_t *lengths, uint16_t *counts,
                                   uint64_t *sums, ibp_stream stream)
{
    if (!ibp_cuda_makes_deltas(codebook)) return IBP_INVALID_ARGUMENT;
    if (num_rows == 0) return IBP_OK;
    if (!ibp::are_versions(versions, num_versions, num_rows) || !lengths || !counts || !sums)
        return IBP_INVALID_ARGUMENT;
    const ibp::MakeCall call{versions, num_versions, num_rows, stream};
    return ibp::by_element<ibp::Measuring>(*codebook, call, lengths, counts, sums);
}

ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *versions, uint32_t num_versions,
                                  int64_t num_rows, const uint16_t *lengths, const uint16_t *counts,
                                  const uint64_t *bases, uint8_t *overflow, int64_t overflow_bytes, ibp_stream stream)
{
    if (!ibp_cuda_makes_deltas(codebook) || overflow_bytes < 0) return IBP_INVALID_ARGUMENT;
    if (num_rows == 0 || overflow_bytes == 0) return IBP_OK;
    if (!ibp::are_versions(versions, num_versions, num_rows) || !lengths || !counts || !bases || !overflow)
        return IBP_INVALID_ARGUMENT;
    const ibp::MakeCall call{versions, num_versions, num_rows, stream};
    return ibp::by_element<ibp::Encoding>(*codebook, call, lengths, counts, bases, overflow, overflow_bytes);
}
}
