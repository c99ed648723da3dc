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

from ..core.errors import CapacityError, DeviceError, KernelError, RequestError
from ..core.model import Device, Node
from ..core.quoting import shown
from ..state import leases, storage
from ..system import filelock, procs, rootless
from . import backends, mps, mpscontrol, mpslimits, mpsprocess, mpsshm, mpswords
from .mpscontrol import Control

_START_S = 30.0  # a driver without persistence mode takes seconds to come up
_SOCKET_BYTES = 107  # sun_path in unix(7), without the byte that ends it
_SHARED = ("control", "log")  # of pipe/: see mps.py


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
    program = mpscontrol.program(host.inventory.root)
    if program is None:
        raise DeviceError(
            f"no {mpscontrol.NAME} in {shown(host.inventory.root)}", "install it: it is part of the driver"
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
    control = Control(program, f"{folder}/pipe", mpscontrol.environment(host, program))
    extra = _options(control, wish)
    control = control._replace(protocol=mpswords.protocol_in(extra, {}))
    found = mps.state(device.uuid, host.config.state_dir)
    if not found.problem:
        _require_same(found, host, wish, program, device.uuid)
        if mpscontrol.listening(control.pipe) is None:
            stop_it = f"`gpushare mps stop --device {device.uuid}`, then start"
            raise DeviceError(f"the MPS daemon on {device.uuid} (pid {found.pid}) runs and listens no more", stop_it)
        mpslimits.put(control, wish.thread_percent, wish.memory_bytes)  # whoever connects can have changed them
        return Started("running", found)
    _forget(folder)
    daemon = mpscontrol.listening(control.pipe)
    how = "adopted" if daemon else "started"
    if daemon is None:
        mpsprocess.end_orphans(control.pipe)
        _clear(folder)
        daemon = _launch(control, folder, device, wish, extra)
    else:
        _require_adoptable(daemon, device, wish, folder, extra)
    try:
        _open_to(folder, wish.uid)
        mpslimits.put(control, wish.thread_percent, wish.memory_bytes)
        return Started(how, _offer(host, device, wish, folder, control, daemon.pid))
    except BaseException:
        mpsprocess.end(control, daemon.pid)
        raise


def _options(control: Control, wish: DaemonSettings) -> tuple[str, ...]:
    """The flags for clients of several users, where they are wanted. Raises DeviceError where the driver has none."""
    if wish.uid != mps.ANY_UID:
        return ()
    try:
        done = subprocess.run(
            [control.program, "-h"], env=control.env, capture_output=True, text=True, timeout=mpscontrol.DEADLINE_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"{control.program} -h: {error}") from None
    options = mpswords.several_users(done.stdout + done.stderr)
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
    daemon: mpscontrol.Daemon, device: Device, wish: DaemonSettings, folder: str, extra: Sequence[str]
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
    if mpscontrol.protocol_of(daemon.pid) != mpswords.protocol_in(extra, {}):
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
) -> mpscontrol.Daemon:
    """Starts the daemon and waits until it listens. Its parent ends then."""
    shm = f"{folder}/shm" if wish.shm == mps.SHM_OWN else ""
    if shm:
        mpsshm.mount(shm)
    env = {
        **control.env,
        "CUDA_MPS_PIPE_DIRECTORY": control.pipe,
        "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log",
        "CUDA_VISIBLE_DEVICES": device.uuid,
    }

    def prepare() -> None:
        os.umask(0o022)
        if shm:
            mpsshm.use(shm)

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
        raise DeviceError(f"{mpscontrol.NAME} -d has not come up in {_START_S:.0f} s", f"see {folder}/log") from None
    except (OSError, subprocess.SubprocessError) as error:
        raise KernelError(f"{shown(control.program)}: {error}") from None
    daemon = mpscontrol.listening(control.pipe)
    if done.returncode or daemon is None:
        silent = f"exit code {done.returncode}" if done.returncode else "it has ended, and nobody listens"
        said = (done.stdout + done.stderr).strip().splitlines()[-1:] or [silent]
        raise DeviceError(f"{mpscontrol.NAME} -d: {said[0]}", f"see {folder}/log")
    return daemon


def _offer(host: Node, device: Device, wish: DaemonSettings, folder: str, control: Control, pid: int) -> mps.MpsState:
    """From here on containers are given it."""
    process = procs.find(pid)
    if process is None:
        raise DeviceError(f"{mpscontrol.NAME} (pid {pid}) ended at once", f"see {folder}/log")
    for name in _SHARED:
        _link(os.path.join(control.pipe, control.words.folder, name), f"{folder}/share/{name}")
    if not os.path.lexists(f"{folder}/share/control"):
        raise DeviceError(f"{mpscontrol.NAME} (pid {pid}) has no socket for clients", f"see {folder}/log")
    _write(f"{folder}/pid", f"{pid}\n")
    ready = {
        "version": mps.VERSION,
        "pid": pid,
        "start": process.start,
        "boot_id": procs.boot_id(),
        "driver_version": host.inventory.driver_version,
        "build": mps.build_of(control.program),
        "clients": mpscontrol.max_clients(host.inventory.driver_version),
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
        daemon = mpscontrol.listening(f"{folder}/pipe")  # whatever the ready file says
        pid = daemon.pid if daemon else 0 if found.problem else found.pid  # one that nobody can reach any more
        with leases.locked(host.config.state_dir):  # so nobody is given it between these two
            holders = backends.having(mps.NAME, leases.view(host.config.state_dir).live, uuid)
            if holders and pid and not force:
                using = ", ".join(one.id for one in holders)
                raise CapacityError(f"containers have MPS on {uuid}: {using}", "stop them, or add --force")
            _forget(folder)
        program = mpscontrol.program(host.inventory.root)
        if pid:
            env = mpscontrol.environment(host, program) if program else {}
            control = Control(program or mpscontrol.NAME, f"{folder}/pipe", env, mpscontrol.protocol_of(pid))
            mpsprocess.end(control, pid)
        was_there = bool(pid) or os.path.lexists(f"{folder}/pipe") or found.was_running
        for name in ("pipe", "log"):
            shutil.rmtree(f"{folder}/{name}", ignore_errors=True)
        if not holders:  # who still has these mounted is to find the next daemon there
            mpsshm.unmount(f"{folder}/shm")
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
