"""Run:ai and its KAI scheduler: GPU_PORTION, in older versions RUNAI_NUM_OF_GPUS; annotations gpu-fraction, gpu-memory.

    read(values, inventory) -> ParsedRequest

Sources: KAI's binder (plugins/gpusharing, common.SetGPUPortion) writes one portion such as 0.50 into both variables of
the container that shares a GPU, and NVIDIA_VISIBLE_DEVICES; its constants have the pod's annotations, of which
gpu-memory is in MiB. An annotation reaches every container of the pod, and the portion follows from it: where there is
a portion, it counts. Run:ai's documentation of dynamic fractions: RUNAI_GPU_MEMORY_LIMIT (0.75, or a quantity
such as 4G or 500000000) is the most that a container may take while others leave it, never less than its request.
"""

from __future__ import annotations

from ...core.errors import RequestError
from ...core.model import Inventory
from ...core.quantity import MAX_SLOTS, wrong
from ...core.quoting import setting
from .parsed_request import Limit, ParsedRequest, fraction, memory, number, percent, quantity
from .registry import KEYS, Value

_CEILING = "RUNAI_GPU_MEMORY_LIMIT"


def _quantity(one: Value) -> Limit:
    """Parse a fraction up to 1, or a Kubernetes quantity."""
    text = one.value.strip()
    if text == "1" or (not text.lstrip("0123456789.") and "." in text):
        return _part(one)
    return Limit(one, size=quantity(one, "write a quantity such as 4G, or 0.5"))


def _part(one: Value) -> Limit:
    top, bottom = fraction(one, "a fraction of a device")
    if top > bottom and (top % bottom or one.name == _CEILING or top // bottom > MAX_SLOTS):
        raise wrong(
            one.name,
            one.value,
            "more than one device, but not a whole number of devices",
            "write a fraction such as 0.5",
        )
    return Limit(one, part=(top, bottom)) if top < bottom else Limit(one)


def _whole(one: Value) -> int:
    """Parse a whole number: 2 means two devices without limits."""
    top, bottom = fraction(one, "a fraction of a device")
    return top // bottom


def _limit(one: Value) -> Limit:
    if one.name == "gpu-memory":
        return Limit(one, size=memory(one, {"": 1 << 20}, hint="write a number of MiB such as 2000"))
    return _quantity(one) if one.name == _CEILING else _part(one)


def _counts(limits: list[Limit]) -> tuple[Limit, ...]:
    """Return the portion of this container, else the pod's request, else its maximum. A request in MiB may exceed the
    maximum a little: older versions count in MB. Whole devices, a variable that an image can set, lift no request."""
    requests = [limit for limit in limits if limit.source.name in KEYS]
    is_limited = any(not limit.is_none for limit in requests)
    portions = [limit for limit in limits if limit.source.name not in (*KEYS, _CEILING)]
    portions = [limit for limit in portions if not (is_limited and limit.is_none)]
    ceiling = [limit for limit in limits if limit.source.name == _CEILING]
    if not portions and requests and ceiling and (ceiling[0].size or 0) < (requests[0].size or 0):
        return tuple(ceiling) if ceiling[0].size else tuple(requests)
    return tuple(portions or requests or ceiling)


def _compute(values: tuple[Value, ...]) -> tuple[Limit, ...]:
    found = tuple(percent(one) for one in values if one.name == "gpu-sm-percentage")
    cores = next((one for one in values if one.name == "gpu-sm-cores"), None)
    if cores is not None and not found:
        raise RequestError(
            f"{setting(cores.name, cores.value)}: a number of multiprocessors is not available in this version",
            "write gpu-sm-percentage",
        )
    return found


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    limits = [_limit(one) for one in values if one.key.about == "memory"]
    counts = _counts(limits)
    ignored = [
        f"{setting(limit.source.name, limit.source.value)}: {counts[0].source.name} overrides it"
        for limit in limits
        if limit not in counts
    ]
    devices = next((number(one, 1, 16, "a number") for one in values if one.name == "gpu-fraction-num-devices"), 0)
    devices = max([devices, *(_whole(limit.source) for limit in counts if limit.is_none)])
    return ParsedRequest("runai", counts, _compute(values), wanted=devices, ignored=tuple(ignored))
