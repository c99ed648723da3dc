"""Configure podman: hooks.d files for every container, and a runtime for `podman run --runtime gpushare`. Pure.

Source: containers.conf(5) ([engine.runtimes], hooks_dir, drop-ins in containers.conf.d), oci-hooks(5). Without
hooks_dir podman searches only the directory for hooks of packages, which gpushare must not change.
With `--runtime gpushare` the hook finds that the container already has its share. Only the hook can get arguments for
other paths of gpushare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ..config import oci_runtime
from . import hookfiles, tomltext
from .base import RUNTIME, Change, Files, Proposal, Settings

NAME = "podman"
PROGRAMS: tuple[str, ...] = ("podman",)
FILE = "/etc/containers/containers.conf.d/gpushare.conf"
HOOKS = "/etc/containers/oci/hooks.d"
_MAIN = ("/usr/share/containers/containers.conf", "/etc/containers/containers.conf")
_DROP_INS = "/etc/containers/containers.conf.d/*.conf"
_TABLE = ("engine",)
# Lists of the runtimes for which podman does more, and their built-in names (containers/common, pkg/config/default.go).
# containers.conf(5) calls the second key runtime_supports_nocgroups, which podman 4.3.1 does not read (tried)
_SUPPORTS = {
    "runtime_supports_json": ("crun", "runc", "kata", "runsc", "youki", "krun", "ocijail"),
    "runtime_supports_nocgroup": ("crun", "krun"),
    "runtime_supports_kvm": ("kata", "kata-runtime", "kata-qemu", "kata-fc", "krun"),
}
_FLAGS = (*_TABLE, "runtimes_flags")  # podman 5.8.6 has it, 5.4.2 has not
_APPENDS = 5  # the first podman whose lists can have {append = true}
_OURS = tuple((*_TABLE, *keys) for keys in (("hooks_dir",), *((key,) for key in _SUPPORTS), ("runtimes", RUNTIME))) + (
    (*_FLAGS, RUNTIME),
)
_INFO = ("podman", "info", "--format", "{{.Version.Version}} {{.Host.OCIRuntime.Name}} {{.Host.OCIRuntime.Path}}")


def located(settings: Settings, files: Files) -> Settings:
    return settings


def reload(settings: Settings, files: Files) -> str:
    return ""  # podman has no daemon


def forget(settings: Settings, files: Files, changed: Sequence[str]) -> str:
    return reload(settings, files)


def verify(settings: Settings, files: Files) -> None:
    pass


def ignored(settings: Settings, files: Files, found: Sequence[str]) -> str:
    return ""


def paths(settings: Settings, files: Files) -> tuple[str, ...]:
    return (settings.config_file or FILE, *hookfiles.names(HOOKS))


def propose(settings: Settings, files: Files) -> Proposal:
    path = paths(settings, files)[0]
    others = [*_MAIN, *files.glob(_DROP_INS)]
    folders, notes = hookfiles.folders(HOOKS, files, others, path, _TABLE)
    table: dict[str, Any] = {"hooks_dir": folders}
    default = _default(files)
    if settings.runtime_args() and not settings.hook_only:
        notes.append("podman cannot pass arguments to a runtime, so only the hook was added")
    elif not settings.hook_only:
        table.update(_of_default(default, others, path, files))
        table["runtimes"] = {RUNTIME: [settings.program]}
    before = files.read(path)
    after = tomltext.put(before or "", {_TABLE: table}, path, _OURS)
    own = [Change(path, before, after)] if before != after else []
    return Proposal([*own, *hookfiles.propose(HOOKS, settings, files)], notes, default.low_level)


class _Default(NamedTuple):
    """podman's default runtime. `low_level`: its path if it is in none of the directories where gpushare looks by
    itself: there runc comes first, which podman's own defaults do not choose."""

    major: int = 0  # of podman's version; 0: podman did not answer
    name: str = ""
    low_level: Optional[str] = None


def _default(files: Files) -> _Default:
    version, name, path = ((files.ask(*_INFO) or "").strip().split(" ", 2) + ["", "", ""])[:3]
    major = version.partition(".")[0]
    known = path and name != RUNTIME
    low_level = ("" if oci_runtime.is_usual(path) else path) if known else None
    return _Default(int(major) if major.isdecimal() else 0, name.rpartition("/")[2], low_level)


def _of_default(default: _Default, others: Sequence[str], own: str, files: Files) -> dict[str, Any]:
    """The keys of the default runtime that hold for the low-level runtime behind gpushare, too."""
    if not default.major:
        return {}
    if default.name == RUNTIME:  # a copy of the former default
        present = tomltext.table_at(tomltext.check(files.read(own) or "", own), _TABLE, own)
        return {key: value for key, value in present.items() if key not in ("hooks_dir", "runtimes")}
    behind = (default.low_level or oci_runtime.first(files.has)).rpartition("/")[2]
    table: dict[str, Any] = {}
    for key, built_in in _SUPPORTS.items():
        names, adds, _ = hookfiles.listed((*_TABLE, key), built_in, files, others, own)
        if behind in names:
            table[key] = [RUNTIME, hookfiles.APPEND] if adds or default.major >= _APPENDS else [*names, RUNTIME]
    value: Mapping[str, Any] = {}
    for path in others if default.name == behind else ():
        value = tomltext.merged(value, tomltext.check(files.read_linked(path) or "" if path != own else "", path))
    flags = tomltext.texts_at(value, (*_FLAGS, default.name), own)
    return {**table, _FLAGS[-1]: {RUNTIME: flags}} if flags else table


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    return hookfiles.withdraw_or_drop(path, text, before, _OURS)


def entry(path: str, text: str) -> str:
    if path.endswith(".json"):
        return hookfiles.program(path, text)
    found = tomltext.table_at(tomltext.check(text, path), (*_TABLE, "runtimes"), path).get(RUNTIME)
    return found[0] if isinstance(found, list) and found and isinstance(found[0], str) else ""


def lacks_cri(path: str, text: str) -> bool:
    return False  # podman is no CRI
