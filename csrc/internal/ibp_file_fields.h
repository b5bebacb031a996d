/* ibp_file_fields.h - what a file's header says, piece by piece: metadata, checksums, and the fields of tables. */
#ifndef IBP_FILE_FIELDS_H
#define IBP_FILE_FIELDS_H

#include "ibp_file.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The same with just the header: the num_bytes bytes in front of the data, of a file of file_bytes bytes. Its tensors
 * have places, and no data; its tables can be found, and not opened. */
IBP_API ibp_status ibp_open_header(const uint8_t *bytes, size_t num_bytes, size_t file_bytes, ibp_file *file);

/* The next entry of the metadata. Keys that begin with "ibp." belong to the format. *cursor: 0 before the first call.
 * @return IBP_NOT_IN_FILE after the last one. */
IBP_API ibp_status ibp_next_metadata(const ibp_file *file, size_t *cursor, ibp_text *key, ibp_text *value);

/* The checksums of a file, as its header has them: one for each block of the data in front of them, one for the bytes
 * in front of the data, and one for the checksums. */
typedef struct ibp_file_checks {
    uint64_t block_bytes, num_blocks;
    size_t start; /* of the entries, among the data of the file */
} ibp_file_checks;

/* @return IBP_NOT_IN_FILE for an ordinary safetensors file, which has none, or IBP_BAD_FILE. */
IBP_API ibp_status ibp_find_checks(const ibp_file *file, ibp_file_checks *checks, ibp_refusal *refusal);

/* ---- fields, one by one ------------------------------------------------------------------------------------------ */

typedef enum ibp_field_kind {
    IBP_FIELD_NUMBER,
    IBP_FIELD_FINGERPRINT,
    IBP_FIELD_REAL,
    IBP_FIELD_LIST, /* of numbers */
    IBP_FIELD_TEXT,
    IBP_FIELD_OTHERS /* all whose keys begin so; text: of the last one, without that beginning and with its "=" */
} ibp_field_kind;

typedef struct ibp_field {
    const char *key, *wanted; /* wanted: its values, in English */
    ibp_field_kind kind;
    uint64_t least, most;  /* a number, or each of a list */
    uint32_t most_entries; /* of a list */
    bool is_given;
    uint64_t number; /* of numbers and fingerprints; of a scheme its number */
    ibp_text text;   /* of every kind */
} ibp_field;

#define IBP_TABLE_FIELDS 13u
#define IBP_CODEBOOK_FIELDS 21u

/* The fields that a table can have, from the value of the key "ibp.table.<name>": just the right ones are given. It may
 * have a codec, or a dtype that is not known. table: what the fields say.
 * @return IBP_BAD_FILE, or IBP_UNSUPPORTED_TABLE for a field or a scheme that this library does not know. */
IBP_API ibp_status ibp_read_table(ibp_text line, ibp_field fields[IBP_TABLE_FIELDS], ibp_file_table *table);

/* The fields that a codebook can have, from the value of the key "ibp.codebook.<k>"; otherwise likewise. */
IBP_API ibp_status ibp_read_codebook(ibp_text line, ibp_field fields[IBP_CODEBOOK_FIELDS], ibp_refusal *refusal);

#ifdef __cplusplus
}
#endif
#endif
