"""How soon a changed limit is enforced, and how much throughput the rate limiter costs: figures beside the matrix."""

from __future__ import annotations

from typing import NamedTuple

from tests.limiter.cells import KERNELS, Ledger, Tenant, parallel, simulate

NEAR_PP = 5
GIVE_UP_MS = 2000
CHANGE_MS = 2000


class Change(NamedTuple):
    """A change at CHANGE_MS, and the share that the tenant `judged` should get from then on."""

    name: str
    tenants: tuple[Tenant, ...]
    judged: int
    target: float

    def bound_ms(self) -> float:
        """Return the time by which it must be enforced: two launches at the limit take that long."""
        return max(100.0, 2 * self.tenants[self.judged].launch_ms() / (self.target / 100))

    def window_ms(self) -> int:
        """Return the shortest window that can show an error of NEAR_PP: one launch is no larger part of it."""
        one = self.tenants[self.judged].launch_ms() / (NEAR_PP / 100)
        return max(100, -(-int(one) // 10) * 10)


def changes() -> list[Change]:
    """Return a changed limit, a container that starts, and one that ends, for each kernel."""
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
    """Return the milliseconds from `from_ms` until two consecutive windows are within NEAR_PP percentage points."""
    for start in range(from_ms, from_ms + GIVE_UP_MS, 10):
        if all(abs(share - target) <= NEAR_PP for share in ledger.shares(window_ms, start)[:2]):
            return start - from_ms
    return GIVE_UP_MS


def settling_ms(change: Change, seed: int = 1) -> float:
    """Run one change and return its settling time."""
    ledgers = simulate(change.tenants, ms=CHANGE_MS + 2 * GIVE_UP_MS, seed=seed)
    return settled_after(ledgers[change.judged], change.target, CHANGE_MS, change.window_ms())


def throughput_ratio(tenant: Tenant, seed: int = 1) -> float:
    """Return the kernel time, without that of probe events, as a fraction of limit x native."""
    native = simulate([tenant._replace(limit=100, more="law=none")], ms=4000, seed=seed)[0]
    return simulate([tenant], ms=4000, seed=seed)[0].work_ns / (tenant.limit / 100 * native.work_ns)


def unlimited_loss(tenant: Tenant, seed: int = 1) -> float:
    """Return the percentage of its kernel time that a tenant without a limit loses."""
    native = simulate([tenant._replace(more="law=none")], ms=4000, seed=seed)[0]
    return 100 * max(0.0, 1 - simulate([tenant], ms=4000, seed=seed)[0].work_ns / native.work_ns)


LIMITED = [Tenant(limit, kernel) for limit in (10, 30, 70) for kernel in KERNELS]
UNLIMITED = [Tenant(100, kernel, program) for kernel in KERNELS for program in ("stream", "streams", "graph")]


def figures() -> dict[str, list[float]]:
    """Return the figures for `make bench`."""
    return {
        "compute.settling_ms": parallel(changes(), settling_ms),
        "compute.throughput_ratio": parallel(LIMITED, throughput_ratio),
        "compute.unlimited_loss": parallel(UNLIMITED, unlimited_loss),
    }
