"""Pools grow by more than the requested size; the limit still holds at every moment."""

from __future__ import annotations

from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, peak, run


def test_pool_never_grows_over_the_limit() -> None:
    limit = CONTEXT_BYTES + 90 * MIB
    with Box([limit]) as box:
        words = run(box, "start(); print(*[alloc_async(20 * MIB) for _ in range(8)])")
        assert words[:2] == ["0", "0"] and words[-1] == "2"
        assert peak(box) <= limit


def test_limit_holds_for_pools_of_threads_and_processes() -> None:
    limit = 1 * GIB
    program = """
        start()
        def work(seed):
            ok(cuda.cuCtxSetCurrent(context))
            mine = []
            for i in range(400):
                size = (1, 3 * MIB, 40 * MIB, 100000)[(i + seed) % 4]
                alloc_async(size, mine)
                if len(mine) > 9 or i % 50 == 49:
                    ok(cuda.cuMemFreeAsync(mine.pop(0), None)) if mine else None
        context = c_void_p()
        ok(cuda.cuCtxGetCurrent(byref(context)))
        if len(sys.argv) == 1:
            program = open("/proc/self/cmdline").read().split(chr(0))[2]
            other = subprocess.Popen([sys.executable, "-c", program, "x"], stdout=subprocess.PIPE)
            other.stdout.readline()  # it has its context
        else:
            print("ready", flush=True)
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        print(other.wait()) if len(sys.argv) == 1 else None
    """
    with Box([limit]) as box:
        assert run(box, program) == ["0"]
        assert peak(box) <= limit


def test_unused_pool_memory_serves_allocations_at_a_full_limit() -> None:
    limit = 1 * GIB
    program = """
        start()
        big, kept = [], []
        ok(alloc_async(100 * MIB, big))  # with what is kept, in one piece that cannot be trimmed
        ok(alloc_async(1 * MIB, kept))
        pool = c_void_p()
        ok(cuda.cuDeviceGetDefaultMemPool(byref(pool), 0))
        ok(cuda.cuMemPoolSetAttribute(pool, 4, byref(c_uint64(1 << 60))))
        ok(cuda.cuMemFreeAsync(big[0], None))
        filled = fill()
        print(info()[0] < 2 * MIB, filled >= 500 * MIB)
        print(*[alloc_async(size) for size in (1, 4096, MIB, 10 * MIB)])
        print(alloc_async(200 * MIB))
    """
    with Box([limit]) as box:
        assert run(box, program) == ["True", "True", "0", "0", "0", "0", "2"]
        assert peak(box) <= limit


def test_pool_beyond_the_table_is_refused() -> None:
    limit = 1 * GIB
    program = """
        start()
        props = (c_uint32 * 22)(1, 0, 1, 0)  # pinned, no handles, on device 0
        pools, results = [], []
        for _ in range(1100):
            pool = c_void_p()
            results.append(cuda.cuMemPoolCreate(byref(pool), props))
            pools.append(pool)
        print(results.count(0) <= 1024, set(results[1024:]) == {2})
        print(alloc_async(2 * GIB, pool=pools[0]), *{alloc_async(GIB, pool=p) == 0 for p in pools[1024:] if p})
        for pool in pools[:1024]:
            ok(cuda.cuMemPoolDestroy(pool)) if pool else None
        print(cuda.cuMemPoolCreate(byref(pool), props))
    """
    with Box([limit]) as box:
        assert run(box, program) == ["True", "True", "2", "0"]
        assert peak(box) <= limit


def test_pools_on_the_host_are_not_charged() -> None:
    program = """
        start()
        props = (c_uint32 * 22)(1, 0, 3, 0)
        pool, before = c_void_p(), info()[0]
        ok(cuda.cuMemPoolCreate(byref(pool), props))
        print(alloc_async(2 * GIB, pool=pool), info()[0] == before)
        ok(cuda.cuMemPoolDestroy(pool))
        print(alloc_async(4096, pool=pool) != 0)
    """
    with Box([1 * GIB]) as box:
        assert run(box, program) == ["0", "True", "True"]


def test_allocations_from_a_default_pool_are_charged() -> None:
    """Nothing else was allocated before, so no other wrapper has registered the pool."""
    program = """
        def allocate(getter):
            pool = c_void_p()
            start()
            ok(cuda[getter](byref(pool), 0))
            print(getter, *[alloc_async(GIB, pool=pool) for _ in range(6)])
        for getter in ("cuDeviceGetDefaultMemPool", "cuDeviceGetMemPool"):
            apart(allocate, getter)
    """
    with Box([4 * GIB]) as box:
        results = ["0", "0", "0", "2", "2", "2"]  # the context uses part of the limit
        assert run(box, program) == ["cuDeviceGetDefaultMemPool", *results, "cuDeviceGetMemPool", *results]
