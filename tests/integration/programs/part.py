"""In a container with a MIG device, beside demo/tenant.py: print what both libraries show of it, and the memory until
refused, in one line of JSON."""

from __future__ import annotations

import json
import uuid
from typing import Any

import pynvml
from cuda.bindings import driver as cuda
from tenant import allocate_until_refused, call


def shown() -> dict[str, Any]:
    """NVML's view: the GPU, without information of its own, and its MIG devices, each with (uuid, GPU instance, total,
    used)."""
    pynvml.nvmlInit()
    gpu, parts = pynvml.nvmlDeviceGetHandleByIndex(0), []
    for number in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number)
        except pynvml.NVMLError_NotFound:
            continue
        memory = pynvml.nvmlDeviceGetMemoryInfo(part)
        name = pynvml.nvmlDeviceGetUUID(part)
        same = pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(name))
        assert (same.total, same.used) == (memory.total, memory.used)
        pids = [one.usedGpuMemory for one in pynvml.nvmlDeviceGetComputeRunningProcesses(part)]
        parts.append([name, pynvml.nvmlDeviceGetGpuInstanceId(part), memory.total, memory.used, pids])
    try:
        whole = pynvml.nvmlDeviceGetMemoryInfo(gpu).total
    except pynvml.NVMLError as error:
        whole = type(error).__name__
    return {"mode": pynvml.nvmlDeviceGetMigMode(gpu)[0], "parts": parts, "whole": whole}


def main() -> None:
    call(cuda.cuInit(0))
    count = call(cuda.cuDeviceGetCount())
    device = call(cuda.cuDeviceGet(0))
    call(cuda.cuCtxSetCurrent(call(cuda.cuDevicePrimaryCtxRetain(device))))
    name = f"MIG-{uuid.UUID(bytes=call(cuda.cuDeviceGetUuid_v2(device)).bytes)}"
    totals = [call(cuda.cuMemGetInfo())[1], call(cuda.cuDeviceTotalMem(device))]
    _, got, refusal = allocate_until_refused()
    print(json.dumps({"count": count, "uuid": name, "totals": totals, "got": got, "refusal": refusal, **shown()}))


if __name__ == "__main__":
    main()
