"""Device time: contexts share it in slices, clients simulate it on demand, and no process spins for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from simulator.ledger import Ledger
from tests.support.remote import Remote

Start = Callable[..., Remote]

PREPARE = """
import threading, time
from ctypes import byref, c_float, c_int, c_uint, c_uint64
from tests.conformance import driver as d
cuda.context()
image = b"SIMMOD globals=0 code=4096\\n\\0"
module = cuda.load(image)
slow, quick = cuda.function(module, "spin_us_10000"), cuda.function(module, "tiny")
stream, start, end = cuda.stream(1), cuda.event(), cuda.event()
def seconds_to_launch(n):
    brief, began = cuda.function(module, "spin_us_1000"), time.monotonic()
    for _ in range(n):
        cuda.launch(brief, stream)
    return time.monotonic() - began
def timed(function, n):
    cuda.ok("cuEventRecord", start, stream)
    for _ in range(n):
        cuda.launch(function, stream)
    cuda.ok("cuEventRecord", end, stream)
    cuda.ok("cuEventSynchronize", end)
    return cuda.milliseconds(start, end)
"""


def test_waiting_costs_no_processor(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("before = time.process_time(); timed(slow, 50); spent = time.process_time() - before")
    assert p.get("spent") < 0.1


def test_idle_device_is_idle(start: Start, ledger: Ledger) -> None:
    p = start()
    p.do(PREPARE)
    p.do("timed(slow, 3)")
    busy = ledger.snapshot().busy_ns
    assert 30_000_000 <= busy < 32_000_000
    p.do("time.sleep(0.05); timed(quick, 1)")
    assert ledger.snapshot().busy_ns < busy + 1_000_000


def test_host_write_releases_a_waiter(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("import ctypes; flag = cuda.out('cuMemHostAlloc', 4096, c_uint(0))")
    p.do("cuda.ok('cuStreamWaitValue32_v2', stream, flag, c_uint(1), c_uint(0))")
    p.do("threading.Timer(0.05, lambda: ctypes.memset(flag, 1, 1)).start(); t = time.monotonic()")
    p.do("cuda.ok('cuStreamSynchronize', stream); took = time.monotonic() - t")
    assert p.get("took") > 0.03


def test_event_orders_two_devices_both_ways(make_host: Callable[..., Path]) -> None:
    with Remote(make_host(gpus=2)) as p:
        p.do("import time; from ctypes import c_uint; cuda.init()")
        p.do("contexts = [cuda.out('cuDevicePrimaryCtxRetain', n) for n in (0, 1)]")
        p.do("enter = lambda n: cuda.ok('cuCtxSetCurrent', contexts[n])")
        p.do("image, kernels, streams, events = b'SIMMOD globals=0 code=4096\\n\\0', [], [], []")
        for n in (0, 1):
            p.do(f"enter({n}); kernels.append(cuda.function(cuda.load(image), 'spin_us_5000'))")
            p.do("streams.append(cuda.stream(1)); events.append(cuda.event())")
        p.do("began = time.monotonic()")
        for turn in range(10):
            n = turn % 2
            p.do(f"enter({n}); cuda.launch(kernels[{n}], streams[{n}])")
            p.do(f"cuda.ok('cuEventRecord', events[{n}], streams[{n}]); enter({1 - n})")
            p.do(f"cuda.ok('cuStreamWaitEvent', streams[{1 - n}], events[{n}], c_uint(0))")
        p.do("cuda.ok('cuStreamSynchronize', streams[0]); took = time.monotonic() - began")
        assert p.get("took") > 0.0499


def test_timestamps_do_not_depend_on_when_they_are_read(start: Start) -> None:
    """Even if no client advanced the simulation during the context's slices."""
    a, b = start(), start()
    for p in (a, b):
        p.do(PREPARE)
    b.do("[cuda.launch(slow, stream) for _ in range(100)]; brief = cuda.function(module, 'spin_us_1000')")
    a.do("brief, events = cuda.function(module, 'spin_us_1000'), [cuda.event() for _ in range(300)]")
    a.do("[(cuda.launch(brief, stream), cuda.ok('cuEventRecord', e, stream)) for e in events]")
    b.do("cuda.ok('cuStreamSynchronize', stream)")
    gaps = a.get("[cuda.milliseconds(x, y) for x, y in zip(events, events[1:])]")
    assert min(gaps) >= 1 and max(gaps) < 6 and sum(gap > 2 for gap in gaps) > 100


def test_device_works_while_callers_sleep(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("[cuda.launch(slow, stream) for _ in range(5)]; time.sleep(0.08)")
    assert p.get("cuda.code('cuStreamQuery', stream)") == 0


def test_killed_context_frees_the_device(make_host: Callable[..., Path]) -> None:
    root = make_host("dead")
    with Remote(root) as a, Remote(root) as b:
        for p in (a, b):
            p.do(PREPARE)
        a.do("[cuda.launch(slow, stream) for _ in range(1000)]")
        a.kill()
        assert 200 <= b.get("timed(slow, 20)") < 300  # 400 if the dead process's work went on
