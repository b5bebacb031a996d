"""Trains GraphSAGE with PyTorch Geometric on plain features, then on compressed ones: the losses have the same bits.

The features are Cora's, the hot ones in 20,000 bytes of the device. The graph is not: it joins each row to the 5 most
like it, and the 7 classes are those of the rows most like the first 7. GPUs add in any order, so there features are
compared, not losses. NeighborLoader, which needs pyg-lib, does what NodeLoader and Neighbors do here: it draws 3
neighbours, and 3 of each of these.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.sampler import BaseSampler, SamplerOutput

import ibp.integrations.pyg

device = torch.device("cuda" if ibp.cuda_is_available() else "cpu")
csr = np.load(Path(__file__).resolve().parent.parent / "data" / "cora.npz")
x = torch.zeros(*csr["shape"])
x[np.repeat(np.arange(len(x)), np.diff(csr["indptr"])), csr["indices"]] = torch.from_numpy(csr["data"])
alike = F.normalize(x) @ F.normalize(x).T
neighbors, classes = alike.topk(6).indices[:, 1:].contiguous(), alike[:, :7].argmax(1)
edge_index = torch.stack([neighbors.reshape(-1), torch.arange(len(x)).repeat_interleave(5)])


class Neighbors(BaseSampler):
    edge_permutation = sample_from_edges = None  # what NodeLoader asks for besides

    def sample_from_nodes(self, inputs):
        first = 5 * inputs.node.repeat_interleave(3) + torch.randint(5, (3 * len(inputs.node),))
        second = 5 * edge_index[0, first].repeat_interleave(3) + torch.randint(5, (9 * len(inputs.node),))
        others = edge_index[0, edges := torch.cat([first, second])].unique()
        nodes = torch.cat([inputs.node, others[~torch.isin(others, inputs.node)]])
        places = torch.zeros(len(x), dtype=torch.int64).scatter_(0, nodes, torch.arange(len(nodes)))
        return SamplerOutput(nodes, *places[edge_index[:, edges]], edges, None, metadata=(inputs.input_id, None))


def train(data, transform=None):
    torch.manual_seed(0)
    model, losses = GraphSAGE(x.shape[1], 32, 2, 7).to(device), []
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for batch in 3 * list(NodeLoader(data, Neighbors(), torch.arange(1024), transform=transform, batch_size=256)):
        batch = batch.to(device)
        assert torch.equal(batch.x.cpu(), x[batch.n_id.cpu()])
        loss = F.cross_entropy(model(batch.x, batch.edge_index)[:256], batch.y[:256])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


plain = train(data := Data(x=x, y=classes, edge_index=edge_index))
fetch = ibp.integrations.pyg.attach(data, "x", device=device, cache_bytes=20_000)  # a script needs this, and transform=
compressed, hits = train(data, fetch), fetch.nodes["x"].stats().hit_rate
assert device.type == "cuda" or torch.equal(plain, compressed)
same = f"the same bits: {torch.equal(plain, compressed)}; features: the same, {hits:.0%} of their rows from the cache"
print(f"losses {plain[0]:.4f} to {plain[-1]:.4f}, {same}")
