"""`ibp doctor`: says what is installed, tests it, and measures what compression gains on this machine. Its first lines,
which describe the installation, are those of `ibp.show_config`.

The data is synthetic. Synthetic weights compress as well as trained ones. Rates are GB/s (10^9 bytes per second) of
original bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

import ibp
from ibp import _core
from ibp._fetch import gather, streaming
from ibp._machine import calibration, memory
from ibp._machine.calibration import Clock

from . import output, work

TEST_SECONDS = 2.0  # The self-test is repeated with other data until this number of seconds has passed.
# Compression pays if something becomes more than this many times as fast. Smaller differences are within the variation
# of measurements.
PAYS = 1.05
_CPU_FEATURES = {1: "AVX2 and BMI2", 2: "AVX-512"}  # Names for the bits of enum ibp_cpu_feature.
_DRIVER = Path("/proc/driver/nvidia")
_BUSY_LOAD = 0.5  # If the CPU's load per core is higher than this, other work disturbs measurements.
# If the GPU was busy for more than this percentage of the last second, other work disturbs measurements.
_BUSY_PERCENT = 10
_MOST_SHOWN = 8  # Largest number of failed tests that are printed. --json has all of them.
# Row sizes in bytes for which speed-ups are measured. The rates of rows in GB/s are printed for the last size only.
_ROW_BYTES = (128, 512, 2048)
# Number of equal parts into which the time for one kind of data is divided: on the CPU, and with a GPU. Each
# measurement takes one part. There are fewer measurements than parts; the rest of the time goes to making tables.
_CPU_PARTS, _GPU_PARTS = 6, 40
_KINDS = {
    "BF16 weights": torch.bfloat16,
    "FP16 weights": torch.float16,
    "FP32 weights": torch.float32,
    "FP8 weights": torch.float8_e4m3fn,
    "BF16 half zeros": torch.bfloat16,
}
_TESTED_KINDS = {**_KINDS, "INT64 numbers": torch.int64, "UINT8 noise": torch.uint8}
_TEST_BYTES = 48 << 10  # Size in bytes of a tensor of the self-test. A test then takes a few milliseconds.
_CPU_COLUMNS = {
    "copy": "copy",
    "compress": "compress",
    "decompress": "decompress",
    "raw_rows": "raw rows",
    "rows": "ibp rows",
}
_GPU_COLUMNS = {
    "torch_rows": "x[ids]",
    "raw_rows": "raw rows",
    "rows": "ibp rows",
    "copy": "copy",
    "whole": "ibp whole",
    "decode": "decompress",
}


def doctor(arguments: argparse.Namespace) -> int:
    """Runs `ibp doctor`."""
    device = work.device_of(arguments)
    with work.threads(arguments.jobs):
        threads = torch.get_num_threads()
        facts, busy = facts_of(device)
        num_tests, failed = self_test(device, TEST_SECONDS)
        link: ibp.calibration.Calibration | None = None
        found: list[Measured] = []
        kinds = functools.partial(work.bar, arguments, "measuring")
        try:
            if not failed and device.type == "cuda":
                link = ibp.calibration.calibrate(device, refresh=arguments.refresh, seconds=arguments.seconds / 2)
                found = measured_with_gpu(device, arguments.seconds / 2, kinds)
            elif not failed:
                found = measured_on_cpu(arguments.seconds, kinds)
        except (RuntimeError, OSError, ValueError, MemoryError) as error:
            failed.append(f"measuring: {output.sentence(error)}")
    failed += [f"measuring {measured.kind}: bits differ" for measured in found if not measured.lossless]
    sentence = verdict(found, threads, why_no_gpu(device)) if found else None
    document = {
        "ibp": ibp.__version__,
        "torch": torch.__version__,
        "device": str(device),
        "gpu": None if link is None else link.gpu,
        "threads": threads,
        "facts": facts,
        "busy": busy,
        "tests": num_tests,
        "failed": failed,
        "link": None if link is None else dataclasses.asdict(link),
        "data": [dataclasses.asdict(measured) for measured in found],
        "verdict": sentence,
    }
    tested = f"Self-test by {'the CPU' if device.type == 'cpu' else device}: {output.show_count(num_tests, 'test')}"
    parts: list[output.Part] = [output.table(["", ""], list(facts.items())), ""]
    parts.append(f"{tested}, {len(failed):,} failed." if failed else f"{tested}, and every bit came back.")
    parts += [f"  failed: {each}" for each in failed[:_MOST_SHOWN]]
    parts += ["", *_tables(link, found), *busy, sentence or "Nothing was measured."]
    output.report(arguments, document, *parts)
    if failed:
        raise output.Failure(f"{output.show_count(len(failed), 'fault')}; the first: {failed[0]}", output.WRONG)
    return 0


# ---- the environment, and other load on the machine ----


def why_no_gpu(device: torch.device) -> str | None:
    """Returns why the CPU does the work, or None if a GPU does."""
    if device.type == "cuda":
        return None
    if torch.cuda.is_available():
        return "The GPU was left out" if _core.cuda_is_built() else "This build of ibp has no CUDA kernels"
    return "Torch sees no GPU, though NVIDIA's driver is installed" if _DRIVER.exists() else "There is no GPU here"


def config(device: torch.device) -> dict[str, str]:
    """Returns what `ibp.show_config` prints: a dictionary from the name at the beginning of each line to the text after
    it. device: the device whose calibration and paths are listed."""
    features = _core.cpu_features()
    coders = [name for bit, name in _CPU_FEATURES.items() if features & bit] or ["plain C"]
    kernels = "not built (without nvcc, or with IBP_NO_CUDA=1)"
    if _core.cuda_is_built():
        built_for = map(int, _core.cuda_architectures().split(","))
        kernels = f"built for compute capability {', '.join(f'{arch // 100}.{arch // 10 % 10}' for arch in built_for)}"
    lines = {
        "ibp": f"{_core.version()}, format version {_core.FORMAT_VERSION}, in {Path(__file__).parent.parent}",
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "CUDA kernels": kernels,
        "CPU coders": f"{', '.join(coders)}; {torch.get_num_threads()} threads",
        "GPUs": "; ".join(map(_gpu_text, range(torch.cuda.device_count()))) or "none that torch sees",
        "calibration": f"of an {calibration.H200.gpu}; ibp.calibration.calibrate() measures this machine",
    }
    if calibration.is_measured(device):
        known = calibration.in_force(device)
        lines["calibration"] = f"measured on {known.gpu}, kept in {calibration.cache_file(device)}"
    if device.type == "cuda":
        lines["index_select"] = f"paths {', '.join(map(repr, gather.PATHS))}, or decoded by the CPU"
        lines["decompress"] = f"paths {', '.join(map(repr, streaming.PATHS))}, or decoded by the CPU"
    else:
        lines["index_select"] = lines["decompress"] = "decoded by the CPU"
    return lines


def _gpu_text(index: int) -> str:
    found = torch.cuda.get_device_properties(index)
    memory_gib, capability = found.total_memory / 2**30, f"{found.major}.{found.minor}"
    sms = found.multi_processor_count
    return f"cuda:{index} {found.name}, {memory_gib:.0f} GiB, {sms} SMs, compute capability {capability}"


def facts_of(device: torch.device) -> tuple[dict[str, str], list[str]]:
    """Finds out what is installed and built, and how busy the machine is. Returns (a dict from the name of each fact to
    its text; a list with a sentence for each sign that other work uses the machine)."""
    load, cores, busy = os.getloadavg()[0], os.cpu_count() or 1, []
    facts = {"Python": f"{platform.python_version()}, {platform.platform()}", **config(device)}
    facts["load"] = f"{load:.1f} on {output.show_count(cores, 'core')}"
    if load > _BUSY_LOAD * cores:
        busy.append(f"Other work uses the CPU: the load of the last minute is {facts['load']}.")
    if device.type == "cpu":
        return {**facts, "pinned memory": "not used, since no GPU reads it"}, busy
    facts["GPU in use"] = "nvidia-smi does not say"
    for driver, percent, used_mib in _ask(device, "gpu", "driver_version", "utilization.gpu", "memory.used"):
        facts |= {"driver": driver, "GPU in use": f"{percent} % of the time, {used_mib} MiB of its memory"}
        if percent.isdecimal() and int(percent) > _BUSY_PERCENT:
            busy.append(f"Other work uses the GPU: it was at work for {percent} % of the last second.")
    others = [(pid, mib) for pid, mib in _ask(device, "compute-apps", "pid", "used_memory") if pid != str(os.getpid())]
    if others:
        named = ", ".join(f"{pid} ({mib} MiB)" for pid, mib in others)
        busy.append(f"The GPU has {len(others)} other process{'es' * (len(others) > 1)}: {named}.")
    try:
        memory.empty(1 << 20, torch.device("cpu"), pin=True)
        kept = output.show_size(_core.pinned_limit())
        facts["pinned memory"] = f"can be pinned; up to {kept} of what tables leave stay pinned for the next ones"
    except memory.PinningError as refused:
        facts["pinned memory"] = output.one_line(str(refused))
    return facts, busy


def _ask(device: torch.device, of: str, *columns: str) -> list[list[str]]:
    """Queries nvidia-smi about a GPU. Returns a list with the lines of its answer. A line is a list of strings, one for
    each column. Returns an empty list if nvidia-smi cannot be run or fails."""
    found: Any = torch.cuda.get_device_properties(device)
    query = f"--query-{of}={','.join(columns)}"
    command = ["nvidia-smi", f"--id=GPU-{found.uuid}", query, "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    lines = ([cell.strip() for cell in line.split(",")] for line in said.splitlines())
    return [cells for cells in lines if len(cells) == len(columns)]


# ---- the self-test ----


def self_test(device: torch.device, seconds: float) -> tuple[int, list[str]]:
    """Tests tables of every kind of data, scheme and layout, and a file, on a device. Repeats all tests with other data
    until `seconds` seconds have passed or a test has failed. Returns (number of tests, list with a line for each
    fault)."""
    end = time.monotonic() + seconds
    failed: list[str] = []
    tests: dict[str, Callable[[int], Iterator[str]]] = {
        f"{kind}, scheme {scheme}, layout {layout}": functools.partial(_test_table, device, kind, scheme, layout)
        for kind, scheme, layout in itertools.product(_TESTED_KINDS, ("auto", "planes", "ibp"), ("slots", "packed"))
    }
    tests["a file"] = functools.partial(_test_file, device)
    seed = 0
    while not seed or (not failed and time.monotonic() < end):
        for name, test in tests.items():
            try:
                failed += [f"{name}: {wrong}" for wrong in test(seed)]
            except Exception as error:  # Any exception that a call raises here is a fault.
                failed.append(f"{name}: {output.sentence(error)}")
        seed += 1
    return seed * len(tests), failed


def _test_table(device: torch.device, kind: str, scheme: str, layout: str, seed: int) -> Iterator[str]:
    """Tests a table made of one kind of data. Yields a sentence for each call whose result differs from the original
    tensor."""
    whole = made(kind, _TEST_BYTES, seed).view(-1)
    width = (256, 33, 1000)[seed % 3]
    x = whole[: len(whole) // width * width].view(-1, width)
    ids = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed), device="cpu")
    table = ibp.compress(x, scheme=scheme, layout=layout, device=device)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "decompress": lambda: ibp.decompress(table, device=device).cpu()[ids],
        "index_select": lambda: ibp.index_select(table, ids, device=device),
    }
    if device.type == "cuda":
        near = table.to(device)
        calls["decompress in device memory"] = lambda: ibp.decompress(near).cpu()[ids]
        calls["index_select in device memory"] = lambda: ibp.index_select(near, ids, device=device)
        calls["decompress on the CPU"] = lambda: ibp.decompress(table, device="cpu")[ids]
    for name, call in calls.items():
        if not same_bits(call(), x[ids]):
            yield f"{name} returns other bits"
    half = ids[: len(ids) // 2]
    table.update_(half, x[half].flip(0).to(device))
    x[half] = x[half].flip(0)
    if not same_bits(ibp.decompress(table, device=device), x):
        yield "update_ leaves other bits"


def _test_file(device: torch.device, seed: int) -> Iterator[str]:
    """Tests a file. Yields a sentence if the file's tensor is read with other bits, and another sentence if damage to
    the file is not noticed."""
    x = made("BF16 weights", _TEST_BYTES, seed)
    with tempfile.TemporaryDirectory(prefix="ibp-") as folder:
        path = Path(folder) / "x.safetensors"
        ibp.save(path, {"x": ibp.compress(x, device=device)})
        with ibp.open(path) as file:
            if not same_bits(ibp.decompress(cast(ibp.CompressedTensor, file["x"]), device=device), x):
                yield "other bits come back"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        try:
            ibp.load(path, verify=True)
        except ibp.ChecksumError:
            return
        yield "damaged bytes are not noticed"


# ---- measurements ----


@dataclass(frozen=True)
class Measured:
    """The measurements of one kind of data."""

    kind: str  # The name of the kind.
    saved: float  # The fraction of the bytes that compression saves.
    lossless: bool  # Whether every bit came back.
    gbps: dict[str, float]  # Rates in GB/s, keyed by the keys of _CPU_COLUMNS or _GPU_COLUMNS.
    # For each row size in bytes: the rate at which the GPU fetches compressed rows, divided by the rate for raw rows.
    # Empty without a GPU.
    rows: dict[int, float] = field(default_factory=dict)
    # The rate at which the GPU fetches and decodes whole compressed tensors, divided by the rate for raw tensors. None
    # without a GPU.
    whole: float | None = None
    # The largest relative error that a rate may have, from the differences between repetitions of its measurement.
    uncertainty: float = 0.0


def made(kind: str, num_bytes: int, seed: int = 0) -> torch.Tensor:
    """Makes data of one kind on the CPU: a tensor of two dimensions, with rows of 2 KiB."""
    dtype, generator = _TESTED_KINDS[kind], torch.Generator().manual_seed(seed)
    shape = (num_bytes // _ROW_BYTES[-1], _ROW_BYTES[-1] // dtype.itemsize)
    if not dtype.is_floating_point:
        return torch.randint(256, shape, generator=generator, dtype=dtype, device="cpu")
    values = 0.02 * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
    if dtype is torch.float8_e4m3fn:  # FP8 checkpoints have a scale for each row, so that rows use the whole range.
        values *= torch.finfo(dtype).max / values.abs().amax(1, keepdim=True)
    return (values.clamp_(min=0) if "zeros" in kind else values).to(dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(torch.uint8), b.cpu().view(torch.uint8))


def measured_on_cpu(seconds: float, kinds: Callable[[list[str]], Any]) -> list[Measured]:
    """Measures every kind of data on the CPU. kinds: a function that wraps a list of names of kinds in a progress
    bar."""
    clock = Clock(torch.device("cpu"), seconds / (_CPU_PARTS * len(_KINDS)))
    return [_on_cpu(clock, kind, made(kind, clock.table_bytes)) for kind in kinds(list(_KINDS))]


def _on_cpu(clock: Clock, kind: str, x: torch.Tensor) -> Measured:
    clock.uncertainty = 0.0
    out = torch.empty_like(x)
    table = ibp.compress(x, device="cpu", memory="host", layout="packed")
    ids = torch.randint(len(x), (len(x) // 4,), device="cpu")
    rows = torch.empty_like(x[: len(ids)])

    def rate(call: Callable[[], object], num_bytes: int = x.nbytes) -> float:
        return num_bytes / clock.wall_s(call) / 1e9

    gbps = {
        "copy": rate(lambda: out.copy_(x)),
        "compress": rate(lambda: code_again(table, x)),
        "decompress": rate(lambda: ibp.decompress(table, out=out)),
        "raw_rows": rate(
            lambda: torch.index_select(x.view(torch.uint8), 0, ids, out=rows.view(torch.uint8)), rows.nbytes
        ),
        "rows": rate(lambda: ibp.index_select(table, ids, out=rows), rows.nbytes),
    }
    lossless = same_bits(ibp.decompress(table), x) and same_bits(rows, x.view(torch.uint8)[ids])
    return Measured(kind, table.savings, lossless, gbps, uncertainty=clock.uncertainty)


def code_again(table: ibp.CompressedTensor, x: torch.Tensor) -> None:
    """Compresses x with the codebook of its table, so that the measured time does not include learning a codebook."""
    how: Any = {"scheme": "raw"} if table.codebook is None else {"codebook": table.codebook}
    ibp.compress(x, **how, device="cpu", memory="host", layout="packed")


def measured_with_gpu(device: torch.device, seconds: float, kinds: Callable[[list[str]], Any]) -> list[Measured]:
    """Measures how fast a GPU fetches each kind of data from pinned memory. kinds: as in `measured_on_cpu`."""
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
        clock = Clock(device, seconds / (_GPU_PARTS * len(_KINDS)))
        found = [_with_gpu(clock, kind, made(kind, clock.table_bytes)) for kind in kinds(list(_KINDS))]
    ibp.release_pinned()
    return found


def _with_gpu(clock: Clock, kind: str, x: torch.Tensor) -> Measured:
    clock.uncertainty = 0.0
    device, lossless = clock.device, True
    gbps: dict[str, float] = {}
    speeds: dict[int, float] = {}
    for row_bytes in _ROW_BYTES:
        rows = x.view(-1, row_bytes // x.itemsize)
        tables = {"raw_rows": ibp.compress(rows, scheme="raw", device=device)}
        tables["rows"] = ibp.compress(rows, device=device)
        host_ids = torch.randint(len(rows), (len(rows) // 2,), device="cpu")
        ids, out = host_ids.to(device), torch.empty_like(rows[: len(rows) // 2], device=device)
        for name, table in tables.items():
            fetch = functools.partial(ibp.index_select, table, ids, out=out)
            gbps[name] = out.nbytes / clock.gpu_s(fetch) / 1e9
        speeds[row_bytes] = gbps["rows"] / gbps["raw_rows"]
        lossless &= same_bits(out, rows.view(torch.uint8)[host_ids])
    gbps["torch_rows"] = out.nbytes / clock.wall_s(lambda: x.view(torch.uint8)[host_ids].to(device)) / 1e9
    packed = ibp.compress(x, layout="packed", device=device)
    near, pinned, out = packed.to(device), x.pin_memory(), torch.empty_like(x, device=device)
    gbps["copy"] = x.nbytes / clock.wall_s(lambda: out.copy_(pinned, non_blocking=True)) / 1e9
    gbps["decode"] = x.nbytes / clock.gpu_s(lambda: ibp.decompress(near, out=out)) / 1e9
    gbps["whole"] = x.nbytes / clock.wall_s(lambda: ibp.decompress(packed, out=out)) / 1e9
    lossless &= same_bits(out, x)
    return Measured(kind, packed.savings, lossless, gbps, speeds, gbps["whole"] / gbps["copy"], clock.uncertainty)


# ---- what follows ----


def verdict(found: Sequence[Measured], threads: int, no_gpu: str | None) -> str:
    """Returns the sentence that says which kinds of data gain from compression on this machine, or that repetitions
    differ too much to tell. no_gpu: why no GPU was measured. None: a GPU was measured."""
    noise = max(measured.uncertainty for measured in found)
    warning = (
        f" Repetitions of a measurement differ so much that its rate may be off by {100 * noise:.0f} %: something else "
        "uses this machine. Measure again without it, or longer (--seconds)."
        if noise > PAYS - 1
        else ""
    )
    saved = ", ".join(f"{measured.kind} {100 * measured.saved:.0f} %" for measured in found)
    if no_gpu:
        slowest, fastest = (of(measured.gbps["decompress"] for measured in found) for of in (min, max))
        return (
            f"{no_gpu}: the CPU codes and decodes. Memory and storage that are saved: {saved}. "
            f"{output.show_count(threads, 'thread')} decode{'s' * (threads == 1)} {slowest:.1f} to {fastest:.1f} GB/s: "
            f"compression pays where data comes from storage, or over a network, that is slower than that.{warning}"
        )
    rows = [
        f"{measured.kind}{_sizes_that_pay(measured.rows)}" for measured in found if max(measured.rows.values()) > PAYS
    ]
    speeds = [measured.whole or 0.0 for measured in found]
    whole = [measured.kind for measured, speed in zip(found, speeds) if speed > PAYS]
    gains = []
    if rows:
        fastest = max(speed for measured in found for speed in measured.rows.values())
        gains.append(f"rows of {', '.join(rows)} come up to {fastest:.2f} times as fast as raw ones")
    if whole:
        gains.append(f"whole tensors of {', '.join(whole)} come up to {max(speeds):.2f} times as fast as raw ones")
    if warning:
        return f"Whether compression pays here is not certain: {'; '.join(gains) or 'nothing comes faster'}.{warning}"
    if gains:
        return f"Compression pays here: {'; '.join(gains)}."
    return f"Compression gains no speed here. Memory that is saved: {saved}."


def _sizes_that_pay(rows: dict[int, float]) -> str:
    """Returns a text in parentheses that lists the row sizes at which compressed rows come faster than raw rows.
    Returns "" if they come faster at all sizes."""
    pay = [f"{row_bytes:,}" for row_bytes, speed in rows.items() if speed > PAYS]
    return "" if len(pay) == len(rows) else f" (of {' or '.join(pay)} bytes)"


def _tables(link: ibp.calibration.Calibration | None, found: Sequence[Measured]) -> Iterator[output.Part]:
    """Yields the tables of the measurements, with an empty line after each table."""
    if not found:
        return
    if link is not None:
        facts = [
            ["copy engine, to the GPU", _rate(link.copy_in_gbps)],
            ["copy engine, to the host", _rate(link.copy_out_gbps)],
            ["kernels, pinned memory", _rate(link.read_gbps)],
            ["copy in device memory", _rate(link.device_copy_gbps)],
        ]
        yield from (output.table(["link", ">GB/s"], facts), "")
    columns = _CPU_COLUMNS if link is None else _GPU_COLUMNS
    rates = [
        [measured.kind, output.show_share(measured.saved), *(_rate(measured.gbps[name]) for name in columns)]
        for measured in found
    ]
    yield from (output.table(["GB/s", ">saved", *(f">{name}" for name in columns.values())], rates), "")
    if link is not None:
        names = ["times as fast", *(f">rows of {row_bytes:,} B" for row_bytes in _ROW_BYTES), ">whole tensors"]
        speeds = [
            [measured.kind, *(f"{speed:.2f}" for speed in (*measured.rows.values(), measured.whole or 0.0))]
            for measured in found
        ]
        yield from (output.table(names, speeds), "")


def _rate(gbps: float) -> str:
    return f"{gbps:,.0f}" if gbps >= 100 else f"{gbps:.1f}"
