/* schemes.c - the list of schemes (schemes.h), and checks of codebooks, compressed tables, places and sources of rows.
 * */
#include "schemes.h"

#include "locate.h"

#if IBP_HAS_X86_ROWS
#define CODERS_OF_MASKS &ibp_masks_plain, &ibp_masks_avx2, &ibp_masks_avx512
#define CODERS_OF_PLANES &ibp_planes_plain, &ibp_planes_x86, &ibp_planes_x86
#else
#define CODERS_OF_MASKS &ibp_masks_plain, &ibp_masks_plain, &ibp_masks_plain
#define CODERS_OF_PLANES &ibp_planes_plain, &ibp_planes_plain, &ibp_planes_plain
#endif

/* Returns whether a codebook has no clusters. This is all that is checked in scheme raw, whose codebooks have no
 * arrays. */
static bool has_no_clusters(const ibp_codebook *cb) { return !ibp_has_clusters(cb); }

static const ibp_scheme_row schemes[] = {
    {IBP_SCHEME_RAW, "raw", NULL, NULL, NULL, has_no_clusters, has_no_clusters, NULL},
    {IBP_SCHEME_IBP, "ibp", CODERS_OF_MASKS, ibp_are_masks_fields, ibp_are_masks_words, ibp_select_masks},
    {IBP_SCHEME_PLANES, "planes", CODERS_OF_PLANES, ibp_are_planes_fields, ibp_are_planes_arrays, ibp_select_planes},
};
enum { NUM_SCHEMES = sizeof schemes / sizeof *schemes };

const ibp_scheme_row *ibp_find_scheme(ibp_scheme id)
{
    for (int i = 0; i < NUM_SCHEMES; i++)
        if (schemes[i].id == id) return &schemes[i];
    return NULL;
}

const char *ibp_scheme_name(ibp_scheme id)
{
    const ibp_scheme_row *const scheme = ibp_find_scheme(id);
    return scheme ? scheme->name : NULL;
}

ibp_status ibp_check_codebook_fields(const ibp_codebook *cb)
{
    const ibp_scheme_row *const scheme = ibp_find_scheme(cb->scheme);
    if (!scheme || !ibp_are_sizes(0, cb->row_bytes) || cb->num_clusters > IBP_MAX_CLUSTERS) return IBP_INVALID_ARGUMENT;
    return scheme->are_fields(cb) ? IBP_OK : IBP_INVALID_ARGUMENT;
}

ibp_status ibp_check_codebook(const ibp_codebook *cb)
{
    if (ibp_check_codebook_fields(cb) != IBP_OK) return IBP_INVALID_ARGUMENT;
    const ibp_scheme_row *const scheme = ibp_find_scheme(cb->scheme);
    if (!ibp_has_clusters(cb)) return scheme->are_arrays(cb) ? IBP_OK : IBP_INVALID_ARGUMENT;
    for (uint32_t k = 0; k < cb->num_clusters; k++) {
        const ibp_codebook one = ibp_cluster_of(scheme, cb, k);
        if (!scheme->are_arrays(&one)) return IBP_INVALID_ARGUMENT;
    }
    return IBP_OK;
}

ibp_status ibp_check_table_fields(const ibp_table *table)
{
    if (ibp_check_codebook_fields(&table->codebook) != IBP_OK) return IBP_INVALID_ARGUMENT;
    if (!ibp_are_items(table->num_items, table->item_bytes)) return IBP_INVALID_ARGUMENT;
    if (!ibp_is_slot(table->slot_bytes, table->codebook.row_bytes)) return IBP_INVALID_ARGUMENT;
    if (table->slots_bytes < 0 || table->overflow_bytes < 0) return IBP_INVALID_ARGUMENT;
    if (table->rows_per_base > 1 && table->rows_per_base != IBP_ROWS_PER_BASE) return IBP_INVALID_ARGUMENT;
    const bool has_coded_rows = ibp_find_scheme(table->codebook.scheme)->plain != NULL;
    return table->lengths && !has_coded_rows ? IBP_INVALID_ARGUMENT : IBP_OK;
}

bool ibp_is_place(const ibp_place *place)
{
    const ibp_table *const table = &place->table;
    const uint32_t row_bytes = table->codebook.row_bytes;
    if (ibp_check_table_fields(table) != IBP_OK || table->slots_start != 0u || table->overflow_start != 0u)
        return false;
    const bool is_whole = table->slot_bytes == row_bytes, is_raw = table->codebook.scheme == IBP_SCHEME_RAW;
    const int64_t num_bytes = ibp_bytes_of_table(table), num_rows = ibp_rows_of_bytes(num_bytes, row_bytes);
    if (table->slots_bytes < (is_whole ? num_bytes : num_rows * table->slot_bytes)) return false;
    if (num_rows == 0) return true;
    if (!ibp_has_arrays(table, place->slots, place->overflow)) return false;
    if ((place->lengths == NULL) != is_raw) return false;
    if (is_whole && place->bases == NULL) return true;
    if (ibp_is_packed(place)) return place->used != NULL && !is_raw;
    return table->rows_per_base == 1u && place->bases != NULL && place->used != NULL && !is_raw;
}

bool ibp_is_row_source(const ibp_row_source *source, uint32_t row_bytes)
{
    const bool is_plain = source->buffers == NULL && source->num_dims == 0u;
    const int64_t most = INT32_MAX, num_rows = source->num_rows;
    if (num_rows < 0 || (num_rows > most && !is_plain) || source->num_dims > IBP_MAX_SOURCE_DIMS) return false;
    if (num_rows == 0) return true;
    if (source->buffers == NULL && source->data == NULL) return false;
    if (source->buffers != NULL && (source->rows_per_buffer < 1 || source->rows_per_buffer > most)) return false;
    for (uint32_t d = 1; d < source->num_dims; d++)
        if (source->sizes[d] < 1 || source->sizes[d] > most) return false;
    return source->last_row_bytes == 0u || (source->last_row_bytes <= row_bytes && source->num_dims == 0u);
}

ibp_status ibp_check_table(const ibp_table *table)
{
    const ibp_status status = ibp_check_table_fields(table);
    if (status != IBP_OK) return status;
    if (!ibp_has_arrays(table, table->slots, table->overflow)) return IBP_INVALID_ARGUMENT;
    return ibp_check_codebook(&table->codebook);
}

int64_t ibp_num_rows(const ibp_table *table)
{
    if (!ibp_are_items(table->num_items, table->item_bytes) || !ibp_are_sizes(0, table->codebook.row_bytes)) return 0;
    return ibp_rows_of_bytes(ibp_bytes_of_table(table), table->codebook.row_bytes);
}
