"""A host pool for SGLang's hierarchical cache that keeps coded pages: 1.4 times as many tokens fit in the same memory.

    SGLANG_PLUGINS=ibp_host_pool python -m sglang.launch_server --model-path MODEL --enable-hierarchical-cache
        --hicache-size 32 --hicache-io-backend direct --page-size 64

The plugin calls `register`. `docs/serving.md` lists the tested releases, and says how they were tested.

SGLang cannot handle the loss of a page, and may overwrite GPU blocks as soon as their store has ended. So if the pool
may be too full for the pages that are being stored, the host waits for the store, and keeps raw copies of the pages
that did not fit. `IBPHostPool.blocks.num_raw_pages` counts these pages.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch

import ibp

from ..shared import check_engine

try:
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # type: ignore
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # type: ignore

    _missing: ImportError | None = None
except ImportError as error:
    MHATokenToKVPoolHost = object
    _missing = error

__all__ = ["IBPHostPool", "register"]

_logger = logging.getLogger(__name__)
# {group: (pages, blocks)}, as in ibp.kv.BlockStore. Group 0 has the tensors of the layers, and group 1 has `_page`.
_Moves = dict[int, tuple[list[int], list[int]]]


def register() -> None:
    """Makes SGLang build `IBPHostPool` for models whose keys and values have the same width. Pages of other models stay
    plain.

    Raises:
        ImportError: SGLang is not installed, or lacks a class that is needed.
    """
    check_engine("sglang", _missing, since="0.5.21")
    HookRegistry.register(f"{MHATokenToKVPoolHost.__module__}.get_mha_host_pool_cls", _class_of, HookType.AFTER)


def _class_of(found: type, *args: Any, **kwargs: Any) -> type:
    if found is MHATokenToKVPoolHost:
        return IBPHostPool
    _logger.warning("ibp: pages of %s stay plain", found.__name__)
    return found


class IBPHostPool(MHATokenToKVPoolHost):
    """A host pool for SGLang that keeps coded pages in an `ibp.kv.BlockStore`. SGLang makes this pool with the
    arguments of its own pool.

    With `--hicache-size`, the pool has the given size, and holds `gain` times as many tokens as a raw pool. With
    `--hicache-ratio`, the pool holds as many tokens as a raw pool, and takes less memory. Transfers run on the current
    stream.

    Attributes:
        gain: average number of coded tokens that fit in the memory of one raw token. This is an attribute of the class.
            Set it before SGLang starts.
        blocks: the `ibp.kv.BlockStore`.

    Raises:
        ImportError: SGLang is not installed, or lacks a class that is needed.
        ValueError: keys and values are neither BF16 nor FP16, a layer's tensor is not contiguous, or the pool has
            layers of a draft model or of other ranks.
    """

    gain = 1.4

    def __init__(self, buffer_info: Any, *args: Any, **kwargs: Any) -> None:
        check_engine("sglang", _missing, since="0.5.21")
        super().__init__(buffer_info, *args, **kwargs)
        # before SGLang 0.5.22, the device's pool has these lists
        keys = getattr(self, "device_k_buffers", None) or buffer_info.k_buffer
        values = getattr(self, "device_v_buffers", None) or buffer_info.v_buffer
        if not self.layer_num == self.target_layer_num == len(keys):
            raise ValueError(
                f"the host pool has {self.layer_num} layers, {self.target_layer_num} of the model, and the device "
                f"{len(keys)}; wanted the same number: neither draft layers nor layers of other ranks"
            )
        layers = [self._blocks_of(tensor) for pair in zip(keys, values) for tensor in pair]
        self._device, self._jobs = layers[0].device, itertools.count()
        self._page = torch.zeros(len(layers), 1, layers[0].shape[1], dtype=torch.int8, device=self._device)
        # the arguments and the moves of the last load, because SGLang loads the same pages layer by layer
        self._last: tuple[Any, Any, _Moves] = None, None, {}
        self.blocks = ibp.kv.BlockStore(
            [layers, list(self._page)],
            num_pages=self.page_num,
            pool_bytes=self.size * self.size_per_token,
            dtype=self.dtype,
            kinds=[[0, 1] * self.layer_num] * 2,  # keys and values, which differ too much for one codebook
        )

    def get_size_per_token(self) -> int:
        """Returns the average size in bytes of a coded token in host memory."""
        return -int(-super().get_size_per_token() // self.gain)

    def init_kv_buffer(self) -> torch.Tensor:
        """Returns a tensor that replaces the raw pool. It has one element, expanded to a shape from which SGLang can
        take a view for each layer."""
        if self.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"keys and values are {self.dtype}; wanted torch.bfloat16 or torch.float16")
        self.token_stride_size = self.head_num * self.head_dim * self.dtype.itemsize
        self.layout_dim = self.token_stride_size * self.layer_num
        self.pin_memory = False  # so that SGLang does not register or unregister it
        return torch.zeros(1, dtype=self.dtype, device="cpu").expand(2, self.layer_num, self.layer_num)

    def destroy(self) -> None:
        """Waits for all transfers, and frees the pool."""
        self.blocks.close()
        super().destroy()

    # ---- between the GPU and the pool ----

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: torch.Tensor, device_indices: torch.Tensor, io_backend: str
    ) -> None:
        """Stores pages. host_indices: the indices of the pages' tokens in this pool. device_indices: their indices on
        the GPU."""
        self._store({0: (self._pages_of(host_indices), self._pages_of(device_indices))})

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: torch.Tensor,
        device_indices: torch.Tensor,
        layer_id: int,
        io_backend: str,
        is_draft: bool = False,
    ) -> None:
        """Loads one layer of pages to the GPU. Does nothing for layers of a draft model. host_indices, device_indices:
        the indices of the pages' tokens in this pool and on the GPU."""
        if is_draft or not 0 <= layer_id < self.layer_num:
            return
        with self.lock:
            if self._last[0] is not host_indices or self._last[1] is not device_indices:
                moves = {0: (self._pages_of(host_indices), self._pages_of(device_indices))}
                self._last = host_indices, device_indices, moves
            self._load(self._last[2], range(2 * layer_id, 2 * layer_id + 2))

    # ---- between the pool and storage ----

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """Decodes a page and returns it on the CPU, as [2, layers, tokens, heads, width], or 1-D if flat is set. Waits
        for the load."""
        with self.lock:
            self._load({1: ([int(index) // self.page_size], [0])}, waits=True)
            page = self._page_view().contiguous().to("cpu", copy=True)
        return page.flatten() if flat else page

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Stores a page that has the form in which `get_data_page` returns pages. Waits for the store."""
        with self.lock:
            view = self._page_view()
            view.copy_(data_page.view(self.dtype).view(view.shape))
            self._store({1: ([int(index) // self.page_size], [0])}, waits=True)

    def get_page_buffer_meta(self, indices: Any = None, split_factor: Any = None) -> Any:
        """Raises NotImplementedError, because coded pages have no addresses from which storage could read."""
        raise NotImplementedError("pages of the host pool are coded: use a storage backend that copies pages")

    get_hybrid_pool_buffer = get_split_heads_page_buffer_meta = get_page_buffer_meta

    # ---- implementation ----

    def _init_write_back_staging_buffers(self, *args: Any) -> None:
        self.can_use_write_back_jit = False

    def _blocks_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_contiguous():
            raise ValueError(f"a layer has strides {tensor.stride()}; wanted rows that lie one after the other")
        count = len(tensor) // self.page_size
        return tensor[: count * self.page_size].view(torch.int8).view(count, -1)

    def _page_view(self) -> torch.Tensor:
        shape = self.layer_num, 2, self.page_size, self.head_num, self.head_dim
        return self._page.view(self.dtype).view(shape).transpose(0, 1)

    def _pages_of(self, indices: torch.Tensor) -> list[int]:
        firsts = indices.cpu()[:: self.page_size]
        if indices.numel() % self.page_size or (firsts % self.page_size).any():
            raise ValueError(f"{indices.numel()} tokens do not begin and end with pages of {self.page_size}")
        return (firsts // self.page_size).tolist()

    def _store(self, moves: _Moves, waits: bool = False) -> None:
        with self.lock:
            self.blocks.store(next(self._jobs), moves, stream=self._stream())
            self._settle(waits or self.blocks.may_lose)

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _load(self, moves: _Moves, tensors: range | None = None, waits: bool = False) -> None:
        self.blocks.load(next(self._jobs), moves, tensors=tensors, stream=self._stream())
        self._settle(waits)

    def _settle(self, waits: bool) -> None:
        """Raises RuntimeError if a page that was loaded is damaged, or was never stored. waits: whether to wait for all
        jobs before the check."""
        if waits:
            self.blocks.wait()
        if not all(success for _, success, _ in self.blocks.finished()):
            raise RuntimeError("a page of the host pool is damaged, or was never stored")
