"""SGLang's hierarchical cache: `storage` keeps coded pages behind its host pool, and `pool` is a host pool of coded
pages.

docs/serving.md has the commands, and the releases that were tried.
"""

from typing import TYPE_CHECKING

from ..shared import lazily

if TYPE_CHECKING:
    from .storage import IBPHiCacheStorage

__all__ = ["IBPHiCacheStorage"]
__getattr__ = lazily(__name__, {"storage": __all__})
