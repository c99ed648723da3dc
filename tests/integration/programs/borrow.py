"""Allocate memory until the driver has no more, then end without a free. Its events are those of demo/tenant.py.

PROCESSES=N    N processes do so, each on a device of its own (default: 1)
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

OK, STEP_BYTES = cuda.CUresult.CUDA_SUCCESS, 64 << 20


def start(device: int) -> None:
    assert cuda.cuInit(0)[0] == OK
    error, context = cuda.cuDevicePrimaryCtxRetain(device)
    assert error == OK, error
    assert cuda.cuCtxSetCurrent(context)[0] == OK


def fill() -> None:
    while cuda.cuMemAlloc(STEP_BYTES)[0] == OK:
        pass


def child(device: int, go: int, full: int) -> None:
    start(device)
    os.read(go, 1)
    fill()
    os.write(full, b"\n")
    while True:
        signal.pause()


def main(directory: Path) -> int:
    others = []
    for device in range(1, int(os.environ.get("PROCESSES", "1"))):
        (go, let), (full, tell_full) = os.pipe(), os.pipe()
        if os.fork() == 0:
            child(device, go, tell_full)
        others.append((let, full))
    with open(directory / "events", "w") as events, open(directory / "go") as go_on:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        start(0)
        tell(event="seen")
        go_on.readline()
        fill()
        for let, full in others:
            os.write(let, b"\n")
            os.read(full, 1)
        tell(event="full")
        go_on.readline()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
