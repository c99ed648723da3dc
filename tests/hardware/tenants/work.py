"""Work whose amount the device itself counts."""

from __future__ import annotations

import time
from collections import deque
from ctypes import byref, c_int, c_uint, c_uint64

from tests.hardware.tenant import listen, say
from tests.hardware.tenants.cuda import MULTIPROCESSORS, THREADS, Gpu, Parameters, counting

BLOCKS_PER_MULTIPROCESSOR = 4
DEPTH = 64  # launches in flight
WARM_UP_S = 0.3  # time for the clocks to rise
NON_BLOCKING, RELAXED = 1, 2
GRAPH_KERNELS = 10


def calibrate(library: str, kernel_us: int) -> None:
    """Report the rounds with which the counting kernel fills the whole device for about `kernel_us`."""
    gpu = Gpu(library)
    function = gpu.kernel(*counting(kernel_us))
    blocks = gpu.attribute(MULTIPROCESSORS) * BLOCKS_PER_MULTIPROCESSOR
    counter, start, end = gpu.counter(), gpu.event(), gpu.event()
    rounds, ms = 1000, 0.0
    until = time.monotonic() + WARM_UP_S
    while time.monotonic() < until or not ms:
        gpu.ok("cuEventRecord", start, 0)
        gpu.start(function, Parameters(counter, rounds), 0, blocks, THREADS)
        gpu.ok("cuEventRecord", end, 0)
        gpu.ok("cuEventSynchronize", end)
        ms = gpu.milliseconds(start, end)
        if ms < 0.5 * kernel_us / 1000:
            rounds *= 2
    say(rounds=max(1, round(rounds * kernel_us / 1000 / ms)), blocks=blocks)


class Worker:
    """Keeps launches in flight and counts finished ones."""

    def __init__(self, library: str, kernel_us: int, rounds: int, blocks: int, graph: bool) -> None:
        self.gpu = gpu = Gpu(library)
        self.function = gpu.kernel(*counting(kernel_us))
        self.counter = gpu.counter()
        self.parameters = Parameters(self.counter, rounds)
        self.blocks, self.per_launch = blocks, rounds * blocks
        self.stream = gpu.stream(NON_BLOCKING)
        self.idle = [gpu.event() for _ in range(DEPTH)]
        self.going: deque[int] = deque()
        self.launched = self.done = 0
        self.unit = GRAPH_KERNELS if graph else 1
        self.graph = self._graph() if graph else 0

    def _graph(self) -> int:
        graph, executable = c_uint64(), c_uint64()
        self.gpu.ok("cuStreamBeginCapture_v2", self.stream, c_int(RELAXED))
        for _ in range(GRAPH_KERNELS):
            self._kernel()
        self.gpu.ok("cuStreamEndCapture", self.stream, byref(graph))
        self.gpu.ok("cuGraphInstantiateWithFlags", byref(executable), graph.value, c_uint64(0))
        return executable.value

    def _kernel(self) -> None:
        self.gpu.start(self.function, self.parameters, self.stream, self.blocks, THREADS)

    def launch(self) -> None:
        if self.graph:
            self.gpu.ok("cuGraphLaunch", self.graph, self.stream)
        else:
            self._kernel()
        event = self.idle.pop()
        self.gpu.ok("cuEventRecord", event, self.stream)
        self.going.append(event)
        self.launched += self.unit

    def look(self) -> None:
        """Collect finished launches; wait for one when all slots are in use."""
        if not self.idle:
            self.gpu.ok("cuEventSynchronize", self.going[0])
        while self.going and self.gpu.done(self.going[0]):
            self.idle.append(self.going.popleft())
            self.done += self.unit

    def until(self, end: float) -> tuple[int, float]:
        """Work until `end`; return (kernels done so far, time of the last check)."""
        while time.monotonic() < end:
            if self.idle:
                self.launch()
            self.look()
        return self.done, time.monotonic()

    def drain(self) -> None:
        self.gpu.ok("cuStreamSynchronize", self.stream)
        self.look()


def work(library: str, kernel_us: int, rounds: int, blocks: int, graph: bool = False) -> None:
    """For each line {settle_s, run_s}: report kernels per second in the run, after the settling time.

    It is idle between lines. `counted`: the fraction of the launched work that the device counted; 0 on a simulator,
    which runs no code.
    """
    worker = Worker(library, kernel_us, rounds, blocks, graph)
    say(ready=True)
    while True:
        asked = listen()
        begin = time.monotonic() + asked["settle_s"]
        first, at_first = worker.until(begin)
        last, at_last = worker.until(begin + asked["run_s"])
        worker.drain()
        counted = worker.gpu.count(worker.counter) / (worker.launched * worker.per_launch)
        say(per_s=(last - first) / (at_last - at_first), done=last - first, counted=counted)


def pair(library: str, kernel_us: int, rounds: int, blocks: int, turns: int) -> None:
    """Run two streams that wait on the device for values which the other one writes after a kernel.

    The waiting stream is issued first, so a limiter that holds the second stream until the first is done waits for
    ever.
    """
    worker = Worker(library, kernel_us, rounds, blocks, False)
    gpu = worker.gpu
    wait, write = (
        f"{name}_v2" if hasattr(gpu.library, f"{name}_v2") else name
        for name in ("cuStreamWaitValue32", "cuStreamWriteValue32")
    )
    streams = (worker.stream, gpu.stream(NON_BLOCKING))
    flags = (gpu.counter(), gpu.counter())
    began = time.monotonic()
    for turn in range(1, turns + 1):
        gpu.ok(wait, streams[0], flags[1], c_uint(turn), c_uint(0))
        gpu.start(worker.function, worker.parameters, streams[0], blocks, THREADS)
        gpu.ok(write, streams[0], flags[0], c_uint(turn), c_uint(0))
        gpu.start(worker.function, worker.parameters, streams[1], blocks, THREADS)
        gpu.ok(write, streams[1], flags[1], c_uint(turn), c_uint(0))
        gpu.ok(wait, streams[1], flags[0], c_uint(turn), c_uint(0))
    gpu.synchronize()
    say(seconds=time.monotonic() - began, kernels=2 * turns)
