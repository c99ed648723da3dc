"""The state and the place of devices, as the kernel shows them below the driver root.

visible(root)               the driver root, or "/" if it is not in this pod
gone(root, devices)         -> {uuid: why no container can use the device now}
numa_nodes(root, devices)   -> {PCI bus id: NUMA node}
pcie_roots(root, devices)   -> {PCI bus id: PCIe root, "pci0000:00"}
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from ..core.errors import DeviceError
from ..core.model import Device
from ..gpu import inventory

_ROOT = re.compile(r"/devices/(pci[0-9a-f]{4,}:[0-9a-f]{2})/")


def visible(root: str) -> str:
    """If the driver root is not in the plugin's pod, as with an operator's driver, "/" serves as well: /proc and /sys
    are of the same kernel."""
    return root if os.path.isdir(root) else "/"


def gone(root: str, devices: Iterable[Device]) -> dict[str, str]:
    """{uuid: reason} of devices that no container can use now."""
    root = visible(root)
    try:
        inventory.driver_version(root)
    except DeviceError:
        return {one.uuid: "no driver is loaded" for one in devices}
    buses, mig = set(inventory.bus_ids(root)), set(inventory.mig_instances(root))
    found = {}
    for one in devices:
        instance = f"gpu{one.minor}/gi{one.gpu_instance}/ci{one.compute_instance}"
        if one.bus_id not in buses:
            found[one.uuid] = f"no GPU at {one.bus_id} any more"
        elif one.parent and instance not in mig:
            found[one.uuid] = "the MIG device is gone"
    return found


def numa_nodes(root: str, devices: Iterable[Device]) -> dict[str, int]:
    """{PCI bus id: NUMA node}, -1 if the kernel knows none."""
    found = {}
    for one in devices:
        try:
            with open(os.path.join(root, "sys/bus/pci/devices", one.bus_id, "numa_node"), encoding="ascii") as file:
                found[one.bus_id] = int(file.read())
        except (OSError, ValueError):
            found[one.bus_id] = -1
    return found


def pcie_roots(root: str, devices: Iterable[Device]) -> dict[str, str]:
    """{PCI bus id: its PCIe root}, without devices whose root the kernel does not show."""
    found = {}
    for one in devices:
        path = os.path.realpath(os.path.join(root, "sys/bus/pci/devices", one.bus_id))
        match = _ROOT.search(path + "/")
        if match is not None:
            found[one.bus_id] = match[1]
    return found
