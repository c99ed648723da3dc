"""An unmodified cuda-bindings from the Python package index runs on the simulated driver."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from simulator.simhost import LIBDIR, default_uuid

PROGRAM = """
from cuda.bindings import driver as d

def ok(answer):
    code, *rest = answer
    assert code == d.CUresult.CUDA_SUCCESS, code
    return rest[0] if len(rest) == 1 else rest

ok(d.cuInit(0))
device = ok(d.cuDeviceGet(0))
assert ok(d.cuDeviceGetCount()) == 1 and ok(d.cuDriverGetVersion()) == 12020
assert ok(d.cuDeviceGetName(64, device)).rstrip(b" \\0") == b"NVIDIA Simulated A16"
print(ok(d.cuDeviceGetUuid(device)).bytes.hex())
ok(d.cuCtxSetCurrent(ok(d.cuDevicePrimaryCtxRetain(device))))
free, total = ok(d.cuMemGetInfo())
address = ok(d.cuMemAlloc(3 << 20))
assert free - ok(d.cuMemGetInfo())[0] == 4 << 20 and total == 16 << 30
data, back = bytes(range(256)) * 16, bytearray(4096)
ok(d.cuMemcpyHtoD(address, data, len(data)))
ok(d.cuMemcpyDtoH(back, address, len(back)))
assert bytes(back) == data
module = ok(d.cuModuleLoadData(b"SIMMOD globals=4096 code=8192 functions=spin_us_2000\\n\\0"))
kernel = ok(d.cuModuleGetFunction(module, b"spin_us_2000"))
variable, size = ok(d.cuModuleGetGlobal(module, b"globals"))
assert size == 4096
stream, start, end = ok(d.cuStreamCreate(0)), ok(d.cuEventCreate(0)), ok(d.cuEventCreate(0))
ok(d.cuEventRecord(start, stream))
for _ in range(5):
    ok(d.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
ok(d.cuEventRecord(end, stream))
assert d.cuEventQuery(end)[0] == d.CUresult.CUDA_ERROR_NOT_READY
ok(d.cuEventSynchronize(end))
assert 10 <= ok(d.cuEventElapsedTime(start, end)) < 60
temporary = ok(d.cuMemAllocAsync(1000, stream))
ok(d.cuMemFreeAsync(temporary, stream))
ok(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
ok(d.cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, 0, 0))
graph = ok(d.cuGraphInstantiate(ok(d.cuStreamEndCapture(stream)), 0))
ok(d.cuGraphLaunch(graph, stream))
ok(d.cuStreamSynchronize(stream))
ok(d.cuModuleUnload(module))
ok(d.cuMemFree(address))
ok(d.cuDevicePrimaryCtxRelease(device))
"""


def test_cuda_bindings_run(simhost: Path) -> None:
    env = {**os.environ, "LD_LIBRARY_PATH": str(simhost / LIBDIR)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == default_uuid(0)[4:].replace("-", "")
