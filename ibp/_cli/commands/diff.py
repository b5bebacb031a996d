"""`ibp diff`."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .. import inputs, output, parsing

if TYPE_CHECKING:
    from ..comparing import Change

HELP = "say what changed from one version of a checkpoint to another"
DESCRIPTION = """\
Say what changed from one version of a checkpoint to another.

Counts the elements of each tensor whose bits differ, and what a delta would
weigh: a file from which `ibp apply` makes the new version out of the old one.
-o writes that delta."""
EPILOG = """\
examples:
  ibp diff step-1000 step-1100
  ibp diff step-1000 step-1100 -o step-1100.delta
  ibp diff --exit-code --quiet old.safetensors new.safetensors"""


def add(parser: argparse.ArgumentParser) -> None:
    kinds = "a file, a directory, an index, a URL, or -"
    parser.add_argument("base", metavar="OLD", help=f"the old version: {kinds}")
    parser.add_argument("new", metavar="NEW", help=f"the new version: {kinds}")
    parser.add_argument("-o", "--output", metavar="DELTA", help="write the delta there")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if anything changed")
    parser.add_argument("--no-weigh", action="store_true", help="count only: do not say what a delta would weigh")
    parser.add_argument("-a", "--all", action="store_true", help="list tensors that did not change, too")
    parsing.add_names(parser)
    parsing.add_work(parser)
    parsing.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    from ibp._files import file_of
    from ibp.checkpoints._sources import open_sources

    from .. import comparing, work

    if arguments.output == inputs.STREAM:
        raise output.Failure("the delta cannot go to stdout (-); wanted a path")
    if arguments.output is not None and not work.may_write(arguments, arguments.output):
        return 0
    device = work.device_of(arguments)
    with inputs.local([arguments.base, arguments.new]) as given, work.threads(arguments.jobs):
        with open_sources(given[0]) as base, open_sources(given[1]) as new:
            names = work.chosen(arguments, dict.fromkeys([*new.tensors, *base.tensors]))
            deltas: dict[str, Any] = {}
            weigh: comparing.Weighing | None = comparing.by_blocks(device)
            if arguments.output is not None:
                weigh = comparing.by_tensors(device, deltas)
            elif arguments.no_weigh:
                weigh = None
            shown = work.bar(arguments, "diff", names)
            found = list(comparing.changes(base.tensors, new.tensors, shown, weigh))
            written = None if arguments.output is None else _write(file_of(arguments.output), found, deltas, new)
    differs = any(change.status != comparing.SAME for change in found)
    document = {
        "old": arguments.base,
        "new": arguments.new,
        "differs": differs,
        "tensors": [change.document() for change in found],
        "total": _total(found),
        "output": arguments.output,
        "written_bytes": written,
    }
    output.report(arguments, document, *_parts(arguments, found, document))
    return 1 if differs and arguments.exit_code else 0


def _write(path: str, found: list[Change], deltas: dict[str, Any], new: Any) -> int:
    """Writes the delta of the checkpoint. Returns the bytes of its file."""
    import ibp

    from .. import comparing, work

    for change in found:
        if change.status in (comparing.NEW, comparing.REPLACED):
            deltas[change.name] = new.tensors[change.name].tensor()
    removed = [change.name for change in found if change.status == comparing.REMOVED]
    ibp.save(path, ibp.deltas.CheckpointDelta(deltas, removed))
    return work.size_of(path)


def _total(found: list[Change]) -> dict[str, Any]:
    after = [change for change in found if change.status != "removed"]
    weights = [change.delta_bytes for change in found]
    return {
        "tensors": dict(Counter(change.status for change in found)),
        "num_elements": sum(change.num_elements for change in after),
        "num_bytes": sum(change.num_bytes for change in after),
        "changed": sum(change.changed for change in after),
        "delta_bytes": None if None in weights else sum(filter(None, weights)),
    }


def _parts(arguments: argparse.Namespace, found: list[Change], document: dict[str, Any]) -> list[output.Part]:
    listed = [change for change in found if arguments.all or change.status != "same"]
    columns: dict[str, Callable[[Change], object]] = {
        "tensor": lambda change: change.name,
        "dtype": output.show_dtype,
        "status": lambda change: change.status,
        ">changed": lambda change: f"{change.changed:,}",
        ">share": lambda change: output.show_share(change.share),
        ">delta": lambda change: "" if change.delta_bytes is None else output.show_size(change.delta_bytes),
    }
    total = document["total"]
    counts = ", ".join(f"{number:,} {status}" for status, number in total["tensors"].items())
    parts: list[output.Part] = [output.table_of(listed, columns), ""] if listed else []
    parts.append(f"{output.show_count(len(found), 'tensor')}: {counts or 'none'}.")
    if total["delta_bytes"] is not None and document["differs"]:
        share = total["delta_bytes"] / total["num_bytes"] if total["num_bytes"] else 0.0
        parts.append(
            f"A delta weighs {output.show_size(total['delta_bytes'])}, {output.show_share(share)} of the new version's "
            f"{output.show_size(total['num_bytes'])}."
        )
    if document["written_bytes"] is not None:
        where = output.shown(arguments.output)
        parts.append(f"{where}: {output.show_size(document['written_bytes'])} written.")
    return parts
