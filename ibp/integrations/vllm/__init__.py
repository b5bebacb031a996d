"""Integrations with vLLM: KV-cache offloading to coded pages, coded weights, and weights that a trainer pushes.

| module | vLLM finds it by |
| --- | --- |
| `offloading` | `"spec_module_path": "ibp.integrations.vllm"` of `OffloadingConnector` |
| `tiers` | `"module_path": "ibp.integrations.vllm.tiers"` of `TieringOffloadingSpec` |
| `weights` | `--quantization ibp` and `--load-format ibp`, by an entry point |
| `sync` | the weight transfer backend "ibp_delta", by an entry point |

docs/serving.md has the commands and the tested releases.
"""

from typing import TYPE_CHECKING

from ..shared import lazily

if TYPE_CHECKING:
    from .offloading import IBPOffloadingSpec, IBPOffloadingWorker

__all__ = ["IBPOffloadingSpec", "IBPOffloadingWorker"]
__getattr__ = lazily(__name__, {"offloading": __all__, "tiers": [], "weights": [], "sync": []})
