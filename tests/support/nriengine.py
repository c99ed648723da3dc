"""An engine's side of NRI: a socket to which one plugin connects, and calls of that plugin.

with NriEngine(path) as engine:
    engine.accept()                       -> the RegisterPluginRequest; configures and synchronises the plugin
    engine.call(method, request, answer)  -> the answer; raises Refused with the plugin's status
    engine.send(bytes)                    whatever the plugin must bear
    engine.closed()                       wait until the plugin has closed the connection
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import Any

from gpushare.integrations.nri import protocol
from gpushare.integrations.nri.wire import PLUGIN, REQUEST, RESPONSE, RUNTIME, Message, encode

TIMEOUT_S = 60
_FRAME, _HEADER = struct.Struct(">II"), struct.Struct(">IIBB")


class Refused(Exception):
    """The message of the plugin's status."""


class NriEngine:
    def __init__(self, path: Path, name: str = "containerd", version: str = "v2.2.0") -> None:
        self.name, self.version = name, version
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.settimeout(TIMEOUT_S)
        self._listener.bind(str(path))
        self._listener.listen()
        self._plugin: socket.socket | None = None
        self._stream = 1

    def __enter__(self) -> NriEngine:
        return self

    def __exit__(self, *error: object) -> None:
        for one in (self._listener, self._plugin):
            if one is not None:
                one.close()

    def accept(self) -> Any:
        if self._plugin is not None:
            self._plugin.close()
        self._plugin, _ = self._listener.accept()
        self._plugin.settimeout(TIMEOUT_S)
        call = protocol.parse("Request", self._message(RUNTIME, REQUEST))
        assert (call.service, call.method) == (protocol.RUNTIME_SERVICE, "RegisterPlugin")
        self.send(encode(Message(RUNTIME, 1, RESPONSE, protocol.message("Response")().SerializeToString())))
        about = protocol.message("ConfigureRequest")(runtime_name=self.name, runtime_version=self.version)
        self.call("Configure", about, "ConfigureResponse")
        self.call("Synchronize", protocol.message("SynchronizeRequest")(), "SynchronizeResponse")
        return protocol.parse("RegisterPluginRequest", call.payload)

    def send(self, data: bytes) -> None:
        assert self._plugin is not None
        self._plugin.sendall(data)

    def call(self, method: str, request: Any, answer: str, service: str = protocol.PLUGIN_SERVICE) -> Any:
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        call = protocol.message("Request")(service=service, method=method, payload=payload)
        self.send(encode(Message(PLUGIN, self._stream, REQUEST, call.SerializeToString())))
        self._stream += 2
        response = protocol.parse("Response", self._message(PLUGIN, RESPONSE))
        if response.status.code:
            raise Refused(response.status.message)
        return protocol.parse(answer, response.payload)

    def closed(self) -> None:
        assert self._plugin is not None
        while self._plugin.recv(1 << 16):
            pass

    def _exactly(self, size: int) -> bytes:
        assert self._plugin is not None
        data = b""
        while len(data) < size:
            more = self._plugin.recv(size - len(data))
            assert more, "the plugin closed the connection"
            data += more
        return data

    def _message(self, connection: int, kind: int) -> bytes:
        """The payload of the next message, which can be in several frames."""
        data = b""
        while len(data) < _HEADER.size or len(data) < _HEADER.size + _HEADER.unpack_from(data)[0]:
            found, size = _FRAME.unpack(self._exactly(_FRAME.size))
            assert found == connection
            data += self._exactly(size)
        assert _HEADER.unpack_from(data)[2] == kind
        return data[_HEADER.size :]
