"""What node-feature-discovery is told about this node: feature_file(node) -> the text of its feature file. Pure.

Source: node-feature-discovery's customization guide, "Local feature source": a line is `<namespace>/<name>=<value>`,
and a file whose name begins with a dot is not read, so a new one gets its name when it is complete. The numbers are
features and no labels (`+no-label`): the NodeFeatureRule in packaging/kubernetes makes an extended resource of them,
which is what the scheduler counts.
"""

from __future__ import annotations

from .dialects import is_among, usable_devices
from .model import Node
from .placement import capacity_bytes

FILE = "/etc/kubernetes/node-feature-discovery/features.d/gpushare"
MIB = 1 << 20


def grantable_mib(node: Node) -> int:
    """MiB that may be granted on all devices that policy allows together. A device of unknown size counts as 0."""
    allowed = node.config.policy.allowed_devices
    found = 0
    for device in usable_devices(node.inventory):
        if not allowed or is_among(device, allowed):
            found += capacity_bytes(device, node.config) // MIB
    return found


def feature_file(node: Node) -> str:
    """`gpushare.io/present` is a label, the rest is for rules."""
    mib = grantable_mib(node)
    devices = len(usable_devices(node.inventory))
    lines = [
        "# Written by `gpushare labels`.",
        f"gpushare.io/present={'true' if devices and mib else 'false'}",
        "# +no-label",
        f"gpushare.io/memory-mib={mib}",
        "# +no-label",
        f"gpushare.io/devices={devices}",
    ]
    return "\n".join(lines) + "\n"
