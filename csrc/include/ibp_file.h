/* ibp_file.h - reads files of compressed tables from memory, such as a mapping of the file. C11 and C++17.
 *
 * A file is a safetensors file whose metadata says which of its tensors are parts of tables (FORMAT.md section 9).
 * What is found points into the caller's bytes: nothing is copied but codebooks, whose working form needs memory that
 * the caller gives. The rules of ibp.h hold: nothing is allocated, threads may share a file, pointers are not NULL.
 *
 *     // The item of a number of the table "embedding", from the bytes of a file.
 *     ibp_status read_item(const uint8_t *bytes, size_t num_bytes, int64_t number, void *workspace,
 *                          size_t workspace_bytes, uint8_t *item, void *scratch, size_t scratch_bytes)
 *     {
 *         ibp_file file;
 *         ibp_file_table found; // its dtype, its shape, and the workspace that it needs
 *         ibp_table table;
 *         ibp_fault fault = {0};
 *         ibp_status status = ibp_open_file(bytes, num_bytes, &file);
 *         if (status == IBP_OK) status = ibp_find_table(&file, 1, "embedding", &found);
 *         if (status == IBP_OK) status = ibp_open_table(&found, workspace, workspace_bytes, &table);
 *         if (status != IBP_OK) return status;
 *         const int64_t start = number * table.item_bytes;
 *         return ibp_decode_bytes(&table, start, start + table.item_bytes, item, scratch, scratch_bytes, &fault);
 *     }
 *
 * Safety. No byte of a file is trusted, nothing outside of it is read, and a file that another process changes while
 * it is read gives wrong data at worst. (That nobody cuts it short meanwhile is up to the caller, as with any mapping.)
 *
 * For little-endian machines of 64 bits. */
#ifndef IBP_FILE_H
#define IBP_FILE_H

#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_MAX_FILE_DIMS 64u /* as many as torch's tensors have */

/* A name or a value: the inside of a string of the header, in JSON, escapes included. Valid as long as the file is. */
typedef struct ibp_text {
    const char *data;
    size_t num_bytes;
} ibp_text;

/* Whether a text is this one, in UTF-8. */
IBP_API bool ibp_is_text(ibp_text text, const char *utf8);

/* Writes a text in UTF-8, and a final 0, to utf8, which has `room` bytes, as snprintf does: what does not fit is left
 * out. room may be 0, and utf8 then NULL. @return the bytes of the whole text without the 0. */
IBP_API size_t ibp_copy_text(ibp_text text, char *utf8, size_t room);

/* Why a file or a table is refused, in words. */
typedef struct ibp_refusal {
    ibp_text found;     /* a piece of the header; its data is NULL where something is missing */
    const char *wanted; /* what should stand there, in English; NULL where nothing was noted */
    const char *key;    /* of the field, if it is a field's value; else NULL */
} ibp_refusal;

/* ---- a file ------------------------------------------------------------------------------------------------------ */

typedef struct ibp_file {
    const uint8_t *bytes;
    size_t num_bytes;
    ibp_text header;     /* the inside of the JSON object that it is */
    ibp_text metadata;   /* the inside of that of the metadata; empty where there is none */
    const uint8_t *data; /* of all tensors; NULL where only the header was given */
    size_t data_bytes;
    uint32_t version; /* of the format; 0: a safetensors file without tables */
    ibp_text release; /* of the library that wrote the file; may be empty */
    size_t num_tensors, num_tables;
    ibp_refusal refusal; /* of a file that is refused */
} ibp_file;

/* Opens the num_bytes bytes of a file, aligned to 16 bytes, and reads its header once. The bytes stay the caller's,
 * and stay where they are as long as the file is used.
 * @return IBP_BAD_FILE for what is no file, or one whose header contradicts itself or its length, or has only some of
 * the names by which checksums are found ("ibp.format", "ibp.checks" and the tensor "ibp.checks"); IBP_NEWER_FILE for
 * one of a newer format: file->release then says which release of the library reads it. */
IBP_API ibp_status ibp_open_file(const uint8_t *bytes, size_t num_bytes, ibp_file *file);

/* The name of the next table; otherwise likewise. */
IBP_API ibp_status ibp_next_table(const ibp_file *file, size_t *cursor, ibp_text *name);

/* A tensor as it is stored. */
typedef struct ibp_file_tensor {
    ibp_text name;
    ibp_text dtype; /* as safetensors names it: "BF16" */
    uint32_t num_dims;
    int64_t shape[IBP_MAX_FILE_DIMS];
    const uint8_t *data; /* at any alignment; NULL where only the header was given */
    size_t num_bytes;
    size_t start; /* of its bytes, among the data of the file */
} ibp_file_tensor;

/* The next stored tensor, in the order of the header: a plain one, or a part of a table, of a codebook or of the
 * checksums (ibp_is_part). *cursor: 0 before the first call. @return IBP_NOT_IN_FILE after the last one. */
IBP_API ibp_status ibp_next_tensor(const ibp_file *file, size_t *cursor, ibp_file_tensor *tensor);

/* Whether a tensor is a part of a table whose fields are in this file, or one of the format's own ("ibp.checks"). */
IBP_API bool ibp_is_part(const ibp_file *file, const ibp_file_tensor *tensor);

/* The stored tensor of a name in UTF-8.
 * @return IBP_NOT_IN_FILE if there is none, IBP_BAD_FILE if there are several. */
IBP_API ibp_status ibp_find_tensor(const ibp_file *file, const char *name, ibp_file_tensor *tensor);

/* XXH3_64bits of xxHash, or a function that does the same. */
typedef uint64_t (*ibp_hash_function)(const void *bytes, size_t num_bytes);

/* Compares all checksums of a file. *block: the first one that is wrong, counted as the entries of "ibp.checks" are:
 * the blocks of the data first, then the header, then the checksums themselves.
 * @return IBP_WRONG_CHECKSUM, or as ibp_find_checks. */
IBP_API ibp_status ibp_check_file(const ibp_file *file, ibp_hash_function xxh3, uint64_t *block);

/* ---- its tables -------------------------------------------------------------------------------------------------- */

/* What the fields of a table say. */
typedef struct ibp_file_table {
    ibp_text dtype; /* of the original tensor: "BF16"; for what safetensors has no name for, torch's in capitals */
    uint32_t num_dims;
    int64_t shape[IBP_MAX_FILE_DIMS];
    int64_t num_items;  /* along the first dimension; one where there is none */
    int64_t item_bytes; /* -1 of a dtype that is not known */
    ibp_scheme scheme;
    uint32_t row_bytes, slot_bytes, rows_per_base;
    uint32_t codebook; /* its number; not in scheme raw */
    bool has_content;  /* whether content, the fingerprint of the original bytes (section 10), is known */
    bool is_delta;     /* the items are differences from bytes of the fingerprint base; their sums have result */
    uint64_t content, base, result;
    ibp_text codec; /* of a table that an external codec has coded, which has no scheme and no rows; else empty */
    size_t workspace_bytes;
    const char *name;       /* the caller's */
    const ibp_file *files;  /* likewise */
    size_t num_files, file; /* the number of the file that has the fields */
    ibp_refusal refusal;    /* of a table that is refused for its fields */
} ibp_file_table;

/* The table of a name in UTF-8. files: one, or all of a set, among which the parts of a table may be spread. The name
 * and the files stay where they are as long as *table is used.
 * @return IBP_NOT_IN_FILE if there is none; IBP_BAD_FILE if its fields contradict each other; IBP_UNSUPPORTED_TABLE if
 * it has fields, a scheme, a dtype or a codec that this library does not know, and then table->codec may say which. */
IBP_API ibp_status ibp_find_table(const ibp_file *files, size_t num_files, const char *name, ibp_file_table *table);

/* The table itself: its arrays lie in the files, its codebook in the workspace: found->workspace_bytes bytes, aligned
 * to 16. What its lengths and bases say is not read: functions of ibp.h find what is wrong in them row by row.
 * @return IBP_BAD_FILE for parts or a codebook that do not fit the fields; IBP_NOT_IN_FILE for a part that is in none
 * of the files; IBP_BUFFER_TOO_SMALL. */
IBP_API ibp_status ibp_open_table(const ibp_file_table *found, void *workspace, size_t workspace_bytes,
                                  ibp_table *table);

#ifdef __cplusplus
}
#endif
#endif
