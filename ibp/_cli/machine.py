"""Measures what a machine does with and without compression, for `ibp bench`.

Rows are 2 KiB of made weights, whose savings are those of trained ones. Rates are GB/s (10^9) of original bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import ibp
from ibp._machine.timing import Clock

ROW_BYTES = 2048
# times as fast; smaller differences are within the variation of measurements, unless something else uses the machine
PAYS = 1.05
_NUM_CALLS = 24  # how many calls share the given time
_KINDS = {
    "BF16 weights": torch.bfloat16,
    "FP16 weights": torch.float16,
    "FP32 weights": torch.float32,
    "FP8 weights": torch.float8_e4m3fn,
    "BF16, half zeros": torch.bfloat16,
}


@dataclass(frozen=True)
class Measured:
    """The measurements of one kind of data."""

    kind: str  # the name of the kind
    saved: float  # the share of the rows' bytes that is saved
    lossless: bool  # whether every bit came back
    gbps: dict[str, float]  # GB/s by name
    # rows, whole: how many times as fast compressed rows, and whole compressed tensors, come to the GPU as raw ones.
    # None without a GPU.
    rows: float | None = None
    whole: float | None = None
    uncertainty: float = 0.0  # the largest share by which a rate may be wrong, because its repetitions differ


def made(kind: str, num_bytes: int) -> torch.Tensor:
    """Returns rows of one kind on the CPU."""
    dtype = _KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    values = 0.02 * torch.randn(num_bytes // dtype.itemsize, generator=generator, dtype=torch.float32, device="cpu")
    if "zeros" in kind:
        values.clamp_(min=0)
    return values.to(dtype).view(-1, ROW_BYTES // dtype.itemsize)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


# ---- the CPU ----


def of_cpu(seconds: float, kinds: Callable[[list[str]], Any]) -> list[Measured]:
    """Measures every kind on the CPU. kinds: wraps the list of their names, to show progress."""
    clock = Clock(torch.device("cpu"), seconds / (_NUM_CALLS * len(_KINDS)) * 4)
    return [_on_cpu(clock, kind, made(kind, clock.table_bytes)) for kind in kinds(list(_KINDS))]


def _on_cpu(clock: Clock, kind: str, x: torch.Tensor) -> Measured:
    clock.uncertainty = 0.0
    num_bytes, out = x.numel() * x.itemsize, torch.empty_like(x)
    table = ibp.compress(x, device="cpu", memory="host", layout="packed")
    ids = torch.randint(len(x), (len(x) // 4,), device="cpu")

    def rate(call: Callable[[], object], of_bytes: int = num_bytes) -> float:
        return of_bytes / clock.wall_s(call) / 1e9

    rows = torch.empty_like(x[: len(ids)])
    taken = ids.numel() * ROW_BYTES
    gbps = {
        "copy": rate(lambda: out.copy_(x)),
        "compress": rate(lambda: _again(table, x)),
        "decompress": rate(lambda: ibp.decompress(table, out=out)),
        "raw_rows": rate(lambda: torch.index_select(x.view(torch.uint8), 0, ids, out=rows.view(torch.uint8)), taken),
        "rows": rate(lambda: ibp.index_select(table, ids, out=rows), taken),
    }
    lossless = same_bits(ibp.decompress(table), x) and same_bits(rows, x.view(torch.uint8)[ids])
    return Measured(kind, table.savings, lossless, gbps, uncertainty=clock.uncertainty)


def _again(table: ibp.CompressedTensor, x: torch.Tensor) -> None:
    """Codes x again, with the codebook of its table."""
    how: Any = {"scheme": "raw"} if table.codebook is None else {"codebook": table.codebook}
    ibp.compress(x, **how, device="cpu", memory="host", layout="packed")


# ---- a GPU ----


def of_gpu(device: torch.device, seconds: float, kinds: Callable[[list[str]], Any]) -> list[Measured]:
    """Measures every kind with a GPU, from pinned memory."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        clock = Clock(device, seconds / (_NUM_CALLS * len(_KINDS)))
        found = [_on_gpu(clock, kind, made(kind, clock.table_bytes)) for kind in kinds(list(_KINDS))]
    ibp.release_pinned()
    return found


def _on_gpu(clock: Clock, kind: str, x: torch.Tensor) -> Measured:
    clock.uncertainty = 0.0
    device, num_bytes = clock.device, x.numel() * x.itemsize
    raw, table = (ibp.compress(x, scheme=scheme, device=device) for scheme in ("raw", "auto"))
    packed = ibp.compress(x, layout="packed", device=device)
    near, pinned, out = packed.to(device), x.pin_memory(), torch.empty_like(x, device=device)
    host_ids = torch.randint(len(x), (len(x) // 2,), device="cpu")
    ids, rows = host_ids.to(device), torch.empty_like(x[: len(x) // 2], device=device)
    taken = host_ids.numel() * ROW_BYTES
    gbps = {
        "torch_rows": taken / clock.wall_s(lambda: x.view(torch.uint8)[host_ids].to(device)),
        "raw_rows": taken / clock.gpu_s(lambda: ibp.index_select(raw, ids, out=rows)),
        "rows": taken / clock.gpu_s(lambda: ibp.index_select(table, ids, out=rows)),
        "copy": num_bytes / clock.wall_s(lambda: out.copy_(pinned, non_blocking=True)),
        "whole": num_bytes / clock.wall_s(lambda: ibp.decompress(packed, out=out)),
        "decode": num_bytes / clock.gpu_s(lambda: ibp.decompress(near, out=out)),
    }
    gbps = {name: rate / 1e9 for name, rate in gbps.items()}
    lossless = same_bits(ibp.decompress(packed, device=device), x)
    lossless &= same_bits(ibp.index_select(table, ids, device=device), x.view(torch.uint8)[host_ids])
    times = gbps["rows"] / gbps["raw_rows"], gbps["whole"] / gbps["copy"]
    return Measured(kind, packed.savings, lossless, gbps, *times, clock.uncertainty)


# ---- what follows ----


def verdict(found: list[Measured], threads: int) -> str:
    """Returns whether compression pays on this machine, judged by the first kind, or that repetitions differ too
    much to tell."""
    first, noise = found[0], max(measured.uncertainty for measured in found)
    warning = (
        f" Repetitions of a measurement differ so much that its rate may be off by {100 * noise:.0f} %: something else "
        "uses this machine. Measure again without it, or longer (--seconds)."
        if noise > PAYS - 1
        else ""
    )
    if first.rows is None or first.whole is None:
        return (
            f"There is no GPU here. {first.kind} take {100 * first.saved:.0f} % less memory and storage, and are "
            f"decoded at {first.gbps['decompress']:.1f} GB/s by {threads} thread{'s' * (threads > 1)}: compression "
            f"pays where they come from storage, or over a network, that is slower than that.{warning}"
        )
    speeds = f"rows come {first.rows:.2f} times as fast as raw ones, whole tensors {first.whole:.2f} times"
    pays = [what for what, speed in (("rows", first.rows), ("whole tensors", first.whole)) if speed > PAYS]
    if warning:
        return f"Whether compression pays here is not certain: of {first.kind} {speeds}.{warning}"
    if pays:
        where = f" for {pays[0]}" if len(pays) == 1 else ""
        return f"Compression pays here{where}: of {first.kind} {speeds}."
    return (
        f"Compression gains no speed here: of {first.kind} {speeds}. It saves {100 * first.saved:.0f} % of the memory."
    )
