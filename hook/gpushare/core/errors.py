"""What can go wrong, and the exit code that says so.

GpushareError              1   anything else that a person must act on
├── ConfigError           78   a configuration file is wrong
├── RequestError          64   the container asks for something that makes no sense
├── PolicyError           77   ... for something that policy does not allow
├── CapacityError         75   ... for more than is free now
├── DeviceError           69   the driver or a device is not there
└── KernelError           71   the kernel refused an operation (syscall and path are named)
"""

from .quoting import printable, shown


class GpushareError(Exception):
    """One line for the person who must act: what failed, and what to do (`hint`). `brief`: the reason in a few words,
    where it stands beside others."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "", brief: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.brief = brief or message

    def __str__(self) -> str:
        """The line as it is printed: control characters never reach a terminal or a log."""
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


_NO_ROOM, _NO_RIGHT = "make room there", "run as root"
# errno that says that something has run out, which is no bug of ours, whichever call meets it -> what to do
EXHAUSTED = {  # ENOSPC, EDQUOT, EMFILE, ENFILE, ENOMEM
    28: _NO_ROOM,
    122: _NO_ROOM,
    24: "raise RLIMIT_NOFILE (ulimit -n) of whoever starts this",
    23: "raise fs.file-max, or find the process that has so many files open",
    12: "see what takes the memory of this host, or of this cgroup",
}
# errno of a file that could not be written or read -> what to do
_WHAT_TO_DO = {  # EACCES, EPERM, EROFS, EAGAIN
    **EXHAUSTED,
    13: _NO_RIGHT,
    1: _NO_RIGHT,
    30: "make it writable: mount -o remount,rw",
    11: "a process of a container holds a lease on it (F_SETLEASE): sysctl fs.leases-enable=0, and again in a minute",
}


def what_to_do(error: OSError) -> str:
    """The hint for an error of the kernel that is about a file; "" when its own words must do."""
    return _WHAT_TO_DO.get(error.errno or 0, "")


def is_exhausted(error: Exception) -> bool:
    """Whether this is one of EXHAUSTED: not even "nothing is there" may be concluded from it."""
    return getattr(error, "errno", None) in EXHAUSTED


def reported(error: BaseException) -> BaseException:
    """`error` as this program reports it: an OSError of EXHAUSTED is the host's, wherever it was raised."""
    if isinstance(error, OSError) and is_exhausted(error):
        if error.filename:
            return of_file(error, str(error.filename))
        return KernelError(f"a system call failed: {error.strerror}", what_to_do(error))
    return error


def of_file(error: OSError, path: str) -> KernelError:
    """`error` as a person reads it."""
    return KernelError(f"{shown(path)}: {error.strerror}", what_to_do(error))
