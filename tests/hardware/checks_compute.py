"""Check compute shares by the device time that the device itself counted, and report the throughput beside it.

Throughput alone misleads: a card at its power limit clocks higher when it works for 30 % of the time, so 30 % of the
device time was 34 % of the native throughput on an H100.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.hardware import processes
from tests.hardware.place import Place
from tests.hardware.session import Result, Session, interval, verdict

ALONE_POINTS, COMPANY_POINTS = 1.0, 2.0  # maximum error of a share, in percentage points
LEAST_TOTAL = 0.9  # fraction of the limits' sum in company: context switches take device time without doing work
LEAST_RATIO = 0.99  # fraction of native speed without a limit
LEAST_OVERLAP = 0.8  # fraction of each program's run in which all of them ran
SHORT_OVERLAP = 0.5
KERNEL_US = 1000
FOUR = (10, 20, 30, 40)
EIGHT = (5, 5, 5, 5, 10, 10, 20, 40)
ROUND_MS = 20  # as configured by default
KILLED = (30, 30, 40)  # the last one is killed
BESIDE_NATIVE = (30, 40)
REQUEST, REQUEST_MEAN_S = 20, 0.05  # kernels of a request; its mean distance from the next
MOST_P50_MS, MOST_P99_MS = 1.2, 3.0  # by which a request may be delayed in turns
LEAST_IN_TURNS = 94  # percent of one program alone, of all programs together
SAVED_S = 0.1
TURN_S = 1.5  # for two kernels; the second is admitted when no kernel has ended for 100 ms
COUNTED = 0.001  # maximum fraction of all rounds missing: a tolerance for none
BARRIER_S = 0.05  # from the line that tells programs to begin until they do
TRIES = 3  # of a measurement in which programs must run at the same time


class Rate(NamedTuple):
    """`per_s`: kernels per second. `device`: device time per elapsed time; None: not known."""

    per_s: float
    device: Optional[float] = None


def times(session: Session, run_s: float = 1.0) -> dict[str, float]:
    """Return the lengths of one measurement."""
    return {"settle_s": 0.1, "run_s": 0.3} if session.short else {"settle_s": 0.3, "run_s": run_s}


def need_overlap(answers: Sequence[dict[str, Any]], least: float = LEAST_OVERLAP) -> None:
    """Raise Failed unless programs ran at the same time, by their `from_s` and `to_s`."""
    common = min(one["to_s"] for one in answers) - max(one["from_s"] for one in answers)
    longest = max(one["to_s"] - one["from_s"] for one in answers)
    if common < least * longest:
        raise processes.Failed(
            f"the programs did not run at the same time: {max(0.0, common):.2f} s of {longest:.2f} s in common"
        )


class Bench:
    """The native program and others beside it; only the programs that get work run."""

    def __init__(self, session: Session, stack: contextlib.ExitStack, torch: str = "", **shape: Any) -> None:
        self.session, self.stack, self.what = session, stack, torch or "work"
        self.shape: dict[str, Any] = {}
        if not torch:
            self.shape = {"kernel_us": KERNEL_US, **session.ask("calibrate", kernel_us=KERNEL_US), **shape}
        self.counted: list[float] = []

    def add(self, *places: Optional[processes.Inside]) -> list[processes.Tenant]:
        """Start a program in each place (None: natively), and wait until all are ready to work."""
        started = []
        for place in places:
            if self.what == "work":
                tenant = self.session.tenant("work", place, **self.shape)
            else:
                tenant = processes.Tenant(self.what, self.session.deadline, place)
            started.append(self.stack.enter_context(tenant))
        for tenant in started:
            tenant.receive()
        return started

    def rates(
        self, *tenants: processes.Tenant, run_s: float = 1.0, killed: Optional[processes.Tenant] = None
    ) -> list[Rate]:
        """Return each program's rate while all of them work. They begin behind a barrier, and again if the machine was
        so busy that they did not work at the same time.

        `killed`: another program that works beside them, and is killed in the middle.
        """
        for tries_left in reversed(range(1 if killed else TRIES)):
            answers = self._answers(tenants, run_s, killed)
            try:
                need_overlap(answers, SHORT_OVERLAP if self.session.short else LEAST_OVERLAP)
                break
            except processes.Failed:
                if not tries_left:
                    raise
        self.counted += [answer["counted"] for answer in answers if "counted" in answer]
        return [Rate(answer["per_s"], self._device(answer, len(answers))) for answer in answers]

    def _answers(
        self, tenants: Sequence[processes.Tenant], run_s: float, killed: Optional[processes.Tenant]
    ) -> list[dict[str, Any]]:
        at = time.monotonic() + BARRIER_S
        length = times(self.session, run_s)
        for tenant in (*tenants, killed) if killed else tenants:
            tenant.go(at=at, **length)
        if killed:
            time.sleep(BARRIER_S + length["settle_s"] + length["run_s"] / 2)
            killed.close()
        return [tenant.receive() for tenant in tenants]

    def _device(self, answer: dict[str, Any], count: int) -> Optional[float]:
        if self.what != "work":  # its events do not tell work from the time slices of another program
            return float(answer["device"]) if count == 1 else None
        if self.session.machine.simhost:  # it runs no code, and a kernel takes exactly what its name says
            return float(answer["per_s"]) * KERNEL_US / 1e6
        return float(answer["device"])

    def miscounted(self) -> list[str]:
        """Return an error unless the device counted every launch. (A simulator runs no code and counts nothing.)"""
        if self.session.machine.simhost:
            return []
        wrong = [count for count in self.counted if abs(count - 1) > COUNTED]
        return [f"the device counted {wrong[0]:.4f} of what was launched"] if wrong else []


def ratios(
    session: Session, percent: Optional[int], torch: str = "", rounds: int = 1, **shape: Any
) -> tuple[dict[str, Any], list[str]]:
    """Measure a share, and native speed before and after it, several times.

    `ratio`: throughput relative to native; `device`: device time per elapsed time in the share, None if not known.
    """
    with contextlib.ExitStack() as stack:
        bench = Bench(session, stack, torch, **shape)
        native, inside = bench.add(None, stack.enter_context(session.place(compute_percent=percent)))
        natives, shares = bench.rates(native), list[Rate]()
        for _ in range(min(2, rounds) if session.short else rounds):
            shares += bench.rates(inside)
            natives += bench.rates(native)
        around = [(before.per_s + after.per_s) / 2 for before, after in zip(natives, natives[1:])]
        found = [share.per_s / beside for share, beside in zip(shares, around)]
        mean, low, high = interval(found)
        device = [share.device for share in shares if share.device is not None]
        values = {
            "ratio": mean,
            "ci95": [low, high] if len(found) > 1 else None,
            "ratios": found,
            "native_per_s": statistics.fmean(rate.per_s for rate in natives),
            "native_device": natives[0].device,
            "device": statistics.fmean(device) if device else None,
        }
        return values, bench.miscounted()


def uncapped(session: Session, torch: str = "") -> Result:
    """Measure native speed and speed under the shim without a limit alternately."""
    values, wrong = ratios(session, None, torch, rounds=3)
    low, high = values["ci95"]
    note = f"{100 * values['ratio']:.2f} % of native speed (95 %: {100 * low:.2f} to {100 * high:.2f})"
    if high < LEAST_RATIO:
        wrong.append(note)
    return verdict(wrong, note, values)


def alone(session: Session, percent: int, torch: str = "", **shape: Any) -> Result:
    """Check that a share that has the device to itself gets its part of the device time, no more and no less."""
    values, wrong = ratios(session, percent, torch, **shape)
    throughput = 100 * values["ratio"]
    got = throughput if values["device"] is None else 100 * values["device"]
    note = f"limit {percent} %: got {got:.2f} % of the device time, {throughput:.2f} % of native throughput"
    if abs(got - percent) > ALONE_POINTS:
        wrong.append(note)
    return verdict(wrong, note, {**values, "limit_percent": percent})


def company(
    session: Session,
    percents: tuple[int, ...],
    torch: str = "",
    told: tuple[int, int] = (0, 0),
    round_ms: int = 0,
) -> Result:
    """Check several shares at once, all with more work than their limits allow."""
    with contextlib.ExitStack() as stack:
        bench, places = _company(session, stack, percents, round_ms, torch, told)
        return side_by_side(bench, percents, places)


def _company(
    session: Session,
    stack: contextlib.ExitStack,
    percents: Sequence[int],
    round_ms: int = ROUND_MS,
    torch: str = "",
    told: tuple[int, int] = (0, 0),
) -> tuple[Bench, list[Place]]:
    """Return places with these limits that share activity files."""
    together = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
    places = [stack.enter_context(session.place(None, percent, together, told, round_ms)) for percent in percents]
    return Bench(session, stack, torch), places


def side_by_side(bench: Bench, percents: tuple[int, ...], places: Sequence[processes.Inside]) -> Result:
    """Measure native speed, and a program in each place at the same time; judge the shares."""
    native, *tenants = bench.add(None, *places)
    before = bench.rates(native, run_s=0.7)
    shares = bench.rates(*tenants, run_s=2.5)
    per_s = statistics.fmean(rate.per_s for rate in (*before, *bench.rates(native, run_s=0.7)))
    return judge(percents, shares, per_s, bench.miscounted())


def judge(percents: tuple[int, ...], shares: Sequence[Rate], native_per_s: float, wrong: list[str]) -> Result:
    """Return whether shares at once got what they are limited to.

    Device time decides, or throughput where it is not known: the device was always busy, so its clock was the native
    one. Too much is always wrong; too little only beyond what all programs lose to switches.
    """
    throughput = [100 * rate.per_s / native_per_s for rate in shares]
    device = [100 * rate.device for rate in shares if rate.device is not None]
    got = device if len(device) == len(shares) else throughput
    note = "limits {}: got {}".format(
        " and ".join(f"{percent} %" for percent in percents), " and ".join(f"{one:.2f} %" for one in got)
    )
    if got is device:
        note += " of the device time, {} of native throughput".format(
            " and ".join(f"{one:.2f} %" for one in throughput)
        )
    total = sum(got) / sum(percents)
    of_work = [one / total for one in got] if total else got
    if any(one > percent + COMPANY_POINTS for one, percent in zip(got, percents)):
        wrong.append(note)
    elif total < LEAST_TOTAL or any(abs(one - percent) > COMPANY_POINTS for one, percent in zip(of_work, percents)):
        wrong.append(f"{note}, which is {100 * total:.1f} % of the sum of their limits")
    values = {"limits_percent": percents, "got_percent": got, "of_work_percent": of_work, "native_per_s": native_per_s}
    values.update(throughput_percent=throughput, device_percent=device or None)
    return verdict(wrong, note, values)


def native(session: Session) -> Result:
    """Measure without a limit."""
    return uncapped(session)


def thirty(session: Session) -> Result:
    return alone(session, 30)


def five(session: Session) -> Result:
    return alone(session, 5)


def graph(session: Session) -> Result:
    """The same check with CUDA graphs of ten kernels."""
    return alone(session, 30, graph=True)


def shared(session: Session) -> Result:
    return company(session, (30, 70))


def four(session: Session) -> Result:
    return company(session, FOUR)


def shared_told(session: Session) -> Result:
    """The same check when the rate limiter knows the device's time slices."""
    if not any(session.machine.slices_ns):
        raise processes.Absent("the check `slices` did not measure them")
    return company(session, (30, 70), told=session.machine.slices_ns)


def turns(session: Session, percents: tuple[int, ...], torch: str = "") -> Result:
    """Measure the same shares with time slices and in turns, in which less throughput is lost."""
    slices, found = (company(session, percents, torch, round_ms=round_ms) for round_ms in (0, ROUND_MS))
    before, together = (sum(result.values["throughput_percent"]) for result in (slices, found))
    note = f"{found.note}; {together:.1f} % together, with time slices {before:.1f} %"
    wrong = [note] if found.verdict != "held" or together < LEAST_IN_TURNS else []
    return verdict(wrong, note, {**found.values, "slices": slices.values, "round_ms": ROUND_MS})


def turns_killed(session: Session) -> Result:
    """Check that two shares keep their parts while the program of a third one, 40 %, is killed."""
    with contextlib.ExitStack() as stack:
        bench, places = _company(session, stack, KILLED)
        native, *tenants, killed = bench.add(None, *places)
        per_s = bench.rates(native, run_s=0.7)[0].per_s
        got = [100 * rate.per_s / per_s for rate in bench.rates(*tenants, run_s=2.5, killed=killed)]
    note = f"a program with {KILLED[-1]} % was killed: {_listed(KILLED[:-1])} got {_listed(got)} of native throughput"
    wrong = [note] if any(one < percent - COMPANY_POINTS for one, percent in zip(got, KILLED)) else []
    return verdict(wrong, note, {"limits_percent": KILLED, "throughput_percent": got})


def turns_outsider(session: Session) -> Result:
    """Check that a program without gpushare takes no more of the device beside turns than beside time slices."""
    found = []
    for round_ms in (0, ROUND_MS):
        with contextlib.ExitStack() as stack:
            bench, places = _company(session, stack, BESIDE_NATIVE, round_ms)
            native, *tenants = bench.add(None, *places)
            per_s = bench.rates(native, run_s=0.7)[0].per_s
            found.append([100 * rate.per_s / per_s for rate in bench.rates(*tenants, native, run_s=2.5)])
    slices, turned = found
    note = f"beside a native program {_listed(BESIDE_NATIVE)} got {_listed(turned[:-1])} in turns"
    note += f", with time slices {_listed(slices[:-1])}; it got {_listed(turned[-1:])} and {_listed(slices[-1:])}"
    wrong = [note] if any(before - one > COMPANY_POINTS for before, one in zip(slices[:-1], turned)) else []
    return verdict(wrong, note, {"limits_percent": BESIDE_NATIVE, "throughput_percent": turned, "slices": slices})


def turns_interactive(session: Session, others: int) -> Result:
    """Measure by how much short requests are delayed beside programs that always have work."""
    percents = (100 - others * (75 // others), *(75 // others,) * others)
    delays = []
    for round_ms in (0, ROUND_MS):
        with contextlib.ExitStack() as stack:
            bench, places = _company(session, stack, percents, round_ms)
            mine = stack.enter_context(session.tenant("requests", places[0], kernels=REQUEST, **bench.shape))
            tenants = bench.add(*places[1:])
            mine.receive()
            run_s = 1.0 if session.short else 5.0
            free, took = (_requests(mine, beside, run_s) for beside in ((), tenants))
            delays.append([_part(took, 0.5) - _part(free, 0.5), _part(took, 0.99) - _part(free, 0.5)])
    (slices_p50, slices_p99), (p50, p99) = delays
    note = f"beside {others}: p50 +{p50:.2f} ms and p99 +{p99:.2f} ms in turns"
    note += f", +{slices_p50:.2f} and +{slices_p99:.2f} ms with time slices"
    wrong = [note] if p50 > MOST_P50_MS or p99 > MOST_P99_MS else []
    return verdict(wrong, note, {"limits_percent": percents, "delay_ms": [p50, p99], "slices": delays[0]})


def _requests(mine: processes.Tenant, beside: Sequence[processes.Tenant], run_s: float) -> list[float]:
    """Return the milliseconds of each request while the others work."""
    at = time.monotonic() + BARRIER_S
    for tenant in beside:
        tenant.go(at=at, settle_s=0, run_s=run_s + BARRIER_S)
    mine.go(at=at + BARRIER_S, run_s=run_s, mean_s=REQUEST_MEAN_S)
    took: list[float] = mine.receive()["request_ms"]
    for tenant in beside:
        tenant.receive()
    return took


def _part(values: Sequence[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


def _listed(percents: Sequence[float]) -> str:
    return " and ".join(f"{percent:.1f} %" for percent in percents)


def waiting(session: Session) -> Result:
    """Check that streams that wait for each other on the device come to an end soon at 5 %."""
    turns = 4 if session.short else 10
    shape = {"kernel_us": KERNEL_US, **session.ask("calibrate", kernel_us=KERNEL_US)}
    with session.place(compute_percent=5) as place:
        answer = session.ask("pair", place, turns=turns, **shape)
    note = f"{answer['kernels']} kernels in {answer['seconds']:.2f} s"
    # The first kernels run on saved-up credit.
    least_s = 0.5 * (answer["kernels"] * KERNEL_US / 1e6 / 0.05 - SAVED_S)
    wrong = [f"{note}, which is not 5 %"] if answer["seconds"] < least_s else []
    if answer["seconds"] > TURN_S * answer["kernels"] / 2:
        wrong.append(f"{note}: delays by the limiter are charged as work")
    return verdict(wrong, note, answer)


def torch_native(session: Session) -> Result:
    return uncapped(session, "torch_work")


def torch_shared(session: Session) -> Result:
    return company(session, (30, 70), "torch_work")


def torch_four(session: Session) -> Result:
    return company(session, FOUR, "torch_work")


def torch_graph(session: Session) -> Result:
    return alone(session, 30, "torch_graph")
