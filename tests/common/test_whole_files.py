"""Files that take their names when they are whole: what they replace, whose permissions they get, who writes them, and
what interrupts and kills leave."""

import contextlib
import errno
import fcntl
import gc
import itertools
import os
import signal
import stat

import pytest

from children import in_child, status_of
from ibp._common.whole_files import NewFile, replaced, write_whole
from interrupts import exempt_what_lives, interrupt_at
from kinds_of_paths import NO_FILES

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def begun(path, **options):
    """A file that is being written."""
    new = NewFile(path, **options)
    os.write(new.file.fileno(), b"half")
    return new


# ---- what is replaced ----


KINDS = {
    **NO_FILES,
    "a directory": os.mkdir,
    "a link to an open file of a process": lambda path: os.symlink("/proc/self/fd/0", path),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_link", [False, True])
def test_only_regular_files_are_replaced(kind, is_link, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # since names of sockets are short
    path = tmp_path / "x"
    KINDS[kind]("made" if is_link else "x")
    if is_link:
        path.symlink_to("made")
    if is_link and kind.startswith("a link"):
        kind = "a device"  # as the input is
    before = sorted(os.listdir(tmp_path))
    with open("/dev/null") as standard_input:
        kept = os.dup(0)
        try:
            os.dup2(standard_input.fileno(), 0)
            with pytest.raises(OSError, match=rf"x is {kind}.*wanted the name of a regular file"):
                write_whole(path, b"new")
        finally:
            os.dup2(kept, 0)
            os.close(kept)
    assert sorted(os.listdir(tmp_path)) == before


def test_links_are_replaced_and_not_followed(tmp_path):
    (tmp_path / "old").write_bytes(b"old")
    for name, to in (("link", "old"), ("dangling", "none")):
        (tmp_path / name).symlink_to(to)
        write_whole(tmp_path / name, b"new")
        assert not (tmp_path / name).is_symlink() and (tmp_path / name).read_bytes() == b"new"
    assert (tmp_path / "old").read_bytes() == b"old" and not (tmp_path / "none").exists()


def test_a_missing_directory_is_named(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        write_whole(tmp_path / "none" / "x", b"")
    assert raised.value.filename == str(tmp_path / "none") and raised.value.strerror == "there is no such directory"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        write_whole(tmp_path / "file" / "x", b"")


def test_a_file_that_is_there_may_be_kept(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(FileExistsError), replaced(path, 3, replace=False):
        pass
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["x"]


# ---- permissions ----


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions(umask, tmp_path):
    sources = [tmp_path / name for name in "ab"]
    for source, mode in zip(sources, (0o640, 0o604)):
        source.write_bytes(b"")
        source.chmod(mode)
    before = os.umask(umask)
    try:
        new, old, alike, common = (tmp_path / name for name in ("new", "old", "alike", "common"))
        write_whole(new, b"")
        assert mode_of(new) == 0o666 & ~umask
        old.write_bytes(b"")
        for mode in (0o640, 0o400, 0o666):
            old.chmod(mode)
            with replaced(old, 0, like=sources):
                pass
            assert mode_of(old) == mode
        with replaced(alike, 0, like=sources[:1]) as file:
            assert not stat.S_IMODE(os.fstat(file.fileno()).st_mode) & ~0o640
        assert mode_of(alike) == 0o640
        with replaced(common, 0, like=sources):
            pass
        assert mode_of(common) == 0o600
    finally:
        os.umask(before)


# ---- several writers ----


def test_another_writer_is_refused_or_goes_beside(tmp_path):
    path = tmp_path / "x"
    first = begun(path, alone=True)
    with pytest.raises(BlockingIOError, match=r"another call writes \S*x at this moment; wanted another output, or to"):
        NewFile(path, alone=True)
    second = begun(path)
    assert len(os.listdir(tmp_path)) == 2
    second.commit()
    first.commit()
    first.discard()
    second.discard()
    assert os.listdir(tmp_path) == ["x"]
    NewFile(path, alone=True).discard()


def test_another_name_is_free(tmp_path):
    first, second = begun(tmp_path / "x", alone=True), begun(tmp_path / "y", alone=True)
    first.discard()
    second.discard()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_leaves_is_removed(tmp_path):
    def work():
        new = begun(tmp_path / "x", alone=True)
        os.kill(os.getpid(), signal.SIGKILL)
        new.discard()

    assert os.waitstatus_to_exitcode(status_of(in_child(work))) == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    write_whole(tmp_path / "y", b"other")
    assert sorted(os.listdir(tmp_path)) == [left, "y"]
    with replaced(tmp_path / "x", 3, alone=True) as file:
        file.write(b"new")
    assert sorted(os.listdir(tmp_path)) == ["x", "y"] and (tmp_path / "x").read_bytes() == b"new"


def test_a_child_does_not_keep_the_lock(tmp_path):
    """A process that was forked meanwhile has the descriptor, and lives on."""
    new = begun(tmp_path / "x", alone=True)
    end, begin = os.pipe()
    child = in_child(lambda: (os.close(begin), os.read(end, 1)))
    new.discard()
    NewFile(tmp_path / "x", alone=True).discard()
    os.close(begin)
    assert status_of(child) == 0
    os.close(end)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(number, tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    first, second = begun(tmp_path / "x", alone=True), begun(tmp_path / "x", alone=True)
    assert len(os.listdir(tmp_path)) == 2
    first.commit()
    first.discard()
    second.discard()
    assert os.listdir(tmp_path) == ["x"] and (tmp_path / "x").read_bytes() == b"half"


def test_no_link_of_another_user_is_written_through(tmp_path):
    first = begun(tmp_path / "x")
    name = first._temporary
    first.discard()
    name.symlink_to("victim")
    (tmp_path / "victim").write_bytes(b"kept")
    with pytest.raises(OSError, match="is no regular file; wanted it removed"):
        write_whole(tmp_path / "x", b"new")
    assert (tmp_path / "victim").read_bytes() == b"kept"


def test_a_name_of_any_length(tmp_path):
    path = tmp_path / ("x" * 255)
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"


# ---- interrupts ----


def descriptors_in(folder):
    """The files and directories from a folder on that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(os.fspath(folder))]


def test_a_file_that_is_closed_is_discarded(tmp_path):
    """An interrupt in `discard` may come after the file was closed; `discard` is then called again."""
    new = begun(tmp_path / "x")
    new.file.close()
    new.discard()
    assert os.listdir(tmp_path) == [] and new.file is None


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_interrupts_leave_nothing(tmp_path, stride):
    """At each moment: the old file or the new one, no other file, and no descriptor."""
    path, new = tmp_path / "x", 0
    write_whole(path, b"old")
    exempt_what_lives()
    for moment in itertools.count(0, stride):
        _, raised = interrupt_at(moment, None, lambda: write_whole(path, b"new"))
        gc.collect()
        assert os.listdir(tmp_path) == ["x"] and descriptors_in(tmp_path) == []
        new += path.read_bytes() == b"new"
        assert path.read_bytes() in (b"old", b"new")
        if not raised:
            break
        write_whole(path, b"old")
    assert moment > 50 and 0 < new < moment // stride
