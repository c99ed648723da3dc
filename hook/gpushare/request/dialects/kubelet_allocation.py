"""Parse what kubelet chose for a container, from the variables of our device plugin (kubelet/offers.py).

Runs on the start path, only if there is such a variable.

    read(env)                             -> {GPUSHARE_DEVICES: ..., GPUSHARE_MEMORY: ..., GPUSHARE_COMPUTE: ...}
    combined(variable, pod, allocated)    -> {key: (name, value)}    with what the pod adds; raises if it contradicts
    with_ends(found, allocated)           -> the same with the annotations for memory request and limit

kubelet adds a plugin's variables to the pod's. Of two with the same name containerd keeps both, and CRI-O the last,
which is the pod's; of two resources kubelet takes the first. So each resource has a variable of its own, and other
variables of the pod must not contradict it.

kubelet chooses memory and compute separately, so compute is a number without a device: the container has it on the
devices of its memory. The pod may add a memory limit above kubelet's amount, which is the request, and conditions that
kubelet's device must meet (`any,model=A100`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Optional

from ...core import constants
from ...core.errors import RequestError
from ...core.quantity import amounts, percents, wrong
from ...core.quoting import setting, shown
from ...gpu.selectors import is_number
from . import Env, one_value

_ANY = ("", "any", "any:1")
_MOST_DIGITS = 4
_PRIMARY = (constants.ENV_ALLOCATED_MEMORY, constants.ENV_ALLOCATED_GPU)
_REQUEST, _LIMIT = constants.MEMORY_ENDS
Pair = tuple[str, str]  # (name, value)


def read(env: Env) -> dict[str, str]:
    """Parse `UUID=AMOUNT` or `UUID,UUID`, and what is beside it, into our variables. Raise RequestError."""
    given = {}
    for name in constants.ALLOCATED:
        value = one_value(name, [value for key, value in env if key == name])
        if value is not None:
            given[name] = value
    primary = [name for name in _PRIMARY if name in given]
    if len(primary) > 1:
        raise RequestError(f"{' and '.join(primary)}: a container can have one of these", "leave out a limit")
    if not primary:
        name, value = next(iter(given.items()))
        raise RequestError(f"{setting(name, value)}: kubelet gave no memory with it", "add the limit for memory")
    name, value = primary[0], given[primary[0]]
    items = [item.partition("=") for item in value.split(",")]
    uuids, sizes = [uuid for uuid, _, _ in items], [size for _, _, size in items]
    if not all(uuids) or len(set(uuids)) < len(uuids) or len({sign for _, sign, _ in items}) > 1:
        raise wrong(name, value, "not a value of gpushare k8s-plugin", "remove it: only kubelet sets it")
    found = {constants.ENV_DEVICES: ",".join(uuids)}
    if items[0][1]:
        found[constants.ENV_MEMORY] = _by_slot(sizes)
    if constants.ENV_ALLOCATED_COMPUTE in given:
        found[constants.ENV_COMPUTE] = _compute(given[constants.ENV_ALLOCATED_COMPUTE], len(items), name)
    wanted = given.get(constants.ENV_ALLOCATED_DEVICES)
    if wanted is not None and wanted != str(len(items)):
        raise RequestError(
            f"{setting(constants.ENV_ALLOCATED_DEVICES, wanted)}, and kubelet gave memory of {len(items)} devices",
            "ask for as many devices as the memory needs",
        )
    return found


def _by_slot(values: Sequence[str]) -> str:
    """One amount for all devices, or one for each. The plugin writes devices in the order in which they are counted."""
    return values[0] if len(set(values)) == 1 else ",".join(f"{slot}={one}" for slot, one in enumerate(values))


def _compute(text: str, devices: int, primary: str) -> str:
    """Divide the percent among the devices."""
    name = constants.ENV_ALLOCATED_COMPUTE
    if primary != constants.ENV_ALLOCATED_MEMORY:
        raise RequestError(
            f"{setting(name, text)} and {primary}: the configuration sets the compute of an equal share or whole GPU",
            "leave out the limit for compute",
        )
    if not is_number(text) or len(text) > _MOST_DIGITS:
        raise wrong(name, text, "not a value of gpushare k8s-plugin", "remove it: only kubelet sets it")
    part, rest = divmod(int(text), devices)
    if not 1 <= part + (rest > 0) <= 100 or not part:
        raise RequestError(
            f"{setting(name, text)}: not 1 to 100 percent of each of {devices} devices", "ask for other compute"
        )
    return _by_slot([str(part + (slot < rest)) for slot in range(devices)])


def _adds(variable: str, name: str, text: str, given: str) -> bool:
    """Compare with the pod's variable, whose amount may have other units and whose device may be `any`. Return whether
    it adds a memory limit or conditions. Raise RequestError if it contradicts."""
    adds = False
    if variable == constants.ENV_DEVICES:
        first, _, conditions = (part.strip() for part in text.partition(","))
        adds = bool(conditions) and first in (*_ANY[1:], f"any:{given.count(',') + 1}")
        same = adds or text.strip() in (*_ANY, f"any:{given.count(',') + 1}", given)
    elif variable == constants.ENV_COMPUTE:
        same = percents(name, text) == percents(variable, given)
    else:
        mine, theirs = amounts(name, text), amounts(variable, given)
        adds = any(one.ceiling is not None for _, one in mine)
        same = [(slot, one[:2]) for slot, one in mine] == [(slot, one[:2]) for slot, one in theirs]
    if not same:
        raise RequestError(
            f"{setting(name, text)}, and kubelet gave {shown(given)}: they contradict", f"leave out {name}"
        )
    return adds


def combined(
    variable: str, pod: Sequence[tuple[str, Optional[str]]], allocated: dict[str, str]
) -> Optional[dict[str, Pair]]:
    """Combine kubelet's value of a variable with the pod's: variable and annotation. Return nothing if kubelet has
    none. Conditions are under ENV_ALLOCATED_DEVICES. Raise RequestError."""
    given = allocated.get(variable)
    if given is None:
        for name, text in pod if variable == constants.ENV_MEMORY else ():
            _refuse_amount(name, text)
        return None
    found = {variable: (variable, given)}
    added = [(name, text) for name, text in pod if text is not None and _adds(variable, name, text, given)]
    if len(added) > 1 and added[0][1].strip() != added[1][1].strip():
        raise RequestError(f"{setting(*added[0])} and annotation {setting(*added[1])} contradict", "keep one of them")
    if added:
        found[constants.ENV_ALLOCATED_DEVICES if variable == constants.ENV_DEVICES else variable] = added[0]
    return found


def with_ends(found: Mapping[str, Pair], allocated: dict[str, str]) -> Mapping[str, Pair]:
    """Kubelet's amount is the request. A limit alone, in the annotation, is above that. Raise RequestError."""
    given = allocated.get(constants.ENV_MEMORY)
    for key in constants.MEMORY_ENDS:
        if key in found and given is None:
            _refuse_amount(*found[key])
    if given is None:
        return found
    if _REQUEST in found:
        _adds(constants.ENV_MEMORY, *found[_REQUEST], given)
    if _LIMIT not in found:
        return found
    whole = (constants.ENV_MEMORY, given)
    kept = {key: pair for key, pair in found.items() if (key, pair) != (constants.ENV_MEMORY, whole)}
    return {_REQUEST: whole, **kept}


def _refuse_amount(name: str, text: Optional[str]) -> None:
    """Raise RequestError for an amount beside an equal share: the configuration sets its size, and kubelet has promised
    the other shares of the device."""
    if text is not None:
        raise RequestError(
            f"{setting(name, text)} cannot be set: kubelet gave an equal share of a device, whose size is fixed",
            f"leave out {name}",
        )
