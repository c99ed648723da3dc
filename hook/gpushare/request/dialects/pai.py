"""Aliyun PAI: AMP_VGPU_ENABLE=1 with GPU_MEM_PER_DEVICE (bytes) and GPU_UTIL_PER_DEVICE (percent).

    read(said, inventory) -> Demand

A variable of these names without the first is somebody's program's.
"""

from __future__ import annotations

from ...core.model import Inventory
from .demand import Demand, Limit, flag, memory, percent
from .table import Said


def read(said: tuple[Said, ...], inventory: Inventory) -> Demand:
    demand = Demand("pai")
    for one in said:
        if one.name == "GPU_MEM_PER_DEVICE":
            size = memory(one, {"": 1}, hint="write a number of bytes such as 4294967296")
            demand = demand._replace(memory=(Limit(one, size=size),))
        elif one.name == "GPU_UTIL_PER_DEVICE":
            demand = demand._replace(compute=(percent(one),))
        elif not flag(one):
            demand = demand._replace(off=((one, "everything"),))
    return demand
