"""Allow devices in the cgroup of an existing container: v1 (devices.allow), v2 (eBPF, see bpf.py) or both.

Rules are (major, minor) of character devices, for reading and writing; never mknod.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Optional

from ..core.errors import KernelError
from ..core.quoting import shown
from . import bpf, mountns, syscalls, systemdscope

Rule = tuple[int, int]
Mounts = Optional[list[mountns.MountEntry]]


def allow_devices(pid: int, rules: Sequence[Rule], mounts: Mounts = None, cgroups_path: str = "") -> Callable[[], None]:
    """Let the container of `pid` open the devices; return a function that undoes it. Raises KernelError, with nothing
    changed, also when the container has no cgroup of its own. `mounts`: this process's mounts, if already read;
    `cgroups_path`: linux.cgroupsPath of config.json."""
    undos: list[Callable[[], None]] = []

    def undo() -> None:
        while undos:
            undos.pop()()

    try:
        v1, v2 = _of_container(own_cgroups(pid, mounts), cgroups_path, mounts)
        for directory in v1:
            undos.append(_allow_v1(directory, rules))
        if v2:
            for directory in v2:
                undos.append(bpf.allow(directory, rules))
    except BaseException:
        undo()
        raise
    if not undos:
        raise KernelError(f"no device cgroup of process {pid} is mounted", "mount /sys/fs/cgroup")
    return undo


def tell_systemd(
    pid: int, rules: Sequence[Rule], mounts: Mounts = None, cgroups_path: str = ""
) -> Optional[Callable[[], None]]:
    """Add the rules to systemd's own for the container's scope, so that they persist when systemd writes its rules
    again. Return a function that undoes it; None if systemd has these, or does not manage the container's cgroup.
    Raises KernelError."""
    for directories in _of_container(own_cgroups(pid, mounts), cgroups_path, mounts):
        if directories and directories[0].endswith(".scope"):
            return systemdscope.allow(directories[0], rules)
    return None


def revoke(pid: int, rules: Sequence[Rule], cgroups_path: str = "") -> None:
    """Deny the devices that `allow_devices` allowed, also from another process or later."""
    v1, v2 = _of_container(find_cgroups(pid), cgroups_path)
    for directory in v1:
        _write_rules(directory, "devices.deny", rules)
    if v2:
        for directory in v2:
            bpf.revoke(directory, rules)


def _of_container(found: tuple[str, str], cgroups_path: str, mounts: Mounts = None) -> tuple[list[str], list[str]]:
    mine = find_cgroups(os.getpid(), mounts)
    return of_container(found[0], mine[0], cgroups_path), of_container(found[1], mine[1], cgroups_path)


def of_container(directory: str, mine: str, cgroups_path: str = "") -> list[str]:
    """The cgroups that contain this container only: from the one that its engine made for it, down to `directory`, the
    one of its process. The kernel requires that all of them allow an access. crun 1.21 puts the process into a child of
    its systemd scope (`<scope>/container`) and the rules into both; crun 1.28 puts them into the scope only. The
    annotation `run.oci.delegate-cgroup` makes a child, too. Cgroups above it are slices, or contain this process, whose
    cgroup is `mine`: other processes use them, so they get no rule. [] for ""."""
    names = {os.path.basename(cgroups_path.rstrip("/"))} - {""}  # `slice:prefix:name` names a scope
    found, at = [directory], directory
    while at.rstrip("/") and not holds(at, mine):
        name = os.path.basename(at)
        if name.endswith(".scope") or name in names:
            return found[::-1]
        at = os.path.dirname(at)
        found.append(at)
    return [directory] if directory else []


def own_cgroups(pid: int, mounts: Mounts = None) -> tuple[str, str]:
    """`find_cgroups` of a container's process, limited to cgroups that hold only the container. Raises KernelError if
    the container shares the cgroup that decides about devices (v1's, where both exist) with the process that starts
    it: a rule there would apply to that process too, and would stay (`podman run --cgroups=disabled`)."""
    found, (v1, v2) = apart(pid, mounts)
    deciding, own = (found[0], v1) if found[0] else (found[1], v2)
    if deciding and not own:
        raise KernelError(
            f"the container has no cgroup of its own: its first process is in {shown(deciding)}, as is the process "
            "that starts it",
            "start it with a cgroup (podman: without --cgroups=disabled)",
        )
    return v1, v2


def apart(pid: int, mounts: Mounts = None) -> tuple[tuple[str, str], tuple[str, str]]:
    """(`find_cgroups` of a process, the same with "" for each cgroup that contains the calling process)."""
    mounts = mountns.read_mounts(containing=mountns.CGROUPS) if mounts is None else mounts
    v1, v2 = found = find_cgroups(pid, mounts)
    my_v1, my_v2 = find_cgroups(os.getpid(), mounts)
    return found, ("" if holds(v1, my_v1) else v1, "" if holds(v2, my_v2) else v2)


def holds(directory: str, other: str) -> bool:
    """Whether cgroup `other` is `directory` or below it."""
    return bool(directory) and f"{other}/".startswith(directory.rstrip("/") + "/")


def find_cgroups(pid: int, mounts: Mounts = None) -> tuple[str, str]:
    """(directory in the v1 devices hierarchy, directory in the v2 hierarchy) of a process; "" if not mounted."""
    v1_path = v2_path = ""
    for line in syscalls.lines_of(f"/proc/{pid}/cgroup"):
        number, controllers, path = line.split(":", 2)
        if "devices" in controllers.split(","):
            v1_path = path
        elif number == "0" and not controllers:
            v2_path = path
    return directories(v1_path, v2_path, mounts)


def thaw(pid: int) -> None:
    """Thaw the cgroup of the v1 freezer that a process is in: there, a signal that kills waits until the cgroup is
    thawed (`docker pause`). v2 needs nothing. An error changes nothing."""
    try:
        for line in syscalls.lines_of(f"/proc/{pid}/cgroup"):
            _, controllers, path = line.split(":", 2)
            if "freezer" in controllers.split(",") and path != "/":
                mounts = mountns.read_mounts(containing=mountns.CGROUPS)
                mount = next(one for one in mounts if "freezer" in one.super_options.split(","))
                with open(f"{_below(mount, path)}/freezer.state", "r+", encoding="ascii") as state:
                    state.write("THAWED")
    except (OSError, KernelError, StopIteration):
        pass


def first_frozen(pids: Iterable[int]) -> int:
    """Return a process that is stopped: by a signal or debugger, or with its cgroup (`docker pause`). 0: none is."""
    seen = set()
    for pid in pids:
        try:
            for line in syscalls.lines_of(f"/proc/{pid}/status"):
                if line.startswith("State:") and line.split()[1] in "tT":
                    return pid
            paths = tuple(syscalls.lines_of(f"/proc/{pid}/cgroup"))
            if paths in seen:
                continue  # mount tables are long, and a container can have many processes
            seen.add(paths)
            frozen = _values(pid, "freezer", "freezer.state", "cgroup.events")
        except (OSError, KernelError):
            continue
        if any("FROZEN" in text or "FREEZING" in text or "frozen 1" in text for text in frozen):
            return pid
    return 0


def memory_room(pid: int) -> Optional[int]:
    """Return the bytes by which the memory of a process's cgroup may grow: the least of it and all above it that this
    process can see. None: no limit is known."""
    found = []
    try:
        for limit_name, used_name in (
            ("memory.limit_in_bytes", "memory.max"),
            ("memory.usage_in_bytes", "memory.current"),
            ("memory.stat", "memory.stat"),
        ):
            found.append(_values(pid, "memory", limit_name, used_name))
    except (OSError, KernelError):
        return None
    rooms = [
        int(most) - int(used) + _cached_bytes(text)
        for most, used, text in zip(*found)
        if most.isdigit() and used.isdigit()
    ]
    return max(0, min(rooms)) if rooms else None


def _cached_bytes(stat: str) -> int:
    """Return the contents of files that the kernel drops when the memory is needed; v1 counts those below it apart."""
    values = dict(line.split(None, 1) for line in stat.splitlines() if " " in line)
    return int(values.get("total_inactive_file", values.get("inactive_file", "0")))


def _values(pid: int, controller: str, v1_name: str, v2_name: str) -> list[str]:
    """Return the text of a file of a process's cgroup and of each one above it, innermost first; "" where it lacks."""
    mounts, found = mountns.read_mounts(containing=mountns.CGROUPS), []
    for line in syscalls.lines_of(f"/proc/{pid}/cgroup"):
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and controller not in controllers.split(","):
            continue
        for mount in mounts:
            if mount.fstype == "cgroup2" if is_v2 else controller in mount.super_options.split(","):
                directory, top = _below(mount, path), mount.point.rstrip("/")
                while directory and len(directory) >= len(top):
                    found.append(_text(f"{directory}/{v2_name if is_v2 else v1_name}"))
                    directory = os.path.dirname(directory)
                break
    return found


def _text(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def directories(v1_path: str, v2_path: str, mounts: Mounts = None) -> tuple[str, str]:
    """Directories of these paths of the v1 devices hierarchy and of the v2 hierarchy; "" if not mounted."""
    v1 = v2 = ""
    for mount in mountns.read_mounts(containing=mountns.CGROUPS) if mounts is None else mounts:
        if mount.fstype == "cgroup" and v1_path and not v1 and "devices" in mount.super_options.split(","):
            v1 = _below(mount, v1_path)
        elif mount.fstype == "cgroup2" and v2_path and not v2:
            v2 = _below(mount, v2_path)
    return v1, v2


def _below(mount: mountns.MountEntry, path: str) -> str:
    """Directory of cgroup `path` below `mount`; "" when it is not in the part of the hierarchy that is mounted."""
    if "/.." in path:  # outside our cgroup namespace
        return ""
    root = mount.root.rstrip("/")
    if path != root and not path.startswith(root + "/"):
        return ""
    directory = mount.point.rstrip("/") + path[len(root) :]
    return directory if os.path.isdir(directory) else ""


def _write_rules(directory: str, name: str, rules: Sequence[Rule]) -> None:
    path = f"{directory}/{name}"
    for major, minor in rules:
        try:
            with open(path, "w", encoding="ascii") as control:  # one rule per write(2)
                control.write(f"c {major}:{minor} rw")
        except OSError as error:
            raise syscalls.from_os_error(error, "write", path) from None


def _allow_v1(directory: str, rules: Sequence[Rule]) -> Callable[[], None]:
    missing = [rule for rule in rules if not _is_allowed_v1(directory, rule)]
    _write_rules(directory, "devices.allow", missing)
    return lambda: _write_rules(directory, "devices.deny", missing)


def _is_allowed_v1(directory: str, rule: Rule) -> bool:
    """Whether devices.list already has the rule. Such a rule is not ours, so undoing must not remove it."""
    with open(f"{directory}/devices.list", encoding="ascii") as rules:
        for line in rules:
            kind, _, rest = line.partition(" ")
            numbers, _, access = rest.strip().partition(" ")
            major, _, minor = numbers.partition(":")
            device_matches = major in ("*", str(rule[0])) and minor in ("*", str(rule[1]))
            if kind in ("a", "c") and device_matches and {"r", "w"} <= set(access):
                return True
    return False
