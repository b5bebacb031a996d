/* test_file.c - files of tables, made here as FORMAT.md section 9 says: what is found in them and decoded is what was
 * put in, and what contradicts itself is refused. */
#include "check.h"

#include <stdarg.h>

/* ---- a file that is made ---- */

typedef struct made_file {
    char header[65536]; /* the JSON text */
    char metadata[16384];
    uint8_t data[1 << 18];
    size_t header_bytes, metadata_bytes, data_bytes;
    uint8_t *bytes; /* the file, once finished */
    size_t num_bytes;
} made_file;

static void print(char *text, size_t room, size_t *size, const char *format, va_list values)
{
    const int printed = vsnprintf(text + *size, room - *size, format, values);
    if (printed < 0 || (size_t)printed >= room - *size) abort();
    *size += (size_t)printed;
}

/* An entry of the metadata, with the quotes around its key and its value. */
static void add_metadata(made_file *f, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (f->metadata_bytes != 0) f->metadata[f->metadata_bytes++] = ',';
    print(f->metadata, sizeof f->metadata, &f->metadata_bytes, format, values);
    va_end(values);
}

static void add_entry(made_file *f, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    if (f->header_bytes != 0) f->header[f->header_bytes++] = ',';
    print(f->header, sizeof f->header, &f->header_bytes, format, values);
    va_end(values);
}

/* A part: numbers of one dimension, padded to 128 bytes. Empty ones are absent. */
static void add_part(made_file *f, const char *name, const char *dtype, const void *numbers, size_t count, size_t size)
{
    const size_t start = f->data_bytes, padded = (count * size + 127) / 128 * 128;
    if (count == 0) return;
    if (start + padded > sizeof f->data) abort();
    memset(f->data + start, 0, padded);
    memcpy(f->data + start, numbers, count * size);
    f->data_bytes += padded;
    add_entry(f, "\"%s\":{\"dtype\":\"%s\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}", name, dtype, padded / size,
              start, f->data_bytes);
}

/* Not a hash that anybody should use: FNV-1a (Fowler, Noll and Vo). */
static uint64_t fnv(const void *bytes, size_t num_bytes)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < num_bytes; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return hash;
}

enum { CHECK_BYTES = 512 };

/* Puts the file together, with checksums by fnv. */
static void finish(made_file *f)
{
    const size_t front = f->data_bytes, num_blocks = (front + CHECK_BYTES - 1) / CHECK_BYTES;
    add_metadata(f, "\"ibp.checks\":\"block_bytes=%d hash=xxh3_64\"", CHECK_BYTES);
    add_entry(f, "\"ibp.checks\":{\"dtype\":\"U64\",\"shape\":[%zu],\"data_offsets\":[%zu,%zu]}", num_blocks + 2, front,
              front + 8 * (num_blocks + 2));
    f->data_bytes += 8 * (num_blocks + 2);
    add_entry(f, "\"__metadata__\":{%.*s}", (int)f->metadata_bytes, f->metadata);
    const size_t text = f->header_bytes + 2, padded = (8 + text + 127) / 128 * 128 - 8;
    f->num_bytes = 8 + padded + f->data_bytes;
    f->bytes = aligned_alloc(16, (f->num_bytes + 15) / 16 * 16);
    if (!f->bytes) abort();
    memset(f->bytes, ' ', 8 + padded);
    memcpy(f->bytes, &padded, 8);
    f->bytes[8] = '{';
    memcpy(f->bytes + 9, f->header, f->header_bytes);
    f->bytes[9 + f->header_bytes] = '}';
    uint8_t *const data = f->bytes + 8 + padded;
    memcpy(data, f->data, f->data_bytes);
    uint64_t entry;
    for (size_t i = 0; i < num_blocks + 2; i++) {
        const size_t start = i * CHECK_BYTES, end = start + CHECK_BYTES < front ? start + CHECK_BYTES : front;
        entry = i < num_blocks    ? fnv(data + start, end - start)
                : i == num_blocks ? fnv(f->bytes, 8 + padded)
                                  : fnv(data + front, 8 * (num_blocks + 1));
        memcpy(data + front + 8 * i, &entry, 8);
    }
}

static made_file *new_file(void)
{
    made_file *const f = calloc(1, sizeof *f);
    if (!f) abort();
    add_metadata(f, "\"ibp.format\":\"1\"");
    add_metadata(f, "\"ibp.release\":\"0.3.0\"");
    return f;
}

static void free_file(made_file *f)
{
    free(f->bytes);
    free(f);
}

/* ---- tables that are put into it ---- */

/* A codebook of scheme ibp: a pair for every chunk. */
static void add_masks(made_file *f, int number, const masks *m)
{
    const uint32_t num_chunks = naive_num_chunks(m);
    uint8_t palette[2 * 512] = {0}, index[512];
    char name[64];
    for (uint32_t c = 0; c < num_chunks; c++) {
        const uint32_t start = c * m->chunk_bytes, left = m->row_bytes - start,
                       size = left < m->chunk_bytes ? left : m->chunk_bytes;
        memcpy(palette + 2 * start, m->mask + start, size);
        memcpy(palette + 2 * start + m->chunk_bytes, m->bitval + start, size);
        index[c] = (uint8_t)c;
    }
    add_metadata(f, "\"ibp.codebook.%d\":\"scheme=ibp row_bytes=%u chunk_bytes=%u flag_all=%d pairs=%u tau=0.8\"",
                 number, m->row_bytes, m->chunk_bytes, m->flag_all, num_chunks);
    snprintf(name, sizeof name, "ibp.codebook.%d:palette", number);
    add_part(f, name, "U8", palette, 2 * (size_t)num_chunks * m->chunk_bytes, 1);
    snprintf(name, sizeof name, "ibp.codebook.%d:index", number);
    if (num_chunks > 1) add_part(f, name, "U8", index, num_chunks, 1);
}

/* Codes data as a table with a codebook, and puts it into the file, whose codebook of that number it is. */
static void add_table(made_file *f, const char *name, const char *shape, int number, const ibp_codebook *codebook,
                      uint32_t slot_bytes, const uint8_t *data, int64_t num_bytes)
{
    static uint8_t slots[1 << 16], overflow[1 << 16], scratch[IBP_MAX_SCRATCH_BYTES];
    uint16_t lengths[1024];
    uint64_t bases[32];
    char part[128];
    ibp_fault fault = {0};
    ibp_table table = {.num_items = num_bytes,
                       .item_bytes = 1,
                       .slot_bytes = slot_bytes,
                       .codebook = *codebook,
                       .lengths = lengths,
                       .bases = bases};
    const int64_t num_rows = ibp_num_rows(&table), groups = (num_rows + 31) / 32;
    ibp_measure_rows(codebook, data, num_bytes, lengths, scratch, sizeof scratch);
    ibp_index_rows(lengths, num_bytes, codebook->row_bytes, slot_bytes, bases, &table.overflow_bytes);
    table.slots_bytes = slot_bytes == codebook->row_bytes ? num_bytes : num_rows * slot_bytes;
    if (num_rows > 1024 || table.overflow_bytes > (int64_t)sizeof overflow) abort();
    table.slots = slots, table.overflow = overflow;
    const ibp_status status =
        ibp_encode_rows(&table, data, 0, num_rows, slots, overflow, scratch, sizeof scratch, &fault);
    CHECK(status == IBP_OK, "%s", ibp_status_string(status));
    add_metadata(f, "\"ibp.table.%s\":\"dtype=U8 shape=%s scheme=%s row_bytes=%u slot_bytes=%u codebook=%d\"", name,
                 shape, ibp_scheme_name(codebook->scheme), codebook->row_bytes, slot_bytes, number);
    snprintf(part, sizeof part, "%s:slots", name);
    add_part(f, part, "U8", slots, (size_t)table.slots_bytes, 1);
    snprintf(part, sizeof part, "%s:overflow", name);
    add_part(f, part, "U8", overflow, (size_t)table.overflow_bytes, 1);
    snprintf(part, sizeof part, "%s:lengths", name);
    add_part(f, part, "U16", lengths, (size_t)num_rows, 2);
    snprintf(part, sizeof part, "%s:bases", name);
    if (table.overflow_bytes != 0) add_part(f, part, "U64", bases, (size_t)groups, 8);
}

/* Whether a table of a file decodes to these bytes; else the status that says why not. */
static ibp_status read_table(const ibp_file *files, size_t num_files, const char *name, const uint8_t *data,
                             int64_t num_bytes)
{
    static uint8_t out[1 << 16];
    ibp_file_table found;
    ibp_table table;
    ibp_fault fault = {0};
    ibp_status status = ibp_find_table(files, num_files, name, &found);
    if (status != IBP_OK) return status;
    const size_t room = (found.workspace_bytes + 15) / 16 * 16;
    uint8_t *const workspace = aligned_alloc(16, room != 0 ? room : 16);
    buffer scratch = scratch_new(found.row_bytes);
    if (!workspace) abort();
    if (found.workspace_bytes != 0) {
        status = ibp_open_table(&found, workspace, found.workspace_bytes - 1, &table);
        CHECK(status != IBP_OK, "a workspace that is too small: %s", ibp_status_string(status));
    }
    status = ibp_open_table(&found, workspace, found.workspace_bytes, &table);
    if (status == IBP_OK && num_bytes == table.num_items * table.item_bytes) {
        status = ibp_decode_bytes(&table, 0, num_bytes, out, scratch.data, scratch.size, &fault);
        if (status == IBP_OK && memcmp(out, data, (size_t)num_bytes) != 0) status = IBP_CORRUPT_ROW;
    }
    buffer_free(&scratch);
    free(workspace);
    return status;
}

enum { ROW_BYTES = 50, DATA_BYTES = 40 * ROW_BYTES - 10 }; /* the last row is short */

static const ibp_planes planes_to_test[] = {
    {.element_bytes = 2, .residual_bits = 8, .rotate = 1, .num_planes = 2, .digit_bits = {2, 1}},
    {.element_bytes = 1, .residual_bits = 4, .num_planes = 1, .digit_bits = {3}, .per_column = true},
    {.element_bytes = 2,
     .residual_bits = 7,
     .num_planes = 1,
     .digit_bits = {2},
     .listed = true,
     .default_value = 7,
     .closed_value = 9,
     .signed_default = true,
     .consecutive = true,
     .first_symbol = 5},
    {.element_bytes = 2, .residual_bits = 16, .listed = true, .num_constant = 5, .default_value = 0x1234},
};

/* A codebook of scheme planes, its arrays in a static buffer. */
static void add_planes(made_file *f, rng *r, int number, ibp_planes planes, ibp_codebook *codebook)
{
    static _Alignas(16) uint8_t entries[4096], row_template[64];
    static uint16_t live[ROW_BYTES];
    const uint32_t columns = ROW_BYTES / planes.element_bytes, num_live = columns - planes.num_constant;
    size_t num_entries = 0;
    char digits[16] = "", name[64], rest[64] = "";
    for (uint32_t p = 0; p < planes.num_planes; p++) {
        num_entries += (1u << planes.digit_bits[p]) - 1;
        snprintf(digits + strlen(digits), sizeof digits - strlen(digits), "%s%u", p ? "," : "", planes.digit_bits[p]);
    }
    const uint32_t symbol_bits = 8 * planes.element_bytes - planes.residual_bits, size = symbol_bits > 8 ? 2 : 1;
    const size_t count = planes.consecutive ? 0 : num_entries * (planes.per_column ? num_live : 1);
    for (size_t i = 0; i < count; i++) {
        const uint32_t entry = rng_below(r, 1u << symbol_bits);
        memcpy(entries + i * size, &entry, size);
    }
    planes.entries = entries, planes.live_columns = live, planes.row_template = row_template;
    for (uint32_t c = 0; c < columns; c++) {
        const uint64_t value = c < planes.num_constant ? rng_next(r) : planes.default_value;
        memcpy(row_template + (size_t)c * planes.element_bytes, &value, planes.element_bytes);
        if (c >= planes.num_constant) live[c - planes.num_constant] = (uint16_t)c;
    }
    const ibp_status status = ibp_build_planes_codebook(&planes, ROW_BYTES, count * size, codebook);
    CHECK(status == IBP_OK, "%s", ibp_status_string(status));
    if (planes.consecutive) snprintf(rest, sizeof rest, " first_symbol=%u", (unsigned)planes.first_symbol);
    if (planes.num_constant) snprintf(rest, sizeof rest, " live=%u", num_live);
    add_metadata(f,
                 "\"ibp.codebook.%d\":\"scheme=planes row_bytes=%d element_bytes=%u rotate=%u residual_bits=%u "
                 "digit_bits=%s per_column=%d listed=%d default=%u closed=%u signed_default=%d invariant_bits=0 "
                 "invariant_value=0%s expected_savings=0.25\"",
                 number, ROW_BYTES, planes.element_bytes, planes.rotate, planes.residual_bits, digits,
                 planes.per_column, planes.listed, (unsigned)planes.default_value, (unsigned)planes.closed_value,
                 planes.signed_default, rest);
    snprintf(name, sizeof name, "ibp.codebook.%d:entries", number);
    add_part(f, name, size == 2 ? "U16" : "U8", entries, count, size);
    if (!planes.num_constant) return;
    snprintf(name, sizeof name, "ibp.codebook.%d:live_columns", number);
    add_part(f, name, "U16", live, num_live, 2);
    snprintf(name, sizeof name, "ibp.codebook.%d:row_template", number);
    add_part(f, name, "U8", row_template, ROW_BYTES, 1);
}

/* ---- tests ---- */

/* Bytes that codebooks find something in: few values, repeated. */
static void fill_data(rng *r, uint8_t *data)
{
    for (int i = 0; i < DATA_BYTES; i++) data[i] = rng_chance(r, 80) ? 7 : (uint8_t)rng_below(r, 16);
}

/* Tables of all schemes in one file come back as they were, and are listed by name. */
static void check_tables(rng *r)
{
    enum { NUM_PLANES = sizeof planes_to_test / sizeof *planes_to_test };
    static uint8_t data[DATA_BYTES];
    made_file *const f = new_file();
    ibp_codebook codebook;
    char name[32];
    fill_data(r, data);
    sample s = sample_new(r, ROW_BYTES, 4, true, 5);
    add_masks(f, 0, &s.masks);
    add_table(f, "masks", "2,995", 0, &s.codebook, 32, data, DATA_BYTES);
    sample_free(&s);
    for (int i = 0; i < NUM_PLANES; i++) {
        add_planes(f, r, i + 1, planes_to_test[i], &codebook);
        snprintf(name, sizeof name, "planes.%d", i);
        add_table(f, name, "2,995", i + 1, &codebook, i % 2 == 0 ? 0 : ROW_BYTES, data, DATA_BYTES);
    }
    add_metadata(f, "\"ibp.table.r\\u00e4w\":\"dtype=U8 shape=%d scheme=raw row_bytes=16 slot_bytes=16\"", DATA_BYTES);
    add_part(f, "r\xc3\xa4w:slots", "U8", data, DATA_BYTES, 1);
    add_part(f, "plain", "U8", data, DATA_BYTES, 1);
    finish(f);

    ibp_file file;
    ibp_file_tensor tensor;
    ibp_text table;
    uint64_t block;
    ibp_status status = ibp_open_file(f->bytes, f->num_bytes, &file);
    CHECK(status == IBP_OK && file.version == 1 && file.num_tables == NUM_PLANES + 2, "%s, %zu tables",
          ibp_status_string(status), file.num_tables);
    CHECK(ibp_is_text(file.release, "0.3.0"), "release of %zu bytes", file.release.num_bytes);
    size_t num_tables = 0, num_parts = 0, num_tensors = 0;
    for (size_t at = 0; ibp_next_table(&file, &at, &table) == IBP_OK; num_tables++) {
        const size_t length = ibp_copy_text(table, name, sizeof name);
        CHECK(length == strlen(name) && ibp_is_text(table, name), "table %s", name);
    }
    for (size_t at = 0; ibp_next_tensor(&file, &at, &tensor) == IBP_OK; num_tensors++)
        num_parts += ibp_is_part(&file, &tensor);
    CHECK(num_tables == file.num_tables && num_tensors == file.num_tensors && num_parts + 1 == num_tensors,
          "%zu tables, %zu of %zu tensors are parts", num_tables, num_parts, num_tensors);
    CHECK(ibp_find_tensor(&file, "plain", &tensor) == IBP_OK && memcmp(tensor.data, data, DATA_BYTES) == 0, "%s",
          "plain");
    CHECK(ibp_find_tensor(&file, "none", &tensor) == IBP_NOT_IN_FILE, "%s", "none");
    CHECK(read_table(&file, 1, "none", data, DATA_BYTES) == IBP_NOT_IN_FILE, "%s", "none");
    static const char *const names[NUM_PLANES + 2] = {"masks",    "planes.0", "planes.1",
                                                      "planes.2", "planes.3", "r\xc3\xa4w"};
    for (size_t i = 0; i < NUM_PLANES + 2; i++) {
        status = read_table(&file, 1, names[i], data, DATA_BYTES);
        CHECK(status == IBP_OK, "%s: %s", names[i], ibp_status_string(status));
    }
    CHECK(ibp_check_file(&file, fnv, &block) == IBP_OK, "block %llu", (unsigned long long)block);
    free_file(f);
}

/* A table whose rows have clusters, and whose parts lie in two files of a set. */
static void check_clusters_and_sets(rng *r)
{
    static uint8_t data[DATA_BYTES];
    made_file *const f = new_file(), *const other = new_file();
    sample s[3];
    const size_t num_words = ibp_codebook_words(ROW_BYTES), stride = 3 * num_words + 4;
    uint32_t *const words = aligned_alloc(16, 3 * stride * sizeof *words);
    if (!words) abort();
    fill_data(r, data);
    for (int k = 0; k < 3; k++) {
        s[k] = sample_new(r, ROW_BYTES, 4, false, 5);
        add_masks(f, k + 7, &s[k].masks);
        memcpy(words + (size_t)k * stride, s[k].words, 3 * num_words * sizeof *words);
        words[(size_t)k * stride + 3 * num_words] = s[k].codebook.num_flags;
    }
    ibp_codebook codebook = s[0].codebook;
    codebook.mask = words, codebook.bitval = words + num_words, codebook.flags = words + 2 * num_words;
    codebook.num_clusters = 3, codebook.cluster_stride = (uint32_t)stride;
    codebook.cluster_flags = words + 3 * num_words;
    add_metadata(f, "\"ibp.codebook.4\":\"clusters=7,8,9 expected_savings=0.5\"");
    add_table(f, "clustered", "1990", 4, &codebook, 0, data, DATA_BYTES);
    finish(f);

    ibp_file files[2];
    uint64_t block;
    CHECK(ibp_open_file(f->bytes, f->num_bytes, &files[0]) == IBP_OK, "%s", "a file of clusters");
    ibp_status status = read_table(files, 1, "clustered", data, DATA_BYTES);
    CHECK(status == IBP_OK, "clusters: %s", ibp_status_string(status));
    CHECK(ibp_check_file(&files[0], fnv, &block) == IBP_OK, "block %llu", (unsigned long long)block);

    add_metadata(other, "\"ibp.table.spread\":\"dtype=U8 shape=1990 scheme=raw row_bytes=8 slot_bytes=8\"");
    finish(other);
    CHECK(ibp_open_file(other->bytes, other->num_bytes, &files[1]) == IBP_OK, "%s", "a file of fields");
    status = read_table(files, 2, "spread", data, DATA_BYTES);
    CHECK(status == IBP_NOT_IN_FILE, "a part that is nowhere: %s", ibp_status_string(status));
    made_file *const third = new_file();
    add_part(third, "spread:slots", "U8", data, DATA_BYTES, 1);
    finish(third);
    CHECK(ibp_open_file(third->bytes, third->num_bytes, &files[0]) == IBP_OK, "%s", "a file of parts");
    status = read_table(files, 2, "spread", data, DATA_BYTES);
    CHECK(status == IBP_OK, "a set: %s", ibp_status_string(status));
    for (int k = 0; k < 3; k++) sample_free(&s[k]);
    free(words);
    free_file(f);
    free_file(other);
    free_file(third);
}

/* Every changed byte of a file has a wrong checksum, in the block where it is. */
static void check_checksums(rng *r)
{
    static uint8_t data[4 * CHECK_BYTES];
    made_file *const f = new_file();
    ibp_file file;
    rng_fill(r, data, sizeof data);
    add_part(f, "plain", "U8", data, sizeof data, 1);
    finish(f);
    if (ibp_open_file(f->bytes, f->num_bytes, &file) != IBP_OK) abort();
    const size_t front = (size_t)(file.data - file.bytes);
    for (size_t i = 0; i < f->num_bytes; i += 7) {
        const bool is_header = i < front, is_data = !is_header && i - front < sizeof data;
        uint64_t block = 99;
        f->bytes[i] ^= 4;
        const ibp_status status = ibp_check_file(&file, fnv, &block);
        f->bytes[i] ^= 4;
        if (is_data) CHECK(status == IBP_WRONG_CHECKSUM && block == (i - front) / CHECK_BYTES, "byte %zu", i);
        if (!is_data) CHECK(status != IBP_OK, "byte %zu: %s", i, ibp_status_string(status));
    }
    for (size_t bit = 0; bit < 8 * front; bit++) { /* opened anew: a damaged name turns no checksum off */
        uint64_t block = 99;
        f->bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        const bool is_open = ibp_open_file(f->bytes, f->num_bytes, &file) == IBP_OK;
        CHECK(!is_open || ibp_check_file(&file, fnv, &block) == IBP_WRONG_CHECKSUM ||
                  ibp_check_file(&file, fnv, &block) == IBP_BAD_FILE,
              "bit %zu of the header", bit);
        f->bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
    }
    free_file(f);
}

/* ---- what is refused ---- */

/* A file with this header and num_data bytes of zeros. */
static ibp_status open_header(const char *header, size_t num_data, ibp_file *file, uint8_t **bytes)
{
    const uint64_t size = strlen(header);
    const size_t num_bytes = 8 + size + num_data;
    *bytes = aligned_alloc(16, (num_bytes + 15) / 16 * 16);
    if (!*bytes) abort();
    memset(*bytes, 0, num_bytes);
    memcpy(*bytes, &size, 8);
    memcpy(*bytes + 8, header, size);
    return ibp_open_file(*bytes, num_bytes, file);
}

#define U8(name, shape, start, end) \
    "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" shape "],\"data_offsets\":[" start "," end "]}"
#define META_MEMBER(text) "\"__metadata__\":{" text "}"
#define META(text) "{" META_MEMBER(text) "}"
#define FORMAT "\"ibp.format\":\"1\""
#define CHECKS "\"ibp.checks\":\"block_bytes=512 hash=xxh3_64\""
#define CHECKS_TENSOR "\"ibp.checks\":{\"dtype\":\"U64\",\"shape\":[0],\"data_offsets\":[0,0]}"

static void check_headers(void)
{
    static const struct {
        const char *header;
        size_t num_data;
        ibp_status wanted;
    } cases[] = {
        {"{}", 0, IBP_OK},
        {"{ } \n\t", 0, IBP_OK},
        {"{" U8("a", "2,3", "0", "6") "," U8("b", "", "6", "7") "}", 7, IBP_OK},
        {"{" U8("b", "1", "6", "7") "," U8("a", "6", "0", "6") "}", 7, IBP_OK},
        {"{\"a\": {\"data_offsets\": [0, 3], \"shape\": [3], \"dtype\": \"U8\"} }  ", 3, IBP_OK},
        {"{" U8("a", "0,3", "0", "0") "}", 0, IBP_OK},
        {"{" META_MEMBER(FORMAT "," CHECKS) "," CHECKS_TENSOR "}", 0, IBP_OK},
        {META(FORMAT "," CHECKS), 0, IBP_BAD_FILE}, /* one name of the format without the others */
        {META(FORMAT), 0, IBP_BAD_FILE},
        {META(CHECKS), 0, IBP_BAD_FILE},
        {META("\"ibp.release\":\"0.3.0\""), 0, IBP_BAD_FILE},
        {"{" CHECKS_TENSOR "}", 0, IBP_OK}, /* a name that any file may have */
        {"{" META_MEMBER(FORMAT) "," CHECKS_TENSOR "}", 0, IBP_BAD_FILE},
        {"{" META_MEMBER(CHECKS) "," CHECKS_TENSOR "}", 0, IBP_BAD_FILE},
        {"{" META_MEMBER("\"hbp.format\":\"1\"," CHECKS) "," CHECKS_TENSOR "}", 0, IBP_BAD_FILE},
        {META("\"other\":\"2\""), 0, IBP_OK},
        {META("\"ibp.format\":\"2\",\"ibp.release\":\"9.9\""), 0, IBP_NEWER_FILE},
        {META("\"ibp.format\":\"99999999999999999999\""), 0, IBP_BAD_FILE},
        {META("\"ibp.format\":\"0\""), 0, IBP_BAD_FILE},
        {META("\"ibp.format\":\"\""), 0, IBP_BAD_FILE},
        {META("\"ibp.format\":\"1 \""), 0, IBP_BAD_FILE},
        {META("\"ibp.format\":\"1\",\"ibp.format\":\"1\""), 0, IBP_BAD_FILE},
        {META("\"ibp.format\":1"), 0, IBP_BAD_FILE},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", 0, IBP_BAD_FILE},
        {"", 0, IBP_BAD_FILE},
        {"{", 0, IBP_BAD_FILE},
        {"[]", 0, IBP_BAD_FILE},
        {" {}", 0, IBP_BAD_FILE},
        {"{}}", 0, IBP_BAD_FILE},
        {"{,}", 0, IBP_BAD_FILE},
        {"{" U8("a", "1", "0", "1") ",}", 1, IBP_BAD_FILE},
        {"{" U8("a", "1", "0", "1") " " U8("b", "1", "1", "2") "}", 2, IBP_BAD_FILE},
        {"{" U8("a", "2", "0", "1") "}", 1, IBP_BAD_FILE},                            /* a shape of other bytes */
        {"{" U8("a", "1", "0", "1") "}", 2, IBP_BAD_FILE},                            /* bytes that are nobody's */
        {"{" U8("a", "1", "1", "2") "}", 2, IBP_BAD_FILE},                            /* a gap */
        {"{" U8("a", "2", "0", "2") "," U8("b", "2", "1", "3") "}", 3, IBP_BAD_FILE}, /* an overlap */
        {"{" U8("a", "2", "0", "2") "," U8("b", "2", "0", "2") "}", 2, IBP_BAD_FILE},
        {"{" U8("a", "3", "0", "3") "}", 2, IBP_BAD_FILE}, /* past the end */
        {"{" U8("a", "0", "1", "0") "}", 1, IBP_BAD_FILE},
        {"{" U8("a", "-1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a", "01", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a", "1.0", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a", "9223372036854775807,4,0", "0", "0") "}", 0, IBP_BAD_FILE}, /* too many bits, 0 taken as 1 */
        {"{" U8("a", "0,4,9223372036854775807", "0", "0") "}", 0, IBP_BAD_FILE},
        {"{" U8("a", "0,1152921504606846976", "0", "0") "}", 0, IBP_BAD_FILE},
        {"{" U8("a", "0,1152921504606846975", "0", "0") "}", 0, IBP_OK},
        {"{" U8("a", "18446744073709551617", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a\\x", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a\\ud800", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a\\udc00", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("a\\ud83d\\ude00\\n\\u0000", "1", "0", "1") "}", 1, IBP_OK},
        {"{" U8("a\n", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("\xc0\x80", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("\xed\xa0\x80", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("\xf4\x90\x80\x80", "1", "0", "1") "}", 1, IBP_BAD_FILE},
        {"{" U8("\xf0\x9f\x98\x80 \xe2\x82\xac", "1", "0", "1") "}", 1, IBP_OK},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, IBP_BAD_FILE},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, IBP_BAD_FILE},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":[[[]]]}}", 1, IBP_BAD_FILE},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, IBP_BAD_FILE},
        {"{\"a\":null}", 0, IBP_BAD_FILE},
    };
    ibp_file file;
    uint8_t *bytes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const ibp_status status = open_header(cases[i].header, cases[i].num_data, &file, &bytes);
        CHECK(status == cases[i].wanted, "%s: %s", cases[i].header, ibp_status_string(status));
        uint64_t block;
        if (status == IBP_OK && file.version == 0)
            CHECK(ibp_check_file(&file, fnv, &block) == IBP_NOT_IN_FILE, "%s has no checksums", cases[i].header);
        if (status == IBP_NEWER_FILE) CHECK(ibp_is_text(file.release, "9.9"), "%s", "a release that reads it");
        free(bytes);
    }
    for (uint64_t size = 0; size < 2; size++) { /* headers that are longer than the file, or than any */
        _Alignas(16) uint8_t small[16] = {0};
        const uint64_t claims[] = {9, UINT64_MAX - 7};
        memcpy(small, &claims[size], 8);
        CHECK(ibp_open_file(small, sizeof small, &file) == IBP_BAD_FILE, "a header of %llu",
              (unsigned long long)claims[size]);
    }
}

/* Fields of a table "t" and of a codebook 0, neither of which has parts: what is wrong is seen before. */
static void check_fields(void)
{
#define MASKS "scheme=ibp row_bytes=8 chunk_bytes=4 flag_all=0 pairs=1"
#define PLANES(rest)                                                                                                   \
    "scheme=planes row_bytes=8 element_bytes=2 rotate=1 residual_bits=8 digit_bits=2 per_column=0 listed=0 default=0 " \
    "closed=0 signed_default=0 invariant_bits=0 invariant_value=0" rest
#define TABLE(scheme) "dtype=U8 shape=0 scheme=" scheme " row_bytes=8 slot_bytes=8 codebook=0"
    static const struct {
        const char *table, *codebook;
        ibp_status wanted;
    } cases[] = {
        {TABLE("ibp"), MASKS, IBP_OK},
        {TABLE("planes"), PLANES(""), IBP_BAD_FILE}, /* entries that the file has no room for */
        {TABLE("planes"), PLANES(" live=2 first_symbol=3"), IBP_OK},
        {"dtype=U8 shape= scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_OK},
        {TABLE("ibp") " content=0123456789abcdef", MASKS, IBP_OK},
        {TABLE("ibp") " base=0123456789abcdef result=0123456789abcdef", MASKS, IBP_OK},
        {TABLE("ibp") " base=0123456789abcdef", MASKS, IBP_BAD_FILE},
        {TABLE("ibp") " content=0123456789abcde", MASKS, IBP_BAD_FILE},
        {TABLE("ibp") " rows_per_base=2", MASKS, IBP_BAD_FILE},
        {TABLE("ibp") " rows_per_base=4294967297", MASKS, IBP_BAD_FILE},
        {TABLE("ibp") " future=1", MASKS, IBP_UNSUPPORTED_TABLE},
        {TABLE("ibp") " row_bytes=8", MASKS, IBP_BAD_FILE},
        {TABLE("ibp") " ", MASKS, IBP_BAD_FILE},
        {TABLE("ibp"), PLANES(""), IBP_BAD_FILE},
        {TABLE("huffman"), MASKS, IBP_UNSUPPORTED_TABLE},
        {"dtype=U8 shape=5 codec=zstd block_bytes=64", MASKS, IBP_UNSUPPORTED_TABLE},
        {"dtype=FLOAT3 shape=0 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_UNSUPPORTED_TABLE},
        {"dtype=U8 shape=9223372036854775807,2 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=4611686018427387904,8,0 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0,1152921504606846976 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0,1152921504606846975 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_OK},
        {"dtype=U8 shape=1,,2 scheme=raw row_bytes=8 slot_bytes=8", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0 scheme=raw row_bytes=8 slot_bytes=4", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0 scheme=raw row_bytes=65537 slot_bytes=65537", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0 scheme=ibp row_bytes=8 slot_bytes=4 codebook=0", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0 scheme=ibp row_bytes=8 slot_bytes=8 codebook=1", MASKS, IBP_BAD_FILE},
        {"dtype=U8 shape=0 scheme=ibp row_bytes=8 slot_bytes=8", MASKS, IBP_BAD_FILE},
        {TABLE("ibp"), "clusters=0,0", IBP_BAD_FILE},
        {TABLE("ibp"), "clusters=0", IBP_BAD_FILE},
        {TABLE("ibp"), "clusters=5,6", IBP_BAD_FILE},
        {TABLE("ibp"), "scheme=ibp row_bytes=8 chunk_bytes=3 flag_all=0 pairs=1", IBP_BAD_FILE},
        {TABLE("ibp"), "scheme=ibp row_bytes=8 chunk_bytes=4 pairs=1", IBP_BAD_FILE},
        {TABLE("ibp"), MASKS " live=1", IBP_UNSUPPORTED_TABLE},
        {TABLE("planes"), PLANES(" live=0"), IBP_BAD_FILE},
        {TABLE("planes"), PLANES(" live=5"), IBP_BAD_FILE},
        {TABLE("planes"), PLANES(" pairs=1"), IBP_UNSUPPORTED_TABLE},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char header[2048];
        ibp_file file;
        ibp_file_table found;
        uint8_t *bytes;
        snprintf(header, sizeof header,
                 "{" META_MEMBER(FORMAT "," CHECKS
                                        ",\"ibp.table.t\":\"%s\",\"ibp.codebook.0\":\"%s\"") "," CHECKS_TENSOR "}",
                 cases[i].table, cases[i].codebook);
        const ibp_status opened = open_header(header, 0, &file, &bytes);
        CHECK(opened == IBP_OK, "%s: %s", header, ibp_status_string(opened));
        const ibp_status status = opened == IBP_OK ? ibp_find_table(&file, 1, "t", &found) : opened;
        CHECK(status == cases[i].wanted, "%s: %s", header, ibp_status_string(status));
        if (strstr(cases[i].table, "codec=")) CHECK(ibp_is_text(found.codec, "zstd"), "%s", header);
        free(bytes);
    }
}

/* What stands in the header, and what was wanted in its place. */
static void check_refusals(void)
{
    static const struct {
        const char *line, *found, *wanted, *key;
    } cases[] = {
        {"dtype=U8 shape=0 scheme=raw row_bytes=70000 slot_bytes=8", "70000", "a number from 1 to 65536", "row_bytes"},
        {"dtype=U8 shape=0 scheme=raw row_bytes=8 slot_bytes=4", "4", "row_bytes, or a multiple of 32 below it",
         "slot_bytes"},
        {"dtype=U8 shape=0 scheme=raw slot_bytes=8", NULL, "a number from 1 to 65536", "row_bytes"},
        {"dtype=U8 shape=0 scheme=raw row_bytes=8  slot_bytes=8", "", "key=value, and one space between fields", NULL},
        {"dtype=U8 dtype=U8", "dtype=U8", "no field there twice", NULL},
        {"dtype=U8 shape=0 future=1", "future=1", "a field that this release knows: a newer one may", NULL},
        {"dtype=U8 shape=0 codec=", "", "the name of a codec", "codec"},
        {"dtype=U8 shape=0 codec=a block_bytes=8 scheme=raw", "raw", "no such field beside the others", "scheme"},
    };
    ibp_file file;
    uint8_t *bytes;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ibp_field fields[IBP_TABLE_FIELDS];
        ibp_file_table table;
        const ibp_status status = ibp_read_table((ibp_text){cases[i].line, strlen(cases[i].line)}, fields, &table);
        const ibp_refusal *const refusal = &table.refusal;
        const bool is_key = cases[i].key ? refusal->key && strcmp(refusal->key, cases[i].key) == 0 : !refusal->key,
                   is_found = cases[i].found ? ibp_is_text(refusal->found, cases[i].found) : !refusal->found.data;
        CHECK(status == IBP_BAD_FILE || status == IBP_UNSUPPORTED_TABLE, "%s", cases[i].line);
        CHECK(is_key && is_found && strcmp(refusal->wanted, cases[i].wanted) == 0, "%s: %s", cases[i].line,
              refusal->wanted ? refusal->wanted : "nothing");
    }
    CHECK(open_header("{" U8("a", "2", "0", "1") "}", 1, &file, &bytes) == IBP_BAD_FILE, "%s",
          "a shape of other bytes");
    CHECK(file.refusal.wanted && strncmp(file.refusal.found.data, "\"a\":{", 5) == 0, "%s", "what stands there");
    free(bytes);
}

/* Files of which bytes are changed, or that are cut short, do no harm: a sanitizer watches what is read. */
static void check_damage(rng *r)
{
    static uint8_t data[DATA_BYTES];
    made_file *const f = new_file();
    ibp_codebook codebook;
    uint64_t block;
    fill_data(r, data);
    add_planes(f, r, 0, planes_to_test[0], &codebook);
    add_table(f, "t", "1990", 0, &codebook, 0, data, DATA_BYTES);
    finish(f);
    for (int round = 0; round < (is_quick ? 300 : 6000); round++) {
        const size_t size = rng_chance(r, 30) ? rng_below(r, (uint32_t)f->num_bytes + 1) : f->num_bytes;
        uint8_t *const copy = aligned_alloc(16, (size + 31) / 16 * 16), *const bytes = copy;
        ibp_file file;
        if (!copy) abort();
        memcpy(bytes, f->bytes, size);
        for (uint32_t k = rng_below(r, 4); k > 0 && size != 0; k--)
            bytes[rng_below(r, rng_chance(r, 60) && size > 2000 ? 2000 : (uint32_t)size)] = (uint8_t)rng_next(r);
        if (ibp_open_file(bytes, size, &file) == IBP_OK) {
            const ibp_status status = read_table(&file, 1, "t", data, DATA_BYTES);
            CHECK(status != IBP_INVALID_ARGUMENT, "round %d", round);
            ibp_check_file(&file, fnv, &block);
        }
        free(copy);
    }
    free_file(f);
}

void test_file(void)
{
    rng r = rng_seed(41);
    check_headers();
    check_fields();
    check_refusals();
    for (int round = 0; round < 10; round++) {
        check_tables(&r);
        check_clusters_and_sets(&r);
    }
    check_checksums(&r);
    check_damage(&r);
}
