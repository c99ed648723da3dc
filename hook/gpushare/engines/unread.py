"""Find changes that an engine has not read: a command was killed before it named the engine's restart, or the user has
not restarted the engine.

changed(engine, host) -> paths     files that gpushare wrote since
removed(engine, host) -> paths     files from which gpushare's entries were removed since
mark(engine, host, paths) -> [Change]      written before the entries are removed, so that a killed command leaves it
unmark(engine, host) -> [Change]

A removed file has no time, so a mark below /run records the removal. It goes with the next command after the engine's
restart, or when the host starts again. A file that was edited since does not count: its editor restarts the engine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Optional

from . import record
from .base import Change, Engine
from .host import Host

_MARK = "/run/gpushare-removed."  # and the name of the engine; each line of the file is a path


def changed(engine: Engine, host: Host) -> list[str]:
    kept, since = record.load(host, engine.NAME), _since_reading(engine.RELOAD, host)
    if kept is None or since is None:
        return []
    written = [one.path for one in kept.files if one.after is not None and host.read(one.path) == one.after]
    return [path for path in written if 0 <= host.age(path) < since]


def removed(engine: Engine, host: Host) -> list[str]:
    path = _MARK + engine.NAME
    text = host.read(path)
    since = None if text is None else _since_reading(engine.FORGET, host)
    return text.splitlines() if text is not None and since is not None and 0 <= host.age(path) < since else []


def mark(engine: Engine, host: Host, paths: Sequence[str]) -> list[Change]:
    """No change if the engine does not run: it reads its files when it starts."""
    if _since_reading(engine.FORGET, host) is None:
        return []
    path = _MARK + engine.NAME
    return [Change(path, host.read(path), "".join(f"{one}\n" for one in paths))]


def unmark(engine: Engine, host: Host) -> list[Change]:
    path = _MARK + engine.NAME
    text = host.read(path)
    return [] if text is None else [Change(path, text, None)]


def _since_reading(command: str, host: Host) -> Optional[float]:
    """Seconds since the engine last did what `command` makes it do; None if it does not run, or not as that unit."""
    if not command:
        return None
    action, unit = command.split()[1:]
    event = "StateChange" if action == "reload" else "ExecMainStart"  # a reload changes the unit's state, and back
    stamp = f"{event}TimestampMonotonic"
    text = host.ask("systemctl", "show", f"--property=ActiveState,{stamp}", unit) or ""
    values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    microseconds = values.get(stamp, "")
    if values.get("ActiveState") != "active" or not microseconds.isdigit():
        return None
    return time.monotonic() - int(microseconds) / 1e6
