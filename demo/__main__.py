"""`make demo`: two containers at the same time under runc, through the hook, on one simulated 16 GiB GPU.

Exit code 0 if the simulated GPU counted that both containers reached their limit and neither exceeded it; else 1.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from simulator.simhost import make_simhost
from tests.support import host, judge
from tests.support.runc import RuntimeFailed
from tests.support.tenant import Tenant

from . import show
from .tenant import LAST_BYTES

GIB = 1 << 30
GPU_BYTES = 16 * GIB
ASKED = {"alice": ("4Gi", 4 * GIB), "bob": ("25%", GPU_BYTES // 4)}


def interrupted(number: int, _: Any) -> None:
    """Handle SIGTERM and SIGHUP like Ctrl-C, so that every cleanup runs."""
    raise KeyboardInterrupt


def context_bytes(seen: dict[str, Any]) -> int:
    """The memory that the program used before its first allocation."""
    taken: int = seen["cuda_total_bytes"] - seen["cuda_free_bytes"]
    return taken


def judged(name: str, full: dict[str, Any], seen: dict[str, Any], ledger_bytes: int) -> show.Row:
    """The row of one container, with a verdict if it exceeded its limit, could not allocate all memory that was free at
    the start (up to one block), or did not see its limit."""
    asked, limit_bytes = ASKED[name]
    verdict = ""
    if ledger_bytes > limit_bytes:
        verdict = f"MISSED: {show.size(ledger_bytes - limit_bytes)} over"
    elif seen["cuda_free_bytes"] - full["got_bytes"] >= LAST_BYTES:
        verdict = f"MISSED: {show.size(seen['cuda_free_bytes'] - full['got_bytes'])} never granted"
    elif seen["cuda_total_bytes"] != limit_bytes or seen["nvml_total_bytes"] != limit_bytes:
        verdict = "MISSED: the container does not see its limit"
    return show.Row(name, asked, limit_bytes, context_bytes(seen), full["got_bytes"], ledger_bytes, verdict)


def demo(directory: Path, cleanup: contextlib.ExitStack) -> list[show.Row]:
    simulated = make_simhost(directory / "host", gpus=1, memory_bytes=GPU_BYTES)
    node = host.Node(directory / "node", simulated)
    cleanup.callback(node.close)
    show.step(f"One GPU with {show.size(GPU_BYTES)}, two containers started by runc with the gpushare hook:")
    tenants = []
    for number, (name, (asked, _)) in enumerate(ASKED.items()):
        tenant = Tenant(directory, name, {"GPUSHARE_MEMORY": asked}, node, id=f"{name}-{os.getpid()}")
        cleanup.callback(tenant.close)
        tenants.append(tenant)
        tenant.container.start()
        show.tenant(number, name, f"is started with GPUSHARE_MEMORY={asked}")

    show.step("Each sees a GPU of its own size:")
    seen = [tenant.expect("seen") for tenant in tenants]
    for number, tenant in enumerate(tenants):
        show.seen(number, tenant.name, seen[number])
    show.remark(f"{show.size(context_bytes(seen[0]))} of each limit is the program's CUDA context, as on any GPU.")

    show.step("Both take memory at the same time, until they are refused:")
    for tenant in tenants:
        tenant.go()
    full = [tenant.expect("full") for tenant in tenants]
    for number, tenant in enumerate(tenants):
        show.full(number, tenant.name, full[number])

    show.step("Meanwhile on the host: gpushare list")
    listed = node.cli("list")
    show.output(listed.stdout + listed.stderr)

    taken = [judge.peak_bytes(simulated, tenant.pid_namespace()) for tenant in tenants]
    for tenant in tenants:
        tenant.go()
        tenant.expect("freed")
        if tenant.container.wait():
            raise AssertionError(f"{tenant.name} ended with {tenant.container.exit_code}\n{tenant.container.stderr}")
    return [judged(tenant.name, full[i], seen[i], taken[i]) for i, tenant in enumerate(tenants)]


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    host.enter_private_mounts()
    try:
        with tempfile.TemporaryDirectory(prefix="demo-", dir=host.BUILD) as work, contextlib.ExitStack() as cleanup:
            rows = demo(Path(work), cleanup)
    except KeyboardInterrupt:
        print("\ndemo: stopped; containers and mounts are gone", file=sys.stderr)
        return 130
    except (AssertionError, RuntimeFailed, RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    show.step("The memory of each container, as the simulated GPU counted it:")
    show.verdict(rows)
    if any(row.verdict for row in rows):
        return 1
    show.step("Each got all of its share, and not a byte more.")
    show.step("Next:")
    show.remark("make playground   a shell with this GPU, gpushare and docker: docs/tour.md")
    show.remark("README.md         how to install gpushare on a host with a GPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
