"""Find, remember and execute the low-level runtime (runc or crun) behind gpushare-runtime (start path).

    runtime_of(config_path, state_dir) -> str    absolute path; raises ConfigError
    remember(config_path, state_dir, config)     write STATE_DIR/launcher, which the launcher reads
    remember_if_stale(config_path, state_dir)    the same for hosts that use only the hook
    execute(program, arguments)                  never returns; restores the original signals, mask and environment

STATE_DIR/launcher has a few lines of `key value`: the runtime, and the identity of the configuration file at that time,
so that an edited file takes effect at once. It is a cache: without it the next start only takes longer.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Sequence
from typing import NoReturn

from ..core import constants
from ..core.errors import ConfigError, KernelError
from ..core.model import Config
from ..core.quoting import shown

FILE = "launcher"
VERSION = "2"  # increment when the meaning of the file changes
_MAX_BYTES = 16 << 10
_NAMES = ("runc", "crun")
_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Python ignores these signals in its own process; a container must not inherit that
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
ENVIRONMENT = "/proc/self/environ"  # the bundle replaces it by another file, see bundled.py


def identity(config_path: str) -> str:
    """A string without spaces that changes with every edit of the configuration file."""
    try:
        status = os.stat(config_path)
    except OSError:
        return "none"
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


def _known(config_path: str, state_dir: str) -> dict[str, str]:
    """The file's lines, if only root or this user could have written it and it is for this configuration file."""
    path = os.path.join(state_dir, FILE)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        status = os.fstat(fd)
        trusted = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        readable = trusted and stat.S_ISREG(status.st_mode)
        text = os.read(fd, _MAX_BYTES).decode("utf-8", "surrogateescape") if readable else ""
    except OSError:
        return {}
    finally:
        os.close(fd)
    lines = dict(line.partition(" ")[::2] for line in text.splitlines())
    return lines if lines.get("version") == VERSION and lines.get("config") == config_path else {}


def runtime_of(config_path: str, state_dir: str) -> str:
    """The configured runtime, or the first of runc and crun that this host has. If the configuration file is wrong, the
    remembered runtime, so that running containers stay manageable."""
    known = _known(config_path, state_dir)
    if known.get("identity") == identity(config_path) and os.access(known.get("runtime", ""), os.X_OK):
        return known["runtime"]
    try:
        from .config import load_config

        config = load_config(config_path)
    except ConfigError:
        if os.access(known.get("runtime", ""), os.X_OK):
            return known["runtime"]
        raise
    found = find(config)
    remember(config_path, state_dir, config)
    return found


def _is_gpushare(path: str) -> bool:
    """Whether a program is gpushare-runtime under another name, which would execute itself for ever."""
    return os.path.basename(os.path.realpath(path)).startswith("gpushare")


def find(config: Config) -> str:
    """Absolute path of the low-level runtime. Raises ConfigError."""
    if config.runtime:
        if not os.access(config.runtime, os.X_OK) or not os.path.isfile(config.runtime):
            raise ConfigError(f"runtime.path {shown(config.runtime)} is not a program", "set it to runc or crun")
        return config.runtime
    for name in _NAMES:
        for directory in _DIRECTORIES:
            path = f"{directory}/{name}"
            if os.path.isfile(path) and os.access(path, os.X_OK) and not _is_gpushare(path):
                return path
    raise ConfigError(f"no {' or '.join(_NAMES)} in {':'.join(_DIRECTORIES)}", "install runc, or set runtime.path")


def remember(config_path: str, state_dir: str, config: Config) -> None:
    """Write STATE_DIR/launcher atomically. Ignores errors: without the file the next start only takes longer."""
    temporary = os.path.join(state_dir, f".{FILE}.{os.getpid()}")
    try:
        lines = {
            "version": VERSION,
            "config": config_path,
            "identity": identity(config_path),
            "runtime": find(config),
        }
        if any("\n" in value for value in lines.values()):
            return
        text = "".join(f"{key} {value}\n" for key, value in lines.items())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except (OSError, ConfigError):
        return
    try:
        data = text.encode("utf-8", "surrogateescape")
        if os.write(fd, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.rename(temporary, os.path.join(state_dir, FILE))
    except OSError:
        os.unlink(temporary)
    finally:
        os.close(fd)


def remember_if_stale(config_path: str, state_dir: str) -> None:
    """Update STATE_DIR/launcher if it is stale, for a container without a request on a host without gpushare-runtime.
    Writes nothing unless both a configuration file and a state directory exist."""
    if os.path.exists(config_path) and os.path.isdir(state_dir):
        try:
            runtime_of(config_path, state_dir)
        except ConfigError:
            pass


def environment() -> dict[bytes, bytes]:
    """The original environment of this process. Not os.environ: in the C locale Python adds LC_CTYPE to it, and every
    hook of the container would inherit that. Source: PEP 538."""
    try:
        fd = os.open(ENVIRONMENT, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return dict(os.environb)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
    finally:
        os.close(fd)
    pairs = (line.partition(b"=") for line in b"".join(parts).split(b"\0"))
    return {name: value for name, equals, value in pairs if equals and name}


def give_back_signals() -> None:
    """Restore the default action of the signals that Python ignores."""
    for number in PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)


def execute(program: str, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by the low-level runtime. Raises KernelError when that fails."""
    original = environment()
    give_back_signals()
    try:
        os.execve(program, [program, *arguments], original)
    except OSError as error:
        raise KernelError(
            f"{shown(program)}: {error.strerror}", f"set runtime.path in {constants.CONFIG_PATH}"
        ) from None
