"""What a thread of a program reads while another one, or the host, changes it. When something that is gone is used, the
simulated driver says so."""

from __future__ import annotations

import threading

from tests.shim.box import GIB, Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS, percent_held


def test_a_context_that_is_said_to_go_while_others_work_in_it() -> None:
    """And does not go: the driver destroys no primary context by that name. What is in it is still used."""
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


def test_a_context_that_is_said_to_go_all_the_time_has_no_more_than_its_limit() -> None:
    """What runs in it is charged, however often the driver is asked to destroy it."""
    program = """
    context, function, stop = start(), kernel("spin_us_1000"), threading.Event()

    def work():
        ok(cuda.cuCtxSetCurrent(context))
        while not stop.is_set():
            ok(launch(function))

    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + 1
    while time.monotonic() < end:
        cuda.cuCtxDestroy_v2(context)
    stop.set()
    thread.join()
    """
    with Box([GIB], compute=[20]) as box:
        run(box, program, helpers=HELPERS)
        assert percent_held(box, 1) < 40


def test_a_thread_can_be_cancelled_after_it_destroyed_a_context() -> None:
    """As before: only meanwhile it cannot, since others wait for it."""
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


def test_what_a_program_is_told_while_the_border_of_its_share_moves() -> None:
    """Of device and host together: their limits of one moment."""
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


def test_a_free_that_was_put_off_behind_work_of_a_context_that_goes() -> None:
    """The event that says when it is due went with that context: then it is due at once."""
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
