"""The kernel's dmem cgroup controller as a backend for memory (start path).

unsupported(device, config) -> reason | None
ops(shares, config)         -> ops
"""

from __future__ import annotations

from .light import Optional, Sequence
from .model import Config, Device, Share
from .ops import Op


def unsupported(device: Device, config: Config) -> Optional[str]:
    """Why the kernel cannot limit memory of this device; None: it can."""
    return "the kernel has no dmem controller (Linux 6.14, cgroup v2)"


def ops(shares: tuple[Share, ...], config: Config) -> Sequence[Op]:
    return ()
