"""Prints the results of commands: one JSON document, or sentences and tables as wide as the terminal. In pipes and
files, tables are as wide as their longest names. Errors and bars go to stderr."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

_WIDTH = 80  # the width of sentences in pipes, and the least width of a terminal, because narrower terminals fold lines
_UNLIMITED = 1 << 20  # the width of tables in pipes
_GAP, _RULE = "  ", "\u2500"  # between columns, and under their names
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")

Table = Callable[[int], Iterator[str]]  # returns the lines of a table for a number of cells in a line
Part = str | Table  # of a command's result: a sentence or a table


class Failure(Exception):
    """Ends a command with a message and an exit status."""

    def __init__(self, sentence: str, status: int = 2) -> None:
        super().__init__(one_line(sentence))
        self.status = status


def report(arguments: argparse.Namespace, document: object, *parts: Part) -> None:
    """Prints the result of a command: the document with --json, else the parts, which are sentences and tables."""
    if arguments.json:
        json.dump(document, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    elif not arguments.quiet:
        is_terminal = sys.stdout.isatty()
        width = max(_WIDTH, shutil.get_terminal_size().columns) if is_terminal else _WIDTH
        for part in parts:
            # Words stay whole, because users copy paths. Lines of code, which begin with four spaces, also stay whole.
            if isinstance(part, str) and part.startswith("    "):
                lines = iter([part])
            elif isinstance(part, str):
                lines = iter(textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [""])
            else:
                lines = part(width if is_terminal else _UNLIMITED)
            sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines)


def note(arguments: argparse.Namespace, sentence: str) -> None:
    """Prints on stderr what a user may want to know in addition to the result."""
    if not arguments.quiet:
        warn(arguments, sentence)


def warn(arguments: argparse.Namespace, sentence: str) -> None:
    """Prints on stderr what went wrong while the command goes on, even with --quiet."""
    print(f"ibp {arguments.command}: {one_line(sentence)}", file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table. Columns whose names begin with ">" are aligned to the right. If a line of the terminal is too
    short, the first column is folded. Without names the table has no head."""
    heads = [name.lstrip(">") for name in columns]
    cells = [heads, *([shown(str(value)) for value in row] for row in rows)]

    def lines(width: int) -> Iterator[str]:
        widths = [max(map(_cells_of, column)) for column in zip(*cells)]
        others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
        widths[0] = max(1, min(widths[0], width - others))
        for row in cells if any(heads) else cells[1:]:
            first, *more = _folded(row[0], widths[0])
            filled = zip((first, *row[1:]), widths, columns)
            yield _GAP.join(_padded(text, room, name.startswith(">")) for text, room, name in filled)
            yield from more
            if row is heads:
                yield (_RULE if shown(_RULE) == _RULE else "-") * (widths[0] + others)

    return lines


def _cells_of(text: str) -> int:
    """Returns how many cells of a terminal a text takes. Wide characters take two, and combining characters none."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def _padded(text: str, width: int, stands_right: bool) -> str:
    blanks = " " * (width - _cells_of(text))
    return blanks + text if stands_right else text + blanks


def _folded(text: str, width: int) -> list[str]:
    """Returns a text in lines of at most `width` cells."""
    if _cells_of(text) <= width:
        return [text]
    found = [""]
    for c in text:
        if found[-1] and _cells_of(found[-1]) + _cells_of(c) > width:
            found.append("")
        found[-1] += c
    return found


def table_of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], object]]) -> Table:
    """Returns a table with a row for each item. columns: by name, a function that returns the cell of an item."""
    return table(list(columns), ([say(item) for say in columns.values()] for item in items))


def shown(name: str) -> str:
    """Returns text of a file, such as a tensor's name, in a form that is safe for a terminal: control characters are
    escaped."""
    if name.isascii() and name.isprintable():
        return name
    are_safe = ((c, unicodedata.category(c)[0] not in "CZ" or c == " ") for c in name)
    safe = "".join(c if is_safe else c.encode("unicode_escape").decode("ascii") for c, is_safe in are_safe)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str) -> str:
    """Returns text in one line, without terminal colours."""
    return shown(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split()))


def sentence(error: BaseException) -> str:
    """Returns the message of an exception, in one line."""
    if isinstance(error, OSError) and error.strerror:
        of = "" if error.filename is None else f"{error.filename}: "
        return one_line(f"{of}{error.strerror}")
    if isinstance(error, MemoryError) and not str(error):
        return "there is not enough memory"
    return one_line(str(error)) or type(error).__name__


def show_bars(arguments: argparse.Namespace) -> bool:
    """Returns whether progress bars are shown on stderr: on a terminal, unless the user does not want them."""
    return not (arguments.quiet or arguments.no_progress) and sys.stderr.isatty()


def show_size(num_bytes: float) -> str:
    """Returns a size such as "1,023 bytes" or "4.2 MiB", with one digit behind the point if there are fewer than
    three before."""
    if abs(num_bytes) < 1024:
        return show_count(int(num_bytes), "byte")
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if abs(num_bytes) >= 99.95 else f"{num_bytes:.1f} {_UNITS[unit]}"


def show_dtype(tensor: Any) -> str:
    """Returns the short name of a tensor's dtype, as in headers of safetensors."""
    from ibp._files import dtype_name

    return dtype_name(tensor.dtype)


def show_share(share: float) -> str:
    """Returns a share in percent: "33.4 %"."""
    return f"{100 * share + 0.0:.1f} %" if abs(share) >= 0.0005 else "0.0 %"


def show_saved(savings: float) -> str:
    """Returns by which share a checkpoint got smaller or larger: "33.4 % saved", "2.1 % more"."""
    return f"{show_share(savings)} saved" if savings >= 0 else f"{show_share(-savings)} more"


def show_count(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 tensor", "1,234 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
