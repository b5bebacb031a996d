/* json.h - reads the parts of JSON (RFC 8259) that headers of files need: texts and whole numbers, where they stand. No
 * byte is trusted, and nothing behind the end is read. */
#ifndef IBP_JSON_H
#define IBP_JSON_H

#include "ibp_file.h"

/* The part of a JSON text that has not been read yet. */
typedef struct ibp_json {
    const char *at, *end;
} ibp_json;

/* Takes a symbol, and the white space before it. Returns whether it was there. */
bool ibp_take_symbol(ibp_json *json, char symbol);
/* Takes a string, whose inside is *text. Returns whether there is one without errors. */
bool ibp_take_string(ibp_json *json, ibp_text *text);
/* Takes a number that consists of digits alone and is at most INT64_MAX. Returns whether there is one. */
bool ibp_take_size(ibp_json *json, int64_t *number);
/* Returns whether nothing but white space is left. */
bool ibp_is_at_end(const ibp_json *json);

/* Takes the next character of a text, in UTF-8. Returns its bytes, 1 to 4; 0 at the end, and for bytes that are no
 * text. */
uint32_t ibp_take_character(ibp_text *text, uint8_t utf8[4]);
/* Takes a text in UTF-8 if it comes next. Returns whether it did. */
bool ibp_take_prefix(ibp_text *text, const char *utf8);
/* Takes a decimal number without leading zeros. Returns whether there is one that is at most UINT64_MAX. */
bool ibp_take_number(ibp_text *text, uint64_t *number);

#endif
