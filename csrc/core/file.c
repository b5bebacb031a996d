/* file.c - reads files of compressed tables: the header, the tensors and tables that it lists, and the checksums
 * (FORMAT.md section 9).
 *
 *   byte 0       N, as uint64
 *   byte 8       N bytes of JSON, the header: {"__metadata__": {"key": "text", ...}, "<tensor>": {...}, ...}
 *   byte 8 + N   the data of all tensors, without gaps; the last tensor is "ibp.checks" */
#include "file.h"
#include "format.h"

#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files are read in place: this needs a little-endian machine"
#endif
_Static_assert(sizeof(size_t) == 8, "files are mapped whole: this needs a machine of 64 bits");

#define CHECKS "ibp.checks" /* the key for the fields of the checksums, and the name of the tensor that holds them */
#define OTHER_NAMES                                                                                                  \
    ": the header is damaged, since a file of ibp has 'ibp.format' and 'ibp.checks' in its metadata and the tensor " \
    "'ibp.checks', and any other file no 'ibp.' in its metadata"

enum { LENGTH_BYTES = 8, MAX_HEADER_BYTES = 100000000 /* the same limit as in the safetensors package */ };

/* ---- entries of the header ---- */

/* Takes the key of the next entry of an object, with the comma before it and the colon after it. */
static bool take_key(ibp_json *json, bool is_first, ibp_text *key)
{
    return (is_first || ibp_take_symbol(json, ',')) && ibp_take_string(json, key) && ibp_take_symbol(json, ':');
}

/* Returns the part of a text that begins at the address `at`, for messages that show where an error is. */
static ibp_text rest_of(const char *at, ibp_text inside)
{
    return (ibp_text){at, (size_t)(inside.data + inside.num_bytes - at)};
}

/* Begins to read an entry of an object, at byte `cursor` of `inside`, and takes the entry's key. inside: the object
 * without its braces. Returns IBP_NOT_IN_FILE if there is no further entry. */
static ibp_status open_entry(ibp_text inside, size_t cursor, ibp_json *json, ibp_text *key)
{
    if (cursor > inside.num_bytes) return IBP_INVALID_ARGUMENT;
    if (cursor == inside.num_bytes) return IBP_NOT_IN_FILE;
    *json = (ibp_json){inside.data + cursor, inside.data + inside.num_bytes};
    if (ibp_is_at_end(json)) return IBP_NOT_IN_FILE;
    return take_key(json, cursor == 0, key) ? IBP_OK : IBP_BAD_FILE;
}

ibp_status ibp_next_metadata(const ibp_file *file, size_t *cursor, ibp_text *key, ibp_text *value)
{
    ibp_json json;
    const ibp_status status = open_entry(file->metadata, *cursor, &json, key);
    if (status != IBP_OK) return status;
    if (!ibp_take_string(&json, value)) return IBP_BAD_FILE;
    *cursor = (size_t)(json.at - file->metadata.data);
    return IBP_OK;
}

/* Takes an object {"key": "value", ...}. metadata: receives the object without its braces. */
static bool take_metadata(ibp_json *json, ibp_text *metadata)
{
    ibp_text key, value;
    if (!ibp_take_symbol(json, '{')) return false;
    const char *const start = json->at;
    for (bool is_first = true; !ibp_take_symbol(json, '}'); is_first = false)
        if (!take_key(json, is_first, &key) || !ibp_take_string(json, &value)) return false;
    *metadata = (ibp_text){start, (size_t)(json->at - 1 - start)};
    return true;
}

/* Takes a list [1, 2, ...] of at most `most` numbers. */
static bool take_sizes(ibp_json *json, int64_t *sizes, uint32_t most, uint32_t *count)
{
    *count = 0;
    if (!ibp_take_symbol(json, '[')) return false;
    while (!ibp_take_symbol(json, ']')) {
        if (*count == most || (*count != 0 && !ibp_take_symbol(json, ','))) return false;
        if (!ibp_take_size(json, &sizes[(*count)++])) return false;
    }
    return true;
}

/* Takes the fields of a tensor, {"dtype": "U8", "shape": [2, 3], "data_offsets": [0, 6]}, in any order. */
static bool take_tensor(ibp_json *json, ibp_file_tensor *tensor, int64_t offsets[2])
{
    enum { DTYPE = 1, SHAPE = 2, OFFSETS = 4 };
    unsigned found = 0;
    uint32_t num_offsets;
    ibp_text key;
    if (!ibp_take_symbol(json, '{')) return false;
    for (bool is_first = true; !ibp_take_symbol(json, '}'); is_first = false) {
        if (!take_key(json, is_first, &key)) return false;
        const unsigned field = ibp_is_text(key, "dtype")          ? DTYPE
                               : ibp_is_text(key, "shape")        ? SHAPE
                               : ibp_is_text(key, "data_offsets") ? OFFSETS
                                                                  : 0;
        if (field == 0 || (found & field)) return false;
        found |= field;
        if (field == DTYPE && !ibp_take_string(json, &tensor->dtype)) return false;
        if (field == SHAPE && !take_sizes(json, tensor->shape, IBP_MAX_FILE_DIMS, &tensor->num_dims)) return false;
        if (field == OFFSETS && (!take_sizes(json, offsets, 2, &num_offsets) || num_offsets != 2)) return false;
    }
    return found == (DTYPE | SHAPE | OFFSETS);
}

/* Checks a tensor. Returns NULL if it is valid. If its fields are inconsistent, or it does not lie in the data, returns
 * a text that says what was expected. */
static const char *wanted_of(const ibp_file *file, const ibp_file_tensor *tensor, const int64_t offsets[2])
{
    const uint32_t bits = ibp_bits_of_dtype(tensor->dtype);
    int64_t num_bytes;
    if (offsets[0] > offsets[1]) return "the first byte and the end of its data in data_offsets";
    if ((uint64_t)offsets[1] > file->data_bytes) return "its data within the file, which was cut or added to";
    if (bits == 0) return NULL;
    if (!ibp_bytes_of_shape(tensor->shape, tensor->num_dims, bits, &num_bytes))
        return "a shape of at most " IBP_SHAPE_BITS;
    return num_bytes == offsets[1] - offsets[0] ? NULL : "as many bytes as its dtype and shape have";
}

/* Finds the next tensor of the header. If the metadata comes first, skips it and returns it in *metadata. */
static ibp_status next_tensor(const ibp_file *file, size_t *cursor, ibp_file_tensor *tensor, ibp_text *metadata,
                              ibp_refusal *refusal)
{
    for (;;) {
        ibp_json json;
        int64_t offsets[2];
        const char *const start = file->header.data + *cursor, *wanted;
        const ibp_status status = open_entry(file->header, *cursor, &json, &tensor->name);
        if (status == IBP_BAD_FILE)
            return ibp_refuse(refusal, rest_of(start, file->header), "JSON: a name and a colon");
        if (status != IBP_OK) return status;
        const bool is_metadata = ibp_is_text(tensor->name, "__metadata__");
        if (is_metadata && metadata->data) return ibp_refuse(refusal, tensor->name, "no key there twice");
        if (is_metadata && !take_metadata(&json, metadata))
            return ibp_refuse(refusal, rest_of(json.at, file->header), "text by text in __metadata__");
        if (!is_metadata && !take_tensor(&json, tensor, offsets))
            return ibp_refuse(refusal, rest_of(tensor->name.data - 1, file->header),
                              "JSON: dtype, shape and data_offsets of a tensor, and no other fields");
        if (!is_metadata && (wanted = wanted_of(file, tensor, offsets)) != NULL)
            return ibp_refuse(refusal, (ibp_text){tensor->name.data - 1, (size_t)(json.at - tensor->name.data) + 1},
                              wanted);
        *cursor = (size_t)(json.at - file->header.data);
        if (is_metadata) continue;
        tensor->start = (size_t)offsets[0];
        tensor->data = file->data ? file->data + offsets[0] : NULL;
        tensor->num_bytes = (size_t)(offsets[1] - offsets[0]);
        return IBP_OK;
    }
}

ibp_status ibp_next_tensor(const ibp_file *file, size_t *cursor, ibp_file_tensor *tensor)
{
    ibp_text metadata = {NULL, 0};
    ibp_refusal refusal;
    return next_tensor(file, cursor, tensor, &metadata, &refusal);
}

/* ---- opening ---- */

/* Counts the tensors and finds the metadata. Checks that the tensors lie one after the other up to the end of the data,
 * whatever their order in the header. This is the case if two sets of numbers are equal: the starts of all tensors
 * together with the end of the data, and 0 together with the ends of all tensors. The function compares the sums of a
 * hash over these two sets, because this needs no memory for the numbers. Memory safety does not depend on this
 * check. */
static ibp_status read_tensors(ibp_file *file)
{
    ibp_file_tensor tensor;
    uint64_t starts = ibp_mix(file->data_bytes), ends = ibp_mix(0);
    size_t cursor = 0;
    ibp_status status;
    while ((status = next_tensor(file, &cursor, &tensor, &file->metadata, &file->refusal)) == IBP_OK) {
        starts += ibp_mix(tensor.start), ends += ibp_mix(tensor.start + tensor.num_bytes);
        file->num_tensors++;
    }
    if (status != IBP_NOT_IN_FILE || starts == ends) return status == IBP_NOT_IN_FILE ? IBP_OK : status;
    return ibp_refuse(&file->refusal, (ibp_text){NULL, 0},
                      "tensors one after the other up to the end of the file: it was cut or added to");
}

/* Finds a key of the metadata that begins with "ibp.". */
static bool find_own_metadata(const ibp_file *file, ibp_text *own)
{
    ibp_text key, value;
    for (size_t cursor = 0; ibp_next_metadata(file, &cursor, &key, &value) == IBP_OK;) {
        *own = key;
        if (ibp_take_prefix(&key, "ibp.")) return true;
    }
    return false;
}

/* Refuses a file because of a name that this format requires: the name occurs twice if status is IBP_BAD_FILE,
 * otherwise it is missing. found: a key of the metadata that shows that the file has this format. */
static ibp_status refuse_name(ibp_file *file, ibp_status status, ibp_text found, const char *wanted)
{
    return ibp_refuse(&file->refusal, found, status == IBP_BAD_FILE ? "each name of a file of ibp once" : wanted);
}

/* Reads the version, checks that the file has its checksums (the key and the tensor "ibp.checks"), and counts the
 * tables. */
static ibp_status read_metadata(ibp_file *file)
{
    ibp_file_tensor checks;
    ibp_text own, value, text, name;
    uint64_t version;
    size_t cursor = 0;
    if (!find_own_metadata(file, &own)) return IBP_OK;
    ibp_status status = ibp_find_metadata(file, "ibp.", "format", &value);
    if (status != IBP_OK) return refuse_name(file, status, own, "'ibp.format' in its metadata beside it" OTHER_NAMES);
    text = value;
    if (!ibp_take_number(&value, &version) || value.num_bytes != 0 || version == 0) {
        file->refusal = (ibp_refusal){text, "a number from 1 on", "ibp.format"};
        return IBP_BAD_FILE;
    }
    status = ibp_find_metadata(file, "ibp.", "release", &file->release);
    if (status == IBP_BAD_FILE) return refuse_name(file, status, own, NULL);
    file->version = version > UINT32_MAX ? UINT32_MAX : (uint32_t)version;
    if (version > IBP_FORMAT_VERSION) return IBP_NEWER_FILE;
    status = ibp_find_metadata(file, CHECKS, "", &value);
    if (status != IBP_OK) return refuse_name(file, status, own, "'ibp.checks' in its metadata beside it" OTHER_NAMES);
    status = ibp_find_tensor(file, CHECKS, &checks);
    if (status != IBP_OK) return refuse_name(file, status, own, "the tensor 'ibp.checks' beside it" OTHER_NAMES);
    while ((status = ibp_next_table(file, &cursor, &name)) == IBP_OK) file->num_tables++;
    return status == IBP_NOT_IN_FILE ? IBP_OK : status;
}

/* Finds the header's JSON object without its braces. White space may follow the object. */
static bool find_header(const uint8_t *bytes, uint64_t header_bytes, ibp_text *header)
{
    const char *const start = (const char *)bytes + LENGTH_BYTES, *end = start + header_bytes;
    while (end > start && (end[-1] == ' ' || end[-1] == '\n' || end[-1] == '\t' || end[-1] == '\r')) end--;
    if (end - start < 2 || *start != '{' || end[-1] != '}') return false;
    *header = (ibp_text){start + 1, (size_t)(end - start) - 2};
    return true;
}

ibp_status ibp_open_file(const uint8_t *bytes, size_t num_bytes, ibp_file *file)
{
    return ibp_open_header(bytes, num_bytes, num_bytes, file);
}

ibp_status ibp_open_header(const uint8_t *bytes, size_t num_bytes, size_t file_bytes, ibp_file *file)
{
    uint64_t header_bytes = 0;
    *file = (ibp_file){.bytes = bytes, .num_bytes = file_bytes};
    if ((uintptr_t)bytes % 16 != 0 || file_bytes > INT64_MAX || num_bytes > file_bytes) return IBP_INVALID_ARGUMENT;
    if (num_bytes < LENGTH_BYTES) return IBP_BAD_FILE;
    for (uint32_t i = 0; i < LENGTH_BYTES; i++) header_bytes |= (uint64_t)IBP_LOAD_ONCE(bytes[i]) << 8 * i;
    if (header_bytes > MAX_HEADER_BYTES || header_bytes > num_bytes - LENGTH_BYTES) return IBP_BAD_FILE;
    if (!find_header(bytes, header_bytes, &file->header))
        return ibp_refuse(&file->refusal, (ibp_text){(const char *)bytes + LENGTH_BYTES, header_bytes},
                          "a header in JSON, from { to }");
    file->data = num_bytes == file_bytes ? bytes + LENGTH_BYTES + header_bytes : NULL;
    file->data_bytes = file_bytes - LENGTH_BYTES - header_bytes;
    const ibp_status status = read_tensors(file);
    return status == IBP_OK ? read_metadata(file) : status;
}

/* ---- finding ---- */

ibp_status ibp_find_metadata(const ibp_file *file, const char *prefix, const char *name, ibp_text *value)
{
    ibp_text key, found;
    size_t cursor = 0;
    bool is_found = false;
    ibp_status status;
    while ((status = ibp_next_metadata(file, &cursor, &key, &found)) == IBP_OK) {
        if (!ibp_take_prefix(&key, prefix) || !ibp_is_text(key, name)) continue;
        if (is_found) return IBP_BAD_FILE;
        is_found = true;
        *value = found;
    }
    return status == IBP_NOT_IN_FILE && is_found ? IBP_OK : status;
}

ibp_status ibp_next_table(const ibp_file *file, size_t *cursor, ibp_text *name)
{
    ibp_text value;
    ibp_status status = file->version == 0 ? IBP_NOT_IN_FILE : IBP_OK;
    do {
        if (status == IBP_OK) status = ibp_next_metadata(file, cursor, name, &value);
    } while (status == IBP_OK && !ibp_take_prefix(name, "ibp.table."));
    return status;
}

ibp_status ibp_find_tensor(const ibp_file *file, const char *name, ibp_file_tensor *tensor)
{
    ibp_file_tensor next;
    size_t cursor = 0;
    bool is_found = false;
    ibp_status status;
    while ((status = ibp_next_tensor(file, &cursor, &next)) == IBP_OK) {
        if (!ibp_is_text(next.name, name)) continue;
        if (is_found) return IBP_BAD_FILE;
        is_found = true;
        *tensor = next;
    }
    return status == IBP_NOT_IN_FILE && is_found ? IBP_OK : status;
}

/* Takes the characters of `other` from the beginning of *text. Returns whether *text begins with them. The characters
 * of the two texts may be escaped differently. */
static bool take_text(ibp_text *text, ibp_text other)
{
    uint8_t ours[4], theirs[4];
    while (other.num_bytes != 0) {
        const uint32_t num_bytes = ibp_take_character(&other, theirs);
        if (num_bytes == 0 || ibp_take_character(text, ours) != num_bytes || memcmp(ours, theirs, num_bytes) != 0)
            return false;
    }
    return true;
}

bool ibp_is_part(const ibp_file *file, const ibp_file_tensor *tensor)
{
    static const char *const parts[] = {":slots", ":overflow", ":lengths", ":bases", ":blocks", ":offsets"};
    ibp_text rest = tensor->name, table;
    size_t cursor = 0;
    if (file->version == 0) return false;
    if (ibp_take_prefix(&rest, "ibp.")) return true;
    while (ibp_next_table(file, &cursor, &table) == IBP_OK) {
        rest = tensor->name;
        if (!take_text(&rest, table)) continue;
        for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
            if (ibp_is_text(rest, parts[i])) return true;
    }
    return false;
}

/* ---- checksums ---- */

ibp_status ibp_find_checks(const ibp_file *file, ibp_file_checks *checks, ibp_refusal *refusal)
{
    ibp_field fields[] = {
        {.key = "block_bytes", .least = 1, .most = INT64_MAX, .wanted = "a power of two"},
        {.key = "hash", .kind = IBP_FIELD_TEXT, .wanted = "xxh3_64"},
    };
    ibp_file_tensor tensor;
    ibp_text line;
    ibp_status status = file->version == 0 ? IBP_NOT_IN_FILE : ibp_find_metadata(file, CHECKS, "", &line);
    if (status == IBP_OK) status = ibp_find_tensor(file, CHECKS, &tensor);
    if (status == IBP_OK) status = ibp_read_fields(line, fields, 2, refusal);
    if (status == IBP_OK) status = ibp_check_given(fields, 2, 3, 0, refusal);
    if (status != IBP_OK) return status == IBP_UNSUPPORTED_TABLE ? IBP_BAD_FILE : status;
    const uint64_t block_bytes = checks->block_bytes = fields[0].number, start = checks->start = tensor.start;
    checks->num_blocks = start / block_bytes + (start % block_bytes != 0);
    if ((block_bytes & (block_bytes - 1)) != 0) return ibp_refuse_field(refusal, &fields[0]);
    if (!ibp_is_text(fields[1].text, "xxh3_64")) return ibp_refuse_field(refusal, &fields[1]);
    if (start + tensor.num_bytes != file->data_bytes)
        return ibp_refuse(refusal, tensor.name, "it after all other tensors");
    const bool are_entries = tensor.num_dims == 1 && ibp_is_text(tensor.dtype, "U64");
    if (are_entries && tensor.num_bytes / 8 == checks->num_blocks + 2) return IBP_OK;
    return ibp_refuse(refusal, tensor.name, "U64 of one dimension: an entry for each block, and two more");
}

ibp_status ibp_check_file(const ibp_file *file, ibp_hash_function xxh3, uint64_t *block)
{
    ibp_file_checks checks;
    ibp_refusal refusal;
    const ibp_status status = ibp_find_checks(file, &checks, &refusal);
    if (status != IBP_OK) return status;
    if (!file->data) return IBP_INVALID_ARGUMENT;
    const uint8_t *const entries = file->data + checks.start;
    for (*block = 0; *block < checks.num_blocks + 2; ++*block) {
        const uint8_t *bytes = file->bytes; /* the header */
        size_t num_bytes = (size_t)(file->data - file->bytes);
        if (*block < checks.num_blocks) {
            const uint64_t left = checks.start - *block * checks.block_bytes;
            bytes = entries - left, num_bytes = left < checks.block_bytes ? left : checks.block_bytes;
        } else if (*block > checks.num_blocks)
            bytes = entries, num_bytes = 8 * (checks.num_blocks + 1);
        uint64_t wanted;
        memcpy(&wanted, entries + 8 * *block, sizeof wanted);
        if (xxh3(bytes, num_bytes) != wanted) return IBP_WRONG_CHECKSUM;
    }
    return IBP_OK;
}
