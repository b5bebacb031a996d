"""The rates of a machine: the one place that "auto", the paths to a GPU and the benchmarks' ideal times take them from.

`ibp.calibration.calibrate` measures them and keeps them in a file of the user's cache directory. If it was never
called, the rates of an H200 are used.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import typing
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._common import ops
from .._common.whole_files import write_whole
from . import memory

FEW_SMS = 8  # how many of a GPU's multiprocessors the rates "few_..." are for
# Size in bytes of the table, and rows per call, for which random_row_ns is measured.
LARGE_BYTES, LARGE_IDS = 2 << 30, 1 << 17
# _GROWTH: how much longer a row at a random place takes, as a share of random_row_ns, each time that the size of the
# table doubles. _LEAST_GAIN: the share of that time that remains if places are in order but rows are far apart. On an
# H200 (large_table.csv), a row of 128 B from a table of 4 GiB takes 21.8 ns, and a row of 512 B from a table of 16 GiB
# 33 ns; fetched in order, with rows 170 KiB apart, the latter takes 21.8 ns.
_GROWTH, _LEAST_GAIN = 0.35, 2 / 3
_MOST_STREAMED_BYTES = 1 << 30  # a larger tensor is streamed on any machine
_FILE_VERSION = 2


@dataclass(frozen=True)
class CoderRates:
    """Rates of one family of decoders and encoders, for rows of 2 KiB (1 KiB for one-byte elements) in device memory.
    GB/s count original bytes, 10^9 per second.

    Attributes:
        decode_gbps, few_decode_gbps: rate of decoding with all multiprocessors, and with at most 8.
        encode_gbps, few_encode_gbps: rate of coding by `ibp.encode_into`, with all multiprocessors, and with at most 8.
        least_row_ns: least time of a row fetched from pinned memory, however few bytes it has.
        work_per_ns: work of decoding per nanosecond with all multiprocessors: elements for dense rows, elements' worth
            of stored bytes for listed rows, bytes for masks.
    """

    decode_gbps: float
    few_decode_gbps: float
    encode_gbps: float
    few_encode_gbps: float
    least_row_ns: float
    work_per_ns: float


@dataclass(frozen=True, repr=False)
class Calibration:
    """Rates of one machine, with one of its GPUs. GB/s are 10^9 bytes per second, that is, bytes per nanosecond.

    Example:
        >>> ibp.calibration.H200.copy_in_gbps
        55.4
        >>> ibp.calibration.H200.masks
        CoderRates(decode_gbps=1740.0, ...)

    Attributes:
        gpu: name of the GPU.
        copy_in_gbps, copy_out_gbps: rates of the copy engine, from pinned memory to the GPU and back.
        read_gbps, few_read_gbps: rates at which a kernel reads rows of 2 KiB of pinned memory, with all multiprocessors
            and with at most 8.
        least_row_ns: least time of a row read by a kernel, however short.
        coded_read_share: the share of read_gbps at which coded rows come if no decoder is the limit.
        reach_bytes: number of bytes of pinned memory that address translation reaches; rows at random places of more
            memory come slower.
        random_row_ns, sorted_row_ns: time of a row of 32 bytes at a random place of a table of 2 GiB, in any order and
            in the order of places.
        bucketed_sms: how many multiprocessors fetch rows in the order of places the fastest.
        stream_start_us: how much longer a stream through the copy engine takes to begin and end than a kernel.
        device_copy_gbps, memset_gbps: rates in device memory, counting bytes copied and bytes set.
        gather_gbps: rate at which one thread of the CPU gathers rows at random places of host memory.
        pairs: dense rows of scheme planes with digits of two bits in elements of two bytes or more.
        dense: other dense rows of such elements, including those with entries for each column.
        one_byte: dense rows of elements of one byte.
        fast: dense rows with one digit of four bits (`level="fast"`).
        listed: listed rows.
        masks: rows of scheme ibp.
    """

    gpu: str
    copy_in_gbps: float
    copy_out_gbps: float
    read_gbps: float
    few_read_gbps: float
    least_row_ns: float
    coded_read_share: float
    reach_bytes: int
    random_row_ns: float
    sorted_row_ns: float
    bucketed_sms: int
    stream_start_us: float
    device_copy_gbps: float
    memset_gbps: float
    gather_gbps: float
    pairs: CoderRates
    dense: CoderRates
    one_byte: CoderRates
    fast: CoderRates
    listed: CoderRates
    masks: CoderRates

    @functools.cached_property
    def least_streamed_bytes(self) -> int:
        """The least stored bytes of a tensor that the copy engine, which starts later, brings sooner than a kernel."""
        gained_ns = 1 / self.read_gbps - 1 / self.copy_in_gbps
        if gained_ns <= 0:
            return _MOST_STREAMED_BYTES
        return int(min(1e3 * self.stream_start_us / gained_ns, _MOST_STREAMED_BYTES))

    def random_ns(self, num_bytes: int) -> float:
        """Returns the time, in ns, that address translation takes for a row at a random place of a pinned table of
        num_bytes bytes. Up to LARGE_BYTES it grows with the share of the table that is out of reach, then by _GROWTH
        each time that the table doubles."""
        out_of_reach, measured = (max(0.0, 1 - self.reach_bytes / size) for size in (num_bytes, LARGE_BYTES))
        if num_bytes <= LARGE_BYTES:
            return self.random_row_ns * out_of_reach / (measured or 1.0)
        return self.random_row_ns * (1 + _GROWTH * math.log2(num_bytes / LARGE_BYTES)) * (out_of_reach > 0)

    def sorted_ns(self, num_bytes: int, num_rows: int) -> float:
        """Returns the time, in ns, that address translation takes for each of num_rows random rows of such a table if
        they are fetched in the order of their addresses. The farther apart the rows are, the fewer of them share a
        translation."""
        random_ns = self.random_ns(num_bytes)
        apart = num_bytes / num_rows * LARGE_IDS / LARGE_BYTES
        return min(_LEAST_GAIN * random_ns, self.sorted_row_ns * random_ns / self.random_row_ns * apart)

    def __repr__(self) -> str:
        """Returns a small table."""
        rates = {name: _shown(value) for name, value in vars(self).items() if isinstance(value, (int, float))}
        reach, streamed = (f"{size / 2**20:,.0f} MiB" for size in (self.reach_bytes, self.least_streamed_bytes))
        lines = [line.format(reach=reach, streamed=streamed, few=FEW_SMS, **rates) for line in _LINES]
        return "\n".join([f"ibp.calibration.Calibration of {self.gpu}", *lines, *self._coder_lines()])

    def _coder_lines(self) -> list[str]:
        few = f"{FEW_SMS} SMs"
        table: list[tuple[str, ...]] = [("GB/s", "decode", few, "encode", few, "ns a row")]
        for name in CODER_FAMILIES:
            rates = getattr(self, name)
            table.append((name, *map(_shown, dataclasses.astuple(rates)[:-1])))
        return [f"  {name:15}" + "".join(f"{value:>10}" for value in values) for name, *values in table]


_LINES = (  # lines of a calibration's repr
    "  copy engine    {copy_in_gbps} GB/s to the GPU, {copy_out_gbps} to the host",
    "  kernels read   {read_gbps} GB/s of pinned memory, with {few} SMs {few_read_gbps}; a row takes {least_row_ns} ns",
    "  random rows    beyond {reach} {random_row_ns} ns a row, in order {sorted_row_ns}",
    "  put in order   they are fetched by {bucketed_sms} SMs",
    "  whole tensors  streamed from {streamed} on: that starts {stream_start_us} us later",
    "  device memory  copy {device_copy_gbps} GB/s, memset {memset_gbps}",
    "  CPU            a thread gathers {gather_gbps} GB/s",
)
CODER_FAMILIES = ("pairs", "dense", "one_byte", "fast", "listed", "masks")

# One NVIDIA H200 on PCIe 5 x16 with 16 cores, as `calibrate` measured it. Some rates were measured at more sizes, in
# files of benchmarks/results. gather.csv has the link: raw rows of 2 KiB; synthetic rows of 128 B, 75 and 90 % saved,
# at 1.45 ns; dense rows of 128 B; 0.90 to 0.99 of the link if no decoder is the limit. large_table.csv has ids that are
# put in order, stream.csv has streams, and codec.csv has `pairs` and `masks` in device memory. encode_into.csv has
# encoding, and `one_byte`, `fast` and `listed`; it does not have `dense` and `masks`, whose encoders a `calibrate`
# measured on a GPU that also had other work. The work of decoders is that of their slowest data: FP32 rows of 128 B,
# LLM keys and values, a BF16 ReLU set, rows of scheme ibp of 64 KiB.
H200 = Calibration(
    gpu="NVIDIA H200",
    copy_in_gbps=55.4,
    copy_out_gbps=55.2,
    read_gbps=51.4,
    few_read_gbps=51.1,
    least_row_ns=1.45,
    coded_read_share=0.9,
    reach_bytes=512 << 20,
    random_row_ns=16.2,
    sorted_row_ns=3.6,
    bucketed_sms=16,
    stream_start_us=94.27,
    device_copy_gbps=2063.0,
    memset_gbps=3270.0,
    gather_gbps=3.7,
    pairs=CoderRates(1952.0, 149.0, 823.0, 44.0, 2.6, 170.0),
    dense=CoderRates(745.0, 48.8, 956.0, 54.2, 2.6, 110.0),
    one_byte=CoderRates(1382.0, 91.1, 562.0, 32.2, 2.6, 110.0),
    fast=CoderRates(1923.0, 159.0, 1752.0, 114.0, 2.6, 110.0),
    listed=CoderRates(677.0, 45.9, 500.0, 27.3, 1.9, 40.0),
    masks=CoderRates(1740.0, 119.0, 679.0, 35.8, 1.45, 419.0),
)

_in_force: dict[torch.device, Calibration] = {}
_complained: set[Path] = set()


def in_force(device: torch.device) -> Calibration:
    """Returns the calibration in force on a device; for the CPU, that of the current GPU; that of the H200 if there
    is none. It measures nothing."""
    known = _in_force.get(device)
    if known is not None or torch.compiler.is_compiling():  # a file cannot be read inside torch.compile
        return known or H200
    if device.type != "cuda":
        # If CUDA is not in use yet, do not initialise it: children of a process that uses CUDA cannot use GPUs.
        has_gpu = ops.cuda_is_available() and torch.cuda.is_initialized()
        return in_force(memory.canonical("cuda")) if has_gpu else H200
    return _in_force.setdefault(device, _read(device) or H200)


def keep(device: torch.device, calibration: Calibration) -> None:
    """Makes a calibration the one in force, also for later processes."""
    _write(device, calibration)
    _in_force[device] = calibration


def is_measured(device: torch.device) -> bool:
    """Returns whether the calibration in force was measured on this machine."""
    return in_force(device) is not H200


# ---- the file ------------------------------------------------------------------------------------------------------


def cache_file(device: torch.device) -> Path | None:
    """Returns the file of a CUDA device's calibration, or None if the user has no cache directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:  # the user has no home
        return None
    digest = hashlib.sha256(json.dumps(_key(device), sort_keys=True).encode()).hexdigest()
    return directory / "ibp" / f"calibration-{digest[:16]}.json"


def _key(device: torch.device) -> dict[str, Any]:
    """Returns what a calibration depends on: another GPU, driver or version of ibp needs one of its own."""
    properties = torch.cuda.get_device_properties(device)
    driver = Path("/proc/driver/nvidia/version")
    return {
        "file": _FILE_VERSION,
        "ibp": _core.version(),
        "gpu": properties.name,
        "uuid": str(getattr(properties, "uuid", "")),
        "driver": driver.read_text().splitlines()[0] if driver.is_file() else "",
        "cuda": torch.version.cuda or "",
    }


def _read(device: torch.device) -> Calibration | None:
    """Returns the calibration on disk, or None if there is none or it cannot be used. In the latter case it warns
    once."""
    path = cache_file(device)
    if path is None or not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or content.get("key") != _key(device):
            raise ValueError("it is of another machine")
        return _of_json(Calibration, content.get("calibration"))
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        if path not in _complained:
            _complained.add(path)
            warnings.warn(f"ibp: {path} is left out: {error}. ibp.calibration.calibrate() measures again", stacklevel=3)
        return None


def _of_json(kind: type, content: Any) -> Any:
    """Makes a dataclass of names, whole numbers and positive numbers from what `dataclasses.asdict` made of it.
    Raises ValueError for anything else."""
    types = typing.get_type_hints(kind)
    if not isinstance(content, dict) or set(content) != set(types):
        raise ValueError(f"it holds no {kind.__name__}")
    values = {}
    for name, wanted in types.items():
        value = content[name]
        if dataclasses.is_dataclass(wanted):
            values[name] = _of_json(typing.cast(type, wanted), value)
            continue
        is_number = isinstance(value, (int, wanted)) and not isinstance(value, (bool, str))
        if not (isinstance(value, str) if wanted is str else is_number and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}")
        values[name] = value if wanted is str else wanted(value)
    return kind(**values)


def _write(device: torch.device, calibration: Calibration) -> None:
    """Saves a calibration for later processes. A whole file replaces the previous one. If this fails, it warns."""
    path = cache_file(device)
    if path is None:
        return
    content = {"key": _key(device), "calibration": dataclasses.asdict(calibration)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        warnings.warn(f"ibp: the calibration is kept for this process only: {error}", stacklevel=3)


def _shown(value: float) -> str:
    """Returns a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
