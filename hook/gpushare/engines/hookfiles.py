"""Install gpushare's hook for engines: JSON files of a hooks.d directory, and containerd's base spec. Pure.

Source: oci-hooks(5), schema 1.0.0. A file has one command line for all its stages, and gpushare's has the stage as an
argument, so there are two files. `when` cannot test a container's environment, so it is `always`; the launcher
decides in a millisecond. Every version of podman and CRI-O supports `prestart`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Optional

from ..core.constants import CRI_FLAG
from ..core.errors import ConfigError
from ..core.quoting import shown
from . import jsontext, tomltext
from .base import HOOK_PROGRAM, Change, Files, Settings

_USUAL = "/usr/share/containers/oci/hooks.d"  # the only directory that podman and CRI-O search by default
STAGES = ("prestart", "poststop")
APPEND = {"append": True}  # the attribute of a list in containers.conf
_TIMEOUT_S = 30  # longer than the hook's own deadline, so that the hook can report its timeout itself


def names(folder: str) -> dict[str, str]:
    """{path of the file: stage}."""
    return {f"{folder}/gpushare{'' if stage == STAGES[0] else f'-{stage}'}.json": stage for stage in STAGES}


def entry_of(settings: Settings, stage: str) -> dict[str, Any]:
    """A hook entry for config.json. `env` is set, so that the hook inherits nothing from the engine's environment."""
    return {
        "path": settings.hook,
        "args": [HOOK_PROGRAM, *settings.hook_args(), stage],
        "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
        "timeout": _TIMEOUT_S,
    }


def text(settings: Settings, stage: str) -> str:
    value = {
        "version": "1.0.0",
        "hook": entry_of(settings, stage),
        "when": {"always": True},
        "stages": [stage],
    }
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def propose(folder: str, settings: Settings, files: Files) -> list[Change]:
    """The changes that write the hook files. Raises ConfigError if a file of that name runs another program."""
    changes = []
    for path, stage in names(folder).items():
        before, after = files.read(path), text(settings, stage)
        if before is not None and not program(path, before):
            raise ConfigError(f"{shown(path)} exists and runs another program", "move it away")
        if before != after:
            changes.append(Change(path, before, after))
    return changes


def folders(
    folder: str, files: Files, paths: Sequence[str], own: str, table: tomltext.Keys
) -> tuple[list[Any], list[str]]:
    """(hooks_dir for the drop-in `own`, notes): the directories of the other files, then `folder`. Raises
    ConfigError."""
    found, adds, later = listed((*table, "hooks_dir"), [_USUAL], files, paths, own)
    notes = [
        f"{path}: hooks_dir overrides gpushare's and lacks {shown(folder)}, so add it there"
        for path, names in later
        if folder not in names
    ]
    return [folder, APPEND] if adds else [*found, *([] if folder in found else [folder])], notes


def listed(
    keys: tomltext.Keys, built_in: Sequence[str], files: Files, paths: Sequence[str], own: str
) -> tuple[list[str], bool, list[tuple[str, list[str]]]]:
    """(the list that the engine has without the drop-in `own`, whether that drop-in adds to it, the later files that
    override it). `paths` are the other files in the order in which the engine reads them. The last file that has the
    key overrides the rest, so a file after `own` can undo it. With {append = true} in a list, this list and later ones
    are added to the earlier ones (containers.conf(5); podman 5). Raises ConfigError."""
    found, later, appends, adds = list(built_in), [], False, False
    for path in paths:
        value = None if path == own else _list_of(path, files, keys)
        if value is None:
            continue
        names = [one for one in value if isinstance(one, str)]
        appends = next((one["append"] for one in reversed(value) if isinstance(one, dict)), appends)
        if not is_later(path, own):
            found, adds = [*found, *names] if appends else names, appends
        elif not appends:
            later.append((path, names))
    return found, adds, later


def _list_of(path: str, files: Files, keys: tomltext.Keys) -> Optional[list[Any]]:
    """A list of a file; None without it. Raises ConfigError."""
    text = files.read_linked(path)
    value = tomltext.table_at(tomltext.check(text, path), keys[:-1], path).get(keys[-1]) if text else None
    if value is not None and (not isinstance(value, list) or not all(map(_is_item, value))):
        raise ConfigError(f"{path}: {keys[-1]} must be a list of texts", "fix the file")
    return value


def _is_item(one: Any) -> bool:
    """Whether this is a text, or the attribute of the list."""
    return isinstance(one, str) or one in (APPEND, {"append": False})


def is_later(path: str, own: str) -> bool:
    """Whether the engine reads the drop-in `path` after `own`."""
    return path.startswith(own.rpartition("/")[0] + "/") and path.split("/") > own.split("/")


def lacks_cri(hook: dict[str, Any]) -> bool:
    """Whether the hook entry lacks the flag for an engine that is a CRI."""
    args = hook.get("args")
    return not isinstance(args, list) or CRI_FLAG not in args


def program(path: str, text: str) -> str:
    """The path of gpushare-hook in a hooks.d file; empty if the file runs another program."""
    hook = jsontext.check(text, path).get("hook")
    found = hook.get("path") if isinstance(hook, dict) else None
    return found if isinstance(found, str) and found.endswith(f"/{HOOK_PROGRAM}") else ""


def withdraw(path: str, text: str) -> Optional[str]:
    """None (remove the file), unless it runs another program by now."""
    return None if program(path, text) else text


def withdraw_or_drop(path: str, text: str, before: Optional[str], ours: Sequence[tomltext.Keys]) -> Optional[str]:
    """`withdraw` for a hook file; for a TOML file, the text without the tables `ours`. None: remove the file."""
    if path.endswith(".json"):
        return withdraw(path, text)
    left = tomltext.drop(text, ours, path)
    return left if left.strip() or before else None


def refuse_arguments(settings: Settings, engine: str) -> None:
    """Raise ConfigError if the runtime needs arguments, for engines that cannot pass any."""
    if settings.runtime_args():
        given = " ".join(settings.runtime_args())
        hint = "use --hook-only, or keep configuration and state at their default paths"
        raise ConfigError(f"{engine} cannot pass arguments to a runtime ({given})", hint)
