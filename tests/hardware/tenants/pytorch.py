"""Matrix products of PyTorch, as users run them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.hardware.tenant import begin_at, listen, say
from tests.hardware.tenants.frameworks import torch_module

MATRIX = 4096
QUEUE = 80  # products in flight
GRAPH_PRODUCTS = 10


class Unit(NamedTuple):
    """A launch: when its call returned, on the host's clock, and when it ended, on the device's; both in seconds."""

    returned: float
    ended: float


def device_time(units: Iterable[Unit], offset: float, begin: float, end: float) -> float:
    """Return for how long the device worked from `begin` to `end`, on the host's clock, for launches in one stream.

    A launch begins on the device when the preceding one has ended and its own call has returned. `offset`: the device's
    clock plus this is the host's.
    """
    total, before = 0.0, float("-inf")
    for returned, ended in units:
        ended += offset
        started = max(returned, before, begin)
        total += max(0.0, min(ended, end) - started)
        before = ended
    return total


def work(graph: bool = False) -> None:
    """For each line {at, settle_s, run_s} begin at that time; report on the run after the settling time.

    `per_s`: matrix products per second; `device`: device time per elapsed time, correct while no other program has the
    device; `from_s`, `to_s`: time.monotonic().
    """
    torch = torch_module()
    left = torch.randn(MATRIX, MATRIX, device="cuda", dtype=torch.float16)
    out = torch.empty_like(left)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.mm(left, left, out=out)
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph() if graph else None
        if recorded:
            with torch.cuda.graph(recorded, stream=stream):
                for _ in range(GRAPH_PRODUCTS):
                    torch.mm(left, left, out=out)
        each = GRAPH_PRODUCTS if recorded else 1
        say(ready=True)
        while True:
            asked = listen()
            begin = begin_at(asked) + asked["settle_s"]
            base = torch.cuda.Event(enable_timing=True)
            at_base = time.monotonic()
            base.record(stream)
            going: deque[tuple[float, Any]] = deque()
            units: list[Unit] = []

            def take_in(going: Any = going, units: Any = units, base: Any = base) -> None:
                returned, event = going.popleft()
                event.synchronize()
                units.append(Unit(returned, base.elapsed_time(event) / 1e3))

            while time.monotonic() < begin + asked["run_s"]:
                recorded.replay() if recorded else torch.mm(left, left, out=out)
                returned = time.monotonic()
                event = torch.cuda.Event(enable_timing=True)
                event.record(stream)
                going.append((returned, event))
                if len(going) * each >= QUEUE:
                    take_in()
            while going:
                take_in()
            # An event is never done before it is recorded, and the first one finds an idle device.
            end = begin + asked["run_s"]
            done = sum(begin < unit.ended + at_base <= end for unit in units)
            say(
                per_s=done * each / asked["run_s"],
                device=device_time(units, at_base, begin, end) / asked["run_s"],
                from_s=begin,
                to_s=end,
            )


def graph() -> None:
    work(graph=True)
