"""The inputs of the benchmarks: synthetic tables with chosen savings, normal values, and the real sets of data/."""

import math
from pathlib import Path

import numpy as np
import torch

MIB = 1 << 20
CHUNK_BYTES = 4
ROW_BYTES = (128, 256, 512, 1024, 2048, 4096, 65536)
SAVINGS = (0.125, 0.25, 0.5, 0.75, 0.9)
QUICK_ROW_BYTES = (128, 1024, 16384)
QUICK_SAVINGS = (0.5, 0.9)
DATA_DIR = Path(__file__).resolve().parent.parent / "data"


# ---- synthetic -----------------------------------------------------------------------------------------------------


def synthetic_mask(row_bytes, savings, seed=0):
    """Returns mask and bitval (uint8, row_bytes each) with which every row that agrees with them saves `savings`, as in
    the paper's figure 7. Fixed bits have random positions and values. There is one more of them for each chunk, to pay
    for its participation bit."""
    num_bits = 8 * row_bytes
    num_fixed = round(savings * num_bits) + row_bytes // CHUNK_BYTES
    if row_bytes % CHUNK_BYTES or not row_bytes // CHUNK_BYTES <= num_fixed <= num_bits:
        raise ValueError(
            f"no mask for rows of {row_bytes} bytes and savings of {savings}: wanted a multiple of {CHUNK_BYTES} "
            f"bytes and savings from 0 to {1 - 1 / (8 * CHUNK_BYTES)}"
        )
    generator = torch.Generator().manual_seed(seed)
    bits = torch.zeros(num_bits, dtype=torch.uint8)
    bits[torch.randperm(num_bits, generator=generator)[:num_fixed]] = 1
    weights = 2 ** torch.arange(8)
    mask = (bits.view(row_bytes, 8) * weights).sum(1).to(torch.uint8)
    bitval = torch.randint(0, 256, (row_bytes,), dtype=torch.uint8, generator=generator) & mask
    return mask, bitval


def agreeing_rows(num_rows, mask, bitval, device):
    """Returns random int32 rows that agree with a mask and bitval in every chunk."""
    mask, bitval = (t.to(device).view(torch.int32) for t in (mask, bitval))
    x = torch.randint(-(1 << 31), (1 << 31) - 1, (num_rows, mask.numel()), dtype=torch.int32, device=device)
    return x.bitwise_and_(~mask).bitwise_or_(bitval)


NORMAL = (("normal 0.02", torch.bfloat16, 0.02), ("normal 0.02", torch.float16, 0.02), ("normal 1", torch.float32, 1.0))


def normal_rows(num_bytes, dtype, deviation, device, columns=1024):
    """Returns about num_bytes of N(0, deviation) in rows of `columns` values."""
    num_rows = max(1, num_bytes // (columns * dtype.itemsize))
    return (torch.randn(num_rows, columns, device=device) * deviation).to(dtype)


ZIPF_EXPONENT = 1.05  # In click logs the frequency of an id falls with its rank by about this exponent.
SCATTER = 2_654_435_761  # This is a prime, which spreads frequent ids over a table.


def zipf_ranks(num_ids, num_rows, device):
    """Returns int64 [num_ids] in [0, num_rows); 0 is the most frequent. Rank r has a probability proportional to (r +
    1)^-ZIPF_EXPONENT. The inverse of the continuous distribution is used."""
    u = torch.rand(num_ids, dtype=torch.float64, device=device)
    power = 1 - ZIPF_EXPONENT
    ranks = ((num_rows + 1) ** power - 1) * u + 1
    return ranks.pow_(1 / power).long().sub_(1).clamp_(0, num_rows - 1)


def scattered(ranks, num_rows):
    """Returns the row of a table that has each rank: int64, a permutation of [0, num_rows)."""
    return ranks * SCATTER % num_rows


# ---- real sets -----------------------------------------------------------------------------------------------------


def _csr(z):
    x = np.zeros(z["shape"], np.float32)
    x[np.repeat(np.arange(len(x)), np.diff(z["indptr"])), z["indices"]] = z["data"]
    return torch.from_numpy(x)


def _float32(name):
    return lambda z: torch.from_numpy(z[name])


def _bfloat16(name):
    return lambda z: torch.from_numpy(z[name]).view(torch.bfloat16)


# Each set has (name, file, loader). data/README.md describes the sets.
REAL_SETS = (
    ("cora", "cora.npz", _csr),
    ("citeseer", "citeseer.npz", _csr),
    ("pubmed", "pubmed_1060rows.npz", _csr),
    ("embedding", "ncf_mlp.npz", _float32("mlp_user")),
    ("LLM weights", "stories260k.npz", _bfloat16("weights_bf16")),
    ("LLM keys", "kv_stories260k.npz", _bfloat16("k_bf16")),
    ("LLM values", "kv_stories260k.npz", _bfloat16("v_bf16")),
)


def real_sets(data_dir):
    """Yields (name, 2-D CPU tensor) for every set whose file exists. Prints the names of the others."""
    for name, file, load in REAL_SETS:
        path = Path(data_dir) / file
        if not path.exists():
            print(f"{name}: no {path}, left out", flush=True)
            continue
        with np.load(path) as z:
            yield name, load(z)


def replicated(x, num_rows, device):
    """Returns x's rows, repeated until there are num_rows of them, on `device`."""
    return x.to(device).repeat(math.ceil(num_rows / len(x)), 1)[:num_rows].contiguous()
