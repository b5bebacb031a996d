"""Tables for engines that multiply: matrices, joined shards, stacked experts."""

import pytest
import torch
import torch.nn.functional as F

import ibp
from helpers import assert_same_bits
from ibp.adapters import ExpertTables, compress_matrix, join
from products import kernels_on_the_cpu, lists

EXPERTS, HIDDEN, WIDTH = 6, 64, 32


def matrix(rows, columns=HIDDEN, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).mul(0.02).bfloat16()


def test_a_matrix_fits_the_kernel():
    table = compress_matrix(matrix(64))
    assert table.fits_linear and table.layout == "slots"
    assert_same_bits(table.decompress(), matrix(64))
    for other in (
        compress_matrix(matrix(64), level="default"),
        compress_matrix(matrix(8)),
        compress_matrix(matrix(64, 20)),
    ):
        assert not other.fits_linear
    assert not compress_matrix(torch.randn(64, 64)).fits_linear
    assert compress_matrix(matrix(64), layout="packed").layout == "packed"


def beside(table, weight):
    return ibp.compress(weight, codebook=table.codebook, slot_bytes=table.slot_bytes)


def test_shards_join():
    plain = [matrix(64), matrix(32, seed=1)]
    first = compress_matrix(plain[0])
    tables = [first, beside(first, plain[1])]
    made = join([(tables[0], 3, 64), (tables[1], 0, 7)], "cpu")
    assert_same_bits(made.decompress(check=True), torch.cat((plain[0][3:], plain[1][:7])))
    assert made.fits_linear and made.shape == (68, HIDDEN)


def test_a_stack_joins_by_its_rows():
    """A row has the elements of the last dimension, however many dimensions are before it."""
    plain = matrix(48).view(3, 16, HIDDEN)
    first = compress_matrix(matrix(16))
    stack = ibp.compress(plain, codebook=first.codebook, slot_bytes=first.slot_bytes, row_bytes=2 * HIDDEN)
    made = join([(stack, 16, 32), (first, 0, 2)], "cpu")
    assert_same_bits(made.decompress(), torch.cat((plain[1], matrix(16)[:2])))


def test_what_does_not_join():
    first = compress_matrix(matrix(64))
    own_codebook, packed = compress_matrix(matrix(64, seed=2).mul(8)), ibp.compress(matrix(64), layout="packed")
    pieces = ibp.compress(matrix(64, 4096), row_bytes=512)
    for other in (own_codebook, packed, pieces, compress_matrix(matrix(64, 96))):
        assert join([(first, 0, 64), (other, 0, 64)], "cpu") is None
    assert join([(ibp.compress(torch.tensor(2.0)), 0, 1)], "cpu") is None


def experts():
    plain = [matrix(EXPERTS * 2 * WIDTH, HIDDEN), matrix(EXPERTS * HIDDEN, WIDTH, seed=1)]
    tables = [compress_matrix(weight) for weight in plain]
    for table in tables:
        lists(table)
    stacks = [plain[0].view(EXPERTS, 2 * WIDTH, HIDDEN), plain[1].view(EXPERTS, HIDDEN, WIDTH)]
    return ExpertTables(*tables, num_experts=EXPERTS), stacks


def activate(y):
    return F.silu(y[:, :WIDTH]) * y[:, WIDTH:]


@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_of_few_tokens(monkeypatch, has_biases):
    with kernels_on_the_cpu(monkeypatch) as calls:
        held, (up, down) = experts()
        x, ids, weights = torch.randn(5, HIDDEN).bfloat16(), torch.randint(EXPERTS, (5, 2)), torch.rand(5, 2)
        biases = (matrix(EXPERTS, 2 * WIDTH), matrix(EXPERTS, HIDDEN)) if has_biases else (None, None)
        assert held.multiplies(x, ids)
        got = held.multiply(x, ids, weights, activate, biases=biases)
        assert got.dtype == torch.bfloat16 and calls == [10, 10]
    for token in range(5):
        wanted = torch.zeros(HIDDEN)
        for number, share in zip(ids[token].tolist(), weights[token]):
            y = F.linear(x[token : token + 1], up[number], biases[0][number] if has_biases else None)
            wanted += share * F.linear(activate(y), down[number], biases[1][number] if has_biases else None)[0].float()
        torch.testing.assert_close(got[token].float(), wanted, rtol=0.03, atol=0.03)


def test_experts_that_do_not_exist(monkeypatch):
    with kernels_on_the_cpu(monkeypatch):
        held, _ = experts()
        x, ids, weights = torch.randn(2, HIDDEN).bfloat16(), torch.tensor([[-1], [EXPERTS]]), torch.ones(2, 1)
        assert held.multiply(x, ids, weights, activate).isnan().all()
        assert not held.multiply(x, ids, weights, activate, absent=0).any()


def test_what_the_kernel_does_not_take(monkeypatch):
    held, stacks = experts()
    x, ids = torch.randn(5, HIDDEN).bfloat16(), torch.zeros(5, 2).long()
    assert not held.multiplies(x, ids)  # a CPU has no such kernel
    with pytest.raises(ValueError, match="ask `multiplies` first"):
        held.multiply(x, ids, torch.ones(5, 2), activate)
    with kernels_on_the_cpu(monkeypatch):
        for number in (0, 1025):
            assert not held.multiplies(x, torch.zeros(number, 1).long())
        assert not held.multiplies(x.float(), ids)
        many = torch.zeros(1025, 1).long()
        with pytest.raises(ValueError, match="ask `multiplies` first"):
            held.multiply(torch.randn(1025, HIDDEN).bfloat16(), many, torch.ones(1025, 1), activate)
    for decoded, wanted in zip(held.decoded("cpu"), stacks):
        assert_same_bits(decoded, wanted)
