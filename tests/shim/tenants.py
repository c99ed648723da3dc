"""Run tenants on one simulated device and measure from the device's own ledger what each of them gets.

A tenant is tests/integration/programs/busy.c, or any other program, in its own box. The boxes share the simulated host
and the directory of activity files, like containers of one host.
"""

from __future__ import annotations

import json
import select
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from simulator.ledger import Ledger
from tests.shim.box import Box
from tests.support.busy import build, words
from tests.support.judge import TimeShares, time_shares

LONG_S = 1000  # longer than any test observes it
READY_S = 60
TRIES = 5


def living(box: Box, slot: int) -> set[int]:
    """Return the pid namespaces of a device's live clients."""
    with Ledger(box.device(slot)) as ledger:
        return {client.pidns for client in ledger.clients() if client.alive}


class Tenant:
    """A busy program in a box."""

    def __init__(self, box: Box, **options: Any) -> None:
        self.box = box
        self.slot = int(options.get("device", 0))
        self._before = living(box, self.slot)
        words_of = words(**{"seconds": LONG_S, **options}, wait=1)
        self.process = box.popen([str(build()), *words_of], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.pidns = 0

    def begin(self) -> None:
        """Wait until the program is ready, record its namespace and let it start."""
        assert self.process.stdin is not None and self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said == "ready\n", f"the tenant said {said!r}"
        (self.pidns,) = living(self.box, self.slot) - self._before
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> dict[str, Any]:
        """End the program and return its report."""
        inner = subprocess.run(["pkill", "-TERM", "-P", str(self.process.pid)], check=False)
        assert inner.returncode == 0
        out, _ = self.process.communicate(timeout=READY_S)
        report: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return report

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def boxes(*percents: Sequence[int] | int, gpus: int = 1, **options: Any) -> Iterator[list[Box]]:
    """Create boxes with these compute limits on one simulated host."""
    with ExitStack() as stack:
        made: list[Box] = []
        for percent in percents:
            compute = [percent] * gpus if isinstance(percent, int) else percent
            host = {"simhost": made[0].simhost, "company": made[0].company} if made else {}
            made.append(stack.enter_context(Box([None] * gpus, gpus=gpus, compute=compute, **host, **options)))
        yield made


@contextmanager
def tenants(*places: tuple[Box, dict[str, Any]]) -> Iterator[list[Tenant]]:
    """Start all tenants, and kill them at the end."""
    made: list[Tenant] = []
    try:
        for box, options in places:
            made.append(Tenant(box, **options))
            made[-1].begin()
        yield made
    finally:
        for tenant in made:
            tenant.kill()


def observe(box: Box, seconds: float, watched: Sequence[Tenant] = (), slot: int = 0) -> TimeShares:
    """Measure each client's share of a device for some seconds. Fails at once when a watched tenant ends."""
    poll = select.poll()
    for tenant in watched:
        assert tenant.process.stdout is not None
        poll.register(tenant.process.stdout, select.POLLIN | select.POLLHUP)
    return time_shares(box.device(slot), poll, seconds)


def holds(tenant: Tenant, percent: float, points: float, seconds: float = 1.0, least: float | None = None) -> None:
    """Assert that the tenant never exceeds its share and reaches it (or `least`) in one of several tries.

    Several tries, because other load on the machine can keep the programs from running.
    """
    least = percent - points if least is None else least
    all_hold(seconds, (tenant, least, percent + points))


def all_hold(seconds: float, *rows: tuple[Tenant, float, float]) -> None:
    """As `holds`, for tenants of one device at a time: (tenant, least, most)."""
    watched = [tenant for tenant, _, _ in rows]
    for _ in range(TRIES):
        of = observe(watched[0].box, seconds, watched, watched[0].slot).of
        got = [of[tenant.pidns] for tenant in watched]
        assert all(one < most for one, (_, _, most) in zip(got, rows)), f"{got} % instead of {rows}"
        if all(one > least for one, (_, least, _) in zip(got, rows)):
            return
    raise AssertionError(f"{got} % instead of {rows}, {TRIES} times")
