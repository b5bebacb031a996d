"""SGLang's hierarchical cache: `storage` keeps coded pages behind its host pool, and `pool` is a host pool of coded
pages.

docs/serving.md has the commands, and the releases that were tried.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

from ..shared import lazily

if TYPE_CHECKING:
    from .storage import IBPHiCacheStorage

__all__ = ["IBPHiCacheStorage"]
__getattr__ = lazily(__name__, {"storage": __all__, "pool": []})


def register_host_pool() -> None:
    """Registers the plugin `ibp_host_pool`. SGLang calls it in each of its processes, even if nobody uses the
    plugin. It does nothing, and imports nothing of SGLang, unless `SGLANG_PLUGINS` names the plugin."""
    if "ibp_host_pool" in os.environ.get("SGLANG_PLUGINS", "").replace(" ", "").split(","):
        import_module("ibp.integrations.sglang.pool").register()
