"""`place`: moves tensors and tables to slots on a device, with overflow in pinned host memory."""

from __future__ import annotations

import torch

from .._fetch.streaming import decompress
from .._layout import geometry as _rows
from .._machine import memory
from .._machine.staging import to_device
from .._schemes import AnyCodebook, Options, Request
from .._tables.coding import Coding, placed, warn_of_gradient
from .._tables.compressed_tensor import CompressedTensor
from . import _targets
from ._profiling import TensorProfile

_CPU = torch.device("cpu")


def place(
    x: torch.Tensor | CompressedTensor,
    target: float | TensorProfile | None = None,
    *,
    slot_bytes: int | None = None,
    threshold: float = _targets.THRESHOLD,
    codebook: AnyCodebook | None = None,
    scheme: str = "planes",
    level: str = "default",
    row_bytes: int | None = None,
    device: torch.device | str | int | None = None,
    progress: bool = False,
) -> CompressedTensor:
    """Returns a table whose slots are on a GPU. Bytes that do not fit in the slots are in pinned host memory, and the
    GPU reads them over the link when it decodes rows (Buddy Compression, ISCA 2020).

    Every row has a slot of the same size on the device. If a stored row is larger than its slot, the rest of its bytes
    are in host memory. If `update_` makes a row larger than its slot, the row's further bytes also go to host memory;
    the slots do not grow, and no other row moves. A default row (zeros, or another row that the codebook defines) has
    no bytes, so no slot is read for it. With a target of infinity there are no slots, and all rows except default rows
    are in host memory.

    The table can be used like any other table. `table.device_bytes` and `table.host_bytes` are the sizes of its memory
    on the GPU and in host memory. `to(device)` moves the slots to another GPU. `cpu()` returns an ordinary table, whose
    slots and overflow are both in host memory. A table that is saved and loaded again is also an ordinary table.
    `place` can move it to a GPU again. If the device is a CPU, everything is in host memory.

    Example:
        >>> x = torch.randn(1000, 1024).bfloat16()
        >>> table = ibp.spill.place(x, 4 / 3, device="cpu")
        >>> table.slot_bytes, torch.equal(table.decompress(), x)  # a slot has 3/4 of a row's 2,048 bytes
        (1536, True)

    Args:
        x: tensor [N, ...]; or a table. The rows of a table are moved without decoding them. But if target or slot_bytes
            is given, they are decoded and encoded again.
        target: the size of x divided by the size of all slots, at least 1. The size of a slot is rounded down to
            sectors of 32 bytes, but is at least one sector. math.inf: there are no slots. Or a profile of the tensor
            from `ibp.spill.profile`, whose codebook and slot size are used. None: the largest of 1, 4/3, 2, 4, 16 and
            infinity at which at most the fraction `threshold` of the rows is larger than the slots.
        slot_bytes: size in bytes of a row's slot, given instead of target: row_bytes, or a smaller multiple of 32.
        threshold: the largest fraction of the rows that may be larger than their slots, 0 to 1. It is used only if
            target and slot_bytes are None. The paper uses 0.30.
        codebook, scheme, level, row_bytes: as in `compress`; scheme is "planes", "ibp" or "auto".
        device: the device of the slots. None: the GPU of x if x is on one, otherwise the current GPU if there is one,
            otherwise the CPU. But if the rows of a table are moved without decoding them, None means the table's
            device.
        progress: whether to show progress bars.

    Raises:
        TypeError, ValueError: as in `compress`. Also if target, slot_bytes or threshold is out of range, if target and
            slot_bytes are both given, or if x does not match the profile.
        RuntimeError: the system refuses to pin the memory of the overflow.
    """
    if isinstance(target, TensorProfile):
        if codebook is not None or slot_bytes is not None or row_bytes is not None:
            raise ValueError("target is a profile, which says codebook, slot_bytes and row_bytes: give none of them")
        codebook, slot_bytes, target = target.codebook, target.slot_bytes, None
    ratio = None if target is None else _targets.checked_ratio(target)
    if ratio is not None and slot_bytes is not None:
        raise ValueError("target and slot_bytes are both given; wanted one of them")
    threshold = _targets.checked_threshold(threshold)
    if isinstance(x, CompressedTensor):
        if ratio is None and slot_bytes is None:
            return _moved(x, memory.canonical(x.device if device is None else device))
        codebook = x.codebook if codebook is None and x.codebook is not None else codebook
        x = decompress(x, check=x.is_cuda)
    _rows.check_tensor(x)
    warn_of_gradient(x)
    if scheme == "raw":
        raise ValueError("scheme is 'raw'; wanted 'planes', 'ibp' or 'auto': raw rows need slots of their full size")
    worker = memory.usual(device, x)
    options = Options(scheme, level=level, codebook=codebook, row_bytes=row_bytes, device=worker, progress=progress)
    request = Request.of(x, options)
    if slot_bytes not in (None, 0):
        _rows.checked_slot_bytes("slots", slot_bytes, request.geometry.row_bytes)

    def slots_for(coding: Coding) -> int:
        if slot_bytes is not None:
            return slot_bytes
        if ratio is not None:
            return _targets.slot_bytes_of(ratio, request.geometry.row_bytes)
        return _targets.slots_within(threshold, coding.survey, _targets.RATIOS)

    return placed(CompressedTensor, request, slots_for)


def _moved(table: CompressedTensor, device: torch.device) -> CompressedTensor:
    """Returns a table with the same coded rows, whose slots are on the device and whose overflow is in pinned host
    memory. If the device is a CPU, both are in host memory. If both are already where they should be, returns the table
    itself."""
    if device.type == "cpu" or (table.device == device and table.spills_to_host):
        return table.to(device)

    def to_host(overflow: torch.Tensor) -> torch.Tensor:
        return memory.empty(overflow.numel(), _CPU, True).copy_(overflow)

    return table._with(lambda tensor: to_device(tensor, device), change_overflow=to_host)
