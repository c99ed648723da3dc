"""Report what the driver says about itself and its device."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from ctypes import byref, c_char_p, c_int, c_uint, c_uint64, c_ulonglong, c_void_p
from typing import Optional

from tests.conformance import driver
from tests.hardware.place import STEMS, TREE
from tests.hardware.tenant import absent, listen, say
from tests.hardware.tenants import cuda

WRONG_CODES = {100: "no device", 999: "unknown error", 803: "driver mismatch", 804: "no forward compatibility"}
PTSZ = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
VERSIONS = (2000, 3020, 4000, 7000, 7050, 10010, 11000, 11010, 11020, 11030, 12000, 12020, 12040, 12060, 12080, 13000)


def loaded(directories: list[str]) -> None:
    """Report which files a program loads for the two sonames.

    `directories`: searched if the loader does not find them.
    """
    found = ""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        for found in directories:
            try:
                ctypes.CDLL(f"{found}/libcuda.so.1")
                break
            except OSError:
                continue
        else:
            absent("libcuda.so.1 cannot be loaded")
    try:
        ctypes.CDLL("libnvidia-ml.so.1" if not found else f"{found}/libnvidia-ml.so.1")
    except OSError:
        pass
    say(files=mapped(), directory=found)


def mapped() -> dict[str, str]:
    """Map each stem to the driver's library file in this process."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        paths = [line.split(None, 5)[5].strip() for line in maps if line.count("/")]
    return {stem: path for path in paths for stem in STEMS if os.path.basename(path).startswith(f"{stem}.so")}


def device(library: str) -> None:
    """Report the first device."""
    gpu = driver.Driver(library)
    code = gpu.code("cuInit", c_uint(0))
    if code:
        absent(f"cuInit gave {code} ({WRONG_CODES.get(code, 'see CUresult in cuda.h')})")
    if not gpu.out("cuDeviceGetCount", kind=c_int):
        absent("the driver shows no device")
    number = [gpu.out("cuDeviceGetAttribute", c_int(a), c_int(0), kind=c_int) for a in (75, 76, 16)]
    say(
        model=cuda.name_of(gpu),
        uuid=cuda.uuid_of(gpu),
        bus_id=cuda.bus_of(gpu),
        total_bytes=gpu.out("cuDeviceTotalMem_v2", c_int(0)),
        capability=number[:2],
        multiprocessors=number[2],
        cuda_version=gpu.out("cuDriverGetVersion", kind=c_int),
    )


class Memory(ctypes.Structure):
    """nvmlMemory_t"""

    _fields_ = [("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong)]


def meter(library: str, nvml: str, uuid: str) -> None:
    """For each line report the bytes used on the device, natively.

    They come from NVML, or, where it does not work, from cuMemGetInfo in an own context, which is then part of every
    answer. The driver stays loaded while this runs, so other programs start fast and no setting of the card has to
    change.
    """
    read = _nvml_meter(nvml, uuid)
    source = "nvmlDeviceGetMemoryInfo" if read else "cuMemGetInfo"
    read = read or _cuda_meter(library)
    while True:
        say(used_bytes=read(), source=source)
        listen()


def _nvml_meter(library: str, uuid: str) -> Optional[Callable[[], int]]:
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    handle, memory = c_void_p(), Memory()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)):
        return None

    def read() -> int:
        code = nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory))
        assert not code, f"nvmlDeviceGetMemoryInfo gave {code}"
        return int(memory.used)

    return read


def nvml(uuid: str) -> None:
    """Report the device's total memory in a share, from NVML and from nvidia-smi (None: not installed)."""
    library = ctypes.CDLL("libnvidia-ml.so.1")
    handle, memory = c_void_p(), Memory()
    code = library.nvmlInit_v2()
    code = code or library.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle))
    code = code or library.nvmlDeviceGetMemoryInfo(handle, byref(memory))
    assert not code, f"NVML gave {code}"
    say(nvml=memory.total, nvidia_smi=_nvidia_smi(uuid))


def _nvidia_smi(uuid: str) -> Optional[int]:
    command = ["nvidia-smi", f"--id={uuid}", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10).stdout
        return int(said.strip()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _cuda_meter(library: str) -> Callable[[], int]:
    gpu = driver.Driver(library)
    gpu.context()
    return lambda: gpu.total_bytes() - gpu.free_bytes()


def context(library: str) -> None:
    """Report the memory of a process's first context (by NVML, from outside) and of a second (by cuMemGetInfo)."""
    gpu = driver.Driver(library)
    gpu.init()
    say(before=True)
    listen()
    gpu.context()
    say(first=True)
    listen()
    before = gpu.free_bytes()
    second = c_uint64()
    gpu.ok("cuCtxCreate_v2", byref(second), c_uint(0), c_int(0))
    after = gpu.free_bytes()
    gpu.ok("cuCtxDestroy_v2", second.value)
    say(second_bytes=before - after)


def names(library: str) -> None:
    """Report whether cuGetProcAddress returns the exported addresses, and whether the loaded library is the shim."""
    gpu = driver.Driver(library)
    gpu.init()
    listed = [line.split("\t") for line in (TREE / "shim" / "symbols.tsv").read_text().splitlines()[1:]]
    exported = {name: address_of(gpu.library, name) for library, name, *_ in listed if library == "cuda"}
    known = {address for address in exported.values() if address}
    bases = sorted({re.sub(r"(_v\d+)?(_ptsz|_ptds)?$", "", name) for name in exported})
    asked = strange = 0
    unknown = set()
    for base in bases:
        for version in VERSIONS:
            for flags in (0, PTSZ):
                address = c_void_p()
                code = gpu.library.cuGetProcAddress(
                    c_char_p(base.encode()), byref(address), c_int(version), c_uint64(flags)
                )
                if code or not address.value:
                    continue
                asked += 1
                if address.value not in known:
                    strange += 1
                    unknown.add(base)
    try:
        real: Optional[int] = address_of(ctypes.CDLL("/usr/lib/gpushare/driver/libcuda-real.so.1"), "cuMemAlloc_v2")
    except OSError:
        real = None
    say(
        answers=asked,
        not_exported=strange,
        unknown=sorted(unknown)[:40],
        exported=len(known),
        shadowed=real is not None and exported["cuMemAlloc_v2"] != real,
        missing=sum(address is None for address in exported.values()),
    )


def exported(library: str, names: list[str], nvml: str = "") -> None:
    """Report which functions a library (libcuda, or `nvml`) exports, and which cuGetProcAddress knows."""
    gpu = driver.Driver(library)
    try:
        there = [name for name in names if address_of(ctypes.CDLL(nvml) if nvml else gpu.library, name)]
    except OSError:  # this machine has no NVML
        there = []
    known = []
    for name in () if nvml else names:
        address = c_void_p()
        code = gpu.library.cuGetProcAddress(c_char_p(name.encode()), byref(address), c_int(VERSIONS[-1]), c_uint64(0))
        known += [name] if not code and address.value else []
    say(there=there, procaddress=known)


def address_of(library: ctypes.CDLL, name: str) -> Optional[int]:
    try:
        return ctypes.cast(library[name], c_void_p).value
    except AttributeError:
        return None
