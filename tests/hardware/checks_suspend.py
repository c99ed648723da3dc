"""Check whether the driver can suspend a process: its memory is free for another one, and comes back unchanged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.hardware.processes import Tenant
from tests.hardware.session import Result, Session, size, verdict
from tests.hardware.tenants.suspend import PIECE

GIB = 1 << 30
MOST, SHORT, SIMULATED = 20 * GIB, 4 * GIB, GIB // 4  # the simulator keeps the content in host memory
LOCK_MS = 10000
AFTER = {"Lock": "locked", "Checkpoint": "checkpointed", "Restore": "locked", "Unlock": "running"}


def pieces_of(session: Session) -> int:
    """Return how much to suspend: at most half of what is free on the device and on the host."""
    most = SIMULATED if session.machine.simhost else SHORT if session.short else MOST
    free = session.machine.total_bytes - session.idle_at_start_bytes
    host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(1, min(most, free // 2, host // 2) // PIECE)


class Suspension:
    """The calls for one process, with the results and the device's counts after each."""

    def __init__(self, session: Session, caller: Tenant, target: Tenant) -> None:
        self.session, self.caller, self.pid = session, caller, target.process.pid
        self.wrong: list[str] = []
        self.values: dict[str, Any] = {"calls": {}, "device": {"before": self.counts()}}

    def counts(self) -> dict[str, Any]:
        return {"used_bytes": self.session.used_bytes(), "process_bytes": self.session.process_bytes(self.pid)}

    def call(self, *operations: str) -> bool:
        """Return whether all of them succeeded."""
        for operation in operations:
            self.caller.go(
                operation=operation, pid=self.pid, **({"timeout_ms": LOCK_MS} if operation == "Lock" else {})
            )
            done = self.values["calls"][operation] = self.caller.receive()
            if done["code"] or done["state"] != AFTER[operation]:
                self.wrong.append(f"{operation} gave {done['code']} and the state {done['state'] or 'is unknown'}")
                return False
        return True


def suspend(session: Session) -> Result:
    """Suspend a program, let another one have the memory, resume the first, compare its memory."""
    with session.tenant("checkpointer") as caller:
        caller.receive()
        with session.tenant("patterned", pieces=pieces_of(session)) as target:
            filled = target.receive()
            steps = Suspension(session, caller, target)
            steps.values.update(filled)
            if steps.call("Lock", "Checkpoint"):
                steps.values["device"]["suspended"] = steps.counts()
                steps.values["neighbour_bytes"] = neighbour(session)
                if steps.call("Restore", "Unlock"):
                    steps.values["device"]["resumed"] = steps.counts()
                    target.go()
                    steps.values.update(target.receive())
    return judged(steps.values, steps.wrong, session.machine.total_bytes)


def neighbour(session: Session) -> int:
    """Return how much another program gets while the first is suspended."""
    with session.tenant("fill", way="plain", most_bytes=session.machine.total_bytes) as other:
        other.receive()
        other.go()
        got = int(other.receive()["got_bytes"])
    session.idle_bytes()
    return got


def judged(values: dict[str, Any], failed: Sequence[str], total_bytes: int) -> Result:
    """Judge the counts and the content, if no call failed, and add the rates to the values."""
    if failed:
        return verdict(failed, "", values)
    wrong, count = [], values["bytes"]
    before, suspended, resumed = (values["device"][when] for when in ("before", "suspended", "resumed"))
    freed, had = before["used_bytes"] - suspended["used_bytes"], total_bytes - before["used_bytes"]
    if freed < count:
        wrong.append(f"only {size(freed)} of {size(count)} became free")
    if suspended["process_bytes"] is not None:
        wrong.append("NVML lists the suspended process")
    if values["neighbour_bytes"] <= had:
        wrong.append(f"another program got only {size(values['neighbour_bytes'])}, and {size(had)} were free before")
    if values["wrong_pieces"]:
        wrong.append(f"{values['wrong_pieces']} of {count // PIECE} pieces have another content")
    note = f"{size(count)}: "
    for name in ("Checkpoint", "Restore"):
        seconds = values["calls"][name]["seconds"]
        rate = values[f"{name.lower()}_gib_s"] = count / GIB / max(1e-9, seconds)
        note += f"{name.lower()} {seconds:.2f} s ({rate:.1f} GiB/s), "
    note += f"device: {size(before['used_bytes'])} used, {size(suspended['used_bytes'])} while suspended, "
    note += f"{size(resumed['used_bytes'])} afterwards"
    return verdict(wrong, note, values)
