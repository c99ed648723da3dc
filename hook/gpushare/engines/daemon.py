"""How an engine's daemon was started: the flags of its unit, of files that the unit names, and of its process. Pure.

    flags(program, units, files) -> [Flag]     the process last, so that its values win
    groups(program, units, files) -> [[Flag]]  the same, apart for each unit that exists and each process
    value(flags, "config", "c")  -> Flag | None
    unit_of(path, "docker", files) -> unit     of the daemon that reads this file

Sources: systemd.unit(5), systemd.service(5), systemd.exec(5).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple, Optional

from ..core.errors import ConfigError
from ..core.quoting import shown
from .base import Files

_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system",
            "/lib/systemd/system")  # fmt: skip
_DEFAULTS = ("/etc/default/{}", "/etc/sysconfig/{}", "/etc/conf.d/{}")  # of init scripts: NAME_OPTS="--flag"
_LOGGED = re.compile(r'(?:time=\S+ )?level=\w+ msg="((?:[^"\\]|\\.)*)".*')
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class Flag(NamedTuple):
    """`where` is a file, or a process."""

    name: str  # without dashes
    value: str
    where: str

    def words(self) -> list[str]:
        """The flag for a command line."""
        return [f"{'-' if len(self.name) == 1 else '--'}{self.name}", self.value]


def reason(complaint: str) -> str:
    """The last line of what a program wrote to standard error; programs log what they do before it. Without the time
    that CRI-O logs with it: the same complaint must have the same reason."""
    last = complaint.strip().rpartition("\n")[2]
    match = _LOGGED.fullmatch(last)
    return match[1].replace('\\"', '"').replace("\\n", " ") if match else last


def flags(program: str, units: Sequence[str], files: Files) -> list[Flag]:
    """The flags of each unit that exists, then those of the running processes that no unit has."""
    found = [flag for unit in units for flag in _of_unit(program, unit, files)]
    known = {(flag.name, flag.value) for flag in found}
    for pid, words in files.processes(program):
        found += [one for one in _parsed([(word, f"process {pid}") for word in words[1:]]) if one[:2] not in known]
    return found


def groups(program: str, units: Sequence[str], files: Files) -> list[list[Flag]]:
    """The flags of each unit that exists, then those of each running process: there can be several daemons."""
    of_units = [(_of_unit(program, unit, files), _unit_files(unit, files)) for unit in units]
    running = [[(word, f"process {pid}") for word in words[1:]] for pid, words in files.processes(program)]
    return [*(found for found, there in of_units if found or there), *map(_parsed, running)]


def value(found: Sequence[Flag], *names: str) -> Optional[Flag]:
    return next((flag for flag in reversed(found) if flag.name in names), None)


def path_of(flag: Flag) -> str:
    """The file that a flag names. Raises ConfigError for one that depends on the daemon's working directory."""
    if not flag.value.startswith("/"):
        raise ConfigError(
            f"--{flag.name} {shown(flag.value)} from {flag.where} is not an absolute path",
            "write the whole path there, or name the file with --config-file",
        )
    return flag.value


def unit_of(path: str, usual: str, files: Files) -> str:
    """The unit whose daemon reads a file that is not the usual one; without such a unit, the usual one."""
    for folder in _FOLDERS:
        for unit in files.glob(f"{folder}/*.service"):
            if any(name == "ExecStart" and path in text for name, text in _settings(files.look(unit))):
                return unit.rpartition("/")[2].removesuffix(".service")
    return usual


def _of_unit(program: str, unit: str, files: Files) -> list[Flag]:
    command: list[tuple[str, str]] = []  # (word, its file)
    variables: dict[str, tuple[str, str]] = {}  # name -> (value, its file)
    for path in _unit_files(unit, files):
        for name, text in _settings(files.look(path)):
            if name == "ExecStart":
                command = [(word, path) for word in _words(text)] if text else []
            elif name == "Environment":
                variables.update(_variables(_words(text), path))
            elif name == "EnvironmentFile":
                other = text.lstrip("-")
                variables.update(_variables(_words(files.look(other)), other))
    if not command:  # no unit: an init script, which reads one of these files
        for other in (one.format(unit) for one in _DEFAULTS):
            words = [
                word for value, _ in _variables(_words(files.look(other)), other).values() for word in _words(value)
            ]
            command += [(word, other) for word in words]
        return _parsed(command)
    if command[0][0].lstrip("@-:+!").rpartition("/")[2] != program:
        return []
    return _parsed([one for word in command[1:] for one in _expanded(*word, variables)])


def _unit_files(unit: str, files: Files) -> list[str]:
    """The unit and its drop-ins, in the order in which systemd reads them."""
    main = next((path for folder in _FOLDERS if files.has(path := f"{folder}/{unit}.service")), None)
    drop_ins: dict[str, str] = {}
    for folder in reversed(_FOLDERS):  # a file in an earlier folder replaces one of the same name
        drop_ins.update({path.rpartition("/")[2]: path for path in files.glob(f"{folder}/{unit}.service.d/*.conf")})
    return [*([main] if main else []), *(drop_ins[name] for name in sorted(drop_ins))]


def _settings(text: str) -> list[tuple[str, str]]:
    lines = [line.strip() for line in re.sub(r"\\\n", " ", text).splitlines()]
    pairs = (line.partition("=") for line in lines if line and line[0] not in "#;[")
    return [(name.strip(), rest.strip()) for name, _, rest in pairs]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote
        return text.split()


def _variables(words: Sequence[str], path: str) -> dict[str, tuple[str, str]]:
    pairs = (word.partition("=") for word in words if "=" in word)
    return {name: (value, path) for name, _, value in pairs if re.fullmatch(r"\w+", name)}


def _expanded(word: str, path: str, variables: dict[str, tuple[str, str]]) -> list[tuple[str, str]]:
    """systemd splits the value of a word that is $NAME; ${NAME} stays one word."""
    alone = re.fullmatch(r"\$(\w+)", word)
    if alone:
        text, where = variables.get(alone[1], ("", path))
        return [(one, where) for one in _words(text)]
    return [(_VARIABLE.sub(lambda match: variables.get(match[1] or match[2], ("", ""))[0], word), path)]


def _parsed(words: Sequence[tuple[str, str]]) -> list[Flag]:
    """--name=value, --name value, -n value. A flag without a value has an empty one."""
    found = []
    for n, (word, where) in enumerate(words):
        match = re.fullmatch(r"--?([A-Za-z][\w-]*)(=.*)?", word, re.DOTALL)
        if match:
            after = words[n + 1][0] if n + 1 < len(words) and not words[n + 1][0].startswith("-") else ""
            found.append(Flag(match[1], match[2][1:] if match[2] else after, where))
    return found
