"""The parser of the command line: its options, and the help of every command. It imports neither ibp nor torch, so that
help is shown at once.

After a change, `python tools/command_line.py` writes the man page and the examples of docs/cli.md again.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import Any, NoReturn

_WIDTH = 80
_MOST_THREADS = 1024
_UNITS = ("", "K", "M", "G", "T")
_ONE_INPUT = "a file, a directory, an index, a URL, or -"
# The suffix of files in each format of `ibp decompress --format`.
SUFFIXES = {"safetensors": ".safetensors", "npy": ".npy", "npz": ".npz", "torch": ".pt"}

_DESCRIPTION = """\
Lossless compression of tensors.

Checkpoints and arrays become smaller files, which are safetensors, and every
bit comes back: weights are checked, read row by row, or decoded as a whole."""
_EPILOG = """\
exit status:
  0    done
  1    data is wrong: a checksum differs, a file is damaged, or diff --exit-code
       found a difference; or doctor found a fault
  2    wrong usage, or an input that cannot be read
  130  interrupted

ibp COMMAND --help says more about a command."""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, and whose help is the same in every version of Python."""

    def __init__(self, **options: Any) -> None:
        if sys.version_info >= (3, 14):
            options.setdefault("color", False)
        super().__init__(formatter_class=_Formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        near = difflib.get_close_matches(str(value), map(str, action.choices or ()), 1)
        if near and near[0] != value:
            raise argparse.ArgumentError(action, f"invalid choice: {value!r} (did you mean {near[0]!r}?)")
        super()._check_value(action, value)


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=26, width=_WIDTH)

    def add_argument(self, action: argparse.Action) -> None:
        super().add_argument(action)
        if isinstance(action, argparse._SubParsersAction):
            self._action_max_length += self._indent_increment  # The names in the list of commands are indented more.

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Returns the text for an option in the help in the form of Python 3.13: "-o, --output OUT"."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def size(text: str) -> int:
    """Converts a size such as "5G", "512MiB", "1.5GB" or "4096" to a number of bytes. Units are powers of 1024; units
    that end in B without i, such as GB, are powers of 1000."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B|)", text.strip(), re.IGNORECASE | re.ASCII)
    if not found or (found[3].lower() == "ib" and not found[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is no size; wanted a number of bytes like 4096, 512M or 5G")
    base = 1000 if found[3].upper() == "B" else 1024
    num_bytes = float(found[1]) * base ** _UNITS.index(found[2].upper())
    if not 1 <= num_bytes < 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no size from one byte to 2^63 - 1 bytes")
    return int(num_bytes)


def thread_count(text: str) -> int:
    if not re.fullmatch(r"0*[1-9]\d{0,3}", text, re.ASCII) or int(text) > _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to {_MOST_THREADS}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 120:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 120")
    return value


# ---- options of several commands ----


def _add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    group.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")


def _add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", metavar="IN", help="files, directories, indices of sets of files, globs, URLs, or -"
    )


def _add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help=what)


def _add_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        choices=("default", "fast"),
        default="default",
        help="fast: somewhat larger, decoded at the rate of a GPU's memory (default: default)",
    )


def _add_names(parser: argparse.ArgumentParser, take: str = "take") -> None:
    """Adds the options that choose tensors by patterns of their names."""
    for option, what in (("--include", f"{take} only"), ("--exclude", f"do not {take}")):
        parser.add_argument(
            option,
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{what} tensors whose names match (*, ?, [a-z]); repeats",
        )


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the device and the number of threads."""
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the work is done: cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    _add_jobs(parser)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-j", "--jobs", type=thread_count, metavar="N", help="threads of the CPU (default: one a core)")


def _add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say whether to replace an existing OUT."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--force", action="store_true", help="replace what is at OUT")
    group.add_argument("-k", "--keep", action="store_true", help="do nothing where OUT is there already")


# ---- commands ----

_Commands = argparse._SubParsersAction  # The class of the object to which the parsers of the commands are added.


def make_parser() -> Parser:
    """Returns the parser of the whole command line."""
    parser = Parser(prog="ibp", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"ibp {version()}", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for add in (_compress, _decompress, _verify, _inspect, _estimate, _diff, _apply, _doctor):
        add(commands)
    for command in commands.choices.values():
        _add_common(command)
    return parser


def version() -> str:
    """Returns the version of this library. It is read from the installed header, so ibp is not imported."""
    header = Path(__file__).parent.parent / "include" / "ibp.h"
    found = re.search(r'#define IBP_VERSION "([^"]+)"', header.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def _compress(commands: _Commands) -> None:
    parser = commands.add_parser(
        "compress",
        help="compress checkpoints and arrays",
        description="""\
Compress checkpoints and arrays into files. Each tensor of a file decodes alone.

Reads safetensors, .npy, .npz, torch checkpoints and files of ibp, of any size,
block by block. What does not become smaller stays as it is; names, metadata and
every bit are kept. Checksums of files of ibp are compared as they are read.
Several inputs become one file or one set of files. If input and output are
directories, each file of tensors is compressed to a file of its own
(model.ibp.safetensors, optimizer.pt.ibp.safetensors), all other files are
copied, and config.json says that the weights are coded.""",
        epilog="""\
examples:
  ibp compress model.safetensors -o model.ibp.safetensors
  ibp compress model/ -o small/
  ibp compress checkpoint/ -o compressed/ --shard-bytes 2G
  ibp compress 'shards/*.npy' -o features.safetensors --verify
  cat x.npy | ibp compress - -o - > x.safetensors

An interrupted run goes on where it ended when it is started again.""",
    )
    _add_inputs(parser)
    _add_output(parser, "the file or directory to write, a URL, or -")
    parser.add_argument(
        "--scheme", choices=("auto", "planes", "ibp", "raw"), default="auto", help="how rows are coded (default: auto)"
    )
    _add_level(parser)
    parser.add_argument(
        "--shard-bytes",
        type=size,
        default=5 << 30,
        metavar="SIZE",
        help="the most bytes of tensors of a file, such as 500M; more become a set of files (default: 5G)",
    )
    _add_names(parser, "compress")
    _add_work(parser)
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read what was written, decode it, and compare every tensor (default: no)",
    )
    parser.add_argument("--no-restart", action="store_true", help="begin anew, though a run was interrupted")
    _add_force(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="list every tensor")


def _decompress(commands: _Commands) -> None:
    parser = commands.add_parser(
        "decompress",
        help="write the tensors of compressed files as they were",
        description="""\
Write the tensors of compressed files as they were, bit for bit.

The format is told by the suffix of OUT: .safetensors, .npy, .npz, .pt; a
directory gets model.safetensors, and a set of files becomes a set again. From
a directory to a directory, each file comes back under its name and in its
format, and all other files are copied. Checksums are compared as files are
read.""",
        epilog="""\
examples:
  ibp decompress model.ibp.safetensors -o model.safetensors
  ibp decompress compressed/ -o checkpoint/
  ibp decompress x.safetensors -o - --format npy | gzip > x.npy.gz""",
    )
    _add_inputs(parser)
    _add_output(parser, "the file or directory to write, a URL, or -")
    parser.add_argument("--format", choices=tuple(SUFFIXES), help="of what is written (default: by the suffix of OUT)")
    _add_names(parser, "write")
    parser.add_argument("--no-verify", action="store_true", help="do not compare the checksums of what is read")
    _add_jobs(parser)
    _add_force(parser)


def _verify(commands: _Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare the checksums of files",
        description="""\
Compare the checksums of files with their bytes.

Exits with 1 if bytes are damaged, or if a file has no checksums, as those that
ibp did not write. Checksums are those of blocks of 1 MiB. In a damaged block,
the tables that no longer decode to what was compressed are named; if there are
none, the tensors that may be damaged. With --content all tables are decoded,
also those in blocks that are good.""",
        epilog="""\
examples:
  ibp verify model.safetensors
  ibp verify --content checkpoints/*.safetensors""",
    )
    _add_inputs(parser)
    parser.add_argument("--content", action="store_true", help="decode tables, and compare what comes out")
    _add_jobs(parser)


def _inspect(commands: _Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what is in files: tensors, savings, what the bytes are",
        description="""\
Say what is in files: tensors, schemes, savings, and what the bytes are.

Files of ibp are described as they are. Of other files of tensors, what
compressing them would give is estimated from a sample of rows.""",
        epilog="""\
examples:
  ibp inspect model.safetensors
  ibp inspect model.safetensors --tensor lm_head.weight
  ibp inspect checkpoint/ --plot bits.png --html model.html

"before" is the size of a tensor, "after" that of all the file has for it alone:
rows, index, unused room of slots and padding. Codebooks, which tensors share,
the header and the checksums count in the sum. Parts of coded rows are counted
on a sample of a large tensor's rows. The page needs a browser and nothing else;
plots need matplotlib.""",
    )
    _add_inputs(parser)
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="all about one tensor; repeats")
    parser.add_argument("--planes", action="store_true", help="what the bytes of every tensor are, by part")
    parser.add_argument("--plot", metavar="OUT.png", help="draw bits and savings")
    parser.add_argument("--html", metavar="OUT.html", help="write a page to click through the tensors")
    _add_names(parser)
    _add_force(parser)


def _estimate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "estimate",
        help="say what each scheme would save, without writing anything",
        description="""\
Say what each scheme would save, tensor by tensor, without writing anything.

Savings are measured on a sample of rows, and count what a file has for a tensor
alone, as "after" of ibp inspect does. The last column is the scheme that saves
most; "plain" tensors stay as they are.""",
        epilog="""\
examples:
  ibp estimate model.safetensors
  ibp estimate features.npy --json
  ibp estimate checkpoint/ --include '*.mlp.*'""",
    )
    _add_inputs(parser)
    _add_level(parser)
    _add_names(parser)
    _add_jobs(parser)


def _diff(commands: _Commands) -> None:
    parser = commands.add_parser(
        "diff",
        help="say what changed from one version of a checkpoint to another",
        description="""\
Say what changed from one version of a checkpoint to another.

Counts the elements of each tensor whose bits differ, and what a delta would
weigh: a file from which `ibp apply` makes the new version out of the old one.
-o writes that delta.""",
        epilog="""\
examples:
  ibp diff step-1000 step-1100
  ibp diff step-1000 step-1100 -o step-1100.delta
  ibp diff --exit-code --quiet old.safetensors new.safetensors""",
    )
    parser.add_argument("base", metavar="OLD", help=f"the old version: {_ONE_INPUT}")
    parser.add_argument("new", metavar="NEW", help=f"the new version: {_ONE_INPUT}")
    parser.add_argument("-o", "--output", metavar="DELTA", help="write the delta there")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if anything changed")
    parser.add_argument("--no-weigh", action="store_true", help="count only: do not say what a delta would weigh")
    parser.add_argument("-a", "--all", action="store_true", help="list tensors that did not change, too")
    _add_names(parser)
    _add_work(parser)
    _add_force(parser)


def _apply(commands: _Commands) -> None:
    parser = commands.add_parser(
        "apply",
        help="make the new version of a checkpoint out of the old one and a delta",
        description="""\
Make the new version of a checkpoint out of the old one and a delta.

The delta is a file that `ibp diff -o` or ibp.save wrote. It is refused where a
tensor of OLD is not, bit for bit, what it was made for. OLD stays as it is. A
set of files becomes a set again.""",
        epilog="""\
examples:
  ibp apply step-1000.safetensors step-1100.delta -o step-1100.safetensors""",
    )
    parser.add_argument("base", metavar="OLD", help=f"the old version: {_ONE_INPUT}")
    parser.add_argument("delta", metavar="DELTA", help="what changed: a file, a URL, or -")
    _add_output(parser, "the file (.safetensors, .npz, .pt) or directory to write, a URL, or -")
    _add_work(parser)
    _add_force(parser)


def _doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, test it, and whether compression pays here",
        description="""\
Say what is installed, test it, and say whether compression pays here.

Lists versions, the GPU, the kernels and the rates in use; codes and decodes for
two seconds and compares every bit; then measures. With a GPU: the link, random
rows and whole tensors, raw and compressed, from pinned memory. Without one: how
fast the CPU codes and decodes. Says so if something else uses the machine.
Exits with 1 if bits differ or a call fails.""",
        epilog="""\
examples:
  ibp doctor
  ibp doctor --device cpu --seconds 2 --json

Rates are GB/s of original bytes. The data is synthetic, and rows have 2 KiB
unless a table says otherwise. Columns with a GPU:
  x[ids]      rows that torch gathers on the CPU and copies
  raw rows    raw rows that a kernel fetches
  ibp rows    compressed rows that a kernel fetches
  copy        raw tensors that the copy engine moves
  ibp whole   compressed tensors
  decompress  compressed tensors in the GPU's memory
The second table gives the speed-up of compressed over raw, for rows and for
whole tensors. What is measured of the link is kept for later processes, which
choose schemes and paths by it; --refresh measures it again.""",
    )
    _add_work(parser)
    parser.add_argument(
        "--seconds", type=_seconds, default=8.0, metavar="S", help="how long to measure, about, 1 to 120 (default: 8)"
    )
    parser.add_argument("--refresh", action="store_true", help="measure the link again, though it is known")
