"""`ibp.deltas.make`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import torch

from .._common.sequences import cut, one_ahead
from .._fetch.streaming import decompress
from .._layout.geometry import bytes_of
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from . import _coding, _on_gpu
from ._checkpoints import CheckpointDelta, Version, compare
from ._fingerprint import check_source, fingerprint
from ._tensors import Delta

_MOST_BYTES = 2 << 30  # of tensors that are brought to a GPU at once, unless one has more; the next ones come beside


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
    parts = cut(pairs, lambda pair: pair[0].numel() * pair[0].dtype.itemsize, _MOST_BYTES)
    return [delta for made in one_ahead(begin_differences(part, device) for part in parts) for delta in made()]


def begin_differences(
    pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None, updates_bases: bool = False
) -> Callable[[], list[Delta]]:
    """Lets GPUs measure what `differences` makes. What it returns waits for them, and makes it.

    updates_bases: bases, which are contiguous tensors then, become the newer versions once their deltas are made.
    """
    targets = [memory.canonical(new.device if device is None else device) for new, _ in pairs]
    near: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, ((new, base), target) in enumerate(zip(pairs, targets)):
        if target.type == "cuda" and new.numel() > 0:
            near[index] = _brought(new, target), _brought(base, target)
            groups.setdefault((target, _coding.element_bytes_of(new.dtype)), []).append(index)
    makings = [
        (indices, _on_gpu.Making([_on_gpu.DeltaPair(*map(bytes_of, near[i])) for i in indices], width, updates_bases))
        for (_, width), indices in groups.items()
    ]

    def finish() -> list[Delta]:
        coded = {index: found for indices, making in makings for index, found in zip(indices, making.coded())}
        made = []
        for index, ((new, base), target) in enumerate(zip(pairs, targets)):
            newer, older = near.get(index) or (_brought(new, target), _brought(base, target))
            found = coded.get(index)
            is_coded = found is not None and found.parts is not None
            if found is not None and found.parts is not None:
                made.append(Delta(_on_gpu.table_of(found.parts, new.shape, new.dtype), found.base, found.result))
            else:
                difference = _coding.integers_of(newer) - _coding.integers_of(older)
                made.append(Delta(_coding.code(difference, newer), fingerprint(older), fingerprint(newer)))
            if updates_bases and not (is_coded and base.device == target):
                assert isinstance(base, torch.Tensor)
                _coding.bits_of(base).copy_(_coding.bits_of(newer))
        return made

    return finish


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)
