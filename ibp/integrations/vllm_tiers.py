"""An alias for `ibp.integrations.vllm.tiers` under its former name. Existing engine options, imports and pickles still
use that name."""

import sys

from .vllm import tiers

sys.modules[__name__] = tiers
