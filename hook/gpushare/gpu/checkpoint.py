"""Move the device memory of processes to the host and back, by the driver's checkpoint functions (driver 570). Not on
the start path.

    Driver(library).states(pids)         -> {pid: state}     of the processes that use CUDA
    Driver(library).lock(pid, seconds)   its calls wait, and its work ends. Raise Busy if that takes longer
    Driver(library).checkpoint(pid)      its device memory is in its own host memory
    Driver(library).restore(pid), unlock(pid)

The caller needs the rights to trace the process. Each call runs in a forked child, since it may never return: in a
process that is stopped, for example. Raise DeviceError with the driver's reason. Source: cuda.h of CUDA 12.8, and
NVIDIA's description of the checkpoint functions; docs/suspend.md has what was measured.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Callable, Iterable
from typing import Optional

from ..core.errors import DeviceError, GpushareError
from . import nvml

LEAST_DRIVER = 570
RUNNING, LOCKED, CHECKPOINTED, FAILED = range(4)  # CUprocessState
NAMES = ("running", "locked", "checkpointed", "failed")
_ARGUMENTS_BYTES = 64
_FUNCTIONS = ("GetState", "Lock", "Checkpoint", "Restore", "Unlock")
_SUCCESS, _OUT_OF_MEMORY, _NO_CUDA, _NOT_READY = 0, 2, 3, 600
_REASONS = {
    1: "invalid value",
    2: "out of memory",
    3: "the process does not use CUDA",
    304: "the operating system refused it",
    401: "the process is in another state",
    801: "the driver does not support it for this process",
}
_STATES_S, _UNLOCK_S = 10.0, 30.0
_LEAST_BYTES_PER_S = 200 << 20  # of a copy; the slowest that was measured had 1.1 GB/s
_COPY_S = 60.0  # in addition


class Busy(GpushareError):
    """The work of a process did not end in time."""


class Driver:
    """The driver's libcuda at the path `library`. `meanwhile`: called ten times a second while it works. Raise
    DeviceError if it cannot checkpoint a process."""

    def __init__(self, library: str, version: str, meanwhile: Optional[Callable[[], None]] = None) -> None:
        self._library, self._meanwhile = library, meanwhile
        major = version.partition(".")[0]
        why = ""
        if platform.machine() != "x86_64":
            why = f"NVIDIA's driver suspends no process on {platform.machine()}"
        elif major.isdigit() and int(major) < LEAST_DRIVER:
            why = f"driver {version} cannot suspend a process: that needs {LEAST_DRIVER} or later"
        elif not library:
            why = "no libcuda of the loaded driver was found"
        if why:
            raise DeviceError(why, "stop the container instead")

    def states(self, pids: Iterable[int]) -> dict[int, int]:
        """Return the state of each process that uses CUDA. No process may be stopped."""
        wanted = list(pids)

        def ask() -> list[list[int]]:
            import ctypes

            cuda = self._loaded()
            found = []
            for pid in wanted:
                state = ctypes.c_int(-1)
                code = cuda.cuCheckpointProcessGetState(pid, ctypes.byref(state))
                found.append([pid, code, state.value])
            return found

        answer = nvml.in_child(ask, _STATES_S, self._meanwhile) if wanted else []
        if answer is None:
            raise DeviceError("the driver does not answer which processes use CUDA", "see `gpushare doctor`")
        return {pid: state for pid, code, state in answer if code == _SUCCESS and 0 <= state <= FAILED}

    def lock(self, pid: int, seconds: float) -> None:
        code = self._call("Lock", pid, seconds + _STATES_S, int(seconds * 1000))
        if code == _NOT_READY:
            raise Busy(f"the work of pid {pid} did not end within {seconds:g} s", "try again later, or with --timeout")
        self._require("lock", pid, code)

    def checkpoint(self, pid: int, size_bytes: int = 0) -> None:
        self._require("checkpoint", pid, self._call("Checkpoint", pid, _COPY_S + size_bytes / _LEAST_BYTES_PER_S))

    def restore(self, pid: int, size_bytes: int = 0) -> None:
        self._require("restore", pid, self._call("Restore", pid, _COPY_S + size_bytes / _LEAST_BYTES_PER_S))

    def unlock(self, pid: int) -> None:
        self._require("unlock", pid, self._call("Unlock", pid, _UNLOCK_S))

    def _call(self, name: str, pid: int, deadline_s: float, timeout_ms: Optional[int] = None) -> Optional[int]:
        given = struct.pack(f"<I{_ARGUMENTS_BYTES - 4}x", timeout_ms or 0)

        def act() -> int:
            cuda = self._loaded()
            return int(getattr(cuda, f"cuCheckpointProcess{name}")(pid, given))

        code: Optional[int] = nvml.in_child(act, deadline_s, self._meanwhile)
        return code

    def _loaded(self) -> ctypes.CDLL:  # type: ignore[name-defined]  # noqa: F821
        import ctypes

        cuda = ctypes.CDLL(self._library)
        for name in _FUNCTIONS:
            getattr(cuda, f"cuCheckpointProcess{name}").restype = ctypes.c_int
        if cuda.cuInit(0):
            raise OSError("cuInit failed")
        return cuda

    @staticmethod
    def _require(what: str, pid: int, code: Optional[int]) -> None:
        if code is None:
            raise DeviceError(f"the driver did not {what} pid {pid} in time", "see `gpushare doctor`")
        if code != _SUCCESS:
            reason = _REASONS.get(code, "unknown")
            raise DeviceError(f"the driver did not {what} pid {pid}: error {code}, {reason}", "see docs/suspend.md")
