/* delta.c - adds rows of differences to a tensor (FORMAT.md section 9). */
#include "../internal/ibp_delta.h"
#include "bits.h"
#include "rows.h"

/* The state of an addition: a word with the highest bit of each element set, the change of the tensor's sum so far, and
 * whether differences are subtracted. */
typedef struct adding {
    uint64_t highest, change;
    bool subtracts;
} adding;

/* Adds or subtracts a row's differences word by word. first: the index, in the tensor, of the row's first word. Bytes
 * past the end of the row count as zeros. */
static void add_row(adding *add, uint8_t *base, const uint8_t *differences, uint32_t num_bytes, uint64_t first)
{
    for (uint32_t at = 0; at < num_bytes; at += 8) {
        const size_t held = ibp_min_u32(num_bytes - at, 8);
        const uint64_t step = ibp_load_number(differences + at, held);
        if (step == 0) continue;
        const uint64_t before = ibp_load_number(base + at, held);
        const uint64_t after = add->subtracts ? ibp_subtract_elements(before, step, add->highest)
                                              : ibp_add_elements(before, step, add->highest);
        memcpy(base + at, &after, held);
        add->change += ibp_mix_word(after, first + at / 8) - ibp_mix_word(before, first + at / 8);
    }
}

/* Returns whether a row is a default row that consists of zeros. */
static bool is_zero_row(const ibp_table *table, int64_t row)
{
    const ibp_codebook *const cb = &table->codebook;
    const bool is_default = table->lengths && table->lengths[row] == IBP_DEFAULT_LENGTH(cb->row_bytes);
    return is_default && ibp_template_of(cb) == NULL && ibp_default_bytes(cb) == 0;
}

ibp_status ibp_add_rows(const ibp_table *table, uint32_t element_bytes, bool subtracts, int64_t first_row,
                        int64_t last_row, uint8_t *base, uint64_t *change, void *scratch, size_t scratch_bytes,
                        ibp_fault *fault)
{
    const ibp_status status = ibp_check_table_fields(table);
    if (status != IBP_OK) return status;
    const int64_t row_bytes = table->codebook.row_bytes, num_bytes = ibp_bytes_of_table(table);
    if (!ibp_is_element_size(element_bytes) || row_bytes % 8 != 0 || num_bytes % element_bytes != 0)
        return IBP_INVALID_ARGUMENT;
    if (first_row < 0 || first_row > last_row || last_row > ibp_num_rows(table)) return IBP_INVALID_ARGUMENT;
    if (scratch_bytes < IBP_SCRATCH_BYTES(row_bytes) + (size_t)row_bytes) return IBP_INVALID_ARGUMENT;
    uint8_t *const row = (uint8_t *)scratch + IBP_SCRATCH_BYTES(row_bytes);
    adding add = {ibp_highest_bits(element_bytes), 0, subtracts};
    ibp_fault_log log = {fault, IBP_OK};
    for (int64_t r = first_row; r < last_row; r++) {
        if (is_zero_row(table, r)) continue;
        const int64_t start = r * row_bytes;
        const uint32_t valid = ibp_valid_bytes(num_bytes, (uint32_t)row_bytes, r);
        ibp_fault unused = {0};
        const ibp_status decoded =
            ibp_decode_bytes(table, start, start + valid, row, scratch, IBP_SCRATCH_BYTES(row_bytes), &unused);
        if (decoded == IBP_INVALID_ARGUMENT) return decoded;
        if (decoded == IBP_OK)
            add_row(&add, base + start, row, valid, (uint64_t)start / 8);
        else
            ibp_note_fault(&log, decoded, r, r);
    }
    *change += add.change;
    return log.status;
}
