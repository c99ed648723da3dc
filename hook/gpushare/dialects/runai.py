"""Run:ai and its KAI scheduler: GPU_PORTION, in older versions RUNAI_NUM_OF_GPUS; annotations gpu-fraction, gpu-memory.

    read(said, inventory) -> Demand

Sources: KAI's binder (plugins/gpusharing, common.SetGPUPortion) writes one portion such as 0.50 into both variables of
the container that shares a GPU, and NVIDIA_VISIBLE_DEVICES; the pod's annotation gpu-memory is in MiB. An annotation
reaches every container of the pod, and the portion follows from it: where there is a portion, it is what counts.
"""

from __future__ import annotations

from ..model import Inventory
from ..quantity import shown
from .demand import Demand, Limit, fraction, memory
from .table import KEYS, Said


def _limit(one: Said) -> Limit:
    if one.name == "gpu-memory":
        return Limit(one, size=memory(one, {"": 1 << 20}, hint="write a number of MiB such as 2000"))
    top, bottom = fraction(one, "a fraction of a device")
    return Limit(one, part=(top, bottom)) if top < bottom else Limit(one)


def read(said: tuple[Said, ...], inventory: Inventory) -> Demand:
    limits = [_limit(one) for one in said]
    variables = [limit for limit in limits if limit.said.name not in KEYS]
    why = f"{variables[0].said.name} says it for this container" if variables else ""
    ignored = [f"{one.name}={shown(one.value)}: {why}" for one in said if variables and one.name in KEYS]
    return Demand("runai", tuple(variables or limits), ignored=tuple(ignored))
