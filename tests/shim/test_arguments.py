"""Invalid, unusual and huge arguments return a valid CUDA code, crash nothing and charge nothing.

All memory queries agree.
"""

from __future__ import annotations

import pytest

from simulator import models
from tests.shim.box import CONTEXT_BYTES, GIB, Box
from tests.shim.inside import MIB, peak, run
from tests.shim.launches import HELPERS

# Every code that a caller may get here; anything else (such as -1) is not a CUDA code
CODES = {0, 1, 2, 3, 100, 101, 201, 400, 801}

ALLOCATORS = """
start()
pitch, pool = c_uint64(), c_void_p()
location = (c_uint32 * 16)(1, 0, 1, 0)
ok(cuda.cuDeviceGetDefaultMemPool(byref(pool), 0))
FAMILIES = {
    "plain": lambda out, size: cuda.cuMemAlloc_v2(out, c_size_t(size)),
    "pitch": lambda out, size: cuda.cuMemAllocPitch_v2(out, byref(pitch), c_size_t(size), c_size_t(size), c_uint(4)),
    "managed": lambda out, size: cuda.cuMemAllocManaged(out, c_size_t(size), c_uint(1)),
    "async": lambda out, size: cuda.cuMemAllocAsync(out, c_size_t(size), None),
    "pool": lambda out, size: cuda.cuMemAllocFromPoolAsync(out, c_size_t(size), pool, None),
    "vmm": lambda out, size: cuda.cuMemCreate(out, c_size_t(size), location, c_uint64(0)),
    "array": lambda out, size: cuda.cuArray3DCreate_v2(out, (c_uint64 * 5)(size, size, size, 0x20 | 4 << 32, 0)),
}
before = info()
"""


@pytest.mark.parametrize(
    ("sizes", "out"),
    [
        ((0, 2**40, 2**62, 2**63, 2**63 + 1, 2**64 - 1, 2**64 - 2**21 + 1), "byref(c_uint64())"),
        ((4096,), "None"),
    ],
    ids=["sizes", "null"],
)
def test_impossible_arguments_of_allocators_are_refused(sizes: tuple[int, ...], out: str) -> None:
    """Sizes that no device has, and NULL for the result with a size that would fit."""
    program = f"""
        for name, call in FAMILIES.items():
            for size in {sizes}:
                print(name, size, call({out}, size), before[0] - info()[0], flush=True)
    """
    with Box([GIB]) as box:
        words = run(box, program, helpers=ALLOCATORS)
        rows = list(zip(*[iter(words)] * 4))
        assert len(rows) == 7 * len(sizes)
        assert [row for row in rows if int(row[2]) not in CODES - {0} or row[3] != "0"] == []
        assert peak(box) == CONTEXT_BYTES


def test_null_pointers_are_refused() -> None:
    program = """
        start()
        value = c_size_t()
        print(cuda.cuMemGetInfo_v2(None, byref(value)), cuda.cuMemGetInfo_v2(byref(value), None),
              cuda.cuMemGetInfo_v2(None, None), cuda.cuDeviceTotalMem_v2(None, 0),
              cuda.cuDevicePrimaryCtxRetain(None, 0), cuda.cuCtxCreate_v2(None, 0, 0),
              cuda.cuMemPoolCreate(None, None), cuda.cuModuleLoadData(None, None),
              cuda.cuArrayCreate_v2(None, None), cuda.cuMemCreate(None, c_size_t(4096), None, c_uint64(0)),
              cuda.cuGetProcAddress(None, None, 0, c_uint64(0)))
    """
    with Box([GIB]) as box:
        codes = run(box, program)
        assert len(codes) == 11 and all(int(code) in CODES for code in codes)


def test_unknown_ordinal_is_refused_by_the_driver() -> None:
    """Not as a lack of memory, although an unknown device has no limit."""
    program = """
        start()
        location = lambda ordinal: (ctypes.c_int32 * 16)(1, 0, 1, ordinal)
        print(*[cuda.cuMemCreate(byref(c_uint64()), c_size_t(2 * MIB), location(n), c_uint64(0)) for n in (-1, 77)])
    """
    with Box([GIB]) as box:
        assert run(box, program) == ["101", "101"]


def test_free_of_unknown_addresses_is_refused() -> None:
    program = """
        start()
        kept, before = [], info()
        ok(alloc(64 * MIB, kept)), ok(alloc(100, kept))
        full = info()
        print(*[cuda.cuMemFree_v2(c_uint64(wrong)) for wrong in (1, 2**63, 2**64 - 1, kept[0].value + 4096)])
        print(cuda.cuMemFreeAsync(c_uint64(12345), None), cuda.cuMemRelease(c_uint64(77)),
              cuda.cuMemUnmap(c_uint64(1 << 30), c_size_t(2 * MIB)))
        assert info() == full
        for address in kept:
            ok(cuda.cuMemFree_v2(address))
        print(*[cuda.cuMemFree_v2(address) for address in kept])
        assert info() == before, (info(), before)
    """
    with Box([GIB]) as box:
        codes = [int(word) for word in run(box, program)]
        assert codes[:4] == [1] * 4 and codes[7:] == [1] * 2
        assert all(code in CODES - {0} for code in codes)


def test_limit_below_one_context_refuses_the_context() -> None:
    program = """
        context = c_void_p()
        ok(cuda.cuInit(0))
        total = c_size_t()
        print(cuda.cuDevicePrimaryCtxRetain(byref(context), 0), cuda.cuCtxCreate_v2(byref(context), 0, 0), alloc(1))
        ok(cuda.cuDeviceTotalMem_v2(byref(total), 0))
        print(total.value)
    """
    with Box([CONTEXT_BYTES - MIB]) as box:
        assert run(box, program) == ["2", "2", "201", str(CONTEXT_BYTES - MIB)]
        # nothing was ever allocated: the device has no group for it
        with pytest.raises(ValueError, match="max"):
            peak(box)


RESERVED = models.MODELS[models.DEFAULT].reserved_bytes


@pytest.mark.parametrize("limit", [GIB, 16 * GIB, None, 300 * MIB + 1])
def test_all_memory_queries_agree(limit: int | None) -> None:
    """The driver API, NVML v1 and the memory that can be allocated agree at every step.

    Without a limit NVML's total is the device's, which includes the reserved memory.
    """
    program = """
        start()
        kept, limit, reserved = [], int(sys.argv[1]), int(sys.argv[2])
        def agree():
            free, total = info()
            total_mem = c_size_t()
            ok(cuda.cuDeviceTotalMem_v2(byref(total_mem), 0))
            assert total == total_mem.value == limit, (total, total_mem.value, limit)
            assert nvml_memory() == (total + reserved, free, total - free), (nvml_memory(), free, total)
            return free
        last = agree()
        for size in (1, 1, 100, 3 * MIB, 64 * MIB, 1 << 29, 1 << 34):
            fits = alloc(size, kept) == SUCCESS
            free = agree()
            assert free < last if fits and size > 100 else free <= last
            last = free
        fill()
        assert agree() < 2 * MIB
        print(len(kept))
    """
    with Box([limit]) as box:
        (kept,) = run(box, program, str(limit or 16 * GIB), str(0 if limit else RESERVED), helpers=HELPERS)
        assert int(kept) > 0 or limit == 300 * MIB + 1
        assert peak(box) <= (limit or 16 * GIB)
