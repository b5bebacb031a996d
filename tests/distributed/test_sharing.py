"""Tables that several processes read: handles, processes that are forked and spawned, and memory counted once."""

import base64
import concurrent.futures
import dataclasses
import fcntl
import gc
import multiprocessing
import os
import pathlib
import pickle
import re
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

import ibp
from helpers import assert_same_bits
from ibp import _core
from ibp._common import wire
from ibp._machine import segments
from ibp._rows.table import tensors_of

SECONDS = 120  # that another process may take
OPTIONS = {"device": "cpu", "memory": "host"}
METHODS = ["fork", "spawn"]
SPELLINGS = ["slots", "packed", "raw", "ibp"]


@pytest.fixture(scope="module")
def x():
    return torch.randn(3000, 96, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def table_of(x, spelling="slots"):
    options = {
        "slots": {"scheme": "planes", "slot_bytes": 96},
        "packed": {"scheme": "planes", "layout": "packed"},
        "raw": {"scheme": "raw"},
        "ibp": {"scheme": "ibp"},
    }
    return ibp.compress(x, **options[spelling], **OPTIONS)


@pytest.fixture(scope="module")
def spawned():
    """A process that was spawned: to start one takes seconds."""
    with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture
def in_process(spawned):
    """call(method, function, *args): what function(*args) returns in a process that is forked or spawned; its exception
    is raised here."""

    def call(method, function, *args):
        if method == "spawn":
            return spawned.submit(function, *args).result(SECONDS)
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(
            target=_answer, args=(sender, function, args), daemon=True
        )
        process.start()
        assert receiver.poll(SECONDS), "the process does not answer"
        outcome = receiver.recv()
        process.join(SECONDS)
        return outcome

    return call


def _answer(sender, function, args):
    sender.send(function(*args))


def rows_of(table, ids):
    return table.is_shared(), table.index_select(torch.tensor(ids)).float().tolist()


def opened_rows(handle, ids):
    return rows_of(ibp.distributed.open_shared(handle), ids)


# ---- in this process ----


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_shared_table_is_the_same_table(x, spelling):
    table = table_of(x, spelling)
    savings, nbytes = table.savings, table.nbytes
    assert not table.is_shared()
    assert table.share_memory_() is table and table.is_shared() and table.share_memory_() is table
    assert (table.savings, table.nbytes, table.device.type, table.is_pinned()) == (savings, nbytes, "cpu", False)
    assert_same_bits(table.decompress(), x)
    for other in (table.clone(), pickle.loads(pickle.dumps(table))):
        assert not other.is_shared()
        assert_same_bits(other.decompress(), x)


def test_handles_open_one_memory(x):
    table = table_of(x)
    first, second = table.share(), pickle.loads(pickle.dumps(table.share()))
    assert first.process == os.getpid() and first.num_bytes >= table.slots.numel() and "_fields" not in repr(first)
    opened = [ibp.distributed.open_shared(first), ibp.distributed.open_shared(second)]
    for other in opened:
        assert other is not table and other.is_shared() and other.slots.data_ptr() == table.slots.data_ptr()
        assert_same_bits(other.decompress(), x)
    again = opened[0].share()
    del table, opened, other
    gc.collect()
    with pytest.raises(RuntimeError, match="no longer has the table|does not share"):
        ibp.distributed.open_shared(again)


@pytest.mark.slow
def test_repr_of_a_handle_has_what_it_documents(x):
    table = table_of(x)
    handle = table.share()
    assert repr(handle) == f"SharedHandle(process={os.getpid()}, num_bytes={handle.num_bytes})"


def test_nothing_is_left(x):
    """Descriptors and mappings go with the last tensor of the tables."""

    def held():
        files = [os.readlink(f"/proc/self/fd/{file}") for file in os.listdir("/proc/self/fd") if _is_open(file)]
        return sum("memfd:ibp" in name for name in files), pathlib.Path("/proc/self/maps").read_text().count(
            "memfd:ibp"
        )

    def _is_open(file):
        return os.path.islink(f"/proc/self/fd/{file}")

    gc.collect()
    before = held()
    table = table_of(x)
    opened = ibp.distributed.open_shared(table.share())
    slots = opened.slots
    assert held() == (before[0] + 1, before[1] + 1)
    del table, opened
    gc.collect()
    assert held() == (before[0], before[1] + 1) and slots.numel() and int(slots[0]) >= 0
    del slots
    gc.collect()
    assert held() == before


def test_small_and_empty_tables():
    for x in (torch.empty(0, 5), torch.randn(1, 3), torch.tensor(5.0)):
        table = ibp.compress(x, **OPTIONS)
        assert_same_bits(ibp.distributed.open_shared(table.share()).decompress(), x)


def test_what_cannot_be_shared(x):
    table = ibp.compress(x.clone(), **OPTIONS, inplace=True)
    with pytest.raises(RuntimeError, match="clone"):
        table.share()
    copied = table.clone()
    assert_same_bits(ibp.distributed.open_shared(copied.share()).decompress(), x)
    with pytest.raises(TypeError, match="handle is a CompressedTensor; wanted what table.share"):
        ibp.distributed.open_shared(table)


def test_handles_of_other_memory(x):
    """A number of a process, or of a descriptor, that has come to mean something else."""
    table = table_of(x)
    handle = table.share()
    with open("/dev/null", "rb") as other:
        for changes in (
            {"_file": other.fileno()},
            {"_file": 1 << 30},
            {"process": 1 << 30},
            {"_name": "ibp-none"},
        ):
            wrong = dataclasses.replace(handle, **{"_name": f"{handle._name}x", **changes})
            with pytest.raises(RuntimeError, match="share"):
                ibp.distributed.open_shared(wrong)
    longer = dataclasses.replace(handle, _name=handle._name, num_bytes=handle.num_bytes + 1)
    segments._segments.pop(handle._name)
    with pytest.raises(RuntimeError, match="no longer has the table"):
        ibp.distributed.open_shared(longer)


def test_nobody_can_shrink_the_memory(x):
    table = table_of(x).share_memory_()
    with pytest.raises(OSError):
        os.ftruncate(table._segment.file, 10)


def test_memory_that_can_be_cut_is_refused(x):
    handle = table_of(x).share()
    name = "ibp-" + "f" * 32
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, handle.num_bytes)
    other = dataclasses.replace(handle, _file=file, _name=name)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="can still cut the memory that it shares .it lacks F_SEAL_SHRINK"):
        ibp.distributed.open_shared(other)
    assert len(os.listdir("/proc/self/fd")) == before
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with pytest.raises(ValueError):  # its bytes are zeros, which no slots are
        ibp.distributed.open_shared(dataclasses.replace(other, _tensors=wire.written({})))
    os.close(file)


@pytest.mark.parametrize(
    "changes, kind, message",
    [
        ({"process": "self"}, TypeError, "process of a SharedHandle is a str; wanted int"),
        ({"process": True}, TypeError, "process of a SharedHandle is a bool; wanted int"),
        ({"num_bytes": 512.0}, TypeError, "num_bytes of a SharedHandle is a float; wanted int"),
        ({"num_bytes": -1}, ValueError, "num_bytes of a SharedHandle is -1; wanted 0 or more"),
        ({"_file": "../../1/fd/0"}, TypeError, "_file of a SharedHandle is a str; wanted int"),
        ({"_name": b"ibp"}, TypeError, "_name of a SharedHandle is a bytes; wanted str"),
        ({"_pin": 1}, TypeError, "_pin of a SharedHandle is a int; wanted bool"),
        ({"_fields": ""}, TypeError, "_fields of a SharedHandle is a str; wanted bytes"),
    ],
)
def test_fields_of_handles(x, changes, kind, message):
    with pytest.raises(kind, match=message):
        dataclasses.replace(table_of(x).share(), **changes)


@pytest.mark.parametrize("size", ["3", 1.0, -1, 1 << 40])
def test_sizes_of_tensors_in_a_handle(x, size):
    table = table_of(x)
    sizes = {name: tensor.numel() for name, tensor in tensors_of(table).items()} | {"slots": size}
    handle = dataclasses.replace(table.share(), _tensors=wire.written(sizes))
    with pytest.raises((TypeError, ValueError), match="the size of slots in shared memory is"):
        ibp.distributed.open_shared(handle)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_nothing_begins_to_use_cuda(x, spelling, monkeypatch):
    """A process in whose children GPUs will be used compresses, shares and reads on the CPU."""

    def begin():
        raise AssertionError("CUDA is used")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", begin)
    monkeypatch.setattr(_core, "cuda_is_built", lambda: True)
    for table in (table_of(x, spelling), ibp.compress(x, **OPTIONS)):
        table.share_memory_()
        assert_same_bits(table.decompress(), x)
        assert_same_bits(table[[1, 2]], x[[1, 2]])


# ---- between processes ----


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_arguments_of_processes(x, method, spelling, in_process):
    """A table that is sent is shared: its bytes are not copied. What is forked has it as it is."""
    ids = [5, 0, 2999]
    shared, rows = in_process(method, rows_of, table_of(x, spelling).share_memory_(), ids)
    assert shared and rows == x[ids].float().tolist()
    assert in_process("spawn", rows_of, table_of(x, spelling), ids) == (True, rows)


@pytest.mark.parametrize("method", METHODS)
def test_handles_in_other_processes(x, method, in_process):
    table = table_of(x)
    ids = [1, 2, 2998]
    assert in_process(method, opened_rows, table.share(), ids) == (True, x[ids].float().tolist())
    assert in_process(method, opened_twice, table.share()) == (True, 1)


def opened_twice(handle):
    first, second = ibp.distributed.open_shared(handle), ibp.distributed.open_shared(handle)
    maps = pathlib.Path("/proc/self/maps").read_text()
    return first.slots.data_ptr() == second.slots.data_ptr(), maps.count(handle._name)


@pytest.mark.slow
def test_queues(x):
    """Tables both ways; what a child sends outlives it here."""
    context = multiprocessing.get_context("spawn")
    there, back = context.Queue(), context.Queue()
    process = context.Process(target=send_back, args=(there, back), daemon=True)
    process.start()
    there.put(table_of(x))  # nobody here keeps it
    received = back.get(timeout=SECONDS)
    there.put("done")
    process.join(SECONDS)
    assert process.exitcode == 0 and received.is_shared()
    assert_same_bits(received.decompress(), x)


def send_back(there, back):
    table = there.get(timeout=SECONDS)
    back.put(table)
    assert there.get(timeout=SECONDS) == "done"


@pytest.mark.slow
def test_a_table_in_a_tensors_memory_is_sent_as_bytes(x, in_process):
    table = ibp.compress(x.clone(), **OPTIONS, inplace=True)
    assert in_process("spawn", rows_of, table, [3])[1] == x[[3]].float().tolist()
    assert_same_bits(table.decompress(), x)


SHARER = """
    import base64, pickle, sys, time, torch, ibp
    torch.manual_seed(0)
    x = torch.randn(3000, 96).bfloat16()
    table = ibp.compress(x, device="cpu", memory="host")
    print(base64.b64encode(pickle.dumps(table.share())).decode(), flush=True)
    time.sleep(100)
"""


@pytest.mark.slow
def test_processes_of_no_common_parent_and_their_deaths(in_process):
    """As torchrun starts them: the handle comes as bytes. The memory outlives its maker, however that ends, for those
    that have it, and nobody else."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    sharer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(SHARER)], stdout=subprocess.PIPE, env=env)
    try:
        handle = pickle.loads(base64.b64decode(sharer.stdout.readline()))
        table = ibp.distributed.open_shared(handle)
    finally:
        sharer.send_signal(signal.SIGKILL)
        sharer.wait(SECONDS)
        sharer.stdout.close()
    torch.manual_seed(0)
    assert_same_bits(table.decompress(), torch.randn(3000, 96).bfloat16())
    assert in_process("spawn", opened_rows, table.share(), [0])[0]
    with pytest.raises(RuntimeError, match=f"process {sharer.pid} does not share"):
        in_process("spawn", opened_rows, handle, [0])


def kilobytes_of_the_table(table):
    """(resident, proportional, private) KiB of shared tables in this process, all of them read."""
    assert int(table.decompress().view(torch.int16).max()) >= 0
    found = {"Rss": 0, "Pss": 0, "Private_Clean": 0, "Private_Dirty": 0}
    is_it = False
    for line in pathlib.Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_it = "memfd:ibp" in line
        elif is_it and line.split(":")[0] in found:
            found[line.split(":")[0]] += int(line.split()[1])
    return found["Rss"], found["Pss"], found["Private_Clean"] + found["Private_Dirty"]


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_memory_is_counted_once(method, in_process):
    """Two processes that have read all of a table have half of it each."""
    x = torch.randn(1 << 14, 256).to(torch.bfloat16)
    table = table_of(x).share_memory_()
    size = table._segment.num_bytes >> 10
    resident, proportional, private = kilobytes_of_the_table(table)
    assert size <= resident <= size + 8 and private >= size  # nobody else has it
    resident, proportional, private = in_process(method, kilobytes_of_the_table, table)
    assert size <= resident <= size + 8
    assert 0.4 * size < proportional < 0.6 * size and private < 0.05 * size


# ---- on GPUs ----


def pinned_rows(table, ids):
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    before = table.is_pinned()
    rows = table.index_select(torch.tensor(ids, device=device), path="gpu")
    again = ibp.distributed.open_shared(table.share()).index_select(torch.tensor(ids, device=device), path="gpu")
    assert torch.equal(rows, again)
    return before, table._segment.pages.is_pinned, rows.float().tolist()


def test_each_process_pins_for_itself(cuda, x, in_process):
    table = ibp.compress(x)
    assert table.is_pinned() and table.share_memory_().is_pinned()
    ids = [7, 0, 2999]
    wanted = x[ids].float().tolist()
    assert pinned_rows(table, ids) == (True, True, wanted)
    assert in_process("spawn", pinned_rows, table, ids) == (True, True, wanted)
    assert in_process("spawn", pinned_handle_rows, table.share(), ids) == (True, True, wanted)
    assert_same_bits(table.decompress(device=cuda).cpu(), x)
    unpinned = table_of(x).share_memory_()
    assert not unpinned.is_pinned() and unpinned.pin_memory() is unpinned and unpinned.is_pinned()
    assert pinned_rows(unpinned, ids)[1:] == (True, wanted)


def pinned_handle_rows(handle, ids):
    return pinned_rows(ibp.distributed.open_shared(handle), ids)


def rows_of_a_gpus_table(table, ids):
    return table.is_cuda, table[torch.tensor(ids, device=table.device)].float().tolist()


def test_tables_on_a_gpu(cuda, x, in_process):
    """By CUDA IPC: the receiver reads the sender's memory."""
    table = ibp.compress(x).to(cuda)
    ids = [4, 2998]
    assert table.is_shared() and table.share_memory_() is table
    wanted = True, x[ids].float().tolist()
    assert in_process("spawn", rows_of_a_gpus_table, table, ids) == wanted
    assert in_process("spawn", rows_of_an_opened_gpus_table, pickle.loads(pickle.dumps(table.share())), ids) == wanted


def rows_of_an_opened_gpus_table(handle, ids):
    return rows_of_a_gpus_table(ibp.distributed.open_shared(handle), ids)


FORKED = """
    import multiprocessing, os, torch, ibp
    x = torch.randn(3000, 96).bfloat16()
    table = ibp.compress(x, device="cpu", memory="host").share_memory_()

    def work(number, results):
        device = torch.device("cuda", number % torch.cuda.device_count())
        with torch.cuda.device(device):
            table.pin_memory()
        ids = torch.arange(number, 3000, 3)
        rows = table.index_select(ids.to(device), path="gpu")
        results.put(bool(torch.equal(rows.cpu(), x[ids])))

    context = multiprocessing.get_context("fork")
    results = context.Queue()
    workers = [context.Process(target=work, args=(number, results), daemon=True) for number in range(2)]
    [worker.start() for worker in workers]
    assert [results.get(timeout=100) for _ in workers] == [True, True]
    [worker.join(100) for worker in workers]
"""


def test_processes_that_are_forked_before_cuda(cuda):
    """As docs/guide.md says it: nothing asks for GPUs before the fork but through NVML, which does no harm."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    program = [sys.executable, "-c", textwrap.dedent(FORKED)]
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
