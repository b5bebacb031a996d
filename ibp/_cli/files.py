"""Runs the commands that write and compare files of tensors: `ibp compress`, `decompress`, `verify`, `diff`, `apply`.

A command that writes first finds out whether its output may be written, then does the work inside the contexts of
`work.py`, which bring stdin to a file and a file to stdout, and at last reports the files. `ibp.checkpoints` does the
work of `compress` and `decompress`. `verify` compares a file with its checksums, and says which tensors of a damaged
file are damaged. `diff` counts the elements in which two versions of a checkpoint differ, and weighs or writes the
delta between them. `apply` makes the new version as a `Source`, whose tensors are made when they are read, and lets
`ibp.checkpoints` write it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

import ibp
from ibp._files import INDEX_SUFFIX, damage_in, dtype_name, file_of, format_of_name, is_url
from ibp._rows.geometry import bytes_of
from ibp.checkpoints import CheckpointReport
from ibp.checkpoints._converting import verified_bytes, write_source
from ibp.checkpoints._inputs import (
    SourceFormatError,
    expand,
    files_to_verify,
    format_of,
    lines_that_load,
    local_path,
    open_source,
    open_sources,
)
from ibp.checkpoints._source import Source, SourceTensor

from . import output, work
from .main import SUFFIXES

GOOD, DAMAGED, UNCHECKED = "good", "damaged", "no checksums"  # Statuses of files.
SAME, CHANGED, NEW, REMOVED, REPLACED = "same", "changed", "new", "removed", "replaced"  # Statuses of tensors.
_BLOCK_BYTES = 16 << 20  # Tensors are read and compared in blocks of this size.
# A function of (old tensor, new tensor) that returns the size of their delta in bytes. The two tensors have the same
# name, shape and dtype.
_Weighing = Callable[[SourceTensor, SourceTensor], int]


# ---- compress ----


def compress(arguments: argparse.Namespace) -> int:
    """Runs `ibp compress`: compresses checkpoints and arrays."""
    arguments.output = work.output_of(arguments, arguments.inputs)
    if not work.may_write(arguments, arguments.output, to_coded=True):
        return 0
    with (
        work.local(arguments.inputs) as given,
        work.written(arguments.output, ".safetensors") as target,
        work.threads(arguments.jobs),
    ):
        try:
            report = ibp.checkpoints.compress(
                given,
                target,
                scheme=arguments.scheme,
                level=arguments.level,
                shard_bytes=None if arguments.output == work.STREAM else arguments.shard_bytes,
                include=arguments.include or None,
                exclude=arguments.exclude,
                restart=not arguments.no_restart,
                verify_inputs=arguments.verify_inputs,
                device=work.device_of(arguments),
                jobs=arguments.jobs,
                progress=output.show_bars(arguments),
                force=arguments.force,
            )
        except KeyboardInterrupt:
            raise output.Failure(_how_to_go_on(arguments, work.unfinished_files(target)), output.INTERRUPTED) from None
        # Not by `compress`, because what was written stays if this is interrupted.
        verified = verified_bytes(report.path, output.show_bars(arguments)) if arguments.verify_output else None
    if arguments.output != work.STREAM:
        output.report(
            arguments, {**report.as_dict(), "verified_bytes": verified}, *_compress_parts(arguments, report, verified)
        )
    return 0


def _how_to_go_on(arguments: argparse.Namespace, num_files: int) -> str:
    """Returns the message of an interrupted run. num_files: number of files of the set that the run has finished."""
    command = shlex.join(["ibp", "compress", *arguments.inputs, "-o", arguments.output])
    if not num_files:
        return f"interrupted, and nothing was written: the same command begins anew: {command}"
    kept = output.show_count(num_files, "file")
    return (
        f"interrupted: {kept} of the set {'is' if num_files == 1 else 'are'} finished and kept. The same command, "
        f"with the same options, goes on from there: {command}"
    )


def _compress_parts(arguments: argparse.Namespace, report: CheckpointReport, verified: int | None) -> list[output.Part]:
    parts: list[output.Part] = []
    if arguments.verbose:
        names = ["tensor", "dtype", "scheme", ">before", ">after", ">saved"]
        rows = (
            [
                tensor.name,
                dtype_name(tensor.dtype),
                tensor.scheme or "plain",
                output.show_size(tensor.num_bytes),
                output.show_size(tensor.stored_bytes),
                output.show_share(tensor.savings),
            ]
            for tensor in report.tensors
        )
        parts += [output.table(names, rows), ""]
    coded = sum(tensor.scheme is not None for tensor in report.tensors)
    parts.append(
        f"{output.shown(report.path)}: {output.show_count(len(report.tensors), 'tensor')}, {coded:,} compressed; "
        f"{output.show_size(report.num_bytes)} became {output.show_size(report.file_bytes)}, "
        f"{output.show_saved(report.savings)}."
    )
    copied = len(report.other_files)
    if copied:
        parts.append(f"{output.show_count(copied, 'other file')} {'was' if copied == 1 else 'were'} copied.")
    if report.file_bytes > report.num_bytes:
        parts.append(
            "The file is larger than its tensors: compression saves less than the header and the checksums take."
        )
    if report.kept_files:
        kept = output.show_count(report.kept_files, "file")
        parts.append(f"{kept} of an interrupted run {'was' if report.kept_files == 1 else 'were'} kept.")
    if verified is not None:
        parts.append(f"{output.show_size(verified)} were read again, and every tensor is what it was.")
    lines = lines_that_load(arguments.output) if copied else None
    if lines is not None:
        parts += ["These lines load it:", *(f"    {line}" for line in lines.splitlines())]
    return parts


# ---- decompress ----


def decompress(arguments: argparse.Namespace) -> int:
    """Runs `ibp decompress`: restores the original tensors of compressed files."""
    arguments.output = work.output_of(arguments, arguments.inputs)
    if not work.may_write(arguments, arguments.output, to_coded=False):
        return 0
    with (
        work.local(arguments.inputs) as given,
        work.written(arguments.output, SUFFIXES[arguments.format or "safetensors"]) as target,
        work.threads(arguments.jobs),
    ):
        files = ibp.checkpoints.decompress(
            given,
            target,
            format=arguments.format,
            include=arguments.include or None,
            exclude=arguments.exclude,
            verify_inputs=arguments.verify_inputs,
            progress=output.show_bars(arguments),
            force=arguments.force,
        )
    work.report_files(arguments, {}, files)
    return 0


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
                    names, places = damage_in(file, arguments.content)
                    told.update(names)
                    if places:
                        more = output.show_count(len(places) - 1, "other block")
                        others = f", as {more} {'has' if len(places) == 2 else 'have'}" if len(places) > 1 else ""
                        told["error"] = output.one_line(f"{places[0]}, has another checksum{others}")
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
                whole = [change["name"] for change in found if change["status"] in (NEW, REPLACED)]
                deltas.update((name, new.tensors[name].tensor()) for name in whole)
                removed = [change["name"] for change in found if change["status"] == REMOVED]
                path = file_of(arguments.output)
                ibp.save(path, ibp.deltas.CheckpointDelta(deltas, removed))
                written = work.size_of(path)
    differs = any(change["status"] != SAME for change in found)
    document = {
        "old": arguments.base,
        "new": arguments.new,
        "differs": differs,
        "tensors": found,
        "total": _total(found),
        "output": arguments.output,
        "written_bytes": written,
    }
    output.report(arguments, document, *_diff_parts(arguments, document))
    return 1 if differs and arguments.exit_code else 0


def _total(found: list[dict[str, Any]]) -> dict[str, Any]:
    after = [change for change in found if change["status"] != REMOVED]
    weights = [change["delta_bytes"] for change in found]
    return {
        "tensors": dict(Counter(change["status"] for change in found)),
        **{name: sum(change[name] for change in after) for name in ("num_elements", "num_bytes", "changed")},
        "delta_bytes": None if None in weights else sum(weights),
    }


def _diff_parts(arguments: argparse.Namespace, document: dict[str, Any]) -> list[output.Part]:
    rows = [
        [
            change["name"],
            change["dtype"],
            change["status"],
            f"{change['changed']:,}",
            output.show_share(change["share"]),
            "" if change["delta_bytes"] is None else output.show_size(change["delta_bytes"]),
        ]
        for change in document["tensors"]
        if arguments.all or change["status"] != SAME
    ]
    names = ["tensor", "dtype", "status", ">changed", ">share", ">delta"]
    total = document["total"]
    counts = ", ".join(f"{number:,} {status}" for status, number in total["tensors"].items())
    parts: list[output.Part] = [output.table(names, rows), ""] if rows else []
    parts.append(f"{output.show_count(len(document['tensors']), 'tensor')}: {counts or 'none'}.")
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


def _changes(
    base: Mapping[str, SourceTensor], new: Mapping[str, SourceTensor], names: Iterable[str], weigh: _Weighing | None
) -> Iterator[dict[str, Any]]:
    """Compares the named tensors of two versions. Yields what `_change` returns for each name. weigh: a function that
    returns the size of a changed tensor's delta. None: the sizes of deltas are not computed."""
    for name in names:
        if name not in new:
            yield _change(REMOVED, base[name], 0, changed=0)
        elif name not in base:
            yield _change(NEW, new[name], new[name].num_bytes)
        elif (base[name].dtype, base[name].shape) != (new[name].dtype, new[name].shape):
            yield _change(REPLACED, new[name], new[name].num_bytes)
        else:
            changed = sum(_differing(*block, new[name].dtype) for block in _blocks(base[name], new[name]))
            taken = None if weigh is None else weigh(base[name], new[name]) if changed else 0
            yield _change(CHANGED if changed else SAME, new[name], taken, changed)


def _change(status: str, tensor: SourceTensor, delta_bytes: int | None, changed: int | None = None) -> dict[str, Any]:
    """Returns what the command reports about the difference between the versions of one tensor.

    Args:
        tensor: the new version, or the old version of a tensor that was removed.
        delta_bytes: size in bytes that the tensor takes in a delta. None: it was not computed (--no-weigh).
        changed: number of elements whose bits differ. None: all elements.
    """
    num_elements = tensor.num_bytes // tensor.dtype.itemsize
    changed = num_elements if changed is None else changed
    return {
        "name": tensor.name,
        "status": status,
        "dtype": dtype_name(tensor.dtype),
        "shape": list(tensor.shape),
        "num_elements": num_elements,
        "num_bytes": tensor.num_bytes,
        "changed": changed,
        "delta_bytes": delta_bytes,
        "share": changed / num_elements if num_elements else 0.0,
    }


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
    for span in new.spans(_BLOCK_BYTES):
        yield base.read(*span), new.read(*span)


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


# ---- apply ----


def apply(arguments: argparse.Namespace) -> int:
    """Runs `ibp apply`: makes the new version of a checkpoint from the old version and a delta, tensor by tensor."""
    arguments.output = work.output_of(arguments, [arguments.base])
    if not work.may_write(arguments, arguments.output):
        return 0
    device = work.device_of(arguments)
    with (
        work.local([arguments.base, arguments.delta]) as (old, delta),
        work.written(arguments.output, ".safetensors") as target,
        work.threads(arguments.jobs),
        open_sources(old, verify=True) as base,
    ):
        with local_path(delta) as near:
            changes = _changes_in(near)
        made = _new_version(base, changes, device)
        files = write_source(made, target, None, "apply", output.show_bars(arguments), arguments.force)
    names = {kind: list(getattr(changes, kind)) for kind in ("changed", "new", "removed")}
    counts = ", ".join(f"{len(of_kind):,} {kind}" for kind, of_kind in names.items())
    work.report_files(arguments, {"old": arguments.base, "delta": arguments.delta, **names}, files, f"{counts}.")
    return 0


def _changes_in(path: str) -> ibp.deltas.CheckpointDelta:
    """Reads the delta in a file. Its tensors stay in the mapped file, except those that a general codec has coded,
    which are decompressed. Raises ibp.ChecksumError if the file is damaged, and ibp.FileFormatError if it is not a
    file of ibp or of safetensors."""
    with ibp.open(path, verify=True) as file:
        whole = {
            name: ibp.decompress(value) for name, value in file.items() if isinstance(value, ibp.codecs.WholeTensor)
        }
        changes = {name: value for name, value in file.items() if not isinstance(value, ibp.codecs.WholeTensor)}
        return ibp.deltas.CheckpointDelta({**changes, **whole}, file.removed)


def _new_version(base: Source, changes: ibp.deltas.CheckpointDelta, device: torch.device) -> Source:
    """Returns the new version of a checkpoint as a source. Deltas are applied on the device, and only when a tensor is
    read. If the old version is a set of files, the new version has a part for each of these files. New tensors are in
    the last part.

    Raises:
        Failure: the changes are not a delta of the old version. Either the old version lacks a tensor that is changed
            or removed. Or the changes hold a whole tensor although the old version has a tensor of the same name, dtype
            and shape, for which a delta would hold only the differences.
    """
    for name in changes.new:
        older, newer = base.tensors.get(name), changes[name]
        if older is not None and (older.dtype, older.shape) == (newer.dtype, tuple(newer.shape)):
            raise output.Failure(
                f"that is no delta of {base.path}: it holds {name!r} whole, with the dtype and shape of old"
            )
    missing = [name for name in (*changes.changed, *changes.removed) if name not in base.tensors]
    if missing:
        raise output.Failure(
            f"{base.path} has no tensor {missing[0]!r}, which the delta changes or removes", output.WRONG
        )
    made = {name: _new_tensor(name, change, base.tensors.get(name), device) for name, change in changes.items()}
    gone = {*changes.removed, *changes.new}
    of_parts = [
        {name: made.get(name, tensor) for name, tensor in part.tensors.items() if name not in gone}
        for part in base.parts
    ]
    of_parts[-1].update((name, made[name]) for name in changes.new)
    tensors = {name: tensor for of_part in of_parts for name, tensor in of_part.items()}
    whole = Source(base.path, base.format, tensors, base.metadata)
    whole.parts = tuple(
        Source(part.path, part.format, of_part, part.metadata) for part, of_part in zip(base.parts, of_parts)
    )
    whole.files = base.files
    return whole


def _new_tensor(
    name: str,
    change: ibp.deltas.Delta | ibp.CompressedTensor | torch.Tensor,
    old: SourceTensor | None,
    device: torch.device,
) -> SourceTensor:
    """Returns a tensor of the new version. When the tensor is first read, all of it is made on the CPU: `change` is
    decompressed or, if `change` is a delta, applied to the old version of the tensor. The made tensor is freed when its
    last bytes have been read."""
    made: list[np.ndarray] = []

    def make() -> torch.Tensor:
        if isinstance(change, torch.Tensor):
            return change
        if not isinstance(change, ibp.deltas.Delta):
            return ibp.decompress(change, device="cpu")
        assert old is not None
        try:
            return change.to(device).apply_(old.tensor().to(device)).cpu()
        except (ibp.deltas.DeltaMismatchError, ibp.CorruptTableError) as error:
            raise type(error)(f"{name}: {error}") from None

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        kept = made[:]
        data = kept[0] if kept else bytes_of(make()).numpy()
        made[:] = [data] if end_byte < data.size else []
        return data[start_byte:end_byte]

    return SourceTensor(name, change.dtype, tuple(change.shape), read)
