"""The shim as a backend: gpushare's library in the container enforces both limits. Runs on the start path."""

from __future__ import annotations

from ...core import constants
from .base import LIMITS, Backend

BACKEND = Backend(
    name="shim",
    enforces=LIMITS,
    lends=(constants.MOVABLE, constants.EVICT),
    suspends=True,
    why_unsupported=lambda limit, site: None,
    alone="containers that use MPS are on the device, and the driver gives them no time slices of their own",
    enforced_by="gpushare's library, in every process of the container: an allocation over the limit fails, a launch "
    "waits. All processes of the container count together.",
    bypassed_by="a program that bypasses the CUDA library on purpose, and work outside of CUDA: "
    "OpenGL, Vulkan, video codecs (docs/security.md)",
    changes_live="memory, compute, mode, priority, pause: at once",
    tested="on the simulated driver",
)
