"""The proof of every attack: the host is unchanged, the container got its share or was refused, nothing is left.

`host_state` is a checksum walk of all possible targets; `mount_table` is the host's own table. Both are compared before
the attack's container exists and after it is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from gpushare.state import activity_files

from tests.support import host, judge
from tests.support.host import PYTHON, Node
from tests.support.runc import Container, RuntimeFailed

GIB = 1 << 30
LIMIT = 2 * GIB
LIMIT_WORD = "2Gi"
MAX_LINE = 2000  # characters, including the low-level runtime's own around the line

# Of the machine that runs the tests; missing files must stay missing.
FILES = (
    "/etc/passwd", "/etc/shadow", "/etc/group", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.preload",
    "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/fs/binfmt_misc/status",
    "/usr/sbin/runc", "/usr/bin/runc", "/usr/bin/crun",
)  # fmt: skip
DIRECTORIES = ("/usr/lib/gpushare", "/usr/local/cuda", "/run/gpushare")
NAMES = {"/dev": ("nvidia",), "/usr/lib/x86_64-linux-gnu": ("libcuda", "libnvidia"), "/usr/bin": ("nvidia",)}
CLEAN = ("/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin")  # in the container
MADE = "/dev/made-by-a-tenant"
_MARK = "-- and what else there is"


def walk(root: Path, contents: bool = True) -> dict[str, tuple[Any, ...]]:
    """Every path below `root`: mode, owner, links, size, time of change and the content of a file or link."""
    found: dict[str, tuple[Any, ...]] = {}
    for folder, folders, files in os.walk(root):
        for name in (".", *folders, *files):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content = ""
            if stat.S_ISLNK(status.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(status.st_mode) and contents:
                content = _checksum(path)
            times = (status.st_mtime_ns, status.st_ctime_ns) if contents else ()
            owner = (status.st_uid, status.st_gid, status.st_nlink)
            found[path] = (status.st_mode, *owner, status.st_rdev, *times, content)
    return found


_sums: dict[tuple[int, ...], str] = {}  # of unchanged files, by identity, size and time of change


def _checksum(path: str) -> str:
    """Read a file again only after it was replaced or changed: no process can set the ctime."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if key not in _sums or not status.st_size:  # files in /proc have no size and no time of change
            _sums[key] = hashlib.sha256(file.read()).hexdigest()
        return _sums[key]


def host_state(node: Node, sentinel: Path) -> dict[str, Any]:
    """All that must not change: the attack's sentinel directory, gpushare's files, the driver's, and the machine's."""
    found: dict[str, Any] = dict(walk(sentinel))
    for tree in (host.BIN, host.BIN.parent / "libexec", host.SHIM):
        found.update(walk(tree))
    for tree in node.driver_root.iterdir():  # devices are files that a simulated driver writes
        found.update(walk(tree, contents=tree.name != "dev") if tree.is_dir() and not tree.is_symlink() else {})
    found[str(node.config)] = _checksum(str(node.config))
    for name in FILES:
        found[name] = _checksum(name) if os.path.isfile(name) else "absent"
    for name in DIRECTORIES:
        found[name] = sorted(os.listdir(name)) if os.path.isdir(name) else "absent"
    for folder, prefixes in NAMES.items():
        found[f"{folder}/{prefixes}*"] = sorted(name for name in os.listdir(folder) if name.startswith(prefixes))
    return found


def mount_table(node: Node) -> list[str]:
    """This process's mounts, without ids and without the state directory, which node.left() checks."""
    with open("/proc/self/mountinfo") as table:
        lines = [line.split(" ") for line in table]
    return sorted(" ".join(words[2:]) for words in lines if not f"{words[4]}/".startswith(f"{node.state}/"))


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def require_refusal(error: RuntimeFailed, words: tuple[str, ...], by: str) -> str:
    """Return gpushare's only line (or, with `by` "runc", the runtime's own). It must have each of `words` and no
    traceback."""
    assert "Traceback" not in error.message and "internal error" not in error.message, error.message
    line = error.last_line
    assert len(line) < MAX_LINE and line.isprintable(), error.message
    assert by != "gpushare" or "gpushare: " in error.message, error.message
    missing = [word for word in words if word not in error.message]
    assert not missing, f"{missing} not in {error.message}"
    return line


def require_share(node: Node, one: Container) -> None:
    """A program that allocates all it can gets exactly the share, by both libraries and by the device's ledger. Only
    the granted nodes exist; limits are read-only and the host's."""
    answer, sums, *nodes = _look(one, "sha256sum /usr/lib/gpushare/limits")
    assert "refused" not in answer, answer
    assert answer["total_bytes"] == answer["nvml_total_bytes"] == LIMIT, answer
    assert LIMIT // 2 < answer["got_bytes"] < LIMIT, answer
    namespace = os.stat(f"/proc/{one.pid}/ns/pid").st_ino
    assert judge.peak_bytes(node.driver_root, namespace) <= LIMIT
    _require_devices(nodes)
    limits = node.state / "containers" / one.id / "share" / "limits"
    assert sums.split()[0] == _checksum(str(limits))
    assert limits.stat().st_mode & 0o777 == 0o444 and limits.stat().st_nlink == 1


def require_no_gpu(one: Container) -> None:
    """The container started with limits, and its own driver does not work: CUDA fails, and no container exceeds its
    share."""
    answer, *nodes = _look(one, ":")
    assert answer.keys() == {"refused"}, answer
    _require_devices(nodes)


def _look(one: Container, command: str) -> list[Any]:
    """Return from the container: grab.py's result, the lines of `command`, and those for `_require_devices`."""
    devices = f"ls -d /dev/nvidia[0-9]*; {{ mknod {MADE} c 195 1 && (: <{MADE}); }} 2>&1; rm -f {MADE}"
    script = f"{PYTHON} /opt/grab.py || exit 1; echo; echo {_MARK}; {command}; {devices}"
    done = one.exec(*CLEAN, "/bin/sh", "-c", script)
    lines = done.stdout.splitlines()
    assert _MARK in lines, done.stderr
    at = lines.index(_MARK)
    return [json.loads([line for line in lines[:at] if line][-1]), *lines[at + 1 :]]


def _require_devices(lines: list[str]) -> None:
    """Only this container's nodes exist, and no other GPU's node can be made and opened. The cgroup denies it (/dev is
    no nodev mount, and without a driver an allowed open fails with "No such device")."""
    assert [line for line in lines if line.startswith("/dev/nvidia")] == ["/dev/nvidia0"], lines
    assert "Operation not permitted" in lines[-1], lines


def require_nothing_left(node: Node) -> None:
    """The whole device is free: no lease, no file or mount of a container, and no number of an activity file."""
    assert node.left() == []
    assert node.leases() == []
    numbers = {uuid: activity_files.numbers(str(node.state), uuid) for uuid in os.listdir(node.state / "devices")}
    assert not any(numbers.values()), numbers
