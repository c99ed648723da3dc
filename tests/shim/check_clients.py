"""Unmodified clients of the driver API from the package index keep their limits: make test-clients.

Not part of make test, since they are several hundred megabytes. Each runs under the shim over the simulated driver.
Calls that need NVIDIA's runtime library are left out: that library runs on NVIDIA's driver only.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.shim.box import GIB, Box
from tests.support.host import BUILD

MIB = 1 << 20
LIMIT = 2 * GIB
KERNEL = "spin_us_2000"
IMAGE = f"SIMMOD globals=4096 code=8192 functions={KERNEL}\n"


class Client(NamedTuple):
    requirement: str
    program: str  # defines launch, wait, total and allocate for END; None where the client has no such call


CLIENTS = {
    "cuda-bindings": Client(
        "cuda-bindings==13.5.0",
        """
from cuda.bindings import driver as d

def ok(answer):
    code, *rest = answer
    assert code == d.CUresult.CUDA_SUCCESS, code
    return rest[0] if len(rest) == 1 else rest

ok(d.cuInit(0))
ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(ok(d.cuDeviceGet(0))))))
kernel = ok(d.cuModuleGetFunction(ok(d.cuModuleLoadData(IMAGE)), KERNEL))
stream = ok(d.cuStreamCreate(0))

def launch():
    ok(d.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))

def wait():
    ok(d.cuStreamSynchronize(stream))

def total():
    return ok(d.cuMemGetInfo())[1]

def allocate(size):
    return d.cuMemAlloc(size)[0] == d.CUresult.CUDA_SUCCESS
""",
    ),
    "numba-cuda": Client(
        "numba-cuda==0.30.4",
        """
import numba_cuda, numpy
from numba import cuda
from cuda.core import Device, LaunchConfig, ObjectCode, launch as core_launch

context = cuda.current_context()
data = cuda.to_device(numpy.arange(1 << 20, dtype=numpy.float32))
assert data.copy_to_host().sum() == numpy.arange(1 << 20, dtype=numpy.float32).sum()
del data
device = Device(0)
device.set_current()
stream, kept = device.create_stream(), []
kernel = ObjectCode.from_cubin(IMAGE).get_kernel(KERNEL)

def launch():
    core_launch(stream, LaunchConfig(grid=1, block=32), kernel)

def wait():
    stream.sync()

def total():
    return context.get_memory_info().total

def allocate(size):
    try:
        kept.append(cuda.device_array(size, dtype=numpy.uint8))
    except cuda.cudadrv.driver.CudaAPIError as error:
        assert "CUDA_ERROR_OUT_OF_MEMORY" in str(error)
        return False
    return True
""",
    ),
    "cupy": Client(
        "cupy-cuda13x==14.2.0",
        """
import ctypes
from cupy_backends.cuda.api import driver

assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 0
context = driver.ctxCreate(0)
module = driver.moduleLoadData(IMAGE)
kernel = driver.moduleGetFunction(module, KERNEL.decode())
total = allocate = None

def launch():
    driver.launchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0)

def wait():
    assert ctypes.CDLL("libcuda.so.1").cuCtxSynchronize() == 0
""",
    ),
}
BEGIN = f"import time\nIMAGE, KERNEL = {IMAGE.encode()!r}, {KERNEL.encode()!r}\n"
END = """
began, got = time.monotonic(), 0
for _ in range(200):
    launch()
wait()
took = time.monotonic() - began
while allocate and allocate(16 << 20):
    got += 16 << 20
print(total() if total else "-", got, took)
"""


def installed(name: str) -> Path:
    """Install a client once into build/clients."""
    directory = BUILD / "clients" / CLIENTS[name].requirement
    directory.parent.mkdir(exist_ok=True)
    with open(f"{directory}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            fresh = directory.with_suffix(".new")
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*command, "--target", fresh, CLIENTS[name].requirement], check=True)
            fresh.rename(directory)
    return directory


@pytest.mark.parametrize("name", CLIENTS)
def test_client_has_its_limits(name: str) -> None:
    no_warning = {"CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING": "1"}  # the simulated driver is of CUDA 12
    environment = {**os.environ, **no_warning, "PYTHONPATH": str(installed(name))}
    with Box([LIMIT], compute=[25]) as box:
        program = BEGIN + CLIENTS[name].program + END
        done = box.run([sys.executable, "-c", program], env=environment)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        total, got, took = done.stdout.split()
    assert total in ("-", str(LIMIT))
    if total != "-":
        assert LIMIT - 512 * MIB < int(got) < LIMIT
    assert 1.2 < float(took) < 6, "400 ms of work at 25 %"
