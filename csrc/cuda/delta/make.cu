// make.cu - computes the differences between two versions of tensors, and measures and codes them (FORMAT.md sections 6
// and 9). The differences are not stored: measure_deltas and encode_deltas both compute them. A warp processes one row
// at a time. In each step a lane loads 16 bytes of each version.
//
// measure_deltas also adds up the words of both versions for their fingerprints. It writes to memory how many listed
// elements reach each plane, that is, have a digit there. These counts tell encode_deltas where each part of the coded
// row begins. For each listed element, encode_deltas counts the listed elements before it; this number says where the
// bits of the element go.
//
// The rate at which instructions are issued limits measure_deltas: in a step a lane mixes four words for the
// fingerprints, which takes about 130 instructions.
#include "../encode/encoder.cuh"
#include "../positions.cuh"
#include "versions.cuh"

namespace ibp {

using MakeGroup = EncodeGroup<kWarp>;

// Counts of a row's listed elements. They determine the layout of the coded row. reaching[p]: number of elements that
// have a digit in plane p; reaching[IBP_MAX_PLANES]: number of elements that have a raw symbol. closed: 1 if there are
// listed elements and all of them equal the codebook's closed value, else 0.
struct DeltaCounts {
    uint32_t reaching[IBP_MAX_PLANES + 1];
    uint32_t closed;
};
static_assert(sizeof(DeltaCounts) / 4 <= IBP_DELTA_COUNTS, "the memory for counts must hold DeltaCounts");

// Measures and codes rows of differences with a codebook whose entries are -1, 1, -2, 2, ... T: an unsigned integer
// that has the size of an element. One warp processes a row; all its lanes must call the functions together.
template <typename T> struct DeltaRows {
    // kPerLane, kPerWord: number of elements in 16 bytes and in 8 bytes. kStep: number of bytes of a version that a
    // warp loads in a step.
    static constexpr uint32_t kBits = 8u * sizeof(T), kPerLane = kVector / sizeof(T), kPerWord = 8u / sizeof(T),
                              kStep = kVector * kWarp;
    const ibp_planes &planes;
    const uint32_t columns;
    // The index of each plane's first entry. If a plane is absent, and for raw symbols, it is the number of entries.
    uint32_t first[IBP_MAX_PLANES + 1];

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
    // Returns the number of bits of a plane's digits; 0 if the plane is absent.
    __device__ __forceinline__ uint32_t width_of(uint32_t p) const
    {
        return p < planes.num_planes ? planes.digit_bits[p] : 0u;
    }
    // Returns the index of the entry that equals a listed element. If no entry equals it, returns the number of
    // entries.
    __device__ __forceinline__ uint32_t rank_of(T element) const
    {
        const T negative = static_cast<T>(T{0} - element);
        const bool is_negative = element >> (kBits - 1u) != 0u;
        const T size = is_negative ? negative : element; // -2^(w - 1) is its own negative, and has the size 2^(w - 1)
        const uint32_t rank = size <= 64u ? 2u * static_cast<uint32_t>(size) - (is_negative ? 2u : 1u) : ~0u;
        return ibp_min_u32(rank, first[IBP_MAX_PLANES]);
    }

    // 16 bytes of both versions, and the differences between their elements (words).
    struct Loaded {
        uint64_t newer[2], base[2], words[2];
    };
    // Loads the 16 bytes that begin at byte `at` of a row. Bytes past the row's end count as zeros.
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
            loaded.words[i] = ibp_subtract_elements(loaded.newer[i], loaded.base[i], ibp_highest_bits(sizeof(T)));
        }
    }
    // Copies the loaded words of the newer version to the base where they differ from it.
    static __device__ __forceinline__ void update(const ibp_delta_tensor &version, const VersionRow &row, uint32_t at,
                                                  const Loaded &loaded)
    {
#pragma unroll
        for (uint32_t i = 0; i < 2u; i++)
            if (loaded.words[i] != 0u)
                store_any_word(version.base + row.start, row.valid, at / 8u + i, loaded.newer[i]);
    }
    // Returns the loaded difference with the index e.
    static __device__ __forceinline__ T element(const Loaded &loaded, uint32_t e)
    {
        return static_cast<T>((e < kPerWord ? loaded.words[0] : loaded.words[1]) >> kBits * (e % kPerWord) % 64u);
    }
    // Returns a bit for each loaded difference, set if the difference is not 0. Such elements are listed.
    static __device__ __forceinline__ uint32_t listed_of(const Loaded &loaded)
    {
        uint32_t listed = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++) listed |= static_cast<uint32_t>(element(loaded, e) != 0u) << e;
        return listed;
    }
    // Calls take(e, element) for each loaded difference whose bit is set in `listed`, in order.
    template <class Take>
    static __device__ __forceinline__ void over_listed(const Loaded &loaded, uint32_t listed, const Take &take)
    {
#pragma unroll 1
        for (; listed != 0u; listed &= listed - 1u) {
            const uint32_t e = lowest_of(listed);
            take(e, element(loaded, e));
        }
    }

    // ---- measuring ----

    // Counts the listed elements of a row. Adds the mixed words of the base to base_sum and those of the newer version
    // to newer_sum. Each lane adds the words that it loads.
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
            const uint32_t held = row.valid - at > 8u ? 2u : 1u; // number of loaded words that lie in the row
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

    // The bits of a coded row at which its parts begin, and at which it ends. form: the form of its positions. The raw
    // symbols begin at digits[IBP_MAX_PLANES].
    struct Parts {
        ibp_position_form form;
        uint32_t positions, digits[IBP_MAX_PLANES + 1], end;
    };
    // Returns the layout of a coded row with these counts. Absent planes get no bits.
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

    // A ring buffer in shared memory of listed elements and their columns. Elements wait in it until there are enough
    // to give one to each lane. It has room for kWarp - 1 waiting elements and for all elements of a step.
    // kRing: number of elements in the buffer.
    static constexpr uint32_t kRing = 2u * kStep / sizeof(T);
    struct Ring {
        T *elements;
        uint16_t *columns;
    };
    static constexpr uint32_t kRingBytes = kRing * (sizeof(T) + 2u);

    // The state of a row that is being coded. closed: the row has no values. lists: its positions are stored as a list
    // of the listed columns. next: for each plane, the number of elements coded so far that have a digit in this plane.
    struct Work {
        const Parts &parts;
        const BitStage &stage;
        const Ring &ring;
        bool closed, lists;
        uint32_t next[IBP_MAX_PLANES + 1];
    };

    // Codes a row into a stage, whose bytes must be zeros. parts: the result of lay_out(counts).
    __device__ __forceinline__ void encode(const ibp_delta_tensor &version, const VersionRow &row, bool updates_base,
                                           const DeltaCounts &counts, const Parts &parts, const BitStage &stage,
                                           const Ring &ring) const
    {
        if (lane_id() == 0u) stage.or_bits(0, counts.reaching[0] | (counts.closed ? ibp_closed_bit(columns) : 0u));
        const ibp_position_form &form = parts.form;
        Work work{parts, stage, ring, counts.closed != 0u, form.is_list && !form.is_complement, {}};
        // A list of the positions that are not listed goes on past the end of a short row, up to row_bytes.
        const uint32_t end = form.is_complement ? columns * static_cast<uint32_t>(sizeof(T)) : row.valid;
        uint32_t held = 0, done = 0; // number of elements that have been put into the ring, and taken from it
#pragma unroll 1
        for (uint32_t base = 0; base < end; base += kStep) {
            Loaded loaded{};
            const uint32_t at = base + kVector * lane_id(), column = at / static_cast<uint32_t>(sizeof(T));
            if (at < row.valid) load(version, row, at, loaded);
            if (updates_base) update(version, row, at, loaded);
            const uint32_t listed = listed_of(loaded), count[1] = {ibp_popcount(listed)};
            uint32_t lower[1], total[1];
            MakeGroup::scan(count, lower, total);
            uint32_t to = held + lower[0];
            if (!work.lists) put_positions(parts, stage, column, listed, to);
            over_listed(loaded, listed, [&](uint32_t e, T element) {
                ring.elements[to % kRing] = element;
                ring.columns[to++ % kRing] = static_cast<uint16_t>(column + e);
            });
            held += total[0];
            __syncwarp(); // before the ring is read
            for (; held - done >= kWarp; done += kWarp) put_elements(work, done, kWarp);
        }
        if (held != done) put_elements(work, done, held - done);
    }
    // Writes the positions of a lane's listed elements: either the lane's part of the bitmap or, if form.is_complement,
    // a list of the lane's columns that are not listed. column: the first of the lane's kPerLane columns. listed: bit i
    // is set if the element in column + i is listed. rank: number of the row's listed elements in earlier columns.
    __device__ __forceinline__ void put_positions(const Parts &parts, const BitStage &stage, uint32_t column,
                                                  uint32_t listed, uint32_t rank) const
    {
        if (!parts.form.is_list) {
            if (listed != 0u) stage.or_bits(parts.positions + column, listed);
            return;
        }
        const uint32_t held = ibp_min_u32(columns - ibp_min_u32(column, columns), kPerLane);
        rank = column - rank;
#pragma unroll 1
        for (uint32_t named = low_bits(~listed, held); named != 0u; named &= named - 1u, rank++)
            put_position(parts, stage, column + lowest_of(named), rank);
    }
    // Writes a position to a list. rank: index of the position in the list.
    static __device__ __forceinline__ void put_position(const Parts &parts, const BitStage &stage, uint32_t position,
                                                        uint32_t rank)
    {
        const ibp_position_form &form = parts.form;
        const uint32_t bit = parts.positions + (position >> form.low_bits) + rank;
        stage.or_word(bit / 32u, 1u << bit % 32u);
        if (form.low_bits != 0u)
            stage.or_bits(parts.positions + to_byte(form.upper_bits) + rank * form.low_bits,
                          low_bits(position, form.low_bits));
    }
    // Takes n listed elements from the ring, one for each lane, and writes their values and, if work.lists, their
    // positions. first_element: the index of the first of them among the row's listed elements.
    __device__ __forceinline__ void put_elements(Work &work, uint32_t first_element, uint32_t n) const
    {
        const uint32_t number = first_element + lane_id();
        const bool active = lane_id() < n;
        const T element = work.ring.elements[number % kRing];
        if (active && work.lists) put_position(work.parts, work.stage, work.ring.columns[number % kRing], number);
        if (!work.closed) put_value(work, element, active);
        __syncwarp(); // before the ring's elements are overwritten
    }
    // Writes the digits, or the raw symbol, of one element for each lane that is active.
    __device__ __forceinline__ void put_value(Work &work, T element, bool active) const
    {
        const uint32_t rank = rank_of(element);
        bool reaches = active;
#pragma unroll
        for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) {
            reaches = reaches && rank >= first[p];
            const uint32_t lanes = __ballot_sync(kAllLanes, reaches),
                           number = work.next[p] + ibp_popcount(lanes & low_bits(kAllLanes, lane_id()));
            if (lanes == 0u) break;
            work.next[p] += ibp_popcount(lanes);
            if (p < IBP_MAX_PLANES) {
                const uint32_t width = width_of(p), digit = ibp_min_u32(rank - first[p], (1u << width) - 1u);
                if (reaches && width != 0u) work.stage.or_bits(work.parts.digits[p] + number * width, digit);
            } else if (reaches) {
                put_raw(work.stage, work.parts.digits[p] + number * kBits, element);
            }
        }
    }
    static __device__ __forceinline__ void put_raw(const BitStage &stage, uint32_t at, T element)
    {
        if constexpr (sizeof(T) == 8)
            stage.or_bits(at, element);
        else
            stage.or_bits(at, static_cast<uint32_t>(element));
    }
    // Writes the differences of a row to the stage without coding them. Used for a row that is stored raw.
    static __device__ __forceinline__ void stage_raw(const ibp_delta_tensor &version, const VersionRow &row,
                                                     bool updates_base, const BitStage &stage)
    {
        for (uint32_t at = kVector * lane_id(); at < row.valid; at += kStep) {
            Loaded loaded;
            load(version, row, at, loaded);
            *reinterpret_cast<ulonglong2 *>(stage.words + at / 4u) = make_ulonglong2(loaded.words[0], loaded.words[1]);
            if (updates_base) update(version, row, at, loaded);
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
    const WarpRows mine(num_rows);
    PlacedSums<2> placed; // the sums of words of a base and of its newer version
#pragma unroll 1
    for (uint32_t k = 0; mine.row(k) < num_rows; k++) {
        const int64_t r = mine.row(k);
        const VersionRow row = find_row(versions, num_versions, cb.row_bytes, r);
        uint32_t length = IBP_DEFAULT_LENGTH(cb.row_bytes);
        if (row.valid != 0u) {
            uint64_t of_base = 0, of_newer = 0;
            const DeltaCounts found = rows.count(versions[row.version], row, of_base, of_newer);
            placed.open(sums + 2u * row.version);
            placed.own[0] += of_base, placed.own[1] += of_newer;
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
    placed.flush();
}

// Returns the byte of overflow at which row r of the sequence begins. All lanes of the warp must call it together.
__device__ __forceinline__ uint64_t start_of_row(const uint16_t *lengths, const uint64_t *bases, uint32_t row_bytes,
                                                 int64_t r)
{
    const int64_t first = ibp_first_of_group(r);
    uint32_t room = 0;
    if (first + lane_id() < r) room = ibp_stored_bytes(lengths[first + lane_id()], row_bytes, row_bytes);
    return bases[ibp_group_of_row(r)] + __reduce_add_sync(kAllLanes, room);
}

// Returns the size in bytes of the shared memory of a warp of encode_deltas: its stage and its ring.
template <typename T> __host__ __device__ __forceinline__ uint32_t encode_bytes(uint32_t row_bytes, Coded coded)
{
    return bit_stage_bytes(most_stored(coded, row_bytes)) + DeltaRows<T>::kRingBytes;
}

template <typename T>
__global__ void __launch_bounds__(kMakeThreads)
    encode_deltas(const __grid_constant__ ibp_codebook cb, const ibp_delta_tensor *versions,
                  const uint32_t num_versions, const int64_t num_rows, const Coded coded, const uint16_t *lengths,
                  const uint16_t *counts, const uint64_t *bases, uint8_t *overflow, const int64_t overflow_bytes,
                  const bool updates_bases)
{
    using Rows = DeltaRows<T>;
    const Rows rows(cb);
    const WarpRows mine(num_rows);
    const uint32_t stage_bytes = bit_stage_bytes(most_stored(coded, cb.row_bytes));
    uint8_t *const own = shared_bytes() + threadIdx.x / kWarp * encode_bytes<T>(cb.row_bytes, coded);
    const BitStage stage{reinterpret_cast<uint32_t *>(own), stage_bytes / 4u - 1u};
    const typename Rows::Ring ring{reinterpret_cast<T *>(own + stage_bytes),
                                   reinterpret_cast<uint16_t *>(own + stage_bytes + Rows::kRing * sizeof(T))};
#pragma unroll 1
    for (uint32_t k = 0; mine.row(k) < num_rows; k++) {
        const int64_t r = mine.row(k);
        const uint32_t length = IBP_LOAD_ONCE(lengths[r]);
        if (length == IBP_DEFAULT_LENGTH(cb.row_bytes) || !takes(coded, length)) continue;
        const VersionRow row = find_row(versions, num_versions, cb.row_bytes, r);
        const uint32_t stored = ibp_stored_bytes(length, cb.row_bytes, row.valid);
        const uint64_t start = start_of_row(lengths, bases, cb.row_bytes, r);
        if (stored == 0u || stored > row.valid || !ibp_part_in_bounds(start, stored, overflow_bytes)) continue;
        if (length == 0u) {
            rows.stage_raw(versions[row.version], row, updates_bases, stage);
        } else {
            clear<MakeGroup>(stage, (stored + kVector + 15u) / 16u * 16u);
            DeltaCounts found{};
#pragma unroll
            for (uint32_t p = 0; p <= IBP_MAX_PLANES; p++) found.reaching[p] = counts[r * IBP_DELTA_COUNTS + p];
            found.closed = counts[r * IBP_DELTA_COUNTS + IBP_MAX_PLANES + 1u];
            __syncwarp();
            rows.encode(versions[row.version], row, updates_bases, found, rows.lay_out(found), stage, ring);
        }
        __syncwarp();
        copy_out<MakeGroup>(overflow + start, stage, 0, stored);
        __syncwarp(); // before the stage is overwritten by the next row
    }
}

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
    const ibp::DeltaCall call{*codebook, versions, num_versions, num_rows, stream};
    return ibp::by_element(*codebook, [&](auto zero) {
        return ibp::launch_rows(ibp::measure_deltas<decltype(zero)>, ibp::kMakeThreads, 0, call, *codebook, versions,
                                num_versions, num_rows, lengths, counts, sums);
    });
}

ibp_status ibp_cuda_encode_deltas(const ibp_codebook *codebook, const ibp_delta_tensor *versions, uint32_t num_versions,
                                  int64_t num_rows, const uint16_t *lengths, const uint16_t *counts,
                                  const uint64_t *bases, uint8_t *overflow, int64_t overflow_bytes, bool updates_bases,
                                  ibp_stream stream)
{
    if (!ibp_cuda_makes_deltas(codebook) || overflow_bytes < 0) return IBP_INVALID_ARGUMENT;
    if (num_rows == 0 || overflow_bytes == 0) return IBP_OK;
    if (!ibp::are_versions(versions, num_versions, num_rows) || !lengths || !counts || !bases || !overflow)
        return IBP_INVALID_ARGUMENT;
    const ibp::DeltaCall call{*codebook, versions, num_versions, num_rows, stream};
    return ibp::by_element(*codebook, [&](auto zero) {
        ibp_status status = IBP_OK;
        for (const ibp::Coded coded : {ibp::Coded::kShort, ibp::Coded::kLong}) {
            const uint32_t warp_bytes = ibp::encode_bytes<decltype(zero)>(codebook->row_bytes, coded);
            if (status == IBP_OK)
                status = ibp::launch_rows(ibp::encode_deltas<decltype(zero)>, ibp::kMakeThreads,
                                          ibp::kMakeThreads / ibp::kWarp * warp_bytes, call, *codebook, versions,
                                          num_versions, num_rows, coded, lengths, counts, bases, overflow,
                                          overflow_bytes, updates_bases);
        }
        return status;
    });
}
}
