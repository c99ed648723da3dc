"""Looks, as the compute law has them (shim/limiter/probe.c): events in a stream in which nothing else is."""

from __future__ import annotations

import time
from collections import deque

from tests.hardware.tenant import listen, say
from tests.hardware.tenants.cuda import THREADS, Gpu, Parameters, counting
from tests.hardware.tenants.work import NON_BLOCKING

PACE_NS = 200_000  # SOON of the law
DEPTH = 32  # kernels on their way: more than a slice
REST_S = 2e-5


class Events:
    """Timing events that are on their way, in the order in which they were recorded, and those that are done:
    (recorded, stamp, seen), in nanoseconds of the host's clock, the device's since `base`, and the host's."""

    def __init__(self, gpu: Gpu, stream: int, depth: int, base: int) -> None:
        self.gpu, self.stream, self.base = gpu, stream, base
        self.free = [gpu.event() for _ in range(depth)]
        self.going: deque[tuple[int, int]] = deque()
        self.last_ns = 0
        self.done: list[tuple[int, int, int]] = []

    def record(self) -> None:
        event = self.free.pop()
        self.last_ns = time.monotonic_ns()
        self.gpu.ok("cuEventRecord", event, self.stream)
        self.going.append((event, self.last_ns))

    def take_in(self) -> bool:
        """Whether something was done."""
        before = len(self.done)
        while self.going and self.gpu.done(self.going[0][0]):
            seen = time.monotonic_ns()
            event, recorded = self.going.popleft()
            stamp = int(self.gpu.milliseconds(self.base, event) * 1e6)
            self.done.append((recorded, stamp, seen))
            self.free.append(event)
        return len(self.done) > before


def looks(library: str, kernel_us: int, rounds: int, blocks: int) -> None:
    """For each line {run_s, works, looks}: with `works` short kernels one behind the other, each with an event behind
    it, with `looks` one in a stream of their own each 200 us. Says both kinds of events as Events has them."""
    gpu = Gpu(library)
    function = gpu.kernel(*counting(kernel_us))
    parameters = Parameters(gpu.counter(), rounds)
    own, empty = gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING)
    base = gpu.event()
    kernels, looked = Events(gpu, own, DEPTH, base), Events(gpu, empty, 1, base)
    say(ready=True)
    while True:
        asked = listen()
        gpu.ok("cuEventRecord", base, own)
        gpu.synchronize()
        end = time.monotonic_ns() + int(asked["run_s"] * 1e9)
        while time.monotonic_ns() < end:
            moved = False
            while asked["works"] and kernels.free:
                gpu.start(function, parameters, own, blocks, THREADS)
                kernels.record()
                moved = True
            if asked["looks"] and looked.free and time.monotonic_ns() >= looked.last_ns + PACE_NS:
                looked.record()
            moved = kernels.take_in() or moved
            if not (looked.take_in() or moved):
                time.sleep(REST_S)
        gpu.synchronize()
        for events in (kernels, looked):
            events.take_in()
        say(kernels=kernels.done, looks=looked.done)
        kernels.done, looked.done = [], []
