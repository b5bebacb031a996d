"""KV-caches for serving: pages that come and go (`store`, of paged caches: `paged`), rows of tokens by index (`rows`),
and what they take (`sizes`). The caches of transformers are in `_kv_cache`."""
