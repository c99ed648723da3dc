"""The ledger is exact to the byte, over processes, deaths and namespaces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from simulator import ledger as ledger_module
from simulator.ledger import Ledger
from tests.support.remote import Remote

MIB = 1 << 20
CONTEXT = 300 * MIB
WAIT_SECONDS = 20.0

Start = Callable[..., Remote]

# Allocates and frees until it is killed; prints a line when it has begun.
CHURN = """
import random
cuda.context()
held = []
generator = random.Random(os.getpid())
def churn():
    while True:
        if held and generator.random() < 0.5:
            cuda.free(held.pop(generator.randrange(len(held))))
        else:
            held.append(cuda.alloc(generator.choice([1000, 700_000, 3 << 20, 17 << 20])))
import threading
threading.Thread(target=lambda: (cuda.context(), churn()), daemon=True).start()
"""


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < end, "this did not happen within the time"
        time.sleep(0.002)


def test_every_byte_of_one_process_is_counted(start: Start, ledger: Ledger) -> None:
    p = start()
    p.do("cuda.context()")
    assert ledger.used_bytes == CONTEXT
    p.do("a = cuda.alloc(5 << 20); b = cuda.alloc(10); c = cuda.alloc(100)")
    assert ledger.used_bytes == CONTEXT + 6 * MIB + 2 * MIB
    p.do("cuda.free(a); cuda.free(b)")
    assert ledger.used_bytes == CONTEXT + 2 * MIB
    p.do("cuda.free(c)")
    (client,) = ledger.clients()
    assert client.bytes == CONTEXT and client.pid == client.host_pid == p.pid
    assert client.alive and client.contexts == 1 and client.pidns == os.stat("/proc/self/ns/pid").st_ino
    assert client.peak_bytes == CONTEXT + 8 * MIB


def test_four_processes_share_one_device(start: Start, ledger: Ledger) -> None:
    processes = [start() for _ in range(4)]
    for i, p in enumerate(processes):
        p.do(f"cuda.context(); cuda.alloc({i + 1} << 20)")
    expected = 4 * CONTEXT + (2 + 2 + 4 + 4) * MIB
    assert ledger.used_bytes == expected
    assert all(p.get("cuda.free_bytes()") == ledger.total_bytes - expected for p in processes)
    assert sorted(c.host_pid for c in ledger.clients()) == sorted(p.pid for p in processes)
    (group,) = ledger.groups()
    assert group.current_bytes == group.peak_bytes == expected


def test_capacity_is_shared(start: Start, ledger: Ledger) -> None:
    a, b = start(), start()
    a.do("cuda.context(); cuda.alloc(12 << 30)")
    b.do("cuda.context(); from tests.conformance import driver as d")
    assert b.get("d.error_of(cuda.alloc, 4 << 30)") == 2
    assert ledger.groups()[0].refused == 1
    b.do("cuda.alloc(3 << 30)")


def test_memory_of_a_dead_process_is_freed_after_the_delay(make_host: Callable[..., Path]) -> None:
    root = make_host("late", late_return_ms=500.0)
    with Remote(root) as doomed, Remote(root) as survivor, Ledger(str(root / "dev/nvidia0")) as ledger:
        doomed.do("cuda.context(); cuda.alloc(9 << 30)")
        survivor.do("cuda.context(); from tests.conformance import driver as d")
        doomed.kill()
        noticed = time.monotonic()
        assert survivor.get("d.error_of(cuda.alloc, 10 << 30)") == 2
        assert ledger.used_bytes == CONTEXT and ledger.snapshot().unreturned_bytes == CONTEXT + (9 << 30)
        wait_until(lambda: survivor.get("d.error_of(cuda.alloc, 10 << 30)") is None)
        assert time.monotonic() - noticed > 0.4


def test_ledger_is_exact_after_a_kill_at_any_instruction(start: Start, ledger: Ledger) -> None:
    processes = [start() for _ in range(4)]
    for p in processes:
        p.do(CHURN)
    generator = random.Random(7)
    for p in processes[:2]:
        before = next(c.allocations for c in ledger.clients() if c.host_pid == p.pid)
        wait_until(lambda p=p, n=before: next(c.allocations for c in ledger.clients() if c.host_pid == p.pid) > n + 50)  # type: ignore[misc]
        time.sleep(generator.random() / 100)
        p.kill()
    with_context = start()
    with_context.do("cuda.context()")
    wait_until(lambda: with_context.get("cuda.free_bytes()") > 0 and len(ledger.clients()) == 3)
    for p in processes[2:]:
        p.kill()
    wait_until(lambda: bool(with_context.get("cuda.free_bytes()") == ledger.total_bytes - CONTEXT))
    assert ledger.snapshot().unreturned_bytes == 0 and ledger.used_bytes == CONTEXT


def test_dead_processes_do_not_raise_a_peak(start: Start, ledger: Ledger) -> None:
    doomed, survivor = start(), start()
    doomed.do("cuda.context(); cuda.alloc(6 << 30)")
    survivor.do("cuda.context()")
    peak = ledger.groups()[0].peak_bytes
    doomed.kill()
    survivor.do("cuda.alloc(6 << 30)")
    assert ledger.groups()[0].peak_bytes == peak


def test_peak_is_the_sum_at_one_time(start: Start, ledger: Ledger) -> None:
    a, b = start(), start()
    a.do("cuda.context(); x = cuda.alloc(2 << 30); cuda.free(x)")
    b.do("cuda.context(); cuda.alloc(1 << 30)")
    assert ledger.groups()[0].peak_bytes == CONTEXT + (2 << 30)
    ledger.reset_peaks()
    b.do("cuda.alloc(2 << 20)")
    assert ledger.groups()[0].peak_bytes == 2 * CONTEXT + (1 << 30) + 2 * MIB


def test_namespaces_are_groups(start: Start, ledger: Ledger) -> None:
    wrapper = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    inside, outside = start(wrapper=wrapper), start()
    inside.do("cuda.context(); cuda.alloc(4 << 20)")
    outside.do("cuda.context()")
    client = next(c for c in ledger.clients() if c.pid == 1)
    assert client.host_pid not in (0, 1) and client.pidns == inside.get("os.stat('/proc/self/ns/pid').st_ino")
    groups = {g.pidns: g.current_bytes for g in ledger.groups()}
    assert groups[client.pidns] == CONTEXT + 4 * MIB and groups[os.stat("/proc/self/ns/pid").st_ino] == CONTEXT


CLOSE_DEVICES = """
for fd in os.listdir("/proc/self/fd"):
    link = f"/proc/self/fd/{fd}"
    if os.path.islink(link) and "/dev/nvidia" in os.readlink(link):
        os.close(int(fd))
"""


def test_closed_descriptors_end_the_client(start: Start, ledger: Ledger) -> None:
    victim, witness = start(), start()
    victim.do("cuda.context(); cuda.alloc(1 << 30); from tests.conformance import driver as d")
    witness.do("cuda.context()")
    victim.do(CLOSE_DEVICES)
    wait_until(lambda: bool(witness.get("cuda.free_bytes()") == ledger.total_bytes - CONTEXT))
    assert victim.get("d.error_of(cuda.alloc, 2 << 20)") == 999


FORK = """
child = os.fork()
if not child:
    os.close(0), os.close(1)
    import signal
    signal.pause()
"""


def test_forked_child_does_not_hold_memory(start: Start, ledger: Ledger) -> None:
    parent, witness = start(), start()
    witness.do("cuda.context()")
    parent.do("cuda.context(); cuda.alloc(1 << 30)")
    parent.do(FORK)
    child = parent.get("child")
    parent.kill()
    wait_until(lambda: bool(witness.get("cuda.free_bytes()") == ledger.total_bytes - CONTEXT))
    os.kill(child, 9)


def test_command_prints_the_ledger(start: Start, simhost: Path) -> None:
    start().do("cuda.context()")
    device = str(simhost / "dev" / "nvidia0")
    command = [sys.executable, ledger_module.__file__, device]
    said = json.loads(subprocess.run([*command, "--format", "json"], check=True, capture_output=True, text=True).stdout)
    assert said["used_bytes"] == said["clients"][0]["bytes"] == CONTEXT
    assert "300 MiB at most" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
    wrong = subprocess.run([*command[:2], str(simhost / "dev/nvidiactl")], capture_output=True, text=True)
    assert wrong.returncode == 1 and "nvidiactl" in wrong.stderr
