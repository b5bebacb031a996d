"""`ibp.offload`: the weights of a model kept compressed and streamed to where they are used, layer by layer.

The paper's sections 2.1 and 6.4.

`groups.py` divides a model into groups of weights that are used together, `weights.py` compresses them, `schedule.py`
predicts which group comes next, `fetcher.py` brings it to the device, `experts.py` brings what the router of a mixture
asks for, and `offloaded.py` is what the user holds and what the modules' hooks call.
"""

from .offloaded import Offloaded, OffloadStats, offload

__all__ = ["OffloadStats", "Offloaded", "offload"]
