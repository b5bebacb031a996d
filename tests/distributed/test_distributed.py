"""Tables in several processes: one that all share, and one that is spread over them. Processes exchange over gloo."""

import os
import pathlib
import pickle
import re
import types

import pytest
import torch
import torch.distributed as dist

import ibp
from helpers import assert_same_bits, torchrun
from ibp._rows import geometry
from ibp.cache import _peers
from ibp.distributed import ShardedTable, _tables, share_table
from ranks import Ranks, raised

OPTIONS = {"device": "cpu", "memory": "host"}
SIZES = [700, 0, 1, 399]  # items of the ranks' shards
COLUMNS = 96


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    four = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield four
    four.end()


def rows_like(kind, count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    if kind == "sparse":
        return (torch.rand(count, 300, generator=generator) < 0.02).float()
    if kind == "random":
        return torch.randint(256, (count, COLUMNS), generator=generator, dtype=torch.uint8)
    if kind == "complex":
        return torch.randn(count, 3, 20, generator=generator, dtype=torch.complex64) * 0.02
    return torch.randn(count, COLUMNS, generator=generator).to(torch.bfloat16)


def part_of(x, rank):
    return x.split(SIZES)[rank]


def ids_of(rank, count=150):
    return torch.randint(sum(SIZES), (count,), generator=torch.Generator().manual_seed(rank))


# ---- tables that are spread over ranks ----


def fetch(rank, kind, options):
    x = rows_like(kind, sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS, **options)
    assert table.shape == x.shape and len(table) == len(x) and table.dtype == x.dtype and table.size(0) == len(x)
    assert table.local_range == range(sum(SIZES[:rank]), sum(SIZES[: rank + 1]))
    assert f"rank {rank} of 4" in repr(table) and table.device.type == "cpu" and table.group is None
    ids = ids_of(rank)
    for some in (ids, ids.int(), ids[:0], ids.tolist(), torch.arange(len(x)), torch.zeros(9, dtype=torch.int64)):
        assert_same_bits(table.index_select(some), x[some])
    assert_same_bits(table.index_select(ids if rank == 3 else []), x[ids] if rank == 3 else x[:0])
    out = torch.empty(2 * len(ids), *x.shape[1:], dtype=x.dtype)
    assert table.index_select(ids, out=out[::2]).data_ptr() == out.data_ptr()
    assert_same_bits(out[::2], x[ids])
    own = table.local_table
    return own.scheme, own.codebook, own.savings, own.layout


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, options",
    [
        ("dense", {}),
        ("dense", {"scheme": "ibp", "layout": "packed"}),
        ("dense", {"scheme": "planes", "clusters": 2, "row_bytes": 32, "slot_bytes": 32}),
        ("sparse", {"sample": 0.5}),
        ("random", {}),
        ("complex", {"level": "fast"}),
    ],
    ids=["dense", "packed masks", "clusters, rows of parts", "sparse", "raw", "consecutive"],
)
def test_every_rank_fetches_from_all(ranks, kind, options):
    found = ranks(fetch, kind, options)
    codebooks = {codebook for scheme, codebook, _, _ in found if scheme != "raw"}
    assert len(codebooks) == (0 if kind == "random" else 1)
    assert found[1][0] == "raw"  # an empty shard
    assert found[0][3] == options.get("layout", "slots")


def learn_as_one(rank):
    x = rows_like("sparse", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS, scheme="planes")
    whole = ibp.compress(x, **OPTIONS, scheme="planes")
    return table.local_table.stored_bytes, whole.stored_bytes


def test_one_codebook_serves_as_well_as_a_whole_tables(ranks):
    found = ranks(learn_as_one)
    assert sum(stored for stored, _ in found) < 1.1 * found[0][1]


def lack(rank):
    """A last bit that is 0 in all sampled rows, and not in two fifths of them all."""
    x = torch.randn(4000, COLUMNS, generator=torch.Generator().manual_seed(1))
    x.view(torch.int32)[torch.arange(4000) % 5 > 1] &= ~1
    part = x[1000 * rank :][:1000]

    sampled = geometry.bytes_of(part[torch.arange(1000) % 5 > 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_tables, "_sampled", lambda *_: sampled)
        table = ShardedTable.from_local(part, **OPTIONS, scheme="planes")
    assert_same_bits(table.index_select(torch.arange(4000)), x)
    return table.local_table.codebook.is_partial, table.local_table.savings


def test_rows_that_lack_what_the_sample_has_in_common(ranks):
    for is_partial, savings in ranks(lack):
        assert not is_partial and savings > 0.15


def from_tables(rank, case):
    x = rows_like("dense", sum(SIZES))
    part = part_of(x, rank)
    codebook = ibp.codecs.analyze(x, scheme="planes", sample=1.0, **{"device": "cpu"})
    table = {
        "one codebook": lambda: ibp.compress(part, codebook=codebook, **OPTIONS),
        "one is raw": lambda: ibp.compress(
            part, **OPTIONS, **({"scheme": "raw"} if rank == 0 else {"codebook": codebook})
        ),
        "other codebooks": lambda: (
            ibp.compress(part.float(), scheme="planes", **OPTIONS)
            if rank == 3
            else ibp.compress(part.float(), scheme="ibp", **OPTIONS)
        ),
        "other dtypes": lambda: ibp.compress(part.half() if rank == 2 else part, **OPTIONS),
        "other rows": lambda: ibp.compress(part, **OPTIONS, row_bytes=96 if rank == 2 else None),
        "other columns": lambda: ibp.compress(part[:, : 96 - rank], scheme="raw", **OPTIONS),
        "no table": lambda: part if rank == 2 else ibp.compress(part, **OPTIONS),
        "rows of two items": lambda: ibp.compress(part, **OPTIONS, row_bytes=384 if rank == 2 else None),
    }[case]()
    failure = raised(lambda: ShardedTable(table))
    if failure is None:
        ids = ids_of(rank)
        assert_same_bits(ShardedTable(table).index_select(ids), x[ids])
    return failure


@pytest.mark.parametrize(
    "case, name, message",
    [
        ("one codebook", None, None),
        ("one is raw", None, None),
        ("other codebooks", "ValueError", "ranks 0 and 3 have different codebooks"),
        ("other dtypes", "ValueError", "dtype is torch.bfloat16 on rank 0 of the group and torch.float16 on rank 2"),
        ("other rows", "ValueError", "row_bytes is 192 on rank 0 of the group and 96 on rank 2"),
        ("other columns", "ValueError", "shape of items is [96] on rank 0 of the group and [95] on rank 1"),
        ("no table", "TypeError", "local_table is a Tensor"),
        ("rows of two items", "ValueError", "items of 192 bytes are not whole rows of 384"),
    ],
)
def test_shards_that_exist(ranks, case, name, message):
    """What does not go together is an error on all ranks, and the group goes on."""
    for rank, failure in enumerate(ranks(from_tables, case)):
        if name is None:
            assert failure is None
            continue
        elsewhere = case in ("no table", "rows of two items") and rank != 2
        assert failure[0] == ("RuntimeError" if elsewhere else name) and message in failure[1]
        assert not elsewhere or "rank 2" in failure[1]


def refuse(rank):
    """Rank 1 asks for what there is not; the others get theirs."""
    x = rows_like("dense", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS)
    ids, failures = ids_of(rank), []
    bad = ids.clone()
    bad[5] = len(x)
    for arguments in (
        {"ids": bad},
        {"ids": -ids - 1},
        {"ids": ids.float()},
        {"ids": ids.view(10, -1)},
        {"ids": "all"},
        {"ids": ids, "out": torch.empty(3, COLUMNS, dtype=x.dtype)},
        {"ids": ids, "out": torch.empty(len(ids), COLUMNS)},
        {"ids": ids, "device": "meta"},
        {"ids": ids, "max_sms": 0},
    ):
        if rank == 1:
            failures.append(raised(lambda: table.index_select(**arguments)))
        else:
            assert_same_bits(table.index_select(ids), x[ids])
    return failures


def test_wrong_arguments_are_their_ranks_alone(ranks):
    failures = ranks(refuse)[1]
    assert [name for name, _ in failures] == ["IndexError"] * 2 + ["TypeError", "ValueError", "TypeError"] + [
        "ValueError",
        "TypeError",
        "ValueError",
        "ValueError",
    ]
    assert failures[0][1] == f"ids[5] is {sum(SIZES)}; wanted 0 to {sum(SIZES) - 1}"


def refuse_to_compress(rank):
    x = rows_like("dense", 10)
    return [
        raised(lambda: ShardedTable.from_local(x, **OPTIONS, scheme="none" if rank == 2 else "auto")),
        raised(lambda: ShardedTable.from_local(x, **OPTIONS, scheme="planes" if rank == 2 else "auto")),
        raised(lambda: ShardedTable.from_local(x.flatten(), **OPTIONS)),
        raised(lambda: ShardedTable.from_local(x, **OPTIONS, slot_bytes=7 if rank == 0 else None)),
        raised(lambda: ShardedTable.from_local(x, device="meta" if rank == 1 else "cpu", memory="host")),
    ]


def test_wrong_options(ranks):
    for rank, failures in enumerate(ranks(refuse_to_compress)):
        assert (
            failures[0][0] == ("ValueError" if rank == 2 else "RuntimeError") and "scheme is 'none'" in failures[0][1]
        )
        assert "scheme is 'auto' on rank 0 of the group and 'planes' on rank 2" in failures[1][1]
        assert "wanted a tensor of 2 or more dimensions" in failures[2][1]
        assert failures[3][0] == ("ValueError" if rank == 0 else "RuntimeError") and "slot_bytes is 7" in failures[3][1]
        assert (
            failures[4][0] == ("ValueError" if rank == 1 else "RuntimeError") and "device is 'meta'" in failures[4][1]
        )


def meet_corrupt_rows(rank):
    """Of rank 0's shard item 3: who asks for others is not told."""
    x = rows_like("dense", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS, scheme="planes")
    if rank == 0:
        table.local_table.lengths[3] = 5000
    ids = torch.tensor([3, 900]) if rank == 2 else torch.tensor([4, 900])
    if rank != 2:
        assert_same_bits(table.index_select(ids), x[ids])
        return None
    return raised(lambda: table.index_select(ids))


def test_corrupt_rows(ranks):
    failures = ranks(meet_corrupt_rows)
    assert failures[2][0] == "CorruptTableError" and "rank 0" in failures[2][1]


def refit_one(rank):
    """Rows of another codebook than the one that all know are not sent."""
    x = rows_like("dense", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS, scheme="planes")
    if rank == 0:
        table.local_table.refit(scheme="ibp", device="cpu")
    assert_same_bits(table.index_select([900]), x[[900]])
    return raised(lambda: table.index_select([900, 3]))


def test_a_shard_that_is_refit(ranks):
    for name, message in ranks(refit_one):
        assert name == "CorruptTableError" and "rank 0" in message and "refit" in message


def damage(rank):
    """Rows whose bytes contradict their lengths are found by who decodes them."""
    x = rows_like("dense", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS, scheme="planes")
    if rank == 0:
        table.local_table.lengths[3] = 1
    failure = raised(lambda: table.index_select([900, 3]))
    assert_same_bits(table.index_select([4]), x[[4]])
    return failure


def test_damaged_rows(ranks):
    for name, message in ranks(damage):
        assert name == "CorruptTableError" and "ids[1]" in message


def update(rank):
    x = rows_like("dense", sum(SIZES))
    table = ShardedTable.from_local(part_of(x, rank), **OPTIONS)
    ids = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[rank::4][: 100 * rank]
    new = rows_like("dense", len(ids), seed=rank)
    assert table.update_(ids, new) is table
    everything = [None] * 4
    dist.all_gather_object(everything, (ids, new))
    for some, rows in everything:
        x[some] = rows
    assert_same_bits(table.index_select(torch.arange(len(x))), x)
    table.update_([7, 7], rows_like("dense", 2, seed=rank))  # the last one of the last rank
    assert_same_bits(table.index_select([7]), rows_like("dense", 2, seed=3)[1:])
    wrong = raised(lambda: table.update_([0, len(x)] if rank == 1 else [0], x[:2] if rank == 1 else x[1:2]))
    assert_same_bits(table.index_select([0]), x[[0]])
    return wrong


def test_updates(ranks):
    for rank, (name, message) in enumerate(ranks(update)):
        assert name == ("IndexError" if rank == 1 else "RuntimeError")
        assert f"ids[1] is {sum(SIZES)}" in message


def in_subgroup(rank):
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    x = rows_like("dense", 200, seed=rank % 2)
    mine, other = pairs[rank % 2], pairs[1 - rank % 2]
    table = ShardedTable.from_local(x[:50] if rank < 2 else x[50:], mine, **OPTIONS)
    assert_same_bits(table[[0, 199, 50]], x[[0, 199, 50]])
    assert table.group is mine
    return raised(lambda: ShardedTable(table.local_table, other)), raised(lambda: pickle.dumps(table))


def test_groups(ranks):
    for stranger, pickled in ranks(in_subgroup):
        assert stranger[0] == "ValueError" and "not in the group" in stranger[1]
        assert pickled[0] == "TypeError" and "local_table" in pickled[1]


def test_torch_distributed_is_needed():
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedTable(ibp.compress(torch.ones(3, 4), **OPTIONS))
    with pytest.raises(RuntimeError, match="init_process_group"):
        share_table(None)


def lose_a_rank(rank):
    x = rows_like("dense", 90)
    table = ShardedTable.from_local(x[30 * rank :][:30], **OPTIONS)
    if rank == 1:
        os._exit(1)
    return raised(lambda: table.index_select([0])), raised(lambda: ShardedTable(table.local_table))


def test_a_rank_that_dies(tmp_path):
    three = Ranks(3, tmp_path, timeout=20)
    for rank, failures in three.survivors(lose_a_rank, dead=1):
        assert all(name == "RuntimeError" and "not all ranks" in message for name, message in failures), rank


# ---- a cache whose slabs are in several processes ----


def cached(rank, device, group=None, size=4):
    """A cache of all ranks of rows of one shared table: hits of all slabs, misses, and fills."""
    x = rows_like("dense", 2000)
    table = share_table(
        ibp.compress(x, **OPTIONS, scheme="planes") if rank == 0 else None,
        memory="host" if device == "cpu" else "pinned",
    )
    hotness = torch.rand(len(x), generator=torch.Generator().manual_seed(0))
    group = dist.group.WORLD if group is None else group
    cache = ibp.RowCache(table, 30_000, hotness, group=group, devices=device)
    held = {int(row) for slab in cache._state.generation.slabs for row in slab.map[:, 0].tolist() if row >= 0}
    assert 100 * size < len(held) == cache.num_cached_rows <= cache.capacity < 1.05 * len(held)
    assert f"rank {rank} of {size}" in repr(cache)
    assert 0.9 * 30_000 < cache.nbytes <= 30_000
    ids = torch.randint(len(x), (700,), generator=torch.Generator().manual_seed(rank)).to(device)
    for _ in range(2):
        assert_same_bits(cache.index_select(ids, check=True).cpu(), x[ids.cpu()])
    stats = cache.stats()
    assert stats.hits == 2 * sum(row in held for row in ids.tolist()) and stats.hits + stats.misses == 2 * len(ids)
    assert min(stats.hits_of_slabs) > 0 and len(stats.hits_of_slabs) == size
    assert stats.own_hits == stats.hits_of_slabs[rank] and stats.peer_hits == stats.hits - stats.own_hits
    old = cache._state.generation.slabs
    assert [slab.is_lent for slab in old] == [other != rank for other in range(size)]
    for hottest in (-hotness, list(range(100)), [], hotness):
        assert cache.refill(hottest) is cache
        assert_same_bits(cache.index_select(ids, check=True).cpu(), x[ids.cpu()])
    cache.reset_stats()
    coldest = hotness.argsort()[:50].to(device)
    cache.index_select(coldest)
    assert cache.stats().misses == 50
    assert_same_bits(cache.index_select(torch.arange(len(x), device=device), check=True).cpu(), x)
    refused = [
        raised(lambda: cache.invalidate(ids)),
        raised(lambda: cache.update_(ids[:1], x[:1])),
        raised(lambda: cache.refill(hotness[: len(x) - (rank == 1)])),
        raised(lambda: cache.refill(hotness + rank * (torch.arange(len(x)) == 0))),
        raised(lambda: cache.refill([0, len(x)])),
    ]
    assert_same_bits(cache.index_select(coldest).cpu(), x[coldest.cpu()])
    assert cache.refill([]).capacity == 0
    return refused


def check_refused(found):
    for rank, refused in enumerate(found):
        assert [name for name, _ in refused[:2]] == ["RuntimeError"] * 2
        assert refused[2][0] == ("ValueError" if rank == 1 else "RuntimeError") and "[1999]" in refused[2][1]
        assert refused[3][0] == "ValueError" and "hotness is" in refused[3][1]
        assert refused[4][0] == "IndexError"


def test_a_cache_of_several_processes(ranks):
    check_refused(ranks(cached, "cpu"))


def refuse_caches(rank):
    x = rows_like("dense", 300)
    table = ibp.compress(x, **OPTIONS, scheme="planes")
    other = ibp.compress(x if rank == 0 else x + 1, **OPTIONS, scheme="planes")
    world, devices = dist.group.WORLD, {"devices": "cpu"}
    place = ibp.CodedRows(table.codebook, 10, device="cpu")
    assert ibp.RowCache(table, 0, group=world, **devices).index_select([5]).shape == (1, COLUMNS)
    return [
        raised(lambda: ibp.RowCache(table, 1000 + rank, group=world, **devices)),
        raised(lambda: ibp.RowCache(table, 1000, [1] if rank == 2 else None, group=world, **devices)),
        raised(lambda: ibp.RowCache(other, 1000, group=world, **devices)),
        raised(lambda: ibp.RowCache(table, 1000, group=world, policy="lru", **devices)),
        raised(lambda: ibp.RowCache(table, 1000, group=world, writable=True, **devices)),
        raised(lambda: ibp.RowCache(table, 1000, group=world, devices=["cpu", "cpu"])),
        raised(lambda: ibp.RowCache(place, 1000, group=world, **devices)),
        raised(lambda: ibp.RowCache(None if rank == 3 else table, 1000, group=world, **devices)),
    ]


def test_caches_that_ranks_cannot_have(ranks):
    wanted = ["budget_bytes is 1000 on rank 0", "hotness is", "codebook of the table|stored_bytes of the table"]
    wanted += ["is static"] * 3 + ["not of an ibp.CodedRows", "table is a NoneType"]
    for rank, failures in enumerate(ranks(refuse_caches)):
        for (name, message), text in zip(failures, wanted):
            assert re.search(text, message)
            assert name == (("TypeError" if rank == 3 else "RuntimeError") if "NoneType" in text else "ValueError")


def test_gpus_that_cannot_read_each_other(monkeypatch):
    """GPU 2 reads GPU 0, not GPU 1, whatever they are called elsewhere; what is not seen here is not known."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid=f"gpu-{device}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: peer == 0)
    device = torch.device("cuda", 2)
    _peers._check_access(device, ["gpu-0", "gpu-2", "gpu-elsewhere", "gpu-2"])
    _peers._check_access(torch.device("cpu"), ["", ""])
    with pytest.raises(ValueError, match="cuda:2 cannot read the memory of cuda:1, the GPU of rank 3"):
        _peers._check_access(device, ["gpu-0", "gpu-2", "gpu-0", "gpu-1"])


def fail_to_fill(rank):
    """Where one rank has no memory for its slab, all keep what they have."""
    x = rows_like("dense", 300)
    cache = ibp.RowCache(ibp.compress(x, **OPTIONS), 8000, list(range(60)), group=dist.group.WORLD, devices="cpu")
    held, nothing = cache.num_cached_rows, _no_memory if rank == 1 else _peers.filled_slab
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peers, "filled_slab", nothing)
        failure = raised(lambda: cache.refill(list(range(100, 160))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peers.Segment, "opened", _no_memory if rank == 2 else _peers.Segment.opened)
        another = raised(lambda: cache.refill(list(range(100, 160))))
    assert cache.num_cached_rows == held == 60
    assert_same_bits(cache.index_select(torch.arange(300)), x)
    assert cache.stats().hits == 60
    return failure, another


def _no_memory(*args):
    raise torch.OutOfMemoryError("there is none")


def test_a_refill_without_memory(ranks):
    for rank, failures in enumerate(ranks(fail_to_fill)):
        for culprit, (name, message) in zip((1, 2), failures):
            assert name == ("OutOfMemoryError" if rank == culprit else "RuntimeError") and "there is none" in message
            assert rank == culprit or f"rank {culprit}" in message


def lose_a_peer(rank):
    x = rows_like("dense", 300)
    cache = ibp.RowCache(ibp.compress(x, **OPTIONS), 8000, list(range(60)), group=dist.group.WORLD, devices="cpu")
    if rank == 1:
        os._exit(1)
    failure = raised(lambda: cache.refill(list(range(100))))
    assert_same_bits(cache.index_select(torch.arange(300)), x)  # host memory outlives its lender
    return failure


def test_a_peer_that_dies(tmp_path):
    three = Ranks(3, tmp_path, timeout=20)
    for rank, failure in three.survivors(lose_a_peer, dead=1):
        assert failure[0] == "RuntimeError" and "not all ranks" in failure[1], rank


@pytest.mark.slow
def test_the_example():
    """As torchrun starts it, with as many processes as there are GPUs, at most two."""
    path = pathlib.Path(__file__).parents[2] / "examples" / "torchrun_gnn.py"
    assert len(path.read_text().splitlines()) <= 80
    size = min(2, torch.cuda.device_count()) or 2
    said = torchrun(size, path)
    same = "True|False" if torch.cuda.is_available() else "True"
    assert len(re.findall(rf"losses 1\.\d+ to 1\.\d+, the same bits: ({same})", said)) == size


# ---- a table that all share ----


def share(rank):
    x = rows_like("dense", 500)
    table = share_table(ibp.compress(x, **OPTIONS) if rank == 1 else None, src=1)
    ids = ids_of(rank, 40) % 500
    assert_same_bits(table.index_select(ids), x[ids])
    failures = [
        raised(lambda: share_table(None, src=2)),
        raised(lambda: share_table(table, src=4)),
        raised(lambda: share_table(table, src=rank % 2)),
    ]
    return table.is_shared(), table._segment.name, failures


def test_one_table_for_all(ranks):
    found = ranks(share)
    assert all(is_shared for is_shared, _, _ in found) and len({name for _, name, _ in found}) == 1
    for rank, (_, _, failures) in enumerate(found):
        assert failures[0][0] == ("TypeError" if rank == 2 else "RuntimeError")
        assert failures[1] == ("ValueError", "src is 4; wanted 0 to 3")
        assert "src is 0 on rank 0 of the group and 1 on rank 1" in failures[2][1]


def share_far(rank):
    _tables.machine = lambda: "one" if rank < 3 else "other"
    return raised(lambda: share_table(ibp.compress(torch.ones(3, 4), **OPTIONS) if rank == 0 else None))


def test_one_table_is_for_one_machine(tmp_path):
    four = Ranks(4, tmp_path)
    for name, message in four(share_far):
        assert name == "ValueError" and "ranks [3] of the group are on other ones" in message
    four.end()


# ---- on GPUs ----


@pytest.fixture
def spawned(tmp_path):
    """spawned(size, backend): ranks that can use GPUs."""
    made = []

    def start(size, backend):
        made.append(Ranks(size, tmp_path, backend=backend))
        return made[-1]

    yield start
    for some in made:
        some.end()


def cached_on_gpu(rank, device):
    """`cached`, and under a CUDA graph, which goes on reading the slabs that it was captured with."""
    device = torch.device(f"cuda:{rank}" if device == "cuda" else device)
    torch.cuda.set_device(device)
    refused = cached(rank, device, size=2)
    x = rows_like("dense", 2000)
    cache = ibp.RowCache(ibp.compress(x, scheme="planes"), 40_000, list(range(1000)), group=dist.group.WORLD)
    assert cache.devices == (device,) and cache._state.generation.slabs[1 - rank].bytes.device == device
    before = torch.cuda.memory_allocated(device)
    for _ in range(5):  # what was lent can be used again
        cache.refill(list(range(1000)))
    assert torch.cuda.memory_allocated(device) < before + 100_000
    ids, out = torch.arange(0, 1500, 3, device=device), torch.empty(500, COLUMNS, dtype=x.dtype, device=device)
    cache.index_select(ids, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.index_select(ids, out=out)
    cache.refill(list(range(1000, 2000)))
    for first in (0, 1, 400):
        ids.copy_(torch.arange(first, first + 1500, 3)), out.zero_()
        graph.replay()
        assert_same_bits(out.cpu(), x[ids.cpu()])
    assert cache.stats().peer_hits > 0
    dist.barrier()
    return refused


def test_a_cache_of_two_processes_on_one_gpu(cuda, spawned):
    check_refused(spawned(2, "gloo")(cached_on_gpu, "cuda:0"))


def test_a_cache_of_two_processes_on_two_gpus(gpus, spawned):
    check_refused(spawned(2, "nccl")(cached_on_gpu, "cuda"))


def fetch_to_gpu(rank, place):
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    x = rows_like("sparse", 1000) if place == "pinned" else rows_like("dense", 1000)
    part = x[:700] if rank == 0 else x[700:]
    table = ShardedTable.from_local(part if place == "pinned" else part.to(device))
    assert table.local_table.is_cuda == (place == "device") and table.local_table.is_pinned() == (place == "pinned")
    ids = torch.randint(1000, (300,), generator=torch.Generator().manual_seed(rank))
    out = torch.empty(300, 2, x.shape[1], dtype=x.dtype, device=device)
    for some in (ids.to(device), ids, ids[:0].to(device), torch.arange(1000, device=device)):
        assert_same_bits(table.index_select(some, device=device).cpu(), x[some.cpu()])
    table.index_select(ids.to(device).int(), out=out[:, 1], max_sms=8)
    assert_same_bits(out[:, 1].cpu(), x[ids])
    assert_same_bits(table.index_select(ids), x[ids])
    failure = raised(lambda: table.index_select(ids.to(device) + 1000 * rank))
    new = rows_like("sparse" if place == "pinned" else "dense", 40, seed=7 + rank)
    table.update_(torch.arange(rank, 80, 2).flip(0), new.to(device))
    for other in range(2):
        x[torch.arange(other, 80, 2).flip(0)] = rows_like(
            "sparse" if place == "pinned" else "dense", 40, seed=7 + other
        )
    assert_same_bits(table.index_select(torch.arange(1000, device=device)).cpu(), x)
    table.check()
    return failure


def check_bad_ids(failures):
    assert failures[0] is None and failures[1][0] == "IndexError" and "wanted 0 to 999" in failures[1][1]


@pytest.mark.parametrize("place", ["pinned", "device"])
def test_shards_over_gloo_with_a_gpu(cuda, spawned, place):
    check_bad_ids(spawned(2, "gloo")(fetch_to_gpu, place))


@pytest.mark.parametrize("place", ["pinned", "device"])
def test_shards_over_nccl(gpus, spawned, place):
    check_bad_ids(spawned(2, "nccl")(fetch_to_gpu, place))
