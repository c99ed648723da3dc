"""containerd: a runtime handler of the CRI plugin, for the handler of a RuntimeClass. Pure.

Sources: containerd's docs/cri/config.md and docs/PLUGINS.md; tried with 1.6. What one has to know:

* The plugin is called io.containerd.grpc.v1.cri in files of version 2, io.containerd.cri.v1.runtime from version 3 on
  (version 4 moved other sections only). An imported file must have the version of the file that imports it.
* From 2.1 on imported files are merged, so we write a drop-in. Before, a plugin's section in an imported file replaces
  the whole section, so we add to the last file that has the section.
* Before 2.0 a section with any runtimes has only these: without a runtime of its own in the file, runc is added.
* Handlers should agree on SystemdCgroup, so ours begins with what the default handler has.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from ..request.dialects import triggers
from . import basespec, hookfiles, jsontext, tomltext
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
_OUR_DROP_INS = "/etc/containerd/conf.d/gpushare*.toml"  # only ours: other files there were not asked for
_MERGES = (2, 1)
_PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}
_RUNC = "io.containerd.runc.v2"
_CRI = {"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}
# Ours, and other schedulers'; as path.Match reads them: * matches no slash
ANNOTATIONS = ("gpushare.io/*", "*.gpushare.io/*", *sorted(triggers.KEYS))
_MAX_FILES = 64


def paths(settings: Settings) -> tuple[str, ...]:
    return (settings.config_file or FILE, DROP_IN, BASE_SPEC)


class Source(NamedTuple):
    """One of the files that containerd reads, in this order. `value` is what it says without us."""

    path: str
    text: Optional[str]
    value: Mapping[str, Any]


def _tables(version: int) -> Keys:
    return ("plugins", _PLUGINS[version], "containerd")


def engine_version(settings: Settings, files: Files) -> tuple[int, int]:
    """(major, minor); (0, 0) when nobody knows. Raises ConfigError for a --engine-version that is none."""
    if settings.engine_version:
        match = re.fullmatch(r"v?(\d+)\.(\d+)(?:[.~+-].*)?", settings.engine_version)
        if match is None:
            raise ConfigError(
                f"--engine-version {shown(settings.engine_version)} is no version", "write it as 1.7 or 2.1"
            )
        return int(match[1]), int(match[2])
    match = re.search(r" v?(\d+)\.(\d+)\.", files.ask("containerd", "--version") or "")
    if match is not None:
        return int(match[1]), int(match[2])
    dumped = tomltext.check(settings.dump, "--dump").get("version") if settings.dump else None
    return {2: (1, 0), 3: (2, 0), 4: (2, 3)}.get(dumped or 0, (0, 0))


def _config_version(source: Source, engine: tuple[int, int]) -> int:
    """Raises ConfigError."""
    version = source.value.get("version")
    if version is None and not source.value:
        return 3 if engine[0] >= 2 else 2  # 2.x still reads version 2
    if version in _PLUGINS:
        return int(version)
    if version in (None, 1):
        hint = "write it as version 2: `containerd config migrate` does"
        raise ConfigError(f"{source.path}: version 1 of the configuration file (it names no other)", hint)
    known = ", ".join(map(str, _PLUGINS))
    raise ConfigError(f"{source.path}: version {shown(version)} is not known", f"known: {known}; update gpushare")


def _sources(main: str, files: Files) -> list[Source]:
    """The main file and all that it imports, in containerd's order. Raises ConfigError."""
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


def _merged(to: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(to)
    for key, value in more.items():
        old = result.get(key)
        result[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def propose(settings: Settings, files: Files) -> Proposal:
    settings = settings._replace(cri=True)
    main = settings.config_file or FILE
    engine = engine_version(settings, files)
    merges = engine >= _MERGES
    sources = _sources(main, files)
    for source in sources:
        disabled = source.value.get("disabled_plugins")
        if isinstance(disabled, list) and _CRI & {str(one) for one in disabled}:
            raise ConfigError(f"{source.path}: disabled_plugins switches CRI off", "take it out of that list")
    version = _config_version(sources[0], engine)
    keys = _tables(version)
    plugin = keys[:2]
    others = [source for source in sources if source.path != DROP_IN]
    holder = next((one for one in reversed(others) if tomltext.table_at(one.value, plugin, one.path)), others[0])
    if merges:
        value: Mapping[str, Any] = {}
        for source in others:
            value = _merged(value, source.value)
    else:
        value = holder.value
    section = tomltext.table_at(value, keys, holder.path)
    runtimes = {
        name: table
        for name, table in tomltext.table_at(section, ("runtimes",), holder.path).items()
        if name != RUNTIME and isinstance(table, dict)
    }
    table, changes, notes = _table(settings, section, runtimes, files, holder.path)
    tables: dict[Keys, Mapping[str, Any]] = {(*keys, "runtimes", RUNTIME): table}
    if not runtimes and not merges:
        tables[(*keys, "runtimes", "runc")] = {"runtime_type": _RUNC}
    if merges:
        changes += _drop_in(main, sources, tables, version, files)
    else:
        notes.append(_why_no_drop_in(engine, holder.path, main))
        changes += _in_place(holder, tables, version)
        changes += _former_drop_in(files)
    return Proposal(changes, notes)


def _why_no_drop_in(engine: tuple[int, int], path: str, main: str) -> str:
    """What somebody has to know who looks for a drop-in, or adds one of his own."""
    unknown = "" if any(engine) else "the version of containerd is not known (--engine-version); "
    where = "" if path == main else ", which has the CRI section that counts"
    return f"{unknown}before 2.1 imported files are not merged, so the entry goes into {path}{where}"


def _table(
    settings: Settings, section: Mapping[str, Any], runtimes: Mapping[str, Any], files: Files, path: str
) -> tuple[dict[str, Any], list[Change], list[str]]:
    """(our handler, changes of the base spec, notes)."""
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
                f"the default handler runs {shown(before)}; below gpushare it is what runtime.path says, or runc"
            )
        options["BinaryName"] = settings.cri_program
    if options:
        table["options"] = options
    return table, changes, notes


def _base_spec(settings: Settings, former: str, files: Files) -> list[Change]:
    """The default handler's base spec, or containerd's own, with our hooks."""
    text = files.read(former) if former and former != BASE_SPEC else files.ask("ctr", "oci", "spec")
    spec = jsontext.check(text, former or "ctr oci spec") if text else basespec.default()
    hooks = {name: list(spec.get("hooks", {}).get(name, [])) for name in spec.get("hooks", {})}
    for stage in hookfiles.STAGES:
        hooks[stage] = [*hooks.get(stage, []), hookfiles.entry_of(settings, stage)]
    spec.get("linux", {}).pop("cgroupsPath", None)  # of nobody's container; CRI sets its own
    after = json.dumps({**spec, "hooks": hooks}, indent=2, ensure_ascii=False) + "\n"
    before = files.read(BASE_SPEC)
    return [Change(BASE_SPEC, before, after)] if before != after else []


def _in_place(holder: Source, tables: Mapping[Keys, Mapping[str, Any]], version: int) -> list[Change]:
    head = f"version = {version}\n" if not holder.value else ""
    after = tomltext.put(head + (holder.text or ""), tables, holder.path)
    return [Change(holder.path, holder.text, after)] if after != holder.text else []


def _former_drop_in(files: Files) -> list[Change]:
    """Of a containerd that was newer, or of another profile: it would replace the whole section here."""
    text = files.read(DROP_IN)
    then = None if text is None else withdraw(DROP_IN, text, UNKNOWN)
    return [Change(DROP_IN, text, then)] if then != text else []


def _drop_in(
    main: str, sources: list[Source], tables: Mapping[Keys, Mapping[str, Any]], version: int, files: Files
) -> list[Change]:
    """The drop-in, and the import in the main file when nothing there imports it yet."""
    before = files.read(DROP_IN)
    head = f"# For containerd, which merges it into {main}.\nversion = {version}\n"
    own = before if before is not None and _only_of(before, version) else ""
    changes = [Change(DROP_IN, before, tomltext.put(own or head, tables, DROP_IN))]
    first = sources[0]
    text = tomltext.drop(first.text or "", list(tables), main)  # of a containerd that was older
    if not any(_covers(one) for source in sources for one in tomltext.imports(source.value, source.path)):
        # A new main file must go on importing what containerd imports without one.
        glob = _OUR_DROP_INS if first.value else _ALL_DROP_INS
        text = tomltext.add_import(text if first.value else f"version = {version}\n", glob, main)
    if text != (first.text or ""):
        changes.append(Change(main, first.text, text))
    return [change for change in changes if change.before != change.after]


def _only_of(text: str, version: int) -> bool:
    return tomltext.check(text, DROP_IN).get("version") == version


def _covers(pattern: str) -> bool:
    """Whether an entry of `imports` matches our drop-in."""
    regex = "".join("[^/]*" if c == "*" else re.escape(c) for c in pattern)
    return re.fullmatch(regex, DROP_IN) is not None


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    if path == BASE_SPEC:
        return None
    left = tomltext.drop(text, [(*_tables(version), "runtimes", RUNTIME) for version in (2, 3)], path)
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
