"""Configure Docker 20.10 and newer: one entry below "runtimes" in /etc/docker/daemon.json. Pure.

Sources: dockerd's documentation of the configuration file; moby, daemon/config/config.go: dockerd does not start with a
key that it gets as a flag too, except "runtimes". On SIGHUP the daemon reads `runtimes` and
`default-runtime` again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from ..config import oci_runtime
from ..core.errors import ConfigError
from ..core.quoting import shown
from . import daemon, jsontext
from .base import RUNTIME, Change, Files, Proposal, Refusal, Settings

NAME = "docker"
PROGRAMS: tuple[str, ...] = ("dockerd",)
FILE = "/etc/docker/daemon.json"
_DEFAULT = "default-runtime"
_RUNC, _BINARY = "io.containerd.runc.v2", "BinaryName"  # a runtimeType, and the option that names its program
_UNITS = ("docker",)
_CHECKED = (_DEFAULT, "add-runtime", "exec-opt", "cgroup-parent")  # flags that concern the entries of gpushare
_INFO = ("docker", "--host", "unix:///var/run/docker.sock", "info", "--format", "{{json .}}")


def located(settings: Settings, files: Files) -> Settings:
    """The file that dockerd was started with, unless the command names one."""
    return settings._replace(config_file=settings.config_file or _main(files))


def _file_of(group: Sequence[daemon.Flag]) -> str:
    flag = daemon.value(group, "config-file")
    return flag.value if flag else FILE


def _main(files: Files) -> str:
    """The file of the main daemon. Several daemons can run: the main one has no flag for its file."""
    found = [daemon.value(group, "config-file") for group in daemon.groups("dockerd", _UNITS, files)]
    last = found[-1] if found and all(flag and flag.value != FILE for flag in found) else None
    return daemon.path_of(last) if last else FILE


def _flags(path: str, files: Files) -> list[daemon.Flag]:
    """The flags of the daemon that reads this file."""
    units = [*_UNITS, *filter(None, [daemon.unit_of(path, "", files) if path != FILE else ""])]
    found: dict[tuple[str, str], daemon.Flag] = {}
    for group in daemon.groups("dockerd", units, files):
        for flag in group if _file_of(group) == path else ():
            found.setdefault((flag.name, flag.value), flag)
    return list(found.values())


def _flag(path: str, files: Files, name: str, prefix: str = "") -> Optional[daemon.Flag]:
    return daemon.value([flag for flag in _flags(path, files) if flag.value.startswith(prefix)], name)


def reload(settings: Settings, files: Files) -> str:
    """After a reload dockerd forgets the runtimes of its flags until it starts again (tried with 20.10.24)."""
    path = located(settings, files).config_file
    return _command("restart" if _flag(path, files, "add-runtime") else "reload", [path], files)


def forget(settings: Settings, files: Files, changed: Sequence[str]) -> str:
    """A reload keeps removed entries, also the default runtime (tried)."""
    return _command("restart", changed or [located(settings, files).config_file], files)


def _command(verb: str, changed: Sequence[str], files: Files) -> str:
    """The command for the daemons that read these files."""
    if any(path.startswith("/var/snap/docker/") for path in changed):
        return "snap restart docker.dockerd"
    units = [NAME if path == FILE else daemon.unit_of(path, NAME, files) for path in changed]
    return f"systemctl {verb} {' '.join(dict.fromkeys(units))}"


def verify(settings: Settings, files: Files) -> None:
    """Let dockerd check the file together with its flags: docker 23 and later."""
    path = located(settings, files).config_file
    flags = [f"--{one.name}={one.value}" for one in _flags(path, files) if one.name in _CHECKED]
    words = ("dockerd", "--validate", f"--config-file={path}", *flags)
    complaint = files.complaint(*words)
    if complaint and "unknown flag: --validate" not in complaint:  # an earlier docker does not know the flag
        raise Refusal(f"dockerd refuses the change: {daemon.reason(complaint)}", "fix that, then run the command again")


def ignored(settings: Settings, files: Files, found: Sequence[str]) -> str:
    for path in found:
        flag = _flag(path, files, _DEFAULT)
        if flag is not None and _checked(files.read(path) or "{}", path).get(_DEFAULT) is not None:
            return f"{path}: {_clash(flag)}: remove one of them"
    path = located(settings, files).config_file
    running = [_file_of(group) for group in daemon.groups("dockerd", (), files)]
    if found and running and not {path, *running} & set(found):
        return f"dockerd was started with --config-file {path}, so it does not read {', '.join(found)}"
    main = _main(files)
    info = files.ask(*_INFO) if main in found and running else None
    if info and RUNTIME not in (jsontext.check(info, "docker info").get("Runtimes") or {}):
        return f"dockerd has not read {main}: run `{reload(settings._replace(config_file=main), files)}`"
    return ""


def _clash(flag: daemon.Flag) -> str:
    what = f"dockerd gets --{flag.name} {shown(flag.value)} from {flag.where}"
    return f"{what}, and does not start with that key in its file"


def paths(settings: Settings, files: Files) -> tuple[str, ...]:
    return (located(settings, files).config_file,)


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
    path = located(settings, files).config_file
    before = files.read(path)
    text = before or ""
    if jsontext.is_empty(text):  # dockerd accepts an empty file, too
        text = text.strip() + "{}\n"
    value = _checked(text, path)
    _refuse_flags(settings, path, files)
    default, low_level = _default_runtime(value, path, files)
    entry, notes = _entry(settings, default)
    if (value.get("runtimes") or {}).get(RUNTIME) != entry:
        text = jsontext.put(text, ("runtimes", RUNTIME), entry)
    if settings.default and value.get(_DEFAULT) != RUNTIME:
        text = jsontext.put(text, (_DEFAULT,), RUNTIME)
    _checked(text, path)
    if not settings.default and value.get(_DEFAULT) == RUNTIME:
        notes.append(f"{path}: gpushare already is the default runtime and remains it")
    return Proposal([Change(path, before, text)] if text != before else [], notes, low_level)


def _refuse_flags(settings: Settings, path: str, files: Files) -> None:
    """Raise ConfigError if dockerd gets a flag with which it would not start after the change, or that wins over it."""
    flag = _flag(path, files, _DEFAULT)
    if settings.default and flag is not None:
        raise ConfigError(_clash(flag), "remove that flag, or leave out --default")
    flag = _flag(path, files, "add-runtime", f"{RUNTIME}=")
    if flag is not None:
        raise ConfigError(f"dockerd gets --add-runtime {shown(flag.value)} from {flag.where}", "remove that flag")


def _entry(settings: Settings, default: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(gpushare's entry, notes), with what `_default_runtime` found. docker gives a runtime either arguments or
    options."""
    arguments = settings.runtime_args()
    if "options" in default and not arguments:
        return {**default, "options": {**default["options"], _BINARY: settings.program}}, []
    notes = ["docker passes no arguments to a runtime with options, so those of the default runtime are not copied"]
    entry = {"path": settings.program, "runtimeArgs": [*arguments, *default.get("runtimeArgs", [])]}
    return entry, notes if "options" in default else []


def _default_runtime(value: dict[str, Any], path: str, files: Files) -> tuple[dict[str, Any], Optional[str]]:
    """(what gpushare's entry copies of the default runtime, the path of its program) as docker has it; without its
    answer, as its file has it. Nothing is copied of a runtime that is no low-level one, such as NVIDIA's. If gpushare
    is the default already, its entry keeps what it copied of the former one."""
    info = files.ask(*_INFO) if path == _main(files) else None  # only the main daemon has the usual socket
    told = jsontext.check(info, "docker info") if info else {}
    flag = _flag(path, files, _DEFAULT)
    name = told.get("DefaultRuntime") or (flag.value if flag else value.get(_DEFAULT)) or "runc"
    written, running = value.get("runtimes") or {}, told.get("Runtimes") or {}
    ours = written.get(RUNTIME)
    if name == RUNTIME and isinstance(ours, dict):
        return _copied(ours, RUNTIME, path), None
    name = "runc" if name == RUNTIME else name
    table = written.get(name)
    table = table if _is_typed(table) else running.get(name, table)  # `docker info` shows neither type nor options
    if not isinstance(table, dict):  # of a flag, or the built-in one
        return {}, "" if name == "runc" else None
    program = _program(table, path)
    if (program or "runc").rpartition("/")[2] not in oci_runtime.NAMES:
        return {}, ""
    return _copied(table, name, path), program if program.startswith("/") else ""


def _is_typed(table: Any) -> bool:
    """Whether this runtime is a shim of containerd with options (docker 23 and later)."""
    return isinstance(table, dict) and bool(table.get("runtimeType"))


def _program(table: dict[str, Any], path: str) -> str:
    """The program of a runtime; empty: runc of PATH. A type other than runc's counts as a program."""
    if not _is_typed(table):
        program = table.get("path")
    elif table["runtimeType"] == _RUNC:
        options = _options(table, path)
        program = next((one for key, one in options.items() if key.lower() == _BINARY.lower()), "")
    else:
        program = table["runtimeType"]
    return program if isinstance(program, str) else ""


def _options(table: dict[str, Any], path: str) -> dict[str, Any]:
    found = table.get("options", {})
    if not isinstance(found, dict):
        raise ConfigError(
            f'{path}: "options" of a runtime must be an object, not {type(found).__name__}', "fix the file"
        )
    return found


def _copied(table: dict[str, Any], name: str, path: str) -> dict[str, Any]:
    """All of a runtime but its program."""
    if not _is_typed(table):
        return {"runtimeArgs": _without_own(_args(table, name, path))}
    options = {key: one for key, one in _options(table, path).items() if key.lower() != _BINARY.lower()}
    return {"runtimeType": table["runtimeType"], "options": options}


def _args(table: dict[str, Any], name: str, path: str) -> list[str]:
    found = table.get("runtimeArgs") or []
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ConfigError(f'{path}: "runtimeArgs" of {shown(name)} must be a list of strings', "fix the file")
    return found


def _without_own(args: list[str]) -> list[str]:
    """Arguments for the low-level runtime, after pairs of gpushare-runtime's own."""
    return _without_own(args[2:]) if args and args[0].startswith("--gpushare-") else args


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    if jsontext.is_empty(text):
        return text
    value = _checked(text, path)
    result = jsontext.drop(text, ("runtimes", RUNTIME))
    if value.get(_DEFAULT) == RUNTIME:
        former = jsontext.check(before or "", path).get(_DEFAULT) if not jsontext.is_empty(before) else None
        if former and former != RUNTIME:
            result = jsontext.put(result, (_DEFAULT,), former)
        else:
            result = jsontext.drop(result, (_DEFAULT,))
    if before is None and not jsontext.check(result, path):
        return None
    return result


def entry(path: str, text: str) -> str:
    runtimes = _checked(text, path).get("runtimes") if not jsontext.is_empty(text) else None
    found = (runtimes or {}).get(RUNTIME)
    return _program(found, path) if isinstance(found, dict) else ""


def lacks_cri(path: str, text: str) -> bool:
    return False  # docker is no CRI
