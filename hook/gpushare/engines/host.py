"""Read and write files of a host below `root`; write all changes or none.

A file is replaced by rename, so an engine that reads it meanwhile gets the old text or the new text. Mode and owner
stay. A file that is not regular (a link, a directory, a FIFO) is refused: another program manages it.
"""

from __future__ import annotations

import codecs
import errno
import glob
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from typing import Optional

from ..core.errors import ConfigError, KernelError
from ..core.quoting import shown
from ..system import filelock, procs
from .base import Change

MAX_BYTES = 4 << 20
_ASK_SECONDS = 10
# Where systemd keeps the daemons of engines. Seen from a cgroup namespace, such as a pod's, a path begins with /..
_SERVICE = re.compile(
    r"(?:/\.\.)*/system\.slice/(?:(?:docker|containerd|crio|k3s|k3s-agent|rke2-server|rke2-agent|k0sworker|"
    r"k0scontroller)|snap\.microk8s\.[^/]*|(?P<snap>snap\.docker\.[^/]*))\.service(?:/|$)"
)
_HINTS = {errno.EACCES: "run as root", errno.EPERM: "run as root", errno.ENOSPC: "free some space"}
_ODD_KINDS = (errno.ENXIO, errno.ELOOP, errno.EISDIR)  # a FIFO, link or directory has the temporary file's name
_MAX_LOOKED_AT = 4 << 20  # characters
_MAX_LINKS = 40  # the kernel's limit


class Host:
    """Files of one host. All path arguments and results are as the engine sees them, without `root`."""

    def __init__(self, root: str = "/") -> None:
        self.root = os.path.realpath(root)

    def at(self, path: str) -> str:
        """The real path of `path` below `root`. Raises ConfigError for a link out of `root`."""
        if not path.startswith("/"):
            raise ConfigError(f"{shown(path)} is not an absolute path", "write the whole path")
        full = os.path.join(self.root, os.path.normpath(path).lstrip("/"))
        folder = os.path.realpath(os.path.dirname(full))
        if self.root != "/" and os.path.commonpath([self.root, folder]) != self.root:
            raise ConfigError(f"{shown(path)} leads out of {shown(self.root)}", "remove that link")
        return os.path.join(folder, os.path.basename(full))

    def _status(self, path: str) -> Optional[os.stat_result]:
        full = self.at(path)
        try:
            status = os.lstat(full)
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError(
                f"{shown(path)}: {shown(os.path.dirname(path))} is not a directory", "move it away"
            ) from None
        if stat.S_ISLNK(status.st_mode):
            target = os.readlink(full)
            raise ConfigError(
                f"{shown(path)} is a link to {shown(target)}", "change the target by hand, or replace the link"
            )
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{shown(path)} is not a regular file", "move it away")
        return status

    def read(self, path: str) -> Optional[str]:
        """The text of a file; None: no such file. Raises ConfigError, OSError."""
        if self._status(path) is None:
            return None
        fd = os.open(self.at(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{shown(path)} is larger than {MAX_BYTES} bytes")
        try:
            return data.decode(_encoding(data))
        except UnicodeDecodeError as error:
            kind = "UTF-16" if error.encoding.startswith("utf-16") else "UTF-8"
            raise ConfigError(f"{shown(path)}: not {kind} text (byte {error.start})", "fix the file") from None

    def read_linked(self, path: str) -> Optional[str]:
        """The same, also through links; a link's target is a path of this host."""
        last = path
        for _ in range(_MAX_LINKS):
            full = self.at(last)
            if not os.path.islink(full):
                return self.read(last)
            last = os.path.normpath(os.path.join(os.path.dirname(last), os.readlink(full)))
        raise ConfigError(f"{shown(path)} is a link to itself", "remove that link")

    def glob(self, pattern: str) -> list[str]:
        prefix = self.root.rstrip("/")
        return sorted(path[len(prefix) :] for path in glob.glob(glob.escape(prefix) + pattern))

    def files_below(self, folder: str) -> list[str]:
        """All files below a directory, hidden ones and links too, in the order of the names of each directory."""
        found: list[str] = []
        try:
            entries = sorted(os.scandir(self.at(folder)), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            return found
        for entry in entries:
            path = f"{folder}/{entry.name}"
            found += self.files_below(path) if entry.is_dir(follow_symlinks=False) else [path]
        return found

    def ask(self, *command: str) -> Optional[str]:
        """Standard output of a program; None if it fails, or if `root` is another host's: never run its programs."""
        program = self._executable(command[0])
        if not program:
            return None
        try:
            done = subprocess.run(
                [program, *command[1:]],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_ASK_SECONDS,
                check=True,
            )
        except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
            return None
        return done.stdout

    def _executable(self, name: str) -> str:
        """The path of an engine's program if it is safe to run; else empty. A path that is given whole can come from
        another process, so only root may be able to replace that program."""
        path = self.program(name) if self.root == "/" else ""
        return path if "/" not in name or _is_of_root(name) else ""

    def complaint(self, *command: str) -> str:
        """Standard error of a program that failed; empty if it did not, or cannot be run."""
        program = self._executable(command[0])
        if not program:
            return ""
        try:
            done = subprocess.run(
                [program, *command[1:]], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        text = done.stderr.decode(errors="replace").strip() or f"{command[0]} ended with {done.returncode}"
        return text if done.returncode else ""

    def look(self, path: str) -> str:
        """The beginning of a regular file that gpushare does not change, through links; empty if it cannot be read."""
        try:
            full = os.path.realpath(self.at(path))
            if self.root != "/" and os.path.commonpath([self.root, full]) != self.root:
                return ""
            if not os.path.isfile(full):  # a FIFO would make the reader wait
                return ""
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
            with open(fd, encoding="utf-8", errors="replace") as file:
                return file.read(_MAX_LOOKED_AT)
        except (ConfigError, OSError):
            return ""

    def processes(self, program: str) -> list[tuple[int, list[str]]]:
        """(pid, command line) of the running processes of a program that the host itself has started; none if `root` is
        another host's. No other process's command line is read: it can be in memory that makes the reader wait
        (FUSE)."""
        found = []
        for pid in map(int, filter(str.isdigit, os.listdir("/proc") if self.root == "/" else ())):
            words = procs.command(pid) if _is_service(pid) else []
            if words and os.path.basename(words[0]) == program:
                found.append((pid, words))
        return found

    def runs_systemd(self) -> bool:
        """sd_booted(3); False if `root` is another host's."""
        return self.root == "/" and os.path.isdir("/run/systemd/system")

    def has(self, path: str) -> bool:
        return os.path.lexists(self.at(path))

    def is_link(self, path: str) -> bool:
        return os.path.islink(self.at(path))

    def program(self, name: str) -> str:
        """Path of an engine's program, which can be given by its path; empty when there is none."""
        if name.startswith("/"):
            return name if self.has(name) else ""
        if self.root == "/":
            return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin:/usr/local/bin") or ""
        folders = ("/usr/bin", "/usr/sbin", "/usr/local/bin", "/usr/local/sbin")
        return next((f"{folder}/{name}" for folder in folders if self.has(f"{folder}/{name}")), "")

    def missing_folders(self, paths: Sequence[str]) -> tuple[str, ...]:
        """Directories that `write` would make for these files, parents first."""
        missing: list[str] = []
        for path in paths:
            above, folder = [], os.path.dirname(path)
            while folder != "/" and folder not in missing and not os.path.isdir(self.at(folder)):
                above.append(folder)
                folder = os.path.dirname(folder)
            missing += reversed(above)
        return tuple(missing)

    def write(self, changes: Sequence[Change]) -> None:
        """Make all changes, or none. Raises KernelError; ConfigError if a file changed after it was read."""
        for change in changes:
            if self.read(change.path) != change.before:
                raise ConfigError(f"{shown(change.path)} was changed meanwhile", "run the command again")
        done: list[Change] = []
        folders: list[str] = []
        path = ""
        try:
            for change in changes:
                for path in self.missing_folders([change.path] if change.after is not None else []):
                    os.makedirs(self.at(path), exist_ok=True)  # another gpushare command may be making it, too
                    folders.append(path)
                    os.chmod(self.at(path), 0o755)
                path = change.path
                self._replace(change)
                done.append(change)
        except OSError as error:
            for change in reversed(done):
                self._replace(change._replace(before=change.after, after=change.before))
            self.remove_folders(folders)
            path = _temporary_name(path) if error.errno in _ODD_KINDS else path
            raise KernelError(
                f"{shown(path)}: {error.strerror}; nothing was changed", _HINTS.get(error.errno or 0, "")
            ) from error

    def remove_folders(self, folders: Sequence[str]) -> None:
        """Remove the directories that are empty."""
        for folder in sorted(folders, key=len, reverse=True):
            try:
                os.rmdir(self.at(folder))
            except OSError:
                pass

    def _replace(self, change: Change) -> None:
        """Make one change atomically. Raises OSError."""
        full = self.at(change.path)
        if change.after is None:
            os.unlink(full)
            return
        status = self._status(change.path)
        temporary, fd = _temporary(full)
        with open(fd, "wb") as file:
            try:
                if status is not None:
                    os.fchown(fd, status.st_uid, status.st_gid)
                os.fchmod(fd, stat.S_IMODE(status.st_mode) if status is not None else change.mode)
                file.write(change.after.encode(self._encoding_of(full) if status is not None else "utf-8"))
                file.flush()
                os.fsync(fd)
                os.rename(temporary, full)
            except OSError:
                os.unlink(temporary)
                raise

    @staticmethod
    def _encoding_of(full: str) -> str:
        with open(full, "rb") as file:
            return _encoding(file.read(2))

    def sweep(self, paths: Sequence[str]) -> None:
        """Remove temporary files of killed commands next to these files."""
        for path in paths:
            left = _temporary_name(self.at(path))
            if os.path.lexists(left):
                os.unlink(left)


def _is_service(pid: int) -> bool:
    """Whether a process is a unit of an engine on this host, of root. A daemon of a container or of a user is not: its
    command line can name any file."""
    match = _SERVICE.match(procs.cgroup_of(pid))
    if match is None or not procs.is_root(pid):
        return False
    return bool(match["snap"]) or procs.sees_same_files(pid)  # the snap of docker has its own mounts


def _encoding(data: bytes) -> str:
    """The encoding of a text that begins with these bytes. Its byte order mark stays in the text. docker reads UTF-16
    with such a mark (tried with 28.5.2)."""
    return {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}.get(data[:2], "utf-8")


def _temporary_name(full: str) -> str:
    """CRI-O reads every file of a directory of drop-ins, also hidden ones, so the temporary file is above it."""
    folder, name = os.path.split(full)
    if folder.endswith(".d") and not os.path.ismount(folder):
        folder = os.path.dirname(folder)
    return os.path.join(folder, f".{name}.gpushare-new")


def _temporary(full: str) -> tuple[str, int]:
    """(path, descriptor) of an empty temporary file that only this process uses. Waits while another command writes it;
    replaces any other file of that name, as of a killed command."""
    path, flags = _temporary_name(full), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        fd = os.open(path, flags, 0o600)
        try:
            filelock.take(fd, path)
            if os.path.samestat(os.fstat(fd), os.lstat(path)):
                if _is_new(os.fstat(fd)):
                    return path, fd
                os.unlink(path)
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # another command has renamed it to the file


def _is_new(status: os.stat_result) -> bool:
    """Whether a file is as this process creates it: without another name, and no other user has it open."""
    private = status.st_uid == os.geteuid() and not status.st_mode & 0o077
    return private and stat.S_ISREG(status.st_mode) and status.st_nlink == 1 and status.st_size == 0


def check_program(path: str) -> str:
    """The resolved path of a program that root will run for every container. Raises ConfigError if users other than
    root could replace it."""
    resolved = os.path.realpath(path)
    if not os.path.isfile(resolved) or not os.access(resolved, os.X_OK):
        raise ConfigError(f"{shown(path)} is not a program", "install gpushare, or name it with --program")
    _refuse_writable(resolved)
    return resolved


def _refuse_writable(path: str) -> None:
    """Raise ConfigError if users other than root could write a program or a directory above it."""
    here = path
    while True:
        status = os.stat(here)
        group = status.st_gid != 0 and status.st_mode & stat.S_IWGRP
        sticky = here != path and status.st_mode & stat.S_ISVTX
        if (group or status.st_mode & stat.S_IWOTH) and not sticky:
            mode = oct(stat.S_IMODE(status.st_mode))[2:]
            raise ConfigError(f"{shown(here)} (mode {mode}) is writable by users other than root", f"chmod go-w {here}")
        if here == "/":
            return
        here = os.path.dirname(here)


def _is_of_root(program: str) -> bool:
    """Whether only root can replace a program: by itself, by a link on the way to it, or by a directory above."""
    try:
        resolved = check_program(program)
        _refuse_writable(os.path.abspath(program))
        return all(os.lstat(one).st_uid == 0 for path in (os.path.abspath(program), resolved) for one in _above(path))
    except (ConfigError, OSError):
        return False


def _above(path: str) -> list[str]:
    """A path and all directories above it."""
    return [path] if path == "/" else [path, *_above(os.path.dirname(path))]


def foreign_owners(paths: Sequence[str]) -> list[str]:
    """One warning for each program whose owner is neither root nor the caller. No error, because a source tree is
    usually like that."""
    found = []
    for path in paths:
        owner = os.stat(path).st_uid
        if owner not in (0, os.geteuid()):
            found.append(f"{path} belongs to uid {owner}: that user can replace a program that root runs")
    return found


def broken_snapshot(program: str) -> str:
    """Path of the snapshot that starts of `program` use, if Python cannot start from it; else empty. Source:
    docs/internals/snapshot.md."""
    program = os.path.realpath(program)
    folder = "libexec/gpushare" if os.path.exists(f"{program}.py") else "libexec"  # of a wheel, else of the bundle
    path = os.path.join(os.path.dirname(os.path.dirname(program)), folder, "snapshot")
    if not os.path.exists(path):
        return ""
    try:
        done = subprocess.run([path], stdin=subprocess.DEVNULL, capture_output=True, timeout=_ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return path
    return path if done.returncode else ""
