"""Limits and pauses that change while a program runs."""

from __future__ import annotations

import mmap
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from gpushare.state.shm_abi import DEVICE_PAUSED, offset
from gpushare.system.syscalls import futex_wake

from simulator.ledger import Ledger
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, PRELUDE, peak
from tests.shim.launches import HELPERS
from tests.shim.tenants import boxes

TALK = """
def say(*words):
    print(*words, flush=True)
    assert sys.stdin.readline() == "go\\n"
"""


@contextmanager
def talk(box: Box, program: str) -> Iterator[Callable[[], list[str]]]:
    """Start a program; each call runs it to its next `say` and returns the words, the last ones when it ends."""
    source = PRELUDE + HELPERS + TALK + textwrap.dedent(program)
    process = box.popen(
        # timeout of coreutils 9.10 does not work as process 1
        ["sh", "-c", 'timeout 60 python3 -c "$1"; exit $?', "sh", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin and process.stdout and process.stderr
    begun = []

    def following() -> list[str]:
        assert process.stdin and process.stdout and process.stderr
        if begun:
            process.stdin.write("go\n")
            process.stdin.flush()
        begun.append(True)
        line = process.stdout.readline()
        assert line, process.stderr.read()
        return line.split()

    try:
        yield following
    finally:
        process.kill()
        process.communicate()


def wait_until_change_is_handled(box: Box) -> None:
    """Wait until the thread that handles changes of the limits sleeps again."""
    with box.limits.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        end = time.monotonic() + 20
        while not futex_wake(data, offset("gs_limits", "generation")):
            assert time.monotonic() < end


SELDOM = """
start()
function = kernel("spin_us_10")
def now_and_then():
    while True:
        ok(launch(function))
        time.sleep(0.002)
for _ in range(500):
    ok(launch(function))
ok(cuda.cuCtxSynchronize())
context = c_void_p()
ok(cuda.cuCtxGetCurrent(byref(context)))
threading.Thread(target=lambda: (cuda.cuCtxSetCurrent(context), now_and_then()), daemon=True).start()
"""


HELD = """
start()
function, stream = kernel("spin_us_10"), new_stream()
context, begun, paused, returned = c_void_p(), *(threading.Event() for _ in range(3))
ok(cuda.cuCtxGetCurrent(byref(context)))
def launcher():
    ok(cuda.cuCtxSetCurrent(context))
    for _ in range(12):  # the last ones use the reserve of time
        ok(launch(function, stream))
    begun.set()
    paused.wait()
    ok(launch(function, stream))
    returned.set()
threading.Thread(target=launcher).start()
begun.wait()
say("ready")
paused.set()
assert not returned.wait(0.3)
began, mine = time.monotonic(), []
ok(cuda.cuCtxSynchronize())
ok(cuda.cuStreamSynchronize(stream))
ok(alloc(4 * MIB, mine))
ok(alloc_async(4 * MIB, mine))
ok(cuda.cuMemsetD8_v2(mine[0], 0, c_size_t(4 * MIB)))
ok(cuda.cuMemcpyDtoD_v2(mine[0], mine[1], c_size_t(4 * MIB)))
ok(cuda.cuMemFree_v2(mine[0]))
second = new_stream()
ok(cuda.cuStreamDestroy_v2(second))
assert info()[1] and time.monotonic() - began < 5
say("held", returned.is_set())
say("went", returned.wait(20))
"""


@pytest.mark.parametrize(("percent", "pages"), [(50, True), (100, True), (100, False)])
def test_pause_blocks_launches_only(percent: int, pages: bool) -> None:
    """Launches that the limit would allow also wait, and in a container started without activity files."""
    with boxes(percent) as (box,):
        if not pages:
            box.page = []
            box.set_limit(compute_percent=100)
        with talk(box, HELD) as following:
            assert following() == ["ready"]
            box.set_limit(flags=DEVICE_PAUSED)
            wait_until_change_is_handled(box)
            assert following() == ["held", "False"]
            box.set_limit(flags=0)
            assert following() == ["went", "True"]


def test_limit_change_wakes_waiting_threads() -> None:
    """Two threads sleep on the futex: the launch, and the thread that holds the process's slot."""
    with boxes(50) as (box,), talk(box, SELDOM + "say('ready')") as following:
        assert following() == ["ready"]
        at = offset("gs_limits", "generation")
        with box.limits.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            most = [futex_wake(data, at)]
            assert most == [1]
            box.set_limit(flags=DEVICE_PAUSED)
            end = time.monotonic() + 10
            while max(most) < 2 and time.monotonic() < end:
                most.append(futex_wake(data, at))
        assert max(most) == 2


LOWERED = """
start()
def seen():
    total = c_size_t()
    ok(cuda.cuDeviceTotalMem_v2(byref(total), 0))
    return [*info(), *nvml_memory()[:2], total.value]
mine = []
while alloc(64 * MIB, mine) == SUCCESS:
    pass
say(len(mine))
say(*seen(), alloc(2 * MIB), alloc(64 * MIB))
for address in mine[4:]:
    ok(cuda.cuMemFree_v2(address))
say(*seen(), alloc(64 * MIB), alloc(GIB))
say(*seen(), alloc(GIB))
"""


def test_changed_memory_limit_applies_at_once() -> None:
    with Box([2 * GIB], gpu_bytes=16 * GIB) as box, talk(box, LOWERED) as following:
        (pieces,) = map(int, following())
        box.set_limit(memory_limit_bytes=GIB)
        # cuMemGetInfo's free and total; NVML's total and free; cuDeviceTotalMem; then two refusals
        assert list(map(int, following())) == [0, GIB, GIB, 0, GIB, 2, 2]
        used = CONTEXT_BYTES + 4 * 64 * MIB
        assert list(map(int, following())) == [GIB - used, GIB, GIB, GIB - used, GIB, 0, 2]
        box.set_limit(memory_limit_bytes=4 * GIB)
        left = 4 * GIB - used - 64 * MIB
        assert list(map(int, following())) == [left, 4 * GIB, 4 * GIB, left, 4 * GIB, 0]
        assert pieces * 64 * MIB + CONTEXT_BYTES <= peak(box) <= 2 * GIB


POOLED = """
start()
big, kept, pool = [], [], c_void_p()
ok(alloc_async(100 * MIB, big))  # with what is kept, in one piece that cannot be trimmed
ok(alloc_async(MIB, kept))
ok(cuda.cuDeviceGetDefaultMemPool(byref(pool), 0))
ok(cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(1 << 60))))
ok(cuda.cuMemFreeAsync(big[0], None))
filler = []
while alloc(2 * MIB, filler) == SUCCESS:
    pass
say(*[alloc_async(size) for size in (4096, 10 * MIB)])
say(*[alloc_async(size) for size in (4096, 10 * MIB)])
for address in filler[:40]:
    ok(cuda.cuMemFree_v2(address))
say(*[alloc_async(size) for size in (4096, 10 * MIB)])
"""


def test_pool_refuses_allocations_over_a_lowered_limit() -> None:
    """The pool holds unused memory, which must be released."""
    with Box([GIB]) as box, talk(box, POOLED) as following:
        assert following() == ["0", "0"]
        box.set_limit(memory_limit_bytes=GIB - 64 * MIB)
        assert following() == ["2", "2"]
        assert following() == ["0", "0"]


TRIMMED = """
start()
mine, pool = [], c_void_p()
for _ in range(6):
    ok(alloc_async(128 * MIB, mine))
ok(cuda.cuDeviceGetDefaultMemPool(byref(pool), 0))
ok(cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(1 << 60))))
for address in mine:
    ok(cuda.cuMemFreeAsync(address, None))
ok(cuda.cuCtxSynchronize())
say("kept")
say(alloc_async(64 * MIB), alloc(64 * MIB))
"""


def test_pool_releases_unused_memory_under_a_lowered_limit() -> None:
    with Box([2 * GIB]) as box, talk(box, TRIMMED) as following:
        assert following() == ["kept"]
        limit = CONTEXT_BYTES + 256 * MIB
        box.set_limit(memory_limit_bytes=limit)
        assert following() == ["0", "0"]
        with Ledger(box.device()) as ledger:
            assert ledger.used_bytes <= limit


INDEBTED = """
start()
long, short = kernel("spin_us_20000"), kernel("spin_us_10")
for _ in range(2):
    ok(launch(long))
    ok(cuda.cuCtxSynchronize())
say("indebted")
began = time.monotonic()
ok(launch(short))
say(time.monotonic() - began)
"""


def test_raised_limit_does_not_inherit_the_debt() -> None:
    """At 1 % each of these kernels is paid for in two seconds; a new limit does not inherit that debt."""
    with boxes(1) as (box,), talk(box, INDEBTED) as following:
        assert following() == ["indebted"]
        box.set_limit(compute_percent=90)
        (took,) = map(float, following())
        assert took < 1
