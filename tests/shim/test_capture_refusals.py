"""A program goes on after an allocation is refused while it has captured graphs, or while it captures one."""

from __future__ import annotations

import pytest

from tests.shim.box import CONTEXT_BYTES, Box
from tests.shim.inside import MIB, peak, run
from tests.shim.launches import HELPERS

CAPTURE = (
    HELPERS
    + """
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
CAPTURING, INVALIDATED = 1, 2

def begin(stream, mode=RELAXED):
    return cuda.cuStreamBeginCapture_v2(stream, c_int(mode))

def status(stream):
    found = c_int()
    ok(cuda.cuStreamIsCapturing(stream, byref(found)))
    return found.value

def end(stream):
    "The result of the capture's end, and the graph."
    graph = c_void_p()
    return cuda.cuStreamEndCapture(stream, byref(graph)), graph

def instantiated(graph):
    executable = c_void_p()
    ok(cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0)))
    return executable

def captured(function, stream, mode=RELAXED):
    "An executable graph of two kernels."
    ok(begin(stream, mode))
    ok(launch(function, stream))
    ok(launch(function, stream))
    result, graph = end(stream)
    ok(result)
    return instantiated(graph)

def replay(executable, stream):
    return cuda.cuGraphLaunch(executable, stream) or cuda.cuStreamSynchronize(stream)

def relaxed(call):
    "Call as PyTorch allocates during a capture: with this thread's mode relaxed."
    mode = c_int(RELAXED)
    ok(cuda.cuThreadExchangeStreamCaptureMode(byref(mode)))
    result = call()
    ok(cuda.cuThreadExchangeStreamCaptureMode(byref(mode)))
    return result
"""
)
LIMIT = CONTEXT_BYTES + 200 * MIB


@pytest.fixture
def box() -> Box:
    return Box([LIMIT], compute=[50])


def test_refusal_outside_of_a_capture_leaves_captured_graphs_usable(box: Box) -> None:
    program = """
        start()
        function, stream, held = kernel("spin_us_10"), new_stream(), []
        first = captured(function, stream)
        print(replay(first, stream))
        while alloc(8 * MIB, held) == SUCCESS:
            pass
        print(alloc(8 * MIB), replay(first, stream), len(held) > 20)
        print(replay(captured(function, stream), stream))
        for address in held:
            ok(cuda.cuMemFree_v2(address))
        print(replay(first, stream), replay(captured(function, stream), stream), alloc(8 * MIB))
    """
    with box:
        assert run(box, program, helpers=CAPTURE) == ["0", "2", "0", "True", "0", "0", "0", "0"]
        assert peak(box) <= LIMIT


@pytest.mark.parametrize("mode", ["GLOBAL", "THREAD_LOCAL", "RELAXED"])
def test_refusal_during_a_capture_does_not_invalidate_it(box: Box, mode: str) -> None:
    program = f"""
        start()
        function, stream = kernel("spin_us_10"), new_stream()
        first = captured(function, stream, {mode})
        ok(begin(stream, {mode}))
        ok(launch(function, stream))
        print(relaxed(lambda: alloc(GIB)), status(stream) == CAPTURING)
        ok(launch(function, stream))
        result, graph = end(stream)
        print(result, replay(instantiated(graph), stream))
        print(status(stream), replay(first, stream), replay(captured(function, stream, {mode}), stream))
        print(cuda.cuCtxSynchronize(), alloc(8 * MIB))
    """
    with box:
        assert run(box, program, helpers=CAPTURE) == ["2", "True", "0", "0", "0", "0", "0", "0", "0"]
        assert peak(box) <= LIMIT


def test_refusal_that_ends_a_capture_early_leaves_no_capture_behind(box: Box) -> None:
    """As PyTorch does: the exception leaves the capture, whose end is called before the error is handled."""
    program = """
        start()
        function, stream, other = kernel("spin_us_10"), new_stream(), new_stream()
        first = captured(function, stream)
        for _ in range(5):
            ok(begin(stream, THREAD_LOCAL))
            ok(launch(function, stream))
            refused = relaxed(lambda: alloc(GIB))
            result, graph = end(stream)
            ok(cuda.cuGraphDestroy(graph))
            print(refused, result, status(stream), launch(function, other), replay(first, stream))
        print(cuda.cuCtxSynchronize(), replay(captured(function, stream, THREAD_LOCAL), stream))
    """
    with box:
        assert run(box, program, helpers=CAPTURE) == [*["2", "0", "0", "0", "0"] * 5, "0", "0"]


def test_invalidated_capture_ends_with_its_end(box: Box) -> None:
    """A program that allocates without a relaxed mode invalidates its capture, as natively, but only this one."""
    program = """
        start()
        function, stream, event = kernel("spin_us_10"), new_stream(), c_void_p()
        first = captured(function, stream)
        ok(cuda.cuEventCreate(byref(event), c_uint(0)))
        ok(begin(stream, GLOBAL))
        ok(launch(function, stream))
        print(cuda.cuEventQuery(event), alloc(GIB) != SUCCESS, status(stream) == INVALIDATED)
        print(end(stream)[0], status(stream), replay(first, stream))
        print(replay(captured(function, stream, GLOBAL), stream), cuda.cuCtxSynchronize())
    """
    with box:
        assert run(box, program, helpers=CAPTURE) == ["900", "True", "True", "901", "0", "0", "0", "0"]


def test_captured_allocation_beyond_the_limit_is_refused_and_the_next_capture_works(box: Box) -> None:
    program = """
        start()
        function, stream = kernel("spin_us_10"), new_stream()
        first = captured(function, stream)

        def allocating(size):
            "Capture an allocation, and return the result of its launch, or of what failed before."
            address, graph, executable = c_uint64(), c_void_p(), c_void_p()
            ok(begin(stream))
            refused = cuda.cuMemAllocAsync(byref(address), c_size_t(size), stream)
            freed = refused or cuda.cuMemFreeAsync(address, stream)
            result, graph = end(stream)
            result = refused or freed or result
            result = result or cuda.cuGraphInstantiateWithFlags(byref(executable), graph, c_uint64(0))
            return result or replay(executable, stream)

        print(allocating(GIB), status(stream), replay(first, stream), allocating(32 * MIB), replay(first, stream))
    """
    with box:
        assert run(box, program, helpers=CAPTURE) == ["2", "0", "0", "0", "0"]
        assert peak(box) <= LIMIT
