"""Tables of several processes: `ShardedTable`, whose rows are spread over the ranks of a process group, and tables in
memory that processes of one machine share (`share_table` and `open_shared`). Also registers the functions with which
torch.multiprocessing sends tables."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing  # noqa: F401 - This import enables multiprocessing to send tensors.

from .._common import wire
from .._common.arguments import sms_of
from .._common.manners import TensorManners
from .._common.process import OfThisProcess
from .._common.wire import RankGroup, check_one_machine, machine, same_on_all
from .._fetch.calls import Ids, check_out, check_range, list_of_ids, target_of
from .._machine import memory as _memory
from .._machine.memory import check_memory, usual
from .._machine.segments import SharedHandle, open_handle, read_state
from .._rows import geometry as _rows
from .._rows.codebook import AnyCodebook, coding_of, surveyed
from .._rows.handle import OF_SELECTIONS, CorruptTableError, Handle, Parts, new_record
from .._rows.learning import Options, Request, checked, learn
from .._rows.table import TENSORS, faults_of, handle_on, move, spills, worker_of
from .._tables.changes import check_rows, last_of_each
from .._tables.coding import MOST_LACKING
from .._tables.compressed_tensor import CompressedTensor, compress_rows

# ---- sharded tables ------------------------------------------------------------------------------------------------

# In a message, coded rows begin at multiples of this many bytes, because kernels copy aligned rows faster.
_ALIGNMENT = 16
# The operation `fill_slab` requires a number of ways (the associativity of its hash map) of 2 to 32, even if the map is
# empty.
_ANY_WAYS = 32
# A rank sends this number instead of the size of its rows if it cannot send the rows, because rows of its shard are
# damaged, or because the shard now has another codebook.
_CANNOT_SEND = -1
# If the caller gives no fraction, the sample for a codebook has 16 MiB of rows from all shards together. A sample has
# at least 1,024 rows, or all rows if the table has fewer.
_LEAST_SAMPLED_ROWS, _SAMPLED_BYTES = 1024, 16 << 20


class ShardedTable(OfThisProcess, TensorManners):
    """A table [N, ...] whose rows are spread over the ranks of a process group: first the rows of rank 0, then the rows
    of rank 1, and so on. A rank's part of the table is called its shard. Shards may have different numbers of items, or
    none.

    Ranks send each other rows in their stored, compressed form, in all-to-all calls of the group. The rank that asked
    for the rows decodes them. With gloo, rows are sent from host memory; with NCCL, from GPU memory. All shards are
    coded with one codebook. The exception is a shard that would not become smaller, which may be raw.

    Calls that need other ranks are collective: every rank of the group makes the same calls in the same order. Each
    rank passes its own ids, or no ids. A rank whose arguments are wrong still takes part in the call, and raises its
    error afterwards; the other ranks get the items that they asked for. If the process of a rank has ended, the other
    ranks raise an error as soon as the group notices it, at the latest after the group's timeout.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> part = torch.full((1000, 64), float(rank))
        >>> table = ibp.distributed.ShardedTable.from_local(part, device="cpu")
        >>> table.index_select(torch.tensor([3, 1003]))[:, 0]
        tensor([0., 1.])

    Args:
        local_table: this rank's shard. Each of its items must consist of one or more whole rows. The methods of
            local_table may be used to change it, as long as its shape and codebook stay the same.
        group: a process group of torch.distributed. None: the default group.

    Attributes:
        shape, dtype: the shape and dtype of the whole table.
        local_table: this rank's shard.
        starts: the id of the first item of each rank, followed by N.

    Raises:
        TypeError: local_table is not a table.
        ValueError: the shards differ in the shape of items, in dtype, row_bytes or codebook, or items are not whole
            rows.
        RuntimeError: torch.distributed is not initialised, or another rank has failed.
    """

    shape: torch.Size

    _instead = "it belongs to the processes of its group. Pickle its local_table"

    def __init__(self, local_table: CompressedTensor, group: dist.ProcessGroup | None = None) -> None:
        self._group = members = RankGroup(group)

        def describe() -> tuple[dict[str, Any], int, AnyCodebook | None]:
            """Returns (the properties that must be the same for all shards, by their names in error messages; the
            number of this shard's items; its codebook)."""
            if not isinstance(local_table, CompressedTensor):
                raise TypeError(f"local_table is a {type(local_table).__name__}; wanted an ibp.CompressedTensor")
            _check_whole_rows(local_table.geometry)
            return _of_all_shards(local_table, local_table.row_bytes), len(local_table), local_table.codebook

        shards = members.together("ShardedTable", describe)
        same_on_all("ShardedTable", [same for same, _, _ in shards])
        found = [(rank, codebook) for rank, (_, _, codebook) in enumerate(shards) if codebook is not None]
        for rank, codebook in found:
            if codebook != found[0][1]:
                raise ValueError(
                    f"the shards of ranks {found[0][0]} and {rank} have different codebooks: make them with "
                    "from_local, or with compress_rows(..., codebook=) of one"
                )
        self._codebook = found[0][1] if found else None
        self.local_table = local_table
        self.starts = list(itertools.accumulate((num_items for _, num_items, _ in shards), initial=0))
        self.shape = torch.Size((self.starts[-1], *local_table.shape[1:]))
        self._starts = torch.tensor(self.starts, dtype=torch.int64, device=members.device)
        self._own_codebook = local_table.codebook
        self.rows_per_item = local_table.geometry.item_bytes // local_table.row_bytes

    @classmethod
    def from_local(
        cls,
        x: torch.Tensor,
        group: dist.ProcessGroup | None = None,
        *,
        scheme: str = "auto",
        chunk_bytes: int | None = None,
        tau: float | None = None,
        sample: float | None = None,
        clusters: int | str | None = None,
        level: str = "default",
        layout: str = "slots",
        slot_bytes: int | None = None,
        row_bytes: int | None = None,
        device: torch.device | str | int | None = None,
        memory: str | None = None,
        numa: _memory.Numa = None,
    ) -> ShardedTable:
        """Compresses each rank's part of a tensor with one codebook, which is learned from rows of all parts. A
        collective call.

        Args:
            x: this rank's part, [n, ...]. n may be 0.
            group: a process group of torch.distributed. None: the default group.
            sample: the fraction of the rows from which the codebook is learned. None: 16 MiB of rows are used.
            Others: as in `ibp.compress`. All ranks must give the same scheme, chunk_bytes, tau, sample, clusters, level
                and row_bytes.

        Returns:
            The table.

        Raises:
            TypeError, ValueError: an argument is wrong for `ibp.compress`, or the parts differ in dtype or in the shape
                of their items.
            RuntimeError: another rank has failed.
        """
        members = RankGroup(group)
        options: dict[str, Any] = {"scheme": scheme, "chunk_bytes": chunk_bytes, "tau": tau}
        options |= {"sample": sample, "clusters": clusters, "level": level}

        def describe() -> tuple[dict[str, Any], int, torch.device]:
            _rows.check_tensor(x)
            checked(Options(**options))
            geometry = _rows.Geometry.of(x, row_bytes)
            _check_whole_rows(geometry)
            _rows.checked_slot_bytes(layout, slot_bytes, geometry.row_bytes)
            return _of_all_shards(x, geometry.row_bytes) | options, x.shape[0], usual(device, x)

        described = members.together("from_local", describe)
        same_on_all("from_local", [same for same, _, _ in described])
        num_items, worker = sum(count for _, count, _ in described), described[members.rank][2]
        geometry = _rows.Geometry(torch.Size((num_items, *x.shape[1:])), x.dtype, described[0][0]["row_bytes"])
        slots = _rows.checked_slot_bytes(layout, slot_bytes, geometry.row_bytes)
        codebook = _learned(x, members, geometry, checked(Options(**options)), worker, slots)
        settings: dict[str, Any] = {"scheme": "raw", "row_bytes": geometry.row_bytes}
        if codebook is not None:
            settings = {"codebook": codebook, "layout": layout, "slot_bytes": slot_bytes}

        def work() -> CompressedTensor:
            return compress_rows(x, device=worker, memory=memory, numa=numa, **settings)

        return cls(members.on_all("from_local", work), group)

    @property
    def dtype(self) -> torch.dtype:
        return self.local_table.dtype

    @property
    def device(self) -> torch.device:
        """The device of this rank's shard."""
        return self.local_table.device

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group. None: the default group."""
        return self._group.process_group

    @property
    def local_range(self) -> range:
        """The ids of the items in this rank's shard."""
        return range(self.starts[self._group.rank], self.starts[self._group.rank + 1])

    def __repr__(self) -> str:
        own = self.local_range
        return (
            f"ibp.distributed.ShardedTable(shape={list(self.shape)}, dtype={self.dtype}, rank {self._group.rank} of "
            f"{self._group.size} has {len(own):,} items from {own.start:,} on: {self.local_table!r})"
        )

    def check(self) -> None:
        """Waits for this rank's work on GPUs. Raises CorruptTableError if rows were damaged."""
        self.local_table.check()

    # ---- fetching ----

    def index_select(
        self,
        ids: Ids,
        *,
        device: torch.device | str | int | None = None,
        out: torch.Tensor | None = None,
        max_sms: int | None = None,
    ) -> torch.Tensor:
        """Fetches items of the whole table, as torch.index_select(x, 0, ids) does. A collective call. Each rank
        passes its own ids.

        An item whose id occurs several times is sent once. The host waits until it knows how many rows and bytes the
        ranks send each other, so a CUDA graph cannot capture the call.

        Args:
            ids: integers [K] in [0, N), on the CPU or a GPU, in any order. Ids may repeat, and K may be 0.
            device: the device of the result. None: the device of out, or the device of ids if out is None.
            out: a tensor [K, ...] of the table's dtype to write to.
            max_sms: the largest number of the GPU's multiprocessors to decode on. None: all.

        Returns:
            A tensor [K, ...]: out if it was given, otherwise a new tensor.

        Raises:
            IndexError, TypeError, ValueError: ids or out is not as described. Other ranks still get their items.
            CorruptTableError: a rank cannot send rows, because its shard is damaged or has been refit.
            RuntimeError: a rank does not take part.
        """
        refused, unique = None, torch.empty(0, dtype=torch.int64, device="cpu")
        try:
            ids = list_of_ids(ids).to(torch.int64)
            target = target_of(device, out, ids.device)
            if out is not None:
                check_out(out, (ids.numel(), *self.shape[1:]), self.dtype)
            sms = sms_of(max_sms)
            if target.type == "cuda":
                faults_of(self.local_table).raise_pending(target)
            check_range(ids, len(self))
            # The distinct ids in ascending order, and the position among them of each item of the result.
            unique, places = torch.unique(ids, return_inverse=True)
        except (IndexError, TypeError, ValueError) as error:
            refused = error
        received = self._fetched(unique)
        if refused is not None:
            raise refused
        return self._decoded(*received, unique.numel(), places, target, sms, out)

    def __getitem__(self, ids: Ids) -> torch.Tensor:
        """Returns `index_select(ids)`."""
        return self.index_select(ids)

    def update_(self, ids: Ids, rows: torch.Tensor) -> ShardedTable:
        """Sets items of the whole table: x[ids] = rows. A collective call. Each rank passes its own ids. Returns self.

        Each row is sent to the rank whose shard has the item, and that rank codes it with the table's codebook (see
        `CompressedTensor.update_`). If several ranks give rows for one item, the highest of these ranks decides. If
        that rank gives several rows for the item, the item gets the last of them.

        Args:
            ids: integers [K] in [0, N). K may be 0.
            rows: a tensor [K, ...] of the table's dtype.

        Raises:
            IndexError, TypeError, ValueError: ids or rows is not as described. No shard has changed.
            RuntimeError: another rank was given wrong arguments, and no shard has changed. Or a shard cannot be
                changed, for example because other processes share it; then the other shards have changed.
        """
        group = self._group
        what = "ShardedTable.update_"
        owned, data = group.on_all(what, lambda: self._change(ids, rows))
        sent = self._counts_of(owned)
        received = group.counts(sent)
        local = group.exchange(owned, sent, received) - self.starts[group.rank]
        item_bytes = self.local_table.geometry.item_bytes
        items = group.exchange(data, *([item_bytes * count for count in counts] for counts in (sent, received)))
        shape = local.numel(), *self.shape[1:]

        def change() -> None:
            self.local_table.update_(local, items.view(self.dtype).view(shape))

        group.together(what, change)
        return self

    def _counts_of(self, ordered: torch.Tensor) -> list[int]:
        """Returns, for each rank, the number of ids in `ordered` that belong to the rank's shard. ordered: ids in
        ascending order, on the group's device."""
        return torch.searchsorted(ordered, self._starts).diff().tolist()

    def _fetched(self, unique: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Fetches rows from all ranks. A collective call.

        Args:
            unique: ids in ascending order, without repeats.

        Returns:
            (uint16 [rows], the entries of the rows in the table's index, which tell their stored sizes; uint8, the rows
            in their stored form, one after the other).

        Raises:
            CorruptTableError: a rank cannot send rows. The call is complete, so this rank can make the next call.
        """
        group = self._group
        unique = unique.to(group.device)
        asked = self._counts_of(unique)
        asking = group.counts(asked)
        ids = group.exchange(unique, asked, asking) - self.starts[group.rank]
        answers = self._answers(ids, asking)
        sent_bytes = [_CANNOT_SEND if answer is None else answer[1].numel() for answer in answers]
        come_bytes = group.counts(sent_bytes)
        given, nothing = [answer for answer in answers if answer is not None], unique.new_empty(0, dtype=torch.uint8)
        lengths = group.exchange(
            torch.cat([nothing, *(lengths for lengths, _ in given)]),
            [0 if answer is None else answer[0].numel() for answer in answers],
            [2 * self.rows_per_item * count * (size >= 0) for count, size in zip(asked, come_bytes)],
        )
        rows = group.exchange(
            torch.cat([nothing, *(rows for _, rows in given)]),
            [max(0, size) for size in sent_bytes],
            [max(0, size) for size in come_bytes],
        )
        if _CANNOT_SEND in come_bytes:
            which = come_bytes.index(_CANNOT_SEND)
            raise CorruptTableError(
                f"rank {which} of the group cannot send rows of its shard: they contradict each other, or it has been "
                "refit"
            )
        return lengths.view(torch.uint16), rows

    def _decoded(
        self,
        lengths: torch.Tensor,
        rows: torch.Tensor,
        num_items: int,
        places: torch.Tensor,
        target: torch.device,
        sms: int,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        """Decodes the rows that this rank has received. Returns the items that the caller asked for.

        Args:
            lengths, rows: the result of `_fetched`.
            num_items: the number of items that have been received.
            places: int64 [K], the position among these items of each item of the result.
            target: the device of the result.
            sms: the largest number of multiprocessors to decode on. 0: all.
            out: as for `index_select`.
        """
        table, shape = self.local_table, (places.numel(), *self.shape[1:])
        direct = out is not None and out.is_contiguous()
        result = out if direct and out is not None else torch.empty(shape, dtype=self.dtype, device=target)
        if result.numel():
            lengths, rows = lengths.to(target), rows.to(target)
            nothing = rows[:0]
            codec, words = coding_of(self._codebook, table.row_bytes, target)
            sizes, row_bytes = (0, num_items, table.geometry.item_bytes), table.row_bytes
            if self._codebook is None:
                parts = Parts(rows, nothing, lengths[:0], nothing.view(torch.int64), words, codec, row_bytes, *sizes)
            else:
                parts = Parts(nothing, rows, lengths, self._places(lengths)[:-1], words, codec, 0, *sizes)
            on_gpu = target.type == "cuda"
            fault = faults_of(table).on(target, OF_SELECTIONS) if on_gpu else new_record(target)
            torch.ops.ibp.gather_items.default(Handle(parts).table, places.to(target), sms, result, fault, None)
            if not on_gpu:
                faults_of(table).raise_for(fault, OF_SELECTIONS)
        return out.copy_(result.view(out.shape)) if out is not None and not direct else result

    def _answers(self, ids: torch.Tensor, counts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Returns the rows to send to each rank, as `_selected` does. The entry of a rank is None if its rows cannot be
        sent.

        Args:
            ids: the positions in this shard of the items that the ranks ask for: first those for rank 0, then those
                for rank 1, and so on.
            counts: the number of items that each rank asks for.
        """
        if self.local_table.codebook is not self._own_codebook:
            return [None if count else self._selected(ids[:0], [0])[0] for count in counts]
        try:
            return list(self._selected(ids, counts))
        except (CorruptTableError, IndexError):
            return [self._answer(part) for part in ids.split(counts)]

    def _answer(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns the rows to send to one rank, or None if they cannot be sent."""
        try:
            return self._selected(ids, [ids.numel()])[0]
        except (CorruptTableError, IndexError):
            return None

    def _selected(self, ids: torch.Tensor, counts: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Copies the stored rows of items of this shard, and divides them into messages.

        Args:
            ids: the positions of the items in this shard.
            counts: the number of items of each message.

        Returns:
            For each message, (the bytes of the rows' entries in the table's index, uint8 [2 * rows]; the rows in their
            stored form, uint8).

        Raises:
            IndexError, CorruptTableError: an id is out of range, or a row is damaged.
        """
        table, device = self.local_table, self._group.device
        if ids.numel() == 0:
            nothing = torch.empty(0, dtype=torch.uint8, device=device)
            return [(nothing, nothing) for _ in counts]
        check_range(ids, table.geometry.num_items)
        worker = worker_of(table, device)
        parts = torch.arange(self.rows_per_item, device=worker)
        rows = (ids.to(worker).unsqueeze(1) * self.rows_per_item + parts).view(-1)
        ends_of_parts = torch.tensor([0, *counts], dtype=torch.int64, device="cpu").cumsum(0) * self.rows_per_item
        entries = handle_on(table, worker).parts.lengths.view(torch.int16)
        found = entries[rows] if entries.numel() else torch.zeros_like(rows, dtype=torch.int16)
        lengths = found.view(torch.uint16)
        ends = self._places(lengths)
        bounds = ends[ends_of_parts.to(worker)].tolist()
        copied = torch.empty(bounds[-1], dtype=torch.uint8, device=worker)
        fault = new_record(worker)
        handle, no_map = handle_on(table, worker), ends[:0]
        torch.ops.ibp.fill_slab.default(handle.table, rows, ends[:-1], 0, _ANY_WAYS, copied, no_map, fault)
        handle.faults.raise_for(fault)
        near, sizes = copied.to(device), [end - start for start, end in zip(bounds, bounds[1:])]
        sent = lengths.view(torch.uint8).to(device).split((2 * ends_of_parts.diff()).tolist())
        return list(zip(sent, near.split(sizes)))

    def _places(self, lengths: torch.Tensor) -> torch.Tensor:
        """Returns int64 [rows + 1]: the byte offset of each row in a message, followed by the size of the message in
        bytes.

        Args:
            lengths: uint16 [rows], the entries of the rows in the table's index. They tell the stored sizes of the
                rows.
        """
        row_bytes = self.local_table.row_bytes
        sizes = _rows.stored_sizes(lengths, row_bytes, row_bytes)
        if self._codebook is not None:
            sizes = (sizes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        return torch.nn.functional.pad(sizes.cumsum(0), (1, 0))

    def _change(self, ids: Ids, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Checks the arguments of update_. Returns (the distinct ids in ascending order, the bytes of the row for each
        of these ids), both on the group's device. If an id repeats, its last row is taken."""
        ids, device = list_of_ids(ids).to(torch.int64), self._group.device
        check_rows(self.local_table, rows, ids.numel())
        check_range(ids, len(self))
        chosen, places = last_of_each(ids, len(self))
        if places is None:
            chosen, places = chosen.sort()
        data = rows.detach().to(device)[places.to(device)]
        return chosen.to(device), _rows.bytes_of(data)


def _of_all_shards(x: torch.Tensor | CompressedTensor, row_bytes: int) -> dict[str, Any]:
    """Returns the properties that must be the same for all shards, by the names that they have in error messages. x: a
    shard, or the tensor of which it is made."""
    return {"shape of items": list(x.shape[1:]), "dtype": x.dtype, "row_bytes": row_bytes}


def _check_whole_rows(geometry: _rows.Geometry) -> None:
    """Raises ValueError unless each item consists of whole rows."""
    if len(geometry.shape) == 0 or not geometry.has_whole_rows:
        raise ValueError(
            f"items of {geometry.item_bytes} bytes are not whole rows of {geometry.row_bytes}: wanted a tensor of 2 or "
            "more dimensions, and row_bytes that divides an item's"
        )


def _learned(
    x: torch.Tensor,
    members: RankGroup,
    geometry: _rows.Geometry,
    options: Options,
    worker: torch.device,
    slot_bytes: int | None,
) -> AnyCodebook | None:
    """Learns one codebook for all shards: rank 0 learns it from rows of all ranks. Returns the codebook on all ranks,
    or None if rows stay raw. A collective call.

    Args:
        geometry: the geometry of the whole table.
        worker: the device on which the coded sizes of this rank's rows are measured.
        slot_bytes: the slot size in bytes that the caller asked for. None: the caller gave no slot size.
    """
    if geometry.num_bytes == 0:
        return None
    rows = _sampled(x, members, geometry, options.sample)
    of_sample = replace(options, sample=None if options.sample is None else 1.0)  # Takes all rows of the sample.
    request = Request(rows, geometry, worker, of_sample, slot_bytes)

    def by_rank_0(request: Request) -> AnyCodebook | None:
        return members.from_rank(0, "from_local", lambda: learn(options.scheme, request))

    def stored_bytes(codebook: AnyCodebook | None) -> int:
        if codebook is None:
            return geometry.num_bytes

        def coded() -> int:
            data = _rows.bytes_of(x)
            return min(surveyed(data, codebook, worker).stored + codebook.nbytes, data.numel())

        return sum(int(size) for size in members.together("from_local", coded))

    codebook = by_rank_0(request)
    if codebook is None or not codebook.is_partial or codebook.expected_savings is None:
        return codebook
    stored = stored_bytes(codebook)
    if 1 - stored / geometry.num_bytes > codebook.expected_savings - MOST_LACKING:
        return codebook
    again = by_rank_0(replace(request, codes_invariant=True))
    return again if stored_bytes(again) < stored else codebook


def _sampled(x: torch.Tensor, members: RankGroup, geometry: _rows.Geometry, sample: float | None) -> torch.Tensor:
    """Returns a sample of rows from all ranks, uint8 on the CPU. Each rank contributes rows in proportion to the size
    of its part. A collective call."""
    row_bytes = geometry.row_bytes
    share = _SAMPLED_BYTES / geometry.num_bytes if sample is None else sample
    wanted = max(_LEAST_SAMPLED_ROWS, math.ceil(geometry.num_rows * share))
    own_bytes = x.nbytes

    def draw() -> torch.Tensor:
        own = -(-wanted * (own_bytes // row_bytes) // geometry.num_rows)
        return _rows.sample(_rows.bytes_of(x), row_bytes, own, members.rank)

    parts = members.together("from_local", draw)
    return torch.cat(parts)


# ---- shared tables -------------------------------------------------------------------------------------------------


def share_table(
    table: CompressedTensor | None, group: dist.ProcessGroup | None = None, *, src: int = 0, memory: str | None = None
) -> CompressedTensor:
    """Shares one rank's table with all processes of a group, which must be on one machine. The memory of the machine
    then holds the table only once. A collective call.

    The table is moved to shared memory (see `CompressedTensor.share_memory_`). Each process pins that memory for its
    GPU when it first fetches rows.

    Example:
        >>> # on each rank of a group
        >>> is_first = torch.distributed.get_rank() == 0
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host") if is_first else None
        >>> table = ibp.distributed.share_table(table)
        >>> table[17, 0]
        tensor(1.)

    Args:
        table: on rank src, a table in host memory. On the other ranks, None.
        group: a process group of torch.distributed, whose ranks are on one machine. None: the default group.
        src: the rank in the group that has the table.
        memory: "pinned": GPUs read rows directly from the memory. "host": they do not. None: as on rank src.

    Returns:
        On rank src, the table itself. On the other ranks, a table in the same memory.

    Raises:
        TypeError, ValueError: table is not a table or is on a GPU, or the ranks are on several machines or differ in
            src.
        RuntimeError: the memory cannot be opened, torch.distributed is not initialised, or another rank has failed.
    """
    members, what = RankGroup(group), "share_table"

    def share() -> SharedHandle:
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        if table.is_cuda:
            raise ValueError(f"table is on {table.device}; wanted one in host memory")
        return table.share()

    check_one_machine(what, members.together(what, machine))
    handle = members.from_rank(src, what, share)

    def open_it() -> CompressedTensor:
        if members.rank != src or table is None:
            return open_shared(handle, memory=memory)
        return table.pin_memory() if memory == "pinned" else table

    return members.on_all(what, open_it)  # Rank src keeps the table until all ranks have opened it.


def open_shared(handle: SharedHandle, *, memory: str | None = None) -> CompressedTensor:
    """Opens a table that another process shares. The table is in the memory of that process; it is not a copy.

    Repeated calls in a process share one mapping of the memory. If GPUs read rows from the memory, each process pins it
    when the process first uses the table on a GPU, or calls `pin_memory`.

    Example:
        >>> rows = torch.arange(1000.0)[:, None].repeat(1, 64)
        >>> table = ibp.compress(rows, device="cpu", memory="host")
        >>> shared = ibp.distributed.open_shared(table.share())  # in this process or another one
        >>> shared[17, 0]
        tensor(17.)

    Args:
        handle: the result of `table.share()` in a process on this machine. That process must belong to the same user
            and the same container, must still be running, and must still have the table. The handle of a table on a GPU
            can be opened only once, and not in the process that shares the table.
        memory: "pinned": GPUs read rows directly from the memory. "host": they do not. None: as in the process that
            shares the table.

    Returns:
        The table.

    Raises:
        TypeError: handle is not a handle.
        RuntimeError: the memory cannot be opened.
        ValueError: memory is not as described, or the handle's bytes were not made by `share`.
    """
    if not isinstance(handle, SharedHandle):
        raise TypeError(f"handle is a {type(handle).__name__}; wanted what table.share() returns")
    check_memory(memory, among=("pinned", "host"))
    return _opened(handle, pin=None if memory is None else memory == "pinned")


def _opened(handle: SharedHandle, file: int | None = None, pin: bool | None = None) -> CompressedTensor:
    """Opens the table of a handle. The arguments are those of `segments.open_handle`."""
    state, tensors, segment = open_handle(handle, file, pin)
    table = CompressedTensor.__new__(CompressedTensor)
    table.__setstate__({**state, **tensors})
    if segment is not None:
        move(table, tensors, segment)
    return table


def _placed(content: bytes, device: str) -> CompressedTensor:
    """Returns the table whose state `content` holds, with the overflow in host memory and all other tensors on
    `device`."""
    state = read_state(content)
    state.update({name: state[name].to(device) for name in TENSORS if name != "overflow"})
    table = CompressedTensor.__new__(CompressedTensor)
    table.__setstate__(state)
    return table


def _received(handle: SharedHandle, file: Any) -> CompressedTensor:
    """Opens a table that multiprocessing has sent to this process. file: a `DupFd`, or None."""
    return _opened(handle, file.detach() if file is not None else None)


def _reduced(table: CompressedTensor) -> Any:
    """Returns (a function, its arguments) with which the receiver rebuilds a table, as `__reduce__` does.

    If the table can be shared, its memory is shared, as torch shares the memory of tensors. Otherwise the bytes of the
    table are sent. The receiver of shared memory gets a descriptor of the memory's file, so that it can open the memory
    even if the sender no longer has the table."""
    if table._owner is not None:
        return table.__reduce_ex__(2)
    if spills(table):
        state = table.__getstate__()
        return _placed, (wire.written(state), str(table.device))
    handle = table.share()
    return _received, (handle, DupFd(handle._file) if handle.num_bytes else None)


ForkingPickler.register(CompressedTensor, _reduced)
