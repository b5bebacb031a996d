/* emulated_tables.cpp - the kernels of csrc/cuda/decode and csrc/cuda/encode under emulated_simt.h against the C
 * core: tables of every scheme, good ones and corrupt ones. Usage: emulated_tables [seed] [cases] [filter]. filter:
 * part of what the description of the cases to run says up to the codebook; "case 17 " is one of them. */
#include "emulated_simt.h"
#include "core/cache.h"
#include "core/ids.h"
#include "cuda/decode/decode_request.h"
#include "cuda/decode/warp_rows.cuh"
#include "cuda/encode/warp_encode.cuh"
#include "cuda/floats.cuh"
#include "cuda/launch.cuh"
#include "internal/ibp_internal.h"

#include <csignal>
#include <random>
#include <set>
#include <string>
#include <sys/time.h>
#include <unistd.h>

/* So that on_signal names the case. */
extern "C" const char *__asan_default_options() { return "abort_on_error=1:detect_leaks=0"; }
extern "C" const char *__ubsan_default_options() { return "abort_on_error=1:print_stacktrace=1"; }

namespace {

std::mt19937_64 generator;
std::string description; /* of the case that runs */
long num_wrong = 0;
std::set<const void *> kernels; /* that have run */
bool is_wrong = false;

uint64_t below(uint64_t limit) { return generator() % limit; }
bool chance(uint32_t percent) { return below(100) < percent; }
template <class T> T pick(std::initializer_list<T> choices) { return choices.begin()[below(choices.size())]; }
uint64_t low(uint64_t value, uint32_t num_bits)
{
    return num_bits >= 64 ? value : value & ((uint64_t{1} << num_bits) - 1);
}

template <class... Values> void complain(const char *format, Values... values)
{
    if (!is_wrong) printf("wrong: %s\n", description.c_str());
    is_wrong = true;
    printf("    ");
    printf(format, values...);
    printf("\n");
    fflush(stdout);
}

void on_signal(int signal)
{
    fprintf(stderr, "%s in %s\n", signal == SIGPROF ? "no end" : "aborted", description.c_str());
    fflush(stdout);
    _exit(3);
}

/* Exactly so many entries, not one byte more behind them; `offset` bytes after a multiple of 16. */
template <class T> struct Array {
    uint8_t *memory = nullptr;
    T *data = nullptr;
    size_t size = 0;

    Array() = default;
    explicit Array(size_t count, size_t offset = 0) : size(count)
    {
        if (count == 0) return;
        memory = static_cast<uint8_t *>(malloc(offset + count * sizeof(T)));
        memset(memory, 0xA5, offset + count * sizeof(T));
        data = reinterpret_cast<T *>(memory + offset);
    }
    Array(Array &&other) noexcept { swap(other); }
    Array &operator=(Array &&other) noexcept
    {
        swap(other);
        return *this;
    }
    ~Array() { free(memory); }
    void swap(Array &other)
    {
        std::swap(memory, other.memory), std::swap(data, other.data), std::swap(size, other.size);
    }
};

/* ---- codebooks ---- */

struct Codebook {
    ibp_codebook codebook = {};
    Array<uint32_t> mask, bitval, flags, cluster_flags;
    Array<uint8_t> entries, mask_bytes, bitval_bytes; /* of all clusters */
    Array<uint16_t> live_columns;
    Array<uint8_t> row_template;
};

uint8_t mask_byte(int kind, uint32_t i, uint32_t chunk_bytes)
{
    const auto a = static_cast<uint8_t>(generator()), b = static_cast<uint8_t>(generator()),
               c = static_cast<uint8_t>(generator());
    switch (kind) {
    case 0: return 0;
    case 1: return 0xff;
    case 2: return a;
    case 3: return a & b & c;
    case 4: return i / chunk_bytes % 3 == 1 ? 0 : static_cast<uint8_t>(a | b | c);
    case 5: return i % 4 == 3 ? 0x7f : i % 4 == 2 ? 0x80 : 0; /* sign and exponent of float32 */
    default: return i / chunk_bytes % 5 == 0 ? 0xff : 0;
    }
}

void make_masks(Codebook &made, uint32_t row_bytes, uint32_t clusters)
{
    const uint32_t chunk_bytes = pick({1u, 2u, 4u, 8u});
    const size_t num_words = ibp_codebook_words(row_bytes);
    const bool flag_all = chance(25);
    made.mask = Array<uint32_t>(clusters * num_words), made.bitval = Array<uint32_t>(clusters * num_words),
    made.flags = Array<uint32_t>(clusters * num_words);
    made.cluster_flags = Array<uint32_t>((clusters - 1) * num_words + 1);
    made.mask_bytes = Array<uint8_t>(size_t{clusters} * row_bytes),
    made.bitval_bytes = Array<uint8_t>(size_t{clusters} * row_bytes);
    const int kind = static_cast<int>(below(7));
    for (uint32_t k = 0; k < clusters; k++) {
        uint8_t *const mask = made.mask_bytes.data + size_t{k} * row_bytes, *const bitval = made.bitval_bytes.data +
                                                                                            size_t{k} * row_bytes;
        for (uint32_t i = 0; i < row_bytes; i++) {
            mask[i] = mask_byte(kind, i, chunk_bytes);
            bitval[i] = mask[i] & static_cast<uint8_t>(generator());
        }
        Array<uint32_t> words(3 * num_words);
        ibp_codebook one = {};
        if (ibp_build_codebook(mask, bitval, row_bytes, chunk_bytes, flag_all, words.data, &one) != IBP_OK) abort();
        if (k == 0) made.codebook = one;
        memcpy(made.mask.data + k * num_words, one.mask, 4 * num_words);
        memcpy(made.bitval.data + k * num_words, one.bitval, 4 * num_words);
        memcpy(made.flags.data + k * num_words, one.flags, 4 * num_words);
        made.cluster_flags.data[k * num_words] = one.num_flags;
    }
    made.codebook.mask = made.mask.data, made.codebook.bitval = made.bitval.data, made.codebook.flags = made.flags.data;
    made.codebook.num_clusters = clusters, made.codebook.cluster_stride = static_cast<uint32_t>(num_words),
    made.codebook.cluster_flags = made.cluster_flags.data;
    description += " chunk_bytes=" + std::to_string(chunk_bytes) + " flag_all=" + std::to_string(flag_all) +
                   " masks=" + std::to_string(kind);
}

/* One plane of digits of four bits over consecutive symbols: the level for speed. */
void make_fast(Codebook &made, uint32_t row_bytes, uint32_t element_bytes)
{
    ibp_planes p = {};
    const uint32_t width = 8 * element_bytes;
    p.element_bytes = element_bytes, p.rotate = chance(70);
    p.num_planes = 1, p.digit_bits[0] = 4, p.consecutive = true;
    p.invariant_bits = chance(60) ? 0 : pick({3u, width / 2, width - 1, static_cast<uint32_t>(below(width))});
    p.invariant_value = low(generator(), p.invariant_bits);
    const uint32_t bits = width - p.invariant_bits,
                   symbol_bits = std::min(bits, chance(60) ? 8 : static_cast<uint32_t>(below(9)));
    p.residual_bits = bits - symbol_bits;
    p.first_symbol = low(generator(), symbol_bits);
    p.default_value = chance(60) ? 0 : low(generator(), width);
    if (ibp_build_planes_codebook(&p, row_bytes, 0, &made.codebook) != IBP_OK) abort();
    description += " element_bytes=" + std::to_string(element_bytes) +
                   " residual_bits=" + std::to_string(p.residual_bits) + " symbol_bits=" + std::to_string(symbol_bits) +
                   " invariant_bits=" + std::to_string(p.invariant_bits) + " rotate=" + std::to_string(p.rotate);
}

/* Makes some columns constant, but not all. */
void make_constant(Codebook &made)
{
    ibp_planes &p = made.codebook.planes;
    const uint32_t row_bytes = made.codebook.row_bytes, columns = row_bytes / p.element_bytes,
                   percent = pick({1u, 20u, 60u, 98u});
    std::vector<uint16_t> live;
    made.row_template = Array<uint8_t>(row_bytes);
    for (uint32_t i = 0; i < columns; i++) {
        const bool is_live = !chance(percent) || (i + 1 == columns && live.empty());
        const uint64_t value = is_live ? p.default_value : generator();
        memcpy(made.row_template.data + size_t{i} * p.element_bytes, &value, p.element_bytes);
        if (is_live) live.push_back(static_cast<uint16_t>(i));
    }
    made.live_columns = Array<uint16_t>(live.size());
    memcpy(made.live_columns.data, live.data(), 2 * live.size());
    p.num_constant = columns - static_cast<uint32_t>(live.size());
    p.live_columns = made.live_columns.data, p.row_template = made.row_template.data;
    description += " num_constant=" + std::to_string(p.num_constant);
}

void make_planes(Codebook &made, uint32_t row_bytes, uint32_t element_bytes, bool listed, uint32_t clusters)
{
    static const std::vector<std::vector<uint8_t>> plans = {
        {2, 2, 2, 2}, {2, 2, 2}, {2, 2}, {3, 3, 4},    {4, 4},       {},     {2, 2, 2, 3}, {1},          {1, 1},
        {4, 3, 2, 1}, {3},       {2},    {1, 2, 3, 4}, {4, 4, 4, 4}, {3, 2}, {3, 3, 3},    {2, 3, 3, 2}, {3, 2, 2, 2}};
    static const std::vector<uint8_t> nibbles = {4}; /* the level for speed */
    const uint32_t width = 8 * element_bytes;
    ibp_codebook &cb = made.codebook;
    ibp_planes &p = cb.planes;
    cb.scheme = IBP_SCHEME_PLANES, cb.row_bytes = row_bytes;
    p.element_bytes = element_bytes, p.listed = listed, p.rotate = static_cast<uint32_t>(below(2));
    p.per_column = !listed && chance(45);
    p.invariant_bits = chance(75) ? 0 : pick({3u, width / 2, static_cast<uint32_t>(below(width))});
    p.invariant_value = low(generator(), p.invariant_bits);
    const uint32_t bits = width - p.invariant_bits;
    p.residual_bits = element_bytes == 1 && chance(40) ? 5 + static_cast<uint32_t>(below(3))
                      : chance(p.per_column ? 70 : 40) ? std::max(bits, 8u) - 8
                      : chance(5)                      ? bits
                                  : pick({0u, 8u, 11u, 24u, bits - 1, static_cast<uint32_t>(below(bits + 1))});
    if (p.residual_bits > bits) p.residual_bits = static_cast<uint32_t>(below(bits + 1));
    const uint32_t symbol_bits = bits - p.residual_bits;
    p.consecutive = !p.per_column && clusters <= 1 && chance(30);
    const std::vector<uint8_t> &plan =
        p.consecutive && chance(70) ? nibbles : plans[below(chance(60) ? 6 : plans.size())];
    p.num_planes = static_cast<uint32_t>(plan.size());
    for (uint32_t i = 0; i < p.num_planes; i++) p.digit_bits[i] = plan[i], p.num_entries += (1u << plan[i]) - 1;
    for (p.symbol_bytes = 1; 8 * p.symbol_bytes < symbol_bits;) p.symbol_bytes *= 2;
    p.default_value = chance(60) ? 0 : low(generator(), width),
    p.closed_value = low(chance(50) ? 1 : generator(), width);
    p.signed_default = listed && chance(40);
    if (chance(15)) make_constant(made);
    const size_t columns = p.per_column ? row_bytes / element_bytes - p.num_constant : 1,
                 set_bytes = columns * p.num_entries * p.symbol_bytes;
    made.entries = Array<uint8_t>(clusters * set_bytes);
    if (p.consecutive) p.first_symbol = low(generator(), symbol_bits);
    for (size_t i = 0; i < clusters * columns * p.num_entries; i++) {
        const uint64_t symbol = low(p.consecutive ? p.first_symbol + i : generator(), symbol_bits);
        memcpy(made.entries.data + i * p.symbol_bytes, &symbol, p.symbol_bytes);
    }
    p.entries = made.entries.data;
    cb.num_clusters = clusters, cb.cluster_stride = static_cast<uint32_t>(set_bytes);
    description += " element_bytes=" + std::to_string(element_bytes) + " digit_bits=";
    for (uint8_t b : plan) description += std::to_string(b);
    description += " residual_bits=" + std::to_string(p.residual_bits) + " rotate=" + std::to_string(p.rotate) +
                   " per_column=" + std::to_string(p.per_column) + " symbol_bytes=" + std::to_string(p.symbol_bytes) +
                   " consecutive=" + std::to_string(p.consecutive) +
                   " invariant_bits=" + std::to_string(p.invariant_bits) +
                   " signed_default=" + std::to_string(p.signed_default);
    if (ibp_check_codebook(&cb) != IBP_OK) abort();
}

/* ---- rows ---- */

/* What a row is like: hardly ever an escape, some, many, noise, zeros. */
enum Kind { kWell, kSome, kMany, kNoise, kZeros };

void fill_masked(const Codebook &book, Kind kind, uint32_t cluster, uint8_t *row, size_t num_bytes)
{
    static const uint32_t percent_broken[] = {0, 5, 50, 100, 0};
    const uint32_t row_bytes = book.codebook.row_bytes;
    const uint8_t *const mask = book.mask_bytes.data + size_t{cluster} * row_bytes, *const bitval =
                                                                                        book.bitval_bytes.data +
                                                                                        size_t{cluster} * row_bytes;
    bool breaks = false;
    for (size_t i = 0; i < num_bytes; i++) {
        if (i % book.codebook.chunk_bytes == 0) breaks = chance(percent_broken[kind]);
        row[i] = static_cast<uint8_t>((generator() & ~mask[i]) | bitval[i]);
        if (breaks) row[i] ^= static_cast<uint8_t>(mask[i] & generator());
    }
}

void fill_planes(const Codebook &book, Kind kind, uint32_t cluster, uint8_t *row, size_t num_bytes)
{
    const ibp_planes &p = book.codebook.planes;
    const uint32_t bits = 8 * p.element_bytes - p.invariant_bits, symbol_bits = bits - p.residual_bits,
                   percent_raw = kind == kWell   ? 0
                                 : kind == kSome ? 3
                                                 : 40;
    const uint32_t percent_listed = pick({0u, 1u, 5u, 30u, 70u, 97u, 100u}),
                   percent_next = kind == kWell   ? 5
                                  : kind == kSome ? 25
                                                  : 60; /* to the next entry */
    const bool closed = chance(15);
    const bool breaks = chance(5); /* what all rows have */
    size_t live = 0;
    for (size_t i = 0; i + p.element_bytes <= num_bytes; i += p.element_bytes) {
        if (p.num_constant != 0 &&
            (live == book.live_columns.size || book.live_columns.data[live] != i / p.element_bytes)) {
            memcpy(row + i, book.row_template.data + i, p.element_bytes);
            continue;
        }
        const size_t column = p.per_column ? live : 0;
        live++;
        uint64_t symbol = low(generator(), symbol_bits);
        if (p.num_entries != 0 && !chance(percent_raw)) {
            size_t rank = kind == kMany ? below(p.num_entries) : 0;
            while (rank + 1 < p.num_entries && chance(percent_next)) rank++;
            symbol = 0;
            memcpy(&symbol,
                   book.entries.data + size_t{cluster} * book.codebook.cluster_stride +
                       (column * p.num_entries + rank) * p.symbol_bytes,
                   p.symbol_bytes);
        }
        const uint64_t rotated =
            (p.residual_bits >= 64 ? 0 : symbol << p.residual_bits) | low(generator(), p.residual_bits);
        uint64_t element = p.rotate && bits != 0 ? rotated >> 1 | low(rotated, 1) << (bits - 1) : rotated;
        element = (p.invariant_bits >= 64 ? 0 : element << p.invariant_bits) | p.invariant_value;
        const uint64_t sign = p.signed_default && chance(50) ? uint64_t{1} << (8 * p.element_bytes - 1) : 0;
        if (p.listed) element = !chance(percent_listed) ? p.default_value ^ sign : closed ? p.closed_value : element;
        memcpy(row + i, &element, p.element_bytes);
    }
    if (breaks && num_bytes != 0) row[below(num_bytes)] ^= 1;
}

void fill_fast(const ibp_planes &p, Kind kind, uint8_t *row, size_t num_bytes)
{
    const uint32_t width = 8 * p.element_bytes, bits = width - p.invariant_bits, symbol_bits = bits - p.residual_bits,
                   percent_raw = kind == kWell   ? 0
                                 : kind == kSome ? 1
                                                 : 40;
    const bool breaks = chance(5); /* an invariant bit */
    for (size_t i = 0; i + p.element_bytes <= num_bytes; i += p.element_bytes) {
        const uint64_t symbol = low(chance(percent_raw) ? generator() : p.first_symbol + below(15), symbol_bits);
        const uint64_t rotated =
            (p.residual_bits >= 64 ? 0 : symbol << p.residual_bits) | low(generator(), p.residual_bits);
        uint64_t element = p.rotate && bits != 0 ? rotated >> 1 | low(rotated, 1) << (bits - 1) : rotated;
        element = (p.invariant_bits >= 64 ? 0 : element << p.invariant_bits) | p.invariant_value;
        if (breaks && chance(2)) element ^= 1;
        memcpy(row + i, &element, p.element_bytes);
    }
}

void fill_rows(const Codebook &book, uint8_t *data, size_t num_bytes)
{
    const ibp_codebook &cb = book.codebook;
    const int style = static_cast<int>(below(6)); /* of the table: mostly one kind of row, or a mixture */
    for (size_t start = 0; start < num_bytes; start += cb.row_bytes) {
        const size_t bytes = std::min<size_t>(cb.row_bytes, num_bytes - start);
        const Kind kind =
            style < 4 && !chance(15) ? (style == 3 ? kNoise : static_cast<Kind>(style)) : static_cast<Kind>(below(5));
        const uint32_t cluster = static_cast<uint32_t>(below(std::max(1u, cb.num_clusters)));
        for (size_t i = 0; i < bytes; i++) data[start + i] = kind == kZeros ? 0 : static_cast<uint8_t>(generator());
        if (kind == kNoise || kind == kZeros) continue;
        if (cb.scheme == IBP_SCHEME_IBP) fill_masked(book, kind, cluster, data + start, bytes);
        if (cb.scheme == IBP_SCHEME_PLANES && cb.planes.consecutive && book.entries.size == 0)
            fill_fast(cb.planes, kind, data + start, bytes);
        else if (cb.scheme == IBP_SCHEME_PLANES)
            fill_planes(book, kind, cluster, data + start, bytes);
    }
}

/* ---- tables ---- */

struct Made {
    Codebook book;
    Array<uint8_t> data, slots, overflow;
    Array<uint16_t> lengths;
    Array<uint64_t> bases;
    ibp_table table = {};
    bool is_corrupt = false; /* what a kernel writes of such a row, twice it may be, it writes over */
};

uint32_t choose_row_bytes(uint32_t unit)
{
    static const uint32_t limits[] = {16, 64, 128, 256, 300, 512, 1024, 1100, 2048, 4096, 8192, 20000};
    uint32_t row_bytes = chance(2) ? 20001 + static_cast<uint32_t>(below(45536)) : limits[below(12)];
    if (!chance(25)) row_bytes = 1 + static_cast<uint32_t>(below(row_bytes));
    const uint32_t to = std::max(unit, pick({1u, 4u, 16u, 16u}));
    return std::min(std::max(row_bytes / to * to, to), IBP_MAX_ROW_BYTES);
}

Codebook make_codebook(const std::string &scheme)
{
    Codebook made;
    const uint32_t element_bytes = scheme == "dense" || scheme == "listed" ? pick({1u, 2u, 2u, 4u, 8u})
                                   : scheme == "fast"                      ? pick({2u, 2u, 4u})
                                                                           : 1,
                   row_bytes = choose_row_bytes(element_bytes);
    const uint32_t clusters = scheme != "fast" && chance(25) ? 2 + static_cast<uint32_t>(below(2)) : 1;
    description += " row_bytes=" + std::to_string(row_bytes) + " clusters=" + std::to_string(clusters);
    made.codebook.row_bytes = row_bytes;
    if (scheme == "ibp") make_masks(made, row_bytes, clusters);
    if (scheme == "fast") make_fast(made, row_bytes, element_bytes);
    if (scheme == "dense" || scheme == "listed")
        make_planes(made, row_bytes, element_bytes, scheme == "listed", clusters);
    if (chance(50) && clusters == 1) made.codebook.num_clusters = 0;
    return made;
}

Made make_table(const std::string &scheme, Codebook book)
{
    Made made;
    const uint32_t row_bytes = book.codebook.row_bytes;
    made.book = std::move(book);
    ibp_table &t = made.table;
    t.codebook = made.book.codebook;
    const int64_t most_bytes = std::min<int64_t>(
        200 * int64_t{row_bytes}, std::max<int64_t>(chance(10) ? 100000 : 30000, 8 * int64_t{row_bytes}));
    const int64_t most_rows = std::max<int64_t>(most_bytes / row_bytes, 1);
    const int64_t tensor_bytes = (1 + static_cast<int64_t>(below(static_cast<uint64_t>(most_rows)))) * row_bytes -
                                 (chance(50) ? static_cast<int64_t>(below(row_bytes)) : 0);
    switch (below(5)) {
    case 0: t.item_bytes = 1 + static_cast<int64_t>(below(2 * row_bytes)); break;
    case 1: t.item_bytes = row_bytes * (2 + static_cast<int64_t>(below(3))); break;
    case 2:
        t.item_bytes = row_bytes % 4 == 0 && chance(50) ? row_bytes / 4
                       : row_bytes % 2 == 0             ? row_bytes / 2
                                                        : row_bytes;
        break;
    default: t.item_bytes = row_bytes;
    }
    t.num_items = std::max<int64_t>(tensor_bytes / t.item_bytes, 1);
    const int64_t num_bytes = t.num_items * t.item_bytes, num_rows = ibp_num_rows(&t);
    made.data = Array<uint8_t>(static_cast<size_t>(num_bytes));
    fill_rows(made.book, made.data.data, made.data.size);
    t.slot_bytes = scheme == "raw" || chance(25) ? row_bytes
                   : chance(30)                  ? 0
                                                 : static_cast<uint32_t>(below((row_bytes + 31) / 32)) * 32;
    if (scheme != "raw") {
        made.lengths = Array<uint16_t>(static_cast<size_t>(num_rows)),
        made.bases = Array<uint64_t>(static_cast<size_t>((num_rows + 31) / 32));
        Array<uint8_t> work(ibp_scratch_bytes(t.codebook.row_bytes));
        ibp_measure_rows(&t.codebook, made.data.data, num_bytes, made.lengths.data, work.data, work.size);
        if (chance(50) && t.slot_bytes != 0 &&
            t.slot_bytes != row_bytes) { /* as an encoder would choose it: about as long as a row */
            const uint32_t length = made.lengths.data[below(made.lengths.size)];
            t.slot_bytes = length / 32 * 32 < row_bytes ? length / 32 * 32 : t.slot_bytes;
        }
        ibp_index_rows(made.lengths.data, num_bytes, row_bytes, t.slot_bytes, made.bases.data, &t.overflow_bytes);
    }
    t.slots_bytes = t.slot_bytes == row_bytes ? num_bytes : num_rows * t.slot_bytes;
    const auto offset = [] {
        return chance(60) ? size_t{0} : pick({size_t{1}, size_t{2}, size_t{4}, size_t{8}, size_t{13}});
    };
    made.slots = Array<uint8_t>(static_cast<size_t>(t.slots_bytes), offset());
    made.overflow = Array<uint8_t>(static_cast<size_t>(t.overflow_bytes), offset());
    t.slots = made.slots.data, t.overflow = made.overflow.data, t.lengths = made.lengths.data;
    t.bases = t.overflow_bytes || chance(20) ? made.bases.data : nullptr;
    Array<uint8_t> scratch(ibp_scratch_bytes(row_bytes));
    ibp_fault fault = {};
    if (scheme == "raw")
        memcpy(made.slots.data, made.data.data, made.data.size);
    else if (ibp_encode_rows(&t, made.data.data, 0, num_rows, made.slots.data, made.overflow.data, scratch.data,
                             scratch.size, &fault) != IBP_OK)
        abort();
    long coded = 0, two_parts = 0;
    for (size_t r = 0; r < made.lengths.size; r++)
        coded += made.lengths.data[r] != 0, two_parts += t.slot_bytes != 0 && made.lengths.data[r] > t.slot_bytes;
    description += " slot_bytes=" + std::to_string(t.slot_bytes) + " rows=" + std::to_string(num_rows) +
                   " coded=" + std::to_string(coded) + " in_two_parts=" + std::to_string(two_parts) +
                   " item_bytes=" + std::to_string(t.item_bytes) + " items=" + std::to_string(t.num_items);
    return made;
}

void corrupt(Made &made)
{
    made.is_corrupt = true;
    const auto flip = [](uint8_t *bytes, size_t num_bytes, size_t times) {
        for (size_t i = 0; num_bytes != 0 && i < times; i++)
            bytes[below(num_bytes)] ^= static_cast<uint8_t>(1 + below(255));
    };
    const size_t times = 1 + below(chance(50) ? 3 : 60);
    switch (below(5)) {
    case 0: flip(made.slots.data, made.slots.size, times), flip(made.overflow.data, made.overflow.size, times); break;
    case 1:
        for (size_t i = 0; made.lengths.size != 0 && i < times; i++)
            made.lengths.data[below(made.lengths.size)] =
                static_cast<uint16_t>(chance(50) ? below(made.table.codebook.row_bytes + 2) : generator());
        break;
    case 2:
        for (size_t i = 0; made.lengths.size != 0 && i < times; i++)
            made.lengths.data[below(made.lengths.size)] =
                static_cast<uint16_t>(made.lengths.data[below(made.lengths.size)] + pick({1, -1}));
        break;
    case 3:
        if (made.bases.size != 0)
            made.bases.data[below(made.bases.size)] +=
                chance(50) ? generator() : pick<uint64_t>({1, 32, ~uint64_t{0}, 1u << 20});
        break;
    default: /* every row's first bytes: headers, flags, the cluster */
        for (size_t i = 0; i + 4 < made.slots.size; i += std::max(1u, made.table.slot_bytes))
            flip(made.slots.data + i, 4, chance(40));
        flip(made.overflow.data, made.overflow.size, times);
    }
}

/* The arrays of some groups of 32 rows, as a stream brings them; rows of other groups are corrupt. */
void cut_block(Made &made)
{
    ibp_table &t = made.table;
    const size_t num_groups = static_cast<size_t>(ibp_num_rows(&t) + 31) / 32, first = below(num_groups),
                 end = first + 1 + below(num_groups - first);
    const auto cut = [](Array<uint8_t> &array, uint64_t from, uint64_t to) {
        Array<uint8_t> block(to - from, from % 16);
        if (from < to) memcpy(block.data, array.data + from, block.size);
        array = std::move(block);
    };
    const auto slots_at = [&](size_t group) {
        return std::min<uint64_t>(32 * uint64_t{t.slot_bytes} * group, made.slots.size);
    };
    const auto overflow_at = [&](size_t group) {
        return group < num_groups && made.bases.size != 0 ? made.bases.data[group] : made.overflow.size;
    };
    t.slots_start = slots_at(first), t.overflow_start = overflow_at(first);
    cut(made.overflow, t.overflow_start, overflow_at(end)), cut(made.slots, t.slots_start, slots_at(end));
    t.slots = made.slots.data, t.slots_bytes = static_cast<int64_t>(made.slots.size), t.overflow = made.overflow.data,
    t.overflow_bytes = static_cast<int64_t>(made.overflow.size);
}

/* ---- comparison ---- */

/* The output of one function with bytes before it that must stay as they are; behind it there is nothing. */
struct Output {
    static constexpr size_t kBefore = 32;
    Array<uint8_t> bytes;
    uint8_t *out;

    Output(size_t num_bytes, size_t offset) : bytes(kBefore + offset + num_bytes), out(bytes.data + kBefore + offset) {}
};

struct Faults {
    std::vector<ibp_fault> all; /* any of which may be the first */

    void check(const ibp_fault &met, const char *what) const
    {
        if (all.empty()) {
            if (met.status != 0 || met.taken != 0)
                complain("%s: fault %lld at %lld, id %lld; there is none", what, (long long)met.status,
                         (long long)met.position, (long long)met.id);
            return;
        }
        const bool known = std::any_of(all.begin(), all.end(), [&](const ibp_fault &f) {
            return f.status == met.status && f.position == met.position && f.id == met.id;
        });
        if (!known)
            complain("%s: fault %lld at %lld, id %lld; the first of %zu is %lld at %lld, id %lld", what,
                     (long long)met.status, (long long)met.position, (long long)met.id, all.size(),
                     (long long)all[0].status, (long long)all[0].position, (long long)all[0].id);
    }
};

void compare(const Output &met, const Output &wanted, const std::string &what)
{
    size_t num_different = 0, first = 0;
    for (size_t i = met.bytes.size; i-- > 0;)
        if (met.bytes.data[i] != wanted.bytes.data[i]) num_different++, first = i;
    if (num_different == 0) return;
    complain("%s: %zu bytes differ, the first is %lld: %02x, not %02x", what.c_str(), num_different,
             (long long)(met.bytes.data + first - met.out), met.bytes.data[first], wanted.bytes.data[first]);
}

void compare_bytes(const Output &met, const Output &wanted, size_t num_bytes, const char *what)
{
    for (size_t i = 0; i < num_bytes; i++)
        if (met.out[i] != wanted.out[i]) {
            complain("byte %zu of the %s is %02x, not %02x", i, what, met.out[i], wanted.out[i]);
            return;
        }
}

size_t choose_offset() { return chance(40) ? 0 : pick({size_t{1}, size_t{2}, size_t{4}, size_t{8}, size_t{16}}); }

void check_decode(const Made &made, bool whole)
{
    const ibp_table &t = made.table;
    const int64_t num_bytes = t.num_items * t.item_bytes, row_bytes = t.codebook.row_bytes;
    int64_t start = 0, end = num_bytes;
    if (!whole) {
        start = static_cast<int64_t>(below(static_cast<uint64_t>(num_bytes) + 1)),
        end = static_cast<int64_t>(below(static_cast<uint64_t>(num_bytes) + 1));
        const int64_t unit = chance(30) ? row_bytes : chance(50) ? 16 : 1;
        start = start / unit * unit;
        if (start > end) std::swap(start, end);
    }
    const size_t offset = choose_offset(), size = static_cast<size_t>(end - start);
    const std::string what =
        "bytes " + std::to_string(start) + " to " + std::to_string(end) + ", out + " + std::to_string(offset);
    Output met(size, offset), wanted(size, offset);
    Array<uint8_t> scratch(ibp_scratch_bytes(static_cast<uint32_t>(row_bytes)));
    Faults faults;
    for (int64_t at = start; at < end;) {
        const int64_t stop = std::min(end, (at / row_bytes + 1) * row_bytes);
        ibp_fault fault = {};
        ibp_decode_bytes(&t, at, stop, wanted.out + (at - start), scratch.data, scratch.size, &fault);
        if (fault.status != 0) faults.all.push_back(fault);
        at = stop;
    }
    ibp_fault fault = {};
    if (!made.is_corrupt) simt::watch(met.bytes.data, met.bytes.size);
    const ibp_status status =
        ibp_cuda_decode_bytes(&t, start, end, met.out, &fault, static_cast<int>(below(4)), nullptr);
    if (status != IBP_OK) complain("%s: status %d", what.c_str(), status);
    compare(met, wanted, what);
    faults.check(fault, what.c_str());
}

/* Lets the positions be those of a strided tensor, now and then. Returns the bytes that it takes. */
size_t spread(size_t out_items, size_t item_bytes, ibp_ids *ids)
{
    if (!chance(25)) return out_items * item_bytes;
    ids->num_dims = 1 + static_cast<uint32_t>(below(IBP_MAX_OUT_DIMS));
    int64_t rest = std::max<int64_t>(1, static_cast<int64_t>(out_items));
    for (uint32_t d = ids->num_dims - 1; d > 0; d--) {
        ids->sizes[d] = 1 + static_cast<int64_t>(below(4));
        rest = (rest + ids->sizes[d] - 1) / ids->sizes[d];
    }
    ids->sizes[0] = rest;
    std::vector<uint32_t> order(ids->num_dims);
    for (uint32_t d = 0; d < ids->num_dims; d++) order[d] = d;
    std::shuffle(order.begin(), order.end(), generator);
    const int64_t gap = pick({0, 1, 8, 16, 48});
    int64_t end = static_cast<int64_t>(item_bytes);
    for (const uint32_t d : order) {
        ids->strides[d] = end + gap;
        end += (ids->sizes[d] - 1) * ids->strides[d];
    }
    return static_cast<size_t>(end);
}

/* The same items from a copy of their slots, as a part of a larger call. */
void check_staged(const ibp_table &t, const ibp_ids &ids, const Output &wanted, size_t out_bytes, size_t offset,
                  Faults faults)
{
    constexpr int64_t kFirst = 7;
    const int64_t row_bytes = t.codebook.row_bytes;
    if (ids.count == 0 || t.slot_bytes == 0 || t.slots_start != 0 || t.item_bytes % row_bytes != 0) return;
    const auto item_slots = static_cast<size_t>(t.item_bytes / row_bytes * t.slot_bytes);
    if (t.slots_bytes < t.num_items * static_cast<int64_t>(item_slots)) return; /* a block */
    Array<uint8_t> stage(static_cast<size_t>(ids.count) * item_slots);
    for (int64_t k = 0; k < ids.count; k++) {
        const int64_t id = ibp_id_at(&ids, k);
        if (id >= 0 && id < t.num_items)
            memcpy(stage.data + static_cast<size_t>(k) * item_slots, t.slots + static_cast<size_t>(id) * item_slots,
                   item_slots);
    }
    Output met(out_bytes, offset);
    ibp_fault fault = {};
    if (ibp::gather_staged(&t, &ids, stage.data, kFirst, met.out, &fault, 0, nullptr) != IBP_OK)
        complain("%lld ids, staged: refused", (long long)ids.count);
    compare(met, wanted, "staged");
    for (ibp_fault &each : faults.all) each.position += kFirst;
    faults.check(fault, "staged");
}

template <class Id> void check_gather(const Made &made, bool bad_ids)
{
    const ibp_table &t = made.table;
    const auto item_bytes = static_cast<size_t>(t.item_bytes), num_items = static_cast<size_t>(t.num_items);
    const size_t count = chance(3) ? 0 : 1 + below(std::min<size_t>(80, std::max<size_t>(30000 / item_bytes, 4)));
    Array<Id> ids(count);
    const bool in_order = chance(20);
    for (size_t k = 0; k < count; k++) {
        ids.data[k] = static_cast<Id>(in_order ? k % num_items : below(num_items));
        if (k != 0 && chance(20)) ids.data[k] = ids.data[k - 1];
        if (bad_ids && chance(10))
            ids.data[k] = pick(
                {Id{-1}, static_cast<Id>(num_items), std::numeric_limits<Id>::min(), std::numeric_limits<Id>::max()});
    }
    Array<uint32_t> positions;
    ibp_ids request = {ids.data, static_cast<int64_t>(count), sizeof(Id), nullptr, 0};
    size_t out_items = count;
    if (chance(35)) {
        std::vector<uint32_t> places(count + below(5));
        for (size_t i = 0; i < places.size(); i++) places[i] = static_cast<uint32_t>(i);
        std::shuffle(places.begin(), places.end(), generator);
        out_items = places.size();
        positions = Array<uint32_t>(count);
        for (size_t k = 0; k < count; k++)
            positions.data[k] =
                bad_ids && chance(10) ? pick({static_cast<uint32_t>(out_items), ~0u, 1u << 31}) : places[k];
        request.positions = positions.data, request.out_items = static_cast<int64_t>(out_items);
    }
    if (!bad_ids && chance(5)) { /* the items in order */
        request.data = nullptr, request.id_bytes = 0;
        request.count = std::min(request.count, t.num_items);
    }
    const size_t offset = choose_offset(), out_bytes = spread(out_items, item_bytes, &request);
    const std::string what = std::to_string(count) + " ids of " + std::to_string(request.id_bytes) + " bytes" +
                             (request.positions ? " with positions" : "") + (request.num_dims ? ", strided" : "") +
                             ", out + " + std::to_string(offset);
    Output met(out_bytes, offset), wanted(out_bytes, offset);
    Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
    Faults faults;
    for (int64_t k = 0; k < request.count; k++) {
        ibp_fault fault = {};
        ibp_gather_items(&t, &request, k, k + 1, wanted.out, scratch.data, scratch.size, &fault);
        if (fault.status != 0) faults.all.push_back(fault);
    }
    ibp_fault fault = {};
    if (!made.is_corrupt) simt::watch(met.bytes.data, met.bytes.size);
    const ibp_status status = ibp_cuda_gather_items(&t, &request, met.out, &fault, static_cast<int>(below(4)), nullptr);
    if (status != IBP_OK) complain("%s: status %d", what.c_str(), status);
    compare(met, wanted, what);
    faults.check(fault, what.c_str());
    if (!made.is_corrupt) check_staged(t, request, wanted, out_bytes, offset, faults);
}

std::vector<Made> before; /* good tables of earlier cases */

/* A table among others, whole or its items at ids, in one call. */
void check_together(const Made &made)
{
    const size_t count = chance(70) ? 1 + below(5) : 30 + below(6);
    std::vector<Array<int64_t>> ids(count);
    std::vector<ibp_ids> requests(count);
    std::vector<ibp_gather> gathers;
    std::vector<Output> met, wanted;
    std::vector<ibp_fault> faults(count), wanted_faults(count);
    for (size_t k = 0; k < count; k++) {
        const ibp_table &t = before.empty() || chance(50) ? made.table : before[below(before.size())].table;
        const bool is_whole = t.num_items * t.item_bytes < 4000 && chance(40);
        const size_t num_ids = below(4), offset = choose_offset(),
                     num_bytes = static_cast<size_t>((is_whole ? t.num_items : num_ids) * t.item_bytes);
        ids[k] = Array<int64_t>(num_ids);
        for (size_t i = 0; i < num_ids; i++) ids[k].data[i] = static_cast<int64_t>(below(t.num_items + chance(5)));
        requests[k] = {ids[k].data, static_cast<int64_t>(num_ids), sizeof(int64_t), nullptr, 0};
        met.emplace_back(num_bytes, offset), wanted.emplace_back(num_bytes, offset);
        gathers.push_back({&t, is_whole ? nullptr : &requests[k], met[k].out, &faults[k]});
        Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
        if (is_whole)
            for (int64_t i = 0, end; i < static_cast<int64_t>(num_bytes); i = end) {
                end = std::min<int64_t>(static_cast<int64_t>(num_bytes), i + t.codebook.row_bytes);
                ibp_decode_bytes(&t, i, end, wanted[k].out + i, scratch.data, scratch.size, &wanted_faults[k]);
            }
        else
            ibp_gather_items(&t, &requests[k], 0, requests[k].count, wanted[k].out, scratch.data, scratch.size,
                             &wanted_faults[k]);
    }
    const ibp_status status =
        ibp_cuda_gather_tables(gathers.data(), static_cast<int64_t>(count), static_cast<int>(below(6)), nullptr);
    if (status != IBP_OK) complain("%zu tables: status %d", count, status);
    for (size_t k = 0; k < count; k++) {
        compare(met[k], wanted[k], "table " + std::to_string(k) + " of " + std::to_string(count));
        if ((faults[k].status == 0) != (wanted_faults[k].status == 0))
            complain("table %zu of %zu: fault %lld, not %lld", k, count, (long long)faults[k].status,
                     (long long)wanted_faults[k].status);
    }
}

void check_encode(const Made &made)
{
    const ibp_table &t = made.table;
    const int64_t num_bytes = t.num_items * t.item_bytes, num_rows = ibp_num_rows(&t);
    const Array<uint8_t> &data = made.data;
    if (t.codebook.scheme != IBP_SCHEME_RAW) {
        Array<uint16_t> lengths(made.lengths.size);
        if (ibp_cuda_measure_rows(&t.codebook, data.data, num_bytes, lengths.data, nullptr) != IBP_OK)
            complain("rows could not be measured");
        for (size_t r = 0; r < lengths.size; r++)
            if (lengths.data[r] != made.lengths.data[r]) {
                complain("row %zu has %u bytes, not %u", r, lengths.data[r], made.lengths.data[r]);
                break;
            }
    }
    Output slots(made.slots.size, choose_offset()), overflow(made.overflow.size, choose_offset()),
        wanted_slots(made.slots.size, 0), wanted_overflow(made.overflow.size, 0);
    for (Output *output : {&slots, &overflow, &wanted_slots, &wanted_overflow})
        memset(output->bytes.data, 0, output->bytes.size);
    Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
    ibp_fault fault = {};
    if (ibp_encode_rows(&t, made.data.data, 0, num_rows, wanted_slots.out, wanted_overflow.out, scratch.data,
                        scratch.size, &fault) != IBP_OK)
        abort();
    simt::watch(slots.bytes.data, slots.bytes.size);
    if (ibp_cuda_encode_rows(&t, data.data, slots.out, overflow.out, &fault, nullptr) != IBP_OK || fault.status != 0)
        complain("rows could not be coded");
    compare_bytes(slots, wanted_slots, made.slots.size, "slots");
    compare_bytes(overflow, wanted_overflow, made.overflow.size, "overflow");
    if (t.codebook.scheme == IBP_SCHEME_RAW || num_rows == 0) return;
    /* again, in one pass, and the parts of overflow moved */
    Array<uint16_t> lengths(made.lengths.size);
    Output spare(made.overflow.size, choose_offset());
    Array<uint64_t> bases(static_cast<size_t>(num_rows));
    for (Output *output : {&slots, &overflow, &spare}) memset(output->bytes.data, 0xa5, output->bytes.size);
    uint64_t used = 0;
    ibp_place place = {};
    place.table = t, place.slots = slots.out, place.overflow = spare.out, place.lengths = lengths.data,
    place.used = &used, place.is_new = 1, place.table.rows_per_base = 1;
    ibp_row_source source = {};
    source.data = data.data, source.num_rows = num_rows,
    source.last_row_bytes = static_cast<uint32_t>(num_bytes % t.codebook.row_bytes);
    if (t.slot_bytes == 0u) {
        if (ibp_cuda_encode_into(&place, &source, nullptr, 0, nullptr, 0, nullptr) != IBP_INVALID_ARGUMENT)
            complain("packed rows are not refused");
        return;
    }
    place.bases = bases.data;
    if (ibp_cuda_encode_into(&place, &source, nullptr, 0, nullptr, 0, nullptr) != IBP_OK)
        complain("rows could not be coded in one pass");
    if (ibp_cuda_move_parts(&t, &place, overflow.out, nullptr) != IBP_OK) complain("parts could not be moved");
    if (memcmp(lengths.data, made.lengths.data, lengths.size * sizeof lengths.data[0]) != 0)
        complain("one pass measures other lengths");
    compare_bytes(slots, wanted_slots, made.slots.size, "slots of one pass");
    compare_bytes(overflow, wanted_overflow, made.overflow.size, "overflow of one pass");
}

/* ---- rows coded into a place ---- */

/* Rows in buffers of their own, as an ibp_row_source describes them. A buffer ends where its last row ends, since no
   kernel may read beyond it; a kernel may read the bytes of a word before a row. */
struct Source {
    static constexpr size_t kBefore = 4;
    std::vector<Array<uint8_t>> buffers;
    std::vector<const uint8_t *> addresses;
    ibp_row_source source = {};

    /* rows: row_bytes each, but the last one, which may be short. */
    Source(const std::vector<std::vector<uint8_t>> &rows, uint32_t row_bytes)
    {
        const int64_t count = static_cast<int64_t>(rows.size());
        const bool is_short = !rows.empty() && rows.back().size() != row_bytes;
        source.num_rows = count;
        source.rows_per_buffer =
            chance(50) ? 1 + static_cast<int64_t>(below(static_cast<uint64_t>(count) + 2)) : count + 1;
        source.num_dims = is_short ? 0 : static_cast<uint32_t>(below(5));
        source.last_row_bytes = is_short ? static_cast<uint32_t>(rows.back().size()) : 0;
        const int64_t in_buffer = std::min(source.rows_per_buffer, std::max<int64_t>(count, 1));
        int64_t inner = 1, stride = row_bytes;
        for (uint32_t d = source.num_dims; d-- > 0;) { /* the innermost first, gaps between them */
            source.sizes[d] = d == 0 ? 0 : 1 + static_cast<int64_t>(below(4));
            source.strides[d] = stride += pick({int64_t{0}, int64_t{1}, int64_t{16}, int64_t{32}});
            stride *= d == 0 ? (in_buffer + inner - 1) / inner : source.sizes[d];
            inner *= source.sizes[d];
        }
        for (int64_t i = 0; i < count; i++) {
            if (i % source.rows_per_buffer == 0) {
                const int64_t last = std::min(source.rows_per_buffer, count - i) - 1;
                const size_t bytes = offset_of(last, row_bytes) + rows[static_cast<size_t>(i + last)].size();
                buffers.emplace_back(kBefore + bytes, chance(60) ? 16 - kBefore : below(16));
                addresses.push_back(buffers.back().data + kBefore);
            }
            memcpy(buffers.back().data + kBefore + offset_of(i % source.rows_per_buffer, row_bytes),
                   rows[static_cast<size_t>(i)].data(), rows[static_cast<size_t>(i)].size());
        }
        if (addresses.size() > 1 || chance(30))
            source.buffers = addresses.data();
        else if (count != 0)
            source.data = addresses[0];
    }

    size_t offset_of(int64_t number, uint32_t row_bytes) const
    {
        if (source.num_dims == 0) return static_cast<size_t>(number * row_bytes);
        int64_t offset = 0;
        for (uint32_t d = source.num_dims; d-- > 1; number /= source.sizes[d])
            offset += number % source.sizes[d] * source.strides[d];
        return static_cast<size_t>(offset + number * source.strides[0]);
    }
};

/* The rows of a place, what they should be, and the arrays that a call writes. */
struct Place {
    Array<uint8_t> slots, overflow;
    Array<uint16_t> lengths, rooms;
    Array<uint64_t> bases;
    Array<ibp_place_counts> counts{1};
    Array<uint64_t> used{1};
    ibp_place place = {};
    std::vector<std::vector<uint8_t>> rows; /* as they should be decoded; empty where that is unknown */

    Place(const ibp_table &like, bool is_hostile)
    {
        ibp_table &t = place.table;
        t = like;
        const auto num_rows = static_cast<size_t>(ibp_num_rows(&t));
        const size_t most = num_rows * (t.codebook.row_bytes + 31u) / 32 * 32;
        const bool has_parts = t.slot_bytes != t.codebook.row_bytes;
        t.rows_per_base = 1, t.lengths = nullptr, t.bases = nullptr;
        t.overflow_bytes = has_parts ? static_cast<int64_t>(chance(60) ? 3 * most : below(most + 1)) : 0;
        const auto any_offset = [] { return chance(60) ? size_t{0} : 4 * below(4) + below(2); };
        slots = Array<uint8_t>(static_cast<size_t>(t.slots_bytes), any_offset());
        overflow = Array<uint8_t>(static_cast<size_t>(t.overflow_bytes), any_offset());
        lengths = Array<uint16_t>(num_rows), rooms = Array<uint16_t>(num_rows), bases = Array<uint64_t>(num_rows);
        for (size_t r = 0; r < num_rows; r++) {
            const bool lies = is_hostile && chance(70);
            lengths.data[r] = lies ? static_cast<uint16_t>(generator()) : uint16_t{0};
            rooms.data[r] = lies ? static_cast<uint16_t>(chance(50) ? below(40) : generator()) : uint16_t{0};
            bases.data[r] = !lies        ? IBP_NO_BASE
                            : chance(50) ? below(static_cast<uint64_t>(t.overflow_bytes) + 64)
                                         : IBP_NO_BASE - below(70);
        }
        *counts.data = {};
        *used.data = is_hostile ? below(static_cast<uint64_t>(t.overflow_bytes) + 99) : 0;
        place.slots = slots.data, place.overflow = overflow.data, place.used = used.data, place.counts = counts.data;
        place.lengths = t.codebook.scheme == IBP_SCHEME_RAW ? nullptr : lengths.data;
        place.bases = has_parts || (chance(50) && place.lengths) ? bases.data : nullptr;
        place.rooms = chance(50) ? rooms.data : nullptr;
        rows.resize(num_rows);
    }

    uint32_t valid(size_t row) const
    {
        return ibp_valid_bytes(ibp_bytes_of_table(&place.table), place.table.codebook.row_bytes,
                               static_cast<int64_t>(row));
    }

    /* Whether a row is stored as the core codes it. lost: it says that it is not there. */
    bool holds(size_t r, bool *lost) const
    {
        const ibp_table &t = place.table;
        const uint32_t row_bytes = t.codebook.row_bytes, bytes = valid(r);
        std::vector<uint8_t> row = rows[r], coded(IBP_CODED_ROW_BYTES(row_bytes)), work(ibp_scratch_bytes(row_bytes));
        row.resize(row_bytes);
        std::fill(row.begin() + bytes, row.end(), uint8_t{0});
        uint16_t length = 0;
        size_t coded_bytes = 0;
        if (t.codebook.scheme != IBP_SCHEME_RAW) {
            ibp_measure_rows(&t.codebook, row.data(), bytes, &length, work.data(), work.size());
            ibp_encode_row(&t.codebook, row.data(), coded.data(), coded.size(), &coded_bytes, work.data(), work.size());
        }
        const uint32_t stored = ibp_stored_bytes(length, row_bytes, bytes), in_slot = std::min(stored, t.slot_bytes),
                       in_overflow = stored - in_slot;
        *lost = in_overflow != 0 && bases.data[r] == IBP_NO_BASE;
        if (place.lengths && lengths.data[r] != (*lost ? 0 : length)) return false;
        if (*lost) return true;
        const uint8_t *const wanted = length == 0 ? row.data() : coded.data();
        if (in_slot != 0 && memcmp(slots.data + r * t.slot_bytes, wanted, in_slot) != 0) return false;
        if (in_overflow == 0) return true;
        return ibp_part_in_bounds(bases.data[r], in_overflow, t.overflow_bytes) &&
               memcmp(overflow.data + bases.data[r], wanted + in_slot, in_overflow) == 0;
    }
};

/* Codes some rows of `data` into a place, distinct ones or all of them in order, and looks at what is there then. */
void check_call(const Made &made, Place &to, bool is_hostile)
{
    const ibp_table &t = to.place.table;
    const uint32_t row_bytes = t.codebook.row_bytes;
    const size_t num_rows = to.rows.size();
    const bool in_order = chance(40);
    std::vector<int64_t> ids(num_rows);
    for (size_t r = 0; r < num_rows; r++) ids[r] = static_cast<int64_t>(r);
    if (!in_order) std::shuffle(ids.begin(), ids.end(), generator);
    const size_t first = in_order ? below(num_rows + 1) : 0, count = below(num_rows - first + 1);
    std::vector<std::vector<uint8_t>> rows;
    for (size_t i = 0; i < count; i++) {
        const size_t from = chance(30) ? first + i : below(num_rows);
        const uint8_t *const data = made.data.data + from * row_bytes;
        rows.emplace_back(data, data + std::min<size_t>(row_bytes, made.data.size - from * row_bytes));
        rows.back().resize(i + 1 == count && chance(50) ? 1 + below(row_bytes) : row_bytes);
    }
    std::vector<int64_t> given(ids.begin() + static_cast<long>(first), ids.begin() + static_cast<long>(first + count));
    bool misses = false;
    for (size_t i = 0; i < count; i++) {
        if (!in_order && chance(5)) {
            given[i] = pick({int64_t{-1}, static_cast<int64_t>(num_rows), INT64_MAX, INT64_MIN}), misses = true;
            continue;
        }
        to.rows[static_cast<size_t>(given[i])] = rows[i];
    }
    const Source source(rows, row_bytes);
    ibp_fault fault = {};
    simt::watch(to.slots.data, to.slots.size);
    const ibp_status status =
        ibp_cuda_encode_into(&to.place, &source.source, in_order ? nullptr : given.data(), static_cast<int64_t>(first),
                             &fault, static_cast<int>(below(4)), nullptr);
    if (status != IBP_OK) complain("%zu rows into a place: status %d", count, status);
    if (is_hostile) return; /* a base may be the mark of a row that is being coded, and parts may overlap */
    if (fault.status != (misses ? IBP_INDEX_OUT_OF_RANGE : IBP_OK))
        complain("%zu rows into a place: fault %lld", count, (long long)fault.status);
    uint64_t num_lost = 0;
    for (size_t r = 0; r < num_rows; r++) {
        bool lost = false;
        if (to.rows[r].empty()) continue;
        if (!to.holds(r, &lost)) complain("row %zu is not what was coded", r);
        num_lost += lost;
        if (lost) to.rows[r].clear(); /* counted once */
    }
    if (to.counts.data->lost != num_lost)
        complain("%lld rows were counted as lost, not %lld", (long long)to.counts.data->lost, (long long)num_lost);
    to.counts.data->lost = 0;
}

/* Parts that rows own lie apart: a row that is coded again harms no other one. */
void check_encode_into(const Made &made)
{
    const bool is_hostile = chance(25);
    Place to(made.table, is_hostile);
    for (int call = 0; call < 4; call++) check_call(made, to, is_hostile);
}

/* A kernel of a user's, with warp_encode.cuh. */
__global__ void encode_each(const ibp_codebook cb, const uint8_t *rows, int64_t num_rows, uint8_t *coded,
                            uint32_t *lengths)
{
    const uint32_t warp = threadIdx.x / 32u, num_warps = gridDim.x * (blockDim.x / 32u);
    for (int64_t r = blockIdx.x * (blockDim.x / 32u) + warp; r < num_rows; r += num_warps) {
        const int64_t start = r * cb.row_bytes;
        const uint32_t length =
            ibp::warp_encode_row(cb, rows + start, coded + start, warp * ibp::warp_encode_scratch_bytes(cb));
        if (threadIdx.x % 32u == 0) lengths[r] = length;
    }
}

/* rows: whole ones. */
void check_device_encode(const ibp_codebook &cb, const uint8_t *rows, int64_t num_rows)
{
    const size_t row_bytes = cb.row_bytes, offset = choose_offset();
    Output met(static_cast<size_t>(num_rows) * row_bytes, offset),
        wanted(static_cast<size_t>(num_rows) * row_bytes, offset);
    Array<uint32_t> lengths(static_cast<size_t>(num_rows));
    Array<uint8_t> scratch(ibp_scratch_bytes(cb.row_bytes)), coded(row_bytes);
    emulate(encode_each, 2, 64, 2 * ibp::warp_encode_scratch_bytes(cb), nullptr, cb, rows, num_rows, met.out,
            lengths.data);
    for (size_t r = 0; r < static_cast<size_t>(num_rows); r++) {
        size_t length = 0;
        const bool is_coded =
            cb.scheme == IBP_SCHEME_IBP && ibp_encode_row(&cb, rows + r * row_bytes, coded.data, row_bytes - 1, &length,
                                                          scratch.data, scratch.size) == IBP_OK;
        length = is_coded ? length : 0;
        memcpy(wanted.out + r * row_bytes, coded.data, length);
        if (lengths.data[r] != length)
            complain("row %zu coded by a warp: %u bytes, not %zu", r, lengths.data[r], length);
    }
    compare(met, wanted, "rows coded by warps");
}

/* A kernel of a user's, with warp_rows.cuh: a warp takes every so many rows; rows that lie in one piece are decoded
 * from their bytes every other time. */
__global__ void decode_each(const ibp_table table, uint32_t warp_bytes, uint8_t *out, uint32_t *statuses)
{
    const int64_t num_warps = gridDim.x * (blockDim.x / 32u), row_bytes = table.codebook.row_bytes;
    const uint32_t warp = threadIdx.x / 32u;
    for (int64_t r = blockIdx.x * (blockDim.x / 32u) + warp; r <= ibp_num_rows(&table); r += num_warps) {
        ibp_row_place place;
        uint8_t *const row = out + r * row_bytes;
        ibp_status status;
        if (r % 2 != 0 && r < ibp_num_rows(&table) && ibp::find_row(table, r, &place) && !place.raw &&
            !place.is_default && place.in_overflow == 0u)
            status = ibp::warp_decode_coded(table.codebook, table.slots + place.slot_start, place.in_slot, row,
                                            place.valid, warp * warp_bytes);
        else
            status = ibp::warp_decode_row(table, r, row, warp * warp_bytes);
        if (threadIdx.x % 32u == 0) statuses[r] = status;
    }
}

void check_device_rows(const Made &made)
{
    const ibp_table &t = made.table;
    const int64_t num_bytes = t.num_items * t.item_bytes, row_bytes = t.codebook.row_bytes, num_rows = ibp_num_rows(&t);
    const size_t offset = choose_offset();
    Output met(static_cast<size_t>((num_rows + 1) * row_bytes), offset),
        wanted(static_cast<size_t>((num_rows + 1) * row_bytes), offset);
    Array<uint32_t> statuses(static_cast<size_t>(num_rows) + 1);
    Array<uint8_t> scratch(ibp_scratch_bytes(t.codebook.row_bytes));
    memset(wanted.out + num_rows * row_bytes, 0, static_cast<size_t>(row_bytes)); /* there is no such row */
    const uint32_t warp_bytes = ibp::warp_scratch_bytes(t.codebook);
    emulate(decode_each, 2, 64, 2 * warp_bytes, nullptr, t, warp_bytes, met.out, statuses.data);
    for (int64_t r = 0; r < num_rows; r++) {
        ibp_fault fault = {};
        ibp_decode_bytes(&t, r * row_bytes, std::min((r + 1) * row_bytes, num_bytes), wanted.out + r * row_bytes,
                         scratch.data, scratch.size, &fault);
        if (statuses.data[r] != static_cast<uint32_t>(fault.status))
            complain("row %lld by a warp: status %u, not %lld", (long long)r, statuses.data[r],
                     (long long)fault.status);
    }
    if (statuses.data[num_rows] != IBP_INDEX_OUT_OF_RANGE)
        complain("the row past the last one: status %u", statuses.data[num_rows]);
    compare(met, wanted, "rows by warps");
    check_device_encode(t.codebook, wanted.out, num_bytes / row_bytes);
}

/* Words of a codebook that say anything, and entries with any bits: what comes out does not matter, but nothing
 * outside the arrays is touched. */
void check_hostile_words(Made &made)
{
    Codebook &book = made.book;
    ibp_table &t = made.table;
    const auto scramble = [](uint32_t *words, size_t count) {
        for (size_t i = 0; i < count; i++)
            if (chance(50)) words[i] = chance(50) ? static_cast<uint32_t>(generator()) : ~0u << below(32);
    };
    scramble(book.mask.data, book.mask.size), scramble(book.bitval.data, book.bitval.size),
        scramble(book.flags.data, book.flags.size);
    scramble(book.cluster_flags.data, book.cluster_flags.size);
    for (size_t i = 0; i < book.entries.size; i++) book.entries.data[i] = static_cast<uint8_t>(generator());
    for (size_t i = 0; i < book.live_columns.size; i++)
        if (chance(50)) book.live_columns.data[i] = static_cast<uint16_t>(generator());
    if (t.codebook.scheme == IBP_SCHEME_IBP)
        t.codebook.num_flags = static_cast<uint32_t>(below(t.codebook.row_bytes / t.codebook.chunk_bytes + 1));
    const int64_t num_bytes = t.num_items * t.item_bytes;
    Output out(static_cast<size_t>(num_bytes), choose_offset());
    ibp_fault fault = {};
    if (ibp_cuda_decode_bytes(&t, 0, num_bytes, out.out, &fault, 0, nullptr) != IBP_OK)
        complain("hostile words: not decoded");
    const int64_t ids[] = {t.num_items - 1, 0, t.num_items / 2, -1};
    const ibp_ids request = {ids, 4, sizeof *ids, nullptr, 0};
    Output items(4 * static_cast<size_t>(t.item_bytes), choose_offset());
    fault = {};
    if (ibp_cuda_gather_items(&t, &request, items.out, &fault, 0, nullptr) != IBP_OK || fault.status == IBP_OK)
        complain("hostile words: not gathered");
    Array<uint8_t> data((made.data.size + 3) / 4 * 4);
    memcpy(data.data, made.data.data, made.data.size);
    Array<uint16_t> lengths(made.lengths.size);
    if (t.codebook.scheme != IBP_SCHEME_RAW &&
        ibp_cuda_measure_rows(&t.codebook, data.data, num_bytes, lengths.data, nullptr) != IBP_OK)
        complain("hostile words: not measured");
    Output slots(made.slots.size, choose_offset()), overflow(made.overflow.size, choose_offset());
    fault = {};
    if (ibp_cuda_encode_rows(&t, data.data, slots.out, overflow.out, &fault, nullptr) != IBP_OK)
        complain("hostile words: not encoded");
}

/* Arguments that contradict each other are refused before a launch. */
/* Counts bits, and hits of masks, in whole rows that end where their array ends. */
void check_counts(const Made &made)
{
    const ibp_codebook &cb = made.table.codebook;
    const size_t num_rows = made.data.size / cb.row_bytes;
    Array<uint8_t> data(num_rows * cb.row_bytes, choose_offset());
    if (num_rows != 0) memcpy(data.data, made.data.data, data.size);
    const auto compare_counts = [](const Array<uint64_t> &counts, const Array<uint64_t> &wanted, const char *what) {
        for (size_t i = 0; i < counts.size; i++)
            if (counts.data[i] != wanted.data[i]) {
                complain("%s: count %zu is %llu, not %llu", what, i, (unsigned long long)counts.data[i],
                         (unsigned long long)wanted.data[i]);
                break;
            }
    };
    Array<uint64_t> bits(8 * cb.row_bytes), wanted_bits(bits.size);
    for (size_t i = 0; i < bits.size; i++) bits.data[i] = wanted_bits.data[i] = i;
    if (ibp_cuda_count_bits(data.data, num_rows, cb.row_bytes, bits.data, nullptr) != IBP_OK ||
        ibp_count_bits(data.data, num_rows, cb.row_bytes, wanted_bits.data) != IBP_OK)
        complain("bits could not be counted");
    compare_counts(bits, wanted_bits, "bits");
    if (cb.scheme != IBP_SCHEME_IBP) return;
    Array<uint64_t> hits((cb.row_bytes + cb.chunk_bytes - 1) / cb.chunk_bytes), wanted_hits(hits.size);
    for (size_t i = 0; i < hits.size; i++) hits.data[i] = wanted_hits.data[i] = i;
    if (ibp_cuda_count_hits(&cb, data.data, num_rows, hits.data, nullptr) != IBP_OK ||
        ibp_count_hits(&cb, data.data, num_rows, wanted_hits.data) != IBP_OK)
        complain("hits could not be counted");
    compare_counts(hits, wanted_hits, "hits");
}

void check_refusals()
{
    description = "refusals";
    const auto expect = [](const char *what, ibp_status status) {
        if (status != IBP_INVALID_ARGUMENT) complain("%s: status %d", what, status);
    };
    uint8_t data[64] = {}, out[64];
    uint16_t lengths[4] = {};
    int64_t id = 0;
    ibp_fault fault = {};
    ibp_table good = {};
    good.num_items = 4, good.item_bytes = 16, good.slots = data, good.slots_bytes = sizeof data, good.slot_bytes = 16,
    good.codebook.row_bytes = 16;
    const ibp_ids one = {&id, 1, sizeof id, nullptr, 0};
    if (ibp_cuda_decode_bytes(&good, 0, 64, out, &fault, 0, nullptr) != IBP_OK) complain("a good table is refused");
    const auto refuse = [&](const char *what, const ibp_table &t) {
        expect(what, ibp_cuda_decode_bytes(&t, 0, 64, out, &fault, 0, nullptr));
        expect(what, ibp_cuda_gather_items(&t, &one, out, &fault, 0, nullptr));
    };
    ibp_table bad = good;
    bad.lengths = lengths, refuse("raw with lengths", bad);
    expect("raw with lengths", ibp_cuda_encode_rows(&bad, data, out, nullptr, &fault, nullptr));
    bad = good, bad.codebook.scheme = static_cast<ibp_scheme>(7), refuse("no scheme", bad);
    expect("no scheme", ibp_cuda_encode_rows(&bad, data, out, nullptr, &fault, nullptr));
    expect("no scheme", ibp_cuda_measure_rows(&bad.codebook, data, 64, lengths, nullptr));
    expect("raw rows measured", ibp_cuda_measure_rows(&good.codebook, data, 64, lengths, nullptr));
    bad = good, bad.codebook.row_bytes = 0, refuse("rows of no bytes", bad);
    bad = good, bad.slots = nullptr, refuse("no slots", bad);
    bad = good, bad.num_items = INT64_MAX, refuse("too many items", bad);
    bad = good, bad.codebook.scheme = IBP_SCHEME_PLANES, bad.codebook.planes.element_bytes = 3,
    refuse("elements of 3 bytes", bad);
    expect("no output", ibp_cuda_decode_bytes(&good, 0, 64, nullptr, &fault, 0, nullptr));
    expect("no fault", ibp_cuda_decode_bytes(&good, 0, 64, out, nullptr, 0, nullptr));
    expect("bytes past the end", ibp_cuda_decode_bytes(&good, 0, 65, out, &fault, 0, nullptr));
    ibp_ids ids = one;
    ids.id_bytes = 2, expect("ids of 2 bytes", ibp_cuda_gather_items(&good, &ids, out, &fault, 0, nullptr));
    ids = one, ids.data = nullptr, expect("no ids", ibp_cuda_gather_items(&good, &ids, out, &fault, 0, nullptr));
    ids = one, ids.count = -1, expect("-1 ids", ibp_cuda_gather_items(&good, &ids, out, &fault, 0, nullptr));
    expect("no list of tables", ibp_cuda_gather_tables(nullptr, 1, 0, nullptr));
    expect("-1 tables", ibp_cuda_gather_tables(nullptr, -1, 0, nullptr));
    if (ibp_cuda_gather_tables(nullptr, 0, 0, nullptr) != IBP_OK) complain("an empty list is refused");
    expect("no data", ibp_cuda_encode_rows(&good, nullptr, out, nullptr, &fault, nullptr));
    expect("no slots", ibp_cuda_encode_rows(&good, data, nullptr, nullptr, &fault, nullptr));
    ibp_place place = {};
    place.table = good, place.slots = out;
    ibp_row_source source = {};
    source.data = data, source.num_rows = 1;
    expect("no place", ibp_cuda_encode_into(nullptr, &source, nullptr, 0, &fault, 0, nullptr));
    expect("no source", ibp_cuda_encode_into(&place, nullptr, nullptr, 0, &fault, 0, nullptr));
    place.is_new = 1;
    expect("ids of new rows", ibp_cuda_encode_into(&place, &source, &id, 0, &fault, 0, nullptr));
    expect("no table", ibp_cuda_move_parts(nullptr, &place, out, nullptr));
    bad = good, bad.overflow_bytes = 32, expect("no index", ibp_cuda_move_parts(&bad, &place, out, nullptr));
    num_wrong += is_wrong;
}

#include "emulated_cache.h"
#include "emulated_bags.h"

/* @return whether the description of the case has the filter. If not, no table is made, which takes longest. */
bool run_case(uint64_t seed, long number, const char *filter)
{
    generator.seed(seed * 1000003 + static_cast<uint64_t>(number));
    simt::seed(seed * 1000003 + static_cast<uint64_t>(number));
    static const char *const schemes[] = {"raw",   "ibp",   "ibp",    "ibp",    "dense",  "dense", "dense",
                                          "dense", "dense", "listed", "listed", "listed", "fast",  "fast"};
    const std::string scheme = schemes[below(14)];
    description = "case " + std::to_string(number) + " of seed " + std::to_string(seed) + ": " + scheme;
    Codebook book = make_codebook(scheme);
    if (description.find(filter) == std::string::npos) return false;
    Made made = make_table(scheme, std::move(book));
    const bool corrupts = chance(40), cuts = chance(8);
    description += corrupts ? " corrupt" : cuts ? " block" : " good";
    if (corrupts)
        corrupt(made);
    else if (cuts)
        cut_block(made);
    is_wrong = false;
    const itimerval limit = {{0, 0}, {120, 0}}; /* of the processor: other programs may keep it busy */
    setitimer(ITIMER_PROF, &limit, nullptr);
    check_decode(made, true);
    check_decode(made, false);
    check_gather<int32_t>(made, chance(20));
    check_gather<int64_t>(made, chance(20));
    if (!cuts) check_cache(made);
    for (int i = 0; i < 3; i++) check_bags(made, chance(20), !cuts && chance(40));
    if (!corrupts && !cuts) check_encode(made), check_encode_into(made), check_counts(made);
    check_device_rows(made);
    const bool is_hostile = !cuts && chance(25);
    if (is_hostile) check_hostile_words(made);
    if (!is_hostile) check_together(made);
    num_wrong += is_wrong;
    if (!corrupts && !cuts && !is_hostile) before.push_back(std::move(made));
    return true;
}

} // namespace

namespace ibp {

ibp_status check_cuda(cudaError_t error) { return error == cudaSuccess ? IBP_OK : IBP_CUDA_ERROR; }

/* A device so small that its blocks take several jobs one after the other. */
ibp_status read_device(DeviceSizes *sizes)
{
    *sizes = {0, 2, 95 << 10, 96 << 10};
    return IBP_OK;
}

ibp_status prepare(const void *kernel, bool *is_of_90)
{
    kernels.insert(kernel);
    if (is_of_90 != nullptr) *is_of_90 = true;
    return IBP_OK;
}

/* Rows are gathered right either way. */
bool is_host_memory(const void *) { return chance(50); }

/* As in device.cu, of a GPU so small that groups take several jobs one after the other. */
ibp_status plan_groups(const void *kernel, uint32_t most_threads, uint32_t block_bytes, uint32_t group_bytes,
                       uint32_t group_threads, int64_t num_jobs, int max_sms, Launch *launch)
{
    const uint32_t unit = std::max(group_threads, kWarp), groups_a_unit = unit / group_threads,
                   unit_bytes = groups_a_unit * group_bytes;
    const auto few = [] { return chance(50) ? int64_t{1} : 1 + static_cast<int64_t>(below(3)); };
    const int64_t sms = max_sms > 0 ? std::min<int64_t>(max_sms, few()) : few();
    const int64_t fitting = unit_bytes ? ((226 << 10) - int64_t{block_bytes}) / unit_bytes : most_threads;
    const int64_t units = (num_jobs + groups_a_unit - 1) / groups_a_unit, an_sm = (units + sms - 1) / sms;
    const int64_t a_block = std::min({fitting, int64_t{most_threads / unit}, an_sm, few()});
    if (a_block < 1) return IBP_INVALID_ARGUMENT;
    kernels.insert(kernel);
    *launch = {static_cast<uint32_t>(std::min<int64_t>((units + a_block - 1) / a_block, sms)),
               static_cast<uint32_t>(a_block * unit), static_cast<uint32_t>(block_bytes + a_block * unit_bytes)};
    return IBP_OK;
}

} // namespace ibp

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], nullptr, 10) : 1;
    const long num_cases = count > 2 ? atol(arguments[2]) : 300;
    const char *const filter = count > 3 ? arguments[3] : "";
    signal(SIGPROF, on_signal);
    signal(SIGABRT, on_signal);
    long num_run = 0;
    check_refusals();
    for (long number = 0; num_run < num_cases && number < 1000 * num_cases; number++)
        num_run += run_case(seed, number, filter);
    printf("%ld cases, %ld wrong, %zu kernels\n", num_run, num_wrong, kernels.size());
    return num_wrong != 0;
}
