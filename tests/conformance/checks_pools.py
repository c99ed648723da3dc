"""Checks of stream-ordered pools and of memory in graphs."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint64

from tests.conformance import driver as d
from tests.conformance.driver import BLOCK, MIB, Driver

GROWTH = 32 * MIB


def pool_reserves_more_than_it_hands_out(cuda: Driver) -> None:
    cuda.context()
    pool = cuda.pool()
    before = cuda.free_bytes()
    cuda.alloc_from(pool, 1000)
    reserved, used = cuda.pool_attribute(pool, d.RESERVED_CURRENT), cuda.pool_attribute(pool, d.USED_CURRENT)
    assert reserved == GROWTH and 1000 <= used < BLOCK
    assert before - cuda.free_bytes() == reserved


def freed_pool_memory_stays_until_sync(cuda: Driver) -> None:
    cuda.context()
    pool, stream = cuda.pool(), cuda.stream()
    address = cuda.alloc_from(pool, 8 * MIB, stream)
    cuda.ok("cuMemFreeAsync", address, stream)
    assert cuda.pool_attribute(pool, d.USED_CURRENT) == 0
    assert cuda.pool_attribute(pool, d.RESERVED_CURRENT) == GROWTH
    cuda.ok("cuStreamSynchronize", stream)
    assert cuda.pool_attribute(pool, d.RESERVED_CURRENT) == 0


def release_threshold_keeps_memory(cuda: Driver) -> None:
    cuda.context()
    pool = cuda.pool()
    cuda.ok("cuMemPoolSetAttribute", pool, c_int(d.THRESHOLD), byref(c_uint64(1 << 40)))
    cuda.ok("cuMemFreeAsync", cuda.alloc_from(pool, 8 * MIB), 0)
    cuda.synchronize()
    assert cuda.pool_attribute(pool, d.RESERVED_CURRENT) == GROWTH
    cuda.ok("cuMemPoolTrimTo", pool, 0)
    assert cuda.pool_attribute(pool, d.RESERVED_CURRENT) == 0


def pool_memory_can_be_freed_plainly(cuda: Driver) -> None:
    cuda.context()
    pool = cuda.pool()
    address = cuda.alloc_from(pool, MIB)
    cuda.synchronize()
    cuda.free(address)
    assert cuda.pool_attribute(pool, d.USED_CURRENT) == 0


def plain_memory_can_be_freed_in_a_stream(cuda: Driver) -> None:
    cuda.context()
    function, stream = cuda.function(cuda.load()), cuda.stream(d.NON_BLOCKING)
    cuda.launch(function, stream)
    cuda.synchronize()
    before = cuda.free_bytes()
    addresses = [cuda.alloc(64 * MIB), cuda.alloc(1000)]
    cuda.launch(function, stream)
    for address in addresses:
        cuda.ok("cuMemFreeAsync", address, stream)
    cuda.ok("cuStreamSynchronize", stream)
    assert cuda.free_bytes() == before
    assert cuda.code("cuMemFree_v2", addresses[0]) == d.INVALID_VALUE


def default_pool_serves_alloc_async(cuda: Driver) -> None:
    cuda.context()
    pool = cuda.out("cuDeviceGetDefaultMemPool", c_int(0))
    before = cuda.pool_attribute(pool, d.USED_CURRENT)
    cuda.out("cuMemAllocAsync", 5 * MIB, 0)
    assert cuda.pool_attribute(pool, d.USED_CURRENT) - before == 5 * MIB
    assert cuda.code("cuMemPoolDestroy", pool) == d.INVALID_VALUE


def destroyed_pool_gives_memory_back(cuda: Driver) -> None:
    cuda.context()
    before, pool = cuda.free_bytes(), cuda.pool()
    address = cuda.alloc_from(pool, 8 * MIB)
    cuda.ok("cuMemPoolDestroy", pool)
    assert cuda.free_bytes() < before
    cuda.ok("cuMemFreeAsync", address, 0)
    cuda.synchronize()
    assert cuda.free_bytes() == before


def captured_allocation(cuda: Driver) -> int:
    """Return an executable graph that allocates 8 MiB, fills and frees them."""
    stream, graph = cuda.stream(d.NON_BLOCKING), c_uint64()
    cuda.ok("cuStreamBeginCapture_v2", stream, c_int(0))
    address = cuda.out("cuMemAllocAsync", 8 * MIB, stream)
    cuda.ok("cuMemsetD8Async", address, ctypes.c_ubyte(1), MIB, stream)
    cuda.ok("cuMemFreeAsync", address, stream)
    cuda.ok("cuStreamEndCapture", stream, byref(graph))
    return cuda.out("cuGraphInstantiateWithFlags", graph.value, 0)


def graph_memory_comes_with_the_launch(cuda: Driver) -> None:
    cuda.context()
    graph = captured_allocation(cuda)
    before = cuda.free_bytes()  # the stream and the executable graph may have taken memory
    assert cuda.graph_attribute(d.GRAPH_RESERVED) == 0
    cuda.ok("cuGraphLaunch", graph, 0)
    cuda.synchronize()
    assert cuda.graph_attribute(d.GRAPH_RESERVED) >= 8 * MIB
    assert before - cuda.free_bytes() == cuda.graph_attribute(d.GRAPH_RESERVED)


def graph_memory_leaves_with_the_trim(cuda: Driver) -> None:
    cuda.context()
    graph = captured_allocation(cuda)
    before = cuda.free_bytes()
    cuda.ok("cuGraphLaunch", graph, 0)
    cuda.synchronize()
    assert cuda.graph_attribute(d.GRAPH_USED) == 0
    cuda.ok("cuGraphExecDestroy", graph)
    cuda.ok("cuDeviceGraphMemTrim", c_int(0))
    assert cuda.graph_attribute(d.GRAPH_RESERVED) == 0 and cuda.free_bytes() >= before
