"""The device plugin's main loop: register the resources, and register them again whenever kubelet has restarted.

    run(first, state_dir, settings, report)   until SIGTERM

When kubelet starts, it empties its directory and creates a new socket. The plugin watches that directory with inotify,
and registers again if kubelet's socket is a new one or the plugin's own sockets are gone. /proc and /sys send no events
for devices, so the plugin reads them every `interval_s`, which is cheap.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import select
import socket
import stat
import time
from contextlib import ExitStack
from typing import Callable, NamedTuple, Optional

from ...config import node
from ...core.errors import GpushareError, what_to_do
from ...core.model import Node
from ...core.quoting import shown
from ...gpu.selectors import device_name
from ...system import sigterm
from .. import devicestate, grpcsocket
from ..xid import XidWatch
from . import offers, protocol, service
from .checkpoint import Checkpoint
from .pairing import Pairing
from .protocol import grpc
from .service import Service

_REGISTER_S = 15.0  # before kubelet answers, it connects to the plugin, for which it allows itself 10 s
_LISTENS_S = 2.0  # kubelet creates its socket before it listens on it
_CHANNEL = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 200),
]
_RETRY_S = 5.0  # after a failed registration
_STREAM_S = 10.0  # kubelet opens a stream at once when a resource is registered
_SOCKET_NAME = re.compile(r"gpushare-[a-z0-9-]+-[0-9a-f]{8}\.sock")
# inotify(7): files created, deleted, moved in or out; the directory itself deleted or moved; fail if it is no directory
_EVENTS = 0x100 | 0x200 | 0x40 | 0x80 | 0x400 | 0x800 | 0x01000000
_NO_KUBELET = "start kubelet, or name its directory with --kubelet"

Report = Callable[[str], None]


class Settings(NamedTuple):
    """Options of the command."""

    folder: str  # kubelet's directory for device plugins, with its socket
    unit_mib: int
    whole: tuple[str, ...]
    interval_s: float
    nvml: str = ""  # NVML's library, for Xid errors; "": they are not watched
    ignored_xids: tuple[int, ...] = ()
    names: dict[str, str] = {}  # kind -> name of the resource, where it is not the default


def run(first: Node, state_dir: str, settings: Settings, report: Report) -> None:
    """Run until SIGTERM. `first`: the node at the start. Raises GpushareError if the first registration fails; later
    failures are printed, and tried again."""
    log, lines = logging.getLogger("grpc"), _Lines(report)
    log.addHandler(lines)
    log.propagate = False
    try:
        with sigterm.readable() as end, ExitStack() as stack:
            plugin = Plugin(first, state_dir, settings, report, stack)
            plugin.register()
            while not plugin.wait(end):
                plugin.check()
    finally:
        log.removeHandler(lines)


class _Lines(logging.Handler):
    """Prints each message of gRPC as one line, without a traceback."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.WARNING)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._report("gRPC: " + " ".join(f"{record.getMessage()} {error or ''}".split())[:400])


class Plugin:
    """The services of all resources, and what was last printed about kubelet and the devices."""

    def __init__(self, first: Node, state_dir: str, settings: Settings, report: Report, stack: ExitStack) -> None:
        self._node, self._state_dir, self._settings = first, state_dir, settings
        self._last_line = ""
        self._print = report
        self._gone: dict[str, str] = {}  # uuid -> why the device is gone, as last printed
        self._registered: Optional[tuple[int, ...]] = None  # identity of kubelet's socket, if it has all resources
        self._each: dict[Service, tuple[tuple[int, ...], float]] = {}  # the same of each resource, and since when
        self._watch = _Watch(settings.folder)
        stack.callback(self._watch.close)
        self._names = offers.resources(settings.unit_mib, settings.names)
        recorded = Checkpoint(settings.folder, self._names).holders
        self._stack, self._pairing = stack, Pairing(time.monotonic, recorded)
        self._services: list[Service] = []
        for kind, name in self._names.items():
            self._add(kind, name)
        self._woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._xids: Optional[XidWatch] = None
        if settings.nvml:
            self._xids = XidWatch(settings.nvml, settings.ignored_xids, report, wake)
            stack.callback(self._xids.close)
        _remove_stale_sockets(settings.folder)
        self._show()

    def _add(self, kind: str, name: str) -> None:
        self._services.append(self._stack.enter_context(Service(kind, name, self._print, self._pairing)))
        self._registered = None

    def wait(self, end: int) -> bool:
        """Wait for a change of kubelet's directory, or for the next check of the devices. True: SIGTERM has arrived."""
        longest_s = self._settings.interval_s if self._registered else min(_RETRY_S, self._settings.interval_s)
        ready = select.select([end, self._watch.fd, self._woken], [], [], longest_s)[0]
        if self._woken in ready:
            os.read(self._woken, 4096)
        if self._watch.fd in ready:
            self._watch.drain()
        return end in ready

    def check(self) -> None:
        self._show()
        self._watch.renew()
        here = _identity(os.path.join(self._settings.folder, protocol.SOCKET))
        if here is None:
            self._report("kubelet is gone; waiting for it")
            self._registered = None
        elif here != self._registered or not all(self._has(one, here) for one in self._services):
            try:
                self.register()
            except GpushareError as error:
                self._registered = None
                self._report(str(error))

    def register(self) -> None:
        """Serve the resources that kubelet does not have on new sockets, and register them. Raises GpushareError.

        kubelet answers the next registration only when it has processed the list of the one before, which can take it
        longer than _REGISTER_S: then that list must not come again.
        """
        place = os.path.join(self._settings.folder, protocol.SOCKET)
        here = _identity(place)
        if here is None:
            raise GpushareError(f"{shown(place)}: kubelet has no socket there", _NO_KUBELET)
        missing = [one for one in self._services if not self._has(one, here)]
        for one in missing:
            label = re.sub("[^a-z0-9-]", "-", one.name.rpartition("/")[2].lower())
            one.serve(os.path.join(self._settings.folder, f"gpushare-{label}-{os.urandom(4).hex()}.sock"))
            _register(place, one)
            self._each[one] = here, time.monotonic()
        self._registered = here
        self._last_line = ""
        for one in missing:
            self._print(f"registered {one.name}: {one.size}")
            warning = offers.warning(one.name, one.size)
            if warning:
                self._print(warning)

    def _has(self, one: Service, kubelet: tuple[int, ...]) -> bool:
        """Whether this kubelet has the resource. kubelet ends a resource's last stream when any earlier stream of that
        name ends, as after an update of the plugin, and then counts none of its units."""
        where, since = self._each.get(one, ((), 0.0))
        watched = time.monotonic() < since + _STREAM_S if one.is_watched is None else one.is_watched
        return where == kubelet and watched and os.path.lexists(one.path)

    def _show(self) -> None:
        """Check the devices and pass changes to the services, which tell kubelet."""
        self._node = node.last(self._state_dir) or self._node
        config = self._node.config
        found = offers.offered(self._node, self._settings.unit_mib, self._settings.whole)
        devices = [one.device for some in found.values() for one in some]
        found = offers.with_numa(found, devicestate.numa_nodes(devicestate.visible(config.driver_root), devices))
        xids = self._xids.errors() if self._xids else {}
        failed = {one.uuid: xids.get(one.parent or one.uuid) for one in devices}
        gone = {
            uuid: f"Xid {xid} (the GPU counts as broken until the driver is loaded again)"
            for uuid, xid in failed.items()
            if xid is not None
        }
        gone.update(devicestate.gone(config.driver_root, devices))
        for device in devices:
            why = gone.get(device.uuid, "")
            if why != self._gone.get(device.uuid, ""):
                self._print(f"device {device_name(device)} ({device.uuid}): {why or 'is back'}")
        self._gone = gone
        healthy = frozenset(one.uuid for one in devices if one.uuid not in gone)
        shares = offers.name_of_shares(self._node, self._names)
        if shares and shares not in {one.name for one in self._services}:
            self._add(offers.SHARED, shares)
        for one in self._services:
            is_former = one.kind == offers.SHARED and one.name != shares
            one.show(() if is_former else found[one.kind], healthy, config.placement)

    def _report(self, text: str) -> None:
        """Print a line, unless it equals the previous one."""
        if text != self._last_line:
            self._last_line = text
            self._print(text)


def require_answers(folder: str) -> None:
    """Raise GpushareError unless the folder has sockets of a plugin, and the plugin answers on each."""
    try:
        names = [name for name in os.listdir(folder) if _SOCKET_NAME.fullmatch(name)]
    except OSError as error:
        raise GpushareError(f"{shown(folder)}: {error.strerror}", _NO_KUBELET) from None
    if not names:
        raise GpushareError(f"{shown(folder)} has no socket of the plugin", "see the plugin's log")
    for name in names:
        grpcsocket.require_answer(os.path.join(folder, name), f"/{protocol.SERVICE}/GetDevicePluginOptions")


def _identity(path: str) -> Optional[tuple[int, ...]]:
    """Numbers that distinguish two sockets with the same path; None if there is no socket."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_ctime_ns) if stat.S_ISSOCK(found.st_mode) else None


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
        return True


def _remove_stale_sockets(folder: str) -> None:
    """Remove the sockets of a plugin that was killed."""
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if _SOCKET_NAME.fullmatch(name) and _identity(path) is not None and not _listens(path):
            os.unlink(path)


def _register(place: str, one: Service) -> None:
    request = protocol.message("RegisterRequest")(
        version=protocol.VERSION,
        endpoint=os.path.basename(one.path),
        resource_name=one.name,
        options=service.options(),
    )
    with grpc.insecure_channel(f"unix:{place}", options=_CHANNEL) as channel:
        call = channel.unary_unary(protocol.REGISTER, protocol.serializer("RegisterRequest"), protocol.reader("Empty"))
        try:
            grpc.channel_ready_future(channel).result(timeout=_LISTENS_S)
            call(request, timeout=_REGISTER_S)
        except grpc.FutureTimeoutError:
            raise GpushareError(f"{shown(place)}: kubelet does not answer", _NO_KUBELET) from None
        except grpc.RpcError as error:
            raise GpushareError(f"{shown(place)}: kubelet refuses {one.name}: {error.details()}") from None


class _Watch:
    """An inotify watch of one directory."""

    def __init__(self, folder: str) -> None:
        """Raises GpushareError if the directory does not exist."""
        self._folder = folder
        self._library = ctypes.CDLL(None, use_errno=True)
        self.fd = self._library.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        self._watched: Optional[tuple[int, int]] = None
        failed = OSError(ctypes.get_errno(), "") if self.fd < 0 else self._add()
        if failed is not None:
            self.close()
            hint = _NO_KUBELET if isinstance(failed, FileNotFoundError) else what_to_do(failed)
            raise GpushareError(f"{shown(folder)}: {os.strerror(failed.errno or 0)}", hint)

    def _add(self) -> Optional[OSError]:
        try:
            found = os.stat(self._folder)
        except OSError as error:
            return error
        if self._library.inotify_add_watch(self.fd, os.fsencode(self._folder), _EVENTS) < 0:
            return OSError(ctypes.get_errno(), "")
        self._watched = (found.st_dev, found.st_ino)
        return None

    def renew(self) -> None:
        """Watch the new directory if the directory was replaced. If it does not exist now, a later call does it."""
        try:
            found = os.stat(self._folder)
        except OSError:
            return
        if (found.st_dev, found.st_ino) != self._watched:
            self._add()

    def drain(self) -> None:
        try:
            while os.read(self.fd, 65536):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
