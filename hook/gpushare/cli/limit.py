"""gpushare limit set, limit show: show and change the limits of a running container."""

from __future__ import annotations

from typing import Any, Callable, Optional

import click

from ..allocation import limit_request, limit_update
from ..config import node
from ..core import constants
from ..core.errors import GpushareError, RequestError
from ..core.model import Lease, Share
from ..core.quantity import human
from ..core.quoting import shown
from ..gpu.selectors import device_name
from ..state import audit_log, leases
from . import facts
from .ids import complete_ids
from .options import Paths, given, with_format
from .output import Column, write_json, write_line, write_table

# Placement names variables in its hints; this command shows its own options instead
_OPTIONS = (
    (f"{constants.ENV_COMPUTE_MODE}=", "--compute-mode "),
    (f"{constants.ENV_COMPUTE}=", "--compute "),
    (constants.ENV_MEMORY, "--memory"),
)
_COLUMNS = (
    *(Column("slot", True), Column("device", True), Column("memory used", True), Column("memory", True)),
    *(Column("compute", True), Column("mode"), Column("priority"), Column("launches")),
)


def _given(context: click.Context, option: click.Parameter, value: Optional[str]) -> str:
    return given(context, option, value) or ""


@click.group()
def limit() -> None:
    """Show and change the limits of a running container."""


@limit.command("set")
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@click.option("--memory", callback=_given, metavar="AMOUNT", help="6Gi, 50%, 4Gi..12Gi, +1Gi, -512Mi, or unlimited.")
@click.option("--compute", callback=_given, metavar="PERCENT", help="Percent of the device's time; 100 is no limit.")
@click.option("--compute-mode", "mode", type=click.Choice(["hard", "soft"]), help="soft: also use time that is idle.")
@click.option("--priority", type=click.Choice(["normal", "high", "0", "1"]), help="high: gets idle time first.")
@click.option(
    "--device", callback=_given, metavar="SLOT|UUID", help="Change this device only.  [default: all of the container]"
)
@click.option("--dry-run", is_flag=True, help="Show what would change, change nothing.")
@with_format
@click.pass_obj
def set_(
    paths: Paths,
    id: str,
    memory: str,
    compute: str,
    mode: Optional[str],
    priority: Optional[str],
    device: str,
    dry_run: bool,
    output: str,
) -> None:
    """Change the limits of a running container.

    ID is an id or a name of `gpushare list`, or a prefix of an id. A limit can be raised as far as the device has room
    and policy allows, and can always be lowered. A program that holds more memory than its new limit keeps it, but new
    allocations fail until it is below the limit.
    """
    wish = limit_request.parse(memory, compute, mode or "", priority or "", device)
    if wish == limit_request.LimitRequest(device=wish.device):
        raise RequestError("nothing to change", "give --memory, --compute, --compute-mode or --priority")
    container_id = facts.running(paths.state_dir, id)
    node = facts.host(paths)

    def decide(lease: Lease, live: tuple[Lease, ...], seen: leases.View) -> tuple[Share, ...]:
        return limit_request.shares(lease, wish, node, live, seen.blocked(node))

    changed = change(paths, container_id, decide, dry_run)
    if output == "json":
        write_json({**_plain(changed), "dry_run": dry_run})
        return
    write_table(_COLUMNS, _rows(changed))
    if changed.before.shares == changed.after.shares:
        write_line("nothing changes" if dry_run else "nothing changed")
    elif dry_run:
        write_line("nothing was changed: --dry-run")
    for line in _over(changed):
        write_line(line)


@limit.command("show")
@click.argument("id", metavar="ID", shell_complete=complete_ids)
@with_format
@click.pass_obj
def show(paths: Paths, id: str, output: str) -> None:
    """Show the limits of a container and its memory usage."""
    container_id = facts.running(paths.state_dir, id)
    one = facts.one(paths.state_dir, container_id)
    if one is None or one.lease is None:
        raise RequestError(f"no running container {shown(id)}", "`gpushare list` shows containers with a share")
    used = tuple(use.used_bytes for use in one.uses)
    seen = limit_update.Changed(one.lease, one.lease, used)
    if output == "json":
        write_json({"id": one.id, "state": one.state, "shares": _plain(seen)["shares"]})
        return
    write_table(_COLUMNS, _rows(seen))
    for line in _over(seen):
        write_line(line)


def change(paths: Paths, container_id: str, decide: limit_update.DecideFn, dry_run: bool) -> limit_update.Changed:
    try:
        changed = limit_update.change(paths.state_dir, container_id, decide, dry_run)
        if changed.before.shares != changed.after.shares and not dry_run:
            audit_log.changed(node.log_target(paths.config, paths.state_dir), changed.after)
        return changed
    except GpushareError as error:
        for variable, option in _OPTIONS:
            error.hint = error.hint.replace(variable, option)
        raise


def _over(changed: limit_update.Changed) -> list[str]:
    lines = []
    for share, used in zip(changed.after.shares, changed.used_bytes or ()):
        over = _over_bytes(share, used)
        if over:
            lines.append(
                f"slot {share.slot}: in use {human(used)}, over the limit by {human(over)}: "
                "new allocations fail until it is below"
            )
    return lines


def _over_bytes(share: Share, used: int) -> int:
    return 0 if share.ceiling_bytes is None else max(0, used - share.ceiling_bytes)


def _memory(share: Share) -> str:
    if share.memory_limit_bytes is None:
        return limit_request.NO_LIMIT
    request = human(share.memory_limit_bytes)
    return f"{request}..{human(share.virtual_bytes)}" if share.lending else request


def _percent(share: Share) -> str:
    return "100%" if share.compute_percent is None else f"{share.compute_percent}%"


# The text of a share in each of the last columns
_CELLS: tuple[Callable[[Share], str], ...] = (
    _memory,
    _percent,
    lambda share: "soft" if share.soft else "hard",
    lambda share: "high" if share.priority else "normal",
    lambda share: "paused" if share.paused else "allowed",
)


def _rows(changed: limit_update.Changed) -> list[tuple[str, ...]]:
    """A row for each device; a changed value is shown as `old -> new`."""
    rows = []
    used = [human(size) for size in changed.used_bytes] if changed.used_bytes else ["-"] * len(changed.after.shares)
    for old, new, size in zip(changed.before.shares, changed.after.shares, used):
        pairs = [(cell(old), cell(new)) for cell in _CELLS]
        cells = (before if before == after else f"{before} -> {after}" for before, after in pairs)
        rows.append((str(new.slot), device_name(new.device), size, *cells))
    return rows


def _plain(changed: limit_update.Changed) -> dict[str, Any]:
    used = changed.used_bytes or (None,) * len(changed.after.shares)
    return {
        "id": changed.after.id,
        "changed": changed.before.shares != changed.after.shares,
        "shares": [
            {
                "slot": new.slot,
                "device": new.device.index,
                "uuid": new.device.uuid,
                "memory_used_bytes": size,
                "over_bytes": None if size is None else _over_bytes(new, size),
                "before": _limits(old),
                "after": _limits(new),
            }
            for old, new, size in zip(changed.before.shares, changed.after.shares, used)
        ],
    }


def _limits(share: Share) -> dict[str, Any]:
    return {
        "memory_limit_bytes": share.ceiling_bytes,
        "memory_request_bytes": share.memory_limit_bytes,
        "compute_percent": share.compute_percent,
        "compute_mode": "soft" if share.soft else "hard",
        "priority": share.priority,
        "paused": share.paused,
    }
