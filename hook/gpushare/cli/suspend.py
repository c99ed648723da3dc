"""gpushare pause, suspend, resume: hold a running container up, with its memory on the device or on the host."""

from __future__ import annotations

from typing import Any, Optional

import click

from ..allocation import limit_request
from ..config import node
from ..core import constants
from ..core.quantity import human
from ..state import audit_log, leases
from . import facts
from .ids import complete_ids
from .limit import change
from .options import Paths, with_format
from .output import Progress, write_json, write_line

TIMEOUT_S = 60.0


def _with_timeout(command: Any) -> Any:
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        default=TIMEOUT_S,
        show_default=True,
        metavar="SECONDS",
        help="Time for the container's work to end, or for its memory to become free.",
    )(command)


@click.command()
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@click.option("--release-memory", is_flag=True, help="Also move its device memory to the host: gpushare suspend.")
@with_format
@click.pass_obj
def pause(paths: Paths, id: str, release_memory: bool, output: str) -> None:
    """Pause the kernel launches of a container.

    Launches wait, without an error, until `gpushare resume`. Kernels that were launched already finish; memory calls,
    copies and the container's processes continue.
    """
    container_id = facts.running(paths.state_dir, id)
    if release_memory:
        _suspend(paths, id, container_id, TIMEOUT_S, output)
        return
    _write_paused(paths, id, container_id, True, output)


@click.command()
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@_with_timeout
@with_format
@click.pass_obj
def suspend(paths: Paths, id: str, timeout: float, output: str) -> None:
    """Move a container's device memory to the host (experimental).

    Its device memory is then free for other containers, and so is its share. Its next call of CUDA waits, without an
    error, until `gpushare resume`, or until `gpushare agent` resumes it. Needs driver 570 or later; see docs/suspend.md
    for what cannot be suspended.
    """
    _suspend(paths, id, facts.running(paths.state_dir, id), timeout, output)


@click.command()
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@_with_timeout
@with_format
@click.pass_obj
def resume(paths: Paths, id: str, timeout: float, output: str) -> None:
    """Let a paused or suspended container go on.

    A suspended container first gets its share and its memory back. If others have them, this waits, and then fails; the
    container stays suspended.
    """
    container_id = facts.running(paths.state_dir, id)
    lease = leases.find(paths.state_dir, container_id)
    if lease is None or not any(share.phase for share in lease.shares):
        _write_paused(paths, id, container_id, False, output)
        return
    with Progress() as progress:
        done = _site(paths, progress).resume(container_id, timeout)
    changed = change(paths, container_id, lambda lease, live, seen: limit_request.paused(lease, False), False)
    if changed.before.shares == changed.after.shares:  # otherwise it is in the log
        _log(paths, container_id)
    _write(_called(id, container_id), done, "resumed", "resumed already", output, {"paused": False})


def _suspend(paths: Paths, id: str, container_id: str, timeout_s: float, output: str) -> None:
    with Progress() as progress:
        done = _site(paths, progress).suspend(container_id, timeout_s)
    if done.changed:
        _log(paths, container_id)
    name = _called(id, container_id)
    _write(name, done, f"suspended: it goes on with `gpushare resume {name}`", "suspended already", output)


def _site(paths: Paths, progress: Progress) -> Any:
    from ..allocation import suspension  # loads much that pause does not need

    return suspension.Site(paths.state_dir, facts.host(paths), progress.say)


def _called(given: str, container_id: str) -> str:
    """Return the id, or the engine's name, as the user wrote it."""
    return constants.short(container_id) if container_id.startswith(given) else given


def _log(paths: Paths, container_id: str) -> None:
    lease = leases.find(paths.state_dir, container_id)
    if lease is not None:
        audit_log.changed(node.log_target(paths.config, paths.state_dir), lease)


def _write(name: str, done: Any, now: str, already: str, output: str, more: Optional[dict[str, Any]] = None) -> None:
    if output == "json":
        write_json(
            {
                "id": done.id,
                **(more or {}),
                "changed": done.changed,
                "bytes": done.size_bytes,
                "processes": done.processes,
                "seconds": round(done.seconds, 3),
            }
        )
        return
    write_line(f"{name} is {now if done.changed else already}")
    if done.size_bytes:
        rate = human(int(done.size_bytes / max(done.seconds, 0.001)))
        write_line(f"{human(done.size_bytes)} in {done.seconds:.1f} s ({rate}/s)")


def _write_paused(paths: Paths, id: str, container_id: str, pause: bool, output: str) -> None:
    changed = change(paths, container_id, lambda lease, live, seen: limit_request.paused(lease, pause), False)
    did = changed.before.shares != changed.after.shares
    if output == "json":
        moved = {} if pause else {"bytes": 0, "processes": 0, "seconds": 0.0}
        write_json({"id": changed.after.id, "paused": pause, "changed": did, **moved})
        return
    called = _called(id, container_id)
    now = f"paused: its launches wait until `gpushare resume {called}`" if pause else "running: launches go ahead"
    write_line(f"{called} is {now if did else now.partition(':')[0] + ' already'}")
