"""`IncomingTensor` represents a tensor of a checkpoint, and has no memory. vLLM's weight loaders take views of it, as
they do of other tensors, and copy the views to weights. Each of these copies is passed to the `Origin` of the tensor
instead."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ... import CompressedTensor
from ...adapters import join

_CPU = torch.device("cpu")


class Origin(Protocol):
    """The interface to the values of an `IncomingTensor`. In both methods, `source` is a view of the tensor, on the
    meta device."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Called in place of a loader's `target.copy_(source)`."""

    def values(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Returns the values of `source` as a tensor on a device. Called for operations other than views and copies."""


class IncomingTensor(torch.Tensor):
    """Represents a tensor of a checkpoint, and has no memory. Views of it are of this class, too."""

    origin: Origin

    @classmethod
    def of(cls, origin: Origin, shape: Sequence[int], dtype: torch.dtype) -> IncomingTensor:
        return cls._viewed(torch.empty(shape, dtype=dtype, device="meta"), origin)

    @classmethod
    def _viewed(cls, source: torch.Tensor, origin: Origin) -> IncomingTensor:
        made = source.as_subclass(cls)
        made.origin = origin
        return made

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], cls) and _writes(function):
            raise NotImplementedError("a weight loader writes to a tensor of the checkpoint, which has no memory")
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.Tensor.__setitem__:
                function, args = torch.Tensor.copy_, (args[0][args[1]], args[2])
            if function is torch.Tensor.copy_:
                args[1].origin.copy(args[1].as_subclass(torch.Tensor), args[0])
                return args[0]
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            if len(given) == 1:
                source: Any = given[0]
                try:
                    made = function(*args, **kwargs)
                except (NotImplementedError, RuntimeError):  # the function reads values
                    made = None
                leaves = [x for x in tree_leaves(made) if isinstance(x, torch.Tensor)]
                if made is not None and not leaves:
                    return made
                if leaves and all(storage_of(x) == storage_of(source) for x in leaves):
                    return tree_map_only(torch.Tensor, lambda view: cls._viewed(view, source.origin), made)
            devices = [x.device for x in given if not isinstance(x, cls)]

            def values(source: IncomingTensor) -> torch.Tensor:
                return source.origin.values(source.as_subclass(torch.Tensor), devices[0] if devices else _CPU)

            args, kwargs = tree_map_only(cls, values, (args, kwargs))
        return function(*args, **kwargs)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns a number that is the same for all views of one tensor, whether the tensor has memory or not."""
    return tensor.untyped_storage()._cdata


def _writes(function: Any) -> bool:
    """Returns whether a function writes to its first argument, judged by the function's name."""
    name = getattr(function, "__name__", "")
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


# ---- tables of a coded checkpoint ----


def incoming(table: CompressedTensor) -> IncomingTensor:
    """Returns a tensor that represents a table of a checkpoint and can be passed to weight loaders."""
    return IncomingTensor.of(CodedOrigin(table), table.shape, table.dtype)


class CodedOrigin:
    """The `Origin` whose values come from a table of a checkpoint. While the loader of a coded layer's weight runs,
    `copy` only adds the part to the list `noted`. At other times, `copy` decodes the part on the target's device and
    writes the values to the target."""

    def __init__(self, table: CompressedTensor) -> None:
        self.table = table
        self._near = table

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        part, parts = TablePart(self, source, target), noted.get()
        if target.is_meta:  # vLLM counts what will be copied
            target.copy_(source)
        elif parts is None:
            part.write()
        else:
            parts.append(part)

    def values(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype, device=device)
        size, at = self.table.shape[1:].numel(), source.storage_offset()
        last = at + sum((length - 1) * stride for length, stride in zip(source.shape, source.stride()))
        items = self._decoded(at // size, last // size + 1, device)
        return items.view(-1).as_strided(source.shape, source.stride(), at % size)

    def _decoded(self, first: int, last: int, device: torch.device) -> torch.Tensor:
        """Copies coded bytes to the device, decodes items first to last - 1 there, and returns them."""
        if self.table.dim() == 2:
            cut = join([(self.table, first, last)], device)
            if cut is not None:
                return cut.decompress(check=True)
        if self._near.device != device:
            self._near = self.table.to(device)
        return self._near.decompress_items(first, last, check=True)


class TablePart(NamedTuple):
    """A part of a table that a loader copies to a weight.

    Attributes:
        origin: the origin of the table.
        source: a view of the `IncomingTensor`, on the meta device.
        target: a view of the weight.
    """

    origin: CodedOrigin
    source: torch.Tensor
    target: torch.Tensor

    def write(self) -> None:
        self.target.copy_(self.origin.values(self.source, self.target.device))

    def place(self) -> tuple[int, tuple[CompressedTensor, int, int]] | None:
        """Returns (row, (table, first, last)): rows first to last - 1 of the table are the weight's rows from `row` on.
        Returns None if the part does not consist of complete rows of both the table and the weight, or if their dtypes
        differ."""
        table, columns = self.origin.table, self.target.shape[-1]
        if table.dtype != self.target.dtype or table.row_bytes != columns * table.dtype.itemsize:
            return None
        at, to = self.source.storage_offset(), self.target.storage_offset()
        if at % columns or to % columns or not (self.source.is_contiguous() and self.target.is_contiguous()):
            return None
        first, count = at // columns, self.source.numel() // columns
        return to // columns, (table, first, first + count)


# While the loader of a coded layer's weight runs, the list to which the parts of the weight are added; otherwise None.
noted: ContextVar[list[TablePart] | None] = ContextVar("noted", default=None)


def joined(parts: Sequence[TablePart], weight: torch.Tensor) -> CompressedTensor | None:
    """Joins the parts of a weight [rows, columns] in one table, on the weight's device. Returns None if the parts do
    not cover all rows of the weight, are not complete rows of tables, or cannot be joined (see `join`)."""
    places = [part.place() for part in parts]
    found = sorted((place for place in places if place is not None), key=lambda place: place[0])
    ends = [0, *(row + last - first for row, (_, first, last) in found)]
    if not found or len(found) < len(places) or ends != [*(row for row, _ in found), len(weight)]:
        return None
    return join([rows for _, rows in found], weight.device)
