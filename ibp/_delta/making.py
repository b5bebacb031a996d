"""`ibp.delta`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import overload

import torch

from .. import _memory
from .._compressed_tensor import CompressedTensor
from .._fetch.streaming import decompress
from .._fingerprint import check_source, fingerprint
from . import coding
from .checkpoints import CheckpointDelta, compare
from .tensors import Delta

Version = torch.Tensor | CompressedTensor


@overload
def delta(new: Version, base: Version, *, device: torch.device | str | int | None = None) -> Delta: ...
@overload
def delta(
    new: Mapping[str, Version], base: Mapping[str, Version], *, device: torch.device | str | int | None = None
) -> CheckpointDelta: ...
def delta(
    new: Version | Mapping[str, Version],
    base: Version | Mapping[str, Version],
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """What changed from base to new, to be sent or stored instead of new: `delta.apply_(base)` makes base new again.

    Bits are compared and subtracted, not values: what is applied is new, bit for bit, with its NaNs and negative
    zeros. The fewer elements changed, and the less, the smaller it is; a delta in which everything changed is right
    too.

    Args:
        new, base: two versions of a tensor, of one shape and dtype, contiguous or not; or mappings from names to
            tensors, such as two state dicts. `ibp.CompressedTensor`s are taken in place of tensors.
        device: where the differences are worked out, and live; None: on new's device.

    Returns:
        `ibp.Delta` of two tensors. `ibp.CheckpointDelta` of two mappings: tensors with equal bits take nothing, those
        that are new, or have another shape or dtype than before, are kept whole.

    Raises:
        TypeError: an argument is none of these, or the dtypes differ.
        ValueError: the shapes differ, or device is none that can be used.
    """
    if isinstance(new, Mapping) and isinstance(base, Mapping):
        return compare(new, base, lambda newer, older: difference(newer, older, device))
    for name, version in (("new", new), ("base", base)):
        if isinstance(version, Mapping):
            raise TypeError(f"only {name} is a mapping; wanted two tensors, or two mappings from names to tensors")
        check_source(version, name)
    assert not isinstance(new, Mapping) and not isinstance(base, Mapping)
    if new.dtype != base.dtype:
        raise TypeError(f"new has dtype {new.dtype}, base {base.dtype}; wanted the same")
    if new.shape != base.shape:
        raise ValueError(f"new has shape {list(new.shape)}, base {list(base.shape)}; wanted the same")
    return difference(new, base, device)


def difference(new: Version, base: Version, device: torch.device | str | int | None) -> Delta:
    """The delta of two tensors or tables of one shape and dtype."""
    target = _memory.canonical(new.device if device is None else device)
    newer, older = _brought(new, target), _brought(base, target)
    fingerprints = fingerprint(older), fingerprint(newer)
    differences = coding.integers_of(newer) - coding.integers_of(older)
    return Delta(coding.code(differences, new), *fingerprints)


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)
