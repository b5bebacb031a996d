"""How long does GraphSAGE train to an accuracy with DGL's own loader, by the way in which features come to the GPU (the
paper's figure 8)?

    python -m benchmarks.gnn_dgl [--out DIR] [--device cpu] [--quick]

gnn_accuracy.py says what is trained and measured; the last column of gnn_dgl.csv, dgl, is the version of DGL. Batches
come from `dgl.dataloading.DataLoader` with DGL's NeighborSampler, which draws with replacement and prefetches the
features. It is seeded by the first seed of a batch. So all arms of a case get the same batches, but those that the CPU
draws are others than those that the GPU draws, and losses are compared within a case.

Arms of `drawn by the CPU`, where worker processes draw the neighbours: `loader` gathers the rows in host memory and
moves them. `pin_prefetcher` is the same with DGL's defaults for a GPU: a thread gathers the rows of the next batch into
pinned memory, and another stream moves them. `raw rows` and `ibp` are that loader on a graph to which
`ibp.integrations.dgl.attach` attached a table of raw, and of compressed, rows in pinned memory.

Arms of `drawn by the GPU`, where DGL has pinned the graph and the GPU draws the neighbours: `use_uva` fetches rows by
DGL's own kernel, which reads them from pinned memory. `raw rows` and `ibp` are that loader with the attached tables.
These arms need a DGL with CUDA, and are left out without a GPU, as is `pin_prefetcher`.

It is expected to take two and a half minutes on an H200.
"""

import sys

import torch

from ibp.integrations import dgl as ibp_dgl

# isort: split
# DGL comes after it, which makes DGL work without GraphBolt.
import dgl
from dgl.dataloading import DataLoader, NeighborSampler

from . import gnn, gnn_accuracy
from .gnn_accuracy import IBP, RAW

LOADER, PINNED, UVA = "loader", "pin_prefetcher", "use_uva"
BY_CPU = (LOADER, PINNED)
DRAWN_BY_CPU, DRAWN_BY_GPU = ", drawn by the CPU", ", drawn by the GPU"


class Neighbors(NeighborSampler):
    """DGL's sampler, whose draws depend on nothing but the seeds of a batch."""

    def __init__(self):
        super().__init__(
            [*reversed(gnn.FAN_OUTS)], replace=True, prefetch_node_feats=["x"], prefetch_labels=["y"], fused=False
        )

    def sample_blocks(self, g, seed_nodes, exclude_eids=None):
        dgl.seed(int(seed_nodes[0]))
        return super().sample_blocks(g, seed_nodes, exclude_eids)


class Loaders:
    """The loaders of all arms, and their graph.

    Workers draw neighbours; the process that calls a loader gathers rows. To fork a process that has a CUDA context and
    large tables takes seconds for each worker, so the workers begin here. Each of two loaders has its own.
    """

    def __init__(self, graph, batch_size, workers, device):
        if not workers:
            dgl.utils.set_num_threads(1)  # As workers do. What several threads draw depends on which is first.
        self.graph = gnn.graph_of_dgl(graph).formats("csc")
        self.seeds, self.device = torch.randperm(self.graph.num_nodes()), device
        self.same = {"device": device, "batch_size": batch_size, "drop_last": True}
        self.of_arm = {LOADER: self._by_cpu(workers, use_prefetch_thread=False, pin_prefetcher=False)}
        if device.type == "cuda":
            self.of_arm[PINNED] = self._by_cpu(workers, use_prefetch_thread=True, pin_prefetcher=True)

    def _by_cpu(self, workers, **options):
        """Returns a loader whose workers have begun."""
        loader = DataLoader(
            self.graph,
            self.seeds,
            Neighbors(),
            num_workers=workers,
            persistent_workers=workers > 0,
            use_alternate_streams=options["use_prefetch_thread"],
            **self.same,
            **options,
        )
        if workers:
            torch.utils.data.DataLoader.__iter__(loader)  # DGL's own iterator would prefetch features.
        return loader

    def by_gpu(self):
        """Returns a loader that has pinned the graph and its features."""
        return DataLoader(self.graph, self.seeds.to(self.device), Neighbors(), use_uva=True, **self.same)


class Training(gnn_accuracy.Training):
    """loader_of: the loader of each arm."""

    def __init__(self, run, case, features, graph):
        super().__init__(run, case, features)
        self.graph, self.loader_of = graph, {}
        graph.ndata["x"], graph.ndata["y"] = features.x, self.labels

    def batches(self, arm):
        self.graph.ndata["x"] = self.features.x  # This replaces an attached table.
        if arm in (RAW, IBP):
            ibp_dgl.attach(self.graph, "x", table=self.features.raw if arm == RAW else self.features.table)
        for ids, _, blocks in self.loader_of[arm]:
            yield gnn_accuracy.Ready(blocks[0].srcdata["x"], gnn.hops_of_dgl(blocks), blocks[-1].dstdata["y"], ids)


def measure_case(run, case, features, loaders, workers):
    training, version = Training(run, case, features, loaders.graph), dgl.__version__
    training.loader_of = dict.fromkeys((RAW, IBP), [*loaders.of_arm.values()][-1]) | loaders.of_arm
    arms = (*loaders.of_arm, RAW, IBP)
    gnn_accuracy.measure(training, arms, BY_CPU, DRAWN_BY_CPU, workers=workers, dgl=version)
    if run.on_gpu:
        training.graph.ndata["x"] = features.x
        training.loader_of = dict.fromkeys((UVA, RAW, IBP), loaders.by_gpu())
        gnn_accuracy.measure(training, (UVA, RAW, IBP), (), DRAWN_BY_GPU, workers=0, dgl=version)
        training.graph.unpin_memory_()


def main(argv=None):
    return gnn_accuracy.main("gnn_dgl", argv, __doc__, "dgl", Loaders, measure_case)


if __name__ == "__main__":
    sys.exit(main())
