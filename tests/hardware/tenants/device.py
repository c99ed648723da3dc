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
MOST_PROCESSES = 256
NOT_AVAILABLE = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
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
    """For each line report the bytes used on the device, natively; for a line {pid} also those of that process.

    They come from NVML, or, where it does not work, from cuMemGetInfo in an own context, which is then part of every
    answer. The driver stays loaded while this runs, so other programs start fast and no setting of the card has to
    change.
    """
    opened = open_nvml(nvml, uuid)
    source = "nvmlDeviceGetMemoryInfo" if opened else "cuMemGetInfo"
    read = _nvml_meter(*opened) if opened else _cuda_meter(library)
    asked: dict[str, int] = {}
    while True:
        of_process = process_bytes(*opened, asked["pid"]) if opened and "pid" in asked else None
        say(used_bytes=read(), source=source, process_bytes=of_process)
        asked = listen()


def open_nvml(library: str, uuid: str) -> Optional[tuple[ctypes.CDLL, c_void_p]]:
    """Return NVML and its handle of the device; None where it does not work."""
    try:
        nvml = ctypes.CDLL(library)
    except OSError:
        return None
    handle = c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(c_char_p(uuid.encode()), byref(handle)):
        return None
    return nvml, handle


def _nvml_meter(nvml: ctypes.CDLL, handle: c_void_p) -> Callable[[], int]:
    memory = Memory()

    def read() -> int:
        code = nvml.nvmlDeviceGetMemoryInfo(handle, byref(memory))
        assert not code, f"nvmlDeviceGetMemoryInfo gave {code}"
        return int(memory.used)

    return read


class ProcessInfo(ctypes.Structure):
    """nvmlProcessInfo_v2_t"""

    _fields_ = [("pid", c_uint), ("used", c_ulonglong), ("gpu_instance", c_uint), ("compute_instance", c_uint)]


def compute_processes(nvml: ctypes.CDLL, handle: c_void_p) -> Optional[dict[int, int]]:
    """Map the pid of each process with a context to its bytes; None if this NVML cannot list them."""
    for name in ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"):
        count, rows = c_uint(MOST_PROCESSES), (ProcessInfo * MOST_PROCESSES)()
        if hasattr(nvml, name) and nvml[name](handle, byref(count), rows) == 0:
            return {row.pid: row.used for row in rows[: count.value]}
    return None


def process_bytes(nvml: ctypes.CDLL, handle: c_void_p, pid: int) -> Optional[int]:
    used = (compute_processes(nvml, handle) or {}).get(pid, NOT_AVAILABLE)
    return None if used == NOT_AVAILABLE else used


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
