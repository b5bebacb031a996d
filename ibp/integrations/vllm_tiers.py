"""The former name of `ibp.integrations.vllm.tiers`, which options of engines, imports and pickles still use."""

import sys

from .vllm import tiers

sys.modules[__name__] = tiers
