"""The state of an MPS daemon, its limits and its containers, for people. Not on the start path.

known(state_dir)                             -> uuids          devices with files of a daemon
query(host, device, leases)                  -> DaemonStatus   the output of `gpushare mps status` for one device
affected(found, uuid, leases, state_dir)     -> leases         that use a daemon which is gone
limits_now(control), expected(found)         -> text           the limits that it has, and should have
deaths(folder, pid, leases)                  -> text           servers that died, and their containers
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Sequence
from typing import NamedTuple

from ....core import constants
from ....core.errors import GpushareError
from ....core.model import Device, Lease, Node
from ....state import shm_abi, storage
from ... import backends
from . import control as mps_control
from . import state as mps
from .control import Control

_LOG_BYTES = 1 << 18  # the end of a log is enough
_DEATH = re.compile(r"^\[?(.{0,19}).* Control +(\d+)\] Server (\d+) exited with status (-?\d+)")
_SECONDS = "%Y-%m-%d %H:%M:%S"  # local time


class DaemonStatus(NamedTuple):
    """One device."""

    state: str  # running | stopped | dead | changed
    found: mps.MpsState
    servers: tuple[int, ...]
    clients: tuple[int, ...]
    containers: tuple[Lease, ...]
    affected: tuple[Lease, ...]
    note: str


def query(host: Node, device: Device, live: Sequence[Lease]) -> DaemonStatus:
    """Query the daemon. Never raise: a daemon that does not answer is dead."""
    found = mps.state(device.uuid, host.config.state_dir)
    containers = backends.having(mps.NAME, live, device.uuid)
    gone = affected(found, device.uuid, live, host.config.state_dir)
    if found.problem:
        state = "dead" if found.was_running else "stopped"
        return DaemonStatus(state, found, (), (), containers, gone, found.problem if found.was_running else "")
    folder = mps.directory(host.config.state_dir, device.uuid)
    try:
        control = control_of(host, folder, found.pid)
        words = control.commands
        servers = control.numbers(words.servers)
        clients = tuple(pid for server in servers for pid in control.numbers(words.clients.format(server=server)))
        now, wanted = limits_now(control), expected(found)
        others = servers_off(control, servers, found.thread_percent)
    except GpushareError as error:
        return DaemonStatus("dead", found, (), (), containers, gone, error.message)
    state, note = "running", deaths(folder, found.pid, containers)
    if now != wanted or others:
        state, note = "changed", f"its limits are {now}, not {wanted}" if now != wanted else others
    return DaemonStatus(state, found, servers, clients, containers, gone, note)


def control_of(host: Node, folder: str, pid: int) -> Control:
    """Return the Control of the daemon with files in `folder`."""
    program = mps_control.program(host.inventory) or mps_control.NAME
    env = mps_control.environment(host, program)
    return Control(program, f"{folder}/pipe", env, mps_control.protocol_of(pid))


def known(state_dir: str) -> list[str]:
    """Return the uuids of devices with files of a daemon."""
    try:
        left = os.listdir(os.path.join(state_dir, mps.FOLDER))
    except OSError:
        return []
    return sorted(name for name in left if stat.S_ISDIR(os.lstat(os.path.join(state_dir, mps.FOLDER, name)).st_mode))


def affected(found: mps.MpsState, uuid: str, leases: Sequence[Lease], state_dir: str) -> tuple[Lease, ...]:
    """Return containers whose daemon is gone: their programs get errors."""
    theirs = backends.having(mps.NAME, leases, uuid)
    return tuple(lease for lease in theirs if found.problem or _token(state_dir, lease.id) != found.token)


def _token(state_dir: str, container_id: str) -> int:
    """Return the token of a container's daemon; 0 if its limits file has none."""
    try:
        path = os.path.join(storage.container_dir(state_dir, container_id), "share", "limits")
        return storage.read_limits(path).mps_token
    except shm_abi.RegionError:
        return 0


def limits_now(control: Control) -> str:
    """Return the current limits of the daemon as text. Any client can change these defaults."""
    percent, memory = control.ask(control.commands.get_percent), control.ask(control.commands.get_memory)
    number = mps_control.percent_in(percent)
    return f"{percent if number is None else f'{number:.1f}'}%, {memory or 'no memory limit'}"


def servers_off(control: Control, servers: Sequence[int], percent: int) -> str:
    """Return a warning for servers with another percentage than the daemon's, which any client can set too."""
    for server in servers if control.commands.get_server_percent else ():
        said = mps_control.percent_in(control.ask(control.commands.get_server_percent.format(server=server)))
        if said not in (None, percent):  # None: it exited meanwhile
            return f"server {server} gives {said:.1f}%, not {percent:.1f}%"
    return ""


def expected(found: mps.MpsState) -> str:
    memory = mps_control.memory_text(found.memory_bytes) if found.memory_bytes else "no memory limit"
    return f"{found.thread_percent:.1f}%, {memory}"


def deaths(folder: str, pid: int, containers: Sequence[Lease]) -> str:
    """Return a line about servers that died, from the daemon's log, with the containers that used it then: all clients
    of a daemon have one server. "" if no server died."""
    try:
        with open(f"{folder}/log/control.log", "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    found = [match for match in map(_DEATH.search, lines) if match and int(match[2]) == pid and match[4] != "0"]
    if not found:
        return ""
    _, _, server, status = found[-1].groups()
    then = _unix(found[-1][1])
    had = ", ".join(constants.short(one.id) for one in containers if one.created < then)
    where = f" in {had}" if had else ""
    return f"server {server} has died (status {status}): programs that used it{where} must be started again"


def _unix(text: str) -> float:
    """Return the end of that second as Unix time. Invalid text counts as now, so that no container is left out."""
    try:
        return time.mktime(time.strptime(text, _SECONDS)) + 1
    except (ValueError, OverflowError):
        return time.time()
