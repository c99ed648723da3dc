"""Allocate and free random sizes in several processes of a container, as fast as possible, at the memory limit.

stress.py PROCESSES ATTEMPTS      attempts are per process; prints one line of JSON: granted, refused
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

from cuda.bindings import driver as cuda

OK, OUT_OF_MEMORY = cuda.CUresult.CUDA_SUCCESS, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY
MAX_BYTES = 64 << 20
LIVE = 64  # maximum number of allocations that one process holds


def work(seed: int, attempts: int, ready: int, go: int) -> tuple[int, int]:
    """Allocate and free; return (granted, refused).

    Writes to `ready`, then waits until the other end of `go` is closed.
    """
    chance = random.Random(seed)
    granted = refused = 0
    live: list[Any] = []
    assert cuda.cuInit(0)[0] == OK
    error, context = cuda.cuDevicePrimaryCtxRetain(0)
    assert error == OK, error
    assert cuda.cuCtxSetCurrent(context)[0] == OK
    os.write(ready, b".")
    os.close(ready)
    os.read(go, 1)
    for _ in range(attempts):
        if len(live) >= LIVE or (live and chance.random() < 0.4):
            assert cuda.cuMemFree(live.pop(chance.randrange(len(live))))[0] == OK
            continue
        error, pointer = cuda.cuMemAlloc(int(MAX_BYTES ** chance.uniform(0.5, 1)))
        if error == OK:
            live.append(pointer)
            granted += 1
        else:
            assert error == OUT_OF_MEMORY, error
            refused += 1
    return granted, refused


def main(processes: int, attempts: int) -> int:
    readers = []
    (ready, is_ready), (go, goes) = os.pipe(), os.pipe()
    for seed in range(processes):
        reader, writer = os.pipe()
        if os.fork() == 0:
            os.close(goes)
            os.write(writer, json.dumps(work(seed, attempts, is_ready, go)).encode())
            os._exit(0)
        os.close(writer)
        readers.append(reader)
    os.close(is_ready)
    for _ in range(processes):  # all contexts must be created before a process allocates the remaining memory
        os.read(ready, 1)
    os.close(goes)
    answers = [os.read(reader, 4096) for reader in readers]
    if not all(answers):
        return 1  # a process ended early and printed a traceback
    counts = [json.loads(answer) for answer in answers]
    print(json.dumps({"granted": sum(c[0] for c in counts), "refused": sum(c[1] for c in counts)}))
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
