"""`ibp compress`: compresses checkpoints and arrays."""

from __future__ import annotations

import argparse
import shlex

import ibp
from ibp._files import dtype_name
from ibp.checkpoints import CheckpointReport
from ibp.checkpoints._sources import lines_that_load, local_path

from . import output, work

INTERRUPTED = 130  # The exit status of an interrupted run.


def run(arguments: argparse.Namespace) -> int:
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
                device=work.device_of(arguments),
                jobs=arguments.jobs,
                progress=output.show_bars(arguments),
                force=arguments.force,
            )
        except KeyboardInterrupt:
            raise output.Failure(_how_to_go_on(arguments, work.unfinished_files(target)), INTERRUPTED) from None
        verified = _verified(report.path, arguments) if arguments.verify else None
    if arguments.output != work.STREAM:
        output.report(arguments, {**report.as_dict(), "verified_bytes": verified}, *_parts(arguments, report, verified))
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


def _verified(path: str, arguments: argparse.Namespace) -> int:
    """Verifies the written files: checks their checksums, and the fingerprints of their decoded tensors. Returns the
    number of bytes that were verified. path: the path of the output."""
    checked = 0
    for each in work.files_to_verify([path]):
        with local_path(each) as near, ibp.open(near) as file:
            checked += file.verify(content=True, progress=output.show_bars(arguments))
    return checked


def _parts(arguments: argparse.Namespace, report: CheckpointReport, verified: int | None) -> list[output.Part]:
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
