"""Measure when one context runs on the device and when another does."""

from __future__ import annotations

import struct

from tests.hardware.tenant import listen, say
from tests.hardware.tenants.cuda import GAPS, HEAD, Gpu, Parameters

ROOM = 4000


def slices(library: str, run_ms: int, least_us: int) -> None:
    """On a line: run one thread for `run_ms` and report its pauses of more than `least_us`, in device nanoseconds."""
    gpu = Gpu(library)
    function = gpu.kernel((HEAD + GAPS).encode(), "gaps_spin_us_100000")
    size = 8 + 16 * ROOM
    out = gpu.counter(size)
    gpu.start(function, Parameters(out, ROOM, 1000, 1 << 40))
    gpu.synchronize()
    say(ready=True)
    listen()
    gpu.start(function, Parameters(out, ROOM, run_ms * 1_000_000, least_us * 1000))
    gpu.synchronize()
    values = struct.unpack(f"<{1 + 2 * ROOM}Q", gpu.read(out, size))
    say(gaps=[values[1 + 2 * i : 3 + 2 * i] for i in range(values[0])])
