"""Declares the torch operations of ibp: their schemas, fake implementations for tracing, and the library that
implements them.

Each operation is documented at its function in csrc/bindings/torch_*ops.cpp; only `times_matrix` is documented here.
Arguments that many operations share (table, codebook, codec, ids, fault, max_sms) are documented in
csrc/bindings/torch_tables.h. Unless an operation's documentation says otherwise:

- Tensors must be flat and contiguous. All tensors of a call must be on the CPU, or all on one CUDA device. Pass pinned
  host memory as a tensor of the CUDA device (`_machine.memory.device_view`).
- Memory that an operation writes must not be shared with another argument.
- An operation raises RuntimeError if arguments break these rules or are inconsistent. It does not check the handles in
  `table` and `cache`. It does not check addresses either: those of streamers, stagers, deltas, streams and events, and
  those in `buffers` and `addresses`.
- CPU implementations run on torch's intra-op threads if there is enough work for several threads. CUDA implementations
  run on the current stream of their tensors' device, whichever device is current; `take_matrices` also uses a stream
  that the caller gives. CUDA implementations that write to the caller's tensors do not synchronise, and do not allocate
  memory. The exceptions are `take.out` and products, which may allocate work memory from torch's allocator, and
  `list_matrices` and `take_matrices`, which allocate their results.
"""

import os
from pathlib import Path

import torch

from .. import _core
from .modes import cannot_map, cannot_record

_lib = torch.library.Library("ibp", "FRAGMENT")
_ON_THE_CPU = {"table", "cache", "host_bases", "host_slots", "host_ids"}  # Arguments that are always on the CPU.


def _define(schema, shaped=lambda *args, **options: None):
    """Declares an operation with its fake implementation, and makes it raise under tracers that cannot record it.

    torch.jit.trace is refused because its graph leaves out an operation's writes to its arguments. Operations that read
    `table` are tagged, so that inductor keeps them out of its CUDA graphs, because a replay would use the handle that
    was current at the capture.

    Args:
        schema: the operation's name, arguments and results.
        shaped: a function that returns the operation's results as tensors without data. It returns None if the
            operation only writes to its arguments."""
    name = schema[: schema.index("(")]
    _lib.define(schema, tags=(torch.Tag.cudagraph_unsafe,) if " table," in schema else ())
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.ibp, packet), overload or "default")
    called = [argument.name for argument in operation._schema.arguments]

    def refuse_trace(*args, **kwargs):
        raise cannot_record("torch.jit.trace, and exporters that use it,", name)

    def refuse_map(*args, **kwargs):
        raise cannot_map(name)

    def fake(*args, **kwargs):
        """Checks the devices as the compiled operation does, and returns results without data. Refuses torch.export,
        because a handle holds addresses, which mean nothing in the process that loads the exported program."""
        if torch.compiler.is_exporting():
            raise cannot_record("torch.export", name)
        given = dict(zip(called, args)) | kwargs
        tensors = {key: value for key, value in given.items() if isinstance(value, torch.Tensor)}
        devices = {tensor.device for key, tensor in tensors.items() if key not in _ON_THE_CPU}
        if len(devices) > 1:
            where = sorted(map(str, devices))
            raise RuntimeError(f"ibp: the tensors given to {name} must be on one device; they are on {where}")
        for key in tensors.keys() & _ON_THE_CPU:
            if tensors[key].device.type != "cpu":
                raise RuntimeError(f"ibp: {key} given to {name} must be on the CPU")
        return shaped(*args, **kwargs)

    _lib.impl(name, refuse_trace, "Tracer")
    _lib.impl(name, refuse_map, "FuncTorchBatched")
    torch.library.register_fake(f"ibp::{name}", fake, lib=_lib)


def _divide_up(amount, part):
    return -(-amount // part)


def _products(x, parts, slot_bytes, _):
    num_rows = [starts.shape[0] - 1 for starts in parts[2::4]]
    if len(num_rows) == 1:
        return x.new_empty((*x.shape[:-1], num_rows[0]))
    return x.new_empty((x.numel() // x.shape[-1] * sum(num_rows),))


def _matrices(tables, caches, ids, likes, num_matrices, num_slots, num_rows, *args):
    sizes = ids.shape, (num_slots,), (2 * num_slots * sum(num_rows),)
    stacks = [like.new_empty_strided((num_slots, *like.shape[1:]), like.stride()) for like in likes]
    return [ids.new_empty(size, dtype=torch.int64) for size in sizes] + stacks


def _learned_planes(data, *args):
    context = torch.library.get_ctx()
    entries = data.new_empty((context.new_dynamic_size(),))
    return entries, data.new_empty((context.new_dynamic_size(),), dtype=torch.int64)


_define(
    "codebook_words(Tensor mask, Tensor bitval, int chunk_bytes, bool flag_all) -> Tensor",
    lambda mask, *args: mask.new_empty((3, _divide_up(mask.numel(), 16) * 4), dtype=torch.int32),
)
_define(
    "threshold_bits(Tensor counts, int num_rows, float tau) -> (Tensor, Tensor)",
    lambda counts, *args: tuple(counts.new_empty((counts.numel() // 8,), dtype=torch.uint8) for _ in range(2)),
)
_define(
    "choose_masks(Tensor data, int row_bytes, int chunk_bytes) -> (Tensor, Tensor)",
    lambda data, row_bytes, _: tuple(data.new_empty((row_bytes,), dtype=torch.uint8) for _ in range(2)),
)
_define(
    "estimate_masks(Tensor data, int row_bytes) -> Tensor", lambda data, _: data.new_empty((1,), dtype=torch.float64)
)
_define(
    "learn_planes(Tensor data, int row_bytes, int element_bytes, int exponent_bits, int table_rows, bool fast, "
    "bool codes_invariant) -> (Tensor, Tensor)",
    _learned_planes,
)
_define(
    "learn_entries(Tensor data, Tensor codebook, int[] codec) -> Tensor",
    lambda data, codebook, _: torch.empty_like(codebook),
)
_define(
    "count_bits(Tensor data, int row_bytes) -> Tensor",
    lambda data, row_bytes: data.new_empty((8 * row_bytes,), dtype=torch.int64),
)
_define(
    "count_hits(Tensor data, Tensor codebook, int[] codec) -> Tensor",
    lambda data, _, codec: data.new_empty((_divide_up(codec[1], codec[2]),), dtype=torch.int64),
)
_define(
    "measure_rows(Tensor data, Tensor codebook, int[] codec) -> Tensor",
    lambda data, _, codec: data.new_empty((_divide_up(data.numel(), codec[1]),), dtype=torch.uint16),
)
_define(
    "index_rows(Tensor lengths, int num_bytes, int row_bytes, int slot_bytes) -> Tensor",
    lambda lengths, num_bytes, row_bytes, _: lengths.new_empty(
        (_divide_up(num_bytes, _core.ROWS_PER_BASE * row_bytes) + 1,), dtype=torch.int64
    ),
)
_define(
    "survey_rows(Tensor lengths, int num_bytes, int row_bytes) -> Tensor",
    lambda lengths, _, row_bytes: lengths.new_empty(
        (2 + _divide_up(row_bytes, _core.SECTOR_BYTES),), dtype=torch.int64
    ),
)
_define(
    "describe_table(Tensor slots, Tensor overflow, Tensor lengths, Tensor bases, Tensor codebook, int[] codec, "
    "int slot_bytes, int overflow_start, int num_items, int item_bytes, Tensor? rooms=None, Tensor? used=None, "
    "Tensor? fault=None, int[] plan=[]) -> Tensor",
    lambda *_: torch.empty(_core.TABLE_HANDLE_BYTES, dtype=torch.uint8, device="cpu"),
)
_define("encode_rows(Tensor(a!) table, Tensor data, Tensor(b!) fault) -> ()")
_define(
    "encode_into(Tensor(a!) table, Tensor x, Tensor? buffers, Tensor? row_ids, int first_row, int max_sms, "
    "Tensor(b!)? counts, Tensor(c!)? fault, bool is_new=False) -> ()"
)
_define("move_parts(Tensor table, Tensor bases, Tensor(a!) overflow) -> ()")
_define(
    "take(Tensor table, Tensor ids, Tensor like, int max_sms, int way, int from_end=0, "
    "Tensor? cache=None, bool notes=False) -> Tensor",
    lambda _, ids, like, *args: like.new_empty((ids.shape[0], *like.shape[1:])),
)
_define(
    "take.out(Tensor table, Tensor? ids, Tensor(a!) out, int max_sms, int way, Tensor? cache=None, bool notes=False) "
    "-> ()"
)
_define("take_many(Tensor[] tables, Tensor ids, Tensor positions, int[] starts, int max_sms, Tensor(a!) out) -> ()")
_define("decode_many(Tensor[] tables, int max_sms, Tensor(a!)[] outs) -> ()")
_define(
    "gather_items(Tensor table, Tensor? ids, int max_sms, Tensor(a!) out, Tensor(b!) fault, Tensor? positions=None, *, "
    "Tensor? addresses=None, int? outer_dims=None, Tensor? entries=None, Tensor[]? slabs=None) -> ()"
)
_define(
    "sum_bags(Tensor table, Tensor ids, Tensor? entries, Tensor[] slabs, Tensor? offsets, Tensor? weights, "
    "int reduction, int padding_idx, int kind, int max_sms, Tensor(a!) out, Tensor(b!) fault) -> ()"
)
_define("linear(Tensor x, Tensor[] parts, int[] slot_bytes, Tensor[] biases) -> Tensor", _products)
_define("linear.out(Tensor x, Tensor[] parts, int[] slot_bytes, Tensor[] biases, *, Tensor(a!) out) -> ()")
_define(
    "linear_groups(Tensor slots, int slot_bytes, Tensor below, Tensor starts, Tensor entries, Tensor x, Tensor groups, "
    "Tensor? order, int sharing, int num_rows, Tensor(a!) out) -> ()"
)
_define(
    "decode_matrix(Tensor slots, int slot_bytes, Tensor below, Tensor starts, Tensor entries, Tensor(a!) out) -> ()"
)
_define(
    "times_matrix(Tensor table, Tensor x, int columns, ScalarType dtype, Device worker) -> Tensor",
    lambda _, x, columns, *args: x.new_empty((x.shape[0], columns)),
)
_TRANSFER = (
    "Tensor pages, Tensor blocks, int num_pages, int num_blocks, int num_tensors, int first_tensor, Tensor starts, "
    "Tensor? block_starts, int block_stride, int scratch, int pieces"
)
_define(f"plan_pages({_TRANSFER}, Tensor? stored, Tensor(a!) ids, Tensor(b!) addresses) -> ()")
_define(
    "note_pages(Tensor ids, int ids_per_block, Tensor lengths, Tensor rooms, Tensor(a!) stored, Tensor(b!) seen) -> ()"
)
_define("decode_bytes(Tensor table, int start, int end, int max_sms, Tensor(a!) out, Tensor(b!) fault) -> ()")
_define(
    "encode_piece(Tensor data, Tensor codebook, int[] codec, int overflow_start, int max_sms, Tensor(a!) memory) -> ()"
)
_define(
    "decode_piece(Tensor coded, Tensor codebook, int[] codec, int overflow_start, int max_sms, Tensor(a!) out, "
    "Tensor(b!) fault) -> ()"
)
_define(
    "stream_bytes(Tensor table, Tensor host_bases, int start, int end, int streamer, bool begins, bool ends, "
    "int max_sms, Tensor(a!) ring, Tensor(b!) out, Tensor(c!) fault) -> ()"
)
_define(
    "stage_items(Tensor table, Tensor host_slots, Tensor host_ids, int stager, int max_sms, Tensor(a!) out, "
    "Tensor(b!) fault) -> ()"
)
_define("sum_words(Tensor part, int first_word, Tensor(a!) sum) -> ()")
_define(
    "add_rows(Tensor table, int element_bytes, bool subtracts, Tensor(a!) base, Tensor(b!) change, Tensor(c!) fault) "
    "-> ()"
)
_define(
    "measure_deltas(Tensor tensors, Tensor codebook, int[] codec, Tensor(a!) lengths, Tensor(b!) counts, "
    "Tensor(c!) sums) -> ()"
)
_define(
    "encode_deltas(Tensor tensors, Tensor codebook, int[] codec, Tensor lengths, Tensor counts, Tensor bases, "
    "bool updates_bases, Tensor(a!) overflow) -> ()"
)
_define(
    "apply_deltas(Tensor tensors, int num_rows, Tensor codebook, int[] codec, bool takes_back, Tensor(a!) state) -> ()"
)
_define(
    "partition_ids(Tensor ids, int num_items, int window_bits) -> (Tensor, Tensor)",
    lambda ids, *args: (ids.new_empty((ids.numel(),)), ids.new_empty((ids.numel(),), dtype=torch.int32)),
)
_define(
    "group_vectors(Tensor ids, int num_matrices) -> (Tensor, Tensor)",
    lambda ids, num_matrices: (
        ids.new_empty((ids.numel(),), dtype=torch.int64),
        ids.new_empty((min(ids.numel(), num_matrices) + ids.numel() // 8, 3), dtype=torch.int32),
    ),
)
_define(
    "list_matrices(Tensor ids, int num_matrices, int num_slots, int[] num_rows, Tensor(a!)? num_spare) -> Tensor",
    lambda ids, _, num_slots, num_rows, *args: ids.new_empty(
        (ids.numel() + num_slots * (1 + sum(num_rows)),), dtype=torch.int64
    ),
)
_define(
    "take_matrices(Tensor[] tables, Tensor[] caches, Tensor ids, Tensor[] likes, int num_matrices, int num_slots, "
    "int[] num_rows, Tensor(a!)? num_spare, int[] max_sms, int beside, int[] events) -> Tensor[]",
    _matrices,
)
_define(
    "select_rows(Tensor table, Tensor ids, int first, "
    "Tensor(a!) lengths_out, Tensor(b!) bases_out, Tensor(c!) rows_out, Tensor(d!) taken, Tensor(e!) fault) -> ()"
)

# A cache of rows (ibp_cache.h).
_define(
    "describe_cache(Tensor[] maps, int ways, Tensor[] slabs, Tensor counts, Tensor? stamps, Tensor? clock, "
    "int slot_bytes) -> Tensor",
    lambda *_: torch.empty(_core.CACHE_HANDLE_BYTES, dtype=torch.uint8, device="cpu"),
)
_define(
    "find_cached(Tensor ids, int rows_per_item, int row_bytes, Tensor lengths, Tensor[] maps, int ways, "
    "Tensor(a!) entries, Tensor(b!)? counts) -> ()"
)
_define(
    "owners_of_rows(Tensor rows, int num_slabs) -> Tensor",
    lambda rows, _: rows.new_empty((rows.numel(),), dtype=torch.uint8),
)
_define(
    "fill_slab(Tensor table, Tensor rows, Tensor offsets, int slab, int ways, Tensor(a!) bytes, Tensor(b!) map, "
    "Tensor(c!) fault) -> ()"
)
_define(
    "claim_cached(Tensor table, Tensor ids, int ways, int cache_slot_bytes, Tensor(a!) bytes, Tensor(b!) map, "
    "Tensor(c!) stamps, Tensor(d!) clock, Tensor(e!) entries, Tensor(f!)? counts, Tensor(g!) fault) -> ()"
)
_define("drop_cached(Tensor rows, int ways, Tensor(a!) map) -> ()")
_define("set_cached(Tensor rows, Tensor lengths, int ways, bool dirty, Tensor(a!) map) -> ()")


def _times_matrix(table, x, columns, dtype, worker):
    """Returns x [vectors, rows] times the matrix [rows, columns] in `table`. The result has the dtype and device of x.

    Faults are not reported, because this operation computes gradients of a product whose forward pass has already read
    the same rows.

    Args:
        dtype: the dtype of the matrix.
        worker: the device on which the matrix is decoded for the duration of the call.
    """
    matrix = torch.empty((x.shape[1], columns), dtype=dtype, device=worker)
    fault = torch.zeros(4, dtype=torch.int64, device=worker)
    torch.ops.ibp.decode_bytes.default(table, 0, matrix.nbytes, 0, matrix, fault)
    return x @ matrix.to(x.device, x.dtype)


_lib.impl("times_matrix", _times_matrix, "CompositeExplicitAutograd")

torch.ops.load_library(str(Path(__file__).parent.parent / "_lib" / "libibp_torch.so"))

# A forked child has none of its parent's other threads. torch replaces its thread pool when the child first uses the
# pool, which fails if several threads do so at once ("Invalid thread pool!"). This makes the child use the pool right
# after the fork, while it has only one thread.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def cuda_is_available() -> bool:
    return _core.cuda_is_built() and torch.cuda.is_available()
