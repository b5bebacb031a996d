"""Makes deltas: `ibp.deltas.make`, for one version of a tensor or checkpoint and another.

Pairs of versions are compared in batches. On a GPU, `Making` codes the differences of many pairs at once, with the
known codebook. If these take too many bytes, and on a CPU, the versions of a pair are subtracted, and the difference is
coded like any other tensor. `begin_differences` queues the work that measures a batch, so that a GPU measures the next
batch while the deltas of the present one are made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import numpy as np
import torch

from .. import _core
from .._common.sequences import cut, one_ahead
from .._fetch.streaming import decompress
from .._machine import memory, staging
from .._rows.geometry import bytes_of
from .._tables.compressed_tensor import CompressedTensor
from ._applying import memory_of
from ._coding import (
    ROW_BYTES,
    WELL_CODED,
    Version,
    bits_of,
    check_source,
    code,
    element_bytes_of,
    fingerprint,
    finished,
    first_rows,
    integers_of,
    known_codebook,
)
from ._tensors import CheckpointDelta, Delta

# A batch has one pair, or several pairs whose new versions together have at most this many bytes.
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
        return _compared(new, base, device)
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


def _compared(
    new: Mapping[str, Version], base: Mapping[str, Version], device: torch.device | str | int | None
) -> CheckpointDelta:
    """Returns the delta from checkpoint `base` to checkpoint `new`. device: as for `make`."""
    changes: dict[str, Delta | Version] = {}
    pairs: dict[tuple[Any, ...], tuple[Version, Version]] = {}
    names: dict[str, tuple[Any, ...]] = {}  # each name's key in `pairs`; tied weights share a key
    for name, tensor in new.items():
        check_source(tensor, name)
        older = base.get(name)
        if older is not None:
            check_source(older, name)
        if older is None or older.shape != tensor.shape or older.dtype != tensor.dtype:
            changes[name] = tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor
        else:
            names[name] = memory_of(tensor), memory_of(older)
            pairs.setdefault(names[name], (tensor, older))
    made = dict(zip(pairs, differences(list(pairs.values()), device)))
    changes.update((name, made[pair]) for name, pair in names.items() if not made[pair].is_empty)
    return CheckpointDelta(
        {name: changes[name] for name in new if name in changes}, [name for name in base if name not in new]
    )


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
            groups.setdefault((target, element_bytes_of(new.dtype)), []).append(index)
    makings = [(indices, Making([near[i] for i in indices], updates_bases)) for indices in groups.values()]

    def finish() -> list[Delta]:
        coded = {index: found for indices, making in makings for index, found in zip(indices, making.deltas())}
        made = []
        for index, ((new, base), target) in enumerate(zip(pairs, targets)):
            newer, older = near.get(index) or (_brought(new, target), _brought(base, target))
            delta = coded.get(index)
            is_updated = delta is not None and base.device == target
            if delta is None:
                difference = integers_of(newer) - integers_of(older)
                delta = Delta(code(difference, newer), fingerprint(older), fingerprint(newer))
            made.append(delta)
            if updates_bases and not is_updated:
                assert isinstance(base, torch.Tensor)
                bits_of(base).copy_(bits_of(newer))
        return made

    return finish


def _brought(x: Version, device: torch.device) -> torch.Tensor:
    if isinstance(x, CompressedTensor):
        return decompress(x, device=device, check=True)
    return x.detach().to(device)


# ---- on a GPU ----


class Making:
    """Makes the deltas of several pairs on one GPU, with the known codebook. The kernels subtract the bases while they
    code. The constructor queues a kernel that measures the size of each coded row; `deltas` waits for this kernel.

    Args:
        pairs: (newer, base) for each delta, on one GPU. The elements of all tensors have the same size, and no tensor
            is empty.
        updates_bases: whether each base is overwritten with the newer version when the differences are coded. If so,
            all bases must be contiguous.
    """

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], updates_bases: bool) -> None:
        self._like, self._updates_bases = [newer for newer, _ in pairs], updates_bases
        self._pairs = [(bytes_of(newer), bytes_of(base)) for newer, base in pairs]
        self._device = device = pairs[0][0].device
        self._sizes = [newer.numel() for newer, _ in self._pairs]
        self._firsts = first_rows(self._sizes, ROW_BYTES)
        self._num_rows = [-(-size // ROW_BYTES) for size in self._sizes]
        self._tensors, self._edges, self._last_rows, self._first_groups = self._placed()
        self._codebook = known_codebook(element_bytes_of(pairs[0][0].dtype))
        self._coding, num_rows = (self._codebook.words(device), self._codebook.codec), self._firsts[-1]
        self._lengths = torch.empty(num_rows, dtype=torch.uint16, device=device)
        self._counts = torch.empty(8 * num_rows, dtype=torch.uint16, device=device)
        self._sums = torch.zeros(2 * len(pairs), dtype=torch.int64, device=device)
        torch.ops.ibp.measure_deltas.default(self._tensors, *self._coding, self._lengths, self._counts, self._sums)
        self._index()

    def _placed(self) -> tuple[torch.Tensor, ...]:
        """Returns four int64 tensors on the GPU: (the structs that describe the n pairs to the kernels [n, 10]; the
        index of each pair's first group of rows, then the index of the group after each pair's last one [2 * n]; the
        index of each pair's last row [n]; for each group, the index of its pair's first group [number of groups])."""
        structs = [
            [base.data_ptr(), newer.data_ptr(), base.numel(), first, 0, 0, 0, 0, 0, 0]
            for (newer, base), first in zip(self._pairs, self._firsts)
        ]
        ends = np.array(self._firsts) // _core.ROWS_PER_BASE
        first, last = ends[:-1], ends[1:]
        last_rows = np.add(self._firsts[:-1], self._num_rows) - 1
        parts = [np.array(structs).ravel(), first, last, last_rows, np.repeat(first, last - first)]
        near = staging.queued(torch.from_numpy(np.concatenate(parts)), self._device)
        tensors, *others = near.split([len(parts[0]), 2 * len(first), len(first), len(parts[-1])])
        return tensors.view(-1, 10), *others

    def _index(self) -> None:
        """Queues the computation of the offsets at which coded rows begin, and a copy to the host of the numbers that
        `_read` needs."""
        self._bases = torch.ops.ibp.index_rows(self._lengths, self._lengths.numel() * ROW_BYTES, ROW_BYTES, 0)
        last_lengths = self._lengths.view(torch.int16)[self._last_rows].to(torch.int64)
        self._found = staging.Coming(torch.cat([self._bases[self._edges], last_lengths, self._sums]))

    def _read(self) -> tuple[list[int], list[int], list[int]]:
        """Waits for the results of `_index`. Returns (the offset at which each pair's coded rows begin, then the offset
        past the last pair's rows; the size in bytes of each pair's coded rows; the sums of the words of each pair's
        base and newer version)."""
        found, n = self._found.wait().tolist(), len(self._sizes)
        sizes = [
            # The offsets count a last row that is stored raw as a full row. A length of 0 marks a raw row.
            end - start - (-size % ROW_BYTES if length == 0 else 0)
            for size, start, end, length in zip(self._sizes, found[:n], found[n : 2 * n], found[2 * n : 3 * n])
        ]
        return [*found[:n], found[2 * n - 1]], sizes, found[3 * n :]

    def deltas(self) -> list[Delta | None]:
        """Returns the delta of each pair, or None if its coded differences would take more than WELL_CODED times the
        size of the tensor. The bases of these pairs are not overwritten."""
        starts, sizes, sums = self._read()
        badly_coded = {i for i, size in enumerate(self._sizes) if sizes[i] > WELL_CODED * size}
        if badly_coded:
            for i in badly_coded:
                # Marks all rows of the pair as default rows, so that they take no bytes in `overflow` and encode_deltas
                # skips them.
                self._lengths.view(torch.int16)[self._firsts[i] :][: self._num_rows[i]] = ROW_BYTES
            self._index()
            starts, sizes, sums = self._read()
        overflow = torch.empty(starts[-1], dtype=torch.uint8, device=self._device)
        torch.ops.ibp.encode_deltas.default(
            self._tensors, *self._coding, self._lengths, self._counts, self._bases, self._updates_bases, overflow
        )
        bases = self._bases[:-1] - self._bases[self._first_groups]
        made: list[Delta | None] = []
        for i, (like, first) in enumerate(zip(self._like, self._firsts)):
            if i in badly_coded:
                made.append(None)
                continue
            groups = slice(first // _core.ROWS_PER_BASE, self._firsts[i + 1] // _core.ROWS_PER_BASE)
            table = CompressedTensor(
                shape=like.shape,
                dtype=like.dtype,
                scheme="planes",
                row_bytes=ROW_BYTES,
                slot_bytes=0,
                slots=overflow[:0],
                overflow=overflow[starts[i] : starts[i] + sizes[i]],
                lengths=self._lengths[first : first + self._num_rows[i]],
                bases=bases[groups] if sizes[i] else bases[:0],
                codebook=self._codebook,
            )
            made.append(Delta(table, *(finished(total, self._sizes[i]) for total in sums[2 * i : 2 * i + 2])))
        return made
