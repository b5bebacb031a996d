"""Moves activations off the GPU between the forward and the backward pass (cDMA: Rhu and others, HPCA 2018).

spans.py finds the bytes of a saved tensor; coding.py and origin.py encode them; region.py holds saved bytes, wherever
they are; transfers.py moves them; passes.py knows the order in which the backward pass needs them; policy.py decides
which of them leave; offload.py has the hooks.
"""

from .offload import ActivationOffload, ActivationStats, offload_activations

__all__ = ["ActivationOffload", "ActivationStats", "offload_activations"]
