/* json.h - reads the parts of JSON (RFC 8259) that headers of files need: strings and whole numbers. Strings are not
 * copied; they are returned as parts of the input. No byte is trusted, and nothing past the end is read. The functions
 * named ibp_take_... read something from the beginning of the input and move the beginning past it. */
#ifndef IBP_JSON_H
#define IBP_JSON_H

#include "ibp_file.h"

/* The part of a JSON text that has not been read yet. */
typedef struct ibp_json {
    const char *at, *end;
} ibp_json;

/* Skips white space, and takes `symbol` if it comes next. Returns whether it does. */
bool ibp_take_symbol(ibp_json *json, char symbol);
/* Takes a string. Returns whether a valid string comes next. text: receives the characters between its quotation
 * marks. */
bool ibp_take_string(ibp_json *json, ibp_text *text);
/* Takes a number that consists of digits alone and is at most INT64_MAX. Returns whether such a number comes next. */
bool ibp_take_size(ibp_json *json, int64_t *number);
/* Returns whether nothing but white space is left. */
bool ibp_is_at_end(const ibp_json *json);

/* Takes the next character of a text, and writes it in UTF-8. Returns the number of bytes written, 1 to 4; 0 at the end
 * of the text, or if its next bytes are not valid text. */
uint32_t ibp_take_character(ibp_text *text, uint8_t utf8[4]);
/* Takes the characters of `utf8` if the text begins with them. Returns whether it does. */
bool ibp_take_prefix(ibp_text *text, const char *utf8);
/* Takes a decimal number without leading zeros. Returns whether the text begins with such a number and it is at most
 * UINT64_MAX. */
bool ibp_take_number(ibp_text *text, uint64_t *number);

#endif
