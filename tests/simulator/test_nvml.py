"""Simulated NVML under an unmodified nvidia-ml-py, and the nvidia-smi stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from simulator import models
from simulator.simhost import LIBDIR, VERSION, default_uuid
from tests.simulator.test_ledger import CONTEXT, MIB
from tests.support.remote import Remote

Start = Callable[..., Remote]
RESERVED = models.MODELS[models.DEFAULT].reserved_bytes

REPORT = """
import json, pynvml as n
n.nvmlInit()
def device(i):
    h = n.nvmlDeviceGetHandleByIndex(i)
    v1, v2, pci = n.nvmlDeviceGetMemoryInfo(h), n.nvmlDeviceGetMemoryInfo(h, n.nvmlMemory_v2), n.nvmlDeviceGetPciInfo(h)
    rates = n.nvmlDeviceGetUtilizationRates(h)
    assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(n.nvmlDeviceGetUUID(h))) == i
    assert n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(pci.busId)) == i
    return {
        "name": n.nvmlDeviceGetName(h), "uuid": n.nvmlDeviceGetUUID(h), "bus": pci.busId,
        "minor": n.nvmlDeviceGetMinorNumber(h), "v1": [v1.total, v1.free, v1.used],
        "v2": [v2.total, v2.reserved, v2.free, v2.used], "gpu": rates.gpu,
        "processes": [[p.pid, p.usedGpuMemory] for p in n.nvmlDeviceGetComputeRunningProcesses(h)],
        "capability": n.nvmlDeviceGetCudaComputeCapability(h),
    }
devices = [device(i) for i in range(n.nvmlDeviceGetCount())]
report = {"driver": n.nvmlSystemGetDriverVersion(), "cuda": n.nvmlSystemGetCudaDriverVersion(), "devices": devices}
n.nvmlShutdown()
try:
    n.nvmlDeviceGetCount()
except n.NVMLError_Uninitialized:
    report["after"] = "uninitialized"
print(json.dumps(report))
"""


def report(root: Path) -> dict[str, Any]:
    env = {**os.environ, "LD_LIBRARY_PATH": str(root / LIBDIR)}
    done = subprocess.run([sys.executable, "-c", REPORT], check=True, capture_output=True, text=True, env=env)
    return dict(json.loads(done.stdout))


def test_nvidia_ml_py_reads_the_devices(make_host: Callable[..., Path]) -> None:
    root = make_host("two", gpus=2, memory_bytes=8 << 30, model="NVIDIA Test Card")
    said = report(root)
    assert (said["driver"], said["cuda"], said["after"]) == (VERSION, 12020, "uninitialized")
    assert [d["uuid"] for d in said["devices"]] == [default_uuid(0), default_uuid(1)]
    assert [d["minor"] for d in said["devices"]] == [0, 1]
    first = said["devices"][0]
    assert first["name"] == "NVIDIA Test Card" and first["bus"] == "00000000:01:00.0" and first["capability"] == [8, 6]
    assert first["v1"] == [(8 << 30) + RESERVED, 8 << 30, RESERVED]  # used has the reserved memory
    assert first["v2"] == [(8 << 30) + RESERVED, RESERVED, 8 << 30, 0] and first["gpu"] == 0


def test_totals_of_the_h100_are_the_measured_ones(make_host: Callable[..., Path]) -> None:
    (device,) = report(make_host(model="NVIDIA H100 80GB HBM3"))["devices"]
    assert device["v1"] == [85520809984, 85017493504, 503316480]
    assert device["v2"] == [85520809984, 503316480, 85017493504, 0]


def test_memory_and_processes_are_reported(start: Start, simhost: Path) -> None:
    a, b, idle = start(), start(), start()
    a.do("cuda.context(); cuda.alloc(100 << 20)")
    b.do("cuda.context()")
    idle.do("cuda.init()")
    (device,) = report(simhost)["devices"]
    used = 2 * CONTEXT + 100 * MIB
    assert device["v1"] == [(16 << 30) + RESERVED, (16 << 30) - used, RESERVED + used]
    assert sorted(device["processes"]) == sorted([[a.pid, CONTEXT + 100 * MIB], [b.pid, CONTEXT]])
    a.kill()
    (device,) = report(simhost)["devices"]
    assert device["processes"] == [[b.pid, CONTEXT]]


BUSY = """
import threading
cuda.context()
function, stream = cuda.function(cuda.load(b"SIMMOD globals=0 code=1\\n\\0"), "spin_us_10000"), cuda.stream(1)
[cuda.launch(function, stream) for _ in range(900)]
"""


def test_nvml_works_in_one_process_with_cuda(start: Start, simhost: Path) -> None:
    """NVML opening and closing the device must not tear down libcuda's client in the same process."""
    p, witness = start(env={"LD_LIBRARY_PATH": str(simhost / LIBDIR)}), start()
    p.do("cuda.context(); cuda.alloc(1 << 30)\nimport pynvml as n\nn.nvmlInit(); n.nvmlShutdown(); n.nvmlInit()")
    p.do("h = n.nvmlDeviceGetHandleByIndex(0)")
    assert p.get("[q.pid for q in n.nvmlDeviceGetComputeRunningProcesses(h)]") == [p.pid]
    p.do("n.nvmlShutdown()")
    witness.do("cuda.context()")
    assert witness.get("cuda.total_bytes() - cuda.free_bytes()") == 2 * CONTEXT + (1 << 30)


def test_nvidia_smi_prints_memory_and_processes(start: Start, simhost: Path) -> None:
    p = start()
    p.do("cuda.context()")
    env = {**os.environ, "LD_LIBRARY_PATH": str(simhost / LIBDIR)}
    smi = str(simhost / "usr/bin/nvidia-smi")
    listed = subprocess.run([smi, "-L"], check=True, capture_output=True, text=True, env=env).stdout
    assert listed == f"GPU 0: NVIDIA Simulated A16 (UUID: {default_uuid(0)})\n"
    table = subprocess.run([smi], check=True, capture_output=True, text=True, env=env).stdout
    assert VERSION in table and "300MiB /   16768MiB" in table and f"pid {p.pid}" in table


WATCH_PROCESSES = """
import time, pynvml as n
n.nvmlInit()
h = n.nvmlDeviceGetHandleByIndex(0)
time.sleep(0.2)
print(n.nvmlDeviceGetUtilizationRates(h).gpu, {s.pid: s.smUtil for s in n.nvmlDeviceGetProcessUtilization(h, 0)})
"""


def test_utilization_of_processes_is_their_device_time(start: Start, simhost: Path) -> None:
    busy, idle = start(), start()
    idle.do(BUSY.replace("900", "20"))
    idle.do("cuda.synchronize()")  # time held before the first NVML sample is not reported
    busy.do(BUSY)
    env = {**os.environ, "LD_LIBRARY_PATH": str(simhost / LIBDIR)}
    done = subprocess.run([sys.executable, "-c", WATCH_PROCESSES], check=True, capture_output=True, text=True, env=env)
    rate, _, processes = done.stdout.partition(" ")
    assert 90 <= int(rate) <= 100 and eval(processes) == {busy.pid: 100, idle.pid: 0}
