"""Record probe events like the rate limiter's (shim/limiter/probe.c): events in an otherwise empty stream."""

from __future__ import annotations

import time
from collections import deque
from ctypes import byref, c_int, c_uint

from tests.hardware.tenant import begin_at, listen, say
from tests.hardware.tenants.cuda import THREADS, Gpu, counting, counting_parameters
from tests.hardware.tenants.work import NON_BLOCKING

PACE_NS = 200_000  # SOON in the rate limiter
DEPTH = 32  # kernels in flight: more than a slice
REST_S = 2e-5
STREAMS = 64  # more than a device has queues
TRIES = 3  # this process may sleep for longer than a kernel takes


class Events:
    """Timing events in flight, in the order of recording, and finished ones.

    A finished event is (recorded, timestamp, seen) in nanoseconds: the host's clock, the device's since `base`, the
    host's.
    """

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
        """Collect finished events; return whether there were any."""
        before = len(self.done)
        while self.going and self.gpu.done(self.going[0][0]):
            seen = time.monotonic_ns()
            event, recorded = self.going.popleft()
            stamp = int(self.gpu.milliseconds(self.base, event) * 1e6)
            self.done.append((recorded, stamp, seen))
            self.free.append(event)
        return len(self.done) > before


def looks(library: str, kernel_us: int, rounds: int, blocks: int) -> None:
    """For each line {at, run_s, works, looks} begin at that time.

    Report the events of the kernels and of the probes, as in Events.

    With `works` it runs short kernels back to back with an event after each; with `looks` it records an event in a
    stream of its own every 200 us.
    """
    gpu = Gpu(library)
    function = gpu.kernel(*counting(kernel_us))
    parameters = counting_parameters(gpu.counter(), rounds)
    own, empty = gpu.stream(NON_BLOCKING), gpu.stream(NON_BLOCKING)
    base = gpu.event()
    kernels, looked = Events(gpu, own, DEPTH, base), Events(gpu, empty, 1, base)
    say(ready=True)
    while True:
        asked = listen()
        gpu.ok("cuEventRecord", base, own)
        gpu.synchronize()
        end = int((begin_at(asked) + asked["run_s"]) * 1e9)
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


def queues(library: str, kernel_us: int, rounds: int, blocks: int) -> None:
    """Count the streams whose work delays an event in an empty stream of their priority, and of the highest one."""
    gpu = Gpu(library)
    function, parameters = gpu.kernel(*counting(kernel_us)), counting_parameters(gpu.counter(), rounds)
    least, highest = c_int(), c_int()
    gpu.ok("cuCtxGetStreamPriorityRange", byref(least), byref(highest))
    empty = {
        "same": gpu.stream(NON_BLOCKING),
        "highest": gpu.out("cuStreamCreateWithPriority", c_uint(NON_BLOCKING), highest),
    }
    base, first, event = (gpu.event() for _ in range(3))
    gpu.start(function, parameters, 0, blocks, THREADS)  # a function can be loaded by its first launch
    gpu.ok("cuEventRecord", base, 0)
    gpu.synchronize()

    def waits(busy: int, other: int) -> bool:
        """Return whether the event in `other` is done after a kernel in `busy`. A second kernel waits for that one, in
        front of the event if both streams have one queue."""
        gpu.start(function, parameters, busy, blocks, THREADS)
        gpu.ok("cuEventRecord", first, busy)
        gpu.start(function, parameters, busy, blocks, THREADS)
        gpu.ok("cuEventRecord", event, other)
        gpu.synchronize()
        return gpu.milliseconds(base, event) >= gpu.milliseconds(base, first)

    streams = [gpu.stream(NON_BLOCKING) for _ in range(STREAMS)]
    delayed = {
        name: sum(all(waits(busy, other) for _ in range(TRIES)) for busy in streams) for name, other in empty.items()
    }
    itself = waits(streams[0], streams[0])  # always, or the timestamps show nothing
    say(streams=STREAMS, priorities=[least.value, highest.value], delayed=delayed, itself=itself)
