"""The time that a start has, the signals that end it, and what is undone then (start path)."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Optional

from ..core.errors import GpushareError

DEADLINE_S = 20  # runc has no timeout of its own: a hook that hangs would hang the engine
UNDO_DEADLINE_S = 2  # for each step; all of it within the 30 s that hooks have from an engine's configuration
WATCHED = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interrupted(GpushareError):
    """A signal or the deadline; what was done is undone."""


def _interrupt(number: int, _: object) -> None:
    """Ends the start once; a second signal must not end the undoing."""
    ignore_signals()
    if number == signal.SIGALRM:
        raise Interrupted(f"the start took longer than {DEADLINE_S} s", "see whether the driver or the disk hangs")
    raise Interrupted(f"the start was ended by signal {number}", "start the container again")


def _interrupt_undo(number: int, _: object) -> None:
    raise Interrupted(f"undoing took longer than {UNDO_DEADLINE_S} s")


def give_up_later() -> None:
    signal.signal(signal.SIGALRM, _interrupt_undo)
    signal.alarm(UNDO_DEADLINE_S)


def watch() -> None:
    """crun starts a hook with all signals blocked, and then the deadline would never come."""
    for number in WATCHED:
        signal.signal(number, _interrupt)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED)
    signal.alarm(DEADLINE_S)


def ignore_signals() -> None:
    signal.alarm(0)
    for number in WATCHED:
        signal.signal(number, signal.SIG_IGN)


def undo(state_dir: str, container_id: str, undo_applied: Optional[Callable[[], None]]) -> None:
    """Takes everything back. What fails here, or hangs, is left for the next start, poststop or prune: our lease dies
    with us. The error that led here is the one that counts."""
    from ..state import leases, storage

    for step in (
        undo_applied or (lambda: None),
        lambda: leases.undo(state_dir, container_id),
        lambda: storage.empty_trash(state_dir),
    ):
        try:
            give_up_later()  # one that hangs must not leave the others without a deadline
            step()
        except (OSError, GpushareError):
            pass
    signal.alarm(0)
