/* naive.c - FORMAT.md bit by bit, for the tests. */
#include "check.h"

static bool get_bit(const uint8_t *bytes, size_t bit) { return bytes[bit / 8] >> (bit % 8) & 1; }

static void set_bit(uint8_t *bytes, size_t bit, bool value)
{
    const uint8_t one = (uint8_t)(1u << (bit % 8));
    bytes[bit / 8] = value ? bytes[bit / 8] | one : bytes[bit / 8] & (uint8_t)~one;
}

uint32_t naive_num_chunks(const masks *m) { return (m->row_bytes + m->chunk_bytes - 1) / m->chunk_bytes; }

static uint32_t chunk_end(const masks *m, uint32_t chunk)
{
    const uint32_t end = (chunk + 1) * m->chunk_bytes;
    return end < m->row_bytes ? end : m->row_bytes;
}

static bool is_flagged(const masks *m, uint32_t chunk)
{
    bool flagged = m->flag_all;
    for (uint32_t i = chunk * m->chunk_bytes; i < chunk_end(m, chunk); i++) flagged = flagged || m->mask[i] != 0;
    return flagged;
}

uint32_t naive_num_flags(const masks *m)
{
    uint32_t num_flags = 0;
    for (uint32_t chunk = 0; chunk < naive_num_chunks(m); chunk++) num_flags += is_flagged(m, chunk);
    return num_flags;
}

bool naive_participates(const masks *m, const uint8_t *row, uint32_t chunk)
{
    for (uint32_t i = chunk * m->chunk_bytes; i < chunk_end(m, chunk); i++)
        if ((row[i] & m->mask[i]) != m->bitval[i]) return false;
    return true;
}

size_t naive_max_coded_bytes(const masks *m) { return m->row_bytes + (naive_num_chunks(m) + 7) / 8; }

size_t naive_encode_row(const masks *m, const uint8_t *row, uint8_t *coded)
{
    memset(coded, 0, naive_max_coded_bytes(m));
    size_t flag = 0, kept = naive_num_flags(m);
    for (uint32_t chunk = 0; chunk < naive_num_chunks(m); chunk++) {
        const bool participates = is_flagged(m, chunk) && naive_participates(m, row, chunk);
        if (is_flagged(m, chunk)) set_bit(coded, flag++, participates);
        for (size_t bit = 8 * (size_t)chunk * m->chunk_bytes; bit < 8 * (size_t)chunk_end(m, chunk); bit++)
            if (!participates || !get_bit(m->mask, bit)) set_bit(coded, kept++, get_bit(row, bit));
    }
    return (kept + 7) / 8;
}

bool naive_decode_row(const masks *m, const uint8_t *coded, size_t coded_bytes, uint8_t *row)
{
    const size_t num_bits = 8 * coded_bytes;
    size_t flag = 0, kept = naive_num_flags(m);
    if (kept > num_bits) return false;
    for (uint32_t chunk = 0; chunk < naive_num_chunks(m); chunk++) {
        const bool participates = is_flagged(m, chunk) && get_bit(coded, flag++);
        for (size_t bit = 8 * (size_t)chunk * m->chunk_bytes; bit < 8 * (size_t)chunk_end(m, chunk); bit++) {
            if (participates && get_bit(m->mask, bit)) {
                set_bit(row, bit, get_bit(m->bitval, bit));
            } else {
                if (kept == num_bits) return false;
                set_bit(row, bit, get_bit(coded, kept++));
            }
        }
    }
    return (kept + 7) / 8 == coded_bytes;
}

uint32_t naive_valid_bytes(const ibp_table *table, int64_t row)
{
    const int64_t row_bytes = table->codebook.row_bytes, left = table->num_items * table->item_bytes - row * row_bytes;
    return (uint32_t)(left < row_bytes ? left : row_bytes);
}

bool naive_is_marked(const ibp_table *table, int64_t row)
{
    const uint32_t row_bytes = table->codebook.row_bytes;
    return table->lengths && table->lengths[row] == (row_bytes > 65535 ? 65535 : row_bytes);
}

uint32_t naive_stored_bytes(const ibp_table *table, int64_t row)
{
    if (naive_is_marked(table, row)) return 0;
    return table->lengths && table->lengths[row] ? table->lengths[row] : naive_valid_bytes(table, row);
}

static uint32_t part(const ibp_table *table, int64_t row)
{
    const uint32_t stored = naive_stored_bytes(table, row);
    return stored > table->slot_bytes ? stored - table->slot_bytes : 0;
}

bool naive_read_row(const masks *m, const ibp_table *table, int64_t row, uint8_t *out)
{
    uint8_t coded[IBP_MAX_ROW_BYTES], whole[IBP_MAX_ROW_BYTES];
    const uint32_t size = naive_stored_bytes(table, row), valid = naive_valid_bytes(table, row),
                   in_slot = size - part(table, row);
    if (size > valid) return false;
    if (naive_is_marked(table, row)) {
        memset(out, 0, valid);
        return true;
    }
    if (in_slot > 0) {
        if (row * (int64_t)table->slot_bytes + in_slot > table->slots_bytes) return false;
        memcpy(coded, table->slots + row * (int64_t)table->slot_bytes, in_slot);
    }
    if (size > in_slot) {
        if (!table->bases) return false;
        const bool own_base = table->rows_per_base == 1;
        const uint64_t base = table->bases[own_base ? row : row / 32];
        uint64_t before = 0;
        for (int64_t q = own_base ? row : row / 32 * 32; q < row; q++)
            before += table->slot_bytes > 0 ? (part(table, q) + 31) / 32 * 32 : part(table, q);
        if (base > (uint64_t)table->overflow_bytes) return false; /* and so the sum below cannot wrap */
        if (base + before + (size - in_slot) > (uint64_t)table->overflow_bytes) return false;
        memcpy(coded + in_slot, table->overflow + base + before, size - in_slot);
    }
    const bool is_coded = table->lengths && table->lengths[row] != 0;
    if (is_coded && !naive_decode_row(m, coded, size, whole)) return false;
    memcpy(out, is_coded ? whole : coded, valid);
    return true;
}
