"""Defines what a process has only once, and what must survive a fork.

`OfThisProcess` is the base of classes whose objects belong to one process, and `Closing` the base of classes whose
`close()` undoes a change. `warn_once` issues each warning once per process. `ForkLock` is the class of locks of objects
that both the parent and the child use after a fork, and `tqdm` makes progress bars whose lock is not shared with other
processes. `published` makes the public names of a package appear to be defined in the package itself and not in its
modules, and `after_import` delays work until a module of another package is imported, so that `import ibp` does not
have to import it.

A child process has only the thread that forked it. A lock that another thread held at the fork would stay held in the
child for good. A new lock would not help, because the data that the lock guards may be half changed: the child could
read a row whose slot another thread was filling. Therefore the forking thread takes all locks before the fork. Then no
other thread is in the middle of a call on such an object.

The forking thread waits at most `PATIENCE_S` seconds for the locks, because the holder of a lock may itself be waiting
for the forking thread. After that time it forks anyway, and a lock that is still held raises RuntimeError in the child.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, TypeVar

import tqdm as _tqdm

_Self = TypeVar("_Self", bound="Closing")


class OfThisProcess:
    """Base of classes whose objects hold memory, streams or locks of this process. Pickling an object raises a
    TypeError that says what to do instead. Copying an object also raises, unless its class has a `__deepcopy__`.

    Example:
        >>> import copy
        >>> class Pool(ibp.adapters.OfThisProcess):
        ...     _instead = "make it anew there"    # each class says what to do instead
        >>> copy.copy(Pool())
        Traceback (most recent call last):
        TypeError: an ...Pool cannot be pickled or copied: make it anew there
    """

    _instead: str

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self)
        what = "pickled" if hasattr(kind, "__deepcopy__") else "pickled or copied"
        raise TypeError(f"an {kind.__module__}.{kind.__name__} cannot be {what}: {self._instead}")


class Closing(ABC):
    """Base of classes with a method `close()`. Makes their objects context managers, which call `close()` at the end of
    a `with` block.

    Example:
        >>> class Attached(ibp.adapters.Closing):
        ...     def close(self):
        ...         print("detached")
        >>> with Attached() as attached:
        ...     print("attached")
        attached
        detached
    """

    @abstractmethod
    def close(self) -> object:
        """Undoes the change."""

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- warnings ----

said: set[str] = set()  # The keys of the warnings that this process has given.


def warn_once(message: str, *, key: str | None = None, stacklevel: int = 2) -> None:
    """Gives a RuntimeWarning, unless the process has already given one with the same key.

    Args:
        message: the message of the warning.
        key: a string. Of all warnings with the same key, only the first is given. None: the message is the key.
        stacklevel: as in `warnings.warn`. 1: the warning names the line that calls `warn_once`.
    """
    key = message if key is None else key
    if key not in said:
        said.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=stacklevel + 1)


# ---- locks ----

PATIENCE_S = 10.0
_FIRST_WAIT_S = 0.05  # Seconds that the first attempt waits. Threads rarely hold a lock for longer.


class ForkLock(type(threading.RLock())):  # type: ignore[misc]
    """A `threading.RLock` that the forking thread takes before a fork and releases after it, in both processes."""

    def __init__(self) -> None:
        _locks[id(self)] = self


class _LeftLock(ForkLock):
    """A lock in a child process that was held at the fork by a thread that exists only in the parent."""

    def acquire(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(
            f"another thread used this object for more than {PATIENCE_S:g} s while the process forked, so that the "
            "child cannot use it: make it anew in the child, or fork while no other thread uses it"
        )

    __enter__ = acquire


# All locks by id, in the order in which they were made.
_locks: weakref.WeakValueDictionary[int, ForkLock] = weakref.WeakValueDictionary()
_taken: list[ForkLock] = []  # The locks that the forking thread has taken.


def _before_fork() -> None:
    end, wait_s = time.monotonic() + PATIENCE_S, _FIRST_WAIT_S
    missed = _take(_all_locks(), wait_s)
    while missed and time.monotonic() < end:
        _give_back()  # The holder of a missed lock may be waiting for one of these locks.
        wait_s = min(2 * wait_s, end - time.monotonic())
        missed = _take([*missed, *_all_locks()], wait_s)


def _in_child() -> None:
    _give_back()
    for lock in _all_locks():
        if lock.acquire(blocking=False):
            lock.release()
        else:
            lock.__class__ = _LeftLock


def _all_locks() -> list[ForkLock]:
    return [lock for held in _locks.valuerefs() if (lock := held()) is not None]


def _take(locks: Iterable[ForkLock], wait_s: float) -> list[ForkLock]:
    """Acquires locks in order, and waits at most wait_s seconds altogether. Returns the locks that it could not
    acquire."""
    end, missed = time.monotonic() + wait_s, []
    for lock in locks:
        if lock.acquire(timeout=max(0.0, end - time.monotonic())):
            _taken.append(lock)
        else:
            missed.append(lock)
    return missed


def _give_back() -> None:
    while _taken:
        _taken.pop().release()


os.register_at_fork(before=_before_fork, after_in_parent=_give_back, after_in_child=_in_child)


# ---- progress bars ----


class _Bar(_tqdm.tqdm):
    """tqdm's bar with a lock of this process alone. tqdm's own lock is shared with forked processes. If one of them
    were killed while it holds the lock, the others would wait for the lock forever."""

    _lock = threading.RLock()


os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


class _Hidden(Closing):
    """A bar that is not shown. It takes no lock, unlike tqdm's hidden bar, where an interrupt in a thread that holds
    the lock would make all other threads wait forever."""

    def __init__(self, iterable: Iterable[Any] | None) -> None:
        self._iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self._iterable or ())

    def update(self, n: float | None = 1) -> None:
        pass

    def close(self) -> None:
        pass


Bar = _Bar | _Hidden


def tqdm(iterable: Iterable[Any] | None = None, *, disable: bool = False, **options: Any) -> Bar:
    """Returns a progress bar. The arguments are those of tqdm's class `tqdm`."""
    return _Hidden(iterable) if disable else _Bar(iterable, **options)


# ---- modules ----


def published(package: str, *pickled: Any) -> Callable[[], list[str]]:
    """Sets `__module__` of all classes in a package's `__all__` to the name of the package, for pickle and for readers.
    Returns a function to use as the package's `__dir__`, which lists the names of `__all__`. pickled: other classes and
    functions that pickles of the package's objects refer to. They get the same `__module__`, so that pickles refer to
    no private module of the package. The package must have imported them."""
    module = vars(sys.modules[package])
    for name in module["__all__"]:
        if isinstance(value := module.get(name), type):
            value.__module__ = package
    for value in pickled:
        value.__module__ = package
    return lambda: module["__all__"]


def after_import(name: str, work: Callable[[], object]) -> None:
    """Calls work() once the module with the given name is imported: now if it is imported already, otherwise right
    after its import, when the module's code has run."""
    if name in sys.modules:
        work()
        return
    is_asking = False

    def find_spec(asked: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Lets the other finders of sys.meta_path find the module, and makes its loader call work()."""
        nonlocal is_asking
        if asked != name or is_asking:
            return None
        is_asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            is_asking = False
        if spec is not None and spec.loader is not None:
            watch(spec.loader)
        return spec

    def watch(loader: Loader) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # The loader may also load other modules: all modules of an archive share a loader.
            if module.__name__ == name and finder in sys.meta_path:
                sys.meta_path.remove(finder)
                work()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    finder: Any = SimpleNamespace(find_spec=find_spec)
    sys.meta_path.insert(0, finder)
