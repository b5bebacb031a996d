"""The sets whose savings are measured: synthetic tables, fields of simulations that run here, and the real sets of a
data directory, in all their dtypes."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from . import inputs

COLUMNS = 1024
ROWS, QUICK_ROWS = 4096, 256
FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Set:
    """One table, or several that belong together and are compressed separately. They are 2-D CPU tensors with the same
    dtype and row size."""

    name: str
    tensors: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors[0].dtype

    @property
    def rows(self) -> int:
        return sum(len(x) for x in self.tensors)

    @property
    def row_bytes(self) -> int:
        return self.tensors[0].shape[1] * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.rows * self.row_bytes


# ---- synthetic -----------------------------------------------------------------------------------------------------


def _normal(rows, generator, dtype=FP32):
    return torch.randn(rows, COLUMNS, generator=generator, dtype=dtype)


def _normal_as(rows, generator, dtype):
    """Returns normal values, drawn in single precision or better and then rounded."""
    return _normal(rows, generator, dtype if dtype == FP64 else FP32).to(dtype)


def _half_zeros(rows, generator, dtype):
    x = _normal(rows, generator, dtype if dtype == FP64 else FP32)
    return x.masked_fill_(torch.rand(x.shape, generator=generator) < 0.5, 0).to(dtype)


def _quantised(rows, generator, dtype):
    """Returns normal weights as integers. The row's largest magnitude becomes that of the dtype; unsigned integers have
    zero in the middle."""
    x, most = _normal(rows, generator), (1 << 8 * dtype.itemsize - 1) - 1
    x = (x / x.abs().amax(1, keepdim=True) * most).round()
    return (x if dtype.is_signed else x + most + 1).to(dtype)


def _dropout(rows, generator, dtype):
    """Returns normal values. Half of them are multiplied by 0, which gives zeros of both signs."""
    x = _normal(rows, generator)
    return (x * (torch.rand(x.shape, generator=generator) < 0.5)).to(dtype)


def _holding(held):
    """Returns a maker of normal values that a narrower dtype can hold."""
    return lambda rows, generator, dtype: _normal(rows, generator).to(held).to(dtype)


def _default_rows(rows, generator, dtype):
    """Returns normal values in which each row is zero with probability one half, like an embedding that training has
    not touched yet."""
    x = _normal(rows, generator)
    return x.masked_fill_(torch.rand((rows, 1), generator=generator) < 0.5, 0).to(dtype)


def _constant_columns(rows, generator, dtype):
    """Returns normal values in which every fourth column has one value."""
    x = _normal(rows, generator)
    x[:, ::4] = x[0, ::4]
    return x.to(dtype)


# Each set has (name, dtypes, function(rows, generator, dtype) that makes the rows).
SYNTHETIC = (
    ("normal 0.02", (BF16, FP16), lambda rows, g, dtype: (0.02 * _normal(rows, g)).to(dtype)),
    ("normal 1", (FP16, BF16, FP32, FP64), _normal_as),
    ("half zeros", (FP16, BF16, FP32, FP64), _half_zeros),
    ("clipped normal", (FP32, FP16, BF16), lambda rows, g, dtype: _normal(rows, g).clamp_(min=0).to(dtype)),
    ("ids below 2^20", (torch.int64,), lambda rows, g, dtype: torch.randint(1 << 20, (rows, COLUMNS), generator=g)),
    ("counts", (torch.int32,), lambda rows, g, dtype: (1 / (1 - torch.rand(rows, COLUMNS, generator=g))).to(dtype)),
    ("FP8 normal 1", (torch.float8_e4m3fn, torch.float8_e5m2), _holding(FP32)),
    ("dropout", (BF16, FP16, FP32), _dropout),
    ("holding BF16", (FP32, FP16), _holding(BF16)),
    ("holding FP16", (FP32,), _holding(FP16)),
    ("default rows", (BF16,), _default_rows),
    ("constant columns", (BF16, FP32), _constant_columns),
    ("quantised weights", (torch.int8, torch.uint8, torch.int16), _quantised),
    (
        "random bytes",
        (torch.uint8,),
        lambda rows, g, dtype: torch.randint(256, (rows, COLUMNS), generator=g, dtype=dtype),
    ),
)


def synthetic_sets(rows: int) -> Iterator[Set]:
    """Yields the synthetic sets. They are seeded, and the same on every device."""
    for name, dtypes, make in SYNTHETIC:
        for dtype in dtypes:
            yield Set(name, (make(rows, torch.Generator().manual_seed(0), dtype),))


# ---- simulations in double precision ---------------------------------------------------------------------------------

STEPS, TIME_STEP = 60, 0.4  # The shallow water takes this many steps of this size.
# The particles begin at 4 places in each cell of a cube. There are STEPS_APART steps between snapshots.
SIDE_CELLS, LATTICE, STEPS_APART = 5, 1.7, 2
MD_TIME_STEP, CUT_OFF = 0.004, 2.5


def shallow_water(rows):
    """Returns height and both velocities of waves on a periodic grid of COLUMNS, which begin as seeded drops: [rows,
    COLUMNS]."""
    generator, lines = torch.Generator().manual_seed(0), -(-rows // 3)
    down, across = (torch.arange(n, dtype=FP64).view(shape) for n, shape in ((lines, (-1, 1)), (COLUMNS, (1, -1))))
    height, u, v = torch.ones(lines, COLUMNS, dtype=FP64), *torch.zeros(2, lines, COLUMNS, dtype=FP64)
    for a, b, size in torch.rand(12, 3, generator=generator, dtype=FP64).tolist():
        distance = (down - a * lines) ** 2 + (across - b * COLUMNS) ** 2
        height += 0.1 * torch.exp(-distance / (60 + 240 * size) ** 2)

    def slope(x, axis):
        return (x.roll(-1, axis) - x.roll(1, axis)) / 2

    for _ in range(STEPS):
        u -= TIME_STEP * slope(height, 1)
        v -= TIME_STEP * slope(height, 0)
        height -= TIME_STEP * (slope(height * u, 1) + slope(height * v, 0))
    return torch.cat([height, u, v])[:rows].contiguous()


def lennard_jones(rows):
    """Returns positions and velocities of the particles of a liquid in a periodic cube, one snapshot after the other:
    [rows, COLUMNS]."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.cartesian_prod(*3 * [torch.arange(SIDE_CELLS, dtype=FP64)])
    corners = torch.tensor([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]], dtype=FP64)
    x, side = LATTICE * (cells[:, None] + corners).view(-1, 3), LATTICE * SIDE_CELLS
    velocity = torch.randn(x.shape, generator=generator, dtype=FP64)
    velocity -= velocity.mean(0)

    def forces():
        apart = x[:, None] - x
        apart -= side * (apart / side).round()
        square = apart.square().sum(2).fill_diagonal_(float("inf"))
        sixth = torch.where(square < CUT_OFF**2, 1 / square**3, 0.0)
        return ((48 * sixth**2 - 24 * sixth) / square).unsqueeze(2).mul(apart).sum(1)

    force, snapshots, wanted = forces(), [], rows * COLUMNS
    while sum(map(torch.Tensor.numel, snapshots)) < wanted:
        for _ in range(STEPS_APART):
            velocity += MD_TIME_STEP / 2 * force
            x = (x + MD_TIME_STEP * velocity) % side
            force = forces()
            velocity += MD_TIME_STEP / 2 * force
        snapshots += [x, velocity.clone()]
    return torch.cat(snapshots).view(-1)[:wanted].view(rows, COLUMNS)


REPEATED_ROWS = 512
# The last: how many times fewer rows.
SIMULATIONS = (("shallow water", shallow_water, 1), ("Lennard-Jones", lennard_jones, 4))


def simulated_sets(rows: int) -> Iterator[Set]:
    """Yields fields in FP64. They are the same on every machine except for the last bits of sums."""
    for name, make, fewer in SIMULATIONS:
        yield Set(name, (make(rows // fewer),))


def repeated_simulations(num_bytes: int, device: torch.device, quick: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (name, num_bytes of rows on a device) of shorter simulations, which are repeated, for measuring rates."""
    for case in simulated_sets(QUICK_ROWS if quick else REPEATED_ROWS):
        yield case.name, inputs.replicated(case.tensors[0], num_bytes // case.row_bytes, device)


# ---- real ----------------------------------------------------------------------------------------------------------

# The matrices with rows of 64 of the model in stories260k.npz, in the order in which `weights_bf16` has them.
MATRICES = (("emb", 1, 512), ("wq", 5, 64), ("wk", 5, 32), ("wv", 5, 32), ("wo", 5, 64), ("w1", 5, 172), ("w3", 5, 172))


def _csr(z):
    x = np.zeros(z["shape"], np.float32)
    x[np.repeat(np.arange(len(x)), np.diff(z["indptr"])), z["indices"]] = z["data"]
    return (torch.from_numpy(x),)


def _array(name):
    return lambda z: (torch.from_numpy(z[name]),) if name in z else ()


def _weights(z):
    if "weights_bf16" in z:
        return (torch.from_numpy(z["weights_bf16"]).view(BF16),)
    return (torch.from_numpy(np.concatenate([z[name].reshape(-1, 64) for name, _, _ in MATRICES])),)


def _matrices(z):
    """Returns every matrix of every layer."""
    return _weights(z)[0].split([rows for _, layers, rows in MATRICES for _ in range(layers)])


def _cache(name):
    """Returns a loader of keys or values. A row is what one token leaves in all layers of the cache."""

    def load(z):
        if f"{name}_bf16" in z:
            return (torch.from_numpy(z[f"{name}_bf16"]).view(BF16),)
        return (torch.from_numpy(np.concatenate(list(z[name]), axis=1)),)

    return load


# Name, files (the first that exists is taken), dtypes, and a loader, which returns () if the file does not have the
# set.
REAL = (
    ("citeseer", ("citeseer.npz",), (FP32,), _csr),
    ("cora", ("cora.npz",), (FP32,), _csr),
    ("amazon_photo", ("amazon_photo.npz",), (FP32,), _csr),
    ("pubmed_1060rows", ("pubmed_1060rows.npz",), (FP32, FP16, BF16), _csr),
    *(
        (f"ncf {name}", ("ncf_ml1m.npz", "ncf_mlp.npz"), (FP32,), _array(name))
        for name in ("mlp_user", "mlp_item", "gmf_user", "gmf_item")
    ),
    ("kokoro", ("kokoro_voices.npz",), (FP32, FP16, BF16), _array("x")),
    ("word2vec", ("word2vec_1000x300.npz",), (FP32, FP16, BF16), _array("x")),
    ("stories260k", ("stories260k.npz",), (FP32, FP16, BF16), _weights),
    ("stories260k, codebook a tensor", ("stories260k.npz",), (FP32, FP16, BF16), _matrices),
    ("K-cache", ("kv_stories260k.npz",), (FP16, BF16), _cache("k")),
    ("V-cache", ("kv_stories260k.npz",), (FP16, BF16), _cache("v")),
)


def real_sets(data_dir: Path) -> Iterator[Set]:
    """Yields every set that the directory has, rounded to each of its dtypes. Sets that are stored as BF16 have only
    this dtype. Prints the names of missing sets."""
    for name, files, dtypes, load in REAL:
        path = next((path for file in files if (path := Path(data_dir) / file).exists()), None)
        tensors = ()
        if path:
            with np.load(path) as z:
                tensors = load(z)
        if not tensors:
            print(f"{name}: not in {data_dir}, left out", flush=True)
            continue
        for dtype in dtypes if tensors[0].dtype == FP32 else (BF16,):
            yield Set(name, tuple(x.to(dtype) for x in tensors))


def all_sets(data_dir: Path, quick: bool) -> Iterator[Set]:
    """Yields all sets; with `quick`, few rows of each."""
    yield from synthetic_sets(QUICK_ROWS if quick else ROWS)
    yield from shortened(real_sets(data_dir)) if quick else real_sets(data_dir)


def shortened(found: Iterable[Set]) -> Iterator[Set]:
    """Yields the first rows of each set."""
    for case in found:
        yield Set(case.name, tuple(x[:QUICK_ROWS] for x in case.tensors))
