"""The parser, and the options that several commands have."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from typing import Any, NoReturn

_WIDTH = 80
_MOST_THREADS = 1024
_UNITS = ("", "K", "M", "G", "T")


class Parser(argparse.ArgumentParser):
    """Reports errors in one line, and looks the same in every version of Python."""

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
            self._action_max_length += self._indent_increment  # makes room for the list of commands

    def _format_action_invocation(self, action: argparse.Action) -> str:
        """Returns "-o, --output OUT", as in Python 3.13."""
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        value = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {value}"


def size(text: str) -> int:
    """Returns the bytes of "5G", "512MiB", "1.5GB" or "4096". Units are powers of 1024; if they end in B without i,
    powers of 1000."""
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


def add_common(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every command has."""
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
    group.add_argument("-q", "--quiet", action="store_true", help="print errors only")
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")


def add_inputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="+", metavar="IN", help="files, directories, indices of sets of files, globs, URLs, or -"
    )


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("-o", "--output", required=True, metavar="OUT", help=what)


def add_level(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--level",
        choices=("default", "fast"),
        default="default",
        help="fast: somewhat larger, decoded at the rate of a GPU's memory (default: default)",
    )


def add_names(parser: argparse.ArgumentParser, take: str = "take") -> None:
    """Adds the options that choose tensors by patterns of their names."""
    for option, what in (("--include", f"{take} only"), ("--exclude", f"do not {take}")):
        parser.add_argument(
            option,
            action="append",
            default=[],
            metavar="PATTERN",
            help=f"{what} tensors whose names match (*, ?, [a-z]); repeats",
        )


def add_work(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the device and the number of threads."""
    parser.add_argument(
        "--device", metavar="DEVICE", help="where the work is done: cpu, cuda, cuda:1 (default: a GPU if there is one)"
    )
    add_jobs(parser)


def add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-j", "--jobs", type=thread_count, metavar="N", help="threads of the CPU (default: one a core)")


def add_force(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say whether to replace an existing OUT."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--force", action="store_true", help="replace what is at OUT")
    group.add_argument("-k", "--keep", action="store_true", help="do nothing where OUT is there already")
