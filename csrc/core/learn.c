/* learn.c - a codebook of scheme planes from counts (FORMAT.md, section 6).
 *
 * What a mean row of a plan costs follows from how often its symbols occur: of the symbols' ranks only the sums from
 * some rank on are needed, its *tails*. Distinct values and their counts are found once, in order; the symbols of every
 * shape are their prefixes, so that one pass over them gives the shape's counts. Listed rows add what their positions
 * take, which follows from how many elements each row lists. */
#include "bits.h"
#include "checks.h"
#include "planes_layout.h"

#include <float.h>
#include <math.h>
#include <string.h>

enum {
    MOST_BINS_BITS = 16, /* of a value's prefix that is counted for all values; longer prefixes are counted on fewer */
    MOST_ENTRIES = IBP_MAX_PLANES * ((1 << IBP_MAX_DIGIT_BITS) - 1),
    MOST_SHAPES = 2 * 64 + 2,
    MOST_LISTS = 1 + 4 + 16 + 64 + 256, /* of widths of digits */
    MOST_LONG = 1 << 14,                /* elements whose prefixes of more than MOST_BINS_BITS bits are counted */
    MOST_SORTED = 1 << 12,              /* elements that are sorted sooner than counted */
    FEW_ELEMENTS = 1 << 16,             /* that are counted; entries a column take all rows of a sample */
    FEW_BYTES = 1 << 17,                /* and where elements are bytes */
    LEAST_ROWS = 16,                    /* that are counted */
    MOST_TRIED_COLUMNS = 64,            /* that shapes with entries a column are compared on, */
    TRIED_ELEMENTS = 1 << 16,           /* and elements */
    LEAST_CONSTANT_ROWS = 64,           /* that columns are found constant by */
    LEAST_CODED_BITS = 2,               /* of an element, however many are invariant */
    FAST_DIGIT_BITS = 4,                /* of level fast */
    FAST_ENTRIES = (1 << FAST_DIGIT_BITS) - 1,
    JOINT_CELLS = 1 << 18, /* of all columns, for symbols counted at once, */
    JOINT_SPARE = 16,      /* some of which are not among the counted elements */
    DICTIONARY = 255,      /* the table's symbols that columns choose from, at most */
    MOST_SAMPLED_BYTES = 1 << 30
};

static const double AS_GOOD = 1.001;           /* a cost within this of the least is as good: the plan that decodes */
static const double FAST_COST = 1.006;         /* faster is taken; and this, for one that decodes fastest */
static const double FAST_COLUMNS_COST = 1.003; /* and this, where entries are a column's */
static const double WORSE = 1.01;              /* by what is compared on a part of the sample */
static const double COLUMNS_PAY = 0.9995;      /* of the cost with entries a table: what is worth a search */
static const double COLUMNS_GAIN = 1.25;       /* rows with entries a column are smaller by this factor at the most */
static const double LEAST_SHARE = 1.0 / 256;   /* of a default */
static const double CONSTANT_SHARE = 1.0 / 8;  /* of columns: fewer do not pay for the slower decoder */
static const double MOST_LACKING = 0.2;        /* of rows that lack invariant bits */
static const double LEAST_FAST = 0.04;         /* of a row, that digits of level fast save */
static const double INVARIANT_SHARE = 0.01;    /* of a row, likewise that invariant bits save */
static const double PSEUDO_COUNTS = 8.0;       /* of the table's symbols that every column has besides its own */

typedef struct value_count {
    uint64_t value;
    uint64_t count;
} value_count;

/* Distinct values of some bits in increasing order. */
typedef struct value_counts {
    value_count *items;
    size_t size;
    uint32_t bits;
    double scale; /* elements that one of those counted stands for */
} value_counts;

typedef struct shape {
    uint32_t rotate, symbol_bits;
} shape;

typedef struct digit_list {
    uint32_t num_planes, num_entries;
    uint8_t widths[IBP_MAX_PLANES];
} digit_list;

/* Which elements rows code: all; the ones that differ from a default; or the ones that differ from it in other bits
 * than the highest. */
typedef enum listing { DENSE, LISTED, LISTED_SIGNED } listing;

/* Elements whose cost is looked for: all elements of dense rows, or those listed. */
typedef struct values {
    value_counts whole, unsigned_; /* prefixes of up to MOST_BINS_BITS bits, with the sign and without */
    value_counts long_;            /* whole elements, of a part of them */
    double total;                  /* elements */
    double num_rows;               /* rows that they are of */
    double extra_bytes;            /* of a mean row besides the values */
    bool has_uniform;              /* a row that lists one value only */
    listing as;                    /* which elements they are */
} values;

/* ---- shapes and digits ------------------------------------------------------------------------------------------- */

/* The shapes to try: as the exponent's width, or 0 where there is none, leads to expect. */
static uint32_t list_shapes(uint32_t width, uint32_t exponent_bits, shape *shapes)
{
    uint32_t count = 0;
    if (exponent_bits == 0 || width <= 8)
        for (uint32_t bits = 0; bits <= width; bits++) shapes[count++] = (shape){0, bits};
    if (exponent_bits == 0) return count;
    if (width <= 8) {
        for (uint32_t bits = 1; bits < width; bits++) shapes[count++] = (shape){1, bits};
        return count;
    }
    const uint32_t least = exponent_bits > 3 ? exponent_bits - 2 : 1;
    shapes[count++] = (shape){0, 0};
    const uint32_t stop = width < MOST_BINS_BITS ? width : MOST_BINS_BITS;
    for (uint32_t bits = least; bits < stop; bits++) shapes[count++] = (shape){1, bits};
    for (uint32_t bits = least; bits < stop; bits++) shapes[count++] = (shape){0, bits + 1};
    if (width > MOST_BINS_BITS) shapes[count++] = (shape){0, width};
    return count;
}

static uint32_t list_digits(digit_list *lists)
{
    uint32_t count = 0, first = 0;
    lists[count++] = (digit_list){0};
    for (uint32_t planes = 1; planes <= IBP_MAX_PLANES; planes++) {
        const uint32_t stop = count;
        for (uint32_t i = first; i < stop; i++)
            for (uint32_t bits = 1; bits <= IBP_MAX_DIGIT_BITS; bits++) {
                digit_list longer = lists[i];
                longer.widths[longer.num_planes++] = (uint8_t)bits;
                longer.num_entries += (1u << bits) - 1;
                lists[count++] = longer;
            }
        first = stop;
    }
    return count;
}

/* ---- counts ------------------------------------------------------------------------------------------------------ */

/* Sorts by value: a radix sort of bytes, between two arrays. Where the result is. */
static uint64_t *sort_values(uint64_t *from, uint64_t *other, size_t count, uint32_t width)
{
    for (uint32_t shift = 0; shift < width; shift += 8) {
        size_t starts[257] = {0};
        for (size_t i = 0; i < count; i++) starts[1 + (from[i] >> shift & 0xffu)]++;
        for (uint32_t b = 0; b < 256; b++) starts[b + 1] += starts[b];
        for (size_t i = 0; i < count; i++) other[starts[from[i] >> shift & 0xffu]++] = from[i];
        uint64_t *const sorted = other;
        other = from, from = sorted;
    }
    return from;
}

static size_t compact(const uint64_t *sorted, size_t count, value_count *items)
{
    size_t size = 0;
    for (size_t i = 0; i < count; i++) {
        if (size == 0 || items[size - 1].value != sorted[i]) items[size++] = (value_count){sorted[i], 0};
        items[size - 1].count++;
    }
    return size;
}

/* The same values without their highest bit: two ordered halves become one. */
static void drop_sign(const value_counts *whole, value_counts *out)
{
    const uint64_t sign = (uint64_t)1 << (whole->bits - 1);
    const value_count *const items = whole->items, end = {sign, 0};
    size_t low = 0, half = 0;
    while (half < whole->size && items[half].value < sign) half++;
    out->bits = whole->bits - 1, out->size = 0;
    for (size_t high = half; low < half || high < whole->size;) {
        const value_count a = low < half ? items[low] : end, b = high < whole->size ? items[high] : end;
        const uint64_t other = high < whole->size ? b.value ^ sign : sign, value = a.value < other ? a.value : other;
        out->items[out->size++] =
            (value_count){value, (a.value == value ? a.count : 0) + (other == value ? b.count : 0)};
        low += a.value == value, high += other == value;
    }
}

/* The counts of shorter prefixes, which may take the place of the longer ones. */
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

/* A count that at least `most` of the values have. */
static uint64_t least_of_top(const value_counts *counts, uint32_t most)
{
    enum { NUM_BUCKETS = 1024 };
    uint32_t buckets[NUM_BUCKETS] = {0};
    for (size_t i = 0; i < counts->size; i++)
        buckets[counts->items[i].count < NUM_BUCKETS ? counts->items[i].count : NUM_BUCKETS - 1]++;
    uint32_t least = NUM_BUCKETS - 1;
    for (size_t above = buckets[least]; above < most && least > 0; above += buckets[least]) least--;
    return least;
}

/* The most frequent values, of equally frequent ones the smaller first. @return how many, up to most. */
static uint32_t top_values(const value_counts *counts, uint32_t most, value_count *top)
{
    uint64_t least = 0; /* that may be among the most frequent */
    if (counts->size > 4 * (size_t)most) least = least_of_top(counts, most);
    uint32_t size = 0;
    for (size_t i = 0; i < counts->size && most; i++) {
        const value_count item = counts->items[i];
        if (item.count < least) continue;
        if (size == most && item.count <= top[size - 1].count) continue;
        uint32_t at = size < most ? size++ : size - 1;
        for (; at > 0 && top[at - 1].count < item.count; at--) top[at] = top[at - 1];
        top[at] = item;
    }
    return size;
}

/* Which counts hold the symbols of a shape. */
static const value_counts *counts_of(const values *v, shape s)
{
    if (s.rotate) return &v->unsigned_;
    return s.symbol_bits <= v->whole.bits ? &v->whole : &v->long_;
}

/* ---- costs ------------------------------------------------------------------------------------------------------- */

/* A shape with its tails, of dense or listed rows, with entries a table or a column. */
typedef struct option {
    shape shape;
    listing as;
    bool per_column;
    double sets;                     /* of entries */
    double extra_bytes;              /* of a mean row besides the values */
    double tails[MOST_ENTRIES + 1];  /* elements of a mean row whose rank is k or higher */
    double some[MOST_ENTRIES + 1];   /* share of the rows that have such an element, if they fall independently */
    double costs[MOST_LISTS], least; /* bytes of a mean row with its share of the codebook, by the list of digits */
} option;

/* Fills an option's tails from the counts of ranks 0, 1, ..., `size` of them, `scale` elements each. */
static void fill_tails(option *o, double total, double scale, double num_rows, const uint64_t *counts, uint32_t size)
{
    double left = total;
    for (uint32_t k = 0; k <= MOST_ENTRIES; k++) {
        o->tails[k] = left / num_rows;
        o->some[k] = k > size ? o->some[k - 1] : 1.0 - exp(-o->tails[k]);
        if (k < size) left = fmax(0.0, left - scale * (double)counts[k]);
    }
}

/* What is known of the table and its sample. Values are those of coded elements: without the invariant bits. */
typedef struct search {
    const uint8_t *rows;
    size_t num_rows, step, num_counted; /* rows of the sample; each step-th is counted, all of them for columns */
    size_t num_loaded, num_defaults;    /* of those counted: in `elements`, and default rows */
    uint64_t default_row;               /* the value of such rows */
    uint32_t element_bytes, width, row_bytes, columns;
    uint32_t invariant_bits;
    uint64_t invariant_value;
    const uint16_t *live_columns; /* or NULL: all */
    uint32_t exponent_bits, num_shapes, num_lists;
    double table_rows, lacking; /* the latter: share of the rows that are raw for want of the invariant bits */
    uint64_t default_value, closed_value;
    bool is_whole; /* the sample is the table */
    shape shapes[MOST_SHAPES];
    digit_list lists[MOST_LISTS];
} search;

/* Bits of a part with a field of `bits` bits for each element of rank k or higher, padded. is_exact: there are as many
 * in all rows. */
static double part_bits(const option *o, uint32_t k, uint32_t bits, bool is_exact)
{
    if (is_exact) return 8.0 * ceil(o->tails[k] * bits / 8.0);
    const uint32_t unit = bits % 8 == 0 ? 8 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
    return o->tails[k] * bits + (8 - unit) / 2.0 * o->some[k];
}

/* Bytes that the codebook takes. */
static double codebook_bytes(const search *s, const option *o, uint32_t num_entries)
{
    return o->sets * num_entries * ibp_bytes_of_symbol(o->shape.symbol_bits) +
           (o->as != DENSE ? 2.0 * s->width / 8.0 : 0.0);
}

/* Fills in the bytes of a mean row, with its share of the codebook, by all lists of digits. A list continues its
 * parent, whose planes it shares: list_digits puts the children of list i at 4 * i + 1 and behind. */
static void judge(const search *s, option *o)
{
    const uint32_t symbol_bits = o->shape.symbol_bits;
    double escapes[MOST_ENTRIES + 1], books[MOST_ENTRIES + 1], planes[MOST_LISTS]; /* bits, bytes, bits */
    for (uint32_t k = 0; k <= MOST_ENTRIES; k++) {
        escapes[k] = part_bits(o, k, symbol_bits, false);
        books[k] = codebook_bytes(s, o, k) / s->table_rows;
    }
    planes[0] = part_bits(o, 0, s->width - symbol_bits, o->as == DENSE);
    o->least = INFINITY;
    for (uint32_t i = 0; i < s->num_lists; i++) {
        const digit_list *const digits = &s->lists[i];
        if (i) {
            const uint32_t bits = digits->widths[digits->num_planes - 1],
                           first = digits->num_entries + 1 - (1u << bits);
            planes[i] = planes[(i - 1) / IBP_MAX_DIGIT_BITS] + part_bits(o, first, bits, o->as == DENSE && first == 0);
        }
        o->costs[i] = o->extra_bytes + (planes[i] + escapes[digits->num_entries]) / 8.0 + books[digits->num_entries];
        if (o->costs[i] < o->least) o->least = o->costs[i];
    }
}

static double least_of(const option *options, uint32_t count)
{
    double least = INFINITY;
    for (uint32_t k = 0; k < count; k++)
        if (options[k].least < least) least = options[k].least;
    return least;
}

/* Whether dense rows have a decoder of their own (csrc/cuda/decode/decode_dense.cuh). */
static bool is_fast(const option *o, const digit_list *digits)
{
    for (uint32_t p = 0; p < digits->num_planes; p++)
        if (digits->widths[p] != 2) return false;
    return o->shape.symbol_bits <= 8 && o->as == DENSE;
}

/* Of equally good plans the one that decodes faster. */
static bool is_simpler(const search *s, const option *a, const digit_list *x, const option *b, const digit_list *y)
{
    if (a->as != b->as) return a->as < b->as;
    if (x->num_planes != y->num_planes) return x->num_planes < y->num_planes;
    return codebook_bytes(s, a, x->num_entries) < codebook_bytes(s, b, y->num_entries);
}

/* The plan to take of all options: which option, and its digits. */
static uint32_t choose(const search *s, const option *options, uint32_t count, const digit_list **digits, double *cost)
{
    const double least = least_of(options, count);
    double least_fast = INFINITY;
    uint32_t found = 0, fast = count;
    const digit_list *best = NULL, *best_fast = NULL;
    for (uint32_t k = 0; k < count; k++)
        for (uint32_t i = 0; options[k].least <= FAST_COST * least && i < s->num_lists; i++) {
            const option *const o = &options[k];
            const digit_list *const tried = &s->lists[i];
            const double bytes = o->costs[i];
            const double worth = o->per_column ? FAST_COLUMNS_COST : FAST_COST;
            if (is_fast(o, tried) && bytes <= worth * least && bytes < least_fast)
                least_fast = bytes, fast = k, best_fast = tried;
            if (bytes <= AS_GOOD * least && (best == NULL || is_simpler(s, o, tried, &options[found], best)))
                found = k, best = tried;
        }
    *digits = fast < count ? best_fast : best;
    found = fast < count ? fast : found;
    *cost = fmin(options[found].costs[*digits - s->lists], s->row_bytes);
    return found;
}

/* ---- values ------------------------------------------------------------------------------------------------------ */

/* element_bytes is a constant where this is called. */
static inline void load_elements_of(const uint8_t *from, uint32_t count, uint64_t *elements, uint32_t element_bytes)
{
    for (uint32_t i = 0; i < count; i++) elements[i] = ibp_load_number(from + (size_t)i * element_bytes, element_bytes);
}

static void load_elements(const uint8_t *from, uint32_t count, uint32_t element_bytes, uint64_t *elements)
{
    IBP_BY_SIZE(element_bytes, load_elements_of, from, count, elements);
}

/* The column of live element i: another thread may write live_columns meanwhile. */
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

/* The symbols that columns choose from. A short symbol is itself the index into places; a long one's hash is, and the
 * symbol at the place found has to be compared. Where not all places are used, short symbols that are met get one. */
typedef struct dictionary {
    uint32_t size, used, symbol_bits;
    uint8_t *places; /* of every symbol or hash; size if it is none */
    value_count symbols[DICTIONARY + 1];
} dictionary;

/* What is looked at of the sample: `columns` columns of each row_step-th row, each column_step-th one. */
typedef struct part {
    size_t row_step;
    uint32_t columns, column_step;
    bool is_table; /* it need not stand for other rows */
} part;

/* Every symbol of a part by column, once: the counts of shapes of fewer bits are sums of these. */
typedef struct joint_counts {
    dictionary symbols; /* not rotated */
    part of;            /* no columns: nothing is counted */
    size_t num_rows[2]; /* even and odd ones */
    uint8_t places[1 << MOST_BINS_BITS];
    uint32_t counts[2][JOINT_CELLS];
} joint_counts;

/* Room for what is counted: `elements` and `listed` hold as many values as the counted rows have. The counts of all
 * elements and of those listed have places of their own. */
typedef struct room {
    uint64_t *elements, *listed, *longs, *other_longs;
    uint32_t *bins;
    value_count *whole[2], *unsigned_[2], *long_[2], *folded;
    option *options;
    uint32_t *column_counts;
    uint8_t *dictionary; /* place of each symbol or hash */
    uint8_t *ranks;      /* of each place, column by column */
    joint_counts *joint;
} room;

/* Counts the prefixes of values. */
static void count_values(const uint64_t *elements, size_t count, uint32_t width, const room *r, values *v)
{
    const uint32_t bits = width < MOST_BINS_BITS ? width : MOST_BINS_BITS, is_listed = v->as != DENSE;
    value_count *const whole = r->whole[is_listed], *const longs = r->long_[is_listed];
    v->whole = (value_counts){whole, 0, bits, 1.0};
    v->unsigned_ = (value_counts){r->unsigned_[is_listed], 0, bits - 1, 1.0};
    if (count <= MOST_SORTED) {
        for (size_t i = 0; i < count; i++) r->longs[i] = elements[i] >> (width - bits);
        v->whole.size = compact(sort_values(r->longs, r->other_longs, count, bits), count, whole);
    } else {
        memset(r->bins, 0, sizeof *r->bins << (bits < 2 ? 2 : bits));
        for (size_t i = 0; i < count; i++) r->bins[elements[i] >> (width - bits)]++;
        for (uint64_t b = 0; b < (uint64_t)1 << bits; b++) {
            if (b % 4 == 0 && (r->bins[b] | r->bins[b + 1] | r->bins[b + 2] | r->bins[b + 3]) == 0)
                b += 3;
            else if (r->bins[b])
                whole[v->whole.size++] = (value_count){b, r->bins[b]};
        }
    }
    drop_sign(&v->whole, &v->unsigned_);
    const size_t step = count / MOST_LONG + 1, num_longs = width > bits ? (count + step - 1) / step : 0;
    value_count top = {0, 0};
    size_t size = 0;
    if (num_longs) top_values(&v->whole, 1, &top);
    const uint64_t common = top.value << (width - bits); /* zeros, mostly: they need not be sorted */
    for (size_t i = 0; i < num_longs; i++) r->longs[size] = elements[i * step], size += r->longs[size] != common;
    const size_t num_common = num_longs - size;
    if (num_common) r->longs[size++] = common;
    v->long_ = (value_counts){longs, 0, width, num_longs ? (double)count / (double)num_longs : 0.0};
    v->long_.size = compact(sort_values(r->longs, r->other_longs, size, width), size, longs);
    for (size_t i = 0; num_common && i < v->long_.size; i++)
        if (longs[i].value == common) longs[i].count = num_common;
    v->total = (double)count;
}

/* The share of a value. */
static double share_of(const values *v, uint32_t width, uint64_t value)
{
    const value_counts *const counts = counts_of(v, (shape){0, width});
    for (size_t i = 0; i < counts->size && counts->items[i].value <= value; i++)
        if (counts->items[i].value == value) return counts->scale * (double)counts->items[i].count / v->total;
    return 0.0;
}

/* The most frequent value and its share of all. */
static uint64_t most_frequent(const values *v, uint32_t width, double *share)
{
    value_count top = {0, 0};
    const value_counts *const counts = counts_of(v, (shape){0, width});
    *share = top_values(counts, 1, &top) ? counts->scale * (double)top.count / v->total : 0.0;
    return top.value;
}

/* Bits an element of saying which elements are of a share. */
static double entropy(double share)
{
    return share <= 0 || share >= 1 ? 0.0 : -share * log2(share) - (1 - share) * log2(1 - share);
}

static bool is_run(const uint64_t *elements, size_t count)
{
    size_t same = 1;
    while (same < count && elements[same] == elements[0]) same++;
    return same >= count;
}

/* Counts the elements that differ from the default, but for those of closed rows, and what the rows take besides.
 * @return how many they are. */
static size_t count_listed(const search *s, const room *r, listing as, bool has_closed, values *v)
{
    const uint32_t signs = as == LISTED_SIGNED;                     /* bits stored of each unlisted element */
    const uint64_t bits = ~(uint64_t)0 >> (64 - s->width) >> signs; /* that make an element differ */
    uint64_t *const listed = r->listed;
    size_t size = 0, bytes = 0;
    v->has_uniform = false;
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
        if (has_closed && is_uniform && listed[begin] == s->closed_value) size = begin;
    }
    v->num_rows = (double)s->num_loaded, v->extra_bytes = (double)bytes / (double)s->num_loaded;
    count_values(listed, size, s->width, r, v);
    return size;
}

/* Counts the elements that rows code, unless they have been counted: all of them in known[0], those last listed in
 * known[1]. The closed value is the most frequent one of those listed, if any row has only that. */
static const values *count_as(search *s, const room *r, listing as, values *known)
{
    double unused;
    values *const v = &known[as != DENSE];
    if (v->as == as && v->num_rows > 0) return v;
    *v = (values){.as = as, .num_rows = (double)s->num_loaded};
    if (as == DENSE) {
        count_values(r->elements, s->num_loaded * s->columns, s->width, r, v);
        return v;
    }
    const bool has_listed = count_listed(s, r, as, false, v) > 0;
    s->closed_value = has_listed ? most_frequent(v, s->width, &unused) : s->default_value;
    if (v->has_uniform) count_listed(s, r, as, true, v);
    return v;
}

/* One option for each shape. Shapes of one kind go from few bits to many: each is folded from the one after it. */
static void add_options(const search *s, const values *v, const room *r, option *options)
{
    value_counts folded = {.items = r->folded};
    const value_counts *last = NULL;
    for (uint32_t i = s->num_shapes; i-- > 0;) {
        value_count top[MOST_ENTRIES];
        uint64_t ranked[MOST_ENTRIES];
        const value_counts *const counts = counts_of(v, s->shapes[i]);
        fold(counts == last ? &folded : counts, s->shapes[i].symbol_bits, &folded);
        last = counts;
        const uint32_t size = top_values(&folded, MOST_ENTRIES, top);
        for (uint32_t k = 0; k < size; k++) ranked[k] = top[k].count;
        options[i] = (option){.shape = s->shapes[i], .as = v->as, .sets = 1, .extra_bytes = v->extra_bytes};
        fill_tails(&options[i], v->total, counts->scale, v->num_rows, ranked, size);
        judge(s, &options[i]);
    }
}

/* ---- entries a column -------------------------------------------------------------------------------------------- */

static uint32_t hash_of(uint64_t symbol) { return (uint32_t)(symbol * 0x9e3779b97f4a7c15u >> (64 - MOST_BINS_BITS)); }

static uint8_t long_place_of(const dictionary *d, uint64_t symbol)
{
    const uint8_t place = d->places[hash_of(symbol)];
    return d->symbols[place].value == symbol ? place : (uint8_t)d->size;
}

static void make_dictionary(const search *s, const values *v, shape of, const room *r, dictionary *d)
{
    const uint32_t cells = (1u << 20) / s->columns, most = cells < 16 ? 16 : cells < DICTIONARY ? cells : DICTIONARY;
    uint8_t *const places = r->dictionary;
    value_counts folded = {.items = r->folded};
    d->symbol_bits = of.symbol_bits, d->places = places;
    fold(counts_of(v, of), of.symbol_bits, &folded);
    d->size = d->used = top_values(&folded, most, d->symbols);
    const bool is_short = of.symbol_bits <= MOST_BINS_BITS;
    memset(places, (int)d->size, (size_t)1 << (is_short ? of.symbol_bits : MOST_BINS_BITS));
    d->symbols[d->size] = (value_count){0, 0};
    for (uint32_t k = d->size; k-- > 0;) /* of those with one hash the most frequent is found */
        places[is_short ? d->symbols[k].value : hash_of(d->symbols[k].value)] = (uint8_t)k;
}

/* The most frequent of a column's symbols: order[k] is the place in the dictionary of its k-th entry. */
static uint32_t order_column(const search *s, const dictionary *d, const uint32_t *own, const double *pseudo,
                             uint8_t *order)
{
    double weights[MOST_ENTRIES];
    uint32_t size = 0;
    for (uint32_t k = 0; k < d->size; k++) {
        const double weight = own[k] + (s->is_whole ? 0.0 : pseudo[k]);
        if (size == MOST_ENTRIES && weight <= weights[size - 1]) continue;
        uint32_t at = size < MOST_ENTRIES ? size++ : size - 1;
        for (; at > 0 && weights[at - 1] < weight; at--) weights[at] = weights[at - 1], order[at] = order[at - 1];
        weights[at] = weight, order[at] = (uint8_t)k;
    }
    return size;
}

/* is_short and element_bytes are constants where this is called. */
static inline void count_rows_of(const search *s, const part *of, size_t first, size_t step, dictionary *d, shape sh,
                                 uint32_t *counts, bool is_short, uint32_t element_bytes)
{
    const uint32_t shift = s->invariant_bits + (sh.symbol_bits ? s->width - sh.symbol_bits - sh.rotate : 0);
    const uint64_t ones = sh.symbol_bits ? ~(uint64_t)0 >> (64 - sh.symbol_bits) : 0;
    const uint32_t columns = of->columns, column_step = of->column_step, none = d->size, stride = none + 1;
    const bool has_all = s->live_columns == NULL;
    uint8_t *const places = d->places;
    memset(counts, 0, sizeof *counts * columns * stride);
    for (size_t at = first; at < s->num_rows; at += step) {
        const uint8_t *const row = s->rows + at * s->row_bytes;
        uint32_t *own = counts;
        size_t i = 0;
        for (uint32_t c = 0; c < columns; c++, i += column_step, own += stride) {
            const uint64_t element =
                               ibp_load_number(row + (has_all ? i : column_of(s, i)) * element_bytes, element_bytes),
                           symbol = element >> shift & ones;
            uint32_t place = is_short ? places[symbol] : long_place_of(d, symbol);
            if (is_short && place == none && d->used < none) {
                place = d->used++;
                d->symbols[place] = (value_count){symbol, 0}, places[symbol] = (uint8_t)place;
            }
            own[place]++;
        }
    }
}

/* Counts the symbols of columns in each step-th row from `first` on. @return how many rows there are. */
static size_t count_rows(const search *s, const part *of, size_t first, size_t step, dictionary *d, shape sh,
                         uint32_t *counts)
{
    if (d->symbol_bits <= MOST_BINS_BITS)
        IBP_BY_SIZE(s->element_bytes, count_rows_of, s, of, first, step, d, sh, counts, true);
    else
        IBP_BY_SIZE(s->element_bytes, count_rows_of, s, of, first, step, d, sh, counts, false);
    return first < s->num_rows ? (s->num_rows - first + step - 1) / step : 0;
}

static bool has_joint(const room *r, const part *of, shape sh)
{
    const joint_counts *const j = r->joint;
    return j->of.columns == of->columns && j->of.row_step == of->row_step &&
           sh.symbol_bits + sh.rotate <= j->symbols.symbol_bits;
}

/* Counts all symbols of a part at once, if they are few: of most_bits bits or fewer, but enough for a shape. */
static void count_jointly(const search *s, const values *v, const part *of, shape least, uint32_t most_bits,
                          const room *r)
{
    joint_counts *const j = r->joint;
    dictionary *const d = &j->symbols;
    value_counts folded = {.items = r->folded};
    const uint32_t least_bits = least.symbol_bits + least.rotate,
                   most_places = ibp_min_u32(DICTIONARY, JOINT_CELLS / of->columns);
    uint32_t bits = ibp_min_u32(most_bits, v->whole.bits);
    if (has_joint(r, of, least)) return;
    for (j->of.columns = 0; bits >= least_bits; bits--) {
        fold(&v->whole, bits, &folded);
        d->size = (uint32_t)(folded.size + folded.size / 4 + JOINT_SPARE);
        if (d->size < most_places) break;
    }
    if (bits < least_bits || s->num_rows / of->row_step < 4 * d->size) return;
    d->symbol_bits = bits, d->places = j->places, d->used = top_values(&folded, DICTIONARY, d->symbols);
    memset(d->places, (int)d->size, (size_t)1 << bits);
    for (uint32_t k = 0; k < d->used; k++) d->places[d->symbols[k].value] = (uint8_t)k;
    for (uint32_t half = 0; half < 2; half++)
        j->num_rows[half] =
            count_rows(s, of, half * of->row_step, 2 * of->row_step, d, (shape){0, bits}, j->counts[half]);
    if (d->used < d->size) j->of = *of;
}

/* Adds up the joint counts of half the rows for a shape. @return how many rows there are. */
static size_t fold_joint(const room *r, uint32_t half, const dictionary *d, shape sh)
{
    const joint_counts *const j = r->joint;
    const uint32_t shift = j->symbols.symbol_bits - sh.symbol_bits - sh.rotate;
    const uint64_t ones = ~(uint64_t)0 >> (64 - sh.symbol_bits);
    uint8_t to[DICTIONARY];
    for (uint32_t k = 0; k < j->symbols.used; k++) to[k] = d->places[j->symbols.symbols[k].value >> shift & ones];
    const uint32_t used = j->symbols.used, *from = j->counts[half];
    uint32_t *counts = r->column_counts;
    for (uint32_t c = 0; c < j->of.columns; c++, counts += d->size + 1, from += j->symbols.size + 1)
        for (uint32_t k = 0; k < used; k++) counts[to[k]] += from[k];
    return j->num_rows[half];
}

enum { EVEN = 1, ODD = 2 };

/* Counts the symbols of columns in even or odd rows of a part, or in all. @return how many rows there are. */
static size_t count_columns(const search *s, const part *of, uint32_t halves, dictionary *d, shape sh, const room *r)
{
    const size_t step = of->row_step * (halves == (EVEN | ODD) ? 1 : 2);
    if (!has_joint(r, of, sh))
        return count_rows(s, of, halves == ODD ? of->row_step : 0, step, d, sh, r->column_counts);
    memset(r->column_counts, 0, sizeof *r->column_counts * of->columns * (d->size + 1));
    return (halves & EVEN ? fold_joint(r, 0, d, sh) : 0) + (halves & ODD ? fold_joint(r, 1, d, sh) : 0);
}

/* Adds up, of the columns' counts, what every place of the dictionary has, and what every rank has. */
static void add_counts(const part *of, uint32_t stride, const room *r, uint64_t *by_place, uint64_t *by_rank)
{
    for (size_t c = 0; c < of->columns; c++)
        for (uint32_t k = 0; k < stride; k++) {
            const uint32_t count = r->column_counts[c * stride + k];
            by_place[k] += count;
            if (by_rank != NULL) by_rank[r->ranks[c * stride + k]] += count;
        }
}

/* Counts that each place of the dictionary has besides the column's own, from the counts of `rows` rows. */
static void find_pseudo_counts(const part *of, const dictionary *d, size_t rows, const room *r, double *pseudo)
{
    uint64_t totals[DICTIONARY + 1] = {0};
    add_counts(of, d->size + 1, r, totals, NULL);
    for (uint32_t k = 0; k < d->size; k++) pseudo[k] = (double)totals[k] * PSEUDO_COUNTS / ((double)rows * of->columns);
}

/* Finds the rank of each place of the dictionary in each column, from the counts of `rows` rows. */
static void rank_places(const search *s, const part *of, const dictionary *d, size_t rows, const room *r)
{
    const uint32_t stride = d->size + 1;
    double pseudo[DICTIONARY];
    find_pseudo_counts(of, d, rows, r, pseudo);
    for (uint32_t c = 0; c < of->columns; c++) {
        uint8_t order[MOST_ENTRIES], *const to = r->ranks + (size_t)c * stride;
        const uint32_t size = order_column(s, d, r->column_counts + (size_t)c * stride, pseudo, order);
        memset(to, MOST_ENTRIES, stride);
        for (uint32_t k = 0; k < size; k++) to[order[k]] = (uint8_t)k;
    }
}

/* An option with entries a column for a part of the sample, and one with the table's: learned on the even rows and
 * judged on the odd ones, unless the part is the whole table. */
static void column_option(const search *s, const values *v, shape sh, const part *of, const room *r, option *own,
                          option *table)
{
    dictionary d;
    uint64_t own_ranks[MOST_ENTRIES + 1] = {0}, table_ranks[DICTIONARY + 1] = {0};
    make_dictionary(s, v, sh, r, &d);
    size_t rows = count_columns(s, of, of->is_table ? EVEN | ODD : EVEN, &d, sh, r);
    rank_places(s, of, &d, rows, r);
    if (!of->is_table) rows = count_columns(s, of, ODD, &d, sh, r);
    add_counts(of, d.size + 1, r, table_ranks, own_ranks);
    if (d.size < MOST_ENTRIES) table_ranks[d.size] = 0; /* of none */
    const double num_rows = (double)rows, total = num_rows * of->columns;
    *own = (option){.shape = sh, .per_column = true, .sets = of->columns};
    *table = (option){.shape = sh};
    fill_tails(own, total, 1.0, num_rows, own_ranks, MOST_ENTRIES);
    fill_tails(table, total, 1.0, num_rows, table_ranks, MOST_ENTRIES);
    judge(s, own), judge(s, table);
}

/* The part that shapes are compared on. */
static part tried_part(const search *s)
{
    const uint32_t step = (s->columns + MOST_TRIED_COLUMNS - 1) / MOST_TRIED_COLUMNS;
    part p = {.row_step = 1, .columns = (s->columns + step - 1) / step, .column_step = step};
    const size_t most = TRIED_ELEMENTS / p.columns;
    if (s->num_rows > 2 * most) p.row_step = s->num_rows / most;
    p.is_table = s->is_whole && p.row_step == 1;
    return p;
}

/* The shape to have entries a column with: that of the table's, and wider and narrower ones for as long as they are
 * better. shapes: `count` of one kind; `start` is best for the table. @return its cost; INFINITY if none pays. */
static double find_column_shape(const search *s, const values *v, const shape *shapes, uint32_t count, uint32_t start,
                                const room *r, shape *best)
{
    const part tried = tried_part(s);
    option o, table;
    count_jointly(s, v, &tried, shapes[start], shapes[start].symbol_bits + shapes[start].rotate + 2, r);
    column_option(s, v, shapes[start], &tried, r, &o, &table);
    if (o.least > COLUMNS_PAY * table.least) return INFINITY;
    double here = o.least;
    *best = shapes[start];
    for (int step = 1; step >= -1; step -= 2)
        for (int64_t at = (int64_t)start + step; at >= 0 && at < count; at += step) {
            column_option(s, v, shapes[at], &tried, r, &o, &table);
            if (o.least >= here) break;
            here = o.least, *best = shapes[at];
        }
    return here;
}

/* Options with entries a column, of both kinds of shapes unless one is clearly better. @return how many. */
static uint32_t add_columns(const search *s, const values *v, const option *table, const room *r, option *options)
{
    const part all = {.row_step = 1, .columns = s->columns, .column_step = 1, .is_table = s->is_whole};
    shape best[2];
    double costs[2] = {INFINITY, INFINITY};
    for (uint32_t rotate = 0; rotate < 2; rotate++) {
        shape own[MOST_SHAPES];
        uint32_t count = 0, start = 0;
        double least = INFINITY;
        for (uint32_t i = 0; i < s->num_shapes; i++) {
            if (s->shapes[i].rotate != rotate || s->shapes[i].symbol_bits == 0) continue;
            if (table[i].least < least) least = table[i].least, start = count;
            own[count++] = s->shapes[i];
        }
        if (count) costs[rotate] = find_column_shape(s, v, own, count, start, r, &best[rotate]);
    }
    uint32_t found = 0;
    const double most = fmin(DBL_MAX, WORSE * fmin(costs[0], costs[1]));
    const bool is_rotated = costs[0] > most || (costs[1] <= most && best[1].symbol_bits >= best[0].symbol_bits);
    if (most < DBL_MAX) count_jointly(s, v, &all, best[is_rotated], best[is_rotated].symbol_bits + is_rotated, r);
    for (uint32_t rotate = 0; rotate < 2; rotate++) {
        option unused;
        if (costs[rotate] > most) continue;
        column_option(s, v, best[rotate], &all, r, &options[found++], &unused);
    }
    return found;
}

/* ---- all of it --------------------------------------------------------------------------------------------------- */

static bool is_sample(const ibp_sample *sample)
{
    if (sample == NULL || sample->rows == NULL || sample->num_rows < 1 || sample->table_rows < 0) return false;
    const uint32_t row_bytes = sample->row_bytes, element_bytes = sample->element_bytes;
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(element_bytes) || row_bytes % element_bytes) return false;
    if (sample->level != IBP_LEVEL_DEFAULT && sample->level != IBP_LEVEL_FAST) return false;
    return sample->exponent_bits < 8 * element_bytes && sample->num_rows <= MOST_SAMPLED_BYTES / row_bytes;
}

/* The distance between counted rows, and the number of counted rows. */
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

/* The next num_bytes of scratch; NULL, and only counted, where there is none. */
static void *take(uint8_t *scratch, size_t *used, size_t num_bytes)
{
    uint8_t *const at = scratch == NULL ? NULL : scratch + *used;
    *used += align_up(num_bytes);
    return at;
}

/* Lays the arrays out in scratch. @return the bytes that they take. */
static size_t make_room(const ibp_sample *sample, uint8_t *scratch, room *r)
{
    const size_t columns = sample->row_bytes / sample->element_bytes, count = counted_rows(sample) * columns;
    const size_t bins = (size_t)1 << MOST_BINS_BITS, places = columns * (DICTIONARY + 1);
    size_t used = 0;
    r->elements = take(scratch, &used, sizeof *r->elements * count);
    r->listed = take(scratch, &used, sizeof *r->listed * count);
    r->longs = take(scratch, &used, sizeof *r->longs * MOST_LONG);
    r->other_longs = take(scratch, &used, sizeof *r->other_longs * MOST_LONG);
    r->bins = take(scratch, &used, sizeof *r->bins * bins);
    for (uint32_t i = 0; i < 2; i++) {
        r->whole[i] = take(scratch, &used, sizeof **r->whole * bins);
        r->unsigned_[i] = take(scratch, &used, sizeof **r->unsigned_ * bins);
        r->long_[i] = take(scratch, &used, sizeof **r->long_ * MOST_LONG);
    }
    r->folded = take(scratch, &used, sizeof *r->folded * bins);
    r->options = take(scratch, &used, sizeof *r->options * (3 * MOST_SHAPES + 2));
    r->column_counts = take(scratch, &used, sizeof *r->column_counts * places);
    r->dictionary = take(scratch, &used, bins);
    r->ranks = take(scratch, &used, places);
    r->joint = take(scratch, &used, sizeof *r->joint);
    return used;
}

size_t ibp_learn_scratch_bytes(const ibp_sample *sample)
{
    room r;
    return is_sample(sample) ? make_room(sample, NULL, &r) : 0;
}

/* Bytes of the template and the live columns, which lie before the entries. */
static size_t constants_bytes(uint32_t row_bytes, uint32_t element_bytes)
{
    return align_up(row_bytes) + align_up(sizeof(uint16_t) * (row_bytes / element_bytes));
}

size_t ibp_max_planes_bytes(uint32_t row_bytes, uint32_t element_bytes)
{
    if (!ibp_are_sizes(0, row_bytes) || !ibp_is_element_size(element_bytes) || row_bytes % element_bytes) return 0;
    return constants_bytes(row_bytes, element_bytes) + (size_t)MOST_ENTRIES * row_bytes;
}

/* Writes the entries of a plan; what is missing repeats the first one, so that it is never chosen. */
static void write_entries(const search *s, const values *v, const option *o, uint32_t num_entries, const room *r,
                          uint8_t *entries)
{
    const uint32_t bytes = ibp_bytes_of_symbol(o->shape.symbol_bits);
    dictionary d;
    double pseudo[DICTIONARY];
    make_dictionary(s, v, o->shape, r, &d);
    const part all = {.row_step = 1, .columns = s->columns, .column_step = 1, .is_table = true};
    if (o->per_column) find_pseudo_counts(&all, &d, count_columns(s, &all, EVEN | ODD, &d, o->shape, r), r, pseudo);
    for (uint32_t c = 0; c < (o->per_column ? s->columns : 1); c++) {
        uint8_t order[MOST_ENTRIES];
        uint32_t size = d.size < MOST_ENTRIES ? d.size : MOST_ENTRIES;
        for (uint32_t k = 0; k < size; k++) order[k] = (uint8_t)k;
        if (o->per_column) size = order_column(s, &d, r->column_counts + (size_t)c * (d.size + 1), pseudo, order);
        for (uint32_t k = 0; k < num_entries; k++, entries += bytes) {
            const uint64_t symbol = size ? d.symbols[order[k < size ? k : 0]].value : 0;
            memcpy(entries, &symbol, bytes);
        }
    }
}

/* A plan that was found: an option, its digits, and what a mean row costs. */
typedef struct plan {
    const option *option;
    const digit_list *digits;
    bool consecutive;
    uint64_t first_symbol;
    double cost;
} plan;

/* The run of FAST_ENTRIES consecutive symbols that most elements have. */
static void find_run(const search *s, const values *v, shape of, const room *r, option *o, uint64_t *first_symbol)
{
    value_counts folded = {.items = r->folded};
    uint64_t counts[256] = {0}, inside = 0, most = 0;
    fold(counts_of(v, of), of.symbol_bits, &folded);
    const uint32_t num_symbols = 1u << of.symbol_bits;
    for (size_t i = 0; i < folded.size; i++) counts[folded.items[i].value] = folded.items[i].count;
    for (uint32_t i = 0; i < FAST_ENTRIES; i++) inside += counts[i];
    *first_symbol = 0, most = inside;
    for (uint32_t first = 1; first < num_symbols; first++) {
        inside += counts[(first + FAST_ENTRIES - 1) % num_symbols] - counts[first - 1];
        if (inside > most) most = inside, *first_symbol = first;
    }
    *o = (option){.shape = of};
    counts[0] = most;
    fill_tails(o, v->total, 1.0, v->num_rows, counts, 1);
    for (uint32_t k = 1; k <= FAST_ENTRIES; k++) o->tails[k] = o->tails[1], o->some[k] = o->some[1];
    judge(s, o);
}

/* The best plan of level fast, of those with fast coders (csrc/cuda/kinds.h): dense rows of elements of two or four
 * bytes, one plane, consecutive entries, symbols that a byte holds. @return false if
 * its digits save next to nothing. */
static bool search_fast(search *s, const room *r, values *known, plan *found)
{
    uint32_t digits = 0;
    while (s->lists[digits].num_planes != 1 || s->lists[digits].widths[0] != FAST_DIGIT_BITS) digits++;
    option *const best = &r->options[0], *const tried = &r->options[1];
    *found = (plan){.option = best, .digits = &s->lists[digits], .consecutive = true, .cost = INFINITY};
    if (s->element_bytes != 2 && s->element_bytes != 4) return false;
    const values *const v = count_as(s, r, DENSE, known);
    for (uint32_t i = 0; i < s->num_shapes; i++) {
        uint64_t first_symbol;
        const uint32_t symbol_bits = s->shapes[i].symbol_bits,
                       residuals = 16 / s->element_bytes * (s->width - symbol_bits);
        if (symbol_bits < FAST_DIGIT_BITS || symbol_bits > 8 || residuals % 8 != 0) continue; /* of 16 bytes */
        find_run(s, v, s->shapes[i], r, tried, &first_symbol);
        if (tried->costs[digits] >= found->cost) continue;
        *best = *tried, found->cost = best->costs[digits], found->first_symbol = first_symbol;
    }
    return found->cost < s->columns * s->width / 8.0 - LEAST_FAST * s->row_bytes;
}

/* The best of all plans. @return the values that it codes. */
static const values *search_all(search *s, const room *r, values *known, plan *found)
{
    double share, least_listed = INFINITY;
    const values *const all = count_as(s, r, DENSE, known);
    add_options(s, all, r, r->options);
    uint32_t num_options = s->num_shapes;
    s->default_value = most_frequent(all, s->width, &share);
    const double negated = share_of(all, s->width, s->default_value ^ (uint64_t)1 << (s->width - 1));
    const double shares[] = {0, share, share + negated};
    for (listing as = LISTED; as <= LISTED_SIGNED; as++) {
        if (shares[as] < LEAST_SHARE || shares[as] * s->width < 2 * entropy(shares[as])) continue;
        if (as == LISTED_SIGNED && negated < LEAST_SHARE) continue;
        if (s->num_defaults > 0 && s->default_value != s->default_row) continue;
        add_options(s, count_as(s, r, as, known), r, r->options + num_options);
        least_listed = fmin(least_listed, least_of(r->options + num_options, s->num_shapes));
        num_options += s->num_shapes;
    }
    if (s->columns > 1 && (s->is_whole || s->num_rows > 1) && s->columns < 0.1 * s->row_bytes * s->table_rows &&
        least_of(r->options, s->num_shapes) <= COLUMNS_GAIN * least_listed)
        num_options += add_columns(s, all, r->options, r, &r->options[num_options]);
    *found = (plan){0};
    found->option = &r->options[choose(s, r->options, num_options, &found->digits, &found->cost)];
    return count_as(s, r, found->option->as, known);
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
    s->num_lists = list_digits(s->lists);
    s->table_rows = (double)(s->is_whole ? sample->num_rows : sample->table_rows);
}

/* Sets the value that most of the loaded rows of one value have. @return false if there are none. */
static bool find_default_row(search *s, const room *r)
{
    int64_t ahead = 0, found = 0;
    s->default_row = 0;
    for (size_t row = 0; row < s->num_loaded; row++) {
        const uint64_t *const own = r->elements + row * s->columns;
        if (!is_run(own, s->columns)) continue;
        if (ahead == 0) s->default_row = own[0];
        ahead += own[0] == s->default_row ? 1 : -1;
        found++;
    }
    return found > 0;
}

/* Takes default rows away from the loaded ones, which take no bytes and are not counted: one row at least is. */
static void drop_default_rows(search *s, const room *r)
{
    size_t kept = 0;
    for (size_t row = 0; row < s->num_loaded; row++) {
        const uint64_t *const own = r->elements + row * s->columns;
        const bool is_default = own[0] == s->default_row && is_run(own, s->columns);
        s->num_defaults += is_default;
        if (is_default && s->num_defaults < s->num_counted) continue;
        memmove(r->elements + kept++ * s->columns, own, sizeof *own * s->columns);
    }
    s->num_loaded = kept;
}

/* Sets up the search for a plan: of live columns, or NULL for all, and without some invariant bits. */
static void begin_search(search *s, const uint16_t *live_columns, uint32_t num_constant, uint32_t invariant_bits,
                         const room *r)
{
    s->columns = s->row_bytes / s->element_bytes - num_constant, s->live_columns = num_constant ? live_columns : NULL;
    s->invariant_bits = invariant_bits, s->width = 8 * s->element_bytes - invariant_bits;
    s->num_shapes = list_shapes(s->width, s->exponent_bits, s->shapes);
    s->default_value = s->closed_value = 0, s->num_loaded = s->num_counted, s->num_defaults = 0;
    r->joint->of.columns = 0;
    for (size_t i = 0; i < s->num_counted; i++) load_row(s, i * s->step, r->elements + i * s->columns);
    if (find_default_row(s, r)) drop_default_rows(s, r);
}

/* How many of the lowest bits all elements of a row have in common. first: its first element. */
static uint32_t common_bits(const search *s, size_t row, uint64_t *first)
{
    enum { SOME = 64 }; /* elements: few rows have any bit in common, and the first elements show it */
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

/* The low bits that the elements of most counted rows agree on: the middle row has them. Sets their value, and the
 * share of the rows that lack them, which are stored raw. */
static uint32_t find_invariant_bits(search *s)
{
    const uint32_t most = 8 * s->element_bytes - LEAST_CODED_BITS;
    uint32_t rows_with[65] = {0}, bits = most, found = 0;
    for (size_t i = 0; i < s->num_counted; i++) {
        const uint32_t common = common_bits(s, i * s->step, &s->invariant_value);
        if (common <= most) rows_with[common]++, found++; /* others may be default rows, and say nothing */
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
        if (common < bits || (common > most && with > 0)) continue;
        if (with++ == 0) s->invariant_value = first & ones;
        agreeing += (first & ones) == s->invariant_value;
    }
    s->lacking = 1.0 - (double)agreeing / (double)with * (1.0 - (double)lacking / found);
    return s->lacking <= MOST_LACKING ? bits : 0;
}

/* Lists the columns that are not equal in all rows, until they are more than `most`. @return how many it listed.
 * element_bytes is a constant where this is called. */
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

/* Lists the columns that are not equal in all rows of the sample. @return how many are, 0 where they are too few. */
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

/* Searches, first without what all of the sample agrees on, then again with it where leaving it out does not pay.
 * @return the values that the plan codes, which are in `known`. */
static const values *find_plan(search *s, const ibp_sample *sample, const room *r, uint16_t *live_columns,
                               values *known, plan *found)
{
    const bool leaves_out = !sample->codes_invariant;
    const uint32_t bits = leaves_out ? find_invariant_bits(s) : 0;
    const uint32_t num_constant = leaves_out ? find_constant_columns(s, live_columns) : 0;
    begin_search(s, live_columns, num_constant, bits, r);
    known[0] = known[1] = (values){0};
    if (sample->level == IBP_LEVEL_FAST && search_fast(s, r, known, found)) return known;
    const values *const v = search_all(s, r, known, found);
    const option *const o = found->option;
    const double saved = o->tails[0] * bits / 8 - (bits ? s->lacking * (s->row_bytes - found->cost) : 0);
    const bool keeps_bits = bits && saved >= INVARIANT_SHARE * s->row_bytes;
    const bool keeps_columns = num_constant && o->as == DENSE;
    if (keeps_bits == (bits > 0) && keeps_columns == (num_constant > 0)) return v;
    begin_search(s, live_columns, keeps_columns ? num_constant : 0, keeps_bits ? bits : 0, r);
    known[0] = known[1] = (values){0};
    return search_all(s, r, known, found);
}

/* Writes the default row: the sample's first, with the default in the live columns. */
static void write_template(const search *s, uint64_t default_value, uint8_t *row_template)
{
    memcpy(row_template, s->rows, s->row_bytes);
    for (uint32_t c = 0; c < s->columns; c++)
        memcpy(row_template + (size_t)column_of(s, c) * s->element_bytes, &default_value, s->element_bytes);
}

static uint64_t whole_value(const search *s, uint64_t value)
{
    return s->invariant_bits ? value << s->invariant_bits | s->invariant_value : value;
}

ibp_status ibp_learn_planes(const ibp_sample *sample, void *scratch, size_t scratch_bytes, uint8_t *arrays,
                            size_t arrays_bytes, ibp_planes *planes, double *coded_bytes)
{
    if (!is_sample(sample) || planes == NULL || arrays == NULL || coded_bytes == NULL) return IBP_INVALID_ARGUMENT;
    if (scratch == NULL || (uintptr_t)scratch % 16 != 0 || (uintptr_t)arrays % 8 != 0) return IBP_INVALID_ARGUMENT;
    const uint32_t row_bytes = sample->row_bytes, element_bytes = sample->element_bytes;
    room r;
    if (make_room(sample, scratch, &r) > scratch_bytes) return IBP_BUFFER_TOO_SMALL;
    if (arrays_bytes < ibp_max_planes_bytes(row_bytes, element_bytes)) return IBP_BUFFER_TOO_SMALL;
    uint16_t *const live_columns = (uint16_t *)(void *)(arrays + align_up(row_bytes));
    uint8_t *const entries = arrays + constants_bytes(row_bytes, element_bytes);
    search s;
    values known[2];
    plan found;
    init_search(sample, &s);
    const values *const v = find_plan(&s, sample, &r, live_columns, known, &found);
    const option *const o = found.option;
    const digit_list *const digits = found.digits;
    const uint64_t default_value = o->as == DENSE ? s.default_row : s.default_value;
    *coded_bytes = fmin(found.cost, row_bytes);
    if (s.invariant_bits) *coded_bytes += s.lacking * (row_bytes - *coded_bytes);
    const double book = found.consecutive ? 0.0 : codebook_bytes(&s, o, digits->num_entries) / s.table_rows;
    *coded_bytes -= (*coded_bytes - book) * (double)s.num_defaults / (double)s.num_counted;
    *planes = (ibp_planes){.entries = digits->num_entries && !found.consecutive ? entries : NULL,
                           .default_value = whole_value(&s, default_value),
                           .closed_value = o->as == DENSE ? 0 : whole_value(&s, s.closed_value),
                           .element_bytes = element_bytes,
                           .residual_bits = s.width - o->shape.symbol_bits,
                           .rotate = o->shape.rotate,
                           .num_planes = digits->num_planes,
                           .num_entries = digits->num_entries,
                           .symbol_bytes = ibp_bytes_of_symbol(o->shape.symbol_bits),
                           .per_column = o->per_column,
                           .listed = o->as != DENSE,
                           .consecutive = found.consecutive,
                           .signed_default = o->as == LISTED_SIGNED,
                           .invariant_bits = s.invariant_bits,
                           .invariant_value = s.invariant_bits ? s.invariant_value : 0,
                           .first_symbol = found.first_symbol,
                           .num_constant = row_bytes / element_bytes - s.columns};
    memcpy(planes->digit_bits, digits->widths, sizeof planes->digit_bits);
    if (planes->num_constant) {
        write_template(&s, planes->default_value, arrays);
        planes->live_columns = live_columns, planes->row_template = arrays;
    }
    if (!found.consecutive) write_entries(&s, v, o, digits->num_entries, &r, entries);
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
    values v = {0};
    init_search(sample, &s);
    begin_search(&s, planes->live_columns, planes->num_constant, planes->invariant_bits, &r);
    s.default_value = planes->default_value >> planes->invariant_bits;
    s.closed_value = planes->closed_value >> planes->invariant_bits;
    const listing as = planes->signed_default ? LISTED_SIGNED : planes->listed ? LISTED : DENSE;
    if (as == DENSE)
        count_as(&s, &r, DENSE, &v);
    else
        count_listed(&s, &r, as, true, &v);
    const option o = {.shape = {planes->rotate, ibp_symbol_bits(planes)}, .per_column = planes->per_column};
    write_entries(&s, &v, &o, form.planes.num_entries, &r, entries);
    return IBP_OK;
}
