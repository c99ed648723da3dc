"""The deadline of a start, the signals that end it, and the undo after them (start path)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Optional

from ..core.errors import GpushareError

DEADLINE_S = 20  # runc has no timeout: a hanging hook would hang the engine
UNDO_DEADLINE_S = 2  # of each step; the sum is below the 30 s timeout of hooks
WATCHED = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(GpushareError):
    """A signal or the deadline ended the start; its effects are undone."""


def _interrupt(number: int, _: object) -> None:
    """End the start once: a second signal must not end the undo."""
    ignore_signals()
    if number == signal.SIGALRM:
        raise Interrupted(f"the start took longer than {DEADLINE_S} s", "see whether the driver or the disk hangs")
    raise Interrupted(f"the start was interrupted by signal {number}", "start the container again")


def _interrupt_undo(number: int, _: object) -> None:
    raise Interrupted(f"undoing took longer than {UNDO_DEADLINE_S} s")


def give_up_later() -> None:
    signal.signal(signal.SIGALRM, _interrupt_undo)
    signal.alarm(UNDO_DEADLINE_S)


def watch() -> None:
    """Set the deadline and the signal handlers. crun starts hooks with all signals blocked; SIGALRM needs
    unblocking."""
    for number in WATCHED:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    signal.alarm(DEADLINE_S)


def ignore_signals() -> None:
    signal.alarm(0)
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)


def undo(state_dir: str, container_id: str, undo_applied: Optional[Callable[[], None]]) -> None:
    """Undo a start. A step that fails or hangs is left for the next start, poststop or prune, because the lease dies
    with this process. The original error is the one that is reported."""
    from ..state import leases, storage

    for step in (
        undo_applied or (lambda: None),
        lambda: leases.undo(state_dir, container_id),
        lambda: storage.empty_trash(state_dir),
    ):
        try:
            give_up_later()  # a hanging step must not leave the next one without a deadline
            step()
        except (OSError, GpushareError):
            pass
    signal.alarm(0)
