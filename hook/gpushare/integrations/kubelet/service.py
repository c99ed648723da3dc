"""Serve one resource to kubelet on its own socket.

    with Service(kind, name, report) as service:
        service.show(offers, healthy, placement)      set the offers; raises ConfigError if they exceed a message
        service.serve(path)                           serve on a socket (0600); raises GpushareError

Changes are sent to kubelet in a stream that stays open. kubelet uses one stream, so a new stream ends older ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

from ...core.errors import ConfigError, DeviceError, GpushareError, RequestError
from ..grpcsocket import listen
from . import offers as pure
from . import protocol
from .offers import Offered
from .pairing import Pairing
from .protocol import grpc

_THREADS = 8
_MAX_REQUEST_BYTES = 64 << 20  # that the service accepts: more than all ids of a node
_END_S = 1.0  # for calls in progress when the service ends
_CODES = {RequestError: grpc.StatusCode.INVALID_ARGUMENT, DeviceError: grpc.StatusCode.UNAVAILABLE}


class _Shown(NamedTuple):
    """The offers at one moment. `text`: the serialised message with these offers."""

    offers: tuple[Offered, ...] = ()
    healthy: frozenset[str] = frozenset()  # uuids
    placement: str = "binpack"
    text: bytes = b""


class Service:
    """One resource. gRPC calls the methods of the API in its own threads."""

    def __init__(self, kind: str, name: str, report: Callable[[str], None], pairing: Optional[Pairing] = None) -> None:
        self.kind, self.name, self._report = kind, name, report
        self._pairing = pairing or Pairing(time.monotonic)
        self.path = ""
        self._server: Optional[Any] = None
        self._changed = threading.Condition()
        self._shown = _Shown()
        self._stream = object()  # identifies kubelet's current stream
        self._context: Optional[Any] = None  # of that stream
        self._reused: frozenset[str] = frozenset()  # ids that kubelet had to include in its last choice

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def size(self) -> int:
        """The number of offered ids."""
        return sum(one.count for one in self._shown.offers)

    @property
    def is_watched(self) -> Optional[bool]:
        """Whether kubelet has its stream open; None if it has opened none on this socket."""
        context = self._context
        return None if context is None else bool(context.is_active())

    def show(self, offers: tuple[Offered, ...], healthy: frozenset[str], placement: str) -> None:
        here = healthy & {one.device.uuid for one in offers}
        if (offers, here, placement) == self._shown[:3]:
            return
        text = _message(offers, here)
        if len(text) > protocol.MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"the list of {sum(one.count for one in offers)} units of {self.name} has {len(text)} bytes, and "
                f"kubelet accepts {protocol.MAX_MESSAGE_BYTES} in one message",
                "give a larger --memory-unit, the same on all nodes",
            )
        with self._changed:
            self._shown = _Shown(offers, here, placement, text)
            self._changed.notify_all()

    def serve(self, path: str) -> None:
        """Listen on the socket `path` instead of the previous one."""
        self.close()
        handler = grpc.method_handlers_generic_handler(protocol.SERVICE, self._methods())
        options = [("grpc.max_receive_message_length", _MAX_REQUEST_BYTES)]
        self._server, self.path = listen(path, [handler], _THREADS, options), path

    def close(self) -> None:
        if self._server is None:
            return
        with self._changed:
            self._stream, self._context = object(), None
            self._changed.notify_all()
        self._server.stop(_END_S).wait()
        self._server = None
        try:
            os.unlink(self.path)  # in case gRPC did not; the random name belongs to no other process
        except OSError:
            pass

    def _methods(self) -> dict[str, Any]:
        unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        rows: dict[str, tuple[Any, str, str]] = {
            "GetDevicePluginOptions": (self._options, "Empty", "DevicePluginOptions"),
            "GetPreferredAllocation": (self._prefer, "PreferredAllocationRequest", "PreferredAllocationResponse"),
            "Allocate": (self._allocate, "AllocateRequest", "AllocateResponse"),
            "PreStartContainer": (self._nothing, "PreStartContainerRequest", "PreStartContainerResponse"),
        }
        found = {
            name: unary(function, protocol.reader(request), protocol.serializer(answer))
            for name, (function, request, answer) in rows.items()
        }
        found["ListAndWatch"] = stream(self._watch, protocol.reader("Empty"), None)  # _watch yields serialised messages
        return found

    # Methods of the API

    def _options(self, request: Any, context: Any) -> Any:
        return options()

    def _nothing(self, request: Any, context: Any) -> Any:
        return protocol.message("PreStartContainerResponse")()

    def _watch(self, request: Any, context: Any) -> Iterator[bytes]:
        stream, sent = object(), _Shown()
        with self._changed:
            self._stream, self._context = stream, context
            self._changed.notify_all()
        if not context.add_callback(self._wake):
            return
        while True:
            with self._changed:
                while self._shown is sent and self._stream is stream and context.is_active():
                    self._changed.wait()
                if self._stream is not stream or not context.is_active():
                    return
                sent = self._shown
            yield sent.text

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _prefer(self, request: Any, context: Any) -> Any:
        shown, answer = self._shown, protocol.message("PreferredAllocationResponse")()
        for one in request.container_requests:
            choice = one.available_deviceIDs, one.must_include_deviceIDs, one.allocation_size
            self._reused = frozenset(one.must_include_deviceIDs)
            pair = self._pairing.asked(self.kind, one.available_deviceIDs, one.allocation_size)
            chosen = self._call(context, pure.preferred, self.kind, shown.offers, shown.placement, *choice, *pair)
            answer.container_responses.add().deviceIDs.extend(chosen)
        return answer

    def _allocate(self, request: Any, context: Any) -> Any:
        shown, answer = self._shown, protocol.message("AllocateResponse")()
        for one in request.container_requests:
            beside = self._pairing.beside(self.kind)
            ids = one.devices_ids, beside, self._reused
            env = self._call(context, pure.allocate, self.kind, shown.offers, shown.healthy, *ids)
            self._pairing.chosen(self.kind, {unit.rpartition("-")[0] for unit in one.devices_ids}, one.devices_ids)
            answer.container_responses.add().envs.update(env)
        for response in answer.container_responses:
            self._report(f"{self.name}: " + " ".join(f"{name}={value}" for name, value in response.envs.items()))
        return answer

    def _call(self, context: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the function's result. If it raises GpushareError, print the error and return it to kubelet."""
        try:
            return function(*arguments)
        except GpushareError as error:
            self._pairing.refused()
            self._report(f"{self.name}: refused: {error}")
            return context.abort(_CODES.get(type(error), grpc.StatusCode.INTERNAL), f"gpushare: {error}")


def options() -> Any:
    return protocol.message("DevicePluginOptions")(get_preferred_allocation_available=True)


def _message(offers: tuple[Offered, ...], healthy: frozenset[str]) -> bytes:
    answer = protocol.message("ListAndWatchResponse")()
    for one in offers:
        health = protocol.HEALTHY if one.device.uuid in healthy else protocol.UNHEALTHY
        topology = {"nodes": [{"ID": one.numa}]} if one.numa >= 0 else None
        for unit in one.ids():
            answer.devices.add(ID=unit, health=health, topology=topology)
    text: bytes = answer.SerializeToString()
    return text
