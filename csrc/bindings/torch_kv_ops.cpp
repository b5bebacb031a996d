// torch_kv_ops.cpp - the operations of torch.ops.ibp that help to move pages of a KV-cache between blocks of tensors
// and a place, which is a table into which rows are coded one by one (ibp_pages.h, ibp_place.h). The operations turn
// tensors into pointers and call the core.
//
//     plan_pages  pages blocks num_pages num_blocks num_tensors first_tensor starts block_starts block_stride scratch
//                 pieces stored ids addresses
//     note_pages  ids ids_per_block lengths rooms stored seen
//
// Each operation is documented at its function. Flags are uint8, one for each page and tensor: whether the place stores
// the tensor's block of that page.
#include "torch_tensors.h"

#include <optional>

namespace {

using namespace ibp_torch;

uint8_t *flags_of(const Tensor &flags, int64_t num_pages, int64_t num_tensors, const char *name)
{
    uint8_t *const found = bytes_of(flags, 0, name);
    require(num_pages >= 0 && num_tensors >= 1 && num_pages <= flags.numel() / num_tensors, name, " has ",
            flags.numel(), " flags for ", num_pages, " pages of ", num_tensors, " tensors");
    return found;
}

// Computes, for a transfer of pages, the ids of the place's rows and the addresses of the tensors' memory. The memory
// at these addresses is neither read nor written. A block of a tensor consists of `pieces` pieces of memory of equal
// size.
//
// pages, blocks: int64 [pages]; the transfer copies page pages[k] of the place to or from block blocks[k] of each
//   tensor. Any numbers are allowed: the ids for a page or block that does not exist are -1.
// num_pages, num_blocks: the number of pages of the place, and the number of blocks of each tensor.
// num_tensors, first_tensor: a page has one block for each of num_tensors tensors. The transfer moves only the blocks
//   of the tensors that `starts` describes, which are consecutive and begin with tensor first_tensor.
// starts: int64 [tensors * pieces], the addresses of the pieces of block 0.
// block_starts: int64 [num_blocks]: the pieces of block b begin at starts + block_starts[b]. None: they begin at
//   starts + b * block_stride.
// scratch: the address of a spare piece of memory, which stands in for the pieces of missing blocks.
// pieces: the number of pieces of a block.
// stored: flags [num_pages * num_tensors], or None. The ids of a page are also -1 unless the place stores the page's
//   block of every tensor of the transfer.
// ids: int64 [pages * tensors * rows of a block], written. The number of rows that the place has for a block follows
//   from the size of `ids`. It must be a multiple of `pieces`.
// addresses: int64 [pages * tensors * pieces], written.
void plan_pages(const Device &device, const Tensor &pages, const Tensor &blocks, int64_t num_pages, int64_t num_blocks,
                int64_t num_tensors, int64_t first_tensor, const Tensor &starts,
                const std::optional<Tensor> &block_starts, int64_t block_stride, int64_t scratch, int64_t pieces,
                const std::optional<Tensor> &stored, const Out &ids, const Out &addresses)
{
    ibp_page_transfer t{};
    t.count = pages.numel();
    t.pages = longs_of(pages, 0, "pages");
    t.blocks = longs_of(blocks, t.count, "blocks");
    t.num_pages = num_pages, t.num_blocks = num_blocks;
    t.num_tensors = to_u32(num_tensors, 1, INT32_MAX, "num_tensors");
    t.first_tensor = to_u32(first_tensor, 0, num_tensors - 1, "first_tensor");
    t.pieces = to_u32(pieces, 1, INT32_MAX, "pieces");
    require(starts.numel() > 0 && starts.numel() % pieces == 0, "starts has ", starts.numel(), " elements, not ",
            pieces, " a tensor");
    t.tensors = to_u32(starts.numel() / pieces, 1, num_tensors - first_tensor, "the tensors of starts");
    t.starts = unsigned_longs_of(starts, 0, "starts");
    if (block_starts) t.block_starts = unsigned_longs_of(*block_starts, num_blocks, "block_starts");
    t.block_stride = block_stride, t.scratch = static_cast<uint64_t>(scratch);
    const int64_t per_block = t.count ? ids.numel() / (t.count * t.tensors) : pieces;
    t.ids_per_block = to_u32(per_block, pieces, INT32_MAX, "the ids of a block");
    require(per_block % pieces == 0 && ids.numel() == t.count * t.tensors * per_block, "ids has ", ids.numel(),
            " elements for ", t.count, " pages");
    const uint8_t *const flags = stored ? flags_of(*stored, t.num_pages, t.num_tensors, "stored") : nullptr;
    uint64_t *const places = unsigned_longs_of(addresses, t.count * t.tensors * t.pieces, "addresses");
    run_on(device, "plan_pages", ibp_cuda_plan_pages, ibp_plan_pages, &t, flags, longs_of(ids, 0, "ids"), places);
}

// Notes which blocks a place stores. Call it after the rows of the blocks have been coded into the place. A block with
// a lost row counts as not stored; all other blocks count as stored.
//
// ids: int64, as plan_pages wrote them.
// ids_per_block: the number of rows that the place has for a block.
// lengths: uint16 [rows], the lengths of the place.
// rooms: uint16 [rows], the rooms of the place (ibp_place.h); empty if slots hold whole rows.
// stored, seen: flags [rows / ids_per_block], written. Both receive the same flags: `stored` for the device that
//   decodes, `seen` for the host.
void note_pages(const Device &device, const Tensor &ids, int64_t ids_per_block, const Tensor &lengths,
                const Tensor &rooms, const Out &stored, const Out &seen)
{
    const uint32_t per_block = to_u32(ids_per_block, 1, INT32_MAX, "ids_per_block");
    const int64_t num_rows = lengths.numel(), num_flags = num_rows / ids_per_block;
    require(ids.numel() % ids_per_block == 0, "ids has ", ids.numel(), " elements, not ", ids_per_block, " a block");
    require(num_rows % ids_per_block == 0, "lengths has ", num_rows, " elements, not ", ids_per_block, " a block");
    const int64_t num_blocks = ids.numel() / ids_per_block, *const of_rows = longs_of(ids, 0, "ids");
    const uint16_t *const entries = lengths_of(lengths, num_rows), *const owned = lengths_of(rooms, num_rows, "rooms");
    uint8_t *const flags = bytes_of(stored, num_flags, "stored"), *const of_host = bytes_of(seen, num_flags, "seen");
    run_on(device, "note_pages", ibp_cuda_note_pages, ibp_note_pages, of_rows, num_blocks, per_block, entries, owned,
           num_rows, flags, of_host);
}

template <typename Library> void implement(Library &m)
{
    operation<plan_pages>(m, "plan_pages",
                          "pages blocks num_pages num_blocks num_tensors first_tensor starts block_starts block_stride "
                          "scratch pieces stored ids addresses");
    operation<note_pages>(m, "note_pages", "ids ids_per_block lengths rooms stored seen");
}

} // namespace

STABLE_TORCH_LIBRARY_IMPL(ibp, CPU, m) { implement(m); }
STABLE_TORCH_LIBRARY_IMPL(ibp, CUDA, m) { implement(m); }
