"""Adapters for SGLang's hierarchical cache, which keep coded pages. `pool` is a host pool, and `storage` is a storage
backend, to which a host pool writes pages.

docs/serving.md has the commands, and lists the tested releases.
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
    """Calls `pool.register` if the environment variable `SGLANG_PLUGINS` names the plugin `ibp_host_pool`. Otherwise
    does nothing, and does not import SGLang. SGLang calls this function in each of its processes, even if the plugin is
    not used."""
    if "ibp_host_pool" in os.environ.get("SGLANG_PLUGINS", "").replace(" ", "").split(","):
        import_module("ibp.integrations.sglang.pool").register()
