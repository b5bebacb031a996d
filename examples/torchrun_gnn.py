"""Trains GraphSAGE in several processes, data-parallel, on plain features, then on compressed ones that
all of them share: on the CPU the losses have the same bits.

    torchrun --nproc-per-node 2 examples/torchrun_gnn.py

Features and graph are those of gnn_pyg.py. Every process draws neighbours of seeds of its own. The features are in host
memory once; each process keeps rows with many neighbours on its GPU, and reads those that the others keep.
"""

import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

import ibp

if on_gpu := ibp.cuda_is_available():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

csr = np.load(Path(__file__).resolve().parent.parent / "data" / "cora.npz")
x = torch.zeros(*csr["shape"])
x[np.repeat(np.arange(len(x)), np.diff(csr["indptr"])), csr["indices"]] = torch.from_numpy(csr["data"])
alike = F.normalize(x) @ F.normalize(x).T
neighbors, classes = alike.topk(6).indices[:, 1:].to(device), alike[:, :7].argmax(1).to(device)


class Sage(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2 * x.shape[1], 32), torch.nn.Linear(64, 7)])

    def forward(self, h, hops):
        for layer, (own, others) in zip(self.layers, hops):
            h = layer(torch.cat([h[own], h[others].mean(1)], 1)).relu()
        return h


def sample(seeds, fan_outs=(3, 3)):
    """(ids of rows to fetch, for each hop from the outer one where its nodes and their neighbours are among them)."""
    nodes, hops = seeds, []
    for fan_out in fan_outs:
        drawn = neighbors[nodes.unsqueeze(1), torch.randint(5, (len(nodes), fan_out), device=device)]
        ids, places = torch.cat([nodes, drawn.flatten()]).unique(return_inverse=True)
        hops.append((places[: len(nodes)], places[len(nodes) :].view(-1, fan_out)))
        nodes = ids
    return nodes, hops[::-1]


def train(fetch):
    """The mean loss of all processes, step by step."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(Sage().to(device), device_ids=[device.index] if on_gpu else None)
    optimizer, losses = torch.optim.Adam(model.parameters(), 0.01), []
    for seeds in 3 * torch.arange(1024, device=device).split(256):
        ids, hops = sample(own := seeds[rank::world])
        loss = F.cross_entropy(model(fetch(ids), hops), classes[own])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / world)
        losses.append(mean)
    return torch.stack(losses)


table = ibp.distributed.share_table(ibp.compress(x) if rank == 0 else None)
degrees = neighbors.flatten().bincount(minlength=len(x))
cache = ibp.RowCache(table, 20_000, degrees, group=dist.group.WORLD, devices=device)
plain, cached = train(lambda ids: x[ids.cpu()].to(device)), train(cache.index_select)
assert on_gpu or torch.equal(plain, cached)
print(f"rank {rank}: losses {plain[0]:.4f} to {cached[-1]:.4f}, the same bits: {torch.equal(plain, cached)}; {cache}")
cache.refill([])  # nobody ends while others read its rows
time.sleep(0.3)  # gloo's threads let go of the last tensors, for which they need Python
dist.destroy_process_group()
