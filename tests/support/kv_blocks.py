"""Applies the same changes to the compressed tokens of a KV-cache and to raw tensors."""

import torch

from helpers import assert_same_bits
from ibp.kv import TokenCoder

HEADS, BLOCK = 2, 4
CPU = torch.device("cpu")


def tokens(count, batch, dtype=torch.bfloat16, device=CPU, scale=0.02, dims=(8, 16)):
    return [(torch.randn(batch, HEADS, count, dim) * scale).to(device, dtype) for dim in dims]


class Raw:
    """A history, and the raw tensors that it should hold."""

    def __init__(self, device=CPU, dtype=torch.bfloat16, **changed):
        self.coder, self.dtype, self.device = TokenCoder(block=BLOCK, window=0, **changed), dtype, device
        self.history = self.coder.history(*tokens(1, 1, dtype, device))
        self.right, self.batch = [], 3

    def add(self, num_blocks, scale=0.02, sequences=None):
        """Encodes and adds blocks. sequences: the sequences to take between encoding and storing; None: all as they
        are."""
        new = tokens(num_blocks * BLOCK, self.batch, self.dtype, self.device, scale)
        pending = self.history.encode(*new)
        if sequences is not None:
            pending.take(sequences)
            self.take(sequences)
            new = [x[sequences] for x in new]
        self.history.store(pending)
        self.right = [torch.cat(pair, dim=2) for pair in zip(self.right, new)] if self.right else new

    def take(self, sequences):
        self.history.take(sequences)
        self.right = [x[sequences] for x in self.right]
        self.batch = len(sequences)

    def truncate(self, num_blocks):
        self.history.truncate(num_blocks)
        self.right = [x[:, :, : num_blocks * BLOCK] for x in self.right]

    def check(self, first=0, last=None):
        """Asserts that blocks first to last - 1 have the right bits. The results have room for three more tokens."""
        blocks = range(first, self.history.num_blocks if last is None else last)
        count = len(blocks) * BLOCK
        got = self.history.fetch(count + 3, blocks).wait()
        for tensor, right in zip(got, self.right):
            assert_same_bits(tensor[:, :, :count].cpu(), right[:, :, first * BLOCK :][:, :, :count].cpu())


def any_changes(raw, seed, steps):
    generator = torch.Generator().manual_seed(seed)

    def number(end):
        return int(torch.randint(end, (1,), generator=generator))

    for step in range(steps):
        kind = number(6) if step else 0
        if kind <= 2:
            sequences = torch.randint(raw.batch, (raw.batch,), generator=generator).to(raw.device)
            raw.add(1 + number(5), 10.0 ** number(6), sequences if kind == 2 else None)
        elif raw.history.num_blocks:
            if kind <= 4:
                raw.take(torch.randint(raw.batch, (1 + number(5),), generator=generator).to(raw.device))
            else:
                raw.truncate(number(raw.history.num_blocks + 1))
                raw.right = raw.right if raw.history.num_blocks else []
        if raw.history.num_blocks:
            raw.check()
            first = number(raw.history.num_blocks)
            raw.check(first, first + 1 + number(raw.history.num_blocks - first))
