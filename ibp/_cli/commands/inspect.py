"""`ibp inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .. import inputs, output, parsing

if TYPE_CHECKING:
    from ibp._inspect.report import FileReport, TensorContents

HELP = "say what is in files: tensors, savings, what the bytes are"
DESCRIPTION = """\
Say what is in files: tensors, schemes, savings, and what the bytes are.

Files of ibp are described as they are. Of other files of tensors, what
compressing them would give is estimated from a sample of rows."""
EPILOG = """\
examples:
  ibp inspect model.safetensors
  ibp inspect model.safetensors --tensor lm_head.weight
  ibp inspect checkpoint/ --plot bits.png --html model.html

"before" is the size of a tensor, "after" that of all the file has for it: rows,
index, unused room of slots and its share of the codebook. Parts of coded rows
are counted on a sample of a large tensor's rows. The page needs a browser and
nothing else; plots need matplotlib."""
_BAR = 24  # width in characters


def add(parser: argparse.ArgumentParser) -> None:
    parsing.add_inputs(parser)
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="all about one tensor; repeats")
    parser.add_argument("--planes", action="store_true", help="what the bytes of every tensor are, by part")
    parser.add_argument("--plot", metavar="OUT.png", help="draw bits and savings")
    parser.add_argument("--html", metavar="OUT.html", help="write a page to click through the tensors")
    parsing.add_names(parser)
    parsing.add_force(parser)


def run(arguments: argparse.Namespace) -> int:
    from ibp._inspect import drawing
    from ibp._inspect.collecting import inspect_path
    from ibp.checkpoints._sources import expand

    from .. import work

    def wanted(name: str) -> bool:
        return (not arguments.tensor or name in arguments.tensor) and work.is_chosen(arguments, name)

    for option, suffix in (("plot", ".png"), ("html", ".html")):
        picture = getattr(arguments, option)
        if picture is not None:
            _check_picture(f"--{option}", picture, suffix)
            if not work.may_write(arguments, picture):
                setattr(arguments, option, None)
    status = 0
    if arguments.plot:
        try:
            drawing.require_matplotlib()
        except ImportError as error:
            if not arguments.html:
                raise
            output.warn(arguments, f"{arguments.plot} is not drawn: {error}")
            arguments.plot, status = None, 2
    bars = output.show_bars(arguments)
    with inputs.local(arguments.inputs) as given:
        files = [inspect_path(path, wanted=wanted, progress=bars) for path in expand(given)]
    found = {tensor.name for file in files for tensor in file.tensors}
    missing = [name for name in arguments.tensor if name not in found]
    if missing:
        raise output.Failure(f"there is no tensor {missing[0]!r} in {', '.join(file.path for file in files)}")
    if arguments.include and not found:
        raise output.Failure(f"no tensor's name is one that --include {' '.join(arguments.include)} leaves")
    _write_pictures(arguments, files)
    output.report(arguments, {"files": [file.as_dict() for file in files]}, *_parts(arguments, files))
    return status


def _check_picture(option: str, path: str, suffix: str) -> None:
    """Raises Failure or OSError if a plot or a page cannot be written to a path."""
    from ibp._common.whole_files import check_replaceable

    if not Path(path).absolute().parent.is_dir():
        raise output.Failure(f"{path}: there is no such directory")
    if not path.lower().endswith(suffix):
        raise output.Failure(f"{option} is {path}; wanted a name that ends in {suffix}")
    check_replaceable(Path(path))


def _write_pictures(arguments: argparse.Namespace, files: list[FileReport]) -> None:
    from ibp._common.whole_files import write_whole
    from ibp._inspect import drawing, page

    if arguments.html:
        write_whole(Path(arguments.html), page.make_page(files).encode("utf-8", "backslashreplace"))
    if arguments.plot:
        write_whole(Path(arguments.plot), drawing.draw(files))


# ---- what is printed ----


def _parts(arguments: argparse.Namespace, files: list[FileReport]) -> Iterator[output.Part]:
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
    columns: dict[str, Callable[[TensorContents], object]] = {
        "tensor": lambda tensor: tensor.name,
        "dtype": output.show_dtype,
        "shape": lambda tensor: "x".join(map(str, tensor.shape)) or "scalar",
        "scheme": lambda tensor: "delta" if tensor.kind == "delta" else tensor.scheme,
        ">before": lambda tensor: output.show_size(tensor.original_bytes),
        ">after": lambda tensor: output.show_size(tensor.stored_bytes),
        ">saved": lambda tensor: output.show_share(tensor.savings),
    }
    return output.table_of(file.tensors, columns)


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
    if tensor.is_sampled:
        facts.append(["counted", f"{tensor.sampled_rows:,} of the rows, as a sample"])
    if tensor.note:
        facts.append(["note", tensor.note])
    return facts


def _bits(tensor: TensorContents) -> Iterator[list[str]]:
    """Yields a line for each group of adjacent bits that are alike, from the most significant bit."""
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
