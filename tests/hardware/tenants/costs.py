"""Measure the memory that modules take, and how much of a device can be allocated."""

from __future__ import annotations

import ctypes
import os
from ctypes import byref, c_char_p, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any, Optional

from tests.conformance.driver import MIB, OUT_OF_MEMORY, DriverError
from tests.hardware.tenant import say
from tests.hardware.tenants import device
from tests.hardware.tenants.cuda import HEAD, Gpu, Parameters

INSTRUCTIONS = {"ptx": 64, "cubin": 256}  # of 32 bytes each: 2 KiB of code that the driver compiles fast, or 8 KiB
STEPS = (1024 * MIB, 64 * MIB, 2 * MIB)  # coarse steps first, single blocks last
MOST_USED = 2048 * MIB  # by NVML before the first context: more is in use by programs that NVML does not list


def small_module(number: int, instructions: int = INSTRUCTIONS["ptx"]) -> tuple[bytes, str]:
    """Return (PTX, name) of a module with one small kernel, different for each number.

    The simulator takes the kernel's duration from its name.
    """
    name = f"module_{number}_spin_us_10"
    lines = [f"mad.lo.u32 %r1, %r1, {2 * i + 3}, {1000 * number + i};" for i in range(instructions)]
    body = "\n    ".join(lines)
    entry = f"""
.visible .entry {name}(.param .u64 out)
{{
    .reg .u64 %l1;
    .reg .u32 %r1;
    ld.param.u64 %l1, [out];
    cvta.to.global.u64 %l1, %l1;
    mov.u32 %r1, %tid.x;
    {body}
    st.global.u32 [%l1], %r1;
    ret;
}}
"""
    return (HEAD + entry).encode(), name


def write_module(path: str) -> None:
    """Write the PTX of one small module, for ptxas."""
    Path(path).write_bytes(small_module(0, INSTRUCTIONS["cubin"])[0])
    say(written=path)


def modules(library: str, loading: str, counts: list[int], cubin: str = "") -> None:
    """Report what modules take, by cuMemGetInfo: after loading them, after one launch of each, and after unloading all.

    `counts`: totals at which to report. `loading`: CUDA_MODULE_LOADING. `cubin`: a file to load instead of PTX.
    """
    os.environ["CUDA_MODULE_LOADING"] = loading
    gpu = Gpu(library)
    out = Parameters(gpu.counter())
    image = Path(cubin).read_bytes() if cubin else b""
    before = gpu.free_bytes()
    loaded: list[int] = []
    steps: list[dict[str, int]] = []
    for count in counts:
        names = []
        for number in range(len(loaded), count):
            ptx, name = small_module(0 if cubin else number)
            loaded.append(gpu.load(image or ptx))
            names.append(name)
        at_load = before - gpu.free_bytes()
        for module, name in zip(loaded[-len(names) :], names):
            gpu.start(gpu.function(module, name), out)
        gpu.synchronize()
        steps.append({"modules": count, "loaded_bytes": at_load, "used_bytes": before - gpu.free_bytes()})
    for module in loaded:
        gpu.ok("cuModuleUnload", module)
    say(steps=steps, left_bytes=before - gpu.free_bytes())


V2_NAMES = ("total", "reserved", "free", "used")


class MemoryV2(ctypes.Structure):
    """nvmlMemory_v2_t"""

    _fields_ = [("version", c_uint)] + [(name, c_ulonglong) for name in V2_NAMES]


def nvml_memory(nvml: str, uuid: str) -> dict[str, Any]:
    """Return what NVML's two functions report, and how many processes have a context. Empty without NVML."""
    opened = device.open_nvml(nvml, uuid)
    if not opened:
        return {}
    library, handle = opened
    first, second = device.Memory(), MemoryV2(version=ctypes.sizeof(MemoryV2) | 2 << 24)
    assert library.nvmlDeviceGetMemoryInfo(handle, byref(first)) == 0
    said: dict[str, Any] = {"v1_total": first.total, "v1_used": first.used, "v1_free": first.free}
    if hasattr(library, "nvmlDeviceGetMemoryInfo_v2") and not library.nvmlDeviceGetMemoryInfo_v2(handle, byref(second)):
        said.update({f"v2_{name}": getattr(second, name) for name in V2_NAMES})
    processes = device.compute_processes(library, handle)
    return {**said, "processes": None if processes is None else len(processes)}


def reserved(library: str, nvml: str, uuid: str) -> None:
    """Report what NVML and cuMemGetInfo count, and how much cuMemAlloc really gives.

    Nothing is allocated while another process has a context on the device, or uses memory of it.
    """
    said = nvml_memory(nvml, uuid)
    alone = bool(said) and not said["processes"] and said["v1_used"] < MOST_USED
    gpu = Gpu(library)
    said.update(cuda_total=gpu.out("cuDeviceTotalMem_v2", ctypes.c_int(0)), free_with_context=gpu.free_bytes())
    held = fill(gpu) if alone else {}
    got: Optional[int] = sum(held.values()) if alone else None
    free = gpu.free_bytes()
    for address in held:
        gpu.free(address)
    say(got_bytes=got, free_when_full=free, **said)


def fill(gpu: Gpu) -> dict[int, int]:
    """Allocate all that cuMemAlloc gives; return the size at each address."""
    held: dict[int, int] = {}
    for step in STEPS:
        while True:
            try:
                held[gpu.alloc(step)] = step
            except DriverError as error:
                if error.code != OUT_OF_MEMORY:
                    raise
                break
    return held


def local_memory(library: str) -> None:
    """Report what a launch takes whose threads need much local memory, which the driver keeps for all threads."""
    gpu = Gpu(library)
    function = gpu.kernel((HEAD + LOCAL).encode(), "local_spin_us_10")
    before = gpu.free_bytes()
    gpu.start(function, Parameters(gpu.counter(), 1))
    gpu.synchronize()
    per_thread = gpu.out("cuFuncGetAttribute", c_uint(LOCAL_SIZE), function, kind=ctypes.c_int)
    say(used_bytes=before - gpu.free_bytes(), bytes_per_thread=per_thread)


LOCAL_SIZE = 3  # CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES
LOCAL = """
.visible .entry local_spin_us_10(.param .u64 out, .param .u64 at)
{
    .local .align 8 .b8 room[8192];
    .reg .u64 %l<5>;
    .reg .u32 %r1;
    ld.param.u64 %l1, [out];
    ld.param.u64 %l2, [at];
    and.b64 %l2, %l2, 1023;
    mov.u64 %l3, room;
    add.u64 %l4, %l3, %l2;
    st.local.u8 [%l4], %l2;
    ld.local.u8 %r1, [%l3+1];
    cvta.to.global.u64 %l1, %l1;
    st.global.u32 [%l1], %r1;
    ret;
}
"""

# ---- functions that no header names -------------------------------------------------------------------------------

# Tables that programs of NVIDIA ask cuGetExportTable for, by names that public projects gave them. The first word of
# the runtime library's table is its size.
RUNTIME_TABLE = "CUDART_INTERFACE"
TABLES = {
    RUNTIME_TABLE: "6bd5fb6c5bf4e74a8987d93912fd9df9",
    "TOOLS_RUNTIME_CALLBACK_HOOKS": "a094798c2e742e7493f20800200c0a66",
    "TOOLS_TLS": "42d85a8123f6cb478298f6e78a3aecdc",
    "CONTEXT_LOCAL_STORAGE": "c693336e1121df11a8c368f355d89593",
}


def tables(library: str) -> None:
    """Report which private tables this driver has, and the size of the runtime library's one."""
    gpu = Gpu(library)
    found: dict[str, Any] = {}
    for name, digits in TABLES.items():
        table, uuid = c_void_p(), c_char_p(bytes.fromhex(digits))
        code = gpu.library.cuGetExportTable(byref(table), uuid)
        known = name == RUNTIME_TABLE and not code and table.value
        found[name] = {"code": code, "bytes": ctypes.cast(table, ctypes.POINTER(c_ulonglong))[0] if known else None}
    say(tables=found)
