"""All-gathers of torch's FSDP2 that travel coded."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .calls import check_options, gather
from .codec import Codec


def compress_all_gather(
    module: torch.nn.Module, *, codec: Codec | None = None, level: str = "auto", recurse: bool = True
) -> int:
    """See `ibp.distributed.compress_all_gather`."""
    check_options(codec, level)
    from torch.distributed.fsdp import FSDPModule  # here: not every build of torch has it

    if not hasattr(FSDPModule, "set_custom_all_gather"):
        raise RuntimeError(f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather; 2.8 and later have")
    modules = module.named_modules() if recurse else [("", module)]
    sharded = [(name, one) for name, one in modules if isinstance(one, FSDPModule)]
    if not sharded:
        raise ValueError(f"{type(module).__name__} has no module that torch.distributed.fsdp.fully_shard was called on")
    for name, one in sharded:
        one.set_custom_all_gather(_comm_class()(codec, level, name))
    return len(sharded)


@functools.cache
def _comm_class() -> Any:
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

    class CodedAllGather(AllGather):
        """What FSDP2 calls for the parameters of one module. The name of the module is the codec's: all modules have
        one of their own."""

        def __init__(self, codec: Codec | None, level: str, name: str) -> None:
            super().__init__()
            self.codec, self.level, self.name = codec, level, name

        def allocate(self, size: Sequence[Any], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            return torch.empty(*size, dtype=dtype, device=device)

        def __call__(
            self,
            output_tensor: torch.Tensor,
            input_tensor: torch.Tensor,
            group: dist.ProcessGroup,
            async_op: bool = False,
        ) -> dist.Work | None:
            # Of a coded call always work: FSDP waits for it when it needs the parameters, and so does the host.
            options: dict[str, Any] = {"codec": self.codec, "level": self.level, "name": self.name}
            return gather(output_tensor, input_tensor, group, async_op, True, **options)

    return CodedAllGather
