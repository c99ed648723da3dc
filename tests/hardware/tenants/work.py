"""Work whose amount the device itself counts."""

from __future__ import annotations

import random
import time
from collections import deque
from ctypes import byref, c_int, c_uint, c_uint64
from typing import NamedTuple

from tests.hardware.tenant import begin_at, listen, say
from tests.hardware.tenants.cuda import MULTIPROCESSORS, THREADS, Gpu, counting, counting_parameters

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
        gpu.start(function, counting_parameters(counter, rounds), 0, blocks, THREADS)
        gpu.ok("cuEventRecord", end, 0)
        gpu.ok("cuEventSynchronize", end)
        ms = gpu.milliseconds(start, end)
        if ms < 0.5 * kernel_us / 1000:
            rounds *= 2
    say(rounds=max(1, round(rounds * kernel_us / 1000 / ms)), blocks=blocks)


class Sample(NamedTuple):
    at: float  # time.monotonic()
    done: int  # kernels
    device_ns: int  # as the kernels counted it on the device's clock


class Worker:
    """Keeps launches in flight and counts finished ones."""

    def __init__(self, library: str, kernel_us: int, rounds: int, blocks: int, graph: bool) -> None:
        self.gpu = gpu = Gpu(library)
        self.function = gpu.kernel(*counting(kernel_us))
        self.counter = gpu.counter()
        self.clock = gpu.host_counter()
        self.parameters = counting_parameters(self.counter, rounds, self.clock)
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

    def until(self, end: float) -> Sample:
        """Work until `end`, and return what was done so far."""
        while time.monotonic() < end:
            if self.idle:
                self.launch()
            self.look()
        return Sample(time.monotonic(), self.done, c_uint64.from_address(self.clock).value)

    def drain(self) -> None:
        self.gpu.ok("cuStreamSynchronize", self.stream)
        self.look()


def work(library: str, kernel_us: int, rounds: int, blocks: int, graph: bool = False) -> None:
    """For each line {at, settle_s, run_s} begin at that time; report on the run after the settling time.

    `per_s`: kernels per second; `device`: device time per elapsed time; `from_s`, `to_s`: time.monotonic().
    It is idle between lines. `counted`: the fraction of the launched work that the device counted. A simulator, which
    runs no code, counts neither work nor time.
    """
    worker = Worker(library, kernel_us, rounds, blocks, graph)
    say(ready=True)
    while True:
        asked = listen()
        begin = begin_at(asked) + asked["settle_s"]
        first = worker.until(begin)
        last = worker.until(begin + asked["run_s"])
        worker.drain()
        counted = worker.gpu.count(worker.counter) / (worker.launched * worker.per_launch)
        took, done = last.at - first.at, last.done - first.done
        device = (last.device_ns - first.device_ns) / 1e9 / took
        say(per_s=done / took, done=done, device=device, counted=counted, from_s=first.at, to_s=last.at)


def requests(library: str, kernel_us: int, rounds: int, blocks: int, kernels: int) -> None:
    """For each line {at, run_s, mean_s} do requests until then, with random pauses of `mean_s`.

    A request is one millisecond or so of work in so many kernels, and waits for its end. `request_ms`: how long each
    took; `from_s`, `to_s`: time.monotonic().
    """
    worker = Worker(library, kernel_us // kernels, max(1, rounds // kernels), blocks, False)
    say(ready=True)
    while True:
        asked = listen()
        begin, took = begin_at(asked), list[float]()
        while time.monotonic() < begin + asked["run_s"]:
            time.sleep(random.expovariate(1 / asked["mean_s"]))
            start = time.monotonic()
            for _ in range(kernels):
                worker.launch()
            worker.drain()
            took.append(1000 * (time.monotonic() - start))
        say(request_ms=took, from_s=begin, to_s=time.monotonic())


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
