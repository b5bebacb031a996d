"""Describes this installation: `show_config`, and the first lines of `ibp doctor`."""

from __future__ import annotations

from pathlib import Path as FilePath

import torch

from ibp import _core
from ibp._fetch import gather, streaming
from ibp._machine import calibration, memory

_CPU_FEATURES = {1: "AVX2 and BMI2", 2: "AVX-512"}  # Names for the bits of enum ibp_cpu_feature.


def show_config() -> None:
    """Prints how ibp was built, on which machine it runs, and by which paths rows can come to the GPU. Include the
    output in bug reports.

    Example:
        >>> ibp.show_config()
        ibp           ..., format version 1, in ...
        torch         ...
    """
    lines = config(memory.usual(None))
    width = max(map(len, lines))
    print("\n".join(f"{name:<{width}}  {text}" for name, text in lines.items()))


def config(device: torch.device) -> dict[str, str]:
    """Returns the lines that `show_config` prints, as a dictionary from the name at the beginning of each line to the
    text after it. device: the device whose calibration and paths are listed."""
    features = _core.cpu_features()
    coders = [name for bit, name in _CPU_FEATURES.items() if features & bit] or ["plain C"]
    kernels = "not built (without nvcc, or with IBP_NO_CUDA=1)"
    if _core.cuda_is_built():
        built_for = map(int, _core.cuda_architectures().split(","))
        kernels = f"built for compute capability {', '.join(f'{arch // 100}.{arch // 10 % 10}' for arch in built_for)}"
    lines = {
        "ibp": f"{_core.version()}, format version {_core.FORMAT_VERSION}, in {FilePath(__file__).parent.parent}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "CUDA kernels": kernels,
        "CPU coders": f"{', '.join(coders)}; {torch.get_num_threads()} threads",
        "GPUs": "; ".join(map(_gpu_text, range(torch.cuda.device_count()))) or "none that torch sees",
        "calibration": f"of an {calibration.H200.gpu}; ibp.calibration.calibrate() measures this machine",
    }
    if calibration.is_measured(device):
        known = calibration.in_force(device)
        lines["calibration"] = f"measured on {known.gpu}, kept in {calibration.cache_file(device)}"
    if device.type == "cuda":
        lines["index_select"] = f"paths {', '.join(map(repr, gather.PATHS))}, or decoded by the CPU"
        lines["decompress"] = f"paths {', '.join(map(repr, streaming.PATHS))}, or decoded by the CPU"
    else:
        lines["index_select"] = lines["decompress"] = "decoded by the CPU"
    return lines


def _gpu_text(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    memory_gib, capability = found.total_memory / 2**30, f"{found.major}.{found.minor}"
    sms = found.multi_processor_count
    return f"cuda:{index} {found.name}, {memory_gib:.0f} GiB, {sms} SMs, compute capability {capability}"
