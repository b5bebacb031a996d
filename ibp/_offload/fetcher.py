"""Fetches groups of weights into an arena: the memory of a device for weights in use. A `WeightFetcher` decides which
memory a group gets, and decodes it on the CPU; `CudaWeightFetcher` decodes on a GPU, on a separate stream."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from .._fetch.streaming import STREAM_SMS, TensorStream, decode_items
from .._rows.handle import CorruptTableError, spread_bytes
from .._rows.table import faults_of, serves
from .weights import Group, Region, Weight

# Largest and smallest size in bytes of the ring through which tables are streamed. The ring holds four chunks; the copy
# engine pauses for 3 microseconds between two chunks.
_MOST_RING_BYTES, _LEAST_RING_BYTES = 128 << 20, 1 << 20


def overlap(one: Region, other: Region) -> bool:
    """Returns whether two regions have bytes in common."""
    return one[0] < other[1] and other[0] < one[1]


class WeightFetcher:
    """The arena of a device, into which groups of weights are decoded before they are used. This class decodes
    immediately, on the CPU; `CudaWeightFetcher` decodes on a GPU.

    Groups stay in the arena until another group overwrites them. A group is not overwritten while a call uses it. A
    group that was fetched ahead, and whose use is still expected, is overwritten only if another group is needed at
    once and the arena has no other room for it.

    The arena is a ring: each new region begins where the last region ended, or at the start of the memory if not enough
    memory is left there. So if every pass asks for the same sizes in the same order, each new region overwrites the
    least recently used one.

    Args:
        device: the device that uses the weights.
        arena_bytes: size of the arena in bytes. The arena holds several groups.
        max_sms: largest number of a GPU's multiprocessors that decode. None: STREAM_SMS, which decode as fast as the
            link delivers.
    """

    def __init__(self, device: torch.device, arena_bytes: int, max_sms: int | None) -> None:
        self.device, self.max_sms = device, max_sms
        self.memory = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._arena_bytes = arena_bytes
        self._cursor = 0  # the end of the region that was given to a group last
        self._loaded: list[Group] = []
        self.reset_counts()

    def reset_counts(self) -> None:
        self.misses = 0  # number of uses whose weights were neither loaded nor being fetched when the use began
        self.fetched_bytes = self.link_bytes = 0  # sizes in bytes of fetched weights, and of their compressed rows
        self.waited_s = 0.0  # seconds that uses have waited for their weights

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the device memory for weights that are being fetched or used."""
        return self.memory.numel() + sum(group.num_bytes for group in self._loaded if group.region is None)

    def start(self, groups: Sequence[Group]) -> None:
        """Called once, with all groups of the device that are fetched, after their tables have been made and before the
        first group is fetched."""
        for group in groups:
            tables = [weight.table for weight in group.weights if weight.table is not None]
            group.stored_bytes = sum(spread_bytes(table) for table in tables)

    def fetch_ahead(self, expected: Sequence[Group]) -> bool:
        """Fetches groups ahead of their uses, unless they are already loaded. Returns False if a group cannot be
        fetched now, because there is no room for it or its table is corrupt. From now on, groups that were fetched
        ahead but are no longer expected may be overwritten.

        Args:
            expected: the groups whose uses are expected next, in this order.
        """
        for group in self._loaded:
            group.is_ahead = group.is_ahead and group in expected
        has_room = True
        for group in expected:
            if group.is_loaded:
                group.is_ahead = True
            elif has_room:  # otherwise this group would take the memory that an earlier group needs
                region = self._region(group, keeps_ahead=True)
                try:
                    if region is not None:
                        self._fetch(group, region)
                except CorruptTableError:  # the use that needs the group raises the error again
                    region = None
                has_room = group.is_ahead = region is not None
        return has_room

    def begin_use(self, group: Group) -> None:
        """Makes the caller's current stream wait for a group. A group that is not loaded is fetched now: if there is no
        room, it overwrites groups that were fetched ahead; if there is still no room, it gets a separate allocation.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ibp.CorruptTableError: this fetch or an earlier one found a fault.
        """
        self._check(group)
        if not group.is_loaded:
            self.misses += 1
            self._fetch(group, self._region(group, keeps_ahead=True) or self._region(group, keeps_ahead=False))
        self._wait(group)
        group.is_ahead = False
        group.uses += 1

    def end_use(self, group: Group) -> None:
        """Called when all work of a use has been issued to the caller's current stream."""
        group.uses -= 1
        self._note_reads(group)
        if group.uses == 0 and group.region is None:
            self.drop(group)

    def drop(self, group: Group) -> None:
        """Removes a group that is not in use."""
        group.is_ahead = False
        group.move(None, None)
        if group.is_loaded:
            self._loaded.remove(group)
            group.is_loaded = False

    def find(self, tensor: torch.Tensor) -> tuple[Weight, int] | None:
        """If a tensor is a part of a weight that is loaded on this device, returns (the weight, offset in bytes of the
        tensor in the weight). Otherwise returns None."""
        address, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
        for group in self._loaded:
            for weight, data in zip(group.weights, group.data):
                within = start - int(data.storage_offset())
                if 0 <= within < weight.num_bytes and data.untyped_storage().data_ptr() == address:
                    return weight, within
        return None

    def synchronize(self) -> None:
        """Waits for all fetches and uses that have been issued."""

    def close(self) -> None:
        """Frees the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        for group in list(self._loaded):
            self.drop(group)

    # ---- placing ----

    def _region(self, group: Group, keeps_ahead: bool) -> Region | None:
        """Returns a region of the arena for a group: the latest region of the group if it is free, otherwise another
        free one. Returns None if there is none. A region is free if no group that is in use lies in it. If keeps_ahead
        is set, no group that was fetched ahead may lie in it either."""
        held = [other for other in self._loaded if other.uses or (keeps_ahead and other.is_ahead)]
        return self.free_region(group.num_bytes, [o.region for o in held if o.region is not None], group.region)

    def free_region(self, num_bytes: int, held: Sequence[Region], wish: Region | None) -> Region | None:
        """Returns a region of num_bytes bytes that does not overlap any region in `held`: one that begins as `wish`
        does if it is free, otherwise the first free region after the last returned region. Returns None if there is no
        such region."""
        after_held = sorted(end for _, end in held)
        starts = [self._cursor, *(end for end in after_held if end > self._cursor), 0, *after_held]
        if wish is not None:
            starts.insert(0, wish[0])
        for start in starts:
            region = start, start + num_bytes
            if region[1] <= self._arena_bytes and not any(overlap(region, other) for other in held):
                self._cursor = region[1]
                return region
        return None

    def _fetch(self, group: Group, region: Region | None) -> None:
        """Fetches a group to a region of the arena. If region is None, the group gets a separate allocation."""
        if region is None:
            group.move(None, torch.empty(group.num_bytes, dtype=torch.uint8, device=self.device))
        elif group.region != region:
            group.move(region, self.memory[slice(*region)])
        over = [other for other in self._loaded if region and other.region and overlap(other.region, region)]
        for other in over:
            other.is_loaded = other.is_ahead = False
            self._loaded.remove(other)
        try:
            self._queue(group, over)
        except BaseException:
            self.drop(group)
            raise
        group.is_loaded = True
        self._loaded.append(group)
        self.fetched_bytes += group.num_bytes
        self.link_bytes += group.stored_bytes

    # ---- steps that depend on the device; here for the CPU ----

    def _check(self, group: Group) -> None:
        """Raises RuntimeError if a use cannot begin now, and CorruptTableError if an earlier fetch found a fault."""

    def _wait(self, group: Group) -> None:
        """Makes the caller's current stream wait for a loaded group."""

    def _note_reads(self, group: Group) -> None:
        """Records that all work of a use has been issued to the caller's current stream."""

    def _queue(self, group: Group, over: list[Group]) -> None:
        """Decodes the weights of a group into its memory, after the last reads of the groups in `over`. over: the
        groups whose memory is overwritten."""
        begun = time.perf_counter()
        self._decode(group)
        self.waited_s += time.perf_counter() - begun

    def _decode(self, group: Group) -> None:
        """Decodes the weights of a group into its memory. If a GPU cannot read a table, the CPU decodes its rows, and
        the host waits until they have been copied to the GPU."""
        for weight, part in zip(group.weights, group.data):
            if weight.table is not None:
                decode_items(weight.table, 0, None, out=part.view(weight.table.dtype).view(weight.table.shape))


class CudaWeightFetcher(WeightFetcher):
    """Fetches groups into the arena of a GPU, on a separate stream. The copy engine brings all groups through one ring,
    without a pause between two groups.

    The host does not wait for the GPU, except when it fetches tables that are in pageable memory. The stream of a use
    waits for the end of the fetch. The stream of fetches waits for the end of the last uses of the groups that it
    overwrites.
    """

    def __init__(self, device: torch.device, arena_bytes: int, max_sms: int | None) -> None:
        super().__init__(device, arena_bytes, max_sms)
        self._stream, self._ring_bytes = torch.cuda.Stream(device), _LEAST_RING_BYTES
        self._from_host: TensorStream | None = None

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + (self._from_host.ring_bytes if self._from_host is not None else 0)

    def start(self, groups: Sequence[Group]) -> None:
        super().start(groups)
        largest = max((group.stored_bytes for group in groups), default=0)
        self._ring_bytes = max(_LEAST_RING_BYTES, min(_MOST_RING_BYTES, 4 * largest))
        self._stream.wait_stream(self._current())  # the current stream allocated the arena and filled the tables
        self.memory.record_stream(self._stream)  # a fetch may still be running when the model is destroyed

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.synchronize()
        if self._from_host is not None:
            self._from_host.close()
            self._from_host = None
        super().close()

    def _check(self, group: Group) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the weights of {group.name!r} are streamed by ibp.offload, which a CUDA graph cannot capture: "
                "keep them on the GPU (resident_bytes=), or capture other layers"
            )
        try:
            for weight in group.weights:
                if weight.table is not None:
                    faults_of(weight.table).raise_pending(self.device)
        except CorruptTableError:
            if not group.uses:
                self.drop(group)  # its memory does not hold the weights, so the next use fetches them again
            raise

    def _wait(self, group: Group) -> None:
        assert group.ready is not None and group.memory is not None
        stream, wait = self._current(), group.wait
        if group.region is None:
            group.memory.record_stream(stream)
        if wait is None:
            wait = group.wait = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        elif wait[1].query():  # otherwise the host is a whole pass ahead, and the wait before this one is not counted
            self.waited_s += wait[0].elapsed_time(wait[1]) * 1e-3
        wait[0].record(stream)
        stream.wait_event(group.ready)
        wait[1].record(stream)

    def _note_reads(self, group: Group) -> None:
        stream = self._current()
        event = group.done.get(stream.cuda_stream)
        if event is None:
            event = group.done[stream.cuda_stream] = torch.cuda.Event()
        event.record(stream)

    def _queue(self, group: Group, over: list[Group]) -> None:
        if group.region is None:
            assert group.memory is not None
            self._stream.wait_stream(self._current())  # the current stream allocated the memory
            group.memory.record_stream(self._stream)
        if group.ready is None:
            group.ready = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for other in (*over, group):
                for event in other.done.values():
                    self._stream.wait_event(event)
            if all(weight.table is None or serves(weight.table, self.device) for weight in group.weights):
                self._stream_to(group)
            else:
                self._decode(group)
            group.ready.record(self._stream)

    def _stream_to(self, group: Group) -> None:
        """Streams a group to its memory through the ring. The arguments of the stream are prepared again only if the
        group has moved or the number of multiprocessors has changed."""
        if self._from_host is None:
            self._from_host = TensorStream(self.device, ring_bytes=self._ring_bytes)
        sms = self.max_sms or STREAM_SMS
        if not group.prepared or group.sms != sms:
            group.sms = sms
            group.prepared = [
                self._from_host.prepare(
                    weight.table, 0, weight.num_bytes, self.device, sms, part, faults_of(weight.table).on(self.device)
                )
                for weight, part in zip(group.weights, group.data)
                if weight.table is not None
            ]
        for prepared in group.prepared:
            self._from_host.issue(prepared)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)
