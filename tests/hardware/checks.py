"""The table of checks, in the order of their execution: what the project relies on most comes first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from tests.hardware import checks_busy as busy
from tests.hardware import checks_compute as compute
from tests.hardware import checks_costs as costs
from tests.hardware import checks_driver as driver
from tests.hardware import checks_frameworks as frameworks
from tests.hardware import checks_handles as handles
from tests.hardware import checks_looks as looks
from tests.hardware import checks_memory as memory
from tests.hardware import checks_mps as mps
from tests.hardware import checks_offered as offered
from tests.hardware import checks_product as product
from tests.hardware import checks_switches as switches
from tests.hardware.session import Result, Session

HARDWARE, TORCH, FRAMEWORK = "hardware", "torch", "framework"


class Check(NamedTuple):
    """`limit_s`: time limit of the check.

    `needs`: HARDWARE if a simulator cannot answer it, TORCH for PyTorch, FRAMEWORK for a package that the check itself
    looks for.
    """

    name: str
    what: str
    function: Callable[[Session], Result]
    limit_s: float
    needs: str = ""


def _framework(check: str, name: str, what: str, limit_s: float = 40, needs: str = TORCH) -> Check:
    return Check(check, f"{what} up to the limit", functools.partial(frameworks.limit, name=name), limit_s, needs)


CHECKS = (
    Check("context", "memory that a context takes", memory.context, 30),
    Check("modules", "memory that 1, 10 and 100 small modules take", costs.modules, 40),
    Check("local", "local memory that a launch takes", costs.local, 15),
    Check("reserved", "how much memory of a device can be allocated", costs.reserved, 20),
    Check("slices", "time slices of two contexts", switches.slices, 20, HARDWARE),
    Check("hand-over", "switches to a context with short kernels, and back", switches.handed_over, 15, HARDWARE),
    Check("looks", "whether events in an empty stream wait for a time slice of their context", looks.looks, 20),
    Check("queues", "streams whose work delays an event in another stream", looks.queues, 15),
    Check("descriptors", "descriptors of exported memory", handles.descriptors, 15),
    Check("private-loader", "modules that the runtime library loads", handles.private_loader, 30),
    Check("green", "events and launches in streams of green contexts", handles.green, 20),
    _framework("limit.torch", "eager", "PyTorch"),
    _framework("limit.compiled", "compiled", "torch.compile", 60),
    _framework("limit.graphs", "graphs", "PyTorch's CUDA graphs"),
    _framework("limit.expandable", "expandable", "PyTorch with expandable segments"),
    _framework("limit.async", "async", "PyTorch with cudaMallocAsync"),
    _framework("limit.triton", "triton", "a kernel in Triton"),
    _framework("limit.cupy", "cupy", "CuPy", needs=FRAMEWORK),
    _framework("limit.numba", "numba", "Numba", needs=FRAMEWORK),
    _framework("limit.jax", "jax", "JAX", needs=FRAMEWORK),
    Check("nccl", "NCCL in two processes of one share", frameworks.nccl, 60, TORCH),
    Check("compute.30_70", "30 % and 70 % at the same time", compute.shared, 30),
    Check("compute.10_20_30_40", "10, 20, 30 and 40 % at the same time", compute.four, 35),
    Check("torch.30_70", "PyTorch, 30 % and 70 % at the same time", compute.torch_shared, 45, TORCH),
    Check("torch.10_20_30_40", "PyTorch, 10, 20, 30 and 40 % at the same time", compute.torch_four, 60, TORCH),
    Check("loader", "programs load the shim", driver.loader, 20),
    Check("memory.plain", "cuMemAlloc up to the limit", memory.plain, 20),
    Check("memory.async", "cuMemAllocAsync up to the limit", memory.asynchronous, 20),
    Check("memory.vmm", "cuMemCreate and cuMemMap up to the limit", memory.virtual, 20),
    Check("memory.managed", "cuMemAllocManaged up to the limit", memory.managed, 20),
    Check("memory.processes", "two processes of one share", memory.processes, 20),
    Check("memory.nvml", "NVML and nvidia-smi show the limit", memory.nvml, 20),
    Check("compute.30", "30 %, alone", compute.thirty, 30),
    Check("compute.5", "5 %, alone", compute.five, 30),
    Check("compute.graph", "30 %, alone, CUDA graphs", compute.graph, 30),
    Check(
        "compute.told", "30 % and 70 %, with measured slices in the configuration", compute.shared_told, 30, HARDWARE
    ),
    Check("compute.waiting", "streams that wait for each other, 5 %", compute.waiting, 30),
    Check("run", "gpushare run on this machine", product.run, 30),
    Check("run.compute", "gpushare run with 30 % of compute", product.run_compute, 30),
    Check("latency", "calls, native and under the shim", driver.latency, 40),
    Check("pool", "how a memory pool grows", memory.pool, 20),
    Check("compute.uncapped", "speed under the shim, no limit", compute.native, 40),
    Check("torch.uncapped", "PyTorch under the shim, no limit", compute.torch_native, 60, TORCH),
    Check("torch.graph", "PyTorch, CUDA graphs, 30 %", compute.torch_graph, 60, TORCH),
    Check("compute.shapes", "30 %, alone, programs of several kinds", busy.shapes, 60),
    Check("compute.pairs", "kernels that spin for each other, 5 %", busy.pairs, 40),
    Check("mps", "gpushare mps, and a program with 30 % of it", mps.mps, 60),
    Check("mps.words", "answers of nvidia-cuda-mps-control", offered.mps_words, 60),
    Check("dmem", "the kernel's limits on device memory", offered.dmem, 20),
    Check("prefetch.batch", "many prefetches as one call", offered.prefetch_batch, 20),
    Check("conformance", "whether the driver behaves as the simulator models it", driver.conformance, 110),
)
