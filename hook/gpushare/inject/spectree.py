"""A container's root as it will be: its root file system with config.json's mounts over it, before anything is mounted.
Reads only (start path).

    with SpecTree(bundle) as tree:
        rootfs.probe(tree, bundle.env)      -> Image      the same that the hook finds in the container
        tree.place(target, kind)            -> str        the path for a mount at `target`; raises if unsafe
        tree.add(target, source)                          add a mount of gpushare's; later mounts may be below it

A look-up first opens the whole path in the kernel, which is right if no link and no mount is on the way. Otherwise it
goes component by component and enters the source of each mount of config.json. Links resolve from the container's
root, as they will in the container, also links in volumes.
"""

import errno
import os
import stat
from types import TracebackType
from typing import NamedTuple, Optional

from ..core.errors import KernelError, is_exhausted
from ..core.model import Bundle
from ..core.quoting import shown
from ..request import oci, speckeys
from ..system import inroot, syscalls
from . import mountrules, rootfs

_MAX_LINKS = 40
_Parts = list[str]


class Covering(NamedTuple):
    """One mount of config.json. `source` is "" for file systems that the runtime creates (tmpfs, proc, ...), which
    count as empty."""

    target: str  # resolved, as seen in the container
    source: str  # host path
    below: str  # prefix of paths below `target`
    ours: bool
    shared: bool = False  # mounts below and over it appear on the host too


def _error(path: str, number: int) -> syscalls.SyscallError:
    return syscalls.SyscallError("look up", path, number)


def _below(target: str) -> str:
    return target.rstrip("/") + "/"


def _flags(mount: dict[str, object]) -> list[object]:
    options = mount.get("options")
    return options if isinstance(options, list) else []


def _is_bind(mount: dict[str, object]) -> bool:
    flags = _flags(mount)
    return mount.get("type") == "bind" or "bind" in flags or "rbind" in flags


class SpecTree(inroot.View):
    """The root of a container that does not exist yet."""

    def __init__(self, bundle: Bundle) -> None:
        self._root_fd = rootfs.open_root(bundle)
        self._mounts: list[Covering] = []
        self._last: dict[str, int] = {}  # target -> number of the last mount at it
        self._parents: dict[str, str] = {}  # a directory on the way to a path -> the text of its link
        self._directories: set[str] = set()  # directories where a mount point can be created
        self._fds: dict[str, int] = {}  # of mount sources
        self._found: dict[int, tuple[str, Optional[Covering]]] = {}  # open descriptor -> (path, its mount)
        for mount in speckeys.items(bundle.spec, "mounts"):
            if isinstance(mount, dict) and isinstance(mount.get("destination"), str):
                source = mount.get("source")
                for key in ("destination", "source"):
                    if isinstance(mount.get(key), str) and mount[key]:
                        oci.path_text(mount[key], f"config.json: mounts: {key}")
                path = os.path.join(bundle.path, source) if isinstance(source, str) and _is_bind(mount) else ""
                self._add(
                    mount["destination"], path, shared=not {"shared", "rshared"}.isdisjoint(map(str, _flags(mount)))
                )

    def __enter__(self) -> "SpecTree":
        return self

    def __exit__(self, kind: Optional[type], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        for fd in (self._root_fd, *(fd for fd in self._fds.values() if fd >= 0)):
            os.close(fd)
        self._fds.clear()

    def _add(self, target: str, source: str, shared: bool) -> None:
        resolved, _ = self._resolve("/" + target.lstrip("/"), follow_last=True)
        self._mount(Covering(resolved, source, _below(resolved), False, shared))

    def add(self, target: str, source: str) -> None:
        """Add a mount of gpushare's at `target`, which `place` returned."""
        self._mount(Covering(target, source, _below(target), True))

    def _mount(self, mount: Covering) -> None:
        self._last[mount.target] = len(self._mounts)
        self._mounts.append(mount)
        for path in [path for path in self._parents if path == mount.target or path.startswith(mount.below)]:
            del self._parents[path]
        self._directories -= {
            path for path in self._directories if path == mount.target or path.startswith(mount.below)
        }

    # Look-up

    def _covering(self, path: str) -> Optional[Covering]:
        """Return the mount of a resolved path: the last one that covers it."""
        last, number = self._last, -1
        while path:
            number = max(number, last.get(path, -1))
            path = path.rpartition("/")[0]
        number = max(number, last.get("/", -1))
        return self._mounts[number] if number >= 0 else None

    def _source_fd(self, mount: Optional[Covering]) -> int:
        """Return an O_PATH descriptor of the mount's source; -1 if it has none."""
        if mount is None:
            return self._root_fd
        if not mount.source:
            return -1
        if mount.source not in self._fds:
            try:
                self._fds[mount.source] = os.open(mount.source, os.O_PATH | os.O_CLOEXEC)
            except OSError as error:
                if is_exhausted(error):
                    raise
                self._fds[mount.source] = -1
        return self._fds[mount.source]

    def _open_plain(self, path: str, flags: int) -> int:
        """Open a path without links in its own file system. ELOOP: the path has a link."""
        mount = self._covering(path)
        base = self._source_fd(mount)
        below = path[len(mount.below) - 1 :] if mount else path
        if base < 0:
            raise _error(path, errno.ENOENT)
        if not below.strip("/"):
            try:
                fd = os.open(f"/proc/self/fd/{base}", (flags & ~os.O_NOFOLLOW) | os.O_CLOEXEC)
            except OSError as error:
                raise syscalls.from_os_error(error, "open", path) from None
        elif base != self._root_fd and not stat.S_ISDIR(os.fstat(base).st_mode):
            raise _error(path, errno.ENOTDIR)
        else:
            fd = inroot.open_below(
                base, below, flags, 0, syscalls.RESOLVE_NO_SYMLINKS
            )  # O_PATH | O_NOFOLLOW opens the link itself
        self._found[fd] = (path, mount)
        return fd

    def open_in(self, path: str, flags: int) -> int:
        """See inroot.open_in."""
        if os.path.normpath(path) == path:
            try:
                return self._open_plain(path, flags)
            except syscalls.SyscallError as error:
                if error.errno != errno.ELOOP:
                    raise
        resolved, there = self._resolve(path, follow_last=not flags & os.O_NOFOLLOW)
        if not there:
            raise _error(path, errno.ENOENT)
        return self._open_plain(resolved, flags)

    def _link_at(self, path: str) -> tuple[bool, str]:
        """Return (whether a path with resolved parents exists, its text if it is a link)."""
        try:
            fd = self._open_plain(path, os.O_PATH | os.O_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return self._leads_to_mount(path), ""
            raise
        try:
            return True, inroot.link_text(fd, path.rpartition("/")[2], path) if stat.S_ISLNK(
                os.fstat(fd).st_mode
            ) else ""
        finally:
            os.close(fd)

    def _leads_to_mount(self, path: str) -> bool:
        """Return whether the path is a directory that the runtime will create for a mount."""
        below = _below(path)
        return path in self._last or any(target.startswith(below) for target in self._last)

    def _resolve(self, path: str, follow_last: bool) -> tuple[str, bool]:
        """Return (`path` with links resolved, whether it exists). Missing components are appended as they are."""
        todo: _Parts = [part for part in reversed(path.split("/")) if part not in ("", ".")]
        here, links, there = "", 0, True
        while todo:
            part = todo.pop()
            if part == "..":
                here = here.rpartition("/")[0]
                there = True
                continue
            step = f"{here}/{part}"
            text = ""
            if there and step in self._parents:
                text = self._parents[step]
            elif there:
                there, text = self._link_at(step)
                if there and todo:
                    self._parents[step] = text
            if not text or (not todo and not follow_last):
                here = step
                continue
            links += 1
            inroot.spend(path)
            if links > _MAX_LINKS:
                raise _error(path, errno.ELOOP)
            here = "" if text.startswith("/") else here
            todo += [part for part in reversed(text.split("/")) if part not in ("", ".")]
        return here or "/", there

    def path_of(self, fd: int) -> str:
        """See inroot.path_of."""
        return self._found[fd][0]

    def reopened(self, old: int, new: int) -> int:
        """See inroot.View."""
        self._found[new] = self._found[old]
        return new

    def mounted_in(self, fd: int) -> list[str]:
        """See inroot.View."""
        below = _below(self._found[fd][0])
        return [target[len(below) :].partition("/")[0] for target in self._last if target.startswith(below)]

    def is_mounted_over(self, fd: int) -> bool:
        """See inroot.is_mounted_over."""
        return self._found[fd][1] is not None

    # Places for our mounts

    def place(self, path: str, kind: str) -> str:
        """Return the path at which config.json must mount a `kind` so that it appears at `path`, by the rules of
        mountrules.py. Nothing is created here: the runtime creates missing mount points. Raise KernelError."""
        try:
            resolved, there = self._resolve(path, follow_last=False)
            mode = self._mode(resolved) if there else 0
            if stat.S_ISLNK(mode):
                resolved, mode = self._library_behind(path)
        except syscalls.SyscallError as error:
            if error.errno == errno.ELOOP:
                raise KernelError(f"{shown(path)} leads through a magic link or a loop of links", "remove it") from None
            raise
        if not mode:
            self._require_creatable(path, resolved)
        elif not mountrules.accepts(kind, mode):
            raise mountrules.wrong_type(path, kind, mode)
        covering = self._covering(resolved)
        if covering is not None and covering.shared:
            raise mountrules.in_shared_volume(path, covering.target, covering.source)
        return resolved

    def require_place(self, path: str) -> None:
        """Refuse a device that the runtime would have to create in a user's volume."""
        resolved, there = self._resolve(path, follow_last=True)
        if not there or not self._mode(resolved):
            self._require_creatable(path, resolved)

    def _mode(self, resolved: str) -> int:
        """Return the file type and mode of a path; 0 if it does not exist yet."""
        try:
            fd = self._open_plain(resolved, os.O_PATH | os.O_NOFOLLOW)
        except syscalls.SyscallError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return 0
            raise
        try:
            return os.fstat(fd).st_mode
        finally:
            os.close(fd)

    def _library_behind(self, path: str) -> tuple[str, int]:
        resolved, there = self._resolve(path, follow_last=True)
        mode = self._mode(resolved) if there else 0
        if not mode:
            raise KernelError(f"{shown(path)} is a link to nothing", "remove it from the image")
        if not mountrules.is_library_path(resolved):
            raise mountrules.not_a_library(path, resolved)
        return resolved, mode

    def _require_creatable(self, path: str, resolved: str) -> None:
        """Refuse a mount point that the runtime would create inside a user's volume, and so on the host."""
        mount = self._covering(resolved)
        parent = resolved.rpartition("/")[0]
        mode = 0
        while parent and parent not in self._directories:
            mode = self._mode(parent)
            if mode:
                break
            parent = parent.rpartition("/")[0]
        if mode and not stat.S_ISDIR(mode):
            raise KernelError(f"a parent of {shown(path)} is not a directory", "remove it from the image")
        self._directories.add(parent)
        if mount is not None and mount.source and not mount.ours:
            raise mountrules.in_volume(path, mount.target, mount.source)
