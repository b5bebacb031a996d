/* fuzz_rows.c - single rows, as coded and as they are, of any codebook: coders of all processors agree, what they code
 * comes back, and nothing outside of the buffers is touched. */
#include "fuzz.h"

enum { SRC_PLACE = 8, ROW_PLACE, PLAIN_PLACE, DST_PLACE };

typedef struct job {
    ibp_codebook codebook;
    const uint8_t *src;
    size_t src_bytes;
    uint8_t *row, *plain; /* plain: what the first decoder made of it */
    ibp_status status;
    bool is_right, is_first; /* of the codebook; of the processors */
} job;

static void decode(void *argument)
{
    job *const j = argument;
    const uint32_t row_bytes = j->codebook.row_bytes;
    uint8_t *const to = j->is_first ? j->plain : j->row;
    const ibp_status status =
        ibp_decode_row(&j->codebook, j->src, j->src_bytes, to, fenced_scratch(row_bytes), ibp_scratch_bytes(row_bytes));
    REQUIRE(status == IBP_OK || status == IBP_CORRUPT_ROW);
    if (j->is_right && !j->is_first) {
        REQUIRE(status == j->status);
        REQUIRE(status != IBP_OK || memcmp(j->row, j->plain, row_bytes) == 0);
    }
    j->status = status, j->is_first = false;
}

/* Codes the row in exact room, and in one byte less; all processors make the same bytes of it. */
static void encode(void *argument)
{
    job *const j = argument;
    const uint32_t row_bytes = j->codebook.row_bytes;
    uint8_t *const scratch = fenced_scratch(row_bytes);
    const size_t scratch_bytes = ibp_scratch_bytes(row_bytes), wanted = j->src_bytes;
    const size_t num_bytes = ibp_coded_row_bytes(&j->codebook, j->row, scratch, scratch_bytes);
    REQUIRE(num_bytes > 0 || !j->is_right); /* arrays that contradict each other may leave no bit of a row */
    REQUIRE(num_bytes == IBP_NO_CODED_FORM || num_bytes <= ibp_max_coded_row_bytes(row_bytes));
    if (j->is_right && !j->is_first) REQUIRE(num_bytes == wanted);
    j->src_bytes = num_bytes, j->is_first = false;
    if (num_bytes == IBP_NO_CODED_FORM) return;
    size_t coded_bytes;
    uint8_t *const dst = fenced(DST_PLACE, num_bytes);
    REQUIRE(ibp_encode_row(&j->codebook, j->row, dst, num_bytes, &coded_bytes, scratch, scratch_bytes) == IBP_OK);
    REQUIRE(coded_bytes == num_bytes);
    if (j->is_right) {
        REQUIRE(ibp_decode_row(&j->codebook, dst, num_bytes, j->plain, scratch, scratch_bytes) == IBP_OK);
        REQUIRE(memcmp(j->row, j->plain, row_bytes) == 0);
    }
    if (num_bytes == 0) return;
    uint8_t *const less = fenced(DST_PLACE, num_bytes - 1);
    REQUIRE(ibp_encode_row(&j->codebook, j->row, less, num_bytes - 1, &coded_bytes, scratch, scratch_bytes) ==
            IBP_BUFFER_TOO_SMALL);
    REQUIRE(coded_bytes == num_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    input in = {data, data + size};
    job j = {.is_first = true};
    if (!take_codebook(&in, &j.codebook)) return 0;
    const uint32_t row_bytes = j.codebook.row_bytes;
    j.is_right = ibp_check_codebook(&j.codebook) == IBP_OK;
    j.row = fenced(ROW_PLACE, row_bytes), j.plain = fenced(PLAIN_PLACE, row_bytes);
    const bool is_coded_here = take_flag(&in);
    uint8_t *src;
    if (is_coded_here) {
        take_pattern(&in, j.row, row_bytes, 64);
        damage(&in, j.row, row_bytes);
        on_each_processor(encode, &j);
        if (j.src_bytes == IBP_NO_CODED_FORM) return 0;
        src = fenced(SRC_PLACE, j.src_bytes);
        size_t coded_bytes;
        REQUIRE(ibp_encode_row(&j.codebook, j.row, src, j.src_bytes, &coded_bytes, fenced_scratch(row_bytes),
                               ibp_scratch_bytes(row_bytes)) == IBP_OK);
        damage(&in, src, j.src_bytes);
    } else {
        j.src_bytes = take_below(&in, 2 * row_bytes + 2);
        src = fenced(SRC_PLACE, j.src_bytes);
        take_pattern(&in, src, j.src_bytes, 4096);
    }
    j.src = src, j.is_first = true;
    on_each_processor(decode, &j);
    return 0;
}
