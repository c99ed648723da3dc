"""Aliyun PAI: AMP_VGPU_ENABLE=1 with GPU_MEM_PER_DEVICE (bytes) and GPU_UTIL_PER_DEVICE (percent).

    read(values, inventory) -> ParsedRequest

Without the first variable the others belong to an unrelated program.
"""

from __future__ import annotations

from ...core.model import Inventory
from .parsed_request import Limit, ParsedRequest, flag, memory, percent
from .registry import Value


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    parsed = ParsedRequest("pai")
    for one in values:
        if one.name == "GPU_MEM_PER_DEVICE":
            size = memory(one, {"": 1}, hint="write a number of bytes such as 4294967296")
            parsed = parsed._replace(memory=(Limit(one, size=size),))
        elif one.name == "GPU_UTIL_PER_DEVICE":
            parsed = parsed._replace(compute=(percent(one),))
        elif not flag(one):
            parsed = parsed._replace(off=((one, "everything"),))
    return parsed
