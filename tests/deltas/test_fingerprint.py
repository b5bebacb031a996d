"""ibp.deltas.fingerprint, `sum_words` and their C functions against the numpy of tests/support/reference.py."""

import pytest
import torch

import ibp
import reference
from helpers import bytes_of, embedding

OPS = torch.ops.ibp
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 65, 127, 128, 1000, 65_537]


def random_bytes(size):
    return torch.randint(256, (size,), dtype=torch.uint8)


def expected(x):
    return reference.fingerprint(bytes_of(x).cpu().numpy().tobytes())


@pytest.fixture(params=["plain", "wide"])
def processor(request):
    features = ibp._core.cpu_features()
    if request.param == "plain":
        ibp._core.set_cpu_features(0)
    yield
    ibp._core.set_cpu_features(features)


def test_worked_example():
    """By hand: FORMAT.md section 10 of no bytes is mix(0), which is 0; of one zero byte mix(1) + mix(golden)."""
    assert ibp.deltas.fingerprint(torch.zeros(0)) == 0
    assert (
        ibp.deltas.fingerprint(torch.zeros(1, dtype=torch.uint8)) == (0x5692161D100B05E5 + 0xE220A8397B1DCDAF) % 2**64
    )


@pytest.mark.parametrize("size", SIZES)
def test_sizes_and_starts(processor, size):
    x = random_bytes(size + 9)
    for start in (0, 1, 4, 8, 9):
        part = x[start : start + size]
        assert ibp.deltas.fingerprint(part) == expected(part)


def test_parts_add_up(processor):
    x = random_bytes(10_007)
    total = torch.zeros(1, dtype=torch.int64)
    for first, last in ((8_000, 10_007), (0, 24), (24, 8_000)):
        OPS.sum_words(x[first:last], first // 8, total)
    whole = torch.zeros(1, dtype=torch.int64)
    OPS.sum_words(x, 0, whole)
    assert total.equal(whole)


def test_several_threads(set_threads):
    x = random_bytes((3 << 20) + 5)
    set_threads(2)
    assert ibp.deltas.fingerprint(x) == expected(x)


DTYPES = [torch.bool, torch.int8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.complex64, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_strides(dtype):
    x = random_bytes(30 * 16 * 8)
    x = (x & 1 if dtype == torch.bool else x).view(dtype).view(30, -1)
    views = [x, x.t(), x[::3], x[:, 1::2], x[0, 0], x[:0], x.view(5, 6, -1).permute(1, 2, 0), x.expand(2, *x.shape)]
    if dtype.is_complex:
        views.append(x.conj())
    for view in views:
        assert ibp.deltas.fingerprint(view) == expected(view.clone())


def test_tables():
    for x in (embedding(1000, 24), torch.randn(7, 3, 5), torch.randn(50_000), torch.randn(()), torch.randn(0, 4)):
        for options in ({}, {"layout": "packed"}):
            table = ibp.compress(x, device="cpu", **options)
            assert ibp.deltas.fingerprint(table) == ibp.deltas.fingerprint(x) == expected(x)


def test_a_change_of_any_bit_shows():
    x = random_bytes(40)
    before = ibp.deltas.fingerprint(x)
    for byte in range(40):
        for bit in range(8):
            x[byte] ^= 1 << bit
            assert ibp.deltas.fingerprint(x) != before
            x[byte] ^= 1 << bit
    assert ibp.deltas.fingerprint(torch.cat((x, x[:0].new_zeros(1)))) != before
    assert ibp.deltas.fingerprint(x.flip(0)) != before


def test_arguments():
    with pytest.raises(TypeError, match="x is a list; wanted a torch.Tensor or an ibp.CompressedTensor"):
        ibp.deltas.fingerprint([1])
    with pytest.raises(TypeError, match="sparse"):
        ibp.deltas.fingerprint(torch.eye(3).to_sparse())
    total = torch.zeros(1, dtype=torch.int64)
    for bad, match in ((total.int(), "sum has the wrong dtype"), (total[:0], "sum has 0 elements")):
        with pytest.raises(RuntimeError, match=match):
            OPS.sum_words(random_bytes(8), 0, bad)
    with pytest.raises(RuntimeError, match="share memory"):
        OPS.sum_words(total, 0, total)


@pytest.mark.parametrize("size", [*SIZES, 5_000_011])
def test_cuda(cuda, size):
    x = random_bytes(size + 40)
    near = x.to(cuda)
    for start in (0, 1, 2, 4, 8, 9, 16, 31):
        assert ibp.deltas.fingerprint(near[start : start + size]) == expected(x[start : start + size])


def test_cuda_tensors_and_tables(cuda):
    x = torch.randn(3000, 70)
    near = x.to(cuda)
    assert ibp.deltas.fingerprint(near.t()) == ibp.deltas.fingerprint(x.t())
    assert ibp.deltas.fingerprint(near[:, 3:]) == ibp.deltas.fingerprint(x[:, 3:])
    assert ibp.deltas.fingerprint(ibp.compress(near)) == ibp.deltas.fingerprint(x)
    total = torch.zeros(1, dtype=torch.int64, device=cuda)
    for first, last in ((80_000, 840_000), (0, 80_000)):
        OPS.sum_words(near.view(-1).view(torch.uint8)[first:last], first // 8, total)
    assert (int(total) + ibp.deltas._coding.mix(840_000)) % 2**64 == ibp.deltas.fingerprint(x)
