"""A program that forks a child after CUDA has started, and ends."""

from __future__ import annotations

import os
import signal

from tests.conformance.driver import Driver
from tests.hardware.tenant import listen, say


def forked(library: str, bytes: int, exits: bool) -> None:
    """Take memory and fork a child, which waits with the driver's descriptors. On a line be killed, or exit."""
    cuda = Driver(library)
    cuda.context()
    cuda.alloc(bytes)
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    say(child=child)
    listen()
    if not exits:
        os.kill(os.getpid(), signal.SIGKILL)
