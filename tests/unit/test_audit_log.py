"""The log line of each decision: its fields, its resistance to injected text, and that writing never blocks."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest
from gpushare.config import node
from gpushare.core import quoting
from gpushare.core.errors import CapacityError, ConfigError, GpushareError, PolicyError, RequestError
from gpushare.core.model import Device, Lease, Request, Selection, Share
from gpushare.state import accounts, audit_log
from gpushare.system import syscalls

from tests.support.host import TREE, logfmt

# Hostile ids, paths and messages: a new line, a new field, a closing quote, terminal escapes, invalid UTF-8
HOSTILE = (
    "c\ndecision=granted id=other",
    "c\r\n<30>Nov 21 00:00:00 gpushare[1]: decision=released",
    'c" decision=granted id="other',
    'c\\" decision=granted id=\\"other',
    "c\\",
    "c decision=granted",
    "a=b",
    "\x1b[2J\x00\x7f",
    "\u202egnp.exe\u2028x",
    "\udcff\ud800",
    "x" * 100_000,
    "",
)


def lease(container_id: str = "web", *shares: Share) -> Lease:
    one, two = (Device(n, f"GPU-{n}", n, f"0000:0{n}:00.0", "Sim", 16 << 30, 0) for n in (0, 1))
    given = shares or (Share(0, one, 4 << 30, 30), Share(1, two, None, None))
    return Lease(container_id, "held", "boot", "/b", given, 1, 2, dialect="own")


def closed(one: Lease, known: bool = True) -> accounts.Closed:
    used = accounts.Account(2 * 10**9, 3 * 10**9, 10**9, 2 * 10**9, 4096, 5, 6 * 10**6)
    books = (used, *(accounts.Account(10**9, 0) for _ in one.shares[1:]))
    return accounts.Closed(one._replace(began_ns=10**9), books, 5 * 10**9, known)


def asked(*sources: tuple[str, str]) -> Request:
    return Request("own", Selection("any", 1), ("compute",), sources=sources)


def only_line(path: Path) -> dict[str, str]:
    text = path.read_text("utf-8")
    assert text.endswith("\n") and text.count("\n") == 1 and len(text.splitlines()) == 1
    assert all(c.isprintable() for c in text[:-1])
    return logfmt(text[:-1])


def test_granted_line_has_container_and_allocations(tmp_path: Path) -> None:
    sink = audit_log.open_sink(str(tmp_path / "log"))
    request = asked(("GPUSHARE_MEMORY", "0=4Gi"), ("web.gpushare.io/compute", "30%"), ("GPUSHARE_MEMORY", "0=4Gi"))
    audit_log.granted(sink, "web", lease(), request, "hook", *audit_log.details("notes", ["a", "b c"]))
    fields = only_line(tmp_path / "log")
    stamp, ms = fields.pop("time"), fields.pop("ms")
    assert abs(time.time() - time.mktime(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ")) + time.timezone) < 3700
    assert float(ms) > 0
    assert fields == {
        "decision": "granted",
        "id": "web",
        "dialect": "own",
        "devices": "GPU-0,GPU-1",
        "memory": "4294967296,none",
        "compute": "30,none",
        "mode": "hard",
        "backend": "shim",
        "way": "hook",
        "names": "GPUSHARE_MEMORY,web.gpushare.io/compute",
        "notes": '"a; b c"',
    }


@pytest.mark.parametrize("paused", [True, False])
def test_changed_line_has_new_limits(tmp_path: Path, paused: bool) -> None:
    before = lease()
    now = before._replace(shares=tuple(share._replace(paused=paused, compute_percent=7) for share in before.shares))
    audit_log.changed(str(tmp_path / "log"), now)
    fields = only_line(tmp_path / "log")
    assert (fields["decision"], fields["compute"], fields["way"]) == ("changed", "7,7", "cli")
    assert fields["paused"] == ("yes" if paused else "no")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_adds_no_field_or_line(tmp_path: Path, text: str) -> None:
    """In every field that contains outside text."""
    path = str(tmp_path / "log")
    hostile = lease(text)._replace(dialect=text)
    for write, expected in (
        (lambda: audit_log.granted(audit_log.open_sink(path), text, hostile, asked((text, text)), "hook"), "granted"),
        (lambda: audit_log.granted(audit_log.open_sink(path), text, None, asked((text, text)), "hook"), "granted"),
        (lambda: audit_log.refused(path, text, "hook", GpushareError(text)), "refused"),
        (lambda: audit_log.refused(path, text, "hook", ValueError(text)), "refused"),
        (lambda: audit_log.released(path, closed(hostile), "prune"), "released"),
        (lambda: audit_log.kept(path, text, text, "poststop"), "kept"),
        (lambda: audit_log.withheld(path, text, [text, text]), "withheld"),
        (lambda: audit_log.rebuilt(path, text, None), "granted"),
    ):
        write()
        fields = only_line(tmp_path / "log")
        assert fields["decision"] == expected and len(str(fields)) < 4000
        if text.isprintable() and 0 < len(text) < 100:
            assert fields["id"] in (text, quoting.quoted(text))
        os.unlink(path)


@pytest.mark.parametrize(
    ("error", "reason", "name"),
    [
        (RequestError("GPUSHARE_MEMORY='hunter2': no amount", "write 4Gi"), "request", "GPUSHARE_MEMORY"),
        (PolicyError("web.gpushare.io/memory=hunter2: not accepted"), "policy", "web.gpushare.io/memory"),
        (RequestError("NVIDIA_VISIBLE_DEVICES=hunter2 and GPUSHARE_X=hunter2"), "request", "NVIDIA_VISIBLE_DEVICES"),
        (RequestError("hunter2=GPUSHARE_MEMORY"), "request", None),
        (RequestError("gpushare_x hunter2: y"), "request", None),
        (CapacityError("device 0: 4 GiB requested, 1 GiB free"), "capacity", None),
        (ConfigError("/etc/hunter2 is wrong"), "config", None),
        (GpushareError("hunter2"), "other", None),
        (ZeroDivisionError("hunter2"), "internal", None),
    ],
)  # fmt: skip
def test_refused_line_has_kind_and_name_without_value(
    tmp_path: Path, error: BaseException, reason: str, name: str | None
) -> None:
    audit_log.refused(str(tmp_path / "log"), "web", "runtime", error)
    fields = only_line(tmp_path / "log")
    assert (fields["reason"], fields.get("names"), fields["way"]) == (reason, name, "runtime")
    assert "hunter2" not in (tmp_path / "log").read_text()


def test_socket_receives_rfc3164_datagram(tmp_path: Path) -> None:
    """RFC 3164 as the C library writes it: priority, time, identifier with pid."""
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(path)
        daemon.settimeout(5)
        audit_log.released(path, closed(lease()), "poststop")
        audit_log.refused(path, "web", "run", CapacityError("full"))
        lines = [daemon.recv(8192).decode() for _ in range(2)]
    for line, level, outcome in zip(lines, ("<30>", "<28>"), ("released", "refused")):
        head, identifier, text = line.partition(f" gpushare[{os.getpid()}]: ")
        assert identifier and head.startswith(level) and "\n" not in line
        time.strptime(f"2024 {head[4:]}", "%Y %b %d %H:%M:%S")
        assert logfmt(text)["decision"] == outcome


def test_default_sink_is_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(
        syscalls, "connect_datagram", lambda path: opened.append(path) or os.open("/dev/null", os.O_WRONLY)
    )
    assert audit_log.open_sink(node.log_target(str(tmp_path / "none.yaml"), str(tmp_path))).is_syslog
    assert opened == ["/dev/log"]
    assert audit_log.open_sink(audit_log.NOWHERE) == audit_log.Sink(-1)


def test_full_socket_does_not_block(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as daemon:
        daemon.bind(path)
        before = time.monotonic()
        for _ in range(2000):  # more than a socket queues (net.unix.max_dgram_qlen)
            audit_log.released(path, closed(lease()), "poststop")
        assert time.monotonic() - before < 30
        daemon.setblocking(False)
        with pytest.raises(BlockingIOError):
            for _ in range(2000):
                daemon.recv(8192)


@pytest.mark.parametrize("kind", ["directory", "fifo", "missing", "link", "stream", "long"])
def test_unwritable_sink_is_no_error(tmp_path: Path, kind: str) -> None:
    path, other = tmp_path / "log", tmp_path / "other"
    other.write_text("")
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "missing":
        path = tmp_path / "no" / "log"
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "stream":
        listening.bind(str(path))
    else:
        path = tmp_path / ("x" * 200)
        os.mknod(tmp_path / "s", 0o140600)
        os.rename(tmp_path / "s", path)
    before = len(os.listdir("/proc/self/fd"))
    audit_log.released(str(path), closed(lease()), "prune")
    audit_log.refused(str(path), "web", "hook", RequestError("no"))
    assert other.read_text() == "" and len(os.listdir("/proc/self/fd")) == before
    listening.close()


def test_concurrent_lines_stay_whole(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    children = []
    for number in range(8):
        child = os.fork()
        if child == 0:
            for _ in range(100):
                audit_log.refused(path, f"c{number}" + "y" * 400, "hook", RequestError("no"))
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children)
    lines = Path(path).read_text().splitlines()
    assert len(lines) == 800 and all(logfmt(line)["decision"] == "refused" for line in lines)


def test_release_has_what_the_container_was_granted_and_used(tmp_path: Path) -> None:
    path = tmp_path / "log"
    audit_log.released(str(path), closed(lease(), known=False), "prune")
    line = only_line(path)
    names = ("seconds", "end", "gpu_granted", "gpu_used", "byte_seconds_granted", "byte_seconds_used")
    assert [line[name] for name in names] == ["4.000", "found", "2.000,1.000", "1.000,-", "3,0", "2,-"]
    assert [line[name] for name in ("peak", "refusals", "throttled")] == ["4096,-", "5,-", "0.006,-"]


def test_every_field_is_documented(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    more = [
        *audit_log.details("clamped", ["x"]),
        *audit_log.details("notes", ["x"]),
        *audit_log.details("taken_out", ["x"]),
    ]
    audit_log.granted(audit_log.open_sink(path), "web", lease(), asked(("A", "b")), "hook", *more)
    audit_log.refused(path, "web", "hook", RequestError("GPUSHARE_MEMORY=x"))
    audit_log.released(path, closed(lease()), "prune")
    audit_log.withheld(path, "web", ["x"])
    audit_log.changed(path, lease())
    fields = {key for line in Path(path).read_text().splitlines() for key in logfmt(line)}
    text = (TREE / "docs" / "log.md").read_text()
    assert [key for key in fields if f"`{key}`" not in text and f"`{key}=`" not in text] == []
