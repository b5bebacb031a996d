// warp_rows.cuh - functions with which a warp of any kernel decodes a row from its coded bytes (warp_decode_coded), or
// fetches and decodes a row of a table (warp_decode_row). The comment of each function says what callers must do.
// ibp_device.cuh includes this file. A coded row takes these steps:
//
// 1. The coded bytes are copied to the warp's scratch in dynamic shared memory.
// 2. The codebook's decoder is constructed; its shared memory is the scratch after these bytes.
// 3. The decoder rebuilds the row at the caller's address.
#ifndef IBP_WARP_ROWS_CUH
#define IBP_WARP_ROWS_CUH

#include "../kinds.h"
#include "decode_dense.cuh"
#include "find_row.cuh"
#include "decode_listed.cuh"
#include "decode_masks.cuh"
#include "decode_pairs.cuh"

namespace ibp {

// Kinds of coded rows: rows of scheme ibp, and dense rows and listed rows of scheme planes. A kernel that names only
// the kinds that its tables have is smaller and compiles faster.
enum RowKinds : uint32_t { kMaskRows = 1, kDenseRows = 2, kListedRows = 4, kAllRows = 7 };

// Calls use.with<Decoder>() for the decoder of a codebook, and returns its result. Returns false if KINDS does not
// include the kind of the codebook's rows.
template <uint32_t KINDS, class Use>
__host__ __device__ __forceinline__ bool use_warp_decoder(const ibp_codebook &cb, Use &use)
{
    using Warp = Group<kWarp, 1, kDecodesAny>;
    if (!knows_fields(cb, cb.planes.listed ? kListedFields : kDenseFields)) return false;
    if (cb.scheme == IBP_SCHEME_IBP) {
        if constexpr ((KINDS & kMaskRows) != 0u) return use.template with<MasksDecoder<4, false, Warp>>();
    } else if (cb.scheme == IBP_SCHEME_PLANES && cb.planes.listed) {
        if constexpr ((KINDS & kListedRows) != 0u) {
            switch (cb.planes.element_bytes) {
            case 1: return use.template with<ListedDecoder<uint8_t, kListedFields>>();
            case 2: return use.template with<ListedDecoder<uint16_t, kListedFields>>();
            case 4: return use.template with<ListedDecoder<uint32_t, kListedFields>>();
            case 8: return use.template with<ListedDecoder<uint64_t, kListedFields>>();
            }
        }
    } else if (cb.scheme == IBP_SCHEME_PLANES) {
        if constexpr ((KINDS & kDenseRows) != 0u) {
            const bool pairs = decodes_pairs(cb.planes) && !cb.planes.per_column;
            switch (cb.planes.element_bytes) {
            case 1:
                return pairs ? use.template with<PairsDecoder<uint8_t, Warp, false>>()
                             : use.template with<DenseDecoder<uint8_t, Warp, false>>();
            case 2:
                return pairs ? use.template with<PairsDecoder<uint16_t, Warp, false>>()
                             : use.template with<DenseDecoder<uint16_t, Warp, false>>();
            case 4:
                return pairs ? use.template with<PairsDecoder<uint32_t, Warp, false>>()
                             : use.template with<DenseDecoder<uint32_t, Warp, false>>();
            case 8: return use.template with<DenseDecoder<uint64_t, Warp, false>>();
            }
        }
    }
    return false;
}

struct ScratchOf {
    const ibp_codebook &cb;
    uint32_t num_bytes;

    template <class Decoder> __host__ __device__ __forceinline__ bool with()
    {
        num_bytes += Decoder::scratch_bytes(cb);
        return true;
    }
};

// Returns the size in bytes of the dynamic shared memory that a warp needs to decode rows of a codebook. It is a
// multiple of 16.
template <uint32_t KINDS = kAllRows>
__host__ __device__ __forceinline__ uint32_t warp_scratch_bytes(const ibp_codebook &cb)
{
    ScratchOf scratch{cb, row_stage_bytes(cb.row_bytes)};
    use_warp_decoder<KINDS>(cb, scratch);
    return (scratch.num_bytes + 15u) / 16u * 16u;
}

// A coded row in shared memory, without the byte that holds its cluster.
struct StagedRow {
    const ibp_codebook &cb;
    uint32_t scratch, cluster, start, num_bytes;
    Window window;

    // Constructs the decoder, which fills the scratch, and decodes the row. Not inlined (warp.cuh).
    template <class Decoder> static __device__ __noinline__ bool decode(const StagedRow &row)
    {
        const Decoder decoder(row.cb, row.scratch + row_stage_bytes(row.cb.row_bytes));
        __syncwarp();
        return decoder.decode(row.cluster, true, stage_at(row.scratch, row.cb.row_bytes), 8u * row.start, row.num_bytes,
                              row.window);
    }
    template <class Decoder> __device__ __forceinline__ bool with() const { return decode<Decoder>(*this); }
};

using OneWarp = Group<kWarp, 1>;

// Copies bytes. Not inlined (warp.cuh).
static __device__ __noinline__ void copy_staged(uint8_t *dst, const uint8_t *src, uint32_t num_bytes)
{
    group_copy<OneWarp>(dst, src, num_bytes);
}

// Rebuilds the row whose coded bytes lie at the start of the scratch. Writes zeros if the row is corrupt.
template <uint32_t KINDS>
__device__ __forceinline__ ibp_status decode_staged(const ibp_codebook &cb, uint32_t num_bytes, const Window &window,
                                                    uint32_t scratch)
{
    StagedRow row{cb, scratch, 0, scratch, num_bytes, window};
    bool good = num_bytes >= 1u;
    if (good && ibp_has_clusters(&cb)) {
        row.cluster = shared_bits(8u * scratch) & 0xffu;
        row.start++, row.num_bytes--;
        good = row.cluster < cb.num_clusters;
    }
    good = good && use_warp_decoder<KINDS>(cb, row);
    __syncwarp(); // before zeros are written over the row
    if (!good) group_zero<OneWarp>(window.dst, window.high);
    __syncwarp();
    return good ? IBP_OK : IBP_CORRUPT_ROW;
}

// Decodes a row from its coded bytes. All 32 lanes of a warp must call this together, with the same arguments.
//
// cb: a codebook whose fields are valid (ibp_check_codebook on the host). Its arrays are in memory that the device can
// read.
// coded: coded_bytes bytes at any address that the device can read: in device memory, mapped pinned memory or shared
// memory. row: receives the first num_bytes bytes of the row, at any address that the device can write. num_bytes is 1
// to cb.row_bytes. If the address `row` is a multiple of 16 and num_bytes is cb.row_bytes, the row is stored in vectors
// of 16 bytes.
// scratch: the byte of the block's dynamic shared memory at which the warp's own warp_scratch_bytes(cb) bytes begin; a
// multiple of 16. Bytes are counted from the address at which `extern __shared__` arrays begin.
// @return in all lanes: IBP_OK; or IBP_CORRUPT_ROW, with zeros in row, if the bytes are not a coded row, or if KINDS
// does not include its kind. On return, the stores to row are visible to all lanes of the warp. Whatever the coded
// bytes are, the function reads and writes no memory except coded, the arrays of cb, row and the scratch.
template <uint32_t KINDS = kAllRows>
__device__ __forceinline__ ibp_status warp_decode_coded(const ibp_codebook &cb, const uint8_t *coded,
                                                        uint32_t coded_bytes, uint8_t *row, uint32_t num_bytes,
                                                        uint32_t scratch)
{
    // A coded row with more bytes than the row itself is corrupt.
    const uint32_t staged = coded_bytes <= cb.row_bytes ? coded_bytes : 0u;
    __syncwarp(); // before the scratch is overwritten
    copy_staged(shared_bytes() + scratch, coded, staged);
    __syncwarp();
    return decode_staged<KINDS>(cb, staged, {row, 0, num_bytes}, scratch);
}

// Fetches row `number` of a table and decodes it, or copies it if it is raw.
//
// table: as for ibp_cuda_gather_items; preferably a __grid_constant__ parameter of the kernel. The other parameters are
// as in warp_decode_coded.
// row: memory for table.codebook.row_bytes bytes. If the last row of the table is shorter, only its bytes are written.
// @return as warp_decode_coded does; also IBP_INDEX_OUT_OF_RANGE, with row_bytes zeros in row, if the table has no such
// row.
template <uint32_t KINDS = kAllRows>
__device__ __forceinline__ ibp_status warp_decode_row(const ibp_table &table, int64_t number, uint8_t *row,
                                                      uint32_t scratch)
{
    const uint32_t row_bytes = table.codebook.row_bytes;
    __syncwarp(); // before the scratch is overwritten
    ibp_status status = IBP_OK;
    ibp_row_place place{};
    place.valid = row_bytes;
    if (number < 0 || number >= ibp_rows_of_bytes(ibp_bytes_of_table(&table), row_bytes))
        status = IBP_INDEX_OUT_OF_RANGE;
    else if (!find_row(table, number, &place))
        status = IBP_CORRUPT_ROW;
    if (status != IBP_OK) {
        group_zero<OneWarp>(row, place.valid);
        __syncwarp();
        return status;
    }
    if (place.is_default) {
        fill_default<OneWarp>(table.codebook, row, 0, place.valid);
        __syncwarp();
        return IBP_OK;
    }
    uint8_t *const to = place.raw ? row : shared_bytes() + scratch;
    copy_staged(to, table.slots + place.slot_start, place.in_slot);
    copy_staged(to + place.in_slot, table.overflow + place.overflow_start, place.in_overflow);
    __syncwarp();
    if (place.raw) return IBP_OK;
    return decode_staged<KINDS>(table.codebook, place.in_slot + place.in_overflow, {row, 0, place.valid}, scratch);
}

} // namespace ibp

#endif
