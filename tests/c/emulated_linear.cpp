/* emulated_linear.cpp - products of vectors with coded matrices by the kernel of csrc/cuda/linear/linear.cu, lane by
 * lane, against products of the matrix that was coded; and with lists of escapes that are damaged, which must do no
 * harm. */
#include "internal/ibp_internal.h"

#include "cuda/floats.cuh"
#include "cuda/launch.cuh"

#include <cstdio>
#include <memory>
#include <random>

namespace {

std::mt19937_64 generator;
long num_wrong = 0;

uint64_t below(uint64_t bound) { return generator() % bound; }
bool chance(uint32_t percent) { return below(100) < percent; }
template <class T> T pick(std::initializer_list<T> from) { return from.begin()[below(from.size())]; }

constexpr uint32_t kMantissaBits = 7, kInfinite = 0xff; /* of BF16: the exponent */
constexpr uint16_t kResidualMask = 0x807f, kOne = 0x3f80;

uint16_t bits_of(uint32_t exponent) { return static_cast<uint16_t>(exponent << kMantissaBits); }
uint32_t exponent_of(uint16_t bits) { return (bits & 0x7fffu) >> kMantissaBits; }
double to_double(uint16_t bits) { return ibp::float_of_bfloat16(bits); }
uint32_t coded_bytes(uint32_t columns) { return columns / 2 * 3; }

/* Bytes aligned to 128 whose ends the address sanitizer knows. */
struct Bytes {
    uint8_t *data;
    size_t size;

    explicit Bytes(size_t count) : data(nullptr), size(count)
    {
        if (posix_memalign(reinterpret_cast<void **>(&data), 128, count ? count : 1) != 0) abort();
        memset(data, 0xA5, count);
    }
    Bytes(const Bytes &) = delete;
    ~Bytes() { free(data); }
    uint16_t *halves() { return reinterpret_cast<uint16_t *>(data); }
};

/* What the rows of a matrix are like. Those with many escapes and default rows are irregular. */
enum Kind { kNone, kFew, kSome, kMany, kDefault };

struct Matrix {
    uint32_t rows, columns, first_symbol;
    Bytes weights;
    ibp_codebook codebook = {};

    Matrix(uint32_t num_rows, uint32_t num_columns)
        : rows(num_rows), columns(num_columns), first_symbol(pick({0u, 100u, 112u, 239u})),
          weights(size_t{2} * rows * columns)
    {
        ibp_planes p = {};
        p.element_bytes = 2, p.rotate = 1, p.residual_bits = kMantissaBits + 1, p.num_planes = 1, p.digit_bits[0] = 4;
        p.consecutive = true, p.first_symbol = first_symbol, p.default_value = chance(50) ? 0 : kOne;
        if (ibp_build_planes_codebook(&p, 2 * columns, 0, &codebook) != IBP_OK) abort();
        for (uint32_t r = 0; r < rows; r++) fill(weights.halves() + size_t{r} * columns);
    }
    bool is_escaped(uint16_t weight) const { return exponent_of(weight) - first_symbol >= 15u; }
    uint16_t taken(uint16_t weight) const /* what an escape is multiplied as at first */
    {
        return static_cast<uint16_t>((weight & kResidualMask) | bits_of(first_symbol + 15));
    }
    /* Without infinity and NaN, of which 0 times would be no zero. */
    void fill(uint16_t *row)
    {
        static const uint32_t percent_escaped[] = {0, 0, 2, 50};
        const Kind kind = pick({kNone, kFew, kFew, kSome, kSome, kMany, kDefault});
        for (uint32_t k = 0; k < columns; k++) {
            row[k] = static_cast<uint16_t>(codebook.planes.default_value);
            if (kind == kDefault) continue;
            const bool escaped = chance(percent_escaped[kind]) || (kind == kFew && below(columns) == 0);
            const uint32_t most = kInfinite - 1u;
            const auto exponent = static_cast<uint32_t>(escaped ? below(most + 1u) : first_symbol + below(15));
            row[k] = static_cast<uint16_t>((generator() & kResidualMask) | bits_of(std::min(exponent, most)));
        }
    }
};

struct Coded {
    Bytes lengths, bases, slots, overflow;
    ibp_table table = {};

    static uint32_t slots_for(const Matrix &m)
    {
        const uint32_t least = coded_bytes(m.columns);
        return std::min(2 * m.columns, pick({(least + 31) / 32 * 32, (least + 31) / 32 * 32 + 32, 2 * m.columns}));
    }
    static int64_t measured(const Matrix &m, uint32_t slot_bytes, Bytes *lengths, Bytes *bases)
    {
        std::vector<uint8_t> scratch(ibp_scratch_bytes(2 * m.columns));
        int64_t overflow_bytes = 0;
        const auto num_bytes = static_cast<int64_t>(m.weights.size);
        if (ibp_measure_rows(&m.codebook, m.weights.data, num_bytes, lengths->halves(), scratch.data(),
                             scratch.size()) != IBP_OK ||
            ibp_index_rows(lengths->halves(), num_bytes, 2 * m.columns, slot_bytes,
                           reinterpret_cast<uint64_t *>(bases->data), &overflow_bytes) != IBP_OK)
            abort();
        return overflow_bytes;
    }
    explicit Coded(const Matrix &m) : Coded(m, slots_for(m)) {}
    Coded(const Matrix &m, uint32_t slot_bytes)
        : lengths(size_t{2} * m.rows), bases(size_t{8} * ((m.rows + 31) / 32)), slots(size_t{slot_bytes} * m.rows),
          overflow(static_cast<size_t>(measured(m, slot_bytes, &lengths, &bases)))
    {
        table.num_items = m.rows, table.item_bytes = 2 * m.columns, table.codebook = m.codebook;
        table.slots = slots.data, table.slots_bytes = static_cast<int64_t>(slots.size), table.slot_bytes = slot_bytes;
        table.overflow = overflow.data, table.overflow_bytes = static_cast<int64_t>(overflow.size);
        table.lengths = lengths.halves(), table.bases = reinterpret_cast<uint64_t *>(bases.data);
        std::vector<uint8_t> scratch(ibp_scratch_bytes(2 * m.columns));
        ibp_fault fault = {};
        if (ibp_encode_rows(&table, m.weights.data, 0, m.rows, slots.data, overflow.data, scratch.data(),
                            scratch.size(), &fault) != IBP_OK)
            abort();
    }
};

/* The escapes of the regular rows of a matrix. */
struct Listed {
    std::vector<uint32_t> starts = {0};
    std::vector<ibp_escape> entries;
    std::vector<bool> regular;

    explicit Listed(const Matrix &m, const Coded &coded)
    {
        for (uint32_t r = 0; r < m.rows; r++) {
            const uint32_t length = coded.table.lengths[r];
            regular.push_back(length >= coded_bytes(m.columns) && length < 2 * m.columns);
            const auto *const row = reinterpret_cast<const uint16_t *>(m.weights.data) + size_t{r} * m.columns;
            for (uint32_t k = 0; regular[r] && k < m.columns; k++)
                if (m.is_escaped(row[k])) entries.push_back({k, row[k], m.taken(row[k])});
            starts.push_back(static_cast<uint32_t>(entries.size()));
        }
    }
    ibp_digit_matrix of(const Matrix &m, const Coded &coded) const
    {
        const ibp_table &t = coded.table;
        return {t.slots,
                t.slots_bytes,
                t.slot_bytes,
                m.first_symbol,
                m.rows,
                m.columns,
                static_cast<uint32_t>(entries.size()),
                starts.data(),
                entries.data()};
    }
    void damage()
    {
        for (uint64_t i = 1 + below(3); i != 0; i--) {
            starts[below(starts.size())] = static_cast<uint32_t>(pick({below(1ull << 32), below(entries.size() + 1)}));
            if (!entries.empty()) entries[below(entries.size())].column = static_cast<uint32_t>(generator());
        }
    }
};

void expect(bool right, const char *what, uint64_t number)
{
    if (right) return;
    num_wrong++;
    printf("case %llu: %s\n", static_cast<unsigned long long>(number), what);
}

/* y of one vector and row; in *scale the sum of the finite products' magnitudes, as they are and as escapes are
 * multiplied at first, which bounds the error. */
double product(const Matrix &m, uint32_t row, const uint16_t *x, double *scale)
{
    double sum = *scale = 0;
    const auto *const weights = reinterpret_cast<const uint16_t *>(m.weights.data) + size_t{row} * m.columns;
    for (uint32_t k = 0; k < m.columns; k++) {
        const double weight = to_double(weights[k]), factor = to_double(x[k]);
        const double taken = m.is_escaped(weights[k]) ? std::fabs(to_double(m.taken(weights[k]))) : 0;
        sum += weight * factor;
        if (std::isfinite(factor)) *scale += std::fabs(factor) * (std::fabs(weight) + taken);
    }
    return sum;
}

/* What vectors are like: of ordinary numbers; with a single one; with infinity or NaN among them. */
enum Vectors { kOrdinary, kOneHot, kNotFinite };

void fill_vectors(Vectors kind, uint32_t count, uint32_t columns, Bytes *x)
{
    const uint16_t infinite = bits_of(kInfinite);
    for (size_t i = 0; i < x->size / 2; i++) /* of 0.5 to 2 */
        x->halves()[i] = kind == kOneHot
                             ? 0
                             : static_cast<uint16_t>((generator() & kResidualMask) |
                                                     bits_of(kInfinite / 2 - static_cast<uint32_t>(below(2))));
    for (uint32_t v = 0; v < count && kind == kOneHot; v++) x->halves()[v * columns + below(columns)] = kOne;
    for (uint32_t i = 0; i < 4 * count && kind == kNotFinite; i++)
        x->halves()[below(x->size / 2)] =
            pick<uint16_t>({infinite, static_cast<uint16_t>(0x8000u | infinite), 0x7fc0, 0, 0}); /* 0x7fc0: NaN */
}

bool is_right(double got, double wanted, double bound)
{
    if (std::isnan(wanted)) return std::isnan(got);
    if (std::isinf(wanted)) return got == wanted;
    return std::fabs(got - wanted) <= bound;
}

/* What ibp_cuda_linear multiplies, and where the results go. */
struct Operand {
    Matrix m;
    Coded coded;
    Listed listed;
    Bytes bias;
    std::unique_ptr<Bytes> y;
    bool has_bias = chance(30);

    Operand(uint32_t rows, uint32_t columns) : m(rows, columns), coded(m), listed(m, coded), bias(size_t{2} * rows)
    {
        for (uint32_t r = 0; r < rows; r++)
            bias.halves()[r] = static_cast<uint16_t>((chance(50) ? 0x8000u : 0u) | kOne);
    }
    ibp_product product(uint32_t vectors)
    {
        y = std::make_unique<Bytes>(size_t{2} * vectors * m.rows);
        return {listed.of(m, coded), has_bias ? bias.halves() : nullptr, y->halves()};
    }
};
using Operands = std::vector<std::unique_ptr<Operand>>;

ibp_status multiply(const std::vector<ibp_product> &products, const Bytes &x, int64_t vectors)
{
    const auto count = static_cast<int64_t>(products.size());
    Bytes workspace(static_cast<size_t>(ibp_cuda_linear_bytes(products.data(), count, vectors)));
    return ibp_cuda_linear(products.data(), count, reinterpret_cast<const uint16_t *>(x.data), vectors, workspace.data,
                           nullptr);
}

/* A vector's result has the same bits without the others, and without other matrices. */
void check_each(Operand &operand, const Bytes &x, uint32_t vectors, uint64_t number)
{
    if (vectors == 0 || vectors > IBP_MOST_INVARIANT) return;
    const uint32_t rows = operand.m.rows, columns = operand.m.columns, vector = static_cast<uint32_t>(below(vectors));
    const std::unique_ptr<Bytes> together = std::move(operand.y);
    Bytes own(size_t{2} * columns);
    memcpy(own.data, x.data + size_t{2} * vector * columns, own.size);
    expect(multiply({operand.product(1)}, own, 1) == IBP_OK, "refused alone", number);
    expect(memcmp(operand.y->data, together->data + size_t{2} * vector * rows, size_t{2} * rows) == 0,
           "other bits alone", number);
    operand.y = std::make_unique<Bytes>(together->size);
    memcpy(operand.y->data, together->data, together->size);
}

void check_products(const Operand &operand, Bytes &x, uint32_t vectors, bool is_one_hot, uint64_t number)
{
    const Matrix &m = operand.m;
    for (uint32_t v = 0; v < vectors; v++)
        for (uint32_t r = 0; r < m.rows; r++) {
            if (!operand.listed.regular[r]) continue;
            double scale, wanted = product(m, r, x.halves() + size_t{v} * m.columns, &scale);
            if (operand.has_bias) wanted += to_double(reinterpret_cast<uint16_t *>(operand.bias.data)[r]);
            if (scale > 1e30) continue; /* sums of float may overflow */
            const double got = to_double(operand.y->halves()[size_t{v} * m.rows + r]), relative = 1.0 / 256,
                         bound =
                             is_one_hot && !operand.has_bias ? 0 : std::fabs(wanted) * relative + scale * 1e-5 + 1e-30;
            expect(is_right(got, wanted, bound), "a wrong product", number);
        }
}

/* The weights of regular rows, with a list that is right; with a damaged one nothing else is touched. */
void check_weights(Operand &operand, bool is_damaged, uint64_t number)
{
    const Matrix &m = operand.m;
    Bytes weights(m.weights.size);
    const ibp_digit_matrix matrix = operand.listed.of(m, operand.coded);
    expect(ibp_cuda_decode_matrix(&matrix, weights.halves(), nullptr) == IBP_OK, "a matrix is refused", number);
    const size_t row_bytes = size_t{2} * m.columns;
    for (uint32_t r = 0; r < m.rows && !is_damaged; r++)
        expect(!operand.listed.regular[r] ||
                   memcmp(weights.data + r * row_bytes, m.weights.data + r * row_bytes, row_bytes) == 0,
               "other weights", number);
}

void check(Operands &operands, uint32_t vectors, uint64_t number)
{
    const Vectors kind = pick({kOrdinary, kOneHot, kNotFinite});
    const bool is_damaged = chance(20);
    const uint32_t columns = operands[0]->m.columns;
    Bytes x(size_t{2} * vectors * columns);
    fill_vectors(kind, vectors, columns, &x);
    std::vector<ibp_product> products;
    for (auto &operand : operands) {
        if (is_damaged) operand->listed.damage();
        products.push_back(operand->product(vectors));
    }
    const ibp_status status = multiply(products, x, vectors);
    expect(status == IBP_OK, "refused", number);
    for (auto &operand : operands) {
        check_each(*operand, x, vectors, number);
        check_weights(*operand, is_damaged, number);
        if (status == IBP_OK && !is_damaged) check_products(*operand, x, vectors, kind == kOneHot, number);
    }
}

/* Groups of vectors, each multiplied by a matrix of a stack, give the bits of that matrix alone; and groups that are
 * out of range do no harm. */
void check_groups(uint64_t number)
{
    const auto rows = 16 * (1 + static_cast<uint32_t>(below(3))), matrices = 1 + static_cast<uint32_t>(below(5)),
               columns = 32 * (1 + static_cast<uint32_t>(below(1280 / 32))), vectors = static_cast<uint32_t>(below(20));
    Operand stack(rows * matrices, columns);
    stack.has_bias = false;
    Bytes x(size_t{2} * vectors * columns), y(size_t{2} * vectors * rows), before(y.size);
    fill_vectors(kOrdinary, vectors, columns, &x);
    const uint32_t sharing = vectors != 0 && vectors % 2 == 0 && chance(50) ? 2 : 1;
    const bool is_ordered = sharing == 2 || chance(50);
    std::vector<int64_t> order(vectors);
    for (uint32_t v = 0; v < vectors; v++) order[v] = v;
    for (uint32_t v = vectors; is_ordered && v > 1; v--) std::swap(order[v - 1], order[below(v)]);
    Bytes shared(x.size / sharing);
    memcpy(shared.data, x.data, shared.size);
    const auto row_of = [&](uint32_t v) { return static_cast<size_t>(order[v]) / sharing; };
    std::vector<ibp_vector_group> groups;
    uint32_t first = 0;
    while (first < vectors && !chance(10)) {
        const uint32_t count = std::min(vectors - first, 1 + static_cast<uint32_t>(below(8)));
        groups.push_back({static_cast<uint32_t>(below(matrices)), first, count});
        first += count;
    }
    const size_t used = groups.size();
    if (chance(50)) groups.push_back(pick<ibp_vector_group>({{0, 0, 0}, {matrices, 0, 1}, {0, vectors, 1}, {0, 0, 9}}));
    for (uint64_t i = below(70); i != 0 && groups.size() != used; i--) groups.push_back({0, 0, 1});
    Bytes list(groups.size() * sizeof(ibp_vector_group));
    if (!groups.empty()) memcpy(list.data, groups.data(), list.size);
    const ibp_digit_matrix matrix = stack.listed.of(stack.m, stack.coded);
    const ibp_status status = ibp_cuda_linear_groups(
        &matrix, rows, reinterpret_cast<const ibp_vector_group *>(list.data), static_cast<int64_t>(groups.size()),
        is_ordered ? order.data() : nullptr, sharing, shared.halves(), vectors, y.halves(), nullptr);
    expect(status == IBP_OK, "groups are refused", number);
    for (uint32_t v = first; v < vectors; v++)
        expect(memcmp(y.halves() + static_cast<size_t>(order[v]) * rows, before.data, size_t{2} * rows) == 0,
               "a vector in no group has a result", number);
    for (size_t i = 0; i < used; i++) {
        const ibp_vector_group group = groups[i];
        Bytes own(size_t{2} * group.count * columns);
        for (uint32_t v = 0; v < group.count; v++)
            memcpy(own.halves() + size_t{v} * columns, shared.halves() + row_of(group.first + v) * columns,
                   size_t{2} * columns);
        expect(multiply({stack.product(group.count)}, own, group.count) == IBP_OK, "refused alone", number);
        for (uint32_t v = 0; v < group.count; v++)
            expect(memcmp(stack.y->halves() + size_t{v} * stack.m.rows + group.matrix * rows,
                          y.halves() + static_cast<size_t>(order[group.first + v]) * rows, size_t{2} * rows) == 0,
                   "other bits in a group", number);
    }
}

/* Of the kernel, against its twin on the CPU. */
template <class Id> void check_order(uint64_t number)
{
    const auto count = static_cast<int64_t>(pick({below(9), below(200), uint64_t{IBP_MOST_GROUPED}})),
               matrices = static_cast<int64_t>(pick({below(3), below(300), uint64_t{IBP_MOST_STACKED}})),
               places = std::min(count, matrices) + count / IBP_MOST_OF_A_GROUP + static_cast<int64_t>(below(3));
    const auto used = static_cast<uint64_t>(chance(50) ? matrices + 4 : 5);
    std::vector<Id> ids(static_cast<size_t>(count));
    for (Id &id : ids) id = static_cast<Id>(static_cast<int64_t>(below(used)) - 2);
    const ibp_ids given = {.data = ids.data(), .count = count, .id_bytes = sizeof(Id)};
    std::vector<int64_t> order(ids.size(), -1), wanted(ids.size(), -1);
    std::vector<ibp_vector_group> groups(static_cast<size_t>(places), {7, 7, 7}), right(groups);
    expect(ibp_cuda_group_vectors(&given, matrices, order.data(), groups.data(), places, nullptr) == IBP_OK,
           "vectors are refused", number);
    expect(ibp_group_vectors(&given, matrices, wanted.data(), right.data(), places) == IBP_OK, "on the CPU", number);
    expect(order == wanted, "vectors in another order", number);
    expect(places == 0 || memcmp(groups.data(), right.data(), sizeof right[0] * right.size()) == 0, "other groups",
           number);
}

/* Likewise. */
template <class Id> void check_list(uint64_t number)
{
    const auto count = static_cast<int64_t>(pick({below(9), below(200), below(3000)})),
               matrices = static_cast<int64_t>(pick({below(3), below(300), uint64_t{IBP_MOST_STACKED}})),
               num_slots = std::min(count, matrices + 1) + static_cast<int64_t>(below(3));
    const auto used = static_cast<uint64_t>(chance(50) ? matrices + 4 : 5);
    std::vector<Id> ids(static_cast<size_t>(count));
    for (Id &id : ids) id = static_cast<Id>(static_cast<int64_t>(below(used)) - 2);
    const ibp_ids given = {.data = ids.data(), .count = count, .id_bytes = sizeof(Id)};
    ibp_listed listed = {};
    listed.num_slots = num_slots, listed.num_stacks = static_cast<uint32_t>(below(4));
    int64_t total = count + num_slots;
    for (uint32_t i = 0; i < listed.num_stacks; i++) {
        listed.num_rows[i] = 1 + static_cast<int64_t>(below(pick({2u, 40u})));
        total += num_slots * listed.num_rows[i];
    }
    std::vector<int64_t> found(static_cast<size_t>(total), -7), wanted(found);
    uint64_t spare[2] = {};
    const auto to = [&](std::vector<int64_t> &numbers, uint64_t *num_spare) {
        listed.slots = numbers.data(), listed.held = listed.slots + count, listed.rows = listed.held + num_slots;
        listed.num_spare = num_spare;
        return &listed;
    };
    expect(ibp_cuda_list_matrices(&given, matrices, to(found, spare), nullptr) == IBP_OK, "ids are refused", number);
    expect(ibp_list_matrices(&given, matrices, to(wanted, spare + 1)) == IBP_OK, "on the CPU", number);
    expect(found == wanted && spare[0] == spare[1], "other matrices", number);
}

void run_case(uint64_t number)
{
    if (number % 4 == 3) {
        number % 8 == 3 ? check_order<int32_t>(number) : check_order<int64_t>(number);
        return check_groups(number);
    }
    Operands operands;
    /* Some matrices have so many tiles that a block takes three. A tile of more than 32 vectors takes long: as many
     * steps of 128 columns are enough as fill its stages twice. */
    const auto vectors = static_cast<uint32_t>(below(pick({9u, 17u, 33u, 65u, 140u})));
    const uint32_t rows = 16 + static_cast<uint32_t>(below(pick({30u, 30u, vectors > 32 ? 300u : 500u})));
    const uint32_t most = (rows >= 64 ? 384 : vectors > 64 ? 896 : vectors > 32 ? 1408 : 2304) / 32;
    const uint32_t columns = 32 * (1 + static_cast<uint32_t>(below(most)));
    operands.push_back(std::make_unique<Operand>(rows, columns));
    for (uint32_t i = pick({1u, 1u, 2u, 3u, 4u}); i > 1; i--)
        operands.push_back(std::make_unique<Operand>(16 + static_cast<uint32_t>(below(70)), columns));
    check(operands, vectors, number);
}

void check_refusals()
{
    Operand operand(20, 96), wider(20, 128);
    Bytes x(size_t{2} * 128);
    const auto refuses = [&](const std::vector<ibp_product> &products, int64_t vectors, const char *what) {
        expect(multiply(products, x, vectors) == IBP_INVALID_ARGUMENT, what, 0);
    };
    const auto refuses_matrix = [&](const char *what, const auto &change) {
        ibp_product product = operand.product(1);
        change(product.matrix);
        refuses({product}, 1, what);
        refuses({operand.product(1), product}, 1, what);
    };
    const ibp_product good = operand.product(IBP_MOST_VECTORS + 1);
    refuses({good}, IBP_MOST_VECTORS + 1, "too many vectors");
    refuses({good}, -1, "-1 vectors");
    refuses({}, 1, "no matrix");
    refuses({good, good, good, good, good}, 1, "five matrices");
    refuses({good, wider.product(1)}, 1, "matrices of different columns");
    ibp_product bad = good;
    bad.y = nullptr, refuses({bad}, 1, "nowhere to write");
    refuses_matrix("no starts", [](ibp_digit_matrix &m) { m.starts = nullptr; });
    refuses_matrix("no escapes", [](ibp_digit_matrix &m) { m.escapes = nullptr, m.num_escapes = 1; });
    refuses_matrix("symbols past a byte", [](ibp_digit_matrix &m) { m.first_symbol = 240; });
    refuses_matrix("15 rows", [](ibp_digit_matrix &m) { m.num_rows = 15; });
    refuses_matrix("a slot that ends early", [](ibp_digit_matrix &m) { m.slots_bytes -= 1; });
    refuses_matrix("columns that are no multiple of 32", [](ibp_digit_matrix &m) { m.num_columns += 16; });
    refuses_matrix("columns whose bytes 32 bits do not count",
                   [](ibp_digit_matrix &m) { m.num_columns = 0xffffffe0u; });
    refuses_matrix("slots that are not aligned", [](ibp_digit_matrix &m) { m.slots += 1; });
    refuses_matrix("no slots", [](ibp_digit_matrix &m) { m.slots = nullptr; });

    Operand stack(32, 96);
    const ibp_vector_group group = {0, 0, 1};
    ibp_product product = stack.product(1);
    int64_t sharing = 1;
    const auto refuses_groups = [&](int64_t rows, const ibp_vector_group *groups, int64_t count, int64_t vectors,
                                    const char *what) {
        expect(ibp_cuda_linear_groups(&product.matrix, rows, groups, count, nullptr, sharing, x.halves(), vectors,
                                      product.y, nullptr) == IBP_INVALID_ARGUMENT,
               what, 0);
    };
    refuses_groups(0, &group, 1, 1, "matrices without rows");
    refuses_groups(24, &group, 1, 1, "rows that are no whole strips");
    refuses_groups(48, &group, 1, 1, "a stack that has no whole matrices");
    refuses_groups(16, nullptr, 1, 1, "no groups");
    refuses_groups(16, &group, -1, 1, "-1 groups");
    refuses_groups(16, &group, INT64_MAX, 1, "too many groups");
    refuses_groups(16, &group, 1, -1, "-1 vectors in groups");
    sharing = 2, refuses_groups(16, &group, 1, 2, "shared rows without an order");
    sharing = 0, refuses_groups(16, &group, 1, 1, "rows of no vectors");
    sharing = 1;
    const auto refuses_weights = [&](uint16_t *to, const char *what) {
        expect(ibp_cuda_decode_matrix(&product.matrix, to, nullptr) == IBP_INVALID_ARGUMENT, what, 0);
    };
    refuses_weights(nullptr, "no room for weights");
    refuses_weights(stack.m.weights.halves() + 1, "room for weights that is not aligned");
    product.matrix.starts = nullptr, refuses_groups(16, &group, 1, 1, "no starts of a stack");
    refuses_weights(stack.m.weights.halves(), "no starts of a matrix");
    expect(ibp_cuda_decode_matrix(nullptr, stack.m.weights.halves(), nullptr) == IBP_INVALID_ARGUMENT, "no matrix", 0);
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
ibp_status prepare(const void *, bool *is_of_90)
{
    if (is_of_90 != nullptr) *is_of_90 = true;
    return IBP_OK;
}
} // namespace ibp

int main(int count, char **arguments)
{
    const uint64_t seed = count > 1 ? strtoull(arguments[1], nullptr, 10) : 1,
                   cases = count > 2 ? strtoull(arguments[2], nullptr, 10) : 100;
    generator.seed(seed);
    check_refusals();
    for (uint64_t i = 0; i < cases; i++) {
        generator.seed(seed * 1000003 + i);
        simt::seed(generator());
        run_case(i);
        i % 2 != 0 ? check_list<int32_t>(i) : check_list<int64_t>(i);
    }
    printf("%llu cases, %ld wrong\n", static_cast<unsigned long long>(cases), num_wrong);
    return num_wrong != 0;
}
