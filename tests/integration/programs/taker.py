"""In a container: print the first GPU's memory and how much can be allocated, in one line of JSON. Only ctypes, to
start fast.

taker.py [hold] [bytes of one allocation]     none: until refused; hold: until standard input ends

{"cuInit", "multiprocessors", "cuda_total_bytes", "nvml_total_bytes", "free_bytes", "got_bytes", "refusal"}
"""

from __future__ import annotations

import ctypes
import json
import sys

MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
FIRST_BYTES, LAST_BYTES = 256 << 20, 2 << 20


class Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def nvml_total_bytes() -> int:
    nvml, device, memory = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_void_p(), Memory()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device))
    nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory))
    return int(memory.total)


def begin(cuda: ctypes.CDLL) -> tuple[int, int]:
    """Return (multiprocessors of the first device, CUresult of a context on it)."""
    count, device, context = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    cuda.cuDeviceGetAttribute(ctypes.byref(count), MULTIPROCESSORS, device)
    error: int = cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device)
    return count.value, error


def taken(cuda: ctypes.CDLL, size: int) -> int:
    """Return the CUresult of an allocation."""
    error: int = cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(size))
    return error


def sizes_of(words: list[str]) -> list[int]:
    return [int(word) for word in words if word.isdigit()]


def end(said: object, words: list[str]) -> int:
    print(json.dumps(said), flush=True)
    if "hold" in words:
        sys.stdin.read()
    return 0


def main(words: list[str]) -> int:
    cuda, said = ctypes.CDLL("libcuda.so.1"), {"nvml_total_bytes": nvml_total_bytes()}
    said["cuInit"] = cuda.cuInit(0)
    said["multiprocessors"], said["refusal"] = begin(cuda)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
    said.update(cuda_total_bytes=total.value, free_bytes=free.value, got_bytes=0)
    sizes = sizes_of(words)
    size = FIRST_BYTES
    while sizes or (size >= LAST_BYTES and not sizes_of(words)):
        asked = sizes.pop() if sizes else size
        error = taken(cuda, asked)
        if error == 0:
            said["got_bytes"] += asked
        else:
            said["refusal"], size = error, size // 2
    return end(said, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
