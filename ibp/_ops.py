"""The torch operations of ibp: schemas, the compiled implementations, and fake ones for tracing.

All of them work on flat tensors: `data`, `slots`, `overflow` are uint8 bytes, `out` the memory of a contiguous tensor of any dtype, `lengths` uint16,
`bases`, `counts`, `hits` int64, `codebook` int32 [3, words] as `codebook_words` makes it, `fault` int64 [4] (the struct ibp_fault of ibp.h), and `codec` is
[scheme, row_bytes] and, in scheme ibp (1), [chunk_bytes, num_flags]. Empty `lengths` or `bases` stand for none (FORMAT.md section 2). `positions`, int32
[ids], says where in out each item goes. CPU implementations run on torch's intra-op threads; CUDA ones on the current stream of the
tensors' device, without allocating or synchronising where they write to given tensors. `stream_bytes` is decode_bytes from pinned host
memory by the copy engine, through `ring`, uint8 on the device; `host_bases` is `bases` on the CPU and `streamer` the address of a `_core.Streamer`.
"""

from pathlib import Path

import torch

from . import _core

_lib = torch.library.Library("ibp", "FRAGMENT")

# How a table is described to an operation; see struct ibp_table in ibp.h.
_TABLE = (
    "Tensor{0} slots, Tensor{1} overflow, Tensor lengths, Tensor bases, Tensor codebook, int[] codec, "
    "int slot_bytes, int overflow_start, int num_items, int item_bytes"
)
_READ = _TABLE.format("", "")
_WRITE = _TABLE.format("(a!)", "(b!)")

_lib.define("codebook_words(Tensor mask, Tensor bitval, int chunk_bytes, bool flag_all) -> Tensor")
_lib.define("threshold_bits(Tensor counts, int num_rows, float tau) -> (Tensor, Tensor)")
_lib.define("choose_masks(Tensor data, int row_bytes, int chunk_bytes) -> (Tensor, Tensor)")
_lib.define("count_bits(Tensor data, int row_bytes) -> Tensor")
_lib.define("count_hits(Tensor data, Tensor codebook, int[] codec) -> Tensor")
_lib.define("measure_rows(Tensor data, Tensor codebook, int[] codec) -> Tensor")
_lib.define("index_rows(Tensor lengths, int num_bytes, int row_bytes, int slot_bytes) -> Tensor")
_lib.define("survey_rows(Tensor lengths, int num_bytes, int row_bytes) -> Tensor")
_lib.define(f"encode_rows({_WRITE}, Tensor data, Tensor(c!) fault) -> ()")
_lib.define(f"gather_items({_READ}, Tensor ids, int max_sms, Tensor(a!) out, Tensor(b!) fault, Tensor? positions=None) -> ()")
_lib.define(f"decode_bytes({_READ}, int start, int end, int max_sms, Tensor(a!) out, Tensor(b!) fault) -> ()")
_lib.define(f"stream_bytes({_READ}, Tensor host_bases, int start, int end, int streamer, bool begins, bool ends, int max_sms, "
            "Tensor(a!) ring, Tensor(b!) out, Tensor(c!) fault) -> ()")
_lib.define("partition_ids(Tensor ids, int num_items, int window_bits) -> (Tensor, Tensor)")
_lib.define(
    f"select_rows({_READ}, Tensor ids, int first, "
    "Tensor(a!) lengths_out, Tensor(b!) bases_out, Tensor(c!) rows_out, Tensor(d!) taken, Tensor(e!) fault) -> ()"
)
_lib.define("map_pinned(Tensor host, int device_index) -> Tensor")

torch.ops.load_library(str(Path(__file__).parent / "_lib" / "libibp_torch.so"))


def _words(row_bytes):
    return (row_bytes + 15) // 16 * 4


@torch.library.register_fake("ibp::codebook_words", lib=_lib)
def _(mask, bitval, chunk_bytes, flag_all):
    return mask.new_empty((3, _words(mask.numel())), dtype=torch.int32)


@torch.library.register_fake("ibp::threshold_bits", lib=_lib)
def _(counts, num_rows, tau):
    return tuple(counts.new_empty((counts.numel() // 8,), dtype=torch.uint8) for _ in range(2))


@torch.library.register_fake("ibp::choose_masks", lib=_lib)
def _(data, row_bytes, chunk_bytes):
    return tuple(data.new_empty((row_bytes,), dtype=torch.uint8) for _ in range(2))


@torch.library.register_fake("ibp::count_bits", lib=_lib)
def _(data, row_bytes):
    return data.new_empty((8 * row_bytes,), dtype=torch.int64)


@torch.library.register_fake("ibp::count_hits", lib=_lib)
def _(data, codebook, codec):
    return data.new_empty((-(-codec[1] // codec[2]),), dtype=torch.int64)


@torch.library.register_fake("ibp::measure_rows", lib=_lib)
def _(data, codebook, codec):
    return data.new_empty((-(-data.numel() // codec[1]),), dtype=torch.uint16)


@torch.library.register_fake("ibp::index_rows", lib=_lib)
def _(lengths, num_bytes, row_bytes, slot_bytes):
    return lengths.new_empty((-(-num_bytes // (32 * row_bytes)) + 1,), dtype=torch.int64)


@torch.library.register_fake("ibp::survey_rows", lib=_lib)
def _(lengths, num_bytes, row_bytes):
    return lengths.new_empty((2 + -(-row_bytes // 32),), dtype=torch.int64)


@torch.library.register_fake("ibp::partition_ids", lib=_lib)
def _(ids, num_items, window_bits):
    return ids.new_empty(ids.shape), ids.new_empty(ids.shape, dtype=torch.int32)


@torch.library.register_fake("ibp::map_pinned", lib=_lib)
def _(host, device_index):
    return host.new_empty(host.shape, device=torch.device("cuda", device_index))


def _writes_only(*args, **options):
    return None


for _name in ("encode_rows", "gather_items", "decode_bytes", "stream_bytes", "select_rows"):
    torch.library.register_fake(f"ibp::{_name}", _writes_only, lib=_lib)


def cuda_is_available() -> bool:
    return _core.cuda_is_built() and torch.cuda.is_available()
