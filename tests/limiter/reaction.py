"""How soon a limit is held, and what the law takes from the work: the figures beside the matrix."""

from __future__ import annotations

from typing import NamedTuple

from tests.limiter.cells import KERNELS, Ledger, Tenant, parallel, simulate

NEAR_PP = 5
GIVE_UP_MS = 2000
CHANGE_MS = 2000


class Change(NamedTuple):
    """What happens at CHANGE_MS, and what the tenant `judged` should get from then on."""

    name: str
    tenants: tuple[Tenant, ...]
    judged: int
    target: float

    def bound_ms(self) -> float:
        """In which it must be held: two launches at the limit take that long."""
        return max(100.0, 2 * self.tenants[self.judged].launch_ms() / (self.target / 100))

    def window_ms(self) -> int:
        """The shortest time in which NEAR_PP can be told: one launch is no more of it."""
        one = self.tenants[self.judged].launch_ms() / (NEAR_PP / 100)
        return max(100, -(-int(one) // 10) * 10)


def changes() -> list[Change]:
    """A limit that changes, somebody who joins, and somebody who leaves, for each kernel."""
    found = []
    for kernel in KERNELS:
        for before, after in ((50, 20), (20, 50), (90, 10)):
            tenant = Tenant(before, kernel, more=f"change={after},at={CHANGE_MS}")
            found.append(Change(f"{before} to {after} {kernel}", (tenant,), 0, after))
        joins = (Tenant(30, kernel), Tenant(50, kernel, more=f"join={CHANGE_MS}"))
        leaves = (Tenant(30, kernel), Tenant(50, kernel, more=f"leave={CHANGE_MS}"))
        found.append(Change(f"50 joins 30 {kernel}", joins, 1, 50))
        found.append(Change(f"30 is joined by 50 {kernel}", joins, 0, 30))
        found.append(Change(f"30 is left by 50 {kernel}", leaves, 0, 30))
    return found


def settled_after(ledger: Ledger, target: float, from_ms: int, window_ms: int) -> float:
    """Milliseconds from `from_ms` until two windows, one after the other, are within NEAR_PP points."""
    for start in range(from_ms, from_ms + GIVE_UP_MS, 10):
        if all(abs(share - target) <= NEAR_PP for share in ledger.shares(window_ms, start)[:2]):
            return start - from_ms
    return GIVE_UP_MS


def settling_ms(change: Change, seed: int = 1) -> float:
    """Of one change."""
    ledgers = simulate(change.tenants, ms=CHANGE_MS + 2 * GIVE_UP_MS, seed=seed)
    return settled_after(ledgers[change.judged], change.target, CHANGE_MS, change.window_ms())


def throughput_ratio(tenant: Tenant, seed: int = 1) -> float:
    """Kernel time alone, without that of markers, as a part of limit x native."""
    native = simulate([tenant._replace(limit=100, more="law=none")], ms=4000, seed=seed)[0]
    return simulate([tenant], ms=4000, seed=seed)[0].work_ns / (tenant.limit / 100 * native.work_ns)


def unlimited_loss(tenant: Tenant, seed: int = 1) -> float:
    """Part of its kernel time that a tenant without a limit loses, in percent."""
    native = simulate([tenant._replace(more="law=none")], ms=4000, seed=seed)[0]
    return 100 * max(0.0, 1 - simulate([tenant], ms=4000, seed=seed)[0].work_ns / native.work_ns)


LIMITED = [Tenant(limit, kernel) for limit in (10, 30, 70) for kernel in KERNELS]
UNLIMITED = [Tenant(100, kernel, program) for kernel in KERNELS for program in ("stream", "streams", "graph")]


def figures() -> dict[str, list[float]]:
    """For `make bench`."""
    return {
        "compute.settling_ms": parallel(changes(), settling_ms),
        "compute.throughput_ratio": parallel(LIMITED, throughput_ratio),
        "compute.unlimited_loss": parallel(UNLIMITED, unlimited_loss),
    }
