"""An alias for `ibp.integrations.sglang.pool` under its former name. Existing engine options, imports and pickles still
use that name."""

import sys

from .sglang import pool

sys.modules[__name__] = pool
