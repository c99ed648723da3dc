"""Starting and stopping MPS on a device. Not on the start path.

    start(host, device, wish)          -> Started     runs or adopts the daemon, sets its limits, then offers it
    stop(host, uuid, force)            -> bool        False: there was none

mps/<uuid>/ of the state directory: pipe/ and log/ are the daemon's, shm/ is its /dev/shm (a tmpfs of its own, which its
containers share), share/ is what containers see, `pid` is for systemd, and `ready` says that all of it is true. A start
makes them in this order and a stop takes them away in the other. Whatever of them is there while no daemon listens is
of one that died, and goes. `lock` orders starts and stops of one device.
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
    """What is asked of a daemon. None: as much as policy lets one container have."""

    thread_percent: int
    memory_bytes: int  # 0: no limit, where the device's size is not known
    uid: int  # mps.ANY_UID: everybody
    shm: str  # mps.SHM_*


class Started(NamedTuple):
    """`how`: started, adopted (it listened already), running (all was as asked)."""

    how: str
    state: mps.MpsState


def start(host: Node, device: Device, wish: DaemonSettings) -> Started:
    """Raises GpushareError, with no daemon of ours left that nobody knows of."""
    require_root()
    if device.parent:
        raise RequestError(f"{device.uuid} is a MIG device: MPS is started for whole GPUs here", "name the GPU")
    program = mps_control.program(host.inventory.root)
    if program is None:
        raise DeviceError(
            f"no {mps_control.NAME} in {shown(host.inventory.root)}", "install it: it is part of the driver"
        )
    folder = mps.directory(host.config.state_dir, device.uuid)
    if len(os.fsencode(f"{folder}/pipe/control_privileged")) > _SOCKET_BYTES:
        raise RequestError(
            f"a socket below {shown(folder)} would have too long a path", "use a shorter state directory"
        )
    storage.prepare(host.config.state_dir)
    os.makedirs(os.path.dirname(folder), 0o755, exist_ok=True)
    with _locked(folder):
        os.makedirs(folder, 0o700, exist_ok=True)  # a stop that we waited for has taken it away
        return _start(host, device, wish, folder, program)


def require_root() -> None:
    """Of others' daemons nothing can be said. Raises RequestError."""
    if rootless.is_rootless():
        raise RequestError("MPS for containers needs root", "run as root")


def _start(host: Node, device: Device, wish: DaemonSettings, folder: str, program: str) -> Started:
    control = Control(program, f"{folder}/pipe", mps_control.environment(host, program))
    extra = _options(control, wish)
    control = control._replace(protocol=mps_control.protocol_in(extra, {}))
    found = mps.state(device.uuid, host.config.state_dir)
    if not found.problem:
        _require_same(found, host, wish, program, device.uuid)
        if mps_control.listening(control.pipe) is None:
            stop_it = f"`gpushare mps stop --device {device.uuid}`, then start"
            raise DeviceError(f"the MPS daemon on {device.uuid} (pid {found.pid}) runs and listens no more", stop_it)
        mps_control.put_limits(
            control, wish.thread_percent, wish.memory_bytes
        )  # whoever connects can have changed them
        return Started("running", found)
    _forget(folder)
    daemon = mps_control.listening(control.pipe)
    how = "adopted" if daemon else "started"
    if daemon is None:
        _end_orphans(control.pipe)
        _clear(folder)
        daemon = _launch(control, folder, device, wish, extra)
    else:
        _require_adoptable(daemon, device, wish, folder, extra)
    try:
        _open_to(folder, wish.uid)
        mps_control.put_limits(control, wish.thread_percent, wish.memory_bytes)
        return Started(how, _offer(host, device, wish, folder, control, daemon.pid))
    except BaseException:
        end(control, daemon.pid)
        raise


def _options(control: Control, wish: DaemonSettings) -> tuple[str, ...]:
    """The flags for clients of several users, where they are wanted. Raises DeviceError where the driver has none."""
    if wish.uid != mps.ANY_UID:
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
    """Containers have what they need as a mount. On the host a server that does not run as root has to get here, and
    then every user can: whoever can connect can set the daemon's defaults. The one for all users runs as root."""
    os.chmod(folder, 0o700 if uid in (0, mps.ANY_UID) else 0o755)
    os.chmod(os.path.dirname(folder), 0o755)
    os.makedirs(f"{folder}/share", exist_ok=True)
    os.chmod(f"{folder}/share", 0o755)


def _require_adoptable(
    daemon: mps_control.Daemon, device: Device, wish: DaemonSettings, folder: str, extra: Sequence[str]
) -> None:
    """A daemon that listens where ours would, and was not offered: of a start that was killed, or a person's own."""
    who = f"the MPS daemon in {shown(folder + '/pipe')} (pid {daemon.pid})"
    if daemon.uid != os.geteuid():
        raise DeviceError(f"{who} is of uid {daemon.uid}", "stop it as that user")
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
        raise DeviceError(f"{who} speaks another protocol of MPS", "stop it")
    if (wish.shm == mps.SHM_OWN) != os.path.samestat(there, ours):
        raise DeviceError(f"{who} was started with another /dev/shm", "stop it, or use the other --shm")


def _require_same(found: mps.MpsState, host: Node, wish: DaemonSettings, program: str, uuid: str) -> None:
    """A second start changes nothing, so it must ask for nothing else."""
    again = f"`gpushare mps stop --device {uuid}` first"
    if (found.driver_version, found.build) != (host.inventory.driver_version, mps.build_of(program)):
        raise CapacityError(f"MPS runs on {uuid} already, started before the driver was changed", again)
    there = DaemonSettings(found.thread_percent, found.memory_bytes, found.uid, found.shm)
    if there != wish:
        differs = ", ".join(
            f"{name.replace('_', ' ')} {old}, not {new}"
            for name, old, new in zip(DaemonSettings._fields, there, wish)
            if old != new
        )
        raise CapacityError(f"MPS runs on {uuid} already, with {differs}", again)


def _clear(folder: str) -> None:
    """What a daemon that died has left."""
    shutil.rmtree(f"{folder}/pipe", ignore_errors=True)
    os.makedirs(f"{folder}/shm", exist_ok=True)
    for name in ("pipe", "log", "share"):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
        os.chmod(f"{folder}/{name}", 0o755)  # whatever our umask is


def _launch(
    control: Control, folder: str, device: Device, wish: DaemonSettings, extra: Sequence[str]
) -> mps_control.Daemon:
    """Starts the daemon and waits until it listens. Its parent ends then."""
    shm = f"{folder}/shm" if wish.shm == mps.SHM_OWN else ""
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
        raise DeviceError(f"{mps_control.NAME} -d has not come up in {_START_S:.0f} s", f"see {folder}/log") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{shown(control.program)}: {error}") from None
    daemon = mps_control.listening(control.pipe)
    if done.returncode or daemon is None:
        silent = f"exit code {done.returncode}" if done.returncode else "it has ended, and nobody listens"
        said = (done.stdout + done.stderr).strip().splitlines()[-1:] or [silent]
        raise DeviceError(f"{mps_control.NAME} -d: {said[0]}", f"see {folder}/log")
    return daemon


def _offer(host: Node, device: Device, wish: DaemonSettings, folder: str, control: Control, pid: int) -> mps.MpsState:
    """From here on containers are given it."""
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
        **wish._asdict(),
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
    """By rename: a reader sees all of it or nothing."""
    with open(path + ".new", "w", encoding="ascii") as file:
        file.write(text)
    os.rename(path + ".new", path)


def _forget(folder: str) -> None:
    """Nobody is given the daemon from here on, and no program connects to it any more."""
    for name in (mps.READY, "pid", *(f"share/{name}" for name in _SHARED)):
        try:
            os.unlink(f"{folder}/{name}")
        except FileNotFoundError:
            pass


# The end


def stop(host: Node, uuid: str, force: bool) -> bool:
    """Ends the daemon and removes what it left. False when there was nothing. Raises CapacityError while containers
    have it, unless `force`."""
    folder = mps.directory(host.config.state_dir, uuid)
    if not os.path.isdir(folder):
        return False
    with _locked(folder):
        found = mps.state(uuid, host.config.state_dir)
        daemon = mps_control.listening(f"{folder}/pipe")  # whatever the ready file says
        pid = daemon.pid if daemon else 0 if found.problem else found.pid  # one that nobody can reach any more
        with leases.locked(host.config.state_dir):  # so nobody is given it between these two
            holders = backends.having(mps.NAME, leases.view(host.config.state_dir).live, uuid)
            if holders and pid and not force:
                using = ", ".join(one.id for one in holders)
                raise CapacityError(f"containers have MPS on {uuid}: {using}", "stop them, or add --force")
            _forget(folder)
        program = mps_control.program(host.inventory.root)
        if pid:
            env = mps_control.environment(host, program) if program else {}
            control = Control(program or mps_control.NAME, f"{folder}/pipe", env, mps_control.protocol_of(pid))
            end(control, pid)
        was_there = bool(pid) or os.path.lexists(f"{folder}/pipe") or found.was_running
        for name in ("pipe", "log"):
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        if not holders:  # who still has these mounted is to find the next daemon there
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


def _end_orphans(pipe: str) -> None:
    """Servers whose daemon has died hold the GPU and serve nobody new: they go. A daemon of ours whose directory is
    gone, with the state directory, can still have clients, and nobody can talk to it. Raises DeviceError."""
    folders = [commands.folder for commands in mps_control.COMMANDS.values() if commands.folder]
    servers, places = [], {pipe, *(os.path.join(pipe, folder) for folder in folders)}
    variables = {os.fsencode(f"CUDA_MPS_PIPE_DIRECTORY={place}") for place in places}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/environ", "rb") as environ, open(f"/proc/{name}/cmdline", "rb") as command:
                mine = not variables.isdisjoint(environ.read().split(b"\0"))
                kind = _kind(name, command.read().split(b"\0")) if mine else ""
        except OSError:  # gone, or a kernel thread's
            continue
        process = procs.find(int(name)) if kind else None
        if process is not None and kind == mps_control.NAME:
            raise DeviceError(
                f"an MPS daemon whose directory {shown(pipe)} was lost runs (pid {name})",
                "kill it when the containers that have it have ended",
            )
        servers += [process] if process is not None else []
    for process in servers:
        procs.kill(process)


def _kind(name: str, words: Sequence[bytes]) -> str:
    """mps_control.SERVER, NAME for a control daemon, or "" for whoever has the variable besides: a person's shell, and
    what it starts, or a program in a container, that of a tenant who wants no daemon to start. Raises OSError."""
    if not os.path.samestat(os.stat(f"/proc/{name}/ns/pid"), os.stat("/proc/self/ns/pid")):
        return ""
    programs = [os.path.basename(os.fsdecode(word)) for word in words[:2]]  # the second one of a script
    if programs[0] == mps_control.SERVER:
        return mps_control.SERVER
    with open(f"/proc/{name}/status", encoding="utf-8", errors="replace") as file:
        uids = next(line.split()[1:] for line in file if line.startswith("Uid:"))
    is_daemon = mps_control.NAME in programs and {b"-d", b"-f"} & set(words)
    return mps_control.NAME if is_daemon and str(os.geteuid()) in uids else ""


def end(control: Control, pid: int) -> None:
    """`quit`, and SIGKILL for whoever does not: servers that hang on a kernel that never ends keep their daemon. Only
    processes that are known by pid and start time are killed."""
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
    """A tmpfs of its own, so that a tenant who fills it takes nothing from the state directory. One that is there
    stays: containers of a daemon that died have it, and are to meet the next one there."""
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
    """Containers write here too, also just now, and also directories."""
    for entry in os.scandir(path):
        try:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)
        except (OSError, RecursionError):  # gone, or another thing by now; what is left is its maker's
            pass


def _unmount_shm(path: str) -> None:
    while os.path.ismount(path):
        syscalls.umount(path, syscalls.MNT_DETACH | syscalls.UMOUNT_NOFOLLOW)


def _use_shm(path: str) -> None:
    """In the child that becomes the daemon: its own /dev/shm, seen by nobody else."""
    syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace")
    root = os.open("/", os.O_PATH | os.O_CLOEXEC)
    syscalls.mount_setattr(root, 0, syscalls.MS_SLAVE, "/", recursive=True)
    tree = syscalls.open_tree(path)
    target = os.open("/dev/shm", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.move_mount(tree, target, "/dev/shm")
