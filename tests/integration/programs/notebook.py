"""A notebook: it fills GPU memory with a pattern, and checks the pattern each time that it works.

Events: ready (bytes allocated), worked (whether the pattern is right, and the seconds that the work took). It begins
and works at each line of `go`.

    notebook.py CHANNEL BYTES       CALL: the first call of each round, such as cuCtxSynchronize
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

CHUNK = 256 << 20
WORDS = 1024


def call(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


def main(channel: Path, size_bytes: int, first_call: str) -> None:
    with open(channel / "events", "w") as events, open(channel / "go") as go:

        def say(event: str, **values: Any) -> None:
            print(json.dumps({"event": event, **values}), file=events, flush=True)

        say("started")
        go.readline()
        began = time.monotonic()
        call(cuda.cuInit(0))
        call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(call(cuda.cuDeviceGet(0))))))
        pointers = [call(cuda.cuMemAlloc(CHUNK)) for _ in range(size_bytes // CHUNK)]
        pattern = os.getpid()
        for index, pointer in enumerate(pointers):
            call(cuda.cuMemsetD32(pointer, pattern + index, WORDS))
        say("ready", bytes=CHUNK * len(pointers), seconds=time.monotonic() - began)
        got = bytearray(4 * WORDS)
        while go.readline():
            began = time.monotonic()
            if first_call:
                call(getattr(cuda, first_call)())
            right = True
            for index, pointer in enumerate(pointers):
                call(cuda.cuMemcpyDtoH(got, pointer, len(got)))
                right &= bytes(got) == (pattern + index).to_bytes(4, "little") * WORDS
                pattern_at = pattern + index + 1
                call(cuda.cuMemsetD32(pointer, pattern_at, WORDS))
            pattern += 1
            call(cuda.cuCtxSynchronize())
            say("worked", right=right, seconds=time.monotonic() - began)


main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
