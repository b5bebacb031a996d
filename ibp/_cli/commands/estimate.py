"""`ibp estimate`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .. import inputs, output, parsing

if TYPE_CHECKING:
    from ibp.checkpoints import CheckpointEstimate

HELP = "say what each scheme would save, without writing anything"
DESCRIPTION = """\
Say what each scheme would save, tensor by tensor, without writing anything.

Savings are measured on a sample of rows. The last column is the scheme that
saves most; "plain" tensors stay as they are."""
EPILOG = """\
examples:
  ibp estimate model.safetensors
  ibp estimate features.npy --json
  ibp estimate checkpoint/ --include '*.mlp.*'"""


def add(parser: argparse.ArgumentParser) -> None:
    parsing.add_inputs(parser)
    parsing.add_level(parser)
    parsing.add_names(parser)
    parsing.add_jobs(parser)


def run(arguments: argparse.Namespace) -> int:
    import ibp

    from .. import work

    with inputs.local(arguments.inputs) as given, work.threads(arguments.jobs):
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


def _parts(found: CheckpointEstimate, listed: set[str]) -> list[object]:
    from ibp._files.fields import dtype_name

    schemes = list(dict.fromkeys(scheme for tensor in found.tensors for scheme in tensor.savings))
    rows = [
        [
            tensor.name,
            dtype_name(tensor.dtype),
            output.show_size(tensor.num_bytes),
            *(output.show_share(tensor.savings[scheme]) if scheme in tensor.savings else "" for scheme in schemes),
            tensor.best or "plain",
        ]
        for tensor in found.tensors
        if tensor.name in listed
    ]
    table = output.table(["tensor", "dtype", ">size", *(f">{scheme}" for scheme in schemes), "takes"], rows)
    return [
        table,
        "",
        f"{output.show_count(len(found.tensors), 'tensor')}: {output.show_size(found.num_bytes)} would become "
        f"{output.show_size(found.file_bytes)}, {output.show_saved(found.savings)}.",
    ]
