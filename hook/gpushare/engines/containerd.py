"""Configure containerd: a runtime handler of the CRI plugin, for a RuntimeClass. Pure.

Sources: containerd's docs/cri/config.md and docs/PLUGINS.md; tried with 1.6, 1.7 and 2.1.

* The plugin is called io.containerd.grpc.v1.cri in files of version 2, io.containerd.cri.v1.runtime from version 3 on
  (version 4 moved other sections only). An imported file must have the version of the file that imports it.
* containerd 2.1 and later merge imported files, so gpushare writes a drop-in. In earlier versions a plugin's section in
  an imported file replaces the whole section, so gpushare adds its entry to the last file that has the section.
* gpushare's handler is a copy of the default handler as `containerd config dump` shows it: a file can leave out what
  containerd adds by itself. Handlers must agree on SystemdCgroup, or containers end up outside their pod's cgroup.
* Before 2.0 a section with any runtimes has no default runtimes: if the file has none, gpushare adds runc too.
* With --require-nri there is no handler: the drop-in requires the NRI plugin (validator.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from ..config import oci_runtime
from ..core.errors import ConfigError
from ..core.quoting import shown
from ..request.dialects import registry
from . import basespec, containerd_files, daemon, distributions, hookfiles, jsontext, tomltext, validator
from .base import CRI_PROGRAM, RUNTIME, RUNTIME_PROGRAM, UNKNOWN, Change, Files, Proposal, Refusal, Settings
from .containerd_files import PLUGINS, Place, Source
from .tomltext import Keys

NAME = "containerd"
PROGRAMS: tuple[str, ...] = (NAME, *distributions.PROGRAMS)
FILE, DROP_IN, BASE_SPEC = containerd_files.FILE, containerd_files.DROP_IN, containerd_files.BASE_SPEC
_MERGES = (2, 1)
_MIGRATES = (1, 7)  # has `containerd config migrate`; 1.6.20 has not (tried)
_RUNC = "io.containerd.runc.v2"
_RUNC_TYPES = (_RUNC, "io.containerd.runc.v1", "")
_CRI = {"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}
_NRI = "io.containerd.nri.v1.nri"  # without it, containerd's CRI starts containers and validates nothing
# Annotations of gpushare and of other schedulers, as patterns for Go's path.Match: * matches no slash
ANNOTATIONS = ("gpushare.io/*", "*.gpushare.io/*", *sorted(registry.KEYS), f"{registry.SCOPE}*")
_REQUIREMENT = validator.CONTAINERD.keys
_BUILT_IN = {"runtimes": {"runc": {"runtime_type": _RUNC}}}  # containerd 2 adds it to what the files have
_BASE = '{{ template "base" . }}\n'  # k3s's own template, which one of the administrator's can extend
_OWN_TABLE = re.compile(rf"""^\s*\[[^]\n]*\bruntimes\s*\.\s*["']?{RUNTIME}["'.\s\]]""", re.MULTILINE)  # in a template
_VERSION_1 = {"plugins", "proxy_plugins", "stream_processors"}  # sections that version 2 writes differently

located = containerd_files.located
paths = containerd_files.paths
ignored = containerd_files.ignored
reload = containerd_files.command
forget = containerd_files.command_after


def _plugin(version: int) -> Keys:
    return ("plugins", PLUGINS[version])


def _tables(version: int) -> Keys:
    return (*_plugin(version), "containerd")


def _programs(main: str) -> tuple[str, ...]:
    one = distributions.of(main)
    return (one.programs if one is not None else ()) or (NAME,)


def engine_version(settings: Settings, files: Files) -> tuple[int, int]:
    """(major, minor); (0, 0) when unknown. Raises ConfigError for an invalid --engine-version."""
    if settings.engine_version:
        return settings.given_version()
    answers = (files.ask(program, "--version") for program in _programs(settings.config_file))
    match = re.search(r" v?(\d+)\.(\d+)\.", next(filter(None, answers), ""))
    if match is not None:
        return int(match[1]), int(match[2])
    dumped = tomltext.check(settings.dump, "--dump").get("version") if settings.dump else None
    return {2: (1, 0), 3: (2, 0), 4: (2, 3)}.get(dumped or 0, (0, 0))


def _config_version(source: Source, engine: tuple[int, int]) -> int:
    """The version of the configuration file's format. Raises ConfigError."""
    version = source.value.get("version")
    if version is None and not source.value:
        return 3 if engine[0] >= 2 else 2  # 2.x still reads version 2
    if isinstance(version, int) and version in PLUGINS:
        return version
    if version in (None, 1):
        if (
            version is None
            and not _VERSION_1 & set(source.value)
            and not any(source.value.get(f"{one}_plugins") for one in ("disabled", "required"))
        ):
            return 2  # nothing in the file depends on the version: `version = 2` is added
        what = f"{source.path}: the file has format version 1 (the default)"
        if engine < _MIGRATES and any(engine):
            raise ConfigError(what, "write `version = 2` as its first line, and each plugin with its whole name")
        raise ConfigError(what, "convert it to version 2 with `containerd config migrate`")
    known = ", ".join(map(str, PLUGINS))
    raise ConfigError(f"{source.path}: unknown version {shown(version)}", f"known: {known}; update gpushare")


def propose(settings: Settings, files: Files) -> Proposal:
    settings = located(settings._replace(cri=True), files)
    main = settings.config_file
    distributions.refuse_generated(main)
    engine = engine_version(settings, files)
    why_not = validator.why_not(validator.CONTAINERD, engine)
    if settings.require_nri and why_not:
        return Proposal((), [why_not])
    sources = containerd_files.sources(main, files)
    _refuse_impossible(settings, sources, files)
    version = _config_version(sources[0], engine)
    for source in sources[1:] if "version" not in sources[0].value else ():
        if source.value:
            _config_version(source, engine)  # containerd would refuse it below a file of another version
    place = containerd_files.place(main, sources)
    merges = engine >= _MERGES
    others = [source for source in sources if source.path != place.drop_in]
    plugin = _plugin(version)
    target = next((one for one in reversed(others) if tomltext.table_at(one.value, plugin, one.path)), others[0])
    value: Mapping[str, Any] = {}
    for source in others if merges or place.always else [target]:
        value = tomltext.merged(value, source.value)
    if settings.require_nri:
        required: dict[Keys, Mapping[str, Any]] = {_REQUIREMENT: validator.table(value, main, validator.CONTAINERD)}
        return Proposal(_written(place, sources, target, required, version, merges, files))
    ours = next(filter(None, (_present(source, version) for source in reversed(sources))), {})
    section, notes = _section(settings, tomltext.table_at(value, _tables(version), target.path), ours, engine, files)
    table, changes, more = _table(settings, section, files)
    tables: dict[Keys, Mapping[str, Any]] = {containerd_files.handler(version): table}
    in_place = not (place.always or place.template or merges)
    if in_place:
        if not tomltext.at(value, (*_tables(version), "runtimes")):
            tables[(*_tables(version), "runtimes", "runc")] = _of_runc(section)
        notes.append(_why_no_drop_in(engine, target.path, main))
    elif place.template and place.drop_in and not merges:
        notes.append(_why_no_drop_in(engine, place.template, place.template))
    changes += _written(place, sources, target, tables, version, merges, files)
    binary = tomltext.text_at(section, ("options", "BinaryName"), main)
    low_level = None if settings.hook_only or _is_ours(binary) else binary
    return Proposal(changes, [*notes, *more], low_level)


def _present(source: Source, version: int) -> dict[str, Any]:
    """gpushare's handler in a file; empty if there is none."""
    return tomltext.table_at(
        tomltext.check(source.text or "", source.path), containerd_files.handler(version), source.path
    )


def _is_ours(program: str) -> bool:
    return program.rpartition("/")[2] in (RUNTIME_PROGRAM, CRI_PROGRAM)


def _refuse_impossible(settings: Settings, sources: Sequence[Source], files: Files) -> None:
    """Raise ConfigError if no change of the files can make containerd run gpushare."""
    main = sources[0]
    for source in sources:
        disabled = source.value.get("disabled_plugins")
        names = {str(one) for one in disabled} if isinstance(disabled, list) else set()
        what = "CRI" if names & _CRI else "NRI" if settings.require_nri and _NRI in names else ""
        if what:
            raise ConfigError(f"{source.path}: disabled_plugins disables {what}", "remove it from that list")
    one = distributions.of(main.path)
    if main.text is None and one is not None:
        raise ConfigError(f"{main.path} does not exist", f"start {one.name} once, which writes it")
    if main.text is None and main.path == FILE and not files.program("containerd"):
        for one in distributions.installed(files):
            raise ConfigError(
                f"no containerd is in PATH and there is no {FILE}; this host has the containerd of {one.name}",
                f"name its configuration: --config-file {one.main}",
            )


def _dump(settings: Settings, files: Files) -> list[tuple[str, ...]]:
    """The commands of which the first that runs prints the configuration that containerd has."""
    named = () if settings.config_file == FILE and not files.has(FILE) else ("--config", settings.config_file)
    return [(program, *named, "config", "dump") for program in _programs(settings.config_file)]


def _answer(words: Sequence[str], files: Files) -> dict[str, Any]:
    """The configuration that a command prints; empty if it does not run, or prints something else."""
    try:
        return tomltext.check(files.ask(*words) or "", " ".join(words))
    except ConfigError:
        return {}


def _dumped(settings: Settings, files: Files) -> dict[str, Any]:
    """The configuration that containerd has; empty without its answer."""
    if settings.dump:
        return tomltext.check(settings.dump, "--dump")
    return next(filter(None, (_answer(words, files) for words in _dump(settings, files))), {})


def _effective(
    settings: Settings, written: Mapping[str, Any], engine: tuple[int, int], files: Files
) -> tuple[Mapping[str, Any], list[str]]:
    """(the table `containerd` of the CRI plugin as containerd itself has it, notes); without its answer, as the files
    have it."""
    dumped = _dumped(settings, files)
    version = dumped.get("version")
    if version in PLUGINS:
        return tomltext.table_at(dumped, _tables(version), "containerd config dump"), []
    built_in = _BUILT_IN if engine[0] >= 2 or "runtimes" not in written else {}
    note = f"`containerd config dump` did not run, so the default handler is as {settings.config_file} has it"
    return tomltext.merged(built_in, written), [note]


def _section(
    settings: Settings, written: Mapping[str, Any], ours: Mapping[str, Any], engine: tuple[int, int], files: Files
) -> tuple[Mapping[str, Any], list[str]]:
    """(the handler of which gpushare's is a copy, notes): the default handler, if it runs runc. If gpushare is the
    default already, its entry `ours` is a copy of the former one."""
    section, notes = _effective(settings, written, engine, files)
    path = settings.config_file
    name, one, table = _copied(section, path, ours)
    if one:
        if one != name:
            notes.append(f"the default handler {shown(name)} runs no runc, so gpushare's is a copy of {shown(one)}")
        return {**_set(table), "options": _set(tomltext.table_at(table, ("options",), path))}, notes
    if name in tomltext.table_at(section, ("runtimes",), path):
        notes.append(f"no handler runs runc, so gpushare's has the defaults of containerd (default: {shown(name)})")
    return {}, notes


def _copied(section: Mapping[str, Any], path: str, ours: Mapping[str, Any]) -> tuple[str, str, Mapping[str, Any]]:
    """(name of the default handler, name of the one to copy, its table). The first that runs runc is copied; an empty
    name: none does."""
    runtimes = tomltext.table_at(section, ("runtimes",), path)
    name = str(section.get("default_runtime_name") or "runc")
    for one in dict.fromkeys((name, "runc", *sorted(runtimes))):
        table = runtimes.get(one, (ours or None) if one == RUNTIME else None)
        if one == RUNTIME and one != name:
            continue
        if isinstance(table, Mapping) and table.get("runtime_type", "") in _RUNC_TYPES:
            return name, one, table
    return name, "", {}


def systemd_cgroups(settings: Settings, files: Files) -> tuple[bool, Optional[bool]]:
    """SystemdCgroup of the handler of which gpushare's is a copy, and of gpushare's (None: there is none). Raises
    ConfigError."""
    settings = located(settings, files)
    value = _written_value(settings, files)
    written: Mapping[str, Any] = next(
        (found for version in PLUGINS if (found := tomltext.at(value, _tables(version)))), {}
    )
    section, _ = _effective(settings, written, (2, 0), files)
    ours = tomltext.at(section, ("runtimes", RUNTIME))
    _, _, default = _copied(section, settings.config_file, {})
    systemd = [bool(tomltext.at(table or {}, ("options", "SystemdCgroup"))) for table in (default, ours)]
    return systemd[0], systemd[1] if ours else None


def reads_cdi(settings: Settings, files: Files) -> Optional[bool]:
    """Whether containers get the CDI devices that kubelet requests: containerd 1.7 has CDI disabled by default, and 1.6
    has none. None: neither containerd nor its files tell. Raises ConfigError."""
    settings = located(settings, files)
    dumped = _dumped(settings, files)
    value = dumped or _written_value(settings, files)
    found = [tomltext.at(value, (*_plugin(version), "enable_cdi")) for version in PLUGINS]
    return any(found) if dumped or any(one is not None for one in found) else None


def _written_value(settings: Settings, files: Files) -> Mapping[str, Any]:
    """All files of the daemon in one, with gpushare's entries."""
    value: Mapping[str, Any] = {}
    for source in containerd_files.sources(settings.config_file, files):
        value = tomltext.merged(value, tomltext.check(source.text or "", source.path))
    return value


def _set(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that do not have Go's zero value, which a new handler has by itself."""
    return {key: value for key, value in table.items() if value not in ("", 0, [], {})}


def _of_runc(section: Mapping[str, Any]) -> dict[str, Any]:
    return {"runtime_type": _RUNC, **{key: value for key, value in section.items() if value}}


def _unknown(engine: tuple[int, int]) -> str:
    return "" if any(engine) else "the version of containerd is unknown (--engine-version); "


def _why_no_drop_in(engine: tuple[int, int], path: str, main: str) -> str:
    """A note for users who expect a drop-in, or who add their own."""
    where = "" if path == main else ", whose CRI section is in force"
    reason = f"containerd before 2.1 does not merge imported files, so the entry goes into {path}{where}"
    return _unknown(engine) + reason


def _table(settings: Settings, base: Mapping[str, Any], files: Files) -> tuple[dict[str, Any], list[Change], list[str]]:
    """(gpushare's handler, changes of the base spec, notes)."""
    table: dict[str, Any] = {**base, "runtime_type": _RUNC}
    options = dict(table.pop("options", {}))
    before = tomltext.text_at(options, ("BinaryName",), settings.config_file)
    for name in ("pod_annotations", "container_annotations"):
        allowed = [one for one in tomltext.texts_at(table, (name,), settings.config_file) if one not in ANNOTATIONS]
        table[name] = [*allowed, *ANNOTATIONS]
    changes: list[Change] = []
    notes: list[str] = []
    if settings.hook_only:
        if _is_ours(before):
            del options["BinaryName"]
        changes, notes = _base_spec(
            settings, tomltext.text_at(table, ("base_runtime_spec",), settings.config_file), files
        )
        table["base_runtime_spec"] = containerd_files.base_spec_of(settings.config_file)
    else:
        hookfiles.refuse_arguments(settings, "containerd")
        if table.get("base_runtime_spec") == containerd_files.base_spec_of(settings.config_file):
            del table["base_runtime_spec"]
        if before and before.rpartition("/")[2] not in oci_runtime.NAMES and not _is_ours(before):
            notes.append(
                f"the default handler runs {shown(before)}; gpushare's handler runs runtime.path, or runc by default"
            )
        options["BinaryName"] = settings.cri_program
    if options:
        table["options"] = options
    return table, changes, notes


def _hooks(spec: Mapping[str, Any], path: str) -> dict[str, list[dict[str, Any]]]:
    """The hooks of a base spec by stage. Raises ConfigError."""
    found = spec.get("hooks") or {}
    stages = [one or [] for one in found.values()] if isinstance(found, dict) else [None]
    if not all(isinstance(one, list) and all(isinstance(hook, dict) for hook in one) for one in stages):
        raise ConfigError(f'{path}: "hooks" must be an object of lists of objects', "fix the file")
    return {name: list(one or []) for name, one in found.items()}


def _base_spec(settings: Settings, former: str, files: Files) -> tuple[list[Change], list[str]]:
    """(the change that writes the default handler's base spec, or containerd's own, with gpushare's hooks added;
    notes)."""
    own = containerd_files.base_spec_of(settings.config_file)
    named = former if former != own else ""
    text, notes = files.read_linked(named) if named else None, []
    if named and text is None:
        notes.append(f"base_runtime_spec {shown(named)} does not exist, so gpushare's is a copy of containerd's own")
    text = files.ask("ctr", "oci", "spec") if text is None else text
    spec = jsontext.check(text, named or "ctr oci spec") if text else basespec.default()
    hooks = _hooks(spec, named or "ctr oci spec")
    for stage in hookfiles.STAGES:
        hooks[stage] = [*hooks.get(stage, []), hookfiles.entry_of(settings, stage)]
    spec.get("linux", {}).pop("cgroupsPath", None)  # a placeholder of `ctr oci spec`; CRI sets the real one
    after = json.dumps({**spec, "hooks": hooks}, indent=2, ensure_ascii=False) + "\n"
    before = files.read(own)
    return [Change(own, before, after)] if before != after else [], notes


def _written(
    place: Place,
    sources: Sequence[Source],
    target: Source,
    tables: Mapping[Keys, Mapping[str, Any]],
    version: int,
    merges: bool,
    files: Files,
) -> list[Change]:
    """The changes that write these tables where this containerd reads them."""
    if place.always or (merges and place.drop_in):
        return [*_drop_in(place, sources, tables, version, files), *_former(place.template, files)]
    if place.template:
        return [*_template(place, sources[0], tables, version, files), *_former(place.drop_in, files)]
    return [*_in_place(target, tables, version), *_former(place.drop_in, files)]


def _in_place(target: Source, tables: Mapping[Keys, Mapping[str, Any]], version: int) -> list[Change]:
    head = f"version = {version}\n" if "version" not in target.value else ""
    after = tomltext.put(head + (target.text or ""), tables, target.path)
    return [Change(target.path, target.text, after)] if after != target.text else []


def _template(
    place: Place, made: Source, tables: Mapping[Keys, Mapping[str, Any]], version: int, files: Files
) -> list[Change]:
    """`made`: the file that the distribution makes of the template. Raises ConfigError if a table would be in it
    twice: containerd would not start."""
    before = files.read(place.template)
    if place.is_go:
        handler = containerd_files.handler(version)
        if handler in tables and (
            tomltext.at(made.value, handler) or _OWN_TABLE.search(tomltext.without_block(before or ""))
        ):
            one = distributions.of(made.path)
            again = f", then run `{one.command(files)}`" if one is not None else ""
            raise ConfigError(
                f"{place.template} has a handler {RUNTIME} that gpushare did not write",
                f"remove that table from the template{again} and this command again",
            )
        after = tomltext.put_block(_BASE if before is None else before, tables)
        return [Change(place.template, before, after)] if after != before else []
    if before is None:
        raise ConfigError(f"{place.template} does not exist", "write the entry into the template that is used instead")
    value = tomltext.check(tomltext.without_block(before), place.template)
    return _in_place(Source(place.template, before, value), tables, version)


def _former(path: str, files: Files) -> list[Change]:
    """Remove the entry of another version of containerd, or of another profile. A containerd
    that merges no files takes a drop-in for the whole section; another one adds a template's keys to the drop-in."""
    text = files.read(path) if path else None
    then = None if text is None else withdraw(path, text, UNKNOWN)
    return [Change(path, text, then)] if then != text else []


def _drop_in(
    place: Place, sources: Sequence[Source], tables: Mapping[Keys, Mapping[str, Any]], version: int, files: Files
) -> list[Change]:
    """Write the drop-in, and import it in the main file unless a file imports it already."""
    path, first = place.drop_in, sources[0]
    before = files.read(path)
    head = f"{containerd_files.HEAD.format(main=first.path)}version = {version}\n"
    own = before if before is not None and tomltext.check(before, path).get("version") == version else ""
    handler = containerd_files.handler(version)
    changes = [Change(path, before, tomltext.put(own or head, tables, path, (handler, _REQUIREMENT)))]
    text = tomltext.drop(first.text or "", [handler], first.path)  # written for an older containerd
    if "version" not in first.value and (first.value or place.imported):
        text = f"version = {version}\n{text if first.value else ''}"
    if place.imported:
        text = tomltext.add_import(text, place.imported, first.path)
    if text != (first.text or ""):
        changes.append(Change(first.path, first.text, text))
    return [change for change in changes if change.before != change.after]


def verify(settings: Settings, files: Files) -> None:
    """Let containerd read its files, and look for the entry in its answer."""
    settings = located(settings, files)
    for words in _dump(settings, files):
        complaint = files.complaint(*words)
        if complaint:
            raise Refusal(
                f"containerd refuses the change: {daemon.reason(complaint)}",
                "fix that, then run the command again",
            )
        dumped = _answer(words, files)
        if dumped and not settings.require_nri:
            place = containerd_files.place(settings.config_file, containerd_files.sources(settings.config_file, files))
            there = any(tomltext.at(dumped, containerd_files.handler(version)) for version in PLUGINS)
            if not there and not place.always and not place.template:
                raise ConfigError(
                    f"`{' '.join(words)}` shows no handler {RUNTIME} after the change",
                    "name the daemon's file: --config-file",
                )
            return


def withdraw(path: str, text: str, before: Optional[str]) -> Optional[str]:
    if containerd_files.is_base_spec(path):
        return None
    if containerd_files.is_template(path):
        left = tomltext.without_block(text)
        return None if left == _BASE and before is None else left
    ours: list[Keys] = [containerd_files.handler(version) for version in (2, 3)]
    drop_in = containerd_files.is_drop_in(path)
    if drop_in:
        ours.append(_REQUIREMENT)
    left = tomltext.drop(text, ours, path)
    for one in tomltext.imports(tomltext.check(left, path), path):
        if containerd_files.is_own_import(one) and before is not None and one not in before:
            left = tomltext.drop_import(left, one, path)
    own = drop_in and set(tomltext.check(left, path)) <= {"version"}
    new = before is None and set(tomltext.check(left, path)) <= {"version", "imports"}
    return None if own or new else left


def entry(path: str, text: str) -> str:
    if containerd_files.is_base_spec(path):
        hooks = _hooks(jsontext.check(text, path), path).get(hookfiles.STAGES[0], [])
        return next((str(hook["path"]) for hook in hooks if str(hook.get("path")).endswith("/gpushare-hook")), "")
    value = tomltext.check(tomltext.block(text) if containerd_files.is_template(path) else text, path)
    for version in (2, 3):
        table = tomltext.table_at(value, containerd_files.handler(version), path)
        if table:
            return str(tomltext.table_at(table, ("options",), path).get("BinaryName") or table.get("base_runtime_spec"))
    return ""


def lacks_cri(path: str, text: str) -> bool:
    program = entry(path, text)
    if containerd_files.is_base_spec(path):
        hooks = _hooks(jsontext.check(text, path), path).get(hookfiles.STAGES[0], [])
        ours = [hook for hook in hooks if str(hook.get("path")).endswith("/gpushare-hook")]
        return any(map(hookfiles.lacks_cri, ours))
    return program.rpartition("/")[2] == RUNTIME_PROGRAM
