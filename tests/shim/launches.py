"""Helper functions for programs that launch kernels, and their device time from the ledger."""

from __future__ import annotations

from simulator.ledger import Ledger
from tests.shim.box import Box

POINTS = 5.0
SETTLED_S = 0.5
WINDOW_S = 1.0
BUSY = {"kernel": 1000}

HELPERS = """
def kernel(name):
    module, function = c_void_p(), c_void_p()
    ok(cuda.cuModuleLoadData(byref(module), b"SIMMOD globals=0 code=1\\n"))
    ok(cuda.cuModuleGetFunction(byref(function), module, name.encode()))
    return function

def launch(function, stream=None, grid=1):
    return cuda.cuLaunchKernel(function, grid, 1, 1, 1, 1, 1, 0, stream, None, None)

def new_stream(flags=1):
    stream = c_void_p()
    ok(cuda.cuStreamCreate(byref(stream), flags))
    return stream

def nvml_device():
    nvml, device = ctypes.CDLL("libnvidia-ml.so.1"), c_void_p()
    ok(nvml.nvmlInit_v2())
    ok(nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(device)))
    return nvml, device

def nvml_memory():
    "Total, free and used."
    memory, (nvml, device) = (c_uint64 * 3)(), nvml_device()
    ok(nvml.nvmlDeviceGetMemoryInfo(device, memory))
    return tuple(memory)

def sweep(function, address, size, ns=100_000):
    "Read all of it: the kernel is sweep_ns_arg."
    words = (c_uint64(ns), address, c_uint64(size))
    places = (c_void_p * 3)(*(ctypes.addressof(word) for word in words))
    ok(cuda.cuLaunchKernel(function, 64, 1, 1, 1, 1, 1, 0, None, places, None))

def timed(call):
    "Seconds that a call took."
    began = time.monotonic()
    ok(call())
    return time.monotonic() - began
"""


def percent_held(box: Box, seconds: float) -> float:
    """Return the percentage of a device's time that all programs in the box used, of so many seconds."""
    with Ledger(box.device()) as ledger:
        return 100 * sum(group.busy_ns for group in ledger.groups()) / seconds / 1e9
