"""Checks of stream capture: what invalidates one, what other threads may do, what cannot be combined."""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref, c_int, c_uint, c_uint64

from tests.conformance import driver as d
from tests.conformance.driver import Driver

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


def begin(cuda: Driver, mode: int = GLOBAL) -> int:
    stream = cuda.stream(d.NON_BLOCKING)
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(mode))
    return stream


def end_code(cuda: Driver, stream: int) -> int:
    return cuda.code("cuStreamEndCapture", stream, byref(c_uint64()))


def in_another_thread(cuda: Driver, context: int, call: Callable[[], int]) -> int:
    """Return the result of a call in a thread with the same context."""
    seen: list[int] = []

    def run() -> None:
        cuda.ok("cuCtxSetCurrent", context)
        seen.append(call())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return seen[0]


def other_threads_may_query_during_a_thread_local_capture(cuda: Driver) -> None:
    context, event = cuda.context(), cuda.event()
    stream = begin(cuda, THREAD_LOCAL)
    assert in_another_thread(cuda, context, lambda: cuda.code("cuEventQuery", event)) == d.SUCCESS
    assert end_code(cuda, stream) == d.SUCCESS


def own_query_breaks_a_thread_local_capture(cuda: Driver) -> None:
    cuda.context()
    event, stream = cuda.event(), begin(cuda, THREAD_LOCAL)
    assert cuda.code("cuEventQuery", event) == d.CAPTURE_UNSUPPORTED
    assert end_code(cuda, stream) == d.CAPTURE_INVALIDATED


def own_query_does_not_break_a_relaxed_capture(cuda: Driver) -> None:
    context, event = cuda.context(), cuda.event()
    stream = begin(cuda, RELAXED)
    cuda.ok("cuEventQuery", event)
    assert in_another_thread(cuda, context, lambda: cuda.code("cuEventQuery", event)) == d.SUCCESS
    assert end_code(cuda, stream) == d.SUCCESS


def capture_mode_is_the_threads_own(cuda: Driver) -> None:
    context, event, mode = cuda.context(), cuda.event(), c_int(RELAXED)
    stream = begin(cuda)
    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(mode))
    cuda.ok("cuEventQuery", event)
    assert in_another_thread(cuda, context, lambda: cuda.code("cuEventQuery", event)) == d.CAPTURE_UNSUPPORTED
    assert end_code(cuda, stream) == d.CAPTURE_INVALIDATED


def relaxed_thread_may_allocate_during_a_capture(cuda: Driver) -> None:
    context = cuda.context()
    stream = begin(cuda)

    def allocate() -> int:
        cuda.ok("cuThreadExchangeStreamCaptureMode", byref(c_int(RELAXED)))
        return d.error_of(cuda.alloc, 100) or d.SUCCESS

    assert in_another_thread(cuda, context, allocate) == d.SUCCESS
    assert end_code(cuda, stream) == d.SUCCESS


def record_outside_of_a_capture_does_not_break_it(cuda: Driver) -> None:
    context, event, other = cuda.context(), cuda.event(), cuda.stream(d.NON_BLOCKING)
    stream = begin(cuda)
    assert in_another_thread(cuda, context, lambda: cuda.code("cuEventRecord", event, other)) == d.SUCCESS
    assert end_code(cuda, stream) == d.SUCCESS


def captured_event_has_no_state(cuda: Driver) -> None:
    cuda.context()
    event, stream = cuda.event(), begin(cuda, RELAXED)
    cuda.ok("cuEventRecord", event, stream)
    assert cuda.code("cuEventQuery", event) == d.CAPTURED_EVENT
    assert cuda.code("cuEventSynchronize", event) == d.CAPTURED_EVENT


def capture_ends_in_the_thread_that_began_it(cuda: Driver) -> None:
    context = cuda.context()
    stream = begin(cuda)
    assert in_another_thread(cuda, context, lambda: end_code(cuda, stream)) == d.CAPTURE_WRONG_THREAD


def forked_work_must_be_joined(cuda: Driver) -> None:
    cuda.context()
    function, event, other = cuda.function(cuda.load()), cuda.event(), cuda.stream(d.NON_BLOCKING)
    stream = begin(cuda)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuStreamWaitEvent", other, event, c_uint(0))
    cuda.launch(function, other)
    assert end_code(cuda, stream) == d.CAPTURE_UNJOINED


def capture_ends_in_the_stream_where_it_began(cuda: Driver) -> None:
    cuda.context()
    event, other = cuda.event(), cuda.stream(d.NON_BLOCKING)
    stream = begin(cuda)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuStreamWaitEvent", other, event, c_uint(0))
    assert end_code(cuda, other) == d.CAPTURE_UNMATCHED


def capture_cannot_wait_for_what_is_outside(cuda: Driver) -> None:
    cuda.context()
    event, outside = cuda.event(), cuda.stream(d.NON_BLOCKING)
    cuda.ok("cuEventRecord", event, outside)
    stream = begin(cuda)
    assert cuda.code("cuStreamWaitEvent", stream, event, c_uint(0)) == d.CAPTURE_ISOLATION
    assert end_code(cuda, stream) == d.CAPTURE_INVALIDATED


def captures_do_not_merge(cuda: Driver) -> None:
    cuda.context()
    event, first = cuda.event(), begin(cuda)
    second = begin(cuda)
    cuda.ok("cuEventRecord", event, first)
    assert cuda.code("cuStreamWaitEvent", second, event, c_uint(0)) == d.CAPTURE_MERGE


def legacy_stream_cannot_be_captured(cuda: Driver) -> None:
    cuda.context()
    assert cuda.code("cuStreamBeginCapture_v2", 0, c_int(GLOBAL)) == d.CAPTURE_UNSUPPORTED


def capture_cannot_begin_twice(cuda: Driver) -> None:
    cuda.context()
    stream = begin(cuda)
    assert cuda.code("cuStreamBeginCapture_v2", stream, c_int(GLOBAL)) == d.ILLEGAL_STATE
