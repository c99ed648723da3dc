"""Volcano's GPU share: VOLCANO_GPU_ALLOCATED of VOLCANO_GPU_MEMORY_TOTAL; NVIDIA_VISIBLE_DEVICES names the device.

    read(values, inventory) -> ParsedRequest

Sources: Volcano's user guides "how to use gpu sharing" (VOLCANO_GPU_MEMORY_TOTAL=11178, VOLCANO_GPU_ALLOCATED=1024,
both in MB) and "how to use gpu number" (only VOLCANO_GPU_ALLOCATED=1: whole devices).
"""

from __future__ import annotations

from ...core.model import Inventory
from ...core.quantity import wrong
from ...core.quoting import setting
from .parsed_request import Limit, ParsedRequest, number
from .registry import Value

_MOST = 1 << 40


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    by_name = {one.name: one for one in values}
    allocated, total = by_name.get("VOLCANO_GPU_ALLOCATED"), by_name.get("VOLCANO_GPU_MEMORY_TOTAL")
    if allocated is None:
        return ParsedRequest("volcano")
    amount = number(allocated, 1, _MOST, "an amount of memory")
    if total is None:
        why = f"{setting(allocated.name, allocated.value)}: whole devices, as there is no VOLCANO_GPU_MEMORY_TOTAL"
        return ParsedRequest("volcano", (Limit(allocated),), ignored=(why,))
    of = number(total, 1, _MOST, "an amount of memory")
    if amount > of:
        raise wrong(allocated.name, allocated.value, f"more than {setting(total.name, total.value)}", "ask for less")
    return ParsedRequest("volcano", (Limit(allocated, part=(amount, of), beside=(total,)),))
