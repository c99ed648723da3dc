"""Configure CRI-O: a runtime handler in a drop-in, or hooks.d files for the present handler. Pure.

Source: crio.conf(5). CRI-O reads drop-ins in the order of their names, and a handler is one table. CRI-O passes all
annotations of a pod to the runtime, so no entry needs to allow them. `allowed_annotations` accepts only CRI-O's own
annotations; with any other CRI-O does not start.
"""

from __future__ import annotations

from typing import Optional

from . import hookfiles, jsontext, tomltext
from .base import RUNTIME, RUNTIME_PROGRAM, Change, Files, Proposal, Settings

NAME = "crio"
PROGRAMS: tuple[str, ...] = ("crio",)
RELOAD = "systemctl restart crio"
FORGET = RELOAD
FILE = "/etc/crio/crio.conf.d/99-gpushare.conf"
HOOKS = "/etc/crio/hooks.d"
_MAIN = "/etc/crio/crio.conf"
_DROP_INS = "/etc/crio/crio.conf.d/*.conf"
_TABLE = ("crio", "runtime")
_KEYS = (*_TABLE, "runtimes", RUNTIME)
_OURS = ((*_TABLE, "hooks_dir"), _KEYS)


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE, *hookfiles.names(HOOKS))


def propose(settings: Settings, files: Files) -> Proposal:
    settings = settings._replace(cri=True)
    path = paths(settings)[0]
    before = files.read(path)
    if settings.hook_only:
        folders, notes = hookfiles.folders(HOOKS, files, [_MAIN, *files.glob(_DROP_INS)], path, _TABLE)
        after = tomltext.put(before or "", {_TABLE: {"hooks_dir": folders}}, path, _OURS)
        changes = hookfiles.propose(HOOKS, settings, files)
    else:
        hookfiles.refuse_arguments(settings, "CRI-O")
        table = {"runtime_path": settings.cri_program, "runtime_type": "oci"}
        after = tomltext.put(before or "", {_KEYS: table}, path, _OURS)
        changes, notes = [], []
    own = [Change(path, before, after)] if before != after else []
    return Proposal([*own, *changes], notes)


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    return hookfiles.withdraw_or_drop(path, text, before, _OURS)


def entry(path: str, text: str) -> str:
    if path.endswith(".json"):
        return hookfiles.program(path, text)
    found = tomltext.table_at(tomltext.check(text, path), _KEYS, path).get("runtime_path")
    return found if isinstance(found, str) else ""


def lacks_cri(path: str, text: str) -> bool:
    if path.endswith(".json"):
        hook = jsontext.check(text, path).get("hook") if entry(path, text) else None
        return isinstance(hook, dict) and hookfiles.lacks_cri(hook)
    return entry(path, text).rpartition("/")[2] == RUNTIME_PROGRAM
