"""Measure on the device's own clock when one context runs and when another does."""

from __future__ import annotations

import ctypes
import struct
import time

from tests.hardware.tenant import begin_at, listen, say
from tests.hardware.tenants.cuda import GAPS, HEAD, MULTIPROCESSORS, Gpu, Parameters

ROOM = 4000  # pauses
HEADER, PAUSE = 24, 24  # bytes
NEVER_NS = 1 << 62
WIDE_BLOCKS, WIDE_THREADS = 2, 1024  # per multiprocessor: all the threads that it can hold
MOST_BURSTS = 400


def load(gpu: Gpu) -> int:
    return gpu.kernel((HEAD + GAPS).encode(), "gaps_spin_us_100000")


def slices(library: str, run_ms: int, least_us: int, wide: bool = False) -> None:
    """On a line run for `run_ms`; report the first and last readings, and pauses of more than `least_us`.

    One thread runs, or with `wide` as many as the device can hold. All readings are device nanoseconds; a pause is
    (last reading before, first reading after, ticks of the multiprocessor's clock between them).
    """
    gpu = Gpu(library)
    function = load(gpu)
    size = HEADER + PAUSE * ROOM
    out = gpu.counter(size)
    blocks = gpu.attribute(MULTIPROCESSORS) * WIDE_BLOCKS if wide else 1
    threads = WIDE_THREADS if wide else 1
    gpu.start(function, Parameters(out, ROOM, 1000, NEVER_NS), 0, blocks, threads)
    gpu.synchronize()
    say(ready=True)
    begin_at(listen())
    gpu.start(function, Parameters(out, ROOM, run_ms * 1_000_000, least_us * 1000), 0, blocks, threads)
    gpu.synchronize()
    count, begin, end, *pauses = struct.unpack(f"<{3 + 3 * ROOM}Q", gpu.read(out, size))
    say(begin=begin, end=end, gaps=[pauses[3 * i : 3 * i + 3] for i in range(count)])


def bursts(library: str, kernel_us: int, pause_ms: float, run_s: float) -> None:
    """On a line launch short kernels, each after a pause; report the first and last readings of each.

    The kernels write them into host memory, so this context has no other work on the device.
    """
    gpu = Gpu(library)
    function = load(gpu)
    size = HEADER * MOST_BURSTS
    out = gpu.host_counter(size)
    gpu.start(function, Parameters(out, 0, 1000, NEVER_NS))
    gpu.synchronize()
    say(ready=True)
    begin_at(listen())
    until, count = time.monotonic() + run_s, 0
    while time.monotonic() < until and count < MOST_BURSTS:
        gpu.start(function, Parameters(out + HEADER * count, 0, kernel_us * 1000, NEVER_NS))
        gpu.synchronize()
        time.sleep(pause_ms / 1000)
        count += 1
    values = struct.unpack(f"<{3 * count}Q", ctypes.string_at(out, HEADER * count))
    say(bursts=[values[3 * i + 1 : 3 * i + 3] for i in range(count)])
