/* ibp_pages.h - pages of a KV-cache on their way between blocks of tensors and a place.
 *
 *     // Block 5 of one tensor, blocks of block_bytes bytes, and page 9 of a place with a row for each block.
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

/* Pages on their way between the blocks of paged tensors and a place: page k of the transfer is page pages[k] of the
 * place and block blocks[k] of `tensors` tensors. A page has a block of each of num_tensors tensors; the transfer moves
 * the blocks of `tensors` tensors from first_tensor on. A block of a tensor is `pieces` pieces of memory of one size;
 * the place has ids_per_block rows, or items, for it, a whole number for each piece. Page numbers and block numbers may
 * be any. */
typedef struct ibp_page_transfer {
    const int64_t *pages, *blocks;
    int64_t count, num_pages, num_blocks; /* of the transfer, of the place, of each tensor */
    uint32_t num_tensors, first_tensor, tensors, pieces, ids_per_block;
    const uint64_t *starts;       /* [tensors * pieces]: where the pieces of block 0 begin */
    const uint64_t *block_starts; /* NULL, or [num_blocks]: what is added to starts for each block */
    int64_t block_stride;         /* else its number times these bytes */
    uint64_t scratch;             /* address of a piece that nobody uses: it stands in for missing pieces */
} ibp_page_transfer;

/* Works out ids, count * tensors * ids_per_block of them: those of the place, in the order of pages, tensors and bytes,
 * and addresses, count * tensors * pieces: of the pieces. ids are -1 where there is no such page or block, or, with
 * stored, where the page's flag of any tensor of the transfer is 0: num_pages * num_tensors flags, of blocks of
 * tensors.
 * @return IBP_INVALID_ARGUMENT for numbers that contradict each other, and then nothing is written. */
IBP_API ibp_status ibp_plan_pages(const ibp_page_transfer *transfer, const uint8_t *stored, int64_t *ids,
                                  uint64_t *addresses);

/* Notes which blocks of tensors are stored, once their rows have been coded into a place: all of them, but those with a
 * row that was lost. ids: of rows, ids_per_block for each of num_blocks, as ibp_plan_pages has them; those with a first
 * one below 0 are left out. lengths, rooms: of the place, num_rows of them; rooms NULL where slots hold whole rows.
 * stored, seen: flags, num_rows / ids_per_block of them: of the device that decodes, and of the host.
 * @return IBP_INVALID_ARGUMENT also if that is no whole number. */
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
