"""Check compute shares by what the device itself counted, with kernels whose length was calibrated natively."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from pathlib import Path
from typing import Any, Optional

from tests.hardware import processes
from tests.hardware.place import Place
from tests.hardware.session import Result, Session, interval, verdict

ALONE_POINTS, COMPANY_POINTS = 1.0, 2.0  # maximum error of a share, in percentage points
LEAST_TOTAL = 0.9  # fraction of the limits' sum in company: context switches take device time without doing work
LEAST_RATIO = 0.99  # fraction of native speed without a limit
KERNEL_US = 1000
FOUR = (10, 20, 30, 40)
SAVED_S = 0.1
TURN_S = 1.5  # for two kernels; the second is admitted when no kernel has ended for 100 ms
COUNTED = 0.001  # maximum fraction of all rounds missing: a tolerance for none


def times(session: Session) -> dict[str, float]:
    """Return the lengths of one measurement."""
    return {"settle_s": 0.1, "run_s": 0.3} if session.short else {"settle_s": 0.6, "run_s": 2.0}


class Bench:
    """The native program and others beside it; only the programs that get work run."""

    def __init__(self, session: Session, stack: contextlib.ExitStack, torch: str = "", **shape: Any) -> None:
        self.session, self.stack, self.what = session, stack, torch or "work"
        self.shape: dict[str, Any] = {}
        if not torch:
            self.shape = {"kernel_us": KERNEL_US, **session.ask("calibrate", kernel_us=KERNEL_US), **shape}
        (self.native,) = self.add(None)
        self.counted: list[float] = []

    def add(self, *places: Optional[Place]) -> list[processes.Tenant]:
        """Start a program in each place, and wait until all are ready to work."""
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

    def rates(self, *tenants: processes.Tenant) -> list[float]:
        """Return each program's kernels per second while all of them work."""
        for tenant in tenants:
            tenant.go(**times(self.session))
        answers = [tenant.receive() for tenant in tenants]
        self.counted += [answer["counted"] for answer in answers if "counted" in answer]
        return [answer["per_s"] for answer in answers]

    def miscounted(self) -> list[str]:
        """Return an error unless the device counted every launch. (A simulator runs no code and counts nothing.)"""
        if self.session.machine.simhost:
            return []
        wrong = [count for count in self.counted if abs(count - 1) > COUNTED]
        return [f"the device counted {wrong[0]:.4f} of what was launched"] if wrong else []


def ratios(
    session: Session, percent: Optional[int], torch: str = "", rounds: int = 2, **shape: Any
) -> tuple[dict[str, Any], list[str]]:
    """Measure speed in a share relative to native speed before and after it, several times."""
    with contextlib.ExitStack() as stack:
        bench = Bench(session, stack, torch, **shape)
        (inside,) = bench.add(stack.enter_context(session.place(compute_percent=percent)))
        (native,) = bench.rates(bench.native)
        natives, found = [native], []
        for _ in range(2 if session.short else rounds):
            (rate,) = bench.rates(inside)
            (native,) = bench.rates(bench.native)
            found.append(rate / ((natives[-1] + native) / 2))
            natives.append(native)
        mean, low, high = interval(found)
        values = {"ratio": mean, "ci95": [low, high], "ratios": found, "native_per_s": statistics.fmean(natives)}
        return values, bench.miscounted()


def uncapped(session: Session, torch: str = "") -> Result:
    """Measure native speed and speed under the shim without a limit alternately."""
    values, wrong = ratios(session, None, torch, rounds=3 if torch else 5)
    low, high = values["ci95"]
    note = f"{100 * values['ratio']:.2f} % of native speed (95 %: {100 * low:.2f} to {100 * high:.2f})"
    if high < LEAST_RATIO:
        wrong.append(note)
    return verdict(wrong, note, values)


def alone(session: Session, percent: int, torch: str = "", **shape: Any) -> Result:
    """Check that a share that has the device to itself gets its limit, no more and no less."""
    values, wrong = ratios(session, percent, torch, **shape)
    got = 100 * values["ratio"]
    note = f"limit {percent} %: got {got:.2f} %"
    if abs(got - percent) > ALONE_POINTS:
        wrong.append(note)
    return verdict(wrong, note, {**values, "limit_percent": percent})


def company(session: Session, percents: tuple[int, ...], torch: str = "", told: tuple[int, int] = (0, 0)) -> Result:
    """Check several shares at once, all with more work than their limits allow."""
    with contextlib.ExitStack() as stack:
        bench = Bench(session, stack, torch)
        together = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-check-")))
        places = [stack.enter_context(session.place(None, percent, together, told)) for percent in percents]
        tenants = bench.add(*places)
        before = bench.rates(bench.native)[0]
        rates = [bench.rates(*tenants) for _ in range(1 if session.short else 2)]
        native = (before + bench.rates(bench.native)[0]) / 2
        wrong = bench.miscounted()
    got = [100 * statistics.fmean(one) / native for one in zip(*rates)]
    note = "limits {}: got {}".format(
        " and ".join(f"{percent} %" for percent in percents), " and ".join(f"{one:.2f} %" for one in got)
    )
    total = sum(got) / sum(percents)
    of_work = [one / total for one in got]
    # Too much is always wrong; too little only beyond what all tenants lose to switches.
    if any(one > percent + COMPANY_POINTS for one, percent in zip(got, percents)):
        wrong.append(note)
    elif total < LEAST_TOTAL or any(abs(one - percent) > COMPANY_POINTS for one, percent in zip(of_work, percents)):
        wrong.append(f"{note}, which is {100 * total:.1f} % of the sum of their limits")
    values = {"limits_percent": percents, "got_percent": got, "of_work_percent": of_work, "native_per_s": native}
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


def waiting(session: Session) -> Result:
    """Check that streams that wait for each other on the device come to an end soon at 5 %."""
    turns = 4 if session.short else 15
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
