"""The configuration's `sharing`: equal shares, in 4paradigm's words or as NVIDIA's device plugin spells time-slicing.

    overrides(device_pattern), RESOURCES   JSON Schemas of the lists
    rules(at)   -> tuple[SharingRule, ...] dotted key -> value, checked against the schema; raises Wrong
    plain(rules) -> dict                   the same back, as the file would say it

Not on the start path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.errors import RequestError
from ..core.model import SharingRule
from ..request.dialects import conditions
from ..request.sharing import compute_percent

MAX_SPLIT = 100  # equal shares of compute are whole percent
SPLIT = {"type": "integer", "minimum": 0, "maximum": MAX_SPLIT}
SCALING = {"type": "number", "minimum": 0.01, "maximum": 16}
TIME_SLICING = "sharing.timeSlicing.resources"


def overrides(device_pattern: str) -> dict[str, Any]:
    """The schema of sharing.overrides."""
    return {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["split_count"],
            "properties": {
                "model": {"type": "string", "minLength": 1},
                "devices": {"type": "array", "minItems": 1, "items": {"type": "string", "pattern": device_pattern}},
                "split_count": SPLIT,
                "memory_scaling": SCALING,
                "cores_scaling": SCALING,
            },
        },
    }


# As in NVIDIA's device plugin, "Shared Access to GPUs"; it accepts no other `devices` than all either
RESOURCES = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "replicas"],
        "properties": {
            "name": {"enum": ["nvidia.com/gpu", "gpu"]},
            "rename": {"type": "string"},
            "devices": {"enum": ["all"]},
            "replicas": {"type": "integer", "minimum": 1, "maximum": MAX_SPLIT},
        },
    },
}


class Wrong(Exception):
    """`key` of the file, what is wrong with it, and what to do."""

    def __init__(self, key: str, problem: str, hint: str) -> None:
        super().__init__(problem)
        self.key, self.problem, self.hint = key, problem, hint


def _check(rule: SharingRule, key: str) -> SharingRule:
    for name, value in (("memory_scaling", rule.memory_scaling), ("cores_scaling", rule.cores_scaling)):
        if value != value:
            raise Wrong(f"{key}.{name}", '"NaN" is wrong', "expected a number")
    if rule.split_count and compute_percent(rule) < 1:
        raise Wrong(
            f"{key}.cores_scaling",
            f"{rule.cores_scaling:g} divided by a split_count of {rule.split_count} is less than 1% of compute",
            "share out more, or among fewer",
        )
    return rule


def _override(value: Mapping[str, Any]) -> SharingRule:
    key = "sharing.overrides"
    model, devices = value.get("model", ""), tuple(value.get("devices", ()))
    if not model and not devices:
        raise Wrong(key, "an entry without model and devices", "name one, or write split_count below sharing")
    if model:
        try:
            conditions.parse("model", model, [f"model={model}"])
        except RequestError as error:
            raise Wrong(key, error.message, error.hint) from None
    memory, cores = (float(value.get(name, 1.0)) for name in ("memory_scaling", "cores_scaling"))
    return _check(SharingRule(value["split_count"], memory, cores, model, devices), key)


def rules(at: Mapping[str, Any]) -> tuple[SharingRule, ...]:
    """The first that names a device counts: overrides, then what holds for all."""
    found = [_override(value) for value in at["sharing.overrides"]]
    resources: Sequence[Mapping[str, Any]] = at[TIME_SLICING]
    split: int = at["sharing.split_count"]
    if len(resources) > 1:
        raise Wrong(TIME_SLICING, f"{resources[0]['name']} is given twice", "keep one")
    if resources and split:
        raise Wrong("sharing.split_count", "and the replicas of timeSlicing say how many shares there are", "keep one")
    every = SharingRule(
        resources[0]["replicas"] if resources else split,
        float(at["sharing.memory_scaling"]),
        float(at["sharing.cores_scaling"]),
    )
    _check(every, "sharing")
    return (*found, every) if every.split_count else tuple(found)


def plain(found: Sequence[SharingRule]) -> dict[str, Any]:
    """Dotted key -> value; replicas are a split_count."""
    every = next((rule for rule in found if not rule.model and not rule.devices), SharingRule(0))
    return {
        "sharing.split_count": every.split_count,
        "sharing.memory_scaling": every.memory_scaling,
        "sharing.cores_scaling": every.cores_scaling,
        "sharing.overrides": [_plain(rule) for rule in found if rule.model or rule.devices],
        "sharing.timeSlicing.renameByDefault": False,
        "sharing.timeSlicing.failRequestsGreaterThanOne": False,
        TIME_SLICING: [],
    }


def _plain(rule: SharingRule) -> dict[str, Any]:
    which = {"model": rule.model, "devices": list(rule.devices)}
    much = {name: getattr(rule, name) for name in ("split_count", "memory_scaling", "cores_scaling")}
    return {**{name: value for name, value in which.items() if value}, **much}
