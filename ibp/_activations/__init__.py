"""Activations that leave the GPU between the forward and the backward pass (cDMA: Rhu and others, HPCA 2018).

spans.py: which bytes a saved tensor has; coding.py, origin.py: how they are coded; region.py: saved bytes, wherever
they are; transfers.py: how they move; passes.py: the order in which the backward pass asks for them; policy.py: which
of them leave; offload.py: the hooks.
"""

from .offload import ActivationOffload, ActivationStats, offload_activations

__all__ = ["ActivationOffload", "ActivationStats", "offload_activations"]
