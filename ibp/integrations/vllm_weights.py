"""An alias for `ibp.integrations.vllm.weights` under its former name. Existing engine options, imports and pickles
still use that name."""

import sys

from .vllm import weights

sys.modules[__name__] = weights
