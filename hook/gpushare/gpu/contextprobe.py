"""Measure the memory of a CUDA context: create one in a child process, and read what NVML counts for that process.

    probe(nvml_library, cuda_library, uuid, deadline_s, daemon) -> (bytes, "") or (0, why not)

NVML's number for the one process is exact while other processes allocate and free; the device's free memory is not. The
size includes the memory that NVML lists for no process (constants.INIT_BYTES and CONTEXT_UNLISTED_BYTES). For
`gpushare refresh` only: creating a context takes up to seconds, and takes the memory for a moment.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from ..core import constants
from . import nvml

DEADLINE_S = 10.0
_ROOM_BYTES = 1 << 30  # a device with less free memory, or with less than a tenth of it free, is in full use
_EXCLUSIVE = {1: "exclusive", 2: "prohibited", 3: "exclusive"}  # nvmlComputeMode_t


class MpsDaemon(NamedTuple):
    """The control daemon to connect to. Its mount namespace has the /dev/shm that it shares with clients."""

    pipe: str
    pid: int


NO_DAEMON = MpsDaemon("/nonexistent", 0)  # a directory without a pipe: CUDA then works without MPS


def probe(
    nvml_library: str,
    cuda_library: str,
    uuid: str,
    deadline_s: float = DEADLINE_S,
    daemon: MpsDaemon = NO_DAEMON,
) -> tuple[int, str]:
    """Measure on the GPU or MIG device `uuid`. Return (bytes, "") or (0, why it was not measured)."""
    if not nvml_library or not cuda_library:
        return 0, "the driver's libraries were not found"

    def answer() -> tuple[int, str]:
        try:
            return _measured(nvml_library, cuda_library, uuid, daemon)
        except Exception as error:  # in the child: a library without a function, an NVML error
            return 0, f"{type(error).__name__}: {error}"

    found = nvml.in_child(answer, deadline_s)
    if found is None:
        return 0, f"the driver did not answer within {deadline_s:.0f} s"
    return int(found[0]), str(found[1])


def _measured(nvml_library: str, cuda_library: str, uuid: str, daemon: MpsDaemon) -> tuple[int, str]:
    """Run in the child, which ends right after."""
    import ctypes

    if daemon.pid:
        from ..system import syscalls

        syscalls.setns(os.open(f"/proc/{daemon.pid}/ns/mnt", os.O_RDONLY), "the mount namespace of MPS")
    os.environ.update(CUDA_VISIBLE_DEVICES=uuid, CUDA_MPS_PIPE_DIRECTORY=daemon.pipe)
    pynvml = nvml.initialised(nvml_library)
    device = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    why = _reserved_for_others(pynvml, device, is_client=daemon.pid != 0)
    if why:
        return 0, why
    if os.getpid() in processes(pynvml, device):
        return 0, "NVML reports another process under this process's id: run it in the host's pid namespace"
    cuda = ctypes.CDLL(cuda_library)
    number, context = ctypes.c_int(), ctypes.c_void_p()
    for name, arguments in (
        ("cuInit", (0,)),
        ("cuDeviceGet", (ctypes.byref(number), 0)),
        ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), number)),
    ):
        error = getattr(cuda, name)(*arguments)
        if error:
            return 0, f"{name} failed with CUDA error {error}"
    used = processes(pynvml, device).get(os.getpid())
    if not used:
        return 0, "NVML reports no memory of the measuring process"
    simulated = nvml.text_of(pynvml.nvmlDeviceGetName(device)).startswith(constants.SIMULATED_MODEL)
    return used + (0 if simulated else constants.INIT_BYTES + constants.CONTEXT_UNLISTED_BYTES), ""


def _reserved_for_others(pynvml: Any, device: Any, is_client: bool) -> str:
    """Return why no context may be created now; "" if it may."""
    mode = _EXCLUSIVE.get(nvml.supported(pynvml.nvmlDeviceGetComputeMode, device), "")
    if mode and not (is_client and mode == "exclusive"):
        return f"its compute mode is {mode}"
    memory = nvml.memory_of(pynvml, device)
    if memory is None:
        return "NVML does not report its free memory"
    if memory.free < max(_ROOM_BYTES, memory.allocatable // 10):
        return f"only {memory.free >> 20} MiB of it are free"
    return ""


def processes(pynvml: Any, device: Any) -> dict[int, int]:
    """Return the bytes by pid. NVML lists clients of MPS apart."""
    found: dict[int, int] = {}
    for kind in ("Compute", "MPSCompute"):
        for one in nvml.supported(getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses"), device) or ():
            found[int(one.pid)] = max(int(one.usedGpuMemory or 0), found.get(int(one.pid), 0))
    return found
