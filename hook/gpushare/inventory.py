"""What the host has: devices from <root>/proc/driver/nvidia, memory sizes from NVML.

    driver_version(root)               -> str                 short read; raises DeviceError
    bus_ids(root)                      -> tuple[str, ...]     directory names only; for staleness
    read_inventory(root, deadline_s)   -> Inventory           at refresh: with NVML in a child process
    memory_sizes(library, deadline_s)  -> {uuid: bytes}       {} when NVML does not answer in time

NVML is asked only when the inventory is compiled, in a forked child with a deadline: initialising a driver without
persistence mode takes seconds, and a broken one can hang for good. A simulated root (a file `.gpushare-sim` in it)
may hold JSON in that file: {"context_bytes": N}.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from typing import Any, Optional

from . import names
from .errors import DeviceError
from .model import Device, Inventory

DEFAULT_CONTEXT_BYTES = 512 << 20
# (beginning of the model's name, major driver version) -> bytes that a process's context takes, as measured on that
# hardware with one context and nothing allocated. Unknown hardware gets the default, which is on the safe side of
# what drivers of the 535 to 580 series are known to take.
CONTEXT_BYTES: dict[tuple[str, str], int] = {
    ("NVIDIA Simulated", "535"): 300 << 20,  # tests/sim, unless its marker says otherwise
}
NVML_DEADLINE_S = 10.0  # well below the time that a hook has
_PROC = "proc/driver/nvidia"


def _short_read(path: str, max_bytes: int = 4096) -> Optional[str]:
    """A small text file, None when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return os.read(fd, max_bytes).decode("utf-8", "replace")
    except OSError:
        return None
    finally:
        os.close(fd)


def driver_version(root: str) -> str:
    """The version of the loaded kernel module, as in the names of its libraries."""
    text = _short_read(os.path.join(root, "sys/module/nvidia/version"))
    if text and text.strip():
        return text.strip()
    text = _short_read(os.path.join(root, _PROC, "version"))
    # NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.261.03  Wed ...
    for word in (text or "").partition("\n")[0].split():
        if word[0].isdigit() and "." in word and word.replace(".", "").isdigit():
            return word
    proc = os.path.join(root, _PROC)
    raise DeviceError(
        f"no NVIDIA driver is loaded (no version in {proc})", "load it, or set driver.root in the configuration file"
    )


def bus_ids(root: str) -> tuple[str, ...]:
    """PCI addresses of all GPUs, in PCI order."""
    try:
        return tuple(sorted(os.listdir(os.path.join(root, _PROC, "gpus")), key=_pci_key))
    except OSError:
        return ()


def _pci_key(bus_id: str) -> tuple[tuple[int, ...], str]:
    """PCI order: domain, bus, device, function as numbers."""
    try:
        return tuple(int(part, 16) for part in bus_id.replace(".", ":").split(":")), bus_id
    except ValueError:
        return (), bus_id


def _information(root: str, bus_id: str) -> dict[str, str]:
    """`Key: value` lines of one GPU."""
    path = os.path.join(root, _PROC, "gpus", bus_id, "information")
    text = _short_read(path, 16384)
    if text is None:
        raise DeviceError(f"cannot read {path}", "is the driver being unloaded?")
    lines = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def _device(root: str, index: int, bus_id: str, version: str, sizes: dict[str, int], context_bytes: int) -> Device:
    facts = _information(root, bus_id)
    uuid, minor = facts.get("GPU UUID", ""), facts.get("Device Minor", "")
    if not uuid.startswith("GPU-") or "?" in uuid or not minor.isdigit():
        raise DeviceError(
            f"the driver does not know the GPU at {bus_id} yet (uuid {uuid!r})", "run nvidia-smi once as root"
        )
    model = facts.get("Model", "unknown")
    context_bytes = context_bytes or context_bytes_of(model, version)
    return Device(index, uuid, int(minor), bus_id, model, sizes.get(uuid, 0), context_bytes)


def context_bytes_of(model: str, version: str) -> int:
    """What one process's context takes on this hardware and driver."""
    major = version.partition(".")[0]
    known = (size for (name, row), size in CONTEXT_BYTES.items() if model.startswith(name) and row == major)
    return next(known, DEFAULT_CONTEXT_BYTES)


def _marker(root: str) -> Optional[dict[str, Any]]:
    """The simulated root's own facts; None when the root is a real one."""
    text = _short_read(os.path.join(root, names.SIM_MARKER), 65536)
    if text is None:
        return None
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = {}
    return value if isinstance(value, dict) else {}


def is_simulated(root: str) -> bool:
    """Whether `root` is a simulated host root, whose device nodes are regular files."""
    return os.path.isfile(os.path.join(root, names.SIM_MARKER))


def read_inventory(root: str, deadline_s: float = NVML_DEADLINE_S) -> Inventory:
    """Everything, in PCI order. Without an answer from NVML the sizes are 0: percentages are refused then."""
    from . import driverfiles

    version = driver_version(root)
    marker = _marker(root)
    buses = bus_ids(root)
    sizes = memory_sizes(driverfiles.nvml_library(root, version), deadline_s) if buses else {}
    context = marker.get("context_bytes", 0) if marker else 0
    context_bytes = context if isinstance(context, int) and context > 0 else 0
    devices = (_device(root, index, bus, version, sizes, context_bytes) for index, bus in enumerate(buses))
    return Inventory(root, version, tuple(devices), marker is not None)


def memory_sizes(library: str, deadline_s: float) -> dict[str, int]:
    """Total memory per uuid, asked in a child process. Empty when NVML fails or takes too long."""
    if not library:
        return {}
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _answer(library, writer)
    os.close(writer)
    try:
        text = _read_until(reader, time.monotonic() + deadline_s)
    finally:
        os.close(reader)
        _end(pid)
    try:
        return {str(uuid): int(size) for uuid, size in json.loads(text).items()}
    except ValueError:  # cut short, or nothing at all
        return {}


def _read_until(fd: int, deadline: float) -> bytes:
    """Everything up to the end of the pipe, or up to the deadline."""
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


def _end(pid: int) -> None:
    """Kills and reaps the child. One that is stuck inside the kernel is left to init, after a second."""
    pidfd = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll(1000)
        os.waitpid(pid, os.WNOHANG)
    finally:
        os.close(pidfd)


def _answer(library: str, writer: int) -> None:
    """In the child: only the pipe stays open, so that a hang holds neither a lock nor the runtime's pipes."""
    try:
        os.dup2(writer, 3)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(4, 1 << 16)
        os.write(3, json.dumps(_ask_nvml(library)).encode())
    except BaseException:  # whatever it was, the answer is empty, and nothing of the parent may run here
        os._exit(1)
    os._exit(0)


def _ask_nvml(library: str) -> dict[str, int]:
    """Total bytes per uuid through pynvml, over exactly this library: loaded first by its path, it satisfies
    pynvml's own look-up by soname."""
    import ctypes

    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    import pynvml

    pynvml.nvmlInit()
    sizes = {}
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        sizes[_text(pynvml.nvmlDeviceGetUUID(handle))] = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    return sizes


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
