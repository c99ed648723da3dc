"""Resolve the devices that a request names, as far as policy allows them. Pure (start path)."""

from __future__ import annotations

from typing import Optional

from ..core import constants
from ..core.errors import PolicyError
from ..core.model import Device, Node, Policy, Request
from ..gpu.selectors import device_name, find_devices, is_among, no_device, usable_devices


def denial(device: Device, policy: Policy) -> Optional[PolicyError]:
    allowed = policy.allowed_devices
    if not allowed or is_among(device, allowed):
        return None
    return PolicyError(
        f"device {device_name(device)} ({device.uuid}) is not among policy.allowed_devices",
        f"use {', '.join(allowed)}",
        "not among policy.allowed_devices",
    )


def named(request: Request, node: Node) -> tuple[Device, ...]:
    """Return the named devices in PCI order, in which the container counts them; all devices for `any`. `all` means
    all that policy allows; a named device that is not allowed is refused."""
    inventory, policy = node.inventory, node.config.policy
    selection = request.selection
    if not inventory.devices:
        raise no_device(inventory)
    devices = usable_devices(inventory)
    if selection.kind == "any":
        return devices
    if selection.kind == "list":
        text = ",".join(selection.names)
        found = (find_devices(constants.ENV_DEVICES, text, name, inventory) for name in selection.names)
        uuids = {device.uuid for some in found for device in some}
        devices = tuple(device for device in devices if device.uuid in uuids)
    denials = [denial(device, policy) for device in devices]
    denied = [error for error in denials if error]
    if denied and (selection.kind == "list" or len(denied) == len(devices)):
        raise denied[0]
    return tuple(device for device, error in zip(devices, denials) if error is None)
