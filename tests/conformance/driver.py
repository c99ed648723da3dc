"""A thin ctypes interface to the driver, with the names and numbers of cuda.h."""

from __future__ import annotations

import ctypes
import os
import uuid as uuid_module
from ctypes import byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any, Optional

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
NOT_INITIALIZED = 3
INVALID_DEVICE = 101
INVALID_CONTEXT = 201
OPERATING_SYSTEM = 304
ILLEGAL_STATE = 401
NOT_FOUND = 500
NOT_READY = 600
NOT_SUPPORTED = 801
COOPERATIVE_TOO_LARGE = 720
CAPTURE_UNSUPPORTED = 900
CAPTURE_INVALIDATED = 901
CAPTURE_MERGE = 902
CAPTURE_UNMATCHED = 903
CAPTURE_UNJOINED = 904
CAPTURE_ISOLATION = 905
CAPTURE_IMPLICIT = 906
CAPTURED_EVENT = 907
CAPTURE_WRONG_THREAD = 908
UNKNOWN = 999
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)  # CUprocessState

MIB = 1 << 20
BLOCK = 2 * MIB
NON_BLOCKING = 1

# Spins for about as many microseconds as its name says, by the device's clock.
SPIN_US = 2000
SPIN = f"spin_us_{SPIN_US}"
PTX = f"""
.version 6.0
.target sm_50
.address_size 64
.global .align 4 .b8 table[4194304];
.visible .entry {SPIN}()
{{
    .reg .u64 %t<4>;
    .reg .pred %p;
    mov.u64 %t1, %globaltimer;
wait:
    mov.u64 %t2, %globaltimer;
    sub.u64 %t3, %t2, %t1;
    setp.lt.u64 %p, %t3, {SPIN_US * 1000};
    @%p bra wait;
    ret;
}}
""".encode()

# Counts iterations, so that it takes longer when other contexts have the device in between; about 0.2 to 2 ms.
LOOP = "loop_us_500"
LOOP_PTX = f"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry {LOOP}()
{{
    .reg .u64 %t<3>;
    .reg .u32 %n;
    .reg .pred %p;
    mov.u32 %n, 20000;
    mov.u64 %t2, 0;
again:
    mov.u64 %t1, %clock64;
    xor.b64 %t2, %t2, %t1;
    sub.u32 %n, %n, 1;
    setp.ne.u32 %p, %n, 0;
    @%p bra again;
    setp.eq.u64 %p, %t2, 1311768467463790320;
    @%p trap;
    ret;
}}
""".encode()

# wait_flag(address, value) spins until the 32-bit value there is at least `value`; set_flag writes it.
FLAG_PTX = b"""
.version 6.0
.target sm_50
.address_size 64
.visible .entry wait_flag(.param .u64 flag, .param .u64 value)
{
    .reg .u64 %r<3>;
    .reg .u32 %v<3>;
    .reg .pred %p;
    ld.param.u64 %r1, [flag];
    ld.param.u64 %r2, [value];
    cvta.to.global.u64 %r1, %r1;
    cvt.u32.u64 %v2, %r2;
again:
    ld.volatile.global.u32 %v1, [%r1];
    setp.lt.u32 %p, %v1, %v2;
    @%p bra again;
    ret;
}
.visible .entry set_flag(.param .u64 flag, .param .u64 value)
{
    .reg .u64 %r<3>;
    .reg .u32 %v;
    ld.param.u64 %r1, [flag];
    ld.param.u64 %r2, [value];
    cvta.to.global.u64 %r1, %r1;
    cvt.u32.u64 %v, %r2;
    st.volatile.global.u32 [%r1], %v;
    membar.sys;
    ret;
}
"""


class DriverError(Exception):
    """A call failed unexpectedly. `code` is the CUresult."""

    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name} gave {code}")
        self.code = code


class Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


class PoolProperties(ctypes.Structure):
    """CUmemPoolProps."""

    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("max_bytes", c_size_t),
        ("reserved", ctypes.c_ubyte * 56),
    ]


class ArrayShape(ctypes.Structure):
    """CUDA_ARRAY3D_DESCRIPTOR."""

    _fields_ = [
        *(("width", c_size_t), ("height", c_size_t), ("depth", c_size_t)),
        *(("format", c_int), ("channels", c_uint), ("flags", c_uint)),
    ]


class Requirements(ctypes.Structure):
    """CUDA_ARRAY_MEMORY_REQUIREMENTS."""

    _fields_ = [("size", c_size_t), ("alignment", c_size_t), ("reserved", c_uint * 4)]


IpcHandle = c_char * 64
RESERVED_CURRENT, USED_CURRENT, THRESHOLD = 5, 7, 4
GRAPH_USED, GRAPH_RESERVED = 0, 2


class Driver:
    """A loaded libcuda. Methods raise DriverError; `code(...)` returns the CUresult instead."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)

    def code(self, name: str, *arguments: Any) -> int:
        """Call a function; integers are passed as 64 bits."""
        plain = [c_uint64(a) if isinstance(a, int) else a for a in arguments]
        return int(self.library[name](*plain))

    def ok(self, name: str, *arguments: Any) -> None:
        result = self.code(name, *arguments)
        if result != SUCCESS:
            raise DriverError(name, result)

    def out(self, name: str, *arguments: Any, kind: Any = c_uint64) -> int:
        """Call a function whose first parameter receives the result."""
        value = kind()
        self.ok(name, byref(value), *arguments)
        return int(value.value)

    def init(self) -> None:
        self.ok("cuInit", 0)

    def context(self, device: int = 0) -> int:
        """Initialise the driver and make the device's primary context current."""
        self.init()
        handle = self.out("cuDevicePrimaryCtxRetain", device)
        self.ok("cuCtxSetCurrent", handle)
        return handle

    def alloc(self, size: int) -> int:
        return self.out("cuMemAlloc_v2", size)

    def free(self, address: int) -> None:
        self.ok("cuMemFree_v2", address)

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.ok("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    def total_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.ok("cuMemGetInfo_v2", byref(free), byref(total))
        return total.value

    def nvml(self) -> tuple[Any, Any]:
        """Return pynvml over the libnvidia-ml beside this libcuda, and its handle of device 0."""
        from gpushare.gpu.nvml import initialised

        pynvml = initialised(os.path.join(os.path.dirname(self.library._name), "libnvidia-ml.so.1"))
        raw = (ctypes.c_ubyte * 16)()
        self.ok("cuDeviceGetUuid_v2", byref(raw), c_int(0))
        uuid = uuid_module.UUID(bytes=bytes(raw))
        for kind in ("GPU", "MIG"):
            try:
                return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
            except pynvml.NVMLError_NotFound:
                pass
        raise DriverError("nvmlDeviceGetHandleByUUID", NOT_FOUND)

    def write(self, address: int, data: bytes) -> None:
        self.ok("cuMemcpyHtoD_v2", address, c_char_p(data), len(data))

    def read(self, address: int, size: int) -> bytes:
        data = ctypes.create_string_buffer(size)
        self.ok("cuMemcpyDtoH_v2", data, address, size)
        return data.raw

    def load(self, image: bytes = PTX) -> int:
        return self.out("cuModuleLoadData", c_char_p(image))

    def function(self, module: int, name: str = SPIN) -> int:
        return self.out("cuModuleGetFunction", module, c_char_p(name.encode()))

    def launch_code(self, function: int, stream: int = 0) -> int:
        return self.code("cuLaunchKernel", function, *[c_uint(1)] * 6, c_uint(0), stream, None, None)

    def launch(self, function: int, stream: int = 0) -> None:
        result = self.launch_code(function, stream)
        if result != SUCCESS:
            raise DriverError("cuLaunchKernel", result)

    def stream(self, flags: int = 0) -> int:
        return self.out("cuStreamCreate", c_uint(flags))

    def event(self) -> int:
        return self.out("cuEventCreate", c_uint(0))

    def milliseconds(self, start: int, end: int) -> float:
        value = c_float()
        self.ok("cuEventElapsedTime", byref(value), start, end)
        return value.value

    def synchronize(self) -> None:
        self.ok("cuCtxSynchronize")

    def properties(self, device: int = 0, handle_types: int = 0) -> Properties:
        return Properties(type=1, handle_types=handle_types, location=Location(1, device))

    def create(self, size: int, handle_types: int = 0) -> int:
        return self.out("cuMemCreate", size, byref(self.properties(0, handle_types)), 0)

    def reserve(self, size: int) -> int:
        return self.out("cuMemAddressReserve", size, 0, 0, 0)

    def map(self, address: int, size: int, handle: int) -> None:
        """Map the memory and make it accessible."""
        self.ok("cuMemMap", address, size, 0, handle, 0)
        self.ok("cuMemSetAccess", address, size, byref(Access(Location(1, 0), 3)), 1)

    def pool(self, handle_types: int = 0) -> int:
        return self.out(
            "cuMemPoolCreate", byref(PoolProperties(type=1, handle_types=handle_types, location=Location(1, 0)))
        )

    def pool_attribute(self, pool: int, attribute: int) -> int:
        value = c_uint64()
        self.ok("cuMemPoolGetAttribute", pool, c_int(attribute), byref(value))
        return value.value

    def alloc_from(self, pool: int, size: int, stream: int = 0) -> int:
        return self.out("cuMemAllocFromPoolAsync", size, pool, stream)

    def graph_attribute(self, attribute: int) -> int:
        value = c_uint64()
        self.ok("cuDeviceGetGraphMemAttribute", c_int(0), c_int(attribute), byref(value))
        return value.value

    def checkpoint(self, operation: str, pid: int, arguments: Optional[bytes] = None) -> int:
        """Call cuCheckpointProcess<operation> for a process; `arguments` are those of its 64 bytes that are not 0."""
        given = None if arguments is None else ctypes.create_string_buffer(arguments, 64)
        return int(self.library["cuCheckpointProcess" + operation](c_int(pid), given))

    def process_state(self, pid: int) -> int:
        """Return a CUprocessState."""
        state = c_int(-1)
        self.ok("cuCheckpointProcessGetState", c_int(pid), byref(state))
        return state.value

    def restore_thread(self, pid: int) -> int:
        thread = c_int()
        self.ok("cuCheckpointProcessGetRestoreThreadId", c_int(pid), byref(thread))
        return thread.value

    def ipc_handle(self, address: int) -> bytes:
        handle = IpcHandle()
        self.ok("cuIpcGetMemHandle", byref(handle), address)
        return bytes(handle.raw)

    def ipc_open(self, handle: bytes) -> int:
        """Open an IPC handle, which is passed by value as a structure."""

        class ByValue(ctypes.Structure):
            _fields_ = [("bytes", c_char * 64)]

        value, address = ByValue(), c_uint64()
        ctypes.memmove(byref(value), handle, 64)
        result = int(self.library["cuIpcOpenMemHandle_v2"](byref(address), value, c_uint(1)))
        if result != SUCCESS:
            raise DriverError("cuIpcOpenMemHandle_v2", result)
        return address.value


def error_of(call: Any, *arguments: Any) -> Optional[int]:
    """Return the code with which a Driver method fails; None when it succeeds."""
    try:
        call(*arguments)
    except DriverError as error:
        return error.code
    return None
