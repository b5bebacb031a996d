"""Tables in several processes and on several machines, and collectives whose tensors travel coded, over
torch.distributed.

ibp.distributed.share_table        one table in host memory for all processes of a machine
ibp.distributed.open_shared        a table that another process shares by `table.share()`
ibp.distributed.ShardedTable       a table whose rows are spread over machines
ibp.distributed.broadcast_delta    what changed in weights, from one process to the others
ibp.distributed.all_gather_into_tensor, all_to_all_single, broadcast, send, recv
                                   as in torch.distributed, with tensors coded where that is faster
ibp.distributed.compress_all_gather
                                   FSDP2, whose all-gathers do the same
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._common import group as _group
from .._machine.segments import SharedHandle
from .._tables.compressed_tensor import CompressedTensor
from ..deltas import CheckpointDelta, Delta, _broadcasting
from . import _calls, _fsdp, _pairs, _planning
from ._codec import Codec
from ._links import Link
from ._sharded import ShardedTable
from ._sharing import open_shared

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

__all__ = [
    "Codec",
    "Link",
    "ShardedTable",
    "SharedHandle",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "broadcast_delta",
    "compress_all_gather",
    "measure_link",
    "open_shared",
    "recv",
    "send",
    "share_table",
]


def __dir__() -> list[str]:
    return __all__


def share_table(
    table: CompressedTensor | None,
    group: ProcessGroup | None = None,
    *,
    src: int = 0,
    memory: str | None = None,
) -> CompressedTensor:
    """Puts one rank's table in memory that all processes of a machine share, once for all. A collective call.

    The table is moved to shared memory (see `CompressedTensor.share_memory_`). Each process pins it for its GPU when
    it first fetches from it.

    Example:
        >>> # on each rank of a group
        >>> is_first = torch.distributed.get_rank() == 0
        >>> table = ibp.compress(torch.ones(1000, 64), device="cpu", memory="host") if is_first else None
        >>> table = ibp.distributed.share_table(table)
        >>> table[17, 0]
        tensor(1.)

    Args:
        table: in host memory, on rank src; other ranks give None.
        group: a process group of torch.distributed, all on one machine; None: the default group.
        src: the rank in the group that has the table.
        memory: "pinned": GPUs read rows from the memory themselves; "host": they do not; None: as on rank src.

    Returns:
        The table of rank src: on that rank itself, on the others a table in the same memory.

    Raises:
        TypeError, ValueError: table is none, or on a GPU; ranks are on several machines or differ in src.
        RuntimeError: the memory cannot be opened, torch.distributed is not initialised, or another rank has failed.
    """
    members, what = _group.RankGroup(group), "share_table"

    def offer() -> tuple[str, dict[str, int], Any]:
        if not 0 <= src < members.size:
            raise ValueError(f"src is {src}; wanted 0 to {members.size - 1}")
        if members.rank != src:
            return _group.machine(), {"src": src}, None
        if not isinstance(table, CompressedTensor):
            raise TypeError(f"table is a {type(table).__name__}; wanted an ibp.CompressedTensor")
        if table.is_cuda:
            raise ValueError(f"table is on {table.device}; wanted one in host memory")
        return _group.machine(), {"src": src}, table.share()

    offers = members.together(what, offer)
    _group.check_one_machine(what, [name for name, _, _ in offers])
    _group.same_on_all(what, [arguments for _, arguments, _ in offers])
    opened: list[CompressedTensor] = []

    def open_it() -> None:
        if members.rank != src or table is None:
            opened.append(open_shared(offers[src][2], memory=memory))
        else:
            opened.append(table.pin_memory() if memory == "pinned" else table)

    members.together(what, open_it)  # rank src keeps the table until all have opened it
    return opened[0]


def broadcast_delta(
    delta: Delta | CheckpointDelta | None,
    src: int = 0,
    group: ProcessGroup | None = None,
    *,
    device: torch.device | str | int | None = None,
) -> Delta | CheckpointDelta:
    """Brings one rank's delta to all ranks of a group. A collective call.

    One broadcast of torch.distributed moves the coded bytes: NCCL from GPU to GPU, gloo over host memory. An object
    that describes the tensors is sent before them.

    Example:
        >>> # on each rank of a group
        >>> old = {"w": torch.zeros(1000, 64)}
        >>> new = {"w": torch.ones(1000, 64)}  # which rank 0 alone needs
        >>> change = ibp.deltas.make(new, old, device="cpu") if torch.distributed.get_rank() == 0 else None
        >>> ibp.distributed.broadcast_delta(change, device="cpu").apply_(old)["w"][0, 0]
        tensor(1.)

    Args:
        delta: on rank src; other ranks give None.
        src: the rank in the group that has the delta.
        group: a process group of torch.distributed; None: the default group.
        device: where the delta goes. None: on rank src it stays where it is; on the other ranks it stays where it
            arrives: on the current CUDA device with NCCL, else on the CPU.

    Returns:
        The delta of rank src.

    Raises:
        TypeError, ValueError: delta is none, src is no rank, or ranks differ in it.
        RuntimeError: torch.distributed is not initialised, or another rank has failed.
    """
    return _broadcasting.broadcast_delta(delta, src, group, device=device)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor`, with tensors that travel coded where that is faster.

    The bits of the result are torch's. A tensor is divided into pieces: while one piece travels, the next is coded and
    the one before it decoded. If a codec has too little room for a tensor, the tensor is sent again, raw. A CUDA graph
    captures torch's own call.

    The first call of a kind (shape, dtype, level, name) is slower: the ranks compare their arguments, measure the link,
    learn a codec from samples of their tensors, and try out what is fastest. Some later calls check whether that choice
    still fits.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> whole = torch.empty(2000, 64)
        >>> ibp.distributed.all_gather_into_tensor(whole, torch.full((1000, 64), float(rank)))
        >>> whole[[3, 1003], 0]
        tensor([0., 1.])

    Args:
        output_tensor: contiguous, as many elements as the input tensors of all ranks. The input may be this rank's part
            of it.
        input_tensor: contiguous, of any dtype, on the CPU or a GPU; of one shape and dtype on all ranks.
        group: of torch.distributed; None: the default one.
        async_op: return work at once; its `wait()` gives the result. On a GPU `wait()` blocks the host until all ranks
            have coded their tensors, and lets the current stream wait for the rest; ranks wait in the order in which
            they call.
        codec: how to code, equal on all ranks; None: learned from the tensors of all ranks.
        level: "auto": as fast as can be by the measured link, raw where that is fastest; "default", "fast": coded at
            this level (see `ibp.compress`), unless that saves nothing.
        name: calls of one name and dtype share a codec: give another name to tensors of another distribution.

    Returns:
        Work where async_op is set, else None.

    Raises:
        TypeError, ValueError: an argument is not as described, or ranks differ in it: then on all ranks.
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    options: Any = {"codec": codec, "level": level, "name": name}
    return _calls.all_gather_into_tensor(output_tensor, input_tensor, group, async_op, **options)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> Work | None:
    """`torch.distributed.all_to_all_single`, with tensors that travel coded where that is faster.

    See `all_gather_into_tensor` for how, for the other arguments and for the errors. Parts travel in one piece. Unless
    a level or codec is given, parts that are too small for coding to pay travel raw.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()  # 0 or 1
        >>> output = torch.empty(2000, 64)
        >>> ibp.distributed.all_to_all_single(output, torch.full((2000, 64), float(rank)))
        >>> output[[3, 1003], 0]  # the first half is from rank 0
        tensor([0., 1.])

    Args:
        output, input: contiguous, of one dtype and device.
        output_split_sizes, input_split_sizes: items of dimension 0 from and to each rank; None: equal parts.
    """
    options: Any = {"codec": codec, "level": level, "name": name}
    return _calls.all_to_all_single(output, input, output_split_sizes, input_split_sizes, group, async_op, **options)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> Work | None:
    """`torch.distributed.broadcast`, with a tensor that travels coded where that is faster.

    See `all_gather_into_tensor` for how, for the other arguments and for the errors.

    Example:
        >>> # on each rank of a group
        >>> rank = torch.distributed.get_rank()
        >>> weights = torch.full((1000, 64), float(rank))
        >>> ibp.distributed.broadcast(weights, src=1)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: contiguous; sent by the source, written by the others.
        src, group_src: the source's rank among all, or in the group: one of them.
    """
    options: Any = {"codec": codec, "level": level, "name": name}
    return _calls.broadcast(tensor, src, group, async_op, group_src, **options)


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    async_op: bool = False,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> Work | None:
    """`torch.distributed.send`, with a tensor that travels coded where that is faster. Its twin is `recv` of this
    module, with the same arguments.

    Unless a codec is given, the first tensor of a kind travels raw, and behind it travels the codec of the next ones.
    The call waits first for an earlier tensor to the same rank. See `all_gather_into_tensor` for the other arguments.

    Example:
        >>> # on each rank of a group
        >>> weights = torch.full((1000, 64), float(torch.distributed.get_rank()))
        >>> if torch.distributed.get_rank() == 1:
        ...     ibp.distributed.send(weights, dst=0)
        ... elif torch.distributed.get_rank() == 0:
        ...     ibp.distributed.recv(weights, src=1)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: contiguous.
        dst, group_dst: the receiver's rank among all, or in the group: one of them.
        tag: as in torch.
        async_op: return work, as `torch.distributed.isend` does.
        level: "auto": raw on the CPU, and unless the group's link was measured before (`measure_link`).

    Raises:
        TypeError, ValueError: an argument is not as described.
        RuntimeError: torch.distributed is not initialised, or the other rank does not take part.
    """
    way = _pairs.Way(group, True, _calls.root_of(dst, group_dst, group, "dst"), tag)
    return _pairs.transfer(tensor, way, _pairs.PairOptions(async_op, codec, level, name))


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    async_op: bool = False,
    codec: Codec | None = None,
    level: str = "auto",
    name: str = "",
) -> Work | None:
    """`torch.distributed.recv` from a rank that calls `send` of this module with the same arguments.

    Example:
        >>> # on each rank of a group
        >>> weights = torch.full((1000, 64), float(torch.distributed.get_rank()))
        >>> if torch.distributed.get_rank() == 0:
        ...     ibp.distributed.recv(weights, src=1)
        ... elif torch.distributed.get_rank() == 1:
        ...     ibp.distributed.send(weights, dst=0)
        >>> weights[0, 0]
        tensor(1.)

    Args:
        tensor: contiguous; it is written.
        src, group_src: the sender's rank among all, or in the group: one of them.
        tag, async_op, codec, level, name: as in `send`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `send`; ValueError also if the sender's tensor is of another kind.
    """
    way = _pairs.Way(group, False, _calls.root_of(src, group_src, group), tag)
    return _pairs.transfer(tensor, way, _pairs.PairOptions(async_op, codec, level, name))


def compress_all_gather(
    module: torch.nn.Module, *, codec: Codec | None = None, level: str = "auto", recurse: bool = True
) -> int:
    """Lets the all-gathers of FSDP2 travel coded, where that is faster. Training gives the same bits.

    Every module that `fully_shard` was called on has a codec of its own, which is learned at its first all-gather.
    Before later forward passes of `module`, ranks check together which modules' parameters fit into their messages.
    The host then does not wait for each all-gather: at the end of the forward pass and of the backward pass it checks
    whether all parameters did fit. If parameters are written in between to values that do not fit, that pass raises
    RuntimeError on all ranks.

    Example:
        >>> # on each rank of a group
        >>> from torch.distributed.fsdp import fully_shard
        >>> model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.Linear(512, 512))
        >>> layers = [fully_shard(layer) for layer in model]
        >>> model = fully_shard(model)
        >>> ibp.distributed.compress_all_gather(model)  # the layers, and what is around them
        3

    Args:
        module: sharded by `torch.distributed.fsdp.fully_shard`, itself or parts of it.
        codec, level: as in `all_gather_into_tensor`.
        recurse: also the modules inside.

    Returns:
        How many modules there are.

    Raises:
        TypeError, ValueError: an argument is not as described, or nothing is sharded.
        RuntimeError: this torch has no `FSDPModule.set_custom_all_gather`.
    """
    return _fsdp.compress_all_gather(module, codec=codec, level=level, recurse=recurse)


def measure_link(group: ProcessGroup | None = None, *, refresh: bool = False) -> Link:
    """Measures how fast all-gathers of a group are, for the choices of level="auto". The first call that needs the
    result measures it, once. A collective call.

    Example:
        >>> # on each rank of a group
        >>> ibp.distributed.measure_link().gbps > 0
        True

    Args:
        group: of torch.distributed; None: the default one.
        refresh: measure again.

    Raises:
        RuntimeError: torch.distributed is not initialised, or a rank does not take part.
    """
    return _planning.measured_link(group, refresh)
