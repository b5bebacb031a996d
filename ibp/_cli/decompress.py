"""`ibp decompress`: restores the original tensors of compressed files."""

from __future__ import annotations

import argparse

import ibp
from ibp._files import is_url

from . import output, work
from .parsing import SUFFIXES


def run(arguments: argparse.Namespace) -> int:
    arguments.output = work.output_of(arguments, arguments.inputs)
    if not work.may_write(arguments, arguments.output, to_coded=False):
        return 0
    bars, checked = output.show_bars(arguments), 0
    with (
        work.local(arguments.inputs) as given,
        work.written(arguments.output, SUFFIXES[arguments.format or "safetensors"]) as target,
        work.threads(arguments.jobs),
    ):
        for path in () if arguments.no_verify else work.files_to_verify(given):
            if not is_url(path) and not work.has_other_format(path):
                with ibp.open(path) as file:
                    checked += file.verify(progress=bars)
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
