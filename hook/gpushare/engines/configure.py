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
from .base import UNKNOWN, Change, Engine, Refusal, Settings
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
    reload = engine.reload(settings, host) if changes or unread_files else ""
    outcome = Outcome(engine.NAME, (*more, *changes), reload, notes)
    records = record.low_level(host, engine.NAME, proposal.low_level)
    if dry_run:
        return outcome
    if not outcome.changes:
        host.write(records)
        return outcome
    if changes:
        old = _present(record.load(host, engine.NAME), host)
        folders = host.missing_folders([change.path for change in changes] + [record.path_of(engine.NAME)])
        records = [record.change(host, engine.NAME, _kept(engine, old, changes, folders)), *records]
        records += unread.mark(engine, reload, host, [change.path for change in changes])
    else:
        folders = ()
    older = _refusal(engine, settings, host) if changes else ""
    host.write([*records, *outcome.changes])  # the record first, so that nothing is lost if the command is killed
    try:
        if changes:
            engine.verify(settings, host)
    except ConfigError as error:
        if isinstance(error, Refusal) and error.message == older:
            return outcome._replace(notes=(*notes, f"{older}; it refused the files before the change, too"))
        host.write([one._replace(before=one.after, after=one.before) for one in reversed([*records, *outcome.changes])])
        host.remove_folders(folders)
        raise ConfigError(f"{error.message}; nothing was changed", error.hint) from None
    return outcome


def _refusal(engine: Engine, settings: Settings, host: Host) -> str:
    """Why the engine refuses its present files; empty if it does not."""
    try:
        engine.verify(settings, host)
    except Refusal as error:
        return error.message
    except ConfigError:  # the entry is not there yet
        pass
    return ""


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
    paths = _paths(engine, settings, host, kept)
    changes = []
    for path in paths:
        now = host.read(path)
        one = kept.kept(path) if kept else None
        then = one.before if one and one.after == now else _withdrawn(engine, path, now, one)
        if then != now:
            changes.append(Change(path, now, then))
    unread_paths = [] if changes else unread.paths(engine, host)
    changed = [change.path for change in changes] or unread_paths
    forget = engine.forget(settings, host, changed) if changed else ""
    if not dry_run:
        left = tuple(one for one in kept.files if one.path not in paths) if kept else ()
        rest = kept._replace(files=left) if kept and left else None
        marks = unread.mark(engine, forget, host, [change.path for change in changes]) if changes else []
        host.write([*marks, *changes] if changes or unread_paths else unread.unmark(engine, host))
        host.sweep([*paths, record.path_of(engine.NAME)])
        host.remove_folders(kept.folders if kept else ())
        former = record.low_level(host, engine.NAME, "") if rest is None else []
        last = [record.change(host, engine.NAME, rest)] if kept else []  # so that a killed undo can resume
        host.write([*former, *last])
        host.remove_folders([os.path.dirname(record.FOLDER), record.FOLDER])
    notes = tuple(f"{engine.NAME} has not read yet that {path} was changed or removed" for path in unread_paths)
    return Outcome(engine.NAME, tuple(changes), forget, notes)


def _paths(engine: Engine, settings: Settings, host: Host, kept: Optional[Record]) -> list[str]:
    """All files that can contain gpushare's entries, recorded ones first. If the command names the engine's file, only
    the files of that daemon: there can be several daemons."""
    written = [one.path for one in kept.files] if kept else []
    # gpushare does not write through a link, so there is no entry of gpushare behind one
    usual = [path for path in engine.paths(settings, host) if path in written or not host.is_link(path)]
    return list(dict.fromkeys([*(path for path in written if not settings.config_file or path in usual), *usual]))


def _withdrawn(engine: Engine, path: str, now: Optional[str], kept: Optional[Kept]) -> Optional[str]:
    return None if now is None else engine.withdraw(path, now, kept.before if kept else UNKNOWN)


def state(engine: Engine, settings: Settings, host: Host) -> State:
    """The state of an engine. Errors in its files do not raise: `problem` has them."""
    found = next((path for path in map(host.program, engine.PROGRAMS) if path), "")
    try:
        kept = record.load(host, engine.NAME)
        paths = _paths(engine, settings, host, kept)
        entries, former = {}, False
        for path in paths:
            text = host.read(path)
            program = engine.entry(path, text) if text is not None else ""
            if program and text is not None:
                entries[path] = program
                former = former or engine.lacks_cri(path, text)
        ignored = engine.ignored(settings, host, tuple(entries)) if entries else ""
    except ConfigError as error:
        return State(engine.NAME, found, False, "", (), str(error))
    program = next(iter(entries.values()), "")
    if former:
        problem = (
            "the entry is of an earlier version, so pod annotations are refused: run `gpushare runtime configure "
            f"{engine.NAME}` again, then `{engine.reload(settings, host)}`"
        )
        return State(engine.NAME, found, True, program, tuple(entries), problem)
    problem = f"{shown(program)} does not exist" if program and not host.has(program) and host.root == "/" else ignored
    return State(engine.NAME, found, bool(entries), program, tuple(entries), problem)
