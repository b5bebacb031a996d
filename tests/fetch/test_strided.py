"""Items written to tensors of any strides: into a cache at a time, into a part of a batch, and where that cannot be."""

import pytest
import torch

import ibp
from handles import BY_VALUES as OPS
from handles import values_of
from helpers import assert_same_bits, embedding

CPU = torch.device("cpu")
ON_CPU = {"device": "cpu", "memory": "host"}
SCHEMES = ["raw", "ibp", "planes"]


@pytest.fixture(scope="module")
def x():
    return embedding(40, 16, torch.bfloat16)


def places():
    """(name, view of a tensor, its shape). To the last three, items of 16 elements go by way of a copy."""
    yield "a time of a cache", lambda base: base[:, :, 3], (4, 3, 5, 16)
    yield "heads last", lambda base: base.transpose(1, 2)[:, :, 0], (4, 2, 3, 16)
    yield "every other item", lambda base: base[::2], (24, 16)
    yield "a part of longer items", lambda base: base[:, 8:24], (12, 40)
    yield "three dimensions", lambda base: base[:, 1:3, :, 1], (3, 4, 2, 2, 16)
    yield "a transposed one", lambda base: base.T, (16, 12)
    yield "elements apart", lambda base: base[..., ::2], (12, 32)
    yield "more dimensions than the core has", lambda base: base[::2, ::2, ::2, ::2, ::2], (3, 3, 3, 3, 3, 16)


def check_view(x, table, take, shape, device):
    base = torch.full(shape, 7.0, dtype=x.dtype, device=device)
    wanted, view = base.clone(), take(base)
    ids = torch.randint(40, (view.numel() // 16,))
    take(wanted).copy_(x[ids].view(view.shape))
    assert table.index_select(ids.to(device), out=view) is view
    assert_same_bits(base.cpu(), wanted.cpu())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("place", list(places()), ids=lambda place: place[0])
def test_index_select(x, scheme, place):
    check_view(x, ibp.compress(x, scheme=scheme, **ON_CPU), *place[1:], CPU)


@pytest.mark.parametrize("place", list(places()), ids=lambda place: place[0])
@pytest.mark.parametrize("pinned", [False, True])
def test_index_select_on_a_gpu(x, cuda, place, pinned):
    table = ibp.compress(x, scheme="planes").pin_memory() if pinned else ibp.compress(x.to(cuda), scheme="planes")
    check_view(x, table, *place[1:], cuda)


@pytest.mark.parametrize("shape", [(40, 16), (40, 2, 8), (8, 5, 16)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_decompress(x, shape, scheme):
    x = x.view(shape)
    table = ibp.compress(x, scheme=scheme, **ON_CPU)
    base = torch.full((shape[0], 3, *shape[1:]), 7.0, dtype=x.dtype)
    wanted = base.clone()
    wanted[:, 1] = x
    view = base[:, 1]
    assert table.decompress(out=view) is view
    assert_same_bits(base, wanted)
    base.fill_(7)
    assert ibp.decompress([table], out=[view])[0] is view
    assert_same_bits(base, wanted)


def test_outs_that_do_not_fit(x):
    table, ids = ibp.compress(x, **ON_CPU), torch.arange(6)
    for shape in ((2, 2, 16), (6, 4, 4), (2, 3, 4, 4), (96,), (3, 32), (6, 1, 17)):
        with pytest.raises(ValueError, match="out has shape"):
            table.index_select(ids, out=torch.empty(shape, dtype=x.dtype))
    with pytest.raises(RuntimeError):
        table.index_select(ids, out=torch.empty(1, 16, dtype=x.dtype).expand(6, 16))
    assert_same_bits(table.index_select(ids, out=torch.empty(1, 2, 3, 16, dtype=x.dtype)), x[:6].view(1, 2, 3, 16))
    assert table.index_select(ids[:0], out=torch.empty(0, 3, 16, dtype=x.dtype)).numel() == 0


def test_bad_rows_leave_zeros_where_they_belong(x):
    table = ibp.compress(x, scheme="planes", layout="packed", **ON_CPU)
    table.lengths.view(torch.int16)[33] -= 1
    base = torch.full((3, 4, 16), 7.0, dtype=x.dtype)
    with pytest.raises(ibp.CorruptTableError, match="position 1"):
        table.index_select(torch.tensor([2, 33, 5]), out=base[:, 2])
    assert (base[1, 2] == 0).all() and (base[1, :2] == 7).all()
    assert_same_bits(base[[0, 2], 2], x[[2, 5]])


@pytest.mark.parametrize(
    ("out", "dims", "found"),
    [
        (lambda: torch.empty(6, 16, dtype=torch.bfloat16), 3, "outer_dims is 3"),
        (lambda: torch.empty(6, 8, dtype=torch.bfloat16), 1, "items of 16 bytes"),
        (lambda: torch.empty(16, 6, dtype=torch.bfloat16).T, 1, "not contiguous"),
        (lambda: torch.empty(5, 16, dtype=torch.bfloat16), 1, "room for 5 items"),
        (lambda: torch.empty(1, 16, dtype=torch.bfloat16).expand(6, 16), 1, "share memory"),
        (lambda: torch.empty(100, dtype=torch.bfloat16).as_strided((6, 16), (15, 1)), 1, "share memory"),
    ],
)
def test_the_operation_checks_its_arguments(x, out, dims, found):
    arguments = values_of(ibp.compress(x, **ON_CPU), CPU)
    with pytest.raises(RuntimeError, match=found):
        OPS.gather_items(*arguments, torch.arange(6), 0, out(), torch.zeros(4, dtype=torch.int64), outer_dims=dims)


def test_the_operation_writes_nothing_that_it_reads(x):
    arguments = values_of(ibp.compress(x, scheme="raw", **ON_CPU), CPU)
    shared = arguments[0].view(torch.bfloat16)[: 12 * 16].view(6, 2, 16)[:, 0]
    with pytest.raises(RuntimeError, match="share memory"):
        OPS.gather_items(*arguments, torch.arange(6), 0, shared, torch.zeros(4, dtype=torch.int64), outer_dims=1)
