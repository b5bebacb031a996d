"""Plots of reports: the entropy of bits, what is done with them, and what each tensor saves. Needs matplotlib."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .report import TensorReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Colours of Okabe and Ito, which the colour-blind tell apart.
USES = {"kept as it is": "#0072b2", "ranked symbol": "#e69f00", "left out": "#c9ced3"}
_SCHEMES = {"planes": "#e69f00", "ibp": "#56b4e9", "raw": "#8a939b", "plain": "#c9ced3"}
_MOST_GROUPS = 4  # dtypes that are drawn, those with the most bytes
_MOST_NAMES = 40  # tensors that are named
_NAME_LENGTH = 44
# Where the fields of a float begin, from the most significant bit on.
FIELDS = {
    "bfloat16": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float16": ((0, "sign"), (1, "exponent"), (6, "mantissa")),
    "float32": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float64": ((0, "sign"), (1, "exponent"), (12, "mantissa")),
    "complex64": ((0, "sign"), (1, "exponent"), (9, "mantissa")),
    "float8_e4m3fn": ((0, "sign"), (1, "exponent"), (5, "mantissa")),
    "float8_e5m2": ((0, "sign"), (1, "exponent"), (6, "mantissa")),
}


def draw(reports: Sequence[TensorReport], title: str) -> bytes:
    """A PNG of the reports.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: there is no tensor with elements.
    """
    matplotlib = require_matplotlib()
    reports = [report for report in reports if report.original_bytes]
    groups = _groups(reports)
    if not reports or not groups:
        raise ValueError("there is nothing to plot: no tensor has elements")
    heights = [_height(len(group)) for group in groups.values()]
    savings_height = _height(len(reports)) if len(reports) <= _MOST_NAMES else 2.6
    figure = matplotlib.figure.Figure(
        (12, sum(heights) + savings_height + 1.2 * len(heights) + 1.2), layout="constrained"
    )
    figure.suptitle(plain(title, 90), parse_math=False)
    grid = figure.add_gridspec(len(groups) + 1, 2, width_ratios=(3, 2), height_ratios=[*heights, savings_height])
    for row, (dtype, group) in enumerate(groups.items()):
        _draw_entropy(figure, figure.add_subplot(grid[row, 0]), dtype, group)
        _draw_uses(figure.add_subplot(grid[row, 1]), dtype, group)
    below = figure.add_subplot(grid[-1, :])
    (_draw_bars if len(reports) <= _MOST_NAMES else _draw_steps)(below, reports)
    return _png(figure)


def require_matplotlib() -> Any:
    """matplotlib, with its figures. ImportError if it is not installed."""
    try:
        import matplotlib.figure
    except ImportError:
        raise ImportError("plots need matplotlib: pip install matplotlib") from None
    return matplotlib


def plain(name: str, most: int = _NAME_LENGTH) -> str:
    """A name in one printable line of at most so many characters, cut in its middle."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in name)
    half = (most - 1) // 2
    return shown if len(shown) <= most else f"{shown[:half]}\u2026{shown[-half:]}"


def _groups(reports: Sequence[TensorReport]) -> dict[str, list[TensorReport]]:
    """Reports with bits by dtype, those of the most bytes first."""
    found: dict[str, list[TensorReport]] = {}
    for report in reports:
        if report.entropy:
            found.setdefault(report.dtype, []).append(report)
    widths = {dtype: max(len(report.entropy) for report in group) for dtype, group in found.items()}
    found = {dtype: [r for r in group if len(r.entropy) == widths[dtype]] for dtype, group in found.items()}
    order = sorted(found, key=lambda dtype: -sum(report.original_bytes for report in found[dtype]))
    return {dtype: found[dtype] for dtype in order[:_MOST_GROUPS]}


def _height(num_tensors: int) -> float:
    """Inches of a panel with a row a tensor."""
    return max(1.1, 0.22 * num_tensors) if num_tensors <= _MOST_NAMES else 3.6


def _draw_entropy(figure: Any, axes: Axes, dtype: str, group: list[TensorReport]) -> None:
    image = axes.imshow(
        np.array([report.entropy for report in group]),
        aspect="auto",
        cmap="cividis",
        vmin=0,
        vmax=1,
        interpolation="none",
    )
    fields = " | ".join(name for _, name in FIELDS.get(dtype, ()))
    axes.set_title(f"{dtype}: entropy of each bit{fields and f' ({fields})'}", loc="left", fontsize=10)
    _name_tensors(axes, group)
    _mark_bits(axes, dtype, len(group[0].entropy))
    bar = figure.colorbar(image, ax=axes, shrink=0.9, pad=0.01)
    bar.set_label("bits", fontsize=8)
    bar.ax.tick_params(labelsize=8)


def _name_tensors(axes: Axes, group: list[TensorReport]) -> None:
    if len(group) > _MOST_NAMES:
        axes.set_ylabel(f"{len(group)} tensors, in the file's order", fontsize=8)
        axes.tick_params(labelsize=8)
        return
    axes.set_yticks(range(len(group)), [plain(report.name) for report in group], fontsize=8, parse_math=False)


def _mark_bits(axes: Axes, dtype: str, width: int) -> None:
    """Names the bits, and sets the fields of a float apart."""
    step = 1 if width <= 16 else 4 if width <= 32 else 8
    axes.set_xticks(range(0, width, step), [str(width - 1 - bit) for bit in range(0, width, step)], fontsize=8)
    axes.set_xlabel("bit, from the most significant", fontsize=8)
    for start, _ in FIELDS.get(dtype, ())[1:]:
        axes.axvline(start - 0.5, color="#d55e00", linewidth=1.5)


def _draw_uses(axes: Axes, dtype: str, group: list[TensorReport]) -> None:
    weights = np.array([report.original_bytes for report in group], float)
    width = len(group[0].entropy)
    left_out, ranked = (
        np.average([getattr(report, use) or [0.0] * width for report in group], axis=0, weights=weights)
        for use in ("left_out", "ranked")
    )
    bottom = np.zeros(width)
    for use, share in zip(USES, (1 - left_out - ranked, ranked, left_out)):
        axes.bar(range(width), share, 0.9, bottom, color=USES[use], label=use)
        bottom += share
    axes.set_title("what is done with it, by bytes", loc="left", fontsize=10)
    axes.set_ylim(0, 1)
    axes.set_xlim(-0.5, width - 0.5)
    axes.set_yticks((0, 0.5, 1), ("0", "50 %", "100 %"), fontsize=8)
    _mark_bits(axes, dtype, width)
    axes.legend(fontsize=8, ncols=3, loc="lower center", framealpha=0.9)


def _draw_bars(axes: Axes, reports: Sequence[TensorReport]) -> None:
    """A bar a tensor."""
    savings = [100 * report.savings for report in reports]
    axes.barh(range(len(reports)), savings, 0.7, color=[_color(report) for report in reports])
    axes.set_yticks(range(len(reports)), [plain(report.name) for report in reports], fontsize=8, parse_math=False)
    axes.invert_yaxis()
    for at, value in enumerate(savings):
        axes.annotate(
            f"{value:.1f} %", (max(value, 0), at), (3, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.set_xlim(min(0, *savings) * 1.1, max(10, *savings) * 1.12)
    _finish_savings(axes, reports, "bytes saved, %")


def _draw_steps(axes: Axes, reports: Sequence[TensorReport]) -> None:
    """Tensors from the one that saves most on, as wide as they are large."""
    ordered = sorted(reports, key=lambda report: -report.savings)
    sizes = np.array([report.original_bytes for report in ordered], float) / sum(r.original_bytes for r in ordered)
    starts = np.concatenate([[0], sizes.cumsum()[:-1]])
    heights = [100 * report.savings for report in ordered]
    axes.bar(100 * starts, heights, 100 * sizes, align="edge", color=[_color(r) for r in ordered], linewidth=0)
    axes.set_xlim(0, 100)
    axes.set_ylabel("bytes saved, %", fontsize=8)
    axes.tick_params(labelsize=8)
    _finish_savings(axes, reports, "share of the original bytes, %: tensors that save the most first")


def _finish_savings(axes: Axes, reports: Sequence[TensorReport], label: str) -> None:
    before, after = (sum(getattr(r, field) for r in reports) for field in ("original_bytes", "stored_bytes"))
    axes.set_title(f"savings by tensor; {100 * (1 - after / before):.1f} % of all bytes", loc="left", fontsize=10)
    axes.set_xlabel(label, fontsize=8)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for scheme in dict.fromkeys(report.scheme for report in reports):
        axes.bar(0, 0, color=_SCHEMES.get(scheme, "#cc79a7"), label=scheme)
    axes.legend(fontsize=8, title="scheme", title_fontsize=8, loc="best")


def _color(report: TensorReport) -> str:
    return _SCHEMES.get(report.scheme, "#cc79a7")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # names may have any characters
        figure.savefig(buffer, format="png", dpi=110)
    return buffer.getvalue()
