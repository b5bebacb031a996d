"""The former name of `ibp.integrations.vllm.weights`, which options of engines, imports and pickles still use."""

import sys

from .vllm import weights

sys.modules[__name__] = weights
