"""Calls of the library on the CPU, in which something is made to fail, with checks of what must hold afterwards.

As a program, with tests/c/failing_allocations.cpp preloaded, lets each allocation of the library's own code fail, one
after the other. Arguments: the preloaded library, then names of cases; without names, all cases run. Prints failures
and counts.
"""

import ctypes
import dataclasses
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ibp
from helpers import assert_same_bits

ON_CPU = {"device": "cpu", "memory": "host"}


@dataclasses.dataclass
class Case:
    """A call on a subject, which is made anew for it.

    Attributes:
        make: returns the subject.
        call: the call that may fail; gets the subject.
        check: raises AssertionError unless the call did what it should; gets the subject and the result.
        kept: raises AssertionError unless the subject is as it was or as it becomes; gets the subject and the error.
    """

    make: Callable[[], Any]
    call: Callable[[Any], Any]
    check: Callable[[Any, Any], None]
    kept: Callable[[Any, BaseException], None] = lambda subject, error: None

    def fail(self, call: Callable[[Any], Any]) -> str | None:
        """Runs a call that something may make fail. Returns the error's name, or None if the call succeeds. Raises
        AssertionError unless the subject is kept and the call can be repeated."""
        subject = self.make()
        try:
            self.check(subject, call(subject))
            return None
        except (MemoryError, RuntimeError) as error:
            self.kept(subject, error)
            if not isinstance(getattr(error, "table", None), ibp.CompressedTensor):
                self.check(subject, self.call(subject))
            return type(error).__name__


def same(a: torch.Tensor, *others: torch.Tensor) -> None:
    """Raises AssertionError unless a tensor has the bits of one of the others."""
    for other in others[:-1]:
        if a.shape == other.shape and torch.equal(a.view(torch.uint8), other.view(torch.uint8)):
            return
    assert_same_bits(a, others[-1])


def same_rows(a: torch.Tensor, *others: torch.Tensor) -> None:
    """Raises AssertionError unless each row has the bits that it has in one of the others."""
    is_one = torch.stack([(a.view(torch.uint8) == other.view(torch.uint8)).all(1) for other in others]).any(0)
    assert is_one.all(), f"{int((~is_one).sum())} rows are others"


def rows(count: int, seed: int = 0) -> torch.Tensor:
    """Returns BF16 rows of 96 bytes: rows that compress, zeros, and noise."""
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(count, 48, generator=generator) * 0.02).to(torch.bfloat16)
    x[::5] = 0
    noise = torch.randint(-(2**15), 2**15, (len(x[3::7]), 48), dtype=torch.int16, generator=generator)
    x[3::7] = noise.view(torch.bfloat16)
    return x


X, OTHER = rows(80), rows(16, seed=1)
LARGE = rows(8_000, seed=2)  # These are enough rows for several threads.
IDS = torch.tensor([3, 79, 0, 3, 41])
CHANGED = torch.arange(10, 26)
NEW = X.index_copy(0, CHANGED, OTHER)
FINGERPRINT = torch.tensor(ibp.deltas.fingerprint(X) >> 1)


def table_of(x: torch.Tensor = X, **options: Any) -> ibp.CompressedTensor:
    return ibp.compress(x, **{"scheme": "planes", "slot_bytes": 64, **options}, **ON_CPU)


def is_table_of(*tensors: torch.Tensor) -> Callable[[Any, Any], None]:
    """Returns a check that a table can be read and has the bits of one of the tensors."""

    def check(table: ibp.CompressedTensor, _: Any) -> None:
        same(table.decompress(), *tensors)
        assert len(table.index_select(IDS)) == len(IDS)

    return check


def compressing(x: torch.Tensor = X, **options: Any) -> Case:
    held = x.clone()
    return Case(
        lambda: x,
        lambda x: ibp.compress(x, **options, **ON_CPU),
        lambda x, table: assert_same_bits(table.decompress(), held),
        lambda x, error: assert_same_bits(x, held),
    )


def compressing_in_place() -> Case:
    def kept(x: torch.Tensor, error: BaseException) -> None:
        table = getattr(error, "table", None)
        same(x if table is None else table.decompress(), X)

    return Case(
        X.clone,
        lambda x: ibp.compress(x, scheme="planes", **ON_CPU, inplace=True),
        lambda _, table: assert_same_bits(table.decompress(), X),
        kept,
    )


def reading(wanted: torch.Tensor, call: Callable[[Any], torch.Tensor], **options: Any) -> Case:
    table = table_of(**options)
    return Case(lambda: table, call, lambda _, got: assert_same_bits(got, wanted))


def changing(new: torch.Tensor, call: Callable[[Any], Any], x: torch.Tensor = X, **options: Any) -> Case:
    """Returns a case in which a table has either the old rows or the new ones."""
    return Case(
        lambda: table_of(x, **options),
        call,
        lambda table, _: is_table_of(new)(table, None),
        lambda table, _: is_table_of(x, new)(table, None),
    )


def appending() -> Case:
    """Returns a case that appends to a table a second time."""
    both = torch.cat((X, OTHER))

    def check(table: ibp.CompressedTensor, _: Any) -> None:
        is_table_of(both, torch.cat((both, OTHER)))(table, None)

    return Case(table_of, lambda table: table.append(OTHER), check, lambda table, _: is_table_of(X, both)(table, None))


def caching(call: Callable[[ibp.RowCache], Any], *tensors: torch.Tensor, **options: Any) -> Case:
    """Returns a case in which a cache returns rows of one of the tensors, whatever has failed, and its table has the
    right ones."""

    def make() -> ibp.RowCache:
        options_ = {"hotness": torch.arange(80)} | options
        return ibp.RowCache(table_of(), 6000, devices=["cpu"], **options_)

    def check(cache: ibp.RowCache, _: Any) -> None:
        for _ in range(2):
            assert_same_bits(cache.index_select(torch.arange(80)), tensors[-1])

    def kept(cache: ibp.RowCache, _: BaseException) -> None:
        before = cache.index_select(torch.arange(80))
        same_rows(before, *tensors)
        cache.flush()
        assert_same_bits(cache.index_select(torch.arange(80)), before)

    return Case(make, call, check, kept)


def sharing() -> Case:
    def check(_: Any, opened: ibp.CompressedTensor) -> None:
        assert_same_bits(opened.decompress(), X)

    return Case(
        table_of,
        lambda table: ibp.distributed.open_shared(table.share_memory_().share()),
        check,
        lambda t, _: check(None, t),
    )


def coding_into_a_place() -> Case:
    codebook = table_of().codebook
    wanted = OTHER.view(torch.uint8)

    def make() -> ibp.CodedRows:
        place = ibp.CodedRows(codebook, 80, slot_bytes=96, device="cpu")
        ibp.encode_into(X, place)
        return place

    def check(place: ibp.CodedRows, _: Any) -> None:
        assert_same_bits(place.decode(CHANGED), wanted)
        assert_same_bits(place.decode(IDS), X[IDS].view(torch.uint8))
        place.check()

    def kept(place: ibp.CodedRows, _: BaseException) -> None:
        same(place.decode(CHANGED), X[CHANGED].view(torch.uint8), wanted)
        assert_same_bits(place.decode(IDS), X[IDS].view(torch.uint8))

    return Case(make, lambda place: ibp.encode_into(OTHER, place, CHANGED), check, kept)


PAGES = (torch.randn(8, 2, 8, 16, generator=torch.Generator().manual_seed(3)) * 0.02).to(torch.bfloat16)
PAGE_BYTES = PAGES[0].numel() * 2


def keeping_pages() -> Case:
    """Returns a case that stores pages 0 to 3, stores 2 to 5 again, and loads all."""

    def make() -> ibp.kv.KVStore:
        store = ibp.kv.KVStore(PAGES, num_pages=16, page_bytes=PAGE_BYTES, device="cpu")
        store.store([0, 1, 2, 3], PAGES, [0, 1, 2, 3])
        return store

    def loaded(store: ibp.kv.KVStore, pages: list[int]) -> torch.Tensor:
        out = torch.zeros_like(PAGES)
        store.load(pages, out, list(range(len(pages)))).synchronize()
        return out[: len(pages)]

    def call(store: ibp.kv.KVStore) -> torch.Tensor:
        store.store([2, 3, 4, 5], PAGES, [4, 5, 6, 7])
        return loaded(store, [0, 1, 2, 3, 4, 5])

    def check(store: ibp.kv.KVStore, got: torch.Tensor) -> None:
        assert_same_bits(got, PAGES[[0, 1, 4, 5, 6, 7]])
        store.check()

    def kept(store: ibp.kv.KVStore, _: BaseException) -> None:
        assert_same_bits(loaded(store, [0, 1]), PAGES[:2])
        if all(store.is_stored([2, 3])):
            same(loaded(store, [2, 3]), PAGES[2:4], PAGES[4:6])

    return Case(make, call, check, kept)


def keeping_tokens() -> Case:
    tokens = torch.tensor([5, 1, 7, 1])

    def make() -> ibp.kv.KVRows:
        kv = ibp.kv.KVRows(PAGES[0], num_layers=1, num_tokens=64, num_heads=8, device="cpu", cache_bytes=4000)
        kv.store(0, PAGES[0], torch.arange(2))
        return kv

    def call(kv: ibp.kv.KVRows) -> torch.Tensor:
        kv.store(0, PAGES[1:4].flatten(0, 1), torch.arange(2, 8))
        return kv.load(0, tokens)

    def check(kv: ibp.kv.KVRows, got: torch.Tensor) -> None:
        assert_same_bits(got, PAGES.flatten(0, 1)[tokens])
        kv.check()

    def kept(kv: ibp.kv.KVRows, _: BaseException) -> None:
        assert_same_bits(kv.load(0, torch.arange(2)), PAGES[0])

    return Case(make, call, check, kept)


def bags() -> Case:
    wanted = torch.nn.functional.embedding_bag(IDS.view(1, -1), X, mode="sum")
    return reading(wanted, lambda table: ibp.embedding_bag(table, IDS.view(1, -1), mode="sum"))


class Folder:
    """A directory with one file. It exists as long as the object does."""

    def __init__(self) -> None:
        in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # A disk would be slower.
        self.held = tempfile.TemporaryDirectory(prefix="ibp-test-", dir=in_memory)
        self.path = Path(self.held.name) / "one.safetensors"
        ibp.save(self.path, OLD_FILE)

    def is_one_of(self, *wanted: dict[str, Any]) -> None:
        """Raises AssertionError unless there is exactly one file, intact, that has the tensors of one of `wanted`."""
        assert os.listdir(self.held.name) == [self.path.name]
        found = ibp.load(self.path, verify=True, memory="host")
        same = [some for some in wanted if found.keys() == some.keys()]
        assert same, f"the file has {sorted(found)}"
        for name, value in same[0].items():
            assert_same_bits(plain(found[name]), plain(value))


def plain(value: Any) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value.decompress()


OLD_FILE = {"old": table_of(), "plain": OTHER}
NEW_FILE = {"new": table_of(NEW), "masks": table_of(NEW, scheme="ibp"), "plain": OTHER, "more": X}


def saving() -> Case:
    return Case(
        Folder,
        lambda folder: ibp.save(folder.path, NEW_FILE),
        lambda folder, _: folder.is_one_of(NEW_FILE),
        lambda folder, _: folder.is_one_of(OLD_FILE, NEW_FILE),
    )


def loading(call: Callable[[Path], torch.Tensor]) -> Case:
    return Case(Folder, lambda folder: call(folder.path), lambda _, got: assert_same_bits(got, X))


def rows_of_a_file(path: Path) -> torch.Tensor:
    with ibp.open(path) as file:
        return file["old"].index_select(torch.arange(80))


def compressing_a_checkpoint() -> Case:
    """Returns a case in which the output either does not exist or is complete. Beside it there may only be files with
    which the next call continues."""

    def make() -> Folder:
        folder = Folder()
        ibp.save(folder.path, {"a": LARGE[:700], "b": X, "c": OTHER})
        return folder

    def call(folder: Folder) -> dict[str, Any]:
        output = Path(folder.held.name) / "out.safetensors"
        ibp.checkpoints.compress(folder.path, output, device="cpu", jobs=1, force=True)
        return ibp.load(output, verify=True, memory="host")

    def check(folder: Folder, found: dict[str, Any]) -> None:
        for name, wanted in (("a", LARGE[:700]), ("b", X), ("c", OTHER)):
            assert_same_bits(plain(found[name]), wanted)
        assert sorted(os.listdir(folder.held.name)) == ["one.safetensors", "out.safetensors"]

    def kept(folder: Folder, _: BaseException) -> None:
        output = Path(folder.held.name) / "out.safetensors"
        if output.exists():
            check(folder, ibp.load(output, verify=True, memory="host"))

    return Case(make, call, check, kept)


def making_a_delta() -> Case:
    return Case(
        lambda: None, lambda _: ibp.deltas.make(NEW, X), lambda _, delta: assert_same_bits(delta.apply_(X.clone()), NEW)
    )


def applying_a_delta() -> Case:
    """Returns a case in which the base is either the old one or the new one. If it is the new one, it is changed back
    for the next call."""
    delta, back = ibp.deltas.make(NEW, X), ibp.deltas.make(X, NEW)

    def kept(base: torch.Tensor, _: BaseException) -> None:
        same(base, X, NEW)
        if not torch.equal(base.view(torch.uint8), X.view(torch.uint8)):
            back.apply_(base)

    return Case(X.clone, lambda base: delta.apply_(base), lambda base, _: assert_same_bits(base, NEW), kept)


CASES: dict[str, Callable[[], Case]] = {
    "compress": compressing,
    "compress with masks": lambda: compressing(scheme="ibp"),
    "compress with clusters": lambda: compressing(scheme="planes", clusters=2),
    "compress packed": lambda: compressing(layout="packed"),
    "compress raw": lambda: compressing(scheme="raw"),
    "compress at level fast": lambda: compressing(level="fast"),
    "compress in place": compressing_in_place,
    "decompress": lambda: reading(X, lambda table: table.decompress()),
    "decompress packed": lambda: reading(X, lambda table: table.decompress(), slot_bytes=None, layout="packed"),
    "index_select": lambda: reading(X[IDS], lambda table: ibp.index_select(table, IDS)),
    "index_select by the operation": lambda: reading(X[IDS], lambda table: ibp.index_select(table, IDS, device="cpu")),
    "table[key]": lambda: reading(X[10:20, ::3], lambda table: table[10:20, ::3]),
    "pickle": lambda: reading(X, lambda table: pickle.loads(pickle.dumps(table)).decompress()),
    "clone": lambda: reading(X, lambda table: table.clone().decompress()),
    "share": sharing,
    "embedding_bag": bags,
    "update_": lambda: changing(NEW, lambda table: table.update_(CHANGED, OTHER)),
    "update_ packed": lambda: changing(
        NEW, lambda table: table.update_(CHANGED, OTHER), slot_bytes=None, layout="packed"
    ),
    "append": appending,
    "refit": lambda: changing(X, lambda table: table.refit(device="cpu")),
    "RowCache": lambda: Case(
        table_of,
        lambda table: ibp.RowCache(table, 6000, torch.arange(80), devices=["cpu"]).index_select(IDS),
        lambda _, got: assert_same_bits(got, X[IDS]),
    ),
    "RowCache.index_select": lambda: caching(lambda cache: cache.index_select(IDS), X),
    "RowCache.index_select of the least recently used": lambda: caching(
        lambda cache: cache.index_select(IDS), X, hotness=None, policy="lru"
    ),
    "RowCache.refill": lambda: caching(lambda cache: cache.refill(-torch.arange(80)), X),
    "RowCache.update_": lambda: caching(lambda cache: cache.update_(CHANGED, OTHER), X, NEW),
    "RowCache.update_ in its slots": lambda: caching(
        lambda cache: cache.update_(CHANGED, OTHER), X, NEW, writable=True
    ),
    "encode_into": coding_into_a_place,
    "KVStore": keeping_pages,
    "KVRows": keeping_tokens,
    "save": saving,
    "load": lambda: loading(lambda path: ibp.load(path, verify=True, memory="host")["old"].decompress()),
    "open": lambda: loading(rows_of_a_file),
    "compress_checkpoint": compressing_a_checkpoint,
    "delta": making_a_delta,
    "Delta.apply_": applying_a_delta,
    "fingerprint": lambda: Case(
        lambda: X,
        lambda x: torch.tensor(ibp.deltas.fingerprint(x) >> 1),
        lambda _, got: assert_same_bits(got, FINGERPRINT),
    ),
}
# Calls that several threads work on.
SHARED_CASES: dict[str, Callable[[], Case]] = {
    "compress by threads": lambda: compressing(LARGE, scheme="planes"),
    "decompress by threads": lambda: Case(
        lambda: table_of(LARGE), lambda table: table.decompress(), lambda _, got: assert_same_bits(got, LARGE)
    ),
    "update_ by threads": lambda: changing(
        LARGE.flip(0), lambda table: table.update_(torch.arange(len(LARGE)), LARGE.flip(0)), LARGE
    ),
}


# ---- as a program ----


def fail_one_by_one(name: str, case: Case, shim: ctypes.CDLL) -> int:
    """Lets each allocation of the library in a case fail. Returns the number of the last one."""
    case.check(subject := case.make(), case.call(subject))
    number = 0
    while True:
        number += 1 + number // 40  # If there are many allocations, most come from the same places.

        def call(subject: Any, number: int = number) -> Any:
            shim.ibp_test_arm(ctypes.c_int64(number))
            try:
                return case.call(subject)
            finally:
                failed.append(bool(shim.ibp_test_disarm()))

        failed: list[bool] = []
        try:
            case.fail(call)
        except Exception as error:
            print(f"{name}: allocation {number}: {type(error).__name__}: {error}", flush=True)
            raise
        if not failed[-1]:
            return number - 1


def main(shim_path: str, *names: str) -> int:
    shim = ctypes.CDLL(shim_path)
    shim.ibp_test_disarm.restype = ctypes.c_bool
    assert shim.ibp_test_watch(b"/ibp/_", b"libstdc++") >= 3, "the libraries of ibp are not loaded"
    failures = 0
    for name, make in (CASES | SHARED_CASES).items():
        if names and name not in names:
            continue
        torch.set_num_threads(2 if name in SHARED_CASES else 1)
        try:
            print(f"{name}: {fail_one_by_one(name, make(), shim)} allocations", flush=True)
        except Exception:
            failures += 1
    print(f"{failures} failures", flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
