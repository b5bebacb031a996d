"""`show_config`: prints what this installation is and can do."""

from __future__ import annotations

from pathlib import Path as FilePath

import torch

from .. import _core
from .._fetch import gather, streaming
from .._machine import calibration, memory

_CPU_FEATURES = {1: "AVX2 and BMI2", 2: "AVX-512"}  # by the bits of enum ibp_cpu_feature


def show_config() -> None:
    """Prints how ibp was built, what it runs on, and which paths rows can take to a GPU: for bug reports.

    Example:
        >>> ibp.show_config()
        ibp           ..., format version 1, in ...
        torch         ...
    """
    print(config_text())


def config_text() -> str:
    """Returns what `show_config` prints."""
    features = _core.cpu_features()
    coders = [name for bit, name in _CPU_FEATURES.items() if features & bit] or ["plain C"]
    lines = {
        "ibp": f"{_core.version()}, format version {_core.FORMAT_VERSION}, in {FilePath(__file__).parent.parent}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "CUDA kernels": "built" if _core.cuda_is_built() else "not built (without nvcc, or with IBP_NO_CUDA=1)",
        "CPU coders": f"{', '.join(coders)}; {torch.get_num_threads()} threads",
        "GPUs": "; ".join(map(_gpu_text, range(torch.cuda.device_count()))) or "none that torch sees",
        "calibration": f"of an {calibration.H200.gpu}; ibp.calibration.calibrate() measures this machine",
    }
    device = memory.usual(None)
    if calibration.is_measured(device):
        known = calibration.in_force(device)
        lines["calibration"] = f"measured on {known.gpu}, kept in {calibration.cache_file(device)}"
    if device.type == "cuda":
        lines["index_select"] = f"paths {', '.join(map(repr, gather.PATHS))}, or decoded by the CPU"
        lines["decompress"] = f"paths {', '.join(map(repr, streaming.PATHS))}, or decoded by the CPU"
    else:
        lines["index_select"] = lines["decompress"] = "decoded by the CPU"
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines.items())


def _gpu_text(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    return f"cuda:{index} {found.name}, {found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} SMs"
