"""Compresses KV-caches: pages of paged caches, rows of tokens that are fetched by index, and caches that grow.

    paged = ibp.kv.PagedTensors(caches)                    # caches: a tensor [blocks, ...] for each layer
    pages = ibp.kv.KVStore(sample, num_pages=4096, page_bytes=paged.block_bytes, num_tensors=len(paged))
    pages.store([0, 1], paged, blocks=[17, 4]).wait()      # compresses blocks into pinned host memory
    pages.load([0, 1], paged, blocks=[3, 9]).wait()        # writes the same bits to other blocks

    keys = ibp.kv.KVRows(sample, num_layers=32, num_tokens=131_072, num_heads=8)
    keys.store(layer, k_new, positions)                    # for attention that reads only a few tokens
    k = keys.load(layer, chosen)

    codec = ibp.kv.PageCodec.learn(sample)                 # to send pages to another machine
    message, used = ibp.kv.pack(paged, codec, blocks=[17, 4])
    ibp.kv.unpack(message, codec, out=paged, blocks=[3, 9])  # on the other machine

docs/kv-cache.md shows these three uses. Adapters of serving engines, such as `ibp.integrations.vllm` and `sglang`,
build on `BlockStore` and `KeyedPages`. Caches that grow token by token, such as `CompressedCache` of
`ibp.integrations.transformers`, build on `TokenCoder`.

The classes differ in what a caller names, and in how coded bytes are kept:

- Pages, by number. `PagedTensors` says where the blocks of a cache lie in memory, which stays the engine's. A `KVStore`
  keeps pages in one `ibp.CodedRows`, with a slot for each row, and may lose a page if rows do not compress; each
  `Transfer` runs on a stream of the store. Two classes stand on it. A `BlockStore` has a `KVStore` for each size and
  kind of blocks, and loses no page. `KeyedPages` finds pages by keys, and drops the least recently used ones.
- Rows of tokens, by index. `KVRows` has an `ibp.CodedRows` for each layer, and an `ibp.RowCache` of it.
- All older tokens of a layer, in order. A `TokenHistory` appends coded blocks to memory that grows, and decodes all of
  them at once. The histories of a cache belong to one `TokenCoder`.
- Pages that leave. `pack` and `unpack` keep nothing: a message holds the rows of some blocks, and both machines have
  the `PageCodec`.
"""

from .._common.process import published
from ._engines import BlockStore, KeyedPages
from ._packed import PackedPages, PageCodec, pack, packed_bytes, unpack
from ._paged import PagedTensors
from ._rows import KVRows, KVRowsStats
from ._store import KVStore, KVStoreStats, Transfer
from ._tokens import TokenCoder, TokenHistory

__all__ = [
    "BlockStore",
    "KVRows",
    "KVRowsStats",
    "KVStore",
    "KVStoreStats",
    "KeyedPages",
    "PackedPages",
    "PageCodec",
    "PagedTensors",
    "TokenCoder",
    "TokenHistory",
    "Transfer",
    "pack",
    "packed_bytes",
    "unpack",
]

__dir__ = published(__name__)
