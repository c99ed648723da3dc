"""gpushare-hook: the OCI hook. It takes one container from its state on stdin to its share (start path).

    gpushare-hook [--config FILE] [--state DIR] [--cri] [--nri LOCK] prestart|createRuntime|poststop|adopt

--spec FILE               for adopt, if crun was given another file than the bundle's config.json
--cri                     the engine is a CRI: its annotations identify the container and its pod
--nri LOCK                the NRI plugin added this hook: without the plugin, which holds that lock, no GPU is given

prestart, createRuntime   give the container its share, or fail with one line and undo everything
adopt                     the createRuntime hook that gpushare-runtime adds to config.json: create_runtime_hook.py
poststop                  release the share; idempotent, needs no pid, always exits 0

The hook reads neither its environment nor its working directory: an image can set both.
"""

import os
import select
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, Optional

from ..config import node, oci_runtime
from ..core import constants
from ..core.errors import KernelError, RequestError, reported
from ..core.model import Bundle, Lease
from ..core.ops import Mount
from ..core.quoting import shown
from ..inject import apply, rootfs
from ..request import deny_devices, hookoutput, oci, request
from ..request.dialects import cdi_devices
from ..state import agentlock, audit_log, journal, leaseend, leases, log, storage
from ..system import procs, rootless, syscalls
from . import create_runtime_hook, deadline, session

POSTSTOP_WAIT_MS = 2000
_SYNOPSIS = "gpushare-hook [--config FILE] [--state DIR] [--cri] [--nri LOCK] prestart|createRuntime|poststop|adopt"
_USAGE = f"use {_SYNOPSIS}"


class Options(NamedTuple):
    """The parsed command line."""

    stage: str
    config: str
    state_dir: str
    cri: bool = False
    spec: str = ""
    nri: str = ""


def parse(argv: Sequence[str]) -> Options:
    """Parse the command line, without argparse (10 ms). Raise RequestError."""
    values = {"--config": constants.CONFIG_PATH, "--state": "", "--spec": "", "--nri": ""}
    words = list(argv)
    cri = constants.CRI_FLAG in words[:-1]
    words = [word for word in words[:-1] if word != constants.CRI_FLAG] + words[-1:]
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if flag not in values or not (equals or words):
            raise RequestError(f"option {shown(flag)} is unknown or has no value", _USAGE)
        values[flag] = value if equals else words.pop(0)
        if not values[flag].startswith("/"):
            raise RequestError(f"{flag} {shown(values[flag])} is not an absolute path", _USAGE)
    if len(words) != 1 or words[0] not in _STAGES:
        raise RequestError(f"stage {shown(' '.join(words))} is unknown", _USAGE)
    state_dir = values["--state"].rstrip("/") or rootless.state_dir()
    return Options(words[0], values["--config"], state_dir, cri, values["--spec"], values["--nri"])


def main(argv: Optional[Sequence[str]] = None, stdin: int = 0) -> int:
    """Run the hook and return the exit code. `stdin` is a descriptor."""
    container_id = ""
    options = Options("", "", "")
    words = list(sys.argv[1:] if argv is None else argv)
    if words in (["-h"], ["--help"]):
        text = "An OCI hook: runc or crun runs it and writes the container's state to its standard input."
        os.write(1, f"usage: {_SYNOPSIS}\n{text}\n".encode())
        return 0
    try:
        options = parse(words)
        os.umask(0o022)
        os.chdir("/")
        deadline.watch()
        data = _read_stdin(stdin)
        state = hookoutput.read_state(data)
        container_id = state.id
        state = state._replace(bundle=os.path.realpath(state.bundle))  # runc gives it as in PWD
        return _STAGES[options.stage](options, state)
    except BaseException as raised:
        deadline.ignore_signals()
        error = reported(raised)
        line, code = log.line_of(error)
        if container_id:
            way = "" if options.stage == "poststop" else "runtime" if options.stage == "adopt" else "hook"
            session.keep_refusal(options.config, options.state_dir, container_id, way, line, error)
        log.to_stderr(line)
        # A failing poststop hook has no use: the container is gone, and the line is on stderr
        return 0 if words[-1:] == ["poststop"] else code


def _read_stdin(fd: int) -> bytes:
    parts = []
    size = 0
    while size <= oci.MAX_STATE_BYTES:
        try:
            part = os.read(fd, 1 << 16)
        except OSError as error:  # closed, or a directory
            what = f"cannot read the state on standard input: {error.strerror}"
            raise RequestError(what, "the runtime writes it there; start a container") from None
        if not part:
            break
        parts.append(part)
        size += len(part)
    return b"".join(parts)


def _start(options: Options, state: oci.State) -> int:
    """Run prestart or createRuntime, which do the same."""
    spec = oci.read_json(os.path.join(state.bundle, "config.json"), oci.MAX_CONFIG_BYTES, "config.json")
    hookoutput.silence_for(spec.get("annotations"))
    bundle = oci.bundle_of(state, spec, options.cri)
    start = session.resolve(bundle, lambda: session.load(options.config, options.state_dir))
    if start is None:
        _refuse_rules(bundle, options)
        oci_runtime.remember_if_stale(options.config, options.state_dir)
        return 0
    request.refuse_conflicts(bundle, start.request, start.host.inventory)
    if options.nri and _is_gone(options.nri):
        _refuse_rules(bundle, options)
        log.to_stderr("gpushare: gpushare nri does not run, so this container has no GPU; start it and the pod again")
        return 0
    init = procs.find(bundle.pid)
    if init is None:
        raise RequestError(
            f"no process has pid {bundle.pid}, which the OCI state on standard input names",
            "call the hook as prestart or createRuntime",
        )
    if leases.is_held_by(options.state_dir, bundle.id, init):
        return 0  # the same hook ran in an earlier stage
    rootless.require_mounts()
    way = IntoNamespace(init)
    session.give(start, way, way.close)
    log.forget(options.state_dir, bundle.id)
    return 0


def _is_gone(lock: str) -> bool:
    """Return whether no NRI plugin holds its lock."""
    return not agentlock.is_held(*os.path.split(lock))


def _refuse_rules(bundle: Bundle, options: Options) -> None:
    """Raise PolicyError if a container without a request has device rules that open GPUs."""
    if cdi_devices.rules_reach(bundle.spec):
        deny_devices.refuse(bundle, node.load_config_only(options.config, options.state_dir))


class IntoNamespace(session.Way):
    """Carry out a plan in the mount namespace of the container's init. A preview has none."""

    name = "hook"

    def __init__(self, init: Optional[procs.Process] = None) -> None:
        self._init = init
        self._applied: Optional[apply.Applied] = None

    def image(self, start: session.Start, lease: Optional[Lease]) -> rootfs.Opened:
        self._root = rootfs.Opened(start.bundle, self._init.pid if self._init else 0)
        return self._root

    def carry_out(self, start: session.Start, placed: session.Placed) -> bool:
        assert self._init is not None
        mounts = [(op.source, op.target) for op in placed.plan.ops if isinstance(op, Mount)]
        if placed.lease is None and mounts and rootfs.shows(self._root.fd, mounts):
            return False  # a request without devices has no lease
        self._applied = apply.apply(placed.plan, start.bundle, self._init.pid, start.host.config.state_dir)
        self.warnings = self._applied.warnings
        return True

    def holder(self) -> Optional[procs.Process]:
        return self._init

    def undo(self) -> None:
        if self._applied is not None:
            self._applied.undo()

    def close(self) -> None:
        """End the deadline: the container has its share, and an error after this point would leave it behind."""
        deadline.ignore_signals()
        if self._applied is not None:
            self._applied.close()


def _poststop(options: Options, state: oci.State) -> int:
    """Release the container's lease and its files."""
    if not storage.is_ready(options.state_dir):
        return 0
    lease = leases.find(options.state_dir, state.id)
    if lease is not None and lease.state == "held" and lease.bundle == state.bundle:
        _wait_gone(lease.init_pid, lease.init_start)
    config = node.config_or_defaults(options.config, options.state_dir) if lease else None
    ended = journal.ending(config, options.state_dir, "poststop")
    if not leaseend.release_reserved_by(options.state_dir, state.id, state.bundle, os.getppid(), ended):
        kept = leaseend.release(options.state_dir, state.id, ended)
        if kept:
            log.to_stderr(f"gpushare: {kept}")
            audit_log.kept(node.log_target(options.config, options.state_dir), state.id, kept, "poststop")
    storage.empty_trash(options.state_dir)
    return 0


def _wait_gone(pid: int, start: int) -> None:
    """Wait a moment for the init that the runtime has just killed."""
    try:
        fd = syscalls.pidfd_open(pid)
    except KernelError:
        return
    try:
        if procs.alive(pid, start):
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            poll.poll(POSTSTOP_WAIT_MS)
    finally:
        os.close(fd)


def _adopt(options: Options, state: oci.State) -> int:
    return create_runtime_hook.adopt(options.config, options.state_dir, state, options.spec)


_STAGES: dict[str, Callable[[Options, oci.State], int]] = {
    "adopt": _adopt,
    "prestart": _start,
    "createRuntime": _start,
    "poststop": _poststop,
}
