"""Parse what kubelet chose for a container, from the variables of our device plugin (kubelet/offers.py).

Runs on the start path, only if there is such a variable.

    read(env)                                 -> {GPUSHARE_DEVICES: ..., GPUSHARE_MEMORY: ...}
    refuse_other(variable, name, text, given)    raise for a contradicting variable of the pod
    refuse_amount(name, text)                    raise for an amount beside an equal share of kubelet

kubelet adds a plugin's variables to the pod's. Of two with the same name containerd keeps both, and CRI-O the last,
which is the pod's; of two resources kubelet takes the first. So each resource has a variable of its own, and other
variables of the pod must not contradict it."""

from __future__ import annotations

from typing import Optional

from ...core import constants
from ...core.errors import RequestError
from ...core.quantity import amounts, wrong
from ...core.quoting import setting, shown
from . import Env, one_value

FIXED = (constants.ENV_MEMORY,)  # no amount of the pod can be added to an equal share
_ANY = ("", "any", "any:1")


def read(env: Env) -> dict[str, str]:
    """Parse `UUID=AMOUNT` or `UUID,UUID` into our variables. Raise RequestError."""
    given = {}
    for name in constants.ALLOCATED:
        value = one_value(name, [value for key, value in env if key == name])
        if value is not None:
            given[name] = value
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)}: a container has one of these resources", "leave out a limit")
    ((name, value),) = given.items()
    items = [item.partition("=") for item in value.split(",")]
    sizes = {amount for _, sign, amount in items if sign}
    if len(sizes) > 1 or not all(uuid for uuid, _, _ in items):
        raise wrong(name, value, "not a value of gpushare k8s-plugin", "leave it to kubelet")
    found = {constants.ENV_DEVICES: ",".join(uuid for uuid, _, _ in items)}
    if sizes:
        found[constants.ENV_MEMORY] = sizes.pop()
    return found


def refuse_other(variable: str, name: str, text: Optional[str], given: str) -> None:
    """Compare with the pod's variable, whose amount may have other units and whose device may be `any`. Raise
    RequestError."""
    if text is None:
        return
    if variable == constants.ENV_DEVICES:
        same = text.strip() in (*_ANY, given)
    else:
        mine, theirs = amounts(name, text), amounts(variable, given)
        same = [(slot, one[:2], one.ceiling) for slot, one in mine] == [(slot, one[:2], None) for slot, one in theirs]
    if not same:
        raise RequestError(
            f"{setting(name, text)}, and kubelet gave {shown(given)}: they contradict", f"leave out {name}"
        )


def refuse_amount(name: str, text: Optional[str]) -> None:
    """Raise RequestError for an amount beside an equal share: the configuration sets its size, and kubelet has promised
    the other shares of the device."""
    if text is not None:
        raise RequestError(
            f"{setting(name, text)} cannot be set: kubelet gave an equal share of a device, whose size is fixed",
            f"leave out {name}",
        )
