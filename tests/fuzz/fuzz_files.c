/* fuzz_files.c - files of any bytes: opened, listed, checked, and the first bytes of every table decoded. */
#define _DEFAULT_SOURCE /* posix_memalign */
#include "fuzz.h"

enum { MOST_WORKSPACE = 1 << 24, MOST_BYTES = 1 << 14, NAME_BYTES = 256 };

/* FNV-1a (Fowler, Noll and Vo): any function does. */
static uint64_t hash(const void *bytes, size_t num_bytes)
{
    uint64_t sum = 0xcbf29ce484222325u;
    for (size_t i = 0; i < num_bytes; i++) sum = (sum ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
    return sum;
}

static void *allocate(size_t num_bytes)
{
    void *memory = NULL;
    if (posix_memalign(&memory, 16, num_bytes) != 0) abort();
    return memory;
}

/* Decodes the first bytes of a table that was opened, and its last item. */
static void read_table(const ibp_table *table)
{
    const int64_t num_bytes = table->num_items * table->item_bytes,
                  end = num_bytes < MOST_BYTES ? num_bytes : MOST_BYTES;
    const int64_t id = table->num_items - 1;
    const ibp_ids ids = {.data = &id, .count = 1, .id_bytes = 8};
    const uint32_t row_bytes = table->codebook.row_bytes;
    uint8_t *const out = fenced(8, MOST_BYTES), *const scratch = fenced_scratch(row_bytes);
    ibp_fault fault = {0};
    REQUIRE(ibp_check_table(table) == IBP_OK);
    const ibp_status decoded =
        ibp_decode_bytes(table, 0, end, fenced(9, (size_t)end), scratch, ibp_scratch_bytes(row_bytes), &fault);
    REQUIRE(decoded == IBP_OK || decoded == IBP_CORRUPT_ROW);
    if (table->item_bytes > MOST_BYTES) return;
    const ibp_status gathered = ibp_gather_items(table, &ids, 0, 1, out, scratch, ibp_scratch_bytes(row_bytes), &fault);
    REQUIRE(gathered != IBP_INVALID_ARGUMENT && gathered != IBP_BUFFER_TOO_SMALL);
}

static void open_table(const ibp_file *file, ibp_text text)
{
    char name[NAME_BYTES];
    ibp_file_table found;
    ibp_table table;
    const size_t length = ibp_copy_text(text, name, sizeof name);
    const bool fits = length < sizeof name && strlen(name) == length;
    const ibp_status status = ibp_find_table(file, 1, name, &found);
    REQUIRE(status != IBP_INVALID_ARGUMENT && (status != IBP_NOT_IN_FILE || !fits));
    if (status != IBP_OK || found.workspace_bytes > MOST_WORKSPACE) return;
    void *const workspace = allocate(found.workspace_bytes);
    const ibp_status opened = ibp_open_table(&found, workspace, found.workspace_bytes, &table);
    REQUIRE(opened == IBP_OK || opened == IBP_BAD_FILE || opened == IBP_NOT_IN_FILE || opened == IBP_UNSUPPORTED_TABLE);
    if (opened == IBP_OK) read_table(&table);
    free(workspace);
}

/* Reads every line of the metadata as fields of a table and of a codebook. */
static void read_lines(const ibp_file *file)
{
    ibp_text key, value;
    for (size_t at = 0; ibp_next_metadata(file, &at, &key, &value) == IBP_OK;) {
        ibp_field of_table[IBP_TABLE_FIELDS], of_codebook[IBP_CODEBOOK_FIELDS];
        ibp_file_table table;
        ibp_refusal refusal = {0};
        const ibp_status found = ibp_read_table(value, of_table, &table),
                         read = ibp_read_codebook(value, of_codebook, &refusal);
        REQUIRE(found == IBP_OK || ((found == IBP_BAD_FILE || found == IBP_UNSUPPORTED_TABLE) && table.refusal.wanted));
        REQUIRE(read == IBP_OK || ((read == IBP_BAD_FILE || read == IBP_UNSUPPORTED_TABLE) && refusal.wanted));
    }
}

/* The header alone says what the whole file says. */
static void open_header(const ibp_file *file)
{
    const size_t num_bytes = (size_t)(file->data - file->bytes);
    uint8_t *const bytes = allocate(num_bytes);
    ibp_file header;
    ibp_file_tensor tensor, same;
    memcpy(bytes, file->bytes, num_bytes);
    REQUIRE(ibp_open_header(bytes, num_bytes, file->num_bytes, &header) == IBP_OK);
    REQUIRE(header.num_tensors == file->num_tensors && header.num_tables == file->num_tables);
    for (size_t at = 0, other = 0; ibp_next_tensor(file, &at, &tensor) == IBP_OK;) {
        REQUIRE(ibp_next_tensor(&header, &other, &same) == IBP_OK && at == other);
        REQUIRE(same.start == tensor.start && same.num_bytes == tensor.num_bytes);
        REQUIRE(tensor.data == file->data + tensor.start && (!same.data || header.data));
    }
    free(bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    ibp_file file;
    ibp_file_tensor tensor;
    ibp_text name;
    uint64_t block;
    uint8_t *const bytes = allocate(size);
    memcpy(bytes, data, size);
    const ibp_status status = ibp_open_file(bytes, size, &file);
    REQUIRE(status == IBP_OK || status == IBP_BAD_FILE || status == IBP_NEWER_FILE);
    if (status == IBP_OK) {
        size_t num_tables = 0, num_tensors = 0;
        for (size_t at = 0; ibp_next_tensor(&file, &at, &tensor) == IBP_OK; num_tensors++) {
            REQUIRE(tensor.data >= file.data && tensor.num_bytes <= (size_t)(bytes + size - tensor.data));
            ibp_is_part(&file, &tensor);
        }
        for (size_t at = 0; ibp_next_table(&file, &at, &name) == IBP_OK; num_tables++) open_table(&file, name);
        REQUIRE(num_tables == file.num_tables && num_tensors == file.num_tensors);
        ibp_check_file(&file, hash, &block);
        read_lines(&file);
        open_header(&file);
    }
    free(bytes);
    return 0;
}
