"""Measure compute shares in real time: real containers on a simulated device, from the device's own ledger.

    python -m bench.compute [NAME ...]    run these scenarios, or all, and print what each tenant received

Each run starts the containers of one scenario, waits until all have been using the device for a while, and then
measures for some seconds. The shim's own figures are not used.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from simulator.ledger import Ledger
from simulator.simhost import make_simhost
from tests.support import busy, host
from tests.support.runc import Container
from tests.support.spec import Mount

RUNS = 5
RUN_S = 5.0
WARM_S = 1.0
START_S = 20.0
GIB = 1 << 30
NS = 1_000_000_000
PROGRAM = "/opt/busy"


class Tenant(NamedTuple):
    """One container: its limit in percent, and the options of its program."""

    limit: int
    options: dict[str, str | int] = {}


class Scenario(NamedTuple):
    """The tenants that share one device, and the maximum distance of a tenant from its limit in percentage points."""

    name: str
    tenants: tuple[Tenant, ...]
    bound: float = 3.0


SCENARIOS = (
    Scenario("30_70", (Tenant(30), Tenant(70))),
    Scenario("10_20_30_40", tuple(Tenant(limit) for limit in (10, 20, 30, 40))),
    Scenario("50_alone", (Tenant(50),)),
    Scenario("25_of_4_processes_75", (Tenant(25, {"processes": 4}), Tenant(75))),
    Scenario("graphs_30", (Tenant(30, {"mode": "graph", "kernel": 50}),)),
)


class Run(NamedTuple):
    """Percent of the device by tenant, and percent of CPU time that the hypervisor stole."""

    shares: tuple[float, ...]
    steal: float


def wrong_by(scenario: Scenario, run: Run) -> float:
    """Return the worst tenant's distance from its limit, in percentage points."""
    return max(abs(share - tenant.limit) for share, tenant in zip(run.shares, scenario.tenants))


def cpu_ticks() -> tuple[int, int]:
    """Return the (stolen, total) ticks of all CPUs, from /proc/stat."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[7], sum(ticks)


def container_of(tenant: Tenant, number: int, directory: Path, node: host.Node, way: str) -> Container:
    """Prepare one tenant's container without creating it."""
    arguments = [PROGRAM, *busy.words(seconds=120, seed=number, **{"kernel": 50, **tenant.options})]
    env = {"GPUSHARE_MEMORY": "2Gi", "GPUSHARE_COMPUTE": f"{tenant.limit}%"}
    mounts = [Mount(busy.build(), PROGRAM)]
    return Container(directory, arguments, env=env, mounts=mounts, name=f"t{number}", **node.way(way))


def wait_for_work(ledger: Ledger, container: Container, namespace: int) -> None:
    """Wait until the container has used the device. RuntimeError with its output if it does not in START_S seconds."""
    deadline = time.monotonic() + START_S
    while not any(group.pidns == namespace and group.busy_ns for group in ledger.groups()):
        if time.monotonic() > deadline:
            raise RuntimeError(f"no work on the device after {START_S} s: {container.stdout}{container.stderr}")
        time.sleep(0.01)


def measure(scenario: Scenario, directory: Path, run_s: float = RUN_S, way: str = "runtime") -> Run:
    """Measure one run of `run_s` seconds. `way`: how the containers get their share, "hook" or "runtime"."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=16 * GIB)
    node = host.Node(directory / "node", simulated)
    with ExitStack() as stack:
        stack.callback(node.close)
        ledger = stack.enter_context(Ledger(str(simulated / "dev" / "nvidia0")))
        containers = []
        for number, tenant in enumerate(scenario.tenants):
            container = stack.enter_context(container_of(tenant, number, directory, node, way))
            container.create()
            containers.append(container)
        namespaces = [Path(f"/proc/{one.pid}/ns/pid").stat().st_ino for one in containers]
        for one in containers:
            one.start()
        for one, namespace in zip(containers, namespaces):
            wait_for_work(ledger, one, namespace)
        time.sleep(WARM_S)
        stolen, ticks = cpu_ticks()
        begin = time.monotonic_ns()
        time.sleep(run_s)
        # a throttled client may not have advanced the simulation in the last 50 ms
        end = begin + int(run_s * NS) - 50_000_000
        stolen_then, ticks_then = cpu_ticks()
        shares = []
        for namespace in namespaces:
            each = ledger.history(namespace).shares(begin, end, 10_000_000)
            shares.append(100 * statistics.fmean(each))
        return Run(tuple(shares), 100 * (stolen_then - stolen) / max(1, ticks_then - ticks))


def runs(scenario: Scenario, times: int = RUNS) -> Iterator[Run]:
    """Measure a scenario several times, each on a new device."""
    for _ in range(times):
        with tempfile.TemporaryDirectory(prefix="compute-", dir=host.BUILD) as directory:
            yield measure(scenario, Path(directory))


def main(names: Sequence[str]) -> int:
    host.enter_private_mounts()
    known = {scenario.name: scenario for scenario in SCENARIOS}
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"compute: {unknown[0]!r} is not one of {', '.join(known)}", file=sys.stderr)
        return 2
    for name in names or known:
        for run in runs(known[name]):
            shares = " / ".join(f"{share:.1f}" for share in run.shares)
            print(
                f"{name}: {shares} %, at most {wrong_by(known[name], run):.2f} off, steal {run.steal:.1f} %", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
