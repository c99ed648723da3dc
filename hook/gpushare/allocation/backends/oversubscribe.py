"""Memory beyond the device: the shim enforces it, and no request names this backend. Runs on the start path."""

from __future__ import annotations

from .base import VIRTUAL, Backend

BEYOND = Backend(
    name="oversubscribe",
    enforces=(VIRTUAL,),
    why_unsupported=lambda limit, site: None,
    enforced_by="gpushare's library, which charges the device part and the host part to separate limits. Memory that "
    "does not fit in the device part is placed on the host (managed memory; for cuMemCreate, memory of the NUMA node). "
    "An allocation that fits in neither part fails. The host part is reserved in full before the container starts.",
    bypassed_by="a program that bypasses the shim, as above. If the kernel does not count pages of that memory, the "
    "container's memory cgroup does not limit it either",
    changes_live="the residency boundary, with the memory limit: at once. The total stays as it was reserved",
    tested="on the simulated driver (docs/oversubscription.md)",
)
