/* ibp_linear.h - sums of coded rows (bags), and products of vectors with a coded matrix. Sums and products are computed
 * only on a GPU.
 *
 *     // Sums of four rows of float32 each.
 *     ibp_status sums_of_four(const ibp_table *table, const ibp_ids *ids, uint8_t *out, ibp_fault *fault,
 *                             ibp_stream stream)
 *     {
 *         ibp_bags bags = {0};
 *         bags.num_bags = ids->count / 4;
 *         bags.bag_size = 4;
 *         bags.mode = IBP_BAG_SUM;
 *         bags.kind = IBP_FLOAT32;
 *         bags.padding_id = -1;
 *         return ibp_cuda_sum_bags(table, ids, NULL, &bags, out, fault, 0, stream);
 *     }
 */
#ifndef IBP_LINEAR_H
#define IBP_LINEAR_H

#include "ibp_cache.h"
#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- bags of rows ------------------------------------------------------------------------------------------------ */

typedef enum ibp_bag_mode { IBP_BAG_SUM, IBP_BAG_MEAN, IBP_BAG_MAX } ibp_bag_mode;
typedef enum ibp_float_kind { IBP_FLOAT32, IBP_FLOAT16, IBP_BFLOAT16 } ibp_float_kind;

/* Bags of ids. The ids of all bags lie in one ibp_ids, one bag after the other. Bag b has the ids with the indices
 * offsets[b] to offsets[b + 1] - 1. The first bag begins with the first id, and the last bag ends with the last id,
 * whatever the offsets say. */
typedef struct ibp_bags {
    const void *offsets;   /* in device memory: int32_t or int64_t [num_bags], ascending; NULL: bags of bag_size ids
                              each */
    uint32_t offset_bytes; /* 4 or 8 */
    int64_t num_bags, bag_size;
    const void *weights; /* in device memory: a weight for each id, of the kind of the elements; NULL: all are 1. For
                            IBP_BAG_SUM only */
    ibp_bag_mode mode;
    ibp_float_kind kind; /* kind of the elements of rows */
    int64_t padding_id;  /* ids with this value are skipped; if padding_id is negative, no id is skipped */
} ibp_bags;

/* Decodes the rows of each bag and reduces them to their sum, mean or maximum, in one kernel. out[b] receives row_bytes
 * bytes for bag b. A bag without rows gives zeros. Sums are added up in float, in the order of the bag, and rounded
 * once at the end, so the results equal those of torch's embedding_bag for CUDA bit for bit.
 *
 * table: each of its items is one row of at most 8 KiB. Its scheme is raw, or it is planes with dense rows and elements
 *   of 2 or 4 bytes.
 * ids: without positions. An id out of range and a corrupt row are noted as in ibp_cuda_gather_items, and count as rows
 *   of zeros.
 * cache: if not NULL, rows whose entries are present are read from its slabs, as in ibp_cuda_gather_cached. If NULL,
 *   all rows are read from the table.
 * bags: an offset is noted as IBP_INVALID_ARGUMENT, with its position and value, if it is negative, lies past the ids,
 *   or is less than the offset before it. The bags before and after this offset then have unspecified rows, from the
 *   range between their neighbouring bags.
 * out: aligned to the elements.
 * fault, max_sms: as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_sum_bags(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                     const ibp_bags *bags, uint8_t *out, ibp_fault *fault, int max_sms,
                                     ibp_stream stream);

/* ---- products with a matrix -------------------------------------------------------------------------------------- */

#define IBP_MOST_VECTORS 512  /* largest number of vectors of one call */
#define IBP_MOST_MATRICES 4   /* largest number of matrices of one call */
#define IBP_MOST_INVARIANT 32 /* largest number of vectors with which a vector's result is the same as alone */

/* An element that is coded as the escape, because its exponent is not among the entries of the codebook. */
typedef struct {
    uint32_t column;
    uint16_t weight; /* the bits of the element */
    uint16_t taken;  /* the weight with its exponent replaced by first_symbol + 15, which is what kernels decode for
                        the escape. They multiply by this number and correct the sum later */
} ibp_escape;

/* A matrix [N, K] of BF16 in device memory. Its rows are the items of a table of scheme planes with one plane of
 * four-bit digits, consecutive entries, rotated elements, residuals of sign and mantissa (8 bits), no constant columns
 * and no clusters. Kernels read only the residuals and digits of a slot, which are its first 3 K / 2 bytes: one byte
 * and half a byte for each element. */
typedef struct {
    const uint8_t *slots; /* aligned to 16 bytes */
    int64_t slots_bytes;
    uint32_t slot_bytes;   /* a multiple of 16 */
    uint32_t first_symbol; /* first_symbol of the codebook, at most 239 */
    int64_t num_rows;      /* N, at least 16 */
    uint32_t num_columns;  /* K, a multiple of 32 */
    uint32_t num_escapes;
    const uint32_t *starts;    /* [N + 1]: the escapes of row r are escapes[starts[r]] to escapes[starts[r + 1] - 1] */
    const ibp_escape *escapes; /* sorted by rows and columns; aligned to 8 bytes */
} ibp_digit_matrix;

/* A product y = x W^T + bias with a coded matrix W [N, K]. */
typedef struct {
    ibp_digit_matrix matrix;
    const uint16_t *bias; /* [N], or NULL */
    uint16_t *y;          /* [num_vectors, N] */
} ibp_product;

/* Multiplies vectors by up to IBP_MOST_MATRICES matrices of K columns each, in one launch. So multiplying by the query,
 * key and value matrices of a model takes as long as multiplying by one matrix that has the rows of all three. Rows are
 * decoded in registers and never written.
 *
 * A matrix is read once for every 8 vectors. On GPUs of compute capability 9.0 it is read once for up to 256 vectors.
 * More vectors are split into groups of 256.
 *
 * Products are added in float and rounded once. For up to IBP_MOST_INVARIANT vectors the order of additions depends
 * on K alone, so that the result of a vector depends neither on the number of vectors nor on the other matrices. For
 * more vectors the order depends on the matrices' sizes and on the GPU.
 *
 * Rows that are stored raw or as default rows give unspecified numbers, which are finite if x is finite. The list of
 * escapes is not compared with the rows. Columns and starts out of range do no harm.
 *
 * products, num_products: 1 to IBP_MOST_MATRICES products. bias and y are BF16.
 * x: vectors [num_vectors, K] of BF16, aligned to 16 bytes.
 * num_vectors: at most IBP_MOST_VECTORS.
 * workspace: ibp_cuda_linear_bytes(...) bytes of device memory, aligned to 128 bytes, which the call overwrites; NULL
 *   if that size is 0.
 * stream: earlier work on the stream must not write the matrices, because the call may read them while that work is
 *   still running. Earlier work may write x and bias. */
IBP_API ibp_status ibp_cuda_linear(const ibp_product *products, int64_t num_products, const uint16_t *x,
                                   int64_t num_vectors, uint8_t *workspace, ibp_stream stream);

/* Returns the size in bytes of the workspace that ibp_cuda_linear needs; 0 if it needs no workspace, or if it refuses
 * these arguments. */
IBP_API int64_t ibp_cuda_linear_bytes(const ibp_product *products, int64_t num_products, int64_t num_vectors);

/* Decodes all rows of a matrix, and takes the escapes from its list. Rows that are stored raw or as default rows give
 * unspecified numbers. Columns and starts out of range do no harm.
 *
 * weights: receives [N, K] numbers of BF16 in device memory, aligned to 16 bytes. */
IBP_API ibp_status ibp_cuda_decode_matrix(const ibp_digit_matrix *matrix, uint16_t *weights, ibp_stream stream);

/* ---- products with the matrices of a stack ---------------------------------------------------------------------- */

/* A stack: several matrices of equal size, one after the other, such as the experts of a layer. Each vector is
 * multiplied by the matrix that its id names. */
#define IBP_MOST_OF_A_GROUP 8 /* largest number of vectors of a group */
#define IBP_MOST_GROUPED 1024 /* largest number of vectors of one call */
#define IBP_MOST_STACKED 4096 /* largest number of matrices of a stack */

/* The vectors first to first + count - 1, which are multiplied by matrix number `matrix` of a stack. */
typedef struct {
    uint32_t matrix, first, count; /* count: at most IBP_MOST_OF_A_GROUP */
} ibp_vector_group;

/* Sorts vectors by their matrices and makes groups of them, for ibp_cuda_linear_groups. A vector whose matrix does not
 * exist comes last and is in no group.
 *
 * ids: the matrix of each vector, at most IBP_MOST_GROUPED of them; ids->positions must be NULL.
 * num_matrices: at most IBP_MOST_STACKED.
 * order: [ids->count] receives the numbers of the vectors in their new order; vectors of one matrix keep their order.
 * groups: [num_groups] receives groups of vectors in the new order, then groups without vectors.
 * num_groups: at least min(ids->count, num_matrices) + ids->count / IBP_MOST_OF_A_GROUP. */
IBP_API ibp_status ibp_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order, ibp_vector_group *groups,
                                     int64_t num_groups);

#define IBP_MOST_LISTED 16 /* largest number of stacks of one call of ibp_list_matrices */

/* A list of the matrices that ids name: matrix held[s] is in slot s. Slots after the last matrix are spare. */
typedef struct {
    int64_t *slots;      /* [ids->count]: the slot of the matrix that each id names */
    int64_t *held;       /* [num_slots]: the matrix in each slot; -1 in spare slots */
    int64_t *rows;       /* for each stack [num_slots * num_rows[stack]], one stack after the other: the numbers, in
                            the stack, of the rows of each slot's matrix; zeros for spare slots */
    uint64_t *num_spare; /* the function adds the number of spare slots to *num_spare; or NULL */
    int64_t num_slots;   /* at least min(ids->count, num_matrices + 1) */
    int64_t num_rows[IBP_MOST_LISTED]; /* number of rows of a matrix in each stack, at least 1 */
    uint32_t num_stacks;
} ibp_listed;

/* Lists the matrices that ids name, each once and in increasing order, and the rows of these matrices in each of
 * several stacks. An id out of range counts as matrix num_matrices, which is listed although no stack has it.
 *
 * ids: without positions.
 * num_matrices: at most IBP_MOST_STACKED. */
IBP_API ibp_status ibp_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed);

/* Groups vectors as ibp_group_vectors does, in one short kernel. */
IBP_API ibp_status ibp_cuda_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order,
                                          ibp_vector_group *groups, int64_t num_groups, ibp_stream stream);

/* Lists matrices as ibp_list_matrices does, in one short kernel. The struct `listed` is in host memory. */
IBP_API ibp_status ibp_cuda_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed,
                                          ibp_stream stream);

/* Multiplies groups of vectors, each group by one matrix of a stack, for layers with a mixture of experts. A matrix is
 * read once for each of its groups. For the order of additions, for x and for the stream, see ibp_cuda_linear.
 *
 * stack: a matrix that has the rows of all matrices, one matrix after the other.
 * num_rows: number of rows of one matrix, a multiple of 16.
 * groups: [num_groups] in device memory; earlier work on the stream may write it. The first group that has no vectors,
 *   or whose numbers are out of range, ends the list. No vector may be in two groups.
 * order: [num_vectors] in device memory, as ibp_cuda_group_vectors makes it: vector v of the groups is vector order[v].
 *   Numbers out of range give unspecified results. NULL: the identity.
 * sharing: number of consecutive vectors that share one row of x [num_vectors / sharing, K]; 1 if order is NULL.
 * num_vectors: up to INT32_MAX.
 * y: [num_vectors, num_rows]. Results of vectors that are in no group stay as they are. */
IBP_API ibp_status ibp_cuda_linear_groups(const ibp_digit_matrix *stack, int64_t num_rows,
                                          const ibp_vector_group *groups, int64_t num_groups, const int64_t *order,
                                          int64_t sharing, const uint16_t *x, int64_t num_vectors, uint16_t *y,
                                          ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
