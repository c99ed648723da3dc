"""Check compute shares of many kinds of programs with tests/integration/programs/busy.c.

Its kernels have a length by the device's own count of loops.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import Any, Optional

from tests.hardware import processes
from tests.hardware.place import CANNOT, TREE, Place
from tests.hardware.session import Result, Session, verdict

BUSY = TREE / "build" / "gpu" / "busy"
POINTS = 2.0  # maximum error of a share, in percentage points
LIMIT = 30
# workload -> options of busy
SHAPES: dict[str, dict[str, Any]] = {
    "kernels of 50 us": {"kernel": 50},
    "of 20 ms": {"kernel": 20000, "seconds": 2},
    "log-normal": {"kernel": "lognormal"},
    "a wait after each of 200 us": {"mode": "sync", "kernel": 200},
    "bursts": {"mode": "pause", "kernel": 200},
    "four streams": {"streams": 4, "kernel": 200},
}
SHORT = ("kernels of 50 us", "in two streams")
# Kernels that spin on the device until another one has run
PAIRS: dict[str, dict[str, Any]] = {
    "in two streams": {"mode": "pair", "seconds": 2},
    "in two processes": {"mode": "pair", "processes": 2, "seconds": 4},
}
PAIRS_LIMIT = 20  # a pair costs about 100 ms of device time, because it spins until the limiter admits both kernels
LEAST_DONE = 2  # launches: a debt of half a second for each is expected, a hang is not


def program(session: Session) -> str:
    """Return the path of the program. Raises Absent."""
    if not BUSY.exists():
        raise processes.Absent("build/gpu/busy was not compiled: no C compiler")
    copy = session.work / "busy"
    if not copy.exists():
        shutil.copy(BUSY, copy)
    return str(copy)


def share_of(said: dict[str, Any]) -> float:
    """Return device time per elapsed time. Raises Failed when a driver call failed."""
    if said["code"]:
        raise processes.Failed(f"busy: {said['failed']} gave {said['code']}")
    return float(said["done_ns"] / max(1, said["ended_ns"] - said["started_ns"]))


def busy(session: Session, place: Optional[Place], **options: Any) -> dict[str, Any]:
    """Return the report of one run, with `share`: device time per elapsed time. Raises Absent or Failed."""
    command = [program(session), *(f"{word}" for key, value in options.items() for word in (f"--{key}", value))]
    env = dict(os.environ)
    if session.machine.simhost and not place:
        env["LD_LIBRARY_PATH"] = str(session.machine.real["libcuda"].parent)
    code, out, err = processes.run(place.command(command) if place else command, session.deadline, env)
    if code == CANNOT:
        raise processes.Absent(f"no private mounts here ({err.strip()})")
    if not out.startswith("{"):
        raise processes.Failed(f"busy: ended with {code} {err.strip()[-200:]}")
    said: dict[str, Any] = json.loads(out)
    said["share"] = share_of(said)
    return said


def shapes(session: Session) -> Result:
    """Run programs of several kinds, each alone with a limit; a run without one shows that they would use more.

    If the time ends in between, the result is that of the kinds so far.
    """
    values: dict[str, Any] = {}
    wrong, left = [], []
    for name, options in SHAPES.items():
        if session.short and name not in SHORT:
            continue
        try:
            native = 100 * busy(session, None, **{"seconds": 1, **options})["share"]
            with session.place(compute_percent=LIMIT) as place:
                got = 100 * busy(session, place, **{"seconds": 1, **options})["share"]
        except processes.Failed as error:
            if not values:
                raise
            left.append(f"{name}: {error}")
            values[name] = {"failed": str(error), "stderr": error.stderr}
            continue
        values[name] = {"native_percent": native, "got_percent": got}
        if abs(got - LIMIT) > POINTS:
            wrong.append(f"{name}: {got:.2f} %")
    done = {name: value for name, value in values.items() if "got_percent" in value}
    note = ", ".join(f"{name}: {value['got_percent']:.2f} %" for name, value in done.items())
    note = f"limit {LIMIT} %: {', '.join(wrong) or note}"
    if left:
        note += f"; without a result: {'; '.join(left)}"
    return Result("missed" if wrong else "failed" if left else "held", note, values)


def pairs(session: Session) -> Result:
    """Run kernels that spin until another one has run while the limit holds both back:

    they must progress, if slowly.
    """
    values: dict[str, Any] = {}
    wrong = []
    for name, options in PAIRS.items():
        if session.short and name not in SHORT:
            continue
        with session.place(compute_percent=PAIRS_LIMIT) as place:
            options = {"kernel": 1000, **options}
            if session.short:
                options["seconds"] = 1
            said = busy(session, place, **options)
        values[name] = said
        if said["done"] < (1 if session.short else LEAST_DONE):
            wrong.append(f"{name}: only {said['done']} launches ended")
    note = ", ".join(
        f"{name}: {value['done']} launches done, the longest call took {value['longest_call_ns'] / 1e9:.1f} s"
        for name, value in values.items()
    )
    return verdict(wrong, note, values)
