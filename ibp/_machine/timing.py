"""Times calls on a device. Work on a GPU alone is timed with CUDA events; work that includes the host is timed with the
host's clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")
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
