"""A cgroup for a program that `gpushare run` starts. It only denies devices.

    place(name)              -> Place    its future path, so that the lease has it before it exists
    enter(place, denied)                 create it and move this process into it
    leave(directory)                     return to the parent cgroup and remove it

On v1 it is a child in the devices hierarchy only, on v2 a child of the process's cgroup, without controllers. Raises
KernelError; then nothing has changed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import KernelError
from ..system import bpf, cgroup, syscalls
from ..system.cgroup import Rule


class Place(NamedTuple):
    """A directory of the devices hierarchy (v1), or of v2."""

    directory: str
    v1: bool


def place(name: str) -> Place:
    v1, v2 = cgroup.find_cgroups(os.getpid())
    if not v1 and not v2:
        raise KernelError("no device cgroup is mounted", "mount /sys/fs/cgroup")
    return Place(f"{(v1 or v2).rstrip('/')}/{name}", bool(v1))


def enter(place: Place, denied: Sequence[Rule]) -> None:
    directory = place.directory
    try:
        _make(directory)
    except OSError as error:
        raise syscalls.from_os_error(error, "mkdir", directory) from None
    try:
        if place.v1:
            for major, minor in denied:
                _write(f"{directory}/devices.deny", f"c {major}:{minor} rwm")
        else:
            bpf.attach(directory, bpf.denying(denied))
        _write(f"{directory}/cgroup.procs", str(os.getpid()))
    except BaseException:
        os.rmdir(directory)
        raise


def _make(directory: str) -> None:
    """Create the directory. Remove an empty one of this name first: it is left from a lost lease and has rules."""
    try:
        os.mkdir(directory)
    except FileExistsError:
        os.rmdir(directory)
        os.mkdir(directory)


def leave(directory: str) -> None:
    _write(f"{os.path.dirname(directory)}/cgroup.procs", str(os.getpid()))
    os.rmdir(directory)


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w", encoding="ascii") as control:
            control.write(text)
    except OSError as error:
        raise syscalls.from_os_error(error, "write", path) from None
