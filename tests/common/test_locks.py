"""Locks of objects that are used on both sides of a fork."""

import contextlib
import copy
import os
import pickle
import re
import threading
import time

import pytest

from children import in_child, status_of
from helpers import in_threads
from ibp._common import process
from ibp._common.process import ForkLock
from native import ROOT

PLAIN_LOCKS = {
    "ibp/_common/process.py",  # the class of locks, and the lock of bars, which a child may draw anew
}


def ends_well(work):
    return os.waitstatus_to_exitcode(status_of(in_child(work))) == 0


@contextlib.contextmanager
def held_elsewhere(*held, until):
    """Another thread takes locks, and leaves them when an event is set."""
    has_them = threading.Event()

    def hold():
        with contextlib.ExitStack() as stack:
            for lock in held:
                stack.enter_context(lock)
            has_them.set()
            until.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert has_them.wait(60)
    try:
        yield thread
    finally:
        until.set()
        thread.join(60)


def use(*held):
    with contextlib.ExitStack() as stack:
        for lock in held:
            stack.enter_context(lock)


def test_a_fork_waits_for_another_thread():
    lock, done = ForkLock(), threading.Event()
    with held_elsewhere(lock, until=done):
        threading.Timer(0.2, done.set).start()
        assert ends_well(lambda: use(lock)) and done.is_set()
    use(lock)


def test_threads_take_locks_in_any_order():
    """One thread holds a lock and waits for an older one, which the thread that forks takes first."""
    older, newer, stops, count = ForkLock(), ForkLock(), threading.Event(), [0]

    def work():
        while not stops.is_set():
            with newer:
                time.sleep(0.001)
                use(older)
                count[0] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            assert ends_well(lambda: use(older, newer))
    finally:
        stops.set()
        thread.join(60)
    assert count[0]


def test_the_thread_that_forks_keeps_its_locks():
    lock = ForkLock()

    def is_kept():
        lock.release()
        with pytest.raises(RuntimeError):
            lock.release()

    with lock:
        assert ends_well(is_kept)
        assert in_threads(lambda: lock.acquire(blocking=False)) == [False]
    assert in_threads(lambda: lock.acquire(blocking=False)) == [True]


def test_a_lock_that_is_not_left_in_time(monkeypatch):
    """The child cannot use what it guards, and says so; it can use all else, as the parent can use all."""
    monkeypatch.setattr(process, "PATIENCE_S", 0.2)
    stuck, free, done = ForkLock(), ForkLock(), threading.Event()

    def is_refused():
        use(free)
        for take in (stuck.__enter__, stuck.acquire, lambda: use(stuck)):
            with pytest.raises(RuntimeError, match=r"for more than 0.2 s while the process forked.*make it anew"):
                take()
        assert ends_well(lambda: use(free)), "a child of the child"

    with held_elsewhere(stuck, until=done):
        assert ends_well(is_refused)
        use(free)
    use(stuck)


def test_locks_that_are_gone_are_forgotten():
    before = len(process._locks)
    made = [ForkLock() for _ in range(3)]
    assert len(process._locks) == before + 3
    del made
    assert len(process._locks) == before


@pytest.mark.parametrize("work", [copy.copy, copy.deepcopy, pickle.dumps])
def test_locks_are_not_copied(work):
    with pytest.raises(TypeError, match="cannot pickle 'ForkLock' object"):
        work(ForkLock())


def test_the_library_has_no_other_locks():
    plain = re.compile(r"threading\.(R?Lock|Condition|(Bounded)?Semaphore|Event|Barrier)\(")
    sources = (path for path in (ROOT / "ibp").rglob("*.py") if plain.search(path.read_text()))
    assert {str(path.relative_to(ROOT)) for path in sources} == PLAIN_LOCKS
    native = {path for path in (ROOT / "csrc").rglob("*.h") if "std::mutex mutex_;" in path.read_text()}
    assert {path.name for path in native} == {"pinned_pool.h"}, "which pthread_atfork takes"
