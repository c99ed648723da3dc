"""Matrix products of PyTorch, as users run them."""

from __future__ import annotations

import time
from typing import Any

from tests.hardware.tenant import listen, say
from tests.hardware.tenants.frameworks import torch_module

MATRIX = 4096
QUEUE = 8


def work(graph: bool = False) -> None:
    """For each line {settle_s, run_s}: report matrix products per second."""
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
                for _ in range(10):
                    torch.mm(left, left, out=out)
        say(ready=True)
        while True:
            asked = listen()
            begin = time.monotonic() + asked["settle_s"]
            end = begin + asked["run_s"]
            going: list[Any] = []
            done, first, at_first, now = 0, 0, 0.0, time.monotonic()
            while now < end:
                for _ in range(1 if recorded else 10):
                    recorded.replay() if recorded else torch.mm(left, left, out=out)
                event = torch.cuda.Event()
                event.record(stream)
                going.append(event)
                if len(going) > QUEUE:
                    going.pop(0).synchronize()
                    done += 10
                now = time.monotonic()
                if not at_first and now >= begin:
                    first, at_first = done, now
            torch.cuda.synchronize()
            say(per_s=(done - first) / (now - (at_first or begin)))


def graph() -> None:
    work(graph=True)
