"""What do compressed checkpoints of torch.distributed.checkpoint cost and save?

    python -m benchmarks.dcp [--out DIR] [--device cpu] [--quick] [--directory DIR]

Two processes save a model of a billion parameters, each one half of its tensors, and load it again. Arms, in one order
and in the other: `torch`, its FileSystemWriter; `torch, zstd`, the same with torch's own extension, if zstandard is
installed; `ibp`. Cases: BF16 weights, N(0, 0.02), and the FP32 states that Adam has after a few steps with normal
gradients; on a GPU if there is one, which both processes share, and on the CPU. For the CPU, the case says how many
cores the processes share, and the column gpu names the processor. Weights are also saved to a tmpfs (`tmpfs`), where no
disk binds. The time of a call is that of the slower process, to the end of fsync. Its memory is the most of its own
that a process was seen to have more than before the call. `writing` is a plain file of the same bytes, written and
flushed by both processes. Everything that is loaded is compared with what was saved.
"""

import argparse
import contextlib
import itertools
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import _extension

from ibp.integrations.dcp import Reader, Writer

from . import cpu, harness

WORLD = 2
SHAPE, TENSORS = (4096, 4096), 64  # a billion parameters
QUICK_SHAPE, QUICK_TENSORS = (256, 1024), 4
STEPS = 8  # of Adam
COLUMNS = ("order", "save_seconds", "load_seconds", "stored_bytes", "save_peak_mib", "load_peak_mib")
WRITING, TORCH, ZSTD, IBP = "writing", "torch", "torch, zstd", "ibp"
WRITERS = {
    TORCH: dcp.FileSystemWriter,
    ZSTD: lambda path: dcp.FileSystemWriter(path, _extensions=[_extension.ZStandard()]),
    IBP: Writer,
}


def weights(shape, device, generator):
    yield "weight", (0.02 * torch.randn(shape, generator=generator, device=device)).to(torch.bfloat16)


def adam_states(shape, device, generator):
    mean, square = torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    for _ in range(STEPS):
        gradient = 1e-3 * torch.randn(shape, generator=generator, device=device)
        mean.lerp_(gradient, 0.1)
        square.lerp_(gradient.square(), 0.001)
    yield from (("exp_avg", mean), ("exp_avg_sq", square))


TMPFS = Path("/dev/shm")
CASES = {"BF16 weights": (weights, torch.bfloat16), "FP32 Adam states": (adam_states, torch.float32)}


class PeakMemory:
    """The most memory of its own that the process has in a context, more than before it: `num_bytes`."""

    def __enter__(self):
        self._before = self._most = self._own()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()
        self.num_bytes = max(self._most, self._own()) - self._before

    def _watch(self):
        while not self._ended.wait(0.005):
            self._most = max(self._most, self._own())

    @staticmethod
    def _own():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def timed(call):
    """(seconds until both processes are done, bytes of memory) of a call."""
    dist.barrier()
    with PeakMemory() as peak:
        start = time.perf_counter()
        call()
        dist.barrier()
        seconds = time.perf_counter() - start
    return seconds, peak.num_bytes


def write_plainly(directory, num_bytes):
    block = os.urandom(1 << 24)
    with open(directory / f"plain.{dist.get_rank()}", "wb", buffering=0) as file:
        for start in range(0, num_bytes, len(block)):
            file.write(block[: min(len(block), num_bytes - start)])
        os.fsync(file.fileno())


def work(rank, device, case, shape, tensors, directory, store, found):
    """One process. It writes its records, (arm, order, seconds, ...), to the file found.<rank>."""
    warnings.simplefilter("ignore")  # torch warns of checkpoints that are replaced
    records = []
    with harness.process_group("cpu", store, rank, WORLD):
        make, _ = CASES[case]
        state, zeros = {}, {}
        for number in range(rank, tensors, WORLD):
            generator = torch.Generator(device).manual_seed(number)
            for name, tensor in make(shape, device, generator):
                state[f"layers.{number}.{name}"] = tensor
                zeros[f"layers.{number}.{name}"] = torch.zeros_like(tensor)
        num_bytes = sum(tensor.nbytes for tensor in state.values())
        seconds, _ = timed(lambda: write_plainly(directory, num_bytes))
        records.append((WRITING, 0, seconds, 0.0, num_bytes, 0, 0))
        (directory / f"plain.{rank}").unlink()
        arms = [arm for arm in WRITERS if arm != ZSTD or _extension.ZStandard.is_available()]
        for order, arm in itertools.chain(((1, arm) for arm in arms), ((2, arm) for arm in reversed(arms))):
            path = directory / "checkpoint"
            saved = timed(lambda: dcp.save(state, storage_writer=WRITERS[arm](path)))
            stored = sum(file.stat().st_size for file in path.iterdir()) // WORLD
            for tensor in zeros.values():
                tensor.zero_()
            reader = Reader(path) if arm == IBP else dcp.FileSystemReader(path)
            loaded = timed(lambda: dcp.load(zeros, storage_reader=reader))
            assert all(torch.equal(zeros[name], tensor) for name, tensor in state.items()), f"{arm}: other tensors"
            records.append((arm, order, saved[0], loaded[0], stored, saved[1], loaded[1]))
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
    Path(f"{found}.{rank}").write_bytes(pickle.dumps((num_bytes, records)))


def measure(run, device, case, directory, is_tmpfs):
    shape, tensors = (QUICK_SHAPE, QUICK_TENSORS) if run.quick else (SHAPE, TENSORS)
    found = directory / "found"
    mp.spawn(work, (device, case, shape, tensors, directory, str(directory / "store"), str(found)), nprocs=WORLD)
    (directory / "store").unlink(missing_ok=True)
    of_ranks = [pickle.loads(Path(f"{found}.{rank}").read_bytes()) for rank in range(WORLD)]
    num_bytes = sum(of_rank[0] for of_rank in of_ranks)
    writing = num_bytes * 1e-9 / max(of_rank[1][0][2] for of_rank in of_ranks)
    where = "GPU" if device == "cuda" else f"CPU of {len(os.sched_getaffinity(0))} cores"
    for records in zip(*(of_rank[1] for of_rank in of_ranks)):
        (arm, order, *_), stored = records[0], sum(record[4] for record in records)
        save_s, load_s, save_peak, load_peak = (max(record[k] for record in records) for k in (2, 3, 5, 6))
        run.add(
            case=f"{case}, {where}{', tmpfs' if is_tmpfs else ''}",
            arm=arm,
            rows=num_bytes // (4096 * CASES[case][1].itemsize),
            row_bytes=4096 * CASES[case][1].itemsize,
            dtype=CASES[case][1],
            savings=1 - stored / num_bytes,
            gbps=num_bytes * 1e-9 / save_s,
            ideal_gbps=writing / min(1, stored / num_bytes),
            sms=0,
            order=order,
            save_seconds=harness.four_digits(save_s),
            load_seconds=harness.four_digits(load_s),
            stored_bytes=stored,
            save_peak_mib=f"{save_peak / 2**20:.0f}",
            load_peak_mib=f"{load_peak / 2**20:.0f}",
        )


def main(argv=None):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--directory", type=Path, help="where checkpoints lie (default: that of temporary files)")
    chosen, others = own.parse_known_args(argv)
    args = harness.parse_args(others, __doc__)
    run = harness.Run("dcp", args, COLUMNS)
    for device in ("cuda", "cpu") if run.on_gpu else ("cpu",):
        if device == "cpu":
            run.same["gpu"] = cpu.processor_name()
        places = [(case, chosen.directory) for case in CASES]
        if TMPFS.is_dir():
            places.insert(1, (next(iter(CASES)), TMPFS))
        for case, place in places:
            with contextlib.ExitStack() as stack:
                stack.enter_context(run.cell(f"{case} on {device}, in {place or tempfile.gettempdir()}"))
                made = tempfile.TemporaryDirectory(prefix="ibp-dcp-", dir=place)
                measure(run, device, case, Path(stack.enter_context(made)), place == TMPFS)
    return run.finish([])


if __name__ == "__main__":
    sys.exit(main())
