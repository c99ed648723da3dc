"""Parse the command line of an OCI runtime as runc and crun do: command, bundle, container. Pure.

    parse(words) -> Call

gpushare-runtime runs in front of both, so this module knows the flags of both. It never guesses: the next word may be
the value of an unknown flag, and a container may be called `create`. For an unknown flag `Call.unknown` has its name,
and the caller refuses the line unless no reading of it could start a container.
The launcher's tables are generated from these (hook/launcher/tables.py). Start path: no imports but typing.

Sources: runc 1.1 and 1.2 (urfave/cli: `-root X`, `--root=X`, flags also after the arguments), crun 1.8 to 1.20 (argp).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Our own flags: at the front, and not passed on
OWN = ("gpushare-config", "gpushare-state")
OWN_CRI = "gpushare-cri"  # without a value; the launcher adds it if it is called gpushare-runtime-cri
# Global flags: with a value, and without
GLOBAL_VALUE = ("cgroup-manager", "criu", "log", "log-format", "root", "rootless")
GLOBAL_BARE = ("?", "V", "debug", "h", "help", "systemd-cgroup", "usage", "v", "version")
# Flags of create, run, restore and delete together: the low-level runtime refuses one that its command lacks
COMMAND_VALUE = (
    "b", "bundle", "config", "console-socket", "empty-ns", "f", "image-path", "lsm-mount-context", "lsm-profile",
    "manage-cgroups-mode", "pid-file", "preserve-fds", "work-path",
)  # fmt: skip
COMMAND_BARE = (
    "?", "auto-dedup", "d", "detach", "ext-unix-sk", "file-locks", "h", "help", "keep", "lazy-pages", "no-new-keyring",
    "no-pivot", "no-subreaper", "shell-job", "tcp-close", "tcp-established", "usage",
)  # fmt: skip
# Other names of a flag. The last value counts (crun; runc refuses two names in one line)
OTHER_NAMES = {"b": "bundle", "f": "config"}
DELETE_BARE = ("?", "f", "force", "h", "help", "r", "regex", "usage")
STARTING = ("create", "run", "restore")  # commands that can start a container
HANDLED = (*STARTING, "delete")
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
    unknown: str = ""  # a flag that is in no table or lacks its value; the fields do not count then


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


class _Scan:
    """One pass over the words: values by flag, other words, and the first unknown flag."""

    def __init__(self, words: Sequence[str], with_value: Sequence[str], bare: Sequence[str], stop: bool) -> None:
        self.values: dict[str, str] = {}
        self.others: list[str] = []
        self.unknown = ""
        self.end = len(words)
        at = 0
        while at < len(words):
            word = words[at]
            at += 1
            if word == "--":
                self.others += words[at:]
                return
            if not word.startswith("-") or word == "-":
                self.others.append(word)
                if stop:
                    self.end = at
                    return
                continue
            name, value, given = _flag(word)
            if word.startswith("---") or (name not in with_value and name not in bare):
                self.unknown = word
                return
            if name in with_value and not given:
                if at == len(words):
                    self.unknown = word
                    return
                value = words[at]
                at += 1
            self.values[OTHER_NAMES.get(name, name)] = value


def parse(words: Sequence[str]) -> Call:
    """Parse `words`, which do not have the program's name."""
    rest = list(words)
    own = _own(rest)
    call = Call(tuple(rest), own.get(OWN[0], ""), own.get(OWN[1], ""), OWN_CRI in own)
    top = _Scan(rest, GLOBAL_VALUE, GLOBAL_BARE, stop=True)
    call = call._replace(
        unknown=top.unknown,
        log=top.values.get("log", ""),
        log_format=top.values.get("log-format", ""),
        command=top.others[0] if top.others else "",
    )
    if top.unknown or call.command not in HANDLED:
        return call
    if top.end == len(rest) and len(top.others) > 1:  # `-- create x`: runc and crun differ
        return call._replace(unknown="--")
    is_delete = call.command == "delete"
    scan = _Scan(
        rest[top.end :], () if is_delete else COMMAND_VALUE, DELETE_BARE if is_delete else COMMAND_BARE, stop=False
    )
    values = scan.values
    return call._replace(
        unknown=scan.unknown,
        container_id=scan.others[0] if scan.others else "",
        bundle=values.get("bundle") or ".",
        config_name=values.get("config") or CONFIG_NAME,
    )


def could_start(call: Call) -> bool:
    """Return whether some reading of a line with an unknown flag could start a container."""
    return any(word in STARTING for word in call.rest)
