"""Equal shares, for containers that request a device without a limit. Pure; loaded only if the configuration has
`sharing`.

    rule_of(device, rules)   -> SharingRule | None    the first that names the device
    share_of(device, rule, kept) -> EqualShare        kept: bytes of the device that are reserved
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Optional

from ..core.errors import DeviceError
from ..core.model import Amount, Device, SharingRule
from ..gpu.selectors import device_name, is_among
from .dialects import conditions


class EqualShare(NamedTuple):
    """One of `split_count` shares."""

    memory: Amount
    compute_percent: int
    text: str  # "1 of 10"
    scaling: float = 1.0  # the whole share as a multiple of `memory`; above 1.0: oversubscribed


def _names(rule: SharingRule, device: Device) -> bool:
    if rule.devices and not is_among(device, rule.devices):
        return False
    if rule.model:
        return conditions.is_model(rule.model, device.model)
    return True


def rule_of(device: Device, rules: Iterable[SharingRule]) -> Optional[SharingRule]:
    found = next((rule for rule in rules if _names(rule, device)), None)
    return found if found is not None and found.split_count else None


def compute_percent(rule: SharingRule) -> int:
    """Return whole percent, rounded down, so that all shares together never exceed the device."""
    return min(100, int(100 * rule.cores_scaling) // rule.split_count)


def share_of(device: Device, rule: SharingRule, kept: int = 0) -> EqualShare:
    """Return S x M / K bytes in whole blocks and S / K of the time, for scaling S, memory M and K shares. If S is above
    1, M / K is on the device and the rest on the host. DeviceError while M is not known."""
    if not device.memory_bytes:
        raise DeviceError(
            f"device {device_name(device)} cannot be divided into equal shares: its memory size is not known",
            "run `gpushare refresh` when nvidia-smi works",
            "of unknown size",
        )
    whole = int(device.memory_bytes * rule.memory_scaling)
    size = min(whole, device.memory_bytes - kept) // rule.split_count
    size -= size % device.granularity_bytes
    scaling = whole / rule.split_count / size if rule.memory_scaling > 1 and size else 1.0
    text = f"1 of {rule.split_count}"
    return EqualShare(Amount(size, None, f"an equal share ({text})"), compute_percent(rule), text, scaling)
