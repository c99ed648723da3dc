"""The table of checks, in the order of their execution.

Checks that never ran on hardware come first, then the checks of promises to users, then the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from tests.hardware import checks_busy as busy
from tests.hardware import checks_compute as compute
from tests.hardware import checks_containers as containers
from tests.hardware import checks_costs as costs
from tests.hardware import checks_count as count
from tests.hardware import checks_driver as driver
from tests.hardware import checks_forks as forks
from tests.hardware import checks_frameworks as frameworks
from tests.hardware import checks_handles as handles
from tests.hardware import checks_looks as looks
from tests.hardware import checks_memory as memory
from tests.hardware import checks_mps as mps
from tests.hardware import checks_offered as offered
from tests.hardware import checks_product as product
from tests.hardware import checks_programs as programs
from tests.hardware import checks_suspend as suspend
from tests.hardware import checks_switches as switches
from tests.hardware.session import Result, Session

HARDWARE, TORCH, FRAMEWORK = "hardware", "torch", "framework"


class Check(NamedTuple):
    """`limit_s`: time limit of the check.

    `needs`: HARDWARE if a simulator cannot answer it, TORCH for PyTorch, FRAMEWORK for a package that the check itself
    looks for.

    `quick`: it belongs to the checks that show in two minutes whether gpushare works on a machine.

    `named`: it runs only if it is named (--only).
    """

    name: str
    what: str
    function: Callable[[Session], Result]
    limit_s: float
    needs: str = ""
    quick: bool = False
    named: bool = False


def _framework(check: str, name: str, what: str, limit_s: float = 30, needs: str = TORCH, quick: bool = False) -> Check:
    function = functools.partial(frameworks.limit, name=name)
    return Check(check, f"{what} up to the limit", function, limit_s, needs, quick)


def _program(check: str, name: str, what: str, quick: bool = False) -> Check:
    function = functools.partial(programs.program, name=name)
    return Check(check, f"{what}, alone, 50 %", function, 45, TORCH, quick)


def _turns(check: str, percents: tuple[int, ...], what: str, torch: str = "") -> Check:
    function = functools.partial(compute.turns, percents=percents, torch=torch)
    return Check(check, what, function, 60, TORCH if torch else "", named=True)


CHECKS = (
    Check("context", "memory that a context takes", memory.context, 30, quick=True),
    # Not yet run on hardware
    Check("mps", "gpushare mps, and a program with 30 % of it", mps.mps, 40, quick=True),
    Check("dmem", "the kernel's limits on device memory", offered.dmem, 10, quick=True),
    Check("prefetch.batch", "many prefetches as one call", offered.prefetch_batch, 10, quick=True),
    Check("compute.pairs", "kernels that spin for each other, 20 %", busy.pairs, 30, quick=True),
    Check("count", "what NVML counts of a process, and how fast", count.count, 30, quick=True),
    Check("forks", "memory of a process that has ended before its forked child", forks.forks, 30, HARDWARE, quick=True),
    Check("suspend", "a process that gives its memory back and gets it again", suspend.suspend, 60, quick=True),
    Check("containers", "two containers of runc, 30 % and 70 %", containers.containers, 70, quick=True),
    _program("train.alone", "train", "training of ResNet-50", quick=True),
    Check("mps.words", "answers of nvidia-cuda-mps-control", offered.mps_words, 30),
    Check("costs", "memory that streams, events, graphs and handles take", count.costs, 40),
    _program("decode", "decode", "decoding of tokens"),
    _program("data-loader", "loader", "training that waits for data"),
    Check("conformance", "whether the driver behaves as the simulator models it", driver.conformance, 60),
    # Promises to users
    Check("loader", "programs load the shim", driver.loader, 20, quick=True),
    Check("run", "gpushare run on this machine", product.run, 20, quick=True),
    Check("run.compute", "gpushare run with 30 % of compute", product.run_compute, 20, quick=True),
    Check("memory.plain", "cuMemAlloc up to the limit", memory.plain, 20, quick=True),
    Check("memory.async", "cuMemAllocAsync up to the limit", memory.asynchronous, 20, quick=True),
    Check("memory.vmm", "cuMemCreate and cuMemMap up to the limit", memory.virtual, 20, quick=True),
    Check("memory.managed", "cuMemAllocManaged up to the limit", memory.managed, 20, quick=True),
    Check("memory.processes", "two processes of one share", memory.processes, 20, quick=True),
    Check("memory.nvml", "NVML and nvidia-smi show the limit", memory.nvml, 20, quick=True),
    Check("slices", "time slices of two contexts", switches.slices, 20, HARDWARE, quick=True),
    _framework("limit.torch", "eager", "PyTorch", quick=True),
    _framework("limit.graphs", "graphs", "PyTorch's CUDA graphs", quick=True),
    Check("compute.30", "30 %, alone", compute.thirty, 30, quick=True),
    Check("compute.30_70", "30 % and 70 % at the same time", compute.shared, 30, quick=True),
    Check("torch.30_70", "PyTorch, 30 % and 70 % at the same time", compute.torch_shared, 45, TORCH, quick=True),
    # Assumptions of gpushare
    Check("reserved", "how much memory of a device can be allocated", costs.reserved, 20),
    Check("private-loader", "modules that the runtime library loads", handles.private_loader, 30),
    Check("modules", "memory that 1, 10 and 100 small modules take", costs.modules, 30),
    Check("local", "local memory that a launch takes", costs.local, 15),
    Check("hand-over", "switches to a context with short kernels, and back", switches.handed_over, 15, HARDWARE),
    Check("looks", "whether events in an empty stream wait for a time slice of their context", looks.looks, 20),
    Check("queues", "streams whose work delays an event in another stream", looks.queues, 15),
    Check("descriptors", "descriptors of exported memory", handles.descriptors, 15),
    Check("green", "events and launches in streams of green contexts", handles.green, 20),
    # More shares
    Check("compute.10_20_30_40", "10, 20, 30 and 40 % at the same time", compute.four, 30),
    Check("torch.10_20_30_40", "PyTorch, 10, 20, 30 and 40 % at the same time", compute.torch_four, 50, TORCH),
    Check("torch.graph", "PyTorch, CUDA graphs, 30 %", compute.torch_graph, 40, TORCH),
    Check("compute.shapes", "30 %, alone, programs of several kinds", busy.shapes, 40),
    Check("compute.5", "5 %, alone", compute.five, 30),
    Check("compute.graph", "30 %, alone, CUDA graphs", compute.graph, 30),
    Check("compute.waiting", "streams that wait for each other, 5 %", compute.waiting, 20),
    Check("compute.uncapped", "speed under the shim, no limit", compute.native, 30),
    Check("torch.uncapped", "PyTorch under the shim, no limit", compute.torch_native, 45, TORCH),
    Check("latency", "calls, native and under the shim", driver.latency, 30),
    Check("pool", "how a memory pool grows", memory.pool, 20),
    # More frameworks, the slowest last
    _framework("limit.expandable", "expandable", "PyTorch with expandable segments"),
    _framework("limit.async", "async", "PyTorch with cudaMallocAsync"),
    _framework("limit.triton", "triton", "a kernel in Triton"),
    _framework("limit.cupy", "cupy", "CuPy", needs=FRAMEWORK),
    _framework("limit.numba", "numba", "Numba", needs=FRAMEWORK),
    Check("nccl", "NCCL in two processes of one share", frameworks.nccl, 40, TORCH),
    _framework("limit.jax", "jax", "JAX", 40, needs=FRAMEWORK),
    _framework("limit.compiled", "compiled", "torch.compile", 60),
    Check("compute.told", "30 % and 70 %, with measured slices configured", compute.shared_told, 30, HARDWARE),
    # Only on request: turns against time slices
    _turns("turns.30_70", (30, 70), "30 % and 70 % in turns and with time slices"),
    _turns("turns.torch", (30, 70), "PyTorch, 30 % and 70 % in turns and with time slices", "torch_work"),
    _turns("turns.four", compute.FOUR, "10, 20, 30 and 40 % in turns and with time slices"),
    _turns("turns.eight", compute.EIGHT, "eight shares in turns and with time slices"),
    *(
        Check(
            f"turns.beside_{others}",
            f"short requests beside {others}, in turns and with time slices",
            functools.partial(compute.turns_interactive, others=others),
            60,
            named=True,
        )
        for others in (1, 3)
    ),
    Check("turns.killed", "turns of 30 % and 30 % beside 40 % that is killed", compute.turns_killed, 40, named=True),
    Check("turns.outsider", "30 % and 40 % beside a native program", compute.turns_outsider, 60, named=True),
)
