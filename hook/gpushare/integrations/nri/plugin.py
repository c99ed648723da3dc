"""The plugin's main loop: register with the engine, answer its calls, and connect again when the connection ends.

    run(settings, report)                       until SIGTERM
    answer(settings, report, method, payload)   the response to one call of the engine

The engine waits 2 s for a response. After that it closes the connection and creates the container without this plugin,
so without gpushare's hooks and without a GPU. The plugin has no state of its own: leases belong to the hook. It holds
the lock <state>/nri, and the hooks that it adds give no GPU while no plugin holds that lock.

A hook whose program is gone would stop every container of the host, also the one that brings the program back. So the
plugin adds no hook while the program is missing, and none to a pod with the annotation IGNORED in the namespace that
the administrator names. Elsewhere the annotation has no effect: with it, any user could start containers without the
hook.
"""

from __future__ import annotations

import fnmatch
import os
import select
import socket
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...core.errors import KernelError, RequestError, what_to_do
from ...core.quoting import printable, shown
from ...engines import hookfiles
from ...engines.base import Settings as HookSettings
from ...engines.containerd import ANNOTATIONS
from ...state import agentlock
from ...system import sigterm
from . import protocol, wire
from .wire import Message, ProtocolError

LOCK = "nri"  # in the state directory
NAME = "gpushare"
IGNORED = "gpushare-nri-ignore"  # annotation of pods of Settings.ignore_namespace that get no hook: "true"
_RETRY_S = 0.1  # containers that a restarted engine creates before the plugin is back have no GPU
_SEND_S = 2.0
_KEEP_S = 1.0  # between two looks whether the lock is still that of the state directory
_RECEIVED_BYTES = 1 << 16
_NO_NRI = "containerd 1.7 and newer and CRI-O 1.26 and newer have NRI; in containerd 1.7 it must be enabled"

Report = Callable[[str], None]


class Settings(NamedTuple):
    """Options of the command."""

    socket: str
    position: str  # two digits: engines call plugins in this order
    hook: HookSettings
    ignore_namespace: str = ""

    @property
    def lock(self) -> str:
        return os.path.join(self.hook.state_dir, LOCK)


def run(settings: Settings, report: Report) -> None:
    """Run until SIGTERM. Raises CapacityError if another plugin runs, and KernelError as check_places."""
    lock = Lock(settings.hook.state_dir)
    last = ""
    with sigterm.readable() as end:
        while True:
            check_places(settings.hook)
            try:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as engine:
                    engine.connect(settings.socket)
                    line = Connection(engine, settings, report, lock).serve(end)
            except OSError as error:
                hint = _NO_NRI if isinstance(error, FileNotFoundError) else what_to_do(error)
                line = f"waiting for {shown(settings.socket)}: {error.strerror}" + (f" ({hint})" if hint else "")
            if line != last:
                last = line
                report(line)
            if select.select([end], [], [], _RETRY_S)[0]:
                return


class Lock:
    """The lock of a running plugin. Its file has content after an engine has accepted the plugin."""

    def __init__(self, state_dir: str) -> None:
        self._state_dir, self._content = state_dir, b""
        self._fd = agentlock.take(state_dir, LOCK)
        os.ftruncate(self._fd, 0)

    def mark(self, engine: str) -> None:
        """Record the name of the engine, which the installer reads."""
        self._content = f"registered {printable(engine)}\n".encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._content, 0)

    def keep(self) -> None:
        """Take the lock again if the state directory was lost. Raises CapacityError or KernelError."""
        fd = agentlock.kept(self._fd, self._state_dir, LOCK)
        if fd != self._fd:
            self._fd = fd
            os.pwrite(fd, self._content, 0)


class Connection:
    """One connection to the engine."""

    def __init__(self, engine: socket.socket, settings: Settings, report: Report, lock: Lock) -> None:
        engine.settimeout(_SEND_S)
        self._engine, self._settings, self._report, self._lock = engine, settings, report, lock
        self._reader = wire.Reader()

    def serve(self, end: int) -> str:
        """Answer calls until SIGTERM arrives or the connection ends. Return why it ended."""
        request = protocol.message("RegisterPluginRequest")(plugin_name=NAME, plugin_idx=self._settings.position)
        try:
            self._call("RegisterPlugin", request)
            while True:
                ready = select.select([end, self._engine], [], [], _KEEP_S)[0]
                if end in ready:
                    return "ended by SIGTERM"
                check_places(self._settings.hook)
                self._lock.keep()
                if not ready:
                    continue
                data = self._engine.recv(_RECEIVED_BYTES)
                if not data:
                    return "the engine closed the connection; connecting again"
                for message in self._reader.feed(data):
                    self._handle(message)
        except OSError as error:
            return f"the engine closed the connection ({error.strerror or 'timeout'}); connecting again"
        except ProtocolError as error:
            return f"{error}; connecting again"

    def _call(self, method: str, request: Any) -> None:
        payload = request.SerializeToString()
        call = protocol.message("Request")(service=protocol.RUNTIME_SERVICE, method=method, payload=payload)
        self._send(Message(wire.RUNTIME, 1, wire.REQUEST, call.SerializeToString()))

    def _send(self, message: Message) -> None:
        self._engine.sendall(wire.encode(message))

    def _handle(self, message: Message) -> None:
        if message.kind == wire.RESPONSE:
            status = protocol.parse("Response", message.payload).status
            if status.code:
                raise ProtocolError(f"the engine refused the plugin: {shown(status.message)}")
            return
        call = protocol.parse("Request", message.payload)
        response = protocol.message("Response")()
        if call.service != protocol.PLUGIN_SERVICE:
            response.status.code, response.status.message = protocol.UNIMPLEMENTED, "gpushare has no such service"
        else:
            try:
                response.payload = answer(self._settings, self._report, call.method, call.payload)
                if call.method == "Configure":
                    self._lock.mark(protocol.parse("ConfigureRequest", call.payload).runtime_name)
            except ProtocolError as error:
                self._report(str(error))
                response.status.code, response.status.message = protocol.INVALID_ARGUMENT, f"gpushare: {error}"
        self._send(Message(wire.PLUGIN, message.stream, wire.RESPONSE, response.SerializeToString()))


def check_places(hook: HookSettings) -> None:
    """Raise KernelError if the state directory or one with the hook's program was deleted and is still mounted here, as
    in a pod. The plugin would add no hook any more; started again, it gets the directories that the node has now."""
    path = hook.hook
    places = [hook.state_dir]
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        places.append(path)
    for place in places:
        try:
            deleted = os.stat(place).st_nlink == 0
        except OSError:
            continue  # not there
        if deleted:
            raise KernelError(f"{shown(place)} was deleted while this program had it", "start the plugin again")


def is_registered(state_dir: str) -> bool:
    """Whether a plugin runs that an engine has accepted."""
    try:
        with open(os.path.join(state_dir, LOCK), "rb") as file:
            return file.read(1) != b"" and agentlock.is_held(state_dir, LOCK)
    except OSError:
        return False


def answer(settings: Settings, report: Report, method: str, payload: bytes) -> bytes:
    """The serialised response to a call. Raises ProtocolError."""
    if method == "CreateContainer":
        found = _create(settings, report, protocol.parse("CreateContainerRequest", payload))
    elif method == "Synchronize":
        found = _synchronize(settings, report, protocol.parse("SynchronizeRequest", payload))
    elif method == "Configure":
        request = protocol.parse("ConfigureRequest", payload)
        report(printable(f"registered with {request.runtime_name} {request.runtime_version}"))
        found = protocol.message("ConfigureResponse")(events=1 << (protocol.CREATE_CONTAINER - 1))
    else:
        found = protocol.message("Empty")()  # Shutdown, and events that the plugin did not subscribe to
    text: bytes = found.SerializeToString()
    return text


def _synchronize(settings: Settings, report: Report, request: Any) -> Any:
    """Existing containers keep the hooks that they have, so nothing is to be updated."""
    ours = sum(_has_hook(settings, container) for container in request.containers)
    report(f"{len(request.containers)} containers exist, {ours} of them with gpushare's hook")
    return protocol.message("SynchronizeResponse")(more=request.more)


def _has_hook(settings: Settings, container: Any) -> bool:
    """In either stage: CRI-O moves hooks of the stage prestart in its hooks_dir to createRuntime."""
    hooks = (*container.hooks.prestart, *container.hooks.create_runtime)
    return any(hook.path == settings.hook.hook for hook in hooks)


def _create(settings: Settings, report: Report, request: Any) -> Any:
    """Add the hooks, and the pod's annotations that request something: an unchanged engine does not pass them."""
    found = protocol.message("CreateContainerResponse")()
    if _has_hook(settings, request.container):
        return found  # the engine is configured for gpushare as well
    if _is_ignored(settings, request.pod):
        return found
    if not os.access(settings.hook.hook, os.X_OK):
        report(f"{shown(settings.hook.hook)} does not exist, so a container starts without gpushare's hook")
        return found
    found.adjust.annotations.update(_requests(request.pod.annotations, request.container.annotations))
    for stage in hookfiles.STAGES:
        entry = hookfiles.entry_of(settings.hook, stage)
        hook = getattr(found.adjust.hooks, stage).add(path=entry["path"], args=entry["args"], env=entry["env"])
        hook.args[1:1] = ["--nri", settings.lock]
        hook.timeout.value = entry["timeout"]
    return found


def _is_ignored(settings: Settings, pod: Any) -> bool:
    named = settings.ignore_namespace
    return named != "" and pod.namespace == named and pod.annotations.get(IGNORED) == "true"


def _requests(pod: Mapping[str, str], container: Mapping[str, str]) -> dict[str, str]:
    """The pod's annotations that containerd's handler for gpushare would pass, except what the container has."""
    return {key: value for key, value in pod.items() if key not in container and _is_request(key)}


def _is_request(key: str) -> bool:
    """As Go's path.Match, in which `*` matches no slash."""
    return any(key.count("/") == one.count("/") and fnmatch.fnmatchcase(key, one) for one in ANNOTATIONS)


def check_index(index: str) -> None:
    """Raise RequestError for an index that is not two digits, as NRI demands."""
    if not (len(index) == 2 and index.isascii() and index.isdigit()):
        raise RequestError(f"--index {shown(index)} is not two digits", "write it as 10")
