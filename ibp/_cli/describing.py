"""The commands that describe files: `ibp inspect` says what is in them, and `ibp estimate` what compressing them would
save."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import ibp
from ibp._common.arguments import is_chosen
from ibp._common.whole_files import check_replaceable, write_whole
from ibp._files import dtype_name
from ibp.checkpoints import CheckpointEstimate
from ibp.checkpoints._inputs import expand

from . import drawing, output, report, work
from .report import FileReport, TensorContents

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
        files = [report.inspect_path(path, wanted=wanted, progress=bars) for path in expand(given)]
    found = {tensor.name for file in files for tensor in file.tensors}
    missing = [name for name in arguments.tensor if name not in found]
    if missing:
        raise output.Failure(f"there is no tensor {missing[0]!r} in {', '.join(file.path for file in files)}")
    if arguments.include and not found:
        raise output.Failure(f"no tensor's name is one that --include {' '.join(arguments.include)} leaves")
    if arguments.html:
        write_whole(Path(arguments.html), drawing.make_page(files).encode("utf-8", "backslashreplace"))
    if arguments.plot:
        write_whole(Path(arguments.plot), drawing.draw(files))
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
            drawing.require_matplotlib()
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
