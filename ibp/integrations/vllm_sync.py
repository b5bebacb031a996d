"""The former name of `ibp.integrations.vllm.sync`, which options of engines, imports and pickles still use."""

import sys

from .vllm import sync

sys.modules[__name__] = sync
