"""`ibp estimate`: says what each scheme would save."""

from __future__ import annotations

import argparse

import ibp
from ibp._files import dtype_name
from ibp.checkpoints import CheckpointEstimate

from . import output, work


def run(arguments: argparse.Namespace) -> int:
    with work.local(arguments.inputs) as given, work.threads(arguments.jobs):
        found = ibp.checkpoints.estimate(
            given,
            level=arguments.level,
            include=arguments.include or None,
            exclude=arguments.exclude,
            progress=output.show_bars(arguments),
        )
    listed = set(work.chosen(arguments, [tensor.name for tensor in found.tensors]))
    output.report(arguments, found.as_dict(), *_parts(found, listed))
    return 0


def _parts(found: CheckpointEstimate, listed: set[str]) -> list[output.Part]:
    schemes = dict.fromkeys(scheme for tensor in found.tensors for scheme in tensor.savings)
    rows = (
        [
            tensor.name,
            dtype_name(tensor.dtype),
            output.show_size(tensor.num_bytes),
            *(output.show_share(tensor.savings[scheme]) if scheme in tensor.savings else "" for scheme in schemes),
            tensor.best or "plain",
        ]
        for tensor in found.tensors
        if tensor.name in listed
    )
    return [
        output.table(["tensor", "dtype", ">size", *(f">{scheme}" for scheme in schemes), "takes"], rows),
        "",
        f"{output.show_count(len(found.tensors), 'tensor')}: {output.show_size(found.num_bytes)} would become "
        f"{output.show_size(found.file_bytes)}, {output.show_saved(found.savings)}.",
    ]
