"""`ibp.deltas.make`: makes the delta from one version of a tensor or checkpoint to another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import torch

from .._common.sequences import cut, one_ahead
from .._fetch.streaming import decompress
from .._machine import memory
from .._rows.geometry import bytes_of
from .._tables.compressed_tensor import CompressedTensor
from . import _coding, _on_gpu
from ._coding import check_source, fingerprint
from ._tensors import CheckpointDelta, Delta, Version, compare

# Pairs are compared in batches. A batch has one pair, or several pairs whose new versions together have at most this
# many bytes. The GPU measures the next batch while the deltas of the present batch are made.
_MOST_BYTES = 2 << 30


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
    """Returns the delta from `base` to `new`, which can be sent or stored in place of new. `delta.apply_(base)` turns
    base into new.

    The delta holds the difference of the elements' bits, taken as integers, and not of their values. So `apply_`
    restores new bit for bit, including NaNs and negative zeros. The fewer elements have changed, and the less they have
    changed, the smaller the delta is. A delta is correct even if every element has changed.

    Example:
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        new, base: two versions of a tensor, with the same shape and dtype, contiguous or not; or two mappings from
            names to tensors, such as state dicts. Each tensor may also be an `ibp.CompressedTensor`.
        device: the device on which the differences are computed and stored. None: the device of new.

    Returns:
        An `ibp.deltas.Delta` for two tensors, or an `ibp.deltas.CheckpointDelta` for two mappings. The latter has no
        entry for a tensor whose bits have not changed. It stores a tensor whole if the tensor is new, or if its shape
        or dtype has changed.

    Raises:
        TypeError: an argument is not as described, or the dtypes differ.
        ValueError: the shapes differ, or the device cannot be used.
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
    """Returns the deltas of pairs (new, base) of tensors or tables. The two versions of a pair have the same shape and
    dtype."""
    parts = cut(pairs, lambda pair: pair[0].numel() * pair[0].dtype.itemsize, _MOST_BYTES)
    return [delta for made in one_ahead(begin_differences(part, device) for part in parts) for delta in made()]


def begin_differences(
    pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None, updates_bases: bool = False
) -> Callable[[], list[Delta]]:
    """For the pairs that are compared on a GPU, queues the kernels that measure how large the deltas become. Returns a
    function that waits for the GPUs, makes the deltas of all pairs, and returns them.

    updates_bases: whether each base is overwritten with the newer version once its delta is made. If so, all bases must
        be contiguous tensors.
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
