"""Fetches groups of weights into the memory that a device has for weights in use."""

from __future__ import annotations

import time
from collections.abc import Container, Sequence

import torch

from .._fetch.streaming import STREAM_SMS, TensorStream, decode_items
from .._rows.faults import CorruptTableError, new_record
from .._rows.table import handle_on
from .groups import Group, Place, Region, WeightArena, overlap
from .weights import Weight

# Largest and smallest size in bytes of the ring through which tables are streamed. The ring holds four chunks; the copy
# engine pauses for 3 microseconds between two chunks.
_MOST_RING_BYTES, _LEAST_RING_BYTES = 128 << 20, 1 << 20


class WeightFetcher:
    """The arena of a device, into which groups of weights are decoded before they are used. This class decodes on the
    CPU, immediately; `CudaWeightFetcher` on a GPU.

    Groups stay in the arena until another group overwrites them. A group is not overwritten while a call uses it, nor
    after it was fetched ahead of a use that is still expected.

    Args:
        device: the device that uses the weights.
        arena_bytes: size of the arena, which holds several groups.
        max_sms: number of a GPU's multiprocessors that may decode. None: as many as keep up with the link.
    """

    def __init__(self, device: torch.device, arena_bytes: int, max_sms: int | None) -> None:
        self.device, self.max_sms = device, max_sms
        self.memory = torch.empty(arena_bytes, dtype=torch.uint8, device=device)
        self._arena = WeightArena(arena_bytes)
        self._loaded: list[Group] = []
        self.waited_s = 0.0  # seconds that uses have waited for their weights

    @property
    def device_bytes(self) -> int:
        """Size in bytes of the device memory for weights that are being fetched or used."""
        return self.memory.numel() + sum(group.num_bytes for group in self._loaded if group.region is None)

    def start(self, groups: Sequence[Group]) -> None:
        """Called when the tables of all groups have been made. Later calls may read them."""

    def fetch_ahead(self, group: Group) -> bool:
        """Fetches a group that is not loaded, ahead of its use. Returns False if there is no room for it now."""
        region = self._region(group, keeps_ahead=True)
        if region is None:
            return False
        self._fetch(group, region)
        group.is_ahead = True
        return True

    def fetch_now(self, group: Group) -> None:
        """Fetches a group that is not loaded and is used now. If there is no room, it overwrites groups that were
        fetched ahead; if all of the arena is in use, it gets an allocation of its own."""
        self._fetch(group, self._region(group, keeps_ahead=True) or self._region(group, keeps_ahead=False))

    def expect(self, groups: Container[Group]) -> None:
        """Allows groups that were fetched ahead to be overwritten, unless they are among `groups`, whose uses are still
        expected."""
        for group in self._loaded:
            group.is_ahead = group.is_ahead and group in groups

    def check_use(self, group: Group) -> None:
        """Raises RuntimeError if a use cannot begin now, and CorruptTableError if an earlier fetch found a fault."""

    def begin_use(self, group: Group) -> None:
        """Makes the caller's current stream wait for a loaded group."""

    def end_use(self, group: Group) -> None:
        """Called when all work that reads a group has been issued to the caller's current stream."""
        if group.uses == 0 and group.region is None:
            self.drop(group)

    def drop(self, group: Group) -> None:
        """Removes a group that is not in use."""
        group.is_ahead, group.place = False, None
        if group in self._loaded:
            self._loaded.remove(group)
            group.is_loaded = False

    def find(self, tensor: torch.Tensor) -> tuple[Weight, int] | None:
        """Returns (weight, offset in its bytes) if a tensor is a part of a weight that is loaded on this device,
        otherwise None."""
        address, start = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset()) * tensor.element_size()
        for group in self._loaded:
            memory = self.place_of(group).memory
            if memory.untyped_storage().data_ptr() != address:
                continue
            for weight, offset in zip(group.weights, group.offsets):
                within = start - int(memory.storage_offset()) - offset
                if 0 <= within < weight.num_bytes:
                    return weight, within
        return None

    def place_of(self, group: Group) -> Place:
        assert group.place is not None
        return group.place

    def synchronize(self) -> None:
        """Waits for all fetches and uses that have been issued."""

    def close(self) -> None:
        """Frees the memory."""
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        for group in list(self._loaded):
            self.drop(group)

    # ---- placing ----

    def _region(self, group: Group, keeps_ahead: bool) -> Region | None:
        """Returns a region of the arena for a group, its latest one if that is free, or None if there is no room.
        keeps_ahead: whether groups that were fetched ahead must not be overwritten."""
        held = [other for other in self._loaded if other.uses or (keeps_ahead and other.is_ahead)]
        regions = [other.region for other in held if other.region is not None]
        wish = None if group.region is None else group.region[0]
        start = self._arena.place(group.num_bytes, regions, wish)
        return None if start is None else (start, start + group.num_bytes)

    def _fetch(self, group: Group, region: Region | None) -> None:
        """Fetches a group to a region of the arena. None: to an allocation of its own."""
        is_known = group.place is not None and region is not None and group.region == region
        place = self.place_of(group) if is_known else self._new_place(group, region)
        over = [other for other in self._loaded if region and other.region and overlap(other.region, region)]
        for other in over:
            other.is_loaded = other.is_ahead = False
            self._loaded.remove(other)
        self._queue(group, place, over)
        group.place, group.is_loaded = place, True
        self._loaded.append(group)

    def _new_place(self, group: Group, region: Region | None) -> Place:
        if region is None:
            memory = torch.empty(group.num_bytes, dtype=torch.uint8, device=self.device)
        else:
            memory = self.memory[slice(*region)]
        data = [memory[start : start + weight.num_bytes] for weight, start in zip(group.weights, group.offsets)]
        return Place(region, memory, data, [weight.view(part) for weight, part in zip(group.weights, data)])

    # ---- decoding ----

    def _queue(self, group: Group, place: Place, over: list[Group]) -> None:
        """Decodes a group's weights into its memory, after the last read of the groups that it overwrites."""
        begun = time.perf_counter()
        for weight, part in zip(group.weights, place.data):
            assert weight.table is not None
            fault = new_record()
            handle = handle_on(weight.table, self.device)
            torch.ops.ibp.decode_bytes.default(handle.table, 0, weight.num_bytes, 0, part, fault)
            weight.table._raise_fault(fault)
        self.waited_s += time.perf_counter() - begun


class CudaWeightFetcher(WeightFetcher):
    """The arena of a GPU. Groups are fetched on a separate stream, by the copy engine through one ring, without a pause
    between two groups.

    No call waits for the GPU. The stream of a use waits for the event that follows the fetch; the stream of fetches
    waits for the events that follow the last uses of the groups that are overwritten.
    """

    def __init__(self, device: torch.device, arena_bytes: int, max_sms: int | None) -> None:
        super().__init__(device, arena_bytes, max_sms)
        self._stream, self._ring_bytes = torch.cuda.Stream(device), _LEAST_RING_BYTES
        self._from_host: TensorStream | None = None
        # Recorded before and after the last wait for each group.
        self._waits: dict[Group, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @property
    def device_bytes(self) -> int:
        return super().device_bytes + (self._from_host.ring_bytes if self._from_host is not None else 0)

    def start(self, groups: Sequence[Group]) -> None:
        largest = max((group.stored_bytes for group in groups), default=0)
        self._ring_bytes = max(_LEAST_RING_BYTES, min(_MOST_RING_BYTES, 4 * largest))
        self._stream.wait_stream(self._current())  # it allocated the arena and filled the tables
        self.memory.record_stream(self._stream)  # a fetch may still be running when the model is destroyed

    def check_use(self, group: Group) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the weights of {group.name!r} are streamed by ibp.offload, which a CUDA graph cannot capture: keep "
                "them on the GPU (resident_bytes=), or capture other layers"
            )
        try:
            for weight in group.weights:
                if weight.table is not None:
                    weight.table._raise_pending(self.device)
        except CorruptTableError:
            if not group.uses:
                self.drop(group)  # its memory does not hold the weights, so the next use fetches them again
            raise

    def begin_use(self, group: Group) -> None:
        assert group.ready is not None
        stream, wait, place = self._current(), self._waits.get(group), self.place_of(group)
        if place.region is None:
            place.memory.record_stream(stream)
        if wait is None:
            wait = self._waits[group] = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        elif wait[1].query():  # otherwise the host is a whole pass ahead, and the wait before this one is not counted
            self.waited_s += wait[0].elapsed_time(wait[1]) * 1e-3
        wait[0].record(stream)
        stream.wait_event(group.ready)
        wait[1].record(stream)

    def end_use(self, group: Group) -> None:
        stream = self._current()
        event = group.done.get(stream.cuda_stream)
        if event is None:
            event = group.done[stream.cuda_stream] = torch.cuda.Event()
        event.record(stream)
        super().end_use(group)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def close(self) -> None:
        self.synchronize()
        if self._from_host is not None:
            self._from_host.close()
            self._from_host = None
        super().close()

    def _queue(self, group: Group, place: Place, over: list[Group]) -> None:
        if place.region is None:
            self._stream.wait_stream(self._current())  # it allocated the memory
            place.memory.record_stream(self._stream)
        if group.ready is None:
            group.ready = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            for other in (*over, group):
                for event in other.done.values():
                    self._stream.wait_event(event)
            if all(weight.table is None or weight.table._serves(self.device) for weight in group.weights):
                self._stream_to(group, place)
            else:  # the CPU decodes rows of pageable memory, and waits until they have been copied to the GPU
                for weight, part in zip(group.weights, place.data):
                    if weight.table is not None:
                        out = part.view(weight.table.dtype).view(weight.table.shape)
                        decode_items(weight.table, 0, None, out=out)
            group.ready.record(self._stream)

    def _stream_to(self, group: Group, place: Place) -> None:
        """Streams the group to its memory through the ring. The arguments of the stream are prepared once for each
        `Place`."""
        if self._from_host is None:
            self._from_host = TensorStream(self.device, ring_bytes=self._ring_bytes)
        sms = self.max_sms or STREAM_SMS
        if not place.prepared or place.sms != sms:
            place.sms = sms
            place.prepared = [
                self._from_host.prepare(
                    weight.table, 0, weight.num_bytes, self.device, sms, part, weight.table._faults.on(self.device)
                )
                for weight, part in zip(group.weights, place.data)
                if weight.table is not None
            ]
        for prepared in place.prepared:
            self._from_host.issue(prepared)

    def _current(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device.index)
