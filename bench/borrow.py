"""The program in the containers of bench/elastic.py. Its events are those of demo/tenant.py.

BORROW=all    allocate memory until an allocation is refused, and read all of it, so that it is on the device
BORROW=N      time one allocation of N bytes
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

CHUNK = 256 << 20
READ_NS = 100_000
OK, OUT_OF_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY


def fill() -> int:
    """Return the bytes that it got."""
    error, module = cuda.cuModuleLoadData(b"SIMMOD globals=0 code=1\n")
    assert error == OK, error
    error, sweep = cuda.cuModuleGetFunction(module, b"sweep_ns_arg")
    assert error == OK, error
    held = 0
    while True:
        error, pointer = cuda.cuMemAlloc(CHUNK)
        if error == OUT_OF_MEMORY:
            return held
        assert error == OK, error
        words = ((READ_NS, int(pointer), CHUNK), (ctypes.c_uint64,) * 3)
        assert cuda.cuLaunchKernel(sweep, 64, 1, 1, 1, 1, 1, 0, 0, words, 0)[0] == OK
        assert cuda.cuCtxSynchronize()[0] == OK
        held += CHUNK


def ask(size: int) -> float:
    """Return the milliseconds of the allocation."""
    began = time.perf_counter()
    error, _ = cuda.cuMemAlloc(size)
    took = time.perf_counter() - began
    assert error == OK, error
    return 1000 * took


def main(directory: Path) -> int:
    with open(directory / "events", "w") as events, open(directory / "go") as go:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        assert cuda.cuInit(0)[0] == OK
        error, context = cuda.cuDevicePrimaryCtxRetain(0)
        assert error == OK, error
        assert cuda.cuCtxSetCurrent(context)[0] == OK
        tell(event="seen")
        go.readline()
        wanted = os.environ["BORROW"]
        tell(event="full", result=fill() if wanted == "all" else ask(int(wanted)))
        signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
