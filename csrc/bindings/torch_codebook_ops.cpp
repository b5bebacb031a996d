// torch_codebook_ops.cpp - the operations of torch.ops.ibp that learn codebooks and count what rows have in common.
// They turn tensors into pointers and call the core.
//
//     count_bits      data row_bytes -> Tensor
//     count_hits      data codebook codec -> Tensor
//     codebook_words  mask bitval chunk_bytes flag_all -> Tensor                          (CPU only, like all below)
//     threshold_bits  counts num_rows tau -> (Tensor, Tensor)
//     choose_masks    data row_bytes chunk_bytes -> (Tensor, Tensor)
//     estimate_masks  data row_bytes -> Tensor
//     learn_planes    data row_bytes element_bytes exponent_bits table_rows fast codes_invariant -> (Tensor, Tensor)
//     learn_entries   data codebook codec -> Tensor
//
// Each operation is documented at its function. data is uint8: complete rows, one after the other; bytes after the last
// complete row are not read. mask and bitval are uint8 [row_bytes]: mask has a 1 for each invariant bit of a row, and
// bitval has the values of the invariant bits. codebook and codec are described in torch_tables.h.
#include "torch_tables.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>

namespace {

using namespace ibp_torch;

// ---- statistics ----

// Counts something in all rows of data. Returns the counts, int64 [num_counts].
//
// on_cuda, on_cpu: the functions of the core that count, on a GPU and on the CPU. Both add to counts.
// call: call(count, rows, num_rows, counts) must count the given rows with the function `count`, and return its status.
//   On the CPU `count` is on_cpu. Several threads make this call, each for a range of rows and with separate counts,
//   which are then added up. On a GPU `count` is on_cuda. The call is made once, for all rows, with a stream as its
//   last argument.
// name: the name of the operation, for messages.
template <typename Cuda, typename Cpu, typename Call>
Tensor counts_of(const Device &device, const Tensor &data, int64_t num_counts, uint32_t row_bytes, const char *name,
                 const Cuda &on_cuda, const Cpu &on_cpu, const Call &call)
{
    // Smallest number of bytes that a thread is given to count. It is large because each thread's range has separate
    // counts, which take up to 64 bytes for each byte of a row.
    constexpr int64_t kLeastCounted = 1 << 20;
    const uint8_t *const rows = bytes_of(data, 0, "data");
    const int64_t num_rows = data.numel() / row_bytes;
    Tensor counts = new_counts(data, num_counts);
    uint64_t *const out = unsigned_longs_of(counts, num_counts, "counts");
    if (device.is_cuda()) {
        check(call(on_cuda, rows, static_cast<size_t>(num_rows), out, device.stream()), name);
        return counts;
    }
    std::mutex mutex;
    torch::stable::parallel_for(
        0, num_rows, std::max<int64_t>(1, kLeastCounted / row_bytes), [&](int64_t first, int64_t last) {
            std::vector<uint64_t> partial(static_cast<size_t>(num_counts));
            check(call(on_cpu, rows + first * row_bytes, static_cast<size_t>(last - first), partial.data()),
                  "counting");
            const std::lock_guard<std::mutex> lock(mutex);
            for (size_t i = 0; i < partial.size(); i++) out[i] += partial[i];
        });
    return counts;
}

// Returns int64 [8 * row_bytes]: element 8 * i + b is the number of rows in which bit b of byte i is 1.
Tensor count_bits(const Device &device, const Tensor &data, int64_t row_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes);
    return counts_of(device, data, 8 * row_bytes, bytes, "count_bits", ibp_cuda_count_bits, ibp_count_bits,
                     [&](const auto &count, const uint8_t *rows, size_t num_rows, uint64_t *counts, auto... stream) {
                         return count(rows, num_rows, bytes, counts, stream...);
                     });
}

// Returns int64 [ceil(row_bytes / chunk_bytes)]: for each chunk the number of rows in which the chunk participates,
// that is, in which its invariant bits have the values that the codebook gives. If the codebook has clusters, the first
// cluster is used. Only scheme ibp has chunks.
Tensor count_hits(const Device &device, const Tensor &data, const Tensor &codebook, const Codec &codec)
{
    require(!codec.empty() && codec[0] == IBP_SCHEME_IBP, "only scheme ibp has chunks");
    const ibp_codebook cb = codebook_of(codebook, codec);
    return counts_of(device, data, divide_up(cb.row_bytes, cb.chunk_bytes), cb.row_bytes, "count_hits",
                     ibp_cuda_count_hits, ibp_count_hits,
                     [&](const auto &count, const auto &...given) { return count(&cb, given...); });
}

// ---- masks ----

// Returns a codebook of scheme ibp in the form of the argument `codebook`: int32 [3, words].
//
// chunk_bytes: 1, 2, 4 or 8.
// flag_all: if true, every chunk has a participation bit; otherwise only chunks with invariant bits have one.
Tensor codebook_words(const Device &, const Tensor &mask, const Tensor &bitval, int64_t chunk_bytes, bool flag_all)
{
    const uint32_t row_bytes = to_u32(mask.numel(), 1, IBP_MAX_ROW_BYTES, "the size of mask");
    const auto num_words = static_cast<int64_t>(ibp_codebook_words(row_bytes));
    Tensor words = new_tensor(mask, {3, num_words}, ScalarType::Int);
    ibp_codebook unused;
    check(ibp_build_codebook(bytes_of(mask, 1, "mask"), bytes_of(bitval, row_bytes, "bitval"), row_bytes,
                             to_u32(chunk_bytes, 1, 8, "chunk_bytes"), flag_all,
                             static_cast<uint32_t *>(words.data_ptr()), &unused),
          "codebook_words");
    return words;
}

// Returns (mask, bitval), chosen by the threshold of the paper's section 4.1: a bit is invariant if it has the same
// value in more than tau * num_rows rows, or, if tau is 1, in all rows.
//
// counts: as count_bits returns them.
// num_rows: the number of rows that were counted.
// tau: 0.5 to 1.
std::tuple<Tensor, Tensor> threshold_bits(const Device &, const Tensor &counts, int64_t num_rows, double tau)
{
    require(counts.numel() % 8 == 0, "counts has ", counts.numel(), " elements, 8 a byte of a row are needed");
    require(num_rows >= 0, "num_rows is ", num_rows);
    const uint32_t row_bytes = row_bytes_of(counts.numel() / 8);
    Tensor mask = new_tensor(counts, {row_bytes}, ScalarType::Byte),
           bitval = new_tensor(counts, {row_bytes}, ScalarType::Byte);
    check(ibp_threshold_bits(unsigned_longs_of(counts, 8, "counts"), static_cast<uint64_t>(num_rows), row_bytes, tau,
                             bytes_of(mask, row_bytes, "mask"), bytes_of(bitval, row_bytes, "bitval")),
          "threshold_bits");
    return {mask, bitval};
}

// Chooses the mask of each chunk by a greedy search for the mask that saves the most bits on these rows
// (ibp_choose_masks). Returns (mask, bitval).
//
// chunk_bytes: 1, 2, 4 or 8.
std::tuple<Tensor, Tensor> choose_masks(const Device &, const Tensor &data, int64_t row_bytes, int64_t chunk_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes), chunk = to_u32(chunk_bytes, 1, 8, "chunk_bytes");
    const uint8_t *const rows = bytes_of(data, 0, "data");
    Tensor mask = new_tensor(data, {row_bytes}, ScalarType::Byte),
           bitval = new_tensor(data, {row_bytes}, ScalarType::Byte);
    require((chunk & (chunk - 1)) == 0, "chunk_bytes is ", chunk_bytes, ", not 1, 2, 4 or 8");
    uint8_t *const to_mask = bytes_of(mask, bytes, "mask"), *const to_bitval = bytes_of(bitval, bytes, "bitval");
    const int64_t num_rows = data.numel() / row_bytes;
    // All rows are read once for each bit that is added to a mask. The estimate assumes that a quarter of a chunk's
    // bits are added.
    const int64_t times_read = 2 * chunk_bytes;
    ibp_fault unused{};
    over_ranges(divide_up(row_bytes, chunk_bytes), num_rows * chunk_bytes * times_read, 0, &unused,
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *) {
                    return ibp_choose_masks(rows, static_cast<size_t>(num_rows), bytes, chunk,
                                            static_cast<uint32_t>(first), static_cast<uint32_t>(last), to_mask,
                                            to_bitval);
                });
    return {mask, bitval};
}

// Returns float64 [1]: an estimate of the fraction of the rows' bytes that masks would save. The estimate is quick,
// because it looks at up to 64 rows only, and it tends to be too high.
Tensor estimate_masks(const Device &, const Tensor &data, int64_t row_bytes)
{
    Tensor savings = new_tensor(data, {1}, ScalarType::Double);
    check(ibp_estimate_masks(bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / row_bytes_of(row_bytes)),
                             row_bytes_of(row_bytes), data_of<double>(savings, ScalarType::Double, 1, "savings")),
          "estimate_masks");
    return savings;
}

// ---- learning ----

ibp_sample sample_of(const Tensor &data, int64_t row_bytes, int64_t element_bytes, int64_t exponent_bits,
                     int64_t table_rows)
{
    ibp_sample sample{};
    sample.row_bytes = row_bytes_of(row_bytes);
    sample.element_bytes = to_u32(element_bytes, 1, 8, "element_bytes");
    sample.exponent_bits = to_u32(exponent_bits, 0, 63, "exponent_bits");
    sample.rows = bytes_of(data, 0, "data");
    sample.num_rows = data.numel() / row_bytes;
    sample.table_rows = table_rows;
    return sample;
}

Tensor learning_scratch(const Tensor &data, const ibp_sample &sample)
{
    const auto bytes = static_cast<int64_t>(ibp_learn_scratch_bytes(&sample));
    require(bytes > 0, "no codebook can be learned from ", sample.num_rows, " rows of ", sample.row_bytes,
            " bytes, elements of ", sample.element_bytes, " and exponents of ", sample.exponent_bits, " bits");
    return new_tensor(data, {bytes}, ScalarType::Byte);
}

// Returns a codebook of scheme planes in the form of the argument `codebook`, which read_planes reads.
Tensor planes_words(const Tensor &data, const ibp_planes &planes, uint32_t row_bytes)
{
    const ConstantColumns constants(planes, row_bytes);
    const int64_t start = constants.num_bytes, sets = planes.per_column ? constants.num_live : 1,
                  entries_bytes = planes.entries == nullptr ? 0 : sets * planes.num_entries * planes.symbol_bytes;
    Tensor words = new_tensor(data, {start + entries_bytes}, ScalarType::Byte);
    if (words.numel() == 0) return words;
    uint8_t *const to = bytes_of(words, 0, "words");
    std::memset(to, 0, static_cast<size_t>(start));
    if (start != 0) std::memcpy(to, planes.row_template, row_bytes);
    if (start != 0)
        std::memcpy(to + constants.live_start, planes.live_columns, static_cast<size_t>(2 * constants.num_live));
    if (entries_bytes != 0) std::memcpy(to + start, planes.entries, static_cast<size_t>(entries_bytes));
    return words;
}

Tensor planes_codec(const Tensor &data, const ibp_planes &planes, int64_t row_bytes)
{
    std::vector<int64_t> fields{IBP_SCHEME_PLANES,
                                row_bytes,
                                planes.element_bytes,
                                planes.rotate,
                                planes.residual_bits,
                                planes.per_column,
                                planes.listed,
                                static_cast<int64_t>(planes.default_value),
                                static_cast<int64_t>(planes.closed_value),
                                planes.invariant_bits,
                                static_cast<int64_t>(planes.invariant_value),
                                planes.consecutive,
                                static_cast<int64_t>(planes.first_symbol),
                                planes.signed_default,
                                planes.num_constant};
    fields.insert(fields.end(), planes.digit_bits, planes.digit_bits + planes.num_planes);
    const auto count = static_cast<int64_t>(fields.size());
    Tensor codec = new_tensor(data, {count}, ScalarType::Long);
    std::copy(fields.begin(), fields.end(), longs_of(codec, count, "codec"));
    return codec;
}

// Learns a codebook of scheme planes from rows: all rows of a table, or some of them drawn at random. Returns
// (codebook, codec): uint8 [bytes] and int64 [numbers].
//
// element_bytes: 1, 2, 4 or 8. It must divide row_bytes.
// exponent_bits: the number of exponent bits of floats; 0 for other elements.
// table_rows: the number of rows of the complete table. Codebooks are compared by the mean size of a row plus the size
//   of the codebook divided by table_rows.
// fast: if true, learns a codebook whose rows decode at the speed of memory (IBP_LEVEL_FAST), unless it would save next
//   to nothing.
// codes_invariant: if true, the bits and columns on which all these rows agree are coded, too, so that the codebook has
//   a coded form for any row.
std::tuple<Tensor, Tensor> learn_planes(const Device &, const Tensor &data, int64_t row_bytes, int64_t element_bytes,
                                        int64_t exponent_bits, int64_t table_rows, bool fast, bool codes_invariant)
{
    ibp_sample sample = sample_of(data, row_bytes, element_bytes, exponent_bits, table_rows);
    sample.level = fast ? IBP_LEVEL_FAST : IBP_LEVEL_DEFAULT;
    sample.codes_invariant = codes_invariant;
    Tensor scratch = learning_scratch(data, sample);
    const size_t arrays_bytes = ibp_max_planes_bytes(sample.row_bytes, sample.element_bytes);
    const std::unique_ptr<uint8_t[]> arrays(new uint8_t[arrays_bytes]);
    ibp_planes planes;
    double unused;
    check(ibp_learn_planes(&sample, bytes_of(scratch, 0, "scratch"), static_cast<size_t>(scratch.numel()), arrays.get(),
                           arrays_bytes, &planes, &unused),
          "learn_planes");
    return {planes_words(data, planes, sample.row_bytes), planes_codec(data, planes, row_bytes)};
}

// Learns new entries for a codebook of scheme planes that has one cluster. The new entries are the most frequent
// symbols of these rows. Returns a copy of `codebook` with the new entries.
Tensor learn_entries(const Device &, const Tensor &data, const Tensor &codebook, const Codec &codec)
{
    const ibp_codebook cb = codebook_of(codebook, codec);
    require(cb.scheme == IBP_SCHEME_PLANES, "only scheme planes has entries");
    const ibp_sample sample = sample_of(data, cb.row_bytes, cb.planes.element_bytes, 0, INT64_MAX);
    Tensor scratch = learning_scratch(data, sample), words = new_tensor(data, {codebook.numel()}, ScalarType::Byte);
    if (words.numel() == 0) return words;
    const uint8_t *const from = bytes_of(codebook, 0, "codebook");
    uint8_t *const to = bytes_of(words, 0, "words");
    std::memcpy(to, from, static_cast<size_t>(words.numel()));
    if (cb.planes.entries == nullptr) return words;
    const int64_t start = static_cast<const uint8_t *>(cb.planes.entries) - from;
    check(ibp_learn_entries(&sample, &cb.planes, bytes_of(scratch, 0, "scratch"), static_cast<size_t>(scratch.numel()),
                            to + start, static_cast<size_t>(words.numel() - start)),
          "learn_entries");
    return words;
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    operation<codebook_words>(m, "codebook_words", "mask bitval chunk_bytes flag_all");
    operation<threshold_bits>(m, "threshold_bits", "counts num_rows tau");
    operation<choose_masks>(m, "choose_masks", "data row_bytes chunk_bytes");
    operation<estimate_masks>(m, "estimate_masks", "data row_bytes");
    operation<learn_planes>(m, "learn_planes",
                            "data row_bytes element_bytes exponent_bits table_rows fast codes_invariant");
    operation<learn_entries>(m, "learn_entries", "data codebook codec");
    operation<count_bits>(m, "count_bits", "data row_bytes");
    operation<count_hits>(m, "count_hits", "data codebook codec");
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    operation<count_bits>(m, "count_bits", "data row_bytes");
    operation<count_hits>(m, "count_hits", "data codebook codec");
}
