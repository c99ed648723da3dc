"""Configure containerd: a runtime handler of the CRI plugin, for a RuntimeClass. Pure.

Sources: containerd's docs/cri/config.md and docs/PLUGINS.md; tried with 1.6.

* The plugin is called io.containerd.grpc.v1.cri in files of version 2, io.containerd.cri.v1.runtime from version 3 on
  (version 4 moved other sections only). An imported file must have the version of the file that imports it.
* containerd 2.1 and later merge imported files, so gpushare writes a drop-in. In earlier versions a plugin's section in
  an imported file replaces the whole section, so gpushare adds its entry to the last file that has the section.
* Before 2.0 a section with any runtimes has no default runtimes: if the file has none, gpushare adds runc too.
* Handlers should agree on SystemdCgroup, so gpushare's handler starts as a copy of the default handler.
* With --require-nri there is no handler: the drop-in requires the NRI plugin (validator.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from ..request.dialects import triggers
from . import basespec, hookfiles, jsontext, tomltext, validator
from .base import RUNTIME, RUNTIME_PROGRAM, UNKNOWN, Change, Files, Proposal, Settings
from .tomltext import Keys

NAME = "containerd"
PROGRAMS: tuple[str, ...] = ("containerd",)
RELOAD = "systemctl restart containerd"
FORGET = RELOAD
FILE = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/gpushare.toml"
BASE_SPEC = "/etc/gpushare/containerd-base-spec.json"
_ALL_DROP_INS = "/etc/containerd/conf.d/*.toml"
_OUR_DROP_INS = "/etc/containerd/conf.d/gpushare*.toml"  # only gpushare's: the user did not import other files there
_MERGES = (2, 1)
_PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}
_RUNC = "io.containerd.runc.v2"
_CRI = {"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}
_NRI = "io.containerd.nri.v1.nri"  # without it, containerd's CRI starts containers and validates nothing
# Annotations of gpushare and of other schedulers, as patterns for Go's path.Match: * matches no slash
ANNOTATIONS = ("gpushare.io/*", "*.gpushare.io/*", *sorted(triggers.KEYS), f"{triggers.SCOPE}*")
_REQUIREMENT = validator.CONTAINERD.keys
_MAX_FILES = 64


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE, DROP_IN, BASE_SPEC)


class Source(NamedTuple):
    """A file that containerd reads. `value` is its content without gpushare's block."""

    path: str
    text: Optional[str]
    value: Mapping[str, Any]


def _tables(version: int) -> Keys:
    return ("plugins", _PLUGINS[version], "containerd")


def engine_version(settings: Settings, files: Files) -> tuple[int, int]:
    """(major, minor); (0, 0) when unknown. Raises ConfigError for an invalid --engine-version."""
    if settings.engine_version:
        return settings.given_version()
    match = re.search(r" v?(\d+)\.(\d+)\.", files.ask("containerd", "--version") or "")
    if match is not None:
        return int(match[1]), int(match[2])
    dumped = tomltext.check(settings.dump, "--dump").get("version") if settings.dump else None
    return {2: (1, 0), 3: (2, 0), 4: (2, 3)}.get(dumped or 0, (0, 0))


def _config_version(source: Source, engine: tuple[int, int]) -> int:
    """The version of the configuration file's format. Raises ConfigError."""
    version = source.value.get("version")
    if version is None and not source.value:
        return 3 if engine[0] >= 2 else 2  # 2.x still reads version 2
    if version in _PLUGINS:
        return int(version)
    if version in (None, 1):
        hint = "convert it to version 2 with `containerd config migrate`"
        raise ConfigError(f"{source.path}: the file has format version 1 (the default)", hint)
    known = ", ".join(map(str, _PLUGINS))
    raise ConfigError(f"{source.path}: unknown version {shown(version)}", f"known: {known}; update gpushare")


def _sources(main: str, files: Files) -> list[Source]:
    """The main file and all files that it imports, in containerd's order. Raises ConfigError."""
    found: list[Source] = []
    pending = [main]
    while pending and len(found) < _MAX_FILES:
        path = pending.pop(0)
        if any(source.path == path for source in found):
            continue
        text = files.read(path)
        if text is None and path != main:
            continue
        source = Source(path, text, tomltext.check(tomltext.without_block(text or ""), path))
        found.append(source)
        for one in tomltext.imports(source.value, path):
            one = one if one.startswith("/") else f"{path.rpartition('/')[0]}/{one}"
            pending += files.glob(one) if "*" in one else [one]
    return found


def propose(settings: Settings, files: Files) -> Proposal:
    settings = settings._replace(cri=True)
    main = settings.config_file or FILE
    engine = engine_version(settings, files)
    merges = engine >= _MERGES
    why_not = validator.why_not(validator.CONTAINERD, engine)
    if settings.require_nri and why_not:
        return Proposal((), [why_not])
    sources = _sources(main, files)
    for source in sources:
        disabled = source.value.get("disabled_plugins")
        names = {str(one) for one in disabled} if isinstance(disabled, list) else set()
        what = "CRI" if names & _CRI else "NRI" if settings.require_nri and _NRI in names else ""
        if what:
            raise ConfigError(f"{source.path}: disabled_plugins disables {what}", "remove it from that list")
    version = _config_version(sources[0], engine)
    keys = _tables(version)
    plugin = keys[:2]
    others = [source for source in sources if source.path != DROP_IN]
    target = next((one for one in reversed(others) if tomltext.table_at(one.value, plugin, one.path)), others[0])
    if merges:
        value: Mapping[str, Any] = {}
        for source in others:
            value = tomltext.merged(value, source.value)
    else:
        value = target.value
    if settings.require_nri:
        required: dict[Keys, Mapping[str, Any]] = {_REQUIREMENT: validator.table(value, main, validator.CONTAINERD)}
        return Proposal(_drop_in(main, sources, required, version, files))
    section = tomltext.table_at(value, keys, target.path)
    runtimes = {
        name: table
        for name, table in tomltext.table_at(section, ("runtimes",), target.path).items()
        if name != RUNTIME and isinstance(table, dict)
    }
    table, changes, notes = _table(settings, section, runtimes, files, target.path)
    tables: dict[Keys, Mapping[str, Any]] = {(*keys, "runtimes", RUNTIME): table}
    if not runtimes and not merges:
        tables[(*keys, "runtimes", "runc")] = {"runtime_type": _RUNC}
    if merges:
        changes += _drop_in(main, sources, tables, version, files)
    else:
        notes.append(_why_no_drop_in(engine, target.path, main))
        changes += _in_place(target, tables, version)
        changes += _former_drop_in(files)
    return Proposal(changes, notes)


def _unknown(engine: tuple[int, int]) -> str:
    return "" if any(engine) else "the version of containerd is unknown (--engine-version); "


def _why_no_drop_in(engine: tuple[int, int], path: str, main: str) -> str:
    """A note for users who expect a drop-in, or who add their own."""
    where = "" if path == main else ", whose CRI section is in force"
    reason = f"containerd before 2.1 does not merge imported files, so the entry goes into {path}{where}"
    return _unknown(engine) + reason


def _table(
    settings: Settings, section: Mapping[str, Any], runtimes: Mapping[str, Any], files: Files, path: str
) -> tuple[dict[str, Any], list[Change], list[str]]:
    """(gpushare's handler, changes of the base spec, notes)."""
    base = runtimes.get(str(section.get("default_runtime_name", "runc")), {})
    table: dict[str, Any] = dict(base) if base.get("runtime_type") == _RUNC else {}
    options = dict(tomltext.table_at(table, ("options",), path))
    table.pop("options", None)
    table["runtime_type"] = _RUNC
    for name in ("pod_annotations", "container_annotations"):
        allowed = [one for one in table.get(name, []) if one not in ANNOTATIONS]
        table[name] = [*allowed, *ANNOTATIONS]
    changes, notes = [], []
    if settings.hook_only:
        changes = _base_spec(settings, table.get("base_runtime_spec") or "", files)
        table["base_runtime_spec"] = BASE_SPEC
    else:
        hookfiles.refuse_arguments(settings, "containerd")
        before = options.get("BinaryName")
        if before and before.rpartition("/")[2] != "runc":
            notes.append(
                f"the default handler runs {shown(before)}; gpushare's handler runs runtime.path, or runc by default"
            )
        options["BinaryName"] = settings.cri_program
    if options:
        table["options"] = options
    return table, changes, notes


def _base_spec(settings: Settings, former: str, files: Files) -> list[Change]:
    """The default handler's base spec, or containerd's own, with gpushare's hooks added."""
    text = files.read(former) if former and former != BASE_SPEC else files.ask("ctr", "oci", "spec")
    spec = jsontext.check(text, former or "ctr oci spec") if text else basespec.default()
    hooks = {name: list(spec.get("hooks", {}).get(name, [])) for name in spec.get("hooks", {})}
    for stage in hookfiles.STAGES:
        hooks[stage] = [*hooks.get(stage, []), hookfiles.entry_of(settings, stage)]
    spec.get("linux", {}).pop("cgroupsPath", None)  # a placeholder of `ctr oci spec`; CRI sets the real one
    after = json.dumps({**spec, "hooks": hooks}, indent=2, ensure_ascii=False) + "\n"
    before = files.read(BASE_SPEC)
    return [Change(BASE_SPEC, before, after)] if before != after else []


def _in_place(target: Source, tables: Mapping[Keys, Mapping[str, Any]], version: int) -> list[Change]:
    head = f"version = {version}\n" if not target.value else ""
    after = tomltext.put(head + (target.text or ""), tables, target.path)
    return [Change(target.path, target.text, after)] if after != target.text else []


def _former_drop_in(files: Files) -> list[Change]:
    """Remove the drop-in of a newer containerd, or of another profile: in this version it would replace the whole
    section."""
    text = files.read(DROP_IN)
    then = None if text is None else withdraw(DROP_IN, text, UNKNOWN)
    return [Change(DROP_IN, text, then)] if then != text else []


def _drop_in(
    main: str, sources: list[Source], tables: Mapping[Keys, Mapping[str, Any]], version: int, files: Files
) -> list[Change]:
    """Write the drop-in, and import it in the main file unless a file imports it already."""
    before = files.read(DROP_IN)
    head = f"# For containerd, which merges it into {main}.\nversion = {version}\n"
    own = before if before is not None and _only_of(before, version) else ""
    handler: Keys = (*_tables(version), "runtimes", RUNTIME)
    changes = [Change(DROP_IN, before, tomltext.put(own or head, tables, DROP_IN, (handler, _REQUIREMENT)))]
    first = sources[0]
    text = tomltext.drop(first.text or "", [handler], main)  # written for an older containerd
    if not any(_covers(one) for source in sources for one in tomltext.imports(source.value, source.path)):
        # Without a main file containerd imports all drop-ins; a new main file must import them too.
        glob = _OUR_DROP_INS if first.value else _ALL_DROP_INS
        text = tomltext.add_import(text if first.value else f"version = {version}\n", glob, main)
    if text != (first.text or ""):
        changes.append(Change(main, first.text, text))
    return [change for change in changes if change.before != change.after]


def _only_of(text: str, version: int) -> bool:
    return tomltext.check(text, DROP_IN).get("version") == version


def _covers(pattern: str) -> bool:
    """Whether an entry of `imports` matches gpushare's drop-in."""
    regex = "".join("[^/]*" if c == "*" else re.escape(c) for c in pattern)
    return re.fullmatch(regex, DROP_IN) is not None


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    if path == BASE_SPEC:
        return None
    ours: list[Keys] = [(*_tables(version), "runtimes", RUNTIME) for version in (2, 3)]
    if path == DROP_IN:
        ours.append(_REQUIREMENT)
    left = tomltext.drop(text, ours, path)
    if before is not None and _OUR_DROP_INS not in before:
        left = tomltext.drop_import(left, _OUR_DROP_INS, path)
    own = path == DROP_IN and set(tomltext.check(left, path)) <= {"version"}
    new = before is None and set(tomltext.check(left, path)) <= {"version", "imports"}
    return None if own or new else left


def entry(path: str, text: str) -> str:
    if path == BASE_SPEC:
        hooks = jsontext.check(text, path).get("hooks", {}).get(hookfiles.STAGES[0], [])
        return next((str(hook["path"]) for hook in hooks if str(hook.get("path")).endswith("/gpushare-hook")), "")
    value = tomltext.check(text, path)
    for version in (2, 3):
        table = tomltext.table_at(value, (*_tables(version), "runtimes", RUNTIME), path)
        if table:
            return str(tomltext.table_at(table, ("options",), path).get("BinaryName") or table.get("base_runtime_spec"))
    return ""


def lacks_cri(path: str, text: str) -> bool:
    program = entry(path, text)
    if path == BASE_SPEC:
        hooks = jsontext.check(text, path).get("hooks", {}).get(hookfiles.STAGES[0], [])
        ours = [hook for hook in hooks if str(hook.get("path")).endswith("/gpushare-hook")]
        return any(map(hookfiles.lacks_cri, ours))
    return program.rpartition("/")[2] == RUNTIME_PROGRAM
