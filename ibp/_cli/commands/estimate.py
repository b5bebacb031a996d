"""`ibp estimate`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from .. import inputs, output, parsing

if TYPE_CHECKING:
    from ibp.checkpoints import CheckpointEstimate, TensorEstimate

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


def _parts(found: CheckpointEstimate, listed: set[str]) -> list[output.Part]:
    def saved(scheme: str) -> Callable[[TensorEstimate], object]:
        return lambda tensor: output.show_share(tensor.savings[scheme]) if scheme in tensor.savings else ""

    schemes = dict.fromkeys(scheme for tensor in found.tensors for scheme in tensor.savings)
    columns: dict[str, Callable[[TensorEstimate], object]] = {
        "tensor": lambda tensor: tensor.name,
        "dtype": output.show_dtype,
        ">size": lambda tensor: output.show_size(tensor.num_bytes),
        **{f">{scheme}": saved(scheme) for scheme in schemes},
        "takes": lambda tensor: tensor.best or "plain",
    }
    return [
        output.table_of((tensor for tensor in found.tensors if tensor.name in listed), columns),
        "",
        f"{output.show_count(len(found.tensors), 'tensor')}: {output.show_size(found.num_bytes)} would become "
        f"{output.show_size(found.file_bytes)}, {output.show_saved(found.savings)}.",
    ]
