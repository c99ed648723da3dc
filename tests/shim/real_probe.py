"""Inspect libraries from inside a process. Runs in the box: `real_probe.py FUNCTION JSON-ARGUMENTS` prints JSON.

It uses only the standard library and nothing of this project, so it sees what any program sees.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from typing import Any, Optional

libc = ctypes.CDLL(None)
libc.dlopen.restype = libc.dlmopen.restype = libc.dlsym.restype = ctypes.c_void_p
libc.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
libc.dlmopen.argtypes = (ctypes.c_long, ctypes.c_char_p, ctypes.c_int)
libc.dlsym.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
libc.dlclose.argtypes = (ctypes.c_void_p,)
libc.dlerror.restype = ctypes.c_char_p
RTLD_LAZY, RTLD_NOW, RTLD_NOLOAD, RTLD_DEEPBIND, RTLD_GLOBAL = 1, 2, 4, 8, 0x100
LM_ID_NEWLM = -1
UNTOUCHED = 0xDEAD  # initial value of a pointer, to detect that a look-up did not set it

REAL = {
    "libcuda.so.1": b"/usr/lib/gpushare/driver/libcuda-real.so.1",
    "libnvidia-ml.so.1": b"/usr/lib/gpushare/driver/libnvidia-ml-real.so.1",
}


class DlInfo(ctypes.Structure):
    _fields_ = (
        ("fname", ctypes.c_char_p),
        ("fbase", ctypes.c_void_p),
        ("sname", ctypes.c_char_p),
        ("saddr", ctypes.c_void_p),
    )


libc.dladdr.argtypes = (ctypes.c_void_p, ctypes.POINTER(DlInfo))


def owner(address: Optional[int]) -> str:
    """Return "real:NAME" or "shim:NAME" if the address is exactly that of an exported function; "" for NULL."""
    info = DlInfo()
    if not address or address == UNTOUCHED:
        return "untouched" if address else ""
    if not libc.dladdr(address, ctypes.byref(info)) or info.saddr != address:
        return "unknown"
    where = "real" if info.fname in REAL.values() else "shim" if b"/x86_64-linux-gnu/" in info.fname else "other"
    return f"{where}:{info.sname.decode()}"


def open_library(mode: str, library: str) -> int:
    name = library.encode()
    if mode == "dlmopen":
        return int(libc.dlmopen(LM_ID_NEWLM, name, RTLD_NOW) or 0)
    if mode == "noload":  # loaded by file name first, then found by its soname
        assert libc.dlopen(library[: -len(".1")].encode(), RTLD_NOW)
        return int(libc.dlopen(name, RTLD_NOW | RTLD_NOLOAD) or 0)
    if mode == "closed":  # loaded and unloaded first: afterwards the real library must not remain under this name
        handle = libc.dlopen(name, RTLD_NOW)
        init = libc.dlsym(handle, b"cuInit" if "cuda" in library else b"nvmlInitWithFlags")
        ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint)(init)(0)
        libc.dlclose(handle)
        return int(libc.dlopen(name, RTLD_NOW) or 0)
    flags = {"lazy": RTLD_LAZY, "deepbind": RTLD_NOW | RTLD_DEEPBIND, "global": RTLD_NOW | RTLD_GLOBAL}
    return int(libc.dlopen(name, flags[mode]) or 0)


def owners(mode: str, library: str, names: list[str]) -> dict[str, str]:
    """Map each name to the library from which a program gets it after opening `library` in this mode."""
    handle = open_library(mode, library)
    assert handle, libc.dlerror()
    if mode == "global":
        handle = 0  # RTLD_DEFAULT
    return {name: owner(libc.dlsym(handle, name.encode())) for name in names}


def cuda_init() -> int:
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def nvml_init(function: str, arguments: list[int]) -> int:
    return int(ctypes.CDLL("libnvidia-ml.so.1")[function](*arguments))


def call(library: str, function: str, arguments: list[Any]) -> int:
    """Return the result of one call; the argument None is NULL."""
    return int(ctypes.CDLL(library)[function](*arguments))


def proc_addresses(names: list[str], versions: list[int]) -> list[list[Any]]:
    """Return [api, name, version, flags, shim, real] for each look-up; the last two are [result, status, owner]."""
    shim = ctypes.CDLL("libcuda.so.1")
    real = ctypes.CDLL(REAL["libcuda.so.1"].decode(), mode=RTLD_NOLOAD | RTLD_NOW)
    assert owner(ctypes.cast(real.cuGetProcAddress_v2, ctypes.c_void_p).value) == "real:cuGetProcAddress_v2"
    cache: dict[Optional[int], str] = {}
    rows = []
    for name in names:
        for version in versions:
            for flags in (0, 1, 2):
                for api in ("cuGetProcAddress", "cuGetProcAddress_v2"):
                    answers = [look_up(library[api], api, name, version, flags) for library in (shim, real)]
                    for answer in answers:
                        if answer[2] not in cache:
                            cache[answer[2]] = owner(answer[2])
                        answer[2] = cache[answer[2]]
                    rows.append([api, name, version, flags, *answers])
    return rows


def proc_addresses_at_once(names: list[str], threads: int) -> list[list[str]]:
    """Look up all names in `threads` threads at the same instant; return the owners for each thread."""
    shim = ctypes.CDLL("libcuda.so.1")
    start = threading.Barrier(threads)
    found: list[list[int]] = [[] for _ in range(threads)]

    def work(mine: list[int]) -> None:
        start.wait()
        mine += [look_up(shim.cuGetProcAddress_v2, "_v2", name, 12000, 0)[2] for name in names]

    workers = [threading.Thread(target=work, args=(mine,)) for mine in found]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [[owner(address) for address in mine] for mine in found]


def look_up(function: Any, api: str, name: str, version: int, flags: int) -> list[Any]:
    """Return [result, status, address] of one look-up; status is -1 where the API has none."""
    pointer, status = ctypes.c_void_p(UNTOUCHED), ctypes.c_int(-1)
    more = (ctypes.byref(status),) if api.endswith("_v2") else ()
    result = function(name.encode(), ctypes.byref(pointer), version, ctypes.c_uint64(flags), *more)
    return [result, status.value, pointer.value]


def descriptors_and_environment(library: str, init: str) -> list[Any]:
    """Return what loading and starting a library leaves behind: open files, umask, environment, output on stderr."""

    def look() -> list[Any]:
        umask = os.umask(0)
        os.umask(umask)
        return [sorted(os.listdir("/proc/self/fd")), umask, dict(os.environ), open("/proc/self/comm").read()]

    before = look()
    ctypes.CDLL(library)[init](0)
    return [before, look()]


def runtime(path: str) -> list[Any]:
    """Return [[result, version] of cudaDriverGetVersion, result of cudaGetDeviceCount, result of cudaMalloc]."""
    cudart = ctypes.CDLL(path)
    version, count, pointer = ctypes.c_int(-1), ctypes.c_int(-1), ctypes.c_void_p()
    return [
        [cudart.cudaDriverGetVersion(ctypes.byref(version)), version.value],
        cudart.cudaGetDeviceCount(ctypes.byref(count)),
        cudart.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 20)),
    ]


def each(*calls: list[Any]) -> list[Any]:
    """Make several calls, [FUNCTION, ARGUMENT, ...] each, in one process."""
    return [globals()[name](*arguments) for name, *arguments in calls]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
