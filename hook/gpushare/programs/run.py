"""`gpushare run`: a share of a GPU for a program on the host, without a container engine.

    Job(name, command, variables, user) one request
    start(job, paths)                   this process becomes the command; never returns

The plan is the same as a container's. It is carried out on "/" in a mount namespace of this process (hostroot.py),
which then becomes the command by execve, so no process has to forward signals. The lease belongs to this process and is
dead when the process is gone. The process must have one thread, because it changes namespaces."""

from __future__ import annotations

import errno
import os
import shlex
import signal
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, Optional

from ..allocation import backends
from ..config import oci_runtime
from ..core import constants
from ..core.errors import GpushareError, KernelError, RequestError
from ..core.model import Bundle, Lease, Node
from ..core.ops import Plan
from ..core.quoting import shown
from ..inject import apply, rootfs
from ..request import oci
from ..request.dialects import gpushare_env
from ..state import log, storage
from ..system import mountns, procs, rootless, syscalls
from . import hostroot, owncgroup, session
from .runtime import Paths, Watch

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as env(1)
_MAX_COMMAND = 256  # characters of the command line in a lease
# Programs that start containers, which have other files than this program and so not its libraries
_OF_CONTAINERS = "start it without `gpushare run`, and give the container a share: GPUSHARE_MEMORY, docs/{page}.md"
_LAUNCHERS = {
    "docker": _OF_CONTAINERS.format(page="docker"),
    "nerdctl": _OF_CONTAINERS.format(page="engines"),
    "podman": _OF_CONTAINERS.format(page="podman"),
    "enroot": "Enroot and Pyxis are not supported; docs/recipes.md has Apptainer and bubblewrap",
}
_OTHER_VARIABLES = ("LD_LIBRARY_PATH", "NVIDIA_DRIVER_CAPABILITIES")  # they count beside GPUSHARE_*


class User(NamedTuple):
    """The user of the command. `groups` None: `gid` only."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


class Job(NamedTuple):
    """One command line. `variables`: GPUSHARE_* variables from its flags."""

    name: str
    command: tuple[str, ...]
    variables: tuple[tuple[str, str], ...]
    user: Optional[User] = None


class CannotExecute(GpushareError):
    """The command cannot be executed; the instance has the `exit_code`."""


def start(job: Job, paths: Paths) -> NoReturn:
    """Start the command. Raise GpushareError; then nothing is left."""
    if os.path.lexists(constants.LIMITS):
        raise RequestError(
            f"{constants.LIMITS} exists already: this process is in a share of a GPU",
            "start the command without `gpushare run`: it has the same share",
        )
    refuse_launcher(job.command[0])
    find(job.command[0])
    try:
        directory = os.getcwd()
    except OSError as error:
        raise RequestError(f"the directory of this process: {error.strerror}", "cd to an existing directory") from None
    given = oci_runtime.environment()
    watch = Watch()
    say = _enter_user_namespace() if rootless.is_rootless() else ""
    one = resolve(bundle_of(job, given), session.load(*paths))
    way = OntoRoot()

    def go() -> None:
        os.chdir(directory)
        if way.say or say:
            log.to_stderr(f"gpushare: {way.say or say}")
        watch.end()
        _become(job, given)

    session.give(one, way, go)
    raise AssertionError("the command has taken over")


def refuse_launcher(program: str) -> None:
    """Raise RequestError for a program whose containers would not get the share."""
    name = os.path.basename(program)
    if name in _LAUNCHERS:
        raise RequestError(f"the containers of {name} do not get the share of this command", _LAUNCHERS[name])


def resolve(bundle: Bundle, host: Node) -> session.Start:
    """Return the Start of a job. Also raise RequestError for a job that requests nothing."""
    found = session.resolve(bundle, lambda: host, on_host=True)
    if found is None or found.request.selection.kind == "none":
        raise RequestError(
            f"{constants.ENV_DEVICES}: no device is requested",
            "name a device, or start the command without `gpushare run`",
        )
    request = found.request._replace(dialect=constants.RUN_DIALECT)
    return found._replace(request=request, host=backends.for_programs(request, host))


def bundle_of(job: Job, environment: dict[bytes, bytes]) -> Bundle:
    """Return the command as a container's bundle. Flags replace variables of the same name. Other variables count only
    if they are gpushare's (misspelled ones too) or the driver's."""
    values = {os.fsdecode(name): os.fsdecode(value) for name, value in environment.items()}
    env = {
        name: value
        for name, value in values.items()
        if name.upper().startswith(gpushare_env.PREFIXES) or name in _OTHER_VARIABLES
    }
    env.update(job.variables)
    if constants.ENV_DEVICES not in env:
        env[constants.ENV_DEVICES] = "any"
    command = shlex.join(job.command)
    shown = command if len(command) <= _MAX_COMMAND else command[: _MAX_COMMAND - 1] + "…"
    shown = shown.encode("utf-8", "replace").decode()
    shm = {"destination": "/dev/shm", "type": "bind", "source": "/dev/shm", "options": ["rbind"]}
    spec = {"process": {"user": {"uid": job.user.uid if job.user else os.geteuid()}}, "mounts": [shm]}
    name, pairs = oci.check_id(job.name), oci.without_links(env.items())
    return Bundle(name, os.getpid(), shown, "/", pairs, {}, "", "", "", spec=spec, **oci.facts(spec))


def find(program: str) -> str:
    """Return the path of the command. Raise CannotExecute before anything is reserved."""
    candidates = [program] if "/" in program else [os.path.join(d or ".", program) for d in _search_path()]
    there = [path for path in candidates if program and os.path.exists(path)]
    for path in there:
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    raise _cannot(program, errno.EACCES if there else errno.ENOENT)


def _search_path() -> list[str]:
    given = oci_runtime.environment().get(b"PATH")
    return os.fsdecode(given).split(":") if given is not None else os.defpath.split(":")


def _what_to_do(program: str, number: int) -> str:
    if number != errno.ENOENT:
        return "name a program that this user may execute"
    if "/" not in program:
        return "no directory of PATH has it: give its path"
    return "its interpreter does not exist" if os.path.exists(program) else "give the path of a program"


def _cannot(program: str, number: int) -> CannotExecute:
    error = CannotExecute(f"{shown(program)}: {os.strerror(number)}", _what_to_do(program, number))
    error.exit_code = NOT_FOUND if number == errno.ENOENT else NOT_EXECUTABLE
    return error


# Set-up


def _enter_user_namespace() -> str:
    """Enter a user namespace that maps only this user, where an ordinary user may mount. Return notes for the
    user."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS, "user and mount namespace")
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    except (KernelError, OSError) as error:
        reason = error.message if isinstance(error, KernelError) else f"{error.filename}: {error.strerror}"
        raise KernelError(
            f"this host does not allow users to make mounts ({reason})", "run it with sudo --preserve-env"
        ) from None
    return rootless.COOPERATIVE


class OntoRoot(session.Way):
    """Carry out a plan on "/" in a mount namespace and a cgroup of this process. `say`: prints notes for the user."""

    name = "run"
    say = ""

    def __init__(self, alone: bool = True) -> None:
        """`alone` False: a trial share of `gpushare doctor`."""
        self._alone = alone
        self._cgroup: list[str] = []
        self._home = os.open("/proc/self/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)

    def image(self, start: session.Start, lease: Optional[Lease]) -> rootfs.Opened:
        return rootfs.Opened(start.bundle)

    def needed(self, steps: Plan) -> Plan:
        return hostroot.needed(steps)

    def carry_out(self, start: session.Start, placed: session.Placed) -> bool:
        steps, state_dir, name = placed.plan, start.host.config.state_dir, start.bundle.id
        assert placed.lease is not None  # the request has a device
        apply.store(steps)
        if not rootless.is_rootless():
            syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace")
        hidden = hostroot.hidden_nodes(steps.ops)
        _put(steps, storage.container_dir(state_dir, name), hidden)
        if self._alone and not rootless.is_rootless():
            _let_go_of_others(state_dir)
            denied = sorted({*hidden.values(), *_others(start.host, placed.lease)})
            self.say = _enter_cgroup(state_dir, name, denied, self._cgroup)
        return True

    def holder(self) -> procs.Process:
        return procs.myself()

    def undo(self) -> None:
        """Return to the original namespaces and cgroup, so that effects on the host can be undone there."""
        try:
            for directory in self._cgroup:
                owncgroup.leave(directory)
            if not rootless.is_rootless():
                syscalls.setns(self._home, "/proc/self/ns/mnt")
        except (OSError, GpushareError):
            pass  # the next start does it


def _put(steps: Plan, scratch: str, hidden: dict[str, tuple[int, int]]) -> None:
    trees: list[int] = []
    try:
        copies = apply.copies(steps, trees)
        layers = hostroot.layers_of(steps.ops)
        root = hostroot.HostRoot(scratch)
        root.add_layers(layers)
        apply.put(root, steps, copies)
        for path in hidden if "/dev" not in layers else ():
            root.hide(path)
        root.finish()
    finally:
        for fd in trees:
            os.close(fd)


def _others(host: Node, lease: Lease) -> list[tuple[int, int]]:
    """Return the nodes of GPUs that were not granted, existing or not."""
    granted = {share.device.minor for share in lease.shares}
    return [(constants.NVIDIA_MAJOR, device.minor) for device in host.inventory.devices if device.minor not in granted]


def _let_go_of_others(state_dir: str) -> None:
    """Unmount our copies of other containers' activity files, which would stay alive until this program ends."""
    for mount in mountns.read_mounts():
        if mount.point.startswith(state_dir + "/"):
            syscalls.umount(mount.point)


def _enter_cgroup(state_dir: str, name: str, denied: Sequence[tuple[int, int]], cgroup: list[str]) -> str:
    try:
        place = owncgroup.place(f"gpushare-{name}")
        storage.keep_cgroup(state_dir, name, place.directory)
        owncgroup.enter(place, denied)
    except GpushareError as error:
        return f"no device cgroup ({error.message}): a program that runs as root could reach other GPUs"
    cgroup.append(place.directory)
    return ""


# The command


def _become(job: Job, given: dict[bytes, bytes]) -> NoReturn:
    """Execute like execvp(3): a file without a header is a shell script."""
    program = find(job.command[0])
    if job.user is not None:
        _change_user(job.user)
    oci_runtime.give_back_signals()
    try:
        try:
            os.execve(program, job.command, given)
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
            os.execve("/bin/sh", ["sh", program, *job.command[1:]], given)
    except OSError as error:
        for number in oci_runtime.PYTHON_IGNORES:
            signal.signal(number, signal.SIG_IGN)
        raise _cannot(job.command[0], error.errno or errno.EACCES) from None


def _change_user(user: User) -> None:
    try:
        os.setgroups(user.groups)
        os.setresgid(user.gid, user.gid, user.gid)
        os.setresuid(user.uid, user.uid, user.uid)
    except OSError as error:
        raise KernelError(f"user {user.uid}:{user.gid}: {error.strerror}", "run as root to use --user") from None
