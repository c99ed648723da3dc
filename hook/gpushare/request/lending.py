"""Memory between a container's request and its limit: why a configuration lends none. Pure.

    refusal(config)        -> str      "" if the configuration lets this node lend memory
    notes(request, config) -> lines    for explain and the log: which limits are not granted, and what is
    line(amount, why)      -> str      one of them

A Request has both: Amount.limit_bytes or percent is the memory request, Amount.ceiling the limit above it. A container
may exceed its request only while the memory can be taken back. Elsewhere the request is granted as the limit: never the
other way round, since the requests of all containers fit on the device and their limits do not. allocation/lending.py
decides for a device.
"""

from __future__ import annotations

from ..core import constants
from ..core.model import Amount, Config, Request
from ..core.quantity import described


def refusal(config: Config) -> str:
    """Return why this configuration lends no memory."""
    mode = config.policy.lending
    if mode == constants.MOVABLE and not config.host_memory:
        return "policy.lending is movable, and oversubscription.host_memory gives no memory to move to"
    return "policy.lending is off" if mode == constants.NO_LENDING else ""


def line(amount: Amount, why: str) -> str:
    """Return the note about a limit that is not granted."""
    assert amount.ceiling is not None
    text = described(amount)
    request, _, limit = text.partition("..")
    return f"memory {text}: {why}, so the limit is the request ({request}, not {limit})"


def notes(request: Request, config: Config) -> tuple[str, ...]:
    """Return one line for each memory limit above its request that this configuration does not grant."""
    why = refusal(config)
    above = [amount for _, amount in request.memory if amount.ceiling is not None]
    return tuple(dict.fromkeys(line(amount, why) for amount in above)) if why else ()
