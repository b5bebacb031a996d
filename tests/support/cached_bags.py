"""A stand-in for the file of ColossalAI that has CachedEmbeddingBag: the names that examples/cached_embedding_bag.py
and benchmarks/dlrm.py meet, and no more behaviour than test_colossalai.py needs. If ColossalAI is installed, the same
tests run with its own class.
"""

import math
from pathlib import Path

import torch
from torch.nn import functional

RELEASE = "0.0"


def install(directory):
    """Writes a package of this name and release that can be imported in no other way than by the file of the class."""
    folder = directory.joinpath("colossalai", "legacy", "nn", "parallel", "layers", "cache_embedding")
    folder.mkdir(parents=True)
    for path in (directory / "colossalai", folder):
        (path / "__init__.py").write_text("raise ImportError('what training large models takes')")
    (folder / "cached_embedding.py").write_text(Path(__file__).read_text())
    about = directory / f"colossalai-{RELEASE}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: colossalai\nVersion: {RELEASE}\n")


class Manager:
    """Keeps rows in slots. The rows of the first slots that a batch does not need make room for others."""

    def __init__(self, weight, num_slots, buffer_size):
        self.weight, self.buffer_size = weight, buffer_size
        self.num_hits_history, self.num_miss_history = [], []
        self._cache_miss = self._total_cache = 0
        device = torch.cuda.current_device()
        self.cuda_cached_weight = torch.nn.Parameter(
            torch.zeros(num_slots, weight.shape[1], dtype=weight.dtype, device=device)
        )
        self.rows_of_slots = torch.full((num_slots,), -1, device=device)

    @torch.no_grad()
    def bring(self, rows, slots):
        weight = self.weight.view(self.weight.shape[0], -1)
        for part, places in zip(*(x.split(self.buffer_size or max(1, len(rows))) for x in (rows, slots)), strict=True):
            if self.buffer_size:
                found = weight.index_select(0, part.to(weight.device)).to(slots.device)
            else:
                found = weight.index_select(0, part.cpu()).pin_memory().cuda()
            self.cuda_cached_weight.index_copy_(0, places, found)
        self.rows_of_slots[slots] = rows

    @torch.no_grad()
    def drop(self, slots):
        slots = slots[self.rows_of_slots[slots] >= 0]
        dropped = self.cuda_cached_weight.index_select(0, slots)
        dropped = dropped.to(self.weight.device) if self.buffer_size else dropped.cpu()
        weight = self.weight.view(self.weight.shape[0], -1)
        weight.index_copy_(0, self.rows_of_slots[slots].cpu(), dropped)
        self.rows_of_slots[slots] = -1

    def flush(self):
        self.drop(torch.arange(len(self.rows_of_slots), device=self.rows_of_slots.device))

    def prepare_ids(self, ids):
        rows, places, counts = ids.unique(return_inverse=True, return_counts=True)
        assert len(rows) <= len(self.rows_of_slots)
        is_missed = torch.isin(rows, self.rows_of_slots, invert=True)
        missed = rows[is_missed]
        slots = torch.isin(self.rows_of_slots, rows, invert=True).nonzero()[: len(missed), 0]
        self.drop(slots)
        self.bring(missed, slots)
        self.num_hits_history.append(len(rows) - len(missed))
        self.num_miss_history.append(len(missed))
        self._cache_miss += counts[is_missed].sum()
        self._total_cache += ids.numel()
        held, order = self.rows_of_slots.sort()
        return order[torch.searchsorted(held, rows)][places]


class CachedEmbeddingBag(torch.nn.Module):
    def __init__(
        self,
        num_embeddings,
        embedding_dim,
        *,
        _weight,
        mode,
        cache_ratio=0.01,
        ids_freq_mapping=None,
        warmup_ratio=0.7,
        buffer_size=0,
    ):
        super().__init__()
        self.mode = mode
        self.cache_weight_mgr = Manager(_weight, int(num_embeddings * cache_ratio), buffer_size)
        slots = torch.arange(math.ceil(warmup_ratio * int(num_embeddings * cache_ratio)))
        rows = slots if ids_freq_mapping is None else ids_freq_mapping.topk(len(slots)).indices
        self.cache_weight_mgr.bring(rows.cuda(), slots.cuda())

    def forward(self, ids, offsets):
        places = self.cache_weight_mgr.prepare_ids(ids)
        return functional.embedding_bag(places, self.cache_weight_mgr.cuda_cached_weight, offsets, mode=self.mode)

    def parameters(self, recurse=True):
        yield self.cache_weight_mgr.cuda_cached_weight

    @property
    def num_hits_history(self):
        return self.cache_weight_mgr.num_hits_history

    @property
    def num_miss_history(self):
        return self.cache_weight_mgr.num_miss_history
