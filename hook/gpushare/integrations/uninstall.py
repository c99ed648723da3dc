"""What `gpushare uninstall` takes away from this host: plan(...) -> Plan, carry_out(plan). Idempotent.

    engines   our entries (engines/configure.undo)
    state     the tmpfs of leases and shares
    labels    node-feature-discovery's feature file; cdi: devices for CDI
    config    /etc/gpushare, only when asked for

The programs belong to whoever installed them: a package manager, or tar.
"""

from __future__ import annotations

import errno
import os
import shutil
from typing import NamedTuple

from ..allocation.backends.mps import state as mps
from ..allocation.backends.mps import status as mps_status
from ..core import constants
from ..core.errors import CapacityError, ConfigError
from ..core.quoting import shown
from ..engines import configure, record
from ..engines.base import Settings
from ..engines.configure import ENGINES, Outcome
from ..engines.host import Host
from ..state import leases, storage
from ..system import syscalls
from . import cdi, labels


class Plan(NamedTuple):
    """Everything that is there and would go. `engines` have at least one change each."""

    engines: tuple[Outcome, ...]
    state_dir: str  # empty: there is none
    folders: tuple[str, ...]  # deleted with all that is in them
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        found = [change.describe() for outcome in self.engines for change in outcome.changes]
        found += [f"unmount {self.state_dir}"] if self.state_dir else []
        return found + [f"remove {path}" for path in (*self.files, *self.folders)]

    def next(self) -> list[str]:
        """Commands after which the engines know."""
        return [outcome.next for outcome in self.engines if outcome.next]


def plan(settings: Settings, host: Host, purge: bool, force: bool) -> Plan:
    """Raises CapacityError while containers hold leases or MPS runs, unless `force`; ConfigError."""
    state_dir = host.at(settings.state_dir)
    _refuse_foreign(state_dir)
    if not force:
        refuse_used(state_dir)
    outcomes = (configure.undo(ENGINES[name], settings, host, dry_run=True) for name in ENGINES)
    files = [path for path in (labels.FILE, *cdi.FILES) if host.has(path)]
    folders = []
    if purge:
        usual = os.path.dirname(constants.CONFIG_PATH)
        if host.has(usual):
            folders.append(usual)
        if settings.config != constants.CONFIG_PATH and host.has(settings.config):
            files.append(settings.config)
    return Plan(
        tuple(outcome for outcome in outcomes if outcome.changes),
        state_dir if os.path.isdir(state_dir) else "",
        tuple(folders),
        tuple(files),
    )


def _refuse_foreign(state_dir: str) -> None:
    """Raises ConfigError for a directory of something else: `--state /home` would unmount that."""
    if os.path.isdir(state_dir) and not storage.is_ready(state_dir):
        other = storage.foreign(state_dir)
        if other:
            raise ConfigError(
                f"{shown(state_dir)} is no state directory: {shown(other)} in it is not gpushare's",
                "name gpushare's with --state",
            )


def refuse_used(state_dir: str) -> None:
    """Raises CapacityError also while MPS runs: nobody could talk to its daemon any more, and it keeps its GPU."""
    refuse_leases(state_dir)
    running = [uuid for uuid in mps_status.known(state_dir) if not mps.state(uuid, state_dir).problem]
    if running:
        raise CapacityError(f"MPS runs on {', '.join(running)}", "`gpushare mps stop` first")


def refuse_leases(state_dir: str) -> None:
    """Raises CapacityError naming the containers that have a share, or may have one."""
    if not storage.is_ready(state_dir):
        return
    seen = leases.view(state_dir)
    held = [constants.short(name) for name in [*(one.id for one in seen.live), *(one.id for one in seen.damaged)]]
    if held:
        some = ", ".join(held[:5]) + (f" and {len(held) - 5} more" if len(held) > 5 else "")
        who, them = ("1 container holds", "it") if len(held) == 1 else (f"{len(held)} containers hold", "them")
        hint = f"stop {them} first; --force leaves {them} running without a ledger"
        raise CapacityError(f"{who} a share: {some}", hint)


def carry_out(plan: Plan, settings: Settings, host: Host, force: bool) -> None:
    """Raises what `plan` does, KernelError and OSError. What was done stays done; a second run does the rest."""
    for outcome in plan.engines:
        configure.undo(ENGINES[outcome.engine], settings, host)
    host.remove_folders([os.path.dirname(record.FOLDER), record.FOLDER])
    if plan.state_dir:
        if not force:
            refuse_used(plan.state_dir)
        unmount_state(plan.state_dir)
    for path in plan.files:
        os.unlink(host.at(path))
    for path in plan.folders:
        shutil.rmtree(host.at(path))


def unmount_state(state_dir: str) -> None:
    """Detaches the tmpfs with all that is mounted below it, and removes its mount point. A container that runs keeps
    its own copy of its mounts. Raises SyscallError."""
    while True:
        try:
            syscalls.umount(state_dir, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # no mount point (any more)
                break
            raise
    try:
        os.unlink(os.path.join(state_dir, storage.FIRST))
    except FileNotFoundError:
        pass
    try:
        os.rmdir(state_dir)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise
