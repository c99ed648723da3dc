"""The driver interface of tests/conformance, plus launches with a shape and parameters."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_uint, c_uint64, c_void_p
from typing import Any, Union

from tests.conformance import driver

MULTIPROCESSORS, CC_MAJOR, CC_MINOR = 16, 75, 76  # CUdevice_attribute
THREADS = 256
PORTABLE_MAPPED = 3  # CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP
# A kernel that does `rounds` rounds of arithmetic in each thread. Each block then adds them to a counter, so the device
# itself counts its work. One thread also counts the device time, in nanoseconds at `clock` unless that is 0: it reads
# the device's clock every 128 rounds, 5 to 10 us, and leaves out pauses of 50 us or more, in which another context had
# the device. The simulator, which runs no code, takes the duration in microseconds from the name.
COUNT = """
.visible .entry {name}(.param .u64 counter, .param .u64 rounds, .param .u64 clock)
{{
    .reg .u64 %l<11>;
    .reg .u32 %r<4>;
    .reg .pred %p, %timed, %short;
    ld.param.u64 %l1, [counter];
    ld.param.u64 %l2, [rounds];
    ld.param.u64 %l6, [clock];
    mov.u32 %r2, %tid.x;
    mov.u32 %r1, %r2;
    mov.u32 %r3, %ctaid.x;
    or.b32 %r3, %r3, %r2;
    setp.eq.u32 %timed, %r3, 0;
    setp.ne.and.u64 %timed, %l6, 0, %timed;
    mov.u64 %l3, 0;
    mov.u64 %l7, 0;
    mov.u64 %l8, %globaltimer;
again:
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    add.u64 %l3, %l3, 1;
    @!%timed bra next;
    and.b64 %l9, %l3, 127;
    setp.ne.u64 %p, %l9, 0;
    @%p bra next;
    mov.u64 %l9, %globaltimer;
    sub.u64 %l10, %l9, %l8;
    mov.u64 %l8, %l9;
    setp.lt.u64 %short, %l10, 50000;
    @%short add.u64 %l7, %l7, %l10;
next:
    setp.lt.u64 %p, %l3, %l2;
    @%p bra again;
    @!%timed bra count;
    mov.u64 %l9, %globaltimer;
    sub.u64 %l10, %l9, %l8;
    setp.lt.u64 %short, %l10, 50000;
    @%short add.u64 %l7, %l7, %l10;
    cvta.to.global.u64 %l6, %l6;
    ld.volatile.global.u64 %l9, [%l6];
    add.u64 %l9, %l9, %l7;
    st.volatile.global.u64 [%l6], %l9;
    membar.sys;
count:
    cvta.to.global.u64 %l4, %l1;
    setp.eq.u32 %p, %r1, 3735928559;
    @%p st.global.u32 [%l4+8], %r1;
    setp.eq.u32 %p, %r2, 0;
    @%p atom.global.add.u64 %l5, [%l4], %l3;
    ret;
}}
"""
# Threads that read the device's clock until `run_ns` are over. The first one stores in `out`: the number of pauses
# longer than `least_ns`, its first and last readings, then for each pause the readings before and after it, and the
# ticks of the multiprocessor's own clock between them. Contexts of all processes read the same clock. Warps other than
# the first mostly calculate, so that they do not delay its readings.
GAPS = """
.visible .entry gaps_spin_us_100000(.param .u64 out, .param .u64 room, .param .u64 run_ns, .param .u64 least_ns)
{
    .reg .u64 %l<20>;
    .reg .u32 %r<5>;
    .reg .pred %p, %other, %busy;
    ld.param.u64 %l1, [out];
    ld.param.u64 %l2, [room];
    ld.param.u64 %l3, [run_ns];
    ld.param.u64 %l4, [least_ns];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    shr.u32 %r3, %r1, 5;
    or.b32 %r3, %r3, %r2;
    setp.ne.u32 %busy, %r3, 0;
    or.b32 %r1, %r1, %r2;
    setp.ne.u32 %other, %r1, 0;
    selp.u64 %l4, 0x7fffffffffffffff, %l4, %other;
    cvta.to.global.u64 %l1, %l1;
    add.u64 %l8, %l1, 24;
    mov.u64 %l5, %globaltimer;
    mov.u64 %l11, %clock64;
    mov.u64 %l6, %l5;
    mov.u64 %l9, 0;
read:
    @!%busy bra now;
    mov.u32 %r4, 1000;
calculate:
    .pragma "nounroll";
    mad.lo.u32 %r1, %r1, 1664525, 1013904223;
    sub.u32 %r4, %r4, 1;
    setp.ne.u32 %p, %r4, 0;
    @%p bra calculate;
now:
    mov.u64 %l7, %globaltimer;
    mov.u64 %l12, %clock64;
    sub.u64 %l10, %l7, %l6;
    setp.lt.u64 %p, %l10, %l4;
    @%p bra ran;
    setp.ge.u64 %p, %l9, %l2;
    @%p bra ran;
    sub.u64 %l13, %l12, %l11;
    st.global.u64 [%l8], %l6;
    st.global.u64 [%l8+8], %l7;
    st.global.u64 [%l8+16], %l13;
    add.u64 %l8, %l8, 24;
    add.u64 %l9, %l9, 1;
ran:
    mov.u64 %l6, %l7;
    mov.u64 %l11, %l12;
    sub.u64 %l10, %l7, %l5;
    setp.lt.u64 %p, %l10, %l3;
    @%p bra read;
    @!%other st.global.u64 [%l1], %l9;
    @!%other st.global.u64 [%l1+8], %l5;
    @!%other st.global.u64 [%l1+16], %l7;
    setp.eq.u32 %p, %r1, 3735928559;
    @%p st.global.u32 [%l1], %r1;
    ret;
}
"""
HEAD = ".version 6.0\n.target sm_50\n.address_size 64\n"


def counting(kernel_us: int) -> tuple[bytes, str]:
    """Return (PTX, name) of the counting kernel."""
    name = f"count_spin_us_{kernel_us}"
    return (HEAD + COUNT.format(name=name)).encode(), name


def counting_parameters(counter: int, rounds: int, clock: int = 0) -> Parameters:
    """Return the parameters of the counting kernel. `clock`: host_counter for the device time, if it is wanted."""
    return Parameters(counter, rounds, clock)


class Gpu(driver.Driver):
    """The first device, with its primary context current."""

    def __init__(self, library: str) -> None:
        super().__init__(library)
        self.context()

    def attribute(self, number: int) -> int:
        return self.out("cuDeviceGetAttribute", c_int(number), c_int(0), kind=c_int)

    def kernel(self, ptx: bytes, name: str) -> int:
        return self.function(self.load(ptx), name)

    def start(self, function: int, parameters: Parameters, stream: int = 0, blocks: int = 1, threads: int = 1) -> None:
        """Launch a function. Raises DriverError."""
        shape = [c_uint(n) for n in (blocks, 1, 1, threads, 1, 1, 0)]
        self.ok("cuLaunchKernel", function, *shape, stream, parameters.pointer, None)

    def done(self, event: int) -> bool:
        """Return whether the work before the event is done."""
        code = self.code("cuEventQuery", event)
        if code not in (driver.SUCCESS, driver.NOT_READY):
            raise driver.DriverError("cuEventQuery", code)
        return code == driver.SUCCESS

    def counter(self, size: int = 4096) -> int:
        """Allocate zeroed device memory."""
        address = self.alloc(size)
        self.ok("cuMemsetD8_v2", address, ctypes.c_ubyte(0), size)
        return address

    def host_counter(self, size: int = 4096) -> int:
        """Allocate zeroed memory of the host that kernels can write, and this process can read without a call."""
        address = self.out("cuMemHostAlloc", size, c_uint(PORTABLE_MAPPED))
        ctypes.memset(address, 0, size)
        return address

    def count(self, address: int) -> int:
        return int.from_bytes(self.read(address, 8), "little")


class Parameters:
    """64-bit kernel parameters, kept alive while this object exists."""

    def __init__(self, *values: int) -> None:
        self._values = [c_uint64(value) for value in values]
        self._array = (c_void_p * len(values))(*(ctypes.addressof(value) for value in self._values))
        self.pointer = ctypes.cast(self._array, c_void_p)


def name_of(cuda: Union[driver.Driver, Any], device: int = 0) -> str:
    """Return the device's name."""
    text = ctypes.create_string_buffer(128)
    cuda.ok("cuDeviceGetName", text, c_int(128), c_int(device))
    return text.value.decode(errors="replace")


def uuid_of(cuda: driver.Driver, device: int = 0) -> str:
    """Return the device's UUID as NVML formats it ("GPU-...")."""
    raw = (ctypes.c_ubyte * 16)()
    function = "cuDeviceGetUuid_v2" if hasattr(cuda.library, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid"
    cuda.ok(function, byref(raw), c_int(device))
    digits = bytes(raw).hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def bus_of(cuda: driver.Driver, device: int = 0) -> str:
    text = ctypes.create_string_buffer(32)
    cuda.ok("cuDeviceGetPCIBusId", text, c_int(32), c_int(device))
    return text.value.decode().lower()
