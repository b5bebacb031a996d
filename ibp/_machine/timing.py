"""Times calls on a device: work of a GPU by events, work that the host takes part in by the clock."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch

_Result = TypeVar("_Result")
# The size of a table on which calls are timed, by type of device: several times the device's caches, and at most one
# part in so many of its free memory.
_TABLE_BYTES = {"cpu": (32 << 20, 16), "cuda": (128 << 20, 32)}
_HEAD_START_S = 2e-3


def free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def timed_once(call: Callable[[], _Result], device: torch.device) -> tuple[_Result, float]:
    """Returns (what a call returns, the seconds until its work on a device is done, including its host part)."""
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
        budget_s: about how many seconds one measurement may take.

    Attributes:
        table_bytes: size in bytes of a table on which to time calls.
        uncertainty: the largest standard error of the medians so far, as a share of the median. The times of
            repetitions differ if something else uses the machine.
    """

    def __init__(self, device: torch.device, budget_s: float) -> None:
        self.device, self._budget_s = device, budget_s
        on_gpu = device.type == "cuda"
        most_bytes, part = _TABLE_BYTES[device.type]
        free_bytes = torch.cuda.mem_get_info(device)[0] if on_gpu else free_host_bytes()
        self.table_bytes = max(1 << 20, min(most_bytes, free_bytes // part))
        self.uncertainty = 0.0
        self._zeros = 0  # how often the scratch is set to zero for the head start
        if on_gpu:
            self._scratch = torch.empty(self.table_bytes, dtype=torch.uint8, device=device)
            self._zeros = int(_HEAD_START_S / self.gpu_s(self._scratch.zero_)) + 1

    def wall_s(self, call: Callable[[], object]) -> float:
        """Returns the median of the seconds until a call's work is done, including its host part."""
        return self._median([timed_once(call, self.device)[1] for _ in range(self._repeats(call))])

    def gpu_s(self, call: Callable[[], object]) -> float:
        """Returns the median of the seconds that a call's work takes on the GPU. A head start hides how long it
        takes to issue the calls. The call must not wait for the GPU."""
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
        error = 0.93 * (third - first) / len(seconds) ** 0.5  # for the median of normally distributed seconds
        self.uncertainty = max(self.uncertainty, error / median)
        return median

    def _repeats(self, call: Callable[[], object]) -> int:
        """Returns how often the budget allows a call to be timed, judged by its second run."""
        _, seconds = (timed_once(call, self.device)[1] for _ in range(2))
        return max(3, min(15, int(self._budget_s / seconds)))
