"""Start and stop the MPS daemon of a device. Not on the start path.

    start(host, device, settings)      -> Started     start or adopt the daemon, set its limits, then offer it
    stop(host, uuid, force)            -> bool        end the daemon; False: there was none

In mps/<uuid>/ of the state directory, pipe/ and log/ belong to the daemon. shm/ is its /dev/shm, a tmpfs that its
containers share. share/ is mounted into containers, `pid` is for systemd, and `ready` marks a complete daemon. A start
creates them in this order, a stop removes them in reverse. If no daemon listens, they are left from one that died, and
are removed. `lock` orders starts and stops of one device.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from ....core.errors import CapacityError, DeviceError, GpushareError, KernelError, RequestError
from ....core.model import Device, Node
from ....core.quoting import shown
from ....state import leases, storage
from ....system import filelock, procs, rootless, syscalls
from ... import backends
from . import control as mps_control
from . import state as mps
from .control import Control

_START_S = 30.0  # a driver without persistence mode takes seconds to come up
_SOCKET_BYTES = 107  # sun_path in unix(7), without the byte that ends it
_SHARED = ("control", "log")  # of pipe/: see state.py


class DaemonSettings(NamedTuple):
    """The settings of a daemon. None: as much as policy allows one container."""

    thread_percent: int
    memory_bytes: int  # 0: no limit, where the device's size is not known
    uid: int  # mps.ANY_UID: all users
    shm: str  # mps.SHM_*


class Started(NamedTuple):
    """`how`: started, adopted (it listened already), running (it had these settings)."""

    how: str
    state: mps.MpsState


def start(host: Node, device: Device, settings: DaemonSettings) -> Started:
    """Start the daemon, or adopt one that listens already. Raise GpushareError; then no unknown daemon is left."""
    require_root()
    if device.parent:
        raise RequestError(f"{device.uuid} is a MIG device: MPS is started for whole GPUs here", "name the GPU")
    program = mps_control.program(host.inventory)
    if program is None:
        raise DeviceError(
            f"no {mps_control.NAME} in {shown(host.inventory.files_root)}", "install it: it is part of the driver"
        )
    folder = mps.directory(host.config.state_dir, device.uuid)
    if len(os.fsencode(f"{folder}/pipe/control_privileged")) > _SOCKET_BYTES:
        raise RequestError(
            f"a socket below {shown(folder)} would have too long a path", "use a shorter state directory"
        )
    storage.prepare(host.config.state_dir)
    os.makedirs(os.path.dirname(folder), 0o755, exist_ok=True)
    with _locked(folder):
        os.makedirs(folder, 0o700, exist_ok=True)  # a concurrent stop may have removed it
        return _start(host, device, settings, folder, program)


def require_root() -> None:
    """Raise RequestError for a rootless user, who cannot see daemons of other users."""
    if rootless.is_rootless():
        raise RequestError("MPS for containers needs root", "run as root")


def _start(host: Node, device: Device, settings: DaemonSettings, folder: str, program: str) -> Started:
    control = Control(program, f"{folder}/pipe", mps_control.environment(host, program))
    extra = _options(control, settings)
    control = control._replace(protocol=mps_control.protocol_in(extra, {}))
    found = mps.state(device.uuid, host.config.state_dir)
    if not found.problem:
        whole = device.memory_bytes + device.reserved_bytes  # the default of versions that counted NVML's total
        if (found.memory_bytes, settings.memory_bytes) == (whole, device.memory_bytes):
            settings = settings._replace(memory_bytes=whole)
        _require_same(found, host, settings, program, device.uuid)
        if mps_control.listening(control.pipe) is None:
            stop_it = f"`gpushare mps stop --device {device.uuid}`, then start"
            raise DeviceError(
                f"the MPS daemon on {device.uuid} (pid {found.pid}) runs but no longer accepts connections", stop_it
            )
        mps_control.put_limits(control, settings.thread_percent, settings.memory_bytes)  # clients can have changed them
        return Started("running", found)
    _forget(folder)
    daemon = mps_control.listening(control.pipe)
    how = "adopted" if daemon else "started"
    if daemon is None:
        _end_orphans(control.pipe)
        _clear(folder)
        daemon = _launch(control, folder, device, settings, extra)
    else:
        _require_adoptable(daemon, device, settings, folder, extra)
    try:
        _open_to(folder, settings.uid)
        mps_control.put_limits(control, settings.thread_percent, settings.memory_bytes)
        return Started(how, _offer(host, device, settings, folder, control, daemon.pid))
    except BaseException:
        end(control, daemon.pid)
        raise


def _options(control: Control, settings: DaemonSettings) -> tuple[str, ...]:
    """Return the flags for clients of several users, if requested. Raise DeviceError if the driver has none."""
    if settings.uid != mps.ANY_UID:
        return ()
    try:
        done = subprocess.run(
            [control.program, "-h"], env=control.env, capture_output=True, text=True, timeout=mps_control.DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{control.program} -h: {error}") from None
    options = mps_control.several_users(done.stdout + done.stderr)
    if not options:
        raise DeviceError("this driver's MPS serves one user at a time", "name one: --uid N")
    return options


def _open_to(folder: str, uid: int) -> None:
    """Set who can reach the pipe on the host. Containers reach it by a mount. A server that does not run as root must
    get here, and then every user can connect and set the daemon's defaults. A server for all users runs as root."""
    os.chmod(folder, 0o700 if uid in (0, mps.ANY_UID) else 0o755)
    os.chmod(os.path.dirname(folder), 0o755)
    os.makedirs(f"{folder}/share", exist_ok=True)
    os.chmod(f"{folder}/share", 0o755)


def _require_adoptable(
    daemon: mps_control.Daemon, device: Device, settings: DaemonSettings, folder: str, extra: Sequence[str]
) -> None:
    """Refuse a daemon that listens here and cannot be adopted. It is left from a killed start, or a user's own."""
    who = f"the MPS daemon in {shown(folder + '/pipe')} (pid {daemon.pid})"
    if daemon.uid != os.geteuid():
        raise DeviceError(f"{who} belongs to uid {daemon.uid}", "stop it as that user")
    try:
        with open(f"/proc/{daemon.pid}/environ", "rb") as file:
            sees_it = f"CUDA_VISIBLE_DEVICES={device.uuid}".encode() in file.read().split(b"\0")
        with open(f"/proc/{daemon.pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
        there, ours = os.stat(f"/proc/{daemon.pid}/root/dev/shm"), os.stat(f"{folder}/shm")
    except OSError as error:
        raise DeviceError(f"{who}: {error.strerror}", "stop it") from None
    if not sees_it:
        raise DeviceError(f"{who} was not started for this device alone", "stop it")
    if not set(map(os.fsencode, extra)) <= set(words):
        raise DeviceError(f"{who} serves one user at a time", "stop it, or name the user: --uid N")
    if mps_control.protocol_of(daemon.pid) != mps_control.protocol_in(extra, {}):
        raise DeviceError(f"{who} uses another version of the MPS protocol", "stop it")
    if (settings.shm == mps.SHM_OWN) != os.path.samestat(there, ours):
        raise DeviceError(f"{who} was started with another /dev/shm", "stop it, or use the other --shm")


def _require_same(found: mps.MpsState, host: Node, settings: DaemonSettings, program: str, uuid: str) -> None:
    """Refuse a second start with other settings: it would change nothing."""
    again = f"`gpushare mps stop --device {uuid}` first"
    if (found.driver_version, found.build) != (host.inventory.driver_version, mps.build_of(program)):
        raise CapacityError(f"MPS runs on {uuid} already, started before the driver was changed", again)
    there = DaemonSettings(found.thread_percent, found.memory_bytes, found.uid, found.shm)
    if there != settings:
        differs = ", ".join(
            f"{name.replace('_', ' ')} {old}, not {new}"
            for name, old, new in zip(DaemonSettings._fields, there, settings)
            if old != new
        )
        raise CapacityError(f"MPS runs on {uuid} already, with {differs}", again)


def _clear(folder: str) -> None:
    """Remove the files of a daemon that died."""
    shutil.rmtree(f"{folder}/pipe", ignore_errors=True)
    os.makedirs(f"{folder}/shm", exist_ok=True)
    for name in ("pipe", "log", "share"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        os.chmod(f"{folder}/{name}", 0o755)  # independent of the umask


def _launch(
    control: Control, folder: str, device: Device, settings: DaemonSettings, extra: Sequence[str]
) -> mps_control.Daemon:
    """Start the daemon and wait until it listens, which is when its parent exits."""
    shm = f"{folder}/shm" if settings.shm == mps.SHM_OWN else ""
    if shm:
        _mount_shm(shm)
    env = {
        **control.env,
        "CUDA_MPS_PIPE_DIRECTORY": control.pipe,
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_VISIBLE_DEVICES": device.uuid,
    }

    def prepare() -> None:
        os.umask(0o022)
        if shm:
            _use_shm(shm)

    try:
        done = subprocess.run(
            [control.program, *extra, "-d"],
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            cwd="/",
            timeout=_START_S,
            preexec_fn=prepare,
        )
    except subprocess.TimeoutExpired:
        raise DeviceError(f"{mps_control.NAME} -d did not start within {_START_S:.0f} s", f"see {folder}/log") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{shown(control.program)}: {error}") from None
    daemon = mps_control.listening(control.pipe)
    if done.returncode or daemon is None:
        silent = (
            f"exit code {done.returncode}" if done.returncode else "it has exited, and no daemon accepts connections"
        )
        said = (done.stdout + done.stderr).strip().splitlines()[-1:] or [silent]
        raise DeviceError(f"{mps_control.NAME} -d: {said[0]}", f"see {folder}/log")
    return daemon


def _offer(
    host: Node, device: Device, settings: DaemonSettings, folder: str, control: Control, pid: int
) -> mps.MpsState:
    """Mark the daemon as ready: containers use it from now on."""
    process = procs.find(pid)
    if process is None:
        raise DeviceError(f"{mps_control.NAME} (pid {pid}) ended at once", f"see {folder}/log")
    for name in _SHARED:
        _link(os.path.join(control.pipe, control.commands.folder, name), f"{folder}/share/{name}")
    if not os.path.lexists(f"{folder}/share/control"):
        raise DeviceError(f"{mps_control.NAME} (pid {pid}) has no socket for clients", f"see {folder}/log")
    _write(f"{folder}/pid", f"{pid}\n")
    ready = {
        "version": mps.VERSION,
        "pid": pid,
        "start": process.start,
        "boot_id": procs.boot_id(),
        "driver_version": host.inventory.driver_version,
        "build": mps.build_of(control.program),
        "clients": mps_control.max_clients(host.inventory.driver_version),
        **settings._asdict(),
    }
    _write(f"{folder}/{mps.READY}", json.dumps(ready) + "\n")
    found = mps.state(device.uuid, host.config.state_dir)
    if found.problem:
        raise DeviceError(f"MPS: {found.problem}", f"see {folder}/log")
    return found


def _link(source: str, target: str) -> None:
    if not os.path.lexists(source):
        return
    temporary = target + ".new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.link(source, temporary, follow_symlinks=False)
    os.rename(temporary, target)


def _write(path: str, text: str) -> None:
    """Write by rename, so that a reader sees the whole file or none."""
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".new", path)


def _forget(folder: str) -> None:
    """Withdraw the daemon: no container gets it and no program connects to it any more."""
    for name in (mps.READY, "pid", *(f"share/{name}" for name in _SHARED)):
        try:
            os.unlink(f"{folder}/{name}")
        except FileNotFoundError:
            pass


# Stop


def stop(host: Node, uuid: str, force: bool) -> bool:
    """End the daemon and remove its files. Return False if there was none. Raise CapacityError while containers use
    it, unless `force`."""
    folder = mps.directory(host.config.state_dir, uuid)
    if not os.path.isdir(folder):
        return False
    with _locked(folder):
        found = mps.state(uuid, host.config.state_dir)
        daemon = mps_control.listening(f"{folder}/pipe")  # whatever the ready file says
        pid = daemon.pid if daemon else 0 if found.problem else found.pid  # a daemon that no client can reach any more
        with leases.locked(host.config.state_dir):  # so no container gets it in between
            holders = backends.having(mps.NAME, leases.view(host.config.state_dir).live, uuid)
            if holders and pid and not force:
                using = ", ".join(one.id for one in holders)
                raise CapacityError(f"containers still use MPS on {uuid}: {using}", "stop them, or add --force")
            _forget(folder)
        program = mps_control.program(host.inventory)
        if pid:
            env = mps_control.environment(host, program) if program else {}
            control = Control(program or mps_control.NAME, f"{folder}/pipe", env, mps_control.protocol_of(pid))
            end(control, pid)
        was_there = bool(pid) or os.path.lexists(f"{folder}/pipe") or found.was_running
        for name in ("pipe", "log"):
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        if not holders:  # containers that still have these mounted must find the next daemon there
            _unmount_shm(f"{folder}/shm")
            shutil.rmtree(folder, ignore_errors=True)
        return was_there


@contextmanager
def _locked(folder: str) -> Iterator[None]:
    fd = os.open(f"{folder}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        filelock.take(fd, f"{folder}.lock", 2 * _START_S)
        yield
    finally:
        os.close(fd)


# Processes of MPS. Only processes that are known by pid and start time are killed


_QUIT_S = 10
_COMM = 15  # characters of a process's name: proc(5). Daemon and server have the same


def _end_orphans(pipe: str) -> None:
    """End servers whose daemon has died: they keep the GPU and accept no client. Raise DeviceError if a daemon of a
    lost state directory still runs: it may have clients, and no control program can reach it."""
    folders = [commands.folder for commands in mps_control.COMMANDS.values() if commands.folder]
    servers, places = [], {pipe, *(os.path.join(pipe, folder) for folder in folders)}
    variables = {os.fsencode(f"CUDA_MPS_PIPE_DIRECTORY={place}") for place in places}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if procs.name(int(name)) != mps_control.NAME[:_COMM]:
            continue  # its variables can be in memory that makes the reader wait (FUSE)
        try:
            with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/cmdline", "rb") as command:
                mine = not variables.isdisjoint(environ.read().split(b"\0"))
                kind = _kind(name, command.read().split(b"\0")) if mine else ""
        except OSError:  # exited, or a kernel thread
            continue
        process = procs.find(int(name)) if kind else None
        if process is not None and kind == mps_control.NAME:
            raise DeviceError(
                f"an MPS daemon whose directory {shown(pipe)} was lost still runs (pid {name})",
                "kill it after its containers have ended",
            )
        servers += [process] if process is not None else []
    for process in servers:
        procs.kill(process)


def _kind(name: str, words: Sequence[bytes]) -> str:
    """Return mps_control.SERVER for a server, NAME for a control daemon, "" for any other process with the variable: a
    shell and its children, or a program in a container that tries to block a daemon. Raise OSError."""
    if not os.path.samestat(os.stat(f"/proc/{name}/ns/pid"), os.stat("/proc/self/ns/pid")):
        return ""
    programs = [os.path.basename(os.fsdecode(word)) for word in words[:2]]  # the second one if it is a script
    if programs[0] == mps_control.SERVER:
        return mps_control.SERVER
    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
        uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
    is_daemon = mps_control.NAME in programs and {b"-d", b"-f"} & set(words)
    return mps_control.NAME if is_daemon and str(os.geteuid()) in uids else ""


def end(control: Control, pid: int) -> None:
    """Send `quit`, then SIGKILL to processes that remain: a server whose kernel never ends keeps its daemon alive. Kill
    only processes that are known by pid and start time."""
    family = [found for found in (procs.find(one) for one in (*_children(pid), pid)) if found is not None]
    try:
        control.ask(control.commands.quit.format(_QUIT_S), 2.0 * _QUIT_S)
    except GpushareError:
        pass
    for one in family:
        procs.wait(one, 1000)
        procs.kill(one)


def _children(pid: int) -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                if int(file.read().rpartition(b")")[2].split()[1]) == pid:
                    yield int(name)
        except (OSError, IndexError, ValueError):
            continue


# /dev/shm of the daemon and its containers: a tmpfs of its own


_OPTIONS = {"size": "64m", "nr_inodes": "4096", "mode": "1777"}  # a file of 4 KiB for each client


def _mount_shm(path: str) -> None:
    """Mount a tmpfs, so that a tenant that fills it takes nothing from the state directory. Keep an existing one:
    containers of a daemon that died have it mounted, and must meet the next daemon there."""
    if os.path.ismount(path):
        _empty_shm(path)
        return
    flags = sum(syscalls.ATTRIBUTES[name] for name in ("nosuid", "nodev", "noexec"))
    tmpfs = syscalls.detached_tmpfs(_OPTIONS, flags, path)
    target = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        syscalls.move_mount(tmpfs, target, path)
        syscalls.mount_setattr(tmpfs, 0, syscalls.MS_PRIVATE, path)
    finally:
        os.close(target)
        os.close(tmpfs)


def _empty_shm(path: str) -> None:
    """Remove all entries. Containers write here at the same time, directories too."""
    for entry in os.scandir(path):
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except (OSError, RecursionError):  # gone or replaced meanwhile; what is left is the container's
            pass


def _unmount_shm(path: str) -> None:
    while os.path.ismount(path):
        syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def _use_shm(path: str) -> None:
    """Give the child that becomes the daemon a /dev/shm that no other process sees."""
    syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace")
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    syscalls.mount_setattr(root, 0, syscalls.MS_SLAVE, "/", recursive=True)
    tree = syscalls.open_tree(path)
    target = os.open("/dev/shm", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.move_mount(tree, target, "/dev/shm")
