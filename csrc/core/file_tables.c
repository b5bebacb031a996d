/* file_tables.c - tables of a file: what their fields say, and codebooks in working form (FORMAT.md section 9). */
#include "checks.h"
#include "file.h"
#include "locate.h"

#include <string.h>

/* ---- fields: "key=value key=value" ------------------------------------------------------------------------------- */

typedef enum field_kind { FIELD_NUMBER, FIELD_FINGERPRINT, FIELD_TEXT } field_kind;

typedef struct field {
    const char *key;
    field_kind kind;
    bool is_given;
    uint64_t number;
    ibp_text text; /* of every kind */
} field;

/* Takes a value: all up to a space or the end. */
static bool take_value(ibp_text *fields, ibp_text *value)
{
    uint8_t utf8[4];
    *value = (ibp_text){fields->data, 0};
    for (ibp_text rest = *fields; rest.num_bytes != 0; *fields = rest) {
        const uint32_t num_bytes = ibp_take_character(&rest, utf8);
        if (num_bytes == 0) return false;
        if (num_bytes == 1 && utf8[0] == ' ') break;
        value->num_bytes = (size_t)(rest.data - value->data);
    }
    return true;
}

/* 16 hexadecimal digits. */
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

static bool read_value(field *of)
{
    ibp_text rest = of->text;
    if (of->kind == FIELD_TEXT) return true;
    const bool is_number =
        of->kind == FIELD_NUMBER ? ibp_take_number(&rest, &of->number) : take_fingerprint(&rest, &of->number);
    return is_number && rest.num_bytes == 0;
}

/* Takes the key and the "=" of one of the fields. @return NULL if it is none of them. */
static field *take_key(ibp_text *text, field *fields, size_t num_fields)
{
    for (size_t i = 0; i < num_fields; i++) {
        ibp_text rest = *text;
        if (!ibp_take_prefix(&rest, fields[i].key) || !ibp_take_prefix(&rest, "=")) continue;
        *text = rest;
        return &fields[i];
    }
    return NULL;
}

/* Reads all fields. A key that is none of them makes the whole unsupported; the others are read all the same. */
static ibp_status read_fields(ibp_text text, field *fields, size_t num_fields)
{
    ibp_status status = IBP_OK;
    ibp_text unknown;
    for (bool is_first = true; text.num_bytes != 0; is_first = false) {
        if (!is_first && !ibp_take_prefix(&text, " ")) return IBP_BAD_FILE;
        field *const of = take_key(&text, fields, num_fields);
        if (!take_value(&text, of ? &of->text : &unknown)) return IBP_BAD_FILE;
        if (!of && (unknown.num_bytes == 0 || !memchr(unknown.data, '=', unknown.num_bytes))) return IBP_BAD_FILE;
        if (!of) {
            status = IBP_UNSUPPORTED_TABLE;
            continue;
        }
        if (of->is_given || !read_value(of)) return IBP_BAD_FILE;
        of->is_given = true;
    }
    return status;
}

/* A number that must be given, from `least` to `most`. */
static bool get_u32(const field *of, uint64_t least, uint64_t most, uint32_t *number)
{
    *number = (uint32_t)of->number;
    return of->is_given && of->number >= least && of->number <= most;
}
static bool get_flag(const field *of, bool *flag)
{
    *flag = of->number == 1;
    return of->is_given && of->number <= 1;
}

/* Takes a number of a list, which is separated from the one before it by a comma. */
static bool take_listed(ibp_text *list, bool is_first, uint64_t *number)
{
    return (is_first || ibp_take_prefix(list, ",")) && ibp_take_number(list, number);
}

static ibp_status get_scheme(const field *of, ibp_scheme *scheme)
{
    if (!of->is_given) return IBP_BAD_FILE;
    for (*scheme = IBP_SCHEME_RAW; ibp_scheme_name(*scheme); *scheme = (ibp_scheme)(*scheme + 1))
        if (ibp_is_text(of->text, ibp_scheme_name(*scheme))) return IBP_OK;
    return IBP_UNSUPPORTED_TABLE;
}

/* ---- fields of a table ------------------------------------------------------------------------------------------- */

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
    T_COUNT
};
static const field table_fields[T_COUNT] = {
    [T_DTYPE] = {.key = "dtype", .kind = FIELD_TEXT},
    [T_SHAPE] = {.key = "shape", .kind = FIELD_TEXT},
    [T_SCHEME] = {.key = "scheme", .kind = FIELD_TEXT},
    [T_ROW] = {.key = "row_bytes"},
    [T_SLOT] = {.key = "slot_bytes"},
    [T_CODEBOOK] = {.key = "codebook"},
    [T_PER_BASE] = {.key = "rows_per_base"},
    [T_CONTENT] = {.key = "content", .kind = FIELD_FINGERPRINT},
    [T_BASE] = {.key = "base", .kind = FIELD_FINGERPRINT},
    [T_RESULT] = {.key = "result", .kind = FIELD_FINGERPRINT},
    [T_CODEC] = {.key = "codec", .kind = FIELD_TEXT},
};

static ibp_status read_shape(const field *fields, ibp_file_table *table)
{
    ibp_text rest = fields[T_SHAPE].text;
    uint64_t size;
    int64_t num_bytes;
    table->dtype = fields[T_DTYPE].text;
    if (!fields[T_DTYPE].is_given || !fields[T_SHAPE].is_given) return IBP_BAD_FILE;
    for (; rest.num_bytes != 0; table->shape[table->num_dims++] = (int64_t)size)
        if (table->num_dims == IBP_MAX_FILE_DIMS || !take_listed(&rest, table->num_dims == 0, &size) ||
            size > INT64_MAX)
            return IBP_BAD_FILE;
    const uint32_t bits = ibp_bits_of_dtype(table->dtype), has_items = table->num_dims != 0;
    if (bits == 0) return IBP_UNSUPPORTED_TABLE;
    table->num_items = has_items ? table->shape[0] : 1;
    if (!ibp_bytes_of_shape(table->shape, table->num_dims, bits, &num_bytes) ||
        !ibp_bytes_of_shape(table->shape + has_items, table->num_dims - has_items, bits, &table->item_bytes))
        return IBP_BAD_FILE;
    return ibp_are_items(table->num_items, table->item_bytes) ? IBP_OK : IBP_BAD_FILE;
}

static ibp_status read_table(const field *fields, ibp_file_table *table)
{
    ibp_status status = read_shape(fields, table);
    if (status == IBP_OK) status = get_scheme(&fields[T_SCHEME], &table->scheme);
    if (status != IBP_OK) return status;
    const bool are_sizes = get_u32(&fields[T_ROW], 1, IBP_MAX_ROW_BYTES, &table->row_bytes) &&
                           get_u32(&fields[T_SLOT], 0, table->row_bytes, &table->slot_bytes);
    table->rows_per_base = IBP_ROWS_PER_BASE;
    if (!are_sizes || !ibp_is_slot(table->slot_bytes, table->row_bytes)) return IBP_BAD_FILE;
    if (fields[T_PER_BASE].is_given) table->rows_per_base = (uint32_t)fields[T_PER_BASE].number;
    if (fields[T_PER_BASE].number > IBP_ROWS_PER_BASE) return IBP_BAD_FILE;
    if (table->rows_per_base != 1 && table->rows_per_base != IBP_ROWS_PER_BASE) return IBP_BAD_FILE;
    const bool is_coded = table->scheme != IBP_SCHEME_RAW;
    if (fields[T_CODEBOOK].is_given != is_coded) return IBP_BAD_FILE;
    if (is_coded && !get_u32(&fields[T_CODEBOOK], 0, UINT32_MAX, &table->codebook)) return IBP_BAD_FILE;
    if (fields[T_BASE].is_given != fields[T_RESULT].is_given) return IBP_BAD_FILE;
    table->has_content = fields[T_CONTENT].is_given, table->content = fields[T_CONTENT].number;
    table->is_delta = fields[T_BASE].is_given;
    table->base = fields[T_BASE].number, table->result = fields[T_RESULT].number;
    return table->is_delta && table->has_content ? IBP_BAD_FILE : IBP_OK;
}

/* ---- fields of a codebook ---------------------------------------------------------------------------------------- */

/* Those from C_ROW on are the same in all codebooks of a table. */
enum {
    C_SCHEME,
    C_CLUSTERS,
    C_SAVINGS,
    C_TAU,
    C_PAIRS,
    C_ROW,
    C_CHUNK,
    C_FLAG_ALL,
    C_ELEMENT,
    C_ROTATE,
    C_RESIDUAL,
    C_DIGITS,
    C_PER_COLUMN,
    C_LISTED,
    C_DEFAULT,
    C_CLOSED,
    C_SIGNED,
    C_INVARIANT_BITS,
    C_INVARIANT_VALUE,
    C_FIRST,
    C_LIVE,
    C_COUNT
};
#define BIT(name) (1u << C_##name)
static const field codebook_fields[C_COUNT] = {
    [C_SCHEME] = {.key = "scheme", .kind = FIELD_TEXT},
    [C_CLUSTERS] = {.key = "clusters", .kind = FIELD_TEXT},
    [C_SAVINGS] = {.key = "expected_savings", .kind = FIELD_TEXT},
    [C_TAU] = {.key = "tau", .kind = FIELD_TEXT},
    [C_PAIRS] = {.key = "pairs"},
    [C_ROW] = {.key = "row_bytes"},
    [C_CHUNK] = {.key = "chunk_bytes"},
    [C_FLAG_ALL] = {.key = "flag_all"},
    [C_ELEMENT] = {.key = "element_bytes"},
    [C_ROTATE] = {.key = "rotate"},
    [C_RESIDUAL] = {.key = "residual_bits"},
    [C_DIGITS] = {.key = "digit_bits", .kind = FIELD_TEXT},
    [C_PER_COLUMN] = {.key = "per_column"},
    [C_LISTED] = {.key = "listed"},
    [C_DEFAULT] = {.key = "default"},
    [C_CLOSED] = {.key = "closed"},
    [C_SIGNED] = {.key = "signed_default"},
    [C_INVARIANT_BITS] = {.key = "invariant_bits"},
    [C_INVARIANT_VALUE] = {.key = "invariant_value"},
    [C_FIRST] = {.key = "first_symbol"},
    [C_LIVE] = {.key = "live"},
};
enum {
    CLUSTERS_FIELDS = BIT(CLUSTERS),
    MASKS_FIELDS = BIT(SCHEME) | BIT(PAIRS) | BIT(ROW) | BIT(CHUNK) | BIT(FLAG_ALL),
    PLANES_FIELDS = BIT(SCHEME) | BIT(ROW) | BIT(ELEMENT) | BIT(ROTATE) | BIT(RESIDUAL) | BIT(DIGITS) |
                    BIT(PER_COLUMN) | BIT(LISTED) | BIT(DEFAULT) | BIT(CLOSED) | BIT(SIGNED) | BIT(INVARIANT_BITS) |
                    BIT(INVARIANT_VALUE),
    PLANES_OPTIONAL = BIT(FIRST) | BIT(LIVE)
};

/* Whether just the fields are given that are needed, or may be there. */
static ibp_status check_given(const field *fields, uint32_t needed, uint32_t optional)
{
    uint32_t given = 0;
    for (int i = 0; i < C_COUNT; i++) given |= (uint32_t)fields[i].is_given << i;
    if ((given & needed) != needed) return IBP_BAD_FILE;
    return given & ~(needed | optional | BIT(SAVINGS)) ? IBP_UNSUPPORTED_TABLE : IBP_OK;
}

/* The widths of digits, as bytes of the field's number. */
static bool read_digits(field *digits)
{
    ibp_text rest = digits->text;
    uint64_t width;
    for (uint32_t p = 0; rest.num_bytes != 0; p++) {
        if (p == IBP_MAX_PLANES || !take_listed(&rest, p == 0, &width)) return false;
        if (width < 1 || width > IBP_MAX_DIGIT_BITS) return false;
        digits->number |= width << 8 * p;
    }
    return true;
}

/* The fields of a codebook of one cluster, of a scheme whose number is noted. */
static ibp_status read_codebook(ibp_text text, field *fields)
{
    ibp_scheme scheme;
    memcpy(fields, codebook_fields, sizeof codebook_fields);
    ibp_status status = read_fields(text, fields, C_COUNT);
    if (status == IBP_OK) status = get_scheme(&fields[C_SCHEME], &scheme);
    if (status != IBP_OK) return status;
    fields[C_SCHEME].number = scheme;
    if (scheme == IBP_SCHEME_RAW) return IBP_BAD_FILE;
    if (scheme == IBP_SCHEME_IBP) return check_given(fields, MASKS_FIELDS, BIT(TAU));
    return read_digits(&fields[C_DIGITS]) ? check_given(fields, PLANES_FIELDS, PLANES_OPTIONAL) : IBP_BAD_FILE;
}

static bool are_alike(const field *a, const field *b)
{
    if (a[C_SCHEME].number != b[C_SCHEME].number) return false;
    for (int i = C_ROW; i < C_COUNT; i++)
        if (a[i].is_given != b[i].is_given || a[i].number != b[i].number) return false;
    return true;
}

/* ---- a codebook's sizes ------------------------------------------------------------------------------------------ */

/* A codebook of a file before its working form is made: its clusters' numbers in the file, the fields that they
 * share, and the sizes of what is made. */
typedef struct codebook_plan {
    const ibp_file *file;
    uint32_t members[IBP_MAX_CLUSTERS], num_members;
    ibp_scheme scheme;
    uint32_t row_bytes;
    uint32_t chunk_bytes;   /* scheme ibp */
    bool flag_all;          /* likewise */
    ibp_planes planes;      /* scheme planes, without its arrays */
    uint32_t num_live;      /* live columns */
    size_t set_bytes;       /* of a member: words, or entries */
    size_t constants_bytes; /* of the template, and of the live columns */
    size_t spare_bytes;     /* for the mask and bitval of a row, or the constants of another cluster */
    size_t workspace_bytes;
} codebook_plan;

/* A part of a codebook, as it stands in the file. */
typedef struct file_part {
    const uint8_t *data; /* NULL if there is none */
    size_t num_bytes;
    uint32_t element_bytes;
} file_part;

enum { PALETTE, INDEX, ENTRIES, LIVE_COLUMNS, ROW_TEMPLATE, NUM_CODEBOOK_PARTS };

/* A cluster of it: its fields and parts. */
typedef struct codebook_source {
    ibp_text text;
    file_part parts[NUM_CODEBOOK_PARTS];
} codebook_source;

static size_t round_up_16(size_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

static bool plan_masks(const field *fields, codebook_plan *plan)
{
    const bool fits = get_u32(&fields[C_CHUNK], 1, 8, &plan->chunk_bytes) &&
                      get_flag(&fields[C_FLAG_ALL], &plan->flag_all) &&
                      (plan->chunk_bytes & (plan->chunk_bytes - 1)) == 0;
    if (!fits) return false;
    plan->set_bytes = (3 * ibp_codebook_words(plan->row_bytes) + (plan->num_members > 1 ? 4 : 0)) * sizeof(uint32_t);
    plan->spare_bytes = round_up_16(2 * (size_t)plan->row_bytes);
    return true;
}

/* Bytes of a symbol among the entries of a file. */
static uint32_t symbol_bytes_of(const ibp_planes *p)
{
    uint32_t num_bytes = 1;
    while (8 * num_bytes < 8 * p->element_bytes - p->invariant_bits - p->residual_bits) num_bytes *= 2;
    return num_bytes;
}

static bool plan_planes(const field *fields, codebook_plan *plan)
{
    ibp_planes *const p = &plan->planes;
    const bool has_sizes = get_u32(&fields[C_ELEMENT], 1, 8, &p->element_bytes) &&
                           get_u32(&fields[C_ROTATE], 0, 1, &p->rotate) &&
                           get_u32(&fields[C_INVARIANT_BITS], 0, 8 * p->element_bytes - 1, &p->invariant_bits) &&
                           get_u32(&fields[C_RESIDUAL], 0, 8 * p->element_bytes - p->invariant_bits, &p->residual_bits);
    const bool has_flags = get_flag(&fields[C_PER_COLUMN], &p->per_column) && get_flag(&fields[C_LISTED], &p->listed) &&
                           get_flag(&fields[C_SIGNED], &p->signed_default);
    if (!has_sizes || !has_flags || plan->row_bytes % p->element_bytes != 0) return false;
    p->default_value = fields[C_DEFAULT].number, p->closed_value = fields[C_CLOSED].number;
    p->invariant_value = fields[C_INVARIANT_VALUE].number;
    p->consecutive = fields[C_FIRST].is_given, p->first_symbol = fields[C_FIRST].number;
    size_t num_entries = 0;
    for (uint64_t digits = fields[C_DIGITS].number; digits != 0; digits >>= 8) {
        p->digit_bits[p->num_planes++] = (uint8_t)(digits & 0xff);
        num_entries += (1u << (digits & 0xff)) - 1;
    }
    const uint32_t columns = plan->row_bytes / p->element_bytes;
    plan->num_live = columns;
    if (fields[C_LIVE].is_given && !get_u32(&fields[C_LIVE], 1, columns, &plan->num_live)) return false;
    p->num_constant = columns - plan->num_live;
    if (p->num_constant != 0)
        plan->constants_bytes = round_up_16(plan->row_bytes) + round_up_16(2 * (size_t)plan->num_live);
    plan->spare_bytes = plan->num_members > 1 ? plan->constants_bytes : 0;
    if (!p->consecutive) plan->set_bytes = (p->per_column ? plan->num_live : 1) * num_entries * symbol_bytes_of(p);
    if (plan->set_bytes > plan->file->data_bytes) return false; /* the workspace is no larger than the file warrants */
    return plan->num_members == 1 || plan->set_bytes != 0;
}

/* The digits of a number, and a final 0, at the end of text. */
static const char *to_decimal(uint32_t number, char text[11])
{
    char *at = text + 10;
    for (*at = 0; number != 0 || at == text + 10; number /= 10) *--at = (char)('0' + number % 10);
    return at;
}

/* The numbers of a codebook's clusters: its own, if it has no others. */
static ibp_status plan_members(const ibp_file *file, uint32_t number, codebook_plan *plan, ibp_text *text)
{
    field fields[C_COUNT];
    uint64_t member;
    char name[11];
    memcpy(fields, codebook_fields, sizeof fields);
    ibp_status status = ibp_find_metadata(file, "ibp.codebook.", to_decimal(number, name), text);
    if (status == IBP_OK) status = read_fields(*text, fields, C_COUNT);
    if (status != IBP_OK) return status == IBP_NOT_IN_FILE ? IBP_BAD_FILE : status;
    plan->members[0] = number, plan->num_members = 1;
    if (!fields[C_CLUSTERS].is_given) return IBP_OK;
    status = check_given(fields, CLUSTERS_FIELDS, 0);
    if (status != IBP_OK) return status;
    plan->num_members = 0;
    for (ibp_text rest = fields[C_CLUSTERS].text; rest.num_bytes != 0;) {
        const uint32_t n = plan->num_members;
        if (n == IBP_MAX_CLUSTERS || !take_listed(&rest, n == 0, &member) || member > UINT32_MAX) return IBP_BAD_FILE;
        plan->members[plan->num_members++] = (uint32_t)member;
    }
    if (plan->num_members < 2) return IBP_BAD_FILE;
    status = ibp_find_metadata(file, "ibp.codebook.", to_decimal(plan->members[0], name), text);
    return status == IBP_NOT_IN_FILE ? IBP_BAD_FILE : status;
}

/* fields: of the first cluster, to which all others must be alike. */
static ibp_status plan_codebook(const ibp_file *file, uint32_t number, codebook_plan *plan, field *fields)
{
    ibp_text text;
    *plan = (codebook_plan){.file = file};
    ibp_status status = plan_members(file, number, plan, &text);
    if (status == IBP_OK) status = read_codebook(text, fields);
    if (status != IBP_OK) return status;
    plan->scheme = (ibp_scheme)fields[C_SCHEME].number;
    if (!get_u32(&fields[C_ROW], 1, IBP_MAX_ROW_BYTES, &plan->row_bytes)) return IBP_BAD_FILE;
    if (!(plan->scheme == IBP_SCHEME_IBP ? plan_masks(fields, plan) : plan_planes(fields, plan))) return IBP_BAD_FILE;
    plan->workspace_bytes = round_up_16(plan->num_members * sizeof(codebook_source)) + plan->spare_bytes +
                            plan->constants_bytes + round_up_16(plan->num_members * plan->set_bytes);
    return IBP_OK;
}

/* ---- a codebook's working form ----------------------------------------------------------------------------------- */

/* Notes a part. @return whether it is the first one of its name, of one dimension and of unsigned numbers. */
static bool note_part(const ibp_file_tensor *tensor, file_part *part)
{
    static const char *const dtypes[] = {"U8", "U16", "U32", "U64"};
    uint32_t element_bytes = 0;
    for (uint32_t i = 0; i < 4; i++)
        if (ibp_is_text(tensor->dtype, dtypes[i])) element_bytes = 1u << i;
    const bool is_new = part->data == NULL;
    *part = (file_part){tensor->data, tensor->num_bytes, element_bytes};
    return is_new && element_bytes != 0 && tensor->num_dims == 1;
}

/* Whether a part has count numbers of element_bytes bytes, and then only the zeros that files are padded with. */
static bool holds(const file_part *part, uint64_t count, uint32_t element_bytes)
{
    const uint64_t num_bytes = count * element_bytes;
    if (count == 0) return true;
    return part->data && part->element_bytes == element_bytes && part->num_bytes >= num_bytes &&
           part->num_bytes - num_bytes < IBP_FILE_ALIGN;
}

/* Finds the fields and parts of all clusters, in one pass over the metadata and one over the tensors. */
static ibp_status find_sources(const codebook_plan *plan, codebook_source *sources)
{
    static const char *const names[NUM_CODEBOOK_PARTS] = {":palette", ":index", ":entries", ":live_columns",
                                                          ":row_template"};
    ibp_text key, value;
    ibp_file_tensor tensor;
    uint64_t number;
    ibp_status status;
    memset(sources, 0, plan->num_members * sizeof *sources);
    for (size_t cursor = 0; (status = ibp_next_metadata(plan->file, &cursor, &key, &value)) == IBP_OK;) {
        if (!ibp_take_prefix(&key, "ibp.codebook.") || !ibp_take_number(&key, &number) || key.num_bytes != 0) continue;
        for (uint32_t k = 0; k < plan->num_members; k++)
            if (plan->members[k] == number) sources[k].text = value;
    }
    if (status != IBP_NOT_IN_FILE) return status;
    for (size_t cursor = 0; (status = ibp_next_tensor(plan->file, &cursor, &tensor)) == IBP_OK;) {
        if (!ibp_take_prefix(&tensor.name, "ibp.codebook.") || !ibp_take_number(&tensor.name, &number)) continue;
        for (uint32_t k = 0; k < plan->num_members; k++)
            for (int part = 0; plan->members[k] == number && part < NUM_CODEBOOK_PARTS; part++)
                if (ibp_is_text(tensor.name, names[part]) && !note_part(&tensor, &sources[k].parts[part]))
                    return IBP_BAD_FILE;
    }
    return status == IBP_NOT_IN_FILE ? IBP_OK : status;
}

/* The mask and bitval of a row, from the pairs that its chunks have. */
static bool spread_pairs(const codebook_plan *plan, const codebook_source *source, uint64_t num_pairs, uint8_t *mask,
                         uint8_t *bitval)
{
    const file_part *const palette = &source->parts[PALETTE], *const index = &source->parts[INDEX];
    const uint32_t chunk_bytes = plan->chunk_bytes, num_chunks = (plan->row_bytes + chunk_bytes - 1) / chunk_bytes,
                   index_bytes = num_pairs > 256 ? 2 : 1;
    if (num_pairs < 1 || num_pairs > 65536 || !holds(palette, 2 * num_pairs * chunk_bytes, 1)) return false;
    if (!holds(index, num_pairs > 1 ? num_chunks : 0, index_bytes)) return false;
    for (uint32_t chunk = 0; chunk < num_chunks; chunk++) {
        uint32_t pair = 0;
        for (uint32_t i = 0; num_pairs > 1 && i < index_bytes; i++)
            pair |= (uint32_t)IBP_LOAD_ONCE(index->data[(size_t)chunk * index_bytes + i]) << 8 * i;
        if (pair >= num_pairs) return false;
        const uint8_t *const ones = palette->data + 2 * (size_t)pair * chunk_bytes, *const values = ones + chunk_bytes;
        for (uint32_t i = 0; i < chunk_bytes; i++) {
            const uint32_t at = chunk * chunk_bytes + i;
            if (at < plan->row_bytes) mask[at] = ones[i], bitval[at] = values[i];
            if (at >= plan->row_bytes && (ones[i] | values[i]) != 0) return false;
        }
    }
    return true;
}

/* room: what the plan says, behind the sources. */
static ibp_status build_masks(const codebook_plan *plan, const codebook_source *sources, uint8_t *room,
                              ibp_codebook *out)
{
    field fields[C_COUNT], first[C_COUNT];
    uint8_t *const mask = room, *const bitval = mask + plan->row_bytes;
    uint32_t *const all = (uint32_t *)(void *)(room + plan->spare_bytes);
    const size_t num_words = ibp_codebook_words(plan->row_bytes), stride = plan->set_bytes / sizeof *all;
    for (uint32_t k = 0; k < plan->num_members; k++) {
        ibp_codebook one;
        uint32_t *const words = all + k * stride;
        if (read_codebook(sources[k].text, fields) != IBP_OK) return IBP_BAD_FILE;
        if (k == 0) memcpy(first, fields, sizeof first);
        if (!are_alike(first, fields) || !spread_pairs(plan, &sources[k], fields[C_PAIRS].number, mask, bitval))
            return IBP_BAD_FILE;
        if (ibp_build_codebook(mask, bitval, plan->row_bytes, plan->chunk_bytes, plan->flag_all, words, &one) != IBP_OK)
            return IBP_BAD_FILE;
        if (k == 0) *out = one;
        if (plan->num_members > 1) memcpy(words + 3 * num_words, (uint32_t[4]){one.num_flags}, 4 * sizeof *words);
    }
    if (plan->num_members == 1) return IBP_OK;
    out->num_clusters = plan->num_members;
    out->cluster_stride = (uint32_t)stride;
    out->cluster_flags = all + 3 * num_words;
    return IBP_OK;
}

/* The default row and the live columns, as the functions of ibp.h take them. */
static bool write_constants(const codebook_plan *plan, const codebook_source *source, uint8_t *to)
{
    const file_part *const row = &source->parts[ROW_TEMPLATE], *const live = &source->parts[LIVE_COLUMNS];
    const ibp_planes *const p = &plan->planes;
    if (plan->constants_bytes == 0) return true;
    if (!holds(row, plan->row_bytes, 1) || !holds(live, plan->num_live, 2)) return false;
    uint8_t *const columns = to + round_up_16(plan->row_bytes);
    memset(to, 0, plan->constants_bytes);
    memcpy(to, row->data, plan->row_bytes);
    memcpy(columns, live->data, 2 * (size_t)plan->num_live);
    for (uint32_t i = 0; i < plan->num_live; i++) {
        uint16_t column;
        memcpy(&column, columns + 2 * (size_t)i, sizeof column);
        if (column >= plan->row_bytes / p->element_bytes) return false;
        memcpy(to + (size_t)column * p->element_bytes, &p->default_value, p->element_bytes);
    }
    return true;
}

static ibp_status build_planes(const codebook_plan *plan, const codebook_source *sources, uint8_t *room,
                               ibp_codebook *out)
{
    field fields[C_COUNT], first[C_COUNT];
    uint8_t *const spare = room, *const constants = spare + plan->spare_bytes,
                   *const entries = constants + plan->constants_bytes;
    ibp_planes planes = plan->planes;
    const uint32_t symbol_bytes = symbol_bytes_of(&planes);
    for (uint32_t k = 0; k < plan->num_members; k++) {
        const file_part *const part = &sources[k].parts[ENTRIES];
        uint8_t *const own = k == 0 ? constants : spare;
        if (read_codebook(sources[k].text, fields) != IBP_OK) return IBP_BAD_FILE;
        if (k == 0) memcpy(first, fields, sizeof first);
        if (!are_alike(first, fields) || !holds(part, plan->set_bytes / symbol_bytes, symbol_bytes) ||
            !write_constants(plan, &sources[k], own) || memcmp(own, constants, plan->constants_bytes) != 0)
            return IBP_BAD_FILE;
        if (plan->set_bytes != 0) memcpy(entries + k * plan->set_bytes, part->data, plan->set_bytes);
    }
    planes.entries = plan->set_bytes != 0 ? entries : NULL;
    planes.row_template = constants;
    planes.live_columns = (const uint16_t *)(const void *)(constants + round_up_16(plan->row_bytes));
    const size_t entries_bytes = plan->num_members * plan->set_bytes;
    return ibp_build_planes_codebook(&planes, plan->row_bytes, entries_bytes, out) == IBP_OK ? IBP_OK : IBP_BAD_FILE;
}

/* The codebook of a table, in a workspace of just plan->workspace_bytes. */
static ibp_status build_codebook(const codebook_plan *plan, void *workspace, ibp_codebook *out)
{
    codebook_source *const sources = workspace;
    uint8_t *const room = (uint8_t *)workspace + round_up_16(plan->num_members * sizeof *sources);
    const ibp_status status = find_sources(plan, sources);
    if (status != IBP_OK) return status;
    return (plan->scheme == IBP_SCHEME_IBP ? build_masks : build_planes)(plan, sources, room, out);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

/* Finds the fields of a table, in one of the files. */
static ibp_status find_fields(const ibp_file *files, size_t num_files, const char *name, size_t *file, ibp_text *text)
{
    ibp_status status = IBP_NOT_IN_FILE;
    for (*file = 0; *file < num_files; ++*file) {
        if (files[*file].version == 0) continue;
        status = ibp_find_metadata(&files[*file], "ibp.table.", name, text);
        if (status != IBP_NOT_IN_FILE) break;
    }
    return status;
}

ibp_status ibp_find_table(const ibp_file *files, size_t num_files, const char *name, ibp_file_table *table)
{
    field fields[T_COUNT], shared[C_COUNT];
    codebook_plan plan;
    ibp_text text;
    *table = (ibp_file_table){.name = name, .files = files, .num_files = num_files};
    memcpy(fields, table_fields, sizeof fields);
    ibp_status status = find_fields(files, num_files, name, &table->file, &text);
    if (status != IBP_OK) return status;
    status = read_fields(text, fields, T_COUNT);
    table->codec = fields[T_CODEC].text;
    if (status == IBP_OK && fields[T_CODEC].is_given) status = IBP_UNSUPPORTED_TABLE;
    if (status == IBP_OK) status = read_table(fields, table);
    if (status != IBP_OK || table->scheme == IBP_SCHEME_RAW) return status;
    status = plan_codebook(&files[table->file], table->codebook, &plan, shared);
    if (status != IBP_OK) return status;
    table->workspace_bytes = plan.workspace_bytes;
    return plan.scheme == table->scheme && plan.row_bytes == table->row_bytes ? IBP_OK : IBP_BAD_FILE;
}

enum { SLOTS, OVERFLOW, LENGTHS, BASES, NUM_PARTS };

/* Finds the parts of a table, in any of the files. */
static ibp_status find_parts(const ibp_file_table *found, file_part *parts)
{
    static const char *const names[NUM_PARTS] = {":slots", ":overflow", ":lengths", ":bases"};
    ibp_file_tensor tensor;
    ibp_status status;
    for (size_t f = 0; f < found->num_files; f++) {
        for (size_t cursor = 0; (status = ibp_next_tensor(&found->files[f], &cursor, &tensor)) == IBP_OK;) {
            if (!ibp_take_prefix(&tensor.name, found->name)) continue;
            for (int i = 0; i < NUM_PARTS; i++)
                if (ibp_is_text(tensor.name, names[i]) && !note_part(&tensor, &parts[i])) return IBP_BAD_FILE;
        }
        if (status != IBP_NOT_IN_FILE) return status;
    }
    return IBP_OK;
}

/* A part that has `count` numbers. @return IBP_NOT_IN_FILE if it should be there and is not. */
static ibp_status check_part(const file_part *part, int64_t count, uint32_t element_bytes)
{
    if (count == 0) return IBP_OK;
    if (!part->data) return IBP_NOT_IN_FILE;
    const bool is_aligned = (uintptr_t)part->data % element_bytes == 0;
    return is_aligned && holds(part, (uint64_t)count, element_bytes) ? IBP_OK : IBP_BAD_FILE;
}

/* The arrays of a table. Arrays that a table of its sizes does not have are not read. */
static ibp_status place_parts(const ibp_file_table *found, const file_part *parts, ibp_table *table)
{
    const int64_t num_bytes = ibp_bytes_of_table(table), num_rows = ibp_rows_of_bytes(num_bytes, found->row_bytes),
                  rows_per_base = found->rows_per_base;
    const bool is_coded = found->scheme != IBP_SCHEME_RAW, is_in_place = found->slot_bytes == found->row_bytes,
               has_bases = parts[BASES].data != NULL;
    table->slots_bytes = is_in_place ? num_bytes : num_rows * found->slot_bytes;
    ibp_status status = check_part(&parts[SLOTS], table->slots_bytes, 1);
    if (status == IBP_OK) status = check_part(&parts[LENGTHS], is_coded ? num_rows : 0, 2);
    if (status == IBP_OK && has_bases)
        status = check_part(&parts[BASES], (num_rows + rows_per_base - 1) / rows_per_base, 8);
    if (status != IBP_OK || num_rows == 0) return status;
    if (table->slots_bytes != 0) table->slots = parts[SLOTS].data;
    if (is_coded) table->lengths = (const uint16_t *)(const void *)parts[LENGTHS].data;
    if (!has_bases) return IBP_OK;
    table->bases = (const uint64_t *)(const void *)parts[BASES].data;
    table->overflow = parts[OVERFLOW].data;
    table->overflow_bytes = (int64_t)parts[OVERFLOW].num_bytes;
    return parts[OVERFLOW].data == NULL || parts[OVERFLOW].element_bytes == 1 ? IBP_OK : IBP_BAD_FILE;
}

ibp_status ibp_open_table(const ibp_file_table *found, void *workspace, size_t workspace_bytes, ibp_table *table)
{
    field fields[C_COUNT];
    codebook_plan plan;
    file_part parts[NUM_PARTS] = {{0}};
    *table = (ibp_table){.num_items = found->num_items,
                         .item_bytes = found->item_bytes,
                         .slot_bytes = found->slot_bytes,
                         .rows_per_base = found->rows_per_base,
                         .codebook = {.scheme = found->scheme, .row_bytes = found->row_bytes}};
    ibp_status status = find_parts(found, parts);
    if (status == IBP_OK) status = place_parts(found, parts, table);
    if (status != IBP_OK || found->scheme == IBP_SCHEME_RAW) return status;
    status = plan_codebook(&found->files[found->file], found->codebook, &plan, fields);
    if (status != IBP_OK) return status;
    if (plan.scheme != found->scheme || plan.row_bytes != found->row_bytes) return IBP_BAD_FILE;
    if (workspace_bytes < plan.workspace_bytes) return IBP_BUFFER_TOO_SMALL;
    if ((uintptr_t)workspace % 16 != 0) return IBP_INVALID_ARGUMENT;
    status = build_codebook(&plan, workspace, &table->codebook);
    return status == IBP_OK && ibp_check_table(table) != IBP_OK ? IBP_BAD_FILE : status;
}
