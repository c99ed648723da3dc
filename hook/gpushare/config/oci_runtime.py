"""The low-level runtime (runc or crun) behind gpushare-runtime: found once, remembered, executed (start path).

    runtime_of(config_path, state_dir) -> str    absolute path; raises ConfigError
    remember(config_path, state_dir, config)     writes STATE_DIR/launcher, which the launcher reads
    remember_if_stale(config_path, state_dir)    the same for hosts with the hook only
    execute(program, words)                      never returns; signals, mask and environment as we were given them

STATE_DIR/launcher has a few lines of `key value`: the runtime, whether Python must see containers that ask for nothing,
and what the configuration file was when that was found out, so that an edited file counts at once. It is a cache:
without it the next start costs more, nothing else.
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
VERSION = "2"  # grows when the meaning of the file changes
_MAX_BYTES = 16 << 10
_NAMES = ("runc", "crun")
_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Python ignores these in every process of its own; a container must not inherit that
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
ENVIRONMENT = "/proc/self/environ"  # of the bundle: a file of its own, see bundled.py


def identity(config_path: str) -> str:
    """The configuration file at this moment, in one word."""
    try:
        status = os.stat(config_path)
    except OSError:
        return "none"
    return f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"


def _known(config_path: str, state_dir: str) -> dict[str, str]:
    """The file's lines, if nobody but us could have written it and it is about this configuration file."""
    path = os.path.join(state_dir, FILE)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        status = os.fstat(fd)
        ours = status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        text = (
            os.read(fd, _MAX_BYTES).decode("utf-8", "surrogateescape") if ours and stat.S_ISREG(status.st_mode) else ""
        )
    except OSError:
        return {}
    finally:
        os.close(fd)
    lines = dict(line.partition(" ")[::2] for line in text.splitlines())
    return lines if lines.get("version") == VERSION and lines.get("config") == config_path else {}


def runtime_of(config_path: str, state_dir: str) -> str:
    """The configured runtime, or the first of runc and crun that this host has. While the configuration file is wrong,
    the one that was found last: containers that run must stay manageable."""
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


def _is_us(path: str) -> bool:
    """Whether a program is gpushare-runtime under another name: it would execute itself for ever."""
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
            if os.path.isfile(path) and os.access(path, os.X_OK) and not _is_us(path):
                return path
    raise ConfigError(f"no {' or '.join(_NAMES)} in {':'.join(_DIRECTORIES)}", "install runc, or set runtime.path")


def remember(config_path: str, state_dir: str, config: Config) -> None:
    """Writes STATE_DIR/launcher atomically. What cannot be written, or found, only costs time."""
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
    """For a container that asked for nothing on a host where nobody else does it. Leaves no trace where there is
    neither a configuration file nor a state directory."""
    if os.path.exists(config_path) and os.path.isdir(state_dir):
        try:
            runtime_of(config_path, state_dir)
        except ConfigError:
            pass


def environment() -> dict[bytes, bytes]:
    """The environment that this process was given. Not os.environ: in the C locale Python adds LC_CTYPE to it, which
    every hook of the container would then inherit. Source: PEP 538."""
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
    for number in PYTHON_IGNORES:
        signal.signal(number, signal.SIG_DFL)


def execute(program: str, words: Sequence[str]) -> NoReturn:
    """This process becomes the low-level runtime. Raises KernelError when it cannot."""
    given = environment()
    give_back_signals()
    try:
        os.execve(program, [program, *words], given)
    except OSError as error:
        raise KernelError(
            f"{shown(program)}: {error.strerror}", f"set runtime.path in {constants.CONFIG_PATH}"
        ) from None
