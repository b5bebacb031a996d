"""Makes deltas: `ibp.deltas.make`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import overload

import torch

from .._common.sequences import cut, one_ahead
from .._fetch.streaming import decompress
from .._machine import memory
from .._tables.compressed_tensor import CompressedTensor
from ._checkpoints import CheckpointDelta, Version, compare
from ._coding import code, element_bytes_of, integers_of, known_codebook
from ._differences import CodedDifferences
from ._fingerprint import check_source, fingerprint
from ._tensors import Delta

# Bytes of tensors that are compared at once, unless one of them has more. The next ones are brought to the device while
# a GPU still works on these.
_MOST_BYTES = 512 << 20


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
    """Returns what changed from base to new, to be sent or stored instead of new: `delta.apply_(base)` makes new out of
    base.

    Bits are compared and subtracted, not values. So the result of applying the delta is new, bit for bit, with its NaNs
    and negative zeros. The fewer elements changed, and the less they changed, the smaller the delta is. Everything may
    have changed.

    Example:
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}
        >>> change = ibp.deltas.make(new, old, device="cpu")
        >>> change.apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        new, base: two versions of a tensor, of one shape and dtype, contiguous or not; or two mappings from names to
            tensors, such as state dicts. An `ibp.CompressedTensor` may take the place of a tensor.
        device: computes the differences, and holds the delta. None: the device of new.

    Returns:
        An `ibp.deltas.Delta` for two tensors; an `ibp.deltas.CheckpointDelta` for two mappings. In the latter, tensors
        with equal bits take no memory. Tensors that are new, or had another shape or dtype before, are kept whole.

    Raises:
        TypeError: an argument is of another type, or the dtypes differ.
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
    """Returns the deltas of pairs of tensors or tables, (new, base), each of one shape and dtype."""
    parts = cut(pairs, lambda pair: pair[0].numel() * pair[0].dtype.itemsize, _MOST_BYTES)
    return [delta for made in one_ahead(begin_differences(part, device) for part in parts) for delta in made()]


def begin_differences(
    pairs: Sequence[tuple[Version, Version]], device: torch.device | str | int | None
) -> Callable[[], list[Delta]]:
    """Lets GPUs begin what `differences` does. Returns a function that waits for them, and returns the deltas."""
    targets = [memory.canonical(new.device if device is None else device) for new, _ in pairs]
    near = [(_brought(new, target), _brought(base, target)) for (new, base), target in zip(pairs, targets)]
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for index, (newer, _) in enumerate(near):
        if newer.numel():
            groups.setdefault((newer.device, element_bytes_of(newer.dtype)), []).append(index)
    begun = [(indices, CodedDifferences([near[i] for i in indices])) for indices in groups.values()]

    def finish() -> list[Delta]:
        made = {index: delta for indices, coded in begun for index, delta in zip(indices, coded.deltas())}
        for index, (newer, _) in enumerate(near):
            if newer.numel() == 0:
                known, found = known_codebook(element_bytes_of(newer.dtype)), fingerprint(newer)
                made[index] = Delta(code(integers_of(newer), newer, known), found, found)
        return [made[index] for index in range(len(near))]

    return finish


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    """Returns a tensor, or the tensor of a table, on a device."""
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)
