"""HAMi and Volcano's vGPU: CUDA_DEVICE_MEMORY_LIMIT[_n], CUDA_DEVICE_SM_LIMIT[_n] and what goes with them.

    read(values, inventory) -> ParsedRequest

Sources: HAMi's device plugin (nvinternal/plugin/server.go, Allocate) writes `3000m` for each device and one
CUDA_DEVICE_SM_LIMIT; HAMi-core (multiprocess_memory_limit.c, get_limit_from_env) reads them: k, m and g are 1024-based,
a number for one device wins over the one for all, and a limit on multiprocessors of 0 is none. With
deviceMemoryScaling above 1 the plugin sets CUDA_OVERSUBSCRIBE, and limits add up to so many times the device. KAI and
Koordinator's koordlet write the same for HAMi-core, without a number.
"""

from __future__ import annotations

from ...core.model import Inventory
from ...core.quantity import wrong
from .parsed_request import BINARY, Beyond, Limit, ParsedRequest, flag, memory, number, percent
from .registry import Value

_UNITS = {unit: size for unit, size in BINARY.items() if unit != "t"}
_POLICIES = ("default", "force", "disable")


def read(values: tuple[Value, ...], inventory: Inventory) -> ParsedRequest:
    parsed = ParsedRequest("hami")
    for one in values:
        stem = one.key.name
        if stem == "CUDA_DEVICE_MEMORY_LIMIT":
            size = memory(one, _UNITS, hint="write a number with k, m or g, such as 3000m")
            parsed = parsed._replace(memory=(*parsed.memory, Limit(one, one.number, size)))
        elif stem == "CUDA_DEVICE_SM_LIMIT":
            parsed = parsed._replace(compute=(*parsed.compute, percent(one, one.number)))
        elif stem == "CUDA_TASK_PRIORITY":
            parsed = parsed._replace(priority=0 if number(one, 0, 1, "a priority") else 1, prioritised=one)
        elif stem == "CUDA_OVERSUBSCRIBE" and flag(one):
            parsed = parsed._replace(beyond=(Beyond(one),))
        elif stem == "CUDA_DISABLE_CONTROL" and flag(one):
            parsed = parsed._replace(off=(*parsed.off, (one, "everything")))
        elif stem == "GPU_CORE_UTILIZATION_POLICY":
            if one.value.strip().lower() not in _POLICIES:
                raise wrong(one.name, one.value, "unknown value", f"write {', '.join(_POLICIES)}")
            if one.value.strip().lower() == "disable":
                parsed = parsed._replace(off=(*parsed.off, (one, "compute")))
    return parsed
