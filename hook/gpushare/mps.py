"""NVIDIA's MPS as a backend: whether a device's control daemon takes clients, and what a client gets (start path).

state(uuid, state_dir)        -> MpsState           only files are read
ops(state, state_dir, share)  -> tuple[Op, ...]     of a share whose compute MPS holds
"""

from __future__ import annotations

from .light import NamedTuple
from .model import Share
from .ops import Op


class MpsState(NamedTuple):
    """`problem`: why a container cannot be a client now, with `hint`; "": it can."""

    problem: str = ""
    hint: str = ""


def state(uuid: str, state_dir: str) -> MpsState:
    """Of the daemon of one device."""
    return MpsState("its control daemon is not running on this device")


def ops(found: MpsState, state_dir: str, share: Share) -> tuple[Op, ...]:
    """Mounts of the pipe directory."""
    return ()
