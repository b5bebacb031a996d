"""Every call that takes a path meets what may stand there: links, pipes, sockets, devices and directories."""

import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch

import ibp
from children import in_child, status_of
from ibp._cli.main import main
from ibp._common import ops
from ibp._common.whole_files import NewFile
from ibp.checkpoints._outputs import Journal
from kinds_of_paths import NO_FILES, few_descriptors, soon

FILE, DELTA, OUT = "a.safetensors", "d.safetensors", "o.safetensors"
TENSORS = {
    "weight": torch.arange(64 * 64).reshape(64, 64).bfloat16(),
    **{f"p{n}": torch.full((3,), n) for n in range(100)},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file, and the delta that leads from it to itself."""
    folder = tmp_path_factory.mktemp("files")
    ibp.save(folder / FILE, TENSORS)
    run("diff", str(folder / FILE), str(folder / FILE), "-o", str(folder / DELTA))
    return folder


@pytest.fixture(autouse=True)
def here(files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # since names of sockets are short
    for name in (FILE, DELTA):
        shutil.copy(files / name, name)


def run(*words):
    """Runs a command. An OSError has the one line that it says where it fails."""
    with pytest.MonkeyPatch.context() as patch:
        said = []
        patch.setattr("ibp._cli.main._complain", lambda line, status: said.append(line) or status)
        if main([*words, "--quiet"]):
            (line,) = said
            raise OSError(line)


def offload(path):
    model = torch.nn.Linear(64, 64, bias=False, device="meta", dtype=torch.bfloat16)
    for name in TENSORS.keys() - {"weight"}:
        model.register_buffer(name, TENSORS[name].to("meta"))
    ibp.offload(model.requires_grad_(False), "cpu", checkpoint=path, min_bytes=64).close()
    return model.state_dict()


def read_source(path):
    with ibp.checkpoints.open(path) as source:
        return {name: tensor.tensor() for name, tensor in source.tensors.items()}


def write_tensors(path):
    with ibp.checkpoints.CheckpointWriter(path, {name: tensor.shape for name, tensor in TENSORS.items()}) as writer:
        writer.compress(TENSORS)


READS = {
    "ibp.open": lambda path: ibp.open(path, memory="host"),
    "ibp.load": lambda path: ibp.load(path, memory="host"),
    "ibp.offload": offload,
    "ibp.checkpoints.compress": lambda path: ibp.checkpoints.compress(path, OUT, device="cpu", jobs=1),
    "ibp.checkpoints.decompress": lambda path: ibp.checkpoints.decompress(path, OUT),
    "ibp.checkpoints.estimate": ibp.checkpoints.estimate,
    "ibp.checkpoints.open": read_source,
    "ibp.deltas.make": lambda path: bool(ibp.deltas.make(ibp.open(path), ibp.open(FILE))),
    "ibp compress": lambda path: run("compress", path, "-o", OUT),
    "ibp decompress": lambda path: run("decompress", path, "-o", OUT),
    "ibp verify": lambda path: run("verify", path),
    "ibp inspect": lambda path: run("inspect", path),
    "ibp estimate": lambda path: run("estimate", path),
    "ibp diff, old": lambda path: run("diff", path, FILE),
    "ibp diff, new": lambda path: run("diff", FILE, path),
    "ibp apply, old": lambda path: run("apply", path, DELTA, "-o", OUT),
}
READS_DELTAS = {"ibp apply, delta": lambda path: run("apply", FILE, path, "-o", OUT)}
WRITES = {
    "ibp.save": lambda path: ibp.save(path, TENSORS),
    "ibp.checkpoints.CheckpointWriter": write_tensors,
    "ibp.checkpoints.compress": lambda path: ibp.checkpoints.compress(FILE, path, device="cpu", jobs=1, force=True),
    "ibp.checkpoints.decompress": lambda path: ibp.checkpoints.decompress(FILE, path, force=True),
    "ibp compress": lambda path: run("compress", FILE, "-o", path, "--force"),
    "ibp decompress": lambda path: run("decompress", FILE, "-o", path, "--force"),
    "ibp diff": lambda path: run("diff", FILE, FILE, "-o", path, "--force"),
    "ibp apply": lambda path: run("apply", FILE, DELTA, "-o", path, "--force"),
}
WRITES_PAGES = {"ibp inspect": lambda path: run("inspect", FILE, "--html", path, "--force")}
LINKS = {"symbolic": os.symlink, "hard": os.link}


def all_calls(calls):
    return pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in calls.items()])


def put(kind, path, is_link):
    NO_FILES[kind]("made" if is_link else path)
    if is_link:
        os.symlink("made", path)
    return sorted(os.listdir())


# ---- what is read ----


@all_calls(READS | READS_DELTAS)
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("is_link", [False, True])
def test_only_regular_files_are_read(kind, is_link, call):
    """Where a call would wait for a pipe or read a device for good, it says what the path is."""
    before = put(kind, "x.safetensors", is_link)
    with soon(), pytest.raises(OSError, match=f"x.safetensors is {kind}; wanted a regular file"):
        call("x.safetensors")
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize("read", [ibp.open, ibp.load, ibp.checkpoints.estimate])
def test_only_regular_files_are_read_of_a_set(read):
    """Neither the index nor a file that it names is a pipe; a directory is read by its index."""
    os.mkdir("set")
    os.mkfifo("set/x.safetensors")
    Path("set/x.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}')
    os.mkfifo("y.safetensors.index.json")
    for path in ("set", "set/x.safetensors.index.json", "y.safetensors.index.json"):
        with soon(), pytest.raises(OSError, match=r"[xy]\.safetensors[.a-z]* is a pipe; wanted a regular file"):
            read(path)


@all_calls(READS | READS_DELTAS)
@pytest.mark.parametrize("target", ["nowhere", "x.safetensors"])
def test_links_that_lead_nowhere(target, call):
    os.symlink(target, "x.safetensors")
    before = sorted(os.listdir())
    with pytest.raises(OSError, match=r"x\.safetensors"):
        call("x.safetensors")
    assert sorted(os.listdir()) == before


@all_calls(READS | READS_DELTAS)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_without_files(is_link, call):
    os.mkdir("made" if is_link else "x")
    if is_link:
        os.symlink("made", "x")
    before = sorted(os.listdir())
    with pytest.raises(OSError, match=r"x(: the directory)? has no file"):
        call("x")
    assert sorted(os.listdir()) == before


@all_calls(READS)
@pytest.mark.parametrize("link", LINKS)
def test_links_to_a_file_are_read(link, call):
    LINKS[link](FILE, "x.safetensors")
    given = call("x.safetensors")
    made = ibp.load(OUT, memory="host") if os.path.exists(OUT) else given
    if hasattr(made, "keys"):
        assert made.keys() == TENSORS.keys()
        weight = made["weight"]
        assert torch.equal(weight if isinstance(weight, torch.Tensor) else weight.decompress(), TENSORS["weight"])
    assert os.path.samefile("x.safetensors", FILE)


@all_calls(READS)
def test_files_of_more_tensors_than_descriptors(call):
    with few_descriptors():
        call(FILE)


# ---- what is written ----


@all_calls(WRITES | WRITES_PAGES)
@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("is_link", [False, True])
def test_only_regular_files_are_replaced(kind, is_link, call, request):
    path = name_for(request)
    before = put(kind, path, is_link)
    with soon(), pytest.raises(OSError, match=f"{path} is {kind}, which is not replaced"):
        call(path)
    assert sorted(os.listdir()) == before


def name_for(request):
    return "x.html" if "ibp inspect" in request.node.name else "x.safetensors"


@all_calls(WRITES | WRITES_PAGES)
@pytest.mark.parametrize("link", LINKS)
def test_links_are_replaced_and_not_followed(link, call, request):
    path, old = name_for(request), Path("old")
    old.write_bytes(b"old")
    LINKS[link](old, path)
    call(path)
    assert stat.S_ISREG(os.lstat(path).st_mode) and not os.path.samefile(path, old)
    assert old.read_bytes() == b"old" and os.path.getsize(path) > 3


@all_calls(WRITES)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_directory_gets_a_file(is_link, call):
    os.mkdir("made" if is_link else "x")
    if is_link:
        os.symlink("made", "x")
    call("x")
    (made,) = os.listdir("x")
    assert made in ("model.safetensors", "model.ibp.safetensors") and os.path.islink("x") == is_link


@all_calls(WRITES_PAGES)
def test_a_page_does_not_replace_a_directory(call):
    os.mkdir("x.html")
    with pytest.raises(OSError, match=r"x\.html is a directory, which is not replaced"):
        call("x.html")


@all_calls(WRITES | WRITES_PAGES)
def test_an_interrupt_leaves_no_temporary_file(call, request, monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    path, before = name_for(request), sorted(os.listdir())
    monkeypatch.setattr(NewFile, "commit", interrupted)
    with pytest.raises((KeyboardInterrupt, OSError)):
        call(path)
    assert sorted(os.listdir()) == before


@all_calls(WRITES | WRITES_PAGES)
def test_the_next_call_removes_what_a_killed_one_left(call, request, monkeypatch):
    path, before = name_for(request), sorted(os.listdir())
    with monkeypatch.context() as patch:
        patch.setattr(NewFile, "commit", lambda self: os.kill(os.getpid(), signal.SIGKILL))
        patch.setattr(ops, "cuda_is_available", lambda: False)  # a forked process cannot use CUDA
        assert os.waitstatus_to_exitcode(status_of(in_child(lambda: call(path)))) == -signal.SIGKILL
    assert len(os.listdir()) == len(before) + 1
    call(path)
    assert sorted(os.listdir()) == sorted([*before, path])


BESIDE = {
    "ibp.save",
    "ibp.checkpoints.CheckpointWriter",
    "ibp diff",
    "ibp inspect",
}  # two of them at once: the last one leaves its file


@pytest.mark.parametrize("name", WRITES | WRITES_PAGES)
def test_a_file_that_another_call_writes(name):
    path, before = "x.html" if name in WRITES_PAGES else "x.safetensors", sorted(os.listdir())
    other, call = NewFile(Path(path)), (WRITES | WRITES_PAGES)[name]
    journal = Journal(Path(path), {})
    journal.open(True)
    try:
        if name in BESIDE:
            call(path)
            os.unlink(path)
        else:
            with pytest.raises(BlockingIOError if name.startswith("ibp.") else OSError, match="another call writes"):
                call(path)
    finally:
        other.discard()
        journal.close()
        journal.release()
    assert sorted(os.listdir()) == before
