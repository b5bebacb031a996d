/* json.c - reads strings, whole numbers without a sign, and single symbols of JSON (RFC 8259), in UTF-8 (RFC 3629).
 * file.c reads the rest of JSON with these. */
#include "json.h"

#include "format.h"

#include <string.h>

static bool take_hex4(const char **at, const char *end, uint32_t *code)
{
    if (end - *at < 4) return false;
    *code = 0;
    for (int i = 0; i < 4; i++) {
        const char c = *(*at)++;
        const bool is_digit = c >= '0' && c <= '9', is_low = c >= 'a' && c <= 'f', is_high = c >= 'A' && c <= 'F';
        if (!is_digit && !is_low && !is_high) return false;
        *code = *code << 4 | (uint32_t)(is_digit ? c - '0' : is_low ? c - 'a' + 10 : c - 'A' + 10);
    }
    return true;
}

static uint32_t write_utf8(uint32_t code, uint8_t utf8[4])
{
    if (code < 0x80) return utf8[0] = (uint8_t)code, 1;
    const uint32_t num_bytes = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (uint32_t i = num_bytes - 1; i > 0; i--, code >>= 6) utf8[i] = (uint8_t)(0x80 | (code & 0x3f));
    utf8[0] = (uint8_t)(0xf0u << (4 - num_bytes) | code);
    return num_bytes;
}

/* Takes the four digits after \u. If they are the first half of a surrogate pair, takes the escape of the second half,
 * too. Returns the number of bytes written to utf8; 0 if the digits are not valid. */
static uint32_t take_escaped_code(const char **at, const char *end, uint8_t utf8[4])
{
    uint32_t code, low;
    if (!take_hex4(at, end, &code) || (code >= 0xdc00 && code < 0xe000)) return 0;
    if (code < 0xd800 || code >= 0xe000) return write_utf8(code, utf8);
    if (end - *at < 2 || (*at)[0] != '\\' || (*at)[1] != 'u') return 0;
    *at += 2;
    if (!take_hex4(at, end, &low) || low < 0xdc00 || low >= 0xe000) return 0;
    return write_utf8(0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00), utf8);
}

static uint32_t take_escape(const char **at, const char *end, uint8_t utf8[4])
{
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (*at == end) return 0;
    const char name = *(*at)++;
    if (name == 'u') return take_escaped_code(at, end, utf8);
    for (int i = 0; names[i]; i++)
        if (name == names[i]) return utf8[0] = (uint8_t)values[i], 1;
    return 0;
}

/* Takes a character of several bytes, of which `first` is the first and *at points to the second. Refuses overlong
 * characters, surrogate halves, and numbers above 0x10ffff. */
static uint32_t take_long(uint8_t first, const char **at, const char *end, uint8_t utf8[4])
{
    const uint32_t num_bytes = first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
    if (first < 0xc2 || first > 0xf4 || (size_t)(end - *at) < num_bytes - 1) return 0;
    utf8[0] = first;
    for (uint32_t i = 1; i < num_bytes; i++)
        if (((utf8[i] = (uint8_t) * (*at)++) & 0xc0) != 0x80) return 0;
    const uint8_t second = utf8[1];
    const bool is_wrong = (first == 0xe0 && second < 0xa0) || (first == 0xed && second >= 0xa0) ||
                          (first == 0xf0 && second < 0x90) || (first == 0xf4 && second >= 0x90);
    return is_wrong ? 0 : num_bytes;
}

uint32_t ibp_take_character(ibp_text *text, uint8_t utf8[4])
{
    if (text->num_bytes == 0) return 0;
    const char *at = text->data, *const end = at + text->num_bytes;
    const uint8_t first = (uint8_t)IBP_LOAD_ONCE(*at);
    uint32_t num_bytes = 1;
    utf8[0] = first;
    at++;
    if (first < 0x20 || first == '"') return 0;
    if (first == '\\') num_bytes = take_escape(&at, end, utf8);
    if (first >= 0x80) num_bytes = take_long(first, &at, end, utf8);
    *text = (ibp_text){at, (size_t)(end - at)};
    return num_bytes;
}

bool ibp_take_prefix(ibp_text *text, const char *utf8)
{
    ibp_text rest = *text;
    uint8_t character[4];
    while (*utf8) {
        const uint32_t num_bytes = ibp_take_character(&rest, character);
        if (num_bytes == 0) return false;
        for (uint32_t i = 0; i < num_bytes; i++)
            if (character[i] == 0 || character[i] != (uint8_t)*utf8++) return false;
    }
    *text = rest;
    return true;
}

bool ibp_is_text(ibp_text text, const char *utf8) { return ibp_take_prefix(&text, utf8) && text.num_bytes == 0; }

bool ibp_take_number(ibp_text *text, uint64_t *number)
{
    ibp_text rest = *text;
    uint8_t utf8[4];
    uint32_t num_digits = 0;
    *number = 0;
    while (ibp_take_character(&rest, utf8) == 1 && utf8[0] >= '0' && utf8[0] <= '9') {
        const uint64_t digit = utf8[0] - (uint64_t)'0';
        if ((num_digits != 0 && *number == 0) || *number > (UINT64_MAX - digit) / 10) return false;
        *number = 10 * *number + digit;
        num_digits++;
        *text = rest;
    }
    return num_digits != 0;
}

size_t ibp_copy_text(ibp_text text, char *utf8, size_t room)
{
    uint8_t character[4];
    size_t there_are = 0, written = 0;
    for (uint32_t num_bytes; (num_bytes = ibp_take_character(&text, character)) != 0; there_are += num_bytes) {
        if (written != there_are || num_bytes >= room - written) continue;
        memcpy(utf8 + written, character, num_bytes);
        written += num_bytes;
    }
    if (room != 0) utf8[written] = 0;
    return there_are;
}

static void skip_white_space(ibp_json *json)
{
    while (json->at < json->end && (*json->at == ' ' || *json->at == '\n' || *json->at == '\t' || *json->at == '\r'))
        json->at++;
}

bool ibp_is_at_end(const ibp_json *json)
{
    ibp_json rest = *json;
    skip_white_space(&rest);
    return rest.at == rest.end;
}

bool ibp_take_symbol(ibp_json *json, char symbol)
{
    skip_white_space(json);
    if (json->at == json->end || *json->at != symbol) return false;
    json->at++;
    return true;
}

bool ibp_take_string(ibp_json *json, ibp_text *text)
{
    uint8_t utf8[4];
    if (!ibp_take_symbol(json, '"')) return false;
    ibp_text rest = {json->at, (size_t)(json->end - json->at)};
    while (rest.num_bytes != 0 && *rest.data != '"')
        if (ibp_take_character(&rest, utf8) == 0) return false;
    if (rest.num_bytes == 0) return false;
    *text = (ibp_text){json->at, (size_t)(rest.data - json->at)};
    json->at = rest.data + 1;
    return true;
}

bool ibp_take_size(ibp_json *json, int64_t *number)
{
    skip_white_space(json);
    ibp_text rest = {json->at, (size_t)(json->end - json->at)};
    uint64_t value;
    if (!ibp_take_number(&rest, &value) || value > INT64_MAX) return false;
    /* Escapes such as \u0031 stand for digits in strings alone. */
    if (memchr(json->at, '\\', (size_t)(rest.data - json->at)) != NULL) return false;
    json->at = rest.data;
    *number = (int64_t)value;
    return true;
}
