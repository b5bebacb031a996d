/* json.h - what the headers of files need of JSON (RFC 8259): texts and whole numbers, read where they stand. Nothing
 * is trusted, and nothing behind the end is read. */
#ifndef IBP_JSON_H
#define IBP_JSON_H

#include "ibp_file.h"

/* JSON that is still to be read. */
typedef struct ibp_json {
    const char *at, *end;
} ibp_json;

/* Takes a symbol, and the white space before it. @return whether it was there. */
bool ibp_take_symbol(ibp_json *json, char symbol);
/* Takes a string, whose inside is *text. @return whether there is one without errors. */
bool ibp_take_string(ibp_json *json, ibp_text *text);
/* Takes a number of digits alone that is at most INT64_MAX. @return whether there is one. */
bool ibp_take_size(ibp_json *json, int64_t *number);
/* Whether nothing but white space is left. */
bool ibp_is_at_end(const ibp_json *json);

/* Takes the next character of a text, in UTF-8. @return its bytes, 1 to 4; 0 at the end, and for what is no text. */
uint32_t ibp_take_character(ibp_text *text, uint8_t utf8[4]);
/* Takes a text in UTF-8 if it comes next. */
bool ibp_take_prefix(ibp_text *text, const char *utf8);
/* Takes a decimal number without leading zeros. @return whether there is one, and it is at most UINT64_MAX. */
bool ibp_take_number(ibp_text *text, uint64_t *number);

#endif
