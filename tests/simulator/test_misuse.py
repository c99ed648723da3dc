"""Errors of a careless limiter make the simulator fail."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from simulator.ledger import Ledger
from tests.support.remote import Remote, RemoteError

Start = Callable[..., Remote]

PREPARE = """
from ctypes import byref, c_int, c_uint, c_uint64
from tests.conformance import checks_time, driver as d
context = cuda.context()
function, stream, event = cuda.function(cuda.load()), cuda.stream(1), cuda.event()
cuda.ok("cuEventRecord", event, stream)
"""

DESTROYED = {
    "stream": ("cuda.ok('cuStreamDestroy_v2', stream)", "cuda.code('cuEventRecord', event, stream)"),
    "busy stream": (
        "[cuda.launch(function, stream) for _ in '123']; cuda.ok('cuStreamDestroy_v2', stream)",
        "cuda.code('cuStreamSynchronize', stream)",
    ),
    "event": ("cuda.ok('cuEventDestroy_v2', event)", "cuda.code('cuEventQuery', event)"),
}


@pytest.mark.parametrize("name", DESTROYED)
def test_use_after_destroy_ends_the_process(name: str, start: Start) -> None:
    destroy, use = DESTROYED[name]
    p = start()
    p.do(PREPARE)
    p.do(destroy)
    with pytest.raises(RemoteError, match=f"ended with {-signal.SIGSEGV}"):
        p.do(use)


def test_handles_of_a_destroyed_context_are_errors(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("cuda.ok('cuDevicePrimaryCtxReset_v2', c_int(0)); cuda.context()")
    assert p.get("cuda.code('cuStreamSynchronize', stream)") == 400


def test_destroying_a_stream_ends_its_capture(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("cuda.ok('cuStreamBeginCapture_v2', stream, c_int(0)); cuda.ok('cuStreamDestroy_v2', stream)")
    p.do("cuda.ok('cuEventQuery', event); cuda.alloc(100)")


def test_event_remembers_a_capture_that_has_ended(start: Start) -> None:
    p = start()
    p.do(PREPARE)
    p.do("cuda.ok('cuStreamBeginCapture_v2', stream, c_int(0)); cuda.ok('cuEventRecord', event, stream)")
    p.do("cuda.ok('cuStreamEndCapture', stream, byref(c_uint64()))")
    assert p.get("cuda.code('cuEventQuery', event)") == 907
    assert p.get("cuda.code('cuStreamWaitEvent', cuda.stream(1), event, c_uint(0))") == 907
    p.do("cuda.ok('cuEventRecord', event, stream); cuda.ok('cuEventSynchronize', event)")


def test_event_before_a_programmatic_launch_is_counted(start: Start, ledger: Ledger) -> None:
    p = start()
    p.do(PREPARE)
    launch = "checks_time.launch_extended(cuda, function, stream, 1, (checks_time.PROGRAMMATIC, 1))"
    p.do(f"cuda.launch(function, stream); assert {launch} == 0 == {launch}")
    (client,) = ledger.clients()
    assert (client.programmatic, client.parted) == (2, 0)
    p.do(f"cuda.ok('cuEventRecord', event, stream); assert {launch} == 0")
    (client,) = ledger.clients()
    assert (client.programmatic, client.parted) == (3, 1)


FORK = """
cuda.launch(function, stream)
r, w = os.pipe()
child = os.fork()
if not child:
    os.write(w, bytes([cuda.launch_code(function, stream), cuda.code("cuInit", 0)]))
    os._exit(0)
"""


def test_forked_child_of_a_busy_process_cannot_touch_the_device(start: Start, ledger: Ledger) -> None:
    p = start()
    p.do(PREPARE)
    p.do(FORK)
    assert p.get("os.read(r, 2)") == b"\3\3"
    p.do("os.waitpid(child, 0); cuda.ok('cuStreamSynchronize', stream)")
