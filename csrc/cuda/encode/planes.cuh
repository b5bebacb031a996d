// planes.cuh - encodes rows of scheme planes (FORMAT.md section 6) with any codebook. planes_book.cuh shows the bytes
// of a coded row. census.cuh explains the codes of symbols, and T, LISTED and FIELDS. A group of lanes encodes a row,
// and in each step of encoding every lane takes 16 bytes.
//
// 1. The group takes the census of the row, which says where each part begins.
// 2. Step by step, a lane loads its elements and looks up their codes (find_codes).
// 3. A prefix sum says where the lane's digits of each plane and its raw symbols go (scan).
// 4. The lane ORs all parts of its elements into the stage (write_positions, write_signs, write_values).
//
// If a table has the codes of all symbols, a warp executes about 350 instructions to encode one step, which is 512
// bytes of 16-bit elements, including the census. The rate at which instructions are issued limits encoding.
#ifndef IBP_ENCODE_PLANES_CUH
#define IBP_ENCODE_PLANES_CUH

#include "census.cuh"

#include <type_traits>

namespace ibp {

template <typename T, bool LISTED, uint32_t THREADS, uint32_t FIELDS>
struct PlanesEncoder : PlanesCensus<T, LISTED, THREADS, FIELDS, false> {
    using Base = PlanesCensus<T, LISTED, THREADS, FIELDS, false>;
    using Book = typename Base::Book;
    using G = typename Base::Group;
    using Lane = typename Base::Lane;
    using Parts = typename Base::Parts;
    using Base::columns, Base::element, Base::find_codes, Base::kBits, Base::kPerLane, Base::kPerWord, Base::kStepBytes,
        Base::live_bytes, Base::load, Base::planes, Base::symbol, Base::symbol_bits;
    static constexpr bool kFillsStage = false;
    using Digits = std::conditional_t<sizeof(T) == 1, uint64_t, uint32_t>; // holds a lane's digits of one plane

    using Base::Base;
    // Returns the size in bytes of the scratch that a group needs besides its stage.
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &) { return 0; }

    // Counts over the elements before a lane, or over the elements of all lanes. values: number of coded elements; in
    // dense rows, scan leaves it 0 and encode takes the lane's column instead. escapes: number of escapes in each
    // plane.
    struct Running {
        uint32_t values, escapes[IBP_MAX_PLANES];
    };
    __device__ __forceinline__ void scan(const Lane &lane, uint32_t escapes, Running &before, Running &total) const
    {
        const uint32_t own[3] = {escapes & 0x00ff00ffu, escapes >> 8 & 0x00ff00ffu, ibp_popcount(lane.present)};
        uint32_t below[3], all[3] = {0, 0, 0};
        if (LISTED) {
            G::scan(own, below, all);
        } else {
            const uint32_t counts[2] = {own[0], own[1]};
            uint32_t counts_below[2], counts_all[2];
            G::scan(counts, counts_below, counts_all);
            below[0] = counts_below[0], below[1] = counts_below[1], below[2] = 0;
            all[0] = counts_all[0], all[1] = counts_all[1];
        }
        before = {below[2], {below[0] & 0xffffu, below[1] & 0xffffu, below[0] >> 16, below[1] >> 16}};
        total = {all[2], {all[0] & 0xffffu, all[1] & 0xffffu, all[0] >> 16, all[1] >> 16}};
    }

    __device__ __forceinline__ void write_positions(const Lane &lane, const ibp_position_form &form, uint32_t start,
                                                    uint32_t listed_before, const BitStage &stage) const
    {
        if (!form.is_list) {
            stage.or_bits(start + lane.column, lane.present);
            return;
        }
        uint32_t named = form.is_complement ? this->held_at(lane.column) & ~lane.present : lane.present;
        uint32_t rank = form.is_complement ? lane.column - listed_before : listed_before;
        BitWriter low(stage, start + to_byte(form.upper_bits) + rank * form.low_bits);
        for (; named != 0u; named &= named - 1u, rank++) {
            const uint32_t column = lane.column + lowest_of(named);
            stage.or_bits(start + (column >> form.low_bits) + rank, 1u);
            low.push(column & ((1u << form.low_bits) - 1u), form.low_bits);
        }
        low.finish();
    }

    // Writes the highest bits of a lane's unlisted elements. listed_before: number of listed elements in the row before
    // the lane's elements.
    __device__ __forceinline__ void write_signs(const Lane &lane, uint32_t start, uint32_t listed_before,
                                                const BitStage &stage) const
    {
        uint32_t left = this->held_at(lane.column) & ~lane.present, signs = 0, count = 0;
        for (; left != 0u; left &= left - 1u, count++)
            signs |= static_cast<uint32_t>((lane.signs & left & (0u - left)) != 0u) << count;
        stage.or_bits(start + lane.column - listed_before, signs);
    }

    __device__ __forceinline__ T residual_mask() const
    {
        return static_cast<T>(planes.residual_bits >= kBits ? ~uint64_t{0}
                                                            : (uint64_t{1} << planes.residual_bits) - 1u);
    }
    __device__ __forceinline__ void write_residuals(const Lane &lane, uint32_t position, const BitStage &stage) const
    {
        const uint32_t r = planes.residual_bits;
        const T ones = residual_mask();
        BitWriter writer(stage, position);
        if (LISTED || sizeof(T) == 8) {
#pragma unroll
            for (uint32_t e = 0; e < kPerLane; e++)
                if (lane.present >> e & 1u) writer.push_wide(element(lane.word, e) & ones, r);
        } else { // all elements of a word at once
#pragma unroll
            for (uint32_t i = 0; i < 4; i++) {
                uint32_t packed = 0;
#pragma unroll
                for (uint32_t e = kPerWord; e-- > 0;)
                    packed = (kPerWord == 1 ? 0u : packed << (r % 32u)) |
                             static_cast<uint32_t>(element(lane.word, i * kPerWord + e) & ones);
                writer.push(packed, ibp_popcount(lane.present >> (i * kPerWord) & ((1u << kPerWord) - 1u)) * r);
            }
        }
        writer.finish();
    }

    // Returns the digits that a lane's elements have in plane p, packed from bit 0 in the order of the elements.
    __device__ __forceinline__ Digits digits_of(const Lane &lane, const uint32_t (&code)[kPerLane], uint32_t p) const
    {
        const uint32_t num_bits = planes.digit_bits[p];
        Digits digits = 0;
#pragma unroll
        for (uint32_t e = kPerLane; e-- > 0;) {
            const bool reaches = p == 0u ? (!LISTED || (lane.present >> e & 1u)) : (code[e] >> (8u * p - 8u) & 1u);
            if (reaches) digits = static_cast<Digits>(digits << num_bits) | (code[e] >> (8u * p + 4u) & 15u);
        }
        return digits;
    }

    __device__ __forceinline__ void write_values(const Lane &lane, const uint32_t (&code)[kPerLane], const Parts &parts,
                                                 const Running &at, const Running &total, const BitStage &stage) const
    {
        write_residuals(lane, parts.residuals + at.values * planes.residual_bits, stage);
        if (planes.num_planes > 0u)
            stage.or_bits(parts.digits[0] + at.values * planes.digit_bits[0], digits_of(lane, code, 0));
        uint32_t raw = lane.present, raw_at = parts.digits[0] + at.values * symbol_bits;
        bool is_raw = planes.num_planes == 0u;
#pragma unroll
        for (uint32_t p = 1; p <= IBP_MAX_PLANES; p++) {
            if (p > planes.num_planes || total.escapes[p - 1] == 0u) break;
            if (p < planes.num_planes) {
                stage.or_bits(parts.digits[p] + at.escapes[p - 1] * planes.digit_bits[p % IBP_MAX_PLANES],
                              digits_of(lane, code, p % IBP_MAX_PLANES));
            } else {
                is_raw = true;
                raw_at = parts.digits[p] + at.escapes[p - 1] * symbol_bits;
                raw = 0;
#pragma unroll
                for (uint32_t e = 0; e < kPerLane; e++) raw |= (code[e] >> (8u * p - 8u) & 1u) << e;
            }
        }
        if (!is_raw) return;
        BitWriter writer(stage, raw_at);
#pragma unroll
        for (uint32_t e = 0; e < kPerLane; e++)
            if (raw >> e & 1u) writer.push_wide(symbol(lane, e), symbol_bits);
        writer.finish();
    }

    // Encodes a row into a stage whose bits are zeros, beginning at bit start_bit, which must be the first bit of a
    // byte. Returns the byte at which the coded row ends, or kNoCodedForm. If the result is more than most_bytes, the
    // content of the stage is unspecified.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        const auto census = this->take_census(row);
        if (!census.has_form) return kNoCodedForm;
        const uint32_t k = census.reaching[0], positions = start_bit + this->header_bits();
        const bool has_signs = LISTED && Book::signed_default(planes);
        if (LISTED && G::rank() == 0u) stage.or_bits(start_bit, k | (census.closed ? ibp_closed_bit(columns) : 0u));
        if (LISTED && k == 0u && !has_signs) return positions / 8u;
        ibp_position_form form{};
        if (LISTED && k != 0u) form = this->choose_form(k);
        const uint32_t signs = positions + 8u * form.num_bytes;
        const Parts parts = this->lay_out(signs + this->sign_bits(k), census);
        const uint32_t coded_bytes = (census.closed ? parts.residuals : parts.end) / 8u;
        if (coded_bytes > most_bytes) return coded_bytes;
        Running running{};
        for (uint32_t base = 0; base < live_bytes; base += kStepBytes) {
            const Lane lane = load(row, base + kVector * G::rank());
            if (LISTED && !has_signs && !form.is_complement && !G::any(lane.present != 0u)) continue;
            uint32_t code[kPerLane];
            const uint32_t escapes = find_codes(lane, code);
            Running at, total;
            scan(lane, escapes, at, total);
            at.values = LISTED ? at.values + running.values : lane.column;
            running.values += total.values;
#pragma unroll
            for (uint32_t p = 0; p < IBP_MAX_PLANES; p++)
                at.escapes[p] += running.escapes[p], running.escapes[p] += total.escapes[p];
            if (LISTED && k != 0u) write_positions(lane, form, positions, at.values, stage);
            if (has_signs) write_signs(lane, signs, at.values, stage);
            if (!census.closed) write_values(lane, code, parts, at, total, stage);
        }
        return coded_bytes;
    }
};

} // namespace ibp

#endif
