"""NVIDIA_GPU_MEMORY_REQUEST and _LIMIT, and nvidia.com/container.<container>.gpu-memory.request and .limit.

    read(values, inventory) -> ParsedRequest

Sources: NVIDIA's container toolkit 1.20 (hook apply-cuda-memory-limits) reads both variables as whole MiB, for each
device; a limit alone is also the request. kai-gpu-fractioning: fractiond writes them, both always, from the annotations
of the pod, which hold Kubernetes quantities; it rounds up to MiB, and earlier releases (sharingd) wrote the plural and
counted 4096M as 4096. Its annotation gpus.devices has what it writes into NVIDIA_VISIBLE_DEVICES, and
gpu-compute.portion times 100, rounded and at least 1, is CUDA_MPS_ACTIVE_THREAD_PERCENTAGE.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

from ...core.errors import RequestError
from ...core.model import Inventory
from ...core.quantity import MAX_BYTES, human, wrong
from ...core.quoting import setting
from . import nvidia, parse_devices
from .parsed_request import Limit, ParsedRequest, fraction, number, quantity
from .registry import Value

_MIB, _MB = 1 << 20, 10**6
_MODES = ("time-slicing", "sm-sharing")
# The spellings of (request, limit); the first that occurs counts, and the others must agree
_SPELLINGS = (
    ("NVIDIA_GPU_MEMORY_REQUEST", "NVIDIA_GPU_MEMORY_LIMIT"),
    ("NVIDIA_GPU_MEMORY_REQUESTS", "NVIDIA_GPU_MEMORY_LIMITS"),
    ("gpu-memory.request", "gpu-memory.limit"),
)


class Ends(NamedTuple):
    """Request and limit in bytes, in one spelling. `values`: the values that set them; one can set both."""

    request: int
    limit: int
    values: tuple[Value, Value]


def _bytes(one: Value) -> int:
    if not one.is_scoped:
        return number(one, 1, MAX_BYTES // _MIB, "a number of MiB") * _MIB
    size = quantity(one, "write a quantity such as 4Gi")
    if size < _MIB:
        raise wrong(one.name, one.value, "less than 1 MiB", "write a quantity such as 4Gi")
    return size


def _ends(request: Optional[Value], limit: Optional[Value]) -> Optional[Ends]:
    low, high = request or limit, limit or request
    if low is None or high is None:
        return None
    found = Ends(_bytes(low), _bytes(high), (low, high))
    if found.limit < found.request:
        raise wrong(
            high.name, high.value, f"a limit below the request {setting(low.name, low.value)}", "set a larger limit"
        )
    return found


def _agree(one: Value, size: int, other: Value, other_size: int) -> bool:
    """Return whether two spellings have one amount. An annotation is exact, and its variable rounded."""
    if other.is_scoped and not one.is_scoped:
        return abs(size - other_size) < _MIB or size // _MIB == other_size // _MB
    return size == other_size


def _memory(by_key: dict[str, Value]) -> tuple[Limit, ...]:
    spelled = [_ends(by_key.get(low), by_key.get(high)) for low, high in _SPELLINGS]
    found = [ends for ends in spelled if ends is not None]
    if not found:
        return ()
    first = found[0]
    for other in found[1:]:
        for one, two, size, other_size in zip(first.values, other.values, first[:2], other[:2]):
            if not _agree(one, size, two, other_size):
                raise RequestError(
                    f"{setting(one.name, one.value)} is {human(size)} and {setting(two.name, two.value)} is "
                    f"{human(other_size)}: they contradict",
                    "leave one of them out",
                )
    values = tuple(dict.fromkeys(value for ends in found for value in ends.values))
    ceiling = first.limit if first.limit > first.request else None
    return (Limit(values[0], size=first.request, beside=values[1:], ceiling=ceiling),)


def _compute(one: Optional[Value]) -> tuple[Limit, ...]:
    if one is None:
        return ()
    top, bottom = fraction(one, "a portion of a device")
    if top > bottom:
        raise wrong(one.name, one.value, "more than one device", "write a portion such as 0.5")
    percent = max(1, (200 * top + bottom) // (2 * bottom))
    return (Limit(one, size=percent if percent < 100 else None),)


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    by_key = {one.key.name: one for one in values}
    mode, named = by_key.get("gpu-compute.mode"), by_key.get("gpus.devices")
    if mode is not None and mode.value.strip() not in _MODES:
        raise wrong(mode.name, mode.value, "unknown value", f"write {' or '.join(_MODES)}")
    devices = None
    if named is not None and named.value.strip():
        devices = parse_devices(named.name, nvidia.unqualified(named.value), inventory, any_allowed=False)
    return ParsedRequest(
        "nvidia-memory",
        _memory(by_key),
        _compute(by_key.get("gpu-compute.portion")),
        devices=devices,
        named=named,
        ignored=(f"{setting(mode.name, mode.value)}: gpushare itself enforces the limits",) if mode else (),
    )
