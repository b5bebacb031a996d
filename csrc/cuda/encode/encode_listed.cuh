// encode_listed.cuh - listed rows of scheme planes with elements of up to four bytes and a table of all symbols' codes
// (FORMAT.md section 6).
//
// The elements that are listed are put side by side in shared memory, and the bitmap of their columns; then they are
// coded as a dense row of their own (values.cuh).
#ifndef IBP_ENCODE_LISTED_CUH
#define IBP_ENCODE_LISTED_CUH

#include "values.cuh"

namespace ibp {

template <typename T, uint32_t LANES, uint32_t FIELDS> struct ListedEncoder : ValuesEncoder<T, true, LANES, FIELDS> {
    static_assert(sizeof(T) <= 4, "the comparisons that there are");
    using Base = ValuesEncoder<T, true, LANES, FIELDS>;
    using Book = typename Base::Book;
    using Group = typename Base::Group;
    using G = Group;
    using Base::columns, Base::planes, Base::row_bytes;
    static constexpr uint32_t kBits = Base::kBits, kPerLane = Base::kPerLane, kStepBytes = Base::kStepBytes;

    using Base::Base;

    // Shared memory of a group behind its stage: the listed elements, whole lanes of them, and the bitmap.
    static __host__ __device__ __forceinline__ uint32_t elements_bytes(uint32_t row_bytes)
    {
        return (row_bytes + 63u) / 64u * 64u;
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        const uint32_t words = (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 127u) / 128u * 4u;
        return elements_bytes(cb.row_bytes) + (Book::signed_default(cb.planes) ? 8u : 4u) * words;
    }

    // A row being coded.
    struct Work {
        const BitStage &stage;
        T *elements;     // rotated; then symbols that escape
        uint8_t *bitmap; // a bit a column
        uint8_t *signs;  // likewise the highest bits, where the default has any
        uint32_t num_listed;
        bool closed; // all listed ones equal the closed value
    };
    __device__ __forceinline__ Work work_in(const BitStage &stage) const
    {
        uint8_t *const scratch = reinterpret_cast<uint8_t *>(stage.words) + bit_stage_bytes(row_bytes);
        uint8_t *const bitmap = scratch + elements_bytes(row_bytes);
        return {stage, reinterpret_cast<T *>(scratch), bitmap, bitmap + (columns + 127u) / 128u * 16u, 0, false};
    }

    // ---- listed elements ----

    // Bits of a lane's elements, from a column on, in a bitmap. By all lanes together, also those past the row's end.
    __device__ __forceinline__ void keep_bits(uint8_t *bitmap, uint32_t column, uint32_t bits) const
    {
        uint8_t *const to = bitmap + column / 8u;
        if (kPerLane == 4u) { // two lanes have a byte together
            bits |= __shfl_xor_sync(G::mask(), bits, 1) << 4;
            if (G::lane() % 2u != 0u) return;
        }
        if (column >= columns) return;
        if (kPerLane == 16u)
            *reinterpret_cast<uint16_t *>(to) = static_cast<uint16_t>(bits);
        else
            *to = static_cast<uint8_t>(bits);
    }
    __device__ __forceinline__ uint32_t kept_bits(const uint8_t *bitmap, uint32_t column) const
    {
        if (kPerLane == 16u) return *reinterpret_cast<const uint16_t *>(bitmap + column / 8u);
        return bitmap[column / 8u] >> column % 8u & ((1u << kPerLane) - 1u);
    }

    // Makes the bitmaps, and counts the listed elements.
    __device__ __forceinline__ void find_listed(const PlainRow &row, Work &work) const
    {
        const bool whole = row.is_whole(row_bytes);
        uint32_t sums[2] = {}; // listed ones; lanes that have one which differs from the closed value
#pragma unroll 2
        for (uint32_t base = 0; base < row_bytes; base += kStepBytes) {
            const uint32_t first = base + kVector * G::lane(), column = first / static_cast<uint32_t>(sizeof(T));
            uint32_t word[4] = {}, listed = 0;
            if (first < row_bytes) {
                row.load(first, whole, word);
                listed = low_bits(
                    Base::different_from(static_cast<T>(planes.default_value), !Book::signed_default(planes), word),
                    ibp_min_u32(columns - column, kPerLane));
                if (sums[1] == 0u)
                    sums[1] = (listed & Base::different_from(static_cast<T>(planes.closed_value), true, word)) != 0u;
            }
            keep_bits(work.bitmap, column, listed);
            if (Book::signed_default(planes)) keep_bits(work.signs, column, Base::signs_of(word));
            sums[0] += ibp_popcount(listed);
        }
        G::sum(sums);
        work.num_listed = sums[0], work.closed = sums[0] != 0u && sums[1] == 0u;
        G::sync(); // the bitmaps are there
    }
    // Puts the listed elements side by side.
    __device__ __forceinline__ void gather_listed(const PlainRow &row, const Work &work) const
    {
        constexpr uint32_t kSteps = 2;
        const bool whole = row.is_whole(row_bytes);
        uint32_t num_listed = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            uint32_t words[kSteps][4] = {}, listed[kSteps] = {};
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t first = base + s * kStepBytes + kVector * G::lane();
                if (first >= row_bytes) continue;
                row.load(first, whole, words[s]);
                listed[s] = kept_bits(work.bitmap, first / static_cast<uint32_t>(sizeof(T)));
            }
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) this->rotate(words[s]); // when all are on their way
            const uint32_t counts[1] = {ibp_popcount(listed[0]) | ibp_popcount(listed[1]) << 16};
            uint32_t before[1], total[1];
            G::scan(counts, before, total);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                T *to = work.elements + num_listed + (before[0] >> 16u * s & 0xffffu);
#pragma unroll
                for (uint32_t e = 0; e < kPerLane; e++) {
                    const uint32_t is_listed = listed[s] & 1u << e;
                    if (is_listed != 0u) *to = Base::element(words[s], e);
                    to += is_listed >> e;
                }
                num_listed += total[0] >> 16u * s & 0xffffu;
            }
        }
        G::sync(); // the elements are there
    }

    // ---- positions ----

    __device__ __forceinline__ void put_positions(const Work &work, const ibp_position_form &form, uint32_t start) const
    {
        const uint32_t *const words = reinterpret_cast<const uint32_t *>(work.bitmap);
        uint32_t named_before = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < columns; base += 32u * LANES) {
            const uint32_t first = base + 32u * G::lane(),
                           held = ibp_min_u32(columns - ibp_min_u32(first, columns), 32u);
            uint32_t named = held != 0u ? low_bits(words[first / 32u], held) : 0u;
            if (!form.is_list) {
                work.stage.or_bits(start + first, named);
                continue;
            }
            if (form.is_complement) named = low_bits(~named, held);
            const uint32_t count[1] = {ibp_popcount(named)};
            uint32_t before[1], total[1];
            G::scan(count, before, total);
            put_list(work.stage, form, start, named, first, named_before + before[0]);
            named_before += total[0];
        }
    }
    // The highest bits of the elements that are not listed, from bit `start` on.
    __device__ __forceinline__ void put_signs(const Work &work, uint32_t start) const
    {
        const uint32_t *const listed = reinterpret_cast<const uint32_t *>(work.bitmap),
                              *const signs = reinterpret_cast<const uint32_t *>(work.signs);
        uint32_t all_before = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < columns; base += 32u * LANES) {
            const uint32_t first = base + 32u * G::lane(),
                           held = ibp_min_u32(columns - ibp_min_u32(first, columns), 32u);
            const uint32_t others = held != 0u ? low_bits(~listed[first / 32u], held) : 0u;
            const uint32_t count[1] = {ibp_popcount(others)};
            uint32_t before[1], total[1];
            G::scan(count, before, total);
            if (others != 0u)
                work.stage.or_bits(start + all_before + before[0], ibp_extract(signs[first / 32u], others));
            all_before += total[0];
        }
    }
    // Puts the positions first + i for every bit i of `named`. rank: the first one's. Their upper bits lie in 64 bits
    // at most.
    static __device__ __forceinline__ void put_list(const BitStage &stage, const ibp_position_form &form,
                                                    uint32_t start, uint32_t named, uint32_t first, uint32_t rank)
    {
        const uint32_t group = first >> form.low_bits;
        uint64_t upper = 0;
        BitWriter low(stage, start + to_byte(form.upper_bits) + rank * form.low_bits);
        for (uint32_t i = 0; named != 0u; named &= named - 1u, i++) {
            const uint32_t column = first + ibp_popcount((named & (0u - named)) - 1u);
            upper |= uint64_t{1} << ((column >> form.low_bits) - group + i);
            low.push(low_bits(column, form.low_bits), form.low_bits);
        }
        stage.or_bits(start + group + rank, upper);
        low.finish();
    }

    // ---- values ----

    // Codes the values, which begin with a bit, into at most most_bits of the stage. Returns where they end.
    __device__ __forceinline__ uint32_t put_all(const Work &work, uint32_t start, uint32_t most_bits) const
    {
        return this->put_values(work.stage, work.num_listed, start, most_bits,
                                reinterpret_cast<typename Base::Symbol *>(work.elements),
                                [&](uint32_t first, uint32_t(&words)[Base::kOctets][Base::kWords]) {
#pragma unroll
                                    for (uint32_t i = 0; i < Base::kOctets * Base::kWords; i++)
                                        words[i / Base::kWords][i % Base::kWords] =
                                            reinterpret_cast<const uint32_t *>(work.elements + first)[i];
                                });
    }

    // Codes a row into a stage that is all zeros from start_bit, a whole byte, on. Returns the bytes up to its end;
    // where these are more than most_bytes, the stage holds anything.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        Work work = work_in(stage);
        find_listed(row, work);
        const uint32_t k = work.num_listed, positions = start_bit + this->header_bits();
        if (G::lane() == 0u) stage.or_bits(start_bit, k | (work.closed ? ibp_closed_bit(columns) : 0u));
        ibp_position_form form{};
        if (k != 0u) form = this->choose_form(k);
        const uint32_t signs = positions + 8u * form.num_bytes, values = signs + this->sign_bits(k);
        if (values > 8u * most_bytes) return values / 8u;
        if (k != 0u) put_positions(work, form, positions);
        if (Book::signed_default(planes)) put_signs(work, signs);
        if (k == 0u || work.closed) return values / 8u;
        gather_listed(row, work);
        return put_all(work, values, 8u * most_bytes) / 8u;
    }
};

} // namespace ibp

#endif
