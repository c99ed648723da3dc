"""The driver's default pools are charged, also when a program gets one only from the driver and never creates one."""

from __future__ import annotations

import pytest

from tests.shim.box import GIB, Box

PROGRAM = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
def ok(result): assert result == 0, result
ok(cuda.cuInit(0))
context, pool, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
ok(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
ok(cuda.cuCtxSetCurrent(context))
ok(cuda[sys.argv[1]](ctypes.byref(pool), 0))
results = []
for _ in range(6):
    results.append(cuda.cuMemAllocFromPoolAsync(ctypes.byref(address), ctypes.c_size_t(1 << 30), pool, None))
print(*results)
"""
OUT_OF_MEMORY = 2


@pytest.mark.parametrize("function", ["cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool"])
def test_allocations_from_a_default_pool_are_charged(function: str) -> None:
    """Nothing else was allocated before, so no other wrapper has registered the pool."""
    with Box([4 * GIB]) as box:
        done = box.run(["python3", "-c", PROGRAM, function])
    assert done.returncode == 0, done.stderr
    results = [int(word) for word in done.stdout.split()]
    assert results == [0, 0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY, OUT_OF_MEMORY]  # the context uses part of the limit
