"""The frame of the command line: finds the command, runs it, and turns errors into one line and an exit status. The
second part of the file is the parser: the options that several commands share, and the options and the help of every
command.

This file imports neither ibp nor torch, so that help is shown at once. After a change to the parser, run `python
tools/command_line.py`, which updates the man page and the examples of docs/cli.md.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import output
from .output import INTERRUPTED, USAGE, WRONG

# The module of each command. Its function of the command's name does the work and returns the exit status.
_MODULES = {
    "compress": "files",
    "decompress": "files",
    "verify": "files",
    "inspect": "describing",
    "estimate": "describing",
    "diff": "files",
    "apply": "files",
    "doctor": "doctor",
}
_BROKEN_PIPE, _TERMINATED = 141, 143  # Further exit statuses (see `output`).
_OLD_WORDS = {"bench": "doctor"}  # Maps a command's name in earlier versions to its present name.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line. Returns its exit status. argv: the words after the program's name. None: sys.argv[1:]."""
    try:
        arguments = _parsed(argv)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            status = _run(arguments)
        sys.stdout.flush()
        return status
    except SystemExit as ended:  # argparse raises this after it has printed the reason.
        return ended.code if isinstance(ended.code, int) else USAGE
    except KeyboardInterrupt:
        return _complain("ibp: interrupted", INTERRUPTED)
    except BrokenPipeError:  # Discard the buffered output, including what is flushed when the process ends.
        with contextlib.suppress(OSError, ValueError):  # These are raised if stdout is not a file.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def program() -> NoReturn:
    """Runs `main`, and ends the process with its exit status. SIGTERM raises SystemExit, so that the command cleans up
    as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    sys.exit(main())


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line. If a command does not know an argument, the error names that command, not only `ibp`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in _OLD_WORDS:
        old, words[0] = words[0], _OLD_WORDS[words[0]]
        if not {"-q", "--quiet"} & set(words):
            _complain(f"ibp: `ibp {old}` is now `ibp {words[0]}`, which runs", 0)
    arguments, unknown = make_parser().parse_known_args(words)
    if unknown:
        prog = f"ibp {arguments.command}"
        line = f"{prog}: unrecognized arguments: {output.one_line(' '.join(unknown))}; see {prog} --help"
        raise SystemExit(_complain(line, USAGE))
    return arguments


def _run(arguments: argparse.Namespace) -> int:
    prefix = f"ibp {arguments.command}"
    try:
        module = importlib.import_module(f".{_MODULES[arguments.command]}", __package__)
        status: int = getattr(module, arguments.command)(arguments)
        return status
    except output.Failure as failure:
        return _complain(f"{prefix}: {failure}", failure.status)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, TypeError, RuntimeError, MemoryError, ImportError) as error:
        ibp = sys.modules.get("ibp")  # None if ibp could not be imported.
        of_damage = () if ibp is None else (ibp.ChecksumError, ibp.CorruptTableError, ibp.deltas.DeltaMismatchError)
        return _complain(f"{prefix}: {output.sentence(error)}", WRONG if isinstance(error, of_damage) else USAGE)


def _complain(line: str, status: int) -> int:
    with contextlib.suppress(BrokenPipeError):
        print(line, file=sys.stderr)
    return status


def _show_warning(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    _complain(f"ibp: warning: {output.one_line(str(message))}", 0)


# ---- the parser ----

_WIDTH = 80
_MOST_THREADS = 1024
_UNITS = ("", "K", "M", "G", "T")
_ONE_INPUT = "a file, a directory, an index, a URL, or -"
# The suffix of files in each format of `ibp decompress --format`.
SUFFIXES = {"safetensors": ".safetensors", "npy": ".npy", "npz": ".npz", "torch": ".pt"}

_DESCRIPTION = """\
Lossless compression of tensors.

Compresses checkpoints and arrays to smaller safetensors files, from which every
bit is restored. Weights in such files can be verified, read row by row, or
decompressed as a whole."""
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
            self._action_max_length += self._indent_increment  # The list of commands is indented further than options.

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Returns an option in the form in which Python 3.13 shows it in the help: "-o, --output OUT"."""
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


# ---- options that several commands share ----


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
        help="fast: somewhat larger files, which a GPU decodes at the rate of its memory (default: default)",
    )


def _add_names(parser: argparse.ArgumentParser, take: str = "take") -> None:
    """Adds the options that choose tensors by patterns of their names."""
    for option, what in (("--include", f"{take} only"), ("--exclude", f"do not {take}")):
        parser.add_argument(
            option,
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{what} tensors whose names match (*, ?, [a-z]); may be repeated",
        )


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the device and the number of threads."""
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the work is done: cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    _add_jobs(parser)


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-j", "--jobs", type=thread_count, metavar="N", help="number of CPU threads (default: one for each core)"
    )


def _add_verify_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--no-verify-inputs",
        action="store_false",
        dest="verify_inputs",
        help="do not compare the checksums of the inputs",
    )


def _add_old(parser: argparse.ArgumentParser, option: str, name: str, value: bool) -> None:
    """Adds the former spelling of an option, which help does not show. name, value: the argument that it sets."""
    parser.add_argument(
        option, action="store_const", const=value, dest=name, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )


def _add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say whether to replace an existing OUT."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--force", action="store_true", help="replace an output that exists")
    group.add_argument("-k", "--keep", action="store_true", help="do not write an output that exists")


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
Compress checkpoints and arrays into files. Each tensor of a file can be decoded
without the others.

Reads safetensors, .npy, .npz, torch checkpoints and files of ibp, of any size,
block by block. Tensors that would not become smaller are stored as they are;
names, metadata and every bit are kept. If an input is a file of ibp, its
checksums are compared as it is read. Several inputs become one file or one set
of files. If input and output are directories, each file of tensors is
compressed to a separate file (model.ibp.safetensors,
optimizer.pt.ibp.safetensors), all other files are copied, and config.json says
that the weights are coded.""",
        epilog="""\
examples:
  ibp compress model.safetensors -o model.ibp.safetensors
  ibp compress model/ -o small/
  ibp compress checkpoint/ -o compressed/ --shard-bytes 2G
  ibp compress 'shards/*.npy' -o features.safetensors --verify-output
  cat x.npy | ibp compress - -o - > x.safetensors

If a run is interrupted, repeat the same command: it keeps those files of a set
that the run has finished.""",
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
        help="largest total size of the tensors in a file, before compression, such as 500M; larger inputs become a "
        "set of files (default: 5G)",
    )
    _add_names(parser, "compress")
    _add_work(parser)
    parser.add_argument(
        "--verify-output",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="read what was written, decode it, and compare every tensor (default: no)",
    )
    _add_old(parser, "--verify", "verify_output", True)
    _add_old(parser, "--no-verify", "verify_output", False)
    _add_verify_inputs(parser)
    parser.add_argument(
        "--no-restart", action="store_true", help="do not use the files that an interrupted run has finished"
    )
    _add_force(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="list every tensor")


def _decompress(commands: _Commands) -> None:
    parser = commands.add_parser(
        "decompress",
        help="write the tensors of compressed files as they were",
        description="""\
Write the tensors of compressed files as they were, bit for bit.

The suffix of OUT tells the format: .safetensors, .npy, .npz or .pt. If OUT is a
directory, model.safetensors is written there. A set of files becomes a set of
safetensors files; in other formats it becomes one file. If input and output are
directories, each file gets its original name and format, and all other files
are copied. Checksums are compared as files are read.""",
        epilog="""\
examples:
  ibp decompress model.ibp.safetensors -o model.safetensors
  ibp decompress compressed/ -o checkpoint/
  ibp decompress x.safetensors -o - --format npy | gzip > x.npy.gz""",
    )
    _add_inputs(parser)
    _add_output(parser, "the file or directory to write, a URL, or -")
    parser.add_argument(
        "--format", choices=tuple(SUFFIXES), help="format of the output (default: that of the suffix of OUT)"
    )
    _add_names(parser, "write")
    _add_verify_inputs(parser)
    _add_old(parser, "--no-verify", "verify_inputs", False)
    _add_jobs(parser)
    _add_force(parser)


def _verify(commands: _Commands) -> None:
    parser = commands.add_parser(
        "verify",
        help="compare the checksums of files",
        description="""\
Compare the checksums of files with their bytes.

Exits with 1 if bytes are damaged, or if a file has no checksums, such as a file
that ibp did not write. Each checksum covers a block of 1 MiB. For a damaged
block, the command names the tables that no longer decode to the original
tensors; if there are none, it names the tensors that may be damaged. With
--content, it decodes all tables, also those in blocks that are not damaged.""",
        epilog="""\
examples:
  ibp verify model.safetensors
  ibp verify --content checkpoints/*.safetensors""",
    )
    _add_inputs(parser)
    parser.add_argument("--content", action="store_true", help="decode all tables, and compare their fingerprints")
    _add_jobs(parser)


def _inspect(commands: _Commands) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what is in files: tensors, savings, what the bytes are",
        description="""\
Say what is in files: tensors, schemes, savings, and what the bytes are.

Files of ibp are described as they are. For other files of tensors, the result
of compressing them is estimated from a sample of rows.""",
        epilog="""\
examples:
  ibp inspect model.safetensors
  ibp inspect model.safetensors --tensor lm_head.weight
  ibp inspect checkpoint/ --plot bits.png --html model.html

"before" is the size of a tensor. "after" is the size of all that the file has
for this tensor alone: rows, index, unused room of slots, and padding. The total
also includes the header, the checksums, and codebooks, which tensors share. In
the total, memory that several tensors share counts once. If a tensor is large,
the parts of its coded rows are counted in a sample of rows. The page needs only
a browser; plots need matplotlib.""",
    )
    _add_inputs(parser)
    parser.add_argument(
        "--tensor", action="append", default=[], metavar="NAME", help="show all about one tensor; may be repeated"
    )
    parser.add_argument("--planes", action="store_true", help="show how many bytes each part of a tensor takes")
    parser.add_argument("--plot", metavar="OUT.png", help="draw bits and savings")
    parser.add_argument("--html", metavar="OUT.html", help="write a page that shows the tensors in a browser")
    _add_names(parser)
    _add_force(parser)


def _estimate(commands: _Commands) -> None:
    parser = commands.add_parser(
        "estimate",
        help="say what each scheme would save, without writing anything",
        description="""\
Say what each scheme would save, tensor by tensor, without writing anything.

Savings are measured on a sample of rows. They count all that a file has for a
tensor alone, like "after" in ibp inspect. The last column names the scheme that
ibp compress would choose; "plain" tensors are stored as they are.""",
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

Counts the elements of each tensor whose bits differ, and computes the size of a
delta: a file with which `ibp apply` makes the new version out of the old one.
-o writes that delta.""",
        epilog="""\
examples:
  ibp diff step-1000 step-1100
  ibp diff step-1000 step-1100 -o step-1100.delta
  ibp diff --exit-code --quiet old.safetensors new.safetensors""",
    )
    parser.add_argument("base", metavar="OLD", help=f"the old version: {_ONE_INPUT}")
    parser.add_argument("new", metavar="NEW", help=f"the new version: {_ONE_INPUT}")
    parser.add_argument("-o", "--output", metavar="DELTA", help="write the delta to this file")
    parser.add_argument("--exit-code", action="store_true", help="exit with 1 if anything changed")
    parser.add_argument("--no-weigh", action="store_true", help="do not compute the size of a delta")
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

The delta is a file that `ibp diff -o` or ibp.save wrote. Each tensor of OLD
that the delta changes must be, bit for bit, the tensor that the delta was made
from; otherwise the delta is refused. OLD is not changed. If OLD is a set of
files and the output is safetensors, the output is a set of the same number of
files; in other formats it is one file.""",
        epilog="""\
examples:
  ibp apply step-1000.safetensors step-1100.delta -o step-1100.safetensors""",
    )
    parser.add_argument("base", metavar="OLD", help=f"the old version: {_ONE_INPUT}")
    parser.add_argument("delta", metavar="DELTA", help="the delta: a file, a URL, or -")
    _add_output(parser, "the file (.safetensors, .npz, .pt) or directory to write, a URL, or -")
    _add_work(parser)
    _add_force(parser)


def _doctor(commands: _Commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="say what is installed, test it, and say whether compression pays here",
        description="""\
Say what is installed, test it, and say whether compression pays here.

Lists versions, the GPU, the kernels and the rates in use. Codes and decodes for
two seconds, and compares every bit. Then measures rates. With a GPU, these are
the rates of the link, and of random rows and whole tensors, raw and compressed,
that come from pinned memory. Without a GPU, they are the rates at which the CPU
codes and decodes. Says so if something else uses the machine. Exits with 1 if
bits differ or a call fails.""",
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
whole tensors. The measurements of the link are kept for later processes, which
choose schemes and paths by them; --refresh measures the link again.""",
    )
    _add_work(parser)
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=8.0,
        metavar="S",
        help="about how long to measure, in seconds, 1 to 120 (default: 8)",
    )
    parser.add_argument("--refresh", action="store_true", help="measure the link again, even if its rates are known")
