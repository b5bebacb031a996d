"""Moves activations off the GPU between the forward and the backward pass (cDMA: Rhu and others, HPCA 2018).

The bytes of a saved tensor form a *span* of memory. A *region* holds the bytes of one span, even if several tensors
share them. It is encoded and moved in *pieces* of 64 MiB.

coding.py finds the span of a saved tensor and encodes its bytes. regions.py holds saved bytes on the device or the
host, moves them, and knows the order in which the backward pass needs them. offload.py decides which regions leave the
device, and has the hooks of autograd.
"""

from .offload import ActivationOffload, ActivationStats, offload_activations

__all__ = ["ActivationOffload", "ActivationStats", "offload_activations"]
