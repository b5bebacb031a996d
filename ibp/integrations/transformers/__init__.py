"""Adapters for Hugging Face transformers: models with coded weights (`weights`), and KV-caches whose older tokens are
compressed losslessly (`cache`).

    from ibp.integrations.transformers import IbpConfig

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=IbpConfig())

Matrices become tables while the model is loaded. A model in a directory that `ibp compress` or `save_coded` wrote is
also loaded with tables.

    from ibp.integrations.transformers import CompressedCache

    cache = CompressedCache(config=model.config)
    model.generate(**inputs, cache=cache)       # the same tokens and logits as with a DynamicCache
    print(cache.stats())

Works with transformers 5.17 and newer; tested up to 5.24.
"""

from typing import TYPE_CHECKING

import transformers

from ..shared import check_release, lazily

check_release(transformers, "5.17")  # before the modules here import names that older releases do not have

if TYPE_CHECKING:
    from .cache import CompressedCache, CompressedCacheStats, CompressedLayer
    from .weights import IbpConfig, IbpQuantizer, save_coded

__all__ = ["CompressedCache", "CompressedCacheStats", "CompressedLayer", "IbpConfig", "IbpQuantizer", "save_coded"]
__getattr__ = lazily(__name__, {"cache": __all__[:3], "weights": __all__[3:]})
