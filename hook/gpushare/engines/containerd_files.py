"""Find the files of a containerd: what it reads, and where gpushare's entry goes. Pure.

    located(settings, files)   -> Settings     config_file: the file that the daemon reads
    sources(main, files)       -> [Source]     that file and all that it imports
    place(main, sources)       -> Place        the file for gpushare's entry
    paths(settings, files)     -> paths        all files that can have an entry
    ignored(...)               -> str          why containerd does not read an entry

Each daemon has a drop-in and a base spec of its own. The drop-in goes into a folder that the daemon already imports, if
there is one, because some distributions write the main file again at each start (distributions.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from . import daemon, distributions, tomltext
from .base import RUNTIME, Files, Settings
from .tomltext import Keys

NAME = "containerd"
FILE = "/etc/containerd/config.toml"
DROP_IN = "/etc/containerd/conf.d/gpushare.toml"
BASE_SPEC = "/etc/gpushare/containerd-base-spec.json"
HEAD = "# For containerd, which merges it into {main}.\n"  # of a drop-in
PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime", 4: "io.containerd.cri.v1.runtime"}
_BASE_SPECS = "/etc/gpushare/containerd-base-spec"
_NAME = "gpushare.toml"  # of each drop-in
_MAX_FILES = 64
# dockerd starts a containerd of its own, without CRI
_OF_DOCKER = ("/run/docker/", "/var/run/docker/", "/run/snap.docker/", "/var/run/snap.docker/")


class Source(NamedTuple):
    """A file that containerd reads. `value` is its content without gpushare's block."""

    path: str
    text: Optional[str]
    value: Mapping[str, Any]


class Place(NamedTuple):
    """Where the entry goes: `drop_in` if containerd merges files, else the CRI section's file, or the `template` of a
    distribution. `imported` is the pattern that the main file lacks for the drop-in."""

    drop_in: str = ""
    imported: str = ""
    template: str = ""
    is_go: bool = False  # the template is in Go's template language
    always: bool = False  # the distribution merges the drop-in for a containerd that does not


def handler(version: int) -> Keys:
    return ("plugins", PLUGINS[version], "containerd", "runtimes", RUNTIME)


def located(settings: Settings, files: Files) -> Settings:
    """The file that containerd was started with, unless the command names one; of a distribution, the file that its
    containerd reads. Raises ConfigError for a template, which the command must not name."""
    started = next(iter(_started(files)), None)
    path = settings.config_file or (daemon.path_of(started) if started else FILE)
    one = distributions.of(path)
    if one is None or not one.main:
        return settings._replace(config_file=path)
    if path.endswith(".tmpl"):
        raise ConfigError(
            f"{shown(path)} is a Go template of {one.name}, which makes {one.main} of it",
            f"name that file: --config-file {one.main}; the entry then goes into config-v3.toml.d/gpushare.toml if it "
            "imports that folder, else into the template",
        )
    return settings._replace(config_file=one.main)


def _started(files: Files) -> list[daemon.Flag]:
    """The flags that name the files that containerd was started with, the running processes first."""
    found = [flag for flag in daemon.flags("containerd", ("containerd",), files) if flag.name in ("config", "c")]
    return [flag for flag in reversed(found) if not flag.value.startswith(_OF_DOCKER)]


def command(settings: Settings, files: Files) -> str:
    """The command that makes containerd read its files."""
    main = located(settings, files).config_file
    one = distributions.of(main)
    if one is not None and one.units:
        return one.command(files)
    return f"systemctl restart {NAME if main == FILE else daemon.unit_of(main, NAME, files)}"


def command_after(settings: Settings, files: Files, changed: Sequence[str]) -> str:
    """The same after a change of these files: without --config-file, --undo changes those of every daemon."""
    mains = [one.main for one in map(distributions.of, changed) if one is not None]
    others = [path for path in changed if path.endswith("/config.toml") and path != FILE]
    named = settings.config_file or next(iter([*mains, *others]), "")
    return command(settings._replace(config_file=named), files)


def sources(main: str, files: Files) -> list[Source]:
    """The main file and all files that it imports, in containerd's order. Raises ConfigError."""
    found: list[Source] = []
    pending = [main]
    while pending and len(found) < _MAX_FILES:
        path = pending.pop(0)
        if any(source.path == path for source in found):
            continue
        text = files.read_linked(path)
        if text is None and path != main:
            continue
        source = Source(path, text, tomltext.check(tomltext.without_block(text or ""), path))
        found.append(source)
        for one in _patterns(source):
            pending += files.glob(one) if "*" in one else [one]
    return found


def _patterns(source: Source) -> list[str]:
    """The entries of `imports`, as absolute patterns."""
    folder = source.path.rpartition("/")[0]
    found = tomltext.imports(source.value, source.path)
    return [one if one.startswith("/") else f"{folder}/{one.removeprefix('./')}" for one in found]


def place(main: str, found: Sequence[Source]) -> Place:
    one = distributions.of(main)
    if one is not None and one.drop_in and (found[0].text or "").startswith(distributions.K0S_MANAGED):
        return Place(one.drop_in, always=True)
    usual = _usual(main)
    # DROP_IN is the first daemon's. Two main files can import one folder
    imported = [
        path for path in _imported(found) if (main == FILE or path != DROP_IN) and not _is_other(path, main, found)
    ]
    best = usual if usual in imported or not imported else imported[0]
    if one is not None and one.template:
        version = found[0].value.get("version", 2)
        if not isinstance(version, int):
            raise ConfigError(f"{main}: version must be a number, not {type(version).__name__}", "fix the file")
        return Place(best if imported else "", "", one.template_of(version), one.is_go)
    # Without a main file containerd imports all drop-ins; a new main file must import them too. The user of another
    # main file did not import other files of that folder.
    names = "*.toml" if main == FILE and not found[0].value else "gpushare*.toml"
    return Place(best, "" if imported else f"{best.rpartition('/')[0]}/{names}")


def _usual(main: str) -> str:
    """The drop-in of a main file that imports none. Several main files in one directory have a folder each, which no
    pattern of another one covers."""
    folder, _, name = main.rpartition("/")
    return f"{folder}/{'conf.d' if name == 'config.toml' else name.removesuffix('.toml') + '.d'}/{_NAME}"


def _is_other(path: str, main: str, found: Sequence[Source]) -> bool:
    """Whether a drop-in names another main file."""
    text = next((source.text for source in found if source.path == path), None)
    return bool(text) and _named_in(text or "", main) != main


def _named_in(text: str, otherwise: str) -> str:
    """The main file that a drop-in names in its first line."""
    match = re.match(re.escape(HEAD).replace(r"\{main\}", "(/.+)"), text)
    return match[1] if match else otherwise


def _imported(found: Sequence[Source]) -> list[str]:
    """Drop-ins of gpushare's name that entries of `imports` cover."""
    paths = []
    for pattern in (pattern for source in found for pattern in _patterns(source)):
        path = f"{pattern.rpartition('/')[0]}/{_NAME}"
        regex = "".join("[^/]*" if c == "*" else re.escape(c) for c in pattern)
        if "*" not in path and not path.startswith("/run/") and re.fullmatch(regex, path):
            paths.append(path)
    return paths


def paths(settings: Settings, files: Files) -> tuple[str, ...]:
    main = located(settings, files).config_file
    try:
        where = place(main, sources(main, files))
    except ConfigError:  # a broken file, which `propose` reports
        where = Place(DROP_IN if main == FILE else "")
    return tuple(dict.fromkeys(filter(None, (main, where.drop_in, where.template, base_spec_of(main)))))


def base_spec_of(main: str) -> str:
    name = main.strip("/").replace("/", "-").removesuffix(".toml")
    return BASE_SPEC if main == FILE else f"{_BASE_SPECS}-{name}.json"


def is_base_spec(path: str) -> bool:
    return path.startswith(_BASE_SPECS)


def is_drop_in(path: str) -> bool:
    return path.endswith(f"/{_NAME}")


def is_own_import(pattern: str) -> bool:
    """Whether `configure` adds such an entry to `imports`."""
    return re.fullmatch(r".+\.d/gpushare\*\.toml", pattern) is not None


def is_template(path: str) -> bool:
    return path.endswith(".tmpl")


def ignored(settings: Settings, files: Files, found: Sequence[str]) -> str:
    """Why containerd does not read the entries in `found`; empty: it does."""
    usual = located(settings, files).config_file
    mains = {path: _main_of(path, usual, files) for path in found if not is_base_spec(path)}
    for path, main in mains.items():
        there = sources(main, files)
        where = place(main, there)
        again = f"run `gpushare runtime configure containerd{'' if main == usual else f' --config-file {main}'}` again"
        if path == where.template:
            made = tomltext.check(there[0].text or "", main)  # with the block
            if all(tomltext.at(made, handler(version)) is None for version in PLUGINS):
                named = settings._replace(config_file=main)
                return f"{main} has no entry of {path} yet: run `{command(named, files)}`"
        elif not where.always and path not in [source.path for source in there]:
            return f"{main} does not import {path}, so containerd does not read it: {again}"
    running = [flag.value for flag in _started(files)]
    if mains and running and not set(mains.values()) & set(running) and usual not in mains.values():
        return f"containerd was started with {usual}, and the entry is for {', '.join(sorted(set(mains.values())))}"
    return ""


def _main_of(path: str, usual: str, files: Files) -> str:
    """The main file of an entry, which a drop-in names in its first line."""
    if not is_drop_in(path):
        one = distributions.of(path)
        return one.main if one is not None and one.main else path
    return _named_in(files.look(path), usual)
