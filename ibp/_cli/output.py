"""Prints the results of commands to stdout: one JSON document, or sentences and tables. On a terminal, sentences and
tables are wrapped to the width of the terminal. In pipes and files, a table is as wide as its content. Errors and
progress bars go to stderr."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence

# Exit statuses of commands that did not succeed. 0 means success.
WRONG, USAGE, INTERRUPTED = 1, 2, 130
# The width of sentences in pipes, in characters. It is also used for narrower terminals, which fold the lines.
_WIDTH = 80
_UNLIMITED = 1 << 20  # Width limit of tables in pipes and files: practically none.
_GAP, _RULE = "  ", "\u2500"  # The blanks between columns, and the character of the line under their names.
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")

Table = Callable[[int], Iterator[str]]  # A function that returns the lines of a table for a width in terminal cells.
Part = str | Table  # A part of a command's result: a sentence or a table.


class Failure(Exception):
    """Ends a command with a message and an exit status."""

    def __init__(self, sentence: str, status: int = USAGE) -> None:
        super().__init__(one_line(sentence))
        self.status = status


def report(arguments: argparse.Namespace, document: object, *parts: Part) -> None:
    """Prints the result of a command: with --json the document, otherwise the parts, which are sentences and tables.
    Prints nothing with --quiet, unless --json is given, too."""
    if arguments.json:
        json.dump(document, sys.stdout, indent=1, allow_nan=False)
        sys.stdout.write("\n")
    elif not arguments.quiet:
        is_terminal = sys.stdout.isatty()
        width = max(_WIDTH, shutil.get_terminal_size().columns) if is_terminal else _WIDTH
        for part in parts:
            # Words are not broken, because users copy paths. Lines of code, which begin with four spaces, are not
            # wrapped.
            if isinstance(part, str) and part.startswith("    "):
                lines = iter([part])
            elif isinstance(part, str):
                lines = iter(textwrap.wrap(part, width, break_long_words=False, break_on_hyphens=False) or [""])
            else:
                lines = part(width if is_terminal else _UNLIMITED)
            sys.stdout.writelines(f"{line.rstrip()}\n" for line in lines)


def warn(arguments: argparse.Namespace, sentence: str) -> None:
    """Prints a warning on stderr, even with --quiet. The sentence says what went wrong; the command goes on."""
    print(f"ibp {arguments.command}: {one_line(sentence)}", file=sys.stderr)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table for `report`.

    If the terminal is too narrow for the table, the entries of the first column are folded.

    Args:
        columns: the names of the columns. A column whose name begins with ">" is aligned to the right. If all names are
            empty, the table has no header line.
        rows: for each row, its entry in each column.
    """
    heads = [name.lstrip(">") for name in columns]
    cells = [heads, *([shown(str(value)) for value in row] for row in rows)]

    def lines(width: int) -> Iterator[str]:
        widths = [max(map(_cells_of, column)) for column in zip(*cells)]
        others = sum(widths[1:]) + len(_GAP) * len(widths[1:])
        widths[0] = max(1, min(widths[0], width - others))
        for row in cells if any(heads) else cells[1:]:
            first, *more = _folded(row[0], widths[0])
            filled = []
            for text, room, name in zip((first, *row[1:]), widths, columns):
                blanks = " " * (room - _cells_of(text))
                filled.append(blanks + text if name.startswith(">") else text + blanks)
            yield _GAP.join(filled)
            yield from more
            if row is heads:
                yield (_RULE if shown(_RULE) == _RULE else "-") * (widths[0] + others)

    return lines


def _cells_of(text: str) -> int:
    """Returns the number of terminal cells that a string occupies. A wide character occupies two cells, and a combining
    character none."""
    if text.isascii():
        return len(text)
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def _folded(text: str, width: int) -> list[str]:
    """Divides a string into lines of at most `width` terminal cells."""
    if _cells_of(text) <= width:
        return [text]
    found = [""]
    for c in text:
        if found[-1] and _cells_of(found[-1]) + _cells_of(c) > width:
            found.append("")
        found[-1] += c
    return found


def shown(name: str) -> str:
    """Makes a string from a file, such as a tensor's name, safe to print: escapes control characters, and characters
    that stdout cannot encode."""
    if name.isascii() and name.isprintable():
        return name
    are_safe = ((c, unicodedata.category(c)[0] not in "CZ" or c == " ") for c in name)
    safe = "".join(c if is_safe else c.encode("unicode_escape").decode("ascii") for c, is_safe in are_safe)
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return safe.encode(encoding, "backslashreplace").decode(encoding)


def one_line(text: str) -> str:
    """Returns a string as one line that is safe to print, without the codes of terminal colours."""
    return shown(" ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split()))


def sentence(error: BaseException) -> str:
    """Returns the message of an exception as one line."""
    if isinstance(error, OSError) and error.strerror:
        of = "" if error.filename is None else f"{error.filename}: "
        return one_line(f"{of}{error.strerror}")
    if isinstance(error, MemoryError) and not str(error):
        return "there is not enough memory"
    return one_line(str(error)) or type(error).__name__


def show_bars(arguments: argparse.Namespace) -> bool:
    """Returns whether to show progress bars: stderr is a terminal, and neither --quiet nor --no-progress is given."""
    return not (arguments.quiet or arguments.no_progress) and sys.stderr.isatty()


def show_size(num_bytes: float) -> str:
    """Returns a size as a string, such as "1,023 bytes", "4.2 MiB" or "420 MiB". A size of 1 KiB or more has one
    decimal place if it has at most two digits before the decimal point."""
    if abs(num_bytes) < 1024:
        return show_count(int(num_bytes), "byte")
    unit = 0
    while abs(num_bytes) >= 999.5 and unit < len(_UNITS) - 1:
        num_bytes, unit = num_bytes / 1024, unit + 1
    return f"{num_bytes:,.0f} {_UNITS[unit]}" if abs(num_bytes) >= 99.95 else f"{num_bytes:.1f} {_UNITS[unit]}"


def show_share(share: float) -> str:
    """Returns a fraction as a percentage: "33.4 %"."""
    return f"{100 * share + 0.0:.1f} %" if abs(share) >= 0.0005 else "0.0 %"


def show_saved(savings: float) -> str:
    """Returns a string that says by how much a checkpoint got smaller or larger: "33.4 % saved", "2.1 % more"."""
    return f"{show_share(savings)} saved" if savings >= 0 else f"{show_share(-savings)} more"


def show_count(number: int, noun: str) -> str:
    """Returns a number with its noun, in the plural unless the number is 1: "1 tensor", "1,234 tensors"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
