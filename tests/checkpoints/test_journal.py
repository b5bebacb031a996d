"""Files of a set that wait for the others: one call at a time has them, and moves what it wrote and nothing else."""

import itertools
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

import ibp
from ibp.checkpoints import _converting
from ibp.checkpoints._outputs import Journal
from interrupts import interrupt_at

PLAN = {"a": "plan"}


@pytest.fixture
def journal(tmp_path):
    made = Journal(tmp_path / "out.safetensors", PLAN)
    made.open(True)
    yield made
    made.release()


def finished(journal, file, content=b"content"):
    (journal.directory / file).write_bytes(content)
    return journal.write_record(file, {"names": [], "data_bytes": len(content), "tensors": []})


# ---- one call at a time ----


def test_another_call_is_refused_until_the_first_has_ended(journal, tmp_path):
    record = finished(journal, "a")
    for plan in (PLAN, {"another": "plan"}):
        with pytest.raises(OSError, match=r"another call writes \S*out.safetensors at this moment"):
            Journal(tmp_path / "out.safetensors", plan).open(True)
    journal.move(record)
    journal.close()
    assert os.listdir(tmp_path) == ["a"]
    other = Journal(tmp_path / "out.safetensors", PLAN)
    other.open(True)
    assert other.finished("a") is None
    other.release()


def test_two_calls_with_one_output(tmp_path, monkeypatch):
    """The second begins while the first moves its files: it is refused, and the first is whole."""
    x = torch.randn(6, 30, 256).bfloat16()
    ibp.save(tmp_path / "in.safetensors", {f"w{n}": row.contiguous() for n, row in enumerate(x)})
    refused, move = [], Journal.move

    def compress(**options):
        return ibp.checkpoints.compress(
            tmp_path / "in.safetensors",
            tmp_path / "out.safetensors",
            shard_bytes=20_000,
            device="cpu",
            jobs=1,
            **options,
        )

    def interfere(self, record):
        with pytest.raises(OSError, match="another call writes"):
            compress(level="fast", restart=False)
        refused.append(record["file"])
        move(self, record)

    monkeypatch.setattr(_converting.Journal, "move", interfere)
    report = compress()
    assert list(report.files) == refused and len(refused) == 6
    found = ibp.load(report.path, verify=True, memory="host")
    assert all(torch.equal(ibp.decompress(value) if not isinstance(value, torch.Tensor) else value, x[int(name[1:])])
               for name, value in found.items()) and len(found) == 6  # fmt: skip


def test_a_moved_file_that_was_replaced_is_kept(tmp_path, monkeypatch):
    """A call that ends after it has moved its file, and before it removes its journal, is repeated."""
    source, output = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    ibp.save(source, {"w": torch.randn(30, 256).bfloat16()})
    with monkeypatch.context() as patch:
        patch.setattr(_converting.Journal, "close", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ibp.checkpoints.compress(source, output, device="cpu")
    output.write_bytes(b"of somebody else")
    with pytest.raises(FileExistsError):
        ibp.checkpoints.compress(source, output, device="cpu")
    assert output.read_bytes() == b"of somebody else"


def test_an_interrupt_leaves_no_lock(tmp_path):
    """Nor does an interrupt while the lock is released."""
    raised = 1
    for moment in itertools.count():
        journal = Journal(tmp_path / "out.safetensors", PLAN)
        journal.open(True)
        _, raised = interrupt_at(moment, None, journal.release)
        del journal
        if not raised:
            break
    assert moment > 2


@pytest.mark.slow
def test_the_lock_of_a_killed_process_is_none(tmp_path):
    code = (
        "import sys, time, pathlib; from ibp.checkpoints._outputs import Journal; "
        "journal = Journal(pathlib.Path(sys.argv[1]), {'a': 'plan'}); journal.open(True); "
        "print('has it', flush=True); time.sleep(600)"
    )
    target = tmp_path / "out.safetensors"
    child = subprocess.Popen([sys.executable, "-c", code, str(target)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "has it\n"
        journal = Journal(target, PLAN)
        with pytest.raises(OSError, match="another call writes"):
            journal.open(True)
        child.send_signal(signal.SIGKILL)
        child.wait()
        journal.open(True)
        journal.close()
        journal.release()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    assert os.listdir(tmp_path) == []


def test_a_directory_that_goes_while_it_is_asked_for(tmp_path, monkeypatch):
    """By a call that ends between the steps of one that begins."""
    target, flock = tmp_path / "out.safetensors", _converting.Journal._take
    first = Journal(target, PLAN)
    first.open(True)

    def ends(self, file):
        if first._lock is not None:
            first.close()
            first.release()
        flock(self, file)

    monkeypatch.setattr(Journal, "_take", ends)
    second = Journal(target, PLAN)
    second.open(True)
    finished(second, "a")
    with pytest.raises(OSError, match="another call writes"):
        Journal(target, PLAN).open(True)
    second.release()


# ---- only what was written ----


def test_what_is_missing_is_not_taken_as_moved(journal, tmp_path):
    record = finished(journal, "a")
    (journal.directory / "a").unlink()
    with pytest.raises(FileNotFoundError, match="is not what was written there"):
        journal.move(record)
    (tmp_path / "a").write_bytes(b"other content")
    with pytest.raises(FileNotFoundError, match="is not what was written there"):
        journal.move(record)
    assert (tmp_path / "a").read_bytes() == b"other content"


def test_what_was_moved_before_is_done(journal, tmp_path):
    record = finished(journal, "a")
    journal.move(record)
    journal.move(record)
    assert (tmp_path / "a").read_bytes() == b"content" and journal.finished("a") == record


def test_what_another_process_wrote_is_not_moved(journal, tmp_path):
    record = finished(journal, "a")
    (journal.directory / "a").write_bytes(b"another's")
    with pytest.raises(FileNotFoundError, match="is not what was written there"):
        journal.move(record)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", ["../a", "/etc/hostname", "b"])
def test_a_record_names_its_own_file(name, journal):
    record = finished(journal, "a")
    path = journal.directory / "a.done.json"
    path.write_text(json.dumps({**record, "file": name}))
    assert journal.finished("a") is None
    for wrong in ([], {"file": "a"}, {**record, "tensors": [{}]}, {**record, "tensors": 5}):
        path.write_text(json.dumps(wrong))
        assert journal.finished("a") is None
    path.write_text(json.dumps(record))
    assert journal.finished("a") == record


def test_links_are_not_followed(journal, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "kept").write_bytes(b"content")
    record = finished(journal, "a")
    os.replace(journal.directory / "a", tmp_path / "elsewhere" / "a")
    os.symlink(tmp_path / "elsewhere" / "a", journal.directory / "a")
    assert journal.finished("a") is None
    with pytest.raises(FileNotFoundError):
        journal.move(record)
    os.symlink(tmp_path / "elsewhere", tmp_path / ".linked.ibp-work")
    with pytest.raises(NotADirectoryError, match="symbolic link"):
        Journal(tmp_path / "linked", PLAN).open(False)
    os.symlink(tmp_path / "elsewhere", journal.directory / "folder")
    journal.close()
    assert sorted(os.listdir(tmp_path / "elsewhere")) == ["a", "kept"]
