// torch_ops.cpp - torch.ops.ibp.*: tensors to pointers, nothing else. Schemas and fake implementations are in
// ibp/_common/ops.py.
//
// Built against torch's stable ABI, so that one build serves every torch from 2.10 on, with and without CUDA. The
// operations are public: arguments that contradict each other raise, whatever they are.
#include "torch_places.h"
#include "torch_ranges.h"
#include "torch_tables.h"

#include <algorithm>
#include <memory>
#include <mutex>
#include <tuple>

namespace {

using namespace ibp_torch;

uint64_t *counts_of(const Tensor &counts) { return static_cast<uint64_t *>(counts.data_ptr()); }

// Sums partial counts of row ranges, one range a thread.
template <typename Count>
Tensor count_on_cpu(const Tensor &data, int64_t num_counts, uint32_t row_bytes, const Count &count)
{
    constexpr int64_t kLeastCounted = 1 << 20; // bytes of a range: its partial counts are 64 times as large as a row
    const uint8_t *const rows = bytes_of(data, 0, "data");
    const int64_t num_rows = data.numel() / row_bytes;
    Tensor counts = new_counts(data, num_counts);
    std::mutex mutex;
    torch::stable::parallel_for(
        0, num_rows, std::max<int64_t>(1, kLeastCounted / row_bytes), [&](int64_t first, int64_t last) {
            std::vector<uint64_t> partial(static_cast<size_t>(num_counts));
            check(count(rows + first * row_bytes, static_cast<size_t>(last - first), partial.data()), "counting");
            const std::lock_guard<std::mutex> lock(mutex);
            for (size_t i = 0; i < partial.size(); i++) counts_of(counts)[i] += partial[i];
        });
    return counts;
}

// ---- codebooks and analysis ----

uint32_t row_bytes_of(int64_t row_bytes) { return to_u32(row_bytes, 1, IBP_MAX_ROW_BYTES, "row_bytes"); }

Tensor codebook_words(Tensor mask, Tensor bitval, int64_t chunk_bytes, bool flag_all)
{
    require_cpu({&mask, &bitval});
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

std::tuple<Tensor, Tensor> threshold_bits(Tensor counts, int64_t num_rows, double tau)
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

// data: whole rows on the CPU. Returns (mask, bitval).
std::tuple<Tensor, Tensor> choose_masks(Tensor data, int64_t row_bytes, int64_t chunk_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes), chunk = to_u32(chunk_bytes, 1, 8, "chunk_bytes");
    const uint8_t *const rows = bytes_of(data, 0, "data");
    Tensor mask = new_tensor(data, {row_bytes}, ScalarType::Byte),
           bitval = new_tensor(data, {row_bytes}, ScalarType::Byte);
    require((chunk & (chunk - 1)) == 0, "chunk_bytes is ", chunk_bytes, ", not 1, 2, 4 or 8");
    uint8_t *const to_mask = bytes_of(mask, bytes, "mask"), *const to_bitval = bytes_of(bitval, bytes, "bitval");
    const int64_t num_rows = data.numel() / row_bytes;
    const int64_t times_read = 2 * chunk_bytes; // once for each bit that is added to the mask, of 8 * chunk_bytes some
    ibp_fault unused{};
    over_ranges(divide_up(row_bytes, chunk_bytes), num_rows * chunk_bytes * times_read, 0, &unused,
                [&](int64_t first, int64_t last, uint8_t *, ibp_fault *) {
                    return ibp_choose_masks(rows, static_cast<size_t>(num_rows), bytes, chunk,
                                            static_cast<uint32_t>(first), static_cast<uint32_t>(last), to_mask,
                                            to_bitval);
                });
    return {mask, bitval};
}

// data: whole rows on the CPU. Returns the share of their bytes that masks would save.
Tensor estimate_masks(Tensor data, int64_t row_bytes)
{
    Tensor savings = new_tensor(data, {1}, ScalarType::Double);
    check(ibp_estimate_masks(bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / row_bytes_of(row_bytes)),
                             row_bytes_of(row_bytes), data_of<double>(savings, ScalarType::Double, 1, "savings")),
          "estimate_masks");
    return savings;
}

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

// The working form of a codebook (read_planes).
Tensor planes_words(const Tensor &data, const ibp_planes &planes, uint32_t row_bytes)
{
    const auto aligned = [](int64_t bytes) { return divide_up(bytes, 16) * 16; };
    const int64_t num_live = row_bytes / planes.element_bytes - int64_t{planes.num_constant},
                  live_start = aligned(row_bytes),
                  start = planes.num_constant == 0 ? 0 : live_start + aligned(2 * num_live),
                  sets = planes.per_column ? num_live : 1,
                  entries_bytes = planes.entries == nullptr ? 0 : sets * planes.num_entries * planes.symbol_bytes;
    Tensor words = new_tensor(data, {start + entries_bytes}, ScalarType::Byte);
    if (words.numel() == 0) return words;
    uint8_t *const to = bytes_of(words, 0, "words");
    std::memset(to, 0, static_cast<size_t>(start));
    if (start != 0) std::memcpy(to, planes.row_template, row_bytes);
    if (start != 0) std::memcpy(to + live_start, planes.live_columns, static_cast<size_t>(2 * num_live));
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
    std::copy(fields.begin(), fields.end(), data_of<int64_t>(codec, ScalarType::Long, count, "codec"));
    return codec;
}

// data: whole rows on the CPU, of a table of table_rows. Returns (words, codec) of a codebook.
std::tuple<Tensor, Tensor> learn_planes(Tensor data, int64_t row_bytes, int64_t element_bytes, int64_t exponent_bits,
                                        int64_t table_rows, bool fast, bool codes_invariant)
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

// data: whole rows on the CPU. Returns the words of a codebook that differs in its entries only: those for the rows.
Tensor learn_entries(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    require_cpu({&data, &codebook});
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

Tensor count_bits_cpu(Tensor data, int64_t row_bytes)
{
    const uint32_t bytes = row_bytes_of(row_bytes);
    return count_on_cpu(data, 8 * row_bytes, bytes, [&](const uint8_t *rows, size_t num_rows, uint64_t *counts) {
        return ibp_count_bits(rows, num_rows, bytes, counts);
    });
}

Tensor count_bits_cuda(Tensor data, int64_t row_bytes)
{
    const auto device = use_cuda(data, {});
    const uint32_t bytes = row_bytes_of(row_bytes);
    Tensor counts = new_counts(data, 8 * row_bytes);
    check(ibp_cuda_count_bits(bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / row_bytes), bytes,
                              counts_of(counts), current_stream(data)),
          "count_bits");
    return counts;
}

ibp_codebook masks_of(const Tensor &words, const Codec &codec)
{
    require(!codec.empty() && codec[0] == IBP_SCHEME_IBP, "only scheme ibp has chunks");
    return codebook_of(words, codec);
}

int64_t chunks_of(const ibp_codebook &cb) { return divide_up(cb.row_bytes, cb.chunk_bytes); }

Tensor count_hits_cpu(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    require_cpu({&data, &codebook});
    const ibp_codebook cb = masks_of(codebook, codec);
    return count_on_cpu(data, chunks_of(cb), cb.row_bytes, [&](const uint8_t *rows, size_t num_rows, uint64_t *hits) {
        return ibp_count_hits(&cb, rows, num_rows, hits);
    });
}

Tensor count_hits_cuda(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const auto device = use_cuda(data, {&codebook});
    const ibp_codebook cb = masks_of(codebook, codec);
    Tensor hits = new_counts(data, chunks_of(cb));
    check(ibp_cuda_count_hits(&cb, bytes_of(data, 0, "data"), static_cast<size_t>(data.numel() / cb.row_bytes),
                              counts_of(hits), current_stream(data)),
          "count_hits");
    return hits;
}

// ---- measuring, indexing and coding rows ----

Tensor measure_rows_cpu(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    require_cpu({&data, &codebook});
    const ibp_codebook cb = codebook_of(codebook, codec);
    const uint8_t *const bytes = bytes_of(data, 0, "data");
    const int64_t num_rows = divide_up(data.numel(), cb.row_bytes);
    Tensor lengths = new_tensor(data, {num_rows}, ScalarType::UInt16);
    auto *const out = static_cast<uint16_t *>(lengths.data_ptr());
    const size_t scratch_bytes = ibp_scratch_bytes(cb.row_bytes);
    ibp_fault unused{};
    over_ranges(num_rows, cb.row_bytes, scratch_bytes, &unused,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *) {
                    const int64_t start = first * cb.row_bytes,
                                  end = std::min<int64_t>(data.numel(), last * cb.row_bytes);
                    return ibp_measure_rows(&cb, bytes + start, end - start, out + first, scratch, scratch_bytes);
                });
    return lengths;
}

Tensor measure_rows_cuda(Tensor data, Tensor codebook, std::vector<int64_t> codec)
{
    const auto device = use_cuda(data, {&codebook});
    const ibp_codebook cb = codebook_of(codebook, codec);
    Tensor lengths = new_tensor(data, {divide_up(data.numel(), cb.row_bytes)}, ScalarType::UInt16);
    check(ibp_cuda_measure_rows(&cb, bytes_of(data, 0, "data"), data.numel(),
                                static_cast<uint16_t *>(lengths.data_ptr()), current_stream(data)),
          "measure_rows");
    return lengths;
}

// Returns bases and, as the last entry, the bytes of overflow. index(lengths, row_bytes, slot_bytes, bases,
// overflow_bytes) fills them.
template <typename Index>
Tensor index_rows(const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes, const Index &index)
{
    const uint32_t bytes = row_bytes_of(row_bytes), slot = to_u32(slot_bytes, 0, IBP_MAX_ROW_BYTES, "slot_bytes");
    require(0 <= num_bytes && num_bytes <= kMaxBytes, "num_bytes is ", num_bytes);
    const int64_t num_rows = divide_up(num_bytes, bytes), num_bases = divide_up(num_rows, IBP_ROWS_PER_BASE);
    const uint16_t *const given =
        data_of<uint16_t>(lengths, ScalarType::UInt16, lengths.numel() ? num_rows : 0, "lengths");
    Tensor bases = new_tensor(lengths, {num_bases + 1}, ScalarType::Long);
    auto *const out = static_cast<int64_t *>(bases.data_ptr());
    index(given, bytes, slot, static_cast<uint64_t *>(static_cast<void *>(out)), out + num_bases);
    return bases;
}

Tensor index_rows_cpu(Tensor lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    return index_rows(lengths, num_bytes, row_bytes, slot_bytes,
                      [&](const uint16_t *in, uint32_t bytes, uint32_t slot, uint64_t *bases, int64_t *overflow_bytes) {
                          check(ibp_index_rows(in, num_bytes, bytes, slot, bases, overflow_bytes), "index_rows");
                      });
}

Tensor index_rows_cuda(Tensor lengths, int64_t num_bytes, int64_t row_bytes, int64_t slot_bytes)
{
    const auto device = use_cuda(lengths, {});
    return index_rows(
        lengths, num_bytes, row_bytes, slot_bytes,
        [&](const uint16_t *in, uint32_t bytes, uint32_t slot, uint64_t *bases, int64_t *overflow_bytes) {
            check(ibp_cuda_index_rows(in, num_bytes, bytes, slot, bases, overflow_bytes, current_stream(lengths)),
                  "index_rows");
        });
}

// Returns the stored bytes, and how many rows take 0, 1, ... sectors.
template <typename Survey>
Tensor survey_rows(const Tensor &lengths, int64_t num_bytes, int64_t row_bytes, const Survey &survey)
{
    constexpr int64_t kSectorBytes = IBP_OVERFLOW_ALIGN;
    const uint32_t bytes = row_bytes_of(row_bytes);
    require(0 <= num_bytes && num_bytes <= kMaxBytes, "num_bytes is ", num_bytes);
    const uint16_t *const given =
        data_of<uint16_t>(lengths, ScalarType::UInt16, divide_up(num_bytes, bytes), "lengths");
    Tensor found = new_counts(lengths, 2 + divide_up(row_bytes, kSectorBytes));
    survey(given, bytes, counts_of(found));
    return found;
}

Tensor survey_rows_cpu(Tensor lengths, int64_t num_bytes, int64_t row_bytes)
{
    return survey_rows(lengths, num_bytes, row_bytes, [&](const uint16_t *in, uint32_t bytes, uint64_t *found) {
        check(ibp_survey_rows(in, num_bytes, bytes, found), "survey_rows");
    });
}

Tensor survey_rows_cuda(Tensor lengths, int64_t num_bytes, int64_t row_bytes)
{
    const auto device = use_cuda(lengths, {});
    return survey_rows(lengths, num_bytes, row_bytes, [&](const uint16_t *in, uint32_t bytes, uint64_t *found) {
        check(ibp_cuda_survey_rows(in, num_bytes, bytes, found, current_stream(lengths)), "survey_rows");
    });
}

void encode_rows_cpu(IBP_TABLE_PARAMETERS, Tensor data, Tensor fault)
{
    require_cpu({&data, IBP_TABLE_TENSORS, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const uint8_t *const bytes = bytes_of(data, ibp_bytes_of_table(&table), "data");
    args.check_writing(data, fault);
    uint8_t *const to_slots = bytes_of(slots, 0, "slots"), *const to_overflow = bytes_of(overflow, 0, "overflow");
    const uint32_t row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    over_ranges(ibp_num_rows(&table), row_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_encode_rows(&table, bytes, first, last, to_slots, to_overflow, scratch, scratch_bytes,
                                           mine);
                });
}

void encode_rows_cuda(IBP_TABLE_PARAMETERS, Tensor data, Tensor fault)
{
    const auto device = use_cuda(data, {IBP_TABLE_TENSORS, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const uint8_t *const bytes = bytes_of(data, ibp_bytes_of_table(&table), "data");
    args.check_writing(data, fault);
    check(ibp_cuda_encode_rows(&table, bytes, bytes_of(slots, 0, "slots"), bytes_of(overflow, 0, "overflow"),
                               fault_of(fault), current_stream(data)),
          "encode_rows");
}

// data: of one block of rows. One thread: callers code several blocks at once. Sizes of rows come as lengths, and their
// sum as stored[0].
void encode_packed(Tensor data, Tensor codebook, std::vector<int64_t> codec, Tensor out, Tensor lengths, Tensor stored)
{
    require_cpu({&data, &codebook, &out, &lengths, &stored});
    const ibp_codebook cb = codebook_of(codebook, codec);
    const uint8_t *const bytes = bytes_of(data, 0, "data");
    uint8_t *const to = bytes_of(out, 0, "out");
    require(out.numel() >= data.numel(), "out has ", out.numel(), " bytes, data ", data.numel());
    auto *const to_lengths =
        data_of<uint16_t>(lengths, ScalarType::UInt16, divide_up(data.numel(), cb.row_bytes), "lengths");
    Footprints memory;
    memory.reads("data", data);
    memory.reads("codebook", codebook);
    memory.writes("out", out);
    memory.writes("lengths", lengths);
    memory.writes("stored", stored);
    const size_t scratch_bytes = ibp_scratch_bytes(cb.row_bytes);
    const std::unique_ptr<uint8_t[]> scratch(new uint8_t[scratch_bytes]);
    check(ibp_encode_packed(&cb, bytes, data.numel(), to, out.numel(), to_lengths,
                            data_of<int64_t>(stored, ScalarType::Long, 1, "stored"), scratch.get(), scratch_bytes),
          "encode_packed");
}

// ---- coding rows into a place ----

// x: rows, of any dtype and strides. buffers: addresses of memory of x's layout, whose rows are coded instead of x's
// own; these are trusted.
#define IBP_PLACE_PARAMETERS                                                                                 \
    IBP_TABLE_PARAMETERS, Tensor rooms, Tensor used, Tensor counts, Tensor x, std::optional<Tensor> buffers, \
        std::optional<Tensor> row_ids, int64_t first_row, int64_t max_sms, Tensor fault

struct EncodeInto {
    ibp_place place;
    ibp_row_source source;
    const int64_t *row_ids;
};

EncodeInto prepare_encoding(const TableArgs &args, const Tensor &rooms, const Tensor &used, const Tensor &counts,
                            const Tensor &x, const std::optional<Tensor> &buffers, const std::optional<Tensor> &row_ids,
                            int64_t first_row, const Tensor &fault)
{
    EncodeInto call{PlaceArgs{args, rooms, used, counts}.place(), {}, nullptr};
    const int64_t row_bytes = call.place.table.codebook.row_bytes;
    ibp_row_source &source = call.source = rows_of(x, row_bytes);
    if (buffers) {
        const auto *addresses = data_of<int64_t>(*buffers, ScalarType::Long, 0, "buffers");
        require(source.num_rows > 0 && source.last_row_bytes % row_bytes == 0, "x has no whole rows of ", row_bytes,
                " bytes");
        source.buffers = static_cast<const uint8_t *const *>(static_cast<const void *>(addresses));
        source.rows_per_buffer = source.num_rows;
        source.last_row_bytes = 0;
        source.num_rows = total_bytes(buffers->numel(), source.num_rows, "rows of buffers");
    }
    require(source.num_rows <= INT32_MAX, "x has ", source.num_rows, " rows, more than 2^31 - 1");
    const int64_t num_rows =
        ibp_rows_of_bytes(ibp_bytes_of_table(&call.place.table), call.place.table.codebook.row_bytes);
    if (row_ids) {
        call.row_ids = data_of<int64_t>(*row_ids, ScalarType::Long, 0, "row_ids");
        require(row_ids->numel() == source.num_rows, "row_ids has ", row_ids->numel(), " elements, x ", source.num_rows,
                " rows");
    } else {
        require(first_row >= 0 && first_row <= num_rows - source.num_rows, source.num_rows, " rows from row ",
                first_row, " on are not among ", num_rows);
    }
    Footprints memory;
    for (const auto &[name, tensor] : {std::pair<const char *, const Tensor *>{"slots", &args.slots},
                                       {"overflow", &args.overflow},
                                       {"lengths", &args.lengths},
                                       {"bases", &args.bases},
                                       {"rooms", &rooms},
                                       {"used", &used},
                                       {"counts", &counts},
                                       {"fault", &fault}})
        memory.writes(name, *tensor);
    memory.reads("codebook", args.codebook);
    if (!buffers) memory.reads("x", source.data, extent_of(x, "x").num_bytes);
    if (buffers) memory.reads("buffers", *buffers);
    if (row_ids) memory.reads("row_ids", *row_ids);
    return call;
}

void encode_into_cuda(IBP_PLACE_PARAMETERS)
{
    const auto device = use_cuda(
        x, {IBP_TABLE_TENSORS, &rooms, &used, &counts, &fault, buffers ? &*buffers : &x, row_ids ? &*row_ids : &x});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const EncodeInto call = prepare_encoding(args, rooms, used, counts, x, buffers, row_ids, first_row, fault);
    check(ibp_cuda_encode_into(&call.place, &call.source, call.row_ids, row_ids ? 0 : first_row, fault_of(fault),
                               sms_of(max_sms), current_stream(x)),
          "encode_into");
}

void encode_into_cpu(IBP_PLACE_PARAMETERS)
{
    require_cpu(
        {&x, IBP_TABLE_TENSORS, &rooms, &used, &counts, &fault, buffers ? &*buffers : &x, row_ids ? &*row_ids : &x});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const EncodeInto call = prepare_encoding(args, rooms, used, counts, x, buffers, row_ids, first_row, fault);
    sms_of(max_sms);
    const uint32_t row_bytes = call.place.table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes);
    over_ranges(call.source.num_rows, row_bytes, scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    const ibp_status status =
                        ibp_encode_into(&call.place, &call.source, call.row_ids, row_ids ? 0 : first_row, first, last,
                                        scratch, scratch_bytes, mine);
                    return mine->status == IBP_OK ? status : IBP_CORRUPT_ROW; // what is noted does not raise
                });
}

// ---- gathering ----

void gather_items_cpu(IBP_TABLE_PARAMETERS, Tensor ids, int64_t max_sms, Tensor out, Tensor fault,
                      std::optional<Tensor> positions)
{
    require_cpu({&out, IBP_TABLE_TENSORS, &ids, &fault, positions ? &*positions : &ids});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const ibp_ids items = placed_ids_of(ids, positions, out, item_bytes);
    gather_footprints(args, table, items, out, fault);
    sms_of(max_sms);
    uint8_t *const to = room_of(out, 0, "out");
    const int64_t row_bytes = table.codebook.row_bytes;
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(items.count, std::max(item_bytes, row_bytes), scratch_bytes, fault_of(fault),
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    return ibp_gather_items(&table, &items, first, last, to, scratch, scratch_bytes, mine);
                });
}

void gather_items_cuda(IBP_TABLE_PARAMETERS, Tensor ids, int64_t max_sms, Tensor out, Tensor fault,
                       std::optional<Tensor> positions)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &ids, &fault, positions ? &*positions : &ids});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const ibp_ids items = placed_ids_of(ids, positions, out, item_bytes);
    gather_footprints(args, table, items, out, fault);
    check(ibp_cuda_gather_items(&table, &items, room_of(out, 0, "out"), fault_of(fault), sms_of(max_sms),
                                current_stream(out)),
          "gather_items");
}

// The items at ids, or all of them, in the order of the first outer_dims dimensions of out, which may have any strides.
template <typename Gather>
void gather_into(const TableArgs &args, const std::optional<Tensor> &ids, int64_t outer_dims, const Tensor &out,
                 const Tensor &fault, const Gather &gather)
{
    const ibp_table table = args.table();
    ibp_ids items{};
    if (ids) items = ids_of(*ids);
    if (!ids) items.count = args.num_items;
    const Memory memory = spread_over(out, outer_dims, args.item_bytes, &items);
    Footprints footprints = args.footprints(table);
    footprints.reads("ids", items.data, items.count * items.id_bytes);
    footprints.writes("out", memory);
    footprints.writes("fault", fault);
    if (memory.data != nullptr) gather(table, items, memory.data);
}

void gather_into_cpu(IBP_TABLE_PARAMETERS, std::optional<Tensor> ids, int64_t max_sms, int64_t outer_dims, Tensor out,
                     Tensor fault)
{
    require_cpu({&out, IBP_TABLE_TENSORS, &fault, ids ? &*ids : &out});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    sms_of(max_sms);
    gather_into(args, ids, outer_dims, out, fault, [&](const ibp_table &table, const ibp_ids &items, uint8_t *to) {
        const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
        over_ranges(items.count, std::max<int64_t>(item_bytes, table.codebook.row_bytes), scratch_bytes,
                    fault_of(fault), [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                        return ibp_gather_items(&table, &items, first, last, to, scratch, scratch_bytes, mine);
                    });
    });
}

void gather_into_cuda(IBP_TABLE_PARAMETERS, std::optional<Tensor> ids, int64_t max_sms, int64_t outer_dims, Tensor out,
                      Tensor fault)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &fault, ids ? &*ids : &out});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    gather_into(args, ids, outer_dims, out, fault, [&](const ibp_table &table, const ibp_ids &items, uint8_t *to) {
        check(ibp_cuda_gather_items(&table, &items, to, fault_of(fault), sms_of(max_sms), current_stream(out)),
              "gather_into");
    });
}

// Items whose places in memory are given: their addresses are trusted, like those of buffers.
template <typename Gather>
void gather_to(const TableArgs &args, const Tensor &ids, const Tensor &addresses, const Tensor &fault,
               const Gather &gather)
{
    const ibp_table table = args.table();
    ibp_ids items = ids_of(ids);
    items.addresses = unsigned_longs_of(addresses, items.count, "addresses");
    Footprints memory = args.footprints(table);
    memory.reads("ids", items.data, items.count * items.id_bytes);
    memory.reads("addresses", addresses);
    memory.writes("fault", fault);
    gather(table, items);
}

void gather_to_cpu(IBP_TABLE_PARAMETERS, Tensor ids, Tensor addresses, int64_t max_sms, Tensor out, Tensor fault)
{
    require_cpu({&out, IBP_TABLE_TENSORS, &ids, &addresses, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    sms_of(max_sms);
    gather_to(args, ids, addresses, fault, [&](const ibp_table &table, const ibp_ids &items) {
        const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
        over_ranges(items.count, std::max<int64_t>(item_bytes, table.codebook.row_bytes), scratch_bytes,
                    fault_of(fault), [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                        return ibp_gather_items(&table, &items, first, last, nullptr, scratch, scratch_bytes, mine);
                    });
    });
}

void gather_to_cuda(IBP_TABLE_PARAMETERS, Tensor ids, Tensor addresses, int64_t max_sms, Tensor out, Tensor fault)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &ids, &addresses, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    gather_to(args, ids, addresses, fault, [&](const ibp_table &table, const ibp_ids &items) {
        check(ibp_cuda_gather_items(&table, &items, nullptr, fault_of(fault), sms_of(max_sms), current_stream(out)),
              "gather_to");
    });
}

// Writes the table as a struct ibp_table to packed, on the CPU: for ibp._core, which knows no tensors.
void pack_table(const TableArgs &args, const Tensor &packed)
{
    const ibp_table table = args.table();
    std::memcpy(bytes_of(packed, sizeof table, "packed"), &table, sizeof table);
}

void pack_table_cpu(IBP_TABLE_PARAMETERS, Tensor packed)
{
    require_cpu({IBP_TABLE_TENSORS, &packed});
    pack_table(IBP_TABLE_ARGUMENTS, packed);
}

void pack_table_cuda(IBP_TABLE_PARAMETERS, Tensor packed)
{
    const auto device = use_cuda(slots, {IBP_TABLE_TENSORS});
    require_cpu({&packed});
    pack_table(IBP_TABLE_ARGUMENTS, packed);
}

// ---- large tables ----

// (ids in the order of the windows of a table, the position of each): as many as ids.
template <typename Partition>
std::tuple<Tensor, Tensor> partition_ids(const Tensor &ids, int64_t num_items, int64_t window_bits,
                                         const Partition &partition)
{
    const ibp_ids items = ids_of(ids);
    const uint32_t bits = to_u32(window_bits, 0, 62, "window_bits");
    require(num_items >= 0, "num_items is ", num_items);
    require(items.count <= INT32_MAX, "there are ", items.count, " ids, more than 2^31 - 1");
    require(ibp_num_windows(num_items, bits) <= IBP_MAX_WINDOWS, "window_bits is ", window_bits, ": ", num_items,
            " items fall into more than ", IBP_MAX_WINDOWS, " windows");
    Tensor sorted_ids = new_tensor(ids, {items.count}, ids.scalar_type()),
           positions = new_tensor(ids, {items.count}, ScalarType::Int);
    const auto num_bytes = static_cast<int64_t>(ibp_partition_workspace_bytes(items.count, num_items, bits));
    Tensor workspace = new_tensor(ids, {num_bytes}, ScalarType::Byte);
    check(partition(items, bits, workspace.data_ptr(), sorted_ids.data_ptr(),
                    static_cast<uint32_t *>(static_cast<void *>(positions.data_ptr()))),
          "partition_ids");
    return {sorted_ids, positions};
}

std::tuple<Tensor, Tensor> partition_ids_cpu(Tensor ids, int64_t num_items, int64_t window_bits)
{
    return partition_ids(ids, num_items, window_bits,
                         [&](const ibp_ids &items, uint32_t bits, void *workspace, void *to, uint32_t *positions) {
                             return ibp_partition_ids(&items, num_items, bits, workspace, to, positions);
                         });
}

std::tuple<Tensor, Tensor> partition_ids_cuda(Tensor ids, int64_t num_items, int64_t window_bits)
{
    const auto device = use_cuda(ids, {});
    return partition_ids(ids, num_items, window_bits,
                         [&](const ibp_ids &items, uint32_t bits, void *workspace, void *to, uint32_t *positions) {
                             return ibp_cuda_partition_ids(&items, num_items, bits, workspace, to, positions,
                                                           current_stream(ids));
                         });
}

// The selection of the items at ids from position `first` on, as many as fit lengths (and bases) by their rows and
// rows by their bytes, at least one; taken becomes [items, stored bytes]. Groups of the rows that share a base are
// measured and then copied by torch's threads. Nothing is taken where there is a fault.
void select_rows_cpu(IBP_TABLE_PARAMETERS, Tensor ids, int64_t first, Tensor lengths_out, Tensor bases_out,
                     Tensor rows_out, Tensor taken, Tensor fault)
{
    constexpr int64_t kGroup = IBP_ROWS_PER_BASE;
    constexpr int64_t kLengthBytes = 256; // a length at a random place takes as long to come as so many bytes in order
    require_cpu({IBP_TABLE_TENSORS, &ids, &lengths_out, &bases_out, &rows_out, &taken, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const int64_t row_bytes = table.codebook.row_bytes;
    require(item_bytes > 0 && item_bytes % row_bytes == 0, "items of ", item_bytes, " bytes are not whole rows of ",
            row_bytes);
    ibp_ids items = ids_of(ids);
    require(0 <= first && first < items.count, "first is ", first, " of ", items.count, " ids");
    items.data = static_cast<const uint8_t *>(items.data) + first * items.id_bytes;
    items.count -= first;
    const int64_t rows_per_item = item_bytes / row_bytes;
    auto *const lengths_to = data_of<uint16_t>(lengths_out, ScalarType::UInt16, rows_per_item, "lengths_out");
    const int64_t most_items = std::min(items.count, lengths_out.numel() / rows_per_item);
    int64_t num_rows = most_items * rows_per_item, num_groups = divide_up(num_rows, kGroup);
    auto *const bases_to = data_of<int64_t>(bases_out, ScalarType::Long, num_groups, "bases_out");
    const auto starts = std::make_unique<int64_t[]>(static_cast<size_t>(num_groups)); // read back, so in no tensor
    auto *const result = data_of<int64_t>(taken, ScalarType::Long, 2, "taken");
    uint8_t *const to = bytes_of(rows_out, (rows_per_item + kGroup) * row_bytes, "rows_out");
    Footprints memory = args.footprints(table);
    memory.reads("ids", ids);
    memory.writes("lengths_out", lengths_out);
    memory.writes("bases_out", bases_out);
    memory.writes("rows_out", rows_out);
    memory.writes("taken", taken);
    memory.writes("fault", fault);
    const auto over_groups = [&](int64_t bytes_each, const auto &work) {
        over_ranges(num_groups, bytes_each, 0, fault_of(fault),
                    [&](int64_t begin, int64_t end, uint8_t *, ibp_fault *mine) {
                        ibp_status status = IBP_OK;
                        for (int64_t g = begin; g < end && status == IBP_OK; g++)
                            status = work(g, kGroup * g, std::min(num_rows, kGroup * (g + 1)), mine);
                        mine->position += first;
                        return status;
                    });
    };
    const auto is_ok = [&] { return fault_of(fault)->status == IBP_OK; };
    result[0] = result[1] = 0;
    over_groups(kLengthBytes * kGroup, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        uint64_t stored_bytes = 0;
        const ibp_status status =
            ibp_measure_selection(&table, &items, from, until, lengths_to + from, &stored_bytes, mine);
        starts[g] = static_cast<int64_t>(stored_bytes);
        return status;
    });
    if (!is_ok()) return;
    int64_t end = 0;
    for (int64_t g = 0; g < num_groups; g++) {
        const int64_t start = end;
        end += starts[g];
        starts[g] = start;
        if (end <= rows_out.numel()) continue;
        end = start;
        num_groups = g;
        num_rows = kGroup * g;
    }
    over_groups(kGroup * row_bytes, [&](int64_t g, int64_t from, int64_t until, ibp_fault *mine) {
        const int64_t stop = g + 1 < num_groups ? starts[g + 1] : end;
        return ibp_copy_selection(&table, &items, from, until, to + starts[g], static_cast<uint64_t>(stop - starts[g]),
                                  mine);
    });
    if (!is_ok()) return;
    std::copy(starts.get(), starts.get() + num_groups, bases_to);
    result[0] = num_rows / rows_per_item;
    result[1] = end;
}

// The items at ids, on the CPU, with torch's threads (ibp_cuda_stage_items). table: as out's device sees it;
// host_slots: its slots as the CPU does. stager: address of an ibp_stager of out's device.
void stage_items_cuda(IBP_TABLE_PARAMETERS, Tensor host_slots, Tensor ids, int64_t stager, int64_t max_sms, Tensor out,
                      Tensor fault)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &fault});
    require_cpu({&host_slots, &ids});
    require(stager != 0, "no stager");
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const ibp_ids items = ids_of(ids);
    gather_footprints(args, table, items, out, fault);
    uint8_t *const to = room_of(out, total_bytes(items.count, item_bytes, "items"), "out");
    const uint8_t *const from = bytes_of(host_slots, slots.numel(), "host_slots");
    const ibp_run run = [](void *, int64_t count, void (*work)(void *, int64_t), void *state) {
        torch::stable::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
            for (int64_t number = first; number < last; number++) work(state, number);
        });
    };
    check(ibp_cuda_stage_items(reinterpret_cast<ibp_stager *>(static_cast<uintptr_t>(stager)), &table, from, &items, to,
                               fault_of(fault), sms_of(max_sms), run, nullptr, torch::stable::get_num_threads(),
                               current_stream(out)),
          "stage_items");
}

// ---- decoding ----

// Bytes [start, end) must be in the table, and nothing of it where they go. Returns the memory of it all.
Footprints check_decoding(const TableArgs &args, const ibp_table &table, int64_t start, int64_t end, const Tensor &out,
                          const Tensor &fault)
{
    const int64_t num_bytes = ibp_bytes_of_table(&table);
    require(0 <= start && start <= end && end <= num_bytes, "bytes [", start, ", ", end, ") are not among the table's ",
            num_bytes);
    Footprints memory = args.footprints(table);
    memory.writes("out", out);
    memory.writes("fault", fault);
    return memory;
}

void decode_bytes_cpu(IBP_TABLE_PARAMETERS, int64_t start, int64_t end, int64_t max_sms, Tensor out, Tensor fault)
{
    require_cpu({&out, IBP_TABLE_TENSORS, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    check_decoding(args, table, start, end, out, fault);
    sms_of(max_sms);
    uint8_t *const to = room_of(out, end - start, "out");
    ibp_fault *const first_fault = fault_of(fault);
    if (start == end) return;
    const int64_t row_bytes = table.codebook.row_bytes, first_row = start / row_bytes,
                  last_row = (end - 1) / row_bytes + 1;
    const size_t scratch_bytes = ibp_scratch_bytes(table.codebook.row_bytes);
    over_ranges(last_row - first_row, row_bytes, scratch_bytes, first_fault,
                [&](int64_t first, int64_t last, uint8_t *scratch, ibp_fault *mine) {
                    const int64_t from = std::max(start, (first_row + first) * row_bytes),
                                  stop = std::min(end, (first_row + last) * row_bytes);
                    return ibp_decode_bytes(&table, from, stop, to + (from - start), scratch, scratch_bytes, mine);
                });
}

void decode_bytes_cuda(IBP_TABLE_PARAMETERS, int64_t start, int64_t end, int64_t max_sms, Tensor out, Tensor fault)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &fault});
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    check_decoding(args, table, start, end, out, fault);
    check(ibp_cuda_decode_bytes(&table, start, end, room_of(out, end - start, "out"), fault_of(fault), sms_of(max_sms),
                                current_stream(out)),
          "decode_bytes");
}

// host_bases: the table's bases on the CPU. streamer: address of an ibp_streamer of out's device. begins, ends:
// whether this is the first, the last table of a stream, all through the same ring.
void stream_bytes_cuda(IBP_TABLE_PARAMETERS, Tensor host_bases, int64_t start, int64_t end, int64_t streamer,
                       bool begins, bool ends, int64_t max_sms, Tensor ring, Tensor out, Tensor fault)
{
    const auto device = use_cuda(out, {IBP_TABLE_TENSORS, &ring, &fault});
    require_cpu({&host_bases});
    require(host_bases.numel() == bases.numel(), "host_bases has ", host_bases.numel(), " elements, bases ",
            bases.numel());
    require(streamer != 0, "no streamer");
    const TableArgs args = IBP_TABLE_ARGUMENTS;
    const ibp_table table = args.table();
    const uint64_t *const starts = unsigned_longs_of(host_bases, 0, "host_bases");
    check_decoding(args, table, start, end, out, fault).writes("ring", ring);
    uint8_t *const to = bytes_of(out, end - start, "out"), *const staging = bytes_of(ring, 0, "ring");
    auto *const stream = reinterpret_cast<ibp_streamer *>(static_cast<uintptr_t>(streamer));
    if (begins) check(ibp_cuda_begin_stream(stream, staging, ring.numel()), "begin_stream");
    check(ibp_cuda_stream_bytes(stream, &table, starts, start, end, ends, to, fault_of(fault), sms_of(max_sms),
                                current_stream(out)),
          "stream_bytes");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m)
{
    m.impl("codebook_words", TORCH_BOX(&codebook_words));
    m.impl("threshold_bits", TORCH_BOX(&threshold_bits));
    m.impl("choose_masks", TORCH_BOX(&choose_masks));
    m.impl("estimate_masks", TORCH_BOX(&estimate_masks));
    m.impl("learn_planes", TORCH_BOX(&learn_planes));
    m.impl("learn_entries", TORCH_BOX(&learn_entries));
    m.impl("count_bits", TORCH_BOX(&count_bits_cpu));
    m.impl("count_hits", TORCH_BOX(&count_hits_cpu));
    m.impl("measure_rows", TORCH_BOX(&measure_rows_cpu));
    m.impl("index_rows", TORCH_BOX(&index_rows_cpu));
    m.impl("survey_rows", TORCH_BOX(&survey_rows_cpu));
    m.impl("encode_rows", TORCH_BOX(&encode_rows_cpu));
    m.impl("encode_packed", TORCH_BOX(&encode_packed));
    m.impl("encode_into", TORCH_BOX(&encode_into_cpu));
    m.impl("gather_items", TORCH_BOX(&gather_items_cpu));
    m.impl("gather_into", TORCH_BOX(&gather_into_cpu));
    m.impl("gather_to", TORCH_BOX(&gather_to_cpu));
    m.impl("pack_table", TORCH_BOX(&pack_table_cpu));
    m.impl("decode_bytes", TORCH_BOX(&decode_bytes_cpu));
    m.impl("partition_ids", TORCH_BOX(&partition_ids_cpu));
    m.impl("select_rows", TORCH_BOX(&select_rows_cpu));
}

STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m)
{
    m.impl("count_bits", TORCH_BOX(&count_bits_cuda));
    m.impl("count_hits", TORCH_BOX(&count_hits_cuda));
    m.impl("measure_rows", TORCH_BOX(&measure_rows_cuda));
    m.impl("index_rows", TORCH_BOX(&index_rows_cuda));
    m.impl("survey_rows", TORCH_BOX(&survey_rows_cuda));
    m.impl("encode_rows", TORCH_BOX(&encode_rows_cuda));
    m.impl("encode_into", TORCH_BOX(&encode_into_cuda));
    m.impl("gather_items", TORCH_BOX(&gather_items_cuda));
    m.impl("gather_into", TORCH_BOX(&gather_into_cuda));
    m.impl("gather_to", TORCH_BOX(&gather_to_cuda));
    m.impl("pack_table", TORCH_BOX(&pack_table_cuda));
    m.impl("decode_bytes", TORCH_BOX(&decode_bytes_cuda));
    m.impl("stage_items", TORCH_BOX(&stage_items_cuda));
    m.impl("stream_bytes", TORCH_BOX(&stream_bytes_cuda));
    m.impl("partition_ids", TORCH_BOX(&partition_ids_cuda));
}
