"""Measure time slices and switches between contexts on the device's own clock.

A kernel that reads the clock without pause sees when another context had the device. The clock is the same for all
contexts, so what two programs saw fits together: a switch is the time from the last reading of one to the first reading
of the other.
"""

from __future__ import annotations

import bisect
import statistics
import time
from collections.abc import Sequence
from typing import Any, Optional

from tests.hardware.checks_compute import BARRIER_S, need_overlap
from tests.hardware.session import Result, Session

LEAST_US = 20  # shorter pauses of a kernel are not switches
BURST_US, BURST_PAUSE_MS = 200, 4.0
MOST_SHOWN = 40  # pauses of each program in the JSON file
Gap = Sequence[int]  # (last reading before, first after, ticks of the multiprocessor's clock), ns


def spread(values: Sequence[float]) -> Optional[dict[str, Any]]:
    """Return a distribution; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "p10": ordered[len(ordered) // 10],
        "median": ordered[len(ordered) // 2],
        "p90": ordered[len(ordered) * 9 // 10],
        "max": ordered[-1],
        "n": len(ordered),
    }


def switches(one: dict[str, Any], other: dict[str, Any]) -> list[int]:
    """Return how long each switch from `one` to `other` took while both had work.

    `one` lost the device at the start of each of its pauses, and `other` got it at the end of one of its own.
    """
    got = [gap[1] for gap in other["gaps"]]
    found = []
    for last, first, *_ in one["gaps"]:
        at = bisect.bisect_left(got, last)
        if at < len(got) and got[at] < first:
            found.append(got[at] - last)
    return found


def hand_overs(spinner: dict[str, Any], bursts: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Return how long it took to preempt a program for a burst, and to give the device back after the burst's end."""
    preempted, given_back = [], []
    gaps = spinner["gaps"]
    ends = [gap[1] for gap in gaps]
    for begin, end in bursts:
        at = bisect.bisect_left(ends, end)
        if at < len(gaps) and gaps[at][0] <= begin:
            preempted.append(begin - gaps[at][0])
            given_back.append(gaps[at][1] - end)
    return preempted, given_back


def pair(session: Session, wide: bool) -> list[dict[str, Any]]:
    """Run two programs that never stop on their own."""
    run_ms = 200 if session.short else 800
    shape: dict[str, Any] = {"run_ms": run_ms, "least_us": LEAST_US, "wide": wide}
    with session.tenant("slices", **shape) as one, session.tenant("slices", **shape) as other:
        for tenant in (one, other):
            tenant.receive()
        at = time.monotonic() + BARRIER_S
        for tenant in (one, other):
            tenant.go(at=at)
        programs = [tenant.receive() for tenant in (one, other)]
    need_overlap([{"from_s": program["begin"] / 1e9, "to_s": program["end"] / 1e9} for program in programs])
    return programs


def timeline(programs: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    """Return the first pauses of each program, from the first reading on: for models of the device."""
    first = min(program["begin"] for program in programs)
    return [[[at - first for at in gap[:2]] for gap in program["gaps"][:MOST_SHOWN]] for program in programs]


def slices(session: Session) -> Result:
    """Measure the device's time slice when two contexts have work, and the duration of a switch."""
    programs = pair(session, wide=False)
    gaps = [gap for program in programs for gap in program["gaps"]]
    ran = [right[0] - left[1] for program in programs for left, right in zip(program["gaps"], program["gaps"][1:])]
    values: dict[str, Any] = {"interruptions": len(gaps), "timeline_ns": timeline(programs)}
    if not ran:
        return Result("measured", f"{len(gaps)} interruptions: the contexts ran together, or in turn", values)
    waited = [gap[1] - gap[0] for gap in gaps]
    narrow = spread([*switches(*programs), *switches(*programs[::-1])])
    full = pair(session, wide=True)
    values.update(
        slice_ns=spread(ran),
        gap_ns=spread(waited),
        switch_ns=narrow["median"] if narrow else (statistics.median(waited) - statistics.median(ran)) / 2,
        switches_ns=narrow,
        full_switches_ns=spread([*switches(*full), *switches(*full[::-1])]),
        full_timeline_ns=timeline(full),
        ticks_per_gap_ns=statistics.median(gap[2] / (gap[1] - gap[0]) for gap in gaps),
        clock_step_ns=clock_step(gaps),
    )
    note = f"slices of {statistics.median(ran) / 1e6:.3f} ms, {values['switch_ns'] / 1e3:.0f} us between them"
    if values["full_switches_ns"]:
        note += f", {values['full_switches_ns']['median'] / 1e3:.0f} us with a full device"
    return Result("measured", note, values)


def clock_step(gaps: Sequence[Gap]) -> int:
    """Return the smallest difference between readings: how fine the device's clock is."""
    readings = sorted({reading for gap in gaps for reading in gap[:2]})
    return min((b - a for a, b in zip(readings, readings[1:])), default=0)


def handed_over(session: Session) -> Result:
    """Measure a preemption for short kernels of another context, and the hand-over once these are done."""
    run_s = 0.3 if session.short else 1.0
    with (
        session.tenant("slices", run_ms=int(run_s * 1000) + 300, least_us=LEAST_US) as spinner,
        session.tenant("bursts", kernel_us=BURST_US, pause_ms=BURST_PAUSE_MS, run_s=run_s) as burster,
    ):
        for tenant in (spinner, burster):
            tenant.receive()
        at = time.monotonic() + BARRIER_S
        for tenant in (spinner, burster):
            tenant.go(at=at)
        bursts = burster.receive()["bursts"]
        preempted, given_back = hand_overs(spinner.receive(), bursts)
    values: dict[str, Any] = {"bursts": len(bursts), "preempt_ns": spread(preempted), "idle_ns": spread(given_back)}
    values.update(preempt_each_ns=preempted[:MOST_SHOWN], idle_each_ns=given_back[:MOST_SHOWN])
    if not preempted:
        return Result("absent", f"none of {len(bursts)} short kernels interrupted the long one", values)
    note = f"preempting takes {statistics.median(preempted) / 1e3:.0f} us, "
    note += f"giving back after the end of the work {statistics.median(given_back) / 1e3:.0f} us"
    return Result("measured", note, values)
