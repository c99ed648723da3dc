"""PyTorch, as users run it."""

from __future__ import annotations

import time
from typing import Any

from tests.hardware.tenant import absent, listen, say

MIB = 1 << 20
MATRIX = 4096
QUEUE = 8


def torch_module() -> Any:
    try:
        import torch
    except ImportError as error:
        absent(f"no PyTorch for this python3 ({error})")
    if not torch.cuda.is_available():
        absent("PyTorch sees no GPU")
    return torch


def limit(most_bytes: int) -> None:
    """Report mem_get_info, how much can be allocated, and whether PyTorch continues after OutOfMemoryError."""
    torch = torch_module()
    free, total = torch.cuda.mem_get_info()
    held: list[Any] = []
    refused = False
    while len(held) * 64 * MIB < most_bytes:
        try:
            held.append(torch.empty(64 * MIB, dtype=torch.uint8, device="cuda"))
        except torch.cuda.OutOfMemoryError:
            refused = True
            break
    got = len(held) * 64 * MIB
    del held
    torch.cuda.empty_cache()
    after = torch.ones(1024, device="cuda").sum().item() == 1024
    say(version=torch.__version__, total_bytes=total, free_bytes=free, got_bytes=got, refused=refused, goes_on=after)


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
