"""Parse the command line of an OCI runtime as runc and crun do: command, bundle, container. Pure.

    parse(words) -> Call

gpushare-runtime runs in front of both, so this module knows the flags of both. Newer versions have flags that are in no
table: the next word may be the value of such a flag, and a container may be called `create`. So `parse` tries each
reading: with the next word as value, and without. A reading counts if its command exists and has its one container. If
one reading is left, the line is clear. Else `Call.readings` has them all, and the caller refuses the line if one of
them starts a container with a request.
The launcher's tables are generated from these (hook/launcher/tables.py). The module runs on the
start path, so it imports only typing.

Sources: runc 1.1 to 1.4 (urfave/cli: `-root X`, `--root=X`, flags also after the arguments), crun 1.8 to 1.29 (argp:
any unambiguous prefix of a flag works, so a prefix of a known flag is never taken for a new one).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Our own flags: at the front, and not passed on
OWN = ("gpushare-config", "gpushare-state")
OWN_CRI = "gpushare-cri"  # without a value; the launcher adds it if it is called gpushare-runtime-cri
# Global flags: with a value, and without
GLOBAL_VALUE = ("cgroup-manager", "criu", "log", "log-format", "log-level", "root", "rootless")
GLOBAL_BARE = ("?", "V", "debug", "h", "help", "systemd-cgroup", "usage", "v", "version")
# Flags of create, run, restore and delete together: the low-level runtime refuses one that its command lacks
COMMAND_VALUE = (
    "b", "bundle", "config", "console-socket", "empty-ns", "f", "image-path", "lsm-mount-context", "lsm-profile",
    "manage-cgroups-mode", "pid-file", "pidfd-socket", "preserve-fds", "work-path",
)  # fmt: skip
COMMAND_BARE = (
    "?", "auto-dedup", "d", "detach", "ext-unix-sk", "file-locks", "h", "help", "keep", "lazy-pages", "network-lock",
    "no-new-keyring", "no-pivot", "no-subreaper", "shell-job", "tcp-close", "tcp-established", "usage",
)  # fmt: skip
# Other names of a flag. The last value counts (crun; runc refuses two names in one line)
OTHER_NAMES = {"b": "bundle", "f": "config"}
DELETE_BARE = ("?", "f", "force", "h", "help", "r", "regex", "usage")
STARTING = ("create", "run", "restore")  # commands that can start a container
HANDLED = (*STARTING, "delete")
COMMANDS = (
    *HANDLED, "checkpoint", "events", "exec", "features", "help", "init", "kill", "list", "mounts", "pause", "ps",
    "resume", "spec", "start", "state", "update",
)  # fmt: skip
CONFIG_NAME = "config.json"


class Call(NamedTuple):
    """A parsed command line. `rest`: the unchanged words for the low-level runtime."""

    rest: tuple[str, ...]
    config: str = ""  # our flag; "": not given
    state_dir: str = ""
    cri: bool = False  # the engine is configured as a CRI
    command: str = ""  # "": none, such as `--version`
    container_id: str = ""
    bundle: str = "."
    config_name: str = CONFIG_NAME  # crun's --config
    log: str = ""
    log_format: str = ""
    unknown: str = ""  # the first flag that is in no table or lacks its value
    clear: bool = True  # False: more readings than one, or none; the command's fields do not count then
    readings: tuple["Call", ...] = ()  # of a line that is not clear


def _flag(word: str) -> tuple[str, str, bool]:
    """Split `--root=/x` into ("root", "/x", True). runc accepts one dash and two."""
    name, equals, value = word.lstrip("-").partition("=") if word.startswith("--") else word[1:].partition("=")
    return name, value, bool(equals)


def _own(words: list[str]) -> dict[str, str]:
    """Take our own flags off the front of `words`."""
    found: dict[str, str] = {}
    while words and words[0].startswith("--"):
        name, value, given = _flag(words[0])
        if words[0] == f"--{OWN_CRI}":
            found[OWN_CRI] = words.pop(0)
            continue
        if words[0].startswith("---") or name not in OWN or not (given or words[1:]):
            break
        words.pop(0)
        found[name] = value if given else words.pop(0)
    return found


class _Reading(NamedTuple):
    """One way to read the flags of a command, or those before the command."""

    values: dict[str, str]  # by flag
    others: tuple[str, ...]  # words that are neither flags nor their values
    unknown: str  # the first flag that is in no table
    end: int  # index behind the last word that was read
    stuck: bool = False  # it cannot be right: the other fields have what was read until then


_NOTHING = _Reading({}, (), "", 0)


class _Flags(NamedTuple):
    """The known flags. `stops`: reading ends at the first other word, the command; else that word is the container."""

    with_value: Sequence[str]
    bare: Sequence[str]
    stops: bool


def _may_be_new(word: str, flags: _Flags) -> bool:
    name = _flag(word)[0]
    known = any(one.startswith(name) for one in (*flags.with_value, *flags.bare))
    return word.startswith("--") and not word.startswith("---") and not known and name not in (*OWN, OWN_CRI)


def _read(words: Sequence[str], flags: _Flags, so_far: _Reading = _NOTHING) -> Iterator[_Reading]:
    """Yield each reading of `words`, one at least. A word with a dash is never the value of an unknown flag."""
    values, others, unknown, at, _ = so_far
    while at < len(words):
        word = words[at]
        at += 1
        if word == "--":
            yield _Reading(values, (*others, *words[at:]), unknown, len(words))
            return
        if not word.startswith("-") or word == "-":
            others = (*others, word)
            if flags.stops:
                break
            if unknown and len(others) > 1:
                yield _Reading(values, others, unknown, at, stuck=True)
                return
            continue
        name, value, given = _flag(word)
        plain = not word.startswith("---")
        if plain and name in flags.with_value:
            if not given and at == len(words):
                yield _Reading(values, others, unknown or word, at, stuck=True)
                return
            value, at = (value, at) if given else (words[at], at + 1)
        elif not plain or name not in flags.bare:
            unknown = unknown or word
            if not _may_be_new(word, flags):
                yield _Reading(values, others, unknown, at, stuck=True)
                return
            if not given and at < len(words) and not words[at].startswith("-"):
                yield from _read(words, flags, _Reading(values, others, unknown, at + 1))
        values = {**values, OTHER_NAMES.get(name, name): value}
    yield _Reading(values, others, unknown, at)


_GLOBAL = _Flags(GLOBAL_VALUE, GLOBAL_BARE, stops=True)
_STARTING = _Flags(COMMAND_VALUE, COMMAND_BARE, stops=False)
_DELETE = _Flags((), DELETE_BARE, stops=False)


def _calls(call: Call) -> Iterator[Call]:
    """Yield each reading of the line; `clear` if its command has what it needs."""
    for top in _read(call.rest, _GLOBAL):
        one = call._replace(
            unknown=top.unknown,
            log=top.values.get("log", ""),
            log_format=top.values.get("log-format", ""),
            command=top.others[0] if top.others else "",
            clear=not top.stuck,
        )
        if top.stuck or one.command not in HANDLED:
            yield one
        elif top.end == len(call.rest) and len(top.others) > 1:  # `-- create x`: runc and crun differ
            yield one._replace(unknown="--", clear=False)
        else:
            yield from _of_command(one, call.rest[top.end :])


def _of_command(call: Call, words: Sequence[str]) -> Iterator[Call]:
    for found in _read(words, _DELETE if call.command == "delete" else _STARTING):
        unknown = call.unknown or found.unknown
        yield call._replace(
            unknown=unknown,
            container_id=found.others[0] if found.others else "",
            bundle=found.values.get("bundle") or ".",
            config_name=found.values.get("config") or CONFIG_NAME,
            clear=not found.stuck and (not unknown or len(found.others) == 1),
        )


def parse(words: Sequence[str]) -> Call:
    """Parse `words`, which do not have the program's name."""
    rest = list(words)
    own = _own(rest)
    call = Call(tuple(rest), own.get(OWN[0], ""), own.get(OWN[1], ""), OWN_CRI in own)
    first = None
    readings: dict[tuple[str, ...], Call] = {}
    for one in _calls(call):
        if not one.unknown:
            return one
        first = first or one
        if one.clear and one.command in COMMANDS:
            readings.setdefault((one.command, one.container_id, one.bundle, one.config_name), one)
    if len(readings) == 1:
        return next(iter(readings.values()))
    assert first is not None  # `_read` yields at least one reading
    return call._replace(
        unknown=first.unknown,
        log=first.log,
        log_format=first.log_format,
        clear=False,
        readings=tuple(readings.values()),
    )


def could_start(call: Call) -> bool:
    """Return whether a line that is not clear could start a container."""
    if call.readings:
        return any(one.command in STARTING for one in call.readings)
    return any(word in STARTING for word in call.rest)
