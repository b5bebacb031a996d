// encoder.cuh - the contract of encoders, and the functions that encoders share. A group of lanes loads a row, which
// may lie at any address, in vectors of 16 bytes. The group assembles the coded row in its stage, which is a part of
// shared memory. The spare words at its end take bits that would lie past the coded row (BitStage).
//
//     | index of the cluster, if there are several: 1 byte | coded row | zeros: padding | spare words |
//
// To measure a row is to find the size of its coded form without writing it.
//
// An encoder is a struct for one kind of codebook and a number of threads:
//
//     template <uint32_t THREADS> struct SomeEncoder {
//         using Group = EncodeGroup<THREADS>;
//         static constexpr uint32_t kBlocks;
//         static constexpr bool kFillsStage;
//         static uint32_t table_bytes(const ibp_codebook &);
//         static uint32_t scratch_bytes(const ibp_codebook &);
//         SomeEncoder(const ibp_codebook &, uint32_t *table);
//         void select(const ibp_codebook &, uint32_t k);
//         uint32_t measure(const PlainRow &row) const;
//         uint32_t default_bytes() const;
//         uint32_t encode(const PlainRow &row, const BitStage &stage, uint32_t start_bit, uint32_t most_bytes) const;
//     };
//
//     Group          the threads that encode one row together
//     kBlocks        number of blocks that must be able to run on an SM at once (for __launch_bounds__); a block has
//                    kBlockThreads<Group> threads if rows are measured, else up to kMostEncodeThreads
//     kFillsStage    whether encode writes every byte of the coded row, and reads no byte of the stage
//     table_bytes    size in bytes of a block's table, which begins at byte 0 of shared memory, where `table` points; a
//                    multiple of 16
//     scratch_bytes  size in bytes of a group's scratch, which follows its stage in shared memory; a multiple of 16
//     select         turns the struct into the encoder for rows of cluster k; k is 0 if there is one cluster
//     measure        returns the size of the coded row in bits, or kNoCodedForm if the row cannot be coded
//     default_bytes  returns the largest size in bytes that a coded default row of row_bytes bytes would have,
//                    including the byte of its cluster; ~0u if any size is possible
//     encode         writes the coded row into the stage; returns the byte of the stage at which its bits end
//
// An encoder may rely on this:
//
//   - The fields of the codebook are checked (ibp_check_codebook_fields). The content of its arrays is not.
//   - All threads of a block call the constructor once.
//   - All lanes of a group call measure and encode together. The groups of one warp may diverge.
//   - start_bit is 0 or 8. If start_bit is 8, byte 0 of the stage holds the index of the cluster and must be kept. All
//     other bytes of the stage are zeros, unless kFillsStage.
//   - most_bytes is less than row_bytes. row.valid, the number of bytes that the row has, is row_bytes for all rows
//     except the last row of a table or of a source.
//
// An encoder must do this:
//
//   - End the constructor with a barrier of the block if it fills the table.
//   - Return from measure, in all lanes, the size of the coded row in bits. Rounded up to bytes, it must equal the
//     result of ibp_coded_row_bytes (internal/ibp_coding.h) for a codebook that has only the selected cluster.
//   - Leave the coded row in the stage, beginning at bit start_bit, and return from encode, in all lanes, the byte at
//     which the coded row ends. If the result is more than most_bytes, or kNoCodedForm, the stage may hold anything,
//     because the coded row is not stored then.
//   - Write no shared memory except the group's stage and scratch, whatever the row and the codebook's arrays hold, and
//     even if another stream changes the row meanwhile. BitStage writes bits that would lie past the stage to its spare
//     words.
//
// To add an encoder, write a .cuh with the struct and a .cu that instantiates it with the kernels of rows.cuh; then add
// functions to encode_request.h, and a line to the list of encode.cu.
#ifndef IBP_ENCODER_CUH
#define IBP_ENCODER_CUH

#include "../../core/checks.h"
#include "../../core/format.h"
#include "../../core/locate.h"
#include "../group.cuh"

#include <type_traits>

namespace ibp {

// kEncodeThreads: number of threads in a block if an SM holds several blocks. kMostEncodeThreads: number of threads in
// the larger blocks that are used if the caller limits the SMs, if the block's table is large, or if a block encodes
// one row at a time. kVector: size of a vector in bytes.
constexpr uint32_t kEncodeThreads = 256, kMostEncodeThreads = 512, kVector = 16;
static_assert(kMostEncodeThreads <= kMostJoined, "groups of several warps must be able to add up numbers");

constexpr uint32_t kNoCodedForm = static_cast<uint32_t>(IBP_NO_CODED_FORM);

// kPartLanes: number of lanes that encode one short row; more lanes would be idle. kFewLanes: number of lanes that
// encode one very short row with values.cuh. If each row has fewer lanes, a warp encodes more rows in each step, and
// the step takes no more time. kLongestOfFew, kLongestOfPart, kLongestOfWarp: sizes in bytes of the longest rows that
// kFewLanes lanes, kPartLanes lanes and a warp encode (by_threads in rows.cuh).
constexpr uint32_t kFewLanes = 4, kLongestOfFew = 256, kPartLanes = 8, kLongestOfPart = 1024, kLongestOfWarp = 8192;

// A group of THREADS threads that encode one row: a part of a warp if rows are short, a warp, or several warps if rows
// are long. Stages of long rows are large, so the shared memory of an SM has room for only a few of them. Many threads
// then encode one row. These threads rarely wait for each other, because encoding has few barriers.
template <uint32_t THREADS>
using EncodeGroup = Group<(THREADS < kWarp ? THREADS : kWarp), (THREADS < kWarp ? 1 : THREADS / kWarp), kEncodes>;

// The number of threads in a block, unless the caller limits the SMs.
template <class G> constexpr uint32_t kBlockThreads = G::kWarps > 1 ? G::kThreads : kEncodeThreads;

// Returns the 16 bytes at `from`, which may have any alignment. num_bytes: number of valid bytes at `from`; zeros
// replace the bytes past them. The function loads aligned words, of which the first may begin before `from`. If a word
// would end past the valid bytes, it loads single bytes instead, because the last row may end where its allocation
// ends.
static __device__ __noinline__ uint4 load_part(const uint8_t *from, uint32_t num_bytes)
{
    uint32_t words[4] = {};
    const uint32_t start = reinterpret_cast<uintptr_t>(from) % 4u;
    if (num_bytes < kVector + (0u - start) % 4u) {
#pragma unroll
        for (uint32_t b = 0; b < kVector; b++)
            if (b < num_bytes) words[b / 4u] |= static_cast<uint32_t>(from[b]) << (8u * (b % 4u));
    } else {
        const uint32_t *const near = reinterpret_cast<const uint32_t *>(from - start);
        uint32_t next = near[0];
#pragma unroll
        for (uint32_t i = 0; i < 4; i++) {
            const uint32_t word = next;
            next = i < 3 || start != 0u ? near[i + 1] : 0u;
            words[i] = __funnelshift_r(word, next, 8u * start);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

// A row before coding, and the number of valid bytes that it has.
struct PlainRow {
    const uint8_t *bytes;
    uint32_t valid;

    // Loads the 16 bytes that begin at byte `first`, a multiple of 16. Bytes past the valid ones are zeros.
    __device__ __forceinline__ void load(uint32_t first, uint32_t (&words)[4]) const
    {
        load(first, has_whole(first), words);
    }
    // has_whole() returns whether the vector that begins at byte `first` is aligned and has only valid bytes.
    // is_whole() returns whether this is true for all vectors of a row of row_bytes bytes.
    __device__ __forceinline__ bool has_whole(uint32_t first) const
    {
        return first + kVector <= valid && aligned(bytes, kVector);
    }
    __device__ __forceinline__ bool is_whole(uint32_t row_bytes) const
    {
        return row_bytes % kVector == 0u && valid >= row_bytes && aligned(bytes, kVector);
    }
    // Loads as load(first, words) does. is_vector: the result of has_whole(first).
    __device__ __forceinline__ void load(uint32_t first, bool is_vector, uint32_t (&words)[4]) const
    {
        const uint8_t *const from = bytes + first;
        uint4 v = make_uint4(0, 0, 0, 0);
        if (is_vector)
            v = *reinterpret_cast<const uint4 *>(from);
        else if (first < valid)
            v = load_part(from, valid - first);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
};

// The bytes of a default row (FORMAT.md section 2): a repeating pattern of eight bytes or, if there are constant
// columns, the bytes of the codebook's row template.
struct DefaultRow {
    PlainRow whole;
    uint32_t word[2];

    __device__ __forceinline__ explicit DefaultRow(const ibp_codebook &cb) : whole{ibp_template_of(&cb), cb.row_bytes}
    {
        const uint64_t eight = ibp_default_bytes(&cb);
        word[0] = static_cast<uint32_t>(eight), word[1] = static_cast<uint32_t>(eight >> 32);
    }
    __device__ __forceinline__ void load(uint32_t first, uint32_t (&words)[4]) const
    {
        words[0] = words[2] = word[0], words[1] = words[3] = word[1];
        if (whole.bytes != nullptr) whole.load(first, words);
    }
    static __device__ __forceinline__ uint8_t first_byte(const ibp_codebook &cb)
    {
        const uint8_t *const whole = ibp_template_of(&cb);
        if (whole != nullptr) return __ldg(whole);
        return cb.scheme == IBP_SCHEME_PLANES ? static_cast<uint8_t>(cb.planes.default_value) : uint8_t{0};
    }
};

// Returns whether the first num_bytes bytes of a row equal those of a default row. Stops after the first step that
// finds a difference. Not inlined, because few rows begin like a default row.
template <class G>
static __device__ __noinline__ bool is_default_throughout(const ibp_codebook &cb, PlainRow row, uint32_t num_bytes)
{
    const DefaultRow wanted(cb);
    for (uint32_t base = 0; base < num_bytes; base += kVector * G::kThreads) {
        const uint32_t first = base + kVector * G::rank();
        uint32_t words[4], same[4], differ = 0;
        row.load(first, words);
        wanted.load(first, same);
#pragma unroll
        for (uint32_t i = 0; i < 4u; i++)
            differ |= (words[i] ^ same[i]) & ibp_row_bits_of_word(num_bytes, first / 4u + i);
        if (G::any(differ != 0u)) return false;
    }
    return true;
}
template <class G>
__device__ __forceinline__ bool is_default(const ibp_codebook &cb, const PlainRow &row, uint32_t num_bytes)
{
    return row.bytes[0] == DefaultRow::first_byte(cb) && is_default_throughout<G>(cb, row, num_bytes);
}

// Prefetches a row's bytes into the L2 cache.
template <class G> __device__ __forceinline__ void prefetch(const PlainRow &row)
{
#ifdef __CUDACC__
    constexpr uint32_t kLine = 128;
#pragma unroll 1
    for (uint32_t first = kLine * G::rank(); first < row.valid; first += kLine * G::kThreads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(row.bytes + first));
#endif
}

// The value of the template parameter LIKELY if the bits are probably not zero. All words except the last one are then
// ORed unconditionally, because a test for zero would cost more than the atomic.
constexpr bool kLikely = true;

// The stage of a row that is being coded. Its words are zero at first, and bits are ORed into them. Bits that would lie
// past the end go to the spare words at the end of the stage. There are such bits only if a row has changed since it
// was measured, or has no coded form.
struct BitStage {
    uint32_t *words;
    uint32_t last_word; // index of the last word of the stage; later positions are limited to it

    __device__ __forceinline__ void or_word(uint32_t w, uint32_t bits) const
    {
        if (bits != 0u) atomicOr(&words[ibp_min_u32(w, last_word)], bits);
    }
    template <bool LIKELY = false> __device__ __forceinline__ void or_bits(uint32_t position, uint32_t bits) const
    {
        const uint32_t words_of[1] = {bits};
        or_words<LIKELY>(position, words_of);
    }
    __device__ __forceinline__ void or_bits(uint32_t position, uint64_t bits) const
    {
        const uint32_t words_of[2] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32)};
        or_words(position, words_of);
    }
    // Returns the address of the word that holds bit `position`, at which the caller writes N words of bits. The bits
    // may reach into N + 1 words. The result is limited so that all these words lie in the stage, whatever `position`
    // is.
    template <uint32_t N> __device__ __forceinline__ uint32_t *at(uint32_t position) const
    {
        constexpr uint32_t kMost = 6;
        static_assert(N <= kMost, "a stage must have enough spare words");
        return words + ibp_min_u32(position / 32u, last_word - kMost);
    }
    // ORs N words of bits into the stage, beginning at bit `position`. Words that are zero are skipped, unless LIKELY.
    template <bool LIKELY = false, uint32_t N>
    __device__ __forceinline__ void or_words(uint32_t position, const uint32_t (&bits)[N]) const
    {
        uint32_t *const to = at<N>(position);
        const uint32_t shift = position % 32u;
#pragma unroll
        for (uint32_t i = 0; i <= N; i++) {
            const uint32_t word = __funnelshift_l(i == 0u ? 0u : bits[i - 1u], i == N ? 0u : bits[i % N], shift);
            if ((LIKELY && i < N) || word != 0u) atomicOr(to + i, word);
        }
    }
};

// Writes consecutive bits of one lane to a stage. Words that have bits of this lane alone are stored. The first and the
// last word, in which other lanes may have bits, are ORed. word: index of the word that is being filled. bits: its bits
// so far. filled: number of these bits. is_shared: whether another lane may have bits in this word.
struct BitWriter {
    const BitStage &stage;
    uint64_t bits = 0;
    uint32_t word, filled;
    bool is_shared;

    __device__ __forceinline__ BitWriter(const BitStage &to, uint32_t position)
        : stage(to), word(position / 32u), filled(position % 32u), is_shared(filled != 0u)
    {
    }
    // Appends the lowest num_bits bits of `more`. num_bits is at most 32. All higher bits of `more` must be 0.
    __device__ __forceinline__ void push(uint32_t more, uint32_t num_bits)
    {
        bits |= static_cast<uint64_t>(more) << filled;
        filled += num_bits;
        if (filled < 32u) return;
        if (is_shared)
            stage.or_word(word, static_cast<uint32_t>(bits));
        else if (word < stage.last_word)
            stage.words[word] = static_cast<uint32_t>(bits);
        is_shared = false;
        word++;
        bits >>= 32;
        filled -= 32u;
    }
    __device__ __forceinline__ void push_wide(uint64_t more, uint32_t num_bits)
    {
        push(static_cast<uint32_t>(more), ibp_min_u32(num_bits, 32u));
        if (num_bits > 32u) push(static_cast<uint32_t>(more >> 32), num_bits - 32u);
    }
    __device__ __forceinline__ void finish() const { stage.or_word(word, static_cast<uint32_t>(bits)); }
};

// Writes zeros to the bytes `from` to `to` - 1 of a stage, and to the rest of the last word.
template <class G> __device__ __forceinline__ void pad(const BitStage &stage, uint32_t from, uint32_t to)
{
    uint8_t *const bytes = reinterpret_cast<uint8_t *>(stage.words);
    const uint32_t whole = ibp_min_u32((from + 3u) / 4u * 4u, to);
    if (from + G::rank() < whole) bytes[from + G::rank()] = 0;
#pragma unroll 1
    for (uint32_t w = whole / 4u + G::rank(); 4u * w < to; w += G::kThreads) stage.words[w] = 0;
}
template <class G> __device__ __forceinline__ void clear(const BitStage &stage, uint32_t num_bytes)
{
#pragma unroll 1
    for (uint32_t i = G::rank(); i < num_bytes / kVector; i += G::kThreads)
        reinterpret_cast<uint4 *>(stage.words)[i] = make_uint4(0, 0, 0, 0);
}

// Returns the size of a stage in bytes. A stage has room for a coded row, the padding of its overflow part, and spare
// words.
__host__ __device__ __forceinline__ uint32_t bit_stage_bytes(uint32_t row_bytes)
{
    return (row_bytes + 15u) / 16u * 16u + 48u;
}

// Copies num_bytes bytes of a stage to dst, which may have any alignment. from: the first of these bytes, a multiple of
// 16.
template <class G>
__device__ __forceinline__ void copy_out(uint8_t *dst, const BitStage &stage, uint32_t from, uint32_t num_bytes)
{
    const uint32_t *const words = stage.words + from / 4u;
    const uint8_t *const bytes = reinterpret_cast<const uint8_t *>(words);
    if (aligned(dst, 16)) {
        const uint32_t vectors = num_bytes / 16u;
#pragma unroll 1
        for (uint32_t i = G::rank(); i < vectors; i += G::kThreads)
            reinterpret_cast<uint4 *>(dst)[i] = reinterpret_cast<const uint4 *>(words)[i];
#pragma unroll 1
        for (uint32_t i = 16u * vectors + G::rank(); i < num_bytes; i += G::kThreads) dst[i] = bytes[i];
        return;
    }
    const uint32_t head = ibp_min_u32(static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(dst) % 4u), num_bytes);
    const uint32_t whole = (num_bytes - head) / 4u, tail = head + 4u * whole;
#pragma unroll 1
    for (uint32_t i = G::rank(); i < head; i += G::kThreads) dst[i] = bytes[i];
#pragma unroll 1
    for (uint32_t i = G::rank(); i < whole; i += G::kThreads)
        reinterpret_cast<uint32_t *>(dst + head)[i] = __funnelshift_r(words[i], words[i + 1], 8u * head);
#pragma unroll 1
    for (uint32_t i = tail + G::rank(); i < num_bytes; i += G::kThreads) dst[i] = bytes[i];
}

// Returns a copy of an encoder that encodes rows of cluster k.
template <class Encoder>
__device__ __forceinline__ Encoder of_cluster(const Encoder &encoder, const ibp_codebook &cb, uint32_t k)
{
    Encoder one = encoder;
    one.select(cb, k);
    return one;
}

// cluster: the first of the clusters that code a row in the fewest bytes. bytes: size of the coded row in bytes,
// including the byte of the cluster.
struct Choice {
    uint32_t cluster, bytes;
};
template <class Encoder>
__device__ __forceinline__ Choice choose_cluster(const ibp_codebook &cb, const Encoder &encoder, const PlainRow &row)
{
    const auto bytes_of = [](uint32_t bits) { return bits / 8u + (bits % 8u != 0u); }; // a huge number for kNoCodedForm
    if (!ibp_has_clusters(&cb)) return {0, bytes_of(encoder.measure(row))};
    Choice best{0, ~0u};
    for (uint32_t k = 0; k < cb.num_clusters; k++) {
        const uint32_t bytes = 1u + bytes_of(of_cluster(encoder, cb, k).measure(row));
        if (bytes < best.bytes) best = {k, bytes};
    }
    return best;
}

// Checks the parts of the contract that a compiler can check.
template <class Encoder> constexpr bool is_encoder()
{
    static_assert(kBlockThreads<typename Encoder::Group> <= kMostEncodeThreads,
                  "a block must not have more threads than an encoder may use");
    static_assert(std::is_constructible<Encoder, const ibp_codebook &, uint32_t *>::value,
                  "an encoder must be constructible from a codebook and shared memory");
    static_assert(std::is_same<decltype(Encoder::table_bytes(ibp_codebook())), uint32_t>::value,
                  "table_bytes must return a uint32_t");
    static_assert(std::is_same<decltype(Encoder::scratch_bytes(ibp_codebook())), uint32_t>::value,
                  "scratch_bytes must return a uint32_t");
    static_assert(std::is_same<uint32_t (Encoder::*)(const PlainRow &, const BitStage &, uint32_t, uint32_t) const,
                               decltype(&Encoder::encode)>::value,
                  "encode must have the signature that this file describes");
    return true;
}

} // namespace ibp

#endif
