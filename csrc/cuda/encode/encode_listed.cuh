// encode_listed.cuh - encodes listed rows of scheme planes (FORMAT.md section 6) of up to 8 KiB, with elements of up to
// four bytes. There must be a table of the codes of all symbols (census.cuh). The codebook must have neither invariant
// bits nor constant columns. planes_book.cuh shows the bytes of a listed row.
//
// 1. The listed elements are stored in consecutive elements of shared memory, and a bitmap of their columns is made
//    (gather_listed).
// 2. The header, the positions and the highest bits of the other elements are written to the stage.
// 3. The values of the listed elements are encoded as those of a dense row are (values.cuh).
#ifndef IBP_ENCODE_LISTED_CUH
#define IBP_ENCODE_LISTED_CUH

#include "values.cuh"

namespace ibp {

constexpr uint32_t kGatheredFields = kConsecutive | kSignedDefault; // the PlanesFields that ListedEncoder supports

// FIELDS: the PlanesFields that the codebook may use; flags of kGatheredFields.
template <typename T, uint32_t THREADS, uint32_t FIELDS>
struct ListedEncoder : ValuesEncoder<T, true, THREADS, FIELDS> {
    static_assert(sizeof(T) <= 4, "elements must have at most four bytes");
    using Base = ValuesEncoder<T, true, THREADS, FIELDS>;
    using Book = typename Base::Book;
    using Group = typename Base::Group;
    using G = Group;
    using Base::columns, Base::planes, Base::row_bytes;
    static constexpr uint32_t kBits = Base::kBits, kPerLane = Base::kPerLane;

    // kVectors: number of consecutive vectors that a lane takes in each step. Bits: an integer that holds a bit for
    // each of the lane's elements in a step.
    static constexpr uint32_t kVectors = sizeof(T) == 1 ? 2 : 4, kPerStep = kVectors * kPerLane;
    using Bits = std::conditional_t<kPerStep == 32u, uint32_t, uint16_t>;

    using Base::Base;

    // The scratch of a group, which follows its stage in shared memory. A list of columns has two bytes for each column
    // that it names. It names at most about a quarter of all columns, because a bitmap is stored instead of a longer
    // list. Therefore the listed elements and the list together fit in elements_bytes bytes.
    //
    //     | listed elements, and then the columns of a list: a multiple of 64 bytes | bitmap | signs |
    static __host__ __device__ __forceinline__ uint32_t elements_bytes(uint32_t row_bytes)
    {
        return (row_bytes + (sizeof(T) == 1 ? row_bytes / 2u : 0u) + 63u) / 64u * 64u;
    }
    static __host__ __device__ __forceinline__ uint32_t scratch_bytes(const ibp_codebook &cb)
    {
        const uint32_t words = (cb.row_bytes / static_cast<uint32_t>(sizeof(T)) + 127u) / 128u * 4u;
        return elements_bytes(cb.row_bytes) + (Book::signed_default(cb.planes) ? 12u : 4u) * words;
    }
    // bits: the highest bits of a lane's unlisted elements in a step, packed; the first element's bit is the lowest.
    // before: number of unlisted elements in the row before the lane's elements.
    struct alignas(2u * sizeof(Bits)) Signs {
        Bits bits, before;
    };

    // A row being encoded.
    struct Work {
        const BitStage &stage;
        T *elements;  // listed elements as they are in the row; later the list of values.cuh
        Bits *bitmap; // one bit for each column
        Signs *signs; // used with signed_default
        uint32_t num_listed;
    };
    __device__ __forceinline__ Work work_in(const BitStage &stage) const
    {
        uint8_t *const scratch = reinterpret_cast<uint8_t *>(stage.words) + bit_stage_bytes(row_bytes);
        Bits *const bitmap = reinterpret_cast<Bits *>(scratch + elements_bytes(row_bytes));
        Signs *const signs = reinterpret_cast<Signs *>(bitmap + (columns + 127u) / 128u * (128u / kPerStep));
        return {stage, reinterpret_cast<T *>(scratch), bitmap, signs, 0};
    }

    // ---- listed elements ----

    // Stores the listed elements in work.elements one after the other, and makes the bitmap and, with signed_default,
    // the signs.
    __device__ __forceinline__ void gather_listed(const PlainRow &row, Work &work) const
    {
        const bool is_whole = row.is_whole(row_bytes), has_signs = Book::signed_default(planes);
        const uint32_t normal = this->normal_word(), bits = this->listing_bits() * Base::kLowest;
#pragma unroll 1
        for (uint32_t base = 0; base < columns; base += kPerStep * THREADS) {
            const uint32_t column = base + kPerStep * G::rank();
            uint32_t words[kVectors][4], ones[4u * kVectors], signs = 0;
            this->load_vectors(row, column * static_cast<uint32_t>(sizeof(T)), kVector, is_whole, words);
#pragma unroll
            for (uint32_t i = 0; i < 4u * kVectors; i++)
                ones[i] = Base::ones_of((words[i / 4u][i % 4u] ^ normal) & bits);
            const uint32_t listed = Base::bits_of(ones), count[1] = {ibp_popcount(listed)};
            uint32_t before[1], total[1];
            G::scan(count, before, total);
            before[0] += work.num_listed;
            work.num_listed += total[0];
            if (has_signs)
                signs = put_listed<true>(work.elements + before[0], words, listed);
            else
                put_listed<false>(work.elements + before[0], words, listed);
            if (column >= columns) continue;
            work.bitmap[column / kPerStep] = static_cast<Bits>(listed);
            if (!has_signs) continue;
            signs = __funnelshift_r(__brev(signs), 0u, 32u - kPerStep + count[0]);
            work.signs[column / kPerStep] = {static_cast<Bits>(signs), static_cast<Bits>(column - before[0])};
        }
        G::sync(); // before elements and bitmaps are read
    }
    // Stores the listed elements of a lane's words. If HAS_SIGNS is true, returns the highest bits of the unlisted
    // elements, packed; the last element's bit is the lowest.
    template <bool HAS_SIGNS>
    static __device__ __forceinline__ uint32_t put_listed(T *to, const uint32_t (&words)[kVectors][4], uint32_t listed)
    {
        // lowest, highest: the word of element e, rotated so that element e is the lowest, or the highest, element of
        // the word.
        uint32_t signs = 0, highest = 0;
#pragma unroll
        for (uint32_t e = 0; e < kPerStep; e++) {
            constexpr uint32_t kTurn = sizeof(T) == 1 ? 0x0321 : 0x1032;
            const uint32_t word = words[e / kPerLane][e % kPerLane / Base::kPerWord],
                           lowest = e % Base::kPerWord == 0u ? word : highest;
            highest = (e + 1u) % Base::kPerWord == 0u ? word : permute_bytes(lowest, lowest, kTurn);
            if ((listed >> e & 1u) == 0u) {
                if (HAS_SIGNS) signs = __funnelshift_l(highest, signs, 1);
                continue;
            }
            *to = static_cast<T>(lowest);
            to += 1;
        }
        return signs;
    }
    // Returns whether the row is closed: there are listed elements, and all of them equal the closed value.
    __device__ __forceinline__ bool is_closed(const Work &work) const
    {
        for (uint32_t base = 0; base < work.num_listed; base += THREADS) {
            const uint32_t i = base + G::rank();
            if (G::any(i < work.num_listed && work.elements[i] != static_cast<T>(planes.closed_value))) return false;
        }
        return work.num_listed != 0u;
    }

    // ---- positions ----

    // Writes the positions to the stage, beginning at bit `start`. If the positions are stored as a list, they are
    // first collected in shared memory after the elements, so that all lanes then write about the same number of
    // positions.
    __device__ __forceinline__ void put_positions(const Work &work, const ibp_position_form &form, uint32_t start) const
    {
        const BitStage &stage = work.stage;
        if (!form.is_list) {
#pragma unroll 1
            for (uint32_t first = kPerStep * G::rank(); first < columns; first += kPerStep * THREADS)
                stage.or_bits<kLikely>(start + first, uint32_t{work.bitmap[first / kPerStep]});
            return;
        }
        auto *const list = reinterpret_cast<uint16_t *>(
            work.elements + (sizeof(T) == 1 ? work.num_listed + work.num_listed % 2u : work.num_listed));
        uint32_t num = 0;
#pragma unroll 1
        for (uint32_t base = 0; base < columns; base += kPerStep * THREADS) {
            const uint32_t first = base + kPerStep * G::rank(),
                           held = ibp_min_u32(columns - ibp_min_u32(first, columns), kPerStep);
            uint32_t named = held != 0u ? work.bitmap[first / kPerStep] : 0u;
            if (form.is_complement) named = low_bits(~named, held);
            const uint32_t count[1] = {ibp_popcount(named)};
            uint32_t before[1], total[1];
            G::scan(count, before, total);
            uint16_t *to = list + num + before[0];
            for (; named != 0u; named &= named - 1u) *to++ = static_cast<uint16_t>(first + lowest_of(named));
            num += total[0];
        }
        G::sync(); // before the list is read
        const uint32_t low = start + to_byte(form.upper_bits), num_bits = form.low_bits;
#pragma unroll 1
        for (uint32_t i = G::rank(); i < num; i += THREADS) {
            const uint32_t column = list[i], upper = start + (column >> num_bits) + i;
            stage.or_word(upper / 32u, 1u << upper % 32u);
            stage.or_bits(low + i * num_bits, low_bits(column, num_bits));
        }
    }
    // Writes the highest bits of the unlisted elements, beginning at bit `start`.
    __device__ __forceinline__ void put_signs(const Work &work, uint32_t start) const
    {
        const BitStage &stage = work.stage;
#pragma unroll 1
        for (uint32_t column = kPerStep * G::rank(); column < columns; column += kPerStep * THREADS) {
            const Signs signs = work.signs[column / kPerStep];
            stage.or_bits<kLikely>(start + signs.before, uint32_t{signs.bits});
        }
    }
    // ---- values ----

    // Encodes a row into a stage whose bits are zeros, beginning at bit start_bit, which must be the first bit of a
    // byte. Returns the byte at which the coded row ends. If this is more than most_bytes, the content of the stage is
    // unspecified.
    __device__ __forceinline__ uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit,
                                               uint32_t most_bytes) const
    {
        Work work = work_in(stage);
        gather_listed(row, work);
        const uint32_t k = work.num_listed, positions = start_bit + this->header_bits();
        const bool closed = is_closed(work);
        // The header lies in the stage's first word, because at most the byte of the cluster comes before it.
        if (G::rank() == 0u) stage.or_word(0, (k | (closed ? ibp_closed_bit(columns) : 0u)) << start_bit);
        ibp_position_form form{};
        if (k != 0u) form = this->choose_form(k);
        const uint32_t signs = positions + 8u * form.num_bytes, values = signs + this->sign_bits(k);
        if (values > 8u * most_bytes) return values / 8u;
        if (k != 0u) put_positions(work, form, positions);
        if (Book::signed_default(planes)) put_signs(work, signs);
        if (k == 0u || closed) return values / 8u;
        const auto load = [&](uint32_t first, uint32_t(&words)[Base::kOctets][Base::kWords]) {
#pragma unroll
            for (uint32_t i = 0; i < Base::kWords; i++)
                words[0][i] = reinterpret_cast<const uint32_t *>(work.elements + first)[i];
            this->rotate(words[0]);
        };
        return this->put_values(stage, k, values, 8u * most_bytes,
                                reinterpret_cast<typename Base::Symbol *>(work.elements), load) /
               8u;
    }
};

} // namespace ibp

#endif
