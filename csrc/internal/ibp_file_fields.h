/* ibp_file_fields.h - reads a file's header piece by piece: metadata, checksums, and the fields of tables. */
#ifndef IBP_FILE_FIELDS_H
#define IBP_FILE_FIELDS_H

#include "ibp_file.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Opens a file of file_bytes bytes as ibp_open_file does, but from its header alone. The file's tensors then have a
 * start and a size but no data; its tables can be found but not opened.
 *
 * bytes, num_bytes: the bytes of the file before the data.
 * file_bytes: the size of the whole file. */
IBP_API ibp_status ibp_open_header(const uint8_t *bytes, size_t num_bytes, size_t file_bytes, ibp_file *file);

/* Finds the next entry of the metadata. Keys that begin with "ibp." belong to the format.
 *
 * cursor: set *cursor to 0 before the first call; each call advances it.
 * @return IBP_NOT_IN_FILE after the last entry. */
IBP_API ibp_status ibp_next_metadata(const ibp_file *file, size_t *cursor, ibp_text *key, ibp_text *value);

/* The checksums of a file, as its header describes them: one for each block of the data before the checksums, one for
 * the bytes before the data, and one for all the preceding checksums. */
typedef struct ibp_file_checks {
    uint64_t block_bytes, num_blocks;
    size_t start; /* offset of the checksums in the data of the file */
} ibp_file_checks;

/* Finds the checksums of a file.
 *
 * refusal: says why the checksums are refused, if they are.
 * @return IBP_NOT_IN_FILE if the file has no checksums, as is the case for ordinary safetensors files; IBP_BAD_FILE if
 * what the file says about them is wrong. */
IBP_API ibp_status ibp_find_checks(const ibp_file *file, ibp_file_checks *checks, ibp_refusal *refusal);

/* ---- fields, one by one ------------------------------------------------------------------------------------------ */

/* The kinds of values that fields have. */
typedef enum ibp_field_kind {
    IBP_FIELD_NUMBER,
    IBP_FIELD_FINGERPRINT,
    IBP_FIELD_REAL,
    IBP_FIELD_LIST, /* a list of numbers */
    IBP_FIELD_TEXT,
    /* All fields whose keys begin with `key`. `text` is the last of these fields: the rest of its key, "=" and its
     * value. */
    IBP_FIELD_OTHERS
} ibp_field_kind;

/* A field that a table or a codebook can have, and its value in a line. A line is the value of one key of the metadata;
 * it is a text of the form "key=value key=value". */
typedef struct ibp_field {
    const char *key, *wanted; /* wanted: describes in English the values that the field can have */
    ibp_field_kind kind;
    uint64_t least, most;  /* bounds of a number, and of each number of a list */
    uint32_t most_entries; /* largest number of entries of a list */
    bool is_given;         /* whether the line has the field */
    uint64_t number;       /* the value of a number or a fingerprint; the ibp_scheme that the field `scheme` names */
    ibp_text text;         /* the value as it stands in the line, for every kind */
} ibp_field;

#define IBP_TABLE_FIELDS 13u
#define IBP_CODEBOOK_FIELDS 21u

/* Reads the fields of a table from a line, the value of the key "ibp.table.<name>". Notes in `fields` which of the
 * possible fields the line has, and their values. A table with an external codec or an unknown dtype is read, too.
 *
 * table: receives what the fields say.
 * @return IBP_BAD_FILE if a field is wrong or missing; IBP_UNSUPPORTED_TABLE if there is a field or a scheme that this
 * library does not know. */
IBP_API ibp_status ibp_read_table(ibp_text line, ibp_field fields[IBP_TABLE_FIELDS], ibp_file_table *table);

/* Reads the fields of a codebook from a line, the value of the key "ibp.codebook.<k>", as ibp_read_table does. */
IBP_API ibp_status ibp_read_codebook(ibp_text line, ibp_field fields[IBP_CODEBOOK_FIELDS], ibp_refusal *refusal);

#ifdef __cplusplus
}
#endif
#endif
