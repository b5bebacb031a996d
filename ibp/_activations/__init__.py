"""Activations that leave the device between the forward and the backward pass (cDMA: Rhu and others, HPCA 2018).

spans.py: which bytes a saved tensor has; coding.py, origin.py: how they are coded; region.py: saved bytes, wherever
they are; lane.py: how they move; passes.py: the order in which they are asked for; choosing.py, planning.py: which ones
leave under a budget; offload.py: the hooks.
"""

from .offload import ActivationOffload, ActivationStats, offload_activations

__all__ = ["ActivationOffload", "ActivationStats", "offload_activations"]
