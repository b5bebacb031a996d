"""`ibp.calibration.calibrate`."""

from __future__ import annotations

import torch

from .._common import ops
from .._common.arguments import number
from .._machine import memory
from .._machine.calibration import H200, Calibration, in_force, keep
from . import _measuring


def calibrate(
    device: torch.device | str | int | None = None, *, refresh: bool = False, seconds: float = 4.0
) -> Calibration:
    """Measures once, in a few seconds, what this machine does with one of its GPUs, and keeps the result.

    From then on `ibp.compress` uses the result to choose a scheme, and the calls that fetch use it to choose a path: in
    this process and, for the same GPU, driver and version of ibp, in every later one. It is written to `ibp/` in the
    directory that XDG_CACHE_HOME names, or in `~/.cache`. Where `calibrate` was never called, an H200's rates stand in;
    ibp never measures unasked.

    The GPU should be idle, and the host have some GiB of memory free: up to 2 GiB are pinned meanwhile.

    Example:
        >>> # needs a GPU
        >>> rates = ibp.calibration.calibrate(seconds=0.5)
        >>> rates.copy_in_gbps > 0
        True

    Args:
        device: a CUDA device; None: the current one.
        refresh: measure, though there is a calibration in memory or on disk.
        seconds: about how long to measure, 0.5 to 60; memory is pinned beside that.

    Returns:
        Calibration. Its repr is a table.

    Raises:
        RuntimeError: there is no CUDA device, or this build of ibp has no CUDA kernels.
        TypeError, ValueError: device is not a CUDA device, or seconds is out of range.
    """
    seconds = number("seconds", seconds)
    if not 0.5 <= seconds <= 60:
        raise ValueError(f"seconds is {seconds}; wanted 0.5 to 60")
    if not ops.cuda_is_available():
        raise RuntimeError("calibrate measures a GPU: it needs a CUDA device and a build of ibp with CUDA")
    found = memory.canonical("cuda" if device is None else device)
    if found.type != "cuda":
        raise ValueError(f"device is {str(device)!r}; wanted a CUDA device")
    known = H200 if refresh else in_force(found)
    if known is H200:  # nothing measured
        known = _measuring.measure(found, seconds)
        keep(found, known)
    return known
