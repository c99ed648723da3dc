"""Read the driver's own usage of each device, by process of this host. Not on the start path.

    read(library, deadline_s) -> {uuid: Gpu} | None     None: NVML did not answer in time
    Asker()                   -> the same from a process with threads

Runs in a forked child, as nvml.py does: a broken driver can hang for ever. A program with threads must not fork (a
lock that another thread holds stays locked in the child), so the exporter makes a child without threads first, which
forks.
"""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any, NamedTuple, Optional

from ..core.errors import DeviceError
from . import nvml

DEADLINE_S = 10.0


class Process(NamedTuple):
    """A process that uses the device. `used_bytes` None: the driver does not report it."""

    pid: int  # on this host
    used_bytes: Optional[int]


class Gpu(NamedTuple):
    """A GPU or MIG device; None: the driver does not report it. A divided GPU's processes are in its MIG devices."""

    memory_bytes: Optional[int]
    used_bytes: Optional[int]
    busy_percent: Optional[int]
    celsius: Optional[int]
    milliwatts: Optional[int]
    processes: tuple[Process, ...]


def read(library: str, deadline_s: float = DEADLINE_S) -> Optional[dict[str, Gpu]]:
    """Usage by uuid, from this libnvidia-ml ("": there is none)."""
    return _parsed(_queried(library, deadline_s)) if library else None


class Asker:
    """A child process that queries NVML. Create it before any thread; close() ends it."""

    def __init__(self) -> None:
        question, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                low, high = sorted((question, answer))  # close all other descriptors, also the parent's ends
                for first, end in ((3, low), (low + 1, high), (high + 1, 1 << 16)):
                    os.closerange(first, end)
                _serve(question, answer)
            finally:
                os._exit(0)
        os.close(question)
        os.close(answer)
        self._reader = os.fdopen(self._answers, "rb")

    def read(self, library: str) -> Optional[dict[str, Gpu]]:
        """As the function `read`. Raises DeviceError when the child has ended."""
        if not library:
            return None
        try:
            os.write(self._ask, os.fsencode(library) + b"\n")
        except BrokenPipeError:
            pass
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise DeviceError("the child process that queries NVML has ended", "start `gpushare export` again")
        return _parsed(line)

    def close(self) -> None:
        os.close(self._ask)
        self._reader.close()
        nvml.end(self._pid)


def _serve(question: int, answer: int) -> None:
    """Answer each line (a library path) with a line of JSON, until the pipe closes. The parent handles signals."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with os.fdopen(question, "rb") as lines:
        for line in lines:
            text = _queried(os.fsdecode(line.rstrip(b"\n")), DEADLINE_S) + b"\n"
            while text:
                text = text[os.write(answer, text) :]


def _parsed(text: bytes) -> Optional[dict[str, Gpu]]:
    try:
        value = json.loads(text)
    except ValueError:  # empty or cut short
        return None
    found = {uuid: Gpu(*fields) for uuid, fields in value.items()}
    return {uuid: one._replace(processes=tuple(Process(*p) for p in one.processes)) for uuid, one in found.items()}


def _queried(library: str, deadline_s: float) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            nvml.detach(writer)
            text = json.dumps(_all(library)).encode()
            while text:
                text = text[os.write(3, text) :]
        except BaseException:  # any error makes the answer empty; no code of the parent may run in the child
            os._exit(1)
        os._exit(0)
    os.close(writer)
    try:
        return nvml.read_until(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
        nvml.end(pid)


def _all(library: str) -> dict[str, Gpu]:
    pynvml = nvml.initialised(library)
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        parts = [
            nvml.supported(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, number)
            for number in range(nvml.supported(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0)
        ]
        parts = [part for part in parts if part is not None]
        for one in (gpu, *parts):
            uuid = nvml.text_of(pynvml.nvmlDeviceGetUUID(one))
            found[uuid] = _one(pynvml, one, is_divided=one is gpu and bool(parts))
    return found


def _one(pynvml: Any, device: Any, is_divided: bool) -> Gpu:
    get = nvml.supported
    memory, rates = nvml.memory_of(pynvml, device), get(pynvml.nvmlDeviceGetUtilizationRates, device)
    used: dict[int, Optional[int]] = {}
    for kind in ("Compute", "Graphics", "MPSCompute") if not is_divided else ():
        query = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")
        for one in get(query, device) or ():  # two lists may contain a process, each with its whole memory
            before = used.get(int(one.pid))
            now = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
            used[int(one.pid)] = now if before is None else max(before, now or 0)
    return Gpu(
        memory.allocatable if memory else None,
        memory.allocatable - memory.free if memory else None,
        int(rates.gpu) if rates else None,
        get(pynvml.nvmlDeviceGetTemperature, device, pynvml.NVML_TEMPERATURE_GPU),
        get(pynvml.nvmlDeviceGetPowerUsage, device),
        tuple(Process(*one) for one in sorted(used.items())),
    )
