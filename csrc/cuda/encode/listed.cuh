// listed.cuh - listed rows of scheme planes with elements of two or four bytes and a table of all symbols' codes
// (FORMAT.md section 6).
//
// The elements that are listed are put side by side in shared memory, and the bitmap of their columns; then they are
// coded as a dense row of their own (values.cuh).
#ifndef IBP_ENCODE_LISTED_CUH
#define IBP_ENCODE_LISTED_CUH

#include "values.cuh"

namespace ibp {

template <typename T, uint32_t LANES, uint32_t FIELDS> struct ListedEncoder : ValuesEncoder<T, true, LANES, FIELDS> {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4, "the comparisons that there are");
    using Base = ValuesEncoder<T, true, LANES, FIELDS>;
    using Book = typename Base::Book;
    using Group = typename Base::Group;
    using G = Group;
    using Base::columns, Base::planes, Base::row_bytes;
    static constexpr uint32_t kBits = Base::kBits, kPerLane = Base::kPerLane, kSteps = 4, kStepBytes = kVector * LANES;

    using Base::Base;
    __device__ __forceinline__ explicit ListedEncoder(const Base &base) : Base(base) {}
    __device__ __forceinline__ ListedEncoder of_cluster(const ibp_codebook &cb, uint32_t k) const
    {
        return ListedEncoder(Base::of_cluster(cb, k));
    }

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
    };
    __device__ __forceinline__ Work work_in(const BitStage &stage) const
    {
        uint8_t *const scratch = reinterpret_cast<uint8_t *>(stage.words) + bit_stage_bytes(row_bytes);
        uint8_t *const bitmap = scratch + elements_bytes(row_bytes);
        return {stage, reinterpret_cast<T *>(scratch), bitmap, bitmap + (columns + 127u) / 128u * 16u, 0};
    }

    // ---- listed elements ----

    // Which of the elements of 16 bytes differ from the default: a bit each.
    __device__ __forceinline__ uint32_t listed_of(const uint32_t (&word)[4]) const
    {
        const uint32_t value = static_cast<uint32_t>(planes.default_value);
        uint32_t listed = 0;
        if constexpr (sizeof(T) == 2) {
            const uint32_t two = value * 0x00010001u;
            uint32_t differs[4]; // the highest bit of each half
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                const uint32_t other = word[i] ^ two;
                differs[i] = ((other & 0x7fff7fffu) + 0x7fff7fffu) | (Book::signed_default(planes) ? 0u : other);
            }
#pragma unroll
            for (uint32_t i = 0; i < 4; i += 2)
                listed |= highest_bits(permute_bytes(differs[i], differs[i + 1], 0x7531)) << 2u * i;
        } else {
#pragma unroll
            for (uint32_t i = 0; i < 4; i++)
                listed |= static_cast<uint32_t>(((word[i] ^ value) & static_cast<uint32_t>(this->listing_bits())) != 0u)
                          << i;
        }
        return listed;
    }
    // The highest bits of four bytes.
    static __device__ __forceinline__ uint32_t highest_bits(uint32_t bytes)
    {
        return (bytes & 0x80808080u) * 0x00204081u >> 28;
    }
    // The highest bits of 16 bytes of elements.
    static __device__ __forceinline__ uint32_t signs_of(const uint32_t (&word)[4])
    {
        if (sizeof(T) == 4)
            return highest_bits(
                permute_bytes(permute_bytes(word[0], word[1], 0x73), permute_bytes(word[2], word[3], 0x73), 0x5410));
        return highest_bits(permute_bytes(word[0], word[1], 0x7531)) |
               highest_bits(permute_bytes(word[2], word[3], 0x7531)) << 4;
    }

    // Puts the listed elements side by side, and makes the bitmaps.
    __device__ __forceinline__ void gather_listed(const PlainRow &row, Work &work) const
    {
#pragma unroll 1
        for (uint32_t base = 0; base < row_bytes; base += kSteps * kStepBytes) {
            uint32_t words[kSteps][4], listed[kSteps], signs[kSteps], counts[kSteps / 2] = {};
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t first = base + s * kStepBytes + kVector * G::lane();
                listed[s] = signs[s] = 0;
                if (first < row_bytes) row.load(first, words[s]);
            }
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t first = base + s * kStepBytes + kVector * G::lane(),
                               column = first / static_cast<uint32_t>(sizeof(T));
                if (first >= row_bytes) continue;
                listed[s] = low_bits(listed_of(words[s]), ibp_min_u32(columns - column, kPerLane));
                if (kPerLane == 8u) work.bitmap[column / 8u] = static_cast<uint8_t>(listed[s]);
                if (Book::signed_default(planes)) signs[s] = signs_of(words[s]);
                if (Book::signed_default(planes) && kPerLane == 8u)
                    work.signs[column / 8u] = static_cast<uint8_t>(signs[s]);
                this->rotate(words[s]);
                counts[s / 2] += ibp_popcount(listed[s]) << 16u * (s % 2u);
            }
            if (kPerLane == 4u) {
#pragma unroll
                for (uint32_t s = 0; s < kSteps; s++) { // two lanes have a byte together
                    const uint32_t both = listed[s] | __shfl_xor_sync(G::mask(), listed[s], 1) << 4;
                    const uint32_t column = (base + s * kStepBytes) / static_cast<uint32_t>(sizeof(T)) + 4u * G::lane();
                    if (G::lane() % 2u == 0u && column < columns) work.bitmap[column / 8u] = static_cast<uint8_t>(both);
                    if (!Book::signed_default(planes)) continue;
                    const uint32_t of_both = signs[s] | __shfl_xor_sync(G::mask(), signs[s], 1) << 4;
                    if (G::lane() % 2u == 0u && column < columns)
                        work.signs[column / 8u] = static_cast<uint8_t>(of_both);
                }
            }
            uint32_t before[kSteps / 2], total[kSteps / 2];
            G::scan(counts, before, total);
#pragma unroll
            for (uint32_t s = 0; s < kSteps; s++) {
                const uint32_t shift = 16u * (s % 2u);
                T *to = work.elements + work.num_listed + (before[s / 2] >> shift & 0xffffu);
#pragma unroll
                for (uint32_t e = 0; e < kPerLane; e++)
                    if (listed[s] >> e & 1u) *to++ = Base::element(words[s], e);
                work.num_listed += total[s / 2] >> shift & 0xffffu;
            }
        }
        G::sync(); // the elements are there
    }

    // Whether all listed elements equal the closed value.
    __device__ __forceinline__ bool is_closed(const Work &work) const
    {
        uint32_t closed[4] = {static_cast<uint32_t>(planes.closed_value)};
        this->rotate(closed);
        const T value = static_cast<T>(closed[0]);
        if (work.elements[0] != value) return false;
        bool differs = false;
        for (uint32_t i = G::lane(); i < work.num_listed; i += LANES) differs = differs || work.elements[i] != value;
        return !G::any(differs);
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
    // Positions first + the ones of `named`, of which the first has a rank.
    static __device__ __forceinline__ void put_list(const BitStage &stage, const ibp_position_form &form,
                                                    uint32_t start, uint32_t named, uint32_t first, uint32_t rank)
    {
        const uint32_t low_start = start + to_byte(form.upper_bits);
        for (; named != 0u; named &= named - 1u, rank++) {
            const uint32_t column = first + ibp_popcount((named & (0u - named)) - 1u),
                           bit = start + (column >> form.low_bits) + rank;
            stage.or_word(bit / 32u, 1u << bit % 32u);
            if (form.low_bits != 0u) stage.or_bits(low_start + rank * form.low_bits, low_bits(column, form.low_bits));
        }
    }

    // ---- values ----

    // Codes the values, which begin with a bit, into at most most_bits of the stage. Returns where they end.
    __device__ __forceinline__ uint32_t put_all(const Work &work, uint32_t start, uint32_t most_bits) const
    {
        return this->put_values(work.stage, work.num_listed, start, most_bits,
                                reinterpret_cast<uint16_t *>(work.elements),
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
        gather_listed(row, work);
        const uint32_t k = work.num_listed, positions = start_bit + this->header_bits();
        const bool closed = k != 0u && is_closed(work), has_values = k != 0u && !closed;
        if (G::lane() == 0u) stage.or_bits(start_bit, k | (closed ? ibp_closed_bit(columns) : 0u));
        ibp_position_form form{};
        if (k != 0u) form = this->choose_form(k);
        const uint32_t signs = positions + 8u * form.num_bytes, values = signs + this->sign_bits(k);
        if (values > 8u * most_bytes) return values / 8u;
        if (k != 0u) put_positions(work, form, positions);
        if (Book::signed_default(planes)) put_signs(work, signs);
        return (has_values ? put_all(work, values, 8u * most_bytes) : values) / 8u;
    }
};

} // namespace ibp

#endif
