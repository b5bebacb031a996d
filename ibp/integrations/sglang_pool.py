"""The former name of `ibp.integrations.sglang.pool`, which options of engines, imports and pickles still use."""

import sys

from .sglang import pool

sys.modules[__name__] = pool
