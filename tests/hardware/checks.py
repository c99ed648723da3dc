"""The table of checks, in the order of their execution."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.hardware import checks_busy as busy
from tests.hardware import checks_compute as compute
from tests.hardware import checks_driver as driver
from tests.hardware import checks_looks as looks
from tests.hardware import checks_memory as memory
from tests.hardware import checks_mps as mps
from tests.hardware import checks_offered as offered
from tests.hardware import checks_product as product
from tests.hardware.session import Result, Session

HARDWARE, TORCH = "hardware", "torch"


class Check(NamedTuple):
    """`limit_s`: time limit of the check. `needs`: HARDWARE if a simulator cannot answer it, TORCH for PyTorch."""

    name: str
    what: str
    function: Callable[[Session], Result]
    limit_s: float
    needs: str = ""


CHECKS = (
    Check("context", "memory that a context takes", memory.context, 30),
    Check("loader", "the shim is what programs load", driver.loader, 30),
    Check("memory.plain", "cuMemAlloc up to the limit", memory.plain, 30),
    Check("memory.async", "cuMemAllocAsync up to the limit", memory.asynchronous, 30),
    Check("memory.vmm", "cuMemCreate and cuMemMap up to the limit", memory.virtual, 30),
    Check("memory.managed", "cuMemAllocManaged up to the limit", memory.managed, 30),
    Check("memory.processes", "two processes of one share", memory.processes, 30),
    Check("memory.nvml", "NVML and nvidia-smi show the limit", memory.nvml, 20),
    Check("memory.torch", "PyTorch up to the limit", product.torch_limit, 60, TORCH),
    Check("run", "gpushare run on this machine", product.run, 40),
    Check("run.compute", "gpushare run with 30 % of compute", product.run_compute, 40),
    Check("mps", "gpushare mps, and a program with 30 % of it", mps.mps, 60),
    Check("mps.words", "what nvidia-cuda-mps-control answers", offered.mps_words, 60),
    Check("dmem", "the kernel's limits on device memory", offered.dmem, 20),
    Check("prefetch.batch", "many prefetches as one call", offered.prefetch_batch, 20),
    Check("pool", "how a memory pool grows", memory.pool, 20),
    Check("latency", "calls, native and under the shim", driver.latency, 60),
    Check("slices", "time slices of two contexts", driver.slices, 20, HARDWARE),
    Check("looks", "events in an empty stream wait for the own time slice", looks.looks, 20),
    Check("compute.uncapped", "speed under the shim, no limit", compute.native, 45),
    Check("compute.30", "30 %, alone", compute.thirty, 45),
    Check("compute.5", "5 %, alone", compute.five, 45),
    Check("compute.graph", "30 %, alone, CUDA graphs", compute.graph, 45),
    Check("compute.30_70", "30 % and 70 % at the same time", compute.shared, 45),
    Check("compute.told", "the same, with this device's slices configured", compute.shared_told, 45, HARDWARE),
    Check("compute.waiting", "streams that wait for each other, 5 %", compute.waiting, 30),
    Check("compute.shapes", "30 %, alone, programs of several kinds", busy.shapes, 60),
    Check("compute.pairs", "kernels that spin for each other, 5 %", busy.pairs, 40),
    Check("torch.uncapped", "PyTorch under the shim, no limit", compute.torch_native, 90, TORCH),
    Check("torch.30_70", "PyTorch, 30 % and 70 % at the same time", compute.torch_shared, 90, TORCH),
    Check("torch.graph", "PyTorch, CUDA graphs, 30 %", compute.torch_graph, 90, TORCH),
    Check("conformance", "what the simulator models", driver.conformance, 110),
)
