"""Models that several test files make, and the training that they compare."""

import torch
from torch import nn

from helpers import embedding

WIDTH = 48
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [63, 0, 5, 8, 9, 7, 9, 3]])


class Block(nn.Module):
    def __init__(self, dtype=torch.float32, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, 2 * width, dtype=dtype)
        self.down = nn.Linear(2 * width, width, dtype=dtype)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    """A small decoder: an embedding, blocks whose order can be changed, and a head."""

    def __init__(self, num_blocks=5, dtype=torch.float32, tie=False, seed=0):
        super().__init__()
        self.embed = nn.Embedding(64, WIDTH, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 64, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.register_buffer("shift", torch.zeros(WIDTH, dtype=dtype))
        for number, parameter in enumerate(self.parameters()):
            shape = parameter.shape if parameter.dim() > 1 else (1, parameter.numel())
            parameter.data = embedding(*shape, dtype=dtype, seed=100 * seed + number).reshape(parameter.shape)
        if tie:
            self.head.weight = self.embed.weight
        self.order = list(range(num_blocks))
        self.eval()

    def forward(self, ids):
        x = self.embed(ids) * self.scale + self.shift
        for number in self.order:
            x = self.blocks[number](x)
        return self.head(x)


class Noted(nn.Module):
    """A layer that records the bits of its weight, on the device, each time it is called."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.seen = []

    def bits(self):
        data = self.weight.data.view(torch.uint8).reshape(-1).to(torch.int64)
        return data.sum(), (data * torch.arange(len(data), device=data.device)).sum()

    def forward(self, x):
        self.seen.append(self.bits())
        return (x @ self.weight.to(x.dtype).t())[..., : x.shape[-1]] * 0.1


class Wide(nn.Module):
    """A model whose layers have weights that take several chunks of a ring."""

    def __init__(self, dtype=torch.bfloat16, num_layers=5, width=2048):
        super().__init__()
        self.embed = nn.Embedding(1000, width, dtype=torch.bfloat16)
        scale = 20 if dtype == torch.int8 else 0.02
        self.layers = nn.ModuleList(
            Noted((embedding(width * (1 + number % 3), width, seed=number) * 50 * scale).to(dtype))
            for number in range(num_layers)
        )
        self.wanted = [layer.bits() for layer in self.layers]
        self.eval()

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return x

    def forget(self):
        for layer in self.layers:
            layer.seen.clear()

    def check(self, num_passes):
        """Asserts that there were num_passes passes since the last check, and that each saw the original weights."""
        for layer, wanted in zip(self.layers, self.wanted):
            assert [tuple(map(int, bits)) for bits in layer.seen] == [tuple(map(int, wanted))] * num_passes
        self.forget()


def losses_of(model, ids, steps):
    """Returns the loss of each step of AdamW. model: a language model of transformers; its parameters that require grad
    are trained."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
