/* file_fields.c - reads the lines of a header's metadata, "key=value key=value", which hold the fields of tables and
 * codebooks (FORMAT.md section 9). It also knows the sizes of dtypes. It reads only these lines, not the file. */
#include "checks.h"
#include "file.h"

#include <string.h>

ibp_status ibp_refuse(ibp_refusal *refusal, ibp_text found, const char *wanted)
{
    *refusal = (ibp_refusal){.found = found, .wanted = wanted};
    return IBP_BAD_FILE;
}

ibp_status ibp_refuse_field(ibp_refusal *refusal, const ibp_field *of)
{
    *refusal = (ibp_refusal){.key = of->key, .wanted = of->wanted};
    if (of->is_given) refusal->found = of->text;
    return IBP_BAD_FILE;
}

/* ---- dtypes ------------------------------------------------------------------------------------------------------ */

uint32_t ibp_bits_of_dtype(ibp_text dtype)
{
    /* The dtypes of safetensors come first, then torch's dtypes that safetensors does not have. */
    static const struct {
        const char *name;
        uint32_t bits;
    } dtypes[] = {
        {"BOOL", 8},    {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6},     {"U8", 8},          {"I8", 8},
        {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"I16", 16},
        {"U16", 16},    {"F16", 16},    {"BF16", 16},   {"I32", 32},        {"U32", 32},        {"F32", 32},
        {"F64", 64},    {"I64", 64},    {"U64", 64},    {"C64", 64},        {"COMPLEX32", 32},  {"COMPLEX128", 128},
    };
    for (size_t i = 0; i < sizeof dtypes / sizeof *dtypes; i++)
        if (ibp_is_text(dtype, dtypes[i].name)) return dtypes[i].bits;
    return 0;
}

bool ibp_bytes_of_shape(const int64_t *shape, uint32_t num_dims, uint32_t bits, int64_t *num_bytes)
{
    int64_t num_bits = bits;
    bool is_empty = false;
    for (uint32_t d = 0; d < num_dims; d++) {
        if (__builtin_mul_overflow(num_bits, shape[d] != 0 ? shape[d] : 1, &num_bits)) return false;
        is_empty |= shape[d] == 0;
    }
    *num_bytes = is_empty ? 0 : num_bits / 8;
    return is_empty || num_bits % 8 == 0;
}

/* ---- one field --------------------------------------------------------------------------------------------------- */

/* Takes a pair: all characters up to a space or the end. */
static bool take_pair(ibp_text *line, ibp_text *pair)
{
    uint8_t utf8[4];
    *pair = (ibp_text){line->data, 0};
    for (ibp_text rest = *line; rest.num_bytes != 0; *line = rest) {
        const uint32_t num_bytes = ibp_take_character(&rest, utf8);
        if (num_bytes == 0) return false;
        if (num_bytes == 1 && utf8[0] == ' ') break;
        pair->num_bytes = (size_t)(rest.data - pair->data);
    }
    return true;
}

/* Takes 16 hexadecimal digits. */
static bool take_fingerprint(ibp_text *text, uint64_t *number)
{
    uint8_t c[4];
    *number = 0;
    for (int i = 0; i < 16; i++) {
        if (ibp_take_character(text, c) != 1) return false;
        const bool is_digit = c[0] >= '0' && c[0] <= '9', is_letter = c[0] >= 'a' && c[0] <= 'f';
        if (!is_digit && !is_letter) return false;
        *number = *number << 4 | (uint64_t)(is_digit ? c[0] - '0' : c[0] - 'a' + 10);
    }
    return true;
}

static bool take_digits(ibp_text *text)
{
    uint8_t c[4];
    bool is_one = false;
    for (ibp_text rest = *text; ibp_take_character(&rest, c) == 1 && c[0] >= '0' && c[0] <= '9'; *text = rest)
        is_one = true;
    return is_one;
}

/* Takes a real number, such as -1.5e-07. */
static bool take_real(ibp_text *text)
{
    ibp_take_prefix(text, "-");
    if (!take_digits(text) || (ibp_take_prefix(text, ".") && !take_digits(text))) return false;
    if (!ibp_take_prefix(text, "e")) return true;
    if (!ibp_take_prefix(text, "+")) ibp_take_prefix(text, "-");
    return take_digits(text);
}

bool ibp_take_listed(ibp_text *list, bool is_first, uint64_t *number)
{
    return (is_first || ibp_take_prefix(list, ",")) && ibp_take_number(list, number);
}

static bool is_within(const ibp_field *of, uint64_t number) { return number >= of->least && number <= of->most; }

static bool take_list(const ibp_field *of, ibp_text *list)
{
    uint64_t number;
    for (uint32_t i = 0; list->num_bytes != 0; i++)
        if (i == of->most_entries || !ibp_take_listed(list, i == 0, &number) || !is_within(of, number)) return false;
    return true;
}

/* Checks the text of a field against the field's kind. Stores the value of a number or a fingerprint in of->number. */
static bool read_value(ibp_field *of)
{
    ibp_text rest = of->text;
    switch (of->kind) {
    case IBP_FIELD_NUMBER:
        return ibp_take_number(&rest, &of->number) && rest.num_bytes == 0 && is_within(of, of->number);
    case IBP_FIELD_FINGERPRINT: return take_fingerprint(&rest, &of->number) && rest.num_bytes == 0;
    case IBP_FIELD_REAL: return take_real(&rest) && rest.num_bytes == 0;
    case IBP_FIELD_LIST: return take_list(of, &rest);
    case IBP_FIELD_OTHERS: return rest.num_bytes != 0 && memchr(rest.data, '=', rest.num_bytes);
    case IBP_FIELD_TEXT: return true;
    }
    return false;
}

/* Takes the key of a field and the "=" after it; for a field of kind IBP_FIELD_OTHERS, takes only the beginning of the
 * key. Returns the field, or NULL if the text begins with the key of none of the fields. */
static ibp_field *take_field(ibp_text *text, ibp_field *fields, size_t num_fields)
{
    for (size_t i = 0; i < num_fields; i++) {
        ibp_text rest = *text;
        if (!ibp_take_prefix(&rest, fields[i].key)) continue;
        if (fields[i].kind != IBP_FIELD_OTHERS && !ibp_take_prefix(&rest, "=")) continue;
        *text = rest;
        return &fields[i];
    }
    return NULL;
}

ibp_status ibp_read_fields(ibp_text line, ibp_field *fields, size_t num_fields, ibp_refusal *refusal)
{
    ibp_status status = IBP_OK;
    ibp_text pair;
    for (bool is_first = true; line.num_bytes != 0; is_first = false) {
        if (!is_first) ibp_take_prefix(&line, " ");
        const ibp_text rest = line;
        if (!take_pair(&line, &pair)) return ibp_refuse(refusal, rest, "a text");
        ibp_text value = pair;
        ibp_field *const of = take_field(&value, fields, num_fields);
        if (!of && (pair.num_bytes == 0 || !memchr(pair.data, '=', pair.num_bytes)))
            return ibp_refuse(refusal, pair, "key=value, and one space between fields");
        if (!of) {
            ibp_refuse(refusal, pair, "a field that this release knows: a newer one may");
            status = IBP_UNSUPPORTED_TABLE;
            continue;
        }
        if (of->is_given && of->kind != IBP_FIELD_OTHERS) return ibp_refuse(refusal, pair, "no field there twice");
        of->text = value, of->is_given = true;
        if (!read_value(of)) return ibp_refuse_field(refusal, of);
    }
    return status;
}

ibp_status ibp_check_given(const ibp_field *fields, size_t num_fields, uint32_t needed, uint32_t optional,
                           ibp_refusal *refusal)
{
    ibp_status status = IBP_OK;
    for (size_t i = 0; i < num_fields; i++) {
        const bool is_needed = needed >> i & 1, may_be = is_needed || (optional >> i & 1);
        if (is_needed && !fields[i].is_given) return ibp_refuse_field(refusal, &fields[i]);
        if (may_be || !fields[i].is_given) continue;
        *refusal = (ibp_refusal){fields[i].text, "no such field beside the others", fields[i].key};
        status = IBP_UNSUPPORTED_TABLE;
    }
    return status;
}

static ibp_status read_scheme(ibp_field *of, ibp_refusal *refusal)
{
    if (!of->is_given) return ibp_refuse_field(refusal, of);
    for (ibp_scheme scheme = IBP_SCHEME_RAW; ibp_scheme_name(scheme); scheme = (ibp_scheme)(scheme + 1))
        if (ibp_is_text(of->text, ibp_scheme_name(scheme))) return of->number = scheme, IBP_OK;
    ibp_refuse_field(refusal, of);
    return IBP_UNSUPPORTED_TABLE;
}

/* ---- lists of fields --------------------------------------------------------------------------------------------- */

#define NUMBER(low, high) .least = (low), .most = (high), .wanted = "a number from " #low " to " #high
#define LIST(entries, low, high)                                                       \
    .kind = IBP_FIELD_LIST, .most_entries = (entries), .least = (low), .most = (high), \
    .wanted = "at most " #entries " numbers from " #low " to " #high ", with commas between them"
#define ANY_NUMBER .most = UINT64_MAX, .wanted = "a number"
#define FINGERPRINT .kind = IBP_FIELD_FINGERPRINT, .wanted = "16 hexadecimal digits"
#define REAL .kind = IBP_FIELD_REAL, .wanted = "a real number"
#define TEXT .kind = IBP_FIELD_TEXT
#define SCHEME TEXT, .wanted = "a scheme that this release knows"
_Static_assert(IBP_MAX_ROW_BYTES == 65536 && IBP_MAX_FILE_DIMS == 64 && IBP_MAX_CLUSTERS == 256 &&
                   IBP_MAX_PLANES == 4 && IBP_MAX_DIGIT_BITS == 4 && IBP_OVERFLOW_ALIGN == 32,
               "the fields say these numbers");

enum {
    T_DTYPE,
    T_SHAPE,
    T_SCHEME,
    T_ROW,
    T_SLOT,
    T_CODEBOOK,
    T_PER_BASE,
    T_CONTENT,
    T_BASE,
    T_RESULT,
    T_CODEC,
    T_BLOCK,
    T_CODEC_OWN,
    T_COUNT
};
_Static_assert(IBP_TABLE_FIELDS == T_COUNT && IBP_CODEBOOK_FIELDS == IBP_C_COUNT,
               "ibp_file.h says how many fields there are");
static const ibp_field table_fields[T_COUNT] = {
    [T_DTYPE] = {.key = "dtype", TEXT, .wanted = "a dtype that this release knows"},
    [T_SHAPE] = {.key = "shape", LIST(64, 0, 9223372036854775807)},
    [T_SCHEME] = {.key = "scheme", SCHEME},
    [T_ROW] = {.key = "row_bytes", NUMBER(1, 65536)},
    [T_SLOT] = {.key = "slot_bytes", .most = 65536, .wanted = "row_bytes, or a multiple of 32 below it"},
    [T_CODEBOOK] = {.key = "codebook", NUMBER(0, 4294967295)},
    [T_PER_BASE] = {.key = "rows_per_base", .most = 32, .wanted = "32 or 1"},
    [T_CONTENT] = {.key = "content", FINGERPRINT},
    [T_BASE] = {.key = "base", FINGERPRINT},
    [T_RESULT] = {.key = "result", FINGERPRINT},
    [T_CODEC] = {.key = "codec", TEXT, .wanted = "the name of a codec"},
    [T_BLOCK] = {.key = "block_bytes", NUMBER(1, 1073741824)},
    [T_CODEC_OWN] = {.key = "codec_", .kind = IBP_FIELD_OTHERS, .wanted = "key=value"},
};

static const ibp_field codebook_fields[IBP_C_COUNT] = {
    [IBP_C_SCHEME] = {.key = "scheme", SCHEME},
    [IBP_C_CLUSTERS] = {.key = "clusters", LIST(256, 0, 4294967295)},
    [IBP_C_SAVINGS] = {.key = "expected_savings", REAL},
    [IBP_C_TAU] = {.key = "tau", REAL},
    [IBP_C_PAIRS] = {.key = "pairs", NUMBER(1, 65536)},
    [IBP_C_ROW] = {.key = "row_bytes", NUMBER(1, 65536)},
    [IBP_C_CHUNK] = {.key = "chunk_bytes", .least = 1, .most = 8, .wanted = "1, 2, 4 or 8"},
    [IBP_C_FLAG_ALL] = {.key = "flag_all", NUMBER(0, 1)},
    [IBP_C_ELEMENT] = {.key = "element_bytes", .least = 1, .most = 8, .wanted = "1, 2, 4 or 8"},
    [IBP_C_ROTATE] = {.key = "rotate", NUMBER(0, 1)},
    [IBP_C_RESIDUAL] = {.key = "residual_bits", .most = 64, .wanted = "at most as many bits as an element has left"},
    [IBP_C_DIGITS] = {.key = "digit_bits", LIST(4, 1, 4)},
    [IBP_C_PER_COLUMN] = {.key = "per_column", NUMBER(0, 1)},
    [IBP_C_LISTED] = {.key = "listed", NUMBER(0, 1)},
    [IBP_C_DEFAULT] = {.key = "default", ANY_NUMBER},
    [IBP_C_CLOSED] = {.key = "closed", ANY_NUMBER},
    [IBP_C_SIGNED] = {.key = "signed_default", NUMBER(0, 1)},
    [IBP_C_INVARIANT_BITS] = {.key = "invariant_bits", .most = 63, .wanted = "fewer bits than an element has"},
    [IBP_C_INVARIANT_VALUE] = {.key = "invariant_value", ANY_NUMBER},
    [IBP_C_FIRST] = {.key = "first_symbol", ANY_NUMBER},
    [IBP_C_LIVE] = {.key = "live", .least = 1, .most = 65536, .wanted = "1 up to the number of columns"},
};

/* ---- a table ----------------------------------------------------------------------------------------------------- */

/* Checks that a table has all fields that tables of its kind need, and no field that they cannot have. A table is coded
 * by an external codec, or by a scheme with or without a codebook. A table with a scheme may also be a delta. */
static ibp_status check_kind(ibp_field *fields, ibp_refusal *refusal)
{
    const bool is_delta = fields[T_BASE].is_given || fields[T_RESULT].is_given;
    uint32_t needed = 1u << T_DTYPE | 1u << T_SHAPE, optional = is_delta ? 0 : 1u << T_CONTENT;
    if (fields[T_CODEC].is_given) {
        if (fields[T_CODEC].text.num_bytes == 0) return ibp_refuse_field(refusal, &fields[T_CODEC]);
        needed |= 1u << T_CODEC | 1u << T_BLOCK, optional |= 1u << T_CODEC_OWN;
        return ibp_check_given(fields, T_COUNT, needed, optional, refusal);
    }
    const ibp_status status = read_scheme(&fields[T_SCHEME], refusal);
    if (status != IBP_OK) return status;
    needed |= 1u << T_SCHEME | 1u << T_ROW | 1u << T_SLOT, optional |= 1u << T_PER_BASE;
    if (fields[T_SCHEME].number != IBP_SCHEME_RAW) needed |= 1u << T_CODEBOOK;
    if (is_delta) needed |= 1u << T_BASE | 1u << T_RESULT;
    return ibp_check_given(fields, T_COUNT, needed, optional, refusal);
}

/* Computes the number of items and the size of an item in bytes, if the dtype is known. */
static ibp_status size_items(const ibp_field *fields, ibp_file_table *table)
{
    const uint32_t bits = ibp_bits_of_dtype(table->dtype), has_items = table->num_dims != 0;
    int64_t num_bytes;
    table->num_items = has_items ? table->shape[0] : 1, table->item_bytes = -1;
    if (bits == 0 ||
        (ibp_bytes_of_shape(table->shape, table->num_dims, bits, &num_bytes) &&
         ibp_bytes_of_shape(table->shape + has_items, table->num_dims - has_items, bits, &table->item_bytes) &&
         ibp_are_items(table->num_items, table->item_bytes)))
        return IBP_OK;
    table->refusal = (ibp_refusal){fields[T_SHAPE].text, "at most " IBP_SHAPE_BITS, "shape"};
    return IBP_BAD_FILE;
}

ibp_status ibp_read_table(ibp_text line, ibp_field fields[IBP_TABLE_FIELDS], ibp_file_table *table)
{
    *table = (ibp_file_table){.name = NULL};
    memcpy(fields, table_fields, sizeof table_fields);
    ibp_status status = ibp_read_fields(line, fields, T_COUNT, &table->refusal);
    if (status == IBP_OK) status = check_kind(fields, &table->refusal);
    table->dtype = fields[T_DTYPE].text, table->codec = fields[T_CODEC].text;
    if (status != IBP_OK) return status;
    uint64_t size;
    for (ibp_text rest = fields[T_SHAPE].text; rest.num_bytes != 0; table->shape[table->num_dims++] = (int64_t)size)
        if (!ibp_take_listed(&rest, table->num_dims == 0, &size)) return IBP_BAD_FILE;
    status = size_items(fields, table);
    if (status != IBP_OK) return status;
    table->has_content = fields[T_CONTENT].is_given, table->content = fields[T_CONTENT].number;
    if (fields[T_CODEC].is_given) return IBP_OK;
    table->scheme = (ibp_scheme)fields[T_SCHEME].number;
    table->row_bytes = (uint32_t)fields[T_ROW].number, table->slot_bytes = (uint32_t)fields[T_SLOT].number;
    if (!ibp_is_slot(table->slot_bytes, table->row_bytes)) return ibp_refuse_field(&table->refusal, &fields[T_SLOT]);
    const ibp_field *const per_base = &fields[T_PER_BASE];
    table->rows_per_base = per_base->is_given ? (uint32_t)per_base->number : IBP_ROWS_PER_BASE;
    if (table->rows_per_base != 1 && table->rows_per_base != IBP_ROWS_PER_BASE)
        return ibp_refuse_field(&table->refusal, per_base);
    table->codebook = (uint32_t)fields[T_CODEBOOK].number;
    table->is_delta = fields[T_BASE].is_given;
    table->base = fields[T_BASE].number, table->result = fields[T_RESULT].number;
    return IBP_OK;
}

/* ---- a codebook -------------------------------------------------------------------------------------------------- */

#define BIT(name) (1u << IBP_C_##name)

/* Checks that the fields of a codebook of scheme planes are consistent. Stores the list digit_bits also as a number, in
 * which each byte is the width of one plane's digits. */
static ibp_status check_planes(ibp_field *fields, ibp_refusal *refusal)
{
    const uint64_t element_bytes = fields[IBP_C_ELEMENT].number, bits = 8 * element_bytes,
                   invariant_bits = fields[IBP_C_INVARIANT_BITS].number;
    uint64_t width;
    uint32_t num_digits = 0;
    if ((element_bytes & (element_bytes - 1)) != 0) return ibp_refuse_field(refusal, &fields[IBP_C_ELEMENT]);
    if (fields[IBP_C_ROW].number % element_bytes != 0) {
        *refusal = (ibp_refusal){fields[IBP_C_ROW].text, "a multiple of element_bytes", "row_bytes"};
        return IBP_BAD_FILE;
    }
    if (invariant_bits >= bits) return ibp_refuse_field(refusal, &fields[IBP_C_INVARIANT_BITS]);
    if (fields[IBP_C_RESIDUAL].number > bits - invariant_bits)
        return ibp_refuse_field(refusal, &fields[IBP_C_RESIDUAL]);
    if (fields[IBP_C_LIVE].number > fields[IBP_C_ROW].number / element_bytes)
        return ibp_refuse_field(refusal, &fields[IBP_C_LIVE]);
    for (ibp_text rest = fields[IBP_C_DIGITS].text; rest.num_bytes != 0; num_digits++) {
        if (!ibp_take_listed(&rest, num_digits == 0, &width)) return IBP_BAD_FILE;
        fields[IBP_C_DIGITS].number |= width << 8 * num_digits;
    }
    return IBP_OK;
}

ibp_status ibp_read_codebook(ibp_text line, ibp_field fields[IBP_CODEBOOK_FIELDS], ibp_refusal *refusal)
{
    static const uint32_t masks = BIT(SCHEME) | BIT(PAIRS) | BIT(ROW) | BIT(CHUNK) | BIT(FLAG_ALL),
                          planes = BIT(SCHEME) | BIT(ROW) | BIT(ELEMENT) | BIT(ROTATE) | BIT(RESIDUAL) | BIT(DIGITS) |
                                   BIT(PER_COLUMN) | BIT(LISTED) | BIT(DEFAULT) | BIT(CLOSED) | BIT(SIGNED) |
                                   BIT(INVARIANT_BITS) | BIT(INVARIANT_VALUE);
    memcpy(fields, codebook_fields, sizeof codebook_fields);
    ibp_status status = ibp_read_fields(line, fields, IBP_C_COUNT, refusal);
    if (status != IBP_OK) return status;
    if (fields[IBP_C_CLUSTERS].is_given)
        return ibp_check_given(fields, IBP_C_COUNT, BIT(CLUSTERS), BIT(SAVINGS), refusal);
    status = read_scheme(&fields[IBP_C_SCHEME], refusal);
    if (status != IBP_OK) return status;
    const uint64_t scheme = fields[IBP_C_SCHEME].number, chunk_bytes = fields[IBP_C_CHUNK].number;
    if (scheme == IBP_SCHEME_RAW) return ibp_refuse_field(refusal, &fields[IBP_C_SCHEME]);
    if (scheme != IBP_SCHEME_IBP) {
        status = ibp_check_given(fields, IBP_C_COUNT, planes, BIT(FIRST) | BIT(LIVE) | BIT(SAVINGS), refusal);
        return status == IBP_OK ? check_planes(fields, refusal) : status;
    }
    if ((chunk_bytes & (chunk_bytes - 1)) != 0) return ibp_refuse_field(refusal, &fields[IBP_C_CHUNK]);
    return ibp_check_given(fields, IBP_C_COUNT, masks, BIT(TAU) | BIT(SAVINGS), refusal);
}
