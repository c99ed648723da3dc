"""Serve kubelet: plugin registration, and NodePrepareResources and NodeUnprepareResources of v1 and v1beta1.

    with Service(server, settings, folder, report) as service:
        service.show(node, pool, offers)                  the devices that claims can have
        service.serve(registry, plugins)                  listen on both sockets; raises GpushareError

A prepared claim is a CDI specification in `folder`, and nothing else records it. So it survives a restart of the
driver, and a claim that was prepared is answered from its file. The hook believes a claim's variable only if such a
file has it (programs/system_variables.py).
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import threading
from typing import Any, Callable, Optional

from ...core.errors import GpushareError
from ...core.model import Node
from ...core.quoting import printable, shown
from ...engines.base import Settings
from ..grpcsocket import listen
from . import DRIVER, PREFIX, SUFFIX, UNFINISHED, claims, protocol
from .apiserver import Server
from .claims import ClaimShare
from .protocol import grpc
from .slices import Offer

REGISTRATION_SOCKET = f"{DRIVER}-reg.sock"
_THREADS = 4
_END_S = 1.0  # for calls in progress when the service ends


class Service:
    """gRPC calls the methods of the APIs in its own threads; `_lock` lets one claim change at a time."""

    def __init__(self, server: Server, settings: Settings, folder: str, report: Callable[[str], None]) -> None:
        self._server, self._settings, self._folder, self._report = server, settings, folder, report
        self._lock = threading.Lock()
        self._node: Optional[Node] = None
        self._pool, self._offers = "", dict[str, Offer]()
        self._running: list[tuple[Any, str]] = []
        for path in glob.glob(f"{glob.escape(folder)}/{PREFIX}*{SUFFIX}{UNFINISHED}"):
            os.unlink(path)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def show(self, node: Node, pool: str, offers: dict[str, Offer]) -> None:
        with self._lock:
            self._node, self._pool, self._offers = node, pool, offers

    @property
    def is_reachable(self) -> bool:
        """Whether both sockets exist: kubelet's directories can be emptied."""
        return bool(self._running) and all(os.path.lexists(path) for _, path in self._running)

    def serve(self, registry: str, plugins: str) -> None:
        """Listen on new sockets. kubelet watches `registry` and calls a socket that it finds there."""
        self.close()
        own = os.path.join(plugins, DRIVER)
        os.makedirs(own, mode=0o750, exist_ok=True)
        endpoint = os.path.join(own, "dra.sock")
        info = protocol.message(protocol.PLUGIN, "PluginInfo")(
            type=protocol.TYPE, name=DRIVER, endpoint=endpoint, supported_versions=[*protocol.PACKAGES]
        )
        self._listen(endpoint, [self._of_package(package) for package in protocol.PACKAGES.values()])
        self._listen(os.path.join(registry, REGISTRATION_SOCKET), [self._registration(info)])

    def close(self) -> None:
        for server, path in reversed(self._running):
            server.stop(_END_S).wait()
            if os.path.lexists(path):
                os.unlink(path)
        self._running = []

    def _listen(self, path: str, handlers: list[Any]) -> None:
        self._running.append((listen(path, handlers, _THREADS), path))

    # Methods of the APIs

    def _registration(self, info: Any) -> Any:
        def registered(request: Any, context: Any) -> Any:
            text = "registered with kubelet" if request.plugin_registered else f"kubelet refuses: {request.error}"
            self._report(text)
            return protocol.message(protocol.PLUGIN, "RegistrationStatusResponse")()

        rows = {
            "GetInfo": (lambda request, context: info, "InfoRequest", "PluginInfo"),
            "NotifyRegistrationStatus": (registered, "RegistrationStatus", "RegistrationStatusResponse"),
        }
        methods = {name: protocol.handler(protocol.PLUGIN, *row) for name, row in rows.items()}
        return grpc.method_handlers_generic_handler(protocol.REGISTRATION, methods)

    def _of_package(self, package: str) -> Any:
        def each(name: str, function: Callable[[Any, Any, str, Any], None]) -> Any:
            def call(request: Any, context: Any) -> Any:
                answer = protocol.message(package, f"{name}Response")()
                for one in request.claims:
                    if one.uid in answer.claims:
                        continue  # the same claim twice has one answer
                    entry = answer.claims[one.uid]
                    try:
                        function(one, entry, package, context)
                    except Exception as error:  # of any kind: the other claims need their answers
                        text = printable(_why(error))
                        entry.error = f"gpushare: {text}"
                        self._report(printable(f"claim {one.namespace}/{one.name}: refused: {text}"))
                return answer

            return protocol.handler(package, call, f"{name}Request", f"{name}Response")

        methods = {
            "NodePrepareResources": each("NodePrepareResources", self._prepare),
            "NodeUnprepareResources": each("NodeUnprepareResources", self._unprepare),
        }
        return grpc.method_handlers_generic_handler(f"{package}.DRAPlugin", methods)

    def _path(self, uid: str) -> str:
        return os.path.join(self._folder, f"{PREFIX}{claims.checked_uid(uid)}{SUFFIX}")

    def _prepare(self, asked: Any, entry: Any, package: str, context: Any) -> None:
        """kubelet repeats the call until it has an answer, and calls again when it has restarted. The claim can have
        other devices then: a claim that is used by one pod after another is allocated each time."""
        path = self._path(asked.uid)
        claim = self._server.claim(asked.namespace, asked.name)
        if claim["metadata"]["uid"] != asked.uid:
            raise GpushareError(f"claim {asked.namespace}/{asked.name} was replaced by another", "kubelet tries again")
        with self._lock:
            if self._node is None:
                raise GpushareError("the devices of this node are not known yet", "kubelet tries again")
            shares = claims.shares_of(claim, self._pool, self._offers)
            new = claims.document(asked.uid, shares, self._node, self._settings, secrets.token_hex(16))
            if not self._has(path, new):
                others = [self._read(name) for name in self._prepared() if name != path]
                taken = [one for value in others for one in claims.consumed(value)]
                claims.refuse_overcommit(shares, self._offers, taken)
                if not context.is_active():  # kubelet may have released the claim meanwhile
                    raise GpushareError("kubelet waits no longer", "kubelet tries again")
                self._write(path, new)
        for share in shares:
            self._add(entry, asked.uid, share, package)
        self._report(f"claim {asked.namespace}/{asked.name}: {', '.join(share.text for share in shares)}")

    def _add(self, entry: Any, uid: str, share: ClaimShare, package: str) -> None:
        device = entry.devices.add(pool_name=self._pool, device_name=share.name)
        device.request_names.append(share.request)
        device.cdi_device_ids.append(f"{claims.KIND}={claims.cdi_name(uid, share.number)}")
        if share.share_id and package == protocol.PACKAGES["v1.DRAPlugin"]:
            device.share_id = share.share_id

    def _unprepare(self, asked: Any, entry: Any, package: str, context: Any) -> None:
        """A claim that is not prepared is no error: kubelet may ask twice, and for a claim that was refused."""
        with self._lock:
            try:
                os.unlink(self._path(asked.uid))
            except FileNotFoundError:
                return
        self._report(f"claim {asked.namespace}/{asked.name}: released")

    def _prepared(self) -> list[str]:
        """The paths of the prepared claims."""
        names = [name for name in os.listdir(self._folder) if name.startswith(PREFIX) and name.endswith(SUFFIX)]
        return [os.path.join(self._folder, name) for name in names]

    def _has(self, path: str, new: dict[str, Any]) -> bool:
        """Whether the file gives containers the same as `new`. It stays as it is then: another version of the driver
        can have written it."""
        try:
            return claims.texts(self._read(path)) == claims.texts(new)
        except (GpushareError, FileNotFoundError):
            return False

    @staticmethod
    def _read(path: str) -> Any:
        """The specification in a file. Raises GpushareError, OSError."""
        with open(path, "rb") as file:
            try:
                value = json.load(file)
                claims.consumed(value)
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                raise GpushareError(
                    f"{shown(path)} is damaged", "delete the pod of that claim, then the file"
                ) from None
        return value

    def _write(self, path: str, value: dict[str, Any]) -> None:
        """Write the file whole or not at all; engines do not read other endings."""
        new = path + UNFINISHED
        with open(new, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, path)


def _why(error: Exception) -> str:
    if isinstance(error, (GpushareError, OSError)):
        return str(error)
    return f"the claim is not as in Kubernetes' API ({type(error).__name__}: {error})"
