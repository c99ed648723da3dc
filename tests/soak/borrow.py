"""Allocate and free random sizes up to the memory limit. An allocation within the request must succeed.

borrow.py REQUEST_BYTES SEED      runs until it is killed; ends with 3 and a line if such an allocation fails
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from cuda.bindings import driver as cuda

OK, OUT_OF_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
MIB = 1 << 20
BLOCK = 2 * MIB
CONTEXT = 1024 * MIB  # more than a context and what belongs to it
MOST = 1024 * MIB


def main(request: int, seed: int) -> int:
    chance = random.Random(seed)
    held: list[tuple[Any, int]] = []
    steps = (cuda.cuInit(0), cuda.cuDevicePrimaryCtxRetain(0))
    if any(step[0] != OK for step in steps):
        print(f"no context: {[step[0] for step in steps]}", flush=True)
        return 3
    assert cuda.cuCtxSetCurrent(steps[1][1])[0] == OK
    while True:
        if held and chance.random() < 0.4:
            pointer, _ = held.pop(chance.randrange(len(held)))
            assert cuda.cuMemFree(pointer)[0] == OK
        size = chance.randrange(1, MOST // BLOCK) * BLOCK
        had = sum(size for _, size in held)
        began = time.monotonic()
        error, pointer = cuda.cuMemAlloc(size)
        if error == OK:
            held.append((pointer, size))
        elif error != OUT_OF_MEMORY or had + size + CONTEXT <= request:
            took = time.monotonic() - began
            print(f"{error.name} for {size} bytes beside {had} of {request}, after {took:.1f} s", flush=True)
            return 3
        time.sleep(chance.uniform(0, 0.05))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
