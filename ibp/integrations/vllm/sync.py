"""Receives weights that a trainer pushes into a running vLLM: `--weight-transfer-config '{"backend": "ibp_delta"}'`.

vLLM finds this module by the entry point `vllm.general_plugins` and calls `register`. Messages of `ibp.deltas.Sender`
have the names and shapes of a checkpoint's tensors. A trainer passes them to `send`, and each worker's
`IBPWeightTransferEngine` passes them to a `ModelReceiver`.

`ModelReceiver` finds where a worker keeps the weights of a checkpoint, which may be merged, sharded or coded there. To
find out, it passes tensors that have no memory to the model's own `load_weights`, once for each name. The tensors only
record where `load_weights` copies them to. Later changes are written directly to the recorded places, without
`load_weights`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

import ibp

from ..shared import check_engine
from .weights import CodedMethod, IncomingTensor, storage_of

try:
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory  # type: ignore
    from vllm.distributed.weight_transfer.base import (  # type: ignore
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.nccl_common import (  # type: ignore
        NCCLWeightTransferInitInfo,
        worker_init_process_group,
    )

    _missing: ImportError | None = None
except ImportError as error:
    WeightTransferEngine = WeightTransferInitInfo = WeightTransferUpdateInfo = object
    _missing = error

__all__ = ["IBPWeightTransferEngine", "ModelReceiver", "register", "send"]

_logger = logging.getLogger(__name__)
BACKEND = "ibp_delta"


@functools.cache
def register() -> None:
    """Registers the backend with vLLM, which calls this in each of its processes. If this vLLM lacks a class that is
    needed, the function only logs a warning."""
    if _missing is not None:
        _logger.warning("ibp: the weight transfer backend %s is not there with this vLLM: %s", BACKEND, _missing)
        return
    WeightTransferEngineFactory.register_engine(BACKEND, __name__, "IBPWeightTransferEngine")


@dataclass
class IBPTransferInit(WeightTransferInitInfo):
    """Options of the backend. nccl: fields of vLLM's `NCCLWeightTransferInitInfo`, if messages come by NCCL. Rank 0 of
    the group that these fields describe sends the messages. None: messages come as files."""

    nccl: dict[str, Any] | None = None


@dataclass
class IBPTransferUpdate(WeightTransferUpdateInfo):
    """The messages of an update.

    Attributes:
        paths: paths of the messages that are files on the workers' machine.
        num_bytes: size in bytes of each message that comes by NCCL, in the order of the messages.
    """

    paths: list[str] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)


class IBPWeightTransferEngine(WeightTransferEngine):
    """The engine that vLLM makes in each worker for the backend "ibp_delta".

    Every worker gets all messages and applies those changes that concern its own parameters. `update_weights` raises
    what `ibp.deltas.Receiver.apply` raises; the weights are then unchanged, and the trainer must push them with
    `full=True`.

    Some kernels, for example some kernels of experts, keep weights in an order that differs from the one in which
    vLLM's loaders write them. If a worker has complete tensors, fingerprints detect the difference, and pushes are
    refused. Parts of tensors have no fingerprints, so a worker that has only parts does not notice the difference, nor
    does vLLM's own sparse backend.

    Raises:
        ImportError: vLLM is not installed, or lacks a class that is needed.
    """

    init_info_cls, update_info_cls = IBPTransferInit, IBPTransferUpdate
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        check_engine("vllm", _missing)
        super().__init__(config, vllm_config, device, model)
        self._receiver = ModelReceiver(model, vllm_config.model_config.enforce_eager)
        self._group: Any = None

    def init_transfer_engine(self, init_info: IBPTransferInit) -> None:
        if init_info.nccl is not None:
            self._group = worker_init_process_group(NCCLWeightTransferInitInfo(**init_info.nccl), self.parallel_config)

    def start_weight_update(self) -> None:
        """Does nothing, because parameters change in place."""

    def finish_weight_update(self) -> None:
        """Does nothing, for the same reason as `start_weight_update`."""

    def receive_weights(self, update_info: IBPTransferUpdate) -> None:
        for path in update_info.paths:
            size = os.path.getsize(path)
            self._receiver.apply(torch.from_file(path, shared=False, size=size, dtype=torch.uint8))
        for size in update_info.num_bytes:
            message = torch.empty(size, dtype=torch.uint8, device=self._group.device)
            self._group.broadcast(message, src=0, stream=torch.cuda.current_stream(message.device))
            self._receiver.apply(message)

    def shutdown(self) -> None:
        if self._group is not None and hasattr(self._group, "destroy"):
            self._group.destroy()
        self._group = None

    @staticmethod
    def trainer_send_weights(iterator: Iterator[torch.Tensor], trainer_args: dict[str, Any]) -> None:
        """Calls `send` with the arguments that vLLM 0.26 passes. iterator: the messages. trainer_args: the other
        arguments of `send`."""
        send(list(iterator), **trainer_args)


def send(messages: Sequence[torch.Tensor], client: Any, *, group: Any = None, folder: str = "/dev/shm") -> None:
    """Sends the messages of a push to the workers of a vLLM engine, through one of vLLM's clients. A trainer calls it.

    Args:
        messages: the messages of all senders, as returned by `ibp.deltas.Sender.push`.
        client: an object of vLLM's `HTTPVLLMWeightSyncClient` or `RayVLLMWeightSyncClient`, or an object with the same
            methods.
        group: the result of vLLM's `nccl_common.trainer_init`, if messages are to be sent by NCCL; the messages must
            then be on the group's device. None: messages are sent as files.
        folder: directory of the files, which exist until the call returns. The workers must be able to read them. The
            default directory is in memory.
    """
    client.start_weight_update()
    if group is None:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            paths = [os.path.join(place, str(number)) for number in range(len(messages))]
            for path, message in zip(paths, messages):
                message.cpu().numpy().tofile(path)
            client.update_weights({"paths": paths})
    else:
        with ThreadPoolExecutor(1) as thread:  # update_weights returns only when the workers have received the messages
            told = thread.submit(client.update_weights, {"num_bytes": [message.numel() for message in messages]})
            for message in messages:
                group.broadcast(message, src=0, stream=torch.cuda.current_stream(message.device))
            told.result()
    client.finish_weight_update()


# ---- changes of a model's weights ----


class ModelReceiver(ibp.deltas.PlacedReceiver):
    """Receives changes of a checkpoint's tensors for an engine's model, which may keep the tensors merged, sharded or
    coded.

    Args:
        model: a model whose `load_weights` takes pairs of the names and tensors of a checkpoint.
        is_eager: whether the model runs without CUDA graphs.

    Raises:
        NotImplementedError: the model has coded layers and is_eager is False.
    """

    def __init__(self, model: torch.nn.Module, is_eager: bool = False) -> None:
        super().__init__()
        self._model: Any = model
        methods = ((layer, getattr(layer, "quant_method", None)) for layer in model.modules())
        self._coded = [
            (layer, method)
            for layer, method in methods
            if isinstance(method, CodedMethod) and method.tables and not method.is_tied
        ]
        if self._coded and not is_eager:
            raise NotImplementedError(
                "weights that ibp has coded change with --enforce-eager alone: CUDA graphs hold lists of their escapes"
            )

    def apply(self, message: torch.Tensor) -> bool:
        is_done = super().apply(message)
        for _, method in self._coded if is_done else ():
            for table in method.tables.values():
                table.prepare_linear()
        return is_done

    def places_of(
        self, tensors: Mapping[str, tuple[torch.Size, torch.dtype]]
    ) -> dict[str, list[ibp.deltas.ShardPlace]]:
        """Returns a dict from each tensor's name to a list of the places where the model keeps parts of the tensor. The
        list is empty for tensors that the model does not load, such as those of other pipeline stages."""
        copies = {name: _Copies() for name in tensors}
        weights = {name: IncomingTensor.of(copies[name], *each) for name, each in tensors.items()}
        with contextlib.ExitStack() as stack:
            plain = [stack.enter_context(method.as_plain(layer)) for layer, method in self._coded]
            with torch.no_grad():
                self._model.load_weights(iter(weights.items()))
        by_storage = {storage_of(weight): table for tables in plain for weight, table in tables.items()}
        return {
            name: [_place(name, weight, *copied, by_storage) for copied in copies[name].found]
            for name, weight in weights.items()
        }


class _Copies:
    """The origin of an `IncomingTensor` that notes where the tensor's parts are copied, and copies nothing."""

    def __init__(self) -> None:
        self.found: list[tuple[torch.Tensor, torch.Tensor]] = []

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self.found.append((source, target))

    def values(self, source: torch.Tensor, device: torch.device) -> torch.Tensor:
        raise NotImplementedError("a weight loader changes values before it copies them, which no delta can do")


def _place(
    name: str, weight: torch.Tensor, source: torch.Tensor, target: torch.Tensor, tables: dict[int, ibp.CompressedTensor]
) -> ibp.deltas.ShardPlace:
    """Returns the place to which a loader copied a part of a weight. weight: the whole tensor, on the meta device.
    source: the part, a view of weight. target: the memory to which it was copied, or, if the layer is coded, a view of
    a weight that `as_plain` made. tables: a map from `storage_of` of each such weight to its table."""
    if target.dtype != weight.dtype:
        raise TypeError(f"{name} has dtype {target.dtype} here; the message is for {weight.dtype}")
    strides, at, box = weight.stride(), source.storage_offset(), []
    missing = weight.dim() - source.dim()  # number of leading dimensions that a loader has removed by indexing
    if source.numel() == weight.numel() and source.is_contiguous():
        source, target, missing = weight, target.view(weight.shape), 0
    if missing < 0 or any(n > 1 and a != b for n, a, b in zip(source.shape, source.stride(), strides[missing:])):
        raise NotImplementedError(f"the loader of {name} takes it in another order, which deltas cannot follow")
    for stride, length in zip(strides, (1,) * missing + tuple(source.shape)):
        box.append((at // max(1, stride), length))
        at %= max(1, stride)
    if target.is_meta:
        columns = target.shape[-1]
        table = tables[storage_of(target)]
        if columns != table.shape[1]:
            raise NotImplementedError(f"{name} is coded beside other weights in one row")
        return ibp.deltas.ShardPlace(table, target.storage_offset() // columns, tuple(box))
    return ibp.deltas.ShardPlace(target.detach()[(None,) * missing], 0, tuple(box))
