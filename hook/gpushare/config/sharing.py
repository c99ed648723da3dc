"""Parse `sharing` in the configuration: equal shares, with 4paradigm's keys or NVIDIA's keys for time-slicing.

    overrides(device_pattern), resources(device_pattern)   JSON Schemas of the lists
    rules(at)   -> rules, [Wrong]          from {dotted key: value} that matches the schema
    plain(rules) -> dict                   back to {dotted key: value}

Not on the start path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..core import constants
from ..core.errors import RequestError
from ..core.model import SharingRule
from ..request.dialects import conditions
from ..request.sharing import compute_percent

RENAMED = ".shared"  # after the name of the resource, as with NVIDIA's renameByDefault
MAX_SPLIT = 100  # equal shares of compute are whole percent
SPLIT = {"type": "integer", "minimum": 0, "maximum": MAX_SPLIT}
SCALING = {"type": "number", "minimum": 0.01, "maximum": 16}
TIME_SLICING = "sharing.timeSlicing.resources"
_NAME = "^([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$"  # of a resource


def overrides(device_pattern: str) -> dict[str, Any]:
    """The JSON Schema of sharing.overrides."""
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


def resources(device_pattern: str) -> dict[str, Any]:
    """The JSON Schema of TIME_SLICING. Source: NVIDIA's device plugin, "Shared Access to GPUs" and ReplicaDevices in
    api/config/v1, which also accepts a number of devices."""
    which = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": device_pattern}]},
    }
    return {
        "type": "array",
        "items": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "replicas"],
            "properties": {
                "name": {"enum": ["nvidia.com/gpu", "gpu"]},
                "rename": {"type": "string", "pattern": _NAME},
                "devices": {"anyOf": [{"enum": ["all"]}, which], "description": "all, or a list of indexes or uuids"},
                "replicas": {"type": "integer", "minimum": 1, "maximum": MAX_SPLIT},
            },
        },
    }


class Wrong(NamedTuple):
    """An error of `key` in the file, and what to do."""

    key: str
    problem: str
    hint: str


def _wrong(rule: SharingRule, key: str) -> Iterator[Wrong]:
    scalings = {"memory_scaling": rule.memory_scaling, "cores_scaling": rule.cores_scaling}
    nan = [name for name, value in scalings.items() if value != value]
    for name in nan:
        yield Wrong(f"{key}.{name}", '"NaN" is wrong', "expected a number")
    if not nan and rule.split_count and compute_percent(rule) < 1:
        yield Wrong(
            f"{key}.cores_scaling",
            f"{rule.cores_scaling:g} divided by a split_count of {rule.split_count} is less than 1% of compute",
            "raise cores_scaling or lower split_count",
        )


def _override(value: Mapping[str, Any]) -> SharingRule:
    memory, cores = (float(value.get(name, 1.0)) for name in ("memory_scaling", "cores_scaling"))
    return SharingRule(value["split_count"], memory, cores, value.get("model", ""), tuple(value.get("devices", ())))


def _wrong_override(rule: SharingRule, key: str) -> Iterator[Wrong]:
    if not rule.model and not rule.devices:
        yield Wrong(key, "an entry without model and devices", "name one, or write split_count below sharing")
    if rule.model:
        try:
            conditions.parse("model", rule.model, [f"model={rule.model}"])
        except RequestError as error:
            yield Wrong(key, error.message, error.hint)
    yield from _wrong(rule, key)


def _replicas(resources: Sequence[Mapping[str, Any]]) -> tuple[list[SharingRule], int, list[Wrong]]:
    """(rules of particular devices, replicas of all other devices or 0, errors) of NVIDIA's list."""
    found: list[SharingRule] = []
    every, wrong, taken = 0, [], set()
    for index, one in enumerate(resources):
        devices = one.get("devices", "all")
        names = () if devices == "all" else tuple(dict.fromkeys(map(str, devices)))
        for name in names or ("all",):
            if name in taken:
                what = f"device {name}" if names else one["name"]
                wrong.append(Wrong(f"{TIME_SLICING}[{index}]", f"{what} is given twice", "keep one"))
            taken.add(name)
        if names:
            found.append(SharingRule(one["replicas"], devices=names))
        else:
            every = every or one["replicas"]
    return found, every, wrong


def rules(at: Mapping[str, Any]) -> tuple[tuple[SharingRule, ...], list[Wrong]]:
    """(rules, errors). The first rule that matches a device applies: overrides first, then NVIDIA's entries with
    devices, then the rule for all devices."""
    found = [_override(value) for value in at["sharing.overrides"]]
    wrong = [one for index, rule in enumerate(found) for one in _wrong_override(rule, f"sharing.overrides[{index}]")]
    particular, replicas, more = _replicas(at[TIME_SLICING])
    found, wrong = found + particular, wrong + more
    split: int = at["sharing.split_count"]
    if replicas and split:
        problem = "the replicas of timeSlicing set the number of shares too"
        wrong.append(Wrong("sharing.split_count", problem, "keep one"))
    every = SharingRule(replicas or split, float(at["sharing.memory_scaling"]), float(at["sharing.cores_scaling"]))
    wrong += _wrong(every, "sharing")
    name = next((one["rename"] for one in at[TIME_SLICING] if one.get("rename")), "")
    name = name if "/" in name or not name else constants.ANNOTATION_PREFIX + name
    plugin = {
        "alone": at["sharing.timeSlicing.failRequestsGreaterThanOne"],
        "resource": name or (RENAMED if at["sharing.timeSlicing.renameByDefault"] else ""),
    }
    return tuple(one._replace(**plugin) for one in (*found, *([every] if every.split_count else []))), wrong


def plain(found: Sequence[SharingRule]) -> dict[str, Any]:
    """{dotted key: value} of the rules; replicas become a split_count, unless the resource has a name of its own."""
    every = next((rule for rule in found if not rule.model and not rule.devices), SharingRule(0))
    first = found[0] if found else every
    renamed = first.resource if first.resource != RENAMED else ""
    last = every if every.split_count else (found or (every,))[-1]
    resources = [{"name": "nvidia.com/gpu", "rename": renamed, "replicas": last.split_count}] if renamed else []
    if renamed and last.devices:
        resources[0]["devices"] = list(last.devices)
    return {
        "sharing.split_count": 0 if resources else every.split_count,
        "sharing.memory_scaling": every.memory_scaling,
        "sharing.cores_scaling": every.cores_scaling,
        "sharing.overrides": [
            _plain(one) for one in found if (one.model or one.devices) and not (renamed and one is last)
        ],
        "sharing.timeSlicing.renameByDefault": first.resource == RENAMED,
        "sharing.timeSlicing.failRequestsGreaterThanOne": first.alone,
        TIME_SLICING: resources,
    }


def _plain(rule: SharingRule) -> dict[str, Any]:
    which = {"model": rule.model, "devices": list(rule.devices)}
    much = {name: getattr(rule, name) for name in ("split_count", "memory_scaling", "cores_scaling")}
    return {**{name: value for name, value in which.items() if value}, **much}
