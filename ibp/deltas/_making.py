"""`ibp.deltas.make`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

import torch

from .._common.sequences import cut
from .._fetch.streaming import decompress
from .._layout.geometry import bytes_of
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from . import _coding, _on_gpu
from ._checkpoints import CheckpointDelta, compare
from ._fingerprint import check_source, fingerprint
from ._tensors import Delta

Version = torch.Tensor | CompressedTensor
_MOST_BYTES = 4 << 30  # of the tensors of one call, unless one has more: they are brought to a GPU at once


@overload
def make(new: Version, base: Version, *, device: torch.device | str | int | None = None) -> Delta: ...
@overload
def make(
    new: Mapping[str, Version], base: Mapping[str, Version], *, device: torch.device | str | int | None = None
) -> CheckpointDelta: ...
def make(
    new: Version | Mapping[str, Version],
    base: Version | Mapping[str, Version],
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """What changed from base to new, to be sent or stored instead of new: `delta.apply_(base)` makes base new again.

    Bits are compared and subtracted, not values: what is applied is new, bit for bit, with its NaNs and negative
    zeros. The fewer elements changed, and the less, the smaller it is; a delta in which everything changed is right
    too.

    Example:
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        new, base: two versions of a tensor, of one shape and dtype, contiguous or not; or mappings from names to
            tensors, such as two state dicts. `ibp.CompressedTensor`s are taken in place of tensors.
        device: where the differences are worked out, and live; None: on new's device.

    Returns:
        `ibp.deltas.Delta` of two tensors. `ibp.deltas.CheckpointDelta` of two mappings: tensors with equal bits take
        nothing; tensors that are new, or have another shape or dtype than before, are kept whole.

    Raises:
        TypeError: an argument is none of these, or the dtypes differ.
        ValueError: the shapes differ, or device is none that can be used.
    """
    if isinstance(new, Mapping) and isinstance(base, Mapping):
        return compare(new, base, lambda pairs: differences(pairs, device))
    for name, version in (("new", new), ("base", base)):
        if isinstance(version, Mapping):
            raise TypeError(f"only {name} is a mapping; wanted two tensors, or two mappings from names to tensors")
        check_source(version, name)
    assert not isinstance(new, Mapping) and not isinstance(base, Mapping)
    if new.dtype != base.dtype:
        raise TypeError(f"new has dtype {new.dtype}, base {base.dtype}; wanted the same")
    if new.shape != base.shape:
        raise ValueError(f"new has shape {list(new.shape)}, base {list(base.shape)}; wanted the same")
    return differences([(new, base)], device)[0]


def differences(pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None) -> list[Delta]:
    """The deltas of pairs of tensors or tables, (new, base), each of one shape and dtype."""
    made: list[Delta | None] = [None] * len(pairs)
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, (new, base) in enumerate(pairs):
        target = memory.canonical(new.device if device is None else device)
        if target.type == "cuda" and new.numel() > 0:
            groups.setdefault((target, _coding.element_bytes_of(new.dtype)), []).append(index)
        else:
            made[index] = _difference(_brought(new, target), _brought(base, target))
    for (target, element_bytes), indices in groups.items():
        for part in cut(indices, lambda index: pairs[index][0].numel() * pairs[index][0].dtype.itemsize, _MOST_BYTES):
            near = [(_brought(pairs[i][0], target), _brought(pairs[i][1], target)) for i in part]
            for index, found in zip(part, _differences_on_gpu(near, element_bytes)):
                made[index] = found
    return [found for found in made if found is not None]


def _differences_on_gpu(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], element_bytes: int) -> list[Delta]:
    coded = _on_gpu.make([_on_gpu.DeltaPair(bytes_of(new), bytes_of(base)) for new, base in pairs], element_bytes)
    return [
        _difference(new, base)
        if found.parts is None
        else Delta(_on_gpu.table_of(found.parts, new.shape, new.dtype), found.base, found.result)
        for (new, base), found in zip(pairs, coded)
    ]


def _difference(new: torch.Tensor, base: torch.Tensor) -> Delta:
    """Of tensors on one device, by a codebook for any differences."""
    found = _coding.integers_of(new) - _coding.integers_of(base)
    return Delta(_coding.code(found, new), fingerprint(base), fingerprint(new))


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)
