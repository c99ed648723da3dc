"""Remove gpushare from this host, for `gpushare uninstall`: plan(...) -> Plan, carry_out(plan). Idempotent.

    engines   gpushare's entries in their configuration (engines/configure.undo)
    state     the tmpfs of leases and shares; while pods have it as a volume, it is emptied and stays mounted
    files     node-feature-discovery's feature file, CDI specifications, and links in /dev/char
    config    /etc/gpushare, and the usage journal in its usual place; only with --purge

The programs stay: a package manager or the user installed them.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from typing import NamedTuple

from ..allocation.backends.mps import state as mps
from ..allocation.backends.mps import status as mps_status
from ..core import constants
from ..core.errors import CapacityError, ConfigError, KernelError
from ..core.quoting import shown
from ..engines import configure, record
from ..engines.base import CDI_FILES, Settings
from ..engines.configure import ENGINES, Outcome
from ..engines.host import Host
from ..gpu import charlinks
from ..state import journal, leases, place, storage
from ..system import mountns, syscalls
from . import cdi, dra, labels

UNMOUNT, EMPTY, KEEP = "unmount", "empty", "keep"
_CLAIMS = "/run/cdi"  # the DRA driver's directory is /var/run/cdi, and /var/run a link to /run


class Plan(NamedTuple):
    """Everything that exists and would be removed. Each of `engines` has a change, or has not read an earlier one."""

    engines: tuple[Outcome, ...]
    state_dir: str  # empty: there is none
    state: str  # "unmount", "empty" or "keep": what is done with state_dir
    folders: tuple[str, ...]  # deleted with all that is in them
    files: tuple[str, ...]

    def lines(self) -> list[str]:
        found = [change.describe() for outcome in self.engines for change in outcome.changes]
        found += [f"{self.state} {self.state_dir}"] if self.state_dir and self.state != KEEP else []
        return found + [f"remove {path}" for path in (*self.files, *self.folders)]

    def next(self) -> list[str]:
        """Commands that make the engines reload their configuration."""
        return [outcome.next for outcome in self.engines if outcome.next]


def plan(settings: Settings, host: Host, purge: bool, force: bool) -> Plan:
    """Collect what to remove. Raises CapacityError if containers hold leases, claims are prepared, or MPS runs, unless
    `force`; ConfigError for a state directory that is not gpushare's, or an engine's file that cannot be changed."""
    state_dir = host.at(settings.state_dir)
    _refuse_foreign(state_dir)
    claims = _claims(host.at(_CLAIMS))
    if not force:
        refuse_used(state_dir)
        _refuse_claims(claims)
    outcomes = (configure.undo(ENGINES[name], settings, host, dry_run=True) for name in ENGINES)
    files = [path for path in (labels.FILE, *CDI_FILES, *cdi.NVIDIA_FILES) if host.has(path)]
    files += [f"{charlinks.DIRECTORY}/{name}" for name in charlinks.ours(host.at(charlinks.DIRECTORY))]
    files += [f"{_CLAIMS}/{name}" for name in claims]
    folders = []
    if purge:
        usual = os.path.dirname(constants.CONFIG_PATH)
        if host.has(usual):
            folders.append(usual)
        files += [path for path in (journal.PATH, journal.PATH + journal.OLDER) if host.has(path)]
        if settings.config != constants.CONFIG_PATH and host.has(settings.config):
            files.append(settings.config)
    return Plan(
        tuple(outcome for outcome in outcomes if outcome.changes or outcome.next),
        state_dir if os.path.isdir(state_dir) else "",
        _step(state_dir),
        tuple(folders),
        tuple(files),
    )


def _step(state_dir: str) -> str:
    """Return what to do with the state directory. A pod would keep an unmounted or removed one, and never see the next
    one. The files of running containers are mount points in them, so they must stay where they are."""
    if not _is_volume(state_dir):
        return UNMOUNT
    return KEEP if _holders(state_dir) else EMPTY


def _is_volume(state_dir: str) -> bool:
    """Return whether a mount namespace has the directory, or the file system on it, at another place."""
    path = os.path.realpath(state_dir)
    mounts = mountns.read_mounts()
    own = [one for one in mounts if one.point == path and one.root == "/"]
    here = place.place_of(mounts, own[-1]) if own else ""
    if not here:
        return False
    seen = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            namespace = os.readlink(f"/proc/{pid}/ns/mnt")
            others = [] if namespace in seen else mountns.read_mounts(pid)
        except (OSError, KernelError):  # the process has ended
            continue
        seen.add(namespace)
        for one in others:
            at = place.place_of(others, one) if (one.device, one.root) == (own[-1].device, "/") else ""
            if f"{one.device} {one.root}" == here or at not in ("", here):
                return True
    return False


def _claims(folder: str) -> list[str]:
    """The files of the DRA driver, also those of a write that was killed."""
    endings = (dra.SUFFIX, dra.SUFFIX + dra.UNFINISHED)
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    return [name for name in names if name.startswith(dra.PREFIX) and name.endswith(endings)]


def _refuse_claims(names: list[str]) -> None:
    """Raise CapacityError if a claim is prepared: its pod can still start containers, and kubelet does not prepare a
    claim again."""
    uids = [name[len(dra.PREFIX) : -len(dra.SUFFIX)] for name in names if name.endswith(dra.SUFFIX)]
    if uids:
        what = "1 resource claim is" if len(uids) == 1 else f"{len(uids)} resource claims are"
        raise CapacityError(
            f"{what} prepared for pods: uid {_first(uids)}",
            "delete these pods first; after --force they cannot start containers",
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _refuse_foreign(state_dir: str) -> None:
    """Raise ConfigError for a directory that is not gpushare's: `--state /home` would unmount /home."""
    if os.path.isdir(state_dir) and not storage.is_ready(state_dir):
        other = storage.foreign(state_dir)
        if other:
            raise ConfigError(
                f"{shown(state_dir)} is not a state directory: {shown(other)} in it is not gpushare's",
                "name gpushare's with --state",
            )


def refuse_used(state_dir: str) -> None:
    """Raise CapacityError if containers hold leases or MPS runs. Without the state directory no process could reach the
    MPS daemon, which would keep its GPU."""
    refuse_leases(state_dir)
    running = [uuid for uuid in mps_status.known(state_dir) if not mps.state(uuid, state_dir).problem]
    if running:
        raise CapacityError(f"MPS runs on {', '.join(running)}", "`gpushare mps stop` first")


def refuse_leases(state_dir: str) -> None:
    """Raise CapacityError, which names the containers with a share. A damaged lease counts as a share."""
    held = [constants.short(name) for name in _holders(state_dir)]
    if held:
        who, them = ("1 container holds", "it") if len(held) == 1 else (f"{len(held)} containers hold", "them")
        hint = f"stop {them} first; --force leaves {them} running unaccounted for"
        raise CapacityError(f"{who} a share: {_first(held)}", hint)


def _holders(state_dir: str) -> list[str]:
    """The ids of containers with a share."""
    if not storage.is_ready(state_dir):
        return []
    seen = leases.view(state_dir)
    return [*(one.id for one in seen.live), *(one.id for one in seen.damaged)]


def carry_out(plan: Plan, settings: Settings, host: Host, force: bool) -> None:
    """Remove what the plan lists. Raises the errors of `plan`, KernelError and OSError. After an error, a second run
    does the rest."""
    for outcome in plan.engines:
        configure.undo(ENGINES[outcome.engine], settings, host)
    if plan.state_dir:
        if not force:
            refuse_used(plan.state_dir)
        _STEPS[plan.state](plan.state_dir)
    for path in plan.files:
        os.unlink(host.at(path))
    for path in plan.folders:
        if host.is_link(path):  # the folder behind it is the administrator's
            os.unlink(host.at(path))
        else:
            shutil.rmtree(host.at(path))
    host.remove_folders([os.path.dirname(record.FOLDER), record.FOLDER])


def unmount_state(state_dir: str) -> None:
    """Detach the tmpfs with all mounts below it, and remove its mount point, unless a link names it. A running
    container keeps its own copies of the mounts. Raises SyscallError."""
    place = os.path.realpath(state_dir)
    while True:
        try:
            syscalls.umount(place, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.EINVAL, errno.ENOENT):  # no mount is left
                break
            raise
    try:
        os.unlink(os.path.join(state_dir, storage.FIRST))
    except FileNotFoundError:
        pass
    if os.path.islink(state_dir):  # the next start would not get past a link to nothing
        return
    try:
        os.rmdir(state_dir)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT):
            raise


def empty_state(state_dir: str) -> None:
    """Unmount and delete all that is in the directory; a start makes it complete again. Raises OSError."""
    top = os.path.realpath(state_dir)
    inside = [one.point for one in mountns.read_mounts() if one.point.startswith(f"{top}/")]
    for point in reversed(inside):
        syscalls.umount(point, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)
    for entry in os.scandir(top):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


_STEPS: dict[str, Callable[[str], None]] = {UNMOUNT: unmount_state, EMPTY: empty_state, KEEP: lambda state_dir: None}
