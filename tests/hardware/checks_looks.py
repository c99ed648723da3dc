"""What the compute law takes for granted of events in an empty stream (shim/limiter/probe.c): one is done as soon as
the device is its own context's, so that a late one tells when the own turn began.

Two real processes: a neighbour with kernels of 2 ms one behind the other, and one that looks. The looking one has short
kernels with an event behind each as well, as whoever looks has work: their stamps say, without looks, when it had the
device. A turn of the neighbour is a stretch between two of them; what is known of its end is the length of a kernel.
"""

from __future__ import annotations

import bisect
import contextlib
import shutil
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.hardware import checks_driver as driver
from tests.hardware import processes
from tests.hardware.session import Result, Session, interval

NEIGHBOUR_US, OWN_US = 2000, 100
SLICE_NS = 2_000_000  # where this device's are not measured
PROMPT_NS = 45_000  # what the law takes a look for that did not wait
EDGE_NS = 60_000  # stamps and the host's clock are brought together to about this
MOST_OF = 0.9  # of all looks do as they should
LEAST = 5  # turns of the neighbour in which there was a look: fewer say nothing
Event = Sequence[int]  # recorded (host), stamp (device), seen (host); ns


class Told(NamedTuple):
    """Looks that were recorded in a turn of the neighbour, by when they were done."""

    early: int  # in it
    told: int  # as our turn began
    late: int  # when work of ours had been done in it already


def offset(events: Sequence[Event]) -> int:
    """What makes host time of a stamp: no event is done before it is recorded, and some wait for nothing."""
    return max(recorded - stamp for recorded, stamp, _ in events)


def waited(looks: Sequence[Event]) -> list[int]:
    """How long each waited, by the device's stamps, beyond the one that waited least."""
    by = offset(looks)
    return sorted(stamp + by - recorded for recorded, stamp, _ in looks)


def spread(values: Sequence[int], slice_ns: int) -> dict[str, Any]:
    """A distribution, in words that are short enough for a table."""
    values = sorted(values)
    return {
        "n": len(values),
        "p50_ns": values[len(values) // 2],
        "p90_ns": values[len(values) * 9 // 10],
        "max_ns": values[-1],
        "beyond_half_a_slice": sum(value > slice_ns / 2 for value in values) / len(values),
    }


def told(kernels: Sequence[Event], looks: Sequence[Event], slice_ns: int, kernel_ns: int) -> Told:
    """`kernels`: of the own stream, in order. A turn of the neighbour counts where the next kernel was in the queue
    already when the one before it was done."""
    by = offset([*kernels, *looks])
    stamps = [stamp for _, stamp, _ in looks]
    early = at_once = late = 0
    for (_, last, _), (recorded, following, _) in zip(kernels, kernels[1:]):
        if following - last < slice_ns / 2 + kernel_ns or recorded > last + by:
            continue
        from_ns, to_ns = last + kernel_ns, following - kernel_ns  # in between it was surely the neighbour's
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
    """Whether what the law assumes holds, and that in words. `alone`: waits while only own work was there."""
    prompt = sum(one <= PROMPT_NS for one in alone) / len(alone)
    total = sum(seen)
    words = []
    if prompt < MOST_OF:
        words.append(f"alone only {100 * prompt:.0f} % are done within {PROMPT_NS // 1000} us: they wait for own work")
    if total < LEAST:
        words.append(f"only {total} looks were recorded in a turn of the neighbour")
    elif seen.early > (1 - MOST_OF) * total:
        words.append(f"{seen.early} of {total} were done while the neighbour had the device")
    elif seen.told < MOST_OF * total:
        words.append(f"{seen.late} of {total} were done later than own work of that turn")
    if words:
        return False, "does NOT hold: " + "; ".join(words)
    return True, f"holds: {seen.told} of {total} looks in a turn of the neighbour were done as the own one began"


def lost(without: Sequence[float], beside: Sequence[float]) -> dict[str, Any]:
    """Percent of the neighbour's speed, of runs in pairs."""
    mean, low, high = interval([100 * (1 - after / before) for before, after in zip(without, beside)])
    return {"percent": mean, **({"ci95": [low, high]} if len(beside) > 1 else {})}


def cost(session: Session) -> dict[str, Any]:
    """Of one look, record and query, in nanoseconds of the processor: native, by the compiled program."""
    if not driver.LATENCY.exists():
        return {}
    program = session.work / "latency"
    shutil.copy(driver.LATENCY, program)
    said = driver.answer([str(program), session.machine.libcuda, "look"], session.deadline)
    return dict(said["look"])


class Pair:
    """The one who looks, and his neighbour."""

    def __init__(self, session: Session, stack: contextlib.ExitStack) -> None:
        shapes = [session.ask("calibrate", kernel_us=one) for one in (NEIGHBOUR_US, OWN_US)]
        self.neighbour = stack.enter_context(session.tenant("work", kernel_us=NEIGHBOUR_US, **shapes[0]))
        self.looker = stack.enter_context(session.tenant("looks", kernel_us=OWN_US, **shapes[1]))
        self.settle_s, self.run_s = (0.05, 0.25) if session.short else (0.1, 0.5)
        for tenant in (self.neighbour, self.looker):
            tenant.hear()

    def run(self, neighbour: bool = True, works: bool = True, looks: bool = True) -> tuple[dict[str, Any], float]:
        """What the looking one says, and kernels per second of the neighbour."""
        if neighbour:
            self.neighbour.go(settle_s=self.settle_s, run_s=self.run_s)
        self.looker.go(run_s=self.settle_s + self.run_s, works=works, looks=looks)
        said: dict[str, Any] = self.looker.hear()
        return said, float(self.neighbour.hear()["per_s"]) if neighbour else 0.0


def looks(session: Session) -> Result:
    """Looks alone and in company, with and without work of one's own; then what they cost, and whom."""
    slice_ns = session.machine.slices_ns[0] or SLICE_NS
    with contextlib.ExitStack() as stack:
        pair = Pair(session, stack)
        alone, _ = pair.run(neighbour=False)
        idle, beside_idle = pair.run(works=False)
        runs = [(pair.run(looks=False)[1], *pair.run()) for _ in range(1 if session.short else 3)]
        _, before = pair.run(works=False, looks=False)
    said = [one for _, one, _ in runs]
    if not all(one["looks"] for one in (alone, idle, *said)) or not all(speed for speed, _, _ in runs):
        raise processes.Failed("looks: a process did nothing at all")
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
        f"that a look waits for the own turn {words}; p50 {company['p50_ns'] / 1e3:.0f} us, "
        f"p90 {company['p90_ns'] / 1e3:.0f}, max {company['max_ns'] / 1e3:.0f}, "
        f"{100 * company['beyond_half_a_slice']:.0f} % beyond half a slice; "
        + (f"one takes {took['median_ns']} ns, " if took else "")
        + f"the neighbour's speed changes by {-disturbed['percent']:+.1f} %"
    )
    return Result("measured", note, values)
