"""Exported descriptors, green contexts, and programs of NVIDIA's runtime library."""

from __future__ import annotations

import ctypes
import os
import struct
import time
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_void_p
from pathlib import Path
from typing import Any

from tests.conformance.driver import BLOCK, MIB, NON_BLOCKING
from tests.hardware.tenant import absent, say
from tests.hardware.tenants.cuda import HEAD, Gpu, counting, counting_parameters

POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
HANDLES, EXPORTS_OF_EACH = 4, 2


def export(gpu: Gpu, handle: int) -> int:
    """Return a descriptor of memory."""
    return gpu.out("cuMemExportToShareableHandle", handle, c_int(POSIX_FD), 0, kind=c_int)


def descriptors(library: str) -> None:
    """Export several blocks of memory twice each, and report the kernel's file behind every descriptor."""
    gpu = Gpu(library)
    found = []
    for memory in range(HANDLES):
        handle = gpu.create(BLOCK, POSIX_FD)
        for _ in range(EXPORTS_OF_EACH):
            fd = export(gpu, handle)
            of = os.fstat(fd)
            found.append(
                {
                    "memory": memory,
                    "id": [of.st_dev, of.st_ino],
                    "mode": oct(of.st_mode),
                    "rdev": of.st_rdev,
                    "link": os.readlink(f"/proc/self/fd/{fd}"),
                    "fdinfo": Path(f"/proc/self/fdinfo/{fd}").read_text()[:500],
                }
            )
    say(descriptors=found)


def export_cycles(library: str, cycles: int) -> None:
    """Create, export, close and release memory many times; report how much less memory is free afterwards."""
    gpu = Gpu(library)
    before = gpu.free_bytes()
    for _ in range(cycles):
        handle = gpu.create(BLOCK, POSIX_FD)
        os.close(export(gpu, handle))
        gpu.ok("cuMemRelease", handle)
    say(lost_bytes=before - gpu.free_bytes())


# ---- green contexts ------------------------------------------------------------------------------------------------

SM_RESOURCE, DEFAULT_STREAM, LEAST_PROCESSORS = 1, 1, 8
GREEN = ("cuDeviceGetDevResource", "cuDevSmResourceSplitByCount", "cuDevResourceGenerateDesc", "cuGreenCtxCreate")
GREEN_CALLS = (*GREEN, "cuGreenCtxStreamCreate", "cuCtxFromGreenCtx", "cuGreenCtxDestroy")
LAUNCHES_AHEAD = 16


class Resource(ctypes.Structure):
    """CUdevResource: the type, private bytes, and the multiprocessors at offset 96."""

    _fields_ = [("type", c_int), ("private", ctypes.c_ubyte * 92), ("processors", c_uint), ("rest", c_uint * 11)]


def green_context(gpu: Gpu) -> tuple[int, int]:
    """Return (a green context, its multiprocessors)."""
    whole, part, count, desc = Resource(), Resource(), c_uint(1), c_void_p()
    gpu.ok("cuDeviceGetDevResource", c_int(0), byref(whole), c_int(SM_RESOURCE))
    split = (byref(part), byref(count), byref(whole), None, c_uint(0), c_uint(LEAST_PROCESSORS))
    gpu.ok("cuDevSmResourceSplitByCount", *split)
    gpu.ok("cuDevResourceGenerateDesc", byref(desc), byref(part), c_uint(1))
    return gpu.out("cuGreenCtxCreate", desc, c_int(0), c_uint(DEFAULT_STREAM)), part.processors


def green(library: str, kernel_us: int, rounds: int, run_s: float) -> None:
    """Record events of both kinds of contexts in streams of both kinds, then launch into a green context's stream."""
    gpu = Gpu(library)
    missing = [name for name in GREEN_CALLS if not hasattr(gpu.library, name)]
    if missing:
        absent(f"this driver has no {missing[0]}")
    primary = c_void_p()
    gpu.ok("cuCtxGetCurrent", byref(primary))
    context, processors = green_context(gpu)
    as_context = gpu.out("cuCtxFromGreenCtx", context)
    streams = {
        "primary": gpu.stream(NON_BLOCKING),
        "green": gpu.out("cuGreenCtxStreamCreate", context, c_uint(NON_BLOCKING), c_int(0)),
    }
    events = {"primary": (gpu.event(), gpu.event())}
    gpu.ok("cuCtxSetCurrent", as_context)
    events["green"] = (gpu.event(), gpu.event())
    gpu.ok("cuCtxSetCurrent", primary)
    codes: dict[str, Any] = {}
    for of, (event, _) in events.items():
        for into, stream in streams.items():
            codes[f"event of {of} in stream of {into}"] = gpu.code("cuEventRecord", event, stream)
    gpu.synchronize()
    base, (_, later) = events["primary"][0], events["green"]
    gpu.ok("cuEventRecord", base, streams["primary"])
    codes["green event recorded"] = gpu.code("cuEventRecord", later, streams["green"])
    for stream in streams.values():
        gpu.ok("cuStreamSynchronize", stream)
    codes["time between contexts"] = gpu.code("cuEventElapsedTime", byref(ctypes.c_float()), base, later)
    function = gpu.kernel(*counting(kernel_us))
    parameters = counting_parameters(gpu.counter(), rounds)
    refused: dict[str, int] = {}
    launched, end = 0, time.monotonic() + run_s
    shape = [c_uint(n) for n in (processors * 4, 1, 1, 256, 1, 1, 0)]
    while time.monotonic() < end:
        for _ in range(LAUNCHES_AHEAD):
            code = gpu.code("cuLaunchKernel", function, *shape, streams["green"], parameters.pointer, None)
            if code:
                refused[str(code)] = refused.get(str(code), 0) + 1
            else:
                launched += 1
        gpu.ok("cuStreamSynchronize", streams["green"])
    say(codes=codes, processors=processors, launched=launched, refused=refused, per_s=launched / run_s)


# ---- the runtime library -------------------------------------------------------------------------------------------

WRAPPER, FATBIN = 0x466243B1, 0xBA55ED50
PTX_KIND, ENTRY_BYTES, HOST_LINUX_64 = 1, 80, 0x11
OPTIONS_AT, OPTIONS_TEXT_AT = 64, 72  # in an entry: where its ptxas options are described, and their text
TABLE_BYTES = 16 * MIB
RUNTIME_PTX = f"""{HEAD}
.global .align 4 .b8 table[{TABLE_BYTES}];
.visible .entry runtime_spin_us_10()
{{
    .reg .u64 %l1;
    .reg .u32 %r1;
    mov.u64 %l1, table;
    mov.u32 %r1, 1;
    st.global.u32 [%l1], %r1;
    ret;
}}
"""


def fat_binary(ptx: bytes) -> bytes:
    """Return a fat binary with one uncompressed PTX entry, byte by byte as NVIDIA's `fatbinary` 13.5 writes it.

    The driver follows the offset of the options' text. Without that text it reads any address, and crashes.
    """
    ptx += b"\0" * (-len(ptx) % 8 or 8)
    head = (PTX_KIND, 0x101, ENTRY_BYTES, len(ptx))
    entry = struct.pack("<HHIQIIHHIIIQQQ", *head, 0, OPTIONS_AT, 0, 6, 50, 0, 0, HOST_LINUX_64, 0, 0)
    entry += struct.pack("<QQ", OPTIONS_TEXT_AT, 0)  # an empty text
    return struct.pack("<IHHQ", FATBIN, 1, 16, len(entry) + len(ptx)) + entry + ptx


class Wrapper(ctypes.Structure):
    _fields_ = [("magic", c_int), ("version", c_int), ("data", c_char_p), ("more", c_void_p)]


class Dim3(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]


# The functions of libcudart that a compiled program calls: argument types, and the result's type if it is no error code
TEXT, OUT = c_char_p, c_void_p
SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "__cudaRegisterFatBinary": ([c_void_p], c_void_p),
    "__cudaRegisterFunction": ([c_void_p, c_void_p, TEXT, TEXT, c_int, *[c_void_p] * 5], None),
    "__cudaRegisterFatBinaryEnd": ([c_void_p], None),
    "cudaRuntimeGetVersion": ([OUT], c_int),
    "cudaFree": ([c_void_p], c_int),
    "cudaMemGetInfo": ([OUT, OUT], c_int),
    "cudaLaunchKernel": ([c_void_p, Dim3, Dim3, c_void_p, c_size_t, c_void_p], c_int),
    "cudaDeviceSynchronize": ([], c_int),
}
NO_ARGUMENTS = (c_void_p * 1)()  # as nvcc passes them: an array, even if the kernel has none


def declared(cudart: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the functions, so that ctypes passes each argument in the width that C expects."""
    for name, (arguments, result) in SIGNATURES.items():
        if hasattr(cudart, name):
            function = getattr(cudart, name)
            function.argtypes, function.restype = arguments, result
    return cudart


def runtime(library: str, path: str) -> None:
    """Register and launch a kernel like a program that nvcc compiled; report what the module took and was charged.

    A step with a code other than 0 is the last one. `path`: libcudart, which loads the driver by its soname.
    """
    ctypes.CDLL(library)
    cudart = declared(ctypes.CDLL(path))
    image = fat_binary(RUNTIME_PTX.encode())
    wrapper = Wrapper(magic=ctypes.c_int(WRAPPER).value, version=1, data=image)
    host = ctypes.create_string_buffer(16)  # stands for the function in the program
    free = [c_size_t(), c_size_t()]
    steps: dict[str, int] = {}
    handle = getattr(cudart, "__cudaRegisterFatBinary")(byref(wrapper))
    name = b"runtime_spin_us_10"
    getattr(cudart, "__cudaRegisterFunction")(handle, host, name, name, -1, None, None, None, None, None)
    if hasattr(cudart, "__cudaRegisterFatBinaryEnd"):
        getattr(cudart, "__cudaRegisterFatBinaryEnd")(handle)
    one = Dim3(1, 1, 1)
    version, total = c_int(), c_size_t()
    calls = (
        ("cudaRuntimeGetVersion", (byref(version),)),
        ("cudaFree", (None,)),
        ("cudaMemGetInfo", (byref(free[0]), byref(total))),
        ("cudaLaunchKernel", (host, one, one, NO_ARGUMENTS, 0, None)),
        ("cudaDeviceSynchronize", ()),
        ("cudaMemGetInfo", (byref(free[1]), byref(total))),
    )
    for call, arguments in calls:
        steps[call] = int(getattr(cudart, call)(*arguments))
        if steps[call]:
            break
    say(version=version.value, steps=steps, taken_bytes=free[0].value - free[1].value, table_bytes=TABLE_BYTES)
