"""Allocates memory of the host and of other GPUs for work on a GPU, and interprets the arguments `memory`,
`overflow_memory`, `device` and `numa` of calls.

The first part of the file allocates pinned memory of exactly the requested size, and makes tensors through which a CUDA
device uses it without a copy. The second part does the same with the memory of another GPU. The next parts interpret
the arguments `memory`, `overflow_memory` and `device`, and find the NUMA node of the host on which new pinned memory is
allocated. The last part is `Pool`, a pool of pinned buffers for one owner.

Pinning memory takes tens of milliseconds, even for a small buffer. The core keeps the pinned memory of freed tensors
for the whole process (csrc/bindings/pinned_pool.h, `empty`), but a caller that reuses such memory waits for all GPUs. A
`Pool` belongs to one object, its owner, which tells the pool when each buffer was last used. The stream that writes to
the buffer next waits for this use, so the host does not wait. Memory that a pool releases goes back to the core.
"""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import _core
from .._common import ops
from .._common.arguments import whole_number
from .._common.modes import outside_of_modes
from .._common.process import warn_once
from .._common.sequences import rounded_up


class PinningError(RuntimeError):
    """Raised if the system refuses to pin memory."""

    __module__ = "ibp"


_CPU = torch.device("cpu")
_LEAST_HUGE_BYTES = 4 << 20  # Allocations of this many bytes or more ask the system for huge pages (2 MiB).


def warn_of_pageable(refused: PinningError) -> None:
    """Warns that memory is pageable because the system refused to pin it. Callers that do not require pinning use
    this."""
    _warn(refused, "what would be pinned is pageable, and comes to GPUs by way of the CPU, which is slower")


def warn_of_copy(refused: PinningError) -> None:
    """Warns that tables in mapped files are copied to pinned memory for GPUs, because the system refused to pin the
    files themselves."""
    _warn(refused, "tables that GPUs fetch from are copied to pinned memory instead, each once")


def _warn(refused: PinningError, consequence: str) -> None:
    warn_once(f"{refused}: {consequence}", key=consequence, stacklevel=4)


@contextlib.contextmanager
def pinning(what: str) -> Iterator[None]:
    """A context in which the core pins memory. Converts a RuntimeError of the core to a PinningError. what: the name of
    the memory in the message."""
    if torch.cuda.is_available():
        torch.cuda.init()  # Before CUDA is initialised, torch does not recognise memory as pinned.
    try:
        yield
    except RuntimeError as error:
        raise PinningError(f"{what} cannot be pinned ({error})") from error


def empty(num_bytes: int, device: torch.device, pin: bool, node: int = -1) -> torch.Tensor:
    """Returns an uninitialised uint8 tensor of num_bytes bytes.

    Args:
        device: the device of the tensor, if it is not pinned.
        pin: whether the tensor is in pinned host memory. This memory has the exact size, whereas torch's own allocator
            rounds sizes up to powers of two.
        node: the preferred NUMA node of pinned memory. Negative: the caller's node.

    Raises:
        PinningError: the system refuses to pin the memory.
    """
    if not pin or num_bytes == 0:
        return empty_tensor(num_bytes, device=device)
    with pinning(f"{num_bytes:,} bytes of memory"):
        buffer = _core.PinnedBuffer(num_bytes, node)
    if buffer.is_used:  # Earlier work of this process on any stream of any GPU may still use this memory.
        for index in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                torch.cuda.synchronize(index)
    return torch.frombuffer(buffer, dtype=torch.uint8)


def empty_tensor(
    shape: int | Sequence[int], dtype: torch.dtype = torch.uint8, device: torch.device = _CPU
) -> torch.Tensor:
    """Returns torch.empty(...). For a large tensor on the CPU, asks the system for huge pages, with which the tensor is
    filled several times faster."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if torch.compiler.is_compiling() or device.type != "cpu" or type(tensor) is not torch.Tensor:
        return tensor
    if tensor.nbytes >= _LEAST_HUGE_BYTES:
        _core.ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def empty_parts(
    sizes: Sequence[int], device: torch.device, pin: bool | None, node: int = -1
) -> tuple[list[torch.Tensor], bool]:
    """Allocates a uint8 tensor for each size in bytes, as `empty` does. Returns (the tensors, whether they are pinned).
    pin: whether to pin them. None: all of them are pinned if the system allows it; otherwise all are pageable, and a
    warning says so."""
    if pin is not False:
        try:
            return [empty(size, device, True, node) for size in sizes], True
        except PinningError as error:
            if pin:
                raise
            warn_of_pageable(error)
    return [*map(functools.partial(empty_tensor, device=device), sizes)], False


def pin_in_place(data: torch.Tensor) -> _core.PinnedRange | None:
    """Pins the memory of a tensor at its present address. Returns an object that keeps the memory pinned while the
    object lives, or None if the tensor is empty. Raises PinningError if the system refuses."""
    if not data.numel():
        return None
    try:
        return _core.PinnedRange(data, data.data_ptr(), data.numel())
    except RuntimeError as error:
        raise PinningError(f"{data.numel():,} bytes of memory cannot be pinned ({error})") from error


def release_pinned(limit_bytes: int | None = None) -> int:
    """Releases pinned memory that no table uses, and returns it to the system.

    Pinning memory takes longer than filling it. Therefore memory of freed tables is kept, pinned, for later tables: at
    most 4 GiB, or an eighth of the machine's memory if that is less. A new table reuses kept memory that is on the same
    NUMA node and is at most an eighth larger than the table needs. The call that makes this table first waits for all
    GPUs, because earlier work may still use the memory.

    Example:
        >>> table = ibp.compress(torch.ones(1000, 1024))
        >>> del table
        >>> given_back = ibp.release_pinned()  # the table's memory, where there is a GPU
        >>> ibp.release_pinned()
        0

    Args:
        limit_bytes: the largest number of bytes that may be kept from now on, 0 or more. 0: no memory is kept. None:
            the limit does not change.

    Returns:
        The number of bytes that were released.

    Raises:
        TypeError, ValueError: limit_bytes is not a number of bytes.
    """
    limit = None if limit_bytes is None else whole_number("limit_bytes", limit_bytes, 0, 2**63 - 1)
    freed = _core.release_pinned()
    if limit is not None:
        _core.set_pinned_limit(limit)
    return freed


def to_pinned(tensor: torch.Tensor, node: int = -1) -> torch.Tensor:
    """Returns a pinned copy of a CPU tensor, or the tensor itself if it is already pinned or is empty. node: the
    preferred NUMA node of the copy. Negative: the caller's node."""
    if tensor.numel() == 0 or tensor.is_pinned():
        return tensor
    pinned = empty(tensor.nbytes, tensor.device, pin=True, node=node)
    return pinned.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def device_view(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a tensor on `device`, a CUDA device, over the memory of `memory`, a contiguous tensor that is pinned, or
    that is on another GPU whose memory `device` can read. Nothing is copied. The result keeps `memory` alive.

    `device` can be any GPU. It need not be the current device, nor the one that was current when the memory was pinned.

    Raises:
        ValueError: memory is on a GPU whose memory `device` cannot read.
        RuntimeError: memory is in host memory that is not pinned.
    """
    if memory.is_cuda and not can_read(device, memory.device):
        raise ValueError(f"{device} cannot read the memory of {memory.device}")
    if memory.numel() == 0:
        return torch.empty_like(memory, device=device)
    mapped = _core.map_peer if memory.is_cuda else _core.map_pinned
    with torch.cuda.device(device):
        capsule = mapped(memory, memory.data_ptr(), memory.nbytes, device.index)
        return torch.from_dlpack(capsule).view(memory.dtype).view(memory.shape)


def seen_from(device: torch.device, memory: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of `memory`, without a copy, as a tensor that work on `device` can use. This is `memory` itself
    if it is on this device, and otherwise a view of it on the device. In the second case, `memory` must be pinned, or
    on a GPU whose memory `device` can read. Work on a view is in the order of the streams of `device`."""
    return memory if memory.device == device else device_view(memory, device)


def is_capturing(device: torch.device) -> bool:
    """Returns whether a device's current stream is being captured in a CUDA graph."""
    if device.type != "cuda":
        return False
    if device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):  # torch reports only on the current device.
        return torch.cuda.is_current_stream_capturing()


# ---- memory of other GPUs ----

# For each GPU, the stream on which overflow of slots on other GPUs is allocated and copied.
_overflow_streams: dict[torch.device, torch.cuda.Stream] = {}


def can_read(device: torch.device, other: torch.device) -> bool:
    """Returns whether kernels of `device` can read and write the memory of `other`: whether it is the same device, or
    another GPU to whose memory `device` has access. Enables this access, until the process ends."""
    if device == other:
        return True
    if device.type != "cuda" or other.type != "cuda" or not torch.cuda.can_device_access_peer(device, other):
        return False
    _enable_access(device, other)
    return True


@functools.cache
def _enable_access(device: torch.device, peer: torch.device) -> None:
    """Gives kernels of `device` access to all memory that torch's allocator holds or will hold on `peer`, another GPU.

    cudaDeviceEnablePeerAccess alone would not do. It covers memory from cudaMalloc, but neither expandable segments nor
    the pools of cudaMallocAsync, for which the allocator has to set the access of each device itself. Torch makes its
    allocator do all this when it first copies from one GPU to another: it enables the access of the source's GPU to the
    memory of the target's GPU (`copy_kernel_cuda` in aten/src/ATen/native/cuda/Copy.cu calls `get_p2p_access` of
    aten/src/ATen/cuda/PeerToPeerAccess.cpp; this calls `enablePeerAccess` of the allocator, which in
    c10/cuda/CUDACachingAllocator.cpp also gives access to present and future expandable segments). No other interface
    of torch in Python does the same. The copy is on streams of its own, since the current streams may be captured in a
    CUDA graph.
    """
    sides = [torch.cuda.stream(torch.cuda.Stream(gpu)) for gpu in (device, peer)]
    with outside_of_modes(), sides[0], sides[1]:
        torch.empty(1, dtype=torch.uint8, device=peer).copy_(torch.empty(1, dtype=torch.uint8, device=device))


def empty_overflow(num_bytes: int, home: torch.device, device: torch.device) -> torch.Tensor:
    """Returns an uninitialised uint8 tensor of num_bytes bytes in the memory of `home`, for the overflow of slots on
    `device`. If `device` is a GPU, the tensor is pinned or on another GPU, and work of `device` uses it through
    `seen_from`.

    A tensor on another GPU may be freed as soon as its last use is queued, just like a tensor that was allocated on the
    current stream of `device`. The allocator of the other GPU gives the memory to another tensor only after the work
    that is queued on this stream when the tensor is freed, and on the stream of the other GPU that is current now,
    which torch's `to` uses. `record_stream` provides for that. But the allocator ignores a stream whose handle equals
    the handle of the stream that the memory was allocated on (`recordStream` in c10/cuda/CUDACachingAllocator.cpp), and
    the default streams of all GPUs have the same handle, 0. Therefore the memory is allocated on a stream that is never
    a default stream.

    Args:
        home: a device that `overflow_home` returns for `device`.

    Raises:
        PinningError: the system refuses to pin the memory.
        torch.OutOfMemoryError: the other GPU has too little free memory.
    """
    if home.type == "cpu":
        return empty(num_bytes, home, device.type == "cuda")
    if home not in _overflow_streams:
        _overflow_streams[home] = torch.cuda.Stream(home)
    try:
        with torch.cuda.stream(_overflow_streams[home]):
            made = torch.empty(num_bytes, dtype=torch.uint8, device=home)
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(f"{home} has no free memory for {num_bytes:,} bytes of overflow") from error
    near = torch.cuda.current_stream(device)
    near.wait_stream(_overflow_streams[home])  # Its last work may still use the memory.
    for user in (near, torch.cuda.current_stream(home)):
        made.record_stream(user)
    return made


def copied_overflow(to: torch.Tensor, source: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies the overflow of slots on `device` to other memory, `to`, which `empty_overflow` has allocated for slots on
    `device`, or which is in the memory of the slots. Returns `to`.

    The copy is in the order of the current stream of `device`: it contains what earlier work on this stream has
    written, and later work on this stream finds the copy in `to`. If `to` is in host memory, the call waits for
    `device`. If it is on another GPU, the current stream of this GPU has no part in the copy."""
    if to.device == device or device.type == "cpu":
        return to.copy_(source)
    if not to.is_cuda:
        torch.cuda.synchronize(device)
        return to.copy_(source)
    near, far = torch.cuda.current_stream(device), _overflow_streams[to.device]
    far.wait_stream(near)
    with torch.cuda.stream(far):
        to.copy_(source)
    near.wait_stream(far)
    return to


# ---- the argument `memory` of calls ----

# Values of the argument: "device" is the memory of the device that does the work, "pinned" is pinned host memory, and
# "host" is pageable host memory.
MEMORY = ("device", "pinned", "host")


def check_memory(where: str | None, name: str = "memory", among: Sequence[str] = MEMORY) -> None:
    """Raises ValueError unless `where` is one of the values in `among`, or None. name: the name of the argument in the
    message."""
    if where is not None and where not in among:
        raise ValueError(f"{name} is {where!r}; wanted {', '.join(map(repr, among))} or None")


def memory_read_by(device: torch.device, where: str | None, default: str) -> str:
    """Returns the value of `MEMORY` that says where to put bytes which a device reads while it works. For a CPU, this
    is always "host". For a GPU, it is `where`, or `default` if `where` is None. Raises ValueError if `where` is
    invalid, or is memory that the device cannot read."""
    check_memory(where)
    if device.type == "cpu":
        return "host"
    if where == "host":
        raise ValueError(f"memory is 'host', which {device} does not read; wanted 'device', 'pinned' or None")
    return where or default


def pins(where: str | None) -> bool | None:
    """Returns whether bytes in host memory are to be pinned: True, False, or None to pin them only if the system allows
    it. where: the argument `memory` of the call.

    Raises:
        ValueError: the argument is not valid for host memory.
        RuntimeError: the argument is "pinned", and there is no CUDA device.
    """
    if where is None:
        return None if ops.cuda_is_available() else False
    check_memory(where, among=("pinned", "host"))
    if where == "pinned" and not ops.cuda_is_available():
        raise RuntimeError("memory='pinned' needs a CUDA device and a build of ibp with CUDA")
    return where == "pinned"


def home_of(source: torch.device, where: str | None, worker: torch.device) -> tuple[torch.device, bool | None]:
    """Returns (the device for the coded bytes of a tensor, whether to pin these bytes, as `pins` returns it).

    Args:
        source: the device of the tensor.
        where: the argument `memory`. None: the coded bytes are on the device of the tensor.
        worker: the device that does the work.

    Raises:
        ValueError, RuntimeError: as for `pins`.
    """
    if where is not None:
        check_memory(where)
    home = worker if where == "device" else source if where is None else _CPU
    return home, False if home.type == "cuda" or where in ("device", "host") else pins(where)


# ---- the argument `overflow_memory` of tables ----


def overflow_home(where: torch.device | str | None, device: torch.device) -> torch.device:
    """Returns the device whose memory is to hold the overflow of a table: the CPU, or a GPU whose memory the table's
    GPU can read.

    Args:
        where: the argument `overflow_memory`: "pinned", another GPU or its name, or None, which stands for "pinned".
        device: the device of the slots.

    Raises:
        ValueError: `where` is something else, or the device of the slots cannot read this memory.
    """
    if where is None or where == "pinned":
        return _CPU
    try:
        peer = torch.device(where)
    except (RuntimeError, TypeError):  # Torch does not know this device.
        peer = _CPU
    if peer.type != "cuda":
        raise ValueError(f"overflow_memory is {where!r}; wanted 'pinned', another GPU, such as 'cuda:1', or None")
    where = str(where)
    if device.type != "cuda":
        raise ValueError(
            f"overflow_memory is {where!r}, but the slots are in host memory; wanted slots on a GPU, 'pinned' or None"
        )
    peer = canonical(peer)
    if not 0 <= peer.index < torch.cuda.device_count():
        raise ValueError(f"overflow_memory is {where!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    if peer == device:
        raise ValueError(
            f"overflow_memory is {where!r}, the GPU of the slots; wanted another GPU, 'pinned' or None. ibp.compress "
            "makes tables that lie on one GPU"
        )
    if not can_read(device, peer):
        raise ValueError(
            f"overflow_memory is {where!r}, but {device} cannot read the memory of {peer}; wanted a GPU that it can "
            "read, 'pinned' or None"
        )
    return peer


# ---- the argument `device` of calls ----

# The devices that `canonical` has returned, keyed by the device and by its name.
_usable: dict[torch.device | str, torch.device] = {torch.device("cpu"): torch.device("cpu")}


def canonical(device: torch.device | str | int) -> torch.device:
    """Returns a device as a torch.device; the result for a CUDA device always has an index. "cuda" stands for the
    current CUDA device. Raises TypeError or ValueError if the argument is not a device, or is a device that cannot be
    used."""
    known = _usable.get(device) if isinstance(device, (torch.device, str)) else None
    if known is not None:
        return known
    found = _canonical(device)
    _usable[found] = _usable[str(found)] = found
    return found


def usual(device: torch.device | str | int | None, x: torch.Tensor | None = None) -> torch.device:
    """Returns the device that does the work: the given device, as returned by `canonical`. If device is None, returns
    the GPU of x if x is on a GPU, otherwise the current CUDA device if there is one, and otherwise the CPU."""
    if device is None and x is not None and x.is_cuda:
        device = x.device
    elif device is None and not ops.cuda_is_available():
        return _CPU
    return canonical("cuda" if device is None else device)


def _canonical(device: torch.device | str | int) -> torch.device:
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        got = type(device).__name__
        raise TypeError(f"device is a {got}; wanted a torch.device, the name of one, or the number of a CUDA device")
    try:
        device = torch.device(device) if not isinstance(device, int) else torch.device("cuda", device)
    except RuntimeError:  # torch does not know this device.
        raise ValueError(f"device is {device!r}; wanted the name of a CPU or CUDA device") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {str(device)!r}; wanted a CPU or CUDA device")
    if device.type == "cpu":
        return torch.device("cpu")
    if not _core.cuda_is_built():
        why = "it was built without nvcc, or with IBP_NO_CUDA=1"
        raise ValueError(f"device is {str(device)!r}, but this build of ibp has no CUDA kernels ({why})")
    if not ops.cuda_is_available():
        raise ValueError(f"device is {str(device)!r}, but torch sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


# ---- NUMA nodes ----

CALLERS_NODE = -1  # The number by which the core denotes the node that the calling thread runs on.
_NODES = Path("/sys/devices/system/node/online")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

# The number of a node; or a device, which stands for the node nearest to it; or None, which stands for the caller's
# node.
Numa = int | torch.device | str | None


def node_of(numa: Numa) -> int:
    """Returns the number of the node that an argument `numa` stands for. Returns CALLERS_NODE for None, for the CPU,
    and for a GPU whose nearest node is not known.

    Raises:
        TypeError: the argument is neither a number nor a device.
        ValueError: the machine has no such node, or no such device.
    """
    if numa is None:
        return CALLERS_NODE
    if isinstance(numa, (torch.device, str)):
        device = canonical(numa)
        return CALLERS_NODE if device.type == "cpu" else node_of_gpu(device)
    node = whole_number("numa", numa)
    nodes = online_nodes()
    if node not in nodes:
        raise ValueError(f"numa is {node}; this machine has the nodes {', '.join(map(str, sorted(nodes)))}")
    return node


def online_nodes() -> set[int]:
    """Returns the numbers of the machine's nodes, or {0} if the system does not list them."""
    try:
        text = _NODES.read_text()
    except OSError:
        return {0}
    nodes: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def node_of_gpu(device: torch.device) -> int:
    """Returns the number of the node nearest to a GPU, or CALLERS_NODE if the system does not say."""
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        node = int((_PCI_DEVICES / address / "numa_node").read_text())
    except (OSError, ValueError):
        return CALLERS_NODE
    return node if node in online_nodes() else CALLERS_NODE


# ---- a pool of pinned buffers ----


class Pool:
    """Hands out pinned buffers and takes them back. Only one thread at a time may use a pool.

    Sizes of buffers are rounded up to a few size classes. Each buffer is pinned separately. A request gets a free
    buffer of its own size class if there is one.

    The sizes of coded bytes change from use to use. A pool that kept buffers of all these sizes could hold more memory
    than the raw bytes need. Therefore a request for coded bytes also says how many bytes they have raw, and the pool
    holds at most `raw_held_bytes`, if no coded bytes are larger than the raw ones. Such a request also gets a free
    buffer that is at most an eighth larger. If there is none, and a new buffer would exceed `raw_held_bytes`, the
    request gets any larger buffer that is not larger than a buffer for the raw bytes. If there is none either, the pool
    first releases free buffers, those of the size class that has been unused longest first.

    Attributes:
        held_bytes: total size in bytes of the buffers that the pool has pinned and not yet released.
        raw_held_bytes: the value that held_bytes would have if the requests had been for the raw bytes.
    """

    def __init__(self) -> None:
        self.held_bytes = self.raw_held_bytes = 0
        # For each size, the free buffers, each with the event after its last use. The size whose last buffer was given
        # back first comes first.
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event | None]]] = {}
        # For each size class of raw bytes: [number of requests whose buffers are in use, largest number so far].
        self._requests: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])

    def take(self, num_bytes: int, writer: torch.Stream, raw_bytes: int | None = None) -> torch.Tensor:
        """Returns a pinned buffer of at least num_bytes bytes.

        Args:
            num_bytes: the smallest size in bytes that the caller needs.
            writer: the stream that will write to the buffer first. This stream waits for the last use of the buffer.
            raw_bytes: the size of the caller's bytes before they were coded. None: they are not coded.

        Raises:
            PinningError: the system refuses to pin more memory.
        """
        size = _size_class(num_bytes)
        raw_size = size if raw_bytes is None else _size_class(raw_bytes)
        requests = self._requests[raw_size]
        raw_held = self.raw_held_bytes + raw_size * (requests[0] == requests[1])
        free = self._free.get(size) or self._larger(size, raw_size, self.held_bytes + size <= raw_held)
        if free:
            part, used = free[-1]
            if used is not None:
                writer.wait_event(used)  # If this call raises, the buffer is still in the list of free buffers.
            free.pop()
        else:
            self._release_down_to(raw_held - size)
            part = empty(size, _CPU, True)
            self.held_bytes += size
        requests[0] += 1
        if requests[0] > requests[1]:
            requests[1], self.raw_held_bytes = requests[0], raw_held
        return part

    def _larger(self, size: int, most: int, may_pin: bool) -> list[tuple[torch.Tensor, torch.Event | None]] | None:
        """Returns the free buffers of the smallest size class above `size` that a request may get, or None if there are
        none.

        Args:
            size: the size class of the request.
            most: the largest size that the request may get.
            may_pin: whether the pool may pin a new buffer instead. If so, sizes that are more than an eighth larger do
                not count.
        """
        step = _step(size)
        for other in range(size + step, min(most, size + size // 8) + 1, step):
            if self._free.get(other):
                return self._free[other]
        larger = [] if may_pin else [other for other, free in self._free.items() if free and size < other <= most]
        return self._free[min(larger)] if larger else None

    def give(self, part: torch.Tensor, used: torch.Event | None = None, raw_bytes: int | None = None) -> None:
        """Gives a buffer back to the pool.

        Args:
            part: the buffer.
            used: an event recorded after the last work that uses the buffer. None: no work uses the buffer any more.
            raw_bytes: as for the call of `take` that returned the buffer.
        """
        size = part.numel()
        self._free[size] = free = self._free.pop(size, [])  # The size is now the last one.
        free.append((part, used))
        self._requests[size if raw_bytes is None else _size_class(raw_bytes)][0] -= 1

    def release(self) -> None:
        """Waits until no work uses the free buffers, and releases their memory."""
        self._release_down_to(0)
        for requests in self._requests.values():
            requests[1] = requests[0]
        self.raw_held_bytes = sum(size * in_use for size, (in_use, _) in self._requests.items())

    def _release_down_to(self, num_bytes: int) -> None:
        """Releases free buffers until the pool holds at most num_bytes bytes or has no free buffer. Waits until no work
        uses these buffers."""
        for size, free in self._free.items():
            while free and self.held_bytes > num_bytes:
                used = free[0][1]
                if used is not None:
                    used.synchronize()
                del free[0]
                self.held_bytes -= size


@functools.lru_cache(1024)
def _size_class(num_bytes: int) -> int:
    """Rounds num_bytes up to a size class, a multiple of 4,096 bytes. A size of 64 KiB or more grows by at most a
    sixteenth."""
    return rounded_up(num_bytes, _step(num_bytes))


def _step(num_bytes: int) -> int:
    """Returns the difference between two size classes near num_bytes."""
    return max(4096, 1 << max(0, num_bytes.bit_length() - 5))
