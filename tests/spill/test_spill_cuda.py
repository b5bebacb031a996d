"""Tables whose slots are on a GPU and whose overflow is in pinned host memory: the bits of plain tensors, whatever is
read and changed."""

import copy
import math
import multiprocessing
import pickle

import pytest
import torch

import ibp
from helpers import assert_same_bits
from test_spill import mixed, rows

TARGETS = [1, 4 / 3, 2, 4, 16, math.inf]


@pytest.fixture
def x(cuda):
    return mixed(2000).to(cuda)


def assert_reads(table, x):
    assert_same_bits(table.decompress(check=True), x)
    ids = torch.randint(len(x), (500,), device=x.device)
    assert_same_bits(table.index_select(ids, check=True), x[ids])
    assert_same_bits(table.decompress(device="cpu"), x.cpu())
    assert_same_bits(table[7:50], x[7:50])
    assert_same_bits(torch.nn.functional.embedding(ids, table), x[ids])


def assert_spills(table, slot_bytes):
    assert table.spills_to_host and table.is_cuda and table.overflow.device.type == "cpu"
    assert table.overflow.numel() == 0 or table.overflow.is_pinned()
    assert table.slot_bytes == slot_bytes and table.host_bytes == table.overflow.numel()
    assert table.device_bytes + table.host_bytes == table.nbytes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", ["cuda", "cpu"])
@pytest.mark.parametrize("level", ["default", "fast"])
def test_targets(x, target, source, level):
    table = ibp.spill.place(x.to(source), target, device="cuda", level=level)
    slot_bytes = ibp.spill.place(x.cpu(), target, device="cpu", level=level).slot_bytes
    assert_spills(table, slot_bytes)
    assert_reads(table, x)
    assert "overflow in host memory" in repr(table)


@pytest.mark.parametrize("target", TARGETS)
def test_changes(x, target):
    table = ibp.spill.place(x, target)
    device_bytes = None
    for count, kind in ((100, "noise"), (2000, "noise"), (500, "zeros"), (700, "sparse"), (2000, "coded")):
        ids = torch.randperm(len(x), device=x.device)[:count]
        new = rows(count, kind).to(x.device)
        table.update_(ids, new)
        x[ids] = new
        assert_reads(table, x)
        assert device_bytes in (None, table.device_bytes)
        device_bytes = table.device_bytes
    table.update_([3], x[:1].cpu())
    x[3] = x[0]
    assert_spills(table, table.slot_bytes)
    table.append(x[:10])
    assert_reads(table, torch.cat((x, x[:10])))
    slot_bytes = table.slot_bytes
    table.refit()
    assert_spills(table, slot_bytes)
    assert_reads(table, torch.cat((x, x[:10])))


@pytest.mark.parametrize("level", ["default", "fast"])
def test_refit_keeps_the_level(cuda, level):
    x = torch.randn(3000, 512, device=cuda)
    table = ibp.spill.place(x, 4 / 3, level=level)
    table.update_(torch.arange(3000, device=cuda), 100 * x)
    table.refit()
    assert_reads(table, 100 * x)
    assert table.spills_to_host and table.slot_bytes == 1536 and table.codebook.level == level


def test_changes_behind_work_on_the_stream(x):
    """The overflow grows while the GPU still has changes to make."""
    table = ibp.spill.place(x, math.inf)
    for step in range(20):
        table.update_(torch.arange(step, 2000, 20, device=x.device), rows(100, "noise").to(x.device))
        table.update_(torch.arange(step, 2000, 20, device=x.device), x[step::20])
    assert_reads(table, x)


def test_copies(x, tmp_path):
    table = ibp.spill.place(x, 4)
    for other in (table.clone(), copy.copy(table), copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert_spills(other, 32)
        other.update_([1, 2], x[[2, 3]])
        assert_reads(table, x)
        assert_same_bits(other[1], x[2])
    assert_same_bits(table.cpu().decompress(device="cpu"), x.cpu())
    assert table.cpu().host_bytes == table.cpu().nbytes
    torch.save(table, tmp_path / "x.pt")
    assert_spills(torch.load(tmp_path / "x.pt", weights_only=True), 32)
    assert_reads(torch.load(tmp_path / "x.pt", weights_only=True), x)
    assert torch.load(tmp_path / "x.pt", map_location="cpu", weights_only=True).device.type == "cpu"
    ibp.save(tmp_path / "x.safetensors", {"x": table})
    loaded = ibp.load(tmp_path / "x.safetensors")["x"]
    placed = ibp.spill.place(loaded, device="cuda")
    assert_spills(placed, 32)
    assert_reads(placed, x)
    near = ibp.spill.place(table.cpu().cuda())
    assert_spills(near, 32)
    assert_reads(near, x)
    assert ibp.spill.place(table) is table
    with pytest.raises(RuntimeError, match="cannot be shared"):
        table.share()


def _read(connection, table):
    connection.send(table.decompress(device="cpu").view(torch.int16).tolist())


def test_another_process_gets_a_copy(x):
    table = ibp.spill.place(x[:20], 4)
    context = multiprocessing.get_context("spawn")
    mine, other = context.Pipe()
    process = context.Process(target=_read, args=(other, table))
    process.start()
    assert mine.poll(120)
    assert mine.recv() == x[:20].view(torch.int16).tolist()
    process.join(60)
    assert_reads(table, x[:20])


@pytest.mark.parametrize("slot_bytes", [0, 32, 128])
def test_places(x, slot_bytes):
    codebook = ibp.codecs.analyze(x, scheme="planes")
    place = ibp.CodedRows(
        codebook, len(x), slot_bytes=slot_bytes, overflow_bytes=len(x) * 192, overflow_memory="pinned"
    )
    assert place.slots.is_cuda and place.overflow.is_pinned()
    for _ in range(3):
        ibp.encode_into(x, place)
        assert_same_bits(place.decode(dtype=x.dtype), x)
        ids = torch.randint(len(x), (300,), device=x.device)
        assert_same_bits(place.decode(ids, x.dtype), x[ids])
        x = x.flip(0).contiguous()
    table = place.table(x.shape, x.dtype)
    assert_spills(table, slot_bytes)
    assert_reads(table, x.flip(0))


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda table: pickle.loads(pickle.dumps(table)), lambda table: table.cpu()],
    ids=["clone", "pickle", "cpu"],
)  # fmt: skip
def test_copies_wait_for_rows_that_are_being_coded(x, copied):
    codebook = ibp.codecs.analyze(x, scheme="planes")
    place = ibp.CodedRows(codebook, len(x), slot_bytes=0, overflow_bytes=len(x) * 192, overflow_memory="pinned")
    place.overflow.zero_()
    torch.cuda._sleep(50_000_000)
    ibp.encode_into(x, place)
    table = copied(place.table(x.shape, x.dtype))
    assert_same_bits(table.decompress(device="cpu"), x.cpu())


def test_a_cache_of_rows_over_a_placed_table(x):
    table = ibp.spill.place(x, 4)
    cache = ibp.RowCache(table, 1 << 17, torch.rand(len(x)))
    ids = torch.randint(len(x), (500,), device=x.device)
    assert_same_bits(cache.index_select(ids), x[ids])


def test_profile_on_the_gpu(x):
    found = ibp.spill.profile([{"x": x}, {"x": x.flip(0)}])["x"]
    table = ibp.spill.place(x, found)
    assert_spills(table, found.slot_bytes)
    assert table.overflow.numel() == found.spill(0).num_bytes
    assert_reads(table, x)


def test_two_gpus(x, gpus):
    table = ibp.spill.place(x, 4)
    for other in (table.to(gpus[1]), ibp.spill.place(table, device=gpus[1])):
        assert other.device == gpus[1]
        assert_spills(other, 32)
        assert_reads(other, x.to(gpus[1]))
        other.update_([0], x[1:2])
    assert_reads(table, x)


def test_pages_that_outgrow_their_slots(x):
    """More pages than a pool holds that has to keep them all: none is lost, and each comes back."""
    pages = x.view(200, 10 * 96)
    codebook = ibp.codecs.analyze(x, scheme="planes")
    store = ibp.kv.KVStore(
        codebook, page_bytes=10 * 192, num_pages=200, pool_bytes=2000 * 100, memory="device", overflow_memory="pinned"
    )
    assert store.place.slots.is_cuda and store.place.overflow.is_pinned() and store.pool_bytes == 2000 * 96
    order = torch.randperm(200)
    for numbers in (order.tolist(), order.to(x.device)):
        assert store.store(numbers, pages).lost() == []
        out = torch.empty_like(pages)
        store.load(numbers, out).synchronize()
        assert_same_bits(out, pages)
    store.compact()
    store.load(order[:50].tolist(), out[:50]).synchronize()
    assert_same_bits(out[:50], pages[:50])
    store.check()


@pytest.mark.parametrize("slot_bytes", [0, 32, 96, 160, 192])
def test_pages_that_grow_again_and_again(x, slot_bytes):
    """Rows keep their parts of overflow, also after `clear`: none is lost, whatever was there before."""
    codebook = ibp.codecs.analyze(x, scheme="planes")
    store = ibp.kv.KVStore(
        codebook, page_bytes=10 * 192, num_pages=64, slot_bytes=slot_bytes, memory="device", overflow_memory="pinned"
    )
    out = torch.empty(64, 10 * 96, dtype=x.dtype, device=x.device)
    for call, kind in enumerate(("sparse", "coded", "zeros", "noise", "coded", "noise")):
        pages = rows(640, kind).view(64, -1).to(x.device)
        assert store.store(range(64), pages).lost() == []
        store.load(range(64), out).synchronize()
        assert_same_bits(out, pages)
        if call == 1:
            assert store.compact() == 0
        if call == 4:
            store.clear()
    store.check()
    assert store.stats().lost_rows == 0


@pytest.mark.parametrize("row_bytes", [64, 256, 512, 1024, 2048, 4096, 16384])
@pytest.mark.parametrize("level", ["default", "fast"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_many_sizes(cuda, row_bytes, level, dtype):
    """Every group of threads that decodes rows, with rows in their slots, beyond them, raw and default."""
    count = max(300, (4 << 20) // row_bytes)
    x = torch.randn(count, row_bytes // dtype.itemsize, device=cuda).to(dtype)
    kinds = torch.arange(count, device=cuda) % 7
    x[kinds == 3] = 0
    noise = torch.randint(-(2**31), 2**31 - 1, (count, row_bytes // 4), dtype=torch.int32, device=cuda)
    x[kinds > 4] = noise.view(dtype)[kinds > 4]
    ids = torch.randint(count, (count // 2,), device=cuda)
    for target in (4 / 3, 2):
        table = ibp.spill.place(x, target, level=level)
        assert table.overflow.numel() > table.slots.numel() // 100
        for max_sms in (None, 5):
            assert_same_bits(table.decompress(max_sms=max_sms, check=True), x)
            assert_same_bits(table.index_select(ids, max_sms=max_sms, check=True), x[ids])
        table.update_(ids[:50].unique(), x[: len(ids[:50].unique())])
        changed = x.clone()
        changed[ids[:50].unique()] = x[: len(ids[:50].unique())]
        assert_same_bits(table.decompress(check=True), changed)
        assert_same_bits(table.index_select(ids, check=True), changed[ids])
