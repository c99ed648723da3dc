"""Programs that try to exceed their compute limit by calls of the driver, measured from the simulated device's ledger.

The gain by kernels that suddenly become long is measured in virtual time: tests/limiter/test_law.py."""

from __future__ import annotations

import pytest

from tests.shim.attacker import LIMIT, POINTS, gets
from tests.shim.tenants import boxes

MORE = {
    "a new grid for every launch, in many streams": """
        start()
        function, streams, n = kernel("spin_us_20000"), [new_stream() for _ in range(8)], 0
        go()
        while n := n + 1:
            ok(launch(function, streams[n % 8], grid=n))
        """,
    "a reset after every launch": """
        go_once = [start(), go()]
        while True:
            ok(launch(kernel("spin_us_20000")))
            ok(cuda.cuDevicePrimaryCtxReset_v2(0))
            start()
        """,
    "many more streams than are marked at a time": """
        start()
        function, tiny = kernel("spin_ns_arg"), kernel("spin_us_5")
        first, *others = [new_stream() for _ in range(65)]
        taught(function, 5000, first)
        ok(launch(tiny, others[0]))
        go()
        while True:
            ok(timed_launch(function, 10_000_000, first))
            for stream in others:
                ok(launch(tiny, stream))
            asked(first)
        """,
    "a thread's stream that only others could mark, until no marker is left": """
        context, function, one = start(), kernel("spin_ns_arg"), new_stream()
        cuda.cuLaunchKernel = cuda.cuLaunchKernel_ptsz
        mine, yours = threading.Semaphore(1), threading.Semaphore(0)
        def work():
            ok(cuda.cuCtxSetCurrent(context))
            while mine.acquire():
                ok(timed_launch(function, 300_000))
                yours.release()
        threading.Thread(target=work, daemon=True).start()
        for _ in range(800):
            yours.acquire()
            ok(timed_launch(function, 300_000, one))
            ok(cuda.cuCtxSynchronize())
            mine.release()
        go()
        while True:
            ok(timed_launch(function, 10_000_000, one))
            ok(cuda.cuCtxSynchronize())
        """,
    "launches that the driver refuses": """
        start()
        function, stream = kernel("spin_us_10000"), new_stream()
        for _ in range(50):
            assert cuda.cuLaunchKernel(function, 1, 1, 1, 5000, 1, 1, 0, stream, None, None) == INVALID_VALUE
            ok(cuda.cuCtxSynchronize())
        go()
        while True:
            ok(launch(function, stream))
        """,
    "work in one stream while another one waits": """
        start()
        long, tiny, flag, n = kernel("spin_us_2000"), kernel("spin_us_5"), new_flag(), 0
        first, second = new_stream(), new_stream()
        nothing = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: None)
        go()
        while n := n + 1:
            ok(cuda.cuStreamWaitValue32_v2(first, flag, n, 0))
            ok(launch(tiny, first))
            if n % 2:
                ok(cuda.cuLaunchHostFunc(second, nothing, None))
            ok(launch(long, second))
            ok(cuda.cuStreamWriteValue32_v2(second, flag, n, 0))
            ok(cuda.cuCtxSynchronize())
        """,
    "a host function before each of what became long kernels": """
        start()
        function, stream = kernel("spin_ns_arg"), new_stream()
        nothing = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: None)
        taught(function, 5000, stream)
        go()
        while True:
            ok(cuda.cuLaunchHostFunc(stream, nothing, None))
            ok(timed_launch(function, 10_000_000, stream))
            asked(stream)
        """,
    "a thread's own stream beside another thread's": """
        context = start()
        function, one = kernel("spin_us_500"), new_stream()
        mine, yours = threading.Semaphore(1), threading.Semaphore(0)
        def work():
            ok(cuda.cuCtxSetCurrent(context))
            while mine.acquire():
                ok(cuda.cuLaunchKernel_ptsz(function, 1, 1, 1, 1, 1, 1, 0, None, None, None))
                yours.release()
        threading.Thread(target=work, daemon=True).start()
        go()
        while yours.acquire():
            ok(launch(function, one))
            ok(cuda.cuCtxSynchronize())
            mine.release()
        """,
}


@pytest.mark.parametrize("what", MORE)
def test_attack_gains_nothing(what: str) -> None:
    with boxes(LIMIT) as (box,):
        assert gets(box, MORE[what], 2) < LIMIT + POINTS
