"""Mask /proc/driver/nvidia in a container: only the granted GPUs and MIG capabilities, and `ModifyDeviceFiles: 0`, so
that no driver program in the container creates or changes device nodes. Copies in a small tmpfs are mounted read-only
over the real directory (start path).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..system import imagefiles, syscalls

if TYPE_CHECKING:
    from . import mountpoint

PROC_DIR = "/proc/driver/nvidia"
_FILES = ("version", "registry", "params")  # not the controls of the host's power states
_MAX_BYTES = 64 << 10  # of one file; real files have some hundred bytes
_MAX_GPU_FILES = 32
_TMPFS = {"size": "4m", "nr_inodes": "4096", "mode": "0555"}


def cover(root: mountpoint.Root, bus_ids: tuple[str, ...], capabilities: tuple[str, ...] = ()) -> None:
    """Mount the reduced directory. Do nothing if the kernel has no NVIDIA driver (no such directory)."""
    real = root.lookup(PROC_DIR, os.O_PATH | os.O_DIRECTORY)
    if real < 0:
        return
    attributes = syscalls.ATTRIBUTES["nosuid"] | syscalls.ATTRIBUTES["nodev"] | syscalls.ATTRIBUTES["noexec"]
    tree = root.keep(syscalls.detached_tmpfs(_TMPFS, attributes, PROC_DIR))
    try:
        _fill(tree, real, {bus_id.lower() for bus_id in bus_ids})
        _copy_capabilities(tree, real, capabilities)
    except OSError as error:
        raise syscalls.from_os_error(error, "copy", PROC_DIR) from None
    syscalls.mount_setattr(tree, syscalls.ATTRIBUTES["ro"], syscalls.MS_PRIVATE, PROC_DIR)
    root.attach(tree, real, PROC_DIR)


def _fill(tree: int, real: int, granted: set[str]) -> None:
    for name, content in _regular_files(real, _FILES):
        _write(tree, name, masked_params(content) if name == "params" else content)
    os.mkdir("gpus", 0o555, dir_fd=tree)
    try:
        gpus = os.open("gpus", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=real)
    except FileNotFoundError:
        return
    try:
        for name in sorted(n for n in os.listdir(gpus) if n.lower() in granted):
            _copy_directory(gpus, name, tree, f"gpus/{name}")
    finally:
        os.close(gpus)


def _copy_directory(parent: int, name: str, tree: int, target: str) -> None:
    source = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.mkdir(target, 0o555, dir_fd=tree)
        for file, content in _regular_files(source, tuple(sorted(os.listdir(source))[:_MAX_GPU_FILES])):
            _write(tree, f"{target}/{file}", content)
    finally:
        os.close(source)


def _copy_capabilities(tree: int, real: int, paths: tuple[str, ...]) -> None:
    """Copy the `access` files below capabilities/ with their directories. The driver's libraries read there which node
    opens a MIG device."""
    if not paths:
        return
    source = os.open("capabilities", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=real)
    try:
        os.mkdir("capabilities", 0o555, dir_fd=tree)
        made = {""}
        for path in paths:
            directory = path.rpartition("/")[0]
            for parent in _parents(directory):
                if parent not in made:
                    os.mkdir(f"capabilities/{parent}", 0o555, dir_fd=tree)
                    made.add(parent)
            for name, content in _regular_files(source, (path,)):
                _write(tree, f"capabilities/{name}", masked_capability(content))
    finally:
        os.close(source)


def _parents(directory: str) -> Iterator[str]:
    """Return the path and its parents: a, a/b, a/b/c for a/b/c."""
    parts = directory.split("/")
    return ("/".join(parts[: end + 1]) for end in range(len(parts)))


def _regular_files(directory: int, names: tuple[str, ...]) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of regular files. Sizes in procfs are 0, so content is read up to a bound."""
    for name in names:
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        except FileNotFoundError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                yield name, imagefiles.read_all(fd, _MAX_BYTES)
        finally:
            os.close(fd)


def masked_params(content: bytes) -> bytes:
    """Return the driver's parameter list with ModifyDeviceFiles set to 0."""
    lines = [line for line in content.splitlines() if not line.startswith(b"ModifyDeviceFiles:")]
    return b"\n".join([*lines, b"ModifyDeviceFiles: 0", b""])


def masked_capability(content: bytes) -> bytes:
    """Return an `access` file that does not make a library create or change its node."""
    lines = [line for line in content.splitlines() if not line.startswith(b"DeviceFileModify:")]
    return b"\n".join([*lines, b"DeviceFileModify: 0", b""])


def _write(tree: int, name: str, content: bytes) -> None:
    fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, 0o444, dir_fd=tree)
    try:
        os.write(fd, content)
    finally:
        os.close(fd)
