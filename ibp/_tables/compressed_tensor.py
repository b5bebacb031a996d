"""Defines `CompressedTensor`, a table of coded rows with the methods of a tensor.

Most methods call functions of `_fetch`, `changes.py` and `coding.py`. The last part of the file implements some
functions of torch for tables. If an argument of a function is a table, torch calls the table's method
`__torch_function__`, which calls one of them.
"""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import torch.nn.functional as F

from .._common.manners import CodedManners, Movable, shown_memory
from .._fetch import gather, linear, streaming
from .._fetch.bags import embedding_bag
from .._machine import memory
from .._machine.segments import Segment, SharedHandle, shared
from .._machine.staging import to_device
from .._rows.codebook import AnyCodebook
from .._rows.geometry import check_tensor, given_tensor
from .._rows.learning import Options, Request
from .._rows.table import (
    TENSORS,
    Table,
    check_can_change,
    copied_overflow,
    handle_on,
    lie_with,
    move,
    spills,
    tensors_of,
)
from . import changes, coding

# Size in bytes of the blocks that iteration decodes. A block has many rows, but takes little memory.
_ITERATED_BYTES = 4 << 20


class CompressedTensor(Movable, CodedManners, Table):
    """A tensor [N, ...] that is stored as coded rows, each of which can be decoded alone. Tables are made by
    `ibp.compress` and by unpickling; the constructor is internal.

    A table supports much of the interface of a tensor (`shape`, `size()`, `to()`, `table[key]`, iteration,
    `torch.index_select`, `F.embedding`, `F.embedding_bag`, `F.linear`) and decodes the rows that are needed. A table is
    not a torch.Tensor, does not support arithmetic and has no gradient. `==` and `hash` compare identity, not contents.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x, device="cpu", memory="host")
        >>> table.shape, table.scheme, f"{table.savings:.0%}"
        (torch.Size([1000, 1024]), 'planes', '34%')
        >>> torch.equal(table[[3, 1, 3]], x[[3, 1, 3]])
        True

    Attributes (none can be set):
        shape, dtype: shape and dtype of the original tensor.
        device: the device that the coded rows are on.
        nbytes: size in bytes of all memory that the table takes.
        stored_bytes: size in bytes of the coded rows and the codebook, from which `savings` is computed. `nbytes` is
            larger, because it also counts the index, unused bytes in slots, and unused parts of the overflow.
        scheme: "ibp" or "planes"; or "raw" if compression would have saved nothing.
        codebook: the `ibp.codecs.Codebook`, `ibp.codecs.PlanesCodebook` or `ibp.codecs.ClusteredCodebook`; None for
            scheme "raw".
        row_bytes: size in bytes of a row. By default a row is an item x[i]. If items are longer than 64 KiB, or x has
            fewer than two dimensions, a row is at most 4,096 bytes of the flattened tensor.
        num_rows: number of rows.
        slot_bytes: size in bytes of a row's slot; 0 in the packed layout (FORMAT.md section 3).
        slots, overflow, lengths, bases: the table's tensors (FORMAT.md sections 2 and 3). They must not be changed.
        version: the number of in-place changes so far. A copy of the table's rows is out of date if `version` has grown
            since the copy was made.

    Pickling and `torch.save` keep everything except the pinning of memory: call `pin_memory` after loading. Import ibp
    before loading.
    """

    _is = "a compressed table"
    _instead = (
        "call ibp.decompress(table) for the tensor, table[ids] for some items, or table.update_(ids, rows) to change "
        "rows"
    )

    # ---- the interface of a tensor ----

    def requires_grad_(self, requires_grad: bool = True) -> CompressedTensor:
        if requires_grad:
            raise RuntimeError("a compressed table cannot require grad: its values are fixed")
        return self

    def detach(self) -> CompressedTensor:
        """Returns the table itself."""
        return self

    def __repr__(self) -> str:
        where = str(self.device) if self.device.type == "cuda" else "pinned" if self._is_pinned else "pageable"
        where += f", overflow in {self._far_memory}" if spills(self) else ""
        slots = f", slot_bytes={self.slot_bytes}" if self.slot_bytes else ""
        return (
            f"ibp.CompressedTensor(shape={list(self.shape)}, dtype={self.dtype}, scheme={self.scheme!r}, "
            f"layout={self.layout!r}{slots}, {shown_memory(self.nbytes, self.original_bytes)}, "
            f"stored_bytes={self.stored_bytes:,}, savings={self.savings:.1%}, {where})"
        )

    @property
    def _far_memory(self) -> str:
        """Words for the memory of the overflow of a table that spills, for messages."""
        return "host memory" if self.spills_to_host else f"the memory of {self.overflow_memory}"

    # ---- moving and copying ----

    def pin_memory(self, *, numa: memory.Numa = None) -> CompressedTensor:
        super().pin_memory(numa=numa)
        return self

    pin_memory.__doc__ = Table.pin_memory.__doc__

    def to(
        self,
        device: torch.device | str | int | torch.dtype | torch.Tensor | Table | None = None,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
    ) -> CompressedTensor:
        """Returns the table on a device: the table itself if it is already there, and otherwise a copy of its coded
        bytes, which is not pinned. If a table spills to host memory (`ibp.spill.place`), its overflow stays in host
        memory. If it spills to the memory of another GPU, the result does not: its overflow is on the device, too.

        Args:
            device: the device of the result; or a tensor or a table, which stands for its device and dtype. None: the
                table's own device.
            dtype: None or the table's own dtype, because coded rows cannot be converted.
            non_blocking: whether the call returns without waiting for copies from pinned memory to a GPU.
            copy: whether to make a copy even if the table is already on the device.

        Raises:
            TypeError: dtype is not the table's own.
        """
        if isinstance(device, (torch.Tensor, Table)):
            dtype, device = device.dtype, device.device
        elif isinstance(device, torch.dtype):
            dtype, device = device, None
        if dtype is not None and dtype != self.dtype:
            raise TypeError(
                f"dtype is {dtype}, but a table keeps its own, {self.dtype}: decompress it (of a model, by "
                "ibp.nn.decompress(model)), convert, and compress again"
            )
        target = self.device if device is None else memory.canonical(device)
        if target == self.device:
            return self.clone() if copy else self
        if non_blocking and self._is_pinned:
            return with_tensors(self, lambda tensor: tensor.to(target, non_blocking=True))
        if self.spills_to_host:
            return with_tensors(self, lambda tensor: tensor.to(target), change_overflow=torch.clone)
        if spills(self):  # Without copy=True, the result on the GPU of the overflow would have the same overflow.
            return with_tensors(self, lambda tensor: tensor.to(target, copy=True))
        return with_tensors(self, lambda tensor: to_device(tensor, target))

    def half(self) -> CompressedTensor:
        return self.to(torch.float16)

    def bfloat16(self) -> CompressedTensor:
        return self.to(torch.bfloat16)

    def float(self) -> CompressedTensor:
        return self.to(torch.float32)

    def double(self) -> CompressedTensor:
        return self.to(torch.float64)

    def clone(self) -> CompressedTensor:
        """Returns a copy of the table on the same device. The copy is not pinned, and it shares the codebook. If the
        overflow is on another GPU, so is that of the copy."""
        kept = functools.partial(copied_overflow, self) if spills(self) else None
        return with_tensors(self, torch.clone, change_overflow=kept)

    def share_memory_(self, *, numa: memory.Numa = None) -> CompressedTensor:
        """Moves a table from host memory to shared memory, which other processes can map: child processes that are
        forked, and processes that open the handle of `share`. Returns self. Nothing happens if the table is on a GPU or
        is already shared.

        All processes read the same copy of the bytes. The memory is freed when the last table that uses it is freed. If
        the table was pinned, each process pins the shared memory for itself.

        Args:
            numa: the NUMA node whose memory is preferred, or a device, which stands for the node nearest to it. None:
                the node of the calling thread.

        Raises:
            RuntimeError: `compress(inplace=True)` made the table in a tensor's own memory, or the slots are on a GPU
                and the overflow is elsewhere.
            TypeError, ValueError: numa is neither a node nor a device of this machine.
        """
        node = memory.node_of(numa)
        if self.is_shared():
            return self
        if self._owner is not None:
            raise RuntimeError(
                "a table in the memory of a tensor that was compressed in place cannot be shared: clone() it first"
            )
        if spills(self):
            raise RuntimeError(
                f"a table whose overflow is in {self._far_memory} and whose slots are on a GPU cannot be shared: share "
                "its cpu(), or send it by pickle"
            )
        segment, copies = Segment.of(tensors_of(self), node)
        segment.pin = self._is_pinned
        move(self, copies, segment)
        return self

    def is_shared(self) -> bool:
        """Returns whether the rows are in memory that other processes can map."""
        return (self.is_cuda and not spills(self)) or isinstance(self._segment, Segment)

    def share(self) -> SharedHandle:
        """Moves the table to shared memory (see `share_memory_`) and returns a handle. Other processes pass the handle
        to `ibp.distributed.open_shared` to open the table without a copy.

        `multiprocessing` also sends tables in this way, when they are put in its queues or passed as arguments to its
        processes.

        The handle is plain data and can be sent by any means, such as `torch.distributed.broadcast_object_list`, a
        store or a socket. Any number of processes may open the handle, as long as the process that called `share` lives
        and holds the table. For a table on a GPU, however, the handle contains CUDA's own handles, which torch makes.
        Only one process may open such a handle, and the process that called `share` keeps the memory alive until the
        handle is opened.

        Raises:
            RuntimeError: as for `share_memory_`.
        """
        self.share_memory_()
        state = self.__getstate__()
        tensors = {name: state.pop(name) for name in TENSORS}
        return shared(state, tensors, self._segment if isinstance(self._segment, Segment) else None)

    def __copy__(self) -> CompressedTensor:
        return with_tensors(self, lambda tensor: tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedTensor:
        memo[id(self)] = copied = self.clone()
        return copied

    # ---- rows that change ----

    def update_(self, ids: gather.Ids, rows: torch.Tensor) -> CompressedTensor:
        """Sets x[ids] = rows: encodes the new rows with the table's codebook and replaces the items of these ids.
        Returns self.

        Other rows are neither read nor moved. The codebook stays the same, so new rows save less, or are stored raw, if
        they differ from the rows that it was learned from (`refit` learns a new codebook). A row that no longer fits in
        its slot and its part of the overflow gets a new part. The overflow grows as needed, so an update does not fail
        for lack of room. `refit` frees the parts that rows no longer use.

        The first change copies the index, which then takes at most 12 bytes per row. A packed table stays packed; its
        changed rows move to another place in the overflow. The time of later changes depends only on the number of rows
        that change. If several items share a row, the whole row is decoded and encoded again.

        If the table is on a GPU, this GPU encodes the rows on its current stream, in order with reads on that stream.
        Before another stream reads, that stream must wait for an event of the current stream. Before the next change,
        the current stream must wait for an event of every other stream that has read. If the table is pinned, the GPU
        that holds the new rows or the ids encodes the rows. If neither the rows nor the ids are on a GPU, a GPU that
        has used the table encodes the rows, or the CPU if there is no such GPU. Reads by the CPU wait for the GPU that
        encodes. If the ids are on a GPU, the call waits for this GPU. CUDA graphs that read the table have to be
        captured again after the overflow has grown, and after `append` and `refit`.

        If the call is interrupted or refused, the table holds either all old rows or all new ones.

        Args:
            ids: the items to change, int32 or int64 [K]. If an id occurs more than once, its last occurrence counts.
            rows: [K, ...] tensor of the table's dtype, on any device.

        Raises:
            IndexError: an id is out of range; nothing has changed.
            TypeError, ValueError: ids or rows do not fit the table.
            RuntimeError: the table is shared with other processes.
        """
        changes.put_items(self, *changes.changed_items(self, ids, rows))
        return self

    def append(self, rows: torch.Tensor) -> CompressedTensor:
        """Adds items at the end of dimension 0, encoded with the table's codebook. Returns self.

        When the memory is full, it grows by half, so that many calls together copy each row only a few times. In all
        other respects `append` behaves as `update_` does.

        Args:
            rows: [K, ...] tensor of the table's dtype, on any device.

        Raises:
            TypeError, ValueError: rows does not fit the table, or the table has no dimension.
            RuntimeError: the table is shared with other processes.
        """
        changes.append(self, rows)
        return self

    def refit(
        self,
        *,
        scheme: str = "auto",
        codebook: AnyCodebook | None = None,
        sample: builtins.float | None = None,
        clusters: int | str | None = None,
        level: str | None = None,
        slot_bytes: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> CompressedTensor:
        """Compresses the table's present rows again: learns a codebook that fits them, and frees unused memory. Returns
        self.

        The call needs additional memory for the whole decoded tensor. Rows keep their size, and the layout ("slots" or
        "packed") stays. If a table spills to host memory (`ibp.spill.place`), it also keeps the size of its slots,
        unless slot_bytes is given. If the call is interrupted, the table is unchanged.

        Args:
            level: as in `ibp.compress`. None: the level of the table's present codebook; or "default" if the table has
                no codebook, if scheme is neither "auto" nor "planes", or if codebook or clusters is given.
            scheme, codebook, sample, clusters, slot_bytes, device: as in `ibp.compress`.

        Raises:
            TypeError, ValueError: as for `ibp.compress`.
            RuntimeError: the table is shared with other processes.
        """
        check_can_change(self)
        options = Options(
            scheme, codebook=codebook, sample=sample, clusters=clusters, slot_bytes=slot_bytes, device=device
        )
        self._become(coding.code_anew(self, options, level))
        return self

    # ---- reading ----

    def index_select(
        self,
        ids: gather.Ids,
        *others: NoReturn,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
        path: str | None = None,
    ) -> torch.Tensor:
        """See `ibp.index_select`."""
        if others:
            return gather.index_select(self, ids, *others)
        return gather.select(self, ids, device, out, check, max_sms, path)

    def decompress(
        self,
        *,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
        path: str | None = None,
    ) -> torch.Tensor:
        """See `ibp.decompress`."""
        return streaming.decompress(self, device=device, out=out, check=check, max_sms=max_sms, path=path)

    def decompress_items(
        self,
        first: int,
        last: int,
        *,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        check: bool = False,
        max_sms: int | None = None,
        path: str | None = None,
    ) -> torch.Tensor:
        """Decodes the items x[first:last] and returns them, as `ibp.decompress` does for all of x. If `out` is given,
        the items are decoded directly into it.

        Example:
            >>> x = torch.randn(1000, 1024).bfloat16()
            >>> rows = torch.empty(100, 1024).bfloat16()
            >>> _ = ibp.compress(x).decompress_items(200, 300, out=rows)
            >>> torch.equal(rows, x[200:300])
            True

        Args:
            first, last: the index of the first item, and the index after the last item. A table without dimensions has
                one item.
            device, out, check, max_sms, path: as in `ibp.decompress`. out has the shape of x[first:last].

        Raises:
            IndexError: the table does not have these items.

        It also raises what `ibp.decompress` raises.
        """
        if not 0 <= first <= last <= self.geometry.num_items:
            raise IndexError(f"items {first} to {last} are asked of {self.geometry.num_items}; wanted some of them")
        return streaming.decode_items(self, first, last, device, out, check, max_sms, path)

    def prefetch(
        self,
        ids: gather.Ids | None = None,
        *,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
        max_sms: int | None = None,
        path: str | None = None,
    ) -> gather.Prefetch:
        """Starts copying items, or the whole tensor, to a GPU on another stream, while the current stream continues.

        The prefetch begins after the work that is queued on the current stream at the time of the call, so this work
        may still write `ids` and use `out`. If the result goes to the CPU, the call returns when the prefetch is
        complete.

        Args:
            ids: as in `index_select`. None: the whole tensor, as `decompress` returns it.
            device, out, max_sms, path: as in `index_select` and `decompress`.
            stream: a stream of the device that the result goes to. None: a stream that all prefetches to the device
                share, so that they run one after the other.

        Returns:
            An `ibp.Prefetch`. Its `wait()` returns the result; its `close()` releases the result.

        Raises:
            ValueError: stream belongs to another device.

        It also raises what `index_select` and `decompress` raise.
        """
        return gather.prefetch(self, ids, device=device, out=out, stream=stream, max_sms=max_sms, path=path)

    def prepare_linear(self) -> CompressedTensor:
        """Prepares the table for `ibp.linear` on the table's device. Returns self.

        On a GPU, the call decodes the table once, block by block, makes a list of the escapes (the weights that the
        coded digits do not represent), and waits until the list is complete. If `prepare_linear` was not called, the
        first call of `ibp.linear` prepares the table, unless that call is compiled or captured in a CUDA graph.
        `nbytes` includes the list. Call `prepare_linear` again after rows have changed. Modules of `ibp.nn` call
        `prepare_linear` whenever they are given a table.

        Example:
            >>> table = ibp.compress(torch.randn(512, 1024).bfloat16(), level="fast").prepare_linear()
            >>> multiply = torch.compile(lambda x: ibp.linear(x, table), fullgraph=True, backend="aot_eager")
            >>> multiply(torch.ones(2, 1024).bfloat16()).shape
            torch.Size([2, 512])

        Raises:
            CorruptTableError: the table's bytes are inconsistent.
        """
        handle_on(self, self.device)
        if self.is_cuda:
            linear.escapes_of(self)
        return self

    @property
    def fits_linear(self) -> bool:
        """Whether the kernel of `ibp.linear` can multiply by the coded rows directly once they are in the memory of a
        GPU. This holds for a BF16 matrix that was coded at level "fast" with large enough slots."""
        return linear.takes(self)

    def __getitem__(self, key: Any) -> torch.Tensor:
        """Returns x[key]. Only the rows that the key needs are decoded.

        A key may be an int, a slice, `...`, None, an index tensor, array or list, a bool mask, or a tuple of these.
        uint8 tensors are refused, because torch takes them for masks. The result is on the table's device, or on the
        device of the index tensor that selects rows.

        Raises:
            IndexError: an index is out of range, a mask does not have the table's shape, or there are too many indices.
            TypeError: the key has an unsupported type.
            ValueError: a slice has a step below 1.
        """
        return gather.get_item(self, key)

    def __getitems__(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Returns a list of the items of the given ids, decoded in one call. torch's DataLoader calls this method for
        the items of a batch.

        Raises:
            IndexError: an id is out of range.
            TypeError: an id is not an integer.
        """
        return list(self[torch.as_tensor(ids, device="cpu")])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Returns an iterator over the items x[0], x[1] and so on, on the table's device. They are decoded in blocks of
        about 4 MiB."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return self._items()

    def _items(self) -> Iterator[torch.Tensor]:
        step = max(1, _ITERATED_BYTES // max(1, self.geometry.item_bytes))
        for first in range(0, len(self), step):
            yield from streaming.decode_items(self, first, min(first + step, len(self)), check=self.is_cuda).unbind(0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Returns the whole tensor as an array, for numpy.asarray(table). Raises TypeError if numpy does not have the
        dtype."""
        if copy is False:
            raise ValueError("a compressed table cannot become an array without a copy")
        try:
            torch.empty(0, dtype=self.dtype, device="cpu").numpy()
        except TypeError:
            raise TypeError(
                f"numpy has no {self.dtype}: call ibp.decompress(table), and convert the tensor, as by "
                "float().numpy(), or take its bytes, view(torch.uint8).numpy()"
            ) from None
        array = self.decompress(device="cpu").numpy()
        return array if dtype is None else array.astype(dtype, copy=False)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls torch.index_select, F.embedding, F.embedding_bag or F.linear with a table. Raises TypeError for other
        functions."""
        # PyTorch Geometric replaces torch.index_select, so this attribute is looked up at each call.
        handler = _index_select if function is torch.index_select else _HANDLERS.get(function)
        if handler is None:
            raise TypeError(
                f"{getattr(function, '__name__', function)} does not take an ibp.CompressedTensor (only F.embedding, "
                "F.embedding_bag, F.linear, torch.index_select do): call table.decompress() and give it the tensor"
            )
        return handler(*args, **(kwargs or {}))


torch.serialization.add_safe_globals([CompressedTensor])


def with_tensors(
    table: CompressedTensor,
    change: Callable[[torch.Tensor], torch.Tensor],
    shape: torch.Size | None = None,
    dtype: torch.dtype | None = None,
    change_overflow: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> CompressedTensor:
    """Returns a new table whose tensors are the results of `change` on the tensors of a table.

    Args:
        change: called with each tensor of the table; returns the tensor of the new table.
        shape, dtype: the shape and dtype of the new table. None: those of the table.
        change_overflow: called with the overflow instead of `change`. None: `change` is called.
    """
    held = tensors_of(table)
    moved: dict[str, Any] = {name: change(tensor) for name, tensor in held.items() if name != "overflow"}
    moved["overflow"] = (change_overflow or change)(held["overflow"])
    kept = {name: getattr(table, name) for name in ("scheme", "row_bytes", "slot_bytes", "codebook")}
    made = type(table)(shape=table.shape if shape is None else shape, dtype=dtype or table.dtype, **kept, **moved)
    if any(moved[name].numel() and moved[name].data_ptr() == held[name].data_ptr() for name in TENSORS):
        lie_with(table, made)
    return made


def compress_rows(x: torch.Tensor | np.ndarray, **options: Any) -> CompressedTensor:
    """Compresses a tensor as `ibp.compress` does with a scheme that codes rows. Returns the table. options: fields of
    `Options`."""
    x = given_tensor(x)
    check_tensor(x)
    return coding.compressed(CompressedTensor, Request.of(x, Options(**options)))


# ---- functions of torch ----


def _check_table(table: Any, name: str) -> None:
    if not isinstance(table, Table):
        raise TypeError(
            f"{name} is a {type(table).__name__}; of this function's arguments, a table can only be the one that holds "
            "rows"
        )


def _index_select(input: Table, dim: int, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Implements torch.index_select. For dimension 0, only the selected rows are decoded. For any other dimension, the
    whole table is decoded on the device of the index."""
    _check_table(input, "input")
    if dim in (0, -len(input.shape)):
        return gather.index_select(input, index, out=out)
    return torch.index_select(streaming.decompress(input, device=index.device), dim, index, out=out)


def embedding_of(
    input: torch.Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    """Implements F.embedding. Returns the rows of the table whose ids are in input, on the device of input.
    padding_idx, scale_grad_by_freq and sparse are ignored, because they concern only the gradient of the weight, and a
    table has none."""
    _check_table(weight, "weight")
    _refuse_max_norm(max_norm)
    if len(weight.shape) != 2:
        raise ValueError(f"weight has shape {list(weight.shape)}; wanted two dimensions")
    return gather.index_select(weight, input.reshape(-1)).reshape(*input.shape, weight.shape[1])


def embedding_bag_of(
    input: torch.Tensor,
    weight: Any,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    """Implements F.embedding_bag with `ibp.embedding_bag`. The result is on the device of input. scale_grad_by_freq and
    sparse are ignored."""
    _check_table(weight, "weight")
    _refuse_max_norm(max_norm)
    return embedding_bag(
        weight,
        input,
        offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        padding_idx=padding_idx,
        include_last_offset=include_last_offset,
    )


def _refuse_max_norm(max_norm: float | None) -> None:
    if max_norm is not None:
        raise ValueError(f"max_norm is {max_norm}, but it would change the rows of the table, which are fixed")


def _torch_embedding(
    weight: Table, indices: torch.Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> torch.Tensor:
    return embedding_of(indices, weight)


def linear_of(input: torch.Tensor, weight: Table, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Implements F.linear. Decodes the whole table on the device of input for the duration of the call. If input
    requires grad, the backward pass decodes the table again."""
    _check_table(weight, "weight")
    return linear.differentiable(_decoded_linear, input, weight, bias)


def _decoded_linear(input: torch.Tensor, weight: Table, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(input, streaming.decompress(weight, device=input.device), bias)


# Functions of torch that take tables, each with the function that is called instead.
_HANDLERS: dict[Callable, Callable] = {
    torch._C._VariableFunctions.index_select: _index_select,
    torch.Tensor.index_select: _index_select,
    F.embedding: embedding_of,
    torch.embedding: _torch_embedding,
    F.embedding_bag: embedding_bag_of,
    F.linear: linear_of,
}
