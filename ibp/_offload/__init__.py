"""`ibp.offload` keeps the weights of a model compressed and streams them to the devices that use them, layer by layer
(the paper's sections 2.1 and 6.4).

    ibp.offload(model)         offloaded.py   checks the arguments, and returns the object that undoes all of this
      makes a plan               plan.py        which weights are fetched together, in which order, to which device
      compresses the weights     weights.py     of the model or a checkpoint; its tensors give up their memory and rest
      installs hooks             events.py      in the modules; the hooks call the events
    model(x)
      a module begins and ends   events.py      what these events do, and the prediction of the next group
      a group is fetched         fetcher.py     into the memory of a device, on a separate stream
      experts are fetched        events.py      only those that a router chose, through a cache
"""

from .offloaded import Offloaded, OffloadStats, offload

__all__ = ["OffloadStats", "Offloaded", "offload"]
