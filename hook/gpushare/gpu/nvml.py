"""Query NVIDIA's libraries about the devices when the inventory is compiled, never at a container's start.

    ask(nvml_library, cuda_library, deadline_s) -> Answer      empty when they do not answer in time

Runs in a forked child with a deadline: initialising a driver without persistence mode takes seconds, and a broken
driver can hang for ever. Values that a driver does not support are left out of the answer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable, NamedTuple

# nvmlBrandType_t -> brand in NVIDIA_REQUIRE_*
BRANDS = (
    "unknown", "quadro", "tesla", "nvs", "grid", "geforce", "titan", "vapps", "vpc", "vcs", "vws", "cloudgaming",
    "quadrortx", "nvidiartx", "nvidia", "geforcertx", "titanrtx",
)  # fmt: skip


class Mig(NamedTuple):
    """One MIG device of a GPU."""

    uuid: str
    index: int  # type: ignore[assignment]  # as NVML counts; shadows tuple.index
    gpu_instance: int
    compute_instance: int
    memory_bytes: int


class Gpu(NamedTuple):
    """One GPU; unknown values are 0 or ""."""

    memory_bytes: int = 0
    brand: str = ""
    arch: str = ""
    mig: tuple[Mig, ...] = ()


class Answer(NamedTuple):
    """Result of `ask`; `gpus` by uuid."""

    gpus: dict[str, Gpu]
    cuda_version: str = ""


def ask(nvml_library: str, cuda_library: str, deadline_s: float) -> Answer:
    """Query these two libraries."""
    if not nvml_library:
        return Answer({})
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(nvml_library, cuda_library, writer)
    os.close(writer)
    try:
        text = read_until(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
        end(pid)
    try:
        value = json.loads(text)
    except ValueError:  # empty or cut short
        return Answer({})
    gpus = {
        uuid: Gpu(memory, brand, arch, tuple(Mig(*one) for one in mig))
        for uuid, (memory, brand, arch, mig) in value["gpus"].items()
    }
    return Answer(gpus, value["cuda"])


def read_until(fd: int, deadline: float) -> bytes:
    """Read up to the end of the pipe; b"" when that does not come before the deadline."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while True:
        left_ms = int((deadline - time.monotonic()) * 1000)
        if left_ms <= 0 or not poll.poll(left_ms):
            return b""
        part = os.read(fd, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)


def end(pid: int) -> None:
    """Kill and reap the child. A child that is stuck in the kernel for a second is left to init."""
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(1000)
        os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(pidfd)


def detach(writer: int) -> None:
    """In the child: make `writer` descriptor 3, 0 to 2 /dev/null, and close all other descriptors."""
    os.dup2(writer, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.closerange(4, 1 << 16)


def _answer(nvml_library: str, cuda_library: str, writer: int) -> None:
    """Run the child. Only the pipe stays open, so that a hang keeps neither a lock nor the runtime's pipes."""
    try:
        detach(writer)
        gpus = _gpus(nvml_library)
        text = json.dumps({"gpus": gpus, "cuda": _cuda_version(cuda_library)}).encode()
        while text:
            text = text[os.write(3, text) :]
    except BaseException:  # any error makes the answer empty; no code of the parent may run in the child
        os._exit(1)
    os._exit(0)


def _gpus(library: str) -> dict[str, Gpu]:
    """Query each GPU through pynvml and this very library: it is loaded by its path first, and pynvml's own look-up by
    soname then finds it."""
    import ctypes

    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import pynvml

    pynvml.nvmlInit()
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        brand = supported(pynvml.nvmlDeviceGetBrand, gpu)
        major_minor = supported(pynvml.nvmlDeviceGetCudaComputeCapability, gpu)
        found[text_of(pynvml.nvmlDeviceGetUUID(gpu))] = Gpu(
            int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total),
            BRANDS[brand] if brand is not None and 0 <= brand < len(BRANDS) else "",
            ".".join(map(str, major_minor or ())),
            _migs(pynvml, gpu),
        )
    return found


def _migs(pynvml: Any, gpu: Any) -> tuple[Mig, ...]:
    """MIG devices of one GPU; empty if NVML does not support MIG, or MIG is off. Their numbers may have gaps."""
    found = []
    for index in range(supported(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0):
        mig = supported(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index)
        if mig is not None:
            gi, ci = pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)
            memory = supported(pynvml.nvmlDeviceGetMemoryInfo, mig)
            uuid = text_of(pynvml.nvmlDeviceGetUUID(mig))
            found.append(Mig(uuid, index, int(gi), int(ci), int(memory.total) if memory else 0))
    return tuple(found)


def supported(query: Callable[..., Any], *arguments: Any) -> Any:
    """The result of an NVML query; None if this driver or this GPU does not support it."""
    import pynvml

    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def _cuda_version(library: str) -> str:
    """The CUDA version, such as "12.2", from cuDriverGetVersion (12020), which needs no device; "" when it fails."""
    import ctypes

    number = ctypes.c_int()
    try:
        failed = ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(number)) if library else 1
    except (OSError, AttributeError):
        failed = 1
    return "" if failed else f"{number.value // 1000}.{number.value % 1000 // 10}"


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
