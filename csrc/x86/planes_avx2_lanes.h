/* planes_avx2_lanes.h - loops over elements or symbols in lanes of LANE_BITS bits. planes_avx2.c includes it once for
 * each width. Arrays of lanes are passed as bytes and may have any alignment. "Padded" means that PADDING bytes past
 * the end of an array may be read, and also written if the array is an output. */
#define NAME_OF(name, bits) name##bits
#define EXPAND_NAME(name, bits) NAME_OF(name, bits)
#define NAME(name) EXPAND_NAME(name, LANE_BITS)
#define lane NAME(lane)
#define LANE_BYTES (LANE_BITS / 8)
#define LANES (32 / LANE_BYTES) /* number of lanes of a vector */

IBP_AVX2_INLINE lane NAME(rotated)(lane x, uint32_t left)
{
    const uint64_t wide = x;
    return (lane)(left == 0 ? wide : wide << left | wide >> (LANE_BITS - left));
}

IBP_AVX2_INLINE __m256i NAME(rotated_vector)(__m256i x, uint32_t left)
{
    return _mm256_or_si256(NAME(shift_left)(x, _mm_cvtsi32_si128((int)left)),
                           NAME(shift_right)(x, _mm_cvtsi32_si128((int)(LANE_BITS - left))));
}

/* Rotates lanes and shifts them right: out[i] = rotated row[i] >> shift, for shift < LANE_BITS. */
IBP_AVX2 static void NAME(shift_lanes)(const uint8_t *row, uint32_t n, uint32_t rotate, uint32_t shift, uint8_t *out)
{
    const __m128i count = _mm_cvtsi32_si128((int)shift);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES)
        store_vector(out + i * LANE_BYTES,
                     NAME(shift_right)(NAME(rotated_vector)(load_vector(row + i * LANE_BYTES), rotate), count));
    for (; i < n; i++) ((lane *)out)[i] = (lane)(NAME(rotated)(((const lane *)row)[i], rotate) >> shift);
}

/* Rotates and shifts lanes as shift_lanes does, but keeps only the low byte of each lane. */
IBP_AVX2 static void NAME(shift_bytes)(const uint8_t *row, uint32_t n, uint32_t rotate, uint32_t shift, uint8_t *out)
{
    const __m128i count = _mm_cvtsi32_si128((int)shift);
    const __m256i low = _mm256_set1_epi64x((int64_t)ibp_lane_fields(LANE_BYTES, 8));
    uint32_t i = 0;
    for (; i + 32 <= n; i += 32) {
        __m256i x[LANE_BYTES];
        for (uint32_t v = 0; v < LANE_BYTES; v++)
            x[v] = _mm256_and_si256(
                NAME(shift_right)(NAME(rotated_vector)(load_vector(row + i * LANE_BYTES + 32 * v), rotate), count),
                low);
        store_vector(out + i, NAME(in_order)(NAME(pack_bytes)(x)));
    }
    for (; i < n; i++) out[i] = (uint8_t)(NAME(rotated)(((const lane *)row)[i], rotate) >> shift);
}

/* Combines residuals and symbols into elements. This is the inverse of shift_lanes. row[i], a residual of r < LANE_BITS
 * bits, becomes the element that has this residual and the symbol symbols[i]. symbols is padded. */
IBP_AVX2_INLINE void NAME(join_of)(uint8_t *row, const uint8_t *symbols, uint32_t n, uint32_t r, uint32_t rotate,
                                   uint32_t symbol_bytes)
{
    const __m128i count = _mm_cvtsi32_si128((int)r);
    uint32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const __m256i symbol = NAME(shift_left)(NAME(widened)(symbols + i * symbol_bytes, symbol_bytes), count);
        const __m256i x = _mm256_or_si256(load_vector(row + i * LANE_BYTES), symbol);
        store_vector(row + i * LANE_BYTES, rotate ? NAME(rotated_vector)(x, LANE_BITS - 1) : x);
    }
    for (; i < n; i++) {
        const uint64_t symbol = ibp_load_number(symbols + i * symbol_bytes, symbol_bytes);
        ((lane *)row)[i] = NAME(rotated)((lane)(((lane *)row)[i] | (lane)(symbol << r)), rotate ? LANE_BITS - 1 : 0);
    }
}

IBP_AVX2 static void NAME(join)(uint8_t *row, const uint8_t *symbols, uint32_t symbol_bytes, uint32_t n, uint32_t r,
                                uint32_t rotate)
{
    IBP_BY_SIZE(ibp_min_u32(symbol_bytes, LANE_BYTES), NAME(join_of), row, symbols, n, r, rotate);
}

/* Widens bytes: row[i] = bytes[i]. */
IBP_AVX2 static void NAME(widen_bytes)(const uint8_t *bytes, uint32_t n, uint8_t *row)
{
    for (uint32_t i = 0; i < n; i++) ((lane *)row)[i] = bytes[i];
}

/* Looks up symbols: symbols[i] becomes entry ranks[i] of column i. ranks[i] is at most num_entries. If it is
 * num_entries, the value of symbols[i] is unspecified. Entries are as wide as a lane. symbols is padded. */
IBP_AVX2 static void NAME(name_symbols)(const ibp_planes *planes, const uint8_t *ranks, uint32_t n, uint8_t *symbols)
{
    const uint32_t num_entries = planes->num_entries, stride = planes->per_column ? num_entries : 0;
    const lane *const entries = (const lane *)planes->entries;
    if (num_entries == 0) return;
    for (uint32_t i = 0; i < n; i++)
        ((lane *)symbols)[i] = entries[(size_t)i * stride + (ranks[i] == num_entries ? 0 : ranks[i])];
}

/* Ranks symbols: ranks[i] becomes the index of the first entry that equals symbols[i], or num_entries if no entry does.
 * Entries are as wide as a lane. Both arrays are padded. The entries whose bits above the low 4 are equal share a
 * lookup table. Each symbol is looked up in all tables. */
IBP_AVX2 static void NAME(rank)(const ibp_planes *planes, const uint8_t *symbols, uint32_t n, uint8_t *ranks)
{
    const lane *const entries = (const lane *)planes->entries;
    uint8_t tables[MAX_ENTRIES][16]; /* num_entries minus the rank; 0 if there is no such entry */
    uint64_t highs[MAX_ENTRIES];     /* the high bits of each table's entries, repeated in all lanes of a word */
    uint32_t num_tables = 0;
    for (uint32_t e = planes->num_entries, t; e-- > 0;
         tables[t][entries[e] & 15] = (uint8_t)(planes->num_entries - e)) {
        const uint64_t high = (lane)(entries[e] & ~(lane)15) * ibp_lane_fields(LANE_BYTES, 1);
        for (t = 0; t < num_tables && highs[t] != high;) t++;
        if (t < num_tables) continue;
        highs[num_tables++] = high;
        memset(tables[t], 0, 16);
    }
    const __m256i none = _mm256_set1_epi8((char)planes->num_entries);
    for (uint32_t i = 0; i < n; i += 32) {
        __m256i symbol[LANE_BYTES], found = _mm256_setzero_si256();
        for (uint32_t v = 0; v < LANE_BYTES; v++) symbol[v] = load_vector(symbols + i * LANE_BYTES + 32 * v);
        for (uint32_t t = 0; t < num_tables; t++) {
            const __m256i high = _mm256_set1_epi64x((int64_t)highs[t]);
            __m256i low[LANE_BYTES];
            for (uint32_t v = 0; v < LANE_BYTES; v++)
                low[v] = EXPAND_NAME(at_most_255_, LANE_BITS)(_mm256_xor_si256(symbol[v], high));
            found = _mm256_or_si256(found, look_up(tables[t], NAME(pack_bytes)(low)));
        }
        store_vector(ranks + i, _mm256_sub_epi8(none, NAME(in_order)(found)));
    }
}

/* Ranks symbols among the entries of their columns, as `rank` does among the entries of the table. */
IBP_AVX2 static void NAME(rank_in_column)(const ibp_planes *planes, const uint8_t *symbols, uint32_t n, uint8_t *ranks)
{
    const uint32_t num_entries = planes->num_entries;
    const lane *const entries = (const lane *)planes->entries;
    const size_t end = (size_t)n * num_entries;
    for (uint32_t i = 0; i < n; i++) {
        const lane symbol = ((const lane *)symbols)[i];
        const size_t first = (size_t)i * num_entries;
        const __m256i wanted = _mm256_set1_epi64x((int64_t)(symbol * ibp_lane_fields(LANE_BYTES, 1)));
        uint32_t rank = 0, equal = 0;
        for (; rank < num_entries && equal == 0 && first + rank + LANES <= end;
             rank += equal ? (uint32_t)_tzcnt_u32(equal) / LANE_BYTES : LANES)
            equal = (uint32_t)_mm256_movemask_epi8(EXPAND_NAME(_mm256_cmpeq_epi, LANE_BITS)(
                load_vector((const uint8_t *)(entries + first + rank)), wanted));
        if (equal == 0)
            while (rank < num_entries && entries[first + rank] != symbol) rank++;
        ranks[i] = (uint8_t)ibp_min_u32(rank, num_entries); /* the entry that was found may belong to the next column */
    }
}

/* Copies the lanes whose bits are set in the bitmap to `out`, one after the other. */
IBP_AVX2 static void NAME(gather)(const uint8_t *row, const uint64_t *bitmap, uint32_t n, uint8_t *out)
{
    lane *next = (lane *)out;
    for (uint32_t i = 0; i < n; i += 64)
        for (uint64_t bits = bitmap[i / 64]; bits != 0; bits &= bits - 1)
            *next++ = ((const lane *)row)[i + (uint32_t)_tzcnt_u64(bits)];
}

/* Scatters lanes, the inverse of gather: for each bit i that is set, row[i] becomes the next lane of `in`. step: 1, or
 * 0 to copy the first lane of `in` to all of these positions. */
IBP_AVX2 static void NAME(scatter)(const uint8_t *in, uint32_t step, const uint64_t *bitmap, uint32_t n, uint8_t *row)
{
    const lane *next = (const lane *)in;
    for (uint32_t i = 0; i < n; i += 64)
        for (uint64_t bits = bitmap[i / 64]; bits != 0; bits &= bits - 1, next += step)
            ((lane *)row)[i + (uint32_t)_tzcnt_u64(bits)] = *next;
}

IBP_AVX2 static void NAME(fill)(uint8_t *row, uint32_t n, uint64_t value)
{
    for (uint32_t i = 0; i < n; i++) ((lane *)row)[i] = (lane)value;
}

/* Computes the coded bits of elements, rotated if the codebook says so: out[i] from elements[i]. Returns false if the
 * invariant bits of an element differ from the codebook's. */
IBP_AVX2 static bool NAME(cut_elements)(const ibp_planes *planes, const uint8_t *elements, uint32_t n, uint8_t *out)
{
    const uint32_t bits = planes->invariant_bits, last = LANE_BITS - bits - 1;
    const lane invariant = (lane)ibp_low_bits(~(uint64_t)0, bits), value = (lane)planes->invariant_value,
               coded = (lane)ibp_low_bits(~(uint64_t)0, last + 1);
    lane differing = 0;
    for (uint32_t i = 0; i < n; i++) {
        const lane element = ((const lane *)elements)[i], x = (lane)(element >> bits);
        differing = (lane)(differing | ((element ^ value) & invariant));
        const uint64_t rotated = (uint64_t)x << 1 | (uint64_t)x >> last;
        ((lane *)out)[i] = (lane)((planes->rotate ? rotated : x) & coded);
    }
    return differing == 0;
}
/* Restores elements from their coded bits, in place. This is the inverse of cut_elements. */
IBP_AVX2 static void NAME(restore_elements)(const ibp_planes *planes, uint32_t n, uint8_t *elements)
{
    const uint32_t bits = planes->invariant_bits, last = LANE_BITS - bits - 1;
    const lane value = (lane)planes->invariant_value;
    for (uint32_t i = 0; i < n; i++) {
        const lane y = ((const lane *)elements)[i];
        const uint64_t x = planes->rotate ? (uint64_t)(y >> 1) | (uint64_t)(y & 1) << last : y;
        ((lane *)elements)[i] = (lane)(x << bits | value);
    }
}

/* Sets a bit of the bitmap for each lane whose highest bit is set. The bits after bit n - 1 of the last word become
 * 0. */
IBP_AVX2 static void NAME(find_signs)(const uint8_t *row, uint32_t n, uint64_t *bitmap)
{
    const uint32_t highest = UINT32_MAX / ((1u << LANE_BYTES) - 1) << (LANE_BYTES - 1);
    for (uint32_t i = 0; i < n; i += 64) {
        const uint32_t end = n - i < 64 ? n - i : 64;
        uint64_t bits = 0;
        uint32_t j = 0;
        for (; j + LANES <= end; j += LANES) {
            const __m256i lanes = load_vector(row + (i + j) * LANE_BYTES);
            bits |= (uint64_t)_pext_u32((uint32_t)_mm256_movemask_epi8(lanes), highest) << j;
        }
        for (; j < end; j++) bits |= (uint64_t)(((const lane *)row)[i + j] >> (LANE_BITS - 1)) << j;
        bitmap[i / 64] = bits;
    }
}

/* Sets the highest bit of each lane whose bit is set in the bitmap. */
IBP_AVX2 static void NAME(set_signs)(const uint64_t *bitmap, uint32_t n, uint8_t *row)
{
    for (uint32_t i = 0; i < n; i += 64)
        for (uint64_t bits = bitmap[i / 64]; bits != 0; bits &= bits - 1) {
            lane *const element = (lane *)row + i + (uint32_t)_tzcnt_u64(bits);
            *element = (lane)(*element | (lane)1 << (LANE_BITS - 1));
        }
}

/* Sets a bit of the bitmap for each lane that differs from `value` in bits of `mask`. The bits after bit n - 1 of the
 * last word become 0. */
IBP_AVX2 static void NAME(find_others)(const uint8_t *row, uint32_t n, uint64_t value, uint64_t mask, uint64_t *bitmap)
{
    const lane cared = (lane)mask, wanted = (lane)(value & mask);
    const __m256i values = _mm256_set1_epi64x((int64_t)(wanted * ibp_lane_fields(LANE_BYTES, 1))),
                  masks = _mm256_set1_epi64x((int64_t)(cared * ibp_lane_fields(LANE_BYTES, 1)));
    const uint32_t one_a_lane = UINT32_MAX / ((1u << LANE_BYTES) - 1);
    for (uint32_t i = 0; i < n; i += 64) {
        const uint32_t end = n - i < 64 ? n - i : 64;
        uint64_t bits = 0;
        uint32_t j = 0;
        for (; j + LANES <= end; j += LANES) {
            const __m256i same = EXPAND_NAME(_mm256_cmpeq_epi, LANE_BITS)(
                _mm256_and_si256(load_vector(row + (i + j) * LANE_BYTES), masks), values);
            bits |= (uint64_t)_pext_u32(~(uint32_t)_mm256_movemask_epi8(same), one_a_lane) << j;
        }
        for (; j < end; j++) bits |= (uint64_t)((((const lane *)row)[i + j] & cared) != wanted) << j;
        bitmap[i / 64] = bits;
    }
}

#undef LANES
#undef LANE_BYTES
#undef lane
#undef NAME
#undef EXPAND_NAME
#undef NAME_OF
#undef LANE_BITS
