"""Checks of memory: allocation, release, counters. Each check gets an unused Driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64

from gpushare.gpu import contextprobe, contexts
from gpushare.gpu.nvml import memory_of

from tests.conformance import driver as d
from tests.conformance.driver import BLOCK, MIB, Driver

ALIGNMENT = 256


def alloc_returns_aligned_addresses(cuda: Driver) -> None:
    cuda.context()
    sizes = (1, 255, 4096, MIB, 3 * MIB)
    assert all(cuda.alloc(size) % ALIGNMENT == 0 for size in sizes)


def large_allocation_takes_whole_blocks(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    address = cuda.alloc(BLOCK + 1)
    assert address % BLOCK == 0 and before - cuda.free_bytes() == 2 * BLOCK
    cuda.free(address)
    assert cuda.free_bytes() == before


def small_allocations_share_a_block(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    addresses = [cuda.alloc(1000) for _ in range(50)]
    assert before - cuda.free_bytes() == BLOCK and len({a // BLOCK for a in addresses}) == 1
    for address in addresses[:-1]:
        cuda.free(address)
    assert before - cuda.free_bytes() == BLOCK
    cuda.free(addresses[-1])
    assert cuda.free_bytes() == before


def mebibyte_owns_its_block(cuda: Driver) -> None:
    cuda.context()
    small, mebibyte = cuda.alloc(1000), cuda.alloc(MIB)
    assert mebibyte % BLOCK == 0 and small // BLOCK != mebibyte // BLOCK


def content_is_kept(cuda: Driver) -> None:
    cuda.context()
    data = bytes(range(256)) * 64
    first, second = cuda.alloc(len(data)), cuda.alloc(4 * MIB)
    cuda.write(first, data)
    cuda.ok("cuMemcpyDtoD_v2", second + 12345, first, len(data))
    cuda.ok("cuMemsetD8_v2", second + 12345, c_uint(7), 100)
    assert cuda.read(second + 12345, len(data)) == b"\7" * 100 + data[100:]


def zero_size_is_invalid(cuda: Driver) -> None:
    cuda.context()
    assert d.error_of(cuda.alloc, 0) == d.INVALID_VALUE
    assert d.error_of(cuda.out, "cuMemAllocManaged", 0, c_uint(1)) == d.INVALID_VALUE


def null_outputs_are_invalid(cuda: Driver) -> None:
    cuda.context()
    assert cuda.code("cuMemAlloc_v2", None, 100) == d.INVALID_VALUE
    assert cuda.code("cuMemAllocPitch_v2", None, None, 100, 100, c_uint(4)) == d.INVALID_VALUE
    assert cuda.code("cuMemAllocManaged", None, 100, c_uint(1)) == d.INVALID_VALUE


def free_of_null_succeeds(cuda: Driver) -> None:
    cuda.context()
    cuda.free(0)


def free_of_unknown_is_invalid(cuda: Driver) -> None:
    cuda.context()
    address = cuda.alloc(MIB)
    assert cuda.code("cuMemFree_v2", address + 4096) == d.INVALID_VALUE
    assert cuda.code("cuMemFree_v2", 0xDEADBEEF000) == d.INVALID_VALUE


def double_free_is_invalid(cuda: Driver) -> None:
    cuda.context()
    for size in (1000, 4 * MIB):
        address = cuda.alloc(size)
        cuda.free(address)
        assert cuda.code("cuMemFree_v2", address) == d.INVALID_VALUE


def more_than_the_device_is_out_of_memory(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    for size in (cuda.total_bytes() + 1, 1 << 63, (1 << 64) - 1):
        assert d.error_of(cuda.alloc, size) == d.OUT_OF_MEMORY
    assert cuda.free_bytes() == before


def device_total_is_context_total(cuda: Driver) -> None:
    cuda.context()
    assert cuda.out("cuDeviceTotalMem_v2", c_int(0)) == cuda.total_bytes()


def pitch_is_a_multiple_of_512(cuda: Driver) -> None:
    cuda.context()
    address, pitch = c_uint64(), c_size_t()
    cuda.ok("cuMemAllocPitch_v2", byref(address), byref(pitch), 1000, 3000, c_uint(4))
    assert pitch.value == 1024


def address_range_of_interior_pointer(cuda: Driver) -> None:
    cuda.context()
    base, size, address = c_uint64(), c_size_t(), cuda.alloc(3 * MIB)
    cuda.ok("cuMemGetAddressRange_v2", byref(base), byref(size), address + 12345)
    assert (base.value, size.value) == (address, 3 * MIB)


def managed_memory_is_the_hosts_too(cuda: Driver) -> None:
    cuda.context()
    address = cuda.out("cuMemAllocManaged", 4096, c_uint(1))
    ctypes.memset(address, 9, 4096)
    assert cuda.read(address, 4096) == b"\11" * 4096


def managed_memory_comes_and_goes(cuda: Driver) -> None:
    """Managed memory is on the host until it is used; a prefetch moves it, even if it prefers the host."""
    cuda.context()
    before, host = cuda.free_bytes(), c_int(-1)
    address = cuda.out("cuMemAllocManaged", 64 * MIB, c_uint(1))
    assert before - cuda.free_bytes() < 8 * MIB
    for advice, device in ((3, host), (5, c_int(0))):  # advice: preferred location, accessed by
        cuda.ok("cuMemAdvise", c_uint64(address), c_size_t(64 * MIB), c_int(advice), device)
    for device, least, most in ((c_int(0), 60 * MIB, 80 * MIB), (host, 0, 8 * MIB)):
        cuda.ok("cuMemPrefetchAsync", c_uint64(address), c_size_t(64 * MIB), device, None)
        cuda.ok("cuCtxSynchronize")
        assert least <= before - cuda.free_bytes() <= most
    cuda.free(address)


def pinned_memory_takes_nothing(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    pointer = cuda.out("cuMemHostAlloc", 64 * MIB, c_uint(0))
    assert cuda.free_bytes() == before
    cuda.ok("cuMemFreeHost", pointer)


def array_takes_what_it_says(cuda: Driver) -> None:
    cuda.context()
    before, need = cuda.free_bytes(), d.Requirements()
    shape = d.ArrayShape(width=1024, height=1024, depth=4, format=0x20, channels=4)
    array = cuda.out("cuArray3DCreate_v2", byref(shape))
    cuda.ok("cuArrayGetMemoryRequirements", byref(need), array, c_int(0))
    assert before - cuda.free_bytes() == d.BLOCK * (-(-need.size // d.BLOCK)) and need.size >= 64 * MIB
    cuda.ok("cuArrayDestroy", array)
    assert cuda.free_bytes() == before


def mipmap_takes_more_than_its_first_level(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    shape = d.ArrayShape(width=2048, height=2048, format=0x20, channels=4)
    mipmap = cuda.out("cuMipmappedArrayCreate", byref(shape), c_uint(12))
    assert before - cuda.free_bytes() > 2048 * 2048 * 16
    cuda.ok("cuMipmappedArrayDestroy", mipmap)
    assert cuda.free_bytes() == before


def physical_memory_outlives_its_handle(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    handle = cuda.create(4 * BLOCK)
    assert before - cuda.free_bytes() == 4 * BLOCK
    address = cuda.reserve(4 * BLOCK)
    cuda.map(address, 4 * BLOCK, handle)
    cuda.ok("cuMemRelease", handle)
    assert before - cuda.free_bytes() == 4 * BLOCK
    cuda.write(address, b"still here")
    assert cuda.read(address, 10) == b"still here"
    cuda.ok("cuMemUnmap", address, 4 * BLOCK)
    assert cuda.free_bytes() == before


def retained_handle_keeps_memory(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    handle, address = cuda.create(BLOCK), cuda.reserve(BLOCK)
    cuda.map(address, BLOCK, handle)
    again = cuda.out("cuMemRetainAllocationHandle", address)
    assert again == handle
    cuda.ok("cuMemUnmap", address, BLOCK)
    cuda.ok("cuMemRelease", handle)
    assert before - cuda.free_bytes() == BLOCK
    cuda.ok("cuMemRelease", again)
    assert cuda.free_bytes() == before


def two_mappings_are_one_memory(cuda: Driver) -> None:
    cuda.context()
    handle, a, b = cuda.create(BLOCK), cuda.reserve(BLOCK), cuda.reserve(BLOCK)
    cuda.map(a, BLOCK, handle)
    cuda.map(b, BLOCK, handle)
    cuda.write(a + 100, b"shared")
    assert cuda.read(b + 100, 6) == b"shared"


def exported_memory_has_one_descriptor(cuda: Driver) -> None:
    """Device and inode of a descriptor do not tell blocks of memory apart."""
    cuda.context()
    found = set()
    for size in (BLOCK, 2 * BLOCK):
        fd = c_int()
        cuda.ok("cuMemExportToShareableHandle", byref(fd), cuda.create(size, 1), c_int(1), 0)
        status = os.fstat(fd.value)
        found.add((status.st_dev, status.st_ino, os.path.basename(os.readlink(f"/proc/self/fd/{fd.value}"))))
    assert len(found) == 1 and found.pop()[2] == "nvidiactl"


def granularity_is_one_block(cuda: Driver) -> None:
    cuda.context()
    granularity = cuda.out("cuMemGetAllocationGranularity", byref(cuda.properties()), c_int(0))
    assert granularity == BLOCK
    assert d.error_of(cuda.create, BLOCK + 4096) == d.INVALID_VALUE


def context_takes_memory_and_gives_it_back(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    handle = cuda.out("cuCtxCreate_v2", c_uint(0), c_int(0))
    assert before - cuda.free_bytes() >= 16 * MIB
    cuda.alloc(64 * MIB)
    cuda.ok("cuCtxDestroy_v2", handle)
    assert cuda.free_bytes() == before


def nvml_total_has_reserved_memory(cuda: Driver) -> None:
    """CUDA's total is NVML's total without the reserved part, which version 1 counts as used."""
    cuda.context()
    pynvml, device = cuda.nvml()
    memory = memory_of(pynvml, device)
    assert memory is not None and memory.reserved > 0
    assert abs(memory.allocatable - cuda.out("cuDeviceTotalMem_v2", c_int(0))) <= 32 * MIB
    first = pynvml.nvmlDeviceGetMemoryInfo(device)
    assert first.total == memory.allocatable + memory.reserved and first.used >= memory.reserved
    assert abs(memory.free - cuda.free_bytes()) <= 32 * MIB


def nvml_counts_the_context_of_the_process(cuda: Driver) -> None:
    """A process without allocations is listed with the size of its context, at most the default estimate."""
    cuda.init()
    pynvml, device = cuda.nvml()
    assert os.getpid() not in contextprobe.processes(pynvml, device)
    cuda.context()
    size = contextprobe.processes(pynvml, device)[os.getpid()]
    assert 16 * MIB <= size <= contexts.DEFAULT_BYTES
    cuda.alloc(64 * MIB)
    assert contextprobe.processes(pynvml, device)[os.getpid()] == size + 64 * MIB


def nvml_lists_managed_memory_for_no_process(cuda: Driver) -> None:
    """Managed memory on the device lowers the free memory, but not the list."""
    cuda.context()
    pynvml, device = cuda.nvml()
    listed, before = contextprobe.processes(pynvml, device)[os.getpid()], cuda.free_bytes()
    address = cuda.out("cuMemAllocManaged", 64 * MIB, c_uint(1))
    cuda.ok("cuMemPrefetchAsync", address, 64 * MIB, c_int(0), 0)
    cuda.synchronize()
    assert before - cuda.free_bytes() >= 64 * MIB
    assert contextprobe.processes(pynvml, device)[os.getpid()] == listed


LIST = """
import sys
from gpushare.gpu.contextprobe import processes
from gpushare.gpu.nvml import initialised
n = initialised(sys.argv[1])
print([sorted(processes(n, n.nvmlDeviceGetHandleByIndex(i))) for i in range(n.nvmlDeviceGetCount())])
"""


def nvml_lists_no_process_that_the_caller_cannot_see(cuda: Driver) -> None:
    """In a pid namespace of its own a caller sees none of the other processes of the device."""
    cuda.context()
    nvml = os.path.join(os.path.dirname(cuda.library._name), "libnvidia-ml.so.1")
    apart = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*apart, "true"], capture_output=True).returncode:
        return  # only root can make a pid namespace
    done = subprocess.run([*apart, sys.executable, "-c", LIST, nvml], capture_output=True, text=True, check=True)
    assert not any(eval(done.stdout)), done.stdout


def destroyed_streams_give_back_their_memory(cuda: Driver) -> None:
    cuda.context()
    cuda.ok("cuStreamDestroy_v2", cuda.stream(1))
    before = cuda.free_bytes()
    streams = [cuda.stream(1) for _ in range(32)]
    assert 0 <= before - cuda.free_bytes() <= 128 * MIB
    for stream in streams:
        cuda.ok("cuStreamDestroy_v2", stream)
    assert cuda.free_bytes() == before


def module_takes_memory_on_first_use(cuda: Driver) -> None:
    cuda.context()
    before = cuda.free_bytes()
    module = cuda.load()
    assert before - cuda.free_bytes() < 4 * MIB
    cuda.function(module)
    assert before - cuda.free_bytes() >= 4 * MIB
    cuda.ok("cuModuleUnload", module)
    assert cuda.free_bytes() == before
