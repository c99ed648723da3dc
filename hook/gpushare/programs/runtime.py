"""gpushare-runtime: an OCI runtime that adds a container's share to its config.json and becomes runc or crun (start
path).

    gpushare-runtime [--gpushare-config FILE] [--gpushare-state DIR] [--gpushare-cri] <any command line of runc or crun>

create, run   request -> lease -> plan, as in the hook; the plan goes into config.json, the rest into a hook
delete        for a container with a lease: run the low-level runtime as a child, then release the lease
restore       refused for a container with a request: a checkpoint has addresses of its old device
all others    execute the low-level runtime unchanged

The lease is reserved for this process. execve keeps pid and start time, so the lease lives as long as the create.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn, Optional

from ..config import node, oci_runtime
from ..core import constants
from ..core.errors import GpushareError, KernelError, RequestError, reported
from ..core.model import Bundle, Lease, Node
from ..core.ops import DeviceRule, Mount, Plan
from ..core.quoting import shown, shown_name
from ..inject import memory_hook, spec_record, specedit
from ..inject.specedit import HOOK_PROGRAM
from ..inject.spectree import SpecTree
from ..request import deny_devices, hookoutput, oci, request, speckeys
from ..request.dialects import cdi_devices
from ..state import audit_log, journal, leaseend, leases, log, storage
from ..system import idmap, rootless
from . import commandline, deadline, session
from .commandline import Call

MIN_DESCRIPTORS = 64


class Paths(NamedTuple):
    """The paths of configuration, state and low-level runtime."""

    config: str
    state_dir: str


def paths_of(call: Call) -> Paths:
    """Return the paths of a call. Raise RequestError."""
    paths = Paths(call.config or constants.CONFIG_PATH, call.state_dir or rootless.state_dir())
    for flag, value in zip(commandline.OWN, paths):
        if not value.startswith("/"):
            raise RequestError(f"--{flag} {shown(value)} is not an absolute path", "write the whole path")
    return paths._replace(state_dir=paths.state_dir.rstrip("/"))


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the call. Return the exit code after an error or `delete`; else become the low-level runtime."""
    call = commandline.parse(sys.argv[1:] if argv is None else argv)
    try:
        return _main(call, paths_of(call))
    except BaseException as raised:
        deadline.ignore_signals()
        error = reported(raised)
        line, code = log.line_of(error)
        if call.command in commandline.STARTING:
            _keep(call, line, error)
        log.to_stderr(line)
        log.to_runtime_log(call.log, call.log_format, line)
        return code


def _keep(call: Call, line: str, error: BaseException) -> None:
    """Keep the refusal for `gpushare inspect`."""
    try:
        paths = paths_of(call)
    except RequestError:  # the state directory is unknown
        audit_log.refused(audit_log.SYSLOG, call.container_id, "runtime", error)
        return
    try:
        session.keep_refusal(*paths, oci.check_id(call.container_id), "runtime", line, error)
    except RequestError:  # the id is not valid
        audit_log.refused(node.log_target(*paths), call.container_id, "runtime", error)


def _main(call: Call, paths: Paths) -> int:
    if not call.clear and commandline.could_start(call):
        _refuse_unread(call)
    if not call.clear or call.command not in _COMMANDS:
        _become(call, paths)
    return _COMMANDS[call.command](call, paths)


def _refuse_unread(call: Call) -> None:
    """Raise RequestError for a line that is not clear, unless no config.json that it may mean would be edited."""
    if not call.readings or any(one.command in commandline.STARTING and _concerns(one) for one in call.readings):
        raise RequestError(
            f"flag {shown(call.unknown)} is not known, so gpushare cannot tell which container this starts",
            "leave it out, or update gpushare",
        )


def _concerns(call: Call) -> bool:
    """Return whether the config.json of this reading has a request, or anything that gpushare would take out."""
    if not os.path.exists(os.path.join(call.bundle, call.config_name)):
        return False  # the low-level runtime cannot start it
    directory, _, spec = _read(call)
    clean = hookoutput.without(spec_record.stripped(spec))
    return (
        clean is not spec
        or request.mentions(_bundle(call, directory, clean))
        or oci.has_sys_admin(spec)
        or cdi_devices.rules_reach(spec)
    )


def _become(call: Call, paths: Paths) -> NoReturn:
    oci_runtime.execute(oci_runtime.runtime_of(paths.config, paths.state_dir), call.rest)


# create, run, restore


class Watch:
    """Let signals and the deadline end a start. Restore both before the low-level runtime takes over."""

    def __init__(self) -> None:
        self._before = [(number, signal.getsignal(number)) for number in deadline.WATCHED]
        self._mask = os.umask(0o022)
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        deadline.watch()

    def end(self) -> None:
        signal.alarm(0)
        for number, handler in self._before:
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        os.umask(self._mask)


def _read(call: Call) -> tuple[str, str, dict[str, object]]:
    """Return (bundle, path of config.json, its content). crun resolves a file of another name from its working
    directory (create.c there)."""
    directory = os.path.realpath(call.bundle)
    where = directory if call.config_name == commandline.CONFIG_NAME else os.getcwd()
    path = os.path.join(where, call.config_name)
    return directory, path, oci.read_json(path, oci.MAX_CONFIG_BYTES, "config.json")


def _bundle(call: Call, directory: str, spec: dict[str, object]) -> Bundle:
    return oci.bundle_of(oci.State(call.container_id, 0, "creating", directory, {}), spec, call.cri)


def _resolve(bundle: Bundle, paths: Paths) -> Optional[session.Start]:
    return session.resolve(bundle, lambda: session.load(*paths), with_injected=True)


def _create(call: Call, paths: Paths) -> int:
    directory, path, spec = _read(call)
    watch = Watch()
    clean = hookoutput.without(spec_record.stripped(spec))
    bundle = _bundle(call, directory, clean)
    start = _resolve(bundle, paths)
    if start is None:
        edited = _withheld(bundle, path, paths) or clean
        if edited is not spec:
            specedit.write(path, edited)
        watch.end()
        _become(call, paths)
    oci.check_id(call.container_id)
    _require_descriptors()
    rootless.require_mounts()
    program = oci_runtime.runtime_of(paths.config, paths.state_dir)
    way = IntoSpec(path, clean, _hook_words(paths, bundle, path))

    def go() -> None:
        way.say_cooperative()
        watch.end()
        oci_runtime.execute(program, call.rest)

    session.give(start, way, go)
    return 0  # not reached


def _require_descriptors() -> None:
    """Raise KernelError if RLIMIT_NOFILE is too low. runc 1.1 waits forever for a container whose start ran out of
    descriptors (at 12 for `create`, at 18 for `run`), and the lease would live as long."""
    limit = os.sysconf("SC_OPEN_MAX")
    if 0 <= limit < MIN_DESCRIPTORS:
        raise KernelError(
            f"RLIMIT_NOFILE is {limit}: a start needs {MIN_DESCRIPTORS} descriptors",
            "raise it (ulimit -n) for the process that starts containers",
        )


def _withheld(bundle: Bundle, path: str, paths: Paths) -> Optional[dict[str, object]]:
    """Return the spec of a container without a request, less NVIDIA's devices. This applies if its rules reach them, or
    if it is privileged, has their nodes, and policy has no entry for it. None: the spec stays as it is."""
    if not deny_devices.may_apply(bundle):
        return None
    config = node.load_config_only(paths.config, paths.state_dir)
    if not deny_devices.applies(bundle, config):
        return None
    editor = specedit.Editor(bundle.spec, leased=False)
    taken = editor.take_out_foreign()
    editor.narrow(config.dev_root)
    editor.deny(deny_devices.numbers(config.dev_root, ()))
    audit_log.withheld(config.log, bundle.id, taken)
    return editor.finish(_hook_words(paths, bundle, path))


def _hook_words(paths: Paths, bundle: Bundle, path: str) -> tuple[str, ...]:
    """Return the hook's command line. `path`: of config.json, which crun may have been given."""
    other = () if path == os.path.join(bundle.path, commandline.CONFIG_NAME) else ("--spec", os.path.abspath(path))
    return (_hook_program(), "--config", paths.config, "--state", paths.state_dir, *other)


class IntoSpec(session.Way):
    """Carry out a plan in config.json, and by our hook. `path`: of config.json; `clean`: its content before the edit;
    `words`: our hook's command line."""

    name = "runtime"

    def __init__(self, path: str = "", clean: Optional[dict[str, object]] = None, words: tuple[str, ...] = ()) -> None:
        self._path, self._clean, self._words = path, clean, words
        self._leased = False
        self._nonce = ""  # of our edit, once there is one

    def image(self, start: session.Start, lease: Optional[Lease]) -> SpecTree:
        """Return the root that the edited config.json will mount: without the mounts of other tools, which are
        `taken`."""

        def why(hook: object) -> str:
            return memory_hook.reason(hook, start.request, lease.shares if lease else (), start.host.inventory)

        self._editor = specedit.Editor(start.bundle.spec, leased=lease is not None)
        self._nonce = self._editor.record.nonce
        self.taken = self._editor.take_out_foreign(why)
        self._editor.narrow(start.host.inventory.dev_root)
        self._tree = SpecTree(start.bundle._replace(spec=self._editor.spec))
        return self._tree

    def check(self, steps: Plan) -> None:
        """Check the targets, except those in our own directory, which does not exist yet."""
        for op in steps.ops:
            if isinstance(op, Mount) and not f"{op.target}/".startswith(f"{constants.PRIVATE_DIR}/"):
                self._tree.place(op.target, op.kind)

    def carry_out(self, start: session.Start, placed: session.Placed) -> bool:
        config, steps = start.host.config, placed.plan
        self._leased = placed.lease is not None
        storage.store(steps.ops)
        if cdi_devices.allows_everything(self._editor.spec):
            self._editor.deny(_denied(steps, start.host))
        shim_dir = config.shim_dir if self._leased and _hook_mounts(start.bundle) else ""
        hider = idmap.Hider(config.state_dir)  # its descriptor is closed with this program
        spec = self._editor.put_in(steps, self._tree, self._words, _hook_stderr(), shim_dir, idmap.shown(hider))
        specedit.write(self._path, spec)
        return True

    def say_cooperative(self) -> None:
        if self._leased and rootless.is_rootless():  # to the container's log
            log.to_stderr(f"gpushare: {rootless.COOPERATIVE}")

    def undo(self) -> None:
        """Restore config.json if it has our edit. Another start of this bundle may have written it meanwhile; without
        that edit its container would have the engine's devices without a limit."""
        record = spec_record.record_of(oci.read_json(self._path, oci.MAX_CONFIG_BYTES, "config.json"))
        if record is not None and self._clean is not None and record.nonce == self._nonce:
            specedit.write(self._path, self._clean)


def _denied(steps: Plan, host: Node) -> list[tuple[int, int]]:
    """Return NVIDIA's devices that the plan does not grant."""
    granted = [(op.major, op.minor) for op in steps.ops if isinstance(op, DeviceRule)]
    return deny_devices.numbers(host.inventory.dev_root, granted)


def _hook_mounts(bundle: Bundle) -> bool:
    """Return whether our hook makes the mounts that enforce no limit. With a user namespace they stay in config.json:
    the low-level runtime creates the mount points as their owner."""
    namespaces = speckeys.items(bundle.spec, "linux", "namespaces")
    users = any(isinstance(one, dict) and one.get("type") == "user" for one in namespaces)
    return not users and not rootless.is_rootless()


def _hook_program() -> str:
    """Return the path of gpushare-hook: the launcher if this program is in libexec, else the program beside it."""
    here = os.path.dirname(os.path.abspath(sys.argv[0]))
    launcher = os.path.join(os.path.dirname(here), "bin", HOOK_PROGRAM)
    if os.path.basename(here) == "libexec" and os.access(launcher, os.X_OK):
        return launcher
    return os.path.join(here, HOOK_PROGRAM)


def _hook_stderr() -> str:
    """Return the file that crun should open as error output of hooks: its own, unless that cannot be opened by name."""
    try:
        os.close(os.open(hookoutput.OWN_STDERR, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError:
        return ""
    return hookoutput.OWN_STDERR


def _restore(call: Call, paths: Paths) -> int:
    directory, path, spec = _read(call)
    clean = hookoutput.without(spec_record.stripped(spec))
    bundle = _bundle(call, directory, clean)
    start = _resolve(bundle, paths)
    if start is not None:
        name = shown_name(start.request.sources[0][0])
        raise RequestError(
            f"{name}: a container with a share of a GPU cannot be restored from a checkpoint",
            "start a new container",
        )
    edited = _withheld(bundle, path, paths) or clean
    if edited is not spec:
        specedit.write(path, edited)
    _become(call, paths)


# delete


def _delete(call: Call, paths: Paths) -> int:
    """Run `delete`, and release the lease even if the low-level runtime calls no poststop."""
    try:
        known = leases.find(paths.state_dir, oci.check_id(call.container_id))
    except RequestError:
        known = None
    if known is None:
        _become(call, paths)
    code = _child(oci_runtime.runtime_of(paths.config, paths.state_dir), call.rest)
    try:  # however the child ended
        ended = journal.ending(node.config_or_defaults(*paths), paths.state_dir, "delete")
        kept = leaseend.release(paths.state_dir, call.container_id, ended)
        if kept:
            audit_log.kept(node.log_target(*paths), call.container_id, kept, "delete")
        storage.empty_trash(paths.state_dir)
    except GpushareError as error:
        log.to_stderr(f"gpushare: {error}")  # the next start completes it; the container is gone
    if code < 0:
        _end_by(-code)
    return code


def _child(program: str, words: Sequence[str]) -> int:
    """Run a child and return its exit code, or -signal. Forward signals to the child, but not after its end: its pid
    may belong to another process then."""
    forwarded = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    given = oci_runtime.environment()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    pid = os.posix_spawn(program, [program, *words], given, setsigmask=mask, setsigdef=oci_runtime.PYTHON_IGNORES)
    for number in forwarded:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    signal.pthread_sigmask(signal.SIG_BLOCK, forwarded)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _end_by(number: int) -> None:
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


_COMMANDS: dict[str, Callable[[Call, Paths], int]] = {
    "create": _create,
    "run": _create,
    "restore": _restore,
    "delete": _delete,
}
