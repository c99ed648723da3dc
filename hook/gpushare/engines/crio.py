"""Configure CRI-O: a runtime handler in a drop-in, or hooks.d files for the present handler. Pure.

Sources: crio.conf(5); CRI-O 1.36, pkg/config/config.go. CRI-O reads all files below the directory of drop-ins, with any
ending, hidden ones too, in the order of the names of each directory, and a handler is one table. CRI-O passes all
annotations of a pod to the runtime, so no entry needs to allow them. `allowed_annotations` accepts only CRI-O's own
annotations; with any other CRI-O does not start. With --require-nri there is no handler: the drop-in requires the NRI
plugin (validator.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from . import hookfiles, jsontext, tomltext, validator
from .base import RUNTIME, RUNTIME_PROGRAM, Change, Files, Proposal, Settings

NAME = "crio"
PROGRAMS: tuple[str, ...] = ("crio",)
RELOAD = "systemctl restart crio"
FORGET = RELOAD
FILE = "/etc/crio/crio.conf.d/99-gpushare.conf"
HOOKS = "/etc/crio/hooks.d"
_MAIN = "/etc/crio/crio.conf"
_DROP_INS = "/etc/crio/crio.conf.d"
_TABLE = ("crio", "runtime")
_KEYS = (*_TABLE, "runtimes", RUNTIME)
_OURS = ((*_TABLE, "hooks_dir"), _KEYS)
_REQUIREMENT = validator.CRIO.keys


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE, *hookfiles.names(HOOKS))


def _ours(path: str) -> Sequence[tomltext.Keys]:
    """The tables of gpushare. In a file of the administrator, the validator's table can be the administrator's."""
    return (*_OURS, _REQUIREMENT) if path == FILE else _OURS


def engine_version(settings: Settings, files: Files) -> tuple[int, int]:
    """(major, minor); (0, 0) when unknown. Raises ConfigError for an invalid --engine-version."""
    if settings.engine_version:
        return settings.given_version()
    match = re.search(r"version (\d+)\.(\d+)\.", files.ask("crio", "--version") or "")
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _requirement(path: str, files: Files) -> tuple[dict[str, Any], list[str]]:
    """(the validator's table, notes). A later file replaces a list, so gpushare's has what the other files require.
    Raises ConfigError if CRI-O would refuse containers that gpushare must not block."""
    names = validator.CRIO
    value: Mapping[str, Any] = {}
    notes, last = [], _MAIN
    for one in [_MAIN, *files.files_below(_DROP_INS)]:
        text = files.read(one)
        found = tomltext.check(tomltext.without_block(text or ""), one) if one != path or path != FILE else {}
        value = tomltext.merged(value, found)
        last = one if tomltext.table_at(found, names.nri, one) else last
        if hookfiles.is_later(one, path):
            notes += validator.overridden(tomltext.table_at(found, names.keys, one), one, names)
    return validator.table(value, last, names), notes


def propose(settings: Settings, files: Files) -> Proposal:
    settings = settings._replace(cri=True)
    path = paths(settings)[0]
    before = files.read(path)
    if settings.require_nri:
        why_not = validator.why_not(validator.CRIO, engine_version(settings, files))
        if why_not:
            return Proposal((), [why_not])
        required, notes = _requirement(path, files)
        after = tomltext.put(before or "", {_REQUIREMENT: required}, path, _ours(path))
        changes = []
    elif settings.hook_only:
        folders, notes = hookfiles.folders(HOOKS, files, [_MAIN, *files.files_below(_DROP_INS)], path, _TABLE)
        after = tomltext.put(before or "", {_TABLE: {"hooks_dir": folders}}, path, _ours(path))
        changes = hookfiles.propose(HOOKS, settings, files)
    else:
        hookfiles.refuse_arguments(settings, "CRI-O")
        table = {"runtime_path": settings.cri_program, "runtime_type": "oci"}
        after = tomltext.put(before or "", {_KEYS: table}, path, _ours(path))
        changes, notes = [], []
    own = [Change(path, before, after)] if before != after else []
    return Proposal([*own, *changes], notes)


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    return hookfiles.withdraw_or_drop(path, text, before, _ours(path))


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
