"""`ibp.offload` keeps the weights of a model compressed and streams them to the devices that use them, layer by layer
(the paper's sections 2.1 and 6.4).

    ibp.offload(model)         offloaded.py   checks the arguments, and returns the object that undoes all of this
      what is to be done         plan.py        groups of weights, their order and devices, the sizes of memories: data
      values become tables       weights.py     from the model or a checkpoint; the model's tensors rest (resting.py)
      modules get hooks          hooks.py       closures, which call the events
    model(x)
      a module begins and ends   events.py      the five events, and the prediction of the next group
      a group is fetched         fetcher.py     into the memory of a device, on a stream of its own
      experts are fetched        experts.py     the experts that a router chose, through a cache
"""

from .offloaded import Offloaded, OffloadStats, offload

__all__ = ["OffloadStats", "Offloaded", "offload"]
