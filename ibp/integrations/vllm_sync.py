"""An alias for `ibp.integrations.vllm.sync` under its former name. Existing engine options, imports and pickles still
use that name."""

import sys

from .vllm import sync

sys.modules[__name__] = sync
