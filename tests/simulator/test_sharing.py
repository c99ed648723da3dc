"""Memory shared between processes: its content, and which process is charged for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from simulator.ledger import Ledger
from tests.simulator.test_ledger import CONTEXT, MIB, wait_until
from tests.support.remote import Remote

Start = Callable[..., Remote]

PREPARE = """
import ctypes
from ctypes import byref, c_int, c_void_p
from tests.conformance import driver as d
cuda.context()
"""

SEND = """
import array, socket
def send(path, *fds):
    s = socket.socket(socket.AF_UNIX); s.connect(path)
    socket.send_fds(s, [b"x"], list(fds))
"""


def held(ledger: Ledger, p: Remote) -> int:
    """Return the bytes charged to a process, without its context."""
    return next(c.bytes for c in ledger.clients() if c.host_pid == p.pid) - CONTEXT


def pair(start: Start) -> tuple[Remote, Remote]:
    a, b = start(), start()
    for p in (a, b):
        p.do(PREPARE)
    return a, b


def pass_descriptor(sender: Remote, receiver: Remote, expression: str, path: Path) -> int:
    """Send a descriptor from one process to the other; return its number there."""
    receiver.do(f"import socket; l = socket.socket(socket.AF_UNIX); l.bind({str(path)!r}); l.listen()")
    sender.do(SEND)
    sender.do(f"send({str(path)!r}, {expression})")
    receiver.do("c, _ = l.accept(); _, fds, _, _ = socket.recv_fds(c, 1, 1)")
    return int(receiver.get("fds[0]"))


def test_ipc_shares_content_and_charges_the_exporter(start: Start, ledger: Ledger) -> None:
    a, b = pair(start)
    a.do("p = cuda.alloc(5 << 20); cuda.write(p + 3000, b'hello')")
    handle = a.get("cuda.ipc_handle(p)")
    b.do(f"q = cuda.ipc_open({handle!r})")
    assert b.get("cuda.read(q + 3000, 5)") == b"hello"
    b.do("cuda.write(q + 3000, b'world')")
    assert a.get("cuda.read(p + 3000, 5)") == b"world"
    assert (held(ledger, a), held(ledger, b)) == (6 * MIB, 0)
    b.do("cuda.ok('cuIpcCloseMemHandle', q)")
    a.do("cuda.free(p)")
    assert held(ledger, a) == 0


def test_small_allocation_is_shared_by_ipc(start: Start) -> None:
    a, b = pair(start)
    a.do("x, p = cuda.alloc(700), cuda.alloc(700); cuda.write(p, b'small')")
    b.do(f"q = cuda.ipc_open({a.get('cuda.ipc_handle(p)')!r})")
    assert b.get("cuda.read(q, 5)") == b"small"


def test_importer_inherits_the_charge_of_a_dead_exporter(start: Start, ledger: Ledger) -> None:
    a, b = pair(start)
    a.do("p = cuda.alloc(4 << 20); cuda.write(p, b'left'); other = cuda.alloc(8 << 20)")
    b.do(f"q = cuda.ipc_open({a.get('cuda.ipc_handle(p)')!r})")
    a.kill()
    wait_until(lambda: bool(b.get("cuda.free_bytes()") == ledger.total_bytes - CONTEXT - 4 * MIB))
    assert held(ledger, b) == 4 * MIB and b.get("cuda.read(q, 4)") == b"left"
    b.do("cuda.ok('cuIpcCloseMemHandle', q)")
    assert held(ledger, b) == 0


def test_own_handle_cannot_be_opened(start: Start) -> None:
    a, _ = pair(start)
    a.do("p = cuda.alloc(4 << 20)")
    assert a.get("d.error_of(cuda.ipc_open, cuda.ipc_handle(p))") == 201


def test_shareable_handle_shares_content_and_charge(start: Start, ledger: Ledger, tmp_path: Path) -> None:
    a, b = pair(start)
    a.do("h = cuda.create(4 << 20, 1); p = cuda.reserve(4 << 20); cuda.map(p, 4 << 20, h); cuda.write(p, b'fd')")
    a.do("fd = c_int(); cuda.ok('cuMemExportToShareableHandle', byref(fd), h, c_int(1), 0)")
    number = pass_descriptor(a, b, "fd.value", tmp_path / "s")
    b.do(f"h = cuda.out('cuMemImportFromShareableHandle', c_void_p({number}), c_int(1))")
    b.do(f"os.close({number}); q = cuda.reserve(4 << 20); cuda.map(q, 4 << 20, h)")
    assert b.get("cuda.read(q, 2)") == b"fd"
    assert (held(ledger, a), held(ledger, b)) == (4 * MIB, 0)
    a.do("cuda.ok('cuMemUnmap', p, 4 << 20); cuda.ok('cuMemRelease', h)")
    assert (held(ledger, a), held(ledger, b)) == (0, 4 * MIB)
    b.do("cuda.ok('cuMemRelease', h)")
    assert held(ledger, b) == 4 * MIB
    b.do("cuda.ok('cuMemUnmap', q, 4 << 20)")
    assert held(ledger, b) == 0


def test_pool_pointer_shares_content_and_charge(start: Start, ledger: Ledger, tmp_path: Path) -> None:
    a, b = pair(start)
    a.do("pool = cuda.pool(1); p = cuda.alloc_from(pool, 5000); cuda.write(p, b'pooled')")
    a.do("fd = c_int(); cuda.ok('cuMemPoolExportToShareableHandle', byref(fd), pool, c_int(1), 0)")
    a.do("data = ctypes.create_string_buffer(64); cuda.ok('cuMemPoolExportPointer', data, p)")
    number = pass_descriptor(a, b, "fd.value", tmp_path / "s")
    b.do(f"pool = cuda.out('cuMemPoolImportFromShareableHandle', c_void_p({number}), c_int(1), 0)")
    b.do(f"q = cuda.out('cuMemPoolImportPointer', pool, ctypes.create_string_buffer({a.get('data.raw')!r}, 64))")
    assert b.get("cuda.read(q, 6)") == b"pooled"
    assert (held(ledger, a), held(ledger, b)) == (32 * MIB, 0)
    b.do("cuda.ok('cuMemFreeAsync', q, 0)")
    a.do("cuda.ok('cuMemFreeAsync', p, 0); cuda.synchronize()")
    assert held(ledger, a) == 0


def test_content_does_not_survive_the_allocation(start: Start) -> None:
    a, _ = pair(start)
    a.do("p = cuda.alloc(4 << 20); cuda.write(p, b'secret'); cuda.free(p); q = cuda.alloc(4 << 20)")
    assert a.get("q == p") and a.get("cuda.read(q, 6)") == bytes(6)


def test_untouched_memory_costs_the_host_nothing(start: Start) -> None:
    a, _ = pair(start)
    a.do("cuda.alloc(14 << 30)")
    with open(f"/proc/{a.pid}/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    assert resident < 200 * MIB
