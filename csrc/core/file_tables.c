/* file_tables.c - opens tables of a file (FORMAT.md section 9). It builds their codebooks in working form: an
 * ibp_codebook whose arrays are in the caller's workspace. */
#include "checks.h"
#include "file.h"
#include "locate.h"
#include "planes_layout.h"

#include <string.h>

/* ---- a codebook's sizes ------------------------------------------------------------------------------------------ */

/* Returns whether two codebooks can be clusters of one codebook. */
static bool are_alike(const ibp_field *a, const ibp_field *b)
{
    if (a[IBP_C_SCHEME].number != b[IBP_C_SCHEME].number) return false;
    for (int i = IBP_C_ROW; i < IBP_C_COUNT; i++)
        if (a[i].is_given != b[i].is_given || a[i].number != b[i].number) return false;
    return true;
}

/* A codebook of a file before its working form is built: the numbers of its clusters in the file, the fields of the
 * first cluster, which the other clusters' fields must match, and the sizes of the working form. */
typedef struct codebook_plan {
    const ibp_file *file;
    uint32_t members[IBP_MAX_CLUSTERS], num_members;
    ibp_field fields[IBP_C_COUNT];
    ibp_scheme scheme;
    uint32_t row_bytes;
    ibp_planes planes;      /* scheme planes, without its arrays */
    uint32_t num_live;      /* number of live columns */
    size_t set_bytes;       /* size in bytes of one cluster's words or entries */
    size_t constants_bytes; /* size in bytes of the template and the live columns */
    size_t spare_bytes;     /* size in bytes of a spare buffer, for a row's mask and bitval, or for the constants of
                               another cluster */
    size_t workspace_bytes;
} codebook_plan;

/* A part of a codebook or of a table: a tensor of the file. */
typedef struct file_part {
    const uint8_t *data; /* NULL if the file does not have the part */
    size_t num_bytes;
    uint32_t element_bytes;
} file_part;

enum { PALETTE, INDEX, ENTRIES, LIVE_COLUMNS, ROW_TEMPLATE, NUM_CODEBOOK_PARTS };

/* The fields and parts of a cluster, as they are stored in the file. */
typedef struct codebook_source {
    ibp_text text;
    file_part parts[NUM_CODEBOOK_PARTS];
} codebook_source;

static size_t round_up_16(size_t num_bytes) { return (num_bytes + 15) / 16 * 16; }

static uint32_t number_of(const codebook_plan *plan, int i) { return (uint32_t)plan->fields[i].number; }

static void plan_masks(codebook_plan *plan)
{
    plan->set_bytes = (3 * ibp_codebook_words(plan->row_bytes) + (plan->num_members > 1 ? 4 : 0)) * sizeof(uint32_t);
    plan->spare_bytes = round_up_16(2 * (size_t)plan->row_bytes);
}

static bool plan_planes(codebook_plan *plan)
{
    const ibp_field *const fields = plan->fields;
    ibp_planes *const p = &plan->planes;
    p->element_bytes = number_of(plan, IBP_C_ELEMENT), p->rotate = number_of(plan, IBP_C_ROTATE);
    p->invariant_bits = number_of(plan, IBP_C_INVARIANT_BITS), p->residual_bits = number_of(plan, IBP_C_RESIDUAL);
    p->per_column = number_of(plan, IBP_C_PER_COLUMN), p->listed = number_of(plan, IBP_C_LISTED);
    p->signed_default = number_of(plan, IBP_C_SIGNED);
    p->default_value = fields[IBP_C_DEFAULT].number, p->closed_value = fields[IBP_C_CLOSED].number;
    p->invariant_value = fields[IBP_C_INVARIANT_VALUE].number;
    p->consecutive = fields[IBP_C_FIRST].is_given, p->first_symbol = fields[IBP_C_FIRST].number;
    size_t num_entries = 0;
    for (uint64_t digits = fields[IBP_C_DIGITS].number; digits != 0; digits >>= 8) {
        p->digit_bits[p->num_planes++] = (uint8_t)(digits & 0xff);
        num_entries += (1u << (digits & 0xff)) - 1;
    }
    const uint32_t columns = plan->row_bytes / p->element_bytes;
    plan->num_live = fields[IBP_C_LIVE].is_given ? number_of(plan, IBP_C_LIVE) : columns;
    p->num_constant = columns - plan->num_live;
    if (p->num_constant != 0)
        plan->constants_bytes = round_up_16(plan->row_bytes) + round_up_16(2 * (size_t)plan->num_live);
    plan->spare_bytes = plan->num_members > 1 ? plan->constants_bytes : 0;
    if (!p->consecutive)
        plan->set_bytes = (p->per_column ? plan->num_live : 1) * num_entries * ibp_bytes_of_symbol(ibp_symbol_bits(p));
    /* The entries of a cluster are stored in the file, so they cannot be larger than the file's data. */
    if (plan->set_bytes > plan->file->data_bytes) return false;
    return plan->num_members == 1 || plan->set_bytes != 0;
}

/* Writes a number in decimal digits, NUL-terminated, to the end of `text`. Returns the address of the first digit. */
static const char *to_decimal(uint32_t number, char text[11])
{
    char *at = text + 10;
    for (*at = 0; number != 0 || at == text + 10; number /= 10) *--at = (char)('0' + number % 10);
    return at;
}

/* Finds and reads the fields of a codebook. Returns IBP_BAD_FILE if the file does not have the codebook. */
static ibp_status find_codebook(const ibp_file *file, uint32_t number, ibp_field *fields, ibp_refusal *refusal)
{
    ibp_text text;
    char name[11];
    const ibp_status status = ibp_find_metadata(file, "ibp.codebook.", to_decimal(number, name), &text);
    if (status == IBP_NOT_IN_FILE) return ibp_refuse(refusal, (ibp_text){NULL, 0}, "the codebook of the table");
    return status == IBP_OK ? ibp_read_codebook(text, fields, refusal) : status;
}

/* Takes the numbers of a codebook's clusters from a list. Returns false if there are fewer than two. */
static bool plan_members(ibp_text list, codebook_plan *plan)
{
    uint64_t member;
    for (plan->num_members = 0; list.num_bytes != 0; plan->members[plan->num_members++] = (uint32_t)member)
        if (!ibp_take_listed(&list, plan->num_members == 0, &member)) return false;
    return plan->num_members >= 2;
}

static ibp_status plan_codebook(const ibp_file *file, uint32_t number, codebook_plan *plan, ibp_refusal *refusal)
{
    *plan = (codebook_plan){.file = file, .members = {number}, .num_members = 1};
    ibp_field *const fields = plan->fields;
    ibp_status status = find_codebook(file, number, fields, refusal);
    if (status == IBP_OK && fields[IBP_C_CLUSTERS].is_given) {
        if (!plan_members(fields[IBP_C_CLUSTERS].text, plan)) return IBP_BAD_FILE;
        status = find_codebook(file, plan->members[0], fields, refusal);
    }
    if (status != IBP_OK) return status;
    if (fields[IBP_C_CLUSTERS].is_given) return IBP_BAD_FILE; /* a cluster must not have clusters itself */
    plan->scheme = (ibp_scheme)fields[IBP_C_SCHEME].number;
    plan->row_bytes = number_of(plan, IBP_C_ROW);
    if (plan->scheme == IBP_SCHEME_IBP)
        plan_masks(plan);
    else if (!plan_planes(plan))
        return IBP_BAD_FILE;
    plan->workspace_bytes = round_up_16(plan->num_members * sizeof(codebook_source)) + plan->spare_bytes +
                            plan->constants_bytes + round_up_16(plan->num_members * plan->set_bytes);
    return IBP_OK;
}

/* ---- a codebook's working form ----------------------------------------------------------------------------------- */

/* Records a tensor as a part. Returns whether the tensor is the first with its name, has one dimension and consists of
 * unsigned numbers. */
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

/* Returns whether a part holds `count` numbers of element_bytes bytes, followed by nothing but padding. */
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

/* Fills in the mask and bitval of a row from the (mask, bitval) pairs of its chunks. */
static bool spread_pairs(const codebook_plan *plan, const codebook_source *source, uint64_t num_pairs, uint8_t *mask,
                         uint8_t *bitval)
{
    const file_part *const palette = &source->parts[PALETTE], *const index = &source->parts[INDEX];
    const uint32_t chunk_bytes = number_of(plan, IBP_C_CHUNK),
                   num_chunks = (plan->row_bytes + chunk_bytes - 1) / chunk_bytes,
                   index_bytes = num_pairs > 256 ? 2 : 1;
    if (!holds(palette, 2 * num_pairs * chunk_bytes, 1)) return false;
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

/* Reads the fields of a cluster. Returns whether they are valid and the cluster can belong to this codebook. */
static bool read_member(const codebook_plan *plan, const codebook_source *source, ibp_field *fields)
{
    ibp_refusal refusal;
    return ibp_read_codebook(source->text, fields, &refusal) == IBP_OK && are_alike(plan->fields, fields);
}

/* Builds a codebook of scheme ibp. room: the part of the workspace after the sources. */
static ibp_status build_masks(const codebook_plan *plan, const codebook_source *sources, uint8_t *room,
                              ibp_codebook *out)
{
    ibp_field fields[IBP_C_COUNT];
    uint8_t *const mask = room, *const bitval = mask + plan->row_bytes;
    uint32_t *const all = (uint32_t *)(void *)(room + plan->spare_bytes);
    const size_t num_words = ibp_codebook_words(plan->row_bytes), stride = plan->set_bytes / sizeof *all;
    for (uint32_t k = 0; k < plan->num_members; k++) {
        ibp_codebook one;
        uint32_t *const words = all + k * stride;
        if (!read_member(plan, &sources[k], fields) ||
            !spread_pairs(plan, &sources[k], fields[IBP_C_PAIRS].number, mask, bitval) ||
            ibp_build_codebook(mask, bitval, plan->row_bytes, number_of(plan, IBP_C_CHUNK),
                               number_of(plan, IBP_C_FLAG_ALL), words, &one) != IBP_OK)
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

/* Writes the template and the live columns in the form that the functions of ibp.h take. */
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
    ibp_field fields[IBP_C_COUNT];
    uint8_t *const spare = room, *const constants = spare + plan->spare_bytes,
                   *const entries = constants + plan->constants_bytes;
    ibp_planes planes = plan->planes;
    const uint32_t symbol_bytes = ibp_bytes_of_symbol(ibp_symbol_bits(&planes));
    for (uint32_t k = 0; k < plan->num_members; k++) {
        const file_part *const part = &sources[k].parts[ENTRIES];
        uint8_t *const own = k == 0 ? constants : spare;
        if (!read_member(plan, &sources[k], fields) || !holds(part, plan->set_bytes / symbol_bytes, symbol_bytes) ||
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

/* Builds the codebook of a table in a workspace of plan->workspace_bytes bytes. */
static ibp_status build_codebook(const codebook_plan *plan, void *workspace, ibp_codebook *out)
{
    codebook_source *const sources = workspace;
    uint8_t *const room = (uint8_t *)workspace + round_up_16(plan->num_members * sizeof *sources);
    const ibp_status status = find_sources(plan, sources);
    if (status != IBP_OK) return status;
    return (plan->scheme == IBP_SCHEME_IBP ? build_masks : build_planes)(plan, sources, room, out);
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

/* Finds the fields of a table, in the first of the files that has them. */
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
    ibp_field fields[IBP_TABLE_FIELDS];
    codebook_plan plan;
    ibp_text text;
    size_t file;
    *table = (ibp_file_table){.name = NULL};
    ibp_status status = find_fields(files, num_files, name, &file, &text);
    if (status == IBP_OK) status = ibp_read_table(text, fields, table);
    table->name = name, table->files = files, table->num_files = num_files, table->file = file;
    if (status != IBP_OK) return status;
    if (table->codec.num_bytes != 0 || table->item_bytes < 0) {
        const bool is_coded = table->codec.num_bytes != 0;
        table->refusal = is_coded ? (ibp_refusal){table->codec, "a table of no external codec", "codec"}
                                  : (ibp_refusal){table->dtype, "a dtype that this release knows", "dtype"};
        return IBP_UNSUPPORTED_TABLE;
    }
    if (table->scheme == IBP_SCHEME_RAW) return IBP_OK;
    status = plan_codebook(&files[file], table->codebook, &plan, &table->refusal);
    if (status != IBP_OK) return status;
    table->workspace_bytes = plan.workspace_bytes;
    return plan.scheme == table->scheme && plan.row_bytes == table->row_bytes ? IBP_OK : IBP_BAD_FILE;
}

enum { SLOTS, OVERFLOW, LENGTHS, BASES, NUM_PARTS };

/* Finds the parts of a table in any of the files. */
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

/* Checks that a part holds `count` numbers. Returns IBP_NOT_IN_FILE if the part is missing and count is not 0. */
static ibp_status check_part(const file_part *part, int64_t count, uint32_t element_bytes)
{
    if (count == 0) return IBP_OK;
    if (!part->data) return IBP_NOT_IN_FILE;
    const bool is_aligned = (uintptr_t)part->data % element_bytes == 0;
    return is_aligned && holds(part, (uint64_t)count, element_bytes) ? IBP_OK : IBP_BAD_FILE;
}

/* Sets the arrays of a table. Parts that the table does not need, such as lengths in scheme raw, are not read. */
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
    ibp_refusal refusal;
    codebook_plan plan;
    file_part parts[NUM_PARTS] = {{0}};
    *table = (ibp_table){.num_items = found->num_items,
                         .item_bytes = found->item_bytes,
                         .slot_bytes = found->slot_bytes,
                         .rows_per_base = found->rows_per_base,
                         .codebook = {.scheme = found->scheme, .row_bytes = found->row_bytes}};
    for (size_t f = 0; f < found->num_files; f++)
        if (!found->files[f].data) return IBP_INVALID_ARGUMENT;
    ibp_status status = find_parts(found, parts);
    if (status == IBP_OK) status = place_parts(found, parts, table);
    if (status != IBP_OK || found->scheme == IBP_SCHEME_RAW) return status;
    status = plan_codebook(&found->files[found->file], found->codebook, &plan, &refusal);
    if (status != IBP_OK) return status;
    if (plan.scheme != found->scheme || plan.row_bytes != found->row_bytes) return IBP_BAD_FILE;
    if (workspace_bytes < plan.workspace_bytes) return IBP_BUFFER_TOO_SMALL;
    if ((uintptr_t)workspace % 16 != 0) return IBP_INVALID_ARGUMENT;
    status = build_codebook(&plan, workspace, &table->codebook);
    return status == IBP_OK && ibp_check_table(table) != IBP_OK ? IBP_BAD_FILE : status;
}
