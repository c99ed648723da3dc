"""Configure podman: hooks.d files for every container, and a runtime for `podman run --runtime gpushare`. Pure.

Source: containers.conf(5) ([engine.runtimes], hooks_dir, drop-ins in containers.conf.d), oci-hooks(5). Without
hooks_dir podman searches only the directory for hooks of packages, which gpushare must not change.
With `--runtime gpushare` the hook finds that the container already has its share. Only the hook can get arguments for
other paths of gpushare.
"""

from __future__ import annotations

from typing import Any, Optional

from . import hookfiles, tomltext
from .base import RUNTIME, Change, Files, Proposal, Settings

NAME = "podman"
PROGRAMS: tuple[str, ...] = ("podman",)
RELOAD = ""  # podman has no daemon
FORGET = RELOAD
FILE = "/etc/containers/containers.conf.d/gpushare.conf"
HOOKS = "/etc/containers/oci/hooks.d"
_MAIN = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
_DROP_INS = "/etc/containers/containers.conf.d/*.conf"
_TABLE = ("engine",)
_OURS = ((*_TABLE, "hooks_dir"), (*_TABLE, "runtimes", RUNTIME))


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE, *hookfiles.names(HOOKS))


def propose(settings: Settings, files: Files) -> Proposal:
    path = paths(settings)[0]
    folders, notes = hookfiles.folders(HOOKS, files, [*_MAIN, *files.glob(_DROP_INS)], path, _TABLE)
    table: dict[str, Any] = {"hooks_dir": folders}
    if settings.runtime_args() and not settings.hook_only:
        notes.append("podman cannot pass arguments to a runtime, so only the hook was added")
    elif not settings.hook_only:
        table["runtimes"] = {RUNTIME: [settings.program]}
    before = files.read(path)
    after = tomltext.put(before or "", {_TABLE: table}, path, _OURS)
    own = [Change(path, before, after)] if before != after else []
    return Proposal([*own, *hookfiles.propose(HOOKS, settings, files)], notes)


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    return hookfiles.withdraw_or_drop(path, text, before, _OURS)


def entry(path: str, text: str) -> str:
    if path.endswith(".json"):
        return hookfiles.program(path, text)
    found = tomltext.table_at(tomltext.check(text, path), (*_TABLE, "runtimes"), path).get(RUNTIME)
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""


def lacks_cri(path: str, text: str) -> bool:
    return False  # podman is no CRI
