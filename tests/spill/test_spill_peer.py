"""Tables whose slots are on a GPU and whose overflow is in the memory of another one: the bits of plain tensors,
whatever is read, changed, copied, captured and freed."""

import copy
import gc
import math
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

import ibp
import ibp.distributed  # registers how tables are sent to other processes
from helpers import assert_same_bits
from ibp._machine import memory
from test_spill import mixed, rows
from test_spill_cuda import assert_reads


@pytest.fixture
def x(gpus):
    if not torch.cuda.can_device_access_peer(*gpus):
        pytest.skip(f"{gpus[0]} cannot read the memory of {gpus[1]}")
    return mixed(2000).to(gpus[0])


def placed(x, target=math.inf, **options):
    return ibp.spill.place(x, target, overflow_memory="cuda:1", **options)


def assert_on_peer(table, slot_bytes):
    assert str(table.device) == "cuda:0" and str(table.overflow.device) == table.overflow_memory == "cuda:1"
    assert table.slot_bytes == slot_bytes and not table.spills_to_host
    assert (table.host_bytes, table.peer_bytes) == (0, table.overflow.numel())
    assert table.device_bytes + table.peer_bytes == table.nbytes
    assert "overflow in the memory of cuda:1" in repr(table)


@pytest.mark.parametrize("target", [1, 4 / 3, 4, math.inf])
@pytest.mark.parametrize("source", ["cuda:0", "cpu"])
@pytest.mark.parametrize("level", ["default", "fast"])
def test_reads(x, target, source, level):
    table = placed(x.to(source), target, device="cuda:0", level=level)
    like = ibp.spill.place(x, target, codebook=table.codebook)
    assert_on_peer(table, like.slot_bytes)
    assert table.peer_bytes == like.host_bytes and table.device_bytes == like.device_bytes
    assert_reads(table, x)
    assert_same_bits(table.overflow.cpu(), like.overflow)


@pytest.mark.parametrize("target", [4 / 3, math.inf])
def test_changes(x, target):
    table = placed(x, target)
    for count, kind in ((100, "noise"), (2000, "noise"), (500, "zeros"), (2000, "coded")):
        ids = torch.randperm(len(x), device=x.device)[:count]
        new = rows(count, kind).to(x.device)
        table.update_(ids, new)
        x[ids] = new
        assert_reads(table, x)
    assert_on_peer(table, table.slot_bytes)
    table.append(x[:10])
    x = torch.cat((x, x[:10]))
    assert_reads(table, x)
    slot_bytes = table.slot_bytes
    table.refit()
    assert_on_peer(table, slot_bytes)
    assert_reads(table, x)


def test_a_short_last_row(x):
    """Its old part is kept while it is encoded again together with new bytes."""
    x = x.view(-1)[:-7]
    table = placed(x, row_bytes=192)
    for _ in range(3):
        table.append(x[:50])
        x = torch.cat((x, x[:50]))
        assert_same_bits(table.decompress(check=True), x)
    assert_on_peer(table, 0)


def test_overflow_grows_behind_work_on_the_stream(x):
    table = placed(x)
    for step in range(20):
        ids = torch.arange(step, 2000, 20, device=x.device)
        new = rows(100, "noise").to(x.device)
        torch.cuda._sleep(2_000_000)
        table.update_(ids, new)
        x[ids] = new
    assert_reads(table, x)


def test_an_update_that_finds_no_memory_changes_nothing(x, monkeypatch):
    table = placed(x)

    def full(num_bytes, home, device):
        raise torch.OutOfMemoryError(f"{home} has no free memory for {num_bytes:,} bytes of overflow")

    with monkeypatch.context() as patch:
        patch.setattr(memory, "empty_overflow", full)
        with pytest.raises(torch.OutOfMemoryError, match="cuda:1 has no free memory"):
            table.update_(torch.arange(2000, device=x.device), rows(2000, "noise").to(x.device))
    assert_reads(table, x)
    with pytest.raises(torch.OutOfMemoryError, match="cuda:1 has no free memory for 1,099,511,627,776 bytes"):
        memory.empty_overflow(1 << 40, torch.device("cuda", 1), x.device)


def test_copies(x, gpus, tmp_path):
    table = placed(x, 4)
    for other in (table.clone(), copy.copy(table), copy.deepcopy(table), table.to("cuda:0", copy=True)):
        assert_on_peer(other, 32)
        other.update_([1, 2], x[[2, 3]])
        assert_reads(table, x)
        assert_same_bits(other[1], x[2])
    dumped = pickle.dumps(table), bytes(ForkingPickler.dumps(table))
    for other in (*map(pickle.loads, dumped), ibp.spill.place(table)):
        assert other.overflow_memory == "pinned" and other.peer_bytes == 0
        assert_reads(other, x)
    for gpu in gpus:
        other = table.cpu().to(gpu) if gpu == table.device else table.to(gpu)
        assert other.device == gpu and other.overflow_memory == "device"
        assert_reads(other, x.to(gpu))
    ibp.save(tmp_path / "x.safetensors", {"x": table})
    loaded = ibp.load(tmp_path / "x.safetensors")["x"]
    for source in (loaded, loaded.cuda(), loaded.to(gpus[1]), ibp.spill.place(loaded, device="cuda:0"), table):
        other = ibp.spill.place(source, device="cuda:0", overflow_memory=gpus[1])
        assert_on_peer(other, 32)
        assert_reads(other, x)
    assert other is table and not table.is_shared()
    with pytest.raises(RuntimeError, match="in the memory of cuda:1 and whose slots are on a GPU cannot be shared"):
        table.share()


def test_copies_wait_for_rows_that_are_being_coded(x):
    table = placed(x)
    new = rows(2000, "coded").to(x.device)
    for copied in (copy.deepcopy, lambda table: table.cpu(), lambda table: table.to("cuda:1")):
        torch.cuda._sleep(50_000_000)
        table.update_(torch.arange(2000, device=x.device), new)
        assert_same_bits(copied(table).decompress(device="cpu"), new.cpu())
        new = new.flip(0)


def test_a_graph(x):
    table = placed(x, 4)
    everything = torch.arange(len(x), device=x.device)
    table.update_(everything, x.flip(0))  # Afterwards overflow has room for a few rows more.
    out = torch.empty_like(x)
    table.index_select(everything, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.index_select(everything, out=out)
    x, overflow = x.flip(0), table.overflow
    for row in (7, 8, 9):
        x[row] = rows(1, "noise")[0].to(x.device)
        table.update_([row], x[row : row + 1])
        out.zero_()
        graph.replay()
        assert_same_bits(out, x)
    assert table.overflow is overflow


@pytest.mark.parametrize("is_default", [True, False])
def test_freed_memory_is_not_reused_too_early(x, gpus, is_default):
    """A table is freed while its GPU still has to read it, and the other GPU at once fills memory of the same size."""
    stream = torch.cuda.current_stream(x.device) if is_default else torch.cuda.Stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    out = torch.empty_like(x)
    with torch.cuda.stream(stream):
        for _ in range(5):
            table = placed(x)
            num_bytes = table.overflow.numel()
            out.zero_()
            torch.cuda._sleep(50_000_000)
            ibp.decompress(table, out=out)
            del table
            others = [memory.empty_overflow(num_bytes, gpus[1], gpus[0]) for _ in range(3)]
            for other in others:
                with torch.cuda.stream(torch.cuda.Stream(gpus[1])):
                    other.fill_(255)
            torch.cuda.synchronize(gpus[1])
            assert_same_bits(out, x)


def test_memory_is_freed(x, gpus):
    torch.cuda.synchronize(gpus[0])
    before = torch.cuda.memory_allocated(gpus[1])
    for _ in range(3):
        table = placed(x)
        assert torch.cuda.memory_allocated(gpus[1]) >= before + table.peer_bytes
        view = memory.seen_from(x.device, table.overflow)
        overflow = table.overflow.to(x.device)
        del table
        assert_same_bits(view, overflow)  # A view keeps the memory.
        del view
        gc.collect()
        assert torch.cuda.memory_allocated(gpus[1]) == before


def test_a_cache_of_rows_over_such_a_table(x):
    cache = ibp.RowCache(placed(x, 4), 1 << 17, torch.rand(len(x)))
    ids = torch.randint(len(x), (500,), device=x.device)
    assert_same_bits(cache.index_select(ids), x[ids])


EXPANDABLE = """
import torch, ibp
x = torch.randn(4000, 512, device="cuda:0").bfloat16()
noise = torch.randint(-(2**15), 2**15, x.shape, dtype=torch.int16, device="cuda:0").view(torch.bfloat16)
held = torch.ones(1 << 20, device="cuda:1")
table = ibp.spill.place(x, 4, overflow_memory="cuda:1")
assert table.decompress(check=True).equal(x)
for rows in (noise, x):
    table.update_(torch.arange(4000, device="cuda:0"), rows)
assert table.decompress(check=True).equal(x) and bool(held.eq(1).all())
pinned = ibp.compress(x.cpu())
cache = ibp.RowCache(pinned, 1 << 20, torch.rand(4000), devices=["cuda:0", "cuda:1"])
for gpu in cache.devices:
    assert cache.index_select(torch.arange(4000, device=gpu)).cpu().equal(x.cpu())
assert cache.stats().peer_hits > 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_other_ways_to_allocate(x, setting):
    """Kernels reach memory that torch's allocator maps itself, whose access cudaDeviceEnablePeerAccess does not set."""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": setting, "PYTORCH_ALLOC_CONF": setting}
    done = subprocess.run([sys.executable, "-c", EXPANDABLE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
