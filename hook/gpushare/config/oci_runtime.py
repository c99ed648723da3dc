"""Find, remember and execute the low-level runtime (runc or crun) behind gpushare-runtime (start path).

    runtime_of(config_path, state_dir) -> str    absolute path; raises ConfigError
    remember(config_path, state_dir, config)     write STATE_DIR/launcher, which the launcher reads
    remember_if_stale(config_path, state_dir)    the same for hosts that use only the hook
    remember_scopes(config_path, state_dir)      add that the runtime gives systemd all device rules (refresh)
    gives_rules(config_path, state_dir)          -> bool   whether that is known of the runtime as it is installed now
    execute(program, arguments)                  never returns; restores the original signals, mask and environment

STATE_DIR/launcher has a few lines of `key value`: the runtime, and the identity of the configuration file at that time,
so that an edited file takes effect at once. It is a cache: without it the next start only takes longer.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Callable, Sequence
from typing import NoReturn

from ..core import constants, installed
from ..core.errors import ConfigError, KernelError
from ..core.model import Config
from ..core.quoting import shown

FILE = "launcher"
VERSION = "3"  # increment when the meaning of the file changes
_MAX_BYTES = 16 << 10
NAMES = ("runc", "crun")
_ASK_SECONDS = 10
# Releases that keep NVIDIA's devices in systemd's scopes: tests/integration/test_systemd_cgroups.py. runc 1.1.3 to
# 1.1.6 gives systemd no rule for a device that sysfs lacks, and earlier ones need a link in /dev/char
_GIVES_RULES = r"runc version 1\.(1\.([7-9]|\d\d)|[2-9]|\d\d)\b|crun version 1\.(2[1-9]|[3-9]\d|\d\d\d)\b"
_DIRECTORIES = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
# Of engines that bring their own: CRI-O, k3s, RKE2, k0s
_OF_ENGINES = (
    "/usr/libexec/crio",
    "/var/lib/rancher/k3s/data/current/bin",
    "/var/lib/rancher/rke2/bin",
    "/var/lib/k0s/bin",
)
# One line: the runtime of an engine's default handler, from `gpushare runtime configure`; one file for each engine
FOLDER = "/var/lib/gpushare/configured"
OF_HANDLER = ".runtime"
# Python ignores these signals in its own process; a container must not inherit that
PYTHON_IGNORES = (signal.SIGPIPE, signal.SIGXFSZ)
_DEVICES = "devices"  # key of the identity of a runtime that gives systemd all device rules
ENVIRONMENT = "/proc/self/environ"  # the bundle replaces it by another file, see bundled.py


def identity(path: str) -> str:
    """A string without spaces that changes with every edit of a file."""
    try:
        status = os.stat(path)
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


def find(config: Config) -> str:
    """Absolute path of the low-level runtime: the configured one, that of an engine's default handler, or the first
    that this host has. Raises ConfigError."""
    if config.runtime:
        if installed.is_gpushare(config.runtime):
            raise ConfigError(f"runtime.path {shown(config.runtime)} is gpushare itself", "set it to runc or crun")
        if not os.access(config.runtime, os.X_OK) or not os.path.isfile(config.runtime):
            raise ConfigError(f"runtime.path {shown(config.runtime)} is not a program", "set it to runc or crun")
        return config.runtime
    path = _of_handler()
    if path:
        return path
    path = first(_is_runtime)
    if path:
        return path
    raise ConfigError(f"no {' or '.join(NAMES)} in {':'.join(_DIRECTORIES)}", "install runc, or set runtime.path")


def first(there: Callable[[str], bool]) -> str:
    """The first path of a low-level runtime for which `there` is true; empty: none."""
    for directories in (_DIRECTORIES, _OF_ENGINES):
        for name in NAMES:
            for directory in directories:
                path = f"{directory}/{name}"
                if there(path):
                    return path
    return ""


def is_usual(path: str) -> bool:
    """Whether a program is in a directory that `find` searches first."""
    return os.path.dirname(path) in _DIRECTORIES


def _is_runtime(path: str) -> bool:
    return os.path.isfile(path) and os.access(path, os.X_OK) and not installed.is_gpushare(path)


def _of_handler() -> str:
    """The runtime of an engine's default handler; empty if none is recorded."""
    try:
        names = sorted(name for name in os.listdir(FOLDER) if name.endswith(OF_HANDLER))
        for name in names:
            with open(f"{FOLDER}/{name}", encoding="utf-8", errors="surrogateescape") as file:
                path = file.readline().rstrip("\n")
            if path.startswith("/") and _is_runtime(path):
                return path
    except OSError:
        pass
    return ""


def remember(config_path: str, state_dir: str, config: Config) -> None:
    """Write STATE_DIR/launcher atomically. Ignores errors: without the file the next start only takes longer."""
    try:
        runtime = find(config)
    except ConfigError:
        return
    lines = {"version": VERSION, "config": config_path, "identity": identity(config_path), "runtime": runtime}
    _write(state_dir, lines)


def version(path: str) -> str:
    """The first line that a low-level runtime prints about its version. Raises OSError and SubprocessError."""
    import subprocess  # not on the start path

    words = [path, "--version"]
    done = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
    )
    return done.stdout.partition("\n")[0].strip()


def remember_scopes(config_path: str, state_dir: str) -> None:
    """Add to STATE_DIR/launcher that the runtime gives systemd the device rules of config.json, so that our hook need
    not. For a program in machine code only: a script may run another program tomorrow."""
    import re  # not on the start path
    import subprocess

    known = _known(config_path, state_dir)
    path = known.get("runtime", "")
    asked = identity(path)  # before it runs: an upgrade meanwhile makes it stale
    try:
        with open(path, "rb") as program:
            gives = program.read(4) == b"\x7fELF" and re.match(_GIVES_RULES, version(path))
    except (OSError, ValueError, subprocess.SubprocessError):
        return
    if gives:
        _write(state_dir, {**known, _DEVICES: asked})


def gives_rules(config_path: str, state_dir: str) -> bool:
    """Whether `remember_scopes` knows this of the runtime, and neither it nor the configuration file has changed."""
    known = _known(config_path, state_dir)
    return (
        _DEVICES in known
        and known[_DEVICES] == identity(known["runtime"])
        and known["identity"] == identity(config_path)
    )


def _write(state_dir: str, lines: dict[str, str]) -> None:
    """Write STATE_DIR/launcher; ignores errors."""
    temporary = os.path.join(state_dir, f".{FILE}.{os.getpid()}")
    if any("\n" in value for value in lines.values()):
        return
    try:
        text = "".join(f"{key} {value}\n" for key, value in lines.items())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except OSError:
        return
    try:
        os.fchmod(fd, 0o644)  # whatever the umask
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
