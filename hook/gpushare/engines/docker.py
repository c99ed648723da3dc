"""Configure Docker 20.10 and newer: one entry below "runtimes" in /etc/docker/daemon.json. Pure.

Source: dockerd's documentation of the configuration file. On SIGHUP the daemon reads `runtimes` and
`default-runtime` again.
"""

from __future__ import annotations

from typing import Any, Optional

from ..core.errors import ConfigError
from . import jsontext
from .base import RUNTIME, Change, Files, Proposal, Settings

NAME = "docker"
PROGRAMS: tuple[str, ...] = ("dockerd",)
RELOAD = "systemctl reload docker"
FORGET = "systemctl restart docker"  # a reload keeps removed entries, also the default runtime (tried)
FILE = "/etc/docker/daemon.json"
_DEFAULT = "default-runtime"


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE,)


def _checked(text: str, path: str) -> dict[str, Any]:
    """Parse the configuration. Raises ConfigError if a key that gpushare changes has a type that dockerd rejects."""
    value = jsontext.check(text, path)
    runtimes = value.get("runtimes")
    if runtimes is not None and not isinstance(runtimes, dict):
        raise ConfigError(f'{path}: "runtimes" must be an object, not {type(runtimes).__name__}', "fix the file")
    if not isinstance(value.get(_DEFAULT, ""), str):
        raise ConfigError(f'{path}: "{_DEFAULT}" must be text, not {type(value[_DEFAULT]).__name__}', "fix the file")
    return value


def propose(settings: Settings, files: Files) -> Proposal:
    if settings.hook_only:
        raise ConfigError("docker has no hooks directory", "leave out --hook-only")
    path = paths(settings)[0]
    before = files.read(path)
    text = before if before and before.strip() else "{}\n"  # dockerd accepts an empty file, too
    value = _checked(text, path)
    entry = {"path": settings.program, "runtimeArgs": settings.runtime_args()}
    if (value.get("runtimes") or {}).get(RUNTIME) != entry:
        text = jsontext.put(text, ("runtimes", RUNTIME), entry)
    if settings.default and value.get(_DEFAULT) != RUNTIME:
        text = jsontext.put(text, (_DEFAULT,), RUNTIME)
    _checked(text, path)
    notes = []
    if not settings.default and value.get(_DEFAULT) == RUNTIME:
        notes.append(f"{path}: gpushare already is the default runtime and remains it")
    return Proposal([Change(path, before, text)] if text != before else [], notes)


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    if not text.strip():
        return text
    value = _checked(text, path)
    result = jsontext.drop(text, ("runtimes", RUNTIME))
    if value.get(_DEFAULT) == RUNTIME:
        former = jsontext.check(before, path).get(_DEFAULT) if before and before.strip() else None
        if former and former != RUNTIME:
            result = jsontext.put(result, (_DEFAULT,), former)
        else:
            result = jsontext.drop(result, (_DEFAULT,))
    if before is None and not jsontext.check(result, path):
        return None
    return result


def entry(path: str, text: str) -> str:
    runtimes = _checked(text, path).get("runtimes") if text.strip() else None
    found = (runtimes or {}).get(RUNTIME)
    program = found.get("path") if isinstance(found, dict) else None
    return program if isinstance(program, str) else ""


def lacks_cri(path: str, text: str) -> bool:
    return False  # docker is no CRI
