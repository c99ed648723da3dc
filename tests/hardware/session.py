"""The argument and the result of a check."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from tests.hardware import processes
from tests.hardware.machine import Machine
from tests.hardware.place import Limit, Place

SETTLE_S = 3.0
IN_PLACE = "libcuda.so.1"  # the library that a program in a place loads
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)


class Result(NamedTuple):
    """`verdict`: "held" or "missed" for a promise, "measured" without one; or "absent", "failed" or "not run".

    "absent": this machine lacks what the check needs. "failed": a program of the check failed, and `stderr` is the end
    of what it printed. "not run": no time was left.
    """

    verdict: str
    note: str
    values: dict[str, Any]
    seconds: float = 0.0
    stderr: str = ""


class Session(NamedTuple):
    """One check's context: the machine, the deadline and the directories."""

    machine: Machine
    deadline: float  # time.monotonic()
    short: bool
    work: Path
    meter: processes.Tenant
    idle_at_start_bytes: int

    def need_shim(self) -> None:
        """Raise Absent if there is no shim."""
        if not (self.machine.shim / "libcuda.so").exists():
            raise processes.Absent(f"needs the shim, and {self.machine.shim} has none")

    def place(
        self,
        memory_bytes: Optional[int] = None,
        compute_percent: Optional[int] = None,
        company: Optional[Path] = None,
        told: tuple[int, int] = (0, 0),
        round_ms: int = 0,
    ) -> Place:
        self.need_shim()
        return Place(self.machine, Limit(memory_bytes, compute_percent, *told, round_ms), company)

    def tenant(self, what: str, place: Optional[processes.Inside] = None, **arguments: Any) -> processes.Tenant:
        """Start a program with the driver, natively or in a place."""
        library = IN_PLACE if place else self.machine.libcuda
        return processes.Tenant(what, self.deadline, place, library=library, **arguments)

    def ask(self, what: str, place: Optional[processes.Inside] = None, **arguments: Any) -> Any:
        with self.tenant(what, place, **arguments) as tenant:
            return tenant.receive()

    def idle_bytes(self) -> int:
        """Return the used bytes once they are stable: memory of a process that just ended is freed with a delay."""
        used, until = self.used_bytes(), time.monotonic() + SETTLE_S
        while used > self.idle_at_start_bytes and time.monotonic() < min(until, self.deadline):
            time.sleep(0.02)
            used = self.used_bytes()
        return used

    def process_bytes(self, pid: int) -> Optional[int]:
        """Return what NVML counts for a process. None: NVML does not list the process."""
        self.meter.deadline = self.deadline
        self.meter.go(pid=pid)
        found: Optional[int] = self.meter.receive()["process_bytes"]
        return found

    def used_bytes(self) -> int:
        """Return the used bytes of the whole device, from the driver without the shim."""
        self.meter.deadline = self.deadline
        self.meter.go()
        return int(self.meter.receive()["used_bytes"])


def verdict(wrong: Sequence[str], note: str, values: dict[str, Any]) -> Result:
    """Return "held" if nothing is wrong; otherwise "missed" with what is wrong."""
    return Result("missed" if wrong else "held", "; ".join(wrong) or note, values)


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and its 95 % confidence interval."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, -math.inf, math.inf
    half = T95[min(len(values) - 2, len(T95) - 1)] * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def size(count: float) -> str:
    """Format bytes for a reader."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count:.0f} bytes"
