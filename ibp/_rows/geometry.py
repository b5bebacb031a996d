"""Divides a tensor into rows, and computes the sizes of the slots, the index and the overflow of a table of these rows
(FORMAT.md sections 1 to 3). The second half of the file checks tensors, returns their bytes, copies the bytes block by
block to the device that works on them, and draws samples of rows.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from .. import _core
from .._common.arguments import whole_number
from .._common.manners import TensorManners
from .._common.process import tqdm
from .._common.sequences import rounded_up
from .._machine import staging

_Given = TypeVar("_Given")

SECTOR_BYTES = _core.SECTOR_BYTES
# Fetching a row that has a part in the overflow takes a second request. This is the cost of that request, expressed as
# a number of bytes that is added to the size of the part. A request takes 1.45 ns; in this time the link transfers
# about two sectors of 32 bytes (0.65 ns each).
SECOND_FETCH_BYTES = 64
# Size in bytes of a row, for tensors of one dimension and for tensors whose items have more than 64 KiB, the largest
# size of a row.
LONG_ITEM_ROW_BYTES = 4096
# Size in bytes of the blocks in which rows are coded. `compress(inplace=True)` holds two copies of a block.
_BLOCK_BYTES = 64 << 20
# Size in bytes of the blocks of host memory that the CPU codes. These blocks are larger because the CPU's threads wait
# for each other after each block.
_NEAR_BLOCK_BYTES = 1 << 30
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # keys: size of an element in bytes

# Names of the dtypes that can be compressed: those with elements of 1, 2, 4 or 8 bytes, except quantised dtypes, which
# torch stores with a scale, and dtypes that pack several values in a byte. A release of torch may lack some of them.
_DTYPE_NAMES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "uint64",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex32",
    "complex64",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
)
DTYPES = frozenset(getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name))
# The dtype that holds two values in a byte; None if torch lacks it.
PAIRS_DTYPE: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)
# Dtypes that uncompressed tensors in files may have.
KEPT_DTYPES = DTYPES if PAIRS_DTYPE is None else DTYPES | {PAIRS_DTYPE}

# Hints for error messages about objects that are not tensors. A hint names the call that takes such an object, or that
# makes a tensor of it. _WAYS finds a hint by the type of the object, _WAYS_BY_ATTRIBUTE by an attribute of the object.
_WAYS: tuple[tuple[Any, str], ...] = (
    ((str, os.PathLike), "ibp.checkpoints.compress(path, output) takes a file, ibp.load(path) reads one"),
    (torch.nn.Module, "ibp.nn.compress(model) takes a model"),
    (Mapping, "call this for each of its tensors; ibp.checkpoints.compress(path, output) takes a file of them"),
    (TensorManners, "it is coded already, and ibp.decompress(table) gives its tensor"),
    ((list, tuple, range, int, float, complex), "torch.tensor(x) makes one of numbers, torch.stack(x) of tensors"),
    (np.ndarray, "torch.from_numpy(x) makes one of an array"),
)
_WAYS_BY_ATTRIBUTE = (
    ("to_numpy", "x.to_numpy() gives an array, torch.from_numpy(array) a tensor"),
    ("__dlpack__", "torch.from_dlpack(x) gives one over the same memory"),
    ("__array__", "numpy.asarray(x) gives an array, torch.from_numpy(array) a tensor"),
)


@dataclass(frozen=True)
class Geometry:
    """The shape and dtype of a tensor x, with the division of x into rows. An item is x[i]; a 0-D tensor is one item.

    Attributes:
        row_bytes: size in bytes of a row; 0 for a tensor that a general codec, such as zstd, has coded as a whole.
        num_items: number of items.
        item_bytes, item_shape: size in bytes and shape of one item.
        num_bytes: size in bytes of the tensor.
        num_rows: number of rows; 0 if row_bytes is 0. The last row may be shorter than row_bytes.
    """

    shape: torch.Size
    dtype: torch.dtype
    row_bytes: int
    num_items: int = field(init=False, repr=False, compare=False)
    item_bytes: int = field(init=False, repr=False, compare=False)
    item_shape: torch.Size = field(init=False, repr=False, compare=False)
    num_bytes: int = field(init=False, repr=False, compare=False)
    num_rows: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_items, item_shape = self.shape[0] if self.shape else 1, self.shape[1:]
        item_bytes = item_shape.numel() * self.dtype.itemsize
        num_bytes = num_items * item_bytes
        vars(self).update(
            num_items=num_items,
            item_bytes=item_bytes,
            item_shape=item_shape,
            num_bytes=num_bytes,
            num_rows=-(-num_bytes // self.row_bytes) if self.row_bytes else 0,
        )

    @classmethod
    def of(cls, x: torch.Tensor, row_bytes: int | None = None) -> Geometry:
        """Returns the geometry of a tensor. row_bytes: size in bytes of a row. None: the size of an item, if x has two
        dimensions or more and items are no longer than 64 KiB; otherwise the smaller of LONG_ITEM_ROW_BYTES and the
        size of x."""
        natural = cls(x.shape, x.dtype, 1)
        if row_bytes is None:
            is_row = x.dim() > 1 and natural.item_bytes <= _core.MAX_ROW_BYTES
            row_bytes = natural.item_bytes if is_row else min(LONG_ITEM_ROW_BYTES, natural.num_bytes)
            row_bytes = max(1, row_bytes)
        return cls(x.shape, x.dtype, whole_number("row_bytes", row_bytes, 1, _core.MAX_ROW_BYTES))

    @property
    def has_whole_rows(self) -> bool:
        """Whether every item consists of a whole number of rows."""
        return self.item_bytes > 0 and self.item_bytes % self.row_bytes == 0

    def survey(self, lengths: torch.Tensor) -> Survey:
        """Returns a survey of the sizes of the stored rows.

        Args:
            lengths: uint16 [num_rows], the lengths of all rows, on any device; an empty tensor if all rows are raw.
        """
        if lengths.numel() == 0:
            lengths = torch.zeros(self.num_rows, dtype=torch.uint16, device="cpu")
        found = torch.ops.ibp.survey_rows.default(lengths, self.num_bytes, self.row_bytes).cpu()
        return Survey(self.row_bytes, int(found.numpy()[0]), found[1:])

    def slots_size(self, slot_bytes: int) -> int:
        """Returns the size in bytes of all slots together. If slots are as large as rows, the slot of a short last row
        is as short as that row."""
        return self.num_bytes if slot_bytes == self.row_bytes else self.num_rows * slot_bytes

    def index_rows(self, lengths: torch.Tensor, slot_bytes: int) -> torch.Tensor:
        """Computes the bases of a table in which rows overflow their slots. A base is the offset in the overflow at
        which the parts of a group of 32 rows begin. Returns the bases on the device of the lengths."""
        return torch.ops.ibp.index_rows.default(lengths, self.num_bytes, self.row_bytes, slot_bytes)[:-1]

    def index_bytes(self, overflows: bool) -> int:
        """Returns the size in bytes of the index of a coded table: its lengths and, if rows overflow their slots, its
        bases."""
        return 2 * self.num_rows + (8 * -(-self.num_rows // _core.ROWS_PER_BASE) if overflows else 0)

    def link_bytes(
        self,
        lengths: torch.Tensor,
        slot_bytes: int,
        own_bases: torch.Tensor | None = None,
        found: Survey | None = None,
    ) -> int:
        """Returns the number of bytes that are read if every row is fetched once. A fetch reads whole sectors of 32
        bytes.

        Args:
            own_bases: the bases of the table, if it has a base for each row. None: it has a base for each group of 32
                rows, or no bases.
            found: the survey of the lengths. None: it is computed if it is needed.
        """
        # Each slot, and each part in the overflow, begins at the start of a sector, so the survey's counts of sectors
        # are exact.
        if slot_bytes > 0 and slot_bytes % SECTOR_BYTES == 0 and own_bases is None:
            return (found or self.survey(lengths)).spilled(0)[1]
        sectors, overflow_end, step = 0, 0, 1 << 22
        for first in range(0, self.num_rows, step):
            row = torch.arange(first, min(first + step, self.num_rows), device=lengths.device)
            valid = torch.clamp(self.num_bytes - row * self.row_bytes, max=self.row_bytes)
            length = lengths[first : first + len(row)] if lengths.numel() else torch.zeros_like(row)
            stored = stored_sizes(length, self.row_bytes, valid)
            part = (stored - slot_bytes).clamp(min=0)
            sectors += _touched(row * slot_bytes, stored - part)
            if own_bases is not None:
                sectors += _touched(own_bases[first : first + len(row)], part)
            elif bool(part.any()):
                room = part if slot_bytes == 0 else (part + SECTOR_BYTES - 1) // SECTOR_BYTES * SECTOR_BYTES
                ends = overflow_end + room.cumsum(0)
                sectors += _touched(ends - room, part)
                overflow_end = int(ends[-1])
        return sectors * SECTOR_BYTES

    def raw_link_bytes(self) -> int:
        """Returns the number of bytes that are read if every row of a table of raw rows is fetched once. The rows lie
        one after the other, without padding. A sector that several rows share is read once for each of these rows."""
        later_rows, period = self.num_rows - 1, SECTOR_BYTES // math.gcd(SECTOR_BYTES, self.row_bytes)
        return SECTOR_BYTES * (-(-self.num_bytes // SECTOR_BYTES) + later_rows - later_rows // period)

    def raw_overflow_bytes(self, slot_bytes: int) -> int:
        """Returns the size in bytes of the overflow if all rows are raw."""
        if slot_bytes == 0:
            return self.num_bytes
        num_whole, last_bytes = divmod(self.num_bytes, self.row_bytes)
        return num_whole * raw_row_overflow(self.row_bytes, slot_bytes) + raw_row_overflow(last_bytes, slot_bytes)


def raw_row_overflow(row_bytes: int, slot_bytes: int) -> int:
    """Returns the size in bytes of the overflow of a raw row that has a slot of slot_bytes bytes."""
    return rounded_up(max(0, row_bytes - slot_bytes), SECTOR_BYTES)


def _touched(start: torch.Tensor, size: torch.Tensor) -> int:
    touched = (start + size - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1
    return int((touched * (size > 0)).sum())


@dataclass(frozen=True)
class Survey:
    """A histogram of the sizes of stored rows, coded and raw.

    Attributes:
        row_bytes: size in bytes of a row before coding.
        stored: size in bytes of all stored rows together.
        sectors: int64 [1 + ceil(row_bytes / 32)] on the CPU. Entry k is the number of rows that take k sectors of 32
            bytes.
    """

    row_bytes: int
    stored: int
    sectors: torch.Tensor

    @property
    def num_rows(self) -> int:
        return int(self.sectors.sum())

    @functools.cached_property
    def table_slot_bytes(self) -> int:
        """The best size in bytes of a slot for a table of these rows from which random rows are fetched over the
        link."""
        return self.best_slots(SECTOR_BYTES, part_cost=SECOND_FETCH_BYTES)[0]

    def best_slots(
        self,
        least: int = 0,
        *,
        overflow_cost: float = 1.0,
        part_cost: float = 0.0,
        most_spilled: float = math.inf,
        near: float = 1.0,
        sizes: Sequence[int] | None = None,
    ) -> tuple[int, float]:
        """Chooses the size of slots. Returns (size of a slot in bytes, mean size in bytes of a row's part in the
        overflow).

        The size of a slot is row_bytes, or a multiple of 32 below row_bytes. A size is excluded if more than
        `most_spilled` rows would not fit in slots of this size. Of the other sizes, the one with the lowest total cost
        of slots and overflow is chosen. If several sizes have the lowest cost, the largest of them is chosen.

        Args:
            least: the smallest size of a slot that may be chosen, in bytes.
            overflow_cost: the cost of a byte in the overflow, where a byte in a slot costs 1.
            part_cost: the cost of each part in the overflow, in addition to the cost of its bytes.
            most_spilled: the largest number of rows that may have a part in the overflow.
            near: a factor, 1 or more. Sizes whose cost is at most `near` times the lowest cost count as equally good,
                so the largest of them is chosen.
            sizes: the sizes to choose from. None: all.
        """
        costs = (overflow_cost, part_cost, most_spilled, near)
        return _core.choose_slots(self.sectors.numpy(), self.row_bytes, least, *costs, sizes)

    def spilled(self, slot_bytes: int) -> tuple[int, int]:
        """Returns (number of rows that do not fit in slots of this size, total size in bytes of the parts of these rows
        in the overflow). The size of each part is rounded up to whole sectors."""
        return _core.count_spilled(self.sectors.numpy(), slot_bytes)

    def overflow_bytes(self, slot_bytes: int) -> int:
        """Returns the size in bytes of the overflow for slots of this size. slot_bytes must be less than row_bytes.
        Each part takes whole sectors. If slot_bytes is 0, the overflow holds all rows without padding."""
        return self.stored if slot_bytes == 0 else self.spilled(slot_bytes)[1]


def stored_sizes(lengths: torch.Tensor, row_bytes: int, valid: torch.Tensor | int) -> torch.Tensor:
    """Returns the sizes in bytes of stored rows, int64.

    Args:
        lengths: the rows' entries in the index.
        valid: the sizes in bytes of the rows before coding. The last row of a tensor may be shorter than row_bytes.
    """
    sizes = lengths.to(torch.int64)
    sizes = torch.where(sizes == 0, valid, sizes)
    return torch.where(lengths.to(torch.int64) == default_length(row_bytes), 0, sizes)


def default_length(row_bytes: int) -> int:
    """Returns the entry of `lengths` that marks a default row, which takes no bytes."""
    return min(row_bytes, 65535)


def check_slot_bytes(slot_bytes: int, row_bytes: int) -> None:
    """Raises ValueError if rows of row_bytes bytes cannot have slots of slot_bytes bytes."""
    if slot_bytes == row_bytes or (0 < slot_bytes < row_bytes and slot_bytes % SECTOR_BYTES == 0):
        return
    raise ValueError(
        f"slot_bytes is {slot_bytes}; wanted a multiple of {SECTOR_BYTES} below the row's {row_bytes} bytes, "
        f"or {row_bytes} itself"
    )


def checked_slot_bytes(layout: str, slot_bytes: int | None, row_bytes: int) -> int | None:
    """Checks the arguments layout and slot_bytes of `compress`. Returns the size in bytes of a slot: 0 for packed rows,
    and None if the size is still to be chosen. Raises TypeError or ValueError if an argument is invalid, or if the two
    are inconsistent."""
    if layout not in ("slots", "packed"):
        raise ValueError(f"layout is {layout!r}; wanted 'slots' or 'packed'")
    if layout == "packed" and slot_bytes is not None:
        raise ValueError(f"slot_bytes is {slot_bytes}, but the packed layout has no slots")
    if slot_bytes is None:
        return 0 if layout == "packed" else None
    slot_bytes = whole_number("slot_bytes", slot_bytes)
    check_slot_bytes(slot_bytes, row_bytes)
    return slot_bytes


# ---- tensors that can be coded, and their bytes ----


def check_tensor(x: torch.Tensor, name: str = "x", dtypes: Container[torch.dtype] = DTYPES) -> None:
    """Raises TypeError unless x is a dense tensor on the CPU or a CUDA device and has one of the dtypes. name: the name
    of x in the message."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; wanted a torch.Tensor{_way_from(x)}")
    if x.layout != torch.strided or x.is_nested or x.device.type not in ("cpu", "cuda"):
        kind = "nested" if x.is_nested else str(x.layout)
        raise TypeError(f"{name} is a {kind} tensor on {x.device}; wanted a dense tensor on the CPU or a CUDA device")
    if x.dtype not in dtypes:
        raise TypeError(
            f"{name} has dtype {x.dtype} with elements of {x.dtype.itemsize} bytes; wanted 1, 2, 4 or 8 whole bytes, "
            "not quantized or packed: pass its int_repr() or view(torch.uint8)"
        )


def _way_from(x: object) -> str:
    """Returns the end of an error message about x, which is not a tensor: a hint (see _WAYS), or an empty string if
    there is no hint for x."""
    for kinds, way in _WAYS:
        if isinstance(x, kinds):
            return f": {way}"
    for attribute, way in _WAYS_BY_ATTRIBUTE:
        if hasattr(x, attribute):
            return f": {way}"
    return ""


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """Returns a tensor over the memory of an array. If the array is read-only, callers must not write to the tensor.
    Unlike torch.from_numpy, this function does not warn of read-only arrays."""
    if not array.flags.writeable:
        # This object presents the array's memory to NumPy as writable memory, and keeps the array alive.
        interface = {**array.__array_interface__, "data": (array.ctypes.data, False)}
        array = np.asarray(SimpleNamespace(__array_interface__=interface, owner=array))
    return torch.from_numpy(array)


def given_tensor(x: _Given | np.ndarray, name: str = "x") -> _Given | torch.Tensor:
    """Converts a NumPy array to a tensor; returns any other x unchanged. The tensor uses the array's memory if torch
    supports the array's strides and byte order, and a copy otherwise. A dtype of the package ml_dtypes becomes torch's
    dtype of the same name. Raises TypeError for an array of a dtype that torch lacks."""
    if not isinstance(x, np.ndarray):
        return x
    x = np.asarray(x, dtype=x.dtype.newbyteorder("="))
    dtype: Any = getattr(torch, x.dtype.name, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != x.dtype.itemsize:
        raise TypeError(f"{name} is an array of {x.dtype}; wanted a dtype that torch has")
    if any(stride < 0 or stride % x.dtype.itemsize for stride in x.strides):
        x = x.copy()
    if x.dtype.kind == "V":  # numpy sees a dtype of ml_dtypes as plain bytes.
        return as_tensor(x.view(f"u{x.dtype.itemsize}")).view(dtype)
    return as_tensor(x)


def layout_of(x: torch.Tensor) -> str:
    """Returns a description of a tensor for messages: dtype, shape, device and strides."""
    return f"{x.dtype} {list(x.shape)} on {x.device}, strides {x.stride()}"


def check_bytes(
    name: str, given: object, least_bytes: int, device: torch.device | None = None, alignment: int = 1
) -> None:
    """Raises TypeError or ValueError unless `given` is a contiguous 1-D uint8 tensor of least_bytes bytes or more, at
    an address that is a multiple of `alignment`.

    Args:
        name: the name of the argument, for messages.
        device: the device that `given` has to be on. None: any device.
    """
    if not isinstance(given, torch.Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}; wanted a tensor")
    is_there = device is None or given.device == device
    if given.dtype != torch.uint8 or given.dim() != 1 or not given.is_contiguous() or not is_there:
        raise ValueError(
            f"{name} is {layout_of(given)}; wanted contiguous torch.uint8 of one dimension"
            f"{'' if device is None else f' on {device}'}"
        )
    if given.numel() < least_bytes:
        raise ValueError(f"{name} has {given.numel()} bytes; wanted {least_bytes} or more")
    if given.data_ptr() % alignment:
        raise ValueError(f"{name} begins at an address that is no multiple of {alignment}")


def memory_order(x: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions of x from the largest stride to the smallest, so that `x.permute(order)` is contiguous if
    x is dense. If x has gaps in memory or overlaps itself, returns the dimensions in their original order."""
    order = tuple(sorted(range(x.dim()), key=lambda dim: (-x.stride()[dim], dim)))
    return order if x.permute(order).is_contiguous() else tuple(range(x.dim()))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor's bytes, uint8 [num_bytes], as a view if the tensor is contiguous, and otherwise as a copy."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    if not x.is_contiguous():
        x = x.view(INTEGERS[x.element_size()]).contiguous()
    # A contiguous tensor of at most one element may have any strides.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


# ---- rows of a tensor, by blocks and by samples ----


def blocks(
    data: torch.Tensor, row_bytes: int, device: torch.device, bar: str | None = None, whole: bool = True
) -> Iterable[tuple[int, int, torch.Tensor]]:
    """Divides rows into blocks of about 64 MiB. Returns an iterable of (first, last, bytes). A block consists of the
    rows [first, last); `bytes` holds the bytes of these rows, on the device. `first` is a multiple of 32.

    If the data is already on the device and `whole` is set, blocks are larger: a GPU gets all data as one block, and
    the CPU gets blocks of 1 GiB. If the data is in host memory and the device is a GPU, blocks are smaller, and the
    copy engine copies the next block while the caller works on the present one. The caller must not use such a block
    after it has requested the next one (see `staging.copied_ahead`).

    Args:
        data: uint8, the bytes of the rows.
        bar: the name of a progress bar. It counts the rows of a block when the caller requests the next block. None: no
            bar is shown.
        whole: whether data that is already on the device may come in larger blocks.
    """
    num_rows, is_staged = -(-data.numel() // row_bytes), device.type == "cuda" and data.device.type == "cpu"
    most_bytes = _BLOCK_BYTES
    if is_staged:
        most_bytes = min(_BLOCK_BYTES, staging.STAGED_BYTES)
    elif whole and data.device == device:
        most_bytes = data.numel() if data.is_cuda else _NEAR_BLOCK_BYTES
    step = max(1, most_bytes // (_core.ROWS_PER_BASE * row_bytes)) * _core.ROWS_PER_BASE
    if 0 < num_rows <= step and data.device == device:
        found: Iterable[tuple[int, int, torch.Tensor]] = [(0, num_rows, data)]
    else:
        found = _copied(data, row_bytes, device, step, is_staged)
    return found if bar is None else _counted(found, bar, num_rows)


def _copied(
    data: torch.Tensor, row_bytes: int, device: torch.device, step: int, is_staged: bool
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields blocks of `step` rows, as `blocks` describes them. is_staged: whether the copy engine copies each block
    ahead of its use."""
    num_rows = -(-data.numel() // row_bytes)
    ranges = [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
    parts = (data[first * row_bytes : last * row_bytes] for first, last in ranges)
    near = (
        staging.copied_ahead(parts, device, not data.is_pinned()) if is_staged else (part.to(device) for part in parts)
    )
    for block, (first, last) in zip(near, ranges):
        yield first, last, block


def _counted(
    found: Iterable[tuple[int, int, torch.Tensor]], bar: str, num_rows: int
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yields the blocks `found`, and shows a progress bar that counts their rows."""
    with tqdm(total=num_rows, desc=bar, unit="row", unit_scale=True) as shown:
        for block in found:
            yield block
            shown.update(block[1] - block[0])


def sample(data: torch.Tensor, row_bytes: int, num_sampled: int, seed: int = 0) -> torch.Tensor:
    """Returns the bytes of num_sampled rows of the data, chosen by `sampled`. A short last row is never chosen. If the
    data has no more than num_sampled rows, not counting a short last row, returns all of them, as a view."""
    num_rows = data.numel() // row_bytes
    rows = data[: num_rows * row_bytes].view(num_rows, row_bytes)
    if num_sampled >= num_rows:
        return rows.reshape(-1)
    numbers = sampled(num_rows, num_sampled, seed)
    if rows.is_cuda:
        return rows.index_select(0, numbers.to(rows.device)).view(-1)
    # torch would wake its threads even for a few bytes, so NumPy copies the rows.
    return torch.from_numpy(rows.numpy().take(numbers.numpy(), 0)).view(-1)


def sampled(num_rows: int, num_sampled: int, seed: int = 0) -> torch.Tensor:
    """Chooses rows at random. Returns the row numbers, int64 [at most num_sampled], in increasing order. The table is
    divided into num_sampled equal parts, and one row is drawn from each part. Rows at equal distances would not be a
    good sample, because all of them could be the same part of an image or of an attention head."""
    if num_sampled >= num_rows:
        return torch.arange(num_rows, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    bounds = np.arange(num_sampled + 1) * num_rows // num_sampled
    shares = torch.rand(num_sampled, generator=generator, dtype=torch.float64, device="cpu").numpy()
    return torch.from_numpy(bounds[:-1] + (shares * np.diff(bounds)).astype(np.int64))


def rows_of(items: torch.Tensor, rows_per_item: int) -> torch.Tensor:
    """Returns the row numbers of the rows that make up the given items, int64 [items * rows_per_item]. items: the
    indices of the items."""
    items = items.to(torch.int64)
    if rows_per_item == 1:
        return items
    return (items[:, None] * rows_per_item + torch.arange(rows_per_item, device=items.device)).reshape(-1)
