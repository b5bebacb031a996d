/* learn.c - learns a codebook of scheme planes from counts (FORMAT.md, section 6).
 *
 * A plan says how to code rows. It has a shape, which says which bits of an element are its symbol, and a list of digit
 * widths. It also says whether rows are listed, and whether every column has its own entries. The mean size of a row
 * under a plan follows from the frequencies of the symbols: if symbols are ranked by frequency, it is enough to know
 * for every k how many elements have a symbol of rank k or higher. These numbers are called the tails of the shape.
 *
 * Bits and columns that are the same in all rows are left out first, and default rows are not counted. If leaving bits
 * or columns out does not pay, the search is repeated with these bits or columns.
 *
 * The values are counted once, into lists that are sorted by value. The highest bits of an element, at most 16, are
 * counted in an array, or by sorting if there are few elements. If elements are wider than 16 bits, a sample of whole
 * elements is also counted, by sorting. The symbols of every shape are prefixes of the values, possibly without the
 * sign. So one pass over these counts gives the counts of a shape. Tails of plans for listed rows are computed in the
 * same way from the listed elements, and tails of plans with entries for each column from counts of some columns.
 *
 * All plans are then compared by cost: the mean size of a row in bytes, plus the row's share of the codebook. The
 * cheapest plan is not always taken: a plan that a GPU decodes fastest may cost up to 0.6 % more (see `choose`). */
#include "bits.h"
#include "checks.h"
#include "planes_layout.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    /* Prefixes of up to this many bits are counted in an array. Longer prefixes are counted by sorting a sample of the
     * elements. */
    MOST_PREFIX_BITS = 16,
    /* Largest number of entries that the digits of a list can name. */
    MOST_ENTRIES = IBP_MAX_PLANES * ((1 << IBP_MAX_DIGIT_BITS) - 1),
    /* Largest number of bits of an element. */
    MOST_BITS = 64,
    /* Number of lists of up to four digit widths: there are 4^n lists of n widths. */
    MOST_LISTS = 1 + 4 + 16 + 64 + 256,
    /* Whole elements of more than MOST_PREFIX_BITS bits are counted by sorting this many of them. For floats the number
     * is half as large, because whole floats are seldom symbols. */
    MOST_LONG = 1 << 14,
    /* If there are at most this many elements, their prefixes are sorted, too, because that is faster than clearing and
     * reading the array. */
    MOST_SORTED = 1 << 12,
    /* Plans are compared by counting about FEW_ELEMENTS elements, or about FEW_BYTES elements if elements are bytes. */
    FEW_ELEMENTS = 1 << 16,
    FEW_BYTES = 1 << 17,
    /* At least this many rows are counted, even if rows are long. */
    LEAST_ROWS = 16,
    /* Shapes with entries for each column are compared by counting up to MOST_TRIED_COLUMNS columns, and up to twice
     * TRIED_ELEMENTS elements. */
    MOST_TRIED_COLUMNS = 64,
    TRIED_ELEMENTS = 1 << 16,
    /* If every column has its own entries, they are chosen from the MOST_CHOSEN most frequent symbols of the table. */
    MOST_CHOSEN = 255,
    /* Number of bits of the hash by which symbols of more than MOST_PREFIX_BITS bits are found. */
    HASH_BITS = 16,
    /* If a sample has fewer rows, no column is taken to be constant. */
    LEAST_CONSTANT_ROWS = 64,
    /* At least this many bits of each element are coded, even if these bits are invariant, too. */
    LEAST_CODED_BITS = 2,
    /* A codebook of level fast has one plane of digits of FAST_DIGIT_BITS bits, and FAST_ENTRIES entries. */
    FAST_DIGIT_BITS = 4,
    FAST_ENTRIES = (1 << FAST_DIGIT_BITS) - 1,
    /* Largest size of a sample in bytes. Larger samples are refused. */
    MOST_SAMPLED_BYTES = 1 << 30
};

/* Plans whose cost is within this factor of the least cost count as equally good. Of these, the one that decodes
 * fastest is taken. */
static const double AS_GOOD = 1.001;
/* A plan that a GPU decodes fastest is taken if its cost is within this factor of the least. */
static const double FAST_COST = 1.006;
/* A plan with entries for each column, which a GPU decodes less fast, is taken if its cost is within this factor of the
 * least. */
static const double FAST_COLUMNS_COST = 1.003;
/* With entries for each column, further rotated shapes are tried only if the first of them costs at most this factor
 * times as much as the best shape that is not rotated. */
static const double FAR_WORSE = 1.03;
/* The best rotated shape and the best other shape are both tried on all columns if the costs of the two are within this
 * factor of each other. */
static const double WORSE = 1.01;
/* The search for entries for each column compares, for its first shape and on some columns, the cost of such entries
 * with the cost of entries for the table. It goes on only if the ratio of the two costs is at most this number. */
static const double COLUMNS_PAY = 0.9995;
/* Entries for each column are not tried if dense rows are larger than listed ones by more than this factor. */
static const double COLUMNS_GAIN = 1.25;
/* Plans for listed rows are tried only if at least this share of the elements equal the default. */
static const double LEAST_SHARE = 1.0 / 256;
/* Constant columns are left out only if at least this share of the columns are constant. A smaller share does not make
 * up for the slower decoder. */
static const double CONSTANT_SHARE = 1.0 / 8;
/* Largest allowed share of rows that lack the invariant bits and are therefore stored raw. */
static const double MOST_LACKING = 0.2;
/* A plan of level fast is taken only if its digits save at least this share of a row. */
static const double LEAST_FAST = 0.04;
/* Invariant bits are left out only if that saves at least this share of a row. */
static const double INVARIANT_SHARE = 0.01;

typedef struct value_count {
    uint64_t value;
    uint64_t count;
} value_count;

/* Counts of the distinct values of some bits, in increasing order of the values. */
typedef struct value_counts {
    value_count *items;
    size_t size;
    uint32_t bits;
    double scale; /* number of elements that each counted element stands for */
} value_counts;

/* The symbol of an element: its highest bits, or, if it is rotated, the bits that follow the highest one. */
typedef struct shape {
    uint32_t rotate, symbol_bits;
} shape;

typedef struct digit_list {
    uint32_t num_planes, num_entries;
    uint8_t widths[IBP_MAX_PLANES];
    bool is_fast; /* whether GPUs have a fast decoder for dense rows with these digits and short symbols
                     (csrc/cuda/decode/decode_pairs.cuh) */
} digit_list;

/* Which elements rows code. DENSE: all elements. LISTED: the elements that differ from a default. LISTED_SIGNED: the
 * elements that differ from the default in any bit other than the highest. */
typedef enum listing { DENSE, LISTED, LISTED_SIGNED, NUM_LISTINGS } listing;

/* Counts of the elements that rows code. */
typedef struct values {
    value_counts prefixes; /* counts of prefixes of up to MOST_PREFIX_BITS bits */
    value_counts whole;    /* counts of whole elements, if these have more than MOST_PREFIX_BITS bits */
    double total;          /* number of elements */
    double num_rows;       /* number of rows that have these elements */
    double extra_bytes;    /* mean number of bytes that a row takes besides the values */
    uint64_t closed_value; /* the value of all listed elements of closed rows, which are not counted */
    bool has_uniform;      /* whether in some row all listed elements are equal */
    listing as;            /* which elements are counted */
} values;

/* A plan of how to code rows, and its cost: the mean size of a row in bytes, including the row's share of the
 * codebook. */
typedef struct plan {
    shape shape;
    listing as;
    uint32_t sets; /* number of sets of entries: one for the table, or one for each column */
    bool consecutive;
    uint64_t first_symbol;
    const digit_list *digits;
    double num_values; /* mean number of elements that a row codes */
    double cost;
} plan;

/* The plans that may be chosen. Plans have kinds: 0 for dense rows with entries for the table, 1 for dense rows with
 * entries for each column, 1 + LISTED and 1 + LISTED_SIGNED for listed rows. */
typedef struct candidates {
    double least;                                      /* least cost of any plan */
    plan simple[NUM_LISTINGS + 1][IBP_MAX_PLANES + 1]; /* the cheapest plan of each kind and number of planes */
    /* The cheapest plans of kinds 0 and 1 with fast digits and short symbols. */
    plan fast[2];
} candidates;

/* The state of a search: facts about the table and its sample. Values of elements do not include the invariant bits.
 * width: number of bits of such a value. columns: number of live columns. num_rows: number of rows of the sample.
 * num_counted: number of rows that are counted, one in every `step` rows. num_loaded: number of counted rows that are
 * in `elements`. num_defaults: number of default rows among the counted rows. lacking: share of the rows that are
 * stored raw because they lack the invariant bits. */
typedef struct search {
    const uint8_t *rows;
    size_t num_rows, step, num_counted;
    size_t num_loaded, num_defaults;
    uint64_t default_row; /* the value of all elements of default rows */
    uint32_t element_bytes, width, row_bytes, columns;
    uint32_t invariant_bits;
    uint64_t invariant_value;
    const uint16_t *live_columns; /* NULL if all columns are live */
    uint32_t exponent_bits;
    double table_rows, lacking;
    uint64_t default_value;
    bool is_whole; /* whether the sample has all rows of the table */
    digit_list lists[MOST_LISTS];
} search;

/* The arrays for counting. `elements` and `listed` have room for all elements of the counted rows; `longs` and
 * `other_longs` are for sorting. Each listing has separate counts. */
typedef struct room {
    uint64_t *elements, *listed, *longs, *other_longs;
    size_t num_long; /* largest number of whole elements that are counted */
    uint32_t *bins;
    value_count *prefixes[NUM_LISTINGS], *whole[NUM_LISTINGS], *folded, *without_sign;
    uint32_t *column_counts; /* for each column the counts of the dictionary's symbols */
    uint8_t *ranks;          /* for each column the ranks of the dictionary's symbols */
    uint8_t *places;         /* index in the dictionary of each symbol, or of each hash of a symbol */
    uint32_t *offsets;       /* offset of each column in a row, in bytes */
} room;

/* ---- shapes and digits ------------------------------------------------------------------------------------------- */

/* Returns whether to try prefixes of `prefix` bits as symbols, without their highest bit if rotate is 1. For integers,
 * and for floats of 8 bits, all prefixes are tried. For longer floats, empty prefixes, whole elements and prefixes
 * about as long as the exponent are tried. Only prefixes of floats are rotated. */
static bool is_tried(const search *s, uint32_t prefix, uint32_t rotate)
{
    const uint32_t least = s->exponent_bits > 3 ? s->exponent_bits - 2 : 1;
    const bool is_near = s->width <= 8 || (prefix > least && prefix <= MOST_PREFIX_BITS);
    if (rotate) return s->exponent_bits && prefix > 1 && is_near;
    return s->exponent_bits == 0 || is_near || prefix == 0 || prefix == s->width;
}

/* Makes all lists of digit widths, in the order of the number of planes. Lists 4 * i + 1 to 4 * i + 4 are list i with
 * one more digit width. */
static void list_digits(digit_list *lists)
{
    lists[0] = (digit_list){.is_fast = true};
    for (uint32_t i = 1; i < MOST_LISTS; i++) {
        const uint32_t bits = (i - 1) % IBP_MAX_DIGIT_BITS + 1;
        digit_list *const longer = &lists[i];
        *longer = lists[(i - 1) / IBP_MAX_DIGIT_BITS];
        longer->widths[longer->num_planes++] = (uint8_t)bits;
        longer->num_entries += (1u << bits) - 1;
        longer->is_fast &= bits == 2;
    }
}

/* ---- counts ------------------------------------------------------------------------------------------------------ */

/* Sorts values with a radix sort, which takes one byte at a time and alternates between two arrays. Returns the array
 * that holds the result. */
static uint64_t *sort_values(uint64_t *from, uint64_t *other, size_t count, uint32_t width)
{
    for (uint32_t shift = 0; shift < width; shift += 8) {
        size_t starts[257] = {0};
        for (size_t i = 0; i < count; i++) starts[1 + (from[i] >> shift & 0xffu)]++;
        if (count == 0 || starts[1 + (from[0] >> shift & 0xffu)] == count) continue; /* all have the same byte */
        for (uint32_t b = 0; b < 256; b++) starts[b + 1] += starts[b];
        for (size_t i = 0; i < count; i++) other[starts[from[i] >> shift & 0xffu]++] = from[i];
        uint64_t *const sorted = other;
        other = from, from = sorted;
    }
    return from;
}

/* Counts sorted values. Returns the number of distinct values. */
static size_t compact(const uint64_t *sorted, size_t count, value_count *items)
{
    size_t size = 0;
    for (size_t i = 0; i < count; i++) {
        if (size == 0 || items[size - 1].value != sorted[i]) items[size++] = (value_count){sorted[i], 0};
        items[size - 1].count++;
    }
    return size;
}

/* Counts the values of `counts` again without their highest bit. Merges the two halves of the counts, each of which is
 * in order. */
static void drop_sign(const value_counts *counts, value_counts *out)
{
    const uint64_t sign = (uint64_t)1 << (counts->bits - 1);
    const value_count *const items = counts->items, end = {sign, 0};
    size_t low = 0, half = 0;
    while (half < counts->size && items[half].value < sign) half++;
    out->bits = counts->bits - 1, out->size = 0;
    for (size_t high = half; low < half || high < counts->size;) {
        const value_count a = low < half ? items[low] : end, b = high < counts->size ? items[high] : end;
        const uint64_t other = high < counts->size ? b.value ^ sign : sign, value = a.value < other ? a.value : other;
        out->items[out->size++] =
            (value_count){value, (a.value == value ? a.count : 0) + (other == value ? b.count : 0)};
        low += a.value == value, high += other == value;
    }
}

/* Computes the counts of the values' prefixes of `bits` bits from the counts of the values. `out` may be the same as
 * `counts`. */
static void fold(const value_counts *counts, uint32_t bits, value_counts *out)
{
    const uint32_t shift = counts->bits - bits;
    size_t size = 0;
    value_count last = {0, 0};
    for (size_t i = 0; i < counts->size; i++) {
        const value_count item = {shift < 64 ? counts->items[i].value >> shift : 0, counts->items[i].count};
        const bool is_same = size && item.value == last.value;
        last = (value_count){item.value, item.count + (is_same ? last.count : 0)};
        size += !is_same;
        out->items[size - 1] = last;
    }
    out->size = size, out->bits = bits;
}

/* Returns the counts that hold prefixes of prefix_bits bits. */
static const value_counts *counts_of(const values *v, uint32_t prefix_bits)
{
    return prefix_bits <= v->prefixes.bits ? &v->prefixes : &v->whole;
}

/* Counts the symbols of a shape. The counts lie in arrays of *r. */
static value_counts count_symbols(const values *v, shape of, const room *r)
{
    value_counts folded = {.items = r->folded}, without_sign = {.items = r->without_sign};
    fold(counts_of(v, of.symbol_bits + of.rotate), of.symbol_bits + of.rotate, &folded);
    if (!of.rotate) return folded;
    drop_sign(&folded, &without_sign);
    return without_sign;
}

/* Returns a count that at least `most` values reach or exceed, or 0 if there are fewer than `most` values. */
static uint64_t least_of_top(const value_counts *counts, uint32_t most)
{
    enum { NUM_BUCKETS = 1024 };
    uint32_t buckets[NUM_BUCKETS] = {0}, least = NUM_BUCKETS - 1;
    for (size_t i = 0; i < counts->size; i++)
        buckets[counts->items[i].count < NUM_BUCKETS ? counts->items[i].count : NUM_BUCKETS - 1]++;
    for (size_t above = buckets[least]; above < most && least > 0; above += buckets[least]) least--;
    return least;
}

/* Finds the most frequent values, in decreasing order of frequency. Equally frequent values are in increasing order.
 * Returns the number of values found, at most `most`. */
static uint32_t top_values(const value_counts *counts, uint32_t most, value_count *top)
{
    const uint64_t least = counts->size > 4 * (size_t)most ? least_of_top(counts, most) : 0;
    uint32_t size = 0;
    for (size_t i = 0; i < counts->size && most; i++) {
        const value_count item = counts->items[i];
        if (item.count < least || (size == most && item.count <= top[size - 1].count)) continue;
        uint32_t at = 0;
        for (uint32_t end = size; at < end;) { /* find the position after all values that are at least as frequent */
            const uint32_t middle = (at + end) / 2;
            if (top[middle].count >= item.count)
                at = middle + 1;
            else
                end = middle;
        }
        size += size < most;
        memmove(top + at + 1, top + at, sizeof *top * (size - 1 - at));
        top[at] = item;
    }
    return size;
}

/* ---- costs ------------------------------------------------------------------------------------------------------- */

/* Computes tails from the counts of the most frequent symbols: tails[k] receives the mean number of elements of a row
 * whose symbols have rank k or higher. The num_rows rows have `total` elements; each counted element represents `scale`
 * elements. */
static void find_tails(double total, double scale, double num_rows, const value_count *ranked, uint32_t size,
                       double *tails)
{
    double left = total;
    for (uint32_t k = 0; k <= MOST_ENTRIES; k++) {
        tails[k] = left / num_rows;
        if (k < size) left = fmax(0.0, left - scale * (double)ranked[k].count);
    }
}

/* Returns the share of the rows that have at least one element of some kind, if a row has `mean` such elements on
 * average and they are distributed at random. The share is about 1 - exp(-mean). It is computed by a short series,
 * which gives the same result on every machine. */
static double share_with_any(double mean) { return 1.0 - 1.0 / (1.0 + mean * (1.0 + mean * (0.5 + mean / 6.0))); }

/* Returns the mean number of bits that pad a run of fields of `bits` bits to a whole byte. */
static double padding_of(uint32_t bits)
{
    return bits % 8 == 0 ? 0.0 : bits % 4 == 0 ? 2.0 : bits % 2 == 0 ? 3.0 : 3.5;
}

/* Returns the mean size in bits, with padding, of a part that has a field of `bits` bits for each of `mean` elements.
 * is_exact: whether all rows have exactly `mean` elements. */
static double part_bits(double mean, uint32_t bits, bool is_exact)
{
    return is_exact ? 8.0 * ceil(mean * bits / 8.0) : mean * bits + padding_of(bits) * share_with_any(mean);
}

/* Returns the size in bytes of the codebook of a plan. */
static double codebook_bytes(const search *s, const plan *p, uint32_t num_entries)
{
    const double entries = (double)p->sets * num_entries * ibp_bytes_of_symbol(p->shape.symbol_bits);
    return p->consecutive ? 0.0 : entries + (p->as != DENSE ? 2.0 * s->width / 8.0 : 0.0);
}

/* Adds a plan to the candidates, unless they have a cheaper plan of its kind. The plan is `made` with digit list
 * number `list`. If plans are equally cheap, the last one is kept, because it has the shortest symbols and the
 * fewest entries. */
static void add_candidate(const search *s, const plan *made, uint32_t list, double cost, candidates *c)
{
    const digit_list *const digits = &s->lists[list];
    const bool per_column = made->sets > 1;
    const uint32_t kind = made->as == DENSE ? per_column : made->as + 1u;
    plan *const simple = &c->simple[kind][digits->num_planes], *const fast = &c->fast[per_column];
    plan p = *made;
    p.digits = digits, p.cost = cost;
    if (cost <= simple->cost) *simple = p;
    if (digits->is_fast && made->as == DENSE && made->shape.symbol_bits <= 8 && cost <= fast->cost) *fast = p;
    if (cost < c->least) c->least = cost;
}

/* Compares all lists of digit widths for a plan. made: the plan without digits. tails: the tails of its shape.
 * extra_bytes: mean number of bytes of a row besides the values. If c is not NULL, adds the plans that cost little
 * enough to the candidates. Returns the least cost. */
static double try_digits(const search *s, const plan *made, const double *tails, double extra_bytes, candidates *c)
{
    const uint32_t symbol_bits = made->shape.symbol_bits;
    const bool is_exact = made->as == DENSE;
    double parts[MOST_ENTRIES + 1][IBP_MAX_DIGIT_BITS + 1], ends[MOST_ENTRIES + 1];
    double planes[MOST_LISTS], costs[MOST_LISTS];
    for (uint32_t k = 0; k <= MOST_ENTRIES; k++) {
        const double any = share_with_any(tails[k]);
        for (uint32_t bits = 1; bits <= IBP_MAX_DIGIT_BITS; bits++)
            parts[k][bits] = tails[k] * bits + padding_of(bits) * any;
        ends[k] = tails[k] * symbol_bits + padding_of(symbol_bits) * any +
                  8.0 * (codebook_bytes(s, made, k) / s->table_rows + extra_bytes);
    }
    for (uint32_t bits = 1; bits <= IBP_MAX_DIGIT_BITS; bits++) parts[0][bits] = part_bits(tails[0], bits, is_exact);
    planes[0] = part_bits(tails[0], s->width - symbol_bits, is_exact);
    double least = costs[0] = planes[0] + ends[0];
    for (uint32_t shorter = 0, i = 1; i < MOST_LISTS; shorter++) {
        const uint32_t first = s->lists[shorter].num_entries;
        for (uint32_t bits = 1; bits <= IBP_MAX_DIGIT_BITS; bits++, i++) {
            planes[i] = planes[shorter] + parts[first][bits];
            costs[i] = planes[i] + ends[first + (1u << bits) - 1];
            if (costs[i] < least) least = costs[i];
        }
    }
    if (c != NULL && least / 8.0 <= FAST_COST * c->least)
        for (uint32_t i = MOST_LISTS; i-- > 0;)
            if (costs[i] <= FAST_COST * least) add_candidate(s, made, i, costs[i] / 8.0, c);
    return least / 8.0;
}

/* Chooses a plan. Takes the cheapest of the plans that a GPU decodes fastest, unless another plan costs clearly less.
 * In that case it considers the plans that are about as good as the cheapest. Of these it takes the first in the order
 * of kinds and, within a kind, of the number of planes. */
static const plan *choose(const candidates *c)
{
    const plan *best = NULL;
    for (uint32_t k = 0; k < 2; k++)
        if (c->fast[k].cost <= (k ? FAST_COLUMNS_COST : FAST_COST) * c->least &&
            (best == NULL || c->fast[k].cost < best->cost))
            best = &c->fast[k];
    for (uint32_t kind = 0; best == NULL && kind <= NUM_LISTINGS; kind++)
        for (uint32_t n = 0; best == NULL && n <= IBP_MAX_PLANES; n++)
            if (c->simple[kind][n].cost <= AS_GOOD * c->least) best = &c->simple[kind][n];
    return best;
}

static void clear_candidates(candidates *c)
{
    c->least = c->fast[0].cost = c->fast[1].cost = INFINITY;
    for (uint32_t kind = 0; kind <= NUM_LISTINGS; kind++)
        for (uint32_t n = 0; n <= IBP_MAX_PLANES; n++) c->simple[kind][n].cost = INFINITY;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* Loads elements as numbers. element_bytes is a constant at every call. */
static inline void load_elements_of(const uint8_t *from, uint32_t count, uint64_t *elements, uint32_t element_bytes)
{
    for (uint32_t i = 0; i < count; i++) elements[i] = ibp_load_number(from + (size_t)i * element_bytes, element_bytes);
}

static void load_elements(const uint8_t *from, uint32_t count, uint32_t element_bytes, uint64_t *elements)
{
    IBP_BY_SIZE(element_bytes, load_elements_of, from, count, elements);
}

/* Returns the column of live element i. The result is limited to existing columns, because another thread may write
 * live_columns meanwhile. */
static uint32_t column_of(const search *s, size_t i)
{
    return ibp_min_u32(IBP_LOAD_ONCE(s->live_columns[i]), s->row_bytes / s->element_bytes - 1);
}

/* Loads the coded elements of a row, without their invariant bits. elements: room for a whole row. */
static void load_row(const search *s, size_t row, uint64_t *elements)
{
    load_elements(s->rows + row * s->row_bytes, s->row_bytes / s->element_bytes, s->element_bytes, elements);
    if (s->live_columns)
        for (uint32_t c = 0; c < s->columns; c++) elements[c] = elements[column_of(s, c)];
    if (s->invariant_bits)
        for (uint32_t c = 0; c < s->columns; c++) elements[c] >>= s->invariant_bits;
}

/* Counts the prefixes of values, either by sorting the prefixes or in an array of counters. */
static void count_prefixes(const uint64_t *elements, size_t count, uint32_t shift, const room *r, value_counts *out)
{
    const size_t num_bins = (size_t)1 << out->bits;
    if (count <= MOST_SORTED) {
        for (size_t i = 0; i < count; i++) r->longs[i] = elements[i] >> shift;
        out->size = compact(sort_values(r->longs, r->other_longs, count, out->bits), count, out->items);
        return;
    }
    memset(r->bins, 0, sizeof *r->bins * (num_bins < 4 ? 4 : num_bins));
    for (size_t i = 0; i < count; i++) r->bins[elements[i] >> shift]++;
    for (size_t b = 0; b < num_bins; b += 4) {
        if ((r->bins[b] | r->bins[b + 1] | r->bins[b + 2] | r->bins[b + 3]) == 0) continue;
        for (size_t i = b; i < b + 4; i++)
            if (r->bins[i]) out->items[out->size++] = (value_count){i, r->bins[i]};
    }
}

/* Counts whole values. It looks at about r->num_long of them, one from each run of `step` values, at positions that are
 * spread over the columns. common: a value that is expected to be frequent. */
static void count_whole(const uint64_t *elements, size_t count, uint64_t common, const room *r, value_counts *out)
{
    const size_t most = r->num_long, step = (count + most - 1) / most, num_drawn = count / step;
    size_t size = 0;
    for (size_t i = 0; i < num_drawn; i++) {
        r->longs[size] = elements[i * step + (i * 0x9e3779b97f4a7c15u >> 32) % step];
        size += r->longs[size] != common; /* the most common value, which is often 0, is counted without sorting */
    }
    const size_t num_common = num_drawn - size;
    if (num_common) r->longs[size++] = common;
    out->size = compact(sort_values(r->longs, r->other_longs, size, out->bits), size, out->items);
    for (size_t i = 0; num_common && i < out->size; i++)
        if (out->items[i].value == common) out->items[i].count = num_common;
    out->scale = (double)count / (double)num_drawn;
}

/* Counts values of `width` bits. */
static void count_values(const uint64_t *elements, size_t count, uint32_t width, const room *r, values *v)
{
    const uint32_t bits = ibp_min_u32(width, MOST_PREFIX_BITS);
    value_count top = {0, 0};
    v->total = (double)count;
    v->prefixes = (value_counts){r->prefixes[v->as], 0, bits, 1.0};
    v->whole = (value_counts){r->whole[v->as], 0, width, 1.0};
    count_prefixes(elements, count, width - bits, r, &v->prefixes);
    if (width == bits || count == 0) return;
    top_values(&v->prefixes, 1, &top);
    count_whole(elements, count, top.value << (width - bits), r, &v->whole);
}

/* Returns the share of the elements that equal `value`. */
static double share_of(const values *v, uint32_t width, uint64_t value)
{
    const value_counts *const counts = counts_of(v, width);
    for (size_t i = 0; i < counts->size && counts->items[i].value <= value; i++)
        if (counts->items[i].value == value) return counts->scale * (double)counts->items[i].count / v->total;
    return 0.0;
}

/* Returns the most frequent value. *share receives the share of the elements that have it. */
static uint64_t most_frequent(const values *v, uint32_t width, double *share)
{
    value_count top = {0, 0};
    const value_counts *const counts = counts_of(v, width);
    *share = top_values(counts, 1, &top) ? counts->scale * (double)top.count / v->total : 0.0;
    return top.value;
}

/* Returns the binary entropy of a share in bits: the least mean cost, for each element, of saying whether the element
 * belongs to this share. */
static double entropy(double share)
{
    return share <= 0 || share >= 1 ? 0.0 : -share * log2(share) - (1 - share) * log2(1 - share);
}

/* Returns whether all elements are equal. */
static bool is_run(const uint64_t *elements, size_t count)
{
    size_t same = 1;
    while (same < count && elements[same] == elements[0]) same++;
    return same >= count;
}

/* Counts the elements that rows list, and computes the mean number of bytes that a row takes besides the values of
 * these elements: its header, positions and signs. If has_closed is true, the elements of closed rows are not
 * counted. */
static void count_listed(const search *s, const room *r, bool has_closed, values *v)
{
    const uint32_t signs = v->as == LISTED_SIGNED;                  /* number of bits stored for each unlisted
                                                                       element */
    const uint64_t bits = ~(uint64_t)0 >> (64 - s->width) >> signs; /* an element is listed if it differs from the
                                                                       default in any of these bits */
    uint64_t *const listed = r->listed;
    size_t size = 0, bytes = 0;
    for (size_t row = 0; row < s->num_loaded; row++) {
        const uint64_t *const own = r->elements + row * s->columns;
        const size_t begin = size;
        for (uint32_t c = 0; c < s->columns; c++) {
            listed[size] = own[c];
            size += ((own[c] ^ s->default_value) & bits) != 0;
        }
        const uint32_t num_listed = (uint32_t)(size - begin);
        bytes += ibp_header_bytes(s->columns) + (signs * (s->columns - num_listed) + 7) / 8 +
                 (num_listed ? ibp_choose_position_form(num_listed, s->columns).num_bytes : 0u);
        const bool is_uniform = num_listed && is_run(listed + begin, num_listed);
        v->has_uniform |= is_uniform;
        if (has_closed && is_uniform && listed[begin] == v->closed_value) size = begin;
    }
    v->extra_bytes = (double)bytes / (double)s->num_loaded;
    count_values(listed, size, s->width, r, v);
}

/* Counts the elements that rows code if they use the listing `as`. The most frequent of them becomes the closed value.
 * If in any row all listed elements are equal, counts again without the elements of closed rows. */
static void count_as(const search *s, const room *r, listing as, values *v)
{
    double unused;
    *v = (values){.as = as, .num_rows = (double)s->num_loaded, .closed_value = s->default_value};
    count_listed(s, r, false, v);
    if (v->total > 0) v->closed_value = most_frequent(v, s->width, &unused);
    if (v->has_uniform) count_listed(s, r, true, v);
}

/* Tries all shapes, and returns the least cost. costs[rotate][prefix] receives the least cost of the shape with a
 * prefix of that many bits; INFINITY if the shape is not tried. Prefixes go from long to short, so that the counts of
 * each are folded from the counts of the one before it. */
static double try_shapes(const search *s, const values *v, const room *r, candidates *c, double (*costs)[MOST_BITS + 1])
{
    value_counts folded = {.items = r->folded}, without_sign = {.items = r->without_sign};
    const value_counts *last = NULL;
    double least = INFINITY;
    for (uint32_t prefix = s->width + 1; prefix-- > 0;)
        for (uint32_t rotate = 0; rotate < 2; rotate++) {
            const value_counts *const counts = counts_of(v, prefix);
            value_count top[MOST_ENTRIES];
            double tails[MOST_ENTRIES + 1];
            costs[rotate][prefix] = INFINITY;
            if (!is_tried(s, prefix, rotate)) continue;
            if (counts != last || prefix != folded.bits) fold(counts == last ? &folded : counts, prefix, &folded);
            if (rotate && without_sign.bits == 0) drop_sign(&folded, &without_sign);
            if (rotate) fold(&without_sign, prefix - 1, &without_sign);
            last = counts;
            const uint32_t size = top_values(rotate ? &without_sign : &folded, MOST_ENTRIES, top);
            find_tails(v->total, counts->scale, v->num_rows, top, size, tails);
            const plan made = {{rotate, prefix - rotate}, .as = v->as, .sets = 1, .num_values = tails[0]};
            costs[rotate][prefix] = try_digits(s, &made, tails, v->extra_bytes, c);
            least = fmin(least, costs[rotate][prefix]);
        }
    return least;
}

/* ---- entries for each column ------------------------------------------------------------------------------------- */

/* The symbols from which the entries of columns are chosen, the most frequent first. `places` gives the index of a
 * symbol in the dictionary: by the symbol itself if symbols are short, else by its hash. A long symbol must be compared
 * with the symbol at that index, because symbols may have the same hash. */
typedef struct dictionary {
    uint32_t size; /* number of symbols; also the index of all symbols that are not in the dictionary */
    bool is_short;
    uint8_t *places;
    uint64_t symbols[MOST_CHOSEN + 1];
} dictionary;

/* The part of the sample that is examined: every row_step-th row, and in these rows every column_step-th column.
 * columns: number of these columns. is_table: whether the examined rows are all rows of the table. */
typedef struct part {
    size_t row_step;
    uint32_t columns, column_step;
    bool is_table;
} part;

static uint32_t hash_of(uint64_t symbol) { return (uint32_t)(symbol * 0x9e3779b97f4a7c15u >> (64 - HASH_BITS)); }

static void make_dictionary(const values *v, shape of, const room *r, dictionary *d)
{
    const value_counts counts = count_symbols(v, of, r);
    value_count top[MOST_CHOSEN];
    d->size = top_values(&counts, MOST_CHOSEN, top), d->places = r->places, d->symbols[d->size] = 0;
    d->is_short = of.symbol_bits <= MOST_PREFIX_BITS;
    memset(d->places, (int)d->size, (size_t)1 << (d->is_short ? of.symbol_bits : HASH_BITS));
    for (uint32_t k = d->size; k-- > 0;) { /* if symbols have the same hash, the most frequent one is found */
        d->symbols[k] = top[k].value;
        d->places[d->is_short ? top[k].value : hash_of(top[k].value)] = (uint8_t)k;
    }
}

/* Ranks the dictionary's symbols by their counts in a column, the most frequent first; ties keep the order of the
 * dictionary. order[k] receives the dictionary index of the column's k-th entry. Returns the number of entries, at most
 * MOST_ENTRIES. */
static uint32_t order_column(const dictionary *d, const uint32_t *counts, uint8_t *order)
{
    uint32_t size = 0;
    for (uint32_t k = 0; k < d->size; k++) {
        if (size == MOST_ENTRIES && counts[k] <= counts[order[size - 1]]) continue;
        uint32_t at = size < MOST_ENTRIES ? size++ : size - 1;
        for (; at > 0 && counts[order[at - 1]] < counts[k]; at--) order[at] = order[at - 1];
        order[at] = (uint8_t)k;
    }
    return size;
}

/* Counts the symbols of columns. is_short and element_bytes are constants at every call. */
static inline void count_columns_of(const search *s, const part *of, size_t first, size_t step, const dictionary *d,
                                    shape sh, const room *r, bool is_short, uint32_t element_bytes)
{
    const uint32_t shift = s->invariant_bits + (sh.symbol_bits ? s->width - sh.symbol_bits - sh.rotate : 0);
    const uint64_t ones = sh.symbol_bits ? ~(uint64_t)0 >> (64 - sh.symbol_bits) : 0;
    const uint8_t *const places = d->places;
    const uint32_t *const offsets = r->offsets;
    const size_t columns = of->columns, stride = d->size + 1u;
    for (size_t at = first; at < s->num_rows; at += step) {
        const uint8_t *const row = s->rows + at * s->row_bytes;
        uint32_t *own = r->column_counts;
        for (size_t i = 0; i < columns; i++, own += stride) {
            const uint64_t symbol = ibp_load_number(row + offsets[i], element_bytes) >> shift & ones;
            uint32_t place = places[is_short ? symbol : hash_of(symbol)];
            if (!is_short && d->symbols[place] != symbol) place = d->size;
            own[place]++;
        }
    }
}

/* Counts the symbols of columns in every step-th row, beginning with row `first`. Symbols that are not in the
 * dictionary are counted together. Returns the number of rows looked at. */
static size_t count_columns(const search *s, const part *of, size_t first, size_t step, const dictionary *d, shape sh,
                            const room *r)
{
    memset(r->column_counts, 0, sizeof *r->column_counts * of->columns * (d->size + 1));
    for (uint32_t i = 0; i < of->columns; i++)
        r->offsets[i] = s->element_bytes * (s->live_columns ? column_of(s, i * of->column_step) : i * of->column_step);
    if (d->is_short)
        IBP_BY_SIZE(s->element_bytes, count_columns_of, s, of, first, step, d, sh, r, true);
    else
        IBP_BY_SIZE(s->element_bytes, count_columns_of, s, of, first, step, d, sh, r, false);
    return first < s->num_rows ? (s->num_rows - first + step - 1) / step : 0;
}

/* Tries a shape with entries for each column on a part of the sample. The entries are learned from the even rows, and
 * their cost is measured on the odd rows, because rows from which entries were learned take less space than other rows.
 * If the part has all rows of the table, all rows are used for both. Returns the cost. *table_cost receives the cost of
 * the same shape with entries for the table, on the same rows. */
static double try_columns(const search *s, const values *v, shape sh, const part *of, const room *r, candidates *c,
                          double *table_cost)
{
    dictionary d;
    value_count by_rank[MOST_ENTRIES + 1] = {{0}}, by_place[MOST_CHOSEN + 1] = {{0}};
    double tails[MOST_ENTRIES + 1];
    make_dictionary(v, sh, r, &d);
    const uint32_t stride = d.size + 1;
    size_t rows = count_columns(s, of, 0, of->is_table ? of->row_step : 2 * of->row_step, &d, sh, r);
    memset(r->ranks, MOST_ENTRIES, (size_t)of->columns * stride);
    for (size_t i = 0; i < of->columns; i++) {
        uint8_t order[MOST_ENTRIES];
        const uint32_t size = order_column(&d, r->column_counts + i * stride, order);
        for (uint32_t k = 0; k < size; k++) r->ranks[i * stride + order[k]] = (uint8_t)k;
    }
    if (!of->is_table) rows = count_columns(s, of, of->row_step, 2 * of->row_step, &d, sh, r);
    for (size_t i = 0; i < of->columns; i++)
        for (uint32_t k = 0; k < stride; k++) {
            const uint32_t count = r->column_counts[i * stride + k];
            by_place[k].count += count, by_rank[r->ranks[i * stride + k]].count += count;
        }
    const double num_rows = (double)rows, total = num_rows * of->columns;
    plan made = {.shape = sh, .sets = 1, .num_values = s->columns};
    find_tails(total, 1.0, num_rows, by_place, ibp_min_u32(d.size, MOST_ENTRIES), tails);
    *table_cost = try_digits(s, &made, tails, 0.0, NULL);
    made.sets = of->columns;
    find_tails(total, 1.0, num_rows, by_rank, MOST_ENTRIES, tails);
    return try_digits(s, &made, tails, 0.0, c);
}

/* Returns the part of the sample on which shapes are compared. Rows are left out only if there are more than twice as
 * many rows as wanted. If the sample is the table and no row is left out, entries are learned and measured on the same
 * rows. */
static part tried_part(const search *s)
{
    const uint32_t step = (s->columns + MOST_TRIED_COLUMNS - 1) / MOST_TRIED_COLUMNS;
    part p = {.row_step = 1, .columns = (s->columns + step - 1) / step, .column_step = step};
    const size_t most = TRIED_ELEMENTS / p.columns;
    if (s->num_rows > 2 * most) p.row_step = s->num_rows / most;
    p.is_table = s->is_whole && p.row_step == 1;
    return p;
}

/* Finds the shape that costs least with entries for each column. Searches the rotated shapes if rotate is 1, otherwise
 * the shapes that are not rotated. The search begins with the shape that is best with entries for the table, and tries
 * longer and shorter symbols as long as the cost falls. table_costs[p]: the cost of the shape with a prefix of p bits
 * and entries for the table. Returns the cost of the shape; INFINITY if entries for each column do not pay for the
 * first shape, or if the first shape costs more than `most`. */
static double find_column_shape(const search *s, const values *v, const double *table_costs, uint32_t rotate,
                                double most, const room *r, shape *best)
{
    const part tried = tried_part(s);
    uint32_t start = rotate + 1; /* symbols have at least one bit */
    for (uint32_t prefix = start; prefix <= s->width; prefix++)
        if (table_costs[prefix] < table_costs[start]) start = prefix;
    if (start > s->width || table_costs[start] >= INFINITY) return INFINITY;
    *best = (shape){rotate, start - rotate};
    double table_cost, here = try_columns(s, v, *best, &tried, r, NULL, &table_cost);
    if (here > fmin(most, COLUMNS_PAY * table_cost)) return INFINITY;
    for (int step = 1; step >= -1; step -= 2)
        for (int64_t prefix = (int64_t)start + step; prefix > rotate && prefix <= s->width; prefix += step) {
            if (table_costs[prefix] >= INFINITY) continue;
            const shape next = {rotate, (uint32_t)prefix - rotate};
            const double cost = try_columns(s, v, next, &tried, r, NULL, &table_cost);
            if (cost >= here) break;
            here = cost, *best = next;
        }
    return here;
}

/* Adds plans with entries for each column, for the best rotated shape and for the best other shape. If one of the two
 * is clearly better on a part of the sample, adds plans for this shape only. */
static void add_columns(const search *s, const values *v, double (*table_costs)[MOST_BITS + 1], const room *r,
                        candidates *c)
{
    const part all = {.row_step = 1, .columns = s->columns, .column_step = 1, .is_table = s->is_whole};
    shape best[2];
    double costs[2], unused;
    costs[0] = find_column_shape(s, v, table_costs[0], 0, INFINITY, r, &best[0]);
    costs[1] = find_column_shape(s, v, table_costs[1], 1, FAR_WORSE * costs[0], r, &best[1]);
    const double most = fmin(DBL_MAX, WORSE * fmin(costs[0], costs[1]));
    for (uint32_t rotate = 0; rotate < 2; rotate++)
        if (costs[rotate] <= most) try_columns(s, v, best[rotate], &all, r, c, &unused);
}

/* ---- the whole search -------------------------------------------------------------------------------------------- */

static bool is_sample(const ibp_sample *sample)
{
    if (sample == NULL || sample->rows == NULL || sample->num_rows < 1 || sample->table_rows < 0) return false;
    const uint32_t row_bytes = sample->row_bytes, element_bytes = sample->element_bytes;
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(element_bytes) || row_bytes % element_bytes) return false;
    if (sample->level != IBP_LEVEL_DEFAULT && sample->level != IBP_LEVEL_FAST) return false;
    return sample->exponent_bits < 8 * element_bytes && sample->num_rows <= MOST_SAMPLED_BYTES / row_bytes;
}

/* Returns the distance from one counted row to the next, in rows. */
static size_t step_of(const ibp_sample *sample)
{
    const size_t columns = sample->row_bytes / sample->element_bytes;
    const size_t few = ((sample->element_bytes > 1 ? FEW_ELEMENTS : FEW_BYTES) + columns - 1) / columns;
    const size_t wanted = few > LEAST_ROWS ? few : LEAST_ROWS, step = (size_t)sample->num_rows / wanted;
    return step > 0 ? step : 1;
}

static size_t counted_rows(const ibp_sample *sample)
{
    const size_t step = step_of(sample);
    return ((size_t)sample->num_rows + step - 1) / step;
}

static size_t align_up(size_t bytes) { return (bytes + 63) / 64 * 64; }

/* Takes the next num_bytes bytes of scratch: adds their number, rounded up, to *used. Returns their address, or NULL if
 * scratch is NULL. */
static void *take(uint8_t *scratch, size_t *used, size_t num_bytes)
{
    uint8_t *const at = scratch == NULL ? NULL : scratch + *used;
    *used += align_up(num_bytes);
    return at;
}

/* Lays out the arrays of *r in scratch. Returns the size of all arrays in bytes. */
static size_t make_room(const ibp_sample *sample, uint8_t *scratch, room *r)
{
    const size_t columns = sample->row_bytes / sample->element_bytes, count = counted_rows(sample) * columns;
    const size_t bins = (size_t)1 << MOST_PREFIX_BITS, choices = columns * (MOST_CHOSEN + 1);
    const size_t distinct = count < bins ? count : bins;
    size_t used = 0;
    r->num_long = sample->exponent_bits ? MOST_LONG / 2 : MOST_LONG;
    r->elements = take(scratch, &used, sizeof *r->elements * count);
    r->listed = take(scratch, &used, sizeof *r->listed * count);
    r->longs = take(scratch, &used, sizeof *r->longs * (r->num_long + 1));
    r->other_longs = take(scratch, &used, sizeof *r->other_longs * (r->num_long + 1));
    r->bins = take(scratch, &used, sizeof *r->bins * bins);
    for (uint32_t i = 0; i < NUM_LISTINGS; i++) {
        r->prefixes[i] = take(scratch, &used, sizeof **r->prefixes * distinct);
        r->whole[i] = take(scratch, &used, sizeof **r->whole * (r->num_long + 1));
    }
    r->folded = take(scratch, &used, sizeof *r->folded * distinct);
    r->without_sign = take(scratch, &used, sizeof *r->without_sign * distinct);
    r->column_counts = take(scratch, &used, sizeof *r->column_counts * choices);
    r->ranks = take(scratch, &used, choices);
    r->places = take(scratch, &used, bins);
    r->offsets = take(scratch, &used, sizeof *r->offsets * columns);
    return used;
}

size_t ibp_learn_scratch_bytes(const ibp_sample *sample)
{
    room r;
    return is_sample(sample) ? make_room(sample, NULL, &r) : 0;
}

/* Returns the size in bytes of the template and the live columns, which come before the entries. */
static size_t constants_bytes(uint32_t row_bytes, uint32_t element_bytes)
{
    return align_up(row_bytes) + align_up(sizeof(uint16_t) * (row_bytes / element_bytes));
}

size_t ibp_max_planes_bytes(uint32_t row_bytes, uint32_t element_bytes)
{
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(element_bytes) || row_bytes % element_bytes) return 0;
    return constants_bytes(row_bytes, element_bytes) + (size_t)MOST_ENTRIES * row_bytes;
}

/* Writes the entries of a plan. If there are fewer symbols than entries, the first symbol is repeated; encoders never
 * use the repetitions. */
static void write_entries(const search *s, const values *v, shape of, bool per_column, uint32_t num_entries,
                          const room *r, uint8_t *entries)
{
    const uint32_t bytes = ibp_bytes_of_symbol(of.symbol_bits), sets = per_column ? s->columns : 1;
    const part all = {.row_step = 1, .columns = s->columns, .column_step = 1};
    dictionary d;
    make_dictionary(v, of, r, &d);
    uint8_t order[MOST_ENTRIES];
    uint32_t size = ibp_min_u32(d.size, MOST_ENTRIES);
    for (uint32_t k = 0; k < size; k++) order[k] = (uint8_t)k;
    if (per_column) count_columns(s, &all, 0, 1, &d, of, r);
    for (size_t c = 0; c < sets; c++) {
        if (per_column) size = order_column(&d, r->column_counts + c * (d.size + 1), order);
        for (uint32_t k = 0; k < num_entries; k++, entries += bytes) {
            const uint64_t symbol = size ? d.symbols[order[k < size ? k : 0]] : 0;
            memcpy(entries, &symbol, bytes);
        }
    }
}

/* Finds the run of FAST_ENTRIES consecutive symbols that covers the largest number of elements. first_symbol: receives
 * the first of these symbols. Returns the number of elements that have one of them. */
static uint64_t find_run(const values *v, shape of, const room *r, uint64_t *first_symbol)
{
    const value_counts symbols = count_symbols(v, of, r);
    const uint32_t num_symbols = 1u << of.symbol_bits;
    uint64_t counts[256] = {0}, inside = 0, most = 0;
    for (size_t i = 0; i < symbols.size; i++) counts[symbols.items[i].value] = symbols.items[i].count;
    for (uint32_t i = 0; i < FAST_ENTRIES; i++) inside += counts[i];
    *first_symbol = 0, most = inside;
    for (uint32_t first = 1; first < num_symbols; first++) {
        inside += counts[(first + FAST_ENTRIES - 1) % num_symbols] - counts[first - 1];
        if (inside > most) most = inside, *first_symbol = first;
    }
    return most;
}

/* Finds the best plan of level fast, among the plans with fast coders (csrc/cuda/kinds.h): dense rows of elements of
 * two or four bytes, one plane, consecutive entries, and symbols of at most 8 bits. Returns false if the plan saves
 * less than the share LEAST_FAST of a row. */
static bool search_fast(const search *s, const room *r, const values *v, plan *found)
{
    *found = (plan){.cost = INFINITY};
    if (s->element_bytes != 2 && s->element_bytes != 4) return false;
    for (uint32_t prefix = FAST_DIGIT_BITS; prefix <= s->width; prefix++)
        for (uint32_t rotate = 0; rotate < 2; rotate++) {
            const uint32_t symbol_bits = prefix - rotate, residual_bits = s->width - symbol_bits;
            if (!is_tried(s, prefix, rotate) || symbol_bits < FAST_DIGIT_BITS || symbol_bits > 8) continue;
            /* The residuals of 16 bytes of elements must fill a whole number of bytes. */
            if (16 / s->element_bytes * residual_bits % 8 != 0) continue;
            plan made = {{rotate, symbol_bits}, .consecutive = true, .digits = &s->lists[FAST_DIGIT_BITS]};
            const uint64_t inside = find_run(v, made.shape, r, &made.first_symbol);
            made.num_values = s->columns;
            made.cost = (part_bits(s->columns, residual_bits, true) + part_bits(s->columns, FAST_DIGIT_BITS, true) +
                         part_bits((v->total - (double)inside) / v->num_rows, symbol_bits, false)) /
                        8.0;
            if (made.cost <= found->cost) *found = made; /* if costs are equal, the rotated shape is taken */
        }
    return found->cost < s->columns * s->width / 8.0 - LEAST_FAST * s->row_bytes;
}

/* Finds the best of all plans. known: for each listing the counts of the elements that rows code. The caller fills in
 * known[DENSE]. The function fills in the counts of the other listings that it tries. */
static void search_all(search *s, const room *r, values *known, plan *found)
{
    candidates c;
    double share, costs[2][MOST_BITS + 1], listed_costs[2][MOST_BITS + 1], least_listed = INFINITY;
    const values *const all = &known[DENSE];
    clear_candidates(&c);
    const double least_dense = try_shapes(s, all, r, &c, costs);
    s->default_value = most_frequent(all, s->width, &share);
    const double negated = share_of(all, s->width, s->default_value ^ (uint64_t)1 << (s->width - 1));
    const double shares[NUM_LISTINGS] = {0, share, share + negated};
    for (listing as = LISTED; as < NUM_LISTINGS; as++) {
        if (shares[as] < LEAST_SHARE || shares[as] * s->width < 2 * entropy(shares[as])) continue;
        if (as == LISTED_SIGNED && negated < LEAST_SHARE) continue;
        if (s->num_defaults > 0 && s->default_value != s->default_row) continue;
        count_as(s, r, as, &known[as]);
        least_listed = fmin(least_listed, try_shapes(s, &known[as], r, &c, listed_costs));
    }
    if (s->columns > 1 && (s->is_whole || s->num_rows > 1) && s->columns < 0.1 * s->row_bytes * s->table_rows &&
        least_dense <= COLUMNS_GAIN * least_listed)
        add_columns(s, all, costs, r, &c);
    *found = *choose(&c);
    found->cost = fmin(found->cost, s->row_bytes);
}

static void init_search(const ibp_sample *sample, search *s)
{
    *s = (search){.rows = sample->rows,
                  .num_rows = (size_t)sample->num_rows,
                  .step = step_of(sample),
                  .num_counted = counted_rows(sample),
                  .element_bytes = sample->element_bytes,
                  .row_bytes = sample->row_bytes,
                  .exponent_bits = sample->exponent_bits,
                  .is_whole = sample->table_rows <= sample->num_rows};
    list_digits(s->lists);
    s->table_rows = (double)(s->is_whole ? sample->num_rows : sample->table_rows);
}

/* Finds the value of default rows by a majority vote among the loaded rows whose elements are all equal. Removes the
 * default rows, because they take no bytes and must not be counted. If all rows are default rows, keeps one of them. */
static void drop_default_rows(search *s, const room *r)
{
    int64_t ahead = 0;
    size_t kept = 0;
    for (size_t row = 0; row < s->num_loaded; row++) {
        const uint64_t *const own = r->elements + row * s->columns;
        if (!is_run(own, s->columns)) continue;
        if (ahead == 0) s->default_row = own[0];
        ahead += own[0] == s->default_row ? 1 : -1;
    }
    for (size_t row = 0; row < s->num_loaded; row++) {
        const uint64_t *const own = r->elements + row * s->columns;
        const bool is_default = own[0] == s->default_row && is_run(own, s->columns);
        s->num_defaults += is_default;
        if (is_default && s->num_defaults < s->num_counted) continue;
        if (kept != row) memcpy(r->elements + kept * s->columns, own, sizeof *own * s->columns);
        kept++;
    }
    s->num_loaded = kept;
}

/* Prepares the search for a plan that leaves out the constant columns and the lowest invariant_bits bits. Loads and
 * counts the elements. live_columns: the columns that are not constant, if num_constant is not 0. */
static void begin_search(search *s, const uint16_t *live_columns, uint32_t num_constant, uint32_t invariant_bits,
                         const room *r, values *all)
{
    s->columns = s->row_bytes / s->element_bytes - num_constant, s->live_columns = num_constant ? live_columns : NULL;
    s->invariant_bits = invariant_bits, s->width = 8 * s->element_bytes - invariant_bits;
    s->default_value = s->default_row = 0, s->num_loaded = s->num_counted, s->num_defaults = 0;
    for (size_t i = 0; i < s->num_counted; i++) load_row(s, i * s->step, r->elements + i * s->columns);
    drop_default_rows(s, r);
    *all = (values){.as = DENSE, .num_rows = (double)s->num_loaded};
    count_values(r->elements, s->num_loaded * s->columns, s->width, r, all);
}

/* Returns the number of lowest bits that are the same in all elements of a row. *first receives the first element. */
static uint32_t common_bits(const search *s, size_t row, uint64_t *first)
{
    enum { SOME = 64 }; /* in most rows the first SOME elements already show that no bit is common to all */
    const uint8_t *const from = s->rows + row * s->row_bytes;
    const uint32_t width = 8 * s->element_bytes, columns = s->row_bytes / s->element_bytes;
    uint64_t differing = 0, some[SOME];
    uint32_t bits = 0;
    for (uint32_t begin = 0; begin < columns && !(differing & 1); begin += SOME) {
        const uint32_t count = ibp_min_u32(SOME, columns - begin);
        load_elements(from + (size_t)begin * s->element_bytes, count, s->element_bytes, some);
        if (begin == 0) *first = some[0];
        for (uint32_t c = 0; c < count; c++) differing |= some[c] ^ *first;
    }
    while (bits < width && !(differing >> bits & 1)) bits++;
    return bits;
}

/* Returns the number of low bits that are the same in all elements of most counted rows. Sets s->invariant_value to the
 * value of these bits, and s->lacking to the share of the rows that have other low bits, which are therefore stored
 * raw. */
static uint32_t find_invariant_bits(search *s)
{
    const uint32_t most = 8 * s->element_bytes - LEAST_CODED_BITS;
    uint32_t rows_with[65] = {0}, bits = most, found = 0;
    for (size_t i = 0; i < s->num_counted; i++) {
        const uint32_t common = common_bits(s, i * s->step, &s->invariant_value);
        /* Other rows have elements that are all equal or nearly so. They may be default rows. */
        if (common <= most) rows_with[common]++, found++;
    }
    uint32_t lacking = 0;
    for (uint32_t k = 0; k <= most; lacking += rows_with[k], k++)
        if (lacking + rows_with[k] > MOST_LACKING * found) {
            bits = k;
            break;
        }
    if (found == 0 || bits == 0) return 0;
    const uint64_t ones = ~(uint64_t)0 >> (64 - bits);
    size_t with = 0, agreeing = 0;
    for (size_t i = 0; i < s->num_counted; i++) {
        uint64_t first;
        const uint32_t common = common_bits(s, i * s->step, &first);
        if (common < bits || common > most) continue;
        if (with++ == 0) s->invariant_value = first & ones;
        agreeing += (first & ones) == s->invariant_value;
    }
    s->lacking = 1.0 - (double)agreeing / (double)with * (1.0 - (double)lacking / found);
    return s->lacking <= MOST_LACKING ? bits : 0;
}

/* Lists the columns whose elements are not the same in all rows of the sample, until there are more than `most` of
 * them. Returns the number of listed columns. element_bytes is a constant at every call. */
static inline uint32_t list_live_of(const search *s, uint32_t most, uint16_t *live_columns, uint32_t element_bytes)
{
    const uint32_t columns = s->row_bytes / element_bytes;
    uint32_t num_live = 0;
    for (uint32_t c = 0; c < columns && num_live <= most; c++) {
        const uint8_t *const column = s->rows + (size_t)c * element_bytes;
        const uint64_t value = ibp_load_number(column, element_bytes);
        size_t row = 1;
        while (row < s->num_rows && ibp_load_number(column + row * s->row_bytes, element_bytes) == value) row++;
        if (row < s->num_rows) live_columns[num_live++] = (uint16_t)c;
    }
    return num_live;
}

/* Lists the columns whose elements are not the same in all rows of the sample. Returns the number of the other columns,
 * which are constant; 0 if leaving them out would not pay. */
static uint32_t find_constant_columns(const search *s, uint16_t *live_columns)
{
    const uint32_t columns = s->row_bytes / s->element_bytes, most = columns - (uint32_t)ceil(CONSTANT_SHARE * columns);
    if (s->num_rows < LEAST_CONSTANT_ROWS) return 0;
    const uint32_t num_live = IBP_BY_SIZE(s->element_bytes, list_live_of, s, most, live_columns);
    const double template_bytes = s->row_bytes + 2.0 * num_live;
    const bool pays = num_live > 0 && num_live <= most &&
                      (double)(columns - num_live) * s->element_bytes * s->table_rows > 2 * template_bytes;
    return pays ? columns - num_live : 0;
}

/* Searches for a plan that leaves out the bits and columns that are the same in all rows of the sample. If leaving the
 * bits or the columns out does not pay, searches again for a plan that codes them. */
static void find_plan(search *s, const ibp_sample *sample, const room *r, uint16_t *live_columns, values *known,
                      plan *found)
{
    const bool leaves_out = !sample->codes_invariant;
    const uint32_t bits = leaves_out ? find_invariant_bits(s) : 0;
    const uint32_t num_constant = leaves_out ? find_constant_columns(s, live_columns) : 0;
    begin_search(s, live_columns, num_constant, bits, r, &known[DENSE]);
    if (sample->level == IBP_LEVEL_FAST && search_fast(s, r, &known[DENSE], found)) return;
    search_all(s, r, known, found);
    const double saved = found->num_values * bits / 8 - (bits ? s->lacking * (s->row_bytes - found->cost) : 0);
    const bool keeps_bits = bits && saved >= INVARIANT_SHARE * s->row_bytes;
    const bool keeps_columns = num_constant && found->as == DENSE;
    if (keeps_bits == (bits > 0) && keeps_columns == (num_constant > 0)) return;
    begin_search(s, live_columns, keeps_columns ? num_constant : 0, keeps_bits ? bits : 0, r, &known[DENSE]);
    search_all(s, r, known, found);
}

/* Writes the default row: the sample's first row with the default in the live columns. */
static void write_template(const search *s, uint64_t default_value, uint8_t *row_template)
{
    memcpy(row_template, s->rows, s->row_bytes);
    for (uint32_t c = 0; c < s->columns; c++)
        memcpy(row_template + (size_t)column_of(s, c) * s->element_bytes, &default_value, s->element_bytes);
}

/* Returns the element that has a coded value: the value with the invariant bits below it. */
static uint64_t whole_value(const search *s, uint64_t value)
{
    return s->invariant_bits ? value << s->invariant_bits | s->invariant_value : value;
}

ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *arrays,
                            size_t arrays_bytes, ibp_planes *planes, double *coded_bytes)
{
    if (!is_sample(sample) || planes == NULL || arrays == NULL || coded_bytes == NULL) return IBP_INVALID_ARGUMENT;
    if (scratch == NULL || (uintptr_t)scratch % 16 != 0 || (uintptr_t)arrays % 16 != 0) return IBP_INVALID_ARGUMENT;
    const uint32_t row_bytes = sample->row_bytes, element_bytes = sample->element_bytes;
    room r;
    if (make_room(sample, scratch, &r) > scratch_bytes) return IBP_BUFFER_TOO_SMALL;
    if (arrays_bytes < ibp_max_planes_bytes(row_bytes, element_bytes)) return IBP_BUFFER_TOO_SMALL;
    uint16_t *const live_columns = (uint16_t *)(void *)(arrays + align_up(row_bytes));
    uint8_t *const entries = arrays + constants_bytes(row_bytes, element_bytes);
    search s;
    values known[NUM_LISTINGS];
    plan found;
    init_search(sample, &s);
    find_plan(&s, sample, &r, live_columns, known, &found);
    const values *const v = &known[found.as];
    const digit_list *const digits = found.digits;
    const uint64_t default_value = found.as == DENSE ? s.default_row : s.default_value;
    *coded_bytes = fmin(found.cost, row_bytes);
    if (s.invariant_bits) *coded_bytes += s.lacking * (row_bytes - *coded_bytes);
    const double book = codebook_bytes(&s, &found, digits->num_entries) / s.table_rows;
    *coded_bytes -= (*coded_bytes - book) * (double)s.num_defaults / (double)s.num_counted;
    *planes = (ibp_planes){.entries = digits->num_entries && !found.consecutive ? entries : NULL,
                           .default_value = whole_value(&s, default_value),
                           .closed_value = found.as == DENSE ? 0 : whole_value(&s, v->closed_value),
                           .element_bytes = element_bytes,
                           .residual_bits = s.width - found.shape.symbol_bits,
                           .rotate = found.shape.rotate,
                           .num_planes = digits->num_planes,
                           .num_entries = digits->num_entries,
                           .symbol_bytes = ibp_bytes_of_symbol(found.shape.symbol_bits),
                           .per_column = found.sets > 1,
                           .listed = found.as != DENSE,
                           .consecutive = found.consecutive,
                           .signed_default = found.as == LISTED_SIGNED,
                           .invariant_bits = s.invariant_bits,
                           .invariant_value = s.invariant_bits ? s.invariant_value : 0,
                           .first_symbol = found.first_symbol,
                           .num_constant = row_bytes / element_bytes - s.columns};
    memcpy(planes->digit_bits, digits->widths, sizeof planes->digit_bits);
    if (planes->num_constant) {
        write_template(&s, planes->default_value, arrays);
        planes->live_columns = live_columns, planes->row_template = arrays;
    }
    if (!found.consecutive) write_entries(&s, v, found.shape, found.sets > 1, digits->num_entries, &r, entries);
    return IBP_OK;
}

ibp_status ibp_learn_entries(const ibp_sample *sample, const ibp_planes *planes, void *scratch, size_t scratch_bytes,
                             uint8_t *entries, size_t entries_bytes)
{
    if (!is_sample(sample) || planes == NULL || planes->consecutive) return IBP_INVALID_ARGUMENT;
    if (scratch == NULL || (uintptr_t)scratch % 16 != 0) return IBP_INVALID_ARGUMENT;
    ibp_codebook form;
    room r;
    if (ibp_build_planes_codebook(planes, sample->row_bytes, entries_bytes, &form) != IBP_OK || form.num_clusters > 1 ||
        planes->element_bytes != sample->element_bytes)
        return IBP_INVALID_ARGUMENT;
    if (entries_bytes == 0) return IBP_OK;
    for (uint32_t c = 0; planes->num_constant && c < ibp_columns_of(&form); c++)
        if (planes->live_columns[c] >= sample->row_bytes / sample->element_bytes) return IBP_INVALID_ARGUMENT;
    if (make_room(sample, scratch, &r) > scratch_bytes) return IBP_BUFFER_TOO_SMALL;
    search s;
    init_search(sample, &s);
    values v;
    begin_search(&s, planes->live_columns, planes->num_constant, planes->invariant_bits, &r, &v);
    s.default_value = planes->default_value >> planes->invariant_bits;
    if (planes->listed) {
        v.as = planes->signed_default ? LISTED_SIGNED : LISTED;
        v.closed_value = planes->closed_value >> planes->invariant_bits;
        count_listed(&s, &r, true, &v);
    }
    const shape of = {planes->rotate, ibp_symbol_bits(planes)};
    write_entries(&s, &v, of, planes->per_column, form.planes.num_entries, &r, entries);
    return IBP_OK;
}
