"""Wait for SIGTERM in a program that serves until it is stopped."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable() -> Iterator[int]:
    """A descriptor to select on, readable once SIGTERM has arrived. For the main thread.

    Python's handlers run in the main thread, but a signal that another thread receives does not interrupt its select.
    Therefore the interpreter writes to the descriptor, in the thread that receives it (signal.set_wakeup_fd).
    """
    reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGTERM, before)
        os.close(reader)
        os.close(writer)
