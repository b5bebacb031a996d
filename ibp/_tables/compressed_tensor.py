"""CompressedTensor: a table of coded rows with the verbs of a tensor."""

from __future__ import annotations

import builtins
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from .._common import ipc, wire
from .._common.statistics import shown_memory
from .._fetch import escapes, gather, indexing, streaming
from .._fetch import prefetch as prefetching
from .._layout.geometry import check_tensor, given_tensor
from .._layout.manners import CodedManners, Movable
from .._machine import memory
from .._machine import numa as _numa
from .._machine.segments import Segment, SharedHandle
from .._machine.staging import to_device
from .._rows.table import TENSORS, Table
from .._schemes import AnyCodebook, Options, Request
from . import changes, coding, torch_functions

_ITERATED_BYTES = 4 << 20  # of a block that iteration decodes at once: many rows, little memory


class CompressedTensor(Movable, CodedManners, Table):
    """A tensor [N, ...] kept as rows that decode alone. Made by `ibp.compress` and by unpickling; its
    constructor is internal.

    It answers what tensors are asked (`shape`, `size()`, `to()`, `table[key]`, iteration, `torch.index_select`,
    `F.embedding`, `F.embedding_bag`, `F.linear`) by decoding the rows needed. It is no torch.Tensor, takes part in no
    arithmetic and has no gradient. `==` and `hash` go by identity.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.compress(x, device="cpu", memory="host")
        >>> table.shape, table.scheme, f"{table.savings:.0%}"
        (torch.Size([1000, 1024]), 'planes', '34%')
        >>> torch.equal(table[[3, 1, 3]], x[[3, 1, 3]])
        True

    Attributes (none can be set):
        shape, dtype: of the original tensor.
        device: where the coded rows are.
        nbytes, stored_bytes: all memory that the table takes; the bytes of its coded rows and codebook, which `savings`
            is about. Room between rows, the index and rows that have changed make the difference.
        scheme: "ibp", "planes", or "raw" where compression would have saved nothing.
        codebook: the `ibp.codecs.Codebook`, `ibp.codecs.PlanesCodebook` or `ibp.codecs.ClusteredCodebook`; None for
            scheme "raw".
        row_bytes, num_rows: the unit of coding: an item x[i] of up to 64 KiB, else a piece of the flat tensor.
        slot_bytes: bytes of a row's slot; 0 in the packed layout (FORMAT.md section 3).
        slots, overflow, lengths, bases: the table's tensors (FORMAT.md sections 2 and 3); not to be changed.
        version: how often rows have changed in place; a copy of rows is stale if it has grown since the copy was made.

    Pickling and `torch.save` keep everything but pinning: call `pin_memory` after loading. Loading needs `import ibp`
    first.
    """

    _is = "a compressed table"
    _instead = (
        "call ibp.decompress(table) for the tensor, table[ids] for some items, or table.update_(ids, rows) to change "
        "rows"
    )

    # ---- what it is, as a tensor ----

    def requires_grad_(self, requires_grad: bool = True) -> CompressedTensor:
        if requires_grad:
            raise RuntimeError("a compressed table cannot require grad: its values are fixed")
        return self

    def detach(self) -> CompressedTensor:
        """The table itself."""
        return self

    def __repr__(self) -> str:
        where = str(self.device) if self.device.type == "cuda" else "pinned" if self._is_pinned else "pageable"
        where += ", overflow in host memory" if self.spills_to_host else ""
        slots = f", slot_bytes={self.slot_bytes}" if self.slot_bytes else ""
        return (
            f"ibp.CompressedTensor(shape={list(self.shape)}, dtype={self.dtype}, scheme={self.scheme!r}, "
            f"layout={self.layout!r}{slots}, {shown_memory(self.nbytes, self.original_bytes)}, "
            f"stored_bytes={self.stored_bytes:,}, savings={self.savings:.1%}, {where})"
        )

    # ---- where it is ----

    def pin_memory(self, *, numa: _numa.Numa = None) -> CompressedTensor:
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
        """The table on another device: itself if it is there, else a copy of its coded bytes (not pinned). The overflow
        of a table that spills to host memory (`ibp.spill.place`) stays there.

        Args:
            device: where to; or another tensor or table, whose device is meant; None: where it is.
            dtype: None or the table's own: coded rows cannot be converted.
            non_blocking: do not wait for copies from pinned memory to a GPU.
            copy: make a copy even if the table is there.

        Raises:
            TypeError: dtype is another one.
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
            return self._with(lambda tensor: tensor.to(target, non_blocking=True))
        if self.spills_to_host:
            return self._with(lambda tensor: tensor.to(target), change_overflow=torch.clone)
        return self._with(lambda tensor: to_device(tensor, target))

    def half(self) -> CompressedTensor:
        return self.to(torch.float16)

    def bfloat16(self) -> CompressedTensor:
        return self.to(torch.bfloat16)

    def float(self) -> CompressedTensor:
        return self.to(torch.float32)

    def double(self) -> CompressedTensor:
        return self.to(torch.float64)

    def clone(self) -> CompressedTensor:
        """A copy of the coded bytes on the same device, not pinned; the codebook is shared."""
        return self._with(torch.clone)

    def share_memory_(self, *, numa: _numa.Numa = None) -> CompressedTensor:
        """Moves a table in host memory to memory that other processes map, by being forked or by `share`. Returns self;
        no-op on a GPU, or if it is shared already.

        The bytes are there once, however many processes read them; they end with the last table in them. A pinned
        table is pinned again where it is now, by each process for itself.

        Args:
            numa: the NUMA node whose memory is preferred, or a device near whose node; None: the calling thread's.

        Raises:
            RuntimeError: `compress(inplace=True)` made the table in a tensor's own memory.
            TypeError, ValueError: numa is no node and no device of this machine.
        """
        node = _numa.node_of(numa)
        if self.is_shared():
            return self
        if self._owner is not None:
            raise RuntimeError(
                "a table in the memory of a tensor that was compressed in place cannot be shared: clone() it first"
            )
        if self.spills_to_host:
            raise RuntimeError(
                "a table whose overflow is in host memory and whose slots are on a GPU cannot be shared: share its "
                "cpu(), or send it by pickle"
            )
        segment, copies = Segment.of(self._tensors(), node)
        segment.pin = self._is_pinned
        self._move(copies, segment)
        return self

    def is_shared(self) -> bool:
        """Whether the rows are in memory that other processes can map."""
        return (self.is_cuda and not self.spills_to_host) or isinstance(self._segment, Segment)

    def share(self) -> SharedHandle:
        """A handle by which other processes open the table with `ibp.distributed.open_shared`, without a copy.

        The table is moved to shared memory first (see `share_memory_`). Multiprocessing's queues and arguments of
        processes send tables so.

        The handle is plain data, to be sent in any way: by `torch.distributed.broadcast_object_list`, a store or a
        socket. Any number of processes may open it, for as long as this one lives and has the table. Of a table on a
        GPU it is CUDA's, made by torch: every handle is for one process, and keeps the memory until it has been opened.

        Raises:
            RuntimeError: `compress(inplace=True)` made the table in a tensor's own memory.
        """
        self.share_memory_()
        state = self.__getstate__()
        tensors = {name: state.pop(name) for name in TENSORS}
        fields = wire.written(state)
        segment = self._segment
        if not isinstance(segment, Segment):
            loans = wire.written({name: ipc.lent(tensor) for name, tensor in tensors.items()})
            return SharedHandle(os.getpid(), 0, 0, "", False, fields, loans)
        sizes = wire.written({name: tensor.numel() for name, tensor in tensors.items()})
        return SharedHandle(os.getpid(), segment.num_bytes, segment.file, segment.name, segment.pin, fields, sizes)

    def __copy__(self) -> CompressedTensor:
        return self._with(lambda tensor: tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompressedTensor:
        memo[id(self)] = copied = self.clone()
        return copied

    def _with(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        change_overflow: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> CompressedTensor:
        """A table of changed tensors, the overflow by a function of its own, if there is one. shape, dtype: that its
        bytes are of; None: the table's own."""
        held = self._tensors()
        moved: dict[str, Any] = {name: change(tensor) for name, tensor in held.items() if name != "overflow"}
        moved["overflow"] = (change_overflow or change)(held["overflow"])
        kept = {name: getattr(self, name) for name in ("scheme", "row_bytes", "slot_bytes", "codebook")}
        made = type(self)(shape=self.shape if shape is None else shape, dtype=dtype or self.dtype, **kept, **moved)
        # The memory's owner, and what pins it, live as long as any table in it.
        if any(moved[name].numel() and moved[name].data_ptr() == held[name].data_ptr() for name in TENSORS):
            made._owner, made._pinned_range = self._owner, self._pinned_range
            made._move({}, self._segment)
            made._is_aliased = self._is_aliased = True
            made._is_live, made._is_refused = self._is_live, self._is_refused
        return made

    # ---- rows that change ----

    def update_(self, ids: gather.Ids, rows: torch.Tensor) -> CompressedTensor:
        """x[ids] = rows: codes rows with the table's codebook and puts them in place of others. Returns self.

        Rows that are not named stay where they are and are not read. The codebook does not change: rows unlike the rows
        that it was learned from save less, or are kept raw (`refit` learns a new codebook). A row that no longer fits
        takes a new part of the overflow, which grows as needed: an update never fails for lack of room. `refit` frees
        the parts that rows have left.

        The first change copies the index and adds 12 bytes a row to it; a packed table stays packed, its changed rows
        elsewhere in the overflow. A later change costs what its rows do; where several items share a row, the whole row
        is decoded and coded again. Rows of a table on a GPU are coded there on its current stream, in order with reads
        on that stream; other streams wait for an event, and the next change for theirs. New rows of a pinned table
        are coded by the GPU that holds them, or else by the GPU that last used the table; reads by the CPU wait for it.
        The call waits for ids on a GPU. CUDA graphs that read the table have to be captured again after the overflow
        has grown, and after `append` and `refit`.

        If the call is interrupted or refused, the table holds either all old rows or all new ones.

        Args:
            ids: items to change, int32 or int64 [K]; of equal ones the last one counts.
            rows: [K, ...] tensor of the table's dtype, on any device.

        Raises:
            IndexError: an id is out of range; nothing has changed.
            TypeError, ValueError: ids or rows do not fit.
            RuntimeError: the table is shared with other processes.
        """
        changes.update(self, ids, rows)
        return self

    def append(self, rows: torch.Tensor) -> CompressedTensor:
        """Adds items at the end, coded with the table's codebook: dimension 0 grows. Returns self.

        Room for more is made by halves of what there is, so that many calls copy each row a few times. Otherwise as
        `update_`.

        Args:
            rows: [K, ...] tensor of the table's dtype, on any device.

        Raises:
            TypeError, ValueError: rows does not fit, or the table has no dimension.
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
        """Compresses the table's present rows anew: a codebook that fits them, and no memory that nobody uses. Returns
        self.

        It takes the memory of the whole tensor meanwhile. Rows keep their size, and the layout stays slots or packed. A
        table that spills to host memory (`ibp.spill.place`) keeps its slots too, unless slot_bytes says otherwise.
        Interrupted, the table is as it was.

        Args:
            level: as in `ibp.compress`; None: that of the codebook which the table has, unless scheme, codebook or
                clusters say otherwise.
            all others: as in `ibp.compress`.

        Raises:
            TypeError, ValueError: as `ibp.compress`.
            RuntimeError: the table is shared with other processes.
        """
        changes.check_can_change(self)
        options = Options(
            scheme, codebook=codebook, sample=sample, clusters=clusters, slot_bytes=slot_bytes, device=device
        )
        self._become(coding.code_anew(self, options, level))
        return self

    # ---- what can be asked of it ----

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

    def prefetch(
        self,
        ids: gather.Ids | None = None,
        *,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
        max_sms: int | None = None,
        path: str | None = None,
    ) -> prefetching.Prefetch:
        """Starts to bring items, or the whole tensor, to a GPU beside the current stream's work.

        It begins when the work is done that the current stream has been given by now, so that ids may come from there
        and out be in use there. For the CPU it is done at once.

        Args:
            ids: as in `index_select`; None: the whole tensor, as `decompress` gives it.
            device, out, max_sms, path: as in `index_select` and `decompress`.
            stream: of the device that the result goes to; None: one that all prefetches to the device share, which
                come one after the other.

        Returns:
            `ibp.Prefetch`: `wait()` gives the result, `close()` gives it up.

        It raises what `index_select` and `decompress` raise, and ValueError for a stream of another device.
        """
        return prefetching.prefetch(self, ids, device=device, out=out, stream=stream, max_sms=max_sms, path=path)

    def prepare_linear(self) -> CompressedTensor:
        """Readies the table for `ibp.linear` where it lies. Returns self.

        On a GPU it decodes the table once, in parts, lists the weights that the coded digits do not give, and waits.
        Without it the first call of `ibp.linear` does so, if it is neither compiled nor captured in a CUDA graph. The
        list counts in `nbytes`. Call it again after rows have changed. Modules of `ibp.nn` call it whenever they take a
        table.

        Example:
            >>> table = ibp.compress(torch.randn(512, 1024).bfloat16(), level="fast").prepare_linear()
            >>> multiply = torch.compile(lambda x: ibp.linear(x, table), fullgraph=True, backend="aot_eager")
            >>> multiply(torch.ones(2, 1024).bfloat16()).shape
            torch.Size([2, 512])

        Raises:
            CorruptTableError: the table's bytes contradict each other.
        """
        escapes.prepare(self)
        return self

    def __getitem__(self, key: Any) -> torch.Tensor:
        """x[key], decoding only the rows that the key needs: ints, slices, ..., None, index tensors, arrays and lists,
        bool masks, and tuples of them.

        On the table's device, or on that of the index tensor that chooses rows. uint8 tensors, which torch takes for
        masks, are refused.

        Raises:
            IndexError: an index is out of range, a mask has another shape, or there are too many indices.
            TypeError: an index is none of these.
            ValueError: a slice has a step below 1.
        """
        return indexing.take(self, key)

    def __getitems__(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """Returns the items of some ids by one call. torch's DataLoader asks for the items of a batch in this way.

        Raises:
            IndexError, TypeError: an id is out of range, or no integer.
        """
        return list(self[torch.as_tensor(ids, device="cpu")])

    def __iter__(self) -> Iterator[torch.Tensor]:
        """The items x[0], x[1] and so on, decoded in blocks of about 4 MiB, on the table's device."""
        if not self.shape:
            raise TypeError("iteration over a 0-d tensor")
        return self._items()

    def _items(self) -> Iterator[torch.Tensor]:
        step = max(1, _ITERATED_BYTES // max(1, self.geometry.item_bytes))
        for first in range(0, len(self), step):
            yield from streaming.decode_items(self, first, min(first + step, len(self)), check=self.is_cuda).unbind(0)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole tensor, for numpy.asarray(table). TypeError for dtypes that numpy lacks."""
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
        """torch.index_select, F.embedding, F.embedding_bag and F.linear of a table; TypeError for other functions."""
        return torch_functions.call(function, args, kwargs or {})


torch.serialization.add_safe_globals([CompressedTensor])


def compress_rows(x: torch.Tensor | np.ndarray, **options: Any) -> CompressedTensor:
    """Returns a table of a tensor's rows: `ibp.compress` for the schemes of rows. options: fields of `Options`."""
    x = given_tensor(x)
    check_tensor(x)
    return coding.compressed(CompressedTensor, Request.of(x, Options(**options)))
