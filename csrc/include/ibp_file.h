/* ibp_file.h - reads files of compressed tables from memory, such as a mapping of the file. C11 and C++17.
 *
 * A file is a safetensors file whose metadata says which of its tensors are parts of tables (FORMAT.md section 9):
 *
 *   8 bytes   N, the length of the header, as uint64
 *   N bytes   the header: JSON with the metadata and the name, dtype, shape and position of each tensor
 *   the rest  the data of all tensors, one after the other
 *
 * The functions return pointers into the caller's bytes. They copy only codebooks, to memory that the caller provides.
 * The rules of ibp.h hold: no function allocates memory, threads may share a file, and pointers must not be NULL.
 *
 *     // Reads item `number` of the table "embedding" from the bytes of a file.
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
 * Safety. No byte of a file is trusted, and nothing outside the file is read. If another process changes a file while
 * it is read, the worst result is wrong data. The caller must ensure that nobody shortens a file that is mapped.
 *
 * Files can be read only on 64-bit little-endian machines. */
#ifndef IBP_FILE_H
#define IBP_FILE_H

#include "ibp_table.h"

#ifdef __cplusplus
extern "C" {
#endif

#define IBP_MAX_FILE_DIMS 64u /* largest number of dimensions of a torch tensor */

/* A name or a value in the header: the characters between the quotation marks of a JSON string, with its escapes. It
 * points into the bytes of the file, and is not NUL-terminated. */
typedef struct ibp_text {
    const char *data;
    size_t num_bytes;
} ibp_text;

/* Returns whether a text, after its escapes are resolved, equals a NUL-terminated UTF-8 string. */
IBP_API bool ibp_is_text(ibp_text text, const char *utf8);

/* Copies a text, after its escapes are resolved, as a NUL-terminated UTF-8 string. A string that is too long is cut
 * before the first character that does not fit.
 *
 * utf8, room: utf8 receives at most `room` bytes, including the NUL. If room is 0, utf8 may be NULL.
 * @return the number of bytes of the complete text in UTF-8, without the NUL. The copy is complete if this number is
 * below room. */
IBP_API size_t ibp_copy_text(ibp_text text, char *utf8, size_t room);

/* Says why a file or a table was refused. */
typedef struct ibp_refusal {
    ibp_text found;     /* the wrong part of the header; its data is NULL if something is missing */
    const char *wanted; /* says in English what should stand there; NULL if nothing was refused */
    const char *key;    /* the key of the field whose value is wrong; NULL if something else is wrong */
} ibp_refusal;

/* ---- opening a file ---------------------------------------------------------------------------------------------- */

/* An open file: a value that points into the caller's bytes and needs no closing. */
typedef struct ibp_file {
    const uint8_t *bytes;
    size_t num_bytes;
    ibp_text header;     /* the JSON object of the header, without its braces */
    ibp_text metadata;   /* the JSON object of the metadata, without its braces; empty if there is no metadata */
    const uint8_t *data; /* the bytes of all tensors, after the header; NULL if only the header was given */
    size_t data_bytes;
    uint32_t version; /* the version of the format; 0 for a safetensors file without tables */
    ibp_text release; /* the release of the library that wrote the file; may be empty */
    size_t num_tensors, num_tables;
    ibp_refusal refusal; /* why the file is refused, if it is */
} ibp_file;

/* Opens a file and reads its header once.
 *
 * bytes, num_bytes: the whole file, aligned to 16 bytes, as a mapping or in memory. Keep it at its address as long as
 *   *file, its tensors and its tables are used.
 * file: receives the open file; if the file is refused, file->refusal says why.
 * @return IBP_BAD_FILE if the bytes are not a safetensors file, or if the header is inconsistent or does not agree with
 * the size of the file. Also returns IBP_BAD_FILE if the metadata has a key that begins with "ibp.", but the key
 * "ibp.format", the key "ibp.checks" or the tensor "ibp.checks" is missing or occurs twice. Returns IBP_NEWER_FILE if
 * the file has a newer format. Then file->release is the release of the library that wrote the file. That release can
 * read it. */
IBP_API ibp_status ibp_open_file(const uint8_t *bytes, size_t num_bytes, ibp_file *file);

/* Finds the name of the next table of a file, in the order of the header.
 *
 * cursor: set *cursor to 0 before the first call; each call advances it.
 * name: receives the name, for ibp_copy_text and ibp_is_text.
 * @return IBP_NOT_IN_FILE after the last table. */
IBP_API ibp_status ibp_next_table(const ibp_file *file, size_t *cursor, ibp_text *name);

/* A tensor as it is stored: a plain tensor, or a part of a table, of a codebook or of the checksums. */
typedef struct ibp_file_tensor {
    ibp_text name;
    ibp_text dtype; /* as safetensors names it, such as "BF16" */
    uint32_t num_dims;
    int64_t shape[IBP_MAX_FILE_DIMS];
    const uint8_t *data; /* at any alignment; NULL if only the header was given */
    size_t num_bytes;
    size_t start; /* offset of its first byte in the data of the file */
} ibp_file_tensor;

/* Finds the next stored tensor of a file, in the order of the header. ibp_is_part says whether it is a plain tensor.
 *
 * cursor: set *cursor to 0 before the first call; each call advances it.
 * tensor: receives the tensor.
 * @return IBP_NOT_IN_FILE after the last tensor. */
IBP_API ibp_status ibp_next_tensor(const ibp_file *file, size_t *cursor, ibp_file_tensor *tensor);

/* Returns whether a stored tensor is a part of a table whose fields are in this file, or has a name that begins with
 * "ibp.", such as the tensor of checksums "ibp.checks". Returns false for a plain tensor. */
IBP_API bool ibp_is_part(const ibp_file *file, const ibp_file_tensor *tensor);

/* Finds a stored tensor by its name.
 *
 * name: in UTF-8.
 * tensor: receives the tensor, whose data point into the file.
 * @return IBP_NOT_IN_FILE if there is no such tensor, IBP_BAD_FILE if there are several. */
IBP_API ibp_status ibp_find_tensor(const ibp_file *file, const char *name, ibp_file_tensor *tensor);

/* XXH3_64bits of xxHash, or a function that does the same. */
typedef uint64_t (*ibp_hash_function)(const void *bytes, size_t num_bytes);

/* Compares all bytes of a file with the checksums of the file. Opening a file does not do this.
 *
 * xxh3: the hash function of the checksums, which the library does not contain.
 * block: if a checksum does not match, receives its index in "ibp.checks". That array holds a checksum for each block
 *   of the data, then one for the header, and last one for all the checksums before it.
 * @return IBP_OK if all checksums are right; IBP_WRONG_CHECKSUM if one is not; IBP_NOT_IN_FILE if the file has no
 * checksums, as is the case for ordinary safetensors files; IBP_BAD_FILE if what the file says about its checksums is
 * wrong. */
IBP_API ibp_status ibp_check_file(const ibp_file *file, ibp_hash_function xxh3, uint64_t *block);

/* ---- the tables of a file ---------------------------------------------------------------------------------------- */

/* The fields of a table, as a file gives them. */
typedef struct ibp_file_table {
    ibp_text dtype; /* the dtype of the original tensor, as safetensors names it, such as "BF16"; torch's name in
                       capitals if safetensors has none */
    uint32_t num_dims;
    int64_t shape[IBP_MAX_FILE_DIMS];
    int64_t num_items;  /* the size of the first dimension; 1 if there are no dimensions */
    int64_t item_bytes; /* the size of an item in bytes; -1 if the dtype is not known */
    ibp_scheme scheme;
    uint32_t row_bytes, slot_bytes, rows_per_base;
    uint32_t codebook; /* the number of the table's codebook in the file; 0 in scheme raw */
    bool has_content;  /* whether `content` is known: the fingerprint of the original bytes (section 10) */
    bool is_delta;     /* whether the table holds differences. If they are added to a tensor with the fingerprint
                          `base`, the sum is a tensor with the fingerprint `result` */
    uint64_t content, base, result;
    ibp_text codec;         /* the name of the external codec, if one is used in place of a scheme; otherwise empty */
    size_t workspace_bytes; /* size in bytes of the workspace that ibp_open_table needs */
    const char *name;       /* as given to ibp_find_table */
    const ibp_file *files;  /* as given to ibp_find_table */
    size_t num_files, file; /* file: the index in `files` of the file that has the fields */
    ibp_refusal refusal;    /* why the fields of the table are refused, if they are */
} ibp_file_table;

/* Finds a table by its name and reads its fields.
 *
 * files, num_files: one file, or all files of a set; the parts of a table may be spread among these files. Keep the
 *   array at its address as long as *table is used.
 * name: in UTF-8; keep it as long as *table is used.
 * table: receives what the fields say; if the fields are refused, table->refusal says why.
 * @return IBP_NOT_IN_FILE if there is no such table; IBP_BAD_FILE if its fields are inconsistent; IBP_UNSUPPORTED_TABLE
 * if the table has fields, a scheme or a dtype that this library does not know, or is coded by an external codec.
 * If there is an external codec, table->codec is its name. */
IBP_API ibp_status ibp_find_table(const ibp_file *files, size_t num_files, const char *name, ibp_file_table *table);

/* Opens a table that ibp_find_table has found, for the functions of ibp.h. The codebook is checked. Lengths and bases
 * are not read, because calls that decode rows check them row by row.
 *
 * workspace, workspace_bytes: at least found->workspace_bytes bytes, aligned to 16. They receive the codebook; keep
 *   them as long as the table.
 * table: receives the table, whose arrays lie in the files.
 * @return IBP_BAD_FILE if a part or the codebook does not agree with the fields; IBP_NOT_IN_FILE if no file has a part
 * that the table needs; IBP_BUFFER_TOO_SMALL if the workspace is too small. */
IBP_API ibp_status ibp_open_table(const ibp_file_table *found, void *workspace, size_t workspace_bytes,
                                  ibp_table *table);

#ifdef __cplusplus
}
#endif
#endif
