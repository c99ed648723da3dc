"""Allocate memory in each possible way until it is refused."""

from __future__ import annotations

from ctypes import byref, c_int, c_uint, c_uint64
from typing import Any

from tests.conformance import driver
from tests.conformance.driver import Driver, DriverError
from tests.hardware.tenant import listen, say

MIB = 1 << 20
STEPS = (256 * MIB, 32 * MIB, 2 * MIB)  # coarse steps first, single blocks last
ATTACH_GLOBAL = 1
LOCATION_DEVICE, LAST_PREFETCH_LOCATION = 1, 4  # CUmemLocationType, CUmem_range_attribute


def plain(cuda: Driver, size: int) -> None:
    cuda.alloc(size)


def asynchronous(cuda: Driver, size: int) -> None:
    cuda.out("cuMemAllocAsync", size, 0)
    cuda.synchronize()


def virtual(cuda: Driver, size: int) -> None:
    cuda.map(cuda.reserve(size), size, cuda.create(size))


def managed(cuda: Driver, size: int) -> None:
    cuda.out("cuMemAllocManaged", size, c_uint(ATTACH_GLOBAL))


WAYS = {"plain": plain, "async": asynchronous, "vmm": virtual, "managed": managed}


def fill(library: str, way: str, most_bytes: int) -> None:
    """Report the memory; on a line allocate until refused, report the bytes, and keep them.

    Allocates at most `most_bytes`.
    """
    cuda = Driver(library)
    cuda.context()
    say(total_bytes=cuda.total_bytes(), free_bytes=cuda.free_bytes())
    listen()
    code: Any = None
    got = 0
    for step in STEPS:
        while got + step <= most_bytes:
            try:
                WAYS[way](cuda, step)
            except DriverError as error:
                code = error.code
                break
            got += step
    say(got_bytes=got, code=code, left_bytes=cuda.free_bytes())
    listen()


def pool(library: str) -> None:
    """Report the growth of the default pool for requests of several sizes.

    Also reports the result of freeing plain memory with cuMemFreeAsync (None: success).
    """
    cuda = Driver(library)
    cuda.context()
    steps = {}
    for size in (1024, 3 * MIB, 33 * MIB, 65 * MIB):
        pool = cuda.pool()
        before = cuda.pool_attribute(pool, driver.RESERVED_CURRENT)
        address = cuda.alloc_from(pool, size)
        cuda.synchronize()
        steps[str(size)] = cuda.pool_attribute(pool, driver.RESERVED_CURRENT) - before
        cuda.ok("cuMemFreeAsync", address, 0)
        cuda.synchronize()
        cuda.ok("cuMemPoolDestroy", pool)
    address = cuda.alloc(MIB)
    code = cuda.code("cuMemFreeAsync", address, 0)
    if code:
        cuda.free(address)
    cuda.synchronize()
    say(grows_bytes=steps, free_async_of_plain_code=code)


def prefetch(library: str) -> None:
    """Bring one managed block to the device with cuMemPrefetchBatchAsync."""
    cuda = Driver(library)
    cuda.context()
    address = cuda.out("cuMemAllocManaged", 2 * MIB, c_uint(ATTACH_GLOBAL))
    one = [(c_uint64 * 1)(value) for value in (address, 2 * MIB, 0)]
    places = (driver.Location * 1)(driver.Location(LOCATION_DEVICE, 0))
    code = cuda.code("cuMemPrefetchBatchAsync", one[0], one[1], 1, places, one[2], 1, 0, 0)
    cuda.synchronize()
    where = c_int(-2)
    cuda.ok("cuMemRangeGetAttribute", byref(where), 4, c_int(LAST_PREFETCH_LOCATION), address, 2 * MIB)
    say(bytes=2 * MIB, code=code, last_location=where.value)
