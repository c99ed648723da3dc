"""Check programs as users run them, each alone in a share: how fast is it compared with native speed?"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Optional

from tests.hardware import processes
from tests.hardware.checks_compute import BARRIER_S
from tests.hardware.session import Result, Session, verdict

PERCENT = 50
LEAST, MOST = 0.94, 1.1  # of the expected speed
UNPROFILED = (0.47, 1.0)  # of native speed, if it is not known how long the program uses the device


def measured(session: Session, tenant: processes.Tenant, run_s: float) -> float:
    """Return a program's steps per second."""
    settle_s, run_s = (0.1, 0.3) if session.short else (0.3, run_s)
    tenant.go(at=time.monotonic() + BARRIER_S, settle_s=settle_s, run_s=run_s)
    return float(tenant.receive()["per_s"])


def program(session: Session, name: str) -> Result:
    """Run a program natively and in a share of 50 %."""
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(session.place(compute_percent=PERCENT))
        native, inside = (
            stack.enter_context(processes.Tenant("program", session.deadline, one, name=name)) for one in (None, place)
        )
        ready = native.receive()
        inside.receive()
        before = measured(session, native, 1.0)
        charged, began = place.usage().buckets[0].busy_ns, time.monotonic()
        got = measured(session, inside, 2.5)
        charged = place.usage().buckets[0].busy_ns - charged
        charged_percent = 100 * charged / 1e9 / (time.monotonic() - began)
        speed = (before + measured(session, native, 1.0)) / 2
        native.go(profile=True)  # at last, because the profiler may slow the program
        profile = native.receive()
    if not speed:
        raise processes.Failed(f"{name}: the native program did no step in a second")
    values = {"native_per_s": speed, "got_per_s": got, "charged_percent": charged_percent, **ready, **profile}
    return judge(values, profile["kernels_s"])


def judge(values: dict[str, Any], kernels_s: Optional[float]) -> Result:
    """Return whether a program alone at 50 % is as fast as half of the device time allows.

    A program that natively uses the device for 80 % of the time is expected at 50 / 80 of its native speed.
    """
    ratio = values["got_per_s"] / values["native_per_s"]
    note = f"{PERCENT} %: {100 * ratio:.1f} % of native speed ({1e3 / max(values['native_per_s'], 1e-9):.1f} ms a step)"
    wrong = []
    if kernels_s:
        busy = min(1.0, kernels_s * values["native_per_s"])
        expected = min(1.0, PERCENT / 100 / busy)
        device = 100 * kernels_s * values["got_per_s"]
        note += f", {device:.1f} % of the device time; natively it uses {100 * busy:.0f} %, so {100 * expected:.0f} %"
        note += " is possible"
        values.update(native_device_percent=100 * busy, device_percent=device, expected_ratio=expected)
        if not LEAST * expected <= ratio <= MOST * expected:
            wrong.append(note)
    elif not UNPROFILED[0] <= ratio <= UNPROFILED[1]:
        wrong.append(note)
    note += f"; charged {values['charged_percent']:.1f} %"
    return verdict(wrong, note, {**values, "ratio": ratio})
