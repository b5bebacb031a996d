"""`ibp diff`: compares two versions of a checkpoint, tensor by tensor and block by block."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import ibp
from ibp._files import as_json, dtype_name, file_of
from ibp.checkpoints._source import SourceTensor
from ibp.checkpoints._sources import open_sources

from . import output, work

SAME, CHANGED, NEW, REMOVED, REPLACED = "same", "changed", "new", "removed", "replaced"
_BLOCK_BYTES = 16 << 20  # Tensors are read and compared in blocks of this size.
# A function of (old tensor, new tensor) that returns the size of their delta in bytes. The two tensors have the same
# name, shape and dtype.
_Weighing = Callable[[SourceTensor, SourceTensor], int]


def run(arguments: argparse.Namespace) -> int:
    if arguments.output == work.STREAM:
        raise output.Failure("the delta cannot go to stdout (-); wanted a path")
    if arguments.output is not None and not work.may_write(arguments, arguments.output):
        return 0
    device = work.device_of(arguments)
    with work.local([arguments.base, arguments.new]) as given, work.threads(arguments.jobs):
        with open_sources(given[0], verify=True) as base, open_sources(given[1], verify=True) as new:
            names = work.chosen(arguments, dict.fromkeys([*new.tensors, *base.tensors]))
            deltas: dict[str, Any] = {}
            weigh: _Weighing | None = _by_blocks(device)
            if arguments.output is not None:
                weigh = _by_tensors(device, deltas)
            elif arguments.no_weigh:
                weigh = None
            shown = work.bar(arguments, "diff", names)
            found, written = list(_changes(base.tensors, new.tensors, shown, weigh)), None
            if arguments.output is not None:
                whole = [change.name for change in found if change.status in (NEW, REPLACED)]
                deltas.update((name, new.tensors[name].tensor()) for name in whole)
                removed = [change.name for change in found if change.status == REMOVED]
                path = file_of(arguments.output)
                ibp.save(path, ibp.deltas.CheckpointDelta(deltas, removed))
                written = work.size_of(path)
    differs = any(change.status != SAME for change in found)
    document = {
        "old": arguments.base,
        "new": arguments.new,
        "differs": differs,
        "tensors": [change.document() for change in found],
        "total": _total(found),
        "output": arguments.output,
        "written_bytes": written,
    }
    output.report(arguments, document, *_parts(arguments, found, document))
    return 1 if differs and arguments.exit_code else 0


def _total(found: list[Change]) -> dict[str, Any]:
    after = [change for change in found if change.status != REMOVED]
    weights = [change.delta_bytes for change in found]
    return {
        "tensors": dict(Counter(change.status for change in found)),
        "num_elements": sum(change.num_elements for change in after),
        "num_bytes": sum(change.num_bytes for change in after),
        "changed": sum(change.changed for change in after),
        "delta_bytes": None if None in weights else sum(filter(None, weights)),
    }


def _parts(arguments: argparse.Namespace, found: list[Change], document: dict[str, Any]) -> list[output.Part]:
    rows = [
        [
            change.name,
            dtype_name(change.dtype),
            change.status,
            f"{change.changed:,}",
            output.show_share(change.share),
            "" if change.delta_bytes is None else output.show_size(change.delta_bytes),
        ]
        for change in found
        if arguments.all or change.status != SAME
    ]
    names = ["tensor", "dtype", "status", ">changed", ">share", ">delta"]
    total = document["total"]
    counts = ", ".join(f"{number:,} {status}" for status, number in total["tensors"].items())
    parts: list[output.Part] = [output.table(names, rows), ""] if rows else []
    parts.append(f"{output.show_count(len(found), 'tensor')}: {counts or 'none'}.")
    if total["delta_bytes"] is not None and document["differs"]:
        share = total["delta_bytes"] / total["num_bytes"] if total["num_bytes"] else 0.0
        parts.append(
            f"A delta weighs {output.show_size(total['delta_bytes'])}, {output.show_share(share)} of the new version's "
            f"{output.show_size(total['num_bytes'])}."
        )
    if document["written_bytes"] is not None:
        where = output.shown(arguments.output)
        parts.append(f"{where}: {output.show_size(document['written_bytes'])} written.")
    return parts


# ---- what changed ----


@dataclass(frozen=True)
class Change:
    """The difference between the old and the new version of one tensor."""

    name: str  # The tensor's name.
    status: str  # "same"; "changed"; "new"; "removed"; or "replaced" by a tensor of another shape or dtype.
    # The dtype, the shape, the number of elements and the size in bytes of the new version, or of the old version if
    # the tensor was removed.
    dtype: torch.dtype
    shape: tuple[int, ...]
    num_elements: int
    num_bytes: int
    changed: int  # Number of elements whose bits differ. All elements of a new or replaced tensor count.
    delta_bytes: int | None  # Size in bytes that the tensor takes in a delta. None: it was not computed (--no-weigh).

    @property
    def share(self) -> float:
        """The fraction of the elements that changed."""
        return self.changed / self.num_elements if self.num_elements else 0.0

    def document(self) -> dict[str, Any]:
        return {**as_json(self), "share": self.share}


def _changes(
    base: Mapping[str, SourceTensor], new: Mapping[str, SourceTensor], names: Iterable[str], weigh: _Weighing | None
) -> Iterator[Change]:
    """Compares the named tensors of two versions. Yields a `Change` for each name. weigh: a function that returns the
    size of a changed tensor's delta. None: the sizes of deltas are not computed."""
    for name in names:
        if name not in new:
            yield _whole(REMOVED, base[name], 0, 0)
        elif name not in base:
            yield _whole(NEW, new[name], _count(new[name]), new[name].num_bytes)
        elif (base[name].dtype, base[name].shape) != (new[name].dtype, new[name].shape):
            yield _whole(REPLACED, new[name], _count(new[name]), new[name].num_bytes)
        else:
            changed = sum(_differing(*block, new[name].dtype) for block in _blocks(base[name], new[name]))
            taken = None if weigh is None else weigh(base[name], new[name]) if changed else 0
            yield _whole(CHANGED if changed else SAME, new[name], changed, taken)


def _whole(status: str, tensor: SourceTensor, changed: int, taken: int | None) -> Change:
    return Change(tensor.name, status, tensor.dtype, tensor.shape, _count(tensor), tensor.num_bytes, changed, taken)


def _count(tensor: SourceTensor) -> int:
    return tensor.num_bytes // tensor.dtype.itemsize


def _by_blocks(device: torch.device) -> _Weighing:
    """Returns a function that makes a delta of each changed block of a tensor on the device, and returns the total size
    of these deltas. The function needs little memory, whatever the size of the tensor."""

    def weigh(base: SourceTensor, new: SourceTensor) -> int:
        taken = 0
        for before, after in _blocks(base, new):
            if _differing(before, after, new.dtype):
                delta = ibp.deltas.make(_tensor(after, new.dtype).to(device), _tensor(before, new.dtype).to(device))
                taken += delta.stored_bytes
        return taken

    return weigh


def _by_tensors(device: torch.device, kept: dict[str, Any]) -> _Weighing:
    """Returns a function that makes the delta of a whole tensor on the device, stores it in `kept` under the tensor's
    name, and returns its size."""

    def weigh(base: SourceTensor, new: SourceTensor) -> int:
        delta = ibp.deltas.make(new.tensor().to(device), base.tensor().to(device)).to("cpu")
        kept[new.name] = delta
        return delta.stored_bytes

    return weigh


def _blocks(base: SourceTensor, new: SourceTensor) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start in range(0, new.num_bytes, _BLOCK_BYTES):
        end = min(start + _BLOCK_BYTES, new.num_bytes)
        yield base.read(start, end), new.read(start, end)


def _differing(a: np.ndarray, b: np.ndarray, dtype: torch.dtype) -> int:
    """Returns the number of elements of a dtype whose bits differ in the two blocks of bytes."""
    words = np.dtype(f"u{min(dtype.itemsize, 8)}")
    unequal = a.view(words) != b.view(words)
    if dtype.itemsize > words.itemsize:  # Complex numbers of 16 bytes are two words each.
        unequal = unequal.reshape(-1, dtype.itemsize // words.itemsize).any(1)
    return int(np.count_nonzero(unequal))


def _tensor(data: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Copies bytes of a file to a tensor of the given dtype."""
    return torch.from_numpy(np.array(data)).view(dtype)
