"""Exception classes and their exit codes.

GpushareError              1   any other error that needs a person to act
├── ConfigError           78   a configuration file is wrong
├── RequestError          64   the container's request is invalid
├── PolicyError           77   policy does not allow the request
├── CapacityError         75   the request exceeds what is free now
├── DeviceError           69   the driver or a device is missing
└── KernelError           71   the kernel refused an operation (the message names the system call and the path)
"""

import os

from .quoting import printable, shown

_SHIM = ("libcuda.so", "libnvidia-ml.so")  # in shim_dir; driver files have the version in their names


class GpushareError(Exception):
    """One line for the user: what failed, and what to do (`hint`). `brief` is a short reason for lists of several."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", brief: str = "") -> None:
        super().__init__(message)
        self.draft, self.draft_brief = message, brief or message
        self.hint = hint

    @property
    def message(self) -> str:
        """The failure. A class whose text needs a lookup completes the draft here, when the text is read."""
        return self.draft

    @property
    def brief(self) -> str:
        return self.draft_brief

    def __str__(self) -> str:
        """The line to print; control characters are escaped for terminals and logs."""
        return printable(f"{self.message}; {self.hint}" if self.hint else self.message)


class ConfigError(GpushareError):
    exit_code = 78


class RequestError(GpushareError):
    exit_code = 64


class PolicyError(GpushareError):
    exit_code = 77


class CapacityError(GpushareError):
    exit_code = 75


class DeviceError(GpushareError):
    exit_code = 69


class KernelError(GpushareError):
    exit_code = 71


_NO_SPACE, _NO_PERMISSION = "free space there", "run as root"
# errno of an exhausted resource, which is never a bug of gpushare, whichever call fails -> what to do
EXHAUSTED = {  # ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM
    28: _NO_SPACE,
    122: _NO_SPACE,
    24: "raise RLIMIT_NOFILE (ulimit -n) of the calling process",
    23: "raise fs.file-max, or find the process that has so many files open",
    12: "free memory on this host, or in this cgroup",
}
# errno of a file that could not be written or read -> what to do
_WHAT_TO_DO = {  # EACCES, EPERM, EROFS, EAGAIN
    **EXHAUSTED,
    13: _NO_PERMISSION,
    1: _NO_PERMISSION,
    30: "make it writable: mount -o remount,rw",
    11: "a process of a container holds a lease on it (F_SETLEASE): set sysctl fs.leases-enable=0, retry in a minute",
}


def what_to_do(error: OSError) -> str:
    """The hint for an OSError about a file; "" when there is none."""
    return _WHAT_TO_DO.get(error.errno or 0, "")


def reason(number: int) -> str:
    """The text of an errno. For EISDIR not the kernel's: docker exits with 126 if an error contains that text, as for a
    program that cannot be executed, and not with 125."""
    return "it is a folder" if number == 21 else os.strerror(number)


def is_exhausted(error: Exception) -> bool:
    """Whether the errno is one of EXHAUSTED. Such an error does not prove that a file is missing."""
    return getattr(error, "errno", None) in EXHAUSTED


def reported(error: BaseException) -> BaseException:
    """Convert an OSError of EXHAUSTED, wherever it was raised, to a KernelError; return other errors unchanged."""
    if isinstance(error, OSError) and is_exhausted(error):
        if error.filename:
            return of_file(error, str(error.filename))
        return KernelError(f"a system call failed: {error.strerror}", what_to_do(error))
    return error


def of_file(error: OSError, path: str) -> KernelError:
    """Convert an OSError about `path` to a KernelError with a hint."""
    why = reason(error.errno) if error.errno == 21 else error.strerror
    return KernelError(f"{shown(path)}: {why}", what_to_do(error))


def of_source(number: int, path: str) -> DeviceError:
    """Return the error for a file of the driver or of gpushare that cannot be mounted. `number`: errno"""
    is_shim = os.path.basename(path) in _SHIM
    return DeviceError(
        f"{shown(path)}: {reason(number)}",
        "install gpushare again, or set shim_dir in the configuration"
        if is_shim
        else "is the driver loaded, and its version still the same?",
    )
