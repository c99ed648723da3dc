"""gpushare prune: remove what killed starts and killed containers left behind."""

from __future__ import annotations

from typing import NamedTuple, Optional

import click

from ..allocation import limit_update
from ..config import node
from ..core import constants
from ..core.errors import GpushareError
from ..state import journal, leaseend, leases, log, storage
from .options import Paths, with_format
from .output import Column, write_json, write_line, write_table


class Item(NamedTuple):
    """One leftover. `removed`: whether this run removes it."""

    kind: str  # lease | start | files | limits | refusal | damaged
    id: str
    why: str
    removed: bool


@click.command()
@click.option("--dry-run", is_flag=True, help="Show what would be removed, remove nothing.")
@click.option(
    "--assume-free", is_flag=True, help="Also remove unreadable leases; use it only if their containers are gone."
)
@with_format
@click.pass_obj
def prune(paths: Paths, dry_run: bool, assume_free: bool, output: str) -> None:
    """Clean up after containers that are gone.

    Removes leases of dead containers, leftovers of killed starts, and stored refusals. Running containers are not
    affected.
    """
    found: list[Item] = []
    problems: list[str] = []
    if storage.is_ready(paths.state_dir):
        found = items(paths.state_dir, assume_free)
        if not dry_run:
            ended = journal.ending(node.config_or_defaults(*paths), paths.state_dir, "prune")
            problems = remove(paths.state_dir, found, assume_free, ended)
    if output == "json":
        write_json(
            {"dry_run": dry_run, "items": [item._asdict() for item in found], "problems": problems},
        )
    else:
        _print(found, dry_run, problems)
    if problems:
        raise SystemExit(1)


def items(state_dir: str, assume_free: bool) -> list[Item]:
    """All leftovers at this moment."""
    seen = leases.view(state_dir)
    found = [Item("lease", lease.id, reason, True) for lease, reason in seen.dead]
    found += [Item("start", name, "killed before it had a lease", True) for name in seen.partial]
    found += [Item("damaged", damage.id, damage.reason, assume_free) for damage in seen.damaged]
    half = limit_update.unfinished(state_dir)
    found += [] if half is None else [Item("limits", half or "-", "a change was killed", True)]
    found += [Item("files", name, "of a released container", True) for name in storage.trash(state_dir)]
    live = {lease.id for lease in seen.live}
    found += [
        Item("refusal", name, log.read(state_dir, name), True) for name in log.known(state_dir) if name not in live
    ]
    return found


def remove(state_dir: str, found: list[Item], assume_free: bool, ended: Optional[leases.Ended] = None) -> list[str]:
    """Remove the items and return the problems. `sweep` checks leases again under the lock, so that the lease of a
    container that has started meanwhile stays."""
    leaseend.sweep(state_dir, assume_free, ended)
    problems = []
    try:
        with leases.locked(state_dir):
            limit_update.finish(state_dir)
    except GpushareError as error:
        problems.append(str(error))
    for item in found:
        if item.kind == "refusal":
            log.forget(state_dir, item.id)
    return problems + storage.empty_trash(state_dir)


def _print(found: list[Item], dry_run: bool, problems: list[str]) -> None:
    verb = "would be removed" if dry_run else "removed"
    if not found:
        write_line("nothing to remove")
    else:
        columns = (Column("result"), Column("what"), Column("container"), Column("why"))
        write_table(
            columns,
            [(verb if item.removed else "kept", item.kind, constants.short(item.id), item.why) for item in found],
        )
    if any(not item.removed for item in found):
        log.to_stderr(
            "gpushare: a lease cannot be read, so gpushare grants nothing on its devices; if its container is gone, "
            "run gpushare prune --assume-free"
        )
    for problem in problems:
        log.to_stderr(f"gpushare: {problem}")
