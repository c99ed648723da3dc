"""Memory that cannot be charged is released again, and unknown functions are refused."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, compile_c, peak, run
from tests.shim.test_live import talk

LIMIT_OFFSET = 64 + 80  # gs_limits.device[0].memory_limit_bytes


@pytest.fixture(scope="module")
def odd_driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_c(tmp_path_factory.mktemp("odd"), "odd_driver.c", "-shared", "-fPIC", "-Wl,-Bsymbolic")


def test_memory_allocated_without_a_context_is_released(odd_driver: Path) -> None:
    """And an allocation is refused until the devices are known: the driver takes a second for that."""
    program = """
        thread = threading.Thread(target=lambda: cuda.cuInit(0))
        thread.start()
        time.sleep(0.5)
        print("early", alloc(4096))
        thread.join()
        out = c_uint64()
        print("plain", cuda.cuMemAlloc_v2(byref(out), c_size_t(4096)), cuda.oddLive())
        print("async", cuda.cuMemAllocAsync(byref(out), c_size_t(4096), None), cuda.oddLive())
        print("array", cuda.cuArrayCreate_v2(byref(out), (c_uint64 * 4)(64, 64, 0x20, 1)), cuda.oddLive())
        image = b"SIMMOD globals=4096 code=4096\\n"
        print("module", cuda.cuModuleLoadData(byref(out), image), cuda.oddLive())
    """
    with Box([GIB], driver=odd_driver) as box:
        rows = [["early", "3"], *([family, "2", "0"] for family in ("plain", "async", "array", "module"))]
        assert run(box, program) == [word for row in rows for word in row]


def test_limit_below_the_usage_refuses_allocations() -> None:
    program = """
        start()
        kept = []
        ok(alloc(800 * MIB, kept))
        ok(cuda.cuCtxSetLimit(2, c_size_t(64 * MIB)))
        say("ready")
        say(*info(), alloc(1), alloc_async(1), alloc(2 * MIB), cuda.cuCtxSetLimit(2, c_size_t(8 * MIB)))
        ok(cuda.cuMemFree_v2(kept[0]))
        say(info()[0] >= 180 * MIB, alloc(100 * MIB), alloc(200 * MIB))
    """
    low = CONTEXT_BYTES + 200 * MIB
    with Box([2 * GIB]) as box, talk(box, program) as following:
        assert following() == ["ready"]
        with open(box.limits, "r+b") as limits:
            limits.seek(LIMIT_OFFSET)
            limits.write(struct.pack("<Q", low))
        assert following() == ["0", str(low), "2", "2", "2", "0"]
        assert following() == ["True", "0", "2"]


def test_device_that_was_not_granted_is_refused() -> None:
    program = """
        ok(cuda.cuInit(0))
        context = c_void_p()
        print(cuda.cuDevicePrimaryCtxRetain(byref(context), 1), cuda.cuCtxCreate_v2(byref(context), 0, 1))
        start(0)
        print(*[alloc(size) for size in (2**62, 2**64 - 1, 2**63, 2**40)])
    """
    with Box([GIB], gpus=2) as box:
        assert run(box, program) == ["2", "2"] + ["2"] * 4
        assert peak(box, 0) <= GIB
