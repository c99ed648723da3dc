"""Device rules of a container's scope that systemd knows (start path).

    undo = allow(directory, rules)     add the missing rules; `undo` is None if nothing changed

Engines with systemd cgroups start each container in a scope, a unit of systemd. `systemctl daemon-reload` and
`daemon-reexec` write the device rules of all units again, so a rule that only a hook added is lost. This module adds
the rules to the unit's property DeviceAllow, org.freedesktop.systemd1(5). Units that a runtime started are transient:
systemd keeps their properties below /run and removes them with the unit.

The messages are those of the D-Bus specification, little endian, over systemd's own socket. That needs no D-Bus daemon,
and only root can connect.
"""

from __future__ import annotations

import _socket
import os
import struct
from collections.abc import Callable, Sequence
from typing import Optional, TypeVar

from ..core.errors import KernelError
from ..core.quoting import shown

Item = TypeVar("Item")
Rule = tuple[int, int]
Entries = list[tuple[str, str]]  # (path, access), as DeviceAllow has them

SOCKET = "/run/systemd/private"
_TIMEOUT_S = 5.0  # systemd answers nothing while it reloads
_MAX_BYTES = 1 << 24
_HINT = "see whether systemd runs and what it logs (journalctl _PID=1)"
_CALL, _RETURN, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _DESTINATION, _SIGNATURE = 1, 2, 3, 6, 8
_SYSTEMD = "org.freedesktop.systemd1"
_PROPERTIES = "org.freedesktop.DBus.Properties"


def allow(directory: str, rules: Sequence[Rule]) -> Optional[Callable[[], None]]:
    """Let systemd allow the devices to the scope with this cgroup. Return a function that undoes it, or None if systemd
    has no device rules for the scope, or has these. Raises KernelError."""
    unit = os.path.basename(directory)
    scope = _Scope(unit[1:] if unit.startswith("_") else unit)  # systemd's escape of names such as `cpu.scope`
    try:
        present = scope.entries()
        paths = {path for path, access in present if {"r", "w"} <= set(access)}
        wanted = [f"/dev/char/{major}:{minor}" for major, minor in rules]
        missing = [(path, "rw") for path in wanted if path not in paths]
        if not missing or (not present and scope.policy() == "auto"):
            return None
        scope.set_entries(missing)
    finally:
        scope.close()

    def undo() -> None:
        again = _Scope(scope.unit)
        try:
            again.set_entries([], present)
        finally:
            again.close()

    return undo


class _Scope:
    """A connection to systemd, for one unit."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        letters = (chr(byte) if chr(byte).isalnum() and byte < 128 else f"_{byte:02x}" for byte in unit.encode())
        self._object = "/org/freedesktop/systemd1/unit/" + "".join(letters)
        self._received = b""
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        self._socket.settimeout(_TIMEOUT_S)
        try:
            self._socket.connect(SOCKET)
            user = str(os.geteuid()).encode().hex().encode()
            self._socket.sendall(b"\0AUTH EXTERNAL " + user + b"\r\nBEGIN\r\n")
            answer = self._until(lambda data: data.find(b"\r\n") + 2 if b"\r\n" in data else 0)
            if not answer.startswith(b"OK "):
                raise KernelError(f"{SOCKET}: {shown(answer.decode('ascii', 'replace').strip())}", _HINT)
        except OSError as error:
            self.close()
            raise _failed(error) from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def policy(self) -> str:
        return self._get("DevicePolicy", "s").string()

    def entries(self) -> Entries:
        answer = self._get("DeviceAllow", "a(ss)")
        end = answer.array(8)
        found = []
        while answer.at < end:
            answer.align(8)
            found.append((answer.string(), answer.string()))
        return found

    def set_entries(self, *lists: Entries) -> None:
        """Assign to DeviceAllow once for each list: systemd appends entries, and an empty list removes all."""
        body = _Writer()
        body.number(1)  # runtime: not after a boot

        def pair(entry: tuple[str, str]) -> None:
            body.string(entry[0])
            body.string(entry[1])

        def one(entries: Entries) -> None:
            body.string("DeviceAllow")
            body.signature("a(ss)")
            body.array(entries, pair)

        body.array(lists, one)
        self._call(f"{_SYSTEMD}.Unit", "SetProperties", "ba(sv)", body)

    def _get(self, name: str, signature: str) -> _Reader:
        body = _Writer()
        body.string(f"{_SYSTEMD}.Scope")
        body.string(name)
        answer = self._call(_PROPERTIES, "Get", "ss", body)
        if answer.signature() != signature:
            raise KernelError(f"systemd has another type for {name} of {shown(self.unit)}", _HINT)
        return answer

    def _call(self, interface: str, member: str, signature: str, body: _Writer) -> _Reader:
        """The body of the reply to a method call."""
        message = _Writer(struct.pack("<BBBBII", ord("l"), _CALL, 0, 1, len(body.data), 1))
        fields = [(_PATH, "o", self._object), (_INTERFACE, "s", interface), (_MEMBER, "s", member)]
        fields += [(_DESTINATION, "s", _SYSTEMD), (_SIGNATURE, "g", signature)]
        message.array(fields, message.field)
        message.align(8)
        try:
            self._socket.sendall(bytes(message.data + body.data))
            while True:
                data = self._until(_message_size)
                if data[1] in (_RETURN, _ERROR):
                    break  # anything else is a signal
        except OSError as error:
            raise _failed(error) from None
        answer = _Reader(data, len(data) - struct.unpack_from("<I", data, 4)[0])
        if data[1] == _ERROR:
            raise KernelError(f"systemd: {shown(answer.string())}", _HINT)
        return answer

    def _until(self, size: Callable[[bytes], int]) -> bytes:
        """Receive until `size` returns the length of a complete message."""
        while not (length := size(self._received)) or len(self._received) < length:
            part = self._socket.recv(1 << 16)
            if not part or len(self._received) > _MAX_BYTES:
                raise KernelError(f"{SOCKET}: systemd closed the connection", _HINT)
            self._received += part
        message, self._received = self._received[:length], self._received[length:]
        return message


def _failed(error: OSError) -> KernelError:
    return KernelError(f"{SOCKET}: {error.strerror or error}", _HINT)


def _message_size(data: bytes) -> int:
    """The length of the message that `data` begins with; 0 as long as it is unknown."""
    if len(data) < 16:
        return 0
    body, _, fields = struct.unpack_from("<III", data, 4)
    return int(16 + fields + -fields % 8 + body)


class _Writer:
    """A message, or its body, as far as it is written."""

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)

    def align(self, size: int) -> None:
        self.data += bytes(-len(self.data) % size)

    def number(self, value: int) -> None:
        self.align(4)
        self.data += struct.pack("<I", value)

    def string(self, text: str) -> None:
        data = text.encode()
        self.number(len(data))
        self.data += data + b"\0"

    def signature(self, text: str) -> None:
        self.data += bytes([len(text)]) + text.encode() + b"\0"

    def field(self, field: tuple[int, str, str]) -> None:
        code, kind, value = field
        self.data.append(code)
        self.signature(kind)
        (self.signature if kind == "g" else self.string)(value)

    def array(self, items: Sequence[Item], write: Callable[[Item], None]) -> None:
        """An array of structures; `write` appends one."""
        self.number(0)
        at = len(self.data)
        self.align(8)
        start = len(self.data)
        for item in items:
            self.align(8)
            write(item)
        struct.pack_into("<I", self.data, at - 4, len(self.data) - start)


class _Reader:
    def __init__(self, data: bytes, at: int) -> None:
        self._data, self.at = data, at

    def align(self, size: int) -> None:
        self.at += -self.at % size

    def number(self) -> int:
        self.align(4)
        self.at += 4
        return int(struct.unpack_from("<I", self._data, self.at - 4)[0])

    def string(self) -> str:
        return self._text(self.number())

    def signature(self) -> str:
        self.at += 1
        return self._text(self._data[self.at - 1])

    def _text(self, size: int) -> str:
        start, self.at = self.at, self.at + size + 1
        return self._data[start : start + size].decode("utf-8", "replace")

    def array(self, alignment: int) -> int:
        """Go to the first element; return the end."""
        size = self.number()
        self.align(alignment)
        return self.at + size
