"""The variables of an MPS client: CUDA_MPS_PINNED_DEVICE_MEM_LIMIT, CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, ..._PRIORITY.

    read(values, inventory) -> ParsedRequest

Source: NVIDIA's documentation of MPS, "Environment Variables": `0=1G,1=512MB` by the ordinal that the client sees,
G and M 1024-based; a percentage may have decimals; priority 1 is below normal, 0.
"""

from __future__ import annotations

from ...core.model import Inventory
from ...core.quantity import wrong
from ...core.quoting import setting, shown
from .parsed_request import Limit, ParsedRequest, fraction, memory, number
from .registry import Value

_UNITS = {"m": 1 << 20, "mb": 1 << 20, "g": 1 << 30, "gb": 1 << 30}
_HINT = "write an amount for each device, such as 0=1G,1=512MB"


def _memory(one: Value) -> tuple[Limit, ...]:
    found: dict[int, Limit] = {}
    for item in one.value.split(","):
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not text.strip() or not (key.isascii() and key.isdigit()) or len(key) > 2 or int(key) in found:
            raise wrong(one.name, one.value, f"{shown(item)} is not an amount for one device", _HINT)
        found[int(key)] = Limit(one, int(key), memory(one, _UNITS, hint=_HINT, value=text))
    return (*found.values(), Limit(one))  # other devices have no limit


def _percent(one: Value) -> tuple[Limit, tuple[str, ...]]:
    top, bottom = fraction(one, "a percentage")
    if top > 100 * bottom or top < bottom:
        raise wrong(one.name, one.value, "not a percentage from 1 to 100", "write a number such as 50")
    rounded = (f"{setting(one.name, one.value)}: {top // bottom} % counts",) if top % bottom else ()
    return Limit(one, None, top // bottom if top < 100 * bottom else None), rounded


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    parsed = ParsedRequest("mps")
    for one in values:
        if one.name == "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT":
            parsed = parsed._replace(memory=_memory(one))
        elif one.name == "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE":
            limit, ignored = _percent(one)
            parsed = parsed._replace(compute=(limit,), ignored=parsed.ignored + ignored)
        elif one.name == "CUDA_MPS_CLIENT_PRIORITY":
            below = number(one, 0, 1, "a priority")
            why = f"{setting(one.name, one.value)}: gpushare has no priority below normal, so normal applies"
            parsed = parsed._replace(ignored=parsed.ignored + ((why,) if below else ()))
        else:
            why = f"{setting(one.name, one.value)}: gpushare enforces the limits itself, without an MPS daemon"
            parsed = parsed._replace(ignored=(*parsed.ignored, why))
    return parsed
