"""Check the rate limiter's assumption about probe events (shim/limiter/probe.c).

An event in an empty stream is done as soon as the device is given to its context, so a late event shows when the
context's residency began.

Two real processes run: a neighbour with back-to-back kernels of 2 ms, and one that probes. The probing process also has
short kernels with an event after each, as a limited program would have work. Their timestamps show, independently of
the probes, when it had the device. A residency of the neighbour is the time between two of them; its end is known to
within the length of a kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import shutil
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.hardware import checks_driver as driver
from tests.hardware import processes
from tests.hardware.checks_compute import BARRIER_S
from tests.hardware.session import Result, Session, interval

NEIGHBOUR_US, OWN_US = 2000, 100
QUEUED_US = 2000
SLICE_NS = 2_000_000  # used if this device's slice was not measured
PROMPT_NS = 45_000  # the rate limiter takes a probe below this for one that did not wait
EDGE_NS = 60_000  # accuracy of converting timestamps to the host's clock
MOST_OF = 0.9  # fraction of the probes that must behave as assumed
LEAST = 5  # residencies of the neighbour with a probe in them: fewer prove nothing
Event = Sequence[int]  # recorded (host), timestamp (device), seen (host); ns


class Told(NamedTuple):
    """Probes recorded in a residency of the neighbour, counted by when they were done."""

    early: int  # during the residency
    told: int  # as the own residency began
    late: int  # after own work was done in the own residency


def offset(events: Sequence[Event]) -> int:
    """Return the offset from a timestamp to host time: no event is done before it is recorded, and some do not wait."""
    return max(recorded - stamp for recorded, stamp, _ in events)


def waited(looks: Sequence[Event]) -> list[int]:
    """Return how long each probe waited by the timestamps, relative to the one that waited least."""
    by = offset(looks)
    return sorted(stamp + by - recorded for recorded, stamp, _ in looks)


def spread(values: Sequence[int], slice_ns: int) -> dict[str, Any]:
    """Return a distribution, brief enough for a table."""
    values = sorted(values)
    return {
        "n": len(values),
        "p50_ns": values[len(values) // 2],
        "p90_ns": values[len(values) * 9 // 10],
        "max_ns": values[-1],
        "beyond_half_a_slice": sum(value > slice_ns / 2 for value in values) / len(values),
    }


def told(kernels: Sequence[Event], looks: Sequence[Event], slice_ns: int, kernel_ns: int) -> Told:
    """Count the probes in residencies of the neighbour.

    `kernels`: of the own stream, in order. A residency of the neighbour counts if the next kernel was queued before the
    preceding one was done.
    """
    by = offset([*kernels, *looks])
    stamps = [stamp for _, stamp, _ in looks]
    early = at_once = late = 0
    for (_, last, _), (recorded, following, _) in zip(kernels, kernels[1:]):
        if following - last < slice_ns / 2 + kernel_ns or recorded > last + by:
            continue
        from_ns, to_ns = last + kernel_ns, following - kernel_ns  # in between the neighbour certainly had the device
        for look in looks[bisect.bisect_left(stamps, last) :]:
            recorded_ns, stamp = look[0] - by, look[1]
            if recorded_ns >= to_ns:
                break
            if stamp > following + EDGE_NS:
                late += recorded_ns >= last
            elif stamp >= to_ns - EDGE_NS:
                at_once += recorded_ns >= last
            else:
                early += recorded_ns >= from_ns
    return Told(early, at_once, late)


def judge(alone: Sequence[int], seen: Told) -> tuple[bool, str]:
    """Return whether the assumption holds, and a sentence about it. `alone`: waits while only own work was there."""
    prompt = sum(one <= PROMPT_NS for one in alone) / len(alone)
    total = sum(seen)
    words = []
    if prompt < MOST_OF:
        words.append(f"alone only {100 * prompt:.0f} % are done within {PROMPT_NS // 1000} us: they wait for own work")
    if total < LEAST:
        words.append(f"only {total} probes were recorded in a residency of the neighbour")
    elif seen.early > (1 - MOST_OF) * total:
        words.append(f"{seen.early} of {total} were done while the neighbour had the device")
    elif seen.told < MOST_OF * total:
        words.append(f"{seen.late} of {total} were done later than own work of that residency")
    if words:
        return False, "does NOT hold: " + "; ".join(words)
    return True, f"holds: {seen.told} of {total} probes in a residency of the neighbour were done as the own one began"


def lost(without: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Return the percentage of speed that the neighbour lost, from paired runs."""
    mean, low, high = interval([100 * (1 - after / before) for before, after in zip(without, beside)])
    return {"percent": mean, **({"ci95": [low, high]} if len(beside) > 1 else {})}


def cost(session: Session) -> dict[str, Any]:
    """Measure the processor time of one probe (record and query) in nanoseconds, natively with the compiled program."""
    if not driver.LATENCY.exists():
        return {}
    program = session.work / "latency"
    shutil.copy(driver.LATENCY, program)
    said = driver.answer([str(program), session.machine.libcuda, "look"], session.deadline)
    return dict(said["look"])


class Pair:
    """The probing process and its neighbour."""

    def __init__(self, session: Session, stack: contextlib.ExitStack) -> None:
        shapes = [session.ask("calibrate", kernel_us=one) for one in (NEIGHBOUR_US, OWN_US)]
        self.neighbour = stack.enter_context(session.tenant("work", kernel_us=NEIGHBOUR_US, **shapes[0]))
        self.prober = stack.enter_context(session.tenant("looks", kernel_us=OWN_US, **shapes[1]))
        self.settle_s, self.run_s = (0.05, 0.25) if session.short else (0.1, 0.5)
        for tenant in (self.neighbour, self.prober):
            tenant.receive()

    def run(self, neighbour: bool = True, works: bool = True, looks: bool = True) -> tuple[dict[str, Any], float]:
        """Return the probing process's report, and the neighbour's kernels per second."""
        at = time.monotonic() + BARRIER_S
        if neighbour:
            self.neighbour.go(at=at, settle_s=self.settle_s, run_s=self.run_s)
        self.prober.go(at=at, run_s=self.settle_s + self.run_s, works=works, looks=looks)
        said: dict[str, Any] = self.prober.receive()
        return said, float(self.neighbour.receive()["per_s"]) if neighbour else 0.0


def looks(session: Session) -> Result:
    """Probe alone and beside the neighbour, with and without own work; then measure what the probes cost each."""
    slice_ns = session.machine.slices_ns[0] or SLICE_NS
    with contextlib.ExitStack() as stack:
        pair = Pair(session, stack)
        alone, _ = pair.run(neighbour=False)
        idle, beside_idle = pair.run(works=False)
        runs = [(pair.run(looks=False)[1], *pair.run()) for _ in range(1 if session.short else 2)]
        _, before = pair.run(works=False, looks=False)
    said = [one for _, one, _ in runs]
    if not all(one["looks"] for one in (alone, idle, *said)) or not all(speed for speed, _, _ in runs):
        raise processes.Failed("looks: a process did no work")
    ends = [stamp for _, stamp, _ in alone["kernels"]]
    kernel_ns = int(statistics.median(b - a for a, b in zip(ends, ends[1:])))
    seen = Told(*map(sum, zip(*(told(one["kernels"], one["looks"], slice_ns, kernel_ns) for one in said))))
    waits = {
        "alone_with_work": waited(alone["looks"]),
        "beside_without_work": waited(idle["looks"]),
        "beside_with_work": sorted(wait for one in said for wait in waited(one["looks"])),
    }
    holds, words = judge(waits["alone_with_work"], seen)
    took = cost(session)
    disturbed = lost([speed for speed, _, _ in runs], [speed for _, _, speed in runs])
    values: dict[str, Any] = {
        "holds": holds,
        "slice_ns": slice_ns,
        "kernel_ns": kernel_ns,
        "waited": {name: spread(one, slice_ns) for name, one in waits.items()},
        "beside_with_work_seen": spread([late - first for one in said for first, _, late in one["looks"]], slice_ns),
        "in_a_turn_of_the_neighbour": seen._asdict(),
        "cost": took,
        "neighbour_lost": disturbed,
        "neighbour_lost_to_looks_without_work": lost([before], [beside_idle]),
    }
    company = values["waited"]["beside_with_work"]
    note = (
        f"that a probe waits for the own residency {words}; p50 {company['p50_ns'] / 1e3:.0f} us, "
        f"p90 {company['p90_ns'] / 1e3:.0f}, max {company['max_ns'] / 1e3:.0f}, "
        f"{100 * company['beyond_half_a_slice']:.0f} % beyond half a slice; "
        + (f"one takes {took['median_ns']} ns, " if took else "")
        + f"the neighbour's speed changes by {-disturbed['percent']:+.1f} %"
    )
    return Result("measured", note, values)


def queues(session: Session) -> Result:
    """Count the streams that share a queue of the device with an empty stream of their priority, or of the highest."""
    shape = session.ask("calibrate", kernel_us=QUEUED_US)
    values: dict[str, Any] = session.ask("queues", kernel_us=QUEUED_US, **shape)
    delayed, (least, highest) = values["delayed"], values["priorities"]
    if not values["itself"]:
        raise processes.Failed("queues: the timestamps of one stream are not in order")
    note = f"of {values['streams']} streams of default priority, {delayed['same']} delay an event in an empty stream "
    note += f"of that priority, and {delayed['highest']} one of priority {highest} ({least} to {highest})"
    return Result("measured", note, values)
