"""Thin wrappers for Linux system calls that Python lacks (start path).

The only module that uses ctypes. It imports the C module behind it, because the rest of ctypes takes 1 ms to load.
Every function raises `SyscallError`, a `KernelError` that names the call, the path (or the meaning of the descriptor)
and the kernel's reason. No function makes decisions. Sources: the manual pages; numbers from the kernel's tables.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, Union

from ..core.errors import EXHAUSTED, KernelError, reason
from ..core.quoting import shown

if TYPE_CHECKING:
    import ctypes

AT_FDCWD = -100
AT_EMPTY_PATH = 0x1000
AT_RECURSIVE = 0x8000

RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_IN_ROOT = 0x10
MOUNT_ATTR_IDMAP = 0x100000  # set once, on a detached mount, with the user namespace that maps
RESOLVE_CACHED = 0x20  # Linux 5.12: fails with EAGAIN if the look-up is not in the kernel's cache

OPEN_TREE_CLONE = 1
OPEN_TREE_CLOEXEC = os.O_CLOEXEC
MOVE_MOUNT_F_EMPTY_PATH = 0x04
MOVE_MOUNT_T_EMPTY_PATH = 0x40

# Mount attributes under the names that plans use (`ops.Mount.flags`)
ATTRIBUTES = {"ro": 0x1, "nosuid": 0x2, "nodev": 0x4, "noexec": 0x8}
MS_PRIVATE = 1 << 18
MS_SLAVE = 1 << 19
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

PROC_SUPER_MAGIC = 0x9FA0
TMPFS_MAGIC = 0x01021994

# Calls since 5.2 have one number on every architecture; -1 is none, which the kernel refuses (ENOSYS)
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _PIDFD_OPEN, _OPENAT2, _MOUNT_SETATTR, _OPEN_TREE_ATTR = (
    428, 429, 430, 431, 432, 434, 437, 442, 467,
)  # fmt: skip
_BPF, _FUTEX, _RENAMEAT2, _STATX = {"x86_64": (321, 202, 316, 332), "aarch64": (280, 98, 276, 291)}.get(
    os.uname().machine, (-1, -1, -1, -1)
)
_RENAME_EXCHANGE = 2
_STATX_MNT_ID, _STATX_SIZE, _MNT_ID_AT = 0x1000, 256, 144  # struct statx

if TYPE_CHECKING:
    from ctypes import addressof as _addressof
    from ctypes import c_char as _Char
    from ctypes import c_long as _Long
    from ctypes import get_errno as _get_errno

    Memory = ctypes.Array[_Char]  # what `buffer` returns
    _syscall: Any

    def _function(name: str) -> Any:
        """A function of the C library that returns an int and saves errno separately."""
else:
    Memory = Any
    try:
        from _ctypes import FUNCFLAG_CDECL, FUNCFLAG_USE_ERRNO, CFuncPtr, _SimpleCData, dlopen, dlsym
        from _ctypes import addressof as _addressof
        from _ctypes import get_errno as _get_errno

        class _Long(_SimpleCData):
            _type_ = "l"

        class _Int(_SimpleCData):
            _type_ = "i"

        class _Char(_SimpleCData):
            _type_ = "c"

        class _LongFunction(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = _Long

        class _IntFunction(CFuncPtr):
            _flags_ = FUNCFLAG_CDECL | FUNCFLAG_USE_ERRNO
            _restype_ = _Int

        _handle = dlopen(None, 0)
        _syscall = _LongFunction(dlsym(_handle, "syscall"))

        def _function(name):
            return _IntFunction(dlsym(_handle, name))
    except (ImportError, AttributeError, TypeError):  # a Python with another _ctypes
        from ctypes import CDLL
        from ctypes import addressof as _addressof
        from ctypes import c_char as _Char
        from ctypes import c_long as _Long
        from ctypes import get_errno as _get_errno

        _libc = CDLL(None, use_errno=True)
        _function = _libc.__getattr__
        _syscall = _function("syscall")
        _syscall.restype = _Long

# Looked up here and not at the call: a build of the snapshot fails if hook/snapshot/snapshot.c lacks one of them
_LIBC = {
    name: _function(name)
    for name in ("connect", "fallocate", "fstatfs", "setns", "socket", "umount2", "unshare")
}  # fmt: skip

Arg = Union[int, bytes, Memory, None]


class SyscallError(KernelError):
    """A system call failed. `errno` lets a caller handle one reason and raise the rest."""

    def __init__(self, call: str, path: str, errno: int, hint: str = "") -> None:
        super().__init__("", hint or EXHAUSTED.get(errno, ""))
        self.call = call
        self.path = path
        self.errno = errno

    @property
    def message(self) -> str:
        """The message, built on first use: most of these errors only report a missing path and are never shown."""
        return self.draft or f"{self.call} {shown(self.path)}: {reason(self.errno)}"


def from_os_error(error: OSError, call: str, path: str) -> SyscallError:
    """Convert an OSError of the `os` module to a SyscallError."""
    return SyscallError(call, path, error.errno or 0)


def _long(argument: Arg) -> object:
    return _Long(argument) if isinstance(argument, int) else argument


def _call(name: str, path: str, number: int, *arguments: Arg) -> int:
    result = int(_syscall(_Long(number), *map(_long, arguments)))
    if result < 0:
        raise SyscallError(name, path, _get_errno())
    return result


def _libc_call(name: str, path: str, *arguments: Arg) -> int:
    result = int(_LIBC[name](*arguments))
    if result < 0:
        raise SyscallError(name, path, _get_errno())
    return result


_OPENAT2_LONG, _HOW_SIZE = _Long(_OPENAT2), _Long(24)  # made once: a start calls openat2 a hundred times


def _u64s(*values: int) -> bytes:
    return b"".join(v.to_bytes(8, "little") for v in values)


_hows: dict[tuple[int, int, int], bytes] = {}  # struct open_how of each kind of look-up; there are few


def openat2(dir_fd: int, path: str, flags: int, mode: int = 0, resolve: int = 0) -> int:
    """Open a file; return a close-on-exec descriptor. Raises with ENOSYS before Linux 5.6."""
    kind = flags, mode, resolve
    how = _hows.get(kind)
    if how is None:
        how = _hows[kind] = _u64s(flags | os.O_CLOEXEC, mode, resolve)
    fd = int(_syscall(_OPENAT2_LONG, _Long(dir_fd), os.fsencode(path), how, _HOW_SIZE))
    if fd < 0:
        raise SyscallError("openat2", path, _get_errno())
    return fd


def open_tree(path: str, recursive: bool = False, dir_fd: int = AT_FDCWD) -> int:
    """A detached copy of the mount of `path` (of `dir_fd` if `path` is ""); it vanishes with its descriptor."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | (AT_RECURSIVE if recursive else 0) | (0 if path else AT_EMPTY_PATH)
    return _call("open_tree", path or f"fd {dir_fd}", _OPEN_TREE, dir_fd, os.fsencode(path), flags)


def open_tree_mapped(dir_fd: int, what: str) -> int:
    """`open_tree` of a descriptor, without the mount's id map: files have the owners of the file system itself.
    Raises with ENOSYS before Linux 6.15."""
    attr = _u64s(0, MOUNT_ATTR_IDMAP, 0, 0)
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_EMPTY_PATH
    return _call("open_tree_attr", what, _OPEN_TREE_ATTR, dir_fd, b"", flags, attr, len(attr))


def mount_setattr(
    fd: int, set_: int, propagation: int, what: str, clear: int = 0, recursive: bool = False, userns: int = 0
) -> None:
    """Set attributes and propagation of the mount whose root is `fd`. `userns`: the user namespace of an id map."""
    attr = _u64s(set_, clear, propagation, userns)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _call("mount_setattr", what, _MOUNT_SETATTR, fd, b"", flags, attr, len(attr))


def move_mount(mount_fd: int, target_fd: int, what: str) -> None:
    """Attach a detached mount on the inode that `target_fd` (O_PATH) names; no path is looked up."""
    flags = MOVE_MOUNT_F_EMPTY_PATH | MOVE_MOUNT_T_EMPTY_PATH
    try:
        _call("move_mount", what, _MOVE_MOUNT, mount_fd, b"", target_fd, b"", flags)
    except SyscallError as error:
        if error.errno == errno.ENOSPC:  # a full mount namespace, and no full disk
            hint = "raise fs.mount-max (sysctl), or find what has mounted so much"
            raise SyscallError(error.call, what, error.errno, hint) from None
        raise


def mount_id(fd: int) -> int:
    """The id of the mount that `fd` is on, as in the first column of mountinfo. Linux 5.8."""
    found = buffer(_STATX_SIZE)
    _call("statx", f"fd {fd}", _STATX, fd, b"", AT_EMPTY_PATH, _STATX_MNT_ID, found)
    mask, number = struct.unpack_from(f"=I{_MNT_ID_AT - 4}xQ", found)
    if not mask & _STATX_MNT_ID:
        raise SyscallError("statx", f"fd {fd}", errno.ENODATA)
    return int(number)


def umount(path: str, flags: int = MNT_DETACH) -> None:
    _libc_call("umount2", path, os.fsencode(path), flags)


def unshare(kinds: int, what: str) -> None:
    """Move this process, which must have one thread, into new namespaces."""
    _libc_call("unshare", what, kinds)


def setns(fd: int, what: str, kind: int = CLONE_NEWNS) -> None:
    _libc_call("setns", what, fd, kind)


def pidfd_open(pid: int) -> int:
    """A descriptor of the process that has this pid now, even if the pid is reused later."""
    return _call("pidfd_open", f"pid {pid}", _PIDFD_OPEN, pid, 0)


def connect_datagram(path: str) -> int:
    """A close-on-exec, non-blocking descriptor for datagrams to the Unix socket at `path`."""
    flags = 2 | os.O_CLOEXEC | os.O_NONBLOCK  # SOCK_DGRAM; SOCK_CLOEXEC and SOCK_NONBLOCK are these flags of open
    fd = _libc_call("socket", path, 1, flags, 0)  # 1: AF_UNIX
    address = (1).to_bytes(2, sys.byteorder) + os.fsencode(path) + b"\0"
    try:
        if len(address) > 110:  # sizeof(struct sockaddr_un)
            raise SyscallError("connect", path, errno.ENAMETOOLONG)
        _libc_call("connect", path, fd, address, len(address))
    except SyscallError:
        os.close(fd)
        raise
    return fd


_SELINUX = "/sys/fs/selinux/enforce"  # exists where the kernel enforces or logs SELinux
_CONTEXT = "system_u:object_r:container_file_t:s0"  # what containers may read and write: container-selinux


def detached_tmpfs(options: dict[str, str], attributes: int, what: str) -> int:
    """A new, detached tmpfs. `options` as in tmpfs(5): size, nr_inodes, mode. With SELinux its files have the label of
    containers' own files, because containers get parts of it as mounts; a policy without containers lacks that type."""
    if os.access(_SELINUX, os.F_OK):
        try:
            return _detached("tmpfs", {**options, "context": _CONTEXT}, attributes, what)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
    return _detached("tmpfs", options, attributes, what)


def detached_overlay(lower: str, upper: str, work: str) -> int:
    """A new, detached overlay over the directory `lower`; see the kernel's filesystems/overlayfs.rst."""
    lower = lower.replace("\\", "\\\\").replace(":", "\\:")
    return _detached("overlay", {"lowerdir": lower, "upperdir": upper, "workdir": work}, 0, lower)


def _detached(kind: str, options: dict[str, str], attributes: int, what: str) -> int:
    fs = _call("fsopen", kind, _FSOPEN, kind.encode(), 1)  # 1: FSOPEN_CLOEXEC
    try:
        for key, value in options.items():
            _call("fsconfig", f"{key}={value}", _FSCONFIG, fs, 1, key.encode(), os.fsencode(value), 0)  # 1: SET_STRING
        _call("fsconfig", what, _FSCONFIG, fs, 6, None, None, 0)  # 6: FSCONFIG_CMD_CREATE
        return _call("fsmount", what, _FSMOUNT, fs, 1, attributes)  # 1: FSMOUNT_CLOEXEC
    finally:
        os.close(fs)


def filesystem_magic(fd: int) -> int:
    """The superblock magic number (statfs f_type) of the file system that `fd` is on."""
    status = buffer(256)
    _libc_call("fstatfs", f"fd {fd}", fd, status)
    return int.from_bytes(status.raw[:8], "little")


def lines_of(file: Union[str, int]) -> list[str]:
    """Lines of a file of /proc, by path or descriptor, without line ends. A carriage return is part of a line.
    Raises OSError. Does not use open(), which takes as long as parsing the lines."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC) if isinstance(file, str) else file
    parts = []
    try:
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        if fd != file:
            os.close(fd)
    return b"".join(parts).decode("utf-8", "surrogateescape").split("\n")[:-1]


def buffer(content: Union[bytes, int]) -> Memory:
    """Memory for the kernel to read or fill: a copy of `content`, or that many zero bytes."""
    size = content if isinstance(content, int) else max(len(content), 1)
    memory: Memory = (_Char * size)()
    if not isinstance(content, int):
        memory.raw = content.ljust(size, b"\0")
    return memory


def address(memory: Memory) -> int:
    return _addressof(memory)


def exchange(first: str, second: str) -> None:
    """Swap the names of two files atomically. Raises SyscallError; not every file system supports it."""
    names = os.fsencode(first), os.fsencode(second)
    _call("renameat2", second, _RENAMEAT2, AT_FDCWD, names[0], AT_FDCWD, names[1], _RENAME_EXCHANGE)


def fallocate(fd: int, mode: int, size_bytes: int, path: str) -> None:
    """Reserve space for a file."""
    _libc_call("fallocate", path, fd, mode, 0, size_bytes)


def futex_wake(mapping: Any, at: int) -> int:
    """Wake all processes that wait on the 32-bit word at `at` of a file, wherever they map it; return their number.
    `mapping` is a writable, shared mmap.mmap of the file. Also a full memory barrier."""
    if _FUTEX < 0:
        raise KernelError(f"futex: no system call number for {shown(os.uname().machine)}")
    word = _Char.from_buffer(mapping, at)
    return _call("futex", "limits", _FUTEX, _addressof(word), 1, 0x7FFFFFFF, None, None, 0)  # 1: FUTEX_WAKE, shared


def bpf(command: int, attr: Memory, what: str) -> int:
    """bpf(2); the kernel may write results into `attr`."""
    return _call("bpf", what, _BPF, command, attr, len(attr))


def try_setxattr(path: str, name: str) -> None:
    """Set an extended attribute if possible: ordinary users may not, and some file systems have none."""
    try:
        os.setxattr(path, name, b"1")
    except OSError:
        pass
