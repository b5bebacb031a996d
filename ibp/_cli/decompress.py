"""`ibp decompress`: restores the original tensors of compressed files."""

from __future__ import annotations

import argparse

import ibp

from . import output, work
from .parsing import SUFFIXES


def run(arguments: argparse.Namespace) -> int:
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
            verify=not arguments.no_verify,
            progress=output.show_bars(arguments),
            force=arguments.force,
        )
    work.report_files(arguments, {}, files)
    return 0
