"""Runs the commands that describe files. `ibp inspect` says what is in files, and `ibp estimate` says what compressing
them would save. `report.py` finds out what `inspect` shows: as tables, as a plot, and as a page.

The plot shows the entropy of each bit, how bits are stored, and how much each tensor saves; it needs matplotlib. The
page is a single file, made of page.html, page.css, page.js and the data.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import io
import json
import re
import warnings
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import ibp
from ibp._common.arguments import is_chosen
from ibp._common.whole_files import check_replaceable, write_whole
from ibp._files import dtype_name
from ibp.checkpoints import CheckpointEstimate
from ibp.checkpoints._inputs import expand

from . import output, work
from .report import FileReport, TensorContents, inspect_path, sum_bytes

_BAR = 24  # Width in characters of the longest bar.


# ---- inspect ----


def inspect(arguments: argparse.Namespace) -> int:
    """Runs `ibp inspect`: describes the tensors in files, and can also draw them as a plot or an HTML page."""

    def wanted(name: str) -> bool:
        is_named = not arguments.tensor or name in arguments.tensor
        return is_named and is_chosen(name, arguments.include or None, arguments.exclude)

    status = _check_pictures(arguments)
    bars = output.show_bars(arguments)
    with work.local(arguments.inputs) as given:
        files = [inspect_path(path, wanted=wanted, progress=bars) for path in expand(given)]
    found = {tensor.name for file in files for tensor in file.tensors}
    missing = [name for name in arguments.tensor if name not in found]
    if missing:
        raise output.Failure(f"there is no tensor {missing[0]!r} in {', '.join(file.path for file in files)}")
    if arguments.include and not found:
        raise output.Failure(f"no tensor's name is one that --include {' '.join(arguments.include)} leaves")
    if arguments.html:
        write_whole(Path(arguments.html), make_page(files).encode("utf-8", "backslashreplace"))
    if arguments.plot:
        write_whole(Path(arguments.plot), draw(files))
    output.report(arguments, {"files": [file.as_dict() for file in files]}, *_inspect_parts(arguments, files))
    return status


def _check_pictures(arguments: argparse.Namespace) -> int:
    """Checks --plot and --html before the work begins. If a picture will not be written, sets its option to None.

    With --keep, an existing picture is not replaced. The plot needs matplotlib. If matplotlib is missing and --html is
    given, the command goes on without the plot and ends with exit status 2. Without --html, ImportError is raised.

    Returns:
        The exit status of the command: 0 or 2.

    Raises:
        Failure, OSError, ImportError: a picture cannot be made.
    """
    for option, suffix in (("plot", ".png"), ("html", ".html")):
        picture = getattr(arguments, option)
        if picture is None:
            continue
        if not Path(picture).absolute().parent.is_dir():
            raise output.Failure(f"{picture}: there is no such directory")
        if not picture.lower().endswith(suffix):
            raise output.Failure(f"--{option} is {picture}; wanted a name that ends in {suffix}")
        check_replaceable(Path(picture))
        if not work.may_write(arguments, picture):
            setattr(arguments, option, None)
    try:
        if arguments.plot:
            require_matplotlib()
    except ImportError as error:
        if not arguments.html:
            raise
        output.warn(arguments, f"{arguments.plot} is not drawn: {error}")
        arguments.plot = None
        return 2
    return 0


def _inspect_parts(arguments: argparse.Namespace, files: list[FileReport]) -> Iterator[output.Part]:
    for number, file in enumerate(files):
        if number:
            yield ""
        if arguments.tensor:
            for tensor in file.tensors:
                yield from _details(tensor)
            continue
        kind = f"{file.format}, {output.show_size(file.file_bytes)}"
        yield f"{output.shown(file.path)}: {kind}{'; sizes after are estimates' if file.is_estimate else ''}"
        yield ""
        yield _list(file)
        if arguments.planes:
            yield ""
            yield _all_parts(file)
        yield ""
        yield (
            f"{output.show_count(len(file.tensors), 'tensor')}: {output.show_size(file.original_bytes)} before, "
            f"{output.show_size(file.stored_bytes)} after, {output.show_share(file.savings)} saved"
        )
        yield from (f"{tensor.name}: {tensor.note}" for tensor in file.tensors if tensor.note)


def _list(file: FileReport) -> output.Table:
    rows = (
        [
            tensor.name,
            dtype_name(tensor.dtype),
            "x".join(map(str, tensor.shape)) or "scalar",
            "delta" if tensor.kind == "delta" else tensor.scheme,
            output.show_size(tensor.original_bytes),
            output.show_size(tensor.stored_bytes),
            output.show_share(tensor.savings),
        ]
        for tensor in file.tensors
    )
    return output.table(["tensor", "dtype", "shape", "scheme", ">before", ">after", ">saved"], rows)


def _all_parts(file: FileReport) -> output.Table:
    rows = []
    for tensor in file.tensors:
        names = [tensor.name, *[""] * (len(tensor.parts) - 1)]
        rows += [
            [name, part, f"{size:,}", output.show_share(size / tensor.stored_bytes)]
            for name, (part, size) in zip(names, tensor.parts.items())
        ]
    return output.table(["tensor", "part", ">bytes", ">share"], rows)


def _details(tensor: TensorContents) -> Iterator[output.Part]:
    yield tensor.name
    yield ""
    yield output.table(["", ""], _facts(tensor))
    if tensor.parts:
        yield ""
        yield output.table(
            ["part", ">bytes", ">share", ""],
            [
                [part, f"{size:,}", output.show_share(share), "#" * round(_BAR * share)]
                for part, size in tensor.parts.items()
                for share in [size / tensor.stored_bytes]
            ],
        )
    if tensor.entropy:
        yield ""
        yield output.table(["bits", ">entropy", ">kept", ">ranked", ">left out"], list(_bits(tensor)))
    if tensor.entries:
        yield ""
        entries = [(name, meaning, output.show_share(share)) for name, meaning, share in tensor.entries]
        yield output.table(["entry", "stands for", ">share"], entries)


def _facts(tensor: TensorContents) -> list[list[str]]:
    rows = f"{tensor.num_rows:,} of {tensor.row_bytes:,} bytes; {tensor.raw_rows:,} raw, {tensor.default_rows:,} empty"
    facts = [
        ["dtype", tensor.dtype],
        ["shape", str(list(tensor.shape))],
        ["scheme", tensor.scheme + ("" if tensor.kind in ("table", "plain") else f" ({tensor.kind})")],
        ["before", f"{tensor.original_bytes:,} bytes"],
        ["after", f"{tensor.stored_bytes:,} bytes, {output.show_share(tensor.savings)} saved"],
        ["rows", rows],
    ]
    if tensor.codebook_bytes:
        facts.append(["codebook", f"{tensor.codebook_bytes:,} bytes, which other tensors may share"])
    if tensor.is_sampled:
        facts.append(["counted", f"{tensor.sampled_rows:,} of the rows, as a sample"])
    if tensor.note:
        facts.append(["note", tensor.note])
    return facts


def _bits(tensor: TensorContents) -> Iterator[list[str]]:
    """Yields the rows of the table of bits, the most significant bit first. Adjacent bits with equal figures share a
    row."""
    width = len(tensor.entropy)
    none = [0.0] * width
    uses = zip(tensor.entropy, tensor.left_out or none, tensor.ranked or none)
    lines = [
        [f"{entropy:.2f}", *map(output.show_share, (1 - left_out - ranked, ranked, left_out))]
        for entropy, left_out, ranked in uses
    ]
    first = 0
    for bit in range(1, width + 1):
        if bit == width or lines[bit] != lines[first]:
            most, least = width - 1 - first, width - bit
            yield [str(most) if most == least else f"{most}-{least}", *lines[first]]
            first = bit


# ---- estimate ----


def estimate(arguments: argparse.Namespace) -> int:
    """Runs `ibp estimate`: says what each scheme would save."""
    with work.local(arguments.inputs) as given, work.threads(arguments.jobs):
        found = ibp.checkpoints.estimate(
            given,
            level=arguments.level,
            include=arguments.include or None,
            exclude=arguments.exclude,
            progress=output.show_bars(arguments),
        )
    listed = set(work.chosen(arguments, [tensor.name for tensor in found.tensors]))
    output.report(arguments, found.as_dict(), *_estimate_parts(found, listed))
    return 0


def _estimate_parts(found: CheckpointEstimate, listed: set[str]) -> list[output.Part]:
    schemes = dict.fromkeys(scheme for tensor in found.tensors for scheme in tensor.savings)
    rows = (
        [
            tensor.name,
            dtype_name(tensor.dtype),
            output.show_size(tensor.num_bytes),
            *(output.show_share(tensor.savings[scheme]) if scheme in tensor.savings else "" for scheme in schemes),
            tensor.best or "plain",
        ]
        for tensor in found.tensors
        if tensor.name in listed
    )
    return [
        output.table(["tensor", "dtype", ">size", *(f">{scheme}" for scheme in schemes), "takes"], rows),
        "",
        f"{output.show_count(len(found.tensors), 'tensor')}: {output.show_size(found.num_bytes)} would become "
        f"{output.show_size(found.file_bytes)}, {output.show_saved(found.savings)}.",
    ]


if TYPE_CHECKING:
    from matplotlib.axes import Axes


# ---- the plot ----

# Colours for how a bit is stored, and for schemes. They are the colours of the page. No colour has two meanings in a
# plot.
USES = {"kept as it is": "#0072b2", "ranked symbol": "#e69f00", "left out": "#c9ced3"}
_SCHEMES = {"planes": "#009e73", "ibp": "#cc79a7", "raw": "#8f2d00", "plain": "#8c6d46"}
_OTHER_SCHEME = "#6b5fa8"
_MOST_GROUPS = 4  # Largest number of dtypes with panels. The dtypes with the most bytes get them.
_MOST_ROWS = 32  # Largest number of rows in a panel. A row is for one tensor, or for several similar tensors.
_LINE_LENGTH = 36  # Largest number of characters in a line of a name. A name may take two lines.
_FONT = 9  # Size of the font in points.
_LEGEND: dict[str, Any] = {"fontsize": _FONT, "handlelength": 1, "columnspacing": 1, "frameon": False}
# For each dtype, the first bit of each field of a float, counted from the most significant bit.
FIELDS = {
    "bfloat16": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float16": ((0, "sign"), (1, "exponent"), (6, "mantissa")),
    "float32": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float64": ((0, "sign"), (1, "exponent"), (12, "mantissa")),
    "complex64": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float8_e4m3fn": ((0, "sign"), (1, "exponent"), (5, "mantissa")),
    "float8_e5m2": ((0, "sign"), (1, "exponent"), (6, "mantissa")),
}


def draw(files: Sequence[FileReport]) -> bytes:
    """Draws the plot of the files' tensors. Returns a PNG.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: no tensor has elements.
    """
    matplotlib = require_matplotlib()
    reports = [tensor for file in files for tensor in file.tensors if tensor.original_bytes]
    groups = _groups(reports)
    if not reports or not groups:
        raise ValueError("there is nothing to plot: no tensor has elements")
    panels = [_rows(group) for group in groups.values()]
    rows = _rows(reports)
    heights = [_height(own) for own in (*panels, rows)]
    figure = matplotlib.figure.Figure((9.5, sum(heights) + 1.1 * len(heights) + 0.5), layout="constrained")
    figure.suptitle(plain(", ".join(file.path for file in files), 90), fontsize=_FONT + 2, parse_math=False)
    grid = figure.add_gridspec(len(heights), 2, width_ratios=(3, 2), height_ratios=heights)
    for at, (dtype, group) in enumerate(groups.items()):
        _draw_entropy(figure, figure.add_subplot(grid[at, 0]), dtype, panels[at])
        _draw_uses(figure.add_subplot(grid[at, 1]), dtype, group)
    _draw_savings(figure.add_subplot(grid[-1, :]), rows, files)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # Names may have any characters.
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()


def require_matplotlib() -> Any:
    """Imports matplotlib and matplotlib.figure. Returns matplotlib. Raises ImportError if it is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    return matplotlib


def plain(name: str, most: int) -> str:
    """Returns a name as one printable line of at most `most` characters. Characters in the middle of a longer name are
    replaced by an ellipsis."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in name)
    half = (most - 1) // 2
    return shown if len(shown) <= most else f"{shown[:half]}\u2026{shown[-half:]}"


def _groups(reports: Sequence[TensorContents]) -> dict[str, list[TensorContents]]:
    """Groups reports by dtype. Returns the `_MOST_GROUPS` groups with the most bytes, the largest first. Leaves out
    reports without entropies, and reports whose elements have fewer bits than others of the same dtype."""
    found: dict[str, list[TensorContents]] = {}
    for report in reports:
        if report.entropy:
            found.setdefault(report.dtype, []).append(report)
    widths = {dtype: max(len(report.entropy) for report in group) for dtype, group in found.items()}
    found = {dtype: [r for r in group if len(r.entropy) == widths[dtype]] for dtype, group in found.items()}
    order = sorted(found, key=lambda dtype: -sum(report.original_bytes for report in found[dtype]))
    return {dtype: found[dtype] for dtype in order[:_MOST_GROUPS]}


def _rows(reports: Sequence[TensorContents]) -> list[tuple[str, list[TensorContents]]]:
    """Divides reports into the rows of a panel. Returns (name, reports) for each row.

    If there are few tensors, each tensor has a row. Otherwise tensors whose names differ only in numbers share a row.
    If there are still too many rows, the rows with the fewest bytes are joined into one row, "others"."""
    if len(reports) <= _MOST_ROWS:
        return [(report.name, [report]) for report in reports]
    kinds: dict[str, list[TensorContents]] = {}
    for report in reports:
        kinds.setdefault(re.sub(r"(?<![^._/])\d+(?![^._/])", "*", report.name), []).append(report)
    rows = sorted(kinds.items(), key=lambda row: -sum_bytes(row[1])[0])
    rows, rest = (rows, []) if len(rows) <= _MOST_ROWS else (rows[: _MOST_ROWS - 1], rows[_MOST_ROWS - 1 :])
    named = [(kind if len(own) > 1 else own[0].name, own) for kind, own in rows]
    return named + ([("others", [report for _, own in rest for report in own])] if rest else [])


def _labels(rows: Sequence[tuple[str, list[TensorContents]]]) -> list[str]:
    """Returns the label of each row: its name, in one or two lines, and the number of its tensors if it has several."""
    return ["\n".join(_lines(name)) + (f" ({len(own)} tensors)" if len(own) > 1 else "") for name, own in rows]


def _lines(name: str) -> list[str]:
    """Divides a name into one or two lines. A long name is split after a dot, slash or underscore: the last one for
    which both lines are short enough."""
    shown = plain(name, 2 * _LINE_LENGTH - 8)
    if len(shown) <= _LINE_LENGTH:
        return [shown]
    ends = [found.end() for found in re.finditer(r"[._/]", shown[:_LINE_LENGTH])]
    end = max((end for end in ends if len(shown) - end <= _LINE_LENGTH), default=_LINE_LENGTH)
    return [shown[:end], shown[end:]]


def _height(rows: Sequence[tuple[str, list[TensorContents]]]) -> float:
    two_lines = any(len(_lines(name)) > 1 for name, _ in rows)
    return max(1.3, (0.34 if two_lines else 0.22) * len(rows))


def _draw_entropy(figure: Any, axes: Axes, dtype: str, rows: Sequence[tuple[str, list[TensorContents]]]) -> None:
    image = axes.imshow(
        np.array([_mean("entropy", own) for _, own in rows]),
        aspect="auto",
        cmap="cividis",
        vmin=0,
        vmax=1,
        interpolation="none",
    )
    fields = " | ".join(name for _, name in FIELDS.get(dtype, ()))
    axes.set_title(f"{dtype}: entropy of each bit{fields and f'{chr(10)}{fields}'}", loc="left", fontsize=_FONT + 1)
    axes.set_yticks(range(len(rows)), _labels(rows), fontsize=_FONT - 1, parse_math=False)
    _mark_bits(axes, dtype, len(rows[0][1][0].entropy))
    bar = figure.colorbar(image, ax=axes, location="bottom", aspect=40, shrink=0.6, pad=0.02)
    bar.set_label("entropy, bits", fontsize=_FONT)
    bar.ax.tick_params(labelsize=_FONT)


def _mean(field: str, reports: Sequence[TensorContents]) -> np.ndarray:
    """Returns the mean of a field over the reports, for each bit. The field has a number for each bit. Tensors are
    weighted by their sizes. An empty field counts as zeros."""
    width = len(reports[0].entropy)
    values = [getattr(report, field) or [0.0] * width for report in reports]
    mean: np.ndarray = np.average(values, axis=0, weights=[report.original_bytes for report in reports])
    return mean


def _mark_bits(axes: Axes, dtype: str, width: int) -> None:
    """Labels the bits on the x axis, and draws lines between the fields of a float."""
    step = 1 if width <= 8 else 2 if width <= 16 else 4 if width <= 32 else 8
    bits = [bit for bit in range(width) if (width - 1 - bit) % step == 0]
    axes.set_xticks(bits, [str(width - 1 - bit) for bit in bits], fontsize=_FONT)
    axes.set_xlabel("bit, from the most significant", fontsize=_FONT)
    for start, _ in FIELDS.get(dtype, ())[1:]:
        axes.axvline(start - 0.5, color="#d55e00", linewidth=1.5)


def _draw_uses(axes: Axes, dtype: str, group: Sequence[TensorContents]) -> None:
    left_out, ranked = (_mean(use, group) for use in ("left_out", "ranked"))
    width = len(left_out)
    bottom = np.zeros(width)
    for use, share in zip(USES, (1 - left_out - ranked, ranked, left_out)):
        if share.any():
            axes.bar(range(width), share, 0.9, bottom, color=USES[use], label=use)
        bottom += share
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_yticks((0, 0.5, 1), ("0", "50 %", "100 %"), fontsize=_FONT)
    _mark_bits(axes, dtype, width)
    title: dict[str, Any] = {"title": "what is done with it, by bytes", "title_fontsize": _FONT + 1}
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1), "borderaxespad": 0.0}
    axes.legend(ncols=3, alignment="left", **title, **place, **_LEGEND)


def _draw_savings(axes: Axes, rows: Sequence[tuple[str, list[TensorContents]]], files: Sequence[FileReport]) -> None:
    """Draws a bar for the savings of each row. If a row has several tensors, a line extends from the lowest to the
    highest savings of a tensor. The title states the savings of the complete files, headers included."""
    drawn: set[str] = set()
    highest = lowest = 0.0
    for at, (_, own) in enumerate(rows):
        before, after = sum_bytes(own)
        saved, each = 100 * (1 - after / before), [100 * report.savings for report in own]
        largest = max(own, key=lambda report: report.original_bytes).scheme
        label = None if largest in drawn else largest
        drawn.add(largest)
        axes.barh(at, saved, 0.7, color=_SCHEMES.get(largest, _OTHER_SCHEME), label=label)
        if len(own) > 1:
            axes.hlines(at, min(each), max(each), color="black", linewidth=1.5)
        end = max(0, saved, *each)
        text: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": _FONT}
        axes.annotate(f"{saved:.1f} %", (end, at), (4, 0), **text)
        lowest, highest = min(lowest, saved, *each), max(highest, end)
    axes.set_yticks(range(len(rows)), _labels(rows), fontsize=_FONT - 1, parse_math=False)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(1.1 * lowest, 1.15 * max(10, highest))
    before, after = sum_bytes(files)
    several = "; line: from the least to the most of its tensors" if any(len(own) > 1 for _, own in rows) else ""
    axes.set_title(f"bytes saved: {100 * (1 - after / before):.1f} % of all", loc="left", fontsize=_FONT + 1)
    axes.set_xlabel(f"bytes saved, %{several}", fontsize=_FONT)
    axes.tick_params(axis="x", labelsize=_FONT)
    axes.grid(alpha=0.3, axis="x")
    axes.set_axisbelow(True)
    axes.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.2, **_LEGEND)


# ---- the page ----


def make_page(files: Sequence[FileReport]) -> str:
    """Returns the text of the HTML page. Text from the files is escaped or stored as JSON, so no name can become markup
    or code."""
    title = ", ".join(file.path for file in files)
    style, script = (_resource(name) for name in ("page.css", "page.js"))
    parts = {
        "title": html.escape(title),
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "style": style,
        "data": _inline(_data(files)),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _resource("page.html"))


def _resource(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


def _inline(data: Any) -> str:
    """Returns data as JSON for a script element. Characters that could begin or end markup are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _data(files: Sequence[FileReport]) -> dict[str, Any]:
    """Returns the data that page.js draws. Each distinct description of a codebook is stored once, in the list
    "codebooks", and tensors refer to it by its position there."""
    codebooks: dict[str, int] = {}
    return {
        "fields": {
            dtype: FIELDS[dtype] for file in files for r in file.tensors for dtype in [r.dtype] if dtype in FIELDS
        },
        "files": [
            {**file.as_dict(), "tensors": [_tensor(report, codebooks) for report in file.tensors]} for file in files
        ],
        "codebooks": list(codebooks),
    }


def _tensor(report: TensorContents, codebooks: dict[str, int]) -> dict[str, Any]:
    """Returns the data of one report. Values that are empty or zero are left out, except for some that page.js always
    needs. codebooks: a dictionary from each description of a codebook to its position in the list "codebooks". If the
    report has a new description, it is added."""
    values = vars(report) | {
        "codebook": codebooks.setdefault(report.codebook, len(codebooks)) if report.codebook else None,
        "left_out": report.left_out if any(report.left_out) else [],
        "ranked": report.ranked if any(report.ranked) else [],
        "entries": [(name, meaning, round(share, 4)) for name, meaning, share in report.entries],
    }
    always = ("name", "original_bytes", "stored_bytes", "shape", "parts", "entropy")
    return {key: value for key, value in values.items() if key in always or value or (key, value) == ("codebook", 0)}
