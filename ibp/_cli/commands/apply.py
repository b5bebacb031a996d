"""`ibp apply`."""

from __future__ import annotations

import argparse
import functools

from .. import inputs, output, parsing

HELP = "make the new version of a checkpoint out of the old one and a delta"
DESCRIPTION = """\
Make the new version of a checkpoint out of the old one and a delta.

The delta is a file that `ibp diff -o` or ibp.save wrote. It is refused where a
tensor of OLD is not, bit for bit, what it was made for. OLD stays as it is. A
set of files becomes a set again."""
EPILOG = """\
examples:
  ibp apply step-1000.safetensors step-1100.delta -o step-1100.safetensors"""


def add(parser: argparse.ArgumentParser) -> None:
    kinds = "a file, a directory, an index, a URL, or -"
    parser.add_argument("base", metavar="OLD", help=f"the old version: {kinds}")
    parser.add_argument("delta", metavar="DELTA", help="what changed: a file, a URL, or -")
    parsing.add_output(parser, "the file (.safetensors, .npz, .pt) or directory to write, a URL, or -")
    parsing.add_work(parser)
    parsing.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    from ibp._common.whole_files import replaced
    from ibp.checkpoints._decompressing import write_source
    from ibp.checkpoints._sources import local_path, open_sources

    from .. import applying, work

    arguments.output = work.output_of(arguments, [arguments.base])
    if not work.may_write(arguments, arguments.output):
        return 0
    device = work.device_of(arguments)
    with (
        inputs.local([arguments.base, arguments.delta]) as (old, delta),
        inputs.written(arguments.output, ".safetensors") as target,
        work.threads(arguments.jobs),
        open_sources(old) as base,
    ):
        with local_path(delta) as near:
            changes = applying.changes_in(near)
        made = applying.new_version(base, changes, device)
        begin = functools.partial(replaced, like=base.files, alone=True, replace=arguments.force)
        files = write_source(made, target, None, "apply", output.show_bars(arguments), begin)
    names = {kind: list(getattr(changes, kind)) for kind in ("changed", "new", "removed")}
    counts = ", ".join(f"{len(of_kind):,} {kind}" for kind, of_kind in names.items())
    work.report_files(arguments, {"old": arguments.base, "delta": arguments.delta, **names}, files, f"{counts}.")
    return 0
