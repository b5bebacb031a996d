"""Encodes rows into memory that was allocated before: `CodedRows`, `Buffers`, `encode_into`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from .. import _core
from .._common.arguments import sms_of
from .._common.process import OfThisProcess
from .._machine import memory as _memory
from .._rows import forms
from .._rows.codebook import AnyCodebook, check_codebook
from .._rows.geometry import check_bytes, default_length, layout_of, memory_order
from .._rows.handle import FaultWords, Handle, Parts, new_record
from .._rows.planes import signed
from .._rows.table import keep_handle
from .compressed_tensor import CompressedTensor

_CPU = torch.device("cpu")
_OUT_OF_RANGE = "row_ids[{position}] is {value}; the place has {num_rows} rows"
_CODING = FaultWords("row_ids has {value} more than once", RuntimeError, _OUT_OF_RANGE)
_READING = FaultWords("row {value} of the place was lost or is damaged", ValueError, _OUT_OF_RANGE)


class RowCounts(NamedTuple):
    """Counts of the rows of a `CodedRows`, over all calls of `encode_into`.

    Attributes:
        spilled: number of rows that were stored with a part in overflow.
        lost: number of rows that were lost because overflow had no room for their part. Reading a lost row raises
            ValueError.
        used_bytes: number of bytes of overflow that have been allocated to rows, including bytes that rows no longer
            use.
    """

    spilled: int
    lost: int
    used_bytes: int


class CodedRows(OfThisProcess):
    """Memory for coded rows. `ibp.encode_into` encodes rows into it, in any order and as often as needed.

    Every row has a slot of fixed size. Bytes that do not fit in the slot go to a part of `overflow`, which the device
    allocates when it encodes the row. Rows that were never encoded read as default rows: zeros, or the codebook's
    default value.

    Example:
        >>> x = torch.randn(100, 1024).bfloat16()
        >>> codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
        >>> rows = ibp.CodedRows(codebook, 500, slot_bytes=1408, overflow_bytes=4096, device="cpu")
        >>> ibp.encode_into(x, rows, first_row=200)
        >>> torch.equal(rows.table([500, 1024], torch.bfloat16)[200:300], x)
        True

    Args:
        codebook: the codebook that rows are encoded with, made by `ibp.codecs.analyze` or taken from a table.
        num_rows: the number of rows, each of codebook.row_bytes bytes.
        slot_bytes: size in bytes of a slot: row_bytes, in which case no row ever overflows, or a multiple of 32 below
            row_bytes. None: row_bytes.
        overflow_bytes: size in bytes of the overflow, which holds the parts of all rows. It must be given if slot_bytes
            is less than row_bytes.
        device: the device that encodes rows and holds the index. None: the device of `buffer` if it is given, else the
            current CUDA device if there is one, else the CPU.
        memory: the memory for slots and overflow: "device"; or "pinned", which is host memory that the GPU writes and
            reads over the link. None: "device". If the device is a CPU, slots and overflow are in host memory.
        overflow_memory: "pinned" puts overflow in pinned host memory even if the slots are on the GPU. The rows then
            take little more GPU memory than their slots (see `ibp.spill.place`). None: overflow is in the same memory
            as the slots.
        buffer: uint8 [at least CodedRows.memory_bytes(...)] on the device, contiguous. It receives, in this order, the
            counters, the index (bases, rooms and lengths), the slots and the overflow. `CodedRows.over` reads a copy of
            these bytes. None: new memory is allocated.
        host_buffer: a 1-D contiguous uint8 tensor in host memory. It holds the slots if `memory` is "pinned", followed
            by overflow. It must be pinned, unless the device is a CPU. None: new memory is allocated.

    Attributes:
        memory, overflow_memory: "device" or "pinned"; or "host" if the device is a CPU.
        counters: int64 [8] on the device. The entries are, in this order: number of bytes of overflow that have been
            allocated to rows; number of rows that spilled; number of rows that were lost; the fault record of
            `encode_into` (4 entries); an entry that `encode_into` does not write. If rows were lost, the first entry
            may be more than the size of overflow.
        used, tally, fault: views of the first entry, of the next two, and of the fault record, in `counters`.

    Raises:
        TypeError, ValueError: an argument is not as described, or a size is out of range.
        RuntimeError: the system does not pin memory.
    """

    _instead = "copy.deepcopy copies it, and its table(shape, dtype) can be pickled"

    def __init__(
        self,
        codebook: AnyCodebook,
        num_rows: int,
        *,
        slot_bytes: int | None = None,
        overflow_bytes: int | None = None,
        device: torch.device | str | int | None = None,
        memory: str | None = None,
        overflow_memory: str | None = None,
        buffer: torch.Tensor | None = None,
        host_buffer: torch.Tensor | None = None,
    ) -> None:
        sizes = (slot_bytes, overflow_bytes)
        self._lay_out(codebook, num_rows, *sizes, device, memory, overflow_memory, buffer, host_buffer)
        self.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> CodedRows:
        memo[id(self)] = copied = type(self).__new__(type(self))
        vars(copied).update(copy.deepcopy(vars(self), memo))
        return copied

    @classmethod
    def over(
        cls,
        buffer: torch.Tensor,
        codebook: AnyCodebook,
        num_rows: int,
        *,
        slot_bytes: int | None = None,
        overflow_bytes: int | None = None,
    ) -> CodedRows:
        """Returns a `CodedRows` whose memory is a buffer that holds the bytes of another `CodedRows` with the same
        codebook and sizes. The bytes may also be copied to the buffer later, before rows are read. The buffer is not
        cleared. Because overflow is the last part, the buffer may end after the bytes of overflow that are in use.

        Args:
            buffer: memory as for `CodedRows`. Its device becomes the device of the result.
            codebook, num_rows, slot_bytes: as for the `CodedRows` whose bytes the buffer holds.
            overflow_bytes: size in bytes of the overflow in this buffer.

        Raises:
            TypeError, ValueError: an argument is not as described for `CodedRows`.
        """
        place = cls.__new__(cls)
        place._lay_out(codebook, num_rows, slot_bytes, overflow_bytes, None, None, None, buffer, None)
        return place

    @staticmethod
    def memory_bytes(
        codebook: AnyCodebook, num_rows: int, *, slot_bytes: int | None = None, overflow_bytes: int | None = None
    ) -> int:
        """Returns the size in bytes of the memory that a `CodedRows` of these sizes takes. Its last `overflow_bytes`
        bytes are overflow.

        Raises:
            TypeError, ValueError: an argument is not as described for `CodedRows`.
        """
        check_codebook(codebook)
        return _form_of(codebook, num_rows, slot_bytes, overflow_bytes).overflow.stop

    def _lay_out(
        self,
        codebook: AnyCodebook,
        num_rows: int,
        slot_bytes: int | None,
        overflow_bytes: int | None,
        device: torch.device | str | int | None,
        memory: str | None,
        overflow_memory: str | None,
        buffer: torch.Tensor | None,
        host_buffer: torch.Tensor | None,
    ) -> None:
        """Checks the arguments of the constructor, and makes the tensors over existing or new memory, without clearing
        them."""
        check_codebook(codebook)
        form = _form_of(codebook, num_rows, slot_bytes, overflow_bytes)
        if buffer is not None:
            if memory in ("pinned", "host") or overflow_memory is not None:
                raise ValueError(
                    "a buffer is given, which all rows lie in: memory and overflow_memory do not go with it"
                )
            there = None if device is None else _memory.canonical(device)
            check_bytes("buffer", buffer, form.overflow.stop, there, forms.ALIGNMENT)
            device = buffer.device
        self.device = _memory.usual(device)
        self.memory = _memory.memory_read_by(self.device, memory, "device")
        _memory.check_memory(overflow_memory, "overflow_memory", among=("pinned",))
        self.overflow_memory = self.memory if self.device.type == "cpu" else overflow_memory or self.memory
        in_host = [memory == "pinned", "pinned" in (memory, overflow_memory)]  # slots, overflow
        if host_buffer is not None:
            needed = sum(part.stop - part.start for part, is_there in zip(form[-2:], in_host) if is_there)
            _check_host_buffer(host_buffer, needed, any(in_host), self.device)
        self.num_rows, self.row_bytes = num_rows, codebook.row_bytes
        self.slot_bytes = self.row_bytes if slot_bytes is None else slot_bytes
        if buffer is None:
            parts = _allocated(form, self.device, in_host, host_buffer)
        else:
            parts = [buffer[: forms.HEAD_BYTES], *(buffer[part] for part in form)]
        head, bases, rooms, lengths, self.slots, self.overflow = parts
        self.rooms, self.lengths = rooms.view(torch.uint16), lengths.view(torch.uint16)
        self.bases = bases.view(torch.int64)
        self.counters = head.view(torch.int64)
        self.used, self.tally, self.fault, _ = forms.head_of(self.counters)
        words, self.codebook = codebook.words(self.device), codebook
        slots, overflow = (_memory.seen_from(self.device, part) for part in (self.slots, self.overflow))
        rows = (self.slot_bytes, 0, self.num_rows, self.row_bytes)
        index = self.lengths, self.bases
        self.handle = Handle(Parts(slots, overflow, *index, words, codebook.codec, *rows, self.rooms, self.used))

    def clear(self) -> None:
        """Removes all rows. Afterwards all rows read as default rows, and the whole overflow is free."""
        self.lengths.view(torch.int16).fill_(signed(default_length(self.row_bytes), 16))
        self.bases.fill_(forms.NO_BASE)
        self.rooms.view(torch.int16).zero_()
        self.counters.zero_()

    def counts(self) -> RowCounts:
        """Waits for the work on the current stream. Returns the number of rows that spilled, the number of rows that
        were lost, and the size in bytes of the used overflow."""
        spilled, lost = self.tally.tolist()
        return RowCounts(spilled, lost, min(int(self.used), self.overflow.numel()))

    def check(self) -> None:
        """Waits for the work on the current stream. Raises the fault that calls of `encode_into` have noted, if any,
        and clears it.

        Raises:
            IndexError: an id was out of range.
            RuntimeError: an id was given twice in one call.
        """
        record = self.fault.tolist()
        self.fault.zero_()
        _CODING.raise_for(record, num_rows=self.num_rows)

    def decode(self, row_ids: torch.Tensor | None = None, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        """Decodes rows. Returns a tensor [number of rows, row_bytes / itemsize] of the given dtype on the device of
        this object.

        Args:
            row_ids: the numbers of the rows, int32 or int64, on the same device. None: all rows.

        Raises:
            ValueError: a row was lost or is damaged.
            IndexError: an id is out of range.
        """
        count = self.num_rows if row_ids is None else row_ids.numel()
        out = torch.empty(count * self.row_bytes, dtype=torch.uint8, device=self.device)
        fault = new_record(self.device)
        if row_ids is None:
            torch.ops.ibp.decode_bytes(self.handle.table, 0, out.numel(), 0, out, fault)
        else:
            torch.ops.ibp.gather_items(self.handle.table, row_ids.reshape(-1), 0, out, fault)
        _READING.raise_for(fault, num_rows=self.num_rows)
        return out.view(count, self.row_bytes).view(dtype)

    def table(self, shape: Sequence[int] | None = None, dtype: torch.dtype = torch.uint8) -> CompressedTensor:
        """Returns a table over the memory of the rows. The table also shows rows that are encoded later. If `memory` is
        "pinned", however, the index is copied, and the table shows only rows that were encoded before the call.

        Args:
            shape, dtype: the shape and dtype of the table. A tensor of this shape and dtype must have num_rows *
                row_bytes bytes. shape None: [num_rows, row_bytes / itemsize].

        Raises:
            ValueError: a tensor of this shape and dtype has another size.
        """
        of_rows = (self.num_rows, self.row_bytes // dtype.itemsize)
        table = CompressedTensor(
            shape=torch.Size(of_rows if shape is None else shape),
            dtype=dtype,
            scheme=self.codebook.scheme,
            row_bytes=self.row_bytes,
            slot_bytes=self.slot_bytes,
            slots=self.slots,
            overflow=self.overflow,
            lengths=self.lengths.to(self.slots.device),
            bases=self.bases.to(self.slots.device),
            codebook=self.codebook,
        )
        table._is_live = True
        return table


def live_table(rows: CodedRows) -> CompressedTensor:
    """Returns a table over the memory of coded rows. The table also shows rows that are encoded later, even if
    `memory` is "pinned"."""
    table = rows.table()
    keep_handle(table, rows.device, rows.handle.parts)
    return table


def _form_of(
    codebook: AnyCodebook, num_rows: int, slot_bytes: int | None, overflow_bytes: int | None
) -> forms.PieceForm:
    """Returns the layout of the memory of a `CodedRows`. Raises ValueError if a size is out of range."""
    row_bytes = codebook.row_bytes
    slot_bytes = row_bytes if slot_bytes is None else slot_bytes
    if num_rows < 0 or num_rows * row_bytes > 2**58:
        raise ValueError(f"num_rows is {num_rows}; wanted 0 or more rows of {row_bytes} bytes, at most 2^58 bytes")
    if slot_bytes != row_bytes and not (0 <= slot_bytes < row_bytes and slot_bytes % _core.SECTOR_BYTES == 0):
        raise ValueError(f"slot_bytes is {slot_bytes}; wanted a multiple of 32 below row_bytes, or {row_bytes}")
    if slot_bytes < row_bytes and overflow_bytes is None:
        raise ValueError(f"slots of {slot_bytes} bytes hold no whole rows; overflow_bytes is needed")
    if overflow_bytes is not None and overflow_bytes < 0:
        raise ValueError(f"overflow_bytes is {overflow_bytes}; wanted 0 or more")
    return forms.fixed(num_rows, row_bytes, slot_bytes, overflow_bytes or 0)


def _check_host_buffer(host_buffer: torch.Tensor, needed: int, is_used: bool, device: torch.device) -> None:
    """Raises TypeError or ValueError if host_buffer cannot be used.

    Args:
        needed: the smallest size in bytes that is accepted.
        is_used: whether slots or overflow are in pinned memory at all.
        device: the device that encodes the rows.
    """
    if not is_used:
        raise ValueError("host_buffer is given, but neither memory nor overflow_memory is 'pinned'")
    check_bytes("host_buffer", host_buffer, needed, _CPU)
    if device.type == "cuda" and needed and not host_buffer.is_pinned():
        raise ValueError(f"host_buffer is pageable; wanted pinned memory, which {device} reads")


def _allocated(
    form: forms.PieceForm, device: torch.device, in_host: Sequence[bool], host_buffer: torch.Tensor | None
) -> list[torch.Tensor]:
    """Returns separate memory for the head and for each part of a form.

    Args:
        in_host: [whether slots are in host memory, whether overflow is in host memory]. This memory is pinned if the
            device is a GPU.
        host_buffer: the parts in host memory become views of this buffer. None: new memory is allocated.
    """
    *index, slots, overflow = forms.HEAD_BYTES, *(part.stop - part.start for part in form)
    parts = [torch.empty(size, dtype=torch.uint8, device=device) for size in index]
    start = 0
    for size, is_there in zip((slots, overflow), in_host):
        if is_there and host_buffer is not None:
            parts.append(host_buffer[start : start + size])
            start += size
        else:
            parts.append(_memory.empty(size, _CPU if is_there else device, is_there and device.type == "cuda"))
    return parts


class Buffers:
    """A list of tensors with the same layout, such as pages of a cache or layers of a model. `ibp.encode_into` encodes
    all of them in one launch. The addresses of the tensors are copied to the device once, by the constructor.

    Example:
        >>> pages = [torch.randn(4, 1024).bfloat16() for _ in range(25)]
        >>> codebook = ibp.codecs.analyze(torch.cat(pages), scheme="planes", device="cpu")
        >>> rows = ibp.CodedRows(codebook, 100, slot_bytes=2048, device="cpu")
        >>> ibp.encode_into(ibp.Buffers(pages), rows)
        >>> torch.equal(rows.decode(torch.arange(8, 12), torch.bfloat16), pages[2])
        True

    Args:
        tensors: one or more tensors with the same shape, dtype, strides and device.

    Raises:
        ValueError: there are no tensors, or they differ.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        if not self.tensors:
            raise ValueError("there are no tensors")
        self.layout = first = _in_memory_order(self.tensors[0])
        for tensor in self.tensors:
            if layout_of(_in_memory_order(tensor)) != layout_of(first):
                raise ValueError(
                    f"the tensors differ: one is {layout_of(tensor)}, the first is {layout_of(self.tensors[0])}"
                )
        addresses = [tensor.data_ptr() for tensor in self.tensors]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)

    def __reduce__(self) -> tuple[type[Buffers], tuple[tuple[torch.Tensor, ...]]]:
        """Copies and pickles only the tensors, so that a copy looks up the addresses of its own tensors."""
        return Buffers, (self.tensors,)


def encode_into(
    x: torch.Tensor | Buffers | Sequence[torch.Tensor],
    place: CodedRows,
    row_ids: torch.Tensor | None = None,
    *,
    first_row: int = 0,
    max_sms: int | None = None,
) -> None:
    """Encodes the rows of a tensor into an `ibp.CodedRows`, in one launch on the current stream of the device of
    `place`. The call does not measure the rows first, does not allocate memory and does not synchronise. It can be
    captured in a CUDA graph.

    If overflow has no room for a row, the row is lost: reading it raises ValueError, and `place.counts()` counts it.

    Example:
        >>> x = torch.randn(100, 1024).bfloat16()
        >>> codebook = ibp.codecs.analyze(x, scheme="planes", device="cpu")
        >>> rows = ibp.CodedRows(codebook, 500, slot_bytes=1024, overflow_bytes=65536, device="cpu")
        >>> ibp.encode_into(x, rows, torch.arange(0, 500, 5))
        >>> rows.counts()
        RowCounts(spilled=100, lost=0, used_bytes=...)

    Args:
        x: a tensor of any dtype on the device of `place`; or `Buffers`; or a sequence of tensors, from which `Buffers`
            are made. The elements of x, in their order, are cut into rows of place.row_bytes bytes. A dense tensor with
            permuted dimensions, such as channels_last, is encoded in the order of its memory. If x is not dense, each
            row has to be contiguous in memory. If x is contiguous, its last row may be short, and is padded with
            zeros.
        place: the memory to encode into.
        row_ids: int64 [rows of x], the numbers of the rows of `place` to write to, all different. None: first_row and
            the rows after it.
        first_row: the number of the first row to write to, if row_ids is None.
        max_sms: the largest number of multiprocessors to keep busy. None: all.

    Raises:
        TypeError: place or x has a wrong type.
        RuntimeError: x, row_ids and place are inconsistent.

    If an id is out of range or is given twice, the call notes a fault, which `place.check()` raises.
    """
    if not isinstance(place, CodedRows):
        raise TypeError(f"place is a {type(place).__name__}; wanted an ibp.CodedRows")
    if isinstance(x, torch.Tensor):
        layout, addresses = _in_memory_order(x.detach() if x.requires_grad else x), None
    else:
        buffers = x if isinstance(x, Buffers) else Buffers(x)
        layout, addresses = buffers.layout, buffers.addresses
    counts, fault, sms = place.tally, place.fault, sms_of(max_sms)
    place.handle.encode(layout, counts, fault, buffers=addresses, row_ids=row_ids, first_row=first_row, max_sms=sms)


def _in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """If x is dense with permuted dimensions, returns a view of x whose dimensions are in the order of memory.
    Otherwise returns x, or a view that equals it."""
    return x if x.is_contiguous() else x.permute(memory_order(x))
