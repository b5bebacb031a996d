"""The commands that write files of tensors: `ibp compress`, `ibp decompress` and `ibp apply`.

Each of them first finds out whether its output may be written, then does the work inside the contexts of `work.py`,
which bring stdin to a file and a file to stdout, and at last reports the files. `ibp.checkpoints` does the work of the
first two. `apply` makes the new version of a checkpoint as a `Source`, whose tensors are made when they are read, and
lets `ibp.checkpoints` write it.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable

import numpy as np
import torch

import ibp
from ibp._files import dtype_name
from ibp._rows.geometry import bytes_of
from ibp.checkpoints import CheckpointReport
from ibp.checkpoints._converting import verified_bytes, write_source
from ibp.checkpoints._inputs import lines_that_load, local_path, open_sources
from ibp.checkpoints._source import Source, SourceTensor

from . import output, work
from .main import SUFFIXES

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
    parts = [_changed(part, changes, device) for part in base.parts]
    last = parts[-1]
    added = {name: _whole(name, change) for name, change in changes.items() if not isinstance(change, ibp.deltas.Delta)}
    parts[-1] = Source(last.path, last.format, {**last.tensors, **added}, last.metadata)
    tensors = {name: tensor for part in parts for name, tensor in part.tensors.items()}
    made = Source(base.path, base.format, tensors, base.metadata)
    made.parts, made.files = tuple(parts), base.files
    return made


def _changed(part: Source, changes: ibp.deltas.CheckpointDelta, device: torch.device) -> Source:
    """Returns the new version of one file of a set, without the new tensors: its unchanged tensors, and the tensors to
    which a delta is applied."""
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in part.tensors.items():
        change = changes.get(name)
        if isinstance(change, ibp.deltas.Delta):
            tensors[name] = _applied(tensor, change, device)
        elif change is None and name not in changes.removed:
            tensors[name] = tensor
    return Source(part.path, part.format, tensors, part.metadata)


def _applied(base: SourceTensor, delta: ibp.deltas.Delta, device: torch.device) -> SourceTensor:
    def make() -> torch.Tensor:
        try:
            return delta.to(device).apply_(base.tensor().to(device)).cpu()
        except (ibp.deltas.DeltaMismatchError, ibp.CorruptTableError) as error:
            raise type(error)(f"{base.name}: {error}") from None

    return _made_tensor(base.name, base.dtype, base.shape, make)


def _whole(name: str, change: torch.Tensor | ibp.CompressedTensor) -> SourceTensor:
    def make() -> torch.Tensor:
        return change if isinstance(change, torch.Tensor) else ibp.decompress(change, device="cpu")

    return _made_tensor(name, change.dtype, tuple(change.shape), make)


def _made_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], make: Callable[[], torch.Tensor]
) -> SourceTensor:
    """Returns a tensor of a source. When it is first read, `make` is called, which returns the whole tensor on the CPU.
    That tensor is freed when its last bytes have been read."""
    made: list[np.ndarray] = []

    def read(start_byte: int, end_byte: int) -> np.ndarray:
        kept = made[:]
        data = kept[0] if kept else bytes_of(make()).numpy()
        made[:] = [data] if end_byte < data.size else []
        return data[start_byte:end_byte]

    return SourceTensor(name, dtype, shape, read)
