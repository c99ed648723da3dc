"""Find processes of containers that use a GPU without gpushare's library, so without a limit. Not on the start path.

    find(leases, listed)   -> tuple[Unlimited, ...]

Such a process found another libcuda.so.1 than the shim: in a directory that LD_LIBRARY_PATH names since the start, as
conda's activate scripts and entry scripts do. Or it reaches the driver without libcuda, as OpenCL and Vulkan do.

The driver opens /dev/nvidia-uvm in cuInit and keeps it. The shim maps the container's usage file before it calls that
function, and a forked child inherits the mapping. So a process that has that node open and the file not mapped is
such a process. nvidia-smi, nvidia-persistenced and other programs with NVML open other nodes only, and a program
before cuInit none. The driver's list of processes (`listed`: pids by container) is the second source, for processes
that closed the node.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Optional

from ..core import constants
from ..core.model import Lease
from ..core.quoting import shown
from ..system import procs
from . import leftover

_UVM = "nvidia-uvm"
_GPU = re.compile(r"nvidia([0-9]+|ctl)")
_LONGEST_S = 0.25  # of processor time, for one container
_LONGEST_WAIT_S = 2.0  # a container can hold the lock of its mappings, for which the reader of /proc/PID/maps waits
_LEAST_WAIT_S = 0.1  # for a container after others took all of that time
_MAX_MAPS_BYTES = 4 << 20  # a container chooses the number and length of the paths
_waiting: dict[str, threading.Thread] = {}  # by container: examinations that have not ended


class Unlimited(NamedTuple):
    """A process of container `id`. `library`: path of its libcuda as the container sees it; "" if it has none."""

    id: str
    process: procs.Process
    command: str
    library: str

    @property
    def text(self) -> str:
        """Its line for `gpushare list`."""
        who = f"process {self.process.pid} ({shown(self.command)}) uses the GPU without a limit"
        if not self.library:
            return f"{who}: it does not use libcuda"
        return f"{who}: it loaded {shown(self.library)}; take that directory out of its LD_LIBRARY_PATH"


def find(
    leases: Sequence[Lease], listed: Mapping[str, Collection[int]] = MappingProxyType({})
) -> tuple[Unlimited, ...]:
    """Return the processes of running containers that this user may examine. A container can have very many processes,
    files and mappings, and make a reader wait; so each gets a bounded time, and all that make it wait share one. What
    was not examined by then is left out."""
    found: list[Unlimited] = []
    left_s = _LONGEST_WAIT_S
    for lease in leases:
        before = _waiting.pop(lease.id, None)
        if before is not None and before.is_alive():
            _waiting[lease.id] = before
            continue
        some: list[Unlimited] = []
        worker = threading.Thread(target=_examine, args=(lease, listed.get(lease.id, ()), some), daemon=True)
        began_s = time.monotonic()
        worker.start()
        worker.join(max(left_s, _LEAST_WAIT_S))
        if worker.is_alive():
            _waiting[lease.id] = worker
            left_s -= time.monotonic() - began_s
        found += tuple(some)
    return tuple(found)


def _examine(lease: Lease, of_gpu: Collection[int], found: list[Unlimited]) -> None:
    """Add the processes of one container to `found`."""
    until_s = time.thread_time() + _LONGEST_S
    for pid in dict.fromkeys((*of_gpu, *leftover.pids(lease))):
        if time.thread_time() > until_s:
            break
        one = _examined(lease, pid, pid in of_gpu, until_s)
        if one is not None:
            found.append(one)


def _examined(lease: Lease, pid: int, is_listed: bool, until_s: float) -> Optional[Unlimited]:
    """Return the process if it uses the GPU without the shim. It can become another program in between, which closes
    the node and loses the mapping; so both are read twice."""
    process = procs.find(pid)
    if process is None:
        return None
    library: Optional[str] = ""
    for _ in range(2):
        if not _is_open(pid, is_listed, until_s):
            return None
        library = _other_library(pid)
        if library is None:
            return None
    return Unlimited(lease.id, process, procs.name(pid), library or "") if procs.alive(*process[:2]) else None


def _is_open(pid: int, any_gpu: bool, until_s: float) -> bool:
    """Return whether the process has the node of CUDA open, or with `any_gpu` any node of NVIDIA's driver. By the names
    of its files: stat() of a file that the container serves itself (FUSE) would wait for the container."""
    try:
        with os.scandir(f"/proc/{pid}/fd") as entries:
            for entry in entries:
                if time.thread_time() > until_s:
                    return False
                if _is_node(entry.path, any_gpu):
                    return True
    except OSError:  # it has ended, or is another user's
        pass
    return False


def _is_node(path: str, any_gpu: bool) -> bool:
    try:
        name = os.path.basename(os.readlink(path))
    except OSError:
        return False
    return name == _UVM or (any_gpu and _GPU.fullmatch(name) is not None)


def _other_library(pid: int) -> Optional[str]:
    """Return the path of the libcuda that the process has mapped; "" without one; None if it has mapped its usage file,
    or if its mappings cannot be read, or are too many."""
    library, left = "", _MAX_MAPS_BYTES
    try:
        with open(f"/proc/{pid}/maps", "rb") as lines:
            while line := lines.readline(left):
                left -= len(line)
                if left <= 0:
                    return None
                path = os.fsdecode(line.rstrip(b"\n").split(maxsplit=5)[-1]) if line.count(b"/") else ""
                if path.removesuffix(" (deleted)").endswith(constants.USAGE):
                    return None
                if not library and os.path.basename(path).startswith("libcuda.so"):
                    library = path
    except OSError:
        return None
    return library
