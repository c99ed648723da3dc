"""Parse what a Kubernetes claim gives a container, from the variables of our DRA driver (integrations/dra/claims.py).

Runs on the start path, only if there is such a variable.

    read(env, inventory)                         -> {GPUSHARE_DEVICES: ..., GPUSHARE_MEMORY: ..., ...}
    combined(variable, pod, allocated)           -> {key: (name, value)}    raises if the pod contradicts
    with_ends(found, allocated)                  -> found                   raises if the pod has request or limit

Each allocated device has a variable of its own, because an engine keeps one value of a name:
`GPUSHARE_CLAIM_<claim's uid>_<number>=<device's uuid>;memory=4Gi;compute=30`. Two shares of one device are added,
since the scheduler counted both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Optional

from ...core import constants
from ...core.errors import DeviceError, RequestError
from ...core.model import Inventory
from ...core.quantity import amount_or_range, amounts, percents, unrounded, whole_percent, wrong
from ...core.quoting import setting, shown
from ...gpu.selectors import usable_devices
from . import Env, one_value

_ANY = tuple((constants.ENV_DEVICES, text) for text in ("", "any", "any:1"))
_MEMORY, _COMPUTE = "memory", "compute"
_ONCE = {"compute-mode": constants.ENV_COMPUTE_MODE, "priority": constants.ENV_PRIORITY}  # for all devices together
_HINT = "remove it: only gpushare dra sets it"
_COUNTED = (constants.ENV_MEMORY, constants.ENV_COMPUTE)  # no amount of the pod can be added to a claim's
Pair = tuple[str, str]  # (name, value)


class _Share(NamedTuple):
    """One variable. `memory`: request and limit in bytes; `compute` 0: no limit."""

    name: str
    uuid: str
    memory: tuple[int, int]
    compute: int
    once: dict[str, str]


def _parse(name: str, value: str) -> _Share:
    uuid, *items = value.split(";")
    fields = dict(item.partition("=")[::2] for item in items)
    if _MEMORY not in fields or len(fields) < len(items) or not fields.keys() <= {_MEMORY, _COMPUTE, *_ONCE}:
        raise wrong(name, value, "not a value of gpushare dra", _HINT)
    size = amount_or_range(name, fields[_MEMORY])
    if size.limit_bytes is None:
        raise wrong(name, value, "not a value of gpushare dra", _HINT)
    most = size.ceiling.limit_bytes if size.ceiling and size.ceiling.limit_bytes else size.limit_bytes
    compute = whole_percent(name, fields[_COMPUTE]) if _COMPUTE in fields else 0
    return _Share(name, uuid, (size.limit_bytes, most), compute, {key: fields[key] for key in _ONCE if key in fields})


def _by_slot(texts: list[str]) -> str:
    """One amount if all are equal, else one for each slot that has any."""
    if len(set(texts)) == 1:
        return texts[0]
    return ",".join(f"{slot}={text}" for slot, text in enumerate(texts) if text)


def _memory(shares: list[_Share]) -> str:
    request, limit = (sum(share.memory[end] for share in shares) for end in (0, 1))
    return unrounded(request) if request == limit else f"{unrounded(request)}..{unrounded(limit)}"


def _compute(shares: list[_Share]) -> str:
    percent = sum(share.compute for share in shares)
    return str(percent) if percent else ""


def _refuse_partial_compute(shares: list[_Share]) -> None:
    """Raise RequestError if some shares have a compute limit and others have none: slots cannot differ in that."""
    without = next((share.name for share in shares if not share.compute), None)
    limited = next((share.name for share in shares if share.compute), None)
    if without and limited:
        raise RequestError(
            f"{without} requests no compute, and {limited} does",
            "request compute for all devices of a container, or for none",
        )


def _once(shares: Iterable[_Share]) -> dict[str, str]:
    """The settings that a container has once, so its devices must not differ."""
    found: dict[str, tuple[str, str]] = {}
    for share in shares:
        for key in _ONCE:
            text = share.once.get(key, "")
            name, other = found.setdefault(key, (share.name, text))
            if text != other:
                raise RequestError(
                    f"{name} has {key} {shown(other)} and {share.name} has {shown(text)}: a container can have one",
                    "give all devices of a container the same parameters in the claim",
                )
    return {_ONCE[key]: text for key, (_, text) in found.items() if text}


def read(env: Env, inventory: Inventory) -> dict[str, str]:
    """Parse the variables of all claims into ours. Raise RequestError, or DeviceError for a device that is gone."""
    given: dict[str, list[str]] = {}
    for name, value in env:
        if name in constants.ALLOCATED:
            raise RequestError(f"{name} beside a claim: a container can have one of these", "leave out one of them")
        if name.startswith(constants.ENV_CLAIM_PREFIX):
            given.setdefault(name, []).append(value)
    shares = [_parse(name, one_value(name, values) or "") for name, values in given.items()]
    _refuse_partial_compute(shares)
    by_device: dict[str, list[_Share]] = {}
    for share in shares:
        by_device.setdefault(share.uuid, []).append(share)
    present = [device.uuid for device in usable_devices(inventory)]  # in the order of the slots
    gone = next((share for share in shares if share.uuid not in present), None)
    if gone is not None:
        raise DeviceError(f"{gone.name}: no device {shown(gone.uuid)}", "delete the pod, so that it gets another claim")
    uuids = [uuid for uuid in present if uuid in by_device]
    found = {
        constants.ENV_DEVICES: ",".join(uuids),
        constants.ENV_MEMORY: _by_slot([_memory(by_device[uuid]) for uuid in uuids]),
        constants.ENV_COMPUTE: _by_slot([_compute(by_device[uuid]) for uuid in uuids]),
        **_once(shares),
    }
    return {name: text for name, text in found.items() if text}


def _meaning(variable: str, name: str, text: str) -> object:
    if variable == constants.ENV_MEMORY:
        return [(slot, one[:2], one.ceiling and one.ceiling[:2]) for slot, one in amounts(name, text)]
    if variable == constants.ENV_COMPUTE:
        return percents(name, text)
    return text.strip().lower()


def combined(
    variable: str, pod: Sequence[tuple[str, Optional[str]]], allocated: dict[str, str]
) -> Optional[dict[str, Pair]]:
    """Compare the value of the claim with variable and annotation of the pod, in other units or with device `any`.
    Return nothing if the claim has none. Raise RequestError."""
    given = allocated.get(variable)
    for name, text in pod:
        if text is None:
            continue
        if given is None:
            if variable in _COUNTED:
                _refuse_amount(name, text)
        elif variable in _COUNTED and "," in allocated[constants.ENV_DEVICES]:
            devices = allocated[constants.ENV_DEVICES].count(",") + 1
            raise RequestError(
                f"{setting(name, text)} is one amount, and the claim has {devices} devices",
                f"leave out {name}: the claim has the amount of each device",
            )
        elif (variable, text.strip()) not in _ANY and _meaning(variable, name, text) != _meaning(variable, name, given):
            raise RequestError(
                f"{setting(name, text)}, and the claim has {shown(given)}: they contradict",
                f"leave out {name}, and request it in the claim",
            )
    return None if given is None else {variable: (variable, given)}


def with_ends(found: Mapping[str, Pair], allocated: dict[str, str]) -> Mapping[str, Pair]:
    """Raise RequestError if the pod has an annotation for memory request or limit: the claim has both."""
    for key in constants.MEMORY_ENDS:
        if key in found:
            _refuse_amount(*found[key])
    return found


def _refuse_amount(name: str, text: str) -> None:
    """Raise RequestError for an amount that the scheduler did not count."""
    raise RequestError(
        f"{setting(name, text)}, and the claim has none: the scheduler did not count it",
        f"leave out {name}, and request it in the claim",
    )
