"""Trains GraphSAGE with DGL on plain features, then on compressed ones: the losses have the same bits.

The features are Cora's. The graph is not: it joins each row to the 5 most like it, and the 7 classes are those of the
rows most like the first 7. On the CPU one thread adds: several add in any order, as GPUs do, so that on a GPU only
features are compared, not losses. PyPI's DGL is not built for GPUs.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import ibp.integrations.dgl  # before DGL, which it leaves GraphBolt out of where that has no binary

import dgl  # isort: skip

torch.set_num_threads(1)
try:
    device = dgl.graph(([0], [0])).to("cuda" if ibp.cuda_is_available() else "cpu").device
except dgl.DGLError:  # not built for GPUs
    device = torch.device("cpu")
csr = np.load(Path(__file__).resolve().parent.parent / "data" / "cora.npz")
x = torch.zeros(*csr["shape"])
x[np.repeat(np.arange(len(x)), np.diff(csr["indptr"])), csr["indices"]] = torch.from_numpy(csr["data"])
alike = F.normalize(x) @ F.normalize(x).T
neighbors, classes = alike.topk(6).indices[:, 1:], alike[:, :7].argmax(1).to(device)
g = dgl.graph((neighbors.reshape(-1), torch.arange(len(x)).repeat_interleave(5)), num_nodes=len(x))
g.ndata["feat"] = x


def train():
    torch.manual_seed(0)
    dgl.seed(0)
    layers = torch.nn.ModuleList([dgl.nn.SAGEConv(x.shape[1], 32, "mean"), dgl.nn.SAGEConv(32, 7, "mean")]).to(device)
    optimizer, losses = torch.optim.Adam(layers.parameters(), 0.01), []
    sampler = dgl.dataloading.NeighborSampler([5, 3], prefetch_node_feats=["feat"])
    loader = dgl.dataloading.DataLoader(g, torch.arange(1024), sampler, device=device, batch_size=256)
    for _ in range(3):
        for nodes, seeds, blocks in loader:
            features = blocks[0].srcdata["feat"]
            assert torch.equal(features.cpu(), x[nodes.cpu()])
            loss = F.cross_entropy(layers[1](blocks[1], layers[0](blocks[0], features).relu()), classes[seeds])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses)


plain = train()
ibp.integrations.dgl.attach(g, "feat")  # what a script needs
compressed = train()
assert device.type == "cuda" or torch.equal(plain, compressed)
print(f"losses {plain[0]:.4f} to {plain[-1]:.4f}, the same bits: {torch.equal(plain, compressed)}; features: the same")
