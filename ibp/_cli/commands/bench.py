"""`ibp bench`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from .. import output, parsing

if TYPE_CHECKING:
    import torch

    from ..machine import Measured

HELP = "measure this machine, and whether compression pays here"
DESCRIPTION = """\
Measure this machine, and say whether compression pays here.

With a GPU: the link, random rows and whole tensors, raw and compressed, from
pinned memory. Without one: how fast the CPU codes and decodes. Rates are GB/s
of original bytes; the data is made, rows are of 2 KiB. With a GPU the columns
are, in their order: rows that torch gathers on the CPU and copies, rows that a
kernel fetches, raw and compressed; whole tensors, raw by the copy engine, and
compressed; decoding in the GPU's memory."""
EPILOG = """\
examples:
  ibp bench
  ibp bench --device cpu --seconds 2 --json

What `ibp bench` measures of the link is kept for later processes, which choose
schemes and paths by it; --refresh measures it again."""
_CPU_COLUMNS = {
    "copy": "copy",
    "compress": "code",
    "decompress": "decode",
    "raw_rows": "raw rows",
    "rows": "coded rows",
}
_GPU_COLUMNS = {
    "torch_rows": "x[ids]",
    "raw_rows": "raw rows",
    "rows": "coded rows",
    "copy": "copy",
    "whole": "coded whole",
    "decode": "decode",
}


def add(parser: argparse.ArgumentParser) -> None:
    parsing.add_work(parser)
    parser.add_argument(
        "--seconds", type=_seconds, default=8.0, metavar="S", help="how long, about, 1 to 120 (default: 8)"
    )
    parser.add_argument("--refresh", action="store_true", help="measure the link again, though it is known")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 120:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 120")
    return value


def run(arguments: argparse.Namespace) -> int:
    import torch

    import ibp

    from .. import machine, work

    device = work.device_of(arguments)
    with work.threads(arguments.jobs):
        threads, link = torch.get_num_threads(), None
        kinds = functools.partial(work.bar, arguments, "measuring")
        if device.type == "cuda":
            link = ibp.calibration.calibrate(device, refresh=arguments.refresh, seconds=arguments.seconds / 2)
            found = machine.of_gpu(device, arguments.seconds / 2, kinds)
        else:
            found = machine.of_cpu(arguments.seconds, kinds)
    sentence = machine.verdict(found, threads)
    document = {
        "ibp": ibp.__version__,
        "torch": torch.__version__,
        "device": str(device),
        "gpu": None if link is None else link.gpu,
        "threads": threads,
        "link": None if link is None else dataclasses.asdict(link),
        "data": [dataclasses.asdict(measured) for measured in found],
        "verdict": sentence,
    }
    output.report(arguments, document, *_parts(device, threads, link, found), "", sentence)
    wrong = [measured.kind for measured in found if not measured.lossless]
    if wrong:
        raise output.Failure(f"bits differ: {', '.join(wrong)}", 1)
    return 0


def _parts(device: torch.device, threads: int, link: Any, found: list[Measured]) -> list[output.Part]:
    columns = _GPU_COLUMNS if link is not None else _CPU_COLUMNS
    rates = output.table(
        ["GB/s", ">saved", *(f">{name}" for name in columns.values())],
        [
            [measured.kind, output.show_share(measured.saved), *(_rate(measured.gbps[name]) for name in columns)]
            for measured in found
        ],
    )
    if link is None:
        return [f"CPU, {output.show_count(threads, 'thread')}", "", rates]
    facts = [
        ["copy engine, to the GPU", _rate(link.copy_in_gbps)],
        ["copy engine, to the host", _rate(link.copy_out_gbps)],
        ["kernels, pinned memory", _rate(link.read_gbps)],
        ["copy in device memory", _rate(link.device_copy_gbps)],
    ]
    return [f"{link.gpu} ({device})", "", output.table(["link", ">GB/s"], facts), "", rates]


def _rate(gbps: float) -> str:
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.1f}"
