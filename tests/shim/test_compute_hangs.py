"""Programs that the compute limit could block. tests/limiter/test_spoof.py has containers with false activity."""

from __future__ import annotations

import textwrap

import pytest

from tests.shim.attacker import LIMIT, TOOLS
from tests.shim.box import Box
from tests.shim.inside import run
from tests.shim.launches import HELPERS
from tests.shim.tenants import boxes

# ---- a container writes to its own files ----------------------------------------------------------------------------

NOISE = """
import mmap, random
pages = "/usr/lib/gpushare/pages/"
path, at, size = {
    "bucket": ("/usr/lib/gpushare/rw/usage", [4096], 128),
    "pages": (pages + os.listdir(pages)[0], [4096 * i for i in range(20)], 4096),
}[sys.argv[1]]
start()
function, stream = kernel("spin_us_500"), new_stream()
with open(path, "r+b") as file:
    data = mmap.mmap(file.fileno(), 0)
stop = threading.Event()
def noise():
    while not stop.wait(0.001):
        where = random.choice(at)
        data[where : where + size] = random.choice((os.urandom(size), b"\\xff" * size, bytes(size)))
writer = threading.Thread(target=noise)
writer.start()
until, n = time.monotonic() + 1, 0
while time.monotonic() < until:
    ok(launch(function, stream))
    n += 1
stop.set()
writer.join()
ok(cuda.cuCtxSynchronize())
print(n)
"""


@pytest.mark.parametrize("where", ["bucket", "pages"])
def test_random_bytes_in_own_files_stop_no_launch(where: str) -> None:
    """The program may exceed its own limit by that (docs/security.md); it is neither stopped nor killed."""
    with boxes(LIMIT) as (box,):
        (n,) = run(box, NOISE, where, helpers=HELPERS)
    assert int(n) * 500e-6 > 0.1


# ---- hangs ------------------------------------------------------------------

HELD_S = 9
HELD = f"""
start()
threading.Timer({HELD_S}, lambda: (print("held", flush=True), os._exit(0))).start()
function, first, second, flag = kernel("spin_us_1000"), new_stream(), new_stream(), new_flag()
for _ in range(60):
    ok(launch(function, second))
ok(cuda.cuCtxSynchronize())
"""
HELD_BY = {
    "a kernel": """
        ok(flagged(kernel("wait_flag"), first, flag, 1))
        for i in range({n}):
            ok(launch(function, second, grid={grid}))
        ok(flagged(kernel("set_flag"), second, flag, 1))
        """,
    "a value": """
        ok(cuda.cuStreamWaitValue32_v2(first, flag, 1, 0))
        ok(launch(function, first))
        for i in range({n}):
            ok(launch(function, second, grid={grid}))
        ok(cuda.cuStreamWriteValue32_v2(second, flag, 1, 0))
        """,
}
SEGMENTS = 32  # GS_SEGMENTS


@pytest.mark.parametrize(("n", "grid"), [(10, "1"), (SEGMENTS + 8, "1"), (6, "2 + i")], ids=["few", "many", "unknown"])
@pytest.mark.parametrize("by", HELD_BY)
def test_stream_that_waits_for_other_streams_makes_progress(by: str, n: int, grid: str) -> None:
    """Until the first stream has finished, no work of the streams that run meanwhile is known to be done."""
    end = "ok(cuda.cuCtxSynchronize())\nprint('through', flush=True)\nos._exit(0)\n"
    program = HELD + textwrap.dedent(HELD_BY[by]).format(n=n, grid=grid) + end
    with boxes(50) as (box,):
        assert run(box, program, helpers=HELPERS + TOOLS) == ["through"]


# ---- delays although the limit is not reached ------------------------------------------------------------------------


def best_ratio(plain: Box, limited: Box, program: str, enough: float = 0.7, tries: int = 4) -> float:
    """Rounds that the program does with a limit, for one without: the best of some runs, which other load delays."""
    native = with_limit = 0
    for _ in range(tries):
        native = max(native, int(run(plain, program, helpers=HELPERS)[0]))
        with_limit = max(with_limit, int(run(limited, program, helpers=HELPERS)[0]))
        if with_limit > enough * native:
            break
    return with_limit / native


def test_host_functions_are_not_charged() -> None:
    """The device is busy for 2 % of the time."""
    program = """
    start()
    function, stream = kernel("spin_us_100"), new_stream()
    pause = ctypes.CFUNCTYPE(None, c_void_p)(lambda _: time.sleep(0.005))
    ok(launch(function, stream))
    ok(cuda.cuCtxSynchronize())
    until, n = time.monotonic() + 3, 0
    while time.monotonic() < until:
        for _ in range(10):
            ok(launch(function, stream))
            ok(cuda.cuLaunchHostFunc(stream, pause, None))
        ok(cuda.cuStreamSynchronize(stream))
        n += 10
    print(n)
    """
    with Box() as plain, boxes(30) as (box,):
        assert best_ratio(plain, box, program) > 0.7  # 0.3 if they were charged


PIPELINE = """
places = []
ok(cuda.cuInit(0))
for device in range(2):
    context, event = start(device), c_void_p()
    ok(cuda.cuEventCreate(byref(event), 2))
    places.append((context, new_stream(), kernel("spin_us_5000"), event))
def step():
    for (context, stream, function, event), (_, _, _, before) in zip(places, places[::-1]):
        ok(cuda.cuCtxSetCurrent(context))
        ok(cuda.cuStreamWaitEvent(stream, before, 0))
        ok(launch(function, stream))
        ok(cuda.cuEventRecord(event, stream))
for _ in range(10):
    step()
until, n = time.monotonic() + 3, 0
while time.monotonic() < until:
    for _ in range(4):
        step()
    ok(cuda.cuStreamSynchronize(places[1][1]))
    n += 4
print(n)
"""


def test_two_devices_waiting_for_each_other_are_not_throttled() -> None:
    """Both devices are below their limits, so no launch is delayed."""
    with Box([None] * 2, gpus=2) as plain, boxes(55, gpus=2) as (box,):
        assert best_ratio(plain, box, PIPELINE, 0.85) > 0.85  # 0.55 if waits were charged
