"""`KVStore` keeps pages of a KV-cache compressed, in host memory or on the GPU."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import _core
from .._common.arguments import sms_of, whole_number
from .._common.manners import Statistics
from .._common.process import ForkLock, OfThisProcess
from .._fetch.calls import check_range, list_of_ids
from .._machine import memory as _memory
from .._machine.memory import is_capturing
from .._machine.staging import copy_all
from .._rows.codebook import AnyCodebook
from .._rows.geometry import raw_row_overflow, stored_sizes
from .._rows.handle import Faults, FaultWords, Handle
from .._tables.coded_rows import Buffers, CodedRows
from . import _paged
from ._paged import PagedTensors, Pages, blocks_on, check_different, check_paged, numbers_on, pages_of, plan_pages

Tensors = torch.Tensor | PagedTensors | Buffers | Sequence[torch.Tensor]

# Default numbers of multiprocessors for stores and for loads of pages in pinned memory. They are enough to keep up with
# the link of an H200: pages of BF16 are stored at 76 GB/s with 24 multiprocessors and at 73 GB/s with all 132; they are
# loaded at 75 GB/s with 16 and with all 132 (benchmarks/results/kv_pages.csv).
_STORE_SMS, _LOAD_SMS = 24, 16
_WORDS = FaultWords(
    "{status}: piece {value} of the store",
    out_of_range="a page that was loaded is not stored, or a page or block number is out of range",
    later="",
)
# `compact_if_due` compacts the overflow if more than num_pages / _STORES_A_COMPACTION pages were stored since the last
# compaction.
_STORES_A_COMPACTION = 16
# Priority of the store's CUDA streams. When a multiprocessor becomes free, thread blocks of these streams get it before
# those of streams with the default priority.
_HIGHEST_PRIORITY = -1


@dataclass(frozen=True)
class KVStoreStats(Statistics):
    """The counts and sizes of a `KVStore`.

    Attributes:
        stored_pages: number of pages that can be loaded.
        pool_bytes: as in `KVStore.pool_bytes`.
        used_overflow_bytes: number of bytes of overflow that are reserved for rows. `compact` frees the bytes that rows
            no longer need.
        overflow_bytes: size in bytes of the overflow.
        spilled_rows: number of rows that were stored with bytes in overflow since the last `clear`.
        lost_rows: number of rows that were lost since the last `clear` because overflow had no room for them.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64, dtype=torch.bfloat16)  # 64 blocks of 16 tokens
        >>> store = ibp.kv.KVStore(kv, page_bytes=kv[0].nbytes, num_pages=100, device="cpu")
        >>> store.store([7, 8], kv, blocks=[3, 5]).wait()
        >>> store.stats()
        KVStoreStats(stored_pages=2, pool_bytes=..., lost_rows=0)
    """

    stored_pages: int
    pool_bytes: int
    used_overflow_bytes: int
    overflow_bytes: int
    spilled_rows: int
    lost_rows: int


class Transfer(OfThisProcess):
    """A store or a load of pages that has been queued. `KVStore.store` and `KVStore.load` return it.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64, dtype=torch.bfloat16)  # 64 blocks of 16 tokens
        >>> store = ibp.kv.KVStore(kv, page_bytes=kv[0].nbytes, num_pages=100, device="cpu")
        >>> transfer = store.store([7, 8], kv, blocks=[3, 5])
        >>> transfer.synchronize()
        >>> transfer.num_bytes, transfer.is_done(), transfer.lost()
        (32768, True, [])

    Attributes:
        num_bytes: uncompressed size of the pages in bytes.
    """

    _instead = "wait() for it in the process that began it"

    def __init__(
        self, store: KVStore, stores: bool, near: torch.Tensor, host: torch.Tensor | None, tensors: range
    ) -> None:
        """near, host: the page numbers on the device and on the host, as `numbers_on` returns them. tensors: the
        indices in a page of the tensors that the transfer moves."""
        self._store, self._stores, self._near = store, stores, near
        self._pages = None if host is None else host.clone()  # the caller may overwrite the given tensor
        self._columns = slice(tensors.start, tensors.stop)
        self.num_bytes = near.numel() * len(tensors) * store.page_bytes
        self._event: torch.cuda.Event | None = None
        self._is_captured = near.is_cuda and is_capturing(near.device)
        if near.is_cuda and not self._is_captured:
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        """Returns whether the transfer has ended. Does not wait."""
        self._refuse_captured()
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Makes the current stream of the store's device wait for the transfer. The host does not wait."""
        self._refuse_captured()
        if self._event is not None:
            torch.cuda.current_stream(self._store.device).wait_event(self._event)

    def synchronize(self) -> None:
        """Makes the host wait for the transfer.

        Raises:
            IndexError: a page that was to be loaded is not stored. Its blocks have become zeros.
            ibp.CorruptTableError: a loaded page is damaged. The damaged parts of its blocks have become zeros.
        """
        self._refuse_captured()
        if self._event is not None:
            self._event.synchronize()
        if not self._stores:
            self._store.faults.raise_pending(self._store.device)

    def lost(self) -> list[int]:
        """Waits for the transfer. Returns the numbers of the pages that it could not store, because overflow had no
        room for one of their rows. For a load, returns an empty list."""
        self.synchronize()
        if not self._stores:
            return []
        pages = (self._near if self._pages is None else self._pages).unique().tolist()
        seen = self._store._seen[:-1, self._columns].all(1).tolist()
        return [page for page in pages if not 0 <= page < len(seen) or not seen[page]]

    def _refuse_captured(self) -> None:
        if self._is_captured:
            raise RuntimeError("the transfer is part of a CUDA graph: wait for the graph's stream, and ask is_stored()")

    def _meets(self, pages: torch.Tensor | None) -> bool:
        if self._pages is None or pages is None:
            return True
        own = np.zeros(self._store.num_pages, bool)
        own[self._pages.numpy()] = True
        return bool(own[pages.numpy()].any())

    def __repr__(self) -> str:
        what = "store" if self._stores else "load"
        state = "captured" if self._is_captured else "done" if self.is_done() else "under way"
        return f"ibp.kv.Transfer({what} of {self._near.numel()} pages, {self.num_bytes} bytes, {state})"


class KVStore(OfThisProcess):
    """A pool of compressed pages of a KV-cache, in pinned host memory or on the GPU, to which serving engines offload.

    A page consists of one block of a tensor of a paged cache, or of one block from each of several tensors of the same
    shape, such as the tensors of all layers. Pages are cut into rows, and every row has a slot of fixed size. Bytes of
    a row that do not fit in its slot go to an overflow area that all pages share. If the overflow area is full, the
    page is not stored; `Transfer.lost`, `is_stored` and a later `load` report this.

    Transfers run on streams of the store, after the work that is queued on the current stream. A transfer waits for an
    earlier one if the two have pages in common and at least one of the two is a store. Page and block numbers may be
    lists, or tensors on the CPU or the GPU. If numbers are on the GPU, the GPU checks them, and `check` raises the
    error. CUDA graphs can capture transfers with such numbers, after one transfer outside the graph. Captured transfers
    run on the current stream, and the caller must order them.

    Example:
        >>> kv = torch.randn(64, 16, 8, 64, dtype=torch.bfloat16)  # 64 blocks of 16 tokens
        >>> store = ibp.kv.KVStore(kv, page_bytes=kv[0].nbytes, num_pages=100, device="cpu")
        >>> store.store([7, 8], kv, blocks=[3, 5]).wait()  # pages 7 and 8 become copies of blocks 3 and 5
        >>> store.load([8], kv, blocks=[11]).wait()  # block 11 becomes page 8
        >>> torch.equal(kv[11], kv[5])
        True

    Args:
        codebook: the codebook that compresses rows. Or a sample of blocks: the codebook is learned from it, and the
            sizes of slots and overflow are chosen to suit it.
        page_bytes: size in bytes of one tensor's block in a page. A complete page has num_tensors * page_bytes bytes.
        num_pages: number of pages. None: the largest number that fits into pool_bytes.
        pool_bytes: total size in bytes of slots and overflow, or of slots alone if overflow is in host memory although
            slots are on the GPU. None: the size that num_pages pages need.
        num_tensors: number of tensors. A page has one block of each of them.
        row_bytes: size in bytes of a row, which must be contiguous in a block. None: 1 to 2 KiB if page_bytes allows
            it. It must not be given with a codebook, which determines it.
        slot_bytes: size in bytes of the slot of each row. None: if num_pages and pool_bytes are both given, the largest
            size that fits into pool_bytes. Otherwise, with a sample, a size that holds 99.9 % of its rows; with a
            codebook, 2 % more than the expected size of a row.
        overflow_bytes: size in bytes of the overflow area. None: a size that suits the slots.
        level: level of the codebook that is learned, see `ibp.compress`.
        device: the GPU that compresses and decompresses, or "cpu". None: the current CUDA device if there is one, else
            the CPU.
        memory: the memory that holds the pages: "pinned" (host memory that the GPU writes and reads) or "device". None:
            "pinned". If the device is the CPU, pages are always in host memory.
        overflow_memory: the memory that holds overflow. None: the same as `memory`. "pinned" with memory "device":
            slots are on the GPU, and overflow is in pinned host memory. Unless overflow_bytes is given, overflow then
            has room for all rows even if they are raw, so no page is lost, and slots may be smaller than most rows
            need.

    Attributes:
        place: the `ibp.CodedRows` that holds the rows.

    Raises:
        TypeError, ValueError: an argument is not as described, or is inconsistent with another.
    """

    _instead = "load() its pages into tensors, which can be pickled"

    def __init__(
        self,
        codebook: AnyCodebook | torch.Tensor,
        *,
        page_bytes: int,
        num_pages: int | None = None,
        pool_bytes: int | None = None,
        num_tensors: int = 1,
        row_bytes: int | None = None,
        slot_bytes: int | None = None,
        overflow_bytes: int | None = None,
        level: str = "default",
        device: torch.device | str | int | None = None,
        memory: str | None = None,
        overflow_memory: str | None = None,
    ) -> None:
        self.page_bytes = whole_number("page_bytes", page_bytes, 1)
        self.num_tensors = whole_number("num_tensors", num_tensors, 1)
        self.device = _memory.usual(device)
        where = _memory.memory_read_by(self.device, memory, "pinned")
        _memory.check_memory(overflow_memory, "overflow_memory", among=("pinned",))
        spills = overflow_memory == "pinned" and (
            memory == "device" if self.device.type == "cpu" else where == "device"
        )
        row_bytes = _paged.row_bytes_of(codebook, row_bytes, self.page_bytes)
        sample = codebook if isinstance(codebook, torch.Tensor) else None
        self.codebook = _paged.learned(codebook, row_bytes, level)
        self._rows_per_tensor = self.page_bytes // row_bytes
        rows_per_page = self._rows_per_tensor * self.num_tensors
        num_rows = None if num_pages is None else whole_number("num_pages", num_pages, 0) * rows_per_page
        pool_bytes = None if pool_bytes is None else whole_number("pool_bytes", pool_bytes, 0)
        if num_rows is not None and pool_bytes is not None:
            usual_slot, overflow_per_row = _paged.sizes_within(pool_bytes, num_rows, row_bytes, spills)
        else:
            usual_slot, overflow_per_row = _paged.usual_sizes(sample, self.codebook)
        if num_rows is None:
            if pool_bytes is None:
                raise ValueError("neither num_pages nor pool_bytes is given; wanted one of them, or both")
            per_row = (slot_bytes or usual_slot) + (0 if spills else overflow_per_row)
            num_rows = int(pool_bytes / (per_row * rows_per_page)) * rows_per_page
        self.num_pages = num_rows // rows_per_page
        self._spills = spills
        self._rows_own_parts = spills and overflow_bytes is None
        if spills:  # overflow has room for all rows in raw form
            slot_bytes = usual_slot if slot_bytes is None else slot_bytes
            overflow_per_row = raw_row_overflow(row_bytes, slot_bytes)
        slot_bytes, overflow_bytes = _paged.checked_sizes(
            slot_bytes, overflow_bytes, num_rows, usual_slot, overflow_per_row
        )
        self.place = CodedRows(
            self.codebook,
            num_rows,
            slot_bytes=slot_bytes,
            overflow_bytes=overflow_bytes,
            device=self.device,
            memory=where if self.device.type == "cuda" else None,
            overflow_memory=overflow_memory if spills else None,
        )
        self._give_parts()
        self._make_state()

    def _give_parts(self) -> None:
        """If overflow was made large enough for all rows in raw form, assigns to each row a part of overflow that is
        large enough for its raw bytes. Then no row ever needs a larger part, and no row is lost."""
        place = self.place
        if not self._rows_own_parts or not place.bases.numel():
            return
        part_bytes = place.overflow.numel() // place.num_rows
        place.bases.copy_(part_bytes * torch.arange(place.num_rows, device=self.device))
        place.rooms.view(torch.int16).fill_(part_bytes // _core.SECTOR_BYTES)
        place.used.fill_(place.overflow.numel())

    def _make_state(self) -> None:
        """Allocates the state of pages and transfers. A flag for each page and tensor says whether the store has the
        tensor's block of this page. There are flags for one extra page, to which `free` writes if page numbers on the
        GPU are out of range."""
        on_gpu = self.device.type == "cuda"
        shape = (self.num_pages + 1, self.num_tensors)
        self._stored = torch.zeros(shape, dtype=torch.uint8, device=self.device)
        seen = _memory.empty(self._stored.numel(), torch.device("cpu"), on_gpu).view(shape)
        self._seen = seen.zero_()  # a copy of the flags in pinned memory, for the host
        self._seen_near = _memory.device_view(seen, self.device) if on_gpu else seen
        self.faults = Faults(_WORDS)
        self.faults.on(self.device)  # graphs need the record to exist before they are captured
        self._streams: dict[bool, torch.cuda.Stream] = {}
        self._under_way: list[Transfer] = []
        self._lists: weakref.WeakKeyDictionary[Buffers, PagedTensors] = weakref.WeakKeyDictionary()
        self._tables: dict[int, torch.Tensor] = {}
        self._lock = ForkLock()
        self._num_stored = 0  # number of pages stored since the last compaction

    # ---- properties ----

    @property
    def pool_bytes(self) -> int:
        """Total size in bytes of slots and overflow, or of slots alone if overflow is in host memory although slots are
        on the GPU."""
        return self.place.slots.numel() + (0 if self._spills else self.place.overflow.numel())

    @property
    def index_bytes(self) -> int:
        """Size in bytes of the index of rows and of the flags of pages, on the device."""
        held = (self.place.lengths, self.place.bases, self.place.rooms, self._stored)
        return sum(tensor.nbytes for tensor in held)

    @property
    def gain(self) -> float:
        """Raw size of all pages divided by `pool_bytes`: the factor by which compression increases the number of pages
        that fit."""
        return self.num_pages * self.num_tensors * self.page_bytes / max(1, self.pool_bytes)

    def __len__(self) -> int:
        return self.num_pages

    def __repr__(self) -> str:
        return (
            f"ibp.kv.KVStore({self.num_pages} pages of {self.num_tensors} x {self.page_bytes} bytes, rows of "
            f"{self.place.row_bytes} in slots of {self.place.slot_bytes}, pool of {self.pool_bytes} bytes, "
            f"{self.device}, {self.place.memory} memory"
            f"{', spills to host memory' if self._spills else ''})"
        )

    def stats(self) -> KVStoreStats:
        """Returns the store's counts and sizes. Waits for all transfers begun so far."""
        self.synchronize()
        counts, stored = self.place.counts(), int(self._seen[:-1].bool().all(1).sum())
        return KVStoreStats(
            stored, self.pool_bytes, counts.used_bytes, self.place.overflow.numel(), counts.spilled, counts.lost
        )

    def is_stored(self, pages: Pages) -> list[bool]:
        """Returns for each page whether it can be loaded, as a list of bools. Does not wait: a transfer that has not
        ended may still change the answer.

        Raises:
            IndexError: there is no such page.
        """
        host = list_of_ids(pages, "pages").cpu().to(torch.int64)
        check_range(host, self.num_pages, name="pages")
        return self._seen[host].bool().all(1).tolist()

    # ---- transfers ----

    def store(
        self,
        pages: Pages,
        tensors: Tensors,
        blocks: Pages | None = None,
        *,
        first_tensor: int = 0,
        stream: torch.cuda.Stream | None = None,
        max_sms: int | None = None,
    ) -> Transfer:
        """Begins to compress blocks of a paged cache into pages. One kernel launch compresses all of them.

        Args:
            pages: the numbers of the pages to which the blocks are stored, all different.
            tensors: a tensor [num_blocks, ...], a sequence of such tensors, or a `PagedTensors` of them. The exception:
                if num_tensors is 1, each tensor of a sequence or of an `ibp.Buffers` is a block, and blocks must be
                None.
            blocks: the numbers of the blocks, one for each page. None: all blocks, in order.
            first_tensor: the index in a page of the first of the given tensors. A call may move only some tensors of a
                page.
            stream: the stream on which the transfer runs, of the store's device. None: one of the store's own streams.
            max_sms: keep at most this many multiprocessors busy. None: enough to keep up with the link, or all if pages
                are on the GPU.

        Raises:
            IndexError, TypeError, ValueError: arguments are not as described. Then nothing was stored.
        """
        paged = self._paged(tensors, blocks, first_tensor)
        near, host = numbers_on(self.device, "pages", pages, self.num_pages)
        moved, _ = blocks_on(paged, blocks)
        _check_as_many(near, moved)
        check_different("pages", host, self.num_pages)
        with self._lock, self._on_stream(stream, True, host, (near, moved, *paged.used)):
            place, count = self.place, self._rows_per_tensor
            sizes = (count, self.num_pages, self.num_tensors, first_tensor)
            row_ids, buffers = plan_pages(paged, near, moved, *sizes)
            sms = _sms_of(max_sms, _STORE_SMS if place.memory == "pinned" else 0)
            place.handle.encode(paged.layout, place.tally, place.fault, buffers=buffers, row_ids=row_ids, max_sms=sms)
            self._num_stored += near.numel()
            torch.ops.ibp.note_pages.default(row_ids, count, place.lengths, place.rooms, self._stored, self._seen_near)
            return self._begun(True, near, host, range(first_tensor, first_tensor + len(paged)))

    def load(
        self,
        pages: Pages,
        tensors: Tensors,
        blocks: Pages | None = None,
        *,
        first_tensor: int = 0,
        stream: torch.cuda.Stream | None = None,
        max_sms: int | None = None,
    ) -> Transfer:
        """Begins to decompress pages into blocks of a paged cache. One kernel launch decompresses all of them. The
        blocks get the bits that were stored. If, for a page, the store lacks the block of any given tensor, the page's
        blocks in all given tensors become zeros. The next call of `Transfer.synchronize` or `check` then raises an
        error.

        Args and Raises: as in `store`, except that the blocks must all be different, and pages may repeat.
        """
        paged = self._paged(tensors, blocks, first_tensor)
        near, host = numbers_on(self.device, "pages", pages, self.num_pages)
        moved, host_moved = blocks_on(paged, blocks)
        _check_as_many(near, moved)
        check_different("blocks", host_moved, paged.num_blocks)
        with self._lock, self._on_stream(stream, False, host, (near, moved, *paged.used)):
            piece = paged.piece_bytes
            sizes = (self.page_bytes // piece, self.num_pages, self.num_tensors, first_tensor)
            items, addresses = plan_pages(paged, near, moved, *sizes, self._stored)
            table = self._table_of(piece)
            sms = _sms_of(max_sms, _LOAD_SMS if self.place.memory == "pinned" else 0)
            fault = self.faults.on(self.device)
            torch.ops.ibp.gather_items.default(table, items, sms, paged.tensors[0], fault, addresses=addresses)
            return self._begun(False, near, host, range(first_tensor, first_tensor + len(paged)))

    def free(self, pages: Pages) -> None:
        """Removes pages, after all earlier transfers of these pages. They cannot be loaded until they are stored again.
        Overflow that is reserved for their rows stays reserved, for the next pages that are stored under these
        numbers."""
        near, host = numbers_on(self.device, "pages", pages, self.num_pages)
        with self._lock, self._on_stream(None, True, host, (near,)):
            is_there = (near >= 0) & (near < self.num_pages)
            index = torch.where(is_there, near, self.num_pages)
            self._seen_near[index] = 0
            self._stored[index] = 0
            self._begun(True, near, host, range(0))

    def clear(self) -> None:
        """Removes all pages and frees all overflow. Waits for all transfers begun so far."""
        self.synchronize()
        # First no page counts as stored, so that an interrupted call leaves no page with removed rows.
        self._seen.zero_(), self._stored.zero_()
        self.place.clear()
        self._give_parts()
        self.faults.clear(self.device)

    def compact(self) -> int:
        """Waits for all transfers begun so far. Frees overflow that is reserved for rows but is not needed for their
        present bytes. Returns the number of bytes of overflow that are then free.

        In a store on the GPU with `overflow_memory` "pinned" and without `overflow_bytes`, enough overflow for the raw
        bytes of every row stays reserved. The call then frees nothing and returns 0.
        """
        self.synchronize()
        self._num_stored = 0
        if self._rows_own_parts:
            return 0
        _compact(self.place, self._stored[:-1].bool().repeat_interleave(self._rows_per_tensor, 1).view(-1))
        return self.place.overflow.numel() - self.place.counts().used_bytes

    def compact_if_due(self) -> bool:
        """Calls `compact()` if more than num_pages / 16 pages were stored since the last compaction. Returns whether
        `compact` was called."""
        if self._num_stored <= self.num_pages // _STORES_A_COMPACTION:
            return False
        self.compact()
        return True

    def synchronize(self) -> None:
        """Makes the host wait for all transfers begun so far."""
        with self._lock:
            under_way = self._under_way
        for transfer in under_way:
            if transfer._event is not None:
                transfer._event.synchronize()
        with self._lock:
            ended = set(map(id, under_way))
            self._under_way = [transfer for transfer in self._under_way if id(transfer) not in ended]

    def check(self) -> None:
        """Waits for all transfers begun so far, and raises an error if one of them has noted a fault.

        Raises:
            IndexError: a page or block number on the GPU was out of range, or a page that was to be loaded was not
                stored.
            RuntimeError: a page was given twice in one call of `store`.
            ibp.CorruptTableError: a page is damaged.
        """
        self.synchronize()
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        self.faults.raise_pending(self.device)
        try:
            self.place.check()
        except IndexError:
            raise IndexError("a page or block number of a store is out of range") from None

    # ---- implementation ----

    def _paged(self, tensors: Tensors, blocks: Pages | None, first_tensor: int) -> PagedTensors:
        """Returns the tensors of a transfer as `PagedTensors`. Raises TypeError or ValueError if they do not suit the
        store, or have no place in a page from number first_tensor on."""
        paged = self._as_paged(tensors, blocks)
        check_paged(paged, "store", self.device, self.page_bytes, self.place.row_bytes)
        whole_number("first_tensor", first_tensor, 0)
        if first_tensor + len(paged) > self.num_tensors:
            raise ValueError(
                f"there are {len(paged)} tensors from number {first_tensor} on; a page has {self.num_tensors}"
            )
        return paged

    def _as_paged(self, tensors: Tensors, blocks: Pages | None) -> PagedTensors:
        if isinstance(tensors, PagedTensors):
            return tensors
        if isinstance(tensors, torch.Tensor) or (self.num_tensors > 1 and not isinstance(tensors, Buffers)):
            return PagedTensors(tensors)
        if self.num_tensors > 1:
            raise ValueError(
                f"a page has blocks of {self.num_tensors} tensors; wanted ibp.kv.PagedTensors, not Buffers"
            )
        if blocks is not None:
            raise ValueError("blocks are given, but the tensors are pages; make them ibp.kv.PagedTensors of one tensor")
        buffers = tensors if isinstance(tensors, Buffers) else Buffers(tensors)
        if buffers not in self._lists:
            self._lists[buffers] = pages_of(buffers)
        return self._lists[buffers]

    @contextlib.contextmanager
    def _on_stream(
        self, stream: torch.cuda.Stream | None, stores: bool, pages: torch.Tensor | None, used: Iterable[torch.Tensor]
    ) -> Iterator[None]:
        """A context in which the stream of a transfer is the current one. The transfer's work runs after the work that
        is queued on the former current stream, and after earlier transfers that have pages in common with it, unless
        both are loads. On the CPU, and while a CUDA graph is being captured, the context does nothing.

        Args:
            stream: the stream of the transfer. None: one of the store's own streams.
            stores: whether the transfer is a store.
            pages: the page numbers on the host. None: they were given on the GPU.
            used: the tensors that the transfer uses and that may have been allocated on another stream.
        """
        if self.device.type != "cuda" or is_capturing(self.device):
            yield
            return
        if stream is None:
            if stores not in self._streams:
                self._streams[stores] = torch.cuda.Stream(self.device, priority=_HIGHEST_PRIORITY)
            stream = self._streams[stores]
        if stream.device != self.device:
            raise ValueError(f"stream is of {stream.device}; wanted one of {self.device}")
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self._under_way = [earlier for earlier in self._under_way if not earlier.is_done()]
        for earlier in self._under_way:
            if (stores or earlier._stores) and earlier._meets(pages) and earlier._event is not None:
                stream.wait_event(earlier._event)
        with torch.cuda.stream(stream):
            for tensor in used:
                tensor.record_stream(stream)
            try:
                yield
            except BaseException:
                stream.synchronize()  # because later transfers do not wait for the work of this one
                raise

    def _begun(self, stores: bool, near: torch.Tensor, host: torch.Tensor | None, tensors: range) -> Transfer:
        transfer = Transfer(self, stores, near, host, tensors)
        if transfer._event is not None:
            self._under_way.append(transfer)
        return transfer

    def _table_of(self, piece: int) -> torch.Tensor:
        """Returns a handle of the pool as a table with items of `piece` bytes."""
        if piece not in self._tables:
            num_items = self.num_pages * self.num_tensors * self.page_bytes // piece
            parts = self.place.handle.parts._replace(num_items=num_items, item_bytes=piece)
            self._tables[piece] = Handle(parts).table
        return self._tables[piece]


def _check_as_many(pages: torch.Tensor, blocks: torch.Tensor) -> None:
    if pages.numel() != blocks.numel():
        raise ValueError(f"there are {pages.numel()} pages and {blocks.numel()} blocks; wanted the same number")


def _sms_of(max_sms: int | None, usual: int) -> int:
    return usual if max_sms is None else sms_of(max_sms)


def _compact(place: CodedRows, keeps: torch.Tensor) -> None:
    """Moves the overflow bytes of rows to the beginning of the overflow, without gaps, and frees the rest. keeps: bool
    [rows], whether the row's bytes are kept."""
    if not place.rooms.numel():
        return
    sector = _core.SECTOR_BYTES
    parts = (stored_sizes(place.lengths, place.row_bytes, place.row_bytes) - place.slot_bytes).clamp(min=0)
    needed = (torch.where(keeps & (place.bases >= 0), parts, 0) + sector - 1) // sector
    ends = needed.cumsum(0)
    starts, total = ends - needed, int(ends[-1]) if len(ends) else 0
    inside = torch.arange(total, device=needed.device) - starts.repeat_interleave(needed)
    sectors = place.handle.parts.overflow.view(-1, sector)
    targets = [sectors[:total], place.bases, place.rooms, place.used]
    moved = sectors[(place.bases // sector).repeat_interleave(needed) + inside]
    bases, rooms = torch.where(needed > 0, starts * sector, -1), needed.to(torch.int16).view(torch.uint16)
    # One operation changes the bytes of rows and the index. An interrupt is raised before or after it.
    copy_all(targets, [moved, bases, rooms, torch.full_like(place.used, total * sector)])
    if needed.is_cuda:
        torch.cuda.current_stream(needed.device).synchronize()
