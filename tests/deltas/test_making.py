"""Deltas of many tensors in one call: the CPU stands in for the kernels, and finds tensors and rows as they do."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp._core import ROWS_PER_BASE
from ibp.deltas import _coding
from ibp.deltas._applying import GpuBatch
from ibp.deltas._coding import ROW_BYTES, known_codebook
from ibp.deltas._delta import begin_on_gpu

DEFAULT_ROW = ROW_BYTES  # the length of a row that takes no bytes


class Kernels:
    """The operations `measure_deltas` and `encode_deltas`, for elements of `width` bytes."""

    def __init__(self, monkeypatch, width):
        self.integers, self.codebook = _coding.INTEGERS[width], known_codebook(width)
        for name in ("measure_deltas", "encode_deltas"):
            monkeypatch.setattr(torch.ops.ibp, name, SimpleNamespace(default=getattr(self, name)), raising=False)

    def tensors(self, structs):
        """Yields (index of the first row, number of rows, base, newer) for each tensor."""
        for base, newer, num_bytes, first, *_ in structs.tolist():
            held = [
                torch.frombuffer((ctypes.c_uint8 * num_bytes).from_address(address), dtype=torch.uint8)
                for address in (base, newer)
            ]
            yield first, -(-num_bytes // ROW_BYTES), *held

    def difference(self, base, newer):
        return newer.view(self.integers) - base.view(self.integers)

    def measure_deltas(self, structs, words, codec, lengths, counts, sums):
        assert lengths.numel() % ROWS_PER_BASE == 0 and counts.numel() == 8 * lengths.numel()
        lengths.view(torch.int16).fill_(DEFAULT_ROW)
        for number, (first, num_rows, *held) in enumerate(self.tensors(structs)):
            assert first % ROWS_PER_BASE == 0
            found = torch.ops.ibp.measure_rows(self.difference(*held).view(torch.uint8), words, codec)
            lengths[first : first + num_rows].view(torch.int16).copy_(found.view(torch.int16))
            for of_pair, data in enumerate(held):
                torch.ops.ibp.sum_words.default(data, 0, sums[2 * number + of_pair :][:1])

    def encode_deltas(self, structs, words, codec, lengths, counts, bases, updates_bases, overflow):
        for first, num_rows, base, newer in self.tensors(structs):
            if bool((lengths[first : first + num_rows].view(torch.int16) == DEFAULT_ROW).all()):
                continue
            table = ibp.compress(self.difference(base, newer), codebook=self.codebook, layout="packed", device="cpu")
            start = int(bases[first // ROWS_PER_BASE])
            overflow[start : start + table.overflow.numel()] = table.overflow
            if updates_bases:
                base.copy_(newer)


@pytest.mark.parametrize("updates_bases", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.complex64])
def test_many_tensors(monkeypatch, dtype, updates_bases):
    Kernels(monkeypatch, _coding.element_bytes_of(dtype))
    pairs, wild = [], 3
    for number, size in enumerate((1, 1000, 33 * ROW_BYTES, 5000, 40_001, 32 * ROW_BYTES)):
        base = torch.randint(256, (size * dtype.itemsize,), dtype=torch.uint8).view(dtype)
        newer = base.clone()
        words = _coding.integers_of(newer)
        words[torch.randint(len(words), (1 + len(words) // 50,))] += 1
        pairs.append((newer if number != wild else newer.flip(0), base))
    before = [base.clone() for _, base in pairs]
    made = begin_on_gpu(pairs, updates_bases)()
    assert [delta is None for delta in made[1:]] == [number == wild for number in range(1, len(pairs))]
    for delta, (newer, base), old in zip(made, pairs, before):
        assert_same_bits(base, newer if updates_bases and delta is not None else old)
        if delta is not None:
            wanted = ibp.deltas.make(newer, old, device="cpu")
            assert (delta.base, delta.result) == (wanted.base, wanted.result)
            assert (delta.shape, delta.dtype) == (newer.shape, dtype)
            assert_same_bits(delta.apply(old), newer)
            for name in ("lengths", "bases", "overflow"):
                assert torch.equal(getattr(delta.table, name), getattr(wanted.table, name)), name


@pytest.mark.parametrize(
    ("verdict", "match"), [(0, None), (1, "^b has fingerprint"), (2, "^b would not become the tensor")]
)
def test_the_delta_that_kernels_refuse(monkeypatch, verdict, match):
    """The kernels apply no delta, and their sums say which one is to blame."""
    jobs = []
    for name in "abc":
        old = torch.randn(100, 64)
        new = old.clone()
        new[3] += 1
        jobs.append((name, ibp.deltas.make(new, old, device="cpu"), old + 1 if (name, verdict) == ("b", 1) else old))

    def apply_deltas(structs, num_rows, words, codec, takes_back, state):
        for number, (of_base, of_result) in enumerate(structs[:, 8:]):
            is_wrong = int(number == 1 and verdict > 0)
            found = of_base + (is_wrong if verdict == 1 else 0), of_result - of_base, is_wrong
            state[1 + 3 * number : 4 + 3 * number] = torch.tensor([int(entry) for entry in found])
        state[0] = verdict

    monkeypatch.setattr(torch.ops.ibp, "apply_deltas", SimpleNamespace(default=apply_deltas), raising=False)
    batch = GpuBatch(jobs, [base for _, _, base in jobs])
    batch.begin()
    if match is None:
        batch.apply()
        return
    with pytest.raises(ibp.deltas.DeltaMismatchError if verdict == 1 else ibp.CorruptTableError, match=match):
        batch.apply()
