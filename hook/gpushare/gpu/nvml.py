"""Query NVIDIA's libraries about the devices when the inventory is compiled, never at a container's start.

    ask(nvml_library, cuda_library, deadline_s) -> Answer      empty when they do not answer in time
    in_child(function, deadline_s)              -> its result, or None
    memory_of(pynvml, device)                   -> Memory      what programs can allocate, reserve and free

Runs in a forked child with a deadline: initialising a driver without persistence mode takes seconds, and a broken
driver can hang for ever. Values that a driver does not support are left out of the answer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Callable, NamedTuple, Optional

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
    reserved_bytes: int = 0
    multiprocessors: int = 0
    profile: str = ""  # "1g.10gb"


class Gpu(NamedTuple):
    """One GPU; unknown values are 0 or ""."""

    memory_bytes: int = 0  # that programs can allocate
    brand: str = ""
    arch: str = ""
    mig: tuple[Mig, ...] = ()
    reserved_bytes: int = 0  # that only the driver uses, in addition
    cores: int = 0


class Memory(NamedTuple):
    """Memory of a GPU or MIG device, in bytes. `exact`: the driver reported what it reserves."""

    allocatable: int
    reserved: int
    free: int
    exact: bool = True


class Answer(NamedTuple):
    """Result of `ask`; `gpus` by uuid."""

    gpus: dict[str, Gpu]
    cuda_version: str = ""


def ask(nvml_library: str, cuda_library: str, deadline_s: float) -> Answer:
    """Query these two libraries.

    If NVML does not report what the driver reserves (drivers before 510), CUDA's total of a GPU counts where it is
    smaller. That query initialises CUDA in another child, so that a hang there loses only this correction.
    """
    if not nvml_library:
        return Answer({})

    def query() -> Any:
        inexact: list[str] = []
        gpus = _gpus(nvml_library, inexact)
        return {"gpus": gpus, "cuda": _cuda_version(cuda_library), "inexact": inexact}

    value = in_child(query, deadline_s)
    if value is None:
        return Answer({})
    gpus = {uuid: Gpu(*fields) for uuid, fields in value["gpus"].items()}
    if value["inexact"] and cuda_library:
        totals = in_child(lambda: _cuda_totals(cuda_library), deadline_s) or {}
        for uuid in value["inexact"]:
            total = gpus[uuid].memory_bytes
            lower = min(total, totals.get(uuid, total))
            gpus[uuid] = gpus[uuid]._replace(memory_bytes=lower, reserved_bytes=total - lower)
    return Answer(
        {uuid: gpu._replace(mig=tuple(Mig(*one) for one in gpu.mig)) for uuid, gpu in gpus.items()}, value["cuda"]
    )


def in_child(function: Callable[[], Any], deadline_s: float, meanwhile: Optional[Callable[[], None]] = None) -> Any:
    """Run `function` in a forked child and return its result, which JSON can represent. None if it fails or does not
    end in time. Call `meanwhile` ten times a second until then."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(function, writer)
    os.close(writer)
    try:
        text = read_until(reader, time.monotonic() + deadline_s, meanwhile)
    finally:
        os.close(reader)
        end(pid)
    try:
        return json.loads(text)
    except ValueError:  # empty or cut short
        return None


def read_until(fd: int, deadline: float, meanwhile: Optional[Callable[[], None]] = None) -> bytes:
    """Read up to the end of the pipe; b"" when that does not come before the deadline."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left_ms := int((deadline - time.monotonic()) * 1000)) > 0:
        if not poll.poll(min(left_ms, 100) if meanwhile else left_ms):
            if meanwhile:
                meanwhile()
            continue
        part = os.read(fd, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


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


def _answer(function: Callable[[], Any], writer: int) -> None:
    """Run the child. Only the pipe stays open, so that a hang keeps neither a lock nor the runtime's pipes."""
    try:
        detach(writer)
        text = json.dumps(function()).encode()
        while text:
            text = text[os.write(3, text) :]
    except BaseException:  # any error makes the answer empty; no code of the parent may run in the child
        os._exit(1)
    os._exit(0)


def initialised(library: str) -> Any:
    """Return pynvml over this very library: it is loaded by its path first, and pynvml's own look-up by soname then
    finds it."""
    import ctypes

    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import pynvml

    pynvml.nvmlInit()
    return pynvml


def memory_of(pynvml: Any, device: Any) -> Optional[Memory]:
    """Return a device's memory; None if the driver does not report it.

    NVML's total includes memory that no program can allocate, 0.4 to 0.9 GiB on many GPUs (480 MiB on an H100).
    Version 2 of the query (since driver 510) reports that part as `reserved`. An older driver does not report it: then
    its total is too large, and `exact` is false.
    """
    memory = supported(pynvml.nvmlDeviceGetMemoryInfo, device, pynvml.nvmlMemory_v2)
    if memory is not None and 0 <= memory.reserved < memory.total:
        return Memory(int(memory.total - memory.reserved), int(memory.reserved), int(memory.free))
    memory = supported(pynvml.nvmlDeviceGetMemoryInfo, device)
    return None if memory is None else Memory(int(memory.total), 0, int(memory.free), exact=False)


def _gpus(library: str, inexact: Optional[list[str]] = None) -> dict[str, Gpu]:
    """Query each GPU. Adds to `inexact` the uuid of each GPU whose reserved memory is unknown."""
    pynvml = initialised(library)
    found = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        brand = supported(pynvml.nvmlDeviceGetBrand, gpu)
        major_minor = supported(pynvml.nvmlDeviceGetCudaComputeCapability, gpu)
        memory = memory_of(pynvml, gpu) or Memory(0, 0, 0)
        uuid = text_of(pynvml.nvmlDeviceGetUUID(gpu))
        if inexact is not None and not memory.exact:
            inexact.append(uuid)
        found[uuid] = Gpu(
            memory.allocatable,
            BRANDS[brand] if brand is not None and 0 <= brand < len(BRANDS) else "",
            ".".join(map(str, major_minor or ())),
            _migs(pynvml, gpu),
            memory.reserved,
            int(supported(pynvml.nvmlDeviceGetNumGpuCores, gpu) or 0),
        )
    return found


def _migs(pynvml: Any, gpu: Any) -> tuple[Mig, ...]:
    """MIG devices of one GPU; empty if NVML does not support MIG, or MIG is off. Their numbers may have gaps."""
    found = []
    for index in range(supported(pynvml.nvmlDeviceGetMaxMigDeviceCount, gpu) or 0):
        mig = supported(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, gpu, index)
        if mig is not None:
            gi, ci = pynvml.nvmlDeviceGetGpuInstanceId(mig), pynvml.nvmlDeviceGetComputeInstanceId(mig)
            memory = memory_of(pynvml, mig) or Memory(0, 0, 0)
            uuid = text_of(pynvml.nvmlDeviceGetUUID(mig))
            attributes = supported(pynvml.nvmlDeviceGetAttributes, mig)
            processors = int(attributes.multiprocessorCount) if attributes else 0
            # its name is that of the GPU, " MIG " and the profile
            profile = text_of(supported(pynvml.nvmlDeviceGetName, mig) or "").partition(" MIG ")[2]
            found.append(Mig(uuid, index, int(gi), int(ci), memory.allocatable, memory.reserved, processors, profile))
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


def _cuda_totals(library: str) -> dict[str, int]:
    """Map each GPU's uuid to the memory that CUDA's programs can allocate; empty if CUDA does not work here."""
    import ctypes
    import uuid as uuids

    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # it may hide devices; CUDA is not yet initialised in this child
    cuda = ctypes.CDLL(library)
    count, found = ctypes.c_int(), {}
    if cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return {}
    for number in range(count.value):
        raw, total, device = (ctypes.c_ubyte * 16)(), ctypes.c_size_t(), ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid(ctypes.byref(raw), device):
            continue
        if not cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device):
            found[f"GPU-{uuids.UUID(bytes=bytes(raw))}"] = total.value
    return found


def text_of(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
