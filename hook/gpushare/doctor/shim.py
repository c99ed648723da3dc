"""The most important check: a process gets a share, as from `gpushare run`, loads the library with this host's driver,
and reads the size of its GPU.

The process is a child with its own mount namespace and state directory. So it changes no lease of this host and takes
no device from a container, and everything disappears with it. It creates no CUDA context, because that would take
memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import struct
import tempfile
import time
from typing import Any, NoReturn

from ..core import constants
from ..core.errors import GpushareError
from ..core.model import Node, Policy
from ..core.ops import Mount, Plan
from ..core.quantity import human
from ..programs import run, session
from ..state import audit_log, storage
from ..state.log import line_of
from ..system import elf, rootless, syscalls
from .base import FAIL, OK, SKIP, Machine, Result, no_driver

_LIMIT_BYTES = 1 << 30
_DEADLINE_S = 30.0  # a driver without persistence mode takes seconds to come up
_MAX_ANSWER = 1 << 16
LIBRARIES = ("libcuda.so", "libnvidia-ml.so")


def files(machine: Machine) -> Result:
    """Whether gpushare's libraries exist, are complete, and are for this CPU architecture."""
    if machine.config is None:
        return Result(SKIP, "needs a configuration")
    folder = machine.config.shim_dir
    for name in LIBRARIES:
        path = os.path.join(folder, name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            return Result(FAIL, f"{path}: {error.strerror}", "install gpushare again, or set shim_dir")
        try:
            found = elf.read_library(fd)
            complete = found is not None and _is_complete(fd)
        finally:
            os.close(fd)
        if found is None or found.machine != os.uname().machine:
            return Result(FAIL, f"{path} is no library for {os.uname().machine}", "install gpushare again")
        if not complete:
            return Result(FAIL, f"{path} is truncated", "install gpushare again")
    return Result(OK, f"{' and '.join(LIBRARIES)} in {folder}")


def _is_complete(fd: int) -> bool:
    """Whether a library contains its section headers, which linkers write at its end. See elf(5), Elf64_Ehdr."""
    (start,) = struct.unpack("<Q", os.pread(fd, 8, 40))
    size, number = struct.unpack("<HH", os.pread(fd, 4, 58))
    return bool(os.fstat(fd).st_size >= start + size * number)


def loads(machine: Machine) -> Result:
    """Whether CUDA and NVML both report the memory limit of a share, with this host's driver."""
    if machine.node is None:
        return no_driver(machine)
    if os.geteuid() != 0 or rootless.is_rootless():
        return Result(SKIP, "needs root")
    if os.path.lexists(constants.LIMITS):
        return Result(SKIP, "this runs in a share of a GPU")
    if not machine.node.inventory.devices:
        return Result(SKIP, "needs a device")
    with tempfile.TemporaryDirectory(prefix="gpushare-doctor-") as directory:
        answer = _ask(machine.node, directory)
    return judged(answer)


def judged(answer: dict[str, Any]) -> Result:
    """The result of the child's answer."""
    if "error" in answer:
        return Result(FAIL, str(answer["error"]), str(answer.get("hint", "")))
    totals = {name: answer.get(name) for name in ("CUDA", "NVML")}
    wrong = [f"{name} shows {human(int(total or 0))}" for name, total in totals.items() if total != _LIMIT_BYTES]
    if wrong:
        return Result(FAIL, f"{' and '.join(wrong)} where the limit is {human(_LIMIT_BYTES)}", "please report it")
    return Result(OK, f"CUDA and NVML show a limit of {human(_LIMIT_BYTES)}")


def _ask(host: Node, directory: str) -> dict[str, Any]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        _child(host, directory, writer)
    os.close(writer)
    try:
        return _read(reader, pid)
    finally:
        os.close(reader)


def _read(reader: int, pid: int) -> dict[str, Any]:
    text, deadline = b"", time.monotonic() + _DEADLINE_S
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    late = False
    while len(text) < _MAX_ANSWER:
        late = not poll.poll(max(0, deadline - time.monotonic()) * 1000)
        part = b"" if late else os.read(reader, 4096)
        if not part:
            break
        text += part
    if late:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # without waiting, because the child may be stuck in the kernel
        return {
            "error": f"the driver did not answer within {_DEADLINE_S:.0f} s",
            "hint": "run nvidia-smi: its output may show the reason",
        }
    status = os.waitpid(pid, 0)[1]
    try:
        answer: dict[str, Any] = json.loads(text)
    except ValueError:
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"
        return {"error": f"a process with the library over the driver ended by {how}", "hint": "please report it"}
    return answer


def _child(host: Node, directory: str, writer: int) -> NoReturn:
    code = 1
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        try:
            answer = _share(host, directory)
        except GpushareError as error:
            answer = {"error": error.message, "hint": error.hint}
        except Exception as error:
            answer = {"error": line_of(error)[0]}
        storage.write_all(writer, json.dumps(answer).encode())
        code = 0
    finally:
        os._exit(code)


def _share(host: Node, directory: str) -> dict[str, Any]:
    """Make a share in the child, and read its sizes. The host's policy does not apply to it."""
    syscalls.unshare(syscalls.CLONE_NEWNS, "mount namespace")
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    syscalls.mount_setattr(root, 0, syscalls.MS_PRIVATE, "/", recursive=True)
    os.close(root)
    storage.prepare(directory)
    host = host._replace(config=host.config._replace(state_dir=directory, policy=Policy(), log=audit_log.NOWHERE))
    job = run.Job("doctor", ("gpushare doctor",), ((constants.ENV_MEMORY, str(_LIMIT_BYTES)),))
    bundle = run.bundle_of(job, {})
    placed = session.place(run.resolve(bundle, host), run.OntoRoot(alone=False))
    assert placed is not None
    steps = placed.plan
    return {"CUDA": _cuda_total(_path(steps, "libcuda")), "NVML": _nvml_total(_path(steps, "libnvidia-ml"))}


def _path(steps: Plan, stem: str) -> str:
    """The path at which a program finds the library `stem`."""
    targets = [
        op.target for op in steps.ops if isinstance(op, Mount) and os.path.basename(op.target).startswith(f"{stem}.so.")
    ]
    found = [target for target in targets if not target.startswith(constants.PRIVATE_DIR + "/")]
    return found[0]


def _checked(code: int, call: str) -> None:
    if code:
        raise GpushareError(
            f"{call} returned {code} in a process with the library over the driver",
            "run nvidia-smi: its output may show the reason",
        )


def _cuda_total(path: str) -> int:
    """The memory size that the CUDA driver API reports. None of these calls needs a context."""
    cuda, device, total = ctypes.CDLL(path), ctypes.c_int(), ctypes.c_size_t()
    _checked(cuda.cuInit(0), "cuInit")
    _checked(cuda.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _checked(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    return total.value


def _nvml_total(path: str) -> int:
    """The memory size that NVML reports."""
    nvml, device, memory = ctypes.CDLL(path), ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    _checked(nvml.nvmlInit_v2(), "nvmlInit")
    _checked(nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)), "nvmlDeviceGetHandleByIndex")
    _checked(nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)), "nvmlDeviceGetMemoryInfo")
    return memory[0]
