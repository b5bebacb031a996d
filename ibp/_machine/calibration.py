"""Knows the rates at which a machine moves and decodes data, and has the clock that measures them.

The choice of scheme "auto", the choice of a path to a GPU, and the ideal times in benchmarks are all computed from
these rates. `ibp.calibration.calibrate` measures the rates and keeps them in a file in the user's cache directory.
Until it is called, the rates of an H200 are used.

The first part of the file times calls on a device: work on a GPU alone with CUDA events, and work that includes the
host with the host's clock. Then come the rates, those of the H200, the calibration in force on a device, and the file.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import os
import statistics
import time
import typing
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from .. import _core
from .._common import ops
from .._common.whole_files import write_whole
from . import memory

_Result = TypeVar("_Result")


# ---- the clock ----

# For each type of device, (b, n). Calls are timed on a table of max(1 MiB, min(b, f / n)) bytes, where f is the size of
# the device's free memory. b is several times the size of the caches.
_TABLE_BYTES = {"cpu": (32 << 20, 16), "cuda": (128 << 20, 32)}
# Time, in seconds, for which the GPU is kept busy with other work while the host queues the timed calls, so that the
# GPU does not wait for the host between them.
_HEAD_START_S = 2e-3


def free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def timed_once(call: Callable[[], _Result], device: torch.device) -> tuple[_Result, float]:
    """Calls a function once. Returns (result of the call, time in seconds until the work of the call on the host and on
    the device is done)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, max(time.perf_counter() - start, 1e-9)


class Clock:
    """Times calls on a device.

    Args:
        device: the device. On a CUDA device, calls use the current stream.
        budget_s: approximate time, in seconds, that one measurement may take.

    Attributes:
        table_bytes: size in bytes of the tables on which calls should be timed.
        uncertainty: the largest standard error of a median so far, as a fraction of this median. It is large if other
            processes use the machine.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self._budget_s = device, budget_s
        on_gpu = device.type == "cuda"
        most_bytes, part = _TABLE_BYTES[device.type]
        free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else free_host_bytes()
        self.table_bytes = max(1 << 20, min(most_bytes, free_bytes // part))
        self.uncertainty = 0.0
        self._zeros = 0  # Number of times that the scratch buffer is set to zero to keep the GPU busy.
        if on_gpu:
            self._scratch = torch.empty(self.table_bytes, dtype=torch.uint8, device=device)
            self._zeros = int(_HEAD_START_S / self.gpu_s(self._scratch.zero_)) + 1

    def wall_s(self, call: Callable[[], object]) -> float:
        """Times a call several times. Returns the median time, in seconds, until the work of the call on the host and
        on the device is done."""
        return self._median([timed_once(call, self.device)[1] for _ in range(self._repeats(call))])

    def gpu_s(self, call: Callable[[], object]) -> float:
        """Times a call several times. Returns the median time, in seconds, that the work of the call takes on the GPU,
        without the time in which the host queues this work. The call must not wait for the GPU."""
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self._repeats(call))]
        for _ in range(self._zeros):
            self._scratch.zero_()
        for start, end in events:
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(self.device)
        return self._median([start.elapsed_time(end) * 1e-3 for start, end in events])

    def _median(self, seconds: list[float]) -> float:
        first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
        # The standard error of the median of normally distributed times, from their interquartile range.
        error = 0.93 * (third - first) / len(seconds) ** 0.5
        self.uncertainty = max(self.uncertainty, error / median)
        return median

    def _repeats(self, call: Callable[[], object]) -> int:
        """Runs a call twice. Returns the number of times, from 3 to 15, that the call can be timed within the budget,
        estimated from the second run."""
        _, seconds = (timed_once(call, self.device)[1] for _ in range(2))
        return max(3, min(15, int(self._budget_s / seconds)))


# ---- the rates ----

FEW_SMS = 8  # Number of multiprocessors with which the rates "few_..." are measured.
# random_row_ns and sorted_row_ns are measured on a table of LARGE_BYTES bytes, from which each call reads LARGE_IDS
# rows.
LARGE_BYTES, LARGE_IDS = 2 << 30, 1 << 17
# _GROWTH: each time that the size of a table doubles beyond LARGE_BYTES, fetching a random row takes longer by this
# fraction of random_row_ns. _LEAST_GAIN: if rows are fetched in the order of their addresses but are far apart, a row
# takes this fraction of the time of a random row. Both were measured on an H200 (large_table.csv). In a table of 4 GiB,
# a random row of 128 bytes takes 21.8 ns. In a table of 16 GiB, a row of 512 bytes takes 33 ns if rows are fetched in
# random order, and 21.8 ns if rows that are 170 KiB apart are fetched in the order of their addresses.
_GROWTH, _LEAST_GAIN = 0.35, 2 / 3
_MOST_STREAMED_BYTES = 1 << 30  # On every machine, the copy engine streams tensors of more bytes.


@dataclass(frozen=True)
class CoderRates:
    """Rates of one family of decoders and encoders, for rows of 2 KiB (1 KiB for one-byte elements) in device memory.
    One GB/s is 10^9 original bytes per second.

    Attributes:
        decode_gbps, few_decode_gbps: rate of decoding, with all multiprocessors and with at most 8.
        encode_gbps, few_encode_gbps: rate of encoding by `ibp.encode_into`, with all multiprocessors and with at
            most 8.
        least_row_ns: shortest time, in ns, in which a row can be fetched from pinned memory and decoded.
        work_per_ns: amount of decoding work that all multiprocessors together do per ns. The work of decoding a dense
            row is its number of elements; for a listed row, it is the stored size of the row divided by the size of an
            element; for a row of scheme ibp, it is the original size of the row in bytes.
    """

    decode_gbps: float
    few_decode_gbps: float
    encode_gbps: float
    few_encode_gbps: float
    least_row_ns: float
    work_per_ns: float


@dataclass(frozen=True, repr=False)
class Calibration:
    """Rates of a machine with one of its GPUs. One GB/s is 10^9 bytes per second, or one byte per nanosecond.

    Example:
        >>> ibp.calibration.H200.copy_in_gbps
        55.4
        >>> ibp.calibration.H200.masks
        CoderRates(decode_gbps=1740.0, ...)

    Attributes:
        gpu: name of the GPU.
        copy_in_gbps, copy_out_gbps: rates at which the copy engine copies from pinned memory to the GPU, and back.
        read_gbps, few_read_gbps: rates at which a kernel reads rows of 2 KiB from pinned memory, with all
            multiprocessors and with at most 8.
        least_row_ns: shortest time, in ns, in which a kernel reads a row from pinned memory, for rows of any size.
        coded_read_share: fraction of read_gbps at which sectors of coded rows arrive if no decoder limits the rate.
        reach_bytes: largest size in bytes of a pinned table in which address translation is fast. Random rows of a
            larger table take longer.
        random_row_ns, sorted_row_ns: mean time per row, in ns, in which a kernel reads many random rows of 32 bytes
            from a table of 2 GiB. For random_row_ns, the rows are read in random order; for sorted_row_ns, in the order
            of their addresses.
        bucketed_sms: number of multiprocessors with which a kernel is fastest if it fetches rows in the order of their
            addresses.
        stream_start_us: additional time, in us, for starting and finishing the transfer of a whole tensor if the copy
            engine, and not a kernel, reads the tensor.
        device_copy_gbps, memset_gbps: rates at which bytes are copied, and set, in device memory.
        gather_gbps: rate at which one thread of the CPU gathers random rows from host memory.
        pairs: rates for dense rows of scheme planes with digits of two bits and elements of two bytes or more.
        dense: rates for other dense rows of such elements, including rows with entries for each column.
        one_byte: rates for dense rows with elements of one byte.
        fast: rates for dense rows with one digit of four bits (`level="fast"`).
        listed: rates for listed rows.
        masks: rates for rows of scheme ibp.
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
        """Smallest size in bytes of a stored tensor that the copy engine transfers in less time than a kernel. The copy
        engine starts later, but has the higher rate."""
        gained_ns = 1 / self.read_gbps - 1 / self.copy_in_gbps
        if gained_ns <= 0:
            return _MOST_STREAMED_BYTES
        return int(min(1e3 * self.stream_start_us / gained_ns, _MOST_STREAMED_BYTES))

    def random_ns(self, num_bytes: int) -> float:
        """Returns the time, in ns, that address translation takes for a random row of a pinned table of num_bytes
        bytes. Up to LARGE_BYTES, the time is proportional to the fraction of the table beyond reach_bytes. For larger
        tables, it grows by the fraction _GROWTH of random_row_ns each time that the size doubles."""
        out_of_reach, measured = (max(0.0, 1 - self.reach_bytes / size) for size in (num_bytes, LARGE_BYTES))
        if num_bytes <= LARGE_BYTES:
            return self.random_row_ns * out_of_reach / (measured or 1.0)
        return self.random_row_ns * (1 + _GROWTH * math.log2(num_bytes / LARGE_BYTES)) * (out_of_reach > 0)

    def sorted_ns(self, num_bytes: int, num_rows: int) -> float:
        """Returns the time, in ns, that address translation takes for each of num_rows random rows of a pinned table of
        num_bytes bytes, if the rows are fetched in the order of their addresses. The farther apart the rows are, the
        fewer of them share a translation."""
        random_ns = self.random_ns(num_bytes)
        apart = num_bytes / num_rows * LARGE_IDS / LARGE_BYTES
        return min(_LEAST_GAIN * random_ns, self.sorted_row_ns * random_ns / self.random_row_ns * apart)

    def __repr__(self) -> str:
        """Returns a table of the rates."""
        rates = {name: _shown(value) for name, value in vars(self).items() if isinstance(value, (int, float))}
        reach, streamed = (f"{size / 2**20:,.0f} MiB" for size in (self.reach_bytes, self.least_streamed_bytes))
        lines = [line.format(reach=reach, streamed=streamed, few=FEW_SMS, **rates) for line in _LINES]
        few = f"{FEW_SMS} SMs"
        table: list[tuple[str, ...]] = [("GB/s", "decode", few, "encode", few, "ns a row")]
        table += [(name, *map(_shown, dataclasses.astuple(getattr(self, name))[:-1])) for name in CODER_FAMILIES]
        lines += [f"  {name:15}" + "".join(f"{value:>10}" for value in values) for name, *values in table]
        return "\n".join([f"ibp.calibration.Calibration of {self.gpu}", *lines])


def _shown(value: float) -> str:
    """Returns a number as text: with three significant digits below 100, and as a whole number from 100."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_LINES = (  # The lines of a calibration's repr before the table of the coders.
    "  copy engine    {copy_in_gbps} GB/s to the GPU, {copy_out_gbps} to the host",
    "  kernels read   {read_gbps} GB/s of pinned memory, with {few} SMs {few_read_gbps}; a row takes {least_row_ns} ns",
    "  random rows    beyond {reach} {random_row_ns} ns a row, in order {sorted_row_ns}",
    "  put in order   they are fetched by {bucketed_sms} SMs",
    "  whole tensors  streamed from {streamed} on: that starts {stream_start_us} us later",
    "  device memory  copy {device_copy_gbps} GB/s, memset {memset_gbps}",
    "  CPU            a thread gathers {gather_gbps} GB/s",
)
CODER_FAMILIES = ("pairs", "dense", "one_byte", "fast", "listed", "masks")

# The rates of one NVIDIA H200 on PCIe 5 x16, with 16 CPU cores. They were measured by `calibrate` and, with data of
# more sizes, by the benchmarks that wrote these files of benchmarks/results:
# - gather.csv: the rates of the link, measured with raw rows of 2 KiB, with synthetic rows of 128 bytes that save 75
#   and 90 % (1.45 ns per row), and with dense rows of 128 bytes. Coded rows reach 0.90 to 0.99 of the link's rate if no
#   decoder limits the rate.
# - large_table.csv: random rows in the order of their addresses. stream.csv: whole tensors.
# - codec.csv: `pairs` and `masks` in device memory.
# - encode_into.csv: encoding, and `one_byte`, `fast` and `listed`. The encoders of `dense` and `masks` are not in this
#   file; `calibrate` measured them while the GPU also had other work.
# Each work_per_ns was measured with the slowest data of its family: FP32 rows of 128 bytes, keys and values of an LLM,
# BF16 activations after ReLU, and rows of scheme ibp of 64 KiB.
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

# ---- the calibration in force ----

_in_force: dict[torch.device, Calibration] = {}


def in_force(device: torch.device) -> Calibration:
    """Returns the calibration in force on a device, without measuring. For the CPU, this is the calibration of the
    current GPU. If there is no calibration, returns the rates of the H200."""
    known = _in_force.get(device)
    if known is not None or torch.compiler.is_compiling():  # Inside torch.compile, no file can be read.
        return known or H200
    if device.type != "cuda":
        # CUDA must not be initialised here, because forked children of a process that uses CUDA cannot use GPUs.
        has_gpu = ops.cuda_is_available() and torch.cuda.is_initialized()
        return in_force(memory.canonical("cuda")) if has_gpu else H200
    return _in_force.setdefault(device, _read(device) or H200)


def keep(device: torch.device, calibration: Calibration) -> None:
    """Puts a calibration in force on a device, for this process and for later ones."""
    _write(device, calibration)
    _in_force[device] = calibration


def is_measured(device: torch.device) -> bool:
    """Returns whether the calibration in force on a device was measured on this machine."""
    return in_force(device) is not H200


# ---- the file ----

_FILE_VERSION = 2  # Version of the format of the file with a calibration.
_complained: set[Path] = set()  # The files that the process has warned of.


def cache_file(device: torch.device) -> Path | None:
    """Returns the path of the file that holds a CUDA device's calibration, or None if the user has no cache
    directory."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    try:
        directory = Path(named) if os.path.isabs(named) else Path.home() / ".cache"
    except RuntimeError:  # The user has no home directory.
        return None
    digest = hashlib.sha256(json.dumps(_key(device), sort_keys=True).encode()).hexdigest()
    return directory / "ibp" / f"calibration-{digest[:16]}.json"


def _key(device: torch.device) -> dict[str, Any]:
    """Returns the properties of a device and of the software on which a calibration depends. A calibration in a file is
    used only if all these properties are the same as when it was measured."""
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
    """Reads a device's calibration from its file. Returns None if there is no file. If there is a file that cannot be
    used, warns once and returns None."""
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
    """Makes an object of a dataclass from the dict that `dataclasses.asdict` returned for it. Every field must be a
    string, a positive int or float, or another such dataclass. Raises ValueError if the content does not match the
    class."""
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
    """Saves a calibration for later processes. The file is replaced as a whole. Warns if it cannot be written."""
    path = cache_file(device)
    if path is None:
        return
    content = {"key": _key(device), "calibration": dataclasses.asdict(calibration)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(content, indent=1).encode())
    except OSError as error:
        warnings.warn(f"ibp: the calibration is kept for this process only: {error}", stacklevel=3)
