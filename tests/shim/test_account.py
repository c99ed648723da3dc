"""Byte-seconds and peak that the shim counts in the usage file."""

from __future__ import annotations

import time
from collections.abc import Callable

from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import run, usage
from tests.shim.test_live import talk

TICK_NS = 100_000_000  # the longest tick of a kernel is 10 ms (HZ=100); a virtual processor can be delayed
BEAT_NS = 1_000_000_000  # the parked thread counts that often


def byte_ns(box: Box) -> int:
    now, memory = usage(box), usage(box).memory[0]
    return memory.byte_ns + now.used_bytes(0) * memory.since_ns(time.monotonic_ns())


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end


def test_byte_seconds_are_memory_multiplied_by_time() -> None:
    program = """
    start()
    mine = []
    say("context")
    ok(alloc(GIB, mine))
    say("held")
    ok(cuda.cuMemFree_v2(mine[0]))
    say("freed")
    """
    with Box() as box, talk(box, program) as step:
        step()
        before, first = byte_ns(box), time.monotonic_ns()
        step()
        second = time.monotonic_ns()
        begun = usage(box).memory[0].until_ns
        until(lambda: usage(box).memory[0].until_ns > begun)  # the parked thread counted
        held, third = byte_ns(box), time.monotonic_ns()
        step()
        fourth, after = time.monotonic_ns(), byte_ns(box)
    whole = GIB + CONTEXT_BYTES
    assert 0 < held - before <= whole * (third - first + TICK_NS)
    assert held - before >= whole * (third - second - TICK_NS)
    assert whole * (third - second - TICK_NS) < after - before < whole * (fourth - first + TICK_NS)


def test_peak_outlives_the_memory_and_refused_allocations_do_not_count() -> None:
    with Box() as box:
        run(box, "start(); mine = []; ok(alloc(3 * GIB, mine)); assert alloc(2 * GIB) == OUT_OF_MEMORY")
        assert usage(box).memory[0].peak_bytes == 3 * GIB + CONTEXT_BYTES
        run(box, "start(); ok(alloc(GIB))")
        assert usage(box).memory[0].peak_bytes == 3 * GIB + CONTEXT_BYTES
        assert usage(box).refused[0] == 1


def test_exit_without_free_counts_to_the_end() -> None:
    program = "start(); ok(alloc(GIB)); print(time.monotonic_ns()); end = time.monotonic_ns() + 300 * 10**6\n"
    program += "while time.monotonic_ns() < end: pass\nprint(time.monotonic_ns())"
    with Box() as box:
        first, last = map(int, run(box, program))
        counted = usage(box).memory[0].byte_ns
    assert counted >= (GIB + CONTEXT_BYTES) * (last - first - TICK_NS)
    assert counted < (GIB + CONTEXT_BYTES) * (last - first + BEAT_NS)


def test_memory_of_a_killed_process_is_counted_to_within_a_second() -> None:
    with Box() as box:
        with talk(box, 'start()\nok(alloc(GIB))\nsay("held")\n') as step:
            step()
            first = time.monotonic_ns()
            begun = usage(box).memory[0].until_ns
            until(lambda: usage(box).memory[0].until_ns > begun)
        killed = time.monotonic_ns()
        assert usage(box).used_bytes(0) == 0
        counted = byte_ns(box)
        assert counted >= (GIB + CONTEXT_BYTES) * (killed - first - BEAT_NS - TICK_NS)
        run(box, "start()")  # another process must not count the dead one's memory
        assert byte_ns(box) - counted < CONTEXT_BYTES * (time.monotonic_ns() - killed + TICK_NS)


def test_processes_that_race_count_each_interval_once() -> None:
    program = """
    start()
    def churn():
        context = c_void_p()
        ok(cuda.cuDevicePrimaryCtxRetain(byref(context), 0))
        ok(cuda.cuCtxSetCurrent(context))
        for _ in range(300):
            mine = []
            if alloc(8 * MIB, mine) == SUCCESS:
                ok(cuda.cuMemFree_v2(mine[0]))
    threads = [threading.Thread(target=churn) for _ in range(4)]
    [one.start() for one in threads]
    [one.join() for one in threads]
    """
    with Box() as box:
        first = time.monotonic_ns()
        run(box, program)
        took, counted = time.monotonic_ns() - first, usage(box).memory[0].byte_ns
    assert 0 < counted <= (CONTEXT_BYTES + 4 * 8 * 2**20) * took
