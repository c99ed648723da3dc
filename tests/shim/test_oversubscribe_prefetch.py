"""Prefetches of memory that an oversubscribed share has on the host.

They bring as much as the share has room for on the device, by the device's ledger, and return it.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, on_device, peak, run, usage
from tests.shim.test_live import talk

DEVICE, WHOLE = 1 * GIB, 2 * GIB
FIRST = 224 * MIB
HELD = CONTEXT_BYTES + FIRST
MOST = (DEVICE - CONTEXT_BYTES) // (2 * MIB) * 2 * MIB  # leaves room for another context
HELPERS = """
def older(at, size, to, stream=None):
    return cuda.cuMemPrefetchAsync(at, c_size_t(size), c_int(to), stream)

def newer(at, size, to, stream=None):
    return cuda.cuMemPrefetchAsync_v2(at, c_size_t(size), c_uint64(1 if to == 0 else 2), 0, stream)

def within(address, mib):
    return c_uint64(address.value + mib * MIB)

HOST = -1
"""


def two() -> str:
    """Return a program's start: 224 MiB on the device and 600 MiB on the host."""
    return HELPERS + "start()\nheld = []\nok(alloc(224 * MIB, held)), ok(alloc(600 * MIB, held))\nat = held[1]\n"


def parts(box: Box) -> tuple[int, int]:
    """Return the bytes that the share counts on the device and on the host."""
    now = usage(box)
    return now.used_bytes(0), now.host_bytes(0)


@pytest.fixture
def box() -> Box:
    return Box([DEVICE], whole=[WHOLE])


@pytest.mark.parametrize("way", ["older", "newer"])
def test_prefetch_uses_the_shares_room_and_returns_it(box: Box, way: str) -> None:
    """Repeat prefetches in both directions and in pieces; the totals that the program sees do not change."""
    program = f"""
        prefetch = {way}
        for _ in range(2):
            ok(prefetch(at, 600 * MIB, 0))
            ok(cuda.cuCtxSynchronize())
            say(info()[0])
            ok(prefetch(at, 600 * MIB, HOST))
            say(info()[0])
            ok(cuda.cuCtxSynchronize())
            say(info()[0])
        for n in range(3):
            ok(prefetch(within(at, 20 * n), 20 * MIB, 0))
        ok(cuda.cuCtxSynchronize())
        say()
        ok(prefetch(within(at, 20), 580 * MIB, HOST))
        ok(cuda.cuCtxSynchronize())
        say()
        ok(cuda.cuMemFree_v2(at))
        say(info()[0])
    """
    with box, talk(box, two() + textwrap.dedent(program)) as following:
        before = HELD
        left = [str(WHOLE - before - 600 * MIB)]
        for _ in range(2):
            assert following() == left
            assert parts(box) == (MOST, 600 * MIB - (MOST - HELD)) and on_device(box) == MOST
            assert following() == left
            assert parts(box) == (MOST, 600 * MIB - (MOST - HELD))  # the memory may still be in transit
            assert following() == left
            assert parts(box) == (before, 600 * MIB) and on_device(box) == before
        following()
        assert parts(box) == (before + 60 * MIB, 540 * MIB) and on_device(box) == before + 60 * MIB
        following()
        assert parts(box) == (before + 20 * MIB, 580 * MIB) and on_device(box) == before + 20 * MIB
        assert following() == [str(WHOLE - before)]
        assert parts(box) == (before, 0) and on_device(box) == before
        assert peak(box) == MOST


def test_reading_prefetched_memory_migrates_nothing_more(box: Box) -> None:
    """A kernel that reads all of it later migrates no further block, also after it was sent back."""
    program = """
        function = kernel("sweep_ns_arg")
        for size, to in ((0, None), (100 * MIB, 0), (600 * MIB, HOST)):
            ok(older(at, size, to) if size else 0)
            sweep(function, at, 600 * MIB)
            ok(cuda.cuCtxSynchronize())
            say()
    """
    with box, talk(box, two() + textwrap.dedent(program)) as following:
        following()
        before = on_device(box)
        following()
        assert on_device(box) == before + 100 * MIB
        following()
        assert on_device(box) == before


def test_ignored_prefetch_succeeds_as_a_hint(box: Box) -> None:
    """One that would pass over memory that was not requested, two in captures, and advice."""
    program = """
        def captured(act):
            stream, graph = c_void_p(), c_void_p()
            ok(cuda.cuStreamCreate(byref(stream), 1))
            ok(cuda.cuStreamBeginCapture_v2(stream, 0))
            result = act(stream)
            ok(cuda.cuStreamEndCapture(stream, byref(graph)))
            return result
        print(older(at, 0, 0), older(at, 601 * MIB, 0))
        print("passes", older(within(at, 4), 8 * MIB, 0))
        print("captured", captured(lambda stream: older(at, 8 * MIB, 0, stream)))
        print("back", captured(lambda stream: newer(at, 8 * MIB, HOST, stream)))
        print("advice", cuda.cuMemAdvise(at, c_size_t(8 * MIB), 3, 0))
        ok(cuda.cuCtxSynchronize())
    """
    with box:
        hints = ["passes", "0", "captured", "0", "back", "0", "advice", "0"]
        assert run(box, two() + textwrap.dedent(program)) == ["1", "1", *hints]
        assert peak(box) == HELD


def test_processes_killed_while_prefetching_leave_nothing(tmp_path: Path) -> None:
    """Three processes prefetch into the free device part and are killed at any point.

    Afterwards the whole share is free again, and it never exceeded its limits.
    """
    device, whole = 2 * GIB, 4 * GIB
    program = """
        me = [sys.executable, "-c", open("/proc/self/cmdline").read().split("\\0")[2], "child"]
        if len(sys.argv) > 1:
            start()
            held = []
            print("started", flush=True)
            sys.stdin.readline()
            for _ in range(10):
                held.append(c_uint64())
                ok(cuda.cuMemAllocManaged(byref(held[-1]), c_size_t(64 * MIB), c_uint(1)))
            for address in held[:4]:
                ok(cuda.cuMemFree_v2(address))
            print("goes", flush=True)
            while True:
                for to in (0, HOST):
                    for at in held[4:]:
                        ok(older(at, 64 * MIB, to))
                    ok(cuda.cuCtxSynchronize())
        for n in range(4):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            children = [subprocess.Popen(me, **pipes) for _ in range(3)]
            for word in (b"started\\n", b"goes\\n"):
                for child in children:
                    assert child.stdout.readline() == word
                for child in children:
                    child.stdin.write(b"\\n")
                    child.stdin.flush()
            time.sleep(0.01 * n)
            for child in children:
                child.kill()
                child.wait()
        start()
        print(info()[0])
    """
    simhost = make_simhost(tmp_path / "host", gpus=1, memory_bytes=16 * GIB, late_return_ms=0)
    with Box([device], whole=[whole], simhost=simhost) as box:
        assert run(box, HELPERS + textwrap.dedent(program)) == [str(whole - CONTEXT_BYTES)]
        assert HELD < peak(box) <= device


def test_prefetches_while_limits_change_lose_nothing(box: Box) -> None:
    """Four threads prefetch in both directions while the residency boundary moves: limits and sums hold."""
    program = """
        import threading
        over, pieces = threading.Event(), []
        for _ in range(4):
            ok(alloc(32 * MIB, pieces))
        context = c_void_p()
        ok(cuda.cuCtxGetCurrent(byref(context)))
        def work(piece):
            ok(cuda.cuCtxSetCurrent(context))
            while not over.is_set():
                ok(older(piece, 32 * MIB, 0))
                ok(older(piece, 32 * MIB, HOST))
                ok(cuda.cuCtxSynchronize())
        workers = [threading.Thread(target=work, args=(piece,)) for piece in pieces]
        [worker.start() for worker in workers]
        say("goes")
        over.set()
        [worker.join() for worker in workers]
        ok(cuda.cuCtxSynchronize())
        for address in (*held, *pieces):
            ok(cuda.cuMemFree_v2(address))
        say(info()[0])
    """
    with box, talk(box, two() + textwrap.dedent(program)) as following:
        assert following() == ["goes"]
        for n in range(200):
            box.set_limit(memory_limit_bytes=DEVICE - (n % 2) * 440 * MIB, memory_virtual_bytes=WHOLE)
            assert parts(box)[0] <= DEVICE
        box.set_limit(memory_limit_bytes=DEVICE, memory_virtual_bytes=WHOLE)
        assert following() == [str(WHOLE - CONTEXT_BYTES)]
        assert parts(box) == (CONTEXT_BYTES, 0) and on_device(box) == CONTEXT_BYTES
        assert peak(box) <= DEVICE
