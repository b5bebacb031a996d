"""`ibp compress`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import inputs, output, parsing

if TYPE_CHECKING:
    from ibp.checkpoints import CheckpointReport, TensorReport

INTERRUPTED = 130  # the exit status of an interrupted run
HELP = "compress checkpoints and arrays"
DESCRIPTION = """\
Compress checkpoints and arrays into files whose tensors decode alone.

Reads safetensors, .npy, .npz, torch checkpoints and files of ibp, of any size,
block by block. What does not become smaller stays as it is; names, metadata and
every bit are kept. Several inputs become one file or one set of files. From a
directory to a directory, each file of tensors becomes one of its own
(model.ibp.safetensors, optimizer.pt.ibp.safetensors), all other files are
copied, and config.json says that the weights are coded."""
EPILOG = """\
examples:
  ibp compress model.safetensors -o model.ibp.safetensors
  ibp compress model/ -o small/
  ibp compress checkpoint/ -o compressed/ --shard-bytes 2G
  ibp compress 'shards/*.npy' -o features.safetensors --verify
  cat x.npy | ibp compress - -o - > x.safetensors

An interrupted run goes on where it ended when it is started again."""


def add(parser: argparse.ArgumentParser) -> None:
    parsing.add_inputs(parser)
    parsing.add_output(parser, "the file or directory to write, a URL, or -")
    parser.add_argument(
        "--scheme", choices=("auto", "planes", "ibp", "raw"), default="auto", help="how rows are coded (default: auto)"
    )
    parsing.add_level(parser)
    parser.add_argument(
        "--shard-bytes",
        type=parsing.size,
        default=5 << 30,
        metavar="SIZE",
        help="the most bytes of tensors of a file, such as 500M; more become a set of files (default: 5G)",
    )
    parsing.add_names(parser, "compress")
    parsing.add_work(parser)
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read what was written, decode it, and compare every tensor (default: no)",
    )
    parser.add_argument("--no-restart", action="store_true", help="begin anew, though a run was interrupted")
    parsing.add_force(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="list every tensor")


def run(arguments: argparse.Namespace) -> int:
    import ibp

    from .. import work

    arguments.output = work.output_of(arguments, arguments.inputs)
    if not work.may_write(arguments, arguments.output, to_coded=True):
        return 0
    with (
        inputs.local(arguments.inputs) as given,
        inputs.written(arguments.output, ".safetensors") as target,
        work.threads(arguments.jobs),
    ):
        try:
            report = ibp.checkpoints.compress(
                given,
                target,
                scheme=arguments.scheme,
                level=arguments.level,
                shard_bytes=None if arguments.output == inputs.STREAM else arguments.shard_bytes,
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
    if arguments.output != inputs.STREAM:
        output.report(arguments, {**report.as_dict(), "verified_bytes": verified}, *_parts(arguments, report, verified))
    return 0


def _how_to_go_on(arguments: argparse.Namespace, num_files: int) -> str:
    """Returns the message of an interrupted run. num_files: how many files the run has finished."""
    command = shlex.join(["ibp", "compress", *arguments.inputs, "-o", arguments.output])
    if not num_files:
        return f"interrupted, and nothing was written: the same command begins anew: {command}"
    kept = output.show_count(num_files, "file")
    return (
        f"interrupted: {kept} of the set {'is' if num_files == 1 else 'are'} finished and kept. The same command, "
        f"with the same options, goes on from there: {command}"
    )


def _verified(path: str, arguments: argparse.Namespace) -> int:
    """Verifies the written files against their checksums, and their tensors against the fingerprints. Returns the
    bytes that were checked."""
    import ibp
    from ibp.checkpoints._sources import local_path

    from .. import work

    checked = 0
    for each in work.files_to_verify([path]):
        with local_path(each) as near, ibp.open(near) as file:
            checked += file.verify(content=True, progress=output.show_bars(arguments))
    return checked


def _parts(arguments: argparse.Namespace, report: CheckpointReport, verified: int | None) -> list[output.Part]:
    from ibp.checkpoints._model_files import lines_that_load

    columns: dict[str, Callable[[TensorReport], object]] = {
        "tensor": lambda tensor: tensor.name,
        "dtype": output.show_dtype,
        "scheme": lambda tensor: tensor.scheme or "plain",
        ">before": lambda tensor: output.show_size(tensor.num_bytes),
        ">after": lambda tensor: output.show_size(tensor.stored_bytes),
        ">saved": lambda tensor: output.show_share(tensor.savings),
    }
    parts: list[output.Part] = [output.table_of(report.tensors, columns), ""] if arguments.verbose else []
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
            "The file is larger than its tensors: what they got smaller by is less than its header and checksums."
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
