"""Tables, files and caches that many use at once: threads, processes that are forked, streams of a GPU, and a GPU whose
memory is full."""

import concurrent.futures
import contextlib
import gc
import io
import itertools
import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import ibp
from children import in_child, status_of
from fault_cases import ON_CPU
from helpers import assert_same_bits, embedding, in_threads, spiky_rows, take
from ibp._activations.offload import ActivationOffload
from ibp._common import process
from ibp._fetch import host_gather
from ibp._offload.events import Events
from ibp.cache._slabs import StreamOrder

NUM_ITEMS, THREADS, ROUNDS = 3000, 4, 8


@pytest.fixture(scope="module")
def x():
    return spiky_rows(NUM_ITEMS, 48)


@pytest.fixture(scope="module")
def tables(x):
    options = {"slots": {}, "packed": {"layout": "packed"}, "masks": {"scheme": "ibp"}}
    return {name: ibp.compress(x, **some, **ON_CPU) for name, some in options.items()}


@pytest.fixture
def path(x, tables, tmp_path):
    ibp.save(tmp_path / "model.safetensors", {**tables, "plain": x})
    return tmp_path / "model.safetensors"


def reader(x, find, device="cpu"):
    """Reads rows, a slice and the whole of what find() gives, as long as others do."""

    def read():
        generator = torch.Generator().manual_seed(0)
        for _ in range(ROUNDS):
            ids = torch.randint(NUM_ITEMS, (200,), generator=generator)
            source = find()
            assert_same_bits(source.index_select(ids.to(device)).cpu(), x[ids])
            assert_same_bits(source[100:130].cpu(), x[100:130])
            assert_same_bits(source.decompress(device=device).cpu(), x)

    return read


@pytest.mark.parametrize("scheme", ["ibp", "planes", "raw"])
def test_threads_read_a_table(x, scheme, set_threads):
    set_threads(2)
    table = ibp.compress(x, scheme=scheme, **ON_CPU)
    in_threads(*[reader(x, lambda: table)] * THREADS)


def test_threads_read_a_file(x, path):
    """Tables are made when they are first asked for, here by all threads at once."""
    with ibp.open(path, memory="host", verify=True) as file:
        names = ["slots", "packed", "masks"]
        in_threads(*(reader(x, lambda name=name: file[name]) for name in names * 2))
        assert_same_bits(file["plain"], x)


@pytest.mark.parametrize("options", [{"hotness": torch.rand(NUM_ITEMS)}, {"policy": "lru"}], ids=["static", "lru"])
def test_threads_read_a_cache(x, options):
    cache = ibp.RowCache(ibp.compress(x, **ON_CPU), 60_000, devices="cpu", **options)
    in_threads(*[reader(x, lambda: cache)] * THREADS)
    assert cache.stats().hits > 0


def test_threads_compress_and_save(x, tmp_path):
    """What they make does not depend on what others do."""

    def work(number):
        for _ in range(3):
            part = x[: 500 * (number + 1)]
            ibp.save(tmp_path / f"{number}.safetensors", ibp.compress(part, **ON_CPU))
            assert_same_bits(ibp.load(tmp_path / f"{number}.safetensors", memory="host")["tensor"].decompress(), part)

    in_threads(*(lambda number=number: work(number) for number in range(THREADS)))
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{number}.safetensors" for number in range(THREADS)]


def test_threads_save_to_one_path(x, path):
    """The file is one of those that were saved."""
    parts = [x[: 700 * (number + 1)] for number in range(THREADS)]
    in_threads(*(lambda part=part: ibp.save(path, ibp.compress(part, **ON_CPU)) for part in parts))
    found = ibp.load(path, verify=True, memory="host")["tensor"]
    assert_same_bits(found.decompress(), x[: len(found)])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_bars_that_are_not_shown_take_no_lock(x, path):
    """An interrupt in a thread that shows a bar can leave its lock taken: others go on."""

    def work():
        ibp.save(path, ibp.compress(x, **ON_CPU))
        assert_same_bits(ibp.load(path, verify=True, memory="host")["tensor"].decompress(), x)

    with process.tqdm(total=1, file=io.StringIO()).get_lock():
        in_threads(work)


# ---- forks ----


def test_forked_processes_go_on(x, path):
    """After a table, a file and a cache have been used, and while a thread uses them."""
    table = ibp.compress(x, **ON_CPU)
    cache = ibp.RowCache(table, 60_000, torch.rand(NUM_ITEMS), devices="cpu")
    opened = ibp.open(path, memory="host")
    users = [reader(x, lambda: table), reader(x, lambda: opened["slots"]), reader(x, lambda: cache)]
    for user in users:
        user()

    def fork():
        children = []
        for user in users:
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    torch.set_num_threads(1)
                    user()
                    changed = ibp.compress(x, **ON_CPU).update_([5], x[:1])
                    assert_same_bits(changed[5], x[0])
                    status = 0
                finally:
                    os._exit(status)
            children.append(child)
        return [os.waitstatus_to_exitcode(status_of(child)) for child in children]

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        using = pool.submit(users[0])
        assert fork() == [0, 0, 0]
        using.result(60)
    for user in users:
        user()


def cache_of(x, **options):
    return ibp.RowCache(ibp.compress(x, **ON_CPU), 60_000, torch.rand(NUM_ITEMS), devices="cpu", **options)


def looks_up(**options):
    def make(x):
        cache = cache_of(x, **options)
        ids = torch.tensor([5, 8])
        cache.index_select(ids)  # later calls take the shortest way
        return lambda: assert_same_bits(cache.index_select(ids), x[ids])

    return make


def refills(x):
    cache = cache_of(x)
    some = cache.cached_ids()[:2]

    def use():
        cache.refill(some.tolist())
        assert torch.equal(cache.cached_ids(), some)

    return use


def puts_and_gets(x):
    kept, keys = ibp.kv.KeyedPages(1 << 20, device="cpu"), itertools.count()

    def use():
        key, out = (os.getpid(), next(keys)), torch.empty_like(x[0])
        assert kept.put(key, x[0]) and kept.get(key, out)
        assert_same_bits(out, x[0])

    use()
    return use


def stores_and_loads(x):
    store = ibp.kv.KVStore(x, page_bytes=x[0].nbytes, num_pages=4, device="cpu")

    def use():
        out = torch.empty_like(x[:1])
        store.store([1], x, [8]).wait()
        store.load([1], out, [0]).synchronize()
        assert_same_bits(out, x[8:9])

    return use


def saves_activations(x):
    offload = ibp.offload_activations(device="cpu", least_bytes=1024)

    def use():
        given = x[:64].float().requires_grad_()
        with offload:
            product = given * given
        # Without autograd's engine: no child uses it, if there is a GPU, once the parent has.
        assert_same_bits(product.grad_fn._saved_self, given)

    return use


def calls_an_offloaded_model(x):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)).requires_grad_(False)
    given = torch.ones(2, 64)
    wanted = model(given)
    ibp.offload(model, "cpu", min_bytes=1024)
    return lambda: assert_same_bits(model(given), wanted)


def gathers_for_a_gpu(x):
    host_gather._stagers.clear()
    return lambda: host_gather._stager_of(torch.device("cpu"))


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (looks_up(), (StreamOrder, "is_settled")),
        (looks_up(policy="lru"), (StreamOrder, "is_settled")),
        (refills, (ibp.RowCache, "_made")),
        (puts_and_gets, (ibp.kv.KVStore, "_paged")),
        (stores_and_loads, (ibp.kv.KVStore, "_begun")),
        (saves_activations, (ActivationOffload, "_save")),
        (calls_an_offloaded_model, (Events, "_fetch_ahead")),
        (gathers_for_a_gpu, (host_gather, "_new_stager")),
    ],
)
def test_a_process_forks_while_a_thread_holds_a_lock(make, place, x, monkeypatch):
    """The thread is in the middle of a call, and goes on some time later; the child and the parent use the object."""
    use, parent, (owner, name) = make(x), os.getpid(), place
    is_within, may_end, works = threading.Event(), threading.Event(), getattr(owner, name)

    def pauses(*args, **options):
        if os.getpid() == parent and not may_end.is_set():
            is_within.set()
            assert may_end.wait(60)
        return object() if owner is host_gather else works(*args, **options)

    monkeypatch.setattr(owner, name, pauses)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        using = pool.submit(use)
        assert is_within.wait(60)
        threading.Timer(0.1, may_end.set).start()
        assert os.waitstatus_to_exitcode(status_of(in_child(use))) == 0 and may_end.is_set()
        using.result(60)
    use()


def test_a_forked_process_makes_torchs_threads_anew(monkeypatch):
    """Before it starts threads: several at once would meet a pool that is being replaced."""
    asked = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    child = os.fork()
    if child == 0:
        os._exit(0 if asked == [torch.get_num_threads()] else 1)
    assert os.waitstatus_to_exitcode(status_of(child)) == 0 and asked == []


_THREADS_OF_CHILDREN = """
import os, sys, threading
import torch
import ibp

torch.set_num_threads(2)
sys.setswitchinterval(1e-6)
x = torch.randn(400, 512).bfloat16()
table, data = ibp.compress(x, scheme="planes", memory="host"), x.view(torch.uint8).reshape(-1).clone()
table.decompress()
torch.randn(1000, 1000).sum()
codec, words = table.codebook.codec, table.codebook.words("cpu")

def work(barrier, failed):
    barrier.wait()
    try:
        torch.ops.ibp.measure_rows(data, words, codec)
    except Exception as error:
        failed.append(error)

for _ in range(30):
    child = os.fork()
    if child == 0:
        barrier, failed = threading.Barrier(8), []
        threads = [threading.Thread(target=work, args=(barrier, failed)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            print(failed[0], file=sys.stderr)
        os._exit(len(failed))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


@pytest.mark.slow
def test_threads_of_forked_processes():
    """Which are the first to use torch's threads there, several at a time: most such children would fail."""
    run = subprocess.run([sys.executable, "-c", _THREADS_OF_CHILDREN], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr


def test_a_process_that_is_killed_stops_no_other(x, path):
    """What forked processes have in common is no lock."""

    def work():
        while True:
            ibp.load(path, verify=True, memory="host")
            ibp.compress(x[:50], **ON_CPU)

    for _ in range(8):
        child = os.fork()
        if child == 0:
            try:
                work()
            finally:
                os._exit(1)
        ibp.load(path, verify=True, memory="host")
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(status_of(child)) == -signal.SIGKILL
    in_threads(reader(x, lambda: ibp.load(path, memory="host")["slots"]))


# ---- GPUs ----


def test_threads_on_streams_of_a_gpu(cuda, x):
    table = ibp.compress(x)
    cache = ibp.RowCache(table, 60_000, torch.rand(NUM_ITEMS), devices=cuda)

    def on_a_stream(read):
        def work():
            with torch.cuda.stream(torch.cuda.Stream(cuda)):
                read()

        return work

    users = [reader(x, lambda: table, cuda), reader(x, lambda: cache, cuda)]
    in_threads(*(on_a_stream(user) for user in users * 2))
    table.check()


def test_a_table_is_dropped_while_streams_read_it(cuda):
    """Its memory is nobody else's before they are done, whichever stream reads: the next tables take it again."""
    x = embedding(60_000, 128, torch.bfloat16)
    ids = torch.randint(len(x), (300_000,), device=cuda)
    expected, wrong = x.to(cuda)[ids], 0
    streams = [torch.cuda.Stream(cuda) for _ in range(3)]
    for number in range(6):
        table = ibp.compress(x, scheme="planes" if number % 2 else "raw")
        if number > 3:
            table = table.to(cuda)
        got = []
        torch.cuda.synchronize(cuda)
        for stream in streams:
            with torch.cuda.stream(stream):
                got.append(table.index_select(ids))
        del table
        other = ibp.compress(-x)  # in the memory that is free
        torch.cuda.synchronize(cuda)
        wrong += sum(not torch.equal(rows, expected) for rows in got)
        del other, got
    assert wrong == 0


def test_a_result_is_the_streams_that_asked(cuda, x):
    """Another stream that waits for that one reads what was written."""
    table, side = ibp.compress(x), torch.cuda.Stream(cuda)
    ids, out = torch.randint(NUM_ITEMS, (2000,)), torch.empty(2000, 48, device=cuda)
    near = ids.to(cuda)
    torch.cuda.synchronize(cuda)
    for _ in range(5):
        with torch.cuda.stream(side):
            table.index_select(near, out=out)
        torch.cuda.current_stream(cuda).wait_stream(side)
        assert_same_bits((out + 0).cpu(), x[ids])
        side.wait_stream(torch.cuda.current_stream(cuda))
        out.zero_()


@pytest.fixture
def little_memory(cuda):
    """little_memory(): from then on the GPU has no memory for anything large, nor has torch's pool."""
    taken = []

    def limit(num_bytes):
        total = torch.cuda.get_device_properties(cuda).total_memory
        torch.cuda.set_per_process_memory_fraction(num_bytes / total, cuda)

    def take_it():
        gc.collect()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_reserved(cuda)
        limit(held)
        for power in range(30, 20, -1):  # what is free beside tensors; those of up to 1 MiB have segments of their own
            with contextlib.suppress(torch.OutOfMemoryError):
                while True:
                    taken.append(torch.empty(1 << power, dtype=torch.uint8, device=cuda))
        limit(held + (8 << 20))

    yield take_it
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    taken.clear()


def gpu_calls(x, table, ids):
    """Calls that need much memory of a GPU: what they give, as a tensor."""
    cuda = ids.device
    return {
        "index_select": lambda: table.index_select(ids),
        "index_select of CPU ids": lambda: table.index_select(ids.cpu(), device=cuda),
        "decompress": lambda: table.decompress(device=cuda)[: ids.numel()],
        "to": lambda: table.to(cuda).index_select(ids),
        "compress": lambda: ibp.compress(x, device=cuda).index_select(ids),
        "RowCache": lambda: ibp.RowCache(table, 1 << 26, torch.rand(len(table)), devices=cuda).index_select(ids),
        "embedding_bag": lambda: ibp.embedding_bag(table, ids.view(-1, 1), mode="sum"),
    }


def test_a_gpu_without_memory(cuda, little_memory):
    """An error that says so, and everything works once there is memory."""
    x = embedding(400_000, 64)
    table, ids = ibp.compress(x, scheme="planes"), torch.arange(200_000, device=cuda)
    calls = gpu_calls(x, table, ids)
    table.index_select(ids[:10])
    assert_same_bits(calls["index_select"]().cpu(), x[:200_000])
    torch.cuda.synchronize(cuda)
    little_memory()
    refused = set()
    for name, call in calls.items():
        try:
            call()
        except RuntimeError as error:
            assert "out of memory" in str(error), name
            assert isinstance(error, torch.OutOfMemoryError) or name not in ("index_select", "decompress", "RowCache")
            refused.add(name)
        gc.collect()
        torch.cuda.empty_cache()
    assert {"index_select", "decompress", "RowCache"} <= refused
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    for name, call in calls.items():
        assert torch.equal(call().cpu(), x[:200_000]), name
    table.check()


def test_a_gpu_without_memory_changes_nothing(cuda, little_memory):
    x = embedding(200_000, 64)
    table = ibp.compress(x, scheme="planes").to(cuda)
    rows, ids = embedding(100_000, 64, seed=1), torch.arange(100_000)
    little_memory()
    changes = [lambda: table.update_(ids, rows), lambda: table.append(rows), lambda: table.refit()]
    for change in changes:
        with pytest.raises(torch.OutOfMemoryError):
            change()
        gc.collect()
        torch.cuda.empty_cache()
        some = torch.arange(0, len(x), 997)
        assert_same_bits(table.index_select(some.to(cuda)).cpu(), take(x, some))
    torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert_same_bits(table.decompress().cpu(), x)
    table.update_(ids, rows)
    assert_same_bits(table.decompress().cpu(), torch.cat((rows, x[100_000:])))
