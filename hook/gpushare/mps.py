"""NVIDIA's MPS as a backend: whether a device's control daemon takes clients, and what a client gets (start path).

unsupported(site)     -> reason | None     only files are read
ops(shares, config)   -> ops               of the shares whose compute MPS holds
"""

from __future__ import annotations

from .light import TYPE_CHECKING, Optional, Sequence
from .model import Config, Share
from .ops import Op

if TYPE_CHECKING:
    from .backends import Site


def unsupported(site: Site) -> Optional[str]:
    """Why the daemon of this device cannot serve the container; None: it can."""
    return "its control daemon is not running on this device"


def ops(shares: tuple[Share, ...], config: Config) -> Sequence[Op]:
    """Mounts of the pipe directory."""
    return ()
