"""A tensor as bytes cut into rows (FORMAT.md section 1), brought block by block to the device that works on them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import _core, _memory, _ops

LONG_ITEM_ROW_BYTES = 4096  # rows of items that are longer than a row may be, and of 1-D tensors
_BLOCK_BYTES = 64 << 20
_STAGED_BYTES = 16 << 20  # of a block of host data on its way to a GPU
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Geometry:
    """How a tensor of a shape and dtype is cut. An item is x[i]; a 0-D tensor is one item."""

    shape: torch.Size
    dtype: torch.dtype
    row_bytes: int

    @classmethod
    def of(cls, x: torch.Tensor, row_bytes: int | None = None) -> Geometry:
        natural = cls(x.shape, x.dtype, 1)
        if row_bytes is None:
            is_row = x.dim() > 1 and natural.item_bytes <= _core.MAX_ROW_BYTES
            row_bytes = natural.item_bytes if is_row else min(LONG_ITEM_ROW_BYTES, natural.num_bytes)
            row_bytes = max(1, row_bytes)
        if not 1 <= row_bytes <= _core.MAX_ROW_BYTES:
            raise ValueError(f"row_bytes is {row_bytes}; wanted 1 to {_core.MAX_ROW_BYTES}")
        return cls(x.shape, x.dtype, int(row_bytes))

    @property
    def num_items(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def item_bytes(self) -> int:
        return self.shape[1:].numel() * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_items * self.item_bytes

    @property
    def num_rows(self) -> int:
        return -(-self.num_bytes // self.row_bytes)


def check_tensor(x: torch.Tensor) -> None:
    """Raises TypeError for what cannot be compressed."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x is a {type(x).__name__}; wanted a torch.Tensor")
    if x.layout != torch.strided or x.is_quantized or x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"x is a {x.layout} tensor of {x.dtype} on {x.device}; wanted a dense, not quantized tensor on the CPU or a CUDA device")
    if x.dtype.itemsize not in _INTEGERS:
        raise TypeError(f"x has dtype {x.dtype} with elements of {x.dtype.itemsize} bytes; wanted 1, 2, 4 or 8")


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8 [num_bytes]: a view where it is contiguous, else a copy."""
    x = x.detach().resolve_conj().resolve_neg()
    if x.dtype.is_complex:
        x = torch.view_as_real(x)
    return x.view(_INTEGERS[x.element_size()]).contiguous().reshape(-1).view(torch.uint8)


def working_device(x: torch.Tensor, device: torch.device | str | int | None) -> torch.device:
    """Where analysis and compression of x run: the device asked for, else x's own if it is a GPU, else the GPU if there is one."""
    if device is not None:
        return _memory.canonical(device)
    if x.is_cuda:
        return _memory.canonical(x.device)
    return _memory.canonical("cuda" if _ops.cuda_is_available() else "cpu")


def blocks(data: torch.Tensor, row_bytes: int, device: torch.device, whole: bool = True) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(first row, last row, bytes on the device) of about 64 MiB each; the first row is a multiple of 32.

    What is on the GPU that works on it is one block, if `whole`. Host data is brought to a GPU in smaller blocks by its copy engine, the next
    one while the caller works on one: such a block is valid until the next one is asked for. Pageable data goes through pinned memory, into
    which torch's intra-op threads copy it.
    """
    num_rows, is_far = -(-data.numel() // row_bytes), data.device != device and device.type == "cuda"
    most_bytes = min(_BLOCK_BYTES, _STAGED_BYTES) if is_far else data.numel() if whole and device.type == "cuda" else _BLOCK_BYTES
    step = max(1, most_bytes // (32 * row_bytes)) * 32
    ranges = [(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]
    parts = (data[first * row_bytes : last * row_bytes] for first, last in ranges)
    if is_far:
        parts = _copied_ahead(parts, min(step * row_bytes, data.numel()), device, data.is_pinned())
    for (first, last), part in zip(ranges, parts):
        yield first, last, part.to(device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """As tensor.to(device), but a contiguous tensor in pageable memory goes to a GPU in blocks, as above, which is faster."""
    data = tensor.view(-1).view(torch.uint8)
    if device.type != "cuda" or data.is_cuda or data.numel() <= _STAGED_BYTES or data.is_pinned():
        return tensor.to(device)
    near = torch.empty_like(data, device=device)
    for first, last, block in blocks(data, 1, device):
        near[first:last] = block
    return near.view(tensor.dtype).view(tensor.shape)


def _copied_ahead(parts, most_bytes, device, pinned):
    """The parts on a GPU, in two buffers in turn; copies run on a stream of their own."""
    stream, copier = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    buffers = [torch.empty(most_bytes, dtype=torch.uint8, device=device) for _ in range(2)]
    staging = [] if pinned else [torch.empty(most_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    copied, used = ([torch.cuda.Event() for _ in buffers] for _ in range(2))
    copier.wait_stream(stream)

    def bring(part, turn):
        if staging:
            copied[turn].synchronize()
            part = staging[turn][: part.numel()].copy_(part)
        copier.wait_event(used[turn])
        with torch.cuda.stream(copier):
            near = buffers[turn][: part.numel()].copy_(part, non_blocking=True)
        copied[turn].record(copier)
        return near

    try:
        waiting, turn = None, 0
        for part in itertools.chain(parts, [None]):
            coming = None if part is None else bring(part, turn)
            if waiting is not None:
                stream.wait_event(copied[1 - turn])
                yield waiting
                used[1 - turn].record(stream)
            waiting, turn = coming, 1 - turn
    finally:
        copier.synchronize()


def sample(data: torch.Tensor, row_bytes: int, num_sampled: int, seed: int = 0) -> torch.Tensor:
    """The bytes of num_sampled whole rows, drawn without repetition and in order; all whole rows without a copy if there are no more."""
    num_rows = data.numel() // row_bytes
    rows = data[: num_rows * row_bytes].view(num_rows, row_bytes)
    if num_sampled >= num_rows:
        return rows.reshape(-1)
    generator = torch.Generator().manual_seed(seed)
    if 4 * num_sampled > num_rows:
        chosen = torch.randperm(num_rows, generator=generator)[:num_sampled]
    else:  # without an array as long as the table
        chosen = torch.randint(num_rows, (num_sampled + num_sampled // 4,), generator=generator).unique()
        chosen = chosen[torch.randperm(len(chosen), generator=generator)[:num_sampled]]
    return rows[chosen.sort().values.to(rows.device)].reshape(-1)
