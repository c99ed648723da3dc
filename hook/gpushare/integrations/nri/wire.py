"""The framing between an engine and its NRI plugins. Has no side effects.

    Reader().feed(data) -> [Message]      raises ProtocolError
    encode(Message) -> bytes

NRI runs two logical connections over one socket. A frame has the number of the connection and the size of its payload,
4 bytes each, big endian. The payloads of one connection are a stream of ttrpc messages. A ttrpc message has a header of
10 bytes: size (4), stream (4), type (1), flags (1). Sources: containerd/nri, pkg/net/multiplex; containerd/ttrpc,
PROTOCOL.md. NRI uses requests and responses only, never ttrpc's streams of data.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

PLUGIN, RUNTIME = 1, 2  # connections: the engine calls the plugin; the plugin calls the engine
REQUEST, RESPONSE = 1, 2  # types of messages
MAX_MESSAGE_BYTES = 4 << 20
_FRAME = struct.Struct(">II")
_HEADER = struct.Struct(">IIBB")
_MAX_FRAME_BYTES = MAX_MESSAGE_BYTES + _HEADER.size
_OPEN = 2  # flag: more data follows
# The engine reads each frame into one buffer, whose smallest size is 4096 bytes: that of Go's bufio
_SENT_BYTES = 4096


class ProtocolError(Exception):
    """The peer sent bytes that are not NRI's protocol."""


class Message(NamedTuple):
    """A ttrpc message."""

    connection: int
    stream: int
    kind: int
    payload: bytes


def encode(message: Message) -> bytes:
    """The frames of a message."""
    data = _HEADER.pack(len(message.payload), message.stream, message.kind, 0) + message.payload
    parts = (data[at : at + _SENT_BYTES] for at in range(0, len(data), _SENT_BYTES))
    return b"".join(_FRAME.pack(message.connection, len(part)) + part for part in parts)


class Reader:
    """Collects the bytes of one socket and returns whole messages."""

    def __init__(self) -> None:
        self._trunk = bytearray()
        self._connections = {PLUGIN: bytearray(), RUNTIME: bytearray()}

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are complete with `data`."""
        self._trunk += data
        found: list[Message] = []
        while len(self._trunk) >= _FRAME.size:
            connection, size = _FRAME.unpack_from(self._trunk)
            if size > _MAX_FRAME_BYTES:
                raise ProtocolError(f"the engine sent a frame of {size} bytes (at most {_MAX_FRAME_BYTES})")
            if len(self._trunk) < _FRAME.size + size:
                break
            payload = self._trunk[_FRAME.size : _FRAME.size + size]
            del self._trunk[: _FRAME.size + size]
            if connection in self._connections:  # NRI ignores other numbers, too
                self._connections[connection] += payload
                found += _messages(connection, self._connections[connection])
        return found


def _messages(connection: int, buffer: bytearray) -> list[Message]:
    """Remove whole messages from `buffer`."""
    found = []
    while len(buffer) >= _HEADER.size:
        size, stream, kind, flags = _HEADER.unpack_from(buffer)
        if size > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"the engine sent a message of {size} bytes (at most {MAX_MESSAGE_BYTES})")
        if kind != (REQUEST if connection == PLUGIN else RESPONSE) or (kind == REQUEST and flags & _OPEN):
            raise ProtocolError(
                f"the engine sent a message of type {kind} with flags {flags} on connection {connection}"
            )
        if len(buffer) < _HEADER.size + size:
            break
        found.append(Message(connection, stream, kind, bytes(buffer[_HEADER.size : _HEADER.size + size])))
        del buffer[: _HEADER.size + size]
    return found
