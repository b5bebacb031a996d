"""`ibp.offload` keeps the weights of a model compressed and streams them to the devices that use them, layer by layer.

The paper's sections 2.1 and 6.4.

`groups.py` divides a model into groups of weights that are used together. `weights.py` holds each weight and its
compressed table, and `resting.py` the tensors that stand for weights between uses. `schedule.py` predicts which group
is used next, `fetcher.py` brings it to the device, and `experts.py` brings the experts that a router chooses.
`offloaded.py` has `ibp.offload`, the object that it returns, and the hooks of the modules.
"""

from .offloaded import Offloaded, OffloadStats, offload

__all__ = ["OffloadStats", "Offloaded", "offload"]
