"""`ibp decompress`."""

from __future__ import annotations

import argparse

from .. import inputs, output, parsing

HELP = "write the tensors of compressed files as they were"
DESCRIPTION = """\
Write the tensors of compressed files as they were, bit for bit.

The format is told by the suffix of OUT: .safetensors, .npy, .npz, .pt; a
directory gets model.safetensors, and a set of files becomes a set again. From
a directory to a directory, each file comes back under its name and in its
format, and all other files are copied. Checksums are compared first."""
EPILOG = """\
examples:
  ibp decompress model.ibp.safetensors -o model.safetensors
  ibp decompress compressed/ -o checkpoint/
  ibp decompress x.safetensors -o - --format npy | gzip > x.npy.gz"""
SUFFIXES = {"safetensors": ".safetensors", "npy": ".npy", "npz": ".npz", "torch": ".pt"}


def add(parser: argparse.ArgumentParser) -> None:
    parsing.add_inputs(parser)
    parsing.add_output(parser, "the file or directory to write, a URL, or -")
    parser.add_argument("--format", choices=tuple(SUFFIXES), help="of what is written (default: by the suffix of OUT)")
    parsing.add_names(parser, "write")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the checksums of what is read")
    parsing.add_jobs(parser)
    parsing.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    import ibp

    from .. import work

    arguments.output = work.output_of(arguments, arguments.inputs)
    if not work.may_write(arguments, arguments.output, to_coded=False):
        return 0
    bars = output.show_bars(arguments)
    with (
        inputs.local(arguments.inputs) as given,
        inputs.written(arguments.output, SUFFIXES[arguments.format or "safetensors"]) as target,
        work.threads(arguments.jobs),
    ):
        checked = 0 if arguments.no_verify else work.verify_inputs(given, bars)
        files = ibp.checkpoints.decompress(
            given,
            target,
            format=arguments.format,
            include=arguments.include or None,
            exclude=arguments.exclude,
            progress=bars,
            force=arguments.force,
        )
    work.report_files(arguments, {"verified_bytes": checked}, files)
    return 0
