"""Reads that race with changes by another thread or by the host. The simulated driver reports use after free."""

from __future__ import annotations

import threading

from tests.shim.box import GIB, Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS, percent_held


def test_primary_context_stays_usable_after_destroy_calls() -> None:
    """The driver ignores cuCtxDestroy for a primary context, so its memory is still used."""
    program = """
    context, function, stop = start(), kernel("spin_us_100"), threading.Event()

    def work():
        ok(cuda.cuCtxSetCurrent(context))
        stream = new_stream()
        while not stop.is_set():
            ok(launch(function, stream))
            ok(cuda.cuStreamSynchronize(stream))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert cuda.cuCtxDestroy_v2(context) == 201
        time.sleep(0.002)
    stop.set()
    for thread in threads:
        thread.join()
    print("ok")
    """
    with Box([GIB], compute=[100]) as box:
        assert run(box, program, helpers=HELPERS) == ["ok"]


def test_limit_holds_under_repeated_destroy_calls() -> None:
    """Work in a context is charged while another thread destroys the context again and again."""
    program = """
    context, function, stop = start(), kernel("spin_us_1000"), threading.Event()

    def work():
        ok(cuda.cuCtxSetCurrent(context))
        while not stop.is_set():
            ok(launch(function))

    thread = threading.Thread(target=work)
    began = time.monotonic()
    thread.start()
    while time.monotonic() < began + 1:
        cuda.cuCtxDestroy_v2(context)
    stop.set()
    thread.join()
    print(time.monotonic() - began)
    """
    with Box([GIB], compute=[20]) as box:
        (seconds,) = run(box, program, helpers=HELPERS)
        assert percent_held(box, float(seconds)) < 40


def test_thread_can_be_cancelled_after_destroying_a_context() -> None:
    """Cancellation is disabled only during the destruction, because other threads wait for it."""
    program = """
    libc, before, context = ctypes.CDLL(None), c_int(7), c_void_p()
    start()
    ok(cuda.cuCtxCreate_v2(byref(context), 0, 0))
    ok(launch(kernel("spin_us_10")))
    ok(cuda.cuCtxDestroy_v2(context))
    assert libc.pthread_setcancelstate(1, byref(before)) == 0
    print(before.value)
    """
    with Box([GIB], compute=[50]) as box:
        assert run(box, program, helpers=HELPERS) == ["0"]


def test_reported_totals_are_consistent_while_the_boundary_moves() -> None:
    """The reported limits of device and host are from one moment."""
    over = threading.Event()

    def move(box: Box) -> None:
        while not over.is_set():
            for device_part in (3 * GIB, GIB):
                box.set_limit(memory_limit_bytes=device_part)

    program = """
    ok(cuda.cuInit(0))
    told, total, end = set(), c_size_t(), time.monotonic() + 0.3
    while time.monotonic() < end:
        ok(cuda.cuDeviceTotalMem_v2(byref(total), 0))
        told.add(total.value // GIB)
    print(*told)
    """
    with Box([GIB], whole=[4 * GIB]) as box:
        host = threading.Thread(target=move, args=(box,))
        host.start()
        try:
            assert run(box, program) == ["4"]
        finally:
            over.set()
            host.join()


def test_deferred_free_completes_when_its_context_is_destroyed() -> None:
    """The event that shows when the free is due was destroyed with that context: the free is due at once."""
    program = """
    first, second, held = start(), c_void_p(), []
    ok(cuda.cuCtxCreate_v2(byref(second), 0, 0))
    stream, function = new_stream(), kernel("spin_us_20000")
    ok(cuda.cuCtxSetCurrent(first))
    while alloc(256 * MIB, held) == SUCCESS:
        pass
    ok(cuda.cuCtxSetCurrent(second))
    ok(launch(function, stream))
    ok(cuda.cuMemFreeAsync(held[-1], stream))
    ok(cuda.cuCtxDestroy_v2(second))
    ok(cuda.cuCtxSetCurrent(first))
    before = info()[0]
    ok(cuda.cuCtxSynchronize())
    print((info()[0] - before) // MIB)
    """
    with Box([2 * GIB], whole=[3 * GIB]) as box:
        assert run(box, program, helpers=HELPERS) == ["256"]
