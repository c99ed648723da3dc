"""Identify a process by pid, start time and boot (start path).

The kernel reuses pids. Field 22 of /proc/<pid>/stat (start time in clock ticks since boot) survives execve and differs
between two processes that had the same pid in one boot. The boot id distinguishes boots. Source: proc(5).
"""

import os
import select
import signal
from typing import NamedTuple, Optional

from ..core.errors import KernelError
from . import syscalls

_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_PF_EXITING = 4
_DEAD_STATES = ("Z", "X", "x")  # a zombie without other threads holds no memory, no device and no mount


class Process(NamedTuple):
    """A process at one moment. `start` is field 22 of its stat line, `threads` field 20."""

    pid: int
    start: int
    state: str
    threads: int = 1


def _read(path: str) -> bytes:
    """Read a file of /proc; empty when its process has exited."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, 65536)
    except OSError:  # ESRCH: died between open and read
        return b""
    finally:
        os.close(fd)


def parse_stat(line: bytes) -> Optional[Process]:
    """Parse a stat line. The process chooses the name in parentheses, and it may contain spaces and `)`, so only the
    last `)` ends it."""
    head, found, tail = line.rpartition(b")")
    fields = tail.split()
    pid = head.partition(b" ")[0]
    if not found or len(fields) < 20 or not all(text.isdigit() for text in (pid, fields[17], fields[19])):
        return None
    return Process(int(pid), int(fields[19]), fields[0].decode("ascii", "replace"), int(fields[17]))


def find(pid: int) -> Optional[Process]:
    """The process with this pid now; None when there is none, or only a zombie. If only the first thread has ended, the
    kernel also shows a zombie, but the process lives and keeps its resources."""
    process = parse_stat(_read(f"/proc/{pid}/stat")) if pid > 0 else None
    dead = process is not None and process.state in _DEAD_STATES and process.threads <= 1
    return None if dead else process


def alive(pid: int, start: int) -> bool:
    """Whether the process with this `pid` and `start` still runs."""
    process = find(pid)
    return process is not None and process.start == start


def living(pid: int, start: int) -> int:
    """`pid` if this process still runs, else 0: its number may be another process's now."""
    return pid if alive(pid, start) else 0


def is_exiting(pid: int) -> bool:
    """Whether no thread of this process runs any more: it has ended, or it closes its files, and no signal can kill it.
    Source: field 9 of proc(5) stat, PF_EXITING of the kernel."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        return True
    lines = (_read(f"/proc/{pid}/task/{thread}/stat") for thread in threads)
    flags = (line.rpartition(b")")[2].split()[6:7] for line in lines)
    return all(not field or int(field[0]) & _PF_EXITING for field in flags)


def myself() -> Process:
    """This process."""
    process = find(os.getpid())
    if process is None:
        raise OSError("/proc/self/stat cannot be read: is /proc mounted?")
    return process


def boot_id() -> str:
    """The id of this boot."""
    return _read(_BOOT_ID).decode("ascii", "replace").strip()


def cgroup_of(pid: int) -> str:
    """The process's cgroup path in the v1 devices hierarchy, else in the unified hierarchy; "" when it has exited."""
    paths = {}
    for line in _read(f"/proc/{pid}/cgroup").decode("utf-8", "surrogateescape").split("\n"):  # not at a \r in a name
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for controller in controllers.split(","):
            paths[controller or number] = path
    return paths.get("devices", paths.get("0", ""))


def command(pid: int) -> list[str]:
    """The command line; empty when it has exited."""
    text = _read(f"/proc/{pid}/cmdline").decode("utf-8", "surrogateescape")
    return text.rstrip("\0").split("\0") if text else []


def name(pid: int) -> str:
    """The name that the process chose; "" when it has exited. Source: proc(5) comm."""
    return _read(f"/proc/{pid}/comm").decode("utf-8", "surrogateescape").removesuffix("\n")


def is_root(pid: int) -> bool:
    """Whether all user ids of the process are 0. The owner of its files in /proc does not tell: that is root, too, if
    the process cannot be dumped. Source: proc(5)."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"Uid:"):
            return line.split()[1:] == [b"0"] * 4
    return False


# Mount namespaces in which a path names the same file as here: our own; that of the first process, if ours is a
# container's whose root is the host's; and that of kubelet and CRI-O, which OpenShift hides from the first process
_SAME_FILES = ("/proc/self/ns/mnt", "/proc/1/ns/mnt", "/proc/1/root/run/kubens/mnt")


def sees_same_files(pid: int) -> bool:
    """Whether a path names the same file for the process as for this one: its mount namespace is one of _SAME_FILES,
    and its root is ours."""
    try:
        theirs = os.stat(f"/proc/{pid}/ns/mnt")
        known = any(os.path.samestat(theirs, os.stat(one)) for one in _SAME_FILES if os.path.exists(one))
        return known and os.path.samestat(os.stat(f"/proc/{pid}/root/"), os.stat("/"))
    except OSError:  # it has ended, or may not be read
        return False


def is_first(pid: int) -> bool:
    """Whether the process is pid 1 of a pid namespace below ours. Source: NSpid in proc(5) status."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            numbers = line.split()[1:]
            return len(numbers) > 1 and numbers[-1] == b"1"
    return False


def pids_by_container_pid(cgroup: str) -> dict[int, int]:
    """{pid inside the container: pid on this host} of all processes in `cgroup` and below.

    A scan of /proc, only for display (inspect). Source: NSpid in proc(5) status, innermost namespace last.
    """
    found = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        path = cgroup_of(int(name))
        if not cgroup or not (path == cgroup or path.startswith(cgroup.rstrip("/") + "/")):
            continue
        for line in _read(f"/proc/{name}/status").splitlines():
            if line.startswith(b"NSpid:"):
                found[int(line.split()[-1])] = int(name)
    return found


def host_memory() -> tuple[int, int]:
    """Return (available, total) bytes of this host's memory. Source: proc(5), meminfo."""
    found = {}
    for line in _read("/proc/meminfo").splitlines():
        name, _, value = line.partition(b":")
        if name in (b"MemAvailable", b"MemTotal"):
            found[name] = int(value.split()[0]) << 10
    return found.get(b"MemAvailable", 0), found.get(b"MemTotal", 0)


def wait(process: Process, milliseconds: int, send: int = 0) -> None:
    """Wait until `process` has ended, `milliseconds` at most. Send it the signal `send` first, if not 0."""
    try:
        fd = syscalls.pidfd_open(process.pid)
    except KernelError:  # gone
        return
    try:
        if alive(process.pid, process.start):
            if send:
                signal.pidfd_send_signal(fd, send)
            _gone(fd, milliseconds)
    except ProcessLookupError:  # ended meanwhile
        pass
    finally:
        os.close(fd)


def kill(process: Process) -> None:
    """Kill `process`, never another process that got its pid, and wait up to 5 s until it has ended."""
    wait(process, 5000, 9)


def _gone(pidfd: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(milliseconds))
