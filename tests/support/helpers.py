"""Helpers that several test files share: tensors to compress, and comparison by bits."""

import dataclasses
import itertools
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import ibp
import reference
import reference_planes
from ibp._machine import calibration
from native import ROOT

SCHEMES = ["ibp", "planes", "auto"]
TENSORS = ("slots", "overflow", "lengths", "bases")
LAYOUTS = ["slots", "slots of 32", "in place", "packed"]

FLOAT8_DTYPES = [getattr(torch, name) for name in sorted(dir(torch)) if name.startswith("float8_")]
DTYPES = FLOAT8_DTYPES + [
    torch.bool,
    torch.int8,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.uint16,
    torch.float32,
    torch.int32,
    torch.uint32,
    torch.complex32,
    torch.float64,
    torch.int64,
    torch.uint64,
    torch.complex64,
]


def pairwise(*columns):
    """Returns few combinations of values, one of each column, in which every value meets every value of every other
    column.

    Use it in parametrize instead of the product if code depends on one or two of the values, but not on all at once.
    The choice is greedy: to a pair that has not met yet, each other column adds the value with the most pairs that meet
    for the first time.
    """
    places = list(itertools.combinations(range(len(columns)), 2))
    wanted = {(i, j, a, b) for i, j in places for a in range(len(columns[i])) for b in range(len(columns[j]))}
    rows = []
    while wanted:
        i, j, a, b = min(wanted)
        row = {i: a, j: b}
        for k in range(len(columns)):
            if k not in row:
                row[k] = max(
                    range(len(columns[k])), key=lambda value: sum(pair_of(k, value, m, row[m]) in wanted for m in row)
                )
        wanted -= {pair_of(i, row[i], j, row[j]) for i, j in places}
        rows.append(tuple(column[row[k]] for k, column in enumerate(columns)))
    return rows


def slow_but(quick, values):
    """Returns values for parametrize. Those that are not in `quick` are marked slow, because they run the same code
    with other data."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def pair_of(i, a, j, b):
    return (i, j, a, b) if i < j else (j, i, b, a)


def in_threads(*works, seconds=60):
    """Runs functions at the same time, each in a thread, and returns their results. Raises what one of them raises, or
    AssertionError if one takes longer than `seconds`. Threads that still run do not keep the process from ending."""
    results, errors = [None] * len(works), []

    def run(number):
        try:
            results[number] = works[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    for error in errors:
        raise error
    assert not any(thread.is_alive() for thread in threads), f"a thread takes longer than {seconds} seconds"
    return results


class NoMemory(TorchDispatchMode):
    """A mode in which operations fail whose results are new memory: the one with a given number, or all from there
    on."""

    def __init__(self, number, stays):
        super().__init__()
        self.number, self.stays, self.count = number, stays, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        held = {_storage_of(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        if all(_storage_of(tensor) in held for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor)):
            return result
        self.count += 1
        if self.count == self.number or (self.stays and self.count > self.number):
            raise torch.OutOfMemoryError("there is no memory: made up by the test")
        return result


def torchrun(size, *command, **options):
    """Returns what a program prints that torchrun starts in `size` processes, which connect over the loopback
    interface."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    python_path = [str(ROOT), *sys.path]
    done = subprocess.run(
        [*launcher, "--nproc-per-node", str(size), *map(str, command)],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(python_path)},
        capture_output=True,
        text=True,
        timeout=200,
        **options,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _storage_of(tensor):
    return tensor.untyped_storage()._cdata


def bytes_of(x):
    """Returns the bytes of a tensor: uint8 [numel * itemsize] on the CPU."""
    x = x.detach().cpu().contiguous()
    x = x.as_strided((x.numel(),), (1,))  # A tensor of at most one element may have any strides.
    return torch.view_as_real(x).reshape(-1).view(torch.uint8) if x.dtype.is_complex else x.view(torch.uint8)


def tensor_from(data, shape, dtype):
    """Returns a tensor of the shape and dtype with the given bytes. data: a numpy uint8 array, which may be longer than
    needed."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return torch.from_numpy(np.ascontiguousarray(data[:size])).view(dtype).reshape(shape)


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape, f"{a.dtype} {list(a.shape)} is not {b.dtype} {list(b.shape)}"
    differs = (bytes_of(a) != bytes_of(b)).nonzero()
    assert len(differs) == 0, f"{len(differs)} of {bytes_of(a).numel()} bytes differ, the first at {int(differs[0])}"


def take(x, ids):
    """Returns x[ids], by bytes, because torch cannot index some dtypes."""
    ids = ids.cpu().to(torch.int64)
    item_bytes = x.shape[1:].numel() * x.dtype.itemsize
    rows = bytes_of(x).reshape(x.shape[0], item_bytes)[ids]
    return rows.reshape(-1).view(x.dtype).reshape(len(ids), *x.shape[1:])


def layout_arguments(layout, row_bytes):
    """Returns the arguments of `compress` for one of LAYOUTS."""
    if layout == "slots of 32":
        return {"slot_bytes": 32} if row_bytes > 32 else {}
    return {"slots": {}, "in place": {"slot_bytes": row_bytes}, "packed": {"layout": "packed"}}[layout]


def assert_same_table(a, b):
    for name in ("scheme", "layout", "row_bytes", "slot_bytes", "stored_bytes", "link_bytes", "codebook"):
        assert getattr(a, name) == getattr(b, name), f"{name}: {getattr(a, name)} is not {getattr(b, name)}"
    for name in TENSORS:
        assert_same_bits(getattr(a, name).cpu(), getattr(b, name).cpu())


def make_tensor(shape, dtype, kind="sparse", seed=0):
    """Returns a random tensor. kind: `sparse` (few bytes are not 0), `narrow` (the high half of elements hardly
    varies), `random` or `equal` (all elements are the same)."""
    rng = np.random.default_rng([seed, len(kind)])
    count = int(np.prod(shape, dtype=np.int64))
    elements = rng.integers(0, 256, (count, dtype.itemsize), np.uint8)
    if kind == "sparse":
        elements[rng.random(count) < 0.9] = 0
    elif kind == "narrow":
        elements[:, dtype.itemsize // 2 :] &= np.where(rng.random((count, 1)) < 0.98, 0x03, 0xFF).astype(np.uint8)
    elif kind == "equal":
        elements[:] = elements[:1]
    if dtype == torch.bool:
        elements &= 1
    return tensor_from(elements.reshape(-1), shape, dtype)


def compress_in_place(x, **arguments):
    return ibp.compress(x, inplace=True, **arguments)


def embedding(num_rows, num_columns, dtype=torch.float32, seed=0):
    """Returns normal values with a small spread, like trained weights."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, num_columns, generator=generator) * 0.02).to(dtype)


def one_hot_rows(num_rows, num_columns, seed=0):
    """Returns float32 zeros with a few ones in each row. Some rows have far more ones than others."""
    rng = np.random.default_rng(seed)
    density = rng.choice([0.002, 0.02, 0.5], (num_rows, 1), p=[0.8, 0.15, 0.05])
    return torch.from_numpy((rng.random((num_rows, num_columns)) < density).astype(np.float32))


def spiky_rows(num_rows, num_columns, seed=0):
    """Returns `one_hot_rows` with random values instead of ones, so that every scheme has long and short rows."""
    generator = torch.Generator().manual_seed(seed)
    return one_hot_rows(num_rows, num_columns, seed) * torch.randn(num_rows, num_columns, generator=generator).abs()


def planes_codebook(codebook):
    """Returns the library's codebook for a codebook of the numpy reference."""
    c = codebook
    entries = torch.from_numpy(c.entries.astype(np.uint64).view(np.int64))
    return ibp.codecs.PlanesCodebook(
        c.row_bytes,
        c.element_bytes,
        c.rotate,
        c.residual_bits,
        c.digit_bits,
        c.per_column,
        c.listed,
        c.default,
        c.closed,
        entries if c.first_symbol is None else entries[:, :0],
        None,
        c.invariant_bits,
        c.invariant_value,
        c.first_symbol,
        c.signed_default,
        None if c.live_columns is None else torch.tensor(c.live_columns),
        None if c.live_columns is None else torch.tensor(list(c.row_template), dtype=torch.uint8),
    )


def reference_planes_codebook(codebook):
    """Returns the numpy reference's codebook for a codebook of the library."""
    c = codebook
    entries = c.entries.numpy().view(np.uint64).astype(reference_planes.symbol_type(c.symbol_bits))
    return reference_planes.Codebook(
        c.element_bytes,
        c.row_bytes,
        c.rotate,
        c.residual_bits,
        c.digit_bits,
        c.per_column,
        c.listed,
        c.default,
        c.closed,
        entries,
        c.invariant_bits,
        c.invariant_value,
        c.first_symbol,
        c.signed_default,
        None if c.live_columns is None else tuple(c.live_columns.tolist()),
        b"" if c.row_template is None else c.row_template.numpy().tobytes(),
    )


def reference_decode(table):
    """Returns the original bytes of a table of any scheme, decoded by numpy."""
    if table.scheme != "planes":
        return reference.decode_table(reference_table(table))
    codebook = reference_planes_codebook(table.codebook)
    plain = plain_table(table, None)
    return b"".join(reference_row(plain, codebook, r) for r in range(plain.num_rows))


def reference_row(plain, codebook, r):
    """Returns the valid bytes of row r of a table of scheme planes. Raises CorruptRow of one of the references."""
    stored = reference.stored_row(plain, r).tobytes()
    if plain.is_default(r):
        return plain.default_row(r)
    return reference_planes.decode_row(codebook, stored)[: plain.valid(r)] if plain.lengths[r] else stored


def reference_table(table):
    """Returns a table of scheme ibp or raw for the numpy decoder."""
    codebook = None
    if table.codebook is not None:
        c = table.codebook
        codebook = reference.Codebook(c.row_bytes, c.chunk_bytes, c.flag_all, c.palette.numpy(), c.index.numpy())
    return plain_table(table, codebook)


def plain_table(table, codebook):
    num_bytes = table.shape.numel() * table.dtype.itemsize
    return reference.Table(
        num_bytes,
        table.row_bytes,
        table.slot_bytes,
        codebook,
        table.lengths.numpy(),
        table.bases.numpy().view(np.uint64),
        table.slots.numpy(),
        table.overflow.numpy(),
        default=default_of(table.codebook),
    )


def reckon_with(monkeypatch, least_streamed_bytes=None, **changed):
    """Puts an H200's calibration with changed rates in force on every device. Returns the calibration."""
    found = dataclasses.replace(ibp.calibration.H200, **changed)
    if least_streamed_bytes is not None:
        gained_ns = 1 / found.read_gbps - 1 / found.copy_in_gbps
        found = dataclasses.replace(found, stream_start_us=(least_streamed_bytes + 0.5) * gained_ns / 1e3)
    monkeypatch.setattr(calibration, "in_force", lambda device: found)
    return found


def default_of(codebook):
    """Returns the bytes that a default row repeats."""
    return reference_planes_codebook(codebook).default_row if isinstance(codebook, ibp.codecs.PlanesCodebook) else b"\0"


def sized(num_items, item_bytes, num_bytes):
    """Returns a stand-in for a table in host memory, with the attributes that plans read. Its slots have num_bytes
    bytes, but no memory."""
    slots = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    geometry = types.SimpleNamespace(num_items=num_items, item_bytes=item_bytes)
    return types.SimpleNamespace(
        geometry=geometry, slots=slots, overflow=slots[:0], device=torch.device("cpu"), codebook=None
    )
