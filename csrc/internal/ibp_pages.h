/* ibp_pages.h - plans transfers of a KV-cache's pages between blocks of tensors and a place.
 *
 *     // Block 5 of a tensor with blocks of block_bytes bytes, and page 9 of a place with one row for each block.
 *     ibp_status plan(const uint8_t *tensor, int64_t block_bytes, uint8_t *spare_block, int64_t *id, uint64_t *address)
 *     {
 *         const int64_t page = 9, block = 5;
 *         const uint64_t start = (uint64_t)(uintptr_t)tensor;
 *         ibp_page_transfer transfer = {0};
 *         transfer.pages = &page;
 *         transfer.blocks = &block;
 *         transfer.count = 1;
 *         transfer.num_pages = transfer.num_blocks = 64;
 *         transfer.num_tensors = transfer.tensors = transfer.pieces = transfer.ids_per_block = 1;
 *         transfer.starts = &start;
 *         transfer.block_stride = block_bytes;
 *         transfer.scratch = (uint64_t)(uintptr_t)spare_block;
 *         return ibp_plan_pages(&transfer, NULL, id, address);
 *     }
 */
#ifndef IBP_PAGES_H
#define IBP_PAGES_H

#include "ibp_cuda_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A transfer of pages between the blocks of paged tensors and a place, which is the memory of a table whose rows are
 * coded one by one (ibp_place.h). Page k of the transfer is page pages[k] of the place, and block blocks[k] of each
 * tensor. A page has one block of each of num_tensors tensors. The transfer moves only the blocks of `tensors`
 * consecutive tensors, beginning with tensor first_tensor. A block of a tensor consists of `pieces` pieces of memory of
 * equal size. For each block the place has ids_per_block rows (or items), a multiple of `pieces`. Page numbers and
 * block numbers may be out of range. */
typedef struct ibp_page_transfer {
    const int64_t *pages, *blocks;
    int64_t count, num_pages, num_blocks; /* number of pages of the transfer, of pages of the place, and of blocks of
                                             each tensor */
    uint32_t num_tensors, first_tensor, tensors, pieces, ids_per_block;
    const uint64_t *starts;       /* [tensors * pieces]: the addresses of the pieces of block 0 */
    const uint64_t *block_starts; /* [num_blocks]: the offset in bytes of each block, added to starts; or NULL */
    int64_t block_stride;         /* distance from one block to the next in bytes; read if block_starts is NULL */
    uint64_t scratch;             /* the address of an unused piece of memory, which stands in for missing pieces */
} ibp_page_transfer;

/* Computes which rows of the place a transfer moves, and the addresses of the pieces of the tensors' blocks.
 *
 * stored: num_pages * num_tensors flags that say which blocks the place stores; NULL if it stores all blocks.
 * ids: receives count * tensors * ids_per_block rows of the place, in the order of pages, tensors and bytes. An id is
 *   -1 if its page or block does not exist, or if, for at least one tensor of the transfer, the place does not store
 *   the page's block.
 * addresses: receives count * tensors * pieces addresses, one for each piece of memory.
 * @return IBP_INVALID_ARGUMENT if numbers are inconsistent; then nothing is written. */
IBP_API ibp_status ibp_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                  uint64_t *addresses);

/* Notes which blocks of tensors are stored, after their rows have been coded into a place: all blocks except those with
 * a lost row, for which overflow had no room.
 *
 * ids: ids_per_block rows for each of num_blocks blocks, as ibp_plan_pages writes them. Blocks whose first id is below
 *   0 are skipped.
 * lengths, rooms: the lengths and rooms of the place, which has num_rows rows; rooms is NULL if slots hold whole rows.
 * stored, seen: both receive the same flags, num_rows / ids_per_block in number. `stored` is for the device that
 *   decodes, and `seen` for the host.
 * @return IBP_INVALID_ARGUMENT also if num_rows is not a multiple of ids_per_block. */
IBP_API ibp_status ibp_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                                  const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows, uint8_t *stored,
                                  uint8_t *seen);

/* Plan and note pages on a GPU as ibp_plan_pages and ibp_note_pages do. The struct *transfer is in host memory; all
 * other pointers are to memory that the device can use. */
IBP_API ibp_status ibp_cuda_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                       uint64_t *addresses, ibp_stream stream);
IBP_API ibp_status ibp_cuda_note_pages(const int64_t *ids, int64_t num_blocks, uint32_t ids_per_block,
                                       const uint16_t *lengths, const uint16_t *rooms, int64_t num_rows,
                                       uint8_t *stored, uint8_t *seen, ibp_stream stream);

#ifdef __cplusplus
}
#endif
#endif
