"""Our hook where engines look for hooks: the JSON files of a hooks.d directory, and containerd's base spec. Pure.

Source: oci-hooks(5), schema 1.0.0. A file has one command line for all its stages, and ours says the stage, so there
are two files. `when` cannot look at a container's environment, so it is `always`; the launcher decides in a
millisecond. `prestart` is what every version of podman and CRI-O knows.
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

_USUAL = "/usr/share/containers/oci/hooks.d"  # all that podman and CRI-O look at unless told
STAGES = ("prestart", "poststop")
_TIMEOUT_S = 30  # longer than our own deadline, so that ours is the one which says what happened


def names(folder: str) -> dict[str, str]:
    """Path of the file -> stage."""
    return {f"{folder}/gpushare{'' if stage == STAGES[0] else f'-{stage}'}.json": stage for stage in STAGES}


def entry_of(settings: Settings, stage: str) -> dict[str, Any]:
    """A hook as config.json has it. `env` is set, so that nothing of the engine's environment reaches us."""
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
    """Raises ConfigError for a file of that name which runs something else."""
    changes = []
    for path, stage in names(folder).items():
        before, after = files.read(path), text(settings, stage)
        if before is not None and not program(path, before):
            raise ConfigError(f"{shown(path)} is there and runs another program", "move it away")
        if before != after:
            changes.append(Change(path, before, after))
    return changes


def folders(
    folder: str, files: Files, paths: Sequence[str], own: str, table: tomltext.Keys
) -> tuple[list[str], list[str]]:
    """(hooks_dir for our drop-in `own`, notes): `folder` after what the other files say; `paths` has them in the order
    in which they count. The last that has the key counts, so one after ours can undo it. Raises ConfigError."""
    found, notes = [_USUAL], []
    for path in paths:
        text = None if path == own else files.read(path)
        said = tomltext.table_at(tomltext.check(text, path), table, path).get("hooks_dir") if text else None
        if said is None:
            continue
        if not isinstance(said, list) or not all(isinstance(one, str) for one in said):
            raise ConfigError(f"{path}: hooks_dir must be a list of texts", "mend the file")
        found = said
        if path.rpartition("/")[0] == own.rpartition("/")[0] and path > own and folder not in said:
            notes.append(f"{path}: hooks_dir lacks {shown(folder)} and counts more than ours, so add it there")
    return [*found, *([] if folder in found else [folder])], notes


def lacks_cri(hook: dict[str, Any]) -> bool:
    """Whether a hook of ours does not know that its engine is a CRI."""
    args = hook.get("args")
    return not isinstance(args, list) or CRI_FLAG not in args


def program(path: str, text: str) -> str:
    """Our program in a hooks.d file; empty when it runs another one."""
    hook = jsontext.check(text, path).get("hook")
    found = hook.get("path") if isinstance(hook, dict) else None
    return found if isinstance(found, str) and found.endswith(f"/{HOOK_PROGRAM}") else ""


def withdraw(path: str, text: str) -> Optional[str]:
    """The whole file is ours, unless it runs something else by now."""
    return None if program(path, text) else text


def withdraw_or_drop(path: str, text: str, before: Optional[str], ours: Sequence[tomltext.Keys]) -> Optional[str]:
    """Of a hook's file, or of a TOML file what is `ours` in it; None where nothing was or is left."""
    if path.endswith(".json"):
        return withdraw(path, text)
    left = tomltext.drop(text, ours, path)
    return left if left.strip() or before else None


def refuse_arguments(settings: Settings, engine: str) -> None:
    """For engines that give a runtime no arguments. Raises ConfigError."""
    if settings.runtime_args():
        given = " ".join(settings.runtime_args())
        raise ConfigError(f"{engine} cannot give a runtime arguments ({given})", "use --hook-only, or the usual paths")
