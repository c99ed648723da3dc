"""Set memory limits of a cgroup through NVML, which the driver enforces: for kernels without dmem controller.

    put(library, uuid, directory, hard, soft)     in a child with a deadline; None: no limit

A start queries NVML only in this case. Soft and hard limit have the values that dmem/regions.py gives to dmem.min and
dmem.max. Source: nvml.h of CUDA 13.4, nvmlSetMemoryLimits_v1_t {nameSpace, softLimit, hardLimit}, and Get with
currentUsed behind these; NVML_DEVICE_MEMORY_LIMIT_MAX is all ones. Raises DeviceError.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, Optional

from ..core.errors import DeviceError
from ..core.quoting import shown
from . import nvml

DEADLINE_S = 10.0
MAX = (1 << 64) - 1
_SET, _GET = "nvmlDeviceSetMemoryLimits_v1", "nvmlDeviceGetMemoryLimits_v1"


class Set(ctypes.Structure):
    _fields_ = [("nameSpace", ctypes.c_char_p), ("softLimit", ctypes.c_uint64), ("hardLimit", ctypes.c_uint64)]


class Get(ctypes.Structure):
    _fields_ = [*Set._fields_, ("currentUsed", ctypes.c_uint64)]


def put(library: str, uuid: str, directory: str, hard: Optional[int], soft: Optional[int]) -> None:
    """Set the limits of cgroup `directory` on device `uuid`, and read the hard limit back."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        nvml.detach(writer)
        try:
            reason = _put(library, uuid, directory, MAX if hard is None else hard, soft or 0)
        except BaseException as error:  # no code of the parent may run in the child
            reason = f"{type(error).__name__}: {error}"
        os.write(3, (reason or "done").encode("utf-8", "replace"))
        os._exit(0)
    os.close(writer)
    try:
        answer = nvml.read_until(reader, time.monotonic() + DEADLINE_S).decode("utf-8", "replace")
    finally:
        os.close(reader)
        nvml.end(pid)
    if answer != "done":
        raise DeviceError(
            f"NVML cannot limit the memory of {uuid} for {shown(directory)}: "
            f"{answer or f'no answer in {DEADLINE_S:.0f} s'}",
            "use the backend shim",
        )


def _put(library: str, uuid: str, directory: str, hard: int, soft: int) -> str:
    """Set and verify the limit; return the reason of a failure, "" on success."""
    calls = ctypes.CDLL(library)
    if not hasattr(calls, _SET):
        return f"{library} has no {_SET}"

    def failed(name: str, *arguments: Any) -> str:
        code = getattr(calls, name)(*arguments)
        return f"{name} returned {code}" if code else ""

    device, name = ctypes.c_void_p(), os.fsencode(directory)
    wanted, found = Set(name, soft, hard), Get(name, 0, 0, 0)
    return (
        failed("nvmlInit_v2")
        or failed("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
        or failed(_SET, device, ctypes.byref(wanted))
        or failed(_GET, device, ctypes.byref(found))
        or ("" if 0 < found.hardLimit <= hard else f"{_GET} returned {found.hardLimit}, not {hard}")
    )
