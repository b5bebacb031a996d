"""How long is an epoch of GraphSAGE with features in host memory, by the way in which they come to the GPU (the paper's
figures 8 and 9)?

    python -m benchmarks.gnn [--dgl | --huge] [--sets NAME,NAME] [--out DIR] [--device cpu] [--quick]

The model has two hops, fan-out 25 and 10, and hidden size 256. The graphs are random, and their degrees follow a power
law: 2.4 million nodes and about 120 million edges, or 11.5 million nodes and as many edges. Neighbours are drawn on the
GPU in plain torch. Features are rows of Citeseer, of Cora and of a sample of Pubmed, which are assigned to nodes at
random, or dense rows with 1 GiB of distinct ones, N(0, 1) in FP32 and N(0, 0.02) in FP16 and BF16. An epoch has 200
batches. An arm is measured with as many batches as fit 2.5 s, at least 3, and its epoch is 200 times their mean. Arms
take turns up to three times, and the median counts.

Arms: `cpu plain` is x[ids].to("cuda"). `cpu pinned` is index_select into a pinned buffer, which is copied during other
work. `cpu pipelined` gathers in chunks that are copied meanwhile. `raw rows` are fetched by the GPU from pinned memory.
`ibp` does the same with a compressed table, and `scheme ibp` with one that is compressed with masks. In all arms the
next batch is sampled and fetched on another stream during the training of a batch. The ids of a batch are unique and
sorted.

--dgl measures only Cora's rows and dense FP32 rows, with neighbours that DGL draws on the CPU. DGL's own loader, which
can pin features or read them from the GPU, is not run. --huge measures only Citeseer's rows, in a table of 64 GiB.
Other rows of the CSV stay, and these rows stay in runs without the options. --sets measures only the named features,
such as `citeseer`, which is expected to take about two minutes on an H200 (a full run three), and keeps the other rows.

gnn.csv has the rate of fetches alone (gbps) and, after the common columns, batch (seeds), batches (measured),
sample_ms, fetch_ms and train_ms (each measured alone: the median of several, and for fetches the mean of several in a
row), beside_ms (the median time of training a batch of the epoch, with the next batch being prepared), epoch_s (with
prefetching), table_gib (of the raw rows) and wait_ms (the median time from the end of a batch's training to the
beginning of the next one's, in the epoch). The first batch of every arm is compared with the right rows bit for bit.

All times are of CUDA events: of the stream that samples and fetches, or of the one that trains. Batches whose training
is measured alone are queued behind other work, as in the epoch they are behind a fetch, so that no time of launches is
in it. Rows without wait_ms are older: their times alone and of epochs are by the wall clock.
"""

import argparse
import contextlib
import functools
import importlib
import itertools
import statistics
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

import ibp
from ibp._machine import memory as _memory

from . import harness, ideal, inputs, reading
from .cpu_gather import PipelinedGather

COLUMNS = "batch,batches,sample_ms,fetch_ms,train_ms,beside_ms,epoch_s,table_gib,wait_ms".split(",")
GIB = 1 << 30
NUM_EDGES, EXPONENT = 120_000_000, 1.5  # The degrees are Pareto distributed with this exponent of the power law.
FAN_OUTS, HIDDEN, NUM_CLASSES = (25, 10), 256, 47
EPOCH_BATCHES, LEAST_BATCHES, ARM_S, ROUNDS = 200, 3, 2.5, 3
SPLIT_BATCHES, SPLIT_S = 6, 1.5  # Some batches are measured apart. The first of them only warms up.
QUEUED_CYCLES = 100_000_000  # The GPU sleeps for about 50 ms, while the host queues SPLIT_BATCHES batches.
CPU_ARMS = ("cpu plain", "cpu pinned", "cpu pipelined")
ARMS = (*CPU_ARMS, "raw rows", "ibp", "scheme ibp")
# Arms of --dgl, and the end of the names of its cases.
DGL_ARMS, BY_DGL = ("cpu plain", "raw rows", "ibp"), ", sampled by DGL"

# Targets: fetches compared with raw rows that the GPU fetches, and epochs compared with the CPU's best arm.
WANTED_FETCH = {"citeseer": 50.0, "cora": 50.0, "pubmed": 7.0}
WANTED_EPOCH_SPARSE, WANTED_EPOCH_DENSE = 1.74, 1.3


class Case(NamedTuple):
    """Features to measure. name: that of a real set, or of dense features. columns: those of dense features."""

    name: str
    num_nodes: int
    batches: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    columns: int = 0


CASES = (
    Case("citeseer", 2_400_000, (1024, 8192)),
    Case("cora", 2_400_000, (1024,)),
    Case("pubmed", 2_400_000, (1024,)),
    Case("dense 602", 2_400_000, (1024, 8192), torch.float32, 602),
    Case("dense 100", 2_400_000, (1024,), torch.float32, 100),
    Case("dense 768", 2_400_000, (1024,), torch.float16, 768),
    Case("dense 768, large", 11_500_000, (1024,), torch.bfloat16, 768),
)
HUGE = ", 64 GiB"  # The name of the case of --huge ends with this text.
HUGE_CASES = (Case("citeseer" + HUGE, 4_640_000, (1024,)),)
DGL_CASES = (CASES[1], CASES[3]._replace(batches=(1024,)))
QUICK_CASES = (Case("pubmed", 2_000, (16,)), Case("dense 100", 2_000, (16, 32), torch.bfloat16, 100))
QUICK_EDGES, QUICK_EPOCH = 40_000, 4


# ---- graphs --------------------------------------------------------------------------------------------------------


class Graph:
    """Edges, ordered by the node that they lead to. Degrees are Pareto distributed. Neighbours are drawn with a
    probability proportional to their degree.

    Attributes:
        starts: int64 [nodes + 1].
        neighbors: int32 [edges].
    """

    def __init__(self, num_nodes, num_edges, device):
        mean = num_edges / num_nodes
        degrees = torch.rand(num_nodes, device=device).clamp_(min=1e-9).pow_(-1 / EXPONENT)
        degrees = degrees.mul_(mean * (EXPONENT - 1) / EXPONENT).long().clamp_(1, max(1, num_nodes // 8))
        self.starts = F.pad(degrees.cumsum(0), (1, 0))
        total = int(self.starts[-1])
        ends = torch.arange(num_nodes, dtype=torch.int32, device=device).repeat_interleave(degrees)
        self.neighbors = torch.empty(total, dtype=torch.int32, device=device)
        for part in self.neighbors.split(1 << 25):
            part.copy_(ends[torch.randint(total, (len(part),), device=device)])

    def sample(self, seeds, fan_outs):
        """Draws neighbours of the seeds, and neighbours of these, from all neighbours of a node, with replacement."""
        nodes, hops = seeds, []
        for fan_out in fan_outs:
            starts = self.starts[nodes].unsqueeze(1)
            degrees = self.starts[nodes + 1].unsqueeze(1) - starts
            drawn = torch.rand(len(nodes), fan_out, device=nodes.device).mul_(degrees).long().add_(starts)
            every = torch.cat([nodes, self.neighbors[drawn].reshape(-1).long()])
            ids, places = torch.unique(every, return_inverse=True)
            hops.append((places[: len(nodes)], places[len(nodes) :].view(-1, fan_out)))
            nodes = ids
        return Batch(seeds, nodes, hops[::-1])


class Batch(NamedTuple):
    """A batch of seeds, and the nodes whose features it needs.

    Attributes:
        seeds: int64 [seeds].
        ids: int64 [rows to fetch], sorted and unique.
        hops: from the outer to the inner hop, (positions of the hop's nodes, positions of their neighbours [nodes,
            fan-out]) among the nodes of the hop before, or among ids for the first.
    """

    seeds: torch.Tensor
    ids: torch.Tensor
    hops: list[tuple[torch.Tensor, torch.Tensor]]

    def record_stream(self, stream):
        for tensor in (self.seeds, self.ids, *(tensor for hop in self.hops for tensor in hop)):
            tensor.record_stream(stream)


class Sage(torch.nn.Module):
    """GraphSAGE with the mean of neighbours."""

    def __init__(self, columns):
        super().__init__()
        widths = (columns, HIDDEN, NUM_CLASSES)
        self.own = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in zip(widths, widths[1:]))
        self.neighbors = torch.nn.ModuleList(torch.nn.Linear(*pair, bias=False) for pair in zip(widths, widths[1:]))

    def forward(self, h, hops):
        for i, (own, neighbors) in enumerate(hops):
            h = self.own[i](h[own]) + self.neighbors[i](F.embedding_bag(neighbors, h, mode="mean"))
            h = h.relu() if i + 1 < len(hops) else h
        return h


# ---- features ------------------------------------------------------------------------------------------------------


class Features:
    """A table of raw rows in (pinned) host memory, the same table compressed, and the rows that both were made from:
    `source[of_node]`.

    Attributes:
        x: [nodes, columns].
        raw: the table in x's own memory.
        table: x compressed.
    """

    def __init__(self, case, data_dir, device):
        if case.columns:
            row_bytes = case.columns * case.dtype.itemsize
            num_bytes = min(GIB, case.num_nodes * row_bytes)
            deviation = 1.0 if case.dtype == torch.float32 else 0.02
            self.source = inputs.normal_rows(num_bytes, case.dtype, deviation, device, columns=case.columns)
        else:
            self.source = dict(inputs.real_sets(data_dir))[case.name.removesuffix(HUGE)].to(device)
        self.of_node = torch.randint(len(self.source), (case.num_nodes,), dtype=torch.int32, device=device)
        shape = (case.num_nodes, self.source.shape[1])
        self.row_bytes = shape[1] * case.dtype.itemsize
        memory = _memory.empty(case.num_nodes * self.row_bytes, torch.device("cpu"), pin=device.type == "cuda")
        self.x = memory.view(case.dtype).view(shape)
        step = max(1, GIB // 4 // self.row_bytes)
        for first in range(0, case.num_nodes, step):
            self.x[first : first + step].copy_(self.source[self.of_node[first : first + step].long()])
        self.raw = ibp.CompressedTensor(
            shape=shape,
            dtype=case.dtype,
            scheme="raw",
            row_bytes=self.row_bytes,
            slot_bytes=self.row_bytes,
            slots=memory,
            overflow=memory[:0],
            lengths=torch.empty(0, dtype=torch.uint16),
            bases=torch.empty(0, dtype=torch.int64),
            codebook=None,
        )
        self.table = ibp.compress(self.x)

    @functools.cached_property
    def masks(self):
        return ibp.compress(self.x, scheme="ibp")

    @property
    def num_bytes(self):
        return self.x.numel() * self.x.element_size()

    def check(self, got, ids, what):
        """Checks every row, in pieces."""
        step = max(1, GIB // 4 // self.row_bytes)
        for part, of_part in zip(got.split(step), ids.split(step)):
            harness.check_bits(part, self.source[self.of_node[of_part].long()], what)


class Plain:
    """A fetcher that computes x[ids].to(device)."""

    def __init__(self, x, device):
        self.x, self.device = x, device

    def __call__(self, ids, out):
        return self.x[ids.cpu()].to(self.device)


class Pinned:
    """A fetcher that gathers rows into one pinned buffer, which is copied during other work."""

    def __init__(self, x, device):
        self.x, self.on_gpu = x, device.type == "cuda"
        self.buffer = x[:0]
        self.copied = torch.cuda.Event() if self.on_gpu else None

    def __call__(self, ids, out):
        ids = ids.cpu()
        if self.copied:
            self.copied.synchronize()  # This returns at once if the buffer was never used.
        if len(ids) > len(self.buffer):
            rows = len(ids) + len(ids) // 8
            memory = _memory.empty(rows * self.x[0].nbytes, torch.device("cpu"), pin=self.on_gpu)
            self.buffer = memory.view(self.x.dtype).view(rows, -1)
        torch.index_select(self.x, 0, ids, out=self.buffer[: len(ids)])
        out.copy_(self.buffer[: len(ids)], non_blocking=True)
        if self.copied:
            self.copied.record()
        return out


class Pipelined:
    """A fetcher that gathers rows into pinned chunks. Each chunk is copied while the next ones are gathered."""

    def __init__(self, x, device):
        self.gather = PipelinedGather(x, len(x), device)

    def __call__(self, ids, out):
        return self.gather(ids.cpu(), out)


class ByGpu:
    """A fetcher with which the GPU fetches rows of a table."""

    def __init__(self, table):
        self.table = table

    def __call__(self, ids, out):
        return ibp.index_select(self.table, ids, out=out)


def fetches(features, device):
    """Yields (arm, object that fetches). A call (ids, out) of the object returns the rows, in out or in a new
    tensor."""
    yield "cpu plain", Plain(features.x, device)
    yield "cpu pinned", Pinned(features.x, device)
    yield "cpu pipelined", Pipelined(features.x, device)
    yield "raw rows", ByGpu(features.raw)
    yield "ibp", ByGpu(features.table)
    yield "scheme ibp", ByGpu(features.masks)


# ---- training ------------------------------------------------------------------------------------------------------


class Training:
    """A model, and batches of one size. After `restart` each arm gets the same batches."""

    def __init__(self, graph, columns, dtype, batch, device, wrap=lambda model: model, part=(0, 1)):
        self.graph, self.columns, self.dtype, self.device = graph, columns, dtype, device
        self.on_gpu, self.wrap = device.type == "cuda", wrap
        num_nodes = len(graph.starts) - 1
        seeds = torch.randperm(num_nodes, device=device).split(batch)
        rank, world = part
        self.seeds = [some for some in seeds if len(some) == batch][rank::world]
        self.labels = torch.randint(NUM_CLASSES, (num_nodes,), device=device)
        self.buffers = [torch.empty(0, columns, dtype=dtype, device=device) for _ in range(2)]
        self.trained = [torch.cuda.Event() for _ in range(2)] if self.on_gpu else []
        self.steps = []  # begin and end of each step of the last run
        self.side = torch.cuda.Stream(device) if self.on_gpu else None

    def restart(self):
        torch.manual_seed(0)
        self.model = self.wrap(Sage(self.columns).to(self.device, self.dtype))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 1e-3, fused=self.on_gpu)

    def beside(self):
        return torch.cuda.stream(self.side) if self.on_gpu else contextlib.nullcontext()

    def sync(self):
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def sample(self, i):
        return self.graph.sample(self.seeds[i % len(self.seeds)], FAN_OUTS)

    def out(self, i, num_rows):
        """Returns rows of one of two buffers, on the side stream."""
        if num_rows > len(self.buffers[i % 2]):
            self.buffers[i % 2] = self.buffers[i % 2][:0]  # The old buffer's memory is freed for the new one.
            self.buffers[i % 2] = torch.empty(
                num_rows + num_rows // 8, self.columns, dtype=self.dtype, device=self.device
            )
        return self.buffers[i % 2][:num_rows]

    def step(self, batch, rows):
        loss = F.cross_entropy(self.model(rows, batch.hops).float(), self.labels[batch.seeds])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()

    def prepare(self, i, fetch):
        """Samples and fetches batch i during the training of another one. Returns the batch, its rows, and an event."""
        with self.beside():
            batch = self.sample(i)
            if self.on_gpu:
                self.side.wait_event(self.trained[i % 2])  # Until then the buffer is in use.
            rows = fetch(batch.ids, self.out(i, len(batch.ids)))
            return batch, rows, self.side.record_event() if self.on_gpu else None

    def train(self, i, batch, rows, ready):
        if self.on_gpu:
            current = torch.cuda.current_stream()
            current.wait_event(ready)
            batch.record_stream(current)
            rows.record_stream(current)
        began = self._mark()
        self.step(batch, rows)
        self.steps.append((began, self._mark()))
        if self.on_gpu:
            self.trained[i % 2].record()

    def _mark(self):
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def beside_s(self):
        """Returns the median seconds of a step of the last run."""
        return statistics.median(seconds_of(self.steps))

    def wait_s(self):
        """Returns the median seconds between the steps of the last run."""
        return statistics.median(seconds_of([(a, b) for (_, a), (b, _) in itertools.pairwise(self.steps)]))

    def run(self, fetch, num_batches, limit_s):
        """Trains as many batches as fit the limit, but at least LEAST_BATCHES. Returns (seconds per batch, number of
        batches)."""
        self.steps.clear()
        self.sync()
        start, begun, prepared = time.perf_counter(), self._mark(), self.prepare(0, fetch)
        for i in range(num_batches):
            self.train(i, *prepared)
            if i + 1 == num_batches or (i + 1 >= LEAST_BATCHES and time.perf_counter() - start > limit_s):
                break
            prepared = self.prepare(i + 1, fetch)
        ended = self._mark()
        self.sync()
        return seconds_of([(begun, ended)])[0] / (i + 1), i + 1

    def split(self, fetch, check):
        """Returns the seconds of (sampling, fetching, training), each measured alone, and the ids of a batch.
        check(rows, ids) is called with those of the first batch."""
        with self.beside():
            batches, sample_s = self._timed(self.sample, range(SPLIT_BATCHES))
            first = batches.pop(0)
            self.sync()
            began = time.perf_counter()
            rows = fetch(first.ids, self.out(0, len(first.ids)))
            self.sync()
            first_s = time.perf_counter() - began  # This says only how many batches are fetched.
            check(rows, first.ids)
            batches = batches[: max(1, int(SPLIT_S / first_s))]
            self.sync()
            begun = self._mark()
            for i, batch in enumerate(batches):
                rows = fetch(batch.ids, self.out(i, len(batch.ids)))
            ended = self._mark()
            self.sync()
            fetch_s = seconds_of([(begun, ended)])[0] / len(batches)
        if self.on_gpu:
            torch.cuda._sleep(QUEUED_CYCLES)
        _, train_s = self._timed(lambda i: self.step(batches[-1], rows), range(SPLIT_BATCHES))
        return [sample_s, fetch_s, train_s], batches[-1].ids

    def _timed(self, call, arguments):
        """Returns (result of each call, median seconds of the calls without the first)."""
        given, times = [], []
        for argument in arguments:
            begun = self._mark()
            given.append(call(argument))
            times.append((begun, self._mark()))
        self.sync()
        return given, statistics.median(seconds_of(times[1:]))


def seconds_of(pairs):
    """Returns the seconds between the marks of each pair, events on a GPU that have all been reached, or times."""
    return [1e-3 * a.elapsed_time(b) if isinstance(a, torch.cuda.Event) else b - a for a, b in pairs]


def dgl_if_there():
    """Returns DGL, which takes seconds to import, or None if it is not installed."""
    try:
        # This import keeps GraphBolt out of DGL if DGL has no binary of it.
        importlib.import_module("ibp.integrations.dgl")
        return importlib.import_module("dgl")
    except ImportError:
        return None


def graph_of_dgl(graph):
    """Returns a `Graph` as one of DGL on the CPU."""
    edges = graph.starts.cpu(), graph.neighbors.cpu().long(), torch.empty(0, dtype=torch.int64)
    return dgl_if_there().graph(("csc", edges), num_nodes=len(graph.starts) - 1)


def hops_of_dgl(blocks):
    """Returns blocks of DGL, whose nodes all have as many neighbours, as the hops that `Sage` takes."""
    return [
        (
            torch.arange(block.num_dst_nodes(), device=block.device),
            block.adj_tensors("csc")[1].view(block.num_dst_nodes(), -1),
        )
        for block in blocks
    ]


class DglTraining(Training):
    """Batches whose neighbours DGL draws on the CPU, as many per node as `Graph` and also with replacement."""

    def __init__(self, graph, columns, dtype, batch, device):
        super().__init__(graph, columns, dtype, batch, device)
        self.of_dgl = graph_of_dgl(graph)
        self.sampler = dgl_if_there().dataloading.NeighborSampler([*reversed(FAN_OUTS)], replace=True)

    def sample(self, i):
        seeds = self.seeds[i % len(self.seeds)]
        ids, _, blocks = self.sampler.sample_blocks(self.of_dgl, seeds.cpu())
        hops = [tuple(places.to(self.device) for places in hop) for hop in hops_of_dgl(blocks)]
        return Batch(seeds, ids.to(self.device), hops)


# ---- cells ---------------------------------------------------------------------------------------------------------


def ideal_of(run, fetch, ids, row_bytes):
    if not isinstance(fetch, ByGpu):
        return ideal.LINK_COPY_GBPS
    return ideal.gather_gbps(len(ids) * row_bytes, ideal.row_link_ns(fetch.table, ids.cpu()), run.memset_gbps)


def measure(run, case, features, training, batch, names=ARMS, suffix=""):
    """Measures arms of one set and batch size. names: the arms. suffix: the end of the case's name."""
    arms = {arm: fetch for arm, fetch in fetches(features, run.device) if arm in names}
    alone, ids, seconds, num_batches = {}, {}, {arm: [] for arm in arms}, dict.fromkeys(arms, 0)
    beside, waits = {}, {}
    for arm, fetch in arms.items():
        with run.cell(f"{case.name}, batch {batch}, {arm}"):
            for buffer in training.buffers:
                harness.poison(buffer)
            training.restart()
            check = functools.partial(features.check, what=f"{case.name}, {arm}")
            alone[arm], ids[arm] = training.split(fetch, check)
    for _ in range(ROUNDS):
        for arm in alone:
            if sum(seconds[arm]) * EPOCH_BATCHES > ARM_S:
                continue
            with run.cell(f"{case.name}, batch {batch}, {arm}"):
                training.restart()
                mean_s, done = training.run(arms[arm], QUICK_EPOCH if run.quick else EPOCH_BATCHES, ARM_S)
                seconds[arm].append(mean_s)
                beside[arm], waits[arm] = training.beside_s(), training.wait_s()
                num_batches[arm] += done
    for arm, fetch in arms.items():
        if not seconds[arm]:
            continue
        run.add(
            case=f"{case.name}, batch {batch}{suffix}",
            arm=arm,
            rows=len(ids[arm]),
            row_bytes=features.row_bytes,
            dtype=case.dtype,
            savings=fetch.table.savings if isinstance(fetch, ByGpu) else 0.0,
            gbps=len(ids[arm]) * features.row_bytes * 1e-9 / alone[arm][1],
            ideal_gbps=ideal_of(run, fetch, ids[arm], features.row_bytes),
            sms=None if isinstance(fetch, ByGpu) else 0,
            batch=batch,
            batches=num_batches[arm],
            **{f"{name}_ms": harness.four_digits(1e3 * s) for name, s in zip(("sample", "fetch", "train"), alone[arm])},
            beside_ms=harness.four_digits(1e3 * beside[arm]),
            epoch_s=harness.four_digits(statistics.median(seconds[arm]) * EPOCH_BATCHES),
            table_gib=f"{features.num_bytes / GIB:.2f}",
            wait_ms=harness.four_digits(1e3 * waits[arm]),
        )


def run_case(run, case, graph, data_dir, by_dgl=False):
    features = Features(case, data_dir, run.device)
    if run.on_gpu and not (features.raw.is_pinned() and features.table.is_pinned()):
        raise AssertionError(f"{case.name}: a table is not in pinned memory")
    print(f"{case.name}: {features.num_bytes / GIB:.1f} GiB, {features.table}", flush=True)
    for batch in case.batches:
        training = (DglTraining if by_dgl else Training)(graph, features.x.shape[1], case.dtype, batch, run.device)
        names, suffix = (DGL_ARMS, BY_DGL) if by_dgl else (ARMS, "")
        measure(run, case, features, training, batch, names, suffix)


# ---- what it comes to ----------------------------------------------------------------------------------------------


class Gains(NamedTuple):
    """The gains of ibp in one case, as speed-ups. fetch: of fetches, over raw rows. epoch: of epochs, over the CPU's
    best arm. raw_epoch: of epochs, over raw rows."""

    case: str
    fetch: float
    epoch: float
    raw_epoch: float


def gains(rows, arm="ibp"):
    """Yields the gains of an arm in every case that has all arms."""
    for case, arms in reading.by_arm(rows).items():
        if {*CPU_ARMS, "raw rows", arm} <= arms.keys():
            fetch_ms = {other: float(row["fetch_ms"]) for other, row in arms.items()}
            epoch_s = {other: float(row["epoch_s"]) for other, row in arms.items()}
            yield Gains(
                case,
                fetch_ms["raw rows"] / fetch_ms[arm],
                min(epoch_s[other] for other in CPU_ARMS) / epoch_s[arm],
                epoch_s["raw rows"] / epoch_s[arm],
            )


def shortfalls(rows):
    """Yields lines that say where fetches and epochs gain less than their target."""
    for gain in gains(rows):
        name = gain.case.split(", batch")[0]
        wanted_epoch = WANTED_EPOCH_SPARSE if name in WANTED_FETCH else WANTED_EPOCH_DENSE
        for what, factor, wanted in (
            ("fetches of raw rows by the GPU", gain.fetch, WANTED_FETCH.get(name, 0)),
            ("epochs with rows gathered by the CPU", gain.epoch, wanted_epoch),
            ("epochs with raw rows by the GPU", gain.raw_epoch, 1),
        ):
            if factor < wanted:
                yield f"{gain.case}: {factor:.2f} times as fast as {what}, wanted {wanted:g}"


def parsed(argv):
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--dgl", action="store_true")
    own.add_argument("--huge", action="store_true")
    own.add_argument("--sets", type=lambda text: text.split(","))
    options, others = own.parse_known_args(argv)
    return options, harness.parse_args(others, __doc__)


def option_of(case):
    """Returns the option with which a case of the CSV is measured."""
    return "dgl" if case.endswith(BY_DGL) else "huge" if HUGE in case else ""


def main(argv=None):
    options, args = parsed(argv)
    by_dgl, option = options.dgl, "dgl" if options.dgl else "huge" if options.huge else ""
    if by_dgl and dgl_if_there() is None:
        print("DGL is not installed")
        return 2

    def is_measured(name):
        return options.sets is None or name.removesuffix(HUGE) in options.sets

    def is_kept(row):
        return option_of(row["case"]) != option or not is_measured(row["case"].rsplit(", batch ", 1)[0])

    run = harness.Run("gnn", args, COLUMNS, keep=is_kept)
    torch.manual_seed(0)
    small = run.quick or not run.on_gpu
    graph, num_nodes = None, 0
    cases = {"dgl": DGL_CASES, "huge": HUGE_CASES, "": CASES}[option]
    if small:
        cases = [case._replace(name=case.name + HUGE) if options.huge else case for case in QUICK_CASES]
    for case in (case for case in cases if is_measured(case.name)):
        with run.cell(case.name):
            if case.num_nodes != num_nodes:
                graph = None  # Its memory is freed for the next graph.
                graph, num_nodes = (
                    Graph(case.num_nodes, QUICK_EDGES if small else NUM_EDGES, run.device),
                    case.num_nodes,
                )
            run_case(run, case, graph, args.data, by_dgl)
        harness.release(run)
    for gain in gains(run.rows):
        print(
            f"{gain.case}: ibp fetches {gain.fetch:.2f} times as fast as the GPU fetches raw rows; epochs are "
            f"{gain.epoch:.2f} times as fast as with the best gather by the CPU, {gain.raw_epoch:.2f} as with raw rows"
        )
    return run.finish([*shortfalls(run.rows)])


if __name__ == "__main__":
    sys.exit(main())
