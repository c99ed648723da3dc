"""An NVML client that returns what nvidia-ml-py reports of device INDEX. Runs in the box, like real_probe.py."""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import pynvml as nvml

SIZES = {"v1": 16, "v2": 24, "v3": 24}


def start(index: int) -> Any:
    nvml.nvmlInit()
    return nvml.nvmlDeviceGetHandleByIndex(index)


def error_of(function: Any, *arguments: Any) -> int:
    """Return NVML's error code of a call, 0 when it succeeds."""
    try:
        function(*arguments)
    except nvml.NVMLError as error:
        return int(error.value)
    return 0


def memory(index: int) -> dict[str, list[int]]:
    """Return [total, used, free, reserved] of versions 1 (reserved 0) and 2; and BAR1's [total, used, free]."""
    handle = start(index)
    v1 = nvml.nvmlDeviceGetMemoryInfo(handle)
    v2 = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    bar1 = nvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    return {
        "v1": [v1.total, v1.used, v1.free, 0],
        "v2": [v2.total, v2.used, v2.free, v2.reserved],
        "bar1": [bar1.bar1Total, bar1.bar1Used, bar1.bar1Free],
    }


def function(name: str) -> Any:
    return ctypes.CDLL("libnvidia-ml.so.1")[name]


def errors(index: int) -> dict[str, int]:
    """Return the error code of each kind of call that reports numbers of a device."""
    handle = start(index)
    return {
        "memory": error_of(nvml.nvmlDeviceGetMemoryInfo, handle),
        "memory v2": error_of(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2),
        "processes": error_of(nvml.nvmlDeviceGetComputeRunningProcesses, handle),
        "utilization": error_of(nvml.nvmlDeviceGetProcessUtilization, handle, 0),
    }


def null_and_wrong(index: int) -> dict[str, int]:
    """Return the error codes of calls with a NULL result pointer, with another structure version, with no device."""
    handle = start(index)
    wrong = nvml.c_nvmlMemory_v2_t()
    wrong.version = 99
    room = ctypes.c_uint(5)
    memory = nvml.c_nvmlMemory_t()
    return {
        "memory NULL": function("nvmlDeviceGetMemoryInfo")(handle, None),
        "memory v2 NULL": function("nvmlDeviceGetMemoryInfo_v2")(handle, None),
        "memory v2 version": function("nvmlDeviceGetMemoryInfo_v2")(handle, ctypes.byref(wrong)),
        "no device": function("nvmlDeviceGetMemoryInfo")(None, ctypes.byref(memory)),
        "count NULL": function("nvmlDeviceGetComputeRunningProcesses_v3")(handle, None, None),
        "room without list": function("nvmlDeviceGetComputeRunningProcesses_v3")(handle, ctypes.byref(room), None),
        "details NULL": function("nvmlDeviceGetRunningProcessDetailList")(handle, None),
    }


def listed(index: int, kind: str, version: str, room: int) -> list[Any]:
    """Return [result, count, [[pid, bytes, gpu instance, compute instance], ...]] with room for `room` processes."""
    handle = start(index)
    suffix = "" if version == "v1" else f"_{version}"
    buffer = ctypes.create_string_buffer(SIZES[version] * max(room, 1))
    count = ctypes.c_uint(room)
    call = function(f"nvmlDeviceGet{kind}RunningProcesses{suffix}")
    result = call(handle, ctypes.byref(count), buffer if room else None)
    rows = []
    for i in range(min(count.value, room) if result == 0 else 0):
        raw = buffer.raw[i * SIZES[version] : (i + 1) * SIZES[version]]
        pid, used = int.from_bytes(raw[:4], "little"), int.from_bytes(raw[8:16], "little")
        instances = [int.from_bytes(raw[at : at + 4], "little") for at in (16, 20)] if version != "v1" else []
        rows.append([pid, used, *instances])
    return [result, count.value, rows]


def details(index: int, mode: int, room: int) -> list[Any]:
    """Return [result, count, [[pid, bytes], ...]] of nvmlDeviceGetRunningProcessDetailList."""
    handle = start(index)
    array = (nvml.c_nvmlProcessDetail_v1_t * max(room, 1))()
    request = nvml.c_nvmlProcessDetailList_v1_t()
    request.version, request.mode, request.numProcArrayEntries = nvml.nvmlProcessDetailList_v1, mode, room
    request.procArray = ctypes.cast(array, type(request.procArray))
    result = function("nvmlDeviceGetRunningProcessDetailList")(handle, ctypes.byref(request))
    rows = [[array[i].pid, array[i].usedGpuMemory] for i in range(room)] if result == 0 else []
    return [result, request.numProcArrayEntries, rows[: request.numProcArrayEntries]]


def utilization(index: int, room: int) -> list[Any]:
    """Return [result, count, pids of all `room` entries] of nvmlDeviceGetProcessUtilization."""
    handle = start(index)
    samples = (nvml.c_nvmlProcessUtilizationSample_t * room)()
    count = ctypes.c_uint(room)
    call = function("nvmlDeviceGetProcessUtilization")
    result = call(handle, samples if room else None, ctypes.byref(count), ctypes.c_ulonglong(0))
    return [result, count.value, [sample.pid for sample in samples]]


def driver_that_starts_itself() -> int:
    """Return the result of a passed-through function that calls nvmlInit_v2 inside the driver."""
    text = ctypes.create_string_buffer(80)
    return int(function("nvmlSystemGetDriverVersion")(text, 80))


def each(*calls: list[Any]) -> list[Any]:
    """Make several calls, [FUNCTION, ARGUMENT, ...] each, in one process."""
    return [globals()[name](*arguments) for name, *arguments in calls]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
