"""Measure how long an allocation within a container's request takes while another container has borrowed the memory.

    python -m bench.elastic       measure both ways to take memory back

The device is full of borrowed memory, except for one context. The time is that of one cuMemAlloc of 3 GiB.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from simulator.simhost import make_simhost
from tests.support import host
from tests.support.judge import taken
from tests.support.lending import agent, wait_until_lent
from tests.support.tenant import Tenant

PROGRAM = Path(__file__).with_name("borrow.py")
GIB = 1 << 30
REQUEST, LIMIT = "4Gi", "12Gi"
DEVICE_BYTES = 12 * GIB + (GIB >> 1)
ASKED_BYTES = 3 * GIB
LEAST_BORROWED_BYTES = 11 * GIB
WAYS: dict[str, dict[str, Any]] = {
    "movable": {"policy": {"lending": "movable"}, "oversubscription": {"host_memory": "24Gi"}},
    "evict": {"policy": {"lending": "evict"}},
}


def reclaim_ms(way: str, directory: Path, times: int) -> list[float]:
    """Return the duration of the asking allocation, each time with a new borrower."""
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=DEVICE_BYTES)
    node = host.Node(directory / "node", simulated, **WAYS[way])
    found = []
    with ExitStack() as stack:
        stack.callback(node.close)
        if way == "evict":
            stack.enter_context(agent(node, []))
        for number in range(times):
            found.append(_once(node, directory / str(number), way))
    return found


def _once(node: host.Node, directory: Path, way: str) -> float:
    with ExitStack() as stack:

        def tenant(name: str, memory: str, borrow: str) -> Tenant:
            one = Tenant(directory, name, {"GPUSHARE_MEMORY": memory, "BORROW": borrow}, node, program=PROGRAM)
            stack.callback(one.close)
            one.container.start()
            one.expect("seen")
            return one

        borrower = tenant("borrower", f"{REQUEST}..{LIMIT}", "all")
        if way == "evict":
            wait_until_lent(node)
        borrower.go()
        borrower.expect("full")
        on_device = taken(node.driver_root, borrower.pid_namespace()).current_bytes
        if on_device < LEAST_BORROWED_BYTES:
            raise RuntimeError(f"the borrower has only {on_device} bytes on the device, so the run shows nothing")
        asking = tenant("asking", REQUEST, str(ASKED_BYTES))
        asking.go()
        return float(asking.expect("full")["result"])


def reclaims_ms(times: int = 10) -> dict[str, list[float]]:
    found = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory(prefix="elastic-", dir=host.BUILD) as directory:
            found[f"elastic.reclaim_ms.{way}"] = reclaim_ms(way, Path(directory), times)
    return found


def main() -> int:
    host.enter_private_mounts()
    for key, values in reclaims_ms(3).items():
        print(f"{key:<32} {', '.join(f'{value:.1f}' for value in values)}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
