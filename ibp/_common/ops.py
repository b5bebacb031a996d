"""The torch operations of ibp: schemas, the compiled implementations, and fake ones for tracing.

The tensors are flat and contiguous, and all of a call are on the CPU or on one CUDA device; what is written shares no
memory with anything else. Arguments that break these rules or contradict each other raise RuntimeError, whatever they
are. Only the bytes of `table`, addresses of streamers and buffers, and `addresses` are trusted.

    table                         uint8 on the CPU: the handle of a table on the device of the other tensors, as
                                  `_rows.handle` makes it by `describe_table`. It owns what it reads. An operation that
                                  codes rows writes to it, as torch.compile sees it: its order among others counts
    slots, overflow, data, ring   uint8 [bytes]
    out                           any dtype and shape: the memory is written to
    lengths                       uint16 [rows]; empty: every row is raw
    bases                         int64 [ceil(rows / 32)], or [rows] where every row has its own; empty: no row has an
                                  overflow part (FORMAT.md section 2)
    counts, hits                  int64, one a bit or chunk of a row
    codebook                      scheme raw: not read; ibp: int32 [3, words] as codebook_words makes it; planes: uint8
                                  symbols. Those of several clusters stand one after the other, in scheme ibp each
                                  followed by [num_flags, 0, 0, 0]. Before the symbols, where num_constant is not 0:
                                  the row template and the live columns, as uint16, each padded to a multiple of 16.
    codec                         scheme raw: [0, row_bytes]; ibp: [1, row_bytes, chunk_bytes, num_flags]; planes:
                                  [2, row_bytes, element_bytes, rotate, residual_bits, per_column, listed, default,
                                  closed, invariant_bits, invariant_value, consecutive, first_symbol, signed_default,
                                  num_constant, digit_bits ...]
    rooms, used, counts           uint16 [rows] or empty, int64 [1], int64 [2]: of struct ibp_place in ibp.h, whose
                                  bases are int64 [rows], or empty where slots hold whole rows. A table without `used`
                                  is no place: `encode_into` refuses it
    x                             any dtype, shape and strides: its elements in their order are rows
    buffers                       int64 [buffers]: addresses of memory of the layout of x, coded instead of x
    row_ids                       int64 [rows of x or of all buffers]: which rows of the table they become
    fault                         int64 [4], the struct ibp_fault of ibp.h
    part, sum                     any dtype, int64 [1 or more]: `sum_words` adds to sum[0] what the words of a part add
                                  to a fingerprint (FORMAT.md section 10), the first of them being first_word
    entries                       int64 [rows]: of a cache of rows, 0 or where the row is (ibp.h)
    bytes, slabs                  uint8 [bytes]: rows as stored, in memory near a GPU
    map, maps                     int64 [sets * ways * 2], aligned to 16 bytes: of each way a row's number (-1: empty,
                                  -2: removed) and its entry, 0 where it is empty; ways 2, 4, 8, 16 or 32
    stamps, clock                 int32 [sets * 33], int64 [2]: of struct ibp_lru, zeros at first
    ids                           int32 or int64 [ids]
    positions                     int32 [ids]: which item of out each goes to; None: one after the other

CPU implementations run on torch's intra-op threads where there is work for several; CUDA ones on the current stream of
the tensors' device, without allocating or synchronising where they write to given tensors, and whatever device is
current. `stream_bytes` is decode_bytes from pinned host memory by the copy engine, through `ring` on the device;
`host_bases` is `bases` on the CPU and `streamer` the address of a living `_core.Streamer` of that device. Pinned host
memory is given as a tensor of the CUDA device (`_memory.device_view`). `encode_packed`, for the CPU alone, codes a
block of rows in one pass and on one thread, back to back to `out`, which has as many bytes as data or more; lengths
uint16 [rows], `stored` int64 [1]: how many bytes it wrote. `encode_piece` codes data into `memory`, uint8, aligned to 8
bytes, whatever it holds: int64 [8] of counters (used, counts, fault); bases; lengths; from overflow_start on overflow,
whose used bytes are all that `decode_piece` needs in `coded`. `gather_items` takes all items where ids is None. With
outer_dims, out has any strides and its first outer_dims dimensions number its items; with addresses, int64
[ids], item k goes to addresses[k], and out is the first of the tensors that they are in; with entries, rows that have
one come from slabs. `plan_pages` and `note_pages` are ibp_plan_pages and ibp_note_pages of ibp.h: pages and blocks
int64 [pages], starts and block_starts int64 addresses, stored and seen uint8 flags, ids int64, addresses int64.
`stage_items` is gather_items of `host_ids`, whose threads gather `host_slots`, the slots as it sees them; `stager` is
the address of a living `_core.Stager` of that device.

`sum_bags`, for CUDA alone, sums bags of rows as struct ibp_bags of ibp_cuda.h says: one for each row of out. Bag b
begins with ids[offsets[b]], offsets being int32 or int64 [bags], or longer, which is not read; without offsets all bags
have as many ids. Rows that have `entries` come from `slabs`, as in gather_items. `reduction` and `kind` are numbers of
ibp_bag_mode and ibp_float_kind, `weights` is of that kind, and padding_idx -1 is none.

`linear`, for CUDA alone, is ibp_cuda_linear of ibp_cuda.h, by up to four tables. Of each table, below has two bytes
more than there are exponents before digit 0's, and starts and entries, its escapes, are int32 [rows + 1] and
[escapes, 2]. x is bfloat16 [vectors, columns], as are weights, biases and out. biases is empty or has a tensor [rows]
for each table, and an empty tensor adds nothing. out has the results [vectors, rows] one after the other.

`linear_groups` is ibp_cuda_linear_groups: groups of vectors, each multiplied by one matrix of num_rows rows of those
that a table stacks. groups is int32 [groups, 3]: number of the matrix, first vector, how many vectors. Vector v is
order[v], int64 [vectors], if that is there, and `sharing` vectors after each other have a row of x. `group_vectors`,
for the CPU too, is ibp_group_vectors: from the matrix of each vector, integers [vectors], to (the vectors' numbers in
the order of their matrices, int64 [vectors]; such groups of them). `list_matrices` is ibp_list_matrices: num_rows is
of each stack, num_spare int64 [1]; slots [ids], held [num_slots] and rows come one after the other.

`decode_matrix`, for CUDA alone, is ibp_cuda_decode_matrix: the weights [rows, columns] of such a table.

`times_matrix` is x [vectors, rows] times the matrix [rows, columns] of dtype that a table on `worker` holds, in x's
dtype and on its device. It decodes the matrix for the time of the call. It notes no faults: it gives gradients of
products whose forward pass has read the same rows.

`add_rows`, on the CPU, adds a table of differences to `base`, the memory of its tensor, as ibp_add_rows of ibp.h does;
change is int64 [1], added to. `measure_deltas`, `encode_deltas` and `apply_deltas`, for CUDA alone, are
ibp_cuda_measure_deltas and so on of ibp_cuda.h: tensors is int64 [n, 10], the structs ibp_delta_tensor, whose addresses
are trusted; lengths, counts and bases are of the sequence of all tensors' rows; sums is int64 [2 n], state int64
[1 + 3 n], both zeros at first.

A cache of rows is for tables whose items are whole rows. `find_cached` turns ids into the entries of their rows, row r
of ids[k] at k * rows_per_item + r, from the maps of up to 8 slabs, as `gather_items` takes them. Maps and slabs may be
on other devices than the rest, that can be read from it. `counts`, int64 [10], is added to: hits of slabs 0 to 7,
misses, and bytes of missed rows in whole sectors of 32. `owners_of_rows` says, as uint8, which slab's map is to hold a
row. `fill_slab` copies `rows`, int64, to `offsets`, int64, of a slab and puts them into its map, if that is not empty;
negative ones are left out. `claim_cached` is find_cached of a cache in which missing rows replace the rows used longest
ago, in slots of cache_slot_bytes, one a way; ways is 32. `drop_cached` takes rows out of a map; `set_cached` says that
rows of it were written anew: with `lengths`, uint16 [rows], or, where there are none, the lengths that they had, and
`dirty`, whether the table's own rows are older.
"""

import os
from pathlib import Path

import torch

from .. import _core
from .graphs import cannot_map, cannot_record

_lib = torch.library.Library("ibp", "FRAGMENT")
_ON_THE_CPU = {"table", "cache", "host_bases", "host_slots", "host_ids"}  # tensors that always are


def _define(schema, shaped=lambda *args, **options: None):
    """Declares an operation. It writes to memory that it is given, which a graph of torch.jit.trace would leave out.
    inductor leaves operations that read a handle out of its CUDA graphs, which would go on using the same one.

    shaped: makes what it returns of tensors without data. Of an operation that only writes: nothing."""
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
        """All tensors are on one device, as the real one requires. An exported program would hold the address in a
        handle, which another process cannot read."""
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
_define("encode_slots(Tensor(a!) table, Tensor data) -> ()")
_define("move_parts(Tensor table, Tensor bases, Tensor(a!) overflow) -> ()")
_define(
    "encode_packed(Tensor data, Tensor codebook, int[] codec, Tensor(a!) out, Tensor(b!) lengths, Tensor(c!) stored) "
    "-> ()"
)
_define(
    "encode_into(Tensor(a!) table, Tensor x, Tensor? buffers, Tensor? row_ids, int first_row, int max_sms, "
    "Tensor(b!) counts, Tensor(c!) fault) -> ()"
)
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
    "select_rows(Tensor table, Tensor ids, int first, "
    "Tensor(a!) lengths_out, Tensor(b!) bases_out, Tensor(c!) rows_out, Tensor(d!) taken, Tensor(e!) fault) -> ()"
)

# A cache of rows (ibp.h).
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
    matrix = torch.empty((x.shape[1], columns), dtype=dtype, device=worker)
    fault = torch.zeros(4, dtype=torch.int64, device=worker)
    torch.ops.ibp.decode_bytes.default(table, 0, matrix.nbytes, 0, matrix, fault)
    return x @ matrix.to(x.device, x.dtype)


_lib.impl("times_matrix", _times_matrix, "CompositeExplicitAutograd")

torch.ops.load_library(str(Path(__file__).parent.parent / "_lib" / "libibp_torch.so"))

# A forked child has none of its parent's threads. torch replaces its pool of them at the first use, which fails where
# several threads come first ("Invalid thread pool!"): the child does it before it has others.
os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


def cuda_is_available() -> bool:
    return _core.cuda_is_built() and torch.cuda.is_available()
