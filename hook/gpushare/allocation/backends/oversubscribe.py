"""Memory beyond the device: the shim enforces it, and no request names this backend. Start path."""

from __future__ import annotations

from .base import VIRTUAL, Backend

BEYOND = Backend(
    name="oversubscribe",
    enforces=(VIRTUAL,),
    supports=lambda limit, site: None,
    enforced_by="our library, which counts both parts against their limits: what the device's part has no room for is "
    "memory of the host (managed memory; of cuMemCreate, the NUMA node's), and what fits in neither fails. The host's "
    "budget is promised whole before a start.",
    bypassed_by="whatever goes around the shim, as above; where the kernel does not count pages of that memory, the "
    "container's memory cgroup does not hold it either",
    changes_live="the border between both parts, with the memory limit: at once; the whole stays as it was promised",
    tested="on the simulated driver (docs/oversubscription.md)",
)
