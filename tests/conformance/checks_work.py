"""Checks of initialisation, contexts, streams, events, launches, capture."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_void_p

from tests.conformance import driver as d
from tests.conformance.driver import SPIN_US, Driver

ENDED_WELL = 0


def calls_before_init_fail(cuda: Driver) -> None:
    value = c_uint64()
    assert cuda.code("cuDeviceGetCount", byref(value)) == d.NOT_INITIALIZED
    assert cuda.code("cuMemAlloc_v2", byref(value), 100) == d.NOT_INITIALIZED


def init_flags_must_be_zero(cuda: Driver) -> None:
    assert cuda.code("cuInit", c_uint(1)) == d.INVALID_VALUE
    cuda.init()
    cuda.init()


def without_context_is_invalid_context(cuda: Driver) -> None:
    cuda.init()
    assert d.error_of(cuda.alloc, 100) == d.INVALID_CONTEXT
    assert d.error_of(cuda.synchronize) == d.INVALID_CONTEXT


def forked_child_is_not_initialised(cuda: Driver) -> None:
    cuda.context()
    value = c_uint64()
    child = os.fork()
    if not child:
        wrong = cuda.code("cuMemAlloc_v2", byref(value), 100) != d.NOT_INITIALIZED
        os._exit(wrong or cuda.code("cuCtxSynchronize") != d.NOT_INITIALIZED)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == ENDED_WELL
    cuda.alloc(100)


def bad_ordinal_is_invalid_device(cuda: Driver) -> None:
    cuda.init()
    value = c_int()
    assert cuda.code("cuDeviceGet", byref(value), c_int(1000)) == d.INVALID_DEVICE
    assert cuda.code("cuDeviceGet", byref(value), c_int(-1)) == d.INVALID_DEVICE


def primary_context_is_counted(cuda: Driver) -> None:
    first = cuda.context()
    assert cuda.out("cuDevicePrimaryCtxRetain", c_int(0)) == first
    cuda.ok("cuDevicePrimaryCtxRelease_v2", c_int(0))
    address = cuda.alloc(100)
    cuda.ok("cuDevicePrimaryCtxRelease_v2", c_int(0))
    assert cuda.code("cuMemFree_v2", address) != d.SUCCESS


def context_stack_is_the_threads_own(cuda: Driver) -> None:
    cuda.context()
    seen: list[int | None] = []
    thread = threading.Thread(target=lambda: seen.append(d.error_of(cuda.alloc, 100)))
    thread.start()
    thread.join()
    assert seen == [d.INVALID_CONTEXT]


def kernel_takes_its_time(cuda: Driver) -> None:
    cuda.context()
    function, stream, start, end = cuda.function(cuda.load()), cuda.stream(), cuda.event(), cuda.event()
    cuda.ok("cuEventRecord", start, stream)
    for _ in range(3):
        cuda.launch(function, stream)
    cuda.ok("cuEventRecord", end, stream)
    cuda.ok("cuEventSynchronize", end)
    assert 0.95 * 3 * SPIN_US <= 1000 * cuda.milliseconds(start, end) < 3 * SPIN_US + 50_000


def launch_returns_before_the_kernel_ends(cuda: Driver) -> None:
    cuda.context()
    function, stream, event = cuda.function(cuda.load()), cuda.stream(), cuda.event()
    for _ in range(20):
        cuda.launch(function, stream)
    cuda.ok("cuEventRecord", event, stream)
    assert cuda.code("cuEventQuery", event) == d.NOT_READY and cuda.code("cuStreamQuery", stream) == d.NOT_READY
    began = time.monotonic()
    cuda.ok("cuStreamSynchronize", stream)
    assert time.monotonic() - began > 5 * SPIN_US * 1e-6
    assert cuda.code("cuEventQuery", event) == d.SUCCESS and cuda.code("cuStreamQuery", stream) == d.SUCCESS


def bad_launches_are_refused(cuda: Driver) -> None:
    cuda.context()
    function = cuda.function(cuda.load())
    shape = [c_uint(1)] * 3
    assert (
        cuda.code("cuLaunchKernel", function, c_uint(0), *shape[:2], *shape, c_uint(0), 0, None, None)
        == d.INVALID_VALUE
    )
    assert (
        cuda.code("cuLaunchKernel", function, *shape, c_uint(2048), *shape[:2], c_uint(0), 0, None, None)
        == d.INVALID_VALUE
    )


def unknown_function_is_not_found(cuda: Driver) -> None:
    cuda.context()
    assert d.error_of(cuda.function, cuda.load(), "no_such_kernel") == d.NOT_FOUND


def host_function_runs_in_order(cuda: Driver) -> None:
    cuda.context()
    function, stream, event, ran = cuda.function(cuda.load()), cuda.stream(), cuda.event(), []
    callback = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: ran.append(cuda.code("cuEventQuery", event)))
    cuda.launch(function, stream)
    cuda.ok("cuLaunchHostFunc", stream, callback, None)
    cuda.ok("cuStreamSynchronize", stream)
    assert len(ran) == 1


def wait_value_holds_a_stream(cuda: Driver) -> None:
    cuda.context()
    waiter, writer = cuda.stream(d.NON_BLOCKING), cuda.stream(d.NON_BLOCKING)
    flag = cuda.alloc(4)
    cuda.ok("cuMemsetD32_v2", flag, c_uint(0), 1)
    cuda.synchronize()
    cuda.ok("cuStreamWaitValue32_v2", waiter, flag, c_uint(1), c_uint(0))
    assert cuda.code("cuStreamQuery", waiter) == d.NOT_READY
    cuda.ok("cuStreamWriteValue32_v2", writer, flag, c_uint(1), c_uint(0))
    cuda.ok("cuStreamSynchronize", waiter)


def event_orders_streams(cuda: Driver) -> None:
    cuda.context()
    function, event = cuda.function(cuda.load()), cuda.event()
    first, second = cuda.stream(d.NON_BLOCKING), cuda.stream(d.NON_BLOCKING)
    start, end = cuda.event(), cuda.event()
    cuda.ok("cuEventRecord", start, first)
    cuda.launch(function, first)
    cuda.ok("cuEventRecord", event, first)
    cuda.ok("cuStreamWaitEvent", second, event, c_uint(0))
    cuda.ok("cuEventRecord", end, second)
    cuda.ok("cuStreamSynchronize", second)
    assert 1000 * cuda.milliseconds(start, end) >= 0.95 * SPIN_US


def begin(cuda: Driver, mode: int = 0) -> int:
    stream = cuda.stream(d.NON_BLOCKING)
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(mode))
    return stream


def captured_work_does_not_run(cuda: Driver) -> None:
    cuda.context()
    address = cuda.alloc(4)
    cuda.ok("cuMemsetD8_v2", address, c_uint(5), 4)
    stream, graph = begin(cuda), c_uint64()
    cuda.ok("cuMemsetD8Async", address, ctypes.c_ubyte(9), 4, stream)
    cuda.ok("cuStreamEndCapture", stream, byref(graph))
    assert cuda.read(address, 4) == b"\5" * 4
    exec_ = cuda.out("cuGraphInstantiateWithFlags", graph.value, 0)
    cuda.ok("cuGraphLaunch", exec_, stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert cuda.read(address, 4) == b"\11" * 4


def sync_breaks_a_capture(cuda: Driver) -> None:
    cuda.context()
    stream, graph = begin(cuda), c_uint64()
    assert cuda.code("cuStreamSynchronize", stream) == d.CAPTURE_UNSUPPORTED
    assert cuda.code("cuStreamEndCapture", stream, byref(graph)) == d.CAPTURE_INVALIDATED
    assert graph.value == 0


def query_in_another_thread_breaks_a_global_capture(cuda: Driver) -> None:
    handle = cuda.context()
    event, graph, seen = cuda.event(), c_uint64(), []

    def query() -> None:
        cuda.ok("cuCtxSetCurrent", handle)
        seen.append(cuda.code("cuEventQuery", event))

    stream = begin(cuda)
    thread = threading.Thread(target=query)
    thread.start()
    thread.join()
    assert seen == [d.CAPTURE_UNSUPPORTED]
    assert cuda.code("cuStreamEndCapture", stream, byref(graph)) == d.CAPTURE_INVALIDATED


def relaxed_thread_may_query_during_a_capture(cuda: Driver) -> None:
    cuda.context()
    event, graph, mode = cuda.event(), c_uint64(), c_int(2)
    stream = begin(cuda)
    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(mode))
    assert mode.value == 0
    cuda.ok("cuEventQuery", event)
    cuda.ok("cuThreadExchangeStreamCaptureMode", byref(mode))
    assert mode.value == 2
    cuda.ok("cuStreamEndCapture", stream, byref(graph))


def alloc_breaks_a_global_capture(cuda: Driver) -> None:
    cuda.context()
    stream, graph = begin(cuda), c_uint64()
    assert d.error_of(cuda.alloc, 100) == d.CAPTURE_UNSUPPORTED
    assert cuda.code("cuStreamEndCapture", stream, byref(graph)) == d.CAPTURE_INVALIDATED


def legacy_stream_breaks_a_blocking_capture(cuda: Driver) -> None:
    cuda.context()
    function, stream, graph = cuda.function(cuda.load()), cuda.stream(), c_uint64()
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(0))
    assert cuda.launch_code(function, 0) == d.CAPTURE_IMPLICIT
    assert cuda.code("cuStreamEndCapture", stream, byref(graph)) == d.CAPTURE_INVALIDATED


def proc_address_by_version(cuda: Driver) -> None:
    cuda.init()
    found, status = c_uint64(), c_int()

    def ask(name: bytes, version: int, flags: int = 0) -> tuple[int, int]:
        cuda.ok("cuGetProcAddress_v2", c_char_p(name), byref(found), c_int(version), flags, byref(status))
        return found.value, status.value

    address = ctypes.cast(cuda.library["cuMemAlloc_v2"], c_void_p).value
    old = ctypes.cast(cuda.library["cuMemAlloc"], c_void_p).value
    assert ask(b"cuMemAlloc", 12000) == (address, 0) and ask(b"cuMemAlloc", 2000) == (old, 0)
    assert ask(b"cuMemAllocAsync", 11010) == (0, 2) and ask(b"cuNoSuchFunction", 12000) == (0, 1)
    per_thread = ctypes.cast(cuda.library["cuMemAllocAsync_ptsz"], c_void_p).value
    assert ask(b"cuMemAllocAsync", 12000, 2) == (per_thread, 0)
