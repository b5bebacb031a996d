"""How fast does `ibp.checkpoints.compress` process checkpoints, and which part of the work is the bottleneck?

    python -m benchmarks.checkpoints [--out DIR] [--device cpu] [--quick] [--directory DIR] [--gib N]

A checkpoint of BF16 weights is in the page cache (a tmpfs, unless --directory names another file system). Three arms
measure parts of the work alone: `reading` into memory with as many threads as the next arms use, `link` (copies to the
GPU and of compressed bytes back, at the same time) and `writing` the compressed bytes. The others are `compress, two
cores` (only the CPU, limited to two cores), `compress, GPU`, `decompress` and `verify`.

Rates count bytes of weights. The time of fsync is not included and has a column of its own. `peak_mib` is the most
memory of its own that the process was seen to have. Both ways to compress must write the same bytes, and these must
decompress to the checkpoint.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

import ibp
from ibp.checkpoints._inputs import open_source

from . import harness

COLUMNS = ("seconds", "fsync_seconds", "peak_mib", *harness.TARGET_COLUMNS)
GIB, LAYER_SHAPE, QUICK_SHAPE = 4, (8192, 8192), (256, 1024)
# Targets: GB/s of the CPU, and for the GPU the share of the slowest of reading, link and writing.
TWO_CORES_GBPS, SHARE = 1.6, 0.8
BLOCK_BYTES, READERS = 16 << 20, 4
READING, LINK, WRITING = "reading", "link", "writing"
CPU, GPU, BACK, VERIFY = "compress, two cores", "compress, GPU", "decompress", "verify"


def save_weights(path, shape, num_layers, device):
    """Writes a safetensors file of BF16 weights, layer after layer."""
    entries, end = {}, 0
    layer_bytes = 2 * shape[0] * shape[1]
    for number in range(num_layers):
        offsets = [end, end := end + layer_bytes]
        entries[f"layers.{number}.weight"] = {"dtype": "BF16", "shape": list(shape), "data_offsets": offsets}
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for number in range(num_layers):
            generator = torch.Generator(device).manual_seed(number)
            layer = (0.02 * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)
            file.write(layer.view(torch.uint8).cpu().numpy().data)


class Timed:
    """A context that measures its seconds without fsync, and the seconds of fsync."""

    def __enter__(self):
        self.fsync_seconds, self._fsync = 0.0, os.fsync

        def timed(descriptor):
            start = time.perf_counter()
            self._fsync(descriptor)
            self.fsync_seconds += time.perf_counter() - start

        os.fsync, self._start = timed, time.perf_counter()
        return self

    def __exit__(self, *_):
        self.seconds = time.perf_counter() - self._start - self.fsync_seconds
        os.fsync = self._fsync


@contextlib.contextmanager
def two_cores():
    """Limits this thread, and the threads that it starts, to two cores."""
    allowed, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, sorted(allowed)[:2])
    torch.set_num_threads(2)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)


def read_all(path, readers):
    """Reads a file's tensors into buffers with several threads, as the arms do."""
    buffers = [np.empty(BLOCK_BYTES, np.uint8) for _ in range(readers)]
    with open_source(path) as source:
        blocks = [
            (tensor, start, min(start + BLOCK_BYTES, tensor.num_bytes))
            for tensor in source.tensors.values()
            for start in range(0, tensor.num_bytes, BLOCK_BYTES)
        ]

        def read(reader):
            for tensor, start, end in blocks[reader::readers]:
                np.copyto(buffers[reader][: end - start], tensor.read(start, end))

        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(read, range(readers)))


def write_all(source, target):
    """Writes a file of the size of `source` and deletes it. Every block gets the source's first bytes, which are in
    memory."""
    size, block = os.path.getsize(source), np.fromfile(source, np.uint8, BLOCK_BYTES)
    with open(target, "wb", buffering=0) as file:
        for start in range(0, size, BLOCK_BYTES):
            file.write(block[: min(BLOCK_BYTES, size - start)].data)
    os.unlink(target)


def link_seconds(num_bytes, coded_bytes):
    """Returns the seconds of copies to the GPU and back that run at the same time."""
    pinned = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    near = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for number in range(-(-num_bytes // BLOCK_BYTES)):
        with torch.cuda.stream(streams[0]):
            near[0].copy_(pinned[0], non_blocking=True)
        if number * BLOCK_BYTES < coded_bytes:
            with torch.cuda.stream(streams[1]):
                pinned[1].copy_(near[1], non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


class Measured:
    """The checkpoint, and the rates that were measured for it."""

    def __init__(self, run, path, layers, shape):
        self.run, self.path, self.shape, self.layers = run, path, shape, layers
        self.num_bytes = 2 * shape[0] * shape[1] * layers
        self.savings, self.rates = 0.0, {}

    def add(self, arm, seconds, fsync_seconds=0.0, peak_bytes=0, target=None):
        gbps = self.num_bytes * 1e-9 / seconds
        self.rates[arm] = gbps
        self.run.add(
            case=f"{self.num_bytes / 2**30:.2f} GiB of weights",
            arm=arm,
            rows=self.layers * self.shape[0],
            row_bytes=2 * self.shape[1],
            dtype=torch.bfloat16,
            savings=self.savings,
            gbps=gbps,
            ideal_gbps=min(self.rates.get(part, gbps) for part in (READING, LINK, WRITING)),
            sms=None if arm == GPU else 0,
            seconds=harness.four_digits(seconds),
            fsync_seconds=harness.four_digits(fsync_seconds),
            peak_mib=f"{peak_bytes / 2**20:.0f}",
            **harness.judged(gbps, target),
        )

    def compress(self, arm, target, device, jobs, wanted):
        """Records the better of two calls. The first one pins memory and touches pages for the first time."""
        with self.run.cell(arm):
            tries = []
            for _ in range(2):
                with Timed() as timed:
                    report = ibp.checkpoints.compress(
                        self.path, target, shard_bytes=None, device=device, jobs=jobs, force=True
                    )
                tries.append((timed.seconds, timed.fsync_seconds))
            self.savings = report.savings
            seconds, fsync_seconds = min(tries)
            self.add(arm, seconds, fsync_seconds, report.peak_bytes, wanted)


def check_same(path, other):
    """Raises AssertionError unless two safetensors files have the same tensors."""
    with open_source(path) as source, open_source(other) as found:
        assert list(source.tensors) == list(found.tensors), "other tensors than in the checkpoint"
        for name, tensor in source.tensors.items():
            for start in range(0, tensor.num_bytes, BLOCK_BYTES):
                end = min(start + BLOCK_BYTES, tensor.num_bytes)
                assert np.array_equal(tensor.read(start, end), found.tensors[name].read(start, end)), name


def check_equal_files(paths):
    first, *others = (np.memmap(path, np.uint8, "r") for path in paths)
    assert all(np.array_equal(first, other) for other in others), "the GPU and the CPU wrote different files"


def measure(run, directory, shape, layers):
    path, coded, near, back = (directory / name for name in ("m.safetensors", "c.ibp", "g.ibp", "b.safetensors"))
    save_weights(path, shape, layers, run.device)
    measured = Measured(run, path, layers, shape)
    with run.cell("parts"):
        read_all(path, READERS)
        with Timed() as timed:
            read_all(path, READERS)
        measured.add(READING, timed.seconds)
    with two_cores():
        measured.compress(CPU, coded, "cpu", 2, TWO_CORES_GBPS)
    with run.cell("parts"):
        write_all(coded, back)
        with Timed() as timed:
            write_all(coded, back)
        measured.add(WRITING, timed.seconds)
    if run.on_gpu:
        with run.cell("parts"):
            link_seconds(measured.num_bytes, os.path.getsize(coded))
            measured.add(LINK, link_seconds(measured.num_bytes, os.path.getsize(coded)))
        slowest = min(measured.rates[part] for part in (READING, LINK, WRITING))
        measured.compress(GPU, near, "cuda", None, SHARE * slowest)
        with run.cell("equal files"):
            check_equal_files([coded, near])
    with run.cell(VERIFY):
        with Timed() as timed, ibp.open(coded) as file:
            file.verify()
        measured.add(VERIFY, timed.seconds)
    with run.cell(BACK):
        with Timed() as timed:
            ibp.checkpoints.decompress(coded, back, force=True)
        measured.add(BACK, timed.seconds, timed.fsync_seconds)
        check_same(path, back)


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--directory", type=Path, help="where the files lie (default: /dev/shm, if there is one)")
    own.add_argument("--gib", type=float, default=GIB, help="size of the checkpoint")
    chosen, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("checkpoints", args, COLUMNS)
    shape = QUICK_SHAPE if run.quick else LAYER_SHAPE
    layers = 4 if run.quick else max(1, round(chosen.gib * 2**30 / (2 * shape[0] * shape[1])))
    shared = Path("/dev/shm")
    where = chosen.directory or (shared if shared.is_dir() else Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="ibp-checkpoints-", dir=where) as directory:
        measure(run, Path(directory), shape, layers)
    return run.finish(harness.missed(run.rows))


if __name__ == "__main__":
    sys.exit(main())
