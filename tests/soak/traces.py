"""Possible leftovers of containers on a host: counted before and after, and compared.

count(node, prefix) -> Traces         `prefix`: the common prefix of our containers' ids
left(before, after) -> lines          empty when all counts are back
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gpushare.state import activity_files

from simulator.ledger import Ledger
from tests.support import processes
from tests.support.host import Node
from tests.support.rootfs import mount_points

CGROUPS = Path("/sys/fs/cgroup")
ERRORS_KEPT = 256 + 1  # hook/gpushare/state/log.py keeps that many, and one in progress


class Traces(NamedTuple):
    """All countable objects; a name with a higher count afterwards is a leak."""

    mounts: Counter[str]
    files: Counter[str]  # open files of this process
    state: Counter[str]  # leases, trash and activity files in the state directory
    tmpfs: Counter[str]  # "<mount> blocks" and "<mount> inodes" in use
    cgroups: Counter[str]
    processes: Counter[str]
    device: Counter[str]  # "nvidia0 bytes": use on the simulated device, also of dead processes


def count(node: Node, prefix: str) -> Traces:
    """Count the host's objects. Remembered refusals are limited in number and are cleared first: no leak."""
    remembered = list((node.state / "errors").glob("*"))
    for path in remembered:
        path.unlink()
    state = Counter(_state(node))
    if len(remembered) > ERRORS_KEPT:
        state["errors beyond what is kept"] = len(remembered) - ERRORS_KEPT
    return Traces(
        mounts=Counter(mount_points()),
        files=Counter(_files()),
        state=state,
        tmpfs=_tmpfs(node),
        cgroups=Counter(str(path) for path in cgroups(f"{prefix}*")),
        processes=Counter(_processes(str(node.state), prefix)),
        device=_device(node.driver_root),
    )


def left(before: Traces, after: Traces) -> list[str]:
    """Return one line for each kind with a higher count than before."""
    lines = []
    for kind in Traces._fields:
        more = getattr(after, kind) - getattr(before, kind)
        lines += [f"{kind}: {name} (+{number})" for name, number in sorted(more.items())]
    return lines


def cgroups(name: str) -> list[Path]:
    """Return the cgroups of that name (with wildcards) and those below, in every hierarchy, the deepest first."""
    found = [path for pattern in (name, f"*/{name}") for path in CGROUPS.glob(pattern)]
    below = [Path(folder) for path in found for folder, _, _ in os.walk(path)]  # os.walk skips directories that vanish
    return sorted(below, key=lambda path: -len(path.parts))


def _files() -> Iterable[str]:
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue  # the listing itself
        # Anonymous files count by kind: numbers of pipes and sockets differ, their count must not.
        yield target.partition(":[")[0]


def _state(node: Node) -> Iterable[str]:
    yield from node.left()
    for device in (node.state / "devices").glob("*"):
        for number in activity_files.numbers(str(node.state), device.name):
            yield f"devices/{device.name}: number {number} is taken"


def _tmpfs(node: Node) -> Counter[str]:
    used: Counter[str] = Counter()
    for path in (node.state, *(node.state / "devices").glob("*")):
        status = os.statvfs(path)
        used[f"{path} blocks"] = status.f_blocks - status.f_bfree
        used[f"{path} inodes"] = status.f_files - status.f_ffree
    return used


def _processes(*names: str) -> Iterable[str]:
    """Processes that name the state directory or a container, and our own children."""
    found = set(processes.children().values())
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue  # ended meanwhile
        if int(path.parent.name) != os.getpid() and any(name in command for name in names):
            found.add(command)
    return found


def _device(driver_root: Path) -> Counter[str]:
    held: Counter[str] = Counter()
    for path in driver_root.glob("dev/nvidia[0-9]*"):
        with Ledger(str(path)) as ledger:
            held[f"{path.name} bytes"] = ledger.snapshot().used_bytes
    return held
