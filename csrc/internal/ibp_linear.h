/* ibp_linear.h - coded rows in sums and products: bags of rows, and vectors times a coded matrix. On a GPU only.
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

/* Bags of ids: bag b has the ids from offsets[b] up to offsets[b + 1]. The first begins with id 0 and the last ends
 * with the last id, whatever the offsets say. */
typedef struct ibp_bags {
    const void *offsets;   /* device: int32_t or int64_t [num_bags], ascending; NULL: bags of bag_size ids each */
    uint32_t offset_bytes; /* 4 or 8 */
    int64_t num_bags, bag_size;
    const void *weights; /* device: one an id, of the kind of the elements; NULL: all 1. For IBP_BAG_SUM only */
    ibp_bag_mode mode;
    ibp_float_kind kind; /* of the elements of rows */
    int64_t padding_id;  /* rows with this id count as absent; negative: there is none */
} ibp_bags;

/* out[b] = the sum, mean or maximum of the rows of bag b, row_bytes bytes each: decoded and reduced by one kernel. A
 * bag without rows gives zeros. Sums are added up in float, in the order of the bag, with one rounding at its end: in
 * the bits of torch's embedding_bag for CUDA.
 * table: of items of one row each, at most 8 KiB, of scheme raw or of dense rows of scheme planes with elements of 2 or
 * 4 bytes. ids: without positions. An id out of range and a corrupt row are noted as in ibp_cuda_gather_items, and
 * count as rows of zeros. An offset past the ids, or less than the one before, is noted as IBP_INVALID_ARGUMENT, with
 * its position and value; the bags about it are then made of any of the rows between their neighbours.
 * cache: rows whose entries are present come from its slabs, as in ibp_cuda_gather_cached; NULL: all from the table.
 * out: aligned to the elements. fault and max_sms as in ibp_cuda_gather_items. */
IBP_API ibp_status ibp_cuda_sum_bags(const ibp_table *table, const ibp_ids *ids, const ibp_cache *cache,
                                     const ibp_bags *bags, uint8_t *out, ibp_fault *fault, int max_sms,
                                     ibp_stream stream);

/* ---- products with a matrix -------------------------------------------------------------------------------------- */

#define IBP_MOST_VECTORS 512  /* of a call */
#define IBP_MOST_INVARIANT 64 /* with up to this many, y of a vector does not depend on how many there are */
#define IBP_MOST_MATRICES 4   /* of a call */

/* An element of a row whose digit is an escape. */
typedef struct {
    uint32_t column;
    uint16_t weight; /* its bits */
    uint16_t taken;  /* those with the exponent first_symbol + 15: what it is multiplied as like other digits */
} ibp_escape;

/* A matrix [N, K] of BF16 whose rows are the items of a table of scheme planes with one plane of four-bit digits,
 * consecutive entries, rotated elements, residuals of sign and mantissa (8 bits), no constant columns and no clusters.
 * Kernels read only the residuals and digits of a slot, its first 3 K / 2 bytes. All is in device memory. */
typedef struct {
    const uint8_t *slots; /* aligned to 16 bytes */
    int64_t slots_bytes;
    uint32_t slot_bytes;   /* a multiple of 16 */
    uint32_t first_symbol; /* of the codebook, at most 239 */
    int64_t num_rows;      /* N, at least 16 */
    uint32_t num_columns;  /* K, a multiple of 32 */
    uint32_t num_escapes;
    const uint32_t *starts;    /* [N + 1]: the escapes of row r are escapes[starts[r]] to escapes[starts[r + 1] - 1] */
    const ibp_escape *escapes; /* by rows and columns; aligned to 8 bytes */
} ibp_digit_matrix;

/* A coded matrix W [N, K], what is added to its products, and where they go: y = x W^T + bias. */
typedef struct {
    ibp_digit_matrix matrix;
    const uint16_t *bias; /* [N], or NULL */
    uint16_t *y;          /* [num_vectors, N] */
} ibp_product;

/* Multiplies vectors x [num_vectors, K] of BF16 by matrices of K columns; bias and y are of BF16, too. One launch
 * multiplies by all matrices: a model's query, key and value matrices take as long as one matrix with the rows of all
 * three. Rows are decoded in registers and never written. A matrix is read once for up to 8 vectors, and on GPUs of
 * compute capability 9.0 for up to 64 (32 where K is above 14,336) and for 65 to 256, else once for every 8. Products
 * are added in float and rounded once: for up to IBP_MOST_INVARIANT vectors in an order that depends on K alone, so
 * that y of a vector depends neither on the number of vectors nor on the other matrices; for more in an order that
 * depends on the matrices' sizes and the GPU.
 * Rows that are stored raw or as default rows give any numbers, which are finite for finite x. The list of escapes is
 * not compared with the rows; columns and starts out of range do no harm.
 * num_products: 1 to IBP_MOST_MATRICES. num_vectors: up to IBP_MOST_VECTORS. x: aligned to 16 bytes. workspace:
 * ibp_cuda_linear_bytes bytes of device memory, aligned to 128, that the call overwrites; NULL where that is 0.
 * Earlier work on the stream must not write the matrices, which are read while that work may still be running. It may
 * write x and bias. */
IBP_API ibp_status ibp_cuda_linear(const ibp_product *products, int64_t num_products, const uint16_t *x,
                                   int64_t num_vectors, uint8_t *workspace, ibp_stream stream);

/* Bytes of workspace of ibp_cuda_linear; 0: it takes none, or not these arguments. */
IBP_API int64_t ibp_cuda_linear_bytes(const ibp_product *products, int64_t num_products, int64_t num_vectors);

/* Decodes all rows of a matrix, by its list of escapes. weights: [N, K] in device memory, aligned to 16 bytes. Rows
 * that are stored raw or as default rows give any numbers; columns and starts out of range do no harm. */
IBP_API ibp_status ibp_cuda_decode_matrix(const ibp_digit_matrix *matrix, uint16_t *weights, ibp_stream stream);

/* ---- vectors that matrices of a stack multiply ------------------------------------------------------------------- */

#define IBP_MOST_OF_A_GROUP 8
#define IBP_MOST_GROUPED 1024 /* vectors of a call */
#define IBP_MOST_STACKED 4096 /* matrices of a call */

/* The vectors first to first + count - 1, which are multiplied by matrix number `matrix` of a stack. */
typedef struct {
    uint32_t matrix, first, count; /* count: at most IBP_MOST_OF_A_GROUP */
} ibp_vector_group;

/* Sorts vectors by their matrices and makes groups of them, for ibp_cuda_linear_groups. A vector whose matrix does not
 * exist comes last and is in no group.
 *
 * ids: the matrix of each of at most IBP_MOST_GROUPED vectors, without positions.
 * num_matrices: at most IBP_MOST_STACKED.
 * order: [ids->count] receives the numbers of the vectors in their new order; vectors of one matrix keep theirs.
 * groups: [num_groups] receives groups of vectors in that order, then groups without vectors.
 * num_groups: at least the smaller of ids->count and num_matrices, and ids->count / IBP_MOST_OF_A_GROUP more. */
IBP_API ibp_status ibp_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order, ibp_vector_group *groups,
                                     int64_t num_groups);

#define IBP_MOST_LISTED 16 /* stacks whose rows are listed */

/* The matrices that are asked for: matrix held[s] is in slot s. */
typedef struct {
    int64_t *slots;      /* [ids]: of the matrix that each id asks for */
    int64_t *held;       /* [num_slots]: -1 in slots that are left over */
    int64_t *rows;       /* of each stack [num_slots * num_rows[stack]], one stack after the other: the numbers of the
                            matrices' rows, zeros in slots that are left over */
    uint64_t *num_spare; /* NULL, or added to: how many slots are left over */
    int64_t num_slots;   /* at least the smaller of ids->count and num_matrices + 1 */
    int64_t num_rows[IBP_MOST_LISTED]; /* of a matrix of each stack, at least 1 */
    uint32_t num_stacks;
} ibp_listed;

/* Lists each matrix that ids ask for once, in the order of their numbers, and the rows that each matrix has in several
 * stacks. An id out of range asks for matrix num_matrices, which no stack has.
 *
 * ids: without positions.
 * num_matrices: at most IBP_MOST_STACKED. */
IBP_API ibp_status ibp_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed);

/* Groups vectors as ibp_group_vectors does, by one short kernel. */
IBP_API ibp_status ibp_cuda_group_vectors(const ibp_ids *ids, int64_t num_matrices, int64_t *order,
                                          ibp_vector_group *groups, int64_t num_groups, ibp_stream stream);

/* Lists matrices as ibp_list_matrices does, by one short kernel. The struct `listed` is in host memory. */
IBP_API ibp_status ibp_cuda_list_matrices(const ibp_ids *ids, int64_t num_matrices, const ibp_listed *listed,
                                          ibp_stream stream);

/* Multiplies groups of vectors, each by one matrix of a stack, as the experts of a mixture want it. stack: a matrix
 * whose rows are those of all matrices, one after the other, num_rows each, a multiple of 16. groups: [num_groups] in
 * device memory, which earlier work on the stream may write; the first group without vectors, or whose numbers are
 * out of range, ends the list. A matrix is read once for each of its groups. y [num_vectors, num_rows]: results of
 * vectors that are in no group stay as they are; no vector may be in two groups. order: NULL, or [num_vectors] in
 * device memory: vector v of the groups is vector order[v], as ibp_cuda_group_vectors gives it; numbers out of range
 * give any results. sharing: of an order, as many vectors after each other are one row of x [num_vectors / sharing,
 * columns]; else 1. The order of sums, x and what the stream may do are as in ibp_cuda_linear; num_vectors: up to
 * INT32_MAX. */
IBP_API ibp_status ibp_cuda_linear_groups(const ibp_digit_matrix *stack, int64_t num_rows,
                                          const ibp_vector_group *groups, int64_t num_groups, const int64_t *order,
                                          int64_t sharing, const uint16_t *x, int64_t num_vectors, uint16_t *y,
                                          ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
