"""Allocate GPU memory with the real driver, bypassing the shim: a library loaded by its path is not the one mounted in
its place. Print "held" and keep the memory."""

from __future__ import annotations

import ctypes
import signal
import sys

REAL_CUDA, BYTES = sys.argv[1], int(sys.argv[2])


def call(result: int) -> None:
    if result:
        raise SystemExit(f"error {result} of the driver")


cuda = ctypes.CDLL(REAL_CUDA)
context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
call(cuda.cuInit(0))
call(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
call(cuda.cuCtxSetCurrent(context))
call(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(BYTES)))
print("held", flush=True)
while True:
    signal.pause()
