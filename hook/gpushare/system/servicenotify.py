"""Telling systemd that a unit of Type=notify has come up, sd_notify(3). Not on the start path.

tell(pid, status)    to whoever started us that way; nothing otherwise
"""

from __future__ import annotations

import os
import socket

from ..core.errors import KernelError
from ..core.quoting import shown

_VARIABLE = "NOTIFY_SOCKET"


def tell(pid: int, status: str) -> None:
    """The unit is up, and its process is `pid`, which need not be a child of ours. Raises KernelError: a start that
    systemd does not hear of is one that it ends."""
    path = os.environ.get(_VARIABLE, "")
    if not path:
        return
    text = f"READY=1\nMAINPID={pid}\nSTATUS={status}"
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.sendto(text.encode(), address)
    except (OSError, ValueError) as error:
        raise KernelError(f"{_VARIABLE} {shown(path)}: {error}") from None
