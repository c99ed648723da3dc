"""Report or stop processes that use a GPU without gpushare's library (state/unlimited.py). Not on the start path.

of_driver(leases, gpus)     -> pids by container, for unlimited.find
Watch().follow(...)            reports once, and stops the process if configured
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

from ..core.model import Lease
from ..gpu.nvml_usage import Gpu
from ..state import audit_log
from ..state.unlimited import Unlimited
from ..system import procs
from . import overuse


def of_driver(leases: Sequence[Lease], gpus: Optional[Mapping[str, Gpu]]) -> dict[str, set[int]]:
    """Return the processes that the driver lists, by container."""
    found: dict[str, set[int]] = {}
    if not gpus:
        return found
    owner = overuse.Owners(leases)
    for process in (one for gpu in gpus.values() for one in gpu.processes):
        found.setdefault(owner(process.pid) or "", set()).add(process.pid)
    return found


class Watch:
    """Remembers the processes of earlier rounds."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()  # (pid, start) of the previous round
        self._reported: set[tuple[int, int]] = set()

    def follow(self, leases: Iterable[Lease], found: Sequence[Unlimited], log: str, action: str) -> None:
        """Log each process that was found twice in a row; with `action` STOP, also kill it, and no other process."""
        by_id = {lease.id: lease for lease in leases}
        now = {one.process[:2]: one for one in found}
        for key in now.keys() & self._seen:
            one = now[key]
            if key not in self._reported:
                audit_log.unlimited(log, by_id[one.id], key[0], one.command, one.library, action)
            if action == overuse.STOP:
                procs.wait(one.process, 0, signal.SIGKILL)
        self._reported = (self._reported | (now.keys() & self._seen)) & now.keys()
        self._seen = set(now)
