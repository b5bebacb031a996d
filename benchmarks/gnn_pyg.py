"""How long does GraphSAGE train to an accuracy with a loader of PyTorch Geometric, by the way in which features come to
the GPU (the paper's figure 8, and its claim that accuracy stays)?

    python -m benchmarks.gnn_pyg [--out DIR] [--device cpu] [--quick]

The graph, the model and the features are those of gnn.py: Cora's rows and dense FP32 rows, for 2.4 million nodes. The
label of a node is the largest of CLASSES random linear functions of its features. Batches of 1,024 seeds come from
PyG's NodeLoader, of which NeighborLoader is the one with the sampler of pyg-lib or torch-sparse. Here `Neighbors` draws
as many neighbours in worker processes, with replacement, so that neither package is needed. The nodes of a batch are in
the order in which PyG has them: seeds first. The clock of an arm begins with its first batch. The accuracy of a batch
is measured before the model learns from it. It counts as reached when EVERY batches in a row have ACCURACY in the mean.
Every arm gets the same batches.

Arms: `loader` is PyG as its pages show it: the loader gathers the rows in host memory, and the batch is moved to the
GPU. `PrefetchLoader` is PyG's class that pins and moves a batch during the training of the one before. `index_select of
mapped rows` is torch's own kernel on the GPU, which reads the rows from pinned memory (UVA). `raw rows` and `ibp` are
`ibp.integrations.pyg.FetchFeatures`, which `attach` returns, with raw and with compressed rows in pinned memory.

After the common columns, gnn_pyg.csv has batch (seeds), batches (trained), batch_ms (their mean, the loader included),
accuracy (of the last EVERY batches), accuracy_s (seconds until it was reached, empty if it was not), loss_difference
(the largest difference of a loss from the first arm's, relative; 0 if all have the same bits), table_gib (of raw rows),
workers (processes that draw neighbours) and pyg (its version). `gbps` is the features of all batches over the time of
training. The rows of the first batch are compared bit for bit. It is expected to take three minutes on an H200.
"""

import itertools
import os
import shutil
import sys
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader, PrefetchLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from ibp._machine import memory
from ibp.integrations import pyg

from . import gnn, harness, ideal

COLUMNS = "batch,batches,batch_ms,accuracy,accuracy_s,loss_difference,table_gib,workers,pyg".split(",")
CLASSES, ACCURACY, EVERY, LEARNING_RATE = 8, 0.8, 5, 1e-2
MOST_BATCHES, QUICK_BATCHES, LIMIT_S, MOST_WORKERS = 300, 5, 45.0, 12
SHARED, WORKER_BYTES = "/dev/shm", 32 << 20  # A worker hands over batches in this folder, which takes at most so much.
QUICK_CASES = (gnn.Case("pubmed", 2_000, (32,)), gnn.Case("dense 100", 2_000, (32,), torch.bfloat16, 100))
LOADER, PREFETCH, MAPPED, RAW, IBP = "loader", "PrefetchLoader", "index_select of mapped rows", "raw rows", "ibp"


class Neighbors(BaseSampler):
    """Draws neighbours of the seeds, and then of all nodes so far, with replacement. graph: a `gnn.Graph` on the
    CPU."""

    edge_permutation = sample_from_edges = None  # NodeLoader asks for both.

    def __init__(self, graph):
        self.graph = graph
        # The place in the batch of each of its nodes. Numbers of other nodes are left from earlier batches.
        self.places = torch.empty(len(graph.starts) - 1, dtype=torch.int64)

    def sample_from_nodes(self, inputs):
        torch.manual_seed(int(inputs.node.sum()))  # A batch is the same in whichever worker and run.
        graph, nodes, counts, rows, cols = self.graph, inputs.node, [len(inputs.node)], [], []
        for fan_out in gnn.FAN_OUTS:
            starts = graph.starts[nodes].unsqueeze(1)
            degrees = graph.starts[nodes + 1].unsqueeze(1) - starts
            drawn = graph.neighbors[torch.rand(len(nodes), fan_out).mul_(degrees).long().add_(starts)].long()
            others = drawn.unique()
            self.places[others] = -1
            self.places[nodes] = torch.arange(len(nodes))
            new = others[self.places[others] < 0]
            self.places[new] = torch.arange(len(nodes), len(nodes) + len(new))
            rows.append(self.places[drawn].view(-1))
            cols.append(torch.arange(len(nodes)).repeat_interleave(fan_out))
            nodes = torch.cat([nodes, new])
            counts.append(len(new))
        return SamplerOutput(
            nodes,
            torch.cat(rows),
            torch.cat(cols),
            None,
            None,
            num_sampled_nodes=counts,
            num_sampled_edges=[len(row) for row in rows],
            metadata=(inputs.input_id, None),
        )


def hops_of(batch):
    """Returns the hops of a batch as `gnn.Sage` takes them, the outer one first."""
    ends, hops, edges = 0, [], batch.edge_index[0].split(batch.num_sampled_edges)
    for count, neighbors, fan_out in zip(batch.num_sampled_nodes, edges, gnn.FAN_OUTS):
        ends += count
        hops.append((torch.arange(ends, device=neighbors.device), neighbors.view(ends, fan_out)))
    return hops[::-1]


class MappedRows:
    """A transform that gathers rows of pinned memory by torch's kernel on the GPU."""

    def __init__(self, x, device):
        self.x, self.device = memory.seen_from(device, x), device

    def __call__(self, batch):
        batch.x = torch.index_select(self.x, 0, batch.n_id.to(self.device))
        return batch


class Trained(NamedTuple):
    """What training came to. seconds: of all batches. accuracy_s: seconds until the accuracy was reached, or None."""

    seconds: float
    rows: int
    losses: torch.Tensor
    accuracy: float
    accuracy_s: float | None


def make_loader(graph, batch_size, workers):
    """Returns PyG's loader, whose workers have begun. They draw neighbours; the process that calls them gathers rows
    and applies transforms. To fork a process that has a CUDA context and large tables takes seconds for each worker, so
    this is called first, and all arms take the same workers."""
    loader = NodeLoader(
        Data(num_nodes=len(graph.starts) - 1, edge_index=torch.empty(2, 0, dtype=torch.int64)),
        Neighbors(graph),
        filter_per_worker=False,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    next(iter(loader))
    return loader


def num_workers():
    room = shutil.disk_usage(SHARED).free // WORKER_BYTES
    return min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2, room)


class Training:
    """Features and labels of the nodes of a loader. Every arm trains a new model on the same batches."""

    def __init__(self, run, case, loader, features):
        self.run, self.case, self.loader, self.features = run, case, loader, features
        generator = torch.Generator(run.device).manual_seed(1)
        source = features.source.float()
        classes = (source @ torch.randn(source.shape[1], CLASSES, generator=generator, device=run.device)).argmax(1)
        self.labels = classes[features.of_node.long()].cpu()
        self.device = torch.device("cuda", torch.cuda.current_device()) if run.on_gpu else run.device

    def batches(self, arm):
        """Returns an iterator over the batches of an arm, which have their features and are on the device."""
        features, loader, gathers = self.features, self.loader, arm in (LOADER, PREFETCH)
        loader.data.y, loader.data.x = self.labels, features.x if gathers else None
        transforms = {
            MAPPED: lambda: MappedRows(features.x, self.device),
            RAW: lambda: pyg.FetchFeatures({"x": features.raw}, device=self.device),
            IBP: lambda: pyg.FetchFeatures({"x": features.table}, device=self.device),
        }
        loader.transform = None if gathers else transforms[arm]()
        if arm == PREFETCH:
            return iter(PrefetchLoader(loader, self.device))
        return (batch.to(self.device) for batch in loader)

    def train(self, arm):
        """Trains until the accuracy is reached, or MOST_BATCHES or LIMIT_S are over. The clock begins when the first
        batch is there."""
        torch.manual_seed(0)
        model = gnn.Sage(self.features.x.shape[1]).to(self.device, self.case.dtype)
        optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE, fused=self.run.on_gpu)
        losses, rights, rows, reached = [], [], 0, None
        most = QUICK_BATCHES if self.run.quick else MOST_BATCHES
        batches = self.batches(arm)
        first = next(batches)
        self.features.check(first.x, first.n_id.to(self.device), f"{self.case.name}, {arm}")
        self.run.sync()
        began = time.perf_counter()
        for number, batch in enumerate(itertools.chain([first], batches), 1):
            logits, labels = model(batch.x, hops_of(batch)).float(), batch.y[: batch.batch_size]
            loss = F.cross_entropy(logits, labels)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            rights.append((logits.argmax(1) == labels).float().mean())
            rows += len(batch.n_id)
            if number % EVERY:
                continue
            accuracy = torch.stack(rights[-EVERY:]).mean().item()  # The host waits for the GPU here.
            seconds = time.perf_counter() - began
            reached = seconds if accuracy >= ACCURACY else None
            if reached or number >= most or seconds > LIMIT_S:
                break
        return Trained(seconds, rows, torch.stack(losses[:number]).cpu(), accuracy, reached)


def difference(losses, others):
    """Returns the largest relative difference of the losses that both have, 0 if they have the same bits."""
    count = min(len(losses), len(others))
    return ((losses[:count] - others[:count]).abs() / others[:count].abs()).max().item()


def record(training, arm, trained, first, savings):
    run, case, features, count = training.run, training.case, training.features, len(trained.losses)
    run.add(
        case=f"{case.name}, batch {case.batches[0]}",
        arm=arm,
        rows=trained.rows // count,
        row_bytes=features.row_bytes,
        dtype=case.dtype,
        savings=savings,
        gbps=trained.rows * features.row_bytes * 1e-9 / trained.seconds,
        ideal_gbps=ideal.LINK_COPY_GBPS / (1 - savings),
        sms=0 if arm in (LOADER, PREFETCH) else None,
        batch=case.batches[0],
        batches=count,
        batch_ms=harness.four_digits(1e3 * trained.seconds / count),
        accuracy=f"{trained.accuracy:.4f}",
        accuracy_s="" if trained.accuracy_s is None else harness.four_digits(trained.accuracy_s),
        loss_difference=f"{difference(trained.losses, first.losses):.2g}",
        table_gib=f"{features.num_bytes / gnn.GIB:.2f}",
        workers=training.loader.num_workers,
        pyg=torch_geometric.__version__,
    )


def run_case(run, case, loader, data_dir):
    training, first = Training(run, case, loader, gnn.Features(case, data_dir, run.device)), None
    savings = {IBP: training.features.table.savings}
    for arm in (LOADER, PREFETCH, MAPPED, RAW, IBP):
        with run.cell(f"{case.name}, {arm}"):
            trained = training.train(arm)
            first = first or trained
            record(training, arm, trained, first, savings.get(arm, 0.0))


def main(argv=None):
    args = harness.parse_args(argv, __doc__)
    on_gpu = args.device == "cuda"
    small = args.quick or not on_gpu
    cases = QUICK_CASES if small else gnn.DGL_CASES
    torch.manual_seed(0)
    graph = gnn.Graph(cases[0].num_nodes, gnn.QUICK_EDGES if small else gnn.NUM_EDGES, torch.device("cpu"))
    loader = make_loader(graph, cases[0].batches[0], num_workers() if on_gpu else 0)
    run = harness.Run("gnn_pyg", args, COLUMNS)
    torch.manual_seed(0)
    for case in cases:
        with run.cell(case.name):
            run_case(run, case, loader, args.data)
        harness.release(run)
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
