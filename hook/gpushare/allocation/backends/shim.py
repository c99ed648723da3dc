"""The shim as a backend: our library in the container enforces both limits. Runs on the start path."""

from __future__ import annotations

from ...core import constants
from .base import LIMITS, Backend

BACKEND = Backend(
    name="shim",
    enforces=LIMITS,
    lends=(constants.MOVABLE, constants.EVICT),
    why_unsupported=lambda limit, site: None,
    alone="containers of MPS are on the device, and the driver does not slice time between those",
    enforced_by="our library, in every process of the container: an allocation over the limit fails, a launch "
    "waits. For all processes of the container together.",
    bypassed_by="a program that bypasses the CUDA library on purpose, and work outside of CUDA: "
    "OpenGL, Vulkan, video codecs (docs/security.md)",
    changes_live="memory, compute, mode, priority, pause: at once",
    tested="on the simulated driver",
)
