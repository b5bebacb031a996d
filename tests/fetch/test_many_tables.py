"""Items of several tables in one call, and what is prefetched."""

import pytest
import torch

import ibp
from helpers import assert_same_bits, embedding
from ibp._rows.table import handle_on

ON_CPU = {"device": "cpu", "memory": "host"}
SIZES = (40, 7, 100, 1)


def make(device=None, pinned=False):
    xs = [embedding(size, 16, torch.bfloat16, seed) for seed, size in enumerate(SIZES)]
    schemes = ("planes", "raw", "ibp", "planes")
    if device is None and not pinned:
        return xs, [ibp.compress(x, scheme=scheme, **ON_CPU) for x, scheme in zip(xs, schemes)]
    if pinned:
        return xs, [ibp.compress(x, scheme=scheme, **ON_CPU).pin_memory() for x, scheme in zip(xs, schemes)]
    return xs, [ibp.compress(x.to(device), scheme=scheme) for x, scheme in zip(xs, schemes)]


def draw(count, used=(0, 1, 2, 3)):
    numbers = torch.tensor(list(used))[torch.randint(len(used), (count,))]
    return numbers, (torch.rand(count) * torch.tensor(SIZES)[numbers]).long()


def rows_of(xs, numbers, ids):
    return torch.stack([xs[number][row] for number, row in zip(numbers.tolist(), ids.tolist())])


@pytest.mark.parametrize("used", [range(4), [2], [0, 3]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_items_of_many(used, dtype):
    xs, tables = make()
    numbers, ids = draw(200, used)
    wanted, out = rows_of(xs, numbers, ids), torch.empty(200, 16, dtype=torch.bfloat16)
    for _ in range(2):
        assert_same_bits(ibp.index_select(tables, ids.to(dtype), table_numbers=numbers), wanted)
    assert ibp.index_select(tables, ids, table_numbers=numbers.to(torch.int32), out=out) is out
    assert_same_bits(out, wanted)
    assert_same_bits(ibp.index_select(tables, ids.tolist(), table_numbers=numbers.numpy()), wanted)
    assert ibp.index_select(tables, ids[:0], table_numbers=numbers[:0]).shape == (0, 16)


def test_one_call(monkeypatch):
    """No table has a call of its own."""
    xs, tables = make()
    numbers, ids = draw(50)
    monkeypatch.setattr("ibp._fetch.gather.index_select", None)
    assert_same_bits(ibp.index_select(tables, ids, table_numbers=numbers), rows_of(xs, numbers, ids))


def test_errors():
    _, tables = make()
    numbers, ids = torch.tensor([0, 1, 3]), torch.tensor([39, 6, 0])
    with pytest.raises(IndexError, match=r"ids\[1\] is 7; wanted 0 to 6 of table 1"):
        ibp.index_select(tables, ids + torch.tensor([0, 1, 0]), table_numbers=numbers)
    for bad in (numbers + 1, numbers - 1):
        with pytest.raises(IndexError, match="table_numbers"):
            ibp.index_select(tables, ids, table_numbers=bad)
    with pytest.raises(ValueError, match="table_numbers \\[2\\]"):
        ibp.index_select(tables, ids, table_numbers=numbers[:2])
    with pytest.raises(ValueError, match="no tables"):
        ibp.index_select([], ids, table_numbers=numbers)
    with pytest.raises(TypeError, match="table is a Tensor"):
        ibp.index_select([tables[0], torch.ones(3)], ids, table_numbers=numbers)
    with pytest.raises(TypeError, match="table_numbers"):
        ibp.index_select(tables, ids, table_numbers=numbers.double())
    with pytest.raises(ValueError, match="items of"):
        ibp.index_select([*tables, ibp.compress(torch.ones(3, 17), **ON_CPU)], ids, table_numbers=numbers)
    for out in (torch.empty(2, 16, dtype=torch.bfloat16), torch.empty(16, 3, dtype=torch.bfloat16).T):
        with pytest.raises(ValueError, match="out"):
            ibp.index_select(tables, ids, table_numbers=numbers, out=out)


def test_corrupt_rows():
    xs, tables = make()
    tables[0].lengths.view(torch.int16)[5] += 40
    with pytest.raises(ibp.CorruptTableError):
        ibp.index_select(tables, torch.tensor([0, 5]), table_numbers=torch.tensor([1, 0]))
    assert_same_bits(ibp.index_select(tables, torch.tensor([0, 4]), table_numbers=torch.tensor([1, 0]))[1], xs[0][4])


def test_what_does_not_fit_is_refused():
    _, tables = make()
    handles = [handle_on(table, torch.device("cpu")).table for table in tables]
    ids, positions = torch.tensor([0, 0]), torch.tensor([1, 0], dtype=torch.int32)
    out, take = torch.empty(2, 16, dtype=torch.bfloat16), torch.ops.ibp.take_many
    take(handles[:2], ids, positions, [0, 1, 2], 0, out)
    other = handle_on(ibp.compress(torch.ones(3, 17), **ON_CPU), torch.device("cpu")).table
    for message, wrong in (
        ("starts are not", (handles[:2], ids, positions, [0, 2], 0, out)),
        ("starts are not", (handles[:2], ids, positions, [0, 1, 3], 0, out)),
        ("starts are not", (handles[:2], ids, positions, [0, 3, 2], 0, out)),
        ("starts are not", (handles[:2], ids, positions, [1, 1, 2], 0, out)),
        ("starts are not", ([], ids, positions, [0], 0, out)),
        ("items of other sizes", ([handles[0], other], ids, positions, [0, 1, 2], 0, out)),
        ("positions has 1 elements", (handles[:2], ids, positions[:1], [0, 1, 2], 0, out)),
        ("positions has the wrong dtype", (handles[:2], ids, positions.long(), [0, 1, 2], 0, out)),
        ("outside", (handles[:2], ids, positions, [0, 1, 2], 0, out[:1])),
        ("max_sms is -1", (handles[:2], ids, positions, [0, 1, 2], -1, out)),
        ("outside", (handles[:2], ids, torch.tensor([1, 2], dtype=torch.int32), [0, 1, 2], 0, out)),
        ("outside", (handles[:2], ids + 10**6, positions, [0, 1, 2], 0, out)),
    ):
        with pytest.raises(RuntimeError, match=message):
            take(*wrong)


@pytest.mark.parametrize("pinned", [False, True])
def test_on_a_gpu(cuda, pinned):
    xs, tables = make(cuda, pinned)
    numbers, ids = draw(500)
    wanted = rows_of(xs, numbers, ids)
    for where in (numbers, numbers.to(cuda)):
        assert_same_bits(ibp.index_select(tables, ids.to(cuda), table_numbers=where, check=True).cpu(), wanted)
    ids[3] = 100
    ibp.index_select(tables, ids.to(cuda), table_numbers=numbers)
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"ids\[3\] is 100"):
        tables[int(numbers[3])].check()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("max_sms", [None, 3])
def test_more_tables_than_a_launch_takes(cuda, pinned, max_sms):
    """Of one kind and of several, and one whose rows are too long for others beside them."""
    sizes = [1 + 37 * i % 300 for i in range(40)]
    xs = [embedding(size, 2000 if i == 7 else 64, torch.bfloat16, i) for i, size in enumerate(sizes)]
    tables = [ibp.compress(x, scheme="raw" if i % 5 == 3 else "planes", **ON_CPU) for i, x in enumerate(xs)]
    tables = [table.pin_memory() if pinned else table.to(cuda) for table in tables]
    for outs in (None, [None, *(torch.empty_like(x, device=cuda) for x in xs[1:])]):
        found = ibp.decompress(tables, device=cuda, out=outs, max_sms=max_sms, check=True)
        for k, x in enumerate(xs):
            assert_same_bits(found[k].cpu(), x)
            assert outs is None or outs[k] is None or found[k] is outs[k]
    alike = [k for k in range(len(xs)) if k != 7]
    numbers = torch.randint(len(alike), (3000,))
    ids = (torch.rand(3000) * torch.tensor([sizes[k] for k in alike])[numbers]).long()
    found = ibp.index_select([tables[k] for k in alike], ids.to(cuda), table_numbers=numbers, max_sms=max_sms)
    assert_same_bits(found.cpu(), rows_of([xs[k] for k in alike], numbers, ids))


def test_tensors_that_are_decoded_one_by_one(cuda):
    """Results of other strides, on the CPU, of no bytes, of no dimensions, and two that share memory."""
    xs = [embedding(40, 16, torch.bfloat16, seed) for seed in range(4)]
    tables = [ibp.compress(x, scheme="planes").to(cuda) for x in xs]
    outs = [None, torch.empty(16, 40, dtype=torch.bfloat16, device=cuda).T, torch.empty_like(xs[2]), None]
    found = ibp.decompress(tables, device=None, out=outs)
    for y, x in zip(found, xs):
        assert_same_bits(y.cpu(), x)
    odd = [ibp.compress(x.to(cuda)) for x in (torch.tensor(3.0), torch.empty(0, 4), torch.ones(7))]
    for y, x in zip(ibp.decompress([*odd, *tables]), (torch.tensor(3.0), torch.empty(0, 4), torch.ones(7), *xs)):
        assert_same_bits(y.cpu(), x)
    shared = torch.empty_like(xs[0], device=cuda)
    ibp.decompress(tables[:2], out=[shared, shared])
    assert_same_bits(shared.cpu(), xs[1])


def test_faults_of_tables_decoded_together(cuda):
    xs = [embedding(40, 16, torch.bfloat16, seed) for seed in range(3)]
    tables = [ibp.compress(x.to(cuda), scheme="planes") for x in xs]
    ibp.decompress(tables)
    tables[1].lengths.view(torch.int16)[5] += 40
    found = ibp.decompress(tables)
    torch.cuda.synchronize()
    for k in (0, 2):
        assert_same_bits(found[k].cpu(), xs[k])
        tables[k].check()
    with pytest.raises(ibp.CorruptTableError):
        tables[1].check()


def test_what_decode_many_refuses(cuda):
    tables = [ibp.compress(embedding(40, 16, torch.bfloat16, seed).to(cuda), scheme="planes") for seed in range(2)]
    handles = [handle_on(table, tables[0].device).table for table in tables]
    outs = [torch.empty(40, 16, dtype=torch.bfloat16, device=cuda) for _ in tables]
    for message, wrong in (
        ("there are 1 outs of 2 tables", (handles, 0, outs[:1])),
        ("outs share memory", (handles, 0, [outs[0], outs[0]])),
        ("bytes, 1280 are needed", (handles, 0, [outs[0], outs[1][:3]])),
        ("share memory", (handles[:1], 0, [tables[0].slots[:1280].view(torch.bfloat16)])),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ibp.decode_many(*wrong)
    torch.ops.ibp.decode_many(handles, 0, outs)
    for out, table in zip(outs, tables):
        assert_same_bits(out, table.decompress())


# ---- prefetches ----


def test_prefetch_for_the_cpu():
    x = embedding(40, 16)
    table, out = ibp.compress(x, **ON_CPU), torch.empty(2, 16)
    handle = table.prefetch(torch.tensor([3, 7]), out=out)
    assert handle.is_ready() and handle.wait() is out
    assert_same_bits(out, x[[3, 7]])
    handle.close()
    handle.close()
    with pytest.raises(RuntimeError, match="closed"):
        handle.wait()
    with table.prefetch() as whole:
        assert_same_bits(whole, x)
    with pytest.raises(IndexError):
        table.prefetch([40])


@pytest.mark.parametrize("path", ["gpu", "bucketed", "cpu", None])
def test_prefetch_of_items(cuda, path):
    x = embedding(3000, 64, torch.bfloat16)
    table = ibp.compress(x, scheme="planes").pin_memory()
    out, seen = torch.empty(1000, 64, dtype=x.dtype, device=cuda), []
    chosen = [torch.randint(3000, (1000,)) for _ in range(6)]
    for ids in chosen:  # each is used while the next one is on its way to the same memory
        with table.prefetch(ids, out=out, path=path) as rows:
            torch.cuda._sleep(100_000)
            seen.append(rows.clone())
    for rows, ids in zip(seen, chosen):
        assert_same_bits(rows.cpu(), x[ids])


def test_prefetch_of_tensors(cuda):
    x = embedding(3000, 64, torch.bfloat16)
    table, stream = ibp.compress(x, layout="packed").pin_memory(), torch.cuda.Stream()
    handles = [table.prefetch(device=cuda), table.prefetch(device=cuda, stream=stream, path="gpu", max_sms=8)]
    for handle in handles:
        assert_same_bits(handle.wait().cpu(), x)
        assert handle.is_ready()
        handle.close()
