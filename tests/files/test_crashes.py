"""Files where saving is cut short: by a full disk, a kill at any point, an interrupt. There is the old file or the new
one, whole, and nothing else that could be taken for a file."""

import errno
import fcntl
import gc
import itertools
import os
import random
import resource
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch

import ibp
from children import in_child, status_of
from fault_cases import NEW_FILE, OLD_FILE, plain
from helpers import assert_same_bits
from ibp import _core
from interrupts import Interrupted, exempt_what_lives, interrupt_at

CALLS = {  # by which files are written
    os: ("open", "pwrite", "fsync", "fchmod", "replace", "unlink", "close"),
    fcntl: ("flock",),
    _core: ("sync_directory",),
}
TIDYING = ("close", "unlink")
KILLED = 77


@pytest.fixture
def folder(tmp_path):
    """A directory in memory, where there is one: files are written many times, and each time the disk is waited for."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="ibp-test-", dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
def path(folder):
    """A file that was saved before, beside one that another process is writing."""
    (folder / OTHERS).write_bytes(b"begun by another process")
    ibp.save(folder / "model.safetensors", OLD_FILE)
    return folder / "model.safetensors"


OTHERS = ".ibp-0123456789abcdef.tmp"


def assert_whole(path, may_leave=False):
    """Returns whether the file is the new one. may_leave: a temporary file may be there, as after a kill."""
    found = ibp.load(path, verify=True, memory="host")
    is_new = found.keys() == NEW_FILE.keys()
    wanted = NEW_FILE if is_new else OLD_FILE
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_same_bits(plain(found[name]), plain(value))
    others = {file.name for file in path.parent.iterdir()} - {path.name, OTHERS}
    assert all(name.startswith(".ibp-") and name.endswith(".tmp") for name in others)
    assert len(others) <= may_leave, others
    assert (path.parent / OTHERS).read_bytes() == b"begun by another process"
    assert ibp.load(path.parent, memory="host").keys() == wanted.keys()  # a directory is searched for files
    for name in others:
        os.unlink(path.parent / name)
    return is_new


class Calls:
    """Counts calls of the system's functions for files, and does something else in one of them."""

    def __init__(self, monkeypatch, at, act):
        self.at, self.act, self.count = at, act, 0
        for module, names in CALLS.items():
            for name in names:
                monkeypatch.setattr(module, name, self.replaced(name, getattr(module, name)))

    def replaced(self, name, function):
        def call(*args, **options):
            self.count += 1
            if self.count - 1 == self.at:
                return self.act(name, function, *args, **options)
            return function(*args, **options)

        return call


def kill_before(name, function, *args, **options):
    os._exit(KILLED)


def kill_after(name, function, *args, **options):
    if name == "pwrite":
        args = args[0], args[1][: len(args[1]) // 2], args[2]
    try:
        function(*args, **options)
    finally:  # a call that fails, such as of a file that may be missing, is one to be killed after, too
        os._exit(KILLED)


@pytest.mark.parametrize("kill", [kill_before, kill_after], ids=["before", "after"])
def test_killed_at_every_call(path, kill):
    """As by SIGKILL: nothing is tidied up."""
    new = 0
    for at in itertools.count():

        def work(at=at):
            with pytest.MonkeyPatch.context() as patch:
                Calls(patch, at, kill)
                ibp.save(path, NEW_FILE)

        status = status_of(in_child(work))
        is_new = assert_whole(path, may_leave=True)
        if status == 0:
            break
        assert os.waitstatus_to_exitcode(status) == KILLED
        new += is_new
        ibp.save(path, OLD_FILE)
    assert at > 6 and 0 < new < at and is_new


@pytest.mark.slow
def test_killed_at_any_time(path):
    """SIGKILL at 100 random times, most of them while it saves."""
    generator, times = random.Random(0), [time.perf_counter()]
    for _ in range(5):
        ibp.save(path, NEW_FILE)
        times.append(time.perf_counter())
    seconds = min(end - begun for begun, end in itertools.pairwise(times))
    ibp.save(path, OLD_FILE)

    def work(files):
        while True:
            for file in files:
                ibp.save(path, file)

    for number in range(100):
        files = [NEW_FILE, OLD_FILE] if number % 2 else [OLD_FILE, NEW_FILE]
        child = in_child(lambda files=files: work(files))
        time.sleep(generator.uniform(0, 2.5 * seconds))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(status_of(child)) == -signal.SIGKILL
        assert_whole(path, may_leave=True)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO], ids=["the disk is full", "the disk is broken"])
def test_a_call_fails(path, number, monkeypatch):
    """Each call that writes, once: an OSError, and no temporary file."""

    def fail(name, function, *args, **options):
        if name in TIDYING:  # which tidy up
            return function(*args, **options)
        raise OSError(number, os.strerror(number))

    new = 0
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, at, fail)
            try:
                ibp.save(path, NEW_FILE)
            except OSError as error:
                assert error.errno == number
        new += assert_whole(path)
        if calls.count <= at:
            break
        ibp.save(path, OLD_FILE)
    assert at > 6 and 0 < new < at


FIRST_OF_SET = "model-00001-of-00004.safetensors"


def test_no_room_on_the_disk(path):
    """A limit of the system instead of a full disk. The error names the file, and how many bytes it wants."""

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(OSError, match=r"File too large: wanted room for at least 12[0-9],[0-9]{3} bytes") as raised:
            ibp.save(path, {"large": torch.zeros(30_000)})
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
        with pytest.raises(OSError, match="wanted room for at least") as raised:
            ibp.save(
                path, {f"{k}": torch.zeros(3000) for k in range(4)}, shard_bytes=12_000, metadata={"x": "y" * 9000}
            )
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path.with_name(FIRST_OF_SET)))

    assert status_of(in_child(work)) == 0
    assert not assert_whole(path)


@pytest.mark.parametrize("suffix", [".safetensors", ".npy", ".npz"])
def test_no_room_for_what_is_decompressed(tmp_path, suffix):
    ibp.save(tmp_path / "coded.safetensors", {"large": torch.zeros(30_000)})
    target = tmp_path / f"out{suffix}"

    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(OSError, match=r"wanted room for at least 120,000 bytes") as raised:
            ibp.checkpoints.decompress(tmp_path / "coded.safetensors", target)
        assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(target))

    assert status_of(in_child(work)) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["coded.safetensors"]


def test_no_directory(tmp_path):
    with pytest.raises(FileNotFoundError):
        ibp.save(tmp_path / "none" / "model.safetensors", OLD_FILE)
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        ibp.save(tmp_path / "file" / "model.safetensors", OLD_FILE)
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


# ---- interrupts ----


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("stride", [151, pytest.param(13, marks=pytest.mark.slow)])
def test_saving_is_interrupted(path, stride):
    """At moments of the library's code."""
    new = 0
    exempt_what_lives()
    for moment in itertools.count(stride // 2, stride):
        _, raised = interrupt_at(moment, None, lambda: ibp.save(path, NEW_FILE))
        gc.collect()
        is_new = assert_whole(path)
        if not raised:
            break
        new += is_new
        if is_new:
            ibp.save(path, OLD_FILE)
    assert is_new and moment > 20 * stride


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("call", ["open", "load", "compress", "decompress"])
def test_others_are_interrupted(path, call):
    """Nothing is changed, and the same call works afterwards."""
    table = plain(OLD_FILE["old"])
    calls = {
        "open": lambda: ibp.open(path)["old"].decompress(),
        "load": lambda: ibp.load(path, verify=True, memory="host")["old"].decompress(),
        "compress": lambda: ibp.compress(table, device="cpu", memory="host").decompress(),
        "decompress": lambda: OLD_FILE["old"].decompress(),
    }
    raised, moment = 1, 3
    while raised:
        got, raised = interrupt_at(moment, None, calls[call])
        moment += 1 + moment // 10
    assert_same_bits(got, table)
    assert not assert_whole(path)


def test_a_set_of_files_is_interrupted(folder):
    """Each file is the old one or the new one; there is no index before the files that it names."""
    path = folder / "model.safetensors"

    def fail(name, function, *args, **options):
        if name in TIDYING:
            return function(*args, **options)
        raise Interrupted

    for at in itertools.count(0, 3):
        with pytest.MonkeyPatch.context() as patch:
            calls = Calls(patch, at, fail)
            try:
                ibp.save(path, NEW_FILE, shard_bytes=4000)
            except Interrupted:
                assert not any(file.name.startswith(".") for file in folder.iterdir())
        index = Path(f"{path}.index.json")
        if index.exists():
            break
        for file in folder.iterdir():
            ibp.load(file, verify=True, memory="host")
            file.unlink()
    assert at > 20 and calls.count > at
    found = ibp.load(index, verify=True, memory="host")
    assert found.keys() == NEW_FILE.keys()


# ---- whole checkpoints ----


@pytest.mark.slow
def test_compressing_a_checkpoint_is_killed(folder):
    """The output is not there, or whole; the next call goes on with what is there, and tidies up."""
    safetensors = pytest.importorskip("safetensors.torch")
    generator = torch.Generator().manual_seed(0)
    tensors = {f"layers.{n}.weight": torch.randn(64, 128, generator=generator).bfloat16() for n in range(4)}
    (folder / "in").mkdir()
    safetensors.save_file(tensors, folder / "in" / "model.safetensors")
    target = folder / "model.safetensors"

    def compress(**options):
        return ibp.checkpoints.compress(folder / "in", target, device="cpu", jobs=1, shard_bytes=20_000, **options)

    for at in itertools.count(0, 4):

        def work(at=at):
            with pytest.MonkeyPatch.context() as patch:
                Calls(patch, at, kill_after)
                compress()

        status = status_of(in_child(work))
        for file in folder.glob("*.safetensors"):
            ibp.load(file, verify=True, memory="host")
        try:
            report = compress()
        except FileExistsError:  # it was killed after all was done
            assert Path(f"{target}.index.json").exists() and not (folder / ".model.safetensors.ibp-work").exists()
            report = compress(force=True)
        found = ibp.load(report.path, verify=True, memory="host")
        for name, tensor in tensors.items():
            assert_same_bits(plain(found[name]), tensor)
        left = {file.name for file in folder.iterdir()} - {"in", *report.files, Path(report.path).name}
        assert not left
        for file in [*report.files, Path(report.path).name]:
            (folder / file).unlink(missing_ok=True)
        if status == 0:
            break
    assert at > 20
