"""What commands print: one JSON document, or sentences and tables as wide as the terminal. In pipes and files tables
are as wide as their longest names. Errors and bars go to stderr."""

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

_WIDTH = 80  # of sentences in pipes; the least of a terminal, as narrower terminals fold lines
_UNLIMITED = 1 << 20  # of tables in pipes
_GAP, _RULE = "  ", "\u2500"  # between columns; under their names
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")

Table = Callable[[int], Iterator[str]]  # the lines of a table, for the cells that a line has
Part = str | Table  # of what a command prints: a sentence or a table


class Failure(Exception):
    """Ends a command with a sentence and an exit status."""

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
            # Words stay whole, because paths are copied; and so do lines of code, which four spaces begin.
            if isinstance(part, str) and part.startswith("    "):
                lines = iter([part])
            elif isinstance(part, str):
                lines = iter(textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [""])
            else:
                lines = part(width if is_terminal else _UNLIMITED)
            sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines)


def note(arguments: argparse.Namespace, sentence: str) -> None:
    """Says on stderr what a user may want to know besides the result."""
    if not arguments.quiet:
        warn(arguments, sentence)


def warn(arguments: argparse.Namespace, sentence: str) -> None:
    """Says on stderr what went wrong while the command goes on, with --quiet as well."""
    print(f"ibp {arguments.command}: {one_line(sentence)}", file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table. Columns whose names begin with ">" stand to the right; the first one folds where a line of the
    terminal is full. Without names there is no head."""
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
    """How many cells of a terminal a text takes: wide characters take two, and combining ones none."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def _padded(text: str, width: int, stands_right: bool) -> str:
    blanks = " " * (width - _cells_of(text))
    return blanks + text if stands_right else text + blanks


def _folded(text: str, width: int) -> list[str]:
    """A text in lines of at most so many cells."""
    if _cells_of(text) <= width:
        return [text]
    found = [""]
    for c in text:
        if found[-1] and _cells_of(found[-1]) + _cells_of(c) > width:
            found.append("")
        found[-1] += c
    return found


def table_of(items: Iterable[Any], columns: Mapping[str, Callable[[Any], object]]) -> Table:
    """A table with a row an item. columns: by name, what a column says of an item."""
    return table(list(columns), ([say(item) for say in columns.values()] for item in items))


def shown(name: str) -> str:
    """Text of a file, a tensor's name for instance, as a terminal may have it: what controls one is escaped."""
    if name.isascii() and name.isprintable():
        return name
    are_safe = ((c, unicodedata.category(c)[0] not in "CZ" or c == " ") for c in name)
    safe = "".join(c if is_safe else c.encode("unicode_escape").decode("ascii") for c, is_safe in are_safe)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str) -> str:
    """Text in one line, without colours of a terminal."""
    return shown(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split()))


def sentence(error: BaseException) -> str:
    """What an exception says, in a line."""
    if isinstance(error, OSError) and error.strerror:
        of = "" if error.filename is None else f"{error.filename}: "
        return one_line(f"{of}{error.strerror}")
    if isinstance(error, MemoryError) and not str(error):
        return "there is not enough memory"
    return one_line(str(error)) or type(error).__name__


def show_bars(arguments: argparse.Namespace) -> bool:
    """Whether progress bars belong on stderr: on a terminal, unless they are not wanted."""
    return not (arguments.quiet or arguments.no_progress) and sys.stderr.isatty()


def show_size(num_bytes: float) -> str:
    """1,023 bytes, 4.2 MiB: with a digit behind the point where fewer than three stand before it."""
    if abs(num_bytes) < 1024:
        return show_count(int(num_bytes), "byte")
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if abs(num_bytes) >= 99.95 else f"{num_bytes:.1f} {_UNITS[unit]}"


def show_dtype(tensor: Any) -> str:
    """The dtype of a tensor, in short, as headers of safetensors name it."""
    from ibp._files.fields import dtype_name

    return dtype_name(tensor.dtype)


def show_share(share: float) -> str:
    """A share as percent: "33.4 %"."""
    return f"{100 * share + 0.0:.1f} %" if abs(share) >= 0.0005 else "0.0 %"


def show_saved(savings: float) -> str:
    """The share that a checkpoint got smaller, or larger, by: "33.4 % saved", "2.1 % more"."""
    return f"{show_share(savings)} saved" if savings >= 0 else f"{show_share(-savings)} more"


def show_count(number: int, noun: str) -> str:
    """ "1 tensor", "1,234 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
