"""NVIDIA's MPS as a backend: whether a device's control daemon takes clients, and what a client gets (start path).

state(device_uuid, state_dir) -> MpsState      only files are read
ops(shares, config)           -> ops           of the shares whose compute MPS holds
"""

from __future__ import annotations

from .light import NamedTuple, Optional, Sequence
from .model import Config, Share
from .ops import Op


class MpsState(NamedTuple):
    """`reason`: why a container cannot be a client now; None: it can."""

    reason: Optional[str]


def state(device_uuid: str, state_dir: str) -> MpsState:
    """Of the daemon of one device."""
    return MpsState("its control daemon is not running on this device")


def ops(shares: tuple[Share, ...], config: Config) -> Sequence[Op]:
    """Mounts of the pipe directory."""
    return ()
