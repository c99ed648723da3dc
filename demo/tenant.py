"""The program in each container of the demo: an ordinary CUDA program without any code for gpushare.

It queries the GPU through NVML (nvidia-ml-py) and the driver API (cuda-bindings), allocates memory until an allocation
fails, and frees it when the demo tells it to. It communicates with the demo through two FIFOs:

    events   one line of JSON after each step: seen, full, freed
    go       the demo writes a line to start the next step
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pynvml
from cuda.bindings import driver as cuda

MIB = 1 << 20
FIRST_BYTES = 256 * MIB  # the size of the first requests; halved at each refusal
LAST_BYTES = 2 * MIB  # the driver's allocation granularity


def call(result: tuple[Any, ...]) -> Any:
    """The values that a driver call returned after its error code. Raises RuntimeError on an error."""
    error, *values = result
    if error != cuda.CUresult.CUDA_SUCCESS:
        raise RuntimeError(error.name)
    return values[0] if len(values) == 1 else values


def seen() -> dict[str, Any]:
    """The GPU's name and sizes, as reported by NVML and the driver API."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    free_bytes, total_bytes = call(cuda.cuMemGetInfo())
    return {
        "gpus": pynvml.nvmlDeviceGetCount(),
        "name": pynvml.nvmlDeviceGetName(handle),
        "nvml_total_bytes": memory.total,
        "nvml_free_bytes": memory.free,
        "cuda_total_bytes": total_bytes,
        "cuda_free_bytes": free_bytes,
    }


def allocate_until_refused() -> tuple[list[Any], int, str]:
    """Allocate memory until even LAST_BYTES are refused. Returns (pointers, bytes, name of the last error)."""
    pointers, got_bytes, size_bytes, refusal = [], 0, FIRST_BYTES, ""
    while size_bytes >= LAST_BYTES:
        error, pointer = cuda.cuMemAlloc(size_bytes)
        if error == cuda.CUresult.CUDA_SUCCESS:
            pointers.append(pointer)
            got_bytes += size_bytes
        elif error == cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            refusal = error.name
            size_bytes //= 2
        else:
            raise RuntimeError(error.name)
    return pointers, got_bytes, refusal


def main(directory: Path) -> int:
    with open(directory / "events", "w") as events, open(directory / "go") as go:

        def tell(**event: Any) -> None:
            print(json.dumps(event), file=events, flush=True)

        call(cuda.cuInit(0))
        device = call(cuda.cuDeviceGet(0))
        call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(device))))
        tell(event="seen", **seen())
        go.readline()
        pointers, got_bytes, refusal = allocate_until_refused()
        free_bytes, _ = call(cuda.cuMemGetInfo())
        tell(event="full", got_bytes=got_bytes, refusal=refusal, cuda_free_bytes=free_bytes)
        go.readline()
        for pointer in pointers:
            call(cuda.cuMemFree(pointer))
        call(cuda.cuDevicePrimaryCtxRelease(device))
        tell(event="freed")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
