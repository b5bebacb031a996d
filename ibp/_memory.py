"""Pinned host memory of exact size, and views of it as tensors of a CUDA device."""

from __future__ import annotations

import torch

from . import _core, _ops


def empty(num_bytes: int, device: torch.device, pin: bool) -> torch.Tensor:
    """Uninitialised uint8 tensor; pinned memory of exactly this size where pin is set (torch's own allocator
    rounds up to a power of two)."""
    if not pin or num_bytes == 0:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if torch.cuda.is_available():
        torch.cuda.init()  # before that, torch takes no memory for pinned
    return torch.frombuffer(_core.PinnedBuffer(num_bytes), dtype=torch.uint8)


def to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is pinned or empty, else a pinned copy of a CPU tensor."""
    if tensor.numel() == 0 or tensor.is_pinned():
        return tensor
    pinned = empty(tensor.numel() * tensor.element_size(), tensor.device, pin=True)
    return pinned.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def device_view(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of a CUDA device over the memory of a contiguous pinned one, which it keeps alive.

    Pinned memory is every GPU's, whichever device was current when it was pinned, and whichever is now.

    Raises:
        RuntimeError: host is not pinned.
    """
    if host.numel() == 0:
        return torch.empty_like(host, device=device)
    with torch.cuda.device(device):
        capsule = _core.map_pinned(host, host.data_ptr(), host.numel() * host.element_size(), device.index)
        return torch.from_dlpack(capsule).view(host.dtype).view(host.shape)


_usable: set[torch.device] = {torch.device("cpu")}  # devices with their index, as canonical() has found them


def canonical(device: torch.device | str | int) -> torch.device:
    """The device with its index: "cuda" is the current CUDA device. TypeError, ValueError: it is none, or cannot
    be used."""
    if isinstance(device, torch.device) and device in _usable:
        return device
    found = _canonical(device)
    _usable.add(found)
    return found


def _canonical(device: torch.device | str | int) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        got = type(device).__name__
        raise TypeError(f"device is a {got}; wanted a torch.device, the name of one, or the number of a CUDA device")
    try:
        device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    except RuntimeError:  # torch knows no such device
        raise ValueError(f"device is {device!r}; wanted the name of a CPU or CUDA device") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; wanted a CPU or CUDA device")
    if device.type == "cpu":
        return torch.device("cpu")
    if not _core.cuda_is_built():
        why = "nvcc was not found when it was installed"
        raise ValueError(f"device is {str(device)!r}, but this build of ibp has no CUDA kernels ({why})")
    if not _ops.cuda_is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
