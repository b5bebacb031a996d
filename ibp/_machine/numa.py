"""Finds the NUMA node of the host on which new pinned memory is to be allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .._common.arguments import whole_number
from . import memory

CALLERS_NODE = -1  # The number by which the core denotes the node that the calling thread runs on.
_NODES = Path("/sys/devices/system/node/online")
_PCI_DEVICES = Path("/sys/bus/pci/devices")

# The number of a node; or a device, which stands for the node nearest to it; or None, which stands for the caller's
# node.
Numa = int | torch.device | str | None


def node_of(numa: Numa) -> int:
    """Returns the number of the node that an argument `numa` stands for. Returns CALLERS_NODE for None, for the CPU,
    and for a GPU whose nearest node is not known.

    Raises:
        TypeError: the argument is neither a number nor a device.
        ValueError: the machine has no such node, or no such device.
    """
    if numa is None:
        return CALLERS_NODE
    if isinstance(numa, (torch.device, str)):
        device = memory.canonical(numa)
        return CALLERS_NODE if device.type == "cpu" else node_of_gpu(device)
    node = whole_number("numa", numa)
    nodes = online_nodes()
    if node not in nodes:
        raise ValueError(f"numa is {node}; this machine has the nodes {', '.join(map(str, sorted(nodes)))}")
    return node


def online_nodes() -> set[int]:
    """Returns the numbers of the machine's nodes, or {0} if the system does not list them."""
    try:
        text = _NODES.read_text()
    except OSError:
        return {0}
    nodes: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def node_of_gpu(device: torch.device) -> int:
    """Returns the number of the node nearest to a GPU, or CALLERS_NODE if the system does not say."""
    found: Any = torch.cuda.get_device_properties(device)
    address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    try:
        node = int((_PCI_DEVICES / address / "numa_node").read_text())
    except (OSError, ValueError):
        return CALLERS_NODE
    return node if node in online_nodes() else CALLERS_NODE
