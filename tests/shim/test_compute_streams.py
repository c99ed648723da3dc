"""Compute limits with captures, many streams, streams of threads, and streams that wait for each other."""

from __future__ import annotations

import pytest

from tests.shim.inside import run
from tests.shim.launches import HELPERS, POINTS, percent_held
from tests.shim.tenants import boxes


def test_captures_are_neither_broken_nor_throttled() -> None:
    """In the strictest capture mode, another thread launches and waits.

    A captured launch is no work, even during a pause.
    """
    program = """
    context = start()
    function, mine, other = kernel("spin_us_300"), new_stream(), new_stream()
    for _ in range(20):
        ok(launch(function, mine))
        ok(launch(function, other))
    stop = threading.Event()
    def busy():
        ok(cuda.cuCtxSetCurrent(context))
        while not stop.is_set():
            ok(launch(function, other))
    thread = threading.Thread(target=busy)
    thread.start()
    for _ in range(20):
        graph, executable = c_void_p(), c_void_p()
        ok(cuda.cuStreamBeginCapture_v2(mine, 0))
        took = timed(lambda: [ok(launch(function, mine)) for _ in range(100)] and 0)
        ok(cuda.cuStreamEndCapture(mine, byref(graph)))
        ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
        assert took < 0.5, took
        ok(cuda.cuGraphDestroy(graph))
    stop.set()
    thread.join()
    def graphs():
        for _ in range(8):
            ok(cuda.cuGraphLaunch(executable, mine))
        return cuda.cuStreamSynchronize(mine)
    print(timed(graphs) > 0.3)
    """
    with boxes(50) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


@pytest.mark.parametrize("blocks", [True, False])
def test_a_long_capture_is_not_broken(blocks: bool) -> None:
    """In the strictest capture mode, another stream is throttled and is timed again later.

    The limiter records no events for earlier launches in the capturing stream and in the legacy stream.
    """
    program = f"""
    start()
    function, other, mine, graph = kernel("spin_us_300"), new_stream(), new_stream({0 if blocks else 1}), c_void_p()
    for _ in range(3):
        ok(launch(function, mine))
        ok(launch(function, None))
        ok(cuda.cuCtxSynchronize())
    ok(launch(function, None))
    ok(launch(function, mine))
    ok(cuda.cuStreamBeginCapture_v2(mine, 0))
    ok(launch(function, mine))
    until, n = time.monotonic() + 1, 0
    while time.monotonic() < until:
        ok(launch(function, other))
        n += 1
    ok(cuda.cuStreamEndCapture(mine, byref(graph)))
    print(n * 300e-6 < 0.7)
    """
    with boxes(50) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


def test_invalidated_capture_does_not_stop_the_limiter() -> None:
    """A capture that the program invalidated by synchronising its stream returns an error and ends."""
    program = """
    start()
    function, stream, plain, graph = kernel("spin_us_2000"), new_stream(), new_stream(), c_void_p()
    ok(cuda.cuStreamBeginCapture_v2(stream, 0))
    ok(launch(function, stream))
    assert cuda.cuStreamSynchronize(stream) == 900
    assert cuda.cuStreamEndCapture(stream, byref(graph)) == 901
    print(timed(lambda: [ok(launch(function, plain)) for _ in range(100)] and 0) > 0.3)
    """
    with boxes(40) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


def test_launch_counts_for_the_context_of_its_stream() -> None:
    """The launch counts for the stream's context even if another context is current."""
    program = """
    first = start()
    second, function = c_void_p(), kernel("spin_us_1000")
    stream = new_stream()
    ok(cuda.cuCtxCreate_v2(byref(second), 0, 0))
    began = time.monotonic()
    results = {launch(function, stream) for _ in range(100)}
    took = time.monotonic() - began
    print(took > 0.2 if results == {0} else results)
    """
    with boxes(30) as (box,):
        assert run(box, program, helpers=HELPERS) == ["True"]


def test_limit_holds_with_many_short_lived_streams_and_functions() -> None:
    """More streams and functions than the limiter caches, destroyed while they have work."""
    program = """
    start()
    functions = [kernel(f"spin_us_{100 + i}") for i in range(5)]
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 1:
        streams = [new_stream() for _ in range(40)]
        for i, stream in enumerate(streams * 2):
            ok(launch(functions[i % 5], stream, grid=1 + n % 700))
            n += 1
        for stream in streams:
            ok(cuda.cuStreamDestroy_v2(stream))
    ok(cuda.cuCtxSynchronize())
    print(time.monotonic() - began)
    """
    with boxes(40) as (box,):
        (took,) = run(box, program, helpers=HELPERS)
        assert 20 < percent_held(box, float(took)) < 40 + POINTS


STREAMS_OF_THREADS = """
def per_thread(function):
    return cuda.cuLaunchKernel_ptsz(function, 1, 1, 1, 1, 1, 1, 0, None, None, None)

def in_threads(threads, function, then):
    "Seconds that it took."
    context, began = start(), time.monotonic()
    function = kernel(function)
    def work():
        ok(cuda.cuCtxSetCurrent(context))
        while time.monotonic() - began < 1.2:
            ok(per_thread(function))
            then()
    workers = [threading.Thread(target=work) for i in range(threads)]
    [w.start() for w in workers], [w.join() for w in workers]
    ok(cuda.cuCtxSynchronize())
    return time.monotonic() - began

def poll():
    while cuda.cuStreamQuery_ptsz(None) == 600:  # CUDA_ERROR_NOT_READY
        pass
"""


@pytest.mark.parametrize(
    ("threads", "percent", "kernel", "then", "most"),
    [
        (1, 40, "spin_us_500", "lambda: None", 40 + POINTS),
        (4, 40, "spin_us_500", "lambda: None", 40 + POINTS),
        (1, 20, "spin_us_50", "poll", 20 + 3),
        (4, 20, "spin_us_50", "poll", 20 + 3),
    ],
)
def test_limit_holds_for_streams_of_threads(threads: int, percent: int, kernel: str, then: str, most: float) -> None:
    """A program that polls whether a stream is done gets no more than one that waits for it."""
    with boxes(percent) as (box,):
        (took,) = run(box, f'print(in_threads({threads}, "{kernel}", {then}))', helpers=HELPERS + STREAMS_OF_THREADS)
        assert percent / 2 < percent_held(box, float(took)) < most


def test_limit_holds_for_the_legacy_stream_and_blocking_streams() -> None:
    program = """
    start()
    function, blocking, free = kernel("spin_us_500"), [new_stream(0), new_stream(0)], new_stream()
    began, n = time.monotonic(), 0
    while time.monotonic() - began < 1.2:
        ok(launch(function, (None, *blocking, free)[n % 4]))
        n += 1
    ok(cuda.cuCtxSynchronize())
    print(time.monotonic() - began)
    """
    with boxes(40) as (box,):
        (took,) = run(box, program, helpers=HELPERS)
        assert 20 < percent_held(box, float(took)) < 40 + POINTS


def test_probe_events_cause_no_deadlock() -> None:
    """A kernel in one blocking stream spins for a later one in another.

    A probe event in the legacy stream between them would wait for the first and delay the second, for ever.
    """
    program = """
    start()
    wait, write, flag = kernel("wait_flag"), kernel("set_flag"), c_uint64()
    ok(cuda.cuMemAlloc_v2(byref(flag), c_size_t(4096)))
    ok(cuda.cuMemsetD32_v2(flag, 0, c_size_t(1)))
    short, waiter, releaser = kernel("spin_us_50"), new_stream(0), new_stream(0)
    def flagged(function, stream, value):
        values = (c_uint64 * 1)(flag.value), (c_uint64 * 1)(value)
        arguments = (c_void_p * 2)(*(ctypes.cast(v, c_void_p) for v in values))
        ok(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, None))
    for i in range(1, 6):
        for _ in range(30):
            ok(launch(short, None))
        flagged(wait, waiter, i)
        for _ in range(3):
            ok(launch(short, releaser))
        flagged(write, releaser, i)
        ok(cuda.cuCtxSynchronize())
    print("through")
    """
    with boxes(60) as (box,):
        assert run(box, program, helpers=HELPERS, timeout_s=50) == ["through"]
