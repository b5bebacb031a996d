/* index.c - what rows take as stored, counted for the choice of a slot size (FORMAT.md sections 2 and 3). */
#include "locate.h"
#include "schemes.h"

ibp_status ibp_survey_rows(const uint16_t *lengths, int64_t num_bytes, uint32_t row_bytes, uint64_t *survey)
{
    if (!ibp_are_sizes(num_bytes, row_bytes)) return IBP_INVALID_ARGUMENT;
    const int64_t num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    const uint32_t most = ibp_sectors_of(row_bytes);
    for (int64_t r = 0; r < num_rows; r++) {
        const uint32_t stored =
            ibp_stored_bytes(IBP_LOAD_ONCE(lengths[r]), row_bytes, ibp_valid_bytes(num_bytes, row_bytes, r));
        survey[0] += stored;
        survey[1 + ibp_min_u32(ibp_sectors_of(stored), most)]++;
    }
    return IBP_OK;
}
