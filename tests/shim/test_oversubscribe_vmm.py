"""Physical memory (cuMemCreate) of an oversubscribed share: on the host if allowed, otherwise refused."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from simulator.simhost import make_simhost
from tests.shim.box import CONTEXT_BYTES, GIB, LIBDIR, VERSION, Box
from tests.shim.inside import MIB, peak, run, usage
from tests.shim.test_graph_room import GRAPHS
from tests.shim.test_live import talk
from tests.support.host import BUILD

DEVICE, WHOLE = 1 * GIB, 2 * GIB
HELPERS = (
    GRAPHS
    + """
def props(handle_types=0, flags=0):
    "CUmemAllocationProp: pinned, on device 0; flags: compression, RDMA, usage (16 bits)."
    return (c_uint64 * 4)(1 | handle_types << 32, 1, 0, flags)

def create(size=512 * MIB, **words):
    handle = c_uint64()
    return cuda.cuMemCreate(byref(handle), c_size_t(size), props(**words), c_uint64(0)) or handle

def mapped(handle, size=512 * MIB):
    at = c_uint64()
    ok(cuda.cuMemAddressReserve(byref(at), c_size_t(size), c_size_t(0), c_uint64(0), c_uint64(0)))
    ok(cuda.cuMemMap(at, c_size_t(size), c_size_t(0), handle, c_uint64(0)))
    ok(cuda.cuMemSetAccess(at, c_size_t(size), (c_uint32 * 3)(1, 0, 3), c_size_t(1)))
    return at

def place(at):
    kind = c_uint()
    ok(cuda.cuPointerGetAttribute(byref(kind), 2, at))
    return {1: "host", 2: "device"}[kind.value]
"""
)


def oversubscribed(driver: Path | None = None, simhost: Path | None = None) -> Box:
    return Box([DEVICE], whole=[WHOLE], driver=driver, simhost=simhost)


@pytest.mark.parametrize("handle_types", [0, 1])
def test_memory_beyond_the_device_part_is_on_the_host(handle_types: int) -> None:
    """Allocations of 512 MiB within 724 MiB and 1 GiB: one is on the device and two are on the host.

    They are written and read, and report the location that the program requested. A mapping stays charged after its
    handle is released, and all memory is returned.
    """
    program = f"""
        start()
        handles = [create(handle_types={handle_types}) for _ in range(4)]
        print(handles.pop(), info()[0])
        addresses = [mapped(handle) for handle in handles]
        print(*map(place, addresses))
        for handle, at in zip(handles, addresses):
            ok(cuda.cuMemsetD8_v2(c_uint64(at.value + 510 * MIB), 0x5a, c_size_t(2 * MIB)))
            last = ctypes.create_string_buffer(2)
            ok(cuda.cuMemcpyDtoH_v2(last, c_uint64(at.value + 512 * MIB - 2), c_size_t(2)))
            asked = (c_uint64 * 4)()
            ok(cuda.cuMemGetAllocationPropertiesFromHandle(asked, handle))
            print(last.raw.decode(), *asked[1:3])
            if {handle_types}:
                fd = c_int()
                ok(cuda.cuMemExportToShareableHandle(byref(fd), handle, 1, c_uint64(0)))
                os.close(fd.value)
            ok(cuda.cuMemRelease(handle))
        print(info()[0])
        for at in addresses:
            ok(cuda.cuMemUnmap(at, c_size_t(512 * MIB)))
        print(info()[0])
    """
    left = WHOLE - CONTEXT_BYTES - 3 * 512 * MIB
    with oversubscribed() as box:
        words = run(box, program, helpers=HELPERS)
        read = ["ZZ", "1", "0"]  # location type and id in one word
        assert words[:5] == ["2", str(left), "device", "host", "host"]
        assert words[5:14] == read * 3
        assert words[14:] == [str(left), str(WHOLE - CONTEXT_BYTES)]
        assert peak(box) == CONTEXT_BYTES + 512 * MIB


def test_parts_are_counted_and_freed_after_death() -> None:
    """Memory of cuMemCreate is not divided: it is refused if it fits in neither part; other memory can use the rest."""
    program = """
        context = start()
        large, held = create(1400 * MIB), [create(600 * MIB), create(600 * MIB)]
        print(large, alloc(500 * MIB), info()[0] // MIB, create(64 * MIB), flush=True)
        sys.stdin.readline()
        os.kill(os.getpid(), 9)
    """
    with oversubscribed() as box:
        with talk(box, HELPERS + textwrap.dedent(program)) as following:
            left = (WHOLE - CONTEXT_BYTES) // MIB - 1700
            assert following() == ["2", "0", str(left), "2"]
            now = usage(box)
            assert (now.used_bytes(0) + now.host_bytes(0), now.refused) == (CONTEXT_BYTES + 1700 * MIB, (2,))
        assert run(box, "start()\nprint(info()[0])") == [str(WHOLE - CONTEXT_BYTES)]


def test_memory_that_must_be_on_the_device_is_refused() -> None:
    program = """
        start()
        ok(alloc(512 * MIB))
        before, shape = info()[0], (c_uint64 * 5)(16384, 8192, 0, 0x20 | 4 << 32, 0)
        for name, call in {
            "fabric": lambda: create(handle_types=8),
            "pci": lambda: create(flags=1 << 8),
            "sparse": lambda: create(flags=1 << 16),
            "array": lambda: cuda.cuArray3DCreate_v2(byref(c_uint64()), shape),
            "mipmap": lambda: cuda.cuMipmappedArrayCreate(byref(c_uint64()), shape, 2),
            "graph": lambda: launch(graph_of((0, 512 * MIB))),
        }.items():
            print(name, call(), before - info()[0])
    """
    with oversubscribed() as box:
        names = ("fabric", "pci", "sparse", "array", "mipmap", "graph")
        assert run(box, program, helpers=HELPERS) == [word for name in names for word in (name, "2", "0")]


OLDER = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <cuda.h>
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#ifdef NO_SUCH_PLACE
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    return prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? REAL(cuMemCreate)(handle, size, prop, flags)
                                                              : CUDA_ERROR_INVALID_VALUE;
}
#else
CUresult cuMemSetAccess(CUdeviceptr at, size_t size, const CUmemAccessDesc *access, size_t count) {
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop;
    REAL(cuMemRetainAllocationHandle)(&handle, (void *)at);
    REAL(cuMemGetAllocationPropertiesFromHandle)(&prop, handle);
    REAL(cuMemRelease)(handle);
    return prop.location.type == CU_MEM_LOCATION_TYPE_DEVICE ? REAL(cuMemSetAccess)(at, size, access, count)
                                                             : CUDA_ERROR_NOT_SUPPORTED;
}
#endif
"""


@pytest.mark.parametrize("lacks", ["NO_SUCH_PLACE", "NO_WAY_THERE"])
def test_driver_without_host_memory_support_refuses(lacks: str, tmp_path: Path) -> None:
    """The driver cannot create host memory, or cannot map it: nothing remains, neither memory nor charge."""
    simhost = make_simhost(tmp_path / "host", gpus=1, memory_bytes=16 * GIB)
    real = simhost / LIBDIR[1:] / f"libcuda.so.{VERSION}"
    (tmp_path / "older.c").write_text(OLDER)
    stub, shared = tmp_path / "stub.so", ["gcc", "-shared", "-fPIC", "-Wl,--no-as-needed"]
    subprocess.run([*shared, f"-Wl,-soname,{real}", "-o", stub, "-xc", "/dev/null"], check=True)  # linked like the shim
    flags = [f"-D{lacks}", "-isystem", BUILD / "include" / "cuda"]
    subprocess.run([*shared, *flags, "-o", tmp_path / "older.so", tmp_path / "older.c", stub, "-ldl"], check=True)
    program = """
        start()
        ok(alloc(512 * MIB))
        before = info()[0]
        print(create(), create(), before - info()[0], alloc(512 * MIB))
    """
    with oversubscribed(tmp_path / "older.so", simhost) as box:
        assert run(box, program, helpers=HELPERS) == ["2", "2", "0", "0"]
        assert peak(box) == CONTEXT_BYTES + 512 * MIB
