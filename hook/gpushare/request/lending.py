"""Memory between a container's request and its limit. Pure.

    notes(request) -> lines    for explain and the log: which limits are not granted, and what is

A Request has both: Amount.limit_bytes or percent is the memory request, Amount.ceiling the limit above it. A container
may exceed its request only while the memory can be taken back. Nothing in this version can take memory back, so the
request is granted as the limit: never the other way round, since the requests of all containers fit on the device and
their limits do not.
"""

from __future__ import annotations

from ..core.model import Request


def notes(request: Request) -> tuple[str, ...]:
    """Return one line for each memory limit above its request."""
    return tuple(
        dict.fromkeys(
            f"memory {amount.text}: this version lends no memory, so the limit is the request "
            f"({amount.text.partition('..')[0]}, not {amount.ceiling.text})"
            for _, amount in request.memory
            if amount.ceiling is not None
        )
    )
