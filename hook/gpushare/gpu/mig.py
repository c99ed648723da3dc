"""List the kernel's MIG devices, and the capability nodes that open them (start path).

    instances(root)                     -> tuple[Instance, ...]   as listed in /proc/driver/nvidia/capabilities
    capability_paths(shares, access)    -> tuple[str, ...]        files below capabilities/ that a container keeps
    nodes(root, paths, simulated, dev)  -> tuple[HostNode, ...]   raises DeviceError for a missing node
    opened_by(root, minors, devices)    -> tuple[Device, ...]     devices that these capability nodes open

Opening a MIG device takes two nodes besides its GPU's: of its GPU instance and of its compute instance. Their minors
are in the `access` files and, for every possible instance, in /proc/driver/nvidia-caps/mig-minors.
Source: NVIDIA MIG user guide, "Device nodes and capabilities".
"""

import os
from typing import NamedTuple, Optional

from ..core.errors import DeviceError
from ..core.model import Device, Share
from .driverroot import HostNode, listing, node, short_read
from .drivertable import CAPS_DIR

CAPABILITIES = "proc/driver/nvidia/capabilities"
MINORS = "proc/driver/nvidia-caps/mig-minors"
RIGHTS = ("config", "monitor")
_MAX_MINORS_BYTES = 4 << 20


class Instance(NamedTuple):
    """One compute instance; `gpu_minor` as in /dev/nvidia<minor>."""

    gpu_minor: int
    gpu_instance: int
    compute_instance: int


def _numbers(path: str, prefix: str) -> list[int]:
    """The numbers in the names `<prefix><number>` of a directory."""
    rests = [name[len(prefix) :] for name in listing(path) if name.startswith(prefix)]
    return sorted(int(rest) for rest in rests if rest.isascii() and rest.isdigit())


def instances(root: str) -> tuple[Instance, ...]:
    """Every compute instance, in order."""
    base = os.path.join(root, CAPABILITIES)
    found = []
    for gpu in _numbers(base, "gpu"):
        for gi in _numbers(f"{base}/gpu{gpu}/mig", "gi"):
            found += [Instance(gpu, gi, ci) for ci in _numbers(f"{base}/gpu{gpu}/mig/gi{gi}", "ci")]
    return tuple(found)


def capability_paths(shares: tuple[Share, ...], access: tuple[str, ...]) -> tuple[str, ...]:
    """The `access` files of granted MIG devices, and of rights to configure or monitor MIG."""
    paths = [f"mig/{right}" for right in access]
    for device in (share.device for share in shares):
        if device.parent:
            paths += paths_of(device)
    return tuple(dict.fromkeys(paths))


def paths_of(device: Device) -> tuple[str, str]:
    """The capabilities of a MIG device, below CAPABILITIES."""
    instance = f"gpu{device.minor}/mig/gi{device.gpu_instance}"
    return f"{instance}/access", f"{instance}/ci{device.compute_instance}/access"


def _minor(root: str, path: str) -> Optional[int]:
    """The minor of one capability, from its own file, else from the table of all minors."""
    for line in (short_read(os.path.join(root, CAPABILITIES, path)) or "").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "DeviceFileMinor" and value.strip().isdigit():
            return int(value)
    wanted = path.replace("/mig/", "/").removeprefix("mig/")  # gpu0/mig/gi1/access is gpu0/gi1/access there
    for line in (short_read(os.path.join(root, MINORS), _MAX_MINORS_BYTES) or "").splitlines():
        name, _, value = line.partition(" ")
        if name == wanted and value.strip().isdigit():
            return int(value)
    return None


def nodes(root: str, paths: tuple[str, ...], simulated: bool, dev: str = "") -> tuple[HostNode, ...]:
    """The nodes of these capabilities. Every node is required: without one the device cannot be opened. `dev`: the
    root that has dev, if it is another one."""
    found = []
    for path in paths:
        minor = _minor(root, path)
        if minor is None:
            raise DeviceError(f"the driver has no MIG capability {path}", "run gpushare refresh")
        one = node(dev or root, f"{CAPS_DIR}/nvidia-cap{minor}", simulated)
        if one is None:
            raise DeviceError(
                f"/dev/{CAPS_DIR}/nvidia-cap{minor} ({path}) is not on this host",
                f"run nvidia-modprobe -f {os.path.join('/', CAPABILITIES, path)}",
            )
        found.append(one)
    return tuple(found)


def opened_by(root: str, minors: frozenset[int], devices: tuple[Device, ...]) -> Optional[tuple[Device, ...]]:
    """The MIG devices among `devices` whose nodes are all in /dev/nvidia-caps/nvidia-cap<minors>. None: no node is of a
    MIG device, so the nodes do not select any."""
    rights = {_minor(root, f"mig/{right}") for right in RIGHTS}
    if all(minor in rights for minor in minors):
        return None
    return tuple(device for device in devices if all(_minor(root, path) in minors for path in paths_of(device)))
