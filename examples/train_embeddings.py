"""Trains the embeddings of a recommender with torch's modules, then compressed: on the CPU with the same bits.

The rows are those of a network that was trained on MovieLens (users and items, FP32), and go on training here: an MLP
learns from pairs of them whether the rows that they were first point the same way. Rows of one width are one compressed
table, in pinned host memory where there is a GPU. Each step reads and writes the rows of its batch and no others.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import ibp

device = torch.device("cuda" if ibp.cuda_is_available() else "cpu")
arrays = np.load(Path(__file__).resolve().parent.parent / "data" / "ncf_mlp.npz")
weights = {name: torch.from_numpy(arrays[f"mlp_{name}"]) for name in ("user", "item")}


class Torchs(torch.nn.Module):
    """What ibp.nn.EmbeddingCollection does, by torch's modules."""

    def __init__(self):
        super().__init__()
        bag = torch.nn.EmbeddingBag.from_pretrained
        self.bags = torch.nn.ModuleDict({n: bag(w.clone(), freeze=False, mode="sum") for n, w in weights.items()})
        self.bags.to(device)

    def forward(self, features):
        return {name: self.bags[name](ids) for name, ids in features.items()}


def train(embeddings, optimizer, num_steps=60):
    generator = torch.manual_seed(0)
    mlp = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    dense, losses = torch.optim.Adam(mlp.parameters(), 0.01), []
    for _ in range(num_steps):
        ids = {name: torch.randint(len(w), (512, 1), generator=generator) for name, w in weights.items()}
        alike = (weights["user"][ids["user"][:, 0]] * weights["item"][ids["item"][:, 0]]).sum(1) > 0
        rows = embeddings({name: own.to(device) for name, own in ids.items()})
        guess = mlp(torch.cat([rows["user"], rows["item"]], 1))[:, 0]
        loss = F.binary_cross_entropy_with_logits(guess, alike.float().to(device))
        for one in (optimizer, dense):
            one.zero_grad()
        loss.backward()
        for one in (optimizer, dense):
            one.step()
        losses.append(loss.detach())
    return torch.stack(losses)


torchs, compressed = Torchs(), ibp.nn.EmbeddingCollection(weights, trainable=True)
plain = train(torchs, torch.optim.Adagrad(torchs.parameters(), 0.02))
same = train(compressed, ibp.optim.Adagrad(compressed, 0.02))
assert device.type == "cuda" or torch.equal(plain, same)
dense = {f"bags.{name}.weight": compressed.weight(name) for name in weights}
assert device.type == "cuda" or all(torch.equal(dense[name], held) for name, held in torchs.state_dict().items())
print(f"losses {plain[0]:.4f} to {plain[-1]:.4f}, the same bits: {torch.equal(plain, same)}")
