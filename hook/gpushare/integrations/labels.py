"""Describe this node to node-feature-discovery: feature_file(node) -> the text of a feature file. Has no side effects.

Source: node-feature-discovery's customization guide, "Local feature source". A line is `<namespace>/<name>=<value>`. A
file whose name begins with a dot is not read, so that an incomplete file can have such a name. The numbers are features
but no labels (`+no-label`): the NodeFeatureRule in packaging/kubernetes makes an extended resource of them, which the
Kubernetes scheduler counts.

Labels of devices have the names and rules of NVIDIA's GPU feature discovery ("Generated Labels" in its README), under
gpushare's own prefix, so that both can run on a node:

    gpu.product   the model with hyphens for spaces, and "-SHARED" after it if a device has several replicas whose
                  resource has the usual name
    gpu.replicas  the number of replicas (`sharing.split_count`); 1: a share has the size that the container requests
    gpu.memory    in MiB, as NVML counts: with the part that the driver reserves
    gpu.count     the number of devices

If a node has different devices, NVIDIA's labels describe one of them. gpushare then writes gpu.count only, because a
pod that selects a product must not get another one.
"""

from __future__ import annotations

import re

from ..allocation.placement import capacity_bytes
from ..core.model import Device, Node
from ..gpu.selectors import is_among, usable_devices
from ..request import sharing

FILE = "/etc/kubernetes/node-feature-discovery/features.d/gpushare"
MIB = 1 << 20
_MAX_VALUE = 63  # characters in the value of a label: Kubernetes, "Labels and Selectors"
_SHARED = "-SHARED"


def _devices(node: Node) -> list[Device]:
    """The devices that policy allows."""
    allowed = node.config.policy.allowed_devices
    return [one for one in usable_devices(node.inventory) if not allowed or is_among(one, allowed)]


def grantable_mib(node: Node) -> int:
    """The sum of MiB that may be granted on all devices that policy allows. A device of unknown size counts as 0."""
    return sum(capacity_bytes(device, node.config) // MIB for device in _devices(node))


def product(model: str, replicas: int) -> str:
    """The value of gpu.product; "" if the model's name has no character that a label allows."""
    suffix = _SHARED if replicas > 1 else ""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "", "-".join(model.split()))
    plain = plain[: _MAX_VALUE - len(suffix)].strip("-_.")
    return plain + suffix if plain else ""


def device_labels(node: Node) -> dict[str, str]:
    """{name: value} of the labels that GPU feature discovery also has."""
    devices = _devices(node)
    found = {"gpu.count": str(len(devices))}
    rules = ((one, sharing.rule_of(one, node.config.sharing)) for one in devices)
    kinds = {
        (
            one.model,
            (one.memory_bytes + one.reserved_bytes) // MIB,
            rule.split_count if rule else 1,
            bool(rule and rule.resource),
        )
        for one, rule in rules
    }
    if len(kinds) != 1:
        return found
    ((model, mib, replicas, renamed),) = kinds
    name = product(model, 1 if renamed else replicas)
    found.update({"gpu.product": name} if name else {})
    found.update({"gpu.memory": str(mib)} if mib else {})
    return {**found, "gpu.replicas": str(replicas)}


def feature_file(node: Node) -> str:
    """The text of the feature file. `gpushare.io/present` and `device_labels` are labels; the rest is for rules."""
    mib = grantable_mib(node)
    devices = len(usable_devices(node.inventory))
    lines = [
        "# Written by `gpushare labels`.",
        f"gpushare.io/present={'true' if devices and mib else 'false'}",
        *(f"gpushare.io/{name}={value}" for name, value in device_labels(node).items()),
        "# +no-label",
        f"gpushare.io/memory-mib={mib}",
        "# +no-label",
        f"gpushare.io/devices={devices}",
    ]
    return "\n".join(lines) + "\n"
