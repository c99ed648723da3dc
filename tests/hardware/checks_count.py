"""Measure what the driver counts of a process's memory, how long that takes, and what single objects cost.

The figures decide whether a limit can be enforced by the driver's own count instead of by charges.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.hardware import processes
from tests.hardware.checks_product import has_torch
from tests.hardware.session import Result, Session, size

QUERIES, SHORT_QUERIES = 400, 20
QUERY_S = 0.5  # in each situation
KERNELS = 300  # of 2 ms
NAMESPACE = ("unshare", "-p", "-f", "--mount-proc")


def spread_us(values: Sequence[int]) -> dict[str, float]:
    """Return the median and the 99th percentile of nanoseconds, in microseconds."""
    ordered = sorted(values)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return {"median_us": statistics.median(ordered) / 1e3, "p99_us": p99 / 1e3, "n": len(ordered)}


def own_rows(said: dict[str, Any], pid: int) -> list[int]:
    """Return the bytes of each of NVML's rows with this pid."""
    return [used for listed, used in said["rows"] if listed == pid]


def listing(said: dict[str, Any], host_pid: int) -> dict[str, Any]:
    """Return how NVML lists a process: by its own pid or by the host's, how often, and with how many bytes."""
    own = own_rows(said, said["pid"])
    return {
        "pid": said["pid"],
        "host_pid": host_pid,
        "rows": said["rows"],
        "times_by_own_pid": len(own),
        "times_by_host_pid": len(own_rows(said, host_pid)),
        "bytes": max(own or own_rows(said, host_pid), default=None),
    }


def in_pid_namespace(session: Session, where: dict[str, Any]) -> dict[str, Any]:
    """Return how NVML lists a process that has a pid namespace of its own; {"missing": reason} if there are none."""
    if not shutil.which(NAMESPACE[0]):
        return {"missing": "no unshare in PATH"}
    try:
        with processes.Tenant(
            "count", session.deadline, before=NAMESPACE, library=session.machine.libcuda, **where
        ) as one:
            said = one.receive()
            children = Path(f"/proc/{one.process.pid}/task/{one.process.pid}/children").read_text().split()
            return listing(said, int(children[0]) if children else 0)
    except (processes.Failed, processes.Absent, OSError) as error:
        return {"missing": str(error)}


def count(session: Session) -> Result:
    """Ask the real NVML inside a process what it counts for that process, and how long such a query takes."""
    where: dict[str, Any] = {"nvml": session.machine.libnvml, "uuid": session.machine.uuid}
    queries = SHORT_QUERIES if session.short else QUERIES
    with session.tenant("count", **where) as one, session.tenant("churn") as other:
        said = one.receive()
        other.receive()

        def latency(kernels: int = 0) -> dict[str, float]:
            one.go(queries=queries, run_s=QUERY_S, kernels=kernels)
            return spread_us(one.receive()["query_ns"])

        query = {"idle": latency(), "a kernel runs": latency(KERNELS)}
        other.go(run_s=0.1 if session.short else QUERY_S)
        query["contexts are created"] = latency()
        made = other.receive()["contexts"]
        host_pid = one.process.pid
    values: dict[str, Any] = {
        "own": listing(said, host_pid),
        "in_pid_namespace": in_pid_namespace(session, where),
        "query": query,
        "contexts_created": made,
        "first_init_us": said["init_ns"][0] / 1e3,
        "init": spread_us(said["init_ns"][1:]),
        "shutdown": spread_us(said["shutdown_ns"]),
    }
    return Result("measured", sentence(values), values)


def sentence(values: dict[str, Any]) -> str:
    own, inside = values["own"], values["in_pid_namespace"]
    parts = [f"NVML lists the own pid {own['times_by_own_pid']} times"]
    if own["bytes"] is not None:
        parts[0] += f", with {size(own['bytes'])}"
    if "missing" in inside:
        parts.append(f"pid namespace: {inside['missing']}")
    else:
        parts.append(
            f"in a pid namespace {inside['times_by_own_pid']} times by its own pid {inside['pid']}, "
            f"{inside['times_by_host_pid']} times by the host's"
        )
    parts += [
        f"a query takes {one['median_us']:.0f} us (p99 {one['p99_us']:.0f}) while {name}"
        if name != "idle"
        else f"a query takes {one['median_us']:.0f} us (p99 {one['p99_us']:.0f})"
        for name, one in values["query"].items()
    ]
    parts.append(f"nvmlInit {values['init']['median_us']:.0f} us, nvmlShutdown {values['shutdown']['median_us']:.0f}")
    return "; ".join(parts)


def costs(session: Session) -> Result:
    """Measure what streams, events, graphs, limits, pools, exports and library handles take of the device."""
    where: dict[str, Any] = {"nvml": session.machine.libnvml, "uuid": session.machine.uuid}
    session.idle_bytes()
    rows = [row for what in ("driver_costs", "limit_costs") for row in session.ask(what, **where)["rows"]]
    values: dict[str, Any] = {"rows": rows}
    if has_torch() and not session.machine.simhost:
        try:
            rows += session.ask("torch_costs", **where)["rows"]
        except (processes.Failed, processes.Absent) as error:
            values["torch"] = str(error)
    dear = sorted((row for row in rows if row.get("device_bytes")), key=lambda row: -int(row["device_bytes"]))
    note = ", ".join(f"{row['item']} {size(row['device_bytes'])}" for row in dear[:5])
    hidden = [row["item"] for row in rows if (row.get("process_bytes") or 0) < row.get("device_bytes", 0)]
    return Result(
        "measured", f"{len(rows)} kinds of objects; most take: {note or 'nothing'}", {**values, "hidden": hidden}
    )
