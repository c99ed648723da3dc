"""Messages to systemd: as systemd's own client writes them, and its answers."""

from __future__ import annotations

import functools
import socket
import struct
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gpushare.core.errors import KernelError
from gpushare.system import systemdscope

UNIT = "docker-a1.scope"
PRESENT = [("/dev/char/1:3", "rwm"), ("char-*", "m")]


class FakeSystemd:
    """Answers with the properties of one scope, and keeps the bodies of other calls. `lost`: it ends the connection
    where the first answer is due."""

    def __init__(self, path: Path, policy: str = "strict", present: list[tuple[str, str]] = PRESENT) -> None:
        self.policy, self.present, self.bodies, self.lost = policy, present, list[bytes](), False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                with self._socket.accept()[0] as connection, connection.makefile("rb") as lines:
                    self._answer(connection, lines)
            except OSError:
                return

    def _answer(self, connection: socket.socket, lines: Any) -> None:
        done = b"OK 0123456789abcdef0123456789abcdef\r\n"
        answers = {b"AUTH EXTERNAL\r\n": b"DATA\r\n", b"NEGOTIATE_UNIX_FD\r\n": b"AGREE_UNIX_FD\r\n"}
        while not (line := lines.readline().lstrip(b"\0")).startswith(b"BEGIN"):
            connection.sendall(answers.get(line, done))
        while len(head := lines.read(16)) == 16 and not self.lost:
            body, _, fields = struct.unpack_from("<III", head, 4)
            rest = lines.read(fields + -fields % 8 + body)
            data = rest[len(rest) - body :]
            reply = systemdscope._Writer()
            if b"Hello" in rest:
                signature = "s"
                reply.string(":1.1")
            elif b"DevicePolicy" in data:
                signature = "v"
                reply.signature("s")
                reply.string(self.policy)
            elif b"\0Get" in rest or b"Get\0" in rest:
                signature = "v"
                reply.signature("a(ss)")
                reply.array(self.present, functools.partial(_pair, reply))
            else:
                signature = ""
                self.bodies.append(data)
            connection.sendall(_message(2, signature, bytes(reply.data), head))

    def close(self) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


def _pair(reply: systemdscope._Writer, pair: tuple[str, str]) -> None:
    reply.string(pair[0])
    reply.string(pair[1])


def _message(kind: int, signature: str, body: bytes, head: bytes) -> bytes:
    serial = struct.unpack_from("<I", head, 8)[0]
    made = systemdscope._Writer(struct.pack("<BBBBII", ord("l"), kind, 1, 1, len(body), 7))
    fields = systemdscope._Writer(struct.pack("<BB2sI", 5, 1, b"u\0", serial))
    if signature:
        fields.align(8)
        fields.field((8, "g", signature))
    made.number(len(fields.data))
    made.data += fields.data
    made.align(8)
    return bytes(made.data) + body


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSystemd]:
    monkeypatch.setattr(systemdscope, "SOCKET", str(tmp_path / "socket"))
    made = FakeSystemd(tmp_path / "socket")
    yield made
    made.close()


def busctl(tmp_path: Path, *words: str) -> None:
    path = "/org/freedesktop/systemd1/unit/docker_2da1_2escope"
    call = ["call", "org.freedesktop.systemd1", path, "org.freedesktop.systemd1.Unit", "SetProperties"]
    subprocess.run(["busctl", f"--address=unix:path={tmp_path}/socket", *call, *words], check=True, timeout=20)


def test_missing_rules_are_added_as_busctl_adds_them(systemd: FakeSystemd, tmp_path: Path) -> None:
    undo = systemdscope.allow(f"/sys/fs/cgroup/system.slice/{UNIT}", [(195, 0), (1, 3), (195, 255)])
    assert undo is not None
    busctl(
        tmp_path, "ba(sv)", "1", "1", "DeviceAllow", "a(ss)", "2", "/dev/char/195:0", "rw", "/dev/char/195:255", "rw"
    )
    added, expected = systemd.bodies
    assert added == expected
    undo()
    again = ["DeviceAllow", "a(ss)", "0", "DeviceAllow", "a(ss)", "2", *PRESENT[0], *PRESENT[1]]
    busctl(tmp_path, "ba(sv)", "1", "2", *again)
    assert systemd.bodies[2] == systemd.bodies[3]


@pytest.mark.parametrize(
    ("policy", "present"),
    [("auto", []), ("strict", [("/dev/char/195:0", "rwm")])],
    ids=["no rules, so all is allowed", "has these rules"],
)
def test_nothing_is_added_if_systemd_allows_the_devices(
    systemd: FakeSystemd, policy: str, present: list[tuple[str, str]]
) -> None:
    systemd.policy, systemd.present = policy, present
    assert systemdscope.allow(f"/x/{UNIT}", [(195, 0)]) is None
    assert systemd.bodies == []


def test_rule_for_reading_is_not_enough(systemd: FakeSystemd) -> None:
    systemd.present = [("/dev/char/195:0", "r")]
    assert systemdscope.allow(f"/x/{UNIT}", [(195, 0)]) is not None


@pytest.mark.parametrize("name", ["cpu.scope", "a-ü.scope"])
def test_escaped_unit_names_are_found(systemd: FakeSystemd, name: str) -> None:
    assert systemdscope.allow(f"/x/_{name}", [(195, 0)]) is not None


def test_missing_systemd_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemdscope, "SOCKET", str(tmp_path / "none"))
    with pytest.raises(KernelError, match="none: No such file or directory; see whether systemd runs"):
        systemdscope.allow(f"/x/{UNIT}", [(195, 0)])


def test_lost_connection_is_one_line(systemd: FakeSystemd) -> None:
    systemd.lost = True
    with pytest.raises(KernelError, match="systemd closed the connection"):
        systemdscope.allow(f"/x/{UNIT}", [(195, 0)])
