"""Report to systemd that a unit of Type=notify is up, sd_notify(3). Not on the start path.

tell(pid, status)    send the report; does nothing in a process that systemd did not start so
"""

from __future__ import annotations

import os
import socket

from ..core.errors import KernelError
from ..core.quoting import shown


def notify(pid: int, status: str) -> None:
    """Report that the unit is up with main process `pid`, which need not be our child. Raises KernelError, because
    systemd ends a start that is not reported."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    text = f"READY=1\nMAINPID={pid}\nSTATUS={status}"
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notify:
            notify.sendto(text.encode(), address)
    except (OSError, ValueError) as error:
        raise KernelError(f"NOTIFY_SOCKET {shown(path)}: {error}") from None
