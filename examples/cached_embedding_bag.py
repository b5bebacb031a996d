"""Puts a compressed table into ColossalAI's CachedEmbeddingBag, whose cache on the GPU then fetches coded rows.

    pip install --no-deps colossalai contexttimer
    python examples/cached_embedding_bag.py

`Rows` is the whole adaptation (section 6.3 of the paper on Invariant Bit Packing). If the class has a `buffer_size`, it
asks its weight for rows that the cache lacks by `index_select`, and gives rows that the cache drops to `index_copy_`.
The program looks up the same ids in plain and in compressed rows, and compares all bits. The class is made for GPUs;
without a GPU, the program has it use the CPU. It was written for colossalai 0.5.0.
"""

import contextlib
import importlib.metadata
import importlib.util
import sys
import types
from pathlib import Path
from unittest import mock

import torch

import ibp


class Rows:
    """What CachedEmbeddingBag asks of its weight, by a table of [N, D]. device: where the cache is. trainable: whether
    rows change in the cache; if they do not, none is written back."""

    def __init__(self, table, device, *, trainable):
        self.table, self.device = table, torch.device(device)
        self.trainable = trainable
        self.shape, self.dtype = table.shape, table.dtype
        self.dim, self.element_size = table.dim, table.element_size

    def view(self, *shape):
        return self

    def index_select(self, dim, ids):
        return ibp.index_select(self.table, ids, device=self.device)

    def index_copy_(self, dim, ids, rows):
        if self.trainable:
            self.table.update_(ids, rows)


def released():
    """Returns (ColossalAI's class, its release). Imports only the files of the class, because the whole package imports
    what the training of large models needs. Raises ImportError if the class cannot be imported."""
    needed = "ColossalAI's CachedEmbeddingBag cannot be imported; wanted pip install --no-deps colossalai contexttimer"
    found = importlib.util.find_spec("colossalai")
    if found is None:
        raise ImportError(needed)
    package = types.ModuleType("colossalai_cache_embedding")
    root = Path(found.submodule_search_locations[0])
    package.__path__ = [str(root.joinpath("legacy", "nn", "parallel", "layers", "cache_embedding"))]
    sys.modules[package.__name__] = package
    try:
        module = importlib.import_module(f"{package.__name__}.cached_embedding")
        return module.CachedEmbeddingBag, importlib.metadata.version("colossalai")
    except ImportError as error:
        raise ImportError(f"{needed} ({error})") from error


def calls_for(device):
    """Returns a context in which the class runs on the device: on the CPU, torch's calls for GPUs serve the CPU."""
    context = contextlib.ExitStack()
    if torch.device(device).type == "cpu":
        context.enter_context(mock.patch.multiple(torch.cuda, current_device=lambda: "cpu", synchronize=lambda: None))
        context.enter_context(mock.patch.multiple(torch.Tensor, cuda=lambda x: x, pin_memory=lambda x: x))
    return context


def main():
    try:
        make, release = released()
    except ImportError as error:
        sys.exit(str(error))
    device = "cuda" if ibp.cuda_is_available() else "cpu"
    weight = torch.randn(20_000, 128)  # FP32 rows of 512 bytes, as in the paper
    table = ibp.compress(weight)
    options = {"mode": "sum", "cache_ratio": 0.05, "buffer_size": 1000}
    with calls_for(device):
        plain = make(*weight.shape, _weight=weight, **options)
        coded = make(*table.shape, _weight=Rows(table, device, trainable=False), **options)
        for _ in range(20):
            ids = (len(weight) * torch.rand(640, device=device) ** 8).long()
            offsets = torch.arange(0, len(ids), 10, device=device)
            assert torch.equal(plain(ids, offsets), coded(ids, offsets))
    found, missed = sum(coded.num_hits_history), sum(coded.num_miss_history)
    print(f"colossalai {release}: {found:,} rows found, {missed:,} fetched, {table.savings:.1%} smaller; the same bits")


if __name__ == "__main__":
    main()
