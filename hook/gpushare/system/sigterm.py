"""The usual end of what serves: SIGTERM."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable() -> Iterator[int]:
    """A descriptor to select on: there is something to read once SIGTERM came. For the main thread.

    Python's handlers run in the main thread, and a signal that another thread took does not wake that from a select:
    so it is the interpreter that writes, in whichever thread it was (signal.set_wakeup_fd).
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
