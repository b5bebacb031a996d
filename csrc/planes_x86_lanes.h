/* planes_x86_lanes.h - loops over elements or symbols in lanes of LANE_BITS bits; planes_x86.c includes it once for each width.
 * Arrays of lanes are given as bytes and may lie anywhere. "Padded": readable, or writable, PADDING bytes further. */
#define NAME_OF(name, bits) name##bits
#define EXPAND_NAME(name, bits) NAME_OF(name, bits)
#define NAME(name) EXPAND_NAME(name, LANE_BITS)
#define lane NAME(lane)

/* The element whose rotated bits are x. */
IBP_X86_INLINE lane NAME(rotate_back)(lane x, uint32_t rotate) { return rotate ? (lane)(x >> 1 | x << (LANE_BITS - 1)) : x; }

IBP_X86_INLINE lane NAME(rotated)(lane x, uint32_t rotate) { return rotate ? (lane)(x << 1 | x >> (LANE_BITS - 1)) : x; }

/* row[i], a residual of r < LANE_BITS bits, becomes the element with it and the symbol symbols[i]. */
IBP_X86 static void NAME(join)(uint8_t *row, const uint8_t *restrict symbols, uint32_t n, uint32_t r, uint32_t rotate)
{
    lane *const restrict lanes = (lane *)row;
    if (rotate)
        for (uint32_t i = 0; i < n; i++) lanes[i] = NAME(rotate_back)((lane)(lanes[i] | (lane)((lane)symbols[i] << r)), 1);
    else
        for (uint32_t i = 0; i < n; i++) lanes[i] = (lane)(lanes[i] | (lane)((lane)symbols[i] << r));
}

/* Likewise with the symbol that ranks[i] names among the entries of column i, or the next of the raw symbols. */
IBP_X86 static void NAME(join_ranks)(const ibp_planes *planes, uint8_t *row, const uint8_t *ranks, const uint8_t *raw, uint32_t n)
{
    lane *const lanes = (lane *)row;
    const lane *next = (const lane *)raw;
    const uint32_t num_entries = planes->num_entries, r = planes->residual_bits % LANE_BITS;
    lane entries[MAX_ENTRIES];
    for (uint32_t e = 0; e < num_entries && !planes->per_column; e++) entries[e] = (lane)load_entry(planes, e);
    for (uint32_t i = 0; i < n; i++) {
        lane symbol;
        if (ranks[i] == num_entries)
            symbol = *next++;
        else
            symbol = planes->per_column ? (lane)load_entry(planes, (size_t)i * num_entries + ranks[i]) : entries[ranks[i]];
        lanes[i] = NAME(rotate_back)((lane)(lanes[i] | (lane)(symbol << r)), planes->rotate);
    }
}

/* out[i] = row[i] rotated and shifted right by `shift` < LANE_BITS bits. */
IBP_X86 static void NAME(shift_lanes)(const uint8_t *row, uint32_t n, uint32_t rotate, uint32_t shift, uint8_t *out)
{
    const lane *const restrict lanes = (const lane *)row;
    lane *const restrict shifted = (lane *)out;
    if (rotate)
        for (uint32_t i = 0; i < n; i++) shifted[i] = (lane)(NAME(rotated)(lanes[i], 1) >> shift);
    else
        for (uint32_t i = 0; i < n; i++) shifted[i] = (lane)(lanes[i] >> shift);
}

/* Likewise, of each only the low byte. */
IBP_X86 static void NAME(shift_bytes)(const uint8_t *row, uint32_t n, uint32_t rotate, uint32_t shift, uint8_t *restrict out)
{
    const lane *const restrict lanes = (const lane *)row;
    if (rotate)
        for (uint32_t i = 0; i < n; i++) out[i] = (uint8_t)(NAME(rotated)(lanes[i], 1) >> shift);
    else
        for (uint32_t i = 0; i < n; i++) out[i] = (uint8_t)(lanes[i] >> shift);
}

/* ranks[i] = the first entry that equals symbols[i], num_entries if none does. Both padded. */
IBP_X86 static void NAME(rank)(const ibp_planes *planes, const uint8_t *symbols, uint32_t n, uint8_t *ranks)
{
    enum { TILE = LANE_BITS == 8 ? 64 : 32, VECTORS = TILE * LANE_BITS / 256 };
    uint64_t entries[MAX_ENTRIES]; /* in every lane of each */
    for (uint32_t e = 0; e < planes->num_entries; e++) entries[e] = (lane)load_entry(planes, e) * ibp_lane_fields(LANE_BITS / 8, 1);
    const __m256i one = _mm256_set1_epi64x((int64_t)ibp_lane_fields(LANE_BITS / 8, 1));
    const __m256i none = _mm256_set1_epi64x((int64_t)(planes->num_entries * ibp_lane_fields(LANE_BITS / 8, 1)));
    for (uint32_t i = 0; i < n; i += TILE) {
        const __m256i *const from = (const __m256i *)(const void *)(symbols + (size_t)i * LANE_BITS / 8);
        __m256i symbol[VECTORS], rank[VECTORS], number = none;
        for (int v = 0; v < VECTORS; v++) symbol[v] = _mm256_loadu_si256(from + v), rank[v] = none;
        for (uint32_t e = planes->num_entries; e-- > 0;) {
            const __m256i entry = _mm256_set1_epi64x((int64_t)entries[e]);
            number = _mm256_sub_epi8(number, one);
            for (int v = 0; v < VECTORS; v++)
                rank[v] = _mm256_blendv_epi8(rank[v], number, EXPAND_NAME(_mm256_cmpeq_epi, LANE_BITS)(symbol[v], entry));
        }
        lane wide[TILE];
        memcpy(wide, rank, sizeof wide);
        for (uint32_t j = 0; j < TILE; j++) ranks[i + j] = (uint8_t)wide[j];
    }
}

/* Likewise among the entries of column i. */
IBP_X86 static void NAME(rank_in_column)(const ibp_planes *planes, const uint8_t *symbols, uint32_t n, uint8_t *ranks)
{
    const lane *const lanes = (const lane *)symbols;
    for (uint32_t i = 0; i < n; i++) {
        const size_t first = (size_t)i * planes->num_entries;
        uint32_t rank = 0;
        while (rank < planes->num_entries && (lane)load_entry(planes, first + rank) != lanes[i]) rank++;
        ranks[i] = (uint8_t)rank;
    }
}

/* The lanes whose bits are set, one after the other. @return how many. */
IBP_X86 static uint32_t NAME(gather)(const uint8_t *row, const uint64_t *bitmap, uint32_t n, uint8_t *out)
{
    const lane *const lanes = (const lane *)row;
    lane *next = (lane *)out;
    for (uint32_t i = 0; i < n; i += 64)
        for (uint64_t bits = bitmap[i / 64]; bits != 0; bits &= bits - 1) *next++ = lanes[i + (uint32_t)_tzcnt_u64(bits)];
    return (uint32_t)(next - (lane *)out);
}

/* The inverse: row[i] = the next lane for each bit set; `step` 0: always the first. */
IBP_X86 static void NAME(scatter)(const uint8_t *in, uint32_t step, const uint64_t *bitmap, uint32_t n, uint8_t *row)
{
    const lane *next = (const lane *)in;
    for (uint32_t i = 0; i < n; i += 64)
        for (uint64_t bits = bitmap[i / 64]; bits != 0; bits &= bits - 1, next += step)
            ((lane *)row)[i + (uint32_t)_tzcnt_u64(bits)] = *next;
}

IBP_X86 static void NAME(fill)(uint8_t *row, uint32_t n, uint64_t value)
{
    for (uint32_t i = 0; i < n; i++) ((lane *)row)[i] = (lane)value;
}

/* A bit for each lane that is not `value`; bits from n up to a whole word are 0. */
IBP_X86 static void NAME(find_others)(const uint8_t *row, uint32_t n, uint64_t value, uint64_t *bitmap)
{
    enum { LANES = 256 / LANE_BITS };
    const lane *const lanes = (const lane *)row;
    const __m256i values = _mm256_set1_epi64x((int64_t)(value * ibp_lane_fields(LANE_BITS / 8, 1)));
    const uint32_t one_a_lane = UINT32_MAX / ((1u << (LANE_BITS / 8)) - 1);
    for (uint32_t i = 0; i < n; i += 64) {
        const uint32_t end = n - i < 64 ? n - i : 64;
        uint64_t bits = 0;
        uint32_t j = 0;
        for (; j + LANES <= end; j += LANES) {
            const __m256i same = EXPAND_NAME(_mm256_cmpeq_epi, LANE_BITS)(_mm256_loadu_si256((const void *)(lanes + i + j)), values);
            bits |= (uint64_t)_pext_u32(~(uint32_t)_mm256_movemask_epi8(same), one_a_lane) << j;
        }
        for (; j < end; j++) bits |= (uint64_t)(lanes[i + j] != (lane)value) << j;
        bitmap[i / 64] = bits;
    }
}

#undef lane
#undef NAME
#undef EXPAND_NAME
#undef NAME_OF
#undef LANE_BITS
