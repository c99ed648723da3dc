"""What the driver itself says that is used: of each device, and by which process of this host. Not on the start path.

    read(library, deadline_s) -> {uuid: Gpu} | None     None: NVML did not answer in time
    Asker()                   -> the same from a process with threads

In a forked child, as in nvml.py: a broken driver can hang for good. A program with threads must not fork (a lock that
another thread holds stays locked in the child), so the exporter makes a child without threads first, which forks.
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
    """`used_bytes` None: the driver does not say."""

    pid: int  # on this host
    used_bytes: Optional[int]


class Gpu(NamedTuple):
    """A GPU or MIG device; None: it does not say. Where a GPU is divided its MIG devices have the processes."""

    memory_bytes: Optional[int]
    used_bytes: Optional[int]
    busy_percent: Optional[int]
    celsius: Optional[int]
    milliwatts: Optional[int]
    processes: tuple[Process, ...]


def read(library: str, deadline_s: float = DEADLINE_S) -> Optional[dict[str, Gpu]]:
    """By uuid, from exactly this libnvidia-ml ("": there is none)."""
    return _parsed(_asked(library, deadline_s)) if library else None


class Asker:
    """A child that asks for us. Make it before there are threads; close() ends it."""

    def __init__(self) -> None:
        question, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                low, high = sorted((question, answer))  # not the place where the parent listens
                for first, end in ((3, low), (low + 1, high), (high + 1, 1 << 16)):
                    os.closerange(first, end)
                _serve(question, answer)
            finally:
                os._exit(0)
        os.close(question)
        os.close(answer)
        self._reader = os.fdopen(self._answers, "rb")

    def read(self, library: str) -> Optional[dict[str, Gpu]]:
        """As `read`. Raises DeviceError when the child is gone."""
        if not library:
            return None
        try:
            os.write(self._ask, os.fsencode(library) + b"\n")
        except BrokenPipeError:
            pass
        line = self._reader.readline()
        if not line.endswith(b"\n"):
            raise DeviceError("the process that asks the driver has ended", "start `gpushare export` again")
        return _parsed(line)

    def close(self) -> None:
        os.close(self._ask)
        self._reader.close()
        nvml.end(self._pid)


def _serve(question: int, answer: int) -> None:
    """A path in a line, a line of JSON back, until the other end is closed. Signals are for the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with os.fdopen(question, "rb") as lines:
        for line in lines:
            text = _asked(os.fsdecode(line.rstrip(b"\n")), DEADLINE_S) + b"\n"
            while text:
                text = text[os.write(answer, text) :]


def _parsed(text: bytes) -> Optional[dict[str, Gpu]]:
    try:
        value = json.loads(text)
    except ValueError:  # nothing, or cut short
        return None
    found = {uuid: Gpu(*fields) for uuid, fields in value.items()}
    return {uuid: one._replace(processes=tuple(Process(*p) for p in one.processes)) for uuid, one in found.items()}


def _asked(library: str, deadline_s: float) -> bytes:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            nvml.detach(writer)
            text = json.dumps(_all(library)).encode()
            while text:
                text = text[os.write(3, text) :]
        except BaseException:  # whatever it was, the answer is empty, and nothing of the parent may run here
            os._exit(1)
        os._exit(0)
    os.close(writer)
    try:
        return nvml.read_until(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
        nvml.end(pid)


def _all(library: str) -> dict[str, Gpu]:
    import ctypes

    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)  # satisfies pynvml's look-up by soname
    import pynvml

    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        parts = [
            nvml.told(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, number)
            for number in range(nvml.told(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0)
        ]
        parts = [part for part in parts if part is not None]
        for one in (gpu, *parts):
            uuid = nvml.text_of(pynvml.nvmlDeviceGetUUID(one))
            found[uuid] = _one(pynvml, one, is_divided=one is gpu and bool(parts))
    return found


def _one(pynvml: Any, device: Any, is_divided: bool) -> Gpu:
    told = nvml.told
    memory, rates = told(pynvml.nvmlDeviceGetMemoryInfo, device), told(pynvml.nvmlDeviceGetUtilizationRates, device)
    used: dict[int, Optional[int]] = {}
    for kind in ("Compute", "Graphics", "MPSCompute") if not is_divided else ():
        ask = getattr(pynvml, f"nvmlDeviceGet{kind}RunningProcesses")
        for one in told(ask, device) or ():  # a process may be in two of them, with all that it has in each
            before = used.get(int(one.pid))
            now = None if one.usedGpuMemory is None else int(one.usedGpuMemory)
            used[int(one.pid)] = now if before is None else max(before, now or 0)
    return Gpu(
        int(memory.total) if memory else None,
        int(memory.used) if memory else None,
        int(rates.gpu) if rates else None,
        told(pynvml.nvmlDeviceGetTemperature, device, pynvml.NVML_TEMPERATURE_GPU),
        told(pynvml.nvmlDeviceGetPowerUsage, device),
        tuple(Process(*one) for one in sorted(used.items())),
    )
