"""Find device nodes for a request, besides the nodes of the granted GPUs (start path).

of_capabilities(root, capabilities, simulated) -> (nodes, missing names)
of_features(root, features, simulated)         -> (nodes, missing names)
of_imex(root, channels, simulated)             -> nodes       raises DeviceError
of_display(root, shares, capabilities, dev)    -> nodes       /dev/dri of the granted GPUs
of_cdi_device(inventory, device)               -> nodes       in the CDI entry of this device
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ..core.errors import DeviceError
from ..core.model import Device, Inventory, Share
from . import mig
from .driverroot import HostNode, listing, node, numbered
from .drivertable import CAPABILITIES, FEATURES, IMEX_DIR

Found = tuple[tuple[HostNode, ...], tuple[str, ...]]
# capability -> prefixes of DRM nodes: rendering needs no access to the screen
_DRM = {"graphics": ("renderD",), "display": ("renderD", "card")}


def _found(root: str, names: Iterable[str], simulated: bool) -> Found:
    """(nodes that exist, names of missing nodes)."""
    nodes = [(name, node(root, name, simulated)) for name in names]
    return tuple(one for _, one in nodes if one is not None), tuple(name for name, one in nodes if one is None)


def of_capabilities(root: str, capabilities: tuple[str, ...], simulated: bool) -> Found:
    """Control nodes of the capabilities."""
    return _found(root, (name for key in ("", *capabilities) for name in CAPABILITIES[key].nodes), simulated)


def of_features(root: str, features: tuple[str, ...], simulated: bool) -> Found:
    """Nodes of requested features; a pattern without a match counts as missing."""
    patterns = [pattern for feature in features for pattern in FEATURES[feature].nodes]
    names = [name for pattern in patterns for name in numbered(root, pattern) or (pattern.replace("#", "0"),)]
    return _found(root, names, simulated)


def of_imex(root: str, channels: tuple[str, ...], simulated: bool) -> tuple[HostNode, ...]:
    """IMEX channels, by number or all of the host. A requested channel that is missing raises DeviceError."""
    if "all" in channels:
        names = numbered(root, f"{IMEX_DIR}/channel#")
    else:
        names = tuple(f"{IMEX_DIR}/channel{channel}" for channel in channels)
    nodes, missing = _found(root, names, simulated)
    if missing:
        raise DeviceError(
            f"no IMEX channel /dev/{missing[0]} on this host", "make it with nvidia-modprobe -i, or leave it out"
        )
    return nodes


def of_display(root: str, shares: tuple[Share, ...], capabilities: tuple[str, ...], dev: str) -> tuple[HostNode, ...]:
    """DRM nodes of the granted GPUs, if the driver has made any (nvidia-drm is optional)."""
    wanted = tuple(prefix for key in capabilities for prefix in _DRM.get(key, ()))
    found = []
    for bus_id in dict.fromkeys(share.device.bus_id for share in shares):
        names = listing(os.path.join(root, "sys/bus/pci/devices", bus_id.lower(), "drm"))
        found += [node(dev, f"dri/{name}", False) for name in sorted(names) if name.startswith(wanted)]
    return tuple(one for one in found if one is not None)


def of_cdi_device(inventory: Inventory, device: Device) -> tuple[HostNode, ...]:
    """Nodes of the device, and control nodes of CUDA programs. () if a node of the device is missing or simulated: then
    only the hook gives access to it."""
    root, dev = inventory.root, inventory.dev_root
    first = None if inventory.simulated else node(dev, f"nvidia{device.minor}", False)
    if first is None:
        return ()
    try:
        parts = mig.nodes(root, mig.paths_of(device), False, dev) if device.parent else ()
    except DeviceError:
        return ()
    control, _ = of_capabilities(dev, ("compute",), False)
    return (first, *parts, *control)
