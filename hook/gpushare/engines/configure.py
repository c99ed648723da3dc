"""Configure one engine, undo that, and report its state.

configure(engine, settings, host, dry_run)  -> Outcome    idempotent
undo(engine, settings, host, dry_run)       -> Outcome    idempotent
state(engine, settings, host)               -> State
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from . import containerd, crio, docker, podman, record, unread
from .base import UNKNOWN, Change, Engine, Settings
from .host import Host
from .record import Kept, Record

ENGINES: dict[str, Engine] = {module.NAME: module for module in (docker, containerd, crio, podman)}
CRI_ENGINES = (containerd.NAME, crio.NAME)


class Outcome(NamedTuple):
    """Changes that were made, or would be. `next` is the command to run afterwards, also for earlier changes that the
    engine has not read yet; empty: none."""

    engine: str
    changes: tuple[Change, ...]
    next: str
    notes: tuple[str, ...]


class State(NamedTuple):
    """State of an engine. `program` is the one in gpushare's entry, `problem` the reason why it cannot work."""

    engine: str
    found: str  # the engine's program; empty: not installed
    configured: bool
    program: str
    files: tuple[str, ...]
    problem: str


def configure(
    engine: Engine, settings: Settings, host: Host, dry_run: bool = False, more: Sequence[Change] = ()
) -> Outcome:
    """Add gpushare's entries. `more`: changes of the same command that do not belong to the engine. Raises ConfigError,
    KernelError."""
    proposal = engine.propose(settings, host)
    changes = tuple(proposal.changes)
    unread_files = [] if changes else _unread(engine, host)
    notes = (*proposal.notes, *(f"{engine.NAME} has not read {path} yet" for path in unread_files))
    outcome = Outcome(engine.NAME, (*more, *changes), engine.RELOAD if changes or unread_files else "", notes)
    if dry_run or not outcome.changes:
        return outcome
    records = []
    if changes:
        old = _present(record.load(host, engine.NAME), host)
        folders = host.missing_folders([change.path for change in changes] + [record.path_of(engine.NAME)])
        records = [record.change(host, engine.NAME, _kept(engine, old, changes, folders))]
        records += unread.mark(engine, engine.RELOAD, host, [change.path for change in changes])
    host.write([*records, *outcome.changes])  # the record first, so that nothing is lost if the command is killed
    return outcome


def _unread(engine: Engine, host: Host) -> list[str]:
    """Files that the engine has not read, without files that were edited since: their editor restarts the engine."""
    kept = record.load(host, engine.NAME)
    found = unread.paths(engine, host) if kept else []
    return [one.path for one in kept.files if one.path in found and host.read(one.path) == one.after] if kept else []


def _present(kept: Optional[Record], host: Host) -> Optional[Record]:
    """The record without files that were removed since."""
    if kept is None:
        return None
    return kept._replace(files=tuple(one for one in kept.files if one.after is None or host.has(one.path)))


def _kept(engine: Engine, old: Optional[Record], changes: Sequence[Change], folders: tuple[str, ...]) -> Record:
    """The record after `changes`. If a file was edited after gpushare's last change, its previous content is the edited
    text without gpushare's entries."""
    files = {kept.path: kept for kept in old.files} if old else {}
    for change in changes:
        kept, before = files.get(change.path), change.before
        if kept is not None and kept.after == change.before:
            before = kept.before
        elif kept is not None and change.before is not None:
            before = engine.withdraw(change.path, change.before, kept.before)
        elif before is not None:  # perhaps with gpushare's entries, if the record was lost
            before = engine.withdraw(change.path, before, UNKNOWN)
        files[change.path] = Kept(change.path, before, change.after)
    return Record(tuple(files.values()), (*(old.folders if old else ()), *folders))


def undo(engine: Engine, settings: Settings, host: Host, dry_run: bool = False) -> Outcome:
    """Restore the previous bytes of each file that has not been edited since; from an edited file remove gpushare's
    entries. Raises ConfigError, KernelError."""
    kept = record.load(host, engine.NAME)
    paths = _paths(engine, settings, kept)
    changes = []
    for path in paths:
        now = host.read(path)
        one = kept.kept(path) if kept else None
        then = one.before if one and one.after == now else _withdrawn(engine, path, now, one)
        if then != now:
            changes.append(Change(path, now, then))
    unread_paths = [] if changes else unread.paths(engine, host)
    if not dry_run:
        left = tuple(one for one in kept.files if one.path not in paths) if kept else ()
        rest = kept._replace(files=left) if kept and left else None
        marks = unread.mark(engine, engine.FORGET, host, [change.path for change in changes]) if changes else []
        host.write([*marks, *changes] if changes or unread_paths else unread.unmark(engine, host))
        host.sweep([*paths, record.path_of(engine.NAME)])
        host.remove_folders(kept.folders if kept and not left else ())
        host.write([record.change(host, engine.NAME, rest)] if kept else [])  # last, so that a killed undo can resume
        host.remove_folders([os.path.dirname(record.FOLDER), record.FOLDER])
    notes = tuple(f"{engine.NAME} has not read yet that {path} was changed or removed" for path in unread_paths)
    return Outcome(engine.NAME, tuple(changes), engine.FORGET if changes or unread_paths else "", notes)


def _paths(engine: Engine, settings: Settings, kept: Optional[Record]) -> list[str]:
    """All files that can contain gpushare's entries, recorded ones first. If the command names the engine's file, only
    the files of that daemon: there can be several daemons."""
    usual = engine.paths(settings)
    written = [one.path for one in kept.files] if kept else []
    return list(dict.fromkeys([*(path for path in written if not settings.config_file or path in usual), *usual]))


def _withdrawn(engine: Engine, path: str, now: Optional[str], kept: Optional[Kept]) -> Optional[str]:
    return None if now is None else engine.withdraw(path, now, kept.before if kept else UNKNOWN)


def state(engine: Engine, settings: Settings, host: Host) -> State:
    """The state of an engine. Errors in its files do not raise: `problem` has them."""
    found = next((path for path in map(host.program, engine.PROGRAMS) if path), "")
    try:
        kept = record.load(host, engine.NAME)
        paths = _paths(engine, settings, kept)
        entries, former = {}, False
        for path in paths:
            text = host.read(path)
            program = engine.entry(path, text) if text is not None else ""
            if program and text is not None:
                entries[path] = program
                former = former or engine.lacks_cri(path, text)
    except ConfigError as error:
        return State(engine.NAME, found, False, "", (), str(error))
    program = next(iter(entries.values()), "")
    if former:
        problem = (
            "the entry is of an earlier version, so pod annotations are refused: run `gpushare runtime configure "
            f"{engine.NAME}` again, then `{engine.RELOAD}`"
        )
        return State(engine.NAME, found, True, program, tuple(entries), problem)
    problem = f"{shown(program)} does not exist" if program and not host.has(program) and host.root == "/" else ""
    return State(engine.NAME, found, bool(entries), program, tuple(entries), problem)
