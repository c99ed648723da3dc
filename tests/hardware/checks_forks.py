"""Measure when the driver frees the memory of a process that has ended, and of which a forked child lives."""

from __future__ import annotations

import os
import signal
from typing import Any

from tests.hardware.processes import KILLED_WAIT_S
from tests.hardware.session import Result, Session, size

BYTES = 1 << 30
CASES = {"killed": False, "exited": True}


def forks(session: Session) -> Result:
    """Measure what stays of a process that was killed, and of one that exited."""
    values: dict[str, Any] = {name: left(session, exits) for name, exits in CASES.items()}
    note = ", ".join(
        f"{size(one['left_bytes'])} of {size(one['held_bytes'])} after it {n}" for n, one in values.items()
    )
    return Result("measured", note, values)


def left(session: Session, exits: bool) -> dict[str, int]:
    """Return the bytes of the device that the process held, and that are left after its end and after its child's."""
    idle = session.idle_bytes()
    with session.tenant("forked", bytes=BYTES, exits=exits) as tenant:
        child = tenant.receive()["child"]
        held = session.used_bytes() - idle
        tenant.go()
        tenant.process.wait(KILLED_WAIT_S)
        kept = session.idle_bytes() - idle
        os.kill(child, signal.SIGKILL)
        return {"held_bytes": held, "left_bytes": kept, "after_child_bytes": session.idle_bytes() - idle}
