"""How long does GraphSAGE train to an accuracy with a loader of PyTorch Geometric, by the way in which features come to
the GPU (the paper's figure 8, and its claim that accuracy stays)?

    python -m benchmarks.gnn_pyg [--out DIR] [--device cpu] [--quick]

gnn_accuracy.py says what is trained and measured; the last column of gnn_pyg.csv, pyg, is the version of PyG. Batches
come from PyG's NodeLoader, of which NeighborLoader is the one with the sampler of pyg-lib or torch-sparse. Here
`Neighbors` draws as many neighbours in worker processes, with replacement, so that neither package is needed. The nodes
of a batch are in the order in which PyG has them: seeds first. Every arm gets the same batches.

Arms: `loader` is PyG as its pages show it: the loader gathers the rows in host memory, and the batch is moved to the
GPU. `PrefetchLoader` is PyG's class that pins and moves a batch during the training of the one before. `index_select of
mapped rows` is torch's own kernel on the GPU, which reads the rows from pinned memory (UVA). `raw rows` and `ibp` are
`ibp.integrations.pyg.FetchFeatures`, which `attach` returns, with raw and with compressed rows in pinned memory. It is
expected to take three minutes on an H200.
"""

import sys

import torch
import torch_geometric
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader, PrefetchLoader
from torch_geometric.sampler import BaseSampler, SamplerOutput

from ibp._machine import memory
from ibp.integrations import pyg

from . import gnn, gnn_accuracy
from .gnn_accuracy import IBP, RAW

LOADER, PREFETCH, MAPPED = "loader", "PrefetchLoader", "index_select of mapped rows"
ARMS, BY_CPU = (LOADER, PREFETCH, MAPPED, RAW, IBP), (LOADER, PREFETCH)


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


def make_loader(graph, batch_size, workers, device):
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


class Training(gnn_accuracy.Training):
    def __init__(self, run, case, features, loader):
        super().__init__(run, case, features)
        self.loader = loader

    def batches(self, arm):
        features, loader, gathers = self.features, self.loader, arm in BY_CPU
        loader.data.y, loader.data.x = self.labels, features.x if gathers else None
        transforms = {
            MAPPED: lambda: MappedRows(features.x, self.device),
            RAW: lambda: pyg.FetchFeatures({"x": features.raw}, device=self.device),
            IBP: lambda: pyg.FetchFeatures({"x": features.table}, device=self.device),
        }
        loader.transform = None if gathers else transforms[arm]()
        batches = (
            iter(PrefetchLoader(loader, self.device))
            if arm == PREFETCH
            else (batch.to(self.device) for batch in loader)
        )
        for batch in batches:
            yield gnn_accuracy.Ready(batch.x, hops_of(batch), batch.y[: batch.batch_size], batch.n_id)


def measure_case(run, case, features, loader, workers):
    training = Training(run, case, features, loader)
    gnn_accuracy.measure(training, ARMS, BY_CPU, workers=workers, pyg=torch_geometric.__version__)


def main(argv=None):
    return gnn_accuracy.main("gnn_pyg", argv, __doc__, "pyg", make_loader, measure_case)


if __name__ == "__main__":
    sys.exit(main())
