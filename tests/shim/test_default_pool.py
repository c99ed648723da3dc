"""The pools that the driver makes itself are charged, also when nobody but their name leads to them."""

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
def test_allocating_from_the_drivers_own_pool_by_name(function: str) -> None:
    """Before anything else was allocated, so that no other wrapper has met the pool."""
    with Box([4 * GIB]) as box:
        done = box.run(["python3", "-c", PROGRAM, function])
    assert done.returncode == 0, done.stderr
    results = [int(word) for word in done.stdout.split()]
    assert results == [0, 0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY, OUT_OF_MEMORY]  # the context takes a part, too
