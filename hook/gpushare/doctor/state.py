"""Checks of the state directory: leases of running containers, leftovers of ended ones, refusals."""

from __future__ import annotations

import os
import stat
import time

from ..allocation import limit_update, suspension
from ..config import node, node_diff
from ..core import constants
from ..core.quoting import shown
from ..state import agentlock, journal, leases, log, storage, unlimited
from .base import FAIL, OK, WARN, Machine, Result, no_driver

_RECENT_S = 24 * 3600
_FULL_PERCENT = 80
_SHOWN = 3  # names in one line


def directory(machine: Machine) -> Result:
    path = machine.state_dir
    if not os.path.isdir(path):
        return Result(OK, f"no {path} yet; the first start makes it")
    if not storage.is_ready(path):
        other = storage.foreign(path)
        if other:
            return Result(
                FAIL, f"{shown(other)} in {path} is not gpushare's: no container starts", "name another directory"
            )
        return Result(OK, f"{path} is not mounted; the first start mounts it")
    space = os.statvfs(path)
    if space.f_flag & os.ST_RDONLY:
        return Result(FAIL, f"{path} is read-only: no share can be given or changed", f"mount -o remount,rw {path}")
    used = 100 - 100 * space.f_bavail // max(1, space.f_blocks)
    files = 100 - 100 * space.f_favail // max(1, space.f_files) if space.f_files else 0
    if max(used, files) >= _FULL_PERCENT:
        return Result(WARN, f"{path} is {max(used, files)}% full", "gpushare prune")
    fresh = node.read_node(machine.config_path, path) is not None
    return Result(OK, f"{path}, {used}% full, node.json {'is fresh' if fresh else 'is compiled by the next start'}")


def records(machine: Machine) -> Result:
    """Whether the usage journal and the log of decisions can be written. A start that cannot write them loses its lines
    without a message."""
    if machine.config is None:
        return no_driver(machine)
    log_path = machine.config.log if machine.config.log.startswith("/") else ""
    given = (("usage.journal", journal.path_of(machine.config)), ("log.decisions", log_path))
    found = [f"{key}: {path}: {why}" for key, path in given if path and (why := _unwritable(path, key))]
    if found:
        return Result(WARN, f"{'; '.join(found)}: its lines are lost", "name a file in a directory of a disk with room")
    return Result(OK, ", ".join(path for _, path in given if path) or "no files")


def _unwritable(path: str, key: str) -> str:
    """Return why no line can be added to the file, which a start creates; "" if it can. Only the journal's directory is
    created too, and only the log of decisions may be a FIFO or a socket."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        folder = os.path.dirname(path)
        while key == "usage.journal" and not os.path.lexists(folder):
            folder = os.path.dirname(folder)
        if not os.path.isdir(folder):
            return f"there is no directory {folder}"
        return "" if os.access(folder, os.W_OK) else f"{folder} cannot be written"
    except OSError as error:
        return error.strerror or str(error)
    if stat.S_ISLNK(status.st_mode):
        return f"a link to {shown(os.readlink(path))}, which is not followed"
    if stat.S_ISDIR(status.st_mode) or (key == "usage.journal" and not stat.S_ISREG(status.st_mode)):
        return "not a regular file"
    return "" if os.access(path, os.W_OK) else "cannot be written"


def lending(machine: Machine) -> Result:
    if machine.config is None:
        return no_driver(machine)
    policy = machine.config.policy
    way, without = f"policy.lending is {policy.lending}", ""
    if policy.lending in (constants.EVICT, constants.SUSPEND):
        without = f"{way} and no agent runs: no memory is lent"
    elif policy.suspend_idle_s:
        without = "policy.suspend.idle is set and no agent runs: no idle container is suspended"
    else:
        live = leases.view(machine.state_dir).live
        suspended = [constants.short(one.id) for one in live if any(share.phase for share in one.shares)]
        if suspended:
            without = f"{some(suspended)}: suspended, and no agent runs that resumes it at its next call"
    if without and not agentlock.is_held(machine.state_dir):
        return Result(WARN, without, "systemctl enable --now gpushare-agent")
    why = suspension.unable(machine.node) if machine.node else ""
    if policy.suspend_idle_s and why:
        return Result(WARN, f"policy.suspend.idle is set, and no container can be suspended: {why}")
    if policy.lending == constants.SUSPEND and why:
        return Result(OK, f"{way}, and borrowers are ended as with evict: {why}")
    return Result(OK, way)


def stale_leases(machine: Machine) -> Result:
    seen = leases.view(machine.state_dir)
    if seen.damaged:
        what = some([f"{constants.short(one.id)}: {one.reason}" for one in seen.damaged])
        return Result(
            FAIL, f"{what}; its devices get no new leases", "if these containers are gone: gpushare prune --assume-free"
        )
    left = [constants.short(lease.id) for lease, _ in seen.dead if not leases.ends(lease)] + list(
        map(constants.short, seen.partial)
    )
    half = limit_update.unfinished(machine.state_dir)
    left += [] if half is None else [f"a change of limits of {constants.short(half)}"]
    trash = storage.trash(machine.state_dir)
    held = f"{len(seen.live)} {'container holds' if len(seen.live) == 1 else 'containers hold'} a share"
    if left or trash:
        what = f"left behind: {some(left)}" if left else f"{len(trash)} released shares are not removed"
        return Result(WARN, f"{held}; {what}", "gpushare prune")
    return Result(OK, held)


def versions(machine: Machine) -> Result:
    """Whether running containers were started with the loaded driver. They keep the libraries of that time, with which
    another driver version does not work."""
    if machine.node is None:
        return no_driver(machine)
    live = leases.view(machine.state_dir).live
    old = node_diff.outdated(live, machine.node)
    if old:
        return Result(WARN, some([f"{name} {why}" for name, why in old]), "start these containers again")
    return Result(OK, f"all use {machine.node.inventory.driver_version}" if live else "no container runs")


def unlimited_processes(machine: Machine) -> Result:
    live = [lease for lease in leases.view(machine.state_dir).live if lease.state == "held"]
    found = unlimited.find(live)
    if found:
        what = some([f"{constants.short(one.id)}: {one.text}" for one in found])
        return Result(WARN, what, "policy.unlimited_process: stop ends such processes (docs/driver.md)")
    return Result(OK, "none uses a GPU without a limit" if live else "no container runs")


def refusals(machine: Machine) -> Result:
    folder = os.path.join(machine.state_dir, "errors")
    found = []
    for name in log.known(machine.state_dir):
        try:
            found.append((os.stat(os.path.join(folder, name)).st_mtime, name))
        except OSError:  # removed since log.known() listed it
            pass
    recent = sorted(one for one in found if time.time() - one[0] < _RECENT_S)
    if not recent:
        return Result(OK, "none in the last day")
    name = recent[-1][1]
    many = "1 container was" if len(recent) == 1 else f"{len(recent)} containers were"
    ours = any(os.path.exists(os.path.join(folder, one + log.TRACE)) for _, one in recent)
    last = f"{constants.short(name)}: {log.read(machine.state_dir, name)}"
    hint = f"see {folder}/*{log.TRACE}, and report it" if ours else f"gpushare inspect {constants.short(name)}"
    return Result(WARN, f"{many} refused in the last day; {'' if len(recent) == 1 else 'the last, '}{last}", hint)


def some(texts: list[str]) -> str:
    """The first few texts and the number of the others, for one line."""
    more = f" and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return ", ".join(texts[:_SHOWN]) + more
