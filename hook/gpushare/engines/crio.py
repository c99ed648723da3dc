"""Configure CRI-O: a runtime handler in a drop-in, or hooks.d files for the present handler. Pure.

Sources: crio.conf(5); CRI-O 1.36, pkg/config/config.go, pkg/config/template.go, internal/criocli.

* CRI-O reads all files below the directory of drop-ins, with any ending, hidden ones too, in the order of the names of
  each directory. A handler is one table: that of a later file replaces the whole one.
* gpushare's handler is a copy of the default handler, with its monitor_path, as `crio config` shows it: that prints the
  handlers that differ from `crio config --default`, and fails if CRI-O would not start. It never prints some keys
  (seccomp_profile, no_sync_log, exec_cpu_affinity, container_create_timeout, stream_websockets): these are as the files
  have them.
* CRI-O passes all annotations of a pod to the runtime, so no entry needs to allow them. `allowed_annotations` has
  CRI-O's own annotations; with any other CRI-O does not start.
* With --require-nri there is no handler: the drop-in requires the NRI plugin (validator.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from . import daemon, hookfiles, jsontext, tomltext, validator
from .base import RUNTIME, RUNTIME_PROGRAM, Change, Files, Proposal, Refusal, Settings

NAME = "crio"
PROGRAMS: tuple[str, ...] = ("crio",)
FILE = "/etc/crio/crio.conf.d/99-gpushare.conf"
HOOKS = "/etc/crio/hooks.d"
_NAME = "99-gpushare.conf"
_MAIN = "/etc/crio/crio.conf"
_DROP_INS = "/etc/crio/crio.conf.d"
_TABLE = ("crio", "runtime")
_KEYS = (*_TABLE, "runtimes", RUNTIME)
_OURS = ((*_TABLE, "hooks_dir"), _KEYS)
_REQUIREMENT = validator.CRIO.keys
_OCI = ("oci", "pod", "")  # types of handlers that run an OCI runtime; pod: with conmon-rs
# Keys of a handler that name its program, and what only a virtual machine has. The last three are of [crio.runtime]:
# `crio config` prints them behind the tables of the handlers, so they are in the last table (tried with 1.36.3)
_NOT_COPIED = ("runtime_path", "runtime_config_path", "platform_runtime_paths", "inherit_default_runtime",
               "runtime_pull_image", "hostnetwork_disable_selinux", "disable_hostport_mapping", "timezone")  # fmt: skip
_CRUN_SINCE = (1, 31)  # the built-in default runtime; runc before


def _flags(files: Files) -> list[daemon.Flag]:
    return daemon.flags("crio", ("crio",), files)


def _main(files: Files) -> str:
    flag = daemon.value(_flags(files), "config", "c")
    return daemon.path_of(flag) if flag else _MAIN


def _drop_ins(files: Files) -> str:
    flag = daemon.value(_flags(files), "config-dir", "d")
    return daemon.path_of(flag).rstrip("/") if flag else _DROP_INS


def _read_files(files: Files) -> list[str]:
    """The files of CRI-O in its order."""
    return [_main(files), *files.files_below(_drop_ins(files))]


def located(settings: Settings, files: Files) -> Settings:
    return settings._replace(config_file=settings.config_file or f"{_drop_ins(files)}/{_NAME}")


def reload(settings: Settings, files: Files) -> str:
    return "systemctl restart crio"


def forget(settings: Settings, files: Files, changed: Sequence[str]) -> str:
    return reload(settings, files)


def _command(files: Files, *words: str) -> tuple[str, ...]:
    """`crio config` with the flags of the daemon."""
    names = {"config", "c", "config-dir", "d", "default-runtime", "runtimes"}
    return ("crio", *(word for flag in _flags(files) if flag.name in names for word in flag.words()), "config", *words)


def verify(settings: Settings, files: Files) -> None:
    """Let CRI-O check its files, and look for the entry in its answer. It ignores a handler that it cannot run."""
    command = _command(files)
    complaint = files.complaint(*command)
    if complaint:
        raise Refusal(f"CRI-O refuses the change: {daemon.reason(complaint)}", "fix that, then run the command again")
    text = files.ask(*command)
    if not text or settings.hook_only or settings.require_nri:
        return
    if tomltext.at(tomltext.check(text, " ".join(command)), _KEYS) is None:
        raise ConfigError(f"`{' '.join(command)}` shows no handler {RUNTIME} after the change", "read its messages")


def ignored(settings: Settings, files: Files, found: Sequence[str]) -> str:
    folder = _drop_ins(files)
    conf = [path for path in found if path.endswith(_NAME)]
    if conf and not any(path.startswith(f"{folder}/") for path in conf):
        return f"CRI-O was started with --config-dir {folder}, so it does not read {', '.join(conf)}"
    told = files.ask("crio", "status", "config") if conf and files.processes("crio") else None
    value = tomltext.check(told, "crio status config") if told else {}
    ours = any(tomltext.at(tomltext.check(files.read(path) or "", path), _KEYS) for path in conf)
    if ours and value and tomltext.at(value, _KEYS) is None:
        return f"CRI-O has not read {', '.join(conf)}, or ignores its handler: run `{reload(settings, files)}`"
    return ""


def paths(settings: Settings, files: Files) -> tuple[str, ...]:
    return (located(settings, files).config_file, *hookfiles.names(HOOKS))


def _ours(path: str) -> Sequence[tomltext.Keys]:
    """The tables of gpushare. In a file of the administrator, the validator's table can be the administrator's."""
    return (*_OURS, _REQUIREMENT) if path.endswith(f"/{_NAME}") else _OURS


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
    for one in _read_files(files):
        text = files.read_linked(one)
        found = tomltext.check(tomltext.without_block(text or ""), one) if one != path or _NAME not in path else {}
        value = tomltext.merged(value, found)
        last = one if tomltext.table_at(found, names.nri, one) else last
        if hookfiles.is_later(one, path):
            notes += validator.overridden(tomltext.table_at(found, names.keys, one), one, names)
    return validator.table(value, last, names), notes


def propose(settings: Settings, files: Files) -> Proposal:
    settings = located(settings._replace(cri=True), files)
    path = settings.config_file
    before = files.read(path)
    if settings.require_nri:
        why_not = validator.why_not(validator.CRIO, engine_version(settings, files))
        if why_not:
            return Proposal((), [why_not])
        required, notes = _requirement(path, files)
        after = tomltext.put(before or "", {_REQUIREMENT: required}, path, _ours(path))
        changes: list[Change] = []
        low_level: Optional[str] = None
    elif settings.hook_only:
        folders, notes = hookfiles.folders(HOOKS, files, _read_files(files), path, _TABLE)
        _refuse_flag("hooks-dir", f"it does not read hooks_dir of {path}", files)
        after = tomltext.put(before or "", {_TABLE: {"hooks_dir": folders}}, path, _ours(path))
        changes, low_level = hookfiles.propose(HOOKS, settings, files), None
    else:
        hookfiles.refuse_arguments(settings, "CRI-O")
        _refuse_flag("runtimes", f"it overrides the handler {RUNTIME} of {path}", files, f"{RUNTIME}:")
        base, notes = _default_handler(settings, path, files)
        kind = base.get("runtime_type") or "oci"
        copied = {key: value for key, value in base.items() if key not in _NOT_COPIED}
        table = {"runtime_path": settings.cri_program, "runtime_type": kind, **copied}
        after = tomltext.put(before or "", {_KEYS: table}, path, _ours(path))
        changes, low_level = [], tomltext.text_at(base, ("runtime_path",), path) if "runtime_path" in base else None
    own = [Change(path, before, after)] if before != after else []
    return Proposal([*own, *changes], notes, low_level)


def _refuse_flag(name: str, effect: str, files: Files, prefix: str = "") -> None:
    """Raise ConfigError if CRI-O gets a flag that wins over the change."""
    flag = daemon.value([one for one in _flags(files) if one.value.startswith(prefix)], name)
    if flag is not None:
        raise ConfigError(f"CRI-O gets --{name} {shown(flag.value)} from {flag.where}: {effect}", "remove that flag")


def _present(path: str, files: Files) -> dict[str, Any]:
    """gpushare's handler in a file; empty if there is none."""
    return tomltext.table_at(tomltext.check(files.read(path) or "", path), _KEYS, path)


def _default_handler(settings: Settings, own: str, files: Files) -> tuple[dict[str, Any], list[str]]:
    """(the handler of which gpushare's is a copy, notes): the default one as CRI-O has it; without its answer, as its
    files have it."""
    values, runtimes, notes = _effective(own, files)
    default = _default_name(values, engine_version(settings, files), files)
    ours = {**_present(own, files), **runtimes.get(RUNTIME, {})}
    if default == RUNTIME and ours:  # a copy of the former default
        return {key: value for key, value in ours.items() if key != "runtime_path"}, notes
    names = (name for name in dict.fromkeys((default, "crun", "runc", *sorted(runtimes))) if _runs_oci(name, runtimes))
    name = next(names, "")
    if name not in ("", default) and default in runtimes:
        notes.append(f"the default handler {shown(default)} runs no OCI runtime, so {shown(name)} is copied")
    known = name == default or default in runtimes  # else it is a built-in one
    return dict(runtimes[name] if name and known else {}), notes


def _effective(own: str, files: Files) -> tuple[list[Mapping[str, Any]], dict[str, Any], list[str]]:
    """(the tables [crio.runtime] in CRI-O's order, all handlers, notes)."""
    texts = {path: files.read_linked(path) or "" for path in _read_files(files) if path != own}
    values: list[Mapping[str, Any]]
    values = [tomltext.table_at(tomltext.check(text, path), _TABLE, path) for path, text in texts.items()]
    runtimes = _handlers(values, own)
    answers = [files.ask(*_command(files, *words)) for words in (("--default",), ())]
    if not all(answers):
        note = "`crio config` did not run, so the default handler is as the files of CRI-O have it"
        return values, runtimes, [note]
    values = [tomltext.table_at(tomltext.check(one or "", "crio config"), _TABLE, "crio config") for one in answers]
    printed = _handlers(values, own)
    return values, {name: {**runtimes.get(name, {}), **table} for name, table in printed.items()}, []


def _default_name(values: Sequence[Mapping[str, Any]], version: tuple[int, int], files: Files) -> str:
    flag = daemon.value(_flags(files), "default-runtime")
    names = (tomltext.text_at(value, ("default_runtime",), _MAIN) for value in reversed(values))
    built_in = "runc" if (0, 0) < version < _CRUN_SINCE else "crun"
    return (flag.value if flag else "") or next(filter(None, names), built_in)


def _runs_oci(name: str, runtimes: Mapping[str, Any]) -> bool:
    """Whether this is a handler that gpushare can copy."""
    table = runtimes.get(name)
    return name != RUNTIME and isinstance(table, dict) and table.get("runtime_type", "") in _OCI


def _handlers(values: Sequence[Mapping[str, Any]], own: str) -> dict[str, Any]:
    """The handlers of these tables. A handler of a later one replaces the whole one of an earlier one."""
    found: dict[str, Any] = {}
    for value in values:
        found.update(tomltext.table_at(value, ("runtimes",), own))
    return found


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
