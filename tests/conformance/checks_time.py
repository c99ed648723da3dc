"""Checks of device time: sharing it, dependencies, launch attributes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from ctypes import Structure, byref, c_int, c_uint, c_uint64, c_void_p, cast, pointer
from typing import Any

from tests.conformance import driver as d
from tests.conformance.driver import SPIN_US, Driver

QUEUED = 1500  # launches: more than a queue holds
COOPERATIVE, PROGRAMMATIC = 2, 6
SHARED_KERNELS = 200


class Attribute(Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", c_int), ("pad", c_uint), ("value", c_int), ("rest", c_uint * 15)]


class Config(Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *(("grid", c_uint * 3), ("block", c_uint * 3), ("shared", c_uint), ("stream", c_void_p)),
        *(("attributes", c_void_p), ("count", c_uint)),
    ]


def launch_with(cuda: Driver, function: int, stream: int, arguments: tuple[int, ...]) -> None:
    values = [c_uint64(a) for a in arguments]
    pointers = (c_void_p * len(values))(*(cast(pointer(v), c_void_p) for v in values))
    cuda.ok("cuLaunchKernel", function, *[c_uint(1)] * 6, c_uint(0), stream, pointers, None)


def launch_extended(cuda: Driver, function: int, stream: int, blocks: int, attribute: tuple[int, int]) -> int:
    attributes = (Attribute * 1)(Attribute(attribute[0], 0, attribute[1]))
    config = Config((blocks, 1, 1), (32, 1, 1), 0, stream, cast(attributes, c_void_p), 1)
    return cuda.code("cuLaunchKernelEx", byref(config), function, None, None)


def elapsed_us(cuda: Driver, stream: int, work: Any) -> float:
    """Return the device time between two events around the work."""
    start, end = cuda.event(), cuda.event()
    cuda.ok("cuEventRecord", start, stream)
    work()
    cuda.ok("cuEventRecord", end, stream)
    cuda.ok("cuEventSynchronize", end)
    return 1000 * cuda.milliseconds(start, end)


def full_queue_blocks_the_launch(cuda: Driver) -> None:
    cuda.context()
    function, stream, began = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), time.monotonic()
    for _ in range(QUEUED):
        cuda.launch(function, stream)
    assert time.monotonic() - began > 0.1 * QUEUED * SPIN_US * 1e-6
    cuda.synchronize()


def beside_another_process(cuda: Driver, measure: Callable[[int, int], float]) -> tuple[float, float]:
    """Return measure(function, stream) alone, and while another process launches the same kernel endlessly.

    The kernel counts iterations: one that spins by the clock would not take longer beside another process.
    """
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    cuda.context()
    function, stream = cuda.function(cuda.load(d.LOOP_PTX), d.LOOP), cuda.stream(d.NON_BLOCKING)
    if not child:
        os.write(ready[1], b".")
        os.read(go[0], 1)
        for _ in range(500):
            cuda.launch(function, stream)
        os.write(ready[1], b".")
        while True:
            cuda.launch(function, stream)
    try:
        measure(function, stream)  # the first call loads the function
        os.read(ready[0], 1)
        alone = measure(function, stream)
        os.write(go[1], b".")
        os.read(ready[0], 1)
        return alone, measure(function, stream)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def two_processes_halve_the_device(cuda: Driver) -> None:
    def time_of_many(function: int, stream: int) -> float:
        return elapsed_us(cuda, stream, lambda: [cuda.launch_code(function, stream) for _ in range(SHARED_KERNELS)])

    alone, together = beside_another_process(cuda, time_of_many)
    assert 1.6 * alone < together < 3 * alone


def a_neighbour_has_slices_of_milliseconds(cuda: Driver) -> None:
    def longest(function: int, stream: int) -> float:
        events = [cuda.event() for _ in range(SHARED_KERNELS)]
        for event in events:
            cuda.launch(function, stream)
            cuda.ok("cuEventRecord", event, stream)
        cuda.ok("cuEventSynchronize", events[-1])
        return max(cuda.milliseconds(a, b) for a, b in zip(events, events[1:]))

    alone, together = beside_another_process(cuda, longest)
    assert 0.3 < together - alone < 50


def launch_takes_microseconds_of_the_host(cuda: Driver) -> None:
    cuda.context()
    function, stream, best = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), 1.0
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(50):
            cuda.launch(function, stream)
        best = min(best, (time.perf_counter() - began) / 50)
    assert 0.5e-6 < best < 50e-6


def event_takes_a_moment_of_the_device(cuda: Driver) -> None:
    cuda.context()
    function, stream, events = (
        cuda.function(cuda.load()),
        cuda.stream(d.NON_BLOCKING),
        [cuda.event() for _ in range(100)],
    )
    for _ in range(20):
        cuda.launch(function, stream)  # all must be in the queue before the first one is due
    for event in events:
        cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuEventSynchronize", events[-1])
    assert 0.1 < 1000 * cuda.milliseconds(events[0], events[-1]) / len(events) < 20


def small_kernels_of_two_streams_overlap(cuda: Driver) -> None:
    cuda.context()
    function, streams = cuda.function(cuda.load()), [cuda.stream(d.NON_BLOCKING) for _ in range(2)]
    ends = [cuda.event() for _ in streams]

    def work() -> None:
        for _ in range(10):
            for stream in streams:
                cuda.launch(function, stream)
        for stream, end in zip(streams, ends):
            cuda.ok("cuEventRecord", end, stream)
        cuda.ok("cuStreamWaitEvent", streams[0], ends[1], c_uint(0))

    for stream in streams:
        cuda.launch(function, stream)
    cuda.synchronize()
    assert 9.5 * SPIN_US < elapsed_us(cuda, streams[0], work) < 15 * SPIN_US


def large_kernels_run_one_after_the_other(cuda: Driver) -> None:
    cuda.context()
    module, streams = cuda.load(d.LOOP_PTX), [cuda.stream(d.NON_BLOCKING) for _ in range(2)]
    function, join = cuda.function(module, d.LOOP), cuda.event()

    def launch(stream: int) -> None:
        shape = [c_uint(1)] * 2
        blocks, threads = c_uint(1 << 14), c_uint(1024)  # enough blocks for several waves on any current device
        cuda.ok("cuLaunchKernel", function, blocks, *shape, threads, *shape, c_uint(0), stream, None, None)

    def in_streams(used: list[int]) -> float:
        def work() -> None:
            for i in range(20):
                launch(used[i % len(used)])
            for stream in used[1:]:
                cuda.ok("cuEventRecord", join, stream)
                cuda.ok("cuStreamWaitEvent", used[0], join, c_uint(0))

        return elapsed_us(cuda, used[0], work)

    in_streams(streams)
    assert in_streams(streams) > 0.8 * in_streams(streams[:1])


def event_of_an_idle_stream_does_not_wait_for_others(cuda: Driver) -> None:
    cuda.context()
    function, busy, idle = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), cuda.stream(d.NON_BLOCKING)
    event = cuda.event()
    for _ in range(100):
        cuda.launch(function, busy)
    cuda.ok("cuEventRecord", event, idle)
    cuda.ok("cuEventSynchronize", event)
    assert cuda.code("cuStreamQuery", busy) == d.NOT_READY
    cuda.synchronize()


def event_orders_streams_of_two_contexts(cuda: Driver) -> None:
    first = cuda.context()
    function, stream, event = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), cuda.event()
    second = cuda.out("cuCtxCreate_v2", c_uint(0), c_int(0))
    waiter = cuda.stream(d.NON_BLOCKING)
    cuda.ok("cuCtxSetCurrent", first)
    began = time.monotonic()
    for _ in range(20):
        cuda.launch(function, stream)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuCtxSetCurrent", second)
    cuda.ok("cuStreamWaitEvent", waiter, event, c_uint(0))
    assert cuda.code("cuStreamQuery", waiter) == d.NOT_READY
    cuda.ok("cuStreamSynchronize", waiter)
    assert time.monotonic() - began > 19 * SPIN_US * 1e-6


def legacy_stream_waits_for_blocking_streams(cuda: Driver) -> None:
    cuda.context()
    function, blocking, event = cuda.function(cuda.load()), cuda.stream(), cuda.event()
    for _ in range(10):
        cuda.launch(function, blocking)
    cuda.ok("cuEventRecord", event, 0)
    assert cuda.code("cuEventQuery", event) == d.NOT_READY
    cuda.ok("cuEventSynchronize", event)
    assert cuda.code("cuStreamQuery", blocking) == d.SUCCESS


def kernel_waits_for_another_stream(cuda: Driver) -> None:
    cuda.context()
    module, flag = cuda.load(d.FLAG_PTX), cuda.alloc(4)
    waiter, setter = cuda.stream(d.NON_BLOCKING), cuda.stream(d.NON_BLOCKING)
    cuda.ok("cuMemsetD32_v2", flag, c_uint(0), 1)
    cuda.synchronize()
    launch_with(cuda, cuda.function(module, "wait_flag"), waiter, (flag, 1))
    assert cuda.code("cuStreamQuery", waiter) == d.NOT_READY
    time.sleep(0.02)
    assert cuda.code("cuStreamQuery", waiter) == d.NOT_READY
    launch_with(cuda, cuda.function(module, "set_flag"), setter, (flag, 1))
    cuda.ok("cuStreamSynchronize", waiter)
    assert cuda.read(flag, 4) == b"\1\0\0\0"


def kernel_waits_for_another_process(cuda: Driver) -> None:
    handles, done = os.pipe(), os.pipe()
    child = os.fork()
    cuda.context()
    module, stream = cuda.load(d.FLAG_PTX), cuda.stream(d.NON_BLOCKING)
    if not child:
        flag = cuda.ipc_open(os.read(handles[0], 64))
        launch_with(cuda, cuda.function(module, "set_flag"), stream, (flag, 7))
        cuda.ok("cuStreamSynchronize", stream)
        os.read(done[0], 1)
        os._exit(0)
    flag = cuda.alloc(d.BLOCK)
    cuda.ok("cuMemsetD32_v2", flag, c_uint(0), 1)
    cuda.synchronize()
    launch_with(cuda, cuda.function(module, "wait_flag"), stream, (flag, 7))
    assert cuda.code("cuStreamQuery", stream) == d.NOT_READY
    os.write(handles[1], cuda.ipc_handle(flag))
    cuda.ok("cuStreamSynchronize", stream)
    os.write(done[1], b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def wide_value_holds_a_stream(cuda: Driver) -> None:
    cuda.context()
    waiter, writer = cuda.stream(d.NON_BLOCKING), cuda.stream(d.NON_BLOCKING)
    value, flag = 5 << 32, cuda.alloc(8)
    cuda.ok("cuMemsetD32_v2", flag, c_uint(0), 2)
    cuda.synchronize()
    cuda.ok("cuStreamWaitValue64_v2", waiter, flag, value, c_uint(1))
    cuda.ok("cuStreamWriteValue64_v2", writer, flag, value - 1, c_uint(0))
    cuda.ok("cuStreamSynchronize", writer)
    assert cuda.code("cuStreamQuery", waiter) == d.NOT_READY
    cuda.ok("cuStreamWriteValue64_v2", writer, flag, value, c_uint(0))
    cuda.ok("cuStreamSynchronize", waiter)


def destroyed_stream_ends_its_work(cuda: Driver) -> None:
    cuda.context()
    function, flag = cuda.function(cuda.load()), cuda.alloc(4)
    cuda.ok("cuMemsetD32_v2", flag, c_uint(0), 1)
    stream, began = cuda.stream(d.NON_BLOCKING), time.monotonic()
    for _ in range(50):
        cuda.launch(function, stream)
    cuda.ok("cuStreamWriteValue32_v2", stream, flag, c_uint(3), c_uint(0))
    cuda.ok("cuStreamDestroy_v2", stream)
    assert time.monotonic() - began < 25 * SPIN_US * 1e-6
    cuda.synchronize()
    assert time.monotonic() - began > 40 * SPIN_US * 1e-6 and cuda.read(flag, 4) == b"\3\0\0\0"


def destroyed_event_was_recorded(cuda: Driver) -> None:
    cuda.context()
    function, event, stream = cuda.function(cuda.load()), cuda.event(), cuda.stream(d.NON_BLOCKING)
    cuda.launch(function, stream)
    cuda.ok("cuEventRecord", event, stream)
    cuda.ok("cuEventDestroy_v2", event)
    cuda.ok("cuStreamSynchronize", stream)


def graph_takes_the_time_of_its_chain(cuda: Driver) -> None:
    cuda.context()
    function, stream, graph = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), c_uint64()
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(0))
    for _ in range(5):
        cuda.launch(function, stream)
    cuda.ok("cuStreamEndCapture", stream, byref(graph))
    exec_ = cuda.out("cuGraphInstantiateWithFlags", graph.value, 0)
    cuda.ok("cuGraphLaunch", exec_, stream)
    took = elapsed_us(cuda, stream, lambda: cuda.ok("cuGraphLaunch", exec_, stream))
    assert 4.75 * SPIN_US < took < 5 * SPIN_US + 20_000


def branches_of_a_graph_take_the_time_of_the_longest(cuda: Driver) -> None:
    cuda.context()
    function, stream, graph = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING), c_uint64()
    other, fork, join = cuda.stream(d.NON_BLOCKING), cuda.event(), cuda.event()
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(0))
    cuda.ok("cuEventRecord", fork, stream)
    cuda.ok("cuStreamWaitEvent", other, fork, c_uint(0))
    for _ in range(10):
        cuda.launch(function, stream)
        cuda.launch(function, other)
    cuda.ok("cuEventRecord", join, other)
    cuda.ok("cuStreamWaitEvent", stream, join, c_uint(0))
    cuda.ok("cuStreamEndCapture", stream, byref(graph))
    exec_ = cuda.out("cuGraphInstantiateWithFlags", graph.value, 0)
    cuda.ok("cuGraphLaunch", exec_, stream)
    took = elapsed_us(cuda, stream, lambda: cuda.ok("cuGraphLaunch", exec_, stream))
    assert 9.5 * SPIN_US < took < 15 * SPIN_US


def cooperative_launch_must_fit(cuda: Driver) -> None:
    cuda.context()
    function, stream = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING)

    def code(blocks: int) -> int:
        shape = [c_uint(1)] * 2
        return cuda.code(
            "cuLaunchCooperativeKernel", function, c_uint(blocks), *shape, c_uint(32), *shape, c_uint(0), stream, None
        )

    assert code(1) == d.SUCCESS and code(1 << 20) == d.COOPERATIVE_TOO_LARGE
    assert launch_extended(cuda, function, stream, 1 << 20, (COOPERATIVE, 1)) == d.COOPERATIVE_TOO_LARGE
    cuda.ok("cuStreamSynchronize", stream)


def extended_launch_takes_attributes(cuda: Driver) -> None:
    cuda.context()
    function, stream = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING)

    def work() -> None:
        cuda.launch(function, stream)
        assert launch_extended(cuda, function, stream, 1, (PROGRAMMATIC, 1)) == d.SUCCESS
        assert launch_extended(cuda, function, stream, 1, (COOPERATIVE, 1)) == d.SUCCESS

    assert elapsed_us(cuda, stream, work) > 1.9 * SPIN_US
