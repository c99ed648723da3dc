"""The GPUs that the simulator can imitate: memory, reserved memory, context size, multiprocessors, costs.

`memory` below is what programs can allocate: NVML's total (version 1, which nvidia-smi prints) without `reserved`.
`source` says where each model's numbers come from. cuDeviceTotalMem and PyTorch's "total capacity" are `memory`.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 1 << 20


class Costs(NamedTuple):
    """Costs beyond a program's own allocations: struct sim_costs of device.h, in the same order."""

    init_bytes: int = 0  # taken by cuInit of each device; NVML lists it for no process
    unlisted_bytes: int = 0  # part of each context that NVML lists for no process
    duplicates: bool = False  # NVML in a container lists each process twice
    host_pids: bool = False  # NVML lists host pids, in a container too
    stream_bytes: int = 0  # of each stream that a program creates, until it is destroyed
    graph_bytes: int = 0  # of each kernel node of an executable graph, together in whole blocks, until it is destroyed
    graph_late: bool = False  # taken when the graph is first uploaded or launched, not when it is instantiated
    library_bytes: int = 0  # of each library in a context, from its first kernel on, beyond its image
    module_bytes: int = 0  # the same for a module that was loaded without a library
    event_pool_bytes: int = 0  # of each 512 events in a context, until the context ends
    one_descriptor: bool = False  # exported pools and host memory have nvidiactl's descriptor, as device memory always
    query_ns: int = 0  # processor time that NVML needs to list the processes of a device
    imports_listed: bool = False  # NVML lists memory of another process that one has open for both
    host_rate: int = 12_000_000_000  # bytes per second of a checkpoint or restore
    saved_whole: bool = False  # checkpointed memory that was never written takes host memory, too
    restore_once: bool = False  # after a restore that found no room, none succeeds
    sync_crashes: bool = False  # waiting for a stream or context of a checkpointed process crashes


class Model(NamedTuple):
    """Sizes in MiB; `cores` and `threads` are per multiprocessor (CUDA C++ Programming Guide, compute capabilities)."""

    total_mib: int
    reserved_mib: int
    context_mib: float
    multiprocessors: int
    capability: tuple[int, int]
    cores: int
    threads: int
    source: str
    costs: Costs = Costs()

    @property
    def memory_bytes(self) -> int:
        return (self.total_mib - self.reserved_mib) * MIB

    @property
    def reserved_bytes(self) -> int:
        return self.reserved_mib * MIB

    @property
    def context_bytes(self) -> int:
        return int(self.context_mib * MIB)

    @property
    def listed_bytes(self) -> int:
        """Return the part of a context that NVML lists for the process."""
        return self.context_bytes - self.costs.unlisted_bytes


DEFAULT = "NVIDIA Simulated A16"
H100_MIG = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
# PyTorch 2.11 on that card took 90 MiB more than its context, images and allocations, and 160 MiB more with its 32
# streams. A stream's size follows from that. Events and libraries are assumed to make up the 90 MiB; 100 small modules
# took 2 MiB, so modules cost nothing more.
H100_COSTS = Costs(
    init_bytes=3407872,
    unlisted_bytes=5832704,  # with init_bytes: the first context takes 526.8 MiB, of which NVML lists 518
    stream_bytes=70 * MIB // 32,
    graph_bytes=4096,  # assumed
    library_bytes=2 * MIB,  # assumed
    event_pool_bytes=2 * MIB,  # assumed
    one_descriptor=True,  # measured for memory of cuMemCreate, assumed for pools
)
# The context sizes marked as assumed follow the reported ones: 2 KiB for each resident thread, and 8 MiB.
MODELS = {
    DEFAULT: Model(16 * 1024 + 384, 384, 300, 48, (8, 6), 128, 2048, "no real card; reserved memory as on the A16"),
    "NVIDIA A16": Model(
        *(15356, 384, 38, 10, (8, 6), 128, 1536),
        "reported: 15356 MiB, of which 14728 used and 245 free (vLLM on four GPUs); context assumed",
    ),
    "NVIDIA GeForce RTX 4060 Ti": Model(
        *(16380, 390, 107, 34, (8, 9), 128, 1536),
        "context reported in llama.cpp pull request 23604; reserved memory assumed, as on the RTX A4000",
    ),
    "NVIDIA H100 80GB HBM3": Model(
        *(81559, 480, 523.5625, 132, (9, 0), 128, 2048),
        "measured on 2026-11-27, driver 580.159.04: total, reserved, context; costs as above",
        H100_COSTS,
    ),
    "NVIDIA H200": Model(
        *(143771, 606, 536, 132, (9, 0), 128, 2048),
        "nvidia-smi: 143771 MiB (Mooncake pull request 2307), PyTorch: 139.81 GiB; context assumed",
    ),
    H100_MIG: Model(
        *(9984, 13, 72, 16, (9, 0), 128, 2048),
        "NVIDIA's MIG guide: 9.75 GiB, 16 multiprocessors; 13 MiB are used in an idle instance (nvitop pull request 8)",
    ),
}  # fmt: skip


def model_of(name: str) -> Model:
    """Return the model with that name; any other name is a card like the default one."""
    return MODELS.get(name, MODELS[DEFAULT])
