"""The commands that compare: `ibp verify`, a file with its checksums, and `ibp diff`, two versions of a checkpoint.

`verify` also says which tensors of a damaged file are damaged. `diff` counts the elements that differ, and weighs or
writes the delta between the versions.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

import ibp
from ibp._files import INDEX_SUFFIX, as_json, damaged_blocks, dtype_name, file_of, format_of_name, is_url, views_in
from ibp.checkpoints._inputs import (
    SourceFormatError,
    expand,
    files_to_verify,
    format_of,
    local_path,
    open_source,
    open_sources,
)
from ibp.checkpoints._source import SourceTensor

from . import output, work

GOOD, DAMAGED, UNCHECKED = "good", "damaged", "no checksums"  # Statuses of files.
SAME, CHANGED, NEW, REMOVED, REPLACED = "same", "changed", "new", "removed", "replaced"  # Statuses of tensors.
_BLOCK_BYTES = 16 << 20  # Tensors are read and compared in blocks of this size.
# A function of (old tensor, new tensor) that returns the size of their delta in bytes. The two tensors have the same
# name, shape and dtype.
_Weighing = Callable[[SourceTensor, SourceTensor], int]


# ---- verify ----


def verify(arguments: argparse.Namespace) -> int:
    """Runs `ibp verify`: compares the contents of files with their checksums."""
    with work.local(arguments.inputs) as given, work.threads(arguments.jobs):
        found = [_checked(file, arguments) for path in expand(given) for file in files_to_verify(path)]
    document = {"files": found, "good": all(one["status"] == GOOD for one in found)}
    output.report(arguments, document, *_verify_parts(found))
    return 0 if document["good"] else 1


def _checked(path: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Verifies one file. Returns what the command reports about it."""
    told: dict[str, Any] = {"path": path, "status": GOOD, "bytes": 0, "tensors": 0, "tables": 0}
    told.update(error=None, damaged=[], by_codebook=[], suspect=[])
    if _has_other_format(path):
        with open_source(path) as read:
            return {**told, "status": UNCHECKED, "tensors": len(read.tensors)}
    try:
        with local_path(path) as near, ibp.open(near) as file:
            told.update(tensors=len(file), tables=len(file.tables))
            try:
                told["bytes"] = file.verify(content=arguments.content, progress=output.show_bars(arguments))
            except (ibp.ChecksumError, ibp.CorruptTableError) as error:
                told.update(status=DAMAGED, error=output.sentence(error))
                with contextlib.suppress(ibp.ChecksumError):  # A header or the checksums themselves are damaged.
                    told.update(_damage(file, arguments.content))
            if told["status"] == GOOD and not file.has_checksums:
                told["status"] = UNCHECKED
    except ibp.FileFormatError as error:
        told.update(status=DAMAGED, error=output.sentence(error))
    return told


def _has_other_format(path: str) -> bool:
    """Returns whether a file holds tensors, but is not a safetensors file. Looks at the bytes of a local file, but only
    at the suffix of a URL."""
    if is_url(path):
        return format_of_name(path) not in (None, "safetensors")
    if not os.path.isfile(path) or path.endswith(INDEX_SUFFIX):
        return False
    try:
        return format_of(path) != "safetensors"
    except SourceFormatError:  # `ibp.open` will report the fault.
        return False


def _damage(file: ibp.File, content: bool) -> dict[str, Any]:
    """Returns a dictionary with the names of tensors in a damaged file, in three lists: "damaged"; "by_codebook", the
    damaged tensors that share a damaged codebook; and "suspect", tensors that may be damaged. If blocks are damaged,
    "error" is a sentence about the first of them.

    Checksums tell which blocks are damaged. Fingerprints tell which tables are damaged. If no tensor and no codebook in
    a damaged block is known to be damaged, all tensors with bytes in the block may be damaged, except those that are
    known to be intact. If the block has bytes of only one tensor, this tensor is damaged.

    Args:
        content: whether to decode tables outside of damaged blocks, too.
    """
    blocks = damaged_blocks(file)
    inside = {name for block in blocks for name in block.tensors}
    used = {name for block in blocks for users in block.codebooks for name in users}
    good = {name: _is_what_it_was(file, name) for name in {*inside, *used, *(file if content else ())}}
    # For each codebook that is certainly damaged, the tables that use it. A codebook in a damaged block is certainly
    # damaged if all tables that use it are damaged. If only one table uses it, this table must also have no rows in a
    # damaged block. Otherwise the rows may be damaged, and not the codebook.
    shared = [
        users
        for block in blocks
        for users in block.codebooks
        if all(good[name] is False for name in users) and (len(users) > 1 or users[0] not in inside)
    ]
    by_codebook = set(itertools.chain(*shared))
    damaged, suspect = {name for name, is_good in good.items() if is_good is False}, set[str]()
    for block in blocks:
        books = [users for users in block.codebooks if not any(good[name] for name in users)]
        tensors = [name for name in block.tensors if not good[name] and name not in by_codebook]
        if any(users in shared for users in books) or not damaged.isdisjoint(tensors):
            continue
        names = {*tensors, *itertools.chain(*books)}
        is_alone = len({*block.tensors, *itertools.chain(*block.codebooks)}) == 1
        (damaged if is_alone else suspect).update(names)
    found = {"damaged": damaged, "by_codebook": by_codebook & damaged, "suspect": suspect - damaged}
    bases = {name: view.base for name, view in views_in(file).items()}  # A view is in the same lists as its base.
    told: dict[str, Any] = {
        kind: [name for name in file if bases.get(name, name) in names] for kind, names in found.items()
    }
    if blocks:
        more = output.show_count(len(blocks) - 1, "other block")
        others = f", as {more} {'has' if len(blocks) == 2 else 'have'}" if len(blocks) > 1 else ""
        told["error"] = output.one_line(f"{blocks[0].place}, has another checksum{others}")
    return told


def _is_what_it_was(file: ibp.File, name: str) -> bool | None:
    """Returns whether the decoded content of a table has the fingerprint in the file. Returns None if the file has no
    fingerprint for it."""
    if name not in file.tables or file.fields(name).content is None:
        return None
    try:
        return ibp.deltas.fingerprint(cast(ibp.CompressedTensor, file[name])) == file.fields(name).content
    except (ibp.FileFormatError, ibp.CorruptTableError):
        return False


def _verify_parts(found: list[dict[str, Any]]) -> list[output.Part]:
    rows = [
        [one["path"], one["tensors"], one["tables"], output.show_size(one["bytes"]), one["status"]] for one in found
    ]
    parts: list[output.Part] = [output.table(["file", ">tensors", ">tables", ">checked", "status"], rows)]
    for one in found:
        if one["status"] == DAMAGED:
            parts += ["", one["error"]]
            for name in one["damaged"]:
                shared = " (by its codebook, which it shares with others)" if name in one["by_codebook"] else ""
                parts.append(f"  damaged: {output.shown(name)}{shared}")
            parts += [f"  perhaps damaged: {output.shown(name)}" for name in one["suspect"]]
        if one["status"] == UNCHECKED:
            verified = f"only {output.show_size(one['bytes'])} were" if one["bytes"] else "nothing was"
            parts += ["", f"{output.shown(one['path'])} has no checksums: {verified} verified."]
    return parts


# ---- diff ----


def diff(arguments: argparse.Namespace) -> int:
    """Runs `ibp diff`: compares two versions of a checkpoint, tensor by tensor and block by block."""
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
    output.report(arguments, document, *_diff_parts(arguments, found, document))
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


def _diff_parts(arguments: argparse.Namespace, found: list[Change], document: dict[str, Any]) -> list[output.Part]:
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
