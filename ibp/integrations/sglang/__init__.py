"""SGLang's hierarchical cache with coded pages: `storage` is a storage backend, to which the host pool writes pages,
and `pool` is a host pool.

docs/serving.md has the commands, and the tested releases.
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
    does nothing, and imports nothing of SGLang. SGLang calls this in each of its processes, even if nobody uses the
    plugin."""
    if "ibp_host_pool" in os.environ.get("SGLANG_PLUGINS", "").replace(" ", "").split(","):
        import_module("ibp.integrations.sglang.pool").register()
